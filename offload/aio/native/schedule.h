// Which block goes next: a decision, without threads and without I/O.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <memory>
#include <optional>

#include "request.h"

namespace offload {

// Requests in order of priority, then of arrival, under two rules that keep everybody moving:
// * background blocks hold at most three quarters of the slots, so that a request that somebody
//   waits for finds a free one and not a device full of write-behind;
// * a priority that others were taken before eight times gets a block.
class Schedule {
  public:
    Schedule(std::size_t slots, std::size_t block_bytes);

    void add(std::shared_ptr<Request> request);

    // Whether `next` would give a block.
    [[nodiscard]] bool ready() const;

    // The next block; its slot is taken until `settle`.
    [[nodiscard]] std::optional<Block> next();

    // Gives the slot of a block back.
    void settle(const Block& block);

    [[nodiscard]] bool empty() const;

  private:
    using Waiting = std::deque<std::shared_ptr<Request>>;

    [[nodiscard]] bool may_take(std::size_t priority) const;
    [[nodiscard]] std::optional<std::size_t> choose() const;

    const std::size_t block_bytes_;
    const std::size_t background_slots_;
    std::array<Waiting, kPriorities> waiting_;
    std::array<std::size_t, kPriorities> passed_over_{};
    std::size_t background_ = 0;  // blocks on their way
};

}  // namespace offload
