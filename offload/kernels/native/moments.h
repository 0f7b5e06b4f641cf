// Moments in 8 bits: blocks of codes with a scale for each block and moment.
//
// [Note: codes of moments] A code is a multiple of its block's scale. A signed moment has codes
// from -127 to 127. A second moment has no sign; its root has codes from 0 to 255. A root above
// zero has a code of at least 1: a second moment of zero would make a step as long as eps allows.
//     scale = largest / 127 or / 255, with its lower 8 bits cut off, and 2^-100 at least
//     code  = floor(value / scale + chance), at most 127 or 255
// The cut makes the product of a code and its scale exact, and the quotient of the largest value at
// least 127 or 255: the largest value of a block always has the largest code. So a block whose
// values do not change is encoded to the same bits, whatever the chance: its range, from 4 to 65531
// of 65536, leaves room for the roundings of the quotient. The chances are half of an element's
// random bits for each moment: see [Note: stochastic rounding].
//
// A block with inf or NaN has NaN as its scale and zeros as codes, which gives NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "bits.h"
#include "noise.h"

namespace offload {

inline constexpr std::size_t kMomentBlock = 256;

// A code of a moment, whose kind the rule knows.
struct Code {
    std::uint8_t bits;
};

inline constexpr float kOne = 65536.0f;  // a code in fixed point
inline constexpr std::uint32_t kNearest = 0x8000u;
inline constexpr std::uint32_t kLeastChance = 4, kLargestChance = 0xFFFFu - 4;

// The value of a code; for codes of roots, the root.
template <bool kRoot>
OFFLOAD_INLINE float code_value(Code code, float scale) {
    if constexpr (kRoot) {
        return static_cast<float>(code.bits) * scale;
    } else {
        return static_cast<float>(static_cast<std::int8_t>(code.bits)) * scale;
    }
}

// The moment of a code's value, and the reverse.
template <bool kRoot>
OFFLOAD_INLINE float moment_of(float value) {
    return kRoot ? value * value : value;
}
template <bool kRoot>
OFFLOAD_INLINE float value_of(float moment) {
    return kRoot ? std::sqrt(moment) : moment;
}

// The scale of a block, and how its values become codes.
struct BlockScale {
    float scale;
    float factor;        // of a magnitude, to fixed point
    std::uint32_t mask;  // of its bits: none remain where the block is not finite
};

template <bool kRoot>
OFFLOAD_INLINE BlockScale block_scale(const float* values, std::size_t numel) {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < numel; ++i) {
        largest = std::max(largest, std::bit_cast<std::uint32_t>(values[i]) & 0x7FFFFFFFu);
    }
    if (largest == 0) return {0.0f, 0.0f, 0};
    if (largest >= 0x7F800000u) return {std::bit_cast<float>(kNanBf16 << 16), 0.0f, 0};
    const float exact = std::bit_cast<float>(largest) / (kRoot ? 255.0f : 127.0f);
    const float cut = std::bit_cast<float>(std::bit_cast<std::uint32_t>(exact) & 0xFFFFFF00u);
    const float scale = std::max(cut, 0x1p-100f);
    return {scale, kOne / scale, 0x7FFFFFFFu};
}

// The chance with which a value is rounded up, from the lower 16 of the `random` bits.
OFFLOAD_INLINE std::uint32_t chance_of(std::uint32_t random) {
    return std::min(std::max(random & 0xFFFFu, kLeastChance), kLargestChance);
}

template <bool kRoot>
OFFLOAD_INLINE std::int32_t code_of(const BlockScale& of, float value, std::uint32_t chance) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    const float magnitude = std::bit_cast<float>(bits & of.mask);
    const auto fixed = static_cast<std::int32_t>(magnitude * of.factor);
    const std::int32_t rounded = (fixed + static_cast<std::int32_t>(chance)) >> 16;
    if constexpr (kRoot) {
        const auto least = static_cast<std::int32_t>(std::min(bits & of.mask, 1u));
        return std::max(std::min(rounded, 255), least);
    } else {
        const std::int32_t sign = static_cast<std::int32_t>(bits) >> 31;
        return (std::min(rounded, 127) ^ sign) - sign;
    }
}

// Writes the codes of a block, of a length up to kMomentBlock, rounded to nearest, and returns its
// scale.
template <bool kRoot>
OFFLOAD_INLINE float encode_block(const float* values, std::size_t numel, Code* codes) {
    // Codes of 32 bits first: a loop that also stores bytes is vectorized by bytes.
    alignas(64) std::int32_t wide[kMomentBlock];
    const BlockScale of = block_scale<kRoot>(values, numel);
    for (std::size_t i = 0; i < numel; ++i) wide[i] = code_of<kRoot>(of, values[i], kNearest);
    for (std::size_t i = 0; i < numel; ++i) codes[i].bits = static_cast<std::uint8_t>(wide[i]);
    return of.scale;
}

// Writes the values of the codes of a block, or of the part of one.
template <bool kRoot>
OFFLOAD_INLINE void decode_block(const Code* codes, float scale, std::size_t numel, float* values) {
    for (std::size_t i = 0; i < numel; ++i) {
        values[i] = moment_of<kRoot>(code_value<kRoot>(codes[i], scale));
    }
}

// A moment in blocks: its codes, and the scale of each block at `scales[stride * block]`.
struct CodedMoment {
    Code* codes;
    float* scales;
    std::size_t stride;
    bool root;
};

// Rounded to nearest. The first value is the first of a block.
void encode_moments(const float* values, const CodedMoment& moment, std::size_t numel);
// The first code has the number `offset` in its block.
void decode_moments(const CodedMoment& moment, std::size_t offset, float* values,
                    std::size_t numel);

}  // namespace offload
