// A queue that accepts requests and hands blocks to the kernel in order of priority.
//
// Threads. Any thread may submit, wait and register. Each driver thread owns a backend; other
// threads call nothing but the backend's `wake`. One mutex guards the schedule, the requests'
// progress and the drivers' flags; it is never held during a system call that moves bytes.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backend.h"
#include "request.h"
#include "schedule.h"

namespace offload {

// A histogram of the times of blocks, from the hand-over to the kernel to the end, in steps of an
// eighth of an octave.
class Latencies {
  public:
    void add(std::uint64_t nanoseconds);
    // Returns the seconds within which this fraction of all blocks ended; 0 if there were none.
    [[nodiscard]] double quantile(double fraction) const;

  private:
    std::array<std::uint64_t, 512> counts_{};
    std::uint64_t total_ = 0;
};

class Queue {
  public:
    using Opener = std::function<std::unique_ptr<Backend>()>;

    // Starts `threads` drivers, each with a backend from `open` and at most `depth` blocks in
    // flight. Throws `Refused` if a backend cannot be opened, std::system_error if a thread cannot
    // be started.
    Queue(const Opener& open, unsigned threads, unsigned depth, std::size_t block_bytes);

    // Closes the queue. A forked child must not call this: it contains no threads to join.
    ~Queue() { close(); }

    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    // Queues `request`. Returns false after `close`.
    [[nodiscard]] bool submit(std::shared_ptr<Request> request);

    // Makes `announced` report the end of `request` under `tag`, which is not 0. Returns false if
    // the request is done already.
    [[nodiscard]] bool announce(Request& request, std::uint64_t tag);

    // Waits for announced requests to end and returns their tags. An empty result means that the
    // queue is closed and none are left.
    [[nodiscard]] std::vector<std::uint64_t> announced();

    // Registers memory or a file with every backend. Returns the bytes that all of them registered,
    // or true if all did. Both must stay as they are until the queue is closed.
    [[nodiscard]] std::size_t register_memory(char* data, std::size_t nbytes);
    [[nodiscard]] bool register_file(int descriptor);

    // Completes all requests, then joins the threads. Idempotent.
    void close();

    [[nodiscard]] std::uint64_t moved_bytes(Operation operation) const;
    [[nodiscard]] double latency(Operation operation, double fraction) const;

  private:
    struct Driver {
        [[nodiscard]] bool in_flight() const { return free.size() < blocks.size(); }

        std::thread thread;
        std::unique_ptr<Backend> backend;
        // Used by the driver's thread alone, which allocates no memory once it has begun:
        std::vector<Block> blocks;                       // one for each slot
        std::vector<unsigned> free;                      // slots
        std::vector<unsigned> fresh;                     // slots of blocks to hand to the kernel
        std::vector<Block> unchecked;                    // read, checksum not yet computed
        std::vector<Block> over;                         // ended, not yet settled
        std::vector<Ended> ended;                        // by the backend, just now
        std::vector<Block*> checked;                     // whose checksums are computed next
        std::vector<std::shared_ptr<Request>> finished;  // settled, their waiters not yet woken
        // Guarded by `mutex_`:
        bool could_take_more = false;  // may sleep in `run` with free slots
        std::function<void(Backend&)> errand;
        bool ran = false;  // true once `errand` has run
    };

    void drive(Driver& driver, const Opener& open, unsigned depth);
    void serve(Driver& driver);
    // Settles the blocks that have ended; adds the requests that are thereby done to `finished`.
    // Needs the lock.
    void settle(Driver& driver);
    // Fills free slots with blocks. Needs the lock.
    void take(Driver& driver);
    void finish(const std::vector<std::shared_ptr<Request>>& finished);
    // Hands fresh blocks to the backend and waits until some have ended.
    static void move(Driver& driver);
    // Frees the slots of transfers that have ended, or hands their rest over again.
    static void collect(Driver& driver);
    // Runs `errand` on every driver's thread. Returns true if all drivers were running.
    [[nodiscard]] bool on_each(const std::function<void(Backend&)>& errand);
    void stop();

    mutable std::mutex mutex_;
    std::condition_variable work_;     // for drivers with nothing in flight
    std::condition_variable changed_;  // for threads that start drivers or send errands
    std::condition_variable told_;     // for `announced`
    Schedule schedule_;
    std::deque<Driver> drivers_;
    std::size_t ready_ = 0;  // drivers that have opened their backend, or failed to
    std::exception_ptr refusal_;
    bool closing_ = false;
    bool stopped_ = false;
    std::array<std::uint64_t, 2> moved_bytes_{};
    std::array<Latencies, 2> latencies_;
    std::vector<std::uint64_t> announced_;  // has room for all that are pending
    std::size_t pending_ = 0;               // tags that `announced` has not returned
    std::mutex closing_mutex_;
    std::mutex errands_mutex_;  // one errand at a time
};

}  // namespace offload
