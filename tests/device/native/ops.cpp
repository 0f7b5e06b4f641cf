// Every other operation: the CPU's kernel, queued on the current stream.
//
// The shapes of results come from the kernels of torch's meta device, so the thread that submits an
// operation reads no value. An operation whose results depend on values (`nonzero`, `equal`) waits
// for its stream and runs at once; the counter of such waits is what CUDA's sync-debug mode would
// show.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <string>
#include <unordered_set>

#include "arguments.h"
#include "tensors.h"

namespace testdevice {
namespace {

using torch::jit::Stack;

// Results have shapes that depend on values.
const std::unordered_set<std::string> kNeedsValues{
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::unique_dim_consecutive",
    "aten::repeat_interleave",
    "aten::equal",

    "aten::multinomial",
    "aten::is_nonzero",
    "aten::_linalg_check_errors",
};

// Their kernels on a CPU save what the meta kernels give another dtype or shape: they run on zeros
// to show it.
const std::unordered_set<std::string> kSavesOtherwise{
    "aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm"};

// May be given indices in host memory.
const std::unordered_set<std::string> kTakesHostIndices{
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index"};

// A call of an operator with arguments on the device.
class Call {
  public:
    Call(const c10::OperatorHandle& op, Stack* stack)
        : op_(op), schema_(op.schema()), stack_(*stack), count_(schema_.arguments().size()) {}

    void carry_out() {
        if (draws_numbers()) {
            draw();
        } else if (kNeedsValues.count(schema_.name()) || uses_mask() || has_generator()) {
            run_now();
        } else {
            queue();
        }
    }

  private:
    const c10::IValue& given(size_t index) const { return stack_[stack_.size() - count_ + index]; }
    const c10::Argument& argument(size_t index) const { return schema_.arguments()[index]; }

    std::vector<at::Tensor> tensors(size_t index) const {
        std::vector<at::Tensor> found;
        replaced(given(index), argument(index),
                 [&](const at::Tensor& tensor, const c10::Argument&) {
                     found.push_back(tensor);
                     return tensor;
                 });
        return found;
    }

    Stack arguments(const Replace& replace, c10::DeviceType where) const {
        Stack made;
        for (size_t index = 0; index < count_; ++index) {
            made.push_back(replaced(given(index), argument(index), replace));
            if (made.back().isDevice()) made.back() = c10::Device(where);
            if (made.back().isGenerator()) made.back() = numbers_of(made.back().toGenerator());
        }
        return made;
    }

    // The kernel's view of an argument. A scalar in host memory goes by value, as into a launch of
    // CUDA.
    at::Tensor for_kernel(const at::Tensor& tensor, const c10::Argument& argument) const {
        if (!tensor.defined()) return tensor;
        if (on_device(tensor)) return over(tensor);
        TORCH_CHECK(tensor.device().is_cpu() && !writes(argument) &&
                        (tensor.dim() == 0 || kTakesHostIndices.count(schema_.name())),
                    "Expected all tensors to be on the same device, but got a tensor on ",
                    tensor.device(), " for ", schema_.name(), " of the test device");
        at::Tensor value = tensor.clone();
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
            value.unsafeGetTensorImpl()->set_wrapped_number(true);
        return value;
    }

    Stack kernel_arguments() const {
        return arguments(
            [this](const at::Tensor& tensor, const c10::Argument& argument) {
                return for_kernel(tensor, argument);
            },
            c10::DeviceType::CPU);
    }

    static void run_kernel(const c10::OperatorHandle& op, Stack& stack) {
        Plain plain;
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    }

    // Queues the kernel, with results of the shapes that torch's meta kernel gives.
    void queue() {
        std::vector<at::Tensor> fresh;
        Stack results = in_place() ? returned_arguments() : shaped(fresh);
        std::vector<at::Tensor> into;
        for (const at::Tensor& each : fresh) into.push_back(each.defined() ? over(each) : each);
        submit([op = op_, stack = kernel_arguments(), into = std::move(into)]() mutable {
            run_kernel(op, stack);
            Plain plain;
            size_t index = 0;
            for (size_t result = 0; result < stack.size() && index < into.size(); ++result) {
                replaced(stack[result], op.schema().returns()[result],
                         [&](const at::Tensor& tensor, const c10::Argument&) {
                             const at::Tensor& to = into.at(index++);
                             TORCH_CHECK(tensor.defined() == to.defined() &&
                                             (!to.defined() || tensor.sizes() == to.sizes()),
                                         op.schema().name(),
                                         " gave another shape than its meta kernel");
                             if (to.defined() && to.numel()) to.copy_(tensor);
                             return tensor;
                         });
            }
        });
        finish(std::move(results));
    }

    bool in_place() const {
        bool any = false;
        for (size_t index = 0; index < count_; ++index) {
            if (!writes(argument(index))) continue;
            if (argument(index).is_out()) return false;
            any = true;
        }
        return any && returns_arguments_alone();
    }

    bool returns_arguments_alone() const {
        for (const c10::Argument& each : schema_.returns()) {
            if (!writes(each)) return false;
        }
        return true;
    }

    // The values that an operator returns which are its arguments.
    Stack returned_arguments() const {
        Stack results;
        for (const c10::Argument& each : schema_.returns()) results.push_back(argument_of(each));
        return results;
    }

    const c10::IValue& argument_of(const c10::Argument& result) const {
        for (size_t index = 0; index < count_; ++index) {
            const auto* alias = argument(index).alias_info();
            if (alias && alias->beforeSets() == result.alias_info()->beforeSets())
                return given(index);
        }
        TORCH_CHECK(false, schema_.name(), " returns an argument that it does not have");
    }

    // Returns the results: new tensors, which `fresh` lists as well, and arguments, resized where
    // they must be.
    Stack shaped(std::vector<at::Tensor>& fresh) {
        // Torch has sized the results that it hands to a kernel, and losses have meta kernels that
        // size them wrongly.
        if (has_sized_outputs()) return returned_arguments();
        Stack meta = arguments(
            [](const at::Tensor& tensor, const c10::Argument&) { return meta_of(tensor); },
            c10::DeviceType::Meta);
        const Stack before = meta;
        if (kSavesOtherwise.count(schema_.name())) {
            meta = arguments(
                [](const at::Tensor& tensor, const c10::Argument&) {
                    return tensor.defined()
                               ? at::zeros_like(tensor, tensor.options().device(at::kCPU))
                               : tensor;
                },
                c10::DeviceType::CPU);
            run_kernel(op_, meta);
        } else {
            Plain plain;
            op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &meta);
        }
        for (size_t index = 0; index < count_; ++index) {
            if (argument(index).is_out() && before[index].isTensor()) {
                resize(given(index).toTensor(), before[index].toTensor());
            }
        }
        Stack results;
        for (size_t index = 0; index < meta.size(); ++index) {
            const c10::Argument& result = schema_.returns()[index];
            if (writes(result)) {
                results.push_back(argument_of(result));
                continue;
            }
            TORCH_CHECK(meta[index].isTensor() || meta[index].isTensorList(), schema_.name(),
                        " returns what depends on values");
            results.push_back(
                replaced(meta[index], result, [&](const at::Tensor& tensor, const c10::Argument&) {
                    fresh.push_back(tensor.defined() ? make(tensor.sizes(), tensor.strides(),
                                                            tensor.scalar_type())
                                                     : tensor);
                    return fresh.back();
                }));
        }
        return results;
    }

    bool has_sized_outputs() const {
        bool any = false;
        for (size_t index = 0; index < count_; ++index) {
            if (!argument(index).is_out()) continue;
            any = true;
            for (const at::Tensor& each : tensors(index)) {
                if (!each.numel()) return false;
            }
        }
        return any && returns_arguments_alone();
    }

    static void resize(const at::Tensor& tensor, const at::Tensor& like) {
        if (tensor.sizes() != like.sizes()) tensor.resize_(like.sizes());
    }

    void finish(Stack results) {
        stack_.erase(stack_.end() - std::ptrdiff_t(count_), stack_.end());
        for (c10::IValue& each : results) stack_.push_back(std::move(each));
    }

    // Waits for the stream and runs the kernel on the calling thread.
    void run_now() {
        count(kSynchronizingOps);
        wait(end_of(current_stream()));
        std::vector<std::pair<at::Tensor, at::Tensor>> out;
        Stack stack = arguments(
            [&](const at::Tensor& tensor, const c10::Argument& argument) {
                if (!argument.is_out()) return for_kernel(tensor, argument);
                out.emplace_back(tensor, at::empty({0}, tensor.options().device(at::kCPU)));
                return out.back().second;
            },
            c10::DeviceType::CPU);
        run_kernel(op_, stack);
        for (const auto& [tensor, value] : out) {
            resize(tensor, value);
            queue_from(tensor, value);
        }
        Stack results;
        for (size_t index = 0; index < stack.size(); ++index) {
            const c10::Argument& result = schema_.returns()[index];
            results.push_back(writes(result)
                                  ? argument_of(result)
                                  : replaced(stack[index], result,
                                             [](const at::Tensor& value, const c10::Argument&) {
                                                 return moved(value);
                                             }));
        }
        finish(std::move(results));
    }

    static at::Tensor moved(const at::Tensor& value) {
        if (!value.defined()) return value;
        at::Tensor tensor = make(value.sizes(), value.strides(), value.scalar_type());
        queue_from(tensor, value);
        return tensor;
    }

    bool uses_mask() const {
        if (!kTakesHostIndices.count(schema_.name())) return false;
        for (const at::Tensor& index : tensors(1)) {
            if (index.defined() &&
                (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte))
                return true;
        }
        return false;
    }

    bool has_generator() const {
        for (size_t index = 0; index < count_; ++index) {
            if (argument(index).type()->str().find("Generator") != std::string::npos) return true;
        }
        return false;
    }

    // Returns true for an operator that writes random numbers and reads no tensor.
    bool draws_numbers() const {
        if (!has_generator()) return false;
        for (size_t index = 0; index < count_; ++index) {
            if (!writes(argument(index)) && !tensors(index).empty()) return false;
        }
        return true;
    }

    // Draws in the order of submission, whenever the stream comes to write the numbers.
    void draw() {
        std::vector<std::pair<at::Tensor, at::Tensor>> drawn;
        Stack stack = arguments(
            [&](const at::Tensor& tensor, const c10::Argument&) {
                drawn.emplace_back(tensor, at::empty_strided(tensor.sizes(), tensor.strides(),
                                                             tensor.options().device(at::kCPU)));
                return drawn.back().second;
            },
            c10::DeviceType::CPU);
        run_kernel(op_, stack);
        for (const auto& [tensor, value] : drawn) {
            resize(tensor, value);
            queue_from(tensor, value);
        }
        finish(returned_arguments());
    }

    c10::OperatorHandle op_;
    const c10::FunctionSchema& schema_;
    Stack& stack_;
    size_t count_;
};

void carry_out(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).carry_out(); }

// Operators that torch would put together of others on this device, and that have a kernel of their
// own on a CPU.
void add_kernels_of_the_cpu(torch::Library& library) {
    const auto key = [](const char* name) { return c10::DispatchKey(c10::parseDispatchKey(name)); };
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
        const auto op = c10::Dispatcher::singleton().findOp(name);
        if (name.getNamespace() != "aten" || !op || !op->hasSchema()) continue;
        if (op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
            (op->hasKernelForDispatchKey(key("CompositeExplicitAutograd")) ||
             op->hasKernelForDispatchKey(key("CompositeImplicitAutograd")))) {
            library.impl(c10::toString(name).c_str(),
                         torch::CppFunction::makeFromBoxedFunction<&carry_out>());
        }
    }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&carry_out>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    add_kernels_of_the_cpu(m);
    m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&carry_out>());
    m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&carry_out>());
    // The forms of these with an output resize it to another shape and back, which memory of
    // another cannot be.
    m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&carry_out>());
    m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&carry_out>());
}

}  // namespace testdevice
