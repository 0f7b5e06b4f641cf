#include "host_memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "memory.h"
#include "streams.h"

namespace testdevice {
namespace {

struct Held {
    uintptr_t start, end;
    Point until;
};

struct HostMemory {
    std::mutex mutex;
    std::map<uintptr_t, uintptr_t> ranges;  // start and end of what is pinned
    std::map<uintptr_t, uintptr_t> allocations;
    std::vector<uintptr_t> freed;  // allocations that a queued copy still uses
    std::vector<Held> held;
    int64_t registered = 0, limit = INT64_MAX;

    bool in_use(uintptr_t start, uintptr_t end) {
        held.erase(std::remove_if(held.begin(), held.end(),
                                  [](const Held& each) { return passed(each.until); }),
                   held.end());
        return std::any_of(held.begin(), held.end(),
                           [=](const Held& each) { return each.start < end && start < each.end; });
    }

    void free_unused() {
        auto kept = std::remove_if(freed.begin(), freed.end(), [this](uintptr_t start) {
            auto at = allocations.find(start);
            if (in_use(start, at->second)) return false;
            allocations.erase(at);
            ranges.erase(start);
            free(reinterpret_cast<void*>(start));
            return true;
        });
        freed.erase(kept, freed.end());
    }
};

HostMemory& host() {
    static auto* one = new HostMemory;
    return *one;
}

void free_pinned(void* at) {
    if (!at) return;
    std::unique_lock lock(host().mutex);
    host().freed.push_back(uintptr_t(at));
    host().free_unused();
}

struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        const size_t size = std::max<size_t>(rounded(nbytes, 64), 64);
        std::unique_lock lock(host().mutex);
        host().free_unused();
        void* at = aligned_alloc(64, size);
        TORCH_CHECK(at, "no host memory to pin");
        host().ranges[uintptr_t(at)] = host().allocations[uintptr_t(at)] = uintptr_t(at) + size;
        return {at, at, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void* to, const void* from, size_t nbytes) const override {
        memcpy(to, from, nbytes);
    }
};

}  // namespace

int register_host(uintptr_t start, size_t nbytes) {
    std::unique_lock lock(host().mutex);
    auto& ranges = host().ranges;
    auto after = ranges.lower_bound(start + nbytes);
    if (after != ranges.begin() && std::prev(after)->second > start) return kAlreadyRegistered;
    if (host().registered + int64_t(nbytes) > host().limit) return kOutOfMemory;
    ranges[start] = start + nbytes;
    host().registered += int64_t(nbytes);
    return kSuccess;
}

int unregister_host(uintptr_t start) {
    std::unique_lock lock(host().mutex);
    auto found = host().ranges.find(start);
    if (found == host().ranges.end() || host().allocations.count(start)) return kNotRegistered;
    const bool used = host().in_use(start, found->second);
    host().registered -= int64_t(found->second - start);
    host().ranges.erase(found);
    lock.unlock();
    if (used) report_failure("host memory was unregistered under a copy");
    return kSuccess;
}

void set_pin_limit(int64_t nbytes) {
    std::unique_lock lock(host().mutex);
    host().limit = nbytes < 0 ? INT64_MAX : nbytes;
}

bool is_pinned(const void* start, size_t nbytes) {
    const auto first = uintptr_t(start), last = first + std::max<size_t>(nbytes, 1);
    std::unique_lock lock(host().mutex);
    const auto& ranges = host().ranges;
    auto after = ranges.lower_bound(last);
    if (after == ranges.begin() || std::prev(after)->second <= first) return false;
    const auto& [from, to] = *std::prev(after);
    TORCH_CHECK(from <= first && last <= to,
                "invalid argument: a copy reaches over the end of pinned memory");
    return true;
}

void hold_host(uintptr_t start, size_t nbytes, int64_t stream, uint64_t number) {
    std::unique_lock lock(host().mutex);
    host().held.push_back({start, start + nbytes, Point{stream, number}});
}

c10::Allocator* pinned_allocator() {
    static auto* one = new PinnedAllocator;
    return one;
}

}  // namespace testdevice
