#include <cmath>

#include "update_body.h"

namespace offload {
namespace {

// torch.optim.Adagrad, after Duchi, Hazan & Singer, 2011; the moment is the sum of squares:
//     g = g + weight_decay * p;  s = s + g * g;  p = p - lr / (1 + (t - 1) lr_decay) * g / (sqrt(s)
//     + eps)
struct Adagrad {
    static constexpr int kMoments = 1;
    static constexpr bool kRoots[2] = {true, false};

    struct Scalars {
        explicit Scalars(const double* s)
            : minus_lr(static_cast<float>(-(s[0] / (1.0 + (s[4] - 1.0) * s[1])))),
              eps(static_cast<float>(s[2])),
              weight_decay(static_cast<float>(s[3])),
              grad_scale(static_cast<float>(s[5])),
              decays(choice(s[3] != 0.0)) {}

        float minus_lr;
        float eps;
        float weight_decay;
        float grad_scale;
        Choice decays;
    };

    OFFLOAD_INLINE static float step(const Scalars& k, float p, float g, float& sum, float&) {
        g = g * k.grad_scale;
        const float with_decay = g + k.weight_decay * p;
        g = choose(k.decays, with_decay, g);
        sum = sum + g * g;
        return p + k.minus_lr * g / (std::sqrt(sum) + k.eps);
    }
};

// Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023:
//     p = p * (1 - lr * weight_decay) - lr * sign(beta1 m + (1 - beta1) g);  m = beta2 m + (1 -
//     beta2) g
struct Lion {
    static constexpr int kMoments = 1;
    static constexpr bool kRoots[2] = {false, false};

    struct Scalars {
        explicit Scalars(const double* s)
            : lr(static_cast<float>(s[0])),
              beta1(static_cast<float>(s[1])),
              one_minus_beta1(static_cast<float>(1.0 - s[1])),
              beta2(static_cast<float>(s[2])),
              one_minus_beta2(static_cast<float>(1.0 - s[2])),
              keep(static_cast<float>(1.0 - s[0] * s[3])),
              grad_scale(static_cast<float>(s[4])) {}

        float lr;
        float beta1;
        float one_minus_beta1;
        float beta2;
        float one_minus_beta2;
        float keep;
        float grad_scale;
    };

    OFFLOAD_INLINE static float step(const Scalars& k, float p, float g, float& m, float&) {
        g = g * k.grad_scale;
        const float direction = k.beta1 * m + k.one_minus_beta1 * g;
        m = k.beta2 * m + k.one_minus_beta2 * g;
        const float down = direction > 0.0f ? k.lr : 0.0f;
        const float up = direction < 0.0f ? k.lr : 0.0f;
        // NaN has no sign, and must not be taken for zero.
        const float moved = direction == direction ? p * k.keep - down + up : direction;
        return moved;
    }
};

// torch.optim.SGD with momentum (Sutskever et al., 2013); the moment is the momentum buffer:
//     g = g + weight_decay * p;  b = momentum b + (1 - dampening) g, or g at the first step;
//     p = p - lr * (nesterov ? g + momentum b : b)
// A group or a step may have no momentum. Then torch leaves the buffer as it is: p = p - lr * g
struct Sgd {
    static constexpr int kMoments = 1;
    static constexpr bool kRoots[2] = {false, false};

    struct Scalars {
        explicit Scalars(const double* s)
            : minus_lr(static_cast<float>(-s[0])),
              momentum(static_cast<float>(s[1])),
              one_minus_dampening(static_cast<float>(1.0 - s[2])),
              weight_decay(static_cast<float>(s[3])),
              grad_scale(static_cast<float>(s[6])),
              nesterov(choice(s[4] != 0.0)),
              first(choice(s[5] != 0.0)),
              decays(choice(s[3] != 0.0)),
              moves(choice(s[1] != 0.0)) {}

        float minus_lr;
        float momentum;
        float one_minus_dampening;
        float weight_decay;
        float grad_scale;
        Choice nesterov;
        Choice first;
        Choice decays;
        Choice moves;
    };

    OFFLOAD_INLINE static float step(const Scalars& k, float p, float g, float& buffer, float&) {
        g = g * k.grad_scale;
        const float with_decay = g + k.weight_decay * p;
        g = choose(k.decays, with_decay, g);
        const float next = k.momentum * buffer + k.one_minus_dampening * g;
        buffer = choose(k.moves, choose(k.first, g, next), buffer);
        const float ahead = g + k.momentum * buffer;
        return p + k.minus_lr * choose(k.moves, choose(k.nesterov, ahead, buffer), g);
    }
};

// torch.optim.SGD without momentum: g = g + weight_decay * p;  p = p - lr * g
struct PlainSgd {
    static constexpr int kMoments = 0;
    static constexpr bool kRoots[2] = {false, false};

    struct Scalars {
        explicit Scalars(const double* s)
            : minus_lr(static_cast<float>(-s[0])),
              weight_decay(static_cast<float>(s[1])),
              grad_scale(static_cast<float>(s[2])),
              decays(choice(s[1] != 0.0)) {}

        float minus_lr;
        float weight_decay;
        float grad_scale;
        Choice decays;
    };

    OFFLOAD_INLINE static float step(const Scalars& k, float p, float g, float&, float&) {
        g = g * k.grad_scale;
        const float with_decay = g + k.weight_decay * p;
        return p + k.minus_lr * choose(k.decays, with_decay, g);
    }
};

}  // namespace

void adagrad(const Buffers& buffers, const std::vector<Segment>& segments) {
    run_update<Adagrad>(buffers, segments);
}

void lion(const Buffers& buffers, const std::vector<Segment>& segments) {
    run_update<Lion>(buffers, segments);
}

void sgd(const Buffers& buffers, const std::vector<Segment>& segments) {
    run_update<Sgd>(buffers, segments);
}

void plain_sgd(const Buffers& buffers, const std::vector<Segment>& segments) {
    run_update<PlainSgd, Writes::kAll>(buffers, segments);
}

}  // namespace offload
