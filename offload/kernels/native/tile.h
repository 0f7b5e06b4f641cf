// A tile: the elements of a partition that a step works on at a time.
//
// [Note: tiles] Weights and gradients of a tile become fp32 in the first-level cache, the rule
// computes there, and the new weights are stored in their form. So a form is compiled once for each
// instruction set, and a rule once for each form of moments. bf16 moments are loaded and rounded by
// the rule's own loop, which has time for that while it waits for its divisions. Values that are
// fp32 already stay where they are. The end of a segment is copied into a tile of its own, so that
// each loop has one length.
//
// [Note: pairs] With moments in 16 or 8 bits, a tile has another order: the elements with even
// numbers are its first half, the elements with odd numbers its second half. Two numbers of 16 bits
// that lie in one word are then taken apart by a shift and a mask, and put together by an or. In
// the usual order each register would be unpacked and packed across its halves.
#pragma once

#include "moments.h"
#include "noise.h"

namespace offload {

inline constexpr std::size_t kTile = 256;
inline constexpr std::size_t kHalf = kTile / 2;
static_assert(kTile == kMomentBlock);  // a tile of codes is a block of them

enum class Order { kLinear, kPairs };

// A loop asks for the elements of the next tile as it comes to those of this one. On two cores of a
// Zen 4 that took the update from 0.90 to 0.96 of the bandwidth of a plain loop over the same five
// arrays. Past the end of an array a prefetch does nothing.
inline constexpr std::size_t kAtOnce = 32;       // elements, in order
inline constexpr std::size_t kPairsAtOnce = 32;  // pairs of elements
inline constexpr std::size_t kCacheLine = 64;

template <std::size_t kNumel, class T>
OFFLOAD_INLINE void prefetch_next(const T* at) {
    const char* next = reinterpret_cast<const char*>(at + kTile);
    for (std::size_t line = 0; line < kNumel * sizeof(T); line += kCacheLine) {
        __builtin_prefetch(next + line);
    }
}

}  // namespace offload
