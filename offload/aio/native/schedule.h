// The choice of the next block, free of threads and I/O.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <memory>
#include <optional>

#include "request.h"

namespace offload {

// Pending requests in order of priority, then of arrival, under two rules against starvation:
// * background blocks hold at most three quarters of the slots, so that an urgent request finds a
//   free slot rather than a device full of write-behind;
// * a priority that was passed over eight times gets the next block.
//
// Some drives move fewer bytes when they read and write at once than one after the other. For them
// `window_bytes` is not 0, and blocks that are not urgent go in windows of one direction:
// * once `window_bytes` of a direction have gone while the other direction waited, or no block of
//   the direction is left, the direction turns. So no block waits longer than one window of the
//   other direction;
// * the first block after a turn waits until the blocks before the turn have ended.
// Urgent blocks go at once whatever the direction. Without requests of the other direction, blocks
// go in the same order as without windows.
class Schedule {
  public:
    // `slots`: blocks in flight at most. `window_bytes`: 0 for a drive that may read and write at
    // once.
    Schedule(std::size_t slots, std::size_t block_bytes, std::size_t window_bytes = 0);

    void add(std::shared_ptr<Request> request);

    // Returns true if `next` would return a block.
    [[nodiscard]] bool ready() const;

    // Returns the next block, which occupies a slot until `settle`.
    [[nodiscard]] std::optional<Block> next();

    // Frees the slot of a block.
    void settle(const Block& block);

    [[nodiscard]] bool empty() const;

  private:
    // Pending requests of one priority; with windows of one direction too.
    struct Lane {
        std::deque<std::shared_ptr<Request>> waiting;
        std::size_t passed_over = 0;
    };

    [[nodiscard]] bool in_windows(std::size_t priority) const;
    // Returns the lane of a priority in which requests of the direction wait.
    [[nodiscard]] std::size_t lane(std::size_t priority, std::size_t direction) const;
    [[nodiscard]] bool may_take(std::size_t priority) const;
    [[nodiscard]] std::optional<std::size_t> choose() const;
    // Returns true if a request of the direction waits for a window.
    [[nodiscard]] bool waits(std::size_t direction) const;
    // Turns the direction if its window is over.
    void turn();

    const std::size_t block_bytes_;
    const std::size_t background_slots_;
    const std::size_t window_bytes_;
    std::array<std::array<Lane, 2>, kPriorities> lanes_;  // all in the first one without windows
    std::size_t background_ = 0;                          // blocks in flight
    std::size_t direction_ = 0;                           // an `Operation`
    std::size_t used_ = 0;  // bytes of the window that have gone while the other direction waited
    std::array<std::size_t, 2> in_flight_{};  // blocks of each direction that went in windows
};

}  // namespace offload
