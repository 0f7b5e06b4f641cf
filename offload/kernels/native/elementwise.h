// Splitting and joining of masters, accumulation of gradients, and sums of squares.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "bits.h"

namespace offload {

// See [Note: split master].
void split_master(const float* master, Bf16* weight, std::int16_t* residual, std::size_t numel);
void join_master(const Bf16* weight, const std::int16_t* residual, float* master,
                 std::size_t numel);

// See [Note: bf24 master]. Masters are rounded with the noise of a stream, in which the first
// master has the number `element`; without noise, to nearest.
struct MasterNoise {
    std::uint64_t stream;
    std::uint64_t element;
};
void split_bf24(const float* master, Bf16* weight, std::int8_t* residual, std::size_t numel,
                const std::optional<MasterNoise>& noise);
void join_bf24(const Bf16* weight, const std::int8_t* residual, float* master, std::size_t numel);

// out = grad, or out + grad with `add` (in fp32, rounded once to out's type). Returns the sum of
// the squares of the new values of `out` for each `chunk` elements, as if each chunk were summed by
// a call of its own: see [Note: sums]. A chunk is the whole range or more, a multiple of kBlock, or
// a divisor of kChunk.
template <class Out, class Grad>
std::vector<double> accumulate(Out* out, const Grad* grad, std::size_t numel, bool add,
                               std::size_t chunk);

template <class Value>
std::vector<double> sum_squares(const Value* values, std::size_t numel, std::size_t chunk);

}  // namespace offload
