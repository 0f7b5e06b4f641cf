// The queue: requests in, blocks to the kernel in order of priority, ends out.
//
// Threads. Anybody may submit, wait, register. Each driver thread has a backend of its own and is
// the only one to touch it, but for `wake`. One mutex guards the schedule, the requests' progress
// and the drivers' flags; it is never held during a system call that moves bytes.
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

// How long blocks took, from the hand-over to the kernel to the end, in steps of an eighth of an
// octave.
class Latencies {
  public:
    void add(std::uint64_t nanoseconds);
    // Seconds that this fraction of all blocks stayed within; 0 where there were none.
    [[nodiscard]] double quantile(double fraction) const;

  private:
    std::array<std::uint64_t, 512> counts_{};
    std::uint64_t total_ = 0;
};

class Queue {
  public:
    using Opener = std::function<std::unique_ptr<Backend>()>;

    // `threads` drivers, each with a backend from `open` and at most `depth` blocks in flight.
    // Throws `Refused` where a backend cannot be had, std::system_error where a thread cannot.
    Queue(const Opener& open, unsigned threads, unsigned depth, std::size_t block_bytes);

    // Closes. A forked child must not come here: it has no threads to join.
    ~Queue() { close(); }

    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    // Queues `request`; false after `close`.
    [[nodiscard]] bool submit(std::shared_ptr<Request> request);

    // Has the end of `request` be told by `announced`, under `tag`, which is not 0. False where it
    // is done already.
    [[nodiscard]] bool announce(Request& request, std::uint64_t tag);

    // Waits for announced requests to end; their tags. None are left where it gives none: the queue
    // is closed.
    [[nodiscard]] std::vector<std::uint64_t> announced();

    // Has every backend register the memory, or the file; the bytes that all of them could, or
    // whether they could. Both must stay as they are until the queue is closed.
    [[nodiscard]] std::size_t register_memory(char* data, std::size_t nbytes);
    [[nodiscard]] bool register_file(int descriptor);

    // Moves what is queued, then joins the threads; idempotent.
    void close();

    [[nodiscard]] std::uint64_t moved_bytes(Operation operation) const;
    [[nodiscard]] double latency(Operation operation, double fraction) const;

  private:
    struct Driver {
        [[nodiscard]] bool in_flight() const { return free.size() < blocks.size(); }

        std::thread thread;
        std::unique_ptr<Backend> backend;
        // Its thread's own:
        std::vector<Block> blocks;     // one for each slot
        std::vector<unsigned> free;    // slots
        std::vector<unsigned> fresh;   // slots of blocks that are to be handed over
        std::vector<Block> unchecked;  // read, and without their checksum
        std::vector<Block> over;       // to be settled
        // Under the lock:
        bool could_take_more = false;  // it may sleep in `run` with slots free
        std::function<void(Backend&)> errand;
        bool ran = false;  // the errand has
    };

    void drive(Driver& driver, const Opener& open, unsigned depth);
    void serve(Driver& driver);
    // Under the lock: settles the blocks that are over; the requests that they end.
    [[nodiscard]] std::vector<std::shared_ptr<Request>> settle(Driver& driver);
    // Under the lock: fills free slots.
    void take(Driver& driver);
    void finish(const std::vector<std::shared_ptr<Request>>& finished);
    // Hands fresh blocks to the backend and waits for some to be over.
    static void move(Driver& driver);
    // What has ended leaves its slot, or is handed over once more.
    static void collect(Driver& driver, const std::vector<Ended>& ended);
    // Whether all drivers were there to do it.
    [[nodiscard]] bool on_each(const std::function<void(Backend&)>& errand);
    void stop();

    mutable std::mutex mutex_;
    std::condition_variable work_;     // for drivers with nothing in flight
    std::condition_variable changed_;  // for who starts drivers or sends them on errands
    std::condition_variable told_;     // for `announced`
    Schedule schedule_;
    std::deque<Driver> drivers_;
    std::size_t ready_ = 0;  // drivers that have opened their backend, or failed to
    std::exception_ptr refusal_;
    bool closing_ = false;
    bool stopped_ = false;
    std::array<std::uint64_t, 2> moved_bytes_{};
    std::array<Latencies, 2> latencies_;
    std::vector<std::uint64_t> announced_;
    std::mutex closing_mutex_;
    std::mutex errands_mutex_;  // held by who has sent drivers on one
};

}  // namespace offload
