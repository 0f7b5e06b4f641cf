// What Python calls, by ctypes, to steer and to watch the device.
#include <cstdint>
#include <cstring>

#include "host_memory.h"
#include "memory.h"
#include "streams.h"

extern "C" {

void td_seed(uint64_t seed, double lateness) { testdevice::seed_scheduler(seed, lateness); }
int64_t td_counter(int which) { return testdevice::counted(testdevice::Counter(which)); }
void td_set_total(int64_t nbytes) { testdevice::set_total_memory(nbytes); }
void td_set_poison(int on) { testdevice::set_poison(on != 0); }
void td_set_pin_limit(int64_t nbytes) { testdevice::set_pin_limit(nbytes); }
int td_register(uint64_t start, uint64_t nbytes) {
    return testdevice::register_host(start, nbytes);
}
int td_unregister(uint64_t start) { return testdevice::unregister_host(start); }
// A kernel of the user's, of which torch knows nothing.
void td_copy(uint64_t to, uint64_t from, uint64_t nbytes) {
    testdevice::submit([to = testdevice::kernel_address(reinterpret_cast<void*>(to)),
                        from = testdevice::kernel_address(reinterpret_cast<void*>(from)),
                        nbytes] { memcpy(to, from, nbytes); });
}
void td_reset_peaks() { testdevice::reset_peaks(); }

void td_memory(int64_t* counts) {
    const testdevice::MemoryCounts now = testdevice::memory_counts();
    const int64_t values[] = {now.allocated, now.reserved, now.peak_allocated, now.peak_reserved,
                              now.total,     now.retries,  now.out_of_memory};
    for (int index = 0; index < 7; ++index) counts[index] = values[index];
}
}
