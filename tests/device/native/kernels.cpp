// Kernels of the device's own: where a GPU's does what the CPU's lacks, and where torch asks each
// device for one.
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/mul.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "tensors.h"

namespace testdevice {
namespace {

// The CPU's dropout multiplies by noise / (1 - p), where a GPU's kernel multiplies by a mask and a
// scale. The device has the CPU's bits.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool>) {
    at::Tensor noise = at::empty(input.sizes(), input.options().device(at::kCPU));
    {
        Plain plain;
        noise.bernoulli_(1 - p);
    }
    at::Tensor mask = make(input.sizes(), noise.strides(), at::kBool);
    queue_from(mask, noise.to(at::kBool));
    at::Tensor output = make(input.sizes(), noise.strides(), input.scalar_type());
    submit([to = over(output), from = over(input), noise, p] {
        Plain plain;
        to.copy_(at::mul(from, noise.div_(1 - p)));
    });
    return {output, mask};
}

at::Tensor dropout_backward(const at::Tensor& gradient, const at::Tensor& mask, double scale) {
    at::Tensor result = make(gradient.sizes(), mask.strides(), gradient.scalar_type());
    submit([to = over(result), from = over(gradient), mask = over(mask), scale] {
        Plain plain;
        to.copy_(at::mul(from, mask.to(from.scalar_type()).div_(1 / scale)));
    });
    return result;
}

// The CPU counts floating-point values alone, CUDA integers as well.
at::Tensor histogram(const at::Tensor& values, int64_t bins, const at::Scalar& min,
                     const at::Scalar& max) {
    at::Tensor counts = make({bins}, {1}, values.scalar_type());
    submit([to = over(counts), from = over(values), bins, min, max] {
        Plain plain;
        const bool whole = at::isIntegralType(from.scalar_type(), false);
        to.copy_(at::histc(whole ? from.to(at::kDouble) : from, bins, min, max));
    });
    return counts;
}

int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped) {
    return at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout, causal, scale,
                                             grouped);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("histc", histogram);
    m.impl("native_dropout", dropout);
    m.impl("native_dropout_backward", dropout_backward);
    m.impl("_fused_sdp_choice", choose_attention);
}

}  // namespace testdevice

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &testdevice::choose_attention)
}
