// Host memory of the test device: what is pinned, and what queued copies still use.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>

namespace testdevice {

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
