// Arguments of an operator: the tensors in them, and whether it writes them.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <optional>

namespace testdevice {

using Replace = std::function<at::Tensor(const at::Tensor&, const c10::Argument&)>;

// Returns the value with each of its tensors replaced.
inline c10::IValue replaced(const c10::IValue& value, const c10::Argument& argument,
                            const Replace& replace) {
    if (value.isTensor()) return replace(value.toTensor(), argument);
    if (value.isTensorList()) {
        c10::List<at::Tensor> tensors;
        for (const at::Tensor& each : value.toTensorVector())
            tensors.push_back(replace(each, argument));
        return tensors;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> tensors;
        for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
            tensors.push_back(each ? std::optional(replace(*each, argument)) : std::nullopt);
        }
        return tensors;
    }
    return value;
}

inline bool writes(const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Returns a tensor of the meta device with the same layout.
inline at::Tensor meta_of(const at::Tensor& tensor) {
    // Kernels of the meta device in Python take a number's value.
    if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
    return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

}  // namespace testdevice
