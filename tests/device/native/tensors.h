// Tensors of the test device, and the CPU's over the same memory.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "memory.h"
#include "streams.h"

namespace testdevice {

inline bool on_device(const at::Tensor& tensor) { return tensor.device().type() == kDevice; }

// Returns a tensor of the CPU over the memory of one of the device. It owns nothing: as on a GPU,
// queued work does not keep memory alive.
at::Tensor over(const at::Tensor& tensor);

// Returns uninitialized memory of the device.
at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// Queues destination[:] = source, a tensor of the CPU that nobody changes from now on.
void queue_from(const at::Tensor& destination, const at::Tensor& source);

// Returns the generator of the CPU that draws the numbers of a generator of the device.
at::Generator numbers_of(const at::Generator& generator);

// Sets aside what torch has asked of this thread: kernels run without autograd, autocast and modes
// of Python.
class Plain {
  public:
    Plain();

  private:
    c10::impl::ForceDispatchKeyGuard guard_;
};

}  // namespace testdevice
