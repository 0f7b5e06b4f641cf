// Block formats of frozen weights: values as codes of 4 or 8 bits with a scale for each block.
//
// [Note: block formats] A block is its codes followed by its scale, which is the largest magnitude
// of the block as bf16. Blocks are consecutive, so that a range of blocks is a range of bytes:
//     nf4   64 values: 32 bytes, the first value of each byte in its high bits; 2 bytes of scale
//     int8  128 values: 128 signed bytes; 2 bytes of scale
// The last block is padded with codes of zero. A value is one product, rounded once to fp32 and
// once to the type of the weights: kNf4[code] * scale, or code * (scale * (1 / 127)).
#pragma once

#include <cstddef>
#include <cstdint>

#include "bits.h"

namespace offload {

enum class Format { kNf4 = 0, kInt8 = 1 };

// `blocks` are the bytes of `numel` values.
template <class Value>
void quantize(Format format, const Value* values, std::uint8_t* blocks, std::size_t numel);

template <class Value>
void dequantize(Format format, const std::uint8_t* blocks, Value* values, std::size_t numel);

}  // namespace offload
