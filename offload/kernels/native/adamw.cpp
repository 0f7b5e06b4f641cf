// The formulas are those of torch.optim.AdamW and torch.optim.Adam for one tensor (foreach=False,
// fused=False), after Loshchilov & Hutter, "Decoupled Weight Decay Regularization", 2019:
//
//     p   = p * (1 - lr * weight_decay)          decoupled; else g = g + weight_decay * p
//     m   = m + (1 - beta1) * (g - m)            Tensor.lerp_
//     v   = v * beta2 + (1 - beta2) * g * g      Tensor.addcmul_
//     p   = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// Scalars are computed in double and rounded to float once, as torch does.
#include <algorithm>
#include <cmath>

#include "update_body.h"

namespace offload {
namespace {

// Whether weight decay is added to the gradient. Without decay both kinds are the same, but 0 * p
// would be NaN for an infinite weight.
bool has_l2(const double* settings) { return settings[7] == 0.0 && settings[4] != 0.0; }

float lerp_weight(const double* settings) { return static_cast<float>(1.0 - settings[1]); }

// Whether Tensor.lerp_ starts from the gradient: it changes its formula there.
bool lerps_from_grad(const double* settings) { return std::fabs(lerp_weight(settings)) >= 0.5f; }

// `kChooses`: for both kinds of decay and any beta1. Otherwise for segments without L2 and with a
// beta1 of at least a half, which saves a quarter of the operations.
template <bool kChooses>
struct AdamW {
    static constexpr int kMoments = 2;
    static constexpr bool kRoots[2] = {false, true};

    struct Scalars {
        explicit Scalars(const double* s) {
            const double lr = s[0], beta1 = s[1], beta2 = s[2], decay = s[4], step = s[5];
            eps = static_cast<float>(s[3]);
            grad_scale = static_cast<float>(s[6]);
            l2 = choice(has_l2(s));
            keep = has_l2(s) ? 1.0f : static_cast<float>(1.0 - lr * decay);
            weight_decay = static_cast<float>(decay);
            one_minus_beta2 = static_cast<float>(1.0 - beta2);
            this->beta2 = static_cast<float>(beta2);
            root_correction2 = static_cast<float>(std::sqrt(1.0 - std::pow(beta2, step)));
            minus_step_size = static_cast<float>(-(lr / (1.0 - std::pow(beta1, step))));
            const float weight = lerp_weight(s);
            lerp_from_grad = choice(lerps_from_grad(s));
            lerp_factor = lerps_from_grad(s) ? -(1.0f - weight) : weight;
        }

        float grad_scale;
        float keep;  // of the weight, after decoupled decay
        float weight_decay;
        float lerp_factor;
        float beta2;
        float one_minus_beta2;
        float root_correction2;
        float eps;
        float minus_step_size;
        Choice lerp_from_grad;
        Choice l2;
    };

    OFFLOAD_INLINE static float step(const Scalars& k, float p, float g, float& m, float& v) {
        g = g * k.grad_scale;
        float base = m;
        if constexpr (kChooses) {
            const float with_decay = g + k.weight_decay * p;
            g = choose(k.l2, with_decay, g);
            base = choose(k.lerp_from_grad, g, m);
        }
        p = p * k.keep;
        m = base + k.lerp_factor * (g - m);
        v = v * k.beta2 + k.one_minus_beta2 * g * g;
        const float denominator = std::sqrt(v) / k.root_correction2 + k.eps;
        return p + k.minus_step_size * m / denominator;
    }
};

}  // namespace

void adamw(const Buffers& buffers, const std::vector<Segment>& segments) {
    const bool chooses = std::any_of(segments.begin(), segments.end(), [](const Segment& each) {
        return has_l2(each.settings) || lerps_from_grad(each.settings);
    });
    if (chooses) return run_update<AdamW<true>>(buffers, segments);
    run_update<AdamW<false>>(buffers, segments);
}

}  // namespace offload
