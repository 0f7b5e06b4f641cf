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

template <class Out, class Grad, bool kAdd>
struct Accumulate {
    struct Args {
        Out* out;
        const Grad* grad;
        double* sums;  // (ceil(numel / kBlock),)
    };

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        for (; begin < end; begin += kBlock) {
            const std::size_t numel = std::min(kBlock, end - begin);
            Out* out = args.out + begin;
            const Grad* grad = args.grad + begin;
#pragma GCC ivdep
            for (std::size_t i = 0; i < numel; ++i) {
                const float g = to_float(grad[i]);
                store(&out[i], kAdd ? to_float(out[i]) + g : g);
            }
            args.sums[begin / kBlock] = block_sum(out, numel);
        }
    }
};

template <class Value>
struct SumSquares {
    struct Args {
        const Value* values;
        double* sums;  // (ceil(numel / kBlock),)
    };

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        for (; begin < end; begin += kBlock) {
            const std::size_t numel = std::min(kBlock, end - begin);
            args.sums[begin / kBlock] = block_sum(args.values + begin, numel);
        }
    }
};

// Calls `run` with room for one sum per block, and adds the sums up in order.
template <class Run>
double add_up_blocks(std::size_t numel, Run run) {
    std::vector<double> sums((numel + kBlock - 1) / kBlock);
    run(sums.data());
    const DefaultRounding rounding;
    double total = 0.0;
    for (const double sum : sums) total += sum;
    return total;
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
double accumulate(Out* out, const Grad* grad, std::size_t numel, bool add) {
    return add_up_blocks(numel, [&](double* sums) {
        if (add) {
            run_body<Accumulate<Out, Grad, true>>({out, grad, sums}, numel);
        } else {
            run_body<Accumulate<Out, Grad, false>>({out, grad, sums}, numel);
        }
    });
}

template <class Value>
double sum_squares(const Value* values, std::size_t numel) {
    return add_up_blocks(numel,
                         [&](double* sums) { run_body<SumSquares<Value>>({values, sums}, numel); });
}

#define OFFLOAD_SUMS(Out)                                              \
    template double accumulate(Out*, const float*, std::size_t, bool); \
    template double accumulate(Out*, const Bf16*, std::size_t, bool);  \
    template double accumulate(Out*, const Fp16*, std::size_t, bool);  \
    template double sum_squares(const Out*, std::size_t)

OFFLOAD_SUMS(float);
OFFLOAD_SUMS(Bf16);
OFFLOAD_SUMS(Fp16);

}  // namespace offload
