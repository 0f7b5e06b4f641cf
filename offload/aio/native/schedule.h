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
class Schedule {
  public:
    // `slots`: blocks in flight at most.
    Schedule(std::size_t slots, std::size_t block_bytes);

    void add(std::shared_ptr<Request> request);

    // Returns true if `next` would return a block.
    [[nodiscard]] bool ready() const;

    // Returns the next block, which occupies a slot until `settle`.
    [[nodiscard]] std::optional<Block> next();

    // Frees the slot of a block.
    void settle(const Block& block);

    [[nodiscard]] bool empty() const;

  private:
    // Pending requests of one priority.
    struct Lane {
        std::deque<std::shared_ptr<Request>> waiting;
        std::size_t passed_over = 0;
    };

    [[nodiscard]] bool may_take(std::size_t priority) const;
    [[nodiscard]] std::optional<std::size_t> choose() const;

    const std::size_t block_bytes_;
    const std::size_t background_slots_;
    std::array<Lane, kPriorities> lanes_;
    std::size_t background_ = 0;  // blocks in flight
};

}  // namespace offload
