// Streams are queues. Work runs late: when a thread waits for it, and at random when other work is
// submitted.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace testdevice {

// A point in the work of a stream: the first `number` submissions.
struct Point {
    int64_t stream = 0;
    uint64_t number = 0;
};

// `lateness` is the chance that nothing runs when it could; at 1, all work waits until a thread
// waits for it.
void seed_scheduler(uint64_t seed, double lateness);
bool chance(double probability);

int64_t current_stream();
int64_t exchange_stream(int64_t stream);
int64_t new_stream();

Point submit(std::function<void()> work);
Point submit_to(int64_t stream, std::function<void()> work);
// Makes later work of a stream wait for `point`.
void submit_wait(int64_t stream, Point point);
Point end_of(int64_t stream);
// Returns whether the work is complete. Takes no lock, lets no time pass.
bool passed(Point point);
// The same for a caller that asks again and again: time passes.
bool query(Point point);

// These run queued work on the calling thread. They throw what a kernel has thrown, once.
void wait(Point point);
void wait_for_all();
// Notes a fault that the next thread that waits shall see.
void report_failure(const std::string& message);

enum Counter {
    kRun,
    kOutOfOrder,
    kHostWaits,
    kSynchronizingOps,
    kCopiesIn,
    kCopiesOut,
    kMostQueued,
    kCounters
};
void count(Counter counter);
int64_t counted(Counter counter);

}  // namespace testdevice
