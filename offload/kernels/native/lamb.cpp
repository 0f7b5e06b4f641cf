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

template <class Master, class Grad>
struct Moments {
    struct Args {
        Master master;
        float* first;
        float* second;
        const Grad* grad;
        Scalars scalars;
        double* sums;  // (ceil(numel / kBlock), 2): of the squares of p and of u
    };

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        float weights[kBlock];
        float directions[kBlock];
        const Scalars k = args.scalars;
        for (; begin < end; begin += kBlock) {
            const std::size_t numel = std::min(kBlock, end - begin);
            const Master master = from(args.master, begin);
            float* first = args.first + begin;
            float* second = args.second + begin;
            const Grad* grad = args.grad + begin;
#pragma GCC ivdep
            for (std::size_t i = 0; i < numel; ++i) {
                const float p = load(master, i);
                const float g = to_float(grad[i]) * k.grad_scale;
                const float m = k.beta1 * first[i] + k.one_minus_beta1 * g;
                const float v = k.beta2 * second[i] + k.one_minus_beta2 * g * g;
                first[i] = m;
                second[i] = v;
                weights[i] = p;
                directions[i] = direction(k, p, m, v);
            }
            args.sums[2 * (begin / kBlock)] = block_sum(weights, numel);
            args.sums[2 * (begin / kBlock) + 1] = block_sum(directions, numel);
        }
    }
};

struct Move {
    static constexpr int kMoments = 2;
    static constexpr bool kBf16Moments = false;
    using Scalars = offload::Scalars;

    OFFLOAD_INLINE static float step(const Scalars& k, float p, float, float& m, float& v) {
        return p + k.minus_step_size * direction(k, p, m, v);
    }
};

}  // namespace

void lamb_moments(const Buffers& b, const Segment& segment, double* sums) {
    with_master(b, [&](auto master) {
        const auto run = [&]<class Grad>() {
            run_body<Moments<decltype(master), Grad>>(
                {from(master, segment.start), static_cast<float*>(b.moments[0]) + segment.start,
                 static_cast<float*>(b.moments[1]) + segment.start,
                 static_cast<const Grad*>(b.grad) + segment.start, Scalars(segment.settings), sums},
                segment.stop - segment.start);
        };
        switch (b.grad_type) {
            case Element::kFloat:
                return run.template operator()<float>();
            case Element::kBf16:
                return run.template operator()<Bf16>();
            case Element::kFp16:
                return run.template operator()<Fp16>();
        }
    });
}

void lamb_move(const Buffers& buffers, const std::vector<Segment>& segments) {
    run_update<Move>(buffers, segments);
}

}  // namespace offload
