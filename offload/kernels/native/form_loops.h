// The loops between the forms of a tile and fp32. Each is compiled for each instruction set.
#pragma once

#include "tile.h"
#include "update.h"

namespace offload {

// -- in order: see `Forms` ------------------------------------------------------------------------

struct LoadFp32Weights {
    OFFLOAD_INLINE static float* run(const Buffers& at, float*) {
        return static_cast<float*>(at.weight);
    }
};

struct LoadFp16Weights {
    OFFLOAD_INLINE static float* run(const Buffers& at, float*) {
        prefetch_next<kTile>(static_cast<Fp16*>(at.weight));
        return static_cast<float*>(at.beside);
    }
};

template <class Residual>
struct LoadBf16Weights {
    OFFLOAD_INLINE static float* run(const Buffers& at, float* room) {
        const auto* weight = static_cast<const Bf16*>(at.weight);
        const auto* residual = static_cast<const Residual*>(at.beside);
        for (std::size_t start = 0; start < kTile; start += kAtOnce) {
            prefetch_next<kAtOnce>(weight + start);
            prefetch_next<kAtOnce>(residual + start);
#pragma GCC ivdep
            for (std::size_t j = 0; j < kAtOnce; ++j) {
                const std::size_t i = start + j;
                room[i] = join(weight[i], residual[i]);
            }
        }
        return room;
    }
};

struct LoadFp32Grads {
    OFFLOAD_INLINE static const float* run(const Buffers& at, float*) {
        return static_cast<const float*>(at.grad);
    }
};

template <class Grad>
struct LoadGrads {
    OFFLOAD_INLINE static const float* run(const Buffers& at, float* room) {
        const auto* values = static_cast<const Grad*>(at.grad);
        for (std::size_t start = 0; start < kTile; start += kAtOnce) {
            prefetch_next<kAtOnce>(values + start);
#pragma GCC ivdep
            for (std::size_t j = 0; j < kAtOnce; ++j) room[start + j] = to_float(values[start + j]);
        }
        return room;
    }
};

struct StoreFp16Weights {
    OFFLOAD_INLINE static void run(const Buffers& at, const float* weights, const Noise&,
                                   std::uint32_t) {
        auto* weight = static_cast<Fp16*>(at.weight);
#pragma GCC ivdep
        for (std::size_t i = 0; i < kTile; ++i) store(&weight[i], weights[i]);
    }
};

struct StoreBf16Weights {
    OFFLOAD_INLINE static void run(const Buffers& at, const float* weights, const Noise&,
                                   std::uint32_t) {
        auto* weight = static_cast<Bf16*>(at.weight);
        auto* residual = static_cast<std::int16_t*>(at.beside);
#pragma GCC ivdep
        for (std::size_t i = 0; i < kTile; ++i) split(weights[i], &weight[i], &residual[i]);
    }
};

struct StoreBf24Weights {
    OFFLOAD_INLINE static void run(const Buffers& at, const float* weights, const Noise& given,
                                   std::uint32_t element) {
        const Noise noise = given;
        auto* weight = static_cast<Bf16*>(at.weight);
        auto* residual = static_cast<std::int8_t*>(at.beside);
#pragma GCC ivdep
        for (std::size_t i = 0; i < kTile; ++i, ++element) {
            split(weights[i], random_bits(noise, element), &weight[i], &residual[i]);
        }
    }
};

// -- in pairs: see [Note: pairs] ------------------------------------------------------------------

OFFLOAD_INLINE void take_apart(const float* values, float* room) {
    for (std::size_t start = 0; start < kTile; start += 2 * kPairsAtOnce) {
        prefetch_next<2 * kPairsAtOnce>(values + start);
#pragma GCC ivdep
        for (std::size_t j = 0; j < kPairsAtOnce; ++j) {
            const std::size_t i = start / 2 + j;
            room[i] = values[2 * i];
            room[kHalf + i] = values[2 * i + 1];
        }
    }
}

OFFLOAD_INLINE void put_together(const float* values, float* to) {
#pragma GCC ivdep
    for (std::size_t i = 0; i < kHalf; ++i) {
        to[2 * i] = values[i];
        to[2 * i + 1] = values[kHalf + i];
    }
}

struct LoadFp32WeightPairs {
    OFFLOAD_INLINE static float* run(const Buffers& at, float* room) {
        take_apart(static_cast<const float*>(at.weight), room);
        return room;
    }
};

struct LoadFp16WeightPairs {
    OFFLOAD_INLINE static float* run(const Buffers& at, float* room) {
        prefetch_next<kTile>(static_cast<Fp16*>(at.weight));
        take_apart(static_cast<const float*>(at.beside), room);
        return room;
    }
};

// The lower half of a word with a sign, shifted to the lower bits, and the upper half.
OFFLOAD_INLINE std::uint32_t first_signed(std::uint32_t pair) {
    return static_cast<std::uint32_t>(static_cast<std::int32_t>(pair << 16) >> 16);
}
OFFLOAD_INLINE std::uint32_t second_signed(std::uint32_t pair) {
    return static_cast<std::uint32_t>(static_cast<std::int32_t>(pair) >> 16);
}

struct LoadBf16WeightPairs {
    OFFLOAD_INLINE static float* run(const Buffers& at, float* room) {
        const auto* weight = static_cast<const Bf16*>(at.weight);
        const auto* residual = static_cast<const std::int16_t*>(at.beside);
        for (std::size_t start = 0; start < kTile; start += 2 * kPairsAtOnce) {
            prefetch_next<2 * kPairsAtOnce>(weight + start);
            prefetch_next<2 * kPairsAtOnce>(residual + start);
#pragma GCC ivdep
            for (std::size_t j = 0; j < kPairsAtOnce; ++j) {
                const std::size_t i = start / 2 + j;
                const std::uint32_t high = load_pair(weight + 2 * i);
                const std::uint32_t low = load_pair(residual + 2 * i);
                room[i] = std::bit_cast<float>((high << 16) + first_signed(low));
                room[kHalf + i] = std::bit_cast<float>((high & 0xFFFF0000u) + second_signed(low));
            }
        }
        return room;
    }
};

struct LoadBf24WeightPairs {
    OFFLOAD_INLINE static float* run(const Buffers& at, float* room) {
        const auto* weight = static_cast<const Bf16*>(at.weight);
        const auto* residual = static_cast<const std::int8_t*>(at.beside);
        for (std::size_t start = 0; start < kTile; start += 2 * kPairsAtOnce) {
            prefetch_next<2 * kPairsAtOnce>(weight + start);
            prefetch_next<2 * kPairsAtOnce>(residual + start);
#pragma GCC ivdep
            for (std::size_t j = 0; j < kPairsAtOnce; ++j) {
                const std::size_t i = start / 2 + j;
                room[i] = join(weight[2 * i], residual[2 * i]);
                room[kHalf + i] = join(weight[2 * i + 1], residual[2 * i + 1]);
            }
        }
        return room;
    }
};

struct LoadFp32GradPairs {
    OFFLOAD_INLINE static const float* run(const Buffers& at, float* room) {
        take_apart(static_cast<const float*>(at.grad), room);
        return room;
    }
};

template <class Grad>
struct LoadGradPairs {
    OFFLOAD_INLINE static const float* run(const Buffers& at, float* room) {
        const auto* values = static_cast<const Grad*>(at.grad);
        for (std::size_t start = 0; start < kTile; start += 2 * kPairsAtOnce) {
            prefetch_next<2 * kPairsAtOnce>(values + start);
#pragma GCC ivdep
            for (std::size_t j = 0; j < kPairsAtOnce; ++j) {
                const std::size_t i = start / 2 + j;
                const std::uint32_t pair = load_pair(values + 2 * i);
                room[i] = first_of(Grad{}, pair);
                room[kHalf + i] = second_of(Grad{}, pair);
            }
        }
        return room;
    }
};

struct StoreFp32WeightPairs {
    OFFLOAD_INLINE static void run(const Buffers& at, const float* weights, const Noise&,
                                   std::uint32_t) {
        put_together(weights, static_cast<float*>(at.weight));
    }
};

struct StoreFp16WeightPairs {
    OFFLOAD_INLINE static void run(const Buffers& at, const float* weights, const Noise&,
                                   std::uint32_t) {
        put_together(weights, static_cast<float*>(at.beside));
        auto* weight = static_cast<Fp16*>(at.weight);
#pragma GCC ivdep
        for (std::size_t i = 0; i < kHalf; ++i) {
            store_pair(weight + 2 * i, half_bits(weights[i]) | half_bits(weights[kHalf + i]) << 16);
        }
    }
};

struct StoreBf16WeightPairs {
    OFFLOAD_INLINE static void run(const Buffers& at, const float* weights, const Noise&,
                                   std::uint32_t) {
        auto* weight = static_cast<Bf16*>(at.weight);
        auto* residual = static_cast<std::int16_t*>(at.beside);
#pragma GCC ivdep
        for (std::size_t i = 0; i < kHalf; ++i) {
            const std::uint32_t first = kept_bits(weights[i]);
            const std::uint32_t second = kept_bits(weights[kHalf + i]);
            store_pair(weight + 2 * i, pair_of_uppers(first + kHalfUp, second + kHalfUp));
            store_pair(residual + 2 * i, pair_of_lowers(first, second));
        }
    }
};

struct StoreBf24WeightPairs {
    OFFLOAD_INLINE static void run(const Buffers& at, const float* weights, const Noise& given,
                                   std::uint32_t element) {
        const Noise noise = given;
        auto* weight = static_cast<Bf16*>(at.weight);
        auto* residual = static_cast<std::int8_t*>(at.beside);
#pragma GCC ivdep
        for (std::size_t i = 0; i < kHalf; ++i, element += 2) {
            const std::uint32_t random[2] = {random_bits(noise, element),
                                             random_bits(noise, element + 1)};
            const std::uint32_t first = kept_bits(weights[i], random[0]);
            const std::uint32_t second = kept_bits(weights[kHalf + i], random[1]);
            store_pair(weight + 2 * i, pair_of_uppers(first + kHalfUp, second + kHalfUp));
            residual[2 * i] = static_cast<std::int8_t>(first >> 8);
            residual[2 * i + 1] = static_cast<std::int8_t>(second >> 8);
        }
    }
};

// -- codes, in pairs ------------------------------------------------------------------------------

OFFLOAD_INLINE std::uint32_t load_two(const Code* codes) {
    std::uint16_t two;
    std::memcpy(&two, codes, sizeof two);
    return two;
}

OFFLOAD_INLINE void store_two(Code* codes, std::int32_t first, std::int32_t second) {
    const auto two = static_cast<std::uint16_t>((first & 0xFF) | second << 8);
    std::memcpy(codes, &two, sizeof two);
}

template <bool kRoot>
struct DecodePairs {
    OFFLOAD_INLINE static void run(const Code* codes, float scale, float* moments) {
        for (std::size_t start = 0; start < kTile; start += 2 * kPairsAtOnce) {
            prefetch_next<2 * kPairsAtOnce>(codes + start);
#pragma GCC ivdep
            for (std::size_t j = 0; j < kPairsAtOnce; ++j) {
                const std::size_t i = start / 2 + j;
                const std::uint32_t two = load_two(codes + 2 * i);
                moments[i] = moment_of<kRoot>(static_cast<float>(lower(two)) * scale);
                moments[kHalf + i] = moment_of<kRoot>(static_cast<float>(upper(two)) * scale);
            }
        }
    }

    OFFLOAD_INLINE static std::int32_t lower(std::uint32_t two) {
        return kRoot ? static_cast<std::int32_t>(two & 0xFFu)
                     : static_cast<std::int32_t>(two << 24) >> 24;
    }
    OFFLOAD_INLINE static std::int32_t upper(std::uint32_t two) {
        return kRoot ? static_cast<std::int32_t>(two >> 8)
                     : static_cast<std::int32_t>(two << 16) >> 24;
    }
};

template <bool kRoot>
struct EncodePairs {
    OFFLOAD_INLINE static float run(const float* values, const std::uint32_t* chances,
                                    Code* codes) {
        const BlockScale of = block_scale<kRoot>(values, kTile);
#pragma GCC ivdep
        for (std::size_t i = 0; i < kHalf; ++i) {
            store_two(codes + 2 * i, code_of<kRoot>(of, values[i], chances[i]),
                      code_of<kRoot>(of, values[kHalf + i], chances[kHalf + i]));
        }
        return of.scale;
    }
};

}  // namespace offload
