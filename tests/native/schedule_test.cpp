// Which block goes next.

#include "schedule.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "orders.h"

namespace {

using namespace offload;
using check::Random;
using orders::ask;
using orders::kWays;
using orders::order;
using orders::settle;
using orders::times;

TEST(schedule_goes_by_priority_then_by_arrival) {
    Schedule schedule(8, kPage);
    std::vector<std::shared_ptr<Request>> expected;
    const auto background = ask(Priority::kBackground, 1);
    const auto normal = ask(Priority::kNormal, 1), normal2 = ask(Priority::kNormal, 1);
    const auto urgent = ask(Priority::kUrgent, 1), urgent2 = ask(Priority::kUrgent, 2);
    for (const auto& each : {background, normal, urgent, normal2, urgent2}) schedule.add(each);
    for (const auto& each : {urgent, urgent2, urgent2, normal, normal2, background}) {
        CHECK(schedule.ready() && !schedule.empty());
        const auto block = schedule.next();
        CHECK(block && block->request == each);
    }
    CHECK(schedule.empty() && !schedule.ready() && !schedule.next());
}

TEST(schedule_takes_one_of_nine_from_below) {
    const Priority u = Priority::kUrgent, n = Priority::kNormal, b = Priority::kBackground;
    const struct {
        std::vector<Priority> waiting;
        std::string expected;
    } cases[] = {
        {{u, n}, "UUUUUUUUN"},
        {{u, b}, "UUUUUUUUB"},
        {{n, b}, "NNNNNNNNB"},
        {{u, n, b}, "UUUUUUUUNB"},  // each of the two has its turn after eight
    };
    for (const auto& [waiting, expected] : cases) {
        Schedule schedule(8, kPage);
        for (const auto priority : waiting) schedule.add(ask(priority, 200));
        CHECK(order(schedule, 10 * expected.size()) == times(10, expected));
    }
}

TEST(schedule_owes_nothing_to_who_did_not_wait) {
    Schedule schedule(8, kPage);
    schedule.add(ask(Priority::kUrgent, 100));
    CHECK(order(schedule, 50) == times(50, "U"));
    schedule.add(ask(Priority::kNormal, 1));
    CHECK(order(schedule, 9) == "UUUUUUUUN");
}

TEST(schedule_keeps_slots_from_background) {
    for (std::size_t slots = 1; slots <= 70; ++slots) {
        Schedule schedule(slots, kPage);
        schedule.add(ask(Priority::kBackground, 500));
        const std::size_t most = slots == 1 ? 1 : slots - std::max<std::size_t>(1, slots / 4);
        std::vector<Block> blocks;
        while (auto block = schedule.next()) blocks.push_back(std::move(*block));
        CHECK(blocks.size() == most);
        CHECK(!schedule.ready() && !schedule.empty());
        schedule.add(ask(Priority::kNormal, 1));
        CHECK(schedule.ready() && order(schedule, 2) == "N");
        CHECK(!settle(schedule, blocks.back()));
        CHECK(order(schedule, 10) == times(10, "B"));  // one slot is enough
    }
}

TEST(schedule_cuts_no_further_what_failed) {
    for (const auto priority : {Priority::kUrgent, Priority::kNormal, Priority::kBackground}) {
        Schedule schedule(8, kPage);
        const auto failing = ask(priority, 10), next = ask(priority, 1);
        schedule.add(failing);
        schedule.add(next);
        auto first = schedule.next(), second = schedule.next(), third = schedule.next();
        CHECK(third->request == failing);
        second->error = EIO;
        CHECK(!settle(schedule, *second));
        third->error = ENODATA;
        CHECK(!settle(schedule, *third));
        auto other = schedule.next();
        CHECK(other && other->request == next);
        CHECK(!schedule.next() && schedule.empty());
        CHECK(settle(schedule, *first));
        CHECK(failing->error() == EIO && failing->failed_piece() == 0);
        CHECK(settle(schedule, *other) && next->error() == 0);
    }
}

TEST(schedule_hands_everything_out_in_random_sequences) {
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
        Random random(seed);
        const std::size_t slots = random.between(1, 12);
        Schedule schedule(slots, kPage);
        std::map<Request*, std::size_t> left;
        std::vector<Block> moving;
        std::size_t ended = 0;
        const auto step = [&] {
            const bool ready = schedule.ready();
            if (ready && moving.size() < slots && random.below(3) > 0) {
                auto block = schedule.next();
                CHECK(block && left[block->request.get()]-- > 0);
                moving.push_back(std::move(*block));
            } else if (!moving.empty()) {
                std::swap(moving[random.below(moving.size())], moving.back());
                ended += settle(schedule, moving.back());
                moving.pop_back();
            } else {
                CHECK(ready || schedule.empty());  // with all slots free, something can be taken
            }
        };
        std::vector<std::shared_ptr<Request>> requests;  // so that no address comes back
        for (int turn = 0; turn < 300; ++turn) {
            if (random.one_in(4)) {
                const std::size_t blocks = random.between(1, 9);
                const auto priority = static_cast<Priority>(random.below(kPriorities));
                requests.push_back(ask(priority, blocks, kWays[random.below(2)]));
                left[requests.back().get()] = blocks;
                schedule.add(requests.back());
            }
            step();
        }
        while (!schedule.empty() || !moving.empty()) step();
        CHECK(ended == requests.size());
        for (const auto& [request, blocks] : left) CHECK(blocks == 0);
    }
}

TEST(schedule_starves_nobody) {
    for (const std::size_t slots : {1, 2, 16}) {
        Schedule schedule(slots, kPage);
        schedule.add(ask(Priority::kNormal, 30));
        schedule.add(ask(Priority::kBackground, 30, Operation::kWrite));
        // More that is urgent comes for each block that goes.
        std::string letters;
        for (int turn = 0; turn < 800; ++turn) {
            schedule.add(ask(Priority::kUrgent, 2, kWays[turn % 2]));
            letters += order(schedule, 1);
        }
        CHECK(std::count(letters.begin(), letters.end(), 'N') == 30);
        CHECK(std::count(letters.begin(), letters.end(), 'B') == 30);
    }
}

}  // namespace
