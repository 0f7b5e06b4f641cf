// You et al., "Large Batch Optimization for Deep Learning", 2020, with bias correction:
//
//     m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g * g
//     u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * p
//     p = p - lr * ratio * u
//
// The ratio of a parameter is |p| / |u|, so there are two passes: the first updates the moments and
// adds up squares, the second computes u once more and moves the weight.
#include <cmath>
#include <vector>

#include "sums_body.h"
#include "update_body.h"

namespace offload {
namespace {

struct Scalars {
    explicit Scalars(const double* s)
        : beta1(static_cast<float>(s[1])),
          one_minus_beta1(static_cast<float>(1.0 - s[1])),
          beta2(static_cast<float>(s[2])),
          one_minus_beta2(static_cast<float>(1.0 - s[2])),
          eps(static_cast<float>(s[3])),
          weight_decay(static_cast<float>(s[4])),
          correction1(static_cast<float>(1.0 - std::pow(s[1], s[5]))),
          correction2(static_cast<float>(1.0 - std::pow(s[2], s[5]))),
          grad_scale(static_cast<float>(s[6])),
          minus_step_size(static_cast<float>(-(s[0] * s[7]))) {}

    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float eps;
    float weight_decay;
    float correction1;
    float correction2;
    float grad_scale;
    float minus_step_size;
};

OFFLOAD_INLINE float direction(const Scalars& k, float p, float m, float v) {
    return m / k.correction1 / (std::sqrt(v / k.correction2) + k.eps) + k.weight_decay * p;
}

template <class Master, class Moment, class Grad>
struct Moments {
    struct Args {
        Master master;
        Moment* first;
        Moment* second;
        float* scales;  // of codes
        const Grad* grad;
        Scalars scalars;
        std::uint64_t stream;
        std::uint64_t element;  // of the first one
        double* sums;           // (ceil(numel / kBlock), 2): of the squares of p and of u
    };

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        float weights[kBlock];
        float directions[kBlock];
        for (; begin < end; begin += kBlock) {
            const std::size_t numel = std::min(kBlock, end - begin);
            // Once, unless a new key begins within the block.
            for (std::size_t done = 0; done < numel;) {
                const std::uint64_t element = args.element + begin + done;
                const std::uint64_t left = kNoiseRange - element % kNoiseRange;
                const std::size_t count = numel - done > left ? left : numel - done;
                const Noise noise = noise_of(args.stream, element, 0);
                if constexpr (std::is_same_v<Moment, Code>) {
                    update_blocks(args, noise, begin + done, count, weights + done,
                                  directions + done);
                } else {
                    update(args, noise, begin + done, count, weights + done, directions + done);
                }
                done += count;
            }
            args.sums[2 * (begin / kBlock)] = block_sum(weights, numel);
            args.sums[2 * (begin / kBlock) + 1] = block_sum(directions, numel);
        }
    }

    OFFLOAD_INLINE static void update(const Args& args, const Noise& of, std::size_t begin,
                                      std::size_t numel, float* weights, float* directions) {
        const Scalars k = args.scalars;
        const Noise noise = of;
        const Master master = from(args.master, begin);
        Moment* first = args.first + begin;
        Moment* second = args.second + begin;
        const Grad* grad = args.grad + begin;
#pragma GCC ivdep
        for (std::size_t i = 0; i < numel; ++i) {
            const float p = load(master, i);
            const float g = to_float(grad[i]) * k.grad_scale;
            const float m = k.beta1 * to_float(first[i]) + k.one_minus_beta1 * g;
            const float v = k.beta2 * to_float(second[i]) + k.one_minus_beta2 * g * g;
            const std::uint32_t random =
                bits_for<Moment>(noise, noise.shift + static_cast<std::uint32_t>(i));
            store_moment(&first[i], m, random);
            store_moment(&second[i], v, random >> 16);
            weights[i] = p;
            // The second pass reads the moments as they are stored, so the norm is of those.
            directions[i] = direction(k, p, to_float(first[i]), to_float(second[i]));
        }
    }

