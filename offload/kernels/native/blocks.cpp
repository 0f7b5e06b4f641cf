#include "blocks.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "isa.h"

#if OFFLOAD_X86
#include <immintrin.h>
#endif

namespace offload {
namespace {

constexpr std::size_t kScale = 2;  // bytes
constexpr std::size_t kNf4Block = 64, kInt8Block = 128;
constexpr std::size_t kNf4Bytes = kNf4Block / 2 + kScale, kInt8Bytes = kInt8Block + kScale;

// Members of a team begin at a multiple of a chunk, which must be the first value of a block.
static_assert(kChunk % kNf4Block == 0 && kChunk % kInt8Block == 0);

// The code book of QLoRA (arXiv 2305.14314, appendix E).
alignas(64) constexpr float kNf4[16] = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};
constexpr std::uint8_t kNf4Zero = 7;

float load_scale(const std::uint8_t* at) {
    Bf16 scale;
    std::memcpy(&scale.bits, at, kScale);
    return to_float(scale);
}

// Returns the largest magnitude as the scale's type holds it, and stores it. Bits of magnitudes
// are ordered as the magnitudes are; NaNs are above infinity, and make the scale a NaN.
template <class Value>
OFFLOAD_INLINE float take_scale(const Value* values, std::size_t numel, std::uint8_t* at) {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < numel; ++i) {
        const auto bits = std::bit_cast<std::uint32_t>(to_float(values[i])) & 0x7FFFFFFFu;
        largest = std::max(largest, bits);
    }
    Bf16 scale;
    store(&scale, std::bit_cast<float>(largest));
    // The largest finite values of fp32 would round to infinity.
    if (scale.bits == 0x7F80u && largest < 0x7F800000u) scale.bits = 0x7F7Fu;
    std::memcpy(at, &scale.bits, kScale);
    return to_float(scale);
}

// Within [-1, 1], or a little beyond where the scale was rounded down; 0 for a block of zeros.
template <class Value>
OFFLOAD_INLINE float share_of(Value value, float scale) {
    return scale > 0.0f ? to_float(value) / scale : 0.0f;
}

// The code whose value is nearest: the number of borders between codes that are below.
OFFLOAD_INLINE std::uint32_t nf4_code(float share) {
    std::uint32_t code = 0;
    for (int k = 0; k < 15; ++k) code += share > (kNf4[k] + kNf4[k + 1]) * 0.5f ? 1u : 0u;
    return code;
}

// Rounded to the nearest integer, ties to even: the sum has no bits below 1.
OFFLOAD_INLINE std::int8_t int8_code(float share) {
    const float scaled = std::min(std::max(share * 127.0f, -127.0f), 127.0f);
    return static_cast<std::int8_t>(static_cast<std::int32_t>((scaled + 0x1.8p23f) - 0x1.8p23f));
}

template <class Value>
struct QuantizeArgs {
    const Value* values;
    std::uint8_t* blocks;
};

template <class Value>
struct QuantizeNf4 {
    using Args = QuantizeArgs<Value>;

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        for (; begin < end; begin += kNf4Block) {
            const std::size_t numel = std::min(kNf4Block, end - begin);
            const Value* values = args.values + begin;
            std::uint8_t* block = args.blocks + begin / kNf4Block * kNf4Bytes;
            const float scale = take_scale(values, numel, block + kNf4Block / 2);
            alignas(64) std::uint32_t codes[kNf4Block];
            for (std::size_t i = numel; i < kNf4Block; ++i) codes[i] = kNf4Zero;
            for (std::size_t i = 0; i < numel; ++i) codes[i] = nf4_code(share_of(values[i], scale));
            for (std::size_t i = 0; i < kNf4Block / 2; ++i)
                block[i] = static_cast<std::uint8_t>(codes[2 * i] << 4 | codes[2 * i + 1]);
        }
    }
};

template <class Value>
struct QuantizeInt8 {
    using Args = QuantizeArgs<Value>;

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        for (; begin < end; begin += kInt8Block) {
            const std::size_t numel = std::min(kInt8Block, end - begin);
            const Value* values = args.values + begin;
            std::uint8_t* block = args.blocks + begin / kInt8Block * kInt8Bytes;
            const float scale = take_scale(values, numel, block + kInt8Block);
            std::memset(block, 0, kInt8Block);
            for (std::size_t i = 0; i < numel; ++i)
                block[i] = static_cast<std::uint8_t>(int8_code(share_of(values[i], scale)));
        }
    }
};

template <class Value>
struct DequantizeArgs {
    const std::uint8_t* blocks;
    Value* values;
};

template <class Value>
struct DequantizeNf4 {
    using Args = DequantizeArgs<Value>;

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        for (; begin < end; begin += kNf4Block)
            block(args.blocks + begin / kNf4Block * kNf4Bytes, args.values + begin,
                  std::min(kNf4Block, end - begin));
    }

    // The 16 values of a block.
    OFFLOAD_INLINE static void book(const std::uint8_t* from, Value* found) {
        const float scale = load_scale(from + kNf4Block / 2);
        for (std::size_t i = 0; i < 16; ++i) store(&found[i], kNf4[i] * scale);
    }

    OFFLOAD_INLINE static void block(const std::uint8_t* from, Value* values, std::size_t numel) {
        Value found[16];
        book(from, found);
        for (std::size_t i = 0; i + 1 < numel; i += 2) {
            values[i] = found[from[i / 2] >> 4];
            values[i + 1] = found[from[i / 2] & 15];
        }
        if (numel % 2 != 0) values[numel - 1] = found[from[numel / 2] >> 4];
    }
};

