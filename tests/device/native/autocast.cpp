// Autocast, by the lists of the CPU: what it computes in 16 bits, in fp32, and in the widest dtype
// of its arguments.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>
#include <unordered_set>

#include "tensors.h"

namespace testdevice {
namespace {

constexpr auto kKey = c10::DispatchKey::AutocastPrivateUse1;

const std::unordered_set<std::string> kIn16Bits{
    "aten::conv1d",
    "aten::conv2d",
    "aten::conv3d",
    "aten::conv_tbc",
    "aten::conv_transpose1d",
    "aten::conv_transpose2d",
    "aten::conv_transpose3d",
    "aten::_convolution",
    "aten::bmm",
    "aten::mm",
    "aten::matmul",
    "aten::baddbmm",
    "aten::addmm",
    "aten::addbmm",
    "aten::linear",
    "aten::linalg_vecdot",
    "aten::prelu",
    "aten::scaled_dot_product_attention",
    "aten::_native_multi_head_attention",
};
const std::unordered_set<std::string> kInTheWidest{"aten::stack", "aten::cat", "aten::index_copy"};

void each_tensor(c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
    if (value.isTensor()) {
        if (value.toTensor().defined()) value = change(value.toTensor());
    } else if (value.isTensorList()) {
        c10::List<at::Tensor> tensors;
        for (const at::Tensor& each : value.toTensorVector()) tensors.push_back(change(each));
        value = tensors;
    }
}

void cast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const c10::impl::ExcludeDispatchKeyGuard without(kKey);
    const size_t count = op.schema().arguments().size();
    const std::string& name = op.schema().name();
    const at::ScalarType low = at::autocast::get_autocast_dtype(kDevice);
    at::ScalarType wanted = kIn16Bits.count(name) ? low : at::kFloat;
    if (kInTheWidest.count(name)) {
        wanted = low;
        for (size_t index = stack->size() - count; index < stack->size(); ++index) {
            each_tensor((*stack)[index], [&](const at::Tensor& tensor) {
                if (tensor.scalar_type() == at::kFloat) wanted = at::kFloat;
                return tensor;
            });
        }
    }
    for (size_t index = stack->size() - count; index < stack->size(); ++index) {
        each_tensor((*stack)[index], [&](const at::Tensor& tensor) {
            return at::autocast::cached_cast(wanted, tensor, kDevice);
        });
    }
    op.callBoxed(stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
        const auto op = c10::Dispatcher::singleton().findOp(name);
        if (name.getNamespace() != "aten" || !op || !op->hasSchema()) continue;
        // Not a kernel of the fallback: one of the op's own.
        if (op->hasKernelForDispatchKey(c10::DispatchKey::AutocastCPU)) {
            m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&cast>());
        }
    }
}

}  // namespace testdevice
