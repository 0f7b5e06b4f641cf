// bfloat16 and the split master weight, as bit patterns.
//
// [Note: split master] An fp32 master is stored as a bf16 weight and a signed 16-bit residual:
//     weight   = (bits(master) + 0x8000) >> 16
//     residual = bits(master) - (weight << 16)
// The weight is rounded half up in the bit pattern, not to even: at an exact tie the residual of a
// weight rounded to even would be +0x8000, which exceeds int16. Joining is one addition and
// restores every pattern except NaNs, which all become weight 0x7FC0, residual 0.
//
// [Note: bf24 master] With 8 low bits the master is the upper 24 bits of an fp32, as bf16 is its
// upper 16. It is rounded to 24 bits before it is split:
//     kept     = (bits(master) + random) with its lower 8 bits cut off
//     weight   = (kept + 0x8000) >> 16
//     residual = (kept - (weight << 16)) >> 8
// `random` is 8 random bits, so that the mean over all of them is the master itself, or 0x80, which
// rounds to nearest. A stored master keeps its value, whatever is added. As in any rounding, a
// magnitude may be rounded up to the next power of two, and the largest ones to inf.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#define OFFLOAD_INLINE inline __attribute__((always_inline))

namespace offload {

struct Bf16 {
    std::uint16_t bits;
};

// A choice that is constant for a whole loop, as a mask of all ones or none. A branch, even a
// loop-invariant one, would keep the compiler from vectorizing.
using Choice = std::uint32_t;

OFFLOAD_INLINE Choice choice(bool yes) { return yes ? ~Choice{0} : 0; }

OFFLOAD_INLINE float choose(Choice choice, float yes, float no) {
    return std::bit_cast<float>((std::bit_cast<std::uint32_t>(yes) & choice) |
                                (std::bit_cast<std::uint32_t>(no) & ~choice));
}

inline constexpr std::uint32_t kNanBf16 = 0x7FC0;

OFFLOAD_INLINE bool is_nan(std::uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

OFFLOAD_INLINE float to_float(float value) { return value; }

OFFLOAD_INLINE float to_float(Bf16 value) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

OFFLOAD_INLINE void store(float* at, float value) { *at = value; }

// Rounded to nearest, ties to even, as `tensor.to(torch.bfloat16)` does.
OFFLOAD_INLINE void store(Bf16* at, float value) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    at->bits = static_cast<std::uint16_t>(is_nan(bits) ? kNanBf16 : rounded);
}

// IEEE binary16, by integer operations that every instruction set supports in vectors.
struct Fp16 {
    std::uint16_t bits;
};

// Of its 16 bits.
OFFLOAD_INLINE float half_value(std::uint32_t half) {
    const std::uint32_t magnitude = half & 0x7FFFu;
    // Exponent and fraction are shifted to their positions in a float. The exponent is then 112 too
    // low, which one exact product corrects, for denormals too.
    const float scaled = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
    const std::uint32_t bits = magnitude >= 0x7C00u ? (magnitude << 13) | 0x7F800000u
                                                    : std::bit_cast<std::uint32_t>(scaled);
    return std::bit_cast<float>(bits | (half & 0x8000u) << 16);
}

OFFLOAD_INLINE float to_float(Fp16 value) { return half_value(value.bits); }

// Rounded to nearest, ties to even, as `tensor.to(torch.float16)` does; beyond 65504 infinite.
OFFLOAD_INLINE std::uint32_t half_bits(float value) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
    const std::uint32_t normal =
        (magnitude - 0x38000000u + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14 the spacing is 2^-24, that of floats just above 0.5: adding 0.5 rounds.
    const std::uint32_t denormal =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
    std::uint32_t half = magnitude < 0x38800000u ? denormal : normal;
    half = magnitude >= 0x477FF000u ? 0x7C00u : half;
    half = magnitude > 0x7F800000u ? 0x7E00u : half;
    return half | sign;
}

OFFLOAD_INLINE void store(Fp16* at, float value) {
    at->bits = static_cast<std::uint16_t>(half_bits(value));
}

OFFLOAD_INLINE float join(Bf16 weight, std::int16_t residual) {
    const std::uint32_t high = static_cast<std::uint32_t>(weight.bits) << 16;
    return std::bit_cast<float>(high + static_cast<std::uint32_t>(std::int32_t{residual}));
}

// The bits of a master that its two halves keep.
OFFLOAD_INLINE std::uint32_t kept_bits(float master) {
    return master == master ? std::bit_cast<std::uint32_t>(master) : kNanBf16 << 16;
}

inline constexpr std::uint32_t kHalfUp = 0x8000u;  // rounds to the upper half

OFFLOAD_INLINE void split(float master, Bf16* weight, std::int16_t* residual) {
    const std::uint32_t bits = kept_bits(master);
    weight->bits = static_cast<std::uint16_t>((bits + kHalfUp) >> 16);
    *residual = static_cast<std::int16_t>(bits & 0xFFFFu);  // the low half, read as signed
}

OFFLOAD_INLINE float join(Bf16 weight, std::int8_t residual) {
    const std::uint32_t high = static_cast<std::uint32_t>(weight.bits) << 16;
    return std::bit_cast<float>(high + (static_cast<std::uint32_t>(std::int32_t{residual}) << 8));
}

inline constexpr std::uint32_t kNearestBf24 = 0x80u;

// Uses the lower 8 of the `random` bits.
OFFLOAD_INLINE std::uint32_t kept_bits(float master, std::uint32_t random) {
    const std::uint32_t sum = std::bit_cast<std::uint32_t>(master) + (random & 0xFFu);
    return master == master ? sum : kNanBf16 << 16;
}

OFFLOAD_INLINE void split(float master, std::uint32_t random, Bf16* weight, std::int8_t* residual) {
    const std::uint32_t bits = kept_bits(master, random);
    weight->bits = static_cast<std::uint16_t>((bits + kHalfUp) >> 16);
    *residual = static_cast<std::int8_t>(bits >> 8);  // the byte below the weight, read as signed
}

// Two numbers of 16 bits that lie in one word, the first one below.
static_assert(std::endian::native == std::endian::little);

template <class T>
OFFLOAD_INLINE std::uint32_t load_pair(const T* at) {
    static_assert(sizeof(T) == 2);
    std::uint32_t pair;
    std::memcpy(&pair, at, sizeof pair);
    return pair;
}
template <class T>
OFFLOAD_INLINE void store_pair(T* at, std::uint32_t pair) {
    static_assert(sizeof(T) == 2);
    std::memcpy(at, &pair, sizeof pair);
}

OFFLOAD_INLINE float first_of(Bf16, std::uint32_t pair) { return std::bit_cast<float>(pair << 16); }
OFFLOAD_INLINE float second_of(Bf16, std::uint32_t pair) {
    return std::bit_cast<float>(pair & 0xFFFF0000u);
}
OFFLOAD_INLINE float first_of(Fp16, std::uint32_t pair) { return half_value(pair & 0xFFFFu); }
OFFLOAD_INLINE float second_of(Fp16, std::uint32_t pair) { return half_value(pair >> 16); }

OFFLOAD_INLINE std::uint32_t pair_of_uppers(std::uint32_t first, std::uint32_t second) {
    return (first >> 16) | (second & 0xFFFF0000u);
}
OFFLOAD_INLINE std::uint32_t pair_of_lowers(std::uint32_t first, std::uint32_t second) {
    return (first & 0xFFFFu) | (second << 16);
}

}  // namespace offload
