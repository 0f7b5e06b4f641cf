// The queue over the backend of scripted.h.

#include "queue.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "check.h"
#include "scripted.h"
#include "storm.h"

namespace {

using namespace offload;
using check::Random;
using scripted::ask;
using scripted::Disk;
using scripted::kFile;
using scripted::opener;
using scripted::Scripted;
using storm::Memory;
using storm::Plan;
using storm::Storm;

constexpr struct {
    unsigned threads, depth;
} kShapes[] = {{1, 1}, {4, 1}, {1, 8}, {3, 5}};

TEST(queue_moves_every_byte_whatever_the_kernel_does) {
    for (const auto [threads, depth] : kShapes) {
        for (const bool trouble : {false, true}) {
            for (const bool coarse : {false, true}) {
                Storm storm({.file = kFile, .seed = threads + depth, .bad = {}});
                Disk disk(storm.file_bytes());
                disk.trouble = trouble;
                disk.coarse = coarse;
                Queue queue(opener(disk, depth), threads, depth, 4 * kPage);
                storm.rage(queue);
                CHECK(storm.fits(disk.bytes.data()) && storm.failed() == 0);
                queue.close();
                CHECK(disk.opened == threads && disk.alive == 0);
                for (const auto operation : {Operation::kRead, Operation::kWrite}) {
                    CHECK(queue.moved_bytes(operation) == storm.asked_bytes(operation));
                    const double median = queue.latency(operation, 0.5);
                    CHECK(median > 0 && median <= queue.latency(operation, 0.99));
                    CHECK(queue.latency(operation, 0.99) <= queue.latency(operation, 1));
                }
            }
        }
    }
}

TEST(queue_keeps_an_error_to_its_request) {
    for (const auto [threads, depth] : kShapes) {
        Plan plan{.file = kFile, .seed = 7, .bad = {250'000, 262'001}};
        Disk disk(plan.threads * plan.part);
        disk.trouble = true;
        disk.bad = plan.bad;
        plan.disk = disk.bytes.data();
        Storm storm(plan);
        Queue queue(opener(disk, depth), threads, depth, 2 * kPage);
        storm.rage(queue);
        CHECK(storm.fits(disk.bytes.data()));
        CHECK(storm.failed() >= plan.rounds);  // each round goes over the bad bytes
        queue.close();
        for (const auto operation : {Operation::kRead, Operation::kWrite}) {
            const std::uint64_t moved = queue.moved_bytes(operation);
            CHECK(moved == disk.moved[static_cast<std::size_t>(operation)]);
            CHECK(moved < storm.asked_bytes(operation));
        }
    }
}

TEST(queue_says_that_a_file_has_ended) {
    Disk disk(10'000);
    Memory memory(8 * kPage);
    Queue queue(opener(disk, 4), 2, 4, kPage);
    const auto inside = ask(Operation::kRead, Priority::kNormal, 0, memory.data(), 10'000);
    const std::vector<Piece> pieces{{kFile, 0, memory.data() + 3 * kPage, 100},
                                    {kFile, 9'000, memory.data() + 4 * kPage, 1'001}};
    const auto beyond =
        std::make_shared<Request>(Operation::kRead, Priority::kNormal, pieces, Checksum{});
    CHECK(queue.submit(inside) && queue.submit(beyond));
    storm::wait(*inside);
    storm::wait(*beyond);
    CHECK(inside->error() == 0);
    CHECK(beyond->error() == ENODATA && beyond->failed_piece() == 1);
}

TEST(queue_announces_each_end_once) {
    for (const auto [threads, depth] : kShapes) {
        Storm storm({.file = kFile, .seed = 11, .rounds = 20, .part = 30'001, .bad = {}});
        Disk disk(storm.file_bytes());
        Queue queue(opener(disk, depth), threads, depth, 2 * kPage);
        std::vector<std::uint64_t> heard;
        std::thread listener([&] {
            for (;;) {
                const auto tags = queue.announced();
                if (tags.empty()) return;
                heard.insert(heard.end(), tags.begin(), tags.end());
            }
        });
        storm.rage(queue);
        queue.close();
        listener.join();
        auto expected = storm.tags();
        std::sort(expected.begin(), expected.end());
        std::sort(heard.begin(), heard.end());
        CHECK(heard == expected);
        CHECK(queue.announced().empty());
    }
}

TEST(queue_announces_what_is_not_yet_done) {
    Disk disk(kPage);
    disk.open_gate(false);
    Memory memory(kPage);
    Queue queue(opener(disk, 2), 1, 2, kPage);
    const auto request = ask(Operation::kRead, Priority::kNormal, 0, memory.data(), kPage);
    CHECK(queue.submit(request) && queue.announce(*request, 5));
    disk.open_gate(true);
    CHECK(queue.announced() == std::vector<std::uint64_t>{5});
    CHECK(request->done() && !queue.announce(*request, 6));
    const auto nothing = ask(Operation::kRead, Priority::kNormal, 0, memory.data(), 0);
    CHECK(queue.submit(nothing) && nothing->done() && !queue.announce(*nothing, 7));
    queue.close();
    CHECK(queue.announced().empty());
}

TEST(queue_wakes_a_driver_that_could_take_more) {
    Disk disk(4 * kPage);
    disk.open_gate(false);
    Memory memory(4 * kPage);
    Queue queue(opener(disk, 4), 1, 4, kPage);
    std::vector<std::shared_ptr<Request>> requests;
    for (std::size_t i = 0; i < 4; ++i) {
        const auto place = i * kPage;
        requests.push_back(
            ask(Operation::kRead, Priority::kUrgent, place, memory.data() + place, kPage));
        CHECK(queue.submit(requests.back()));
        disk.wait_for_held(i + 1);  // while the others are on their way
    }
    CHECK(queue.register_memory(memory.data(), memory.size()) == memory.size());
    disk.open_gate(true);
    for (const auto& request : requests) storm::wait(*request);
}

TEST(queue_moves_what_is_queued_before_it_closes) {
    for (const auto [threads, depth] : kShapes) {
        Disk disk(200 * kPage);
        disk.trouble = true;
        Memory memory(200 * kPage);
        Random(1).fill(memory.data(), memory.size());
        disk.open_gate(false);
        Queue queue(opener(disk, depth), threads, depth, kPage);
        std::vector<std::shared_ptr<Request>> requests;
        for (std::size_t i = 0; i < 100; ++i) {
            const auto priority = static_cast<Priority>(i % kPriorities);
            const auto place = 2 * i * kPage;
            requests.push_back(
                ask(Operation::kWrite, priority, place, memory.data() + place, 2 * kPage));
            CHECK(queue.submit(requests.back()));
        }
        std::thread closer([&] { queue.close(); });
        disk.open_gate(true);
        queue.close();
        closer.join();
        queue.close();
        for (const auto& request : requests) CHECK(request->done() && request->error() == 0);
        CHECK(std::memcmp(disk.bytes.data(), memory.data(), memory.size()) == 0);
        CHECK(disk.alive == 0);
        const auto late = ask(Operation::kRead, Priority::kUrgent, 0, memory.data(), kPage);
        CHECK(!queue.submit(late) && !late->done());
    }
}

// While some threads submit, another closes: what was taken is moved, what was refused is not.
TEST(queue_closes_among_those_who_submit) {
    for (int turn = 0; turn < 20; ++turn) {
        Disk disk(4 * kPage);
        Memory memory(4 * kPage);
        Queue queue(opener(disk, 2), 2, 2, kPage);
        std::vector<std::thread> threads;
        std::atomic<unsigned> taken{0};
        for (std::size_t i = 0; i < 3; ++i) {
            threads.emplace_back([&, i] {
                for (;;) {
                    const auto place = i * kPage;
                    const auto request = ask(Operation::kRead, Priority::kNormal, place,
                                             memory.data() + place, kPage);
                    if (!queue.submit(request)) return;
                    storm::wait(*request);
                    CHECK(request->error() == 0);
                    ++taken;
                }
            });
        }
        while (taken < 20) std::this_thread::yield();
        queue.close();
        for (auto& thread : threads) thread.join();
        CHECK(queue.moved_bytes(Operation::kRead) == taken * kPage);
    }
}

TEST(queue_is_not_made_where_a_backend_is_refused) {
    for (unsigned refused = 0; refused < 4; ++refused) {
        Disk disk(0);
        std::atomic<unsigned> count{0};
        const auto open = [&]() -> std::unique_ptr<Backend> {
            if (count++ == refused) throw Refused{EPERM, "a call"};
            return std::make_unique<Scripted>(disk, 2);
        };
        bool thrown = false;
        try {
            const Queue queue(open, 4, 2, kPage);
        } catch (const Refused& refusal) {
            thrown = refusal.error == EPERM && refusal.call == "a call";
        }
        // A thread that was not joined would have ended the process.
        CHECK(thrown && count == 4 && disk.opened == 3 && disk.alive == 0);
    }
    const auto open = []() -> std::unique_ptr<Backend> { throw std::bad_alloc(); };
    bool thrown = false;
    try {
        const Queue queue(open, 2, 2, kPage);
    } catch (const std::bad_alloc&) {
        thrown = true;
    }
    CHECK(thrown);
}

TEST(queue_registers_with_every_backend) {
    Storm storm({.file = kFile, .seed = 13, .bad = {}});
    Disk disk(storm.file_bytes());
    disk.most_registered = 1'000;
    Queue queue(opener(disk, 4), 5, 4, 2 * kPage);
    const auto& memory = storm.memory()[0];
    // Idle, and then busy; from two threads at a time.
    CHECK(queue.register_memory(memory.data(), memory.size()) == 1'000);
    CHECK(queue.register_memory(memory.data(), 10) == 10);
    std::thread working([&] { storm.rage(queue); });
    std::thread other([&] {
        for (int turn = 0; turn < 20; ++turn) CHECK(queue.register_file(kFile.direct));
    });
    for (int turn = 0; turn < 20; ++turn) CHECK(!queue.register_file(kFile.buffered));
    other.join();
    working.join();
    CHECK(storm.fits(disk.bytes.data()));
    CHECK(disk.registered == 5 * 42);
}

TEST(queue_that_is_closed_registers_nothing) {
    Disk disk(kPage);
    Memory memory(kPage);
    Queue queue(opener(disk, 2), 2, 2, kPage);
    queue.close();
    CHECK(queue.register_memory(memory.data(), memory.size()) == 0);
    CHECK(!queue.register_file(kFile.direct));
    CHECK(disk.registered == 0);
}

TEST(queue_treats_a_request_without_bytes_as_any_other) {
    Disk disk(kPage);
    Queue queue(opener(disk, 2), 1, 2, kPage);
    const auto request = [](std::uint32_t expected) {
        return std::make_shared<Request>(Operation::kRead, Priority::kNormal, std::vector<Piece>{},
                                         Checksum{true, expected});
    };
    for (const std::uint32_t expected : {0u, 123u}) {
        const auto empty = request(expected);
        CHECK(queue.submit(empty));
        CHECK(empty->done() && empty->error() == (expected == 0 ? 0 : EBADMSG));
    }
    queue.close();
    CHECK(!queue.submit(request(0)));
}

TEST(latencies_have_quantiles) {
    Latencies latencies;
    CHECK(latencies.quantile(0.5) == 0);
    for (std::uint64_t i = 1; i <= 1'000; ++i) latencies.add(i * 1'000);
    for (const double fraction : {0.01, 0.5, 0.9, 0.99, 1.0}) {
        // Steps are an eighth of an octave wide, and the middle of one is said.
        const double exact = fraction * 1e-3;
        CHECK(latencies.quantile(fraction) > 0.9 * exact);
        CHECK(latencies.quantile(fraction) < 1.1 * exact);
    }
    latencies.add(~std::uint64_t{0});
    latencies.add(0);
    CHECK(latencies.quantile(0) > 0 && latencies.quantile(0) < 20e-9);
    CHECK(latencies.quantile(1) > 1e10);
}

}  // namespace
