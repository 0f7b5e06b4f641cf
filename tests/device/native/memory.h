// Memory of the test device: addresses that no host code can read, and a caching allocator over
// them.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

namespace testdevice {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

inline size_t rounded(size_t nbytes, size_t unit) { return (nbytes + unit - 1) / unit * unit; }

inline c10::Device device() { return c10::Device(kDevice, 0); }

// The kernels' address of a device address. The device's own addresses are mapped without any
// access, for ever.
char* kernel_address(const void* device_address);

struct MemoryCounts {
    int64_t allocated, reserved, peak_allocated, peak_reserved, total, retries, out_of_memory;
};

MemoryCounts memory_counts();
void reset_peaks();
void set_total_memory(int64_t nbytes);
// Fills each new block with 0xFF by work queued on the stream that it was allocated on.
void set_poison(bool on);
void empty_cache();
// Keeps a freed block from being used again until the work that `stream` has now is complete. As
// CUDA's allocator it protects its own blocks alone: not a storage that DLPack has laid over one.
void record_block(const c10::DataPtr& block, int64_t stream);

}  // namespace testdevice
