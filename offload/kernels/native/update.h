// One fused pass over the arrays of a partition: unscale, decay, moments, step, and the compute
// weight. In place, on the calling thread and the team.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace offload {

enum class Element { kFloat, kBf16, kFp16, kCode, kBf24 };

// Which arrays a step writes. A step that writes the weights, and then one that writes the moments,
// give the bits of one that writes all, if the moments do not depend on the weight.
enum class Writes { kAll, kWeights, kMoments };

// Arrays of `numel` elements, which must not overlap. `beside` depends on the dtype of the weight:
//     fp32   none: the weight is its own master
//     bf16   `beside` is the residual, int16: see [Note: split master]
//     bf24   the same with a residual of int8: see [Note: bf24 master]
//     fp16   `beside` is the master, fp32
struct Buffers {
    void* weight;
    Element weight_type;
    void* beside;
    void* moments[2];  // as many as the rule has; fp32, bf16, or codes
    Element moment_type;
    float* scales;  // of codes: for each block one of each moment; else null
    const void* grad;
    Element grad_type;
    std::size_t numel;
    Writes writes = Writes::kAll;  // all, for a rule without moments and for both passes of LAMB
};

inline constexpr std::size_t kSettings = 8;

// Elements [start, stop) with the hyperparameters of one step, in the order that the rule
// documents. bf16 moments, codes and bf24 masters are rounded with the noise of `stream`, in which
// `start` has the number `element`: see [Note: stochastic rounding]. With codes, `start` and
// `element` are multiples of a block, and no other segment has elements of a block of this one.
struct Segment {
    std::size_t start;
    std::size_t stop;
    double settings[kSettings];
    std::uint64_t stream;
    std::uint64_t element;
};

// Segments are ordered and disjoint; elements outside of them are left alone. Results do not depend
// on how a partition is divided into segments or calls.
using Rule = void (*)(const Buffers&, const std::vector<Segment>&);

// lr, beta1, beta2, eps, weight_decay, step (from 1), grad_scale, decoupled (0: L2)
void adamw(const Buffers& buffers, const std::vector<Segment>& segments);
// lr, lr_decay, eps, weight_decay, step (from 1), grad_scale
void adagrad(const Buffers& buffers, const std::vector<Segment>& segments);
// lr, beta1, beta2, weight_decay, grad_scale
void lion(const Buffers& buffers, const std::vector<Segment>& segments);
// lr, momentum, dampening, weight_decay, nesterov, first (the momentum is set to the gradient),
// grad_scale
void sgd(const Buffers& buffers, const std::vector<Segment>& segments);
// lr, weight_decay, grad_scale: without a moment
void plain_sgd(const Buffers& buffers, const std::vector<Segment>& segments);
// lr, beta1, beta2, eps, weight_decay, step (from 1), grad_scale, ratio: the second pass of LAMB
void lamb_move(const Buffers& buffers, const std::vector<Segment>& segments);
// The lower bound of a step's time: reads every array of AdamW, and writes the arrays that AdamW
// writes, unchanged. The scales of codes are left out.
void probe(const Buffers& buffers, const std::vector<Segment>& segments);

// The first pass of LAMB over one segment: its moments, and the sums of the squares of weights and
// directions for each block of 4096 elements from its start: (ceil(numel / 4096), 2).
void lamb_moments(const Buffers& buffers, const Segment& segment, double* sums);

}  // namespace offload
