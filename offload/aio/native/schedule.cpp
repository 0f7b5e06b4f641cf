#include "schedule.h"

#include <algorithm>
#include <utility>

namespace offload {
namespace {

constexpr std::size_t kBlocksBeforeItsTurn = 8;
constexpr std::size_t kBackground = static_cast<std::size_t>(Priority::kBackground);

}  // namespace

Schedule::Schedule(std::size_t slots, std::size_t block_bytes)
    : block_bytes_(std::max(block_bytes / kPage * kPage, kPage)),
      background_slots_(slots < 2 ? slots : slots - std::max<std::size_t>(slots / 4, 1)) {}

void Schedule::add(std::shared_ptr<Request> request) {
    const auto priority = static_cast<std::size_t>(request->priority());
    lanes_[priority].waiting.push_back(std::move(request));
}

bool Schedule::empty() const {
    return std::all_of(lanes_.begin(), lanes_.end(),
                       [](const Lane& lane) { return lane.waiting.empty(); });
}

bool Schedule::may_take(std::size_t priority) const {
    if (lanes_[priority].waiting.empty()) return false;
    return priority != kBackground || background_ < background_slots_;
}

std::optional<std::size_t> Schedule::choose() const {
    std::optional<std::size_t> chosen;
    for (std::size_t priority = 0; priority < kPriorities; ++priority) {
        if (!may_take(priority)) continue;
        if (lanes_[priority].passed_over >= kBlocksBeforeItsTurn) return priority;
        if (!chosen) chosen = priority;
    }
    return chosen;
}

bool Schedule::ready() const { return choose().has_value(); }

std::optional<Block> Schedule::next() {
    const auto chosen = choose();
    if (!chosen) return std::nullopt;
    auto& [waiting, passed_over] = lanes_[*chosen];
    passed_over = 0;
    for (std::size_t below = *chosen + 1; below < kPriorities; ++below) {
        if (!lanes_[below].waiting.empty()) ++lanes_[below].passed_over;
    }
    auto request = waiting.front();
    Block block = request->next_block(block_bytes_);
    if (!request->has_block()) waiting.pop_front();
    block.request = std::move(request);
    if (*chosen == kBackground) ++background_;
    return block;
}

void Schedule::settle(const Block& block) {
    const auto priority = static_cast<std::size_t>(block.request->priority());
    if (priority == kBackground) --background_;
    // A request that failed has no more blocks, but may still be listed as pending.
    if (block.error == 0) return;
    auto& waiting = lanes_[priority].waiting;
    const auto found = std::find(waiting.begin(), waiting.end(), block.request);
    if (found != waiting.end()) waiting.erase(found);
}

}  // namespace offload
