// Copies between host and device by the rules of CUDA, allocation, and views.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <cstring>

#include "host_memory.h"
#include "tensors.h"

namespace testdevice {

Plain::Plain()
    : guard_(c10::default_included_set, c10::default_excluded_set | c10::autograd_dispatch_keyset |
                                            c10::autocast_dispatch_keyset) {}

at::Tensor over(const at::Tensor& tensor) {
    const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
    TORCH_CHECK(!tensor.is_conj() && !tensor.is_neg(), "the test device knows no lazy conjugates");
    // Queued work writes it on another thread, outside of the caller's inference mode, where no
    // inference tensor may be written.
    c10::InferenceMode ordinary(false);
    return at::from_blob(kernel_address(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                         options);
}

at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
    return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(kDevice),
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             dtype);
}

void queue_from(const at::Tensor& destination, const at::Tensor& source) {
    if (!destination.numel()) return;
    submit([to = over(destination), source] {
        Plain plain;
        to.copy_(source);
    });
}

namespace {

bool as_bytes(const at::Tensor& one, const at::Tensor& other) {
    return one.scalar_type() == other.scalar_type() && one.is_contiguous() && other.is_contiguous();
}

void between_devices(const at::Tensor& source, const at::Tensor& destination) {
    submit([to = over(destination), from = over(source)] {
        Plain plain;
        to.copy_(from);
    });
}

void to_device(at::Tensor source, const at::Tensor& destination, bool non_blocking) {
    count(kCopiesIn);
    if (!as_bytes(source, destination)) {
        // The host converts into a buffer of its own, which is not pinned.
        source =
            at::empty(destination.sizes(), destination.options().device(at::kCPU)).copy_(source);
    }
    const char* from = static_cast<const char*>(source.const_data_ptr());
    const size_t nbytes = source.nbytes();
    Point point;
    if (is_pinned(from, nbytes) && destination.is_contiguous()) {
        point = submit([from, nbytes, to = kernel_address(destination.const_data_ptr())] {
            memcpy(to, from, nbytes);
        });
        hold_host(uintptr_t(from), nbytes, point.stream, point.number);
    } else {
        // Through a buffer of the driver: read at the call, either after all work of the stream or
        // before it.
        if (chance(0.5)) wait(end_of(current_stream()));
        queue_from(destination, source.clone());
        point = end_of(current_stream());
    }
    if (!non_blocking) wait(point);
}

void to_host(at::Tensor source, const at::Tensor& destination, bool non_blocking) {
    count(kCopiesOut);
    if (source.scalar_type() != destination.scalar_type() || !source.is_contiguous()) {
        at::Tensor converted = at::empty(source.sizes(), destination.options().device(device()));
        between_devices(source, converted);
        source = converted;
    }
    if (!destination.is_contiguous()) {
        at::Tensor whole = at::empty(destination.sizes(), destination.options());
        to_host(source, whole, false);
        destination.copy_(whole);
        return;
    }
    char* to = static_cast<char*>(destination.mutable_data_ptr());
    const size_t nbytes = source.nbytes();
    const bool pinned = is_pinned(to, nbytes);
    Point point = submit(
        [to, nbytes, from = kernel_address(source.const_data_ptr())] { memcpy(to, from, nbytes); });
    if (pinned) hold_host(uintptr_t(to), nbytes, point.stream, point.number);
    if (!(pinned && non_blocking)) wait(point);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
    if (!destination.numel()) return destination;
    TORCH_CHECK(!destination.is_conj() && !destination.is_neg(),
                "the test device knows no lazy conjugates");
    at::Tensor from = source.resolve_conj().resolve_neg().expand_as(destination);
    if (!on_device(from)) {
        to_device(from, destination, non_blocking);
    } else if (!on_device(destination)) {
        to_host(from, destination, non_blocking);
    } else {
        between_devices(from, destination);
    }
    return destination;
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes,
                         std::optional<at::MemoryFormat> format);

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
    destination.resize_(source.sizes());
    return copy_from(source, destination, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
    count(kSynchronizingOps);
    wait(end_of(current_stream()));
    Plain plain;
    return at::_local_scalar_dense(over(self));
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device>,
                 std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
    TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided,
                "the test device has strided tensors alone");
    TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
    return at::detail::empty_generic(sizes, c10::GetAllocator(kDevice),
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
    return make(sizes, strides, c10::dtype_or_default(dtype));
}

at::Tensor zeros(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> where,
                 std::optional<bool> pinned) {
    return empty(sizes, dtype, layout, where, pinned, std::nullopt).zero_();
}

void grow(const at::Tensor& self, size_t nbytes) {
    const c10::Storage& storage = self.storage();
    if (nbytes > storage.nbytes())
        at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(storage, nbytes);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes,
                         std::optional<at::MemoryFormat> format) {
    auto* impl = self.unsafeGetTensorImpl();
    grow(self,
         at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset()));
    impl->set_sizes_contiguous(sizes);
    if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
    return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(source));
    impl->set_storage_offset(offset);
    if (strides.data()) {
        impl->set_sizes_and_strides(sizes, strides);
    } else {
        impl->set_sizes_contiguous(sizes);
    }
    grow(self,
         at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), offset));
    return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
    const int64_t numel = int64_t(source.nbytes() / self.itemsize());
    return set_storage(self, std::move(source), 0, {numel}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
    return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                       source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
    return set_storage(self, make({0}, {1}, self.scalar_type()).storage(), 0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
    record_block(self.storage().data_ptr(), stream.id());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("_efficientzerotensor", zeros);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", local_scalar);
    m.impl("resize_", resize);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Storage", set_whole_storage);
    m.impl("set_.source_Tensor", set_tensor);
    m.impl("set_", set_empty);
    m.impl("record_stream", record_stream);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("unfold", at::native::unfold);
    m.impl("view_as_real", at::native::view_as_real);
    m.impl("view_as_complex", at::native::view_as_complex);
    m.impl("is_set_to", at::native::is_set_to);
}

}  // namespace testdevice
