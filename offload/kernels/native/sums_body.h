// [Note: sums] The square of a float is exact in double, so only the additions round, and their
// order is fixed by the index alone: within a block of kBlock elements, element i is added to lane
// i % kLanes; the lanes are added in pairs; the sums of the blocks are added in order. A chunk of
// the team is a whole number of blocks, so threads do not change the order either.
#pragma once

#include <cstddef>

#include "bits.h"
#include "team.h"

namespace offload {

inline constexpr std::size_t kBlock = 4096;
inline constexpr std::size_t kLanes = 16;
static_assert(kChunk % kBlock == 0 && kBlock % kLanes == 0);

template <class Value>
OFFLOAD_INLINE double square(Value value) {
    const double wide = to_float(value);
    return wide * wide;
}

template <class Value>
OFFLOAD_INLINE double block_sum(const Value* values, std::size_t numel) {
    double lanes[kLanes] = {};
    std::size_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) {
#pragma GCC unroll 1
        for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += square(values[i + lane]);
    }
    for (std::size_t lane = 0; i + lane < numel; ++lane) lanes[lane] += square(values[i + lane]);
    for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
        for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
}

}  // namespace offload
