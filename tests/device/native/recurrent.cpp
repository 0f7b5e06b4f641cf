// Cells of recurrent modules, which torch asks of each device but the CPU as one kernel: put
// together of operations that autograd knows.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

#include "tensors.h"

namespace testdevice {
namespace {

at::Tensor with_bias(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
    return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates,
                                            const at::Tensor& hidden_gates,
                                            const at::Tensor& hidden,
                                            const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias) {
    const auto of_input = with_bias(input_gates, input_bias).chunk(3, 1);
    const auto of_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
    const at::Tensor reset = (of_hidden[0] + of_input[0]).sigmoid();
    const at::Tensor update = (of_hidden[1] + of_input[1]).sigmoid();
    const at::Tensor fresh = (of_input[2] + of_hidden[2] * reset).tanh();
    return {(hidden - fresh) * update + fresh, at::empty({0}, hidden.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
    const auto gates =
        (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
    const at::Tensor next = gates[1].sigmoid() * cell + gates[0].sigmoid() * gates[2].tanh();
    return {gates[3].sigmoid() * next.tanh(), next, at::empty({0}, cell.options())};
}

void add(torch::Library& library) {
    library.impl("_thnn_fused_gru_cell", gru_cell);
    library.impl("_thnn_fused_lstm_cell", lstm_cell);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { add(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { add(m); }

}  // namespace testdevice