    // The same for codes. A new key begins at a border of blocks.
    OFFLOAD_INLINE static void update_blocks(const Args& args, const Noise& of, std::size_t begin,
                                             std::size_t numel, float* weights, float* directions) {
        for (std::size_t done = 0; done < numel; done += kMomentBlock) {
            Noise noise = of;
            noise.shift += static_cast<std::uint32_t>(done);
            update_block(args, noise, begin + done, std::min(kMomentBlock, numel - done),
                         weights + done, directions + done);
        }
    }

    OFFLOAD_INLINE static void update_block(const Args& args, const Noise& noise, std::size_t begin,
                                            std::size_t numel, float* weights, float* directions) {
        alignas(64) float m[kMomentBlock];
        alignas(64) float v[kMomentBlock];
        alignas(64) std::uint32_t random[kMomentBlock];
        const Scalars k = args.scalars;
        const Master master = from(args.master, begin);
        Code* first = args.first + begin;
        Code* second = args.second + begin;
        const Grad* grad = args.grad + begin;
        float* scales = args.scales + 2 * (begin / kMomentBlock);
        decode_block<false>(first, scales[0], numel, m);
        decode_block<true>(second, scales[1], numel, v);
#pragma GCC ivdep
        for (std::size_t i = 0; i < numel; ++i) {
            const float g = to_float(grad[i]) * k.grad_scale;
            m[i] = k.beta1 * m[i] + k.one_minus_beta1 * g;
            v[i] = value_of<true>(k.beta2 * v[i] + k.one_minus_beta2 * g * g);
        }
        for (std::size_t i = 0; i < numel; ++i) {
            random[i] = random_bits(noise, noise.shift + static_cast<std::uint32_t>(i));
        }
        scales[0] = encode_block<false>(m, numel, random, 0, first);
        scales[1] = encode_block<true>(v, numel, random, 16, second);
        decode_block<false>(first, scales[0], numel, m);
        decode_block<true>(second, scales[1], numel, v);
#pragma GCC ivdep
        for (std::size_t i = 0; i < numel; ++i) {
            weights[i] = load(master, i);
            directions[i] = direction(k, weights[i], m[i], v[i]);
        }
    }
};

struct Move {
    static constexpr bool kWithoutGrad = true;  // the moments have taken it in the first pass
    static constexpr int kMoments = 2;
    static constexpr bool kRoots[2] = {false, true};
    using Scalars = offload::Scalars;

    OFFLOAD_INLINE static float step(const Scalars& k, float p, float, float& m, float& v) {
        return p + k.minus_step_size * direction(k, p, m, v);
    }
};

}  // namespace

void lamb_moments(const Buffers& b, const Segment& segment, double* sums) {
    with_master(b, [&](auto master) {
        const auto run = [&]<class Moment, class Grad>() {
            run_body<Moments<decltype(master), Moment, Grad>>(
                {from(master, segment.start), static_cast<Moment*>(b.moments[0]) + segment.start,
                 static_cast<Moment*>(b.moments[1]) + segment.start,
                 b.scales == nullptr ? nullptr : b.scales + 2 * (segment.start / kMomentBlock),
                 static_cast<const Grad*>(b.grad) + segment.start, Scalars(segment.settings),
                 segment.stream, segment.element, sums},
                segment.stop - segment.start);
        };
        const auto with_grad = [&]<class Moment>() {
            switch (b.grad_type) {
                case Element::kFloat:
                    return run.template operator()<Moment, float>();
                case Element::kBf16:
                    return run.template operator()<Moment, Bf16>();
                case Element::kFp16:
                    return run.template operator()<Moment, Fp16>();
                case Element::kCode:
                case Element::kBf24:
                    return;  // no gradient is one
            }
        };
        if (b.moment_type == Element::kBf16) return with_grad.template operator()<Bf16>();
        if (b.moment_type == Element::kCode) return with_grad.template operator()<Code>();
        return with_grad.template operator()<float>();
    });
}

void lamb_move(const Buffers& buffers, const std::vector<Segment>& segments) {
    run_update<Move>(buffers, segments);
}

}  // namespace offload
