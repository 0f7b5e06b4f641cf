// Requests for a schedule, and the order in which it hands their blocks out.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "schedule.h"

namespace orders {

using namespace offload;

inline constexpr Operation kWays[] = {Operation::kRead, Operation::kWrite};

// A request of so many blocks, of a page each. Nothing is moved.
inline std::shared_ptr<Request> ask(Priority priority, std::size_t blocks,
                                    Operation operation = Operation::kRead) {
    const Piece piece{{-1, 3}, 0, reinterpret_cast<char*>(1 << 20), blocks * kPage};
    return std::make_shared<Request>(operation, priority, std::vector<Piece>{piece}, Checksum{});
}

// What the queue does with a block that is over; whether its request is.
inline bool settle(Schedule& schedule, const Block& block) {
    const bool last = block.request->settle(block);
    schedule.settle(block);
    return last;
}

// The priorities of the next blocks, each of which ends at once: "UUN".
inline std::string order(Schedule& schedule, std::size_t count) {
    std::string letters;
    while (letters.size() < count) {
        const auto block = schedule.next();
        if (!block) break;
        letters += "UNB"[static_cast<std::size_t>(block->request->priority())];
        (void)settle(schedule, *block);
    }
    return letters;
}

// The directions of the next blocks, each of which ends at once: "RRW".
inline std::string directions(Schedule& schedule, std::size_t count) {
    std::string letters;
    while (letters.size() < count) {
        const auto block = schedule.next();
        if (!block) break;
        letters += "RW"[static_cast<std::size_t>(block->left.operation)];
        (void)settle(schedule, *block);
    }
    return letters;
}

inline std::string times(int count, const std::string& what) {
    std::string all;
    while (count-- > 0) all += what;
    return all;
}

}  // namespace orders
