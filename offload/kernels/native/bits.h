// bfloat16 and the split master weight, as bit patterns.
//
// [Note: split master] An fp32 master weight is kept as a bf16 weight and a signed 16-bit residual:
//     weight   = (bits(master) + 0x8000) >> 16
//     residual = bits(master) - (weight << 16)
// The weight is rounded half up in the bit pattern, not to even: at an exact tie the residual of a
// weight rounded to even would be +0x8000, which int16 does not hold. Joining is one addition and
// gives back every pattern but the NaNs, which all become weight 0x7FC0, residual 0.
#pragma once

#include <bit>
#include <cstdint>

#define OFFLOAD_INLINE inline __attribute__((always_inline))

namespace offload {

struct Bf16 {
    std::uint16_t bits;
};

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

OFFLOAD_INLINE float join(Bf16 weight, std::int16_t residual) {
    const std::uint32_t high = static_cast<std::uint32_t>(weight.bits) << 16;
    return std::bit_cast<float>(high + static_cast<std::uint32_t>(std::int32_t{residual}));
}

OFFLOAD_INLINE void split(float master, Bf16* weight, std::int16_t* residual) {
    std::uint32_t bits = std::bit_cast<std::uint32_t>(master);
    bits = is_nan(bits) ? kNanBf16 << 16 : bits;
    weight->bits = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
    *residual = static_cast<std::int16_t>(bits & 0xFFFFu);  // the low half, read as signed
}

}  // namespace offload
