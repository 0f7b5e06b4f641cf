// Which block goes next where reads and writes go in windows: one way, and then the other.

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "check.h"
#include "orders.h"
#include "schedule.h"

namespace {

using namespace offload;
using check::Random;
using orders::ask;
using orders::directions;
using orders::kWays;
using orders::order;
using orders::settle;
using orders::times;

TEST(schedule_in_windows_goes_one_way_and_then_the_other) {
    for (const auto write : {Priority::kNormal, Priority::kBackground}) {
        Schedule schedule(8, kPage, 3 * kPage);
        schedule.add(ask(Priority::kNormal, 10));
        schedule.add(ask(write, 8, Operation::kWrite));
        CHECK(directions(schedule, 18) == "RRRWWWRRRWWWRRRWWR");
        CHECK(schedule.empty());
    }
}

TEST(schedule_in_windows_counts_from_when_the_other_way_waits) {
    Schedule schedule(8, kPage, 3 * kPage);
    schedule.add(ask(Priority::kNormal, 100));
    CHECK(directions(schedule, 50) == times(50, "R"));
    schedule.add(ask(Priority::kBackground, 1, Operation::kWrite));
    CHECK(directions(schedule, 8) == "RRRWRRRR");
}

TEST(schedule_in_windows_turns_early_where_one_way_has_nothing_left) {
    Schedule schedule(8, kPage, 100 * kPage);
    schedule.add(ask(Priority::kBackground, 5, Operation::kWrite));
    schedule.add(ask(Priority::kNormal, 2));
    CHECK(directions(schedule, 10) == "WWWWWRR");
}

TEST(schedule_in_windows_begins_a_window_when_the_one_before_has_ended) {
    Schedule schedule(8, kPage, 2 * kPage);
    schedule.add(ask(Priority::kNormal, 2));
    schedule.add(ask(Priority::kNormal, 3, Operation::kWrite));
    auto first = schedule.next(), second = schedule.next();
    CHECK(first && second && !schedule.ready() && !schedule.next() && !schedule.empty());
    (void)settle(schedule, *second);
    CHECK(!schedule.ready());
    (void)settle(schedule, *first);
    CHECK(schedule.ready() && directions(schedule, 9) == "WWW");
}

TEST(schedule_in_windows_takes_what_is_urgent_at_once) {
    for (const auto urgent : kWays) {
        Schedule schedule(8, kPage, 2 * kPage);
        schedule.add(ask(Priority::kNormal, 4));
        schedule.add(ask(Priority::kBackground, 4, Operation::kWrite));
        auto first = schedule.next();
        schedule.add(ask(Priority::kUrgent, 1, urgent));
        CHECK(order(schedule, 1) == "U");
        auto second = schedule.next();
        CHECK(!schedule.ready());  // a turn waits for the two
        schedule.add(ask(Priority::kUrgent, 2, urgent));
        auto during = schedule.next();
        CHECK(during && during->request->priority() == Priority::kUrgent);
        (void)settle(schedule, *first);
        (void)settle(schedule, *second);
        // What is urgent and in flight keeps nobody waiting.
        CHECK(order(schedule, 3) == "UBB");
        (void)settle(schedule, *during);
        CHECK(directions(schedule, 4) == "RRWW" && schedule.empty());
    }
}

TEST(schedule_in_windows_goes_by_priority_within_one) {
    Schedule schedule(16, kPage, 20 * kPage);
    schedule.add(ask(Priority::kNormal, 18));
    schedule.add(ask(Priority::kBackground, 2));
    schedule.add(ask(Priority::kNormal, 16, Operation::kWrite));
    schedule.add(ask(Priority::kBackground, 2, Operation::kWrite));
    CHECK(order(schedule, 20) == times(2, "NNNNNNNNB") + "NN");
    CHECK(order(schedule, 18) == times(2, "NNNNNNNNB"));
}

TEST(schedule_in_windows_forgets_what_failed) {
    Schedule schedule(8, kPage, 100 * kPage);
    const auto failing = ask(Priority::kNormal, 5);
    schedule.add(failing);
    schedule.add(ask(Priority::kBackground, 2, Operation::kWrite));
    auto first = schedule.next();
    first->error = EIO;
    CHECK(settle(schedule, *first));  // and with it what was left of the window
    CHECK(directions(schedule, 9) == "WW" && schedule.empty());
}

// The same blocks in the same order as without windows, where all requests go one way.
TEST(schedule_in_windows_changes_nothing_for_one_way) {
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
        Random random(seed);
        const auto way = kWays[random.below(2)];
        const std::size_t slots = random.between(1, 12);
        Schedule plain(slots, kPage), windows(slots, kPage, random.between(1, 9 * kPage));
        std::map<Request*, Request*> twins;
        std::vector<std::shared_ptr<Request>> requests;
        std::vector<std::pair<Block, Block>> moving;
        for (int turn = 0; turn < 500; ++turn) {
            if (turn < 300 && random.one_in(4)) {
                const auto priority = static_cast<Priority>(random.below(kPriorities));
                const std::size_t blocks = random.between(1, 9);
                const auto one = ask(priority, blocks, way), other = ask(priority, blocks, way);
                twins[one.get()] = other.get();
                requests.insert(requests.end(), {one, other});
                plain.add(one);
                windows.add(other);
            }
            CHECK(plain.ready() == windows.ready() && plain.empty() == windows.empty());
            if (plain.ready() && moving.size() < slots && !random.one_in(3)) {
                auto one = plain.next(), other = windows.next();
                CHECK(one && other && twins[one->request.get()] == other->request.get());
                CHECK(one->left.offset == other->left.offset && one->nbytes == other->nbytes);
                moving.emplace_back(std::move(*one), std::move(*other));
            } else if (!moving.empty()) {
                std::swap(moving[random.below(moving.size())], moving.back());
                auto& [one, other] = moving.back();
                one.error = other.error = random.one_in(20) ? EIO : 0;
                CHECK(settle(plain, one) == settle(windows, other));
                moving.pop_back();
            }
        }
    }
}

