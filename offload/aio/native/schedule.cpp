#include "schedule.h"

#include <algorithm>
#include <utility>

namespace offload {
namespace {

constexpr std::size_t kBlocksBeforeItsTurn = 8;
constexpr std::size_t kUrgent = static_cast<std::size_t>(Priority::kUrgent);
constexpr std::size_t kNormal = static_cast<std::size_t>(Priority::kNormal);
constexpr std::size_t kBackground = static_cast<std::size_t>(Priority::kBackground);

}  // namespace

Schedule::Schedule(std::size_t slots, std::size_t block_bytes, std::size_t window_bytes)
    : block_bytes_(std::max(block_bytes / kPage * kPage, kPage)),
      background_slots_(slots < 2 ? slots : slots - std::max<std::size_t>(slots / 4, 1)),
      window_bytes_(window_bytes) {}

void Schedule::add(std::shared_ptr<Request> request) {
    const auto priority = static_cast<std::size_t>(request->priority());
    const auto direction = static_cast<std::size_t>(request->operation());
    lanes_[priority][lane(priority, direction)].waiting.push_back(std::move(request));
    turn();
}

bool Schedule::empty() const {
    return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lanes) {
        return lanes[0].waiting.empty() && lanes[1].waiting.empty();
    });
}

bool Schedule::in_windows(std::size_t priority) const {
    return window_bytes_ > 0 && priority != kUrgent;
}

std::size_t Schedule::lane(std::size_t priority, std::size_t direction) const {
    return in_windows(priority) ? direction : 0;
}

bool Schedule::may_take(std::size_t priority) const {
    if (lanes_[priority][lane(priority, direction_)].waiting.empty()) return false;
    if (in_windows(priority) && in_flight_[1 - direction_] > 0) return false;
    return priority != kBackground || background_ < background_slots_;
}

std::optional<std::size_t> Schedule::choose() const {
    std::optional<std::size_t> chosen;
    for (std::size_t priority = 0; priority < kPriorities; ++priority) {
        if (!may_take(priority)) continue;
        const Lane& taken = lanes_[priority][lane(priority, direction_)];
        if (taken.passed_over >= kBlocksBeforeItsTurn) return priority;
        if (!chosen) chosen = priority;
    }
    return chosen;
}

bool Schedule::ready() const { return choose().has_value(); }

std::optional<Block> Schedule::next() {
    const auto chosen = choose();
    if (!chosen) return std::nullopt;
    auto& [waiting, passed_over] = lanes_[*chosen][lane(*chosen, direction_)];
    passed_over = 0;
    for (std::size_t below = *chosen + 1; below < kPriorities; ++below) {
        Lane& other = lanes_[below][lane(below, direction_)];
        if (!other.waiting.empty()) ++other.passed_over;
    }
    auto request = waiting.front();
    Block block = request->next_block(block_bytes_);
    if (!request->has_block()) waiting.pop_front();
    block.request = std::move(request);
    if (*chosen == kBackground) ++background_;
    if (in_windows(*chosen)) {
        ++in_flight_[direction_];
        used_ += block.nbytes;
        turn();
    }
    return block;
}

void Schedule::settle(const Block& block) {
    const auto priority = static_cast<std::size_t>(block.request->priority());
    const auto direction = static_cast<std::size_t>(block.request->operation());
    if (priority == kBackground) --background_;
    if (in_windows(priority)) --in_flight_[direction];
    // A request that failed has no more blocks, but may still be listed as pending.
    if (block.error == 0) return;
    auto& waiting = lanes_[priority][lane(priority, direction)].waiting;
    const auto found = std::find(waiting.begin(), waiting.end(), block.request);
    if (found != waiting.end()) waiting.erase(found);
    turn();
}

bool Schedule::waits(std::size_t direction) const {
    return !lanes_[kNormal][direction].waiting.empty() ||
           !lanes_[kBackground][direction].waiting.empty();
}

void Schedule::turn() {
    if (window_bytes_ == 0) return;
    const std::size_t other = 1 - direction_;
    if (!waits(other)) {
        used_ = 0;
    } else if (!waits(direction_) || used_ >= window_bytes_) {
        direction_ = other;
        used_ = 0;
    }
}

}  // namespace offload
