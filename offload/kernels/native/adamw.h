// AdamW and Adam over flat arrays; in place, on the calling thread and the team.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bits.h"

namespace offload {

struct AdamWStep {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    std::int64_t step;  // from 1
    double grad_scale;  // multiplies the gradient
    bool decoupled;     // false: the decay is added to the gradient (L2), as Adam does
};

// A master weight in fp32, or in two halves: see [Note: split master].
struct WholeMaster {
    float* value;
};
struct SplitMaster {
    Bf16* weight;
    std::int16_t* residual;
};

// Updates `numel` weights and their moments by one step. The arrays must not overlap.
template <class Master, class Grad>
void adamw(Master master, float* exp_avg, float* exp_avg_sq, const Grad* grad, std::size_t numel,
           const AdamWStep& step);

}  // namespace offload