// While a direction waits, no more than a window of the other one goes, but for what is urgent; and
// the two are never in flight together.
TEST(schedule_in_windows_keeps_the_bound_of_waiting) {
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
        Random random(seed);
        const std::size_t slots = random.between(1, 12), window = random.between(1, 9) * kPage;
        Schedule schedule(slots, kPage, window);
        std::array<std::map<Request*, std::size_t>, 2> left;  // blocks that wait, but urgent ones
        std::array<std::size_t, 2> gone{}, in_flight{};  // of a direction, while the other waits
        std::vector<std::shared_ptr<Request>> requests;
        std::vector<Block> moving;
        const auto step = [&] {
            if (schedule.ready() && moving.size() < slots && !random.one_in(3)) {
                auto block = schedule.next();
                const auto way = static_cast<std::size_t>(block->left.operation);
                if (block->request->priority() != Priority::kUrgent) {
                    CHECK(in_flight[1 - way] == 0);
                    ++in_flight[way];
                    if (--left[way][block->request.get()] == 0)
                        left[way].erase(block->request.get());
                    gone[1 - way] = 0;
                    gone[way] = left[1 - way].empty() ? 0 : gone[way] + block->nbytes;
                    CHECK(gone[way] <= window);
                }
                moving.push_back(std::move(*block));
            } else if (!moving.empty()) {
                std::swap(moving[random.below(moving.size())], moving.back());
                const auto& block = moving.back();
                if (block.request->priority() != Priority::kUrgent) {
                    --in_flight[static_cast<std::size_t>(block.left.operation)];
                }
                (void)settle(schedule, block);
                moving.pop_back();
            }
        };
        for (int turn = 0; turn < 500; ++turn) {
            if (random.one_in(3)) {
                const auto priority = static_cast<Priority>(random.below(kPriorities));
                const std::size_t way = random.below(2), blocks = random.between(1, 9);
                requests.push_back(ask(priority, blocks, kWays[way]));
                if (priority != Priority::kUrgent) left[way][requests.back().get()] = blocks;
                schedule.add(requests.back());
            }
            step();
        }
        while (!schedule.empty() || !moving.empty()) step();
        CHECK(left[0].empty() && left[1].empty());
    }
}

// The time in which a drive moves everything, in the time of a page: it moves a page in that time
// where all blocks in flight go one way, `slower` times as slowly where they do not, and begins
// `start` later where it had nothing to do.
double time_of(Schedule& schedule, std::size_t slots, double slower, double start) {
    double time = 0;
    std::deque<Block> moving;
    const auto goes = [&](Operation way) {
        return std::any_of(moving.begin(), moving.end(),
                           [&](const auto& block) { return block.left.operation == way; });
    };
    for (;;) {
        if (moving.empty()) time += start;
        while (moving.size() < slots && schedule.ready()) moving.push_back(*schedule.next());
        if (moving.empty()) return time - start;
        const bool both = goes(Operation::kRead) && goes(Operation::kWrite);
        time += both ? slower : 1;
        (void)settle(schedule, moving.front());
        moving.pop_front();
    }
}

// As `offload/aio/file.py` counts: two windows and two turns in place of both at once.
TEST(schedule_in_windows_takes_the_time_that_the_rule_expects) {
    constexpr std::size_t kWindow = 32, kBlocks = 50 * kWindow;
    constexpr double kStart = 2;
    const auto filled = [](std::size_t window) {
        Schedule schedule(kWindow, kPage, window);
        for (std::size_t i = 0; i < 2 * kBlocks; ++i) {
            schedule.add(ask(Priority::kNormal, 1, kWays[i % 2]));
        }
        return schedule;
    };
    for (const double slower : {1.0, 1.5, 3.0}) {
        auto at_once = filled(0), windows = filled(kWindow * kPage);
        const double expected = 2 * kBlocks + 100 * kStart;
        const double found = time_of(windows, kWindow, slower, kStart);
        CHECK(found == expected);
        const double both = time_of(at_once, kWindow, slower, kStart);
        const double most = kStart + 2 * kBlocks * slower;
        CHECK(both <= most && both > most - 2 * slower);  // at the end one way is left
    }
}

}  // namespace
