// Memory of the test device: addresses that no host code can read, and a caching allocator over
// them.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>

namespace testdevice {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

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

// -- host memory
// -------------------------------------------------------------------------------------

// Results of CUDA's runtime, by its numbers.
enum : int { kSuccess = 0, kOutOfMemory = 2, kAlreadyRegistered = 712, kNotRegistered = 713 };

int register_host(uintptr_t start, size_t nbytes);
int unregister_host(uintptr_t start);
// The bytes that may be registered in all; more are refused.
void set_pin_limit(int64_t nbytes);
// Returns true for memory within one pinned range. Throws where the memory reaches over the end of
// one.
bool is_pinned(const void* start, size_t nbytes);
// Notes a queued copy from or to pinned memory, which must stay as it is until then.
void hold_host(uintptr_t start, size_t nbytes, int64_t stream, uint64_t number);
c10::Allocator* pinned_allocator();

}  // namespace testdevice
