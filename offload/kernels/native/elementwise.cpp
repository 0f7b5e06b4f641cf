#include "elementwise.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "noise.h"
#include "sums_body.h"

namespace offload {
namespace {

struct Split {
    struct Args {
        const float* master;
        Bf16* weight;
        std::int16_t* residual;
    };

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        const Args a = args;
#pragma GCC ivdep
        for (std::size_t i = begin; i < end; ++i) split(a.master[i], &a.weight[i], &a.residual[i]);
    }
};

// Masters of elements that have one key of their noise.
template <bool kNearest>
struct SplitBf24 {
    struct Args {
        const float* master;
        Bf16* weight;
        std::int8_t* residual;
        Noise noise;
    };

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        const Args a = args;
#pragma GCC ivdep
        for (std::size_t i = begin; i < end; ++i) {
            const std::uint32_t random =
                kNearest ? kNearestBf24
                         : random_bits(a.noise, a.noise.shift + static_cast<std::uint32_t>(i));
            split(a.master[i], random, &a.weight[i], &a.residual[i]);
        }
    }
};

template <class Residual>
struct Join {
    struct Args {
        const Bf16* weight;
        const Residual* residual;
        float* master;
    };

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        const Args a = args;
#pragma GCC ivdep
        for (std::size_t i = begin; i < end; ++i) a.master[i] = join(a.weight[i], a.residual[i]);
    }
};

// A range of elements with one sum. A chunk begins a block, and only its last one may be shorter.
struct Block {
    std::size_t numel;
    std::size_t number;
};

OFFLOAD_INLINE std::size_t blocks_in(std::size_t numel) { return (numel + kBlock - 1) / kBlock; }

// The block that begins at element `begin` of a range cut into chunks, as far as `end`.
OFFLOAD_INLINE Block block_at(std::size_t chunk, std::size_t begin, std::size_t end) {
    const std::size_t first = begin % chunk;
    return {std::min({kBlock, chunk - first, end - begin}),
            begin / chunk * blocks_in(chunk) + first / kBlock};
}

template <class Out, class Grad, bool kAdd>
struct Accumulate {
    struct Args {
        Out* out;
        const Grad* grad;
        std::size_t chunk;
        double* sums;  // of each block of each chunk
    };

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        while (begin < end) {
            const Block block = block_at(args.chunk, begin, end);
            Out* out = args.out + begin;
            const Grad* grad = args.grad + begin;
#pragma GCC ivdep
            for (std::size_t i = 0; i < block.numel; ++i) {
                const float g = to_float(grad[i]);
                store(&out[i], kAdd ? to_float(out[i]) + g : g);
            }
            args.sums[block.number] = block_sum(out, block.numel);
            begin += block.numel;
        }
    }
};

template <class Value>
struct SumSquares {
    struct Args {
        const Value* values;
        std::size_t chunk;
        double* sums;  // of each block of each chunk
    };

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        while (begin < end) {
            const Block block = block_at(args.chunk, begin, end);
            args.sums[block.number] = block_sum(args.values + begin, block.numel);
            begin += block.numel;
        }
    }
};

// Calls `run` with the chunk and room for one sum per block; adds up the sums of each chunk in
// order.
template <class Run>
std::vector<double> add_up_blocks(std::size_t numel, std::size_t chunk, Run run) {
    if (numel == 0) return {};
    chunk = std::min(chunk, numel);
    if (chunk < numel && chunk % kBlock != 0 && (chunk == 0 || kChunk % chunk != 0)) {
        throw std::invalid_argument("a thread's share would end within a block of a chunk of " +
                                    std::to_string(chunk));
    }
    const std::size_t chunks = (numel + chunk - 1) / chunk, blocks = blocks_in(chunk);
    // Both before anything is added: a call that finds no memory has changed nothing.
    std::vector<double> sums(chunks * blocks), totals(chunks);
    run(chunk, sums.data());
    const DefaultRounding rounding;
    for (std::size_t number = 0; number < sums.size(); ++number) {
        totals[number / blocks] += sums[number];  // 0 for the blocks that the last chunk lacks
    }
    return totals;
}

std::atomic<Isa> chosen_isa{Isa::kScalar};
constexpr std::string_view kIsaNames[] = {"scalar", "avx2", "avx512", "neon"};

}  // namespace

std::vector<std::string_view> supported_isas() {
    std::vector<std::string_view> names = {"scalar"};
#if OFFLOAD_X86
    if (__builtin_cpu_supports("avx2")) names.push_back("avx2");
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        names.push_back("avx512");
    }
#elif defined(__aarch64__)
    names.push_back("neon");
#endif
    return names;
}

void set_isa(std::string_view name) {
    for (const std::string_view supported : supported_isas()) {
        if (supported != name) continue;
        const auto* found = std::find(std::begin(kIsaNames), std::end(kIsaNames), name);
        chosen_isa.store(static_cast<Isa>(found - std::begin(kIsaNames)));
        return;
    }
    throw std::invalid_argument("this machine does not support " + std::string(name));
}

Isa active_isa() { return chosen_isa.load(std::memory_order_relaxed); }

void split_master(const float* master, Bf16* weight, std::int16_t* residual, std::size_t numel) {
    run_body<Split>({master, weight, residual}, numel);
}

void join_master(const Bf16* weight, const std::int16_t* residual, float* master,
                 std::size_t numel) {
    run_body<Join<std::int16_t>>({weight, residual, master}, numel);
}

void split_bf24(const float* master, Bf16* weight, std::int8_t* residual, std::size_t numel,
                const std::optional<MasterNoise>& noise) {
    if (!noise) return run_body<SplitBf24<true>>({master, weight, residual, {}}, numel);
    const std::uint64_t stream = master_stream(noise->stream);
    each_key(noise->element, numel, [&](std::size_t start, std::size_t stop, std::uint64_t first) {
        run_body<SplitBf24<false>>(
            {master + start, weight + start, residual + start, noise_of(stream, first, 0)},
            stop - start);
    });
}

void join_bf24(const Bf16* weight, const std::int8_t* residual, float* master, std::size_t numel) {
    run_body<Join<std::int8_t>>({weight, residual, master}, numel);
}

template <class Out, class Grad>
std::vector<double> accumulate(Out* out, const Grad* grad, std::size_t numel, bool add,
                               std::size_t chunk) {
    return add_up_blocks(numel, chunk, [&](std::size_t cut, double* sums) {
        if (add) {
            run_body<Accumulate<Out, Grad, true>>({out, grad, cut, sums}, numel);
        } else {
            run_body<Accumulate<Out, Grad, false>>({out, grad, cut, sums}, numel);
        }
    });
}

template <class Value>
std::vector<double> sum_squares(const Value* values, std::size_t numel, std::size_t chunk) {
    return add_up_blocks(numel, chunk, [&](std::size_t cut, double* sums) {
        run_body<SumSquares<Value>>({values, cut, sums}, numel);
    });
}

#define OFFLOAD_SUMS(Out)                                                                        \
    template std::vector<double> accumulate(Out*, const float*, std::size_t, bool, std::size_t); \
    template std::vector<double> accumulate(Out*, const Bf16*, std::size_t, bool, std::size_t);  \
    template std::vector<double> accumulate(Out*, const Fp16*, std::size_t, bool, std::size_t);  \
    template std::vector<double> sum_squares(const Out*, std::size_t, std::size_t)

OFFLOAD_SUMS(float);
OFFLOAD_SUMS(Bf16);
OFFLOAD_SUMS(Fp16);

}  // namespace offload
