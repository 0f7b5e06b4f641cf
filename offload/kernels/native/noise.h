// Random bits with which moments are rounded to bf16 or 8 bits, and masters to bf24.
//
// [Note: stochastic rounding] A moment moves by less than half of bf16's spacing in most steps, and
// would never move if it were rounded to nearest. Sixteen random bits are added below the bits that
// remain, so that the mean over all of them is the value itself, exactly. The bits depend only on
// the seed of the run, the unit, the update of the parameter, the moment, and the number of the
// element in its unit. No thread, call, tile, rank, tier or resume changes them. One number of 32
// bits serves an element: its halves round the first and the second moment. A master is rounded by
// the bits of another stream, which is derived from the moments' stream.
//
// The hash is C. Wellons' "lowbias32", with a second word of key between its two rounds. It takes
// two products of 32 bits, which every instruction set has for vectors.
#pragma once

#include "bits.h"

namespace offload {

// A 64-bit finalizer (Stafford's variant 13, as in SplitMix64).
OFFLOAD_INLINE std::uint64_t mixed(std::uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}

// The noise of elements whose numbers in the unit agree in all but the lower 32 bits.
struct Noise {
    std::uint32_t before;  // the key, a word for each round
    std::uint32_t between;
    std::uint32_t shift;  // the lower bits of an element's number, less its index in the arrays
};

inline constexpr std::uint64_t kNoiseRange = std::uint64_t{1} << 32;

// The noise of an element of a stream, and of the elements after it up to a multiple of
// kNoiseRange.
OFFLOAD_INLINE Noise noise_of(std::uint64_t stream, std::uint64_t element, std::size_t index) {
    const std::uint64_t key = mixed(stream + 0x9E3779B97F4A7C15ull * (element / kNoiseRange));
    return {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32),
            static_cast<std::uint32_t>(element - index)};
}

// Returns the stream that rounds masters; `stream` rounds moments.
OFFLOAD_INLINE std::uint64_t master_stream(std::uint64_t stream) {
    return mixed(stream ^ 0x6D6173746572ull);
}

// Divides `numel` elements into parts [start, stop) with one key, usually one part. Calls `use`
// with each part and the number of its first element in the stream. The first of all elements has
// the number `element`.
template <class Use>
void each_key(std::uint64_t element, std::size_t numel, Use use) {
    std::size_t start = 0;
    do {
        const std::uint64_t left = kNoiseRange - element % kNoiseRange;
        const std::size_t stop =
            numel - start > left ? start + static_cast<std::size_t>(left) : numel;
        use(start, stop, element);
        element += stop - start;
        start = stop;
    } while (start < numel);
}

// The 32 random bits of the element whose number has the lower bits `element`.
OFFLOAD_INLINE std::uint32_t random_bits(const Noise& noise, std::uint32_t element) {
    std::uint32_t x = element ^ noise.before;
    x ^= x >> 16;
    x *= 0x21F0AAADu;
    x ^= x >> 15;
    x += noise.between;
    x *= 0xD35A2D97u;
    x ^= x >> 15;
    return x;
}

// A bf16 that the lower 16 of the `random` bits round, in the upper half of the word.
OFFLOAD_INLINE std::uint32_t rounded_bits(float value, std::uint32_t random) {
    const std::uint32_t sum = std::bit_cast<std::uint32_t>(value) + (random & 0xFFFFu);
    return value == value ? sum : kNanBf16 << 16;
}

}  // namespace offload