template <class Value>
struct DequantizeInt8 {
    using Args = DequantizeArgs<Value>;

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        for (; begin < end; begin += kInt8Block) {
            const std::size_t numel = std::min(kInt8Block, end - begin);
            Value* values = args.values + begin;
            const std::uint8_t* from = args.blocks + begin / kInt8Block * kInt8Bytes;
            const float step = load_scale(from + kInt8Block) * (1.0f / 127.0f);
#pragma GCC ivdep
            for (std::size_t i = 0; i < numel; ++i)
                store(&values[i], static_cast<float>(static_cast<std::int8_t>(from[i])) * step);
        }
    }
};

#if OFFLOAD_X86
// The 16 values of a block, in registers: a store of each and a load of all would wait for each
// other.
OFFLOAD_AVX2 inline __m256i nf4_book(const std::uint8_t* from, Bf16) {
    const __m256 scale = _mm256_set1_ps(load_scale(from + kNf4Block / 2));
    __m256i halves[2];
    for (int half = 0; half < 2; ++half) {
        const __m256 value = _mm256_mul_ps(_mm256_load_ps(kNf4 + 8 * half), scale);
        const __m256i bits = _mm256_castps_si256(value);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded =
            _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7FFF));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
        halves[half] = _mm256_srli_epi32(
            _mm256_blendv_epi8(rounded, _mm256_set1_epi32(kNanBf16 << 16), nan), 16);
    }
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(halves[0], halves[1]), 0xD8);
}

OFFLOAD_AVX2 inline __m256i nf4_book(const std::uint8_t* from, Fp16) {
    alignas(32) Fp16 found[16];
    DequantizeNf4<Fp16>::book(from, found);
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(found));
}

// Values of 16 bits: a shuffle of bytes looks up 16 codes at once, in the low bytes of the block's
// 16 values and in their high bytes.
template <class Value>
OFFLOAD_AVX2 void nf4_by_shuffles(const DequantizeArgs<Value>& args, std::size_t begin,
                                  std::size_t end) {
    static_assert(sizeof(Value) == 2);
    const __m128i low_byte = _mm_set1_epi16(0x00FF), low_bits = _mm_set1_epi8(0x0F);
    for (; begin < end; begin += kNf4Block) {
        const std::uint8_t* from = args.blocks + begin / kNf4Block * kNf4Bytes;
        if (end - begin < kNf4Block) {
            DequantizeNf4<Value>::block(from, args.values + begin, end - begin);
            return;
        }
        const __m256i book = nf4_book(from, Value{});
        const __m128i one = _mm256_castsi256_si128(book);
        const __m128i two = _mm256_extracti128_si256(book, 1);
        const __m128i low =
            _mm_packus_epi16(_mm_and_si128(one, low_byte), _mm_and_si128(two, low_byte));
        const __m128i high = _mm_packus_epi16(_mm_srli_epi16(one, 8), _mm_srli_epi16(two, 8));
        for (std::size_t half = 0; half < 2; ++half) {
            const __m128i codes =
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * half));
            const __m128i even = _mm_and_si128(_mm_srli_epi16(codes, 4), low_bits);
            const __m128i odd = _mm_and_si128(codes, low_bits);
            const __m128i even_low = _mm_shuffle_epi8(low, even);
            const __m128i even_high = _mm_shuffle_epi8(high, even);
            const __m128i odd_low = _mm_shuffle_epi8(low, odd);
            const __m128i odd_high = _mm_shuffle_epi8(high, odd);
            const __m128i evens[2] = {_mm_unpacklo_epi8(even_low, even_high),
                                      _mm_unpackhi_epi8(even_low, even_high)};
            const __m128i odds[2] = {_mm_unpacklo_epi8(odd_low, odd_high),
                                     _mm_unpackhi_epi8(odd_low, odd_high)};
            auto* to = reinterpret_cast<__m128i*>(args.values + begin + 32 * half);
            for (int k = 0; k < 2; ++k) {
                _mm_storeu_si128(to + 2 * k, _mm_unpacklo_epi16(evens[k], odds[k]));
                _mm_storeu_si128(to + 2 * k + 1, _mm_unpackhi_epi16(evens[k], odds[k]));
            }
        }
    }
}
#endif

template <class Value>
void dequantize_nf4(const DequantizeArgs<Value>& args, std::size_t numel) {
#if OFFLOAD_X86
    if constexpr (sizeof(Value) == 2) {
        if (active_isa() == Isa::kAvx2 || active_isa() == Isa::kAvx512) {
            share_out(
                numel,
                [&args](std::size_t begin, std::size_t end) {
                    const DefaultRounding rounding;
                    nf4_by_shuffles(args, begin, end);
                },
                args.values);
            return;
        }
    }
#endif
    run_body<DequantizeNf4<Value>>(args, numel, args.values);
}

}  // namespace

template <class Value>
void quantize(Format format, const Value* values, std::uint8_t* blocks, std::size_t numel) {
    if (format == Format::kNf4) {
        run_body<QuantizeNf4<Value>>({values, blocks}, numel);
    } else {
        run_body<QuantizeInt8<Value>>({values, blocks}, numel);
    }
}

template <class Value>
void dequantize(Format format, const std::uint8_t* blocks, Value* values, std::size_t numel) {
    if (format == Format::kNf4) {
        dequantize_nf4<Value>({blocks, values}, numel);
    } else {
        run_body<DequantizeInt8<Value>>({blocks, values}, numel, values);
    }
}

#define OFFLOAD_BLOCKS(Value)                                                 \
    template void quantize(Format, const Value*, std::uint8_t*, std::size_t); \
    template void dequantize(Format, const std::uint8_t*, Value*, std::size_t)

OFFLOAD_BLOCKS(float);
OFFLOAD_BLOCKS(Bf16);
OFFLOAD_BLOCKS(Fp16);

}  // namespace offload
