#include "memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "streams.h"

namespace testdevice {
namespace {

constexpr size_t kMiB = 1 << 20;
constexpr size_t kAddresses = size_t(1) << 38;  // of which pages exist once they are written
constexpr size_t kRounding = 512;

// The sizes of CUDA's caching allocator: small blocks share segments of 2 MiB, large ones have
// segments of their own or of 20 MiB.
constexpr size_t kSmall = kMiB, kSmallSegment = 2 * kMiB, kMiddle = 10 * kMiB,
                 kLargeSegment = 20 * kMiB;

// One file in memory, mapped twice.
struct Mapping {
    char *device, *kernel;

    Mapping() {
        int file = memfd_create("test-device", MFD_CLOEXEC);
        TORCH_CHECK(file >= 0 && ftruncate(file, kAddresses) == 0,
                    "memfd_create: ", strerror(errno));
        device = map(file, PROT_NONE);
        kernel = map(file, PROT_READ | PROT_WRITE);
        close(file);
    }

    static char* map(int file, int access) {
        void* at = mmap(nullptr, kAddresses, access, MAP_SHARED | MAP_NORESERVE, file, 0);
        TORCH_CHECK(at != MAP_FAILED, "mmap of the test device: ", strerror(errno));
        madvise(at, kAddresses, MADV_DONTFORK);
        return static_cast<char*>(at);
    }
};

const Mapping& mapping() {
    static const auto* one = new Mapping;
    return *one;
}

struct Block {
    size_t nbytes, segment;
    int64_t stream;
    bool small, used;
};

struct Deferred {
    size_t start;
    std::vector<Point> until;
};

class Blocks {
  public:
    // Returns the offset of a block, or no offset where the device has not enough memory left.
    bool take(size_t nbytes, int64_t stream, size_t& offset) {
        std::unique_lock lock(mutex_);
        finish_deferred();
        const size_t need = std::max(rounded(nbytes, kRounding), kRounding);
        const bool small = need <= kSmall;
        auto best = blocks_.end();
        for (auto at = blocks_.begin(); at != blocks_.end(); ++at) {
            const Block& block = at->second;
            if (block.used || block.stream != stream || block.small != small || block.nbytes < need)
                continue;
            if (best == blocks_.end() || block.nbytes < best->second.nbytes) best = at;
        }
        if (best == blocks_.end() && !add_segment(need, small, stream, best)) return false;
        Block& block = best->second;
        if (block.nbytes - need >= (small ? kRounding : kSmall + 1)) {
            blocks_[best->first + need] = {block.nbytes - need, block.segment, stream, small,
                                           false};
            block.nbytes = need;
        }
        block.used = true;
        counts_.allocated += int64_t(block.nbytes);
        counts_.peak_allocated = std::max(counts_.peak_allocated, counts_.allocated);
        offset = best->first;
        return true;
    }

    void give(size_t offset) {
        std::unique_lock lock(mutex_);
        auto found = recorded_.find(offset);
        if (found == recorded_.end()) return release(offset);
        deferred_.push_back({offset, std::move(found->second)});
        recorded_.erase(found);
    }

    void record(size_t offset, Point point) {
        std::unique_lock lock(mutex_);
        auto at = blocks_.find(offset);
        if (at != blocks_.end() && at->second.used && at->second.stream != point.stream) {
            recorded_[offset].push_back(point);
        }
    }

    // Gives back each segment no part of which is in use. No work may be under way.
    void empty() {
        std::unique_lock lock(mutex_);
        finish_deferred();
        for (auto at = blocks_.begin(); at != blocks_.end();) {
            const auto segment = segments_.find(at->second.segment);
            if (at->second.used || at->second.nbytes != segment->second) {
                ++at;
                continue;
            }
            madvise(mapping().kernel + at->first, segment->second, MADV_REMOVE);
            counts_.reserved -= int64_t(segment->second);
            segments_.erase(segment);
            at = blocks_.erase(at);
        }
    }

    MemoryCounts counts() {
        std::unique_lock lock(mutex_);
        return counts_;
    }

    void reset_peaks() {
        std::unique_lock lock(mutex_);
        counts_.peak_allocated = counts_.allocated;
        counts_.peak_reserved = counts_.reserved;
    }

    void set_total(int64_t nbytes) {
        std::unique_lock lock(mutex_);
        counts_.total = nbytes;
    }

    void note_retry() {
        std::unique_lock lock(mutex_);
        ++counts_.retries;
    }

    void note_out_of_memory() {
        std::unique_lock lock(mutex_);
        ++counts_.out_of_memory;
    }

  private:
    using Iterator = std::map<size_t, Block>::iterator;

    bool add_segment(size_t need, bool small, int64_t stream, Iterator& block) {
        const size_t nbytes = small            ? kSmallSegment
                              : need < kMiddle ? kLargeSegment
                                               : rounded(need, kSmallSegment);
        if (counts_.reserved + int64_t(nbytes) > counts_.total) return false;
        size_t start = 0;
        for (const auto& [first, size] : segments_) {
            if (first - start >= nbytes) break;
            start = first + size;
        }
        TORCH_CHECK(start + nbytes <= kAddresses, "the test device has no more addresses");
        segments_[start] = nbytes;
        counts_.reserved += int64_t(nbytes);
        counts_.peak_reserved = std::max(counts_.peak_reserved, counts_.reserved);
        block = blocks_.insert({start, {nbytes, start, stream, small, false}}).first;
        return true;
    }

    // At once, though work that uses the block may still be queued: later work of its stream comes
    // after that.
    void release(size_t offset) {
        auto at = blocks_.find(offset);
        TORCH_INTERNAL_ASSERT(at != blocks_.end() && at->second.used);
        counts_.allocated -= int64_t(at->second.nbytes);
        at->second.used = false;
        auto next = std::next(at);
        if (next != blocks_.end() && joins(at->second, next->second)) {
            at->second.nbytes += next->second.nbytes;
            blocks_.erase(next);
        }
        if (at != blocks_.begin() && joins(at->second, std::prev(at)->second)) {
            std::prev(at)->second.nbytes += at->second.nbytes;
            blocks_.erase(at);
        }
    }

    static bool joins(const Block& one, const Block& other) {
        return !other.used && one.segment == other.segment;
    }

    void finish_deferred() {
        std::vector<size_t> ended;
        for (const Deferred& each : deferred_) {
            if (std::all_of(each.until.begin(), each.until.end(), passed))
                ended.push_back(each.start);
        }
        for (size_t start : ended) {
            release(start);
            deferred_.erase(
                std::find_if(deferred_.begin(), deferred_.end(),
                             [start](const Deferred& each) { return each.start == start; }));
        }
    }

    std::mutex mutex_;  // nothing is called while it is held that takes another lock
    std::map<size_t, Block> blocks_;
    std::map<size_t, size_t> segments_;  // start and size
    std::map<size_t, std::vector<Point>> recorded_;
    std::vector<Deferred> deferred_;
    MemoryCounts counts_{0, 0, 0, 0, int64_t(4) << 30, 0, 0};
};

Blocks& blocks() {
    static auto* one = new Blocks;
    return *one;
}

std::atomic<bool> poison{true};

void free_block(void* at) {
    if (at) blocks().give(size_t(static_cast<char*>(at) - mapping().device));
}

c10::DataPtr allocate_block(size_t nbytes) {
    if (nbytes == 0) return {nullptr, nullptr, &free_block, device()};
    const int64_t stream = current_stream();
    size_t offset = 0;
    if (!blocks().take(nbytes, stream, offset)) {
        blocks().note_retry();
        empty_cache();
        if (!blocks().take(nbytes, stream, offset)) {
            blocks().note_out_of_memory();
            const MemoryCounts counts = blocks().counts();
            TORCH_CHECK_WITH(OutOfMemoryError, false,
                             "test device out of memory. Tried to allocate ", nbytes, " bytes; ",
                             counts.allocated, " are allocated, ", counts.reserved,
                             " reserved, of ", counts.total);
        }
    }
    if (poison) {
        submit_to(stream, [at = mapping().kernel + offset, nbytes] { memset(at, 0xFF, nbytes); });
    }
    char* at = mapping().device + offset;
    return {at, at, &free_block, device()};
}

void copy_blocks(void* to, const void* from, size_t nbytes) {
    submit([to = kernel_address(to), from = kernel_address(from), nbytes] {
        memcpy(to, from, nbytes);
    });
}

// `torch.accelerator.memory_*` ask a DeviceAllocator, whose interface is younger than the device
// needs.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
struct DeviceAllocator final : c10::DeviceAllocator {
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override { empty_cache(); }
    void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
        record_block(pointer, stream.id());
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
        const MemoryCounts counts = memory_counts();
        c10::CachingDeviceAllocator::DeviceStats stats;
        stats.allocated_bytes[0].current = counts.allocated;
        stats.allocated_bytes[0].peak = counts.peak_allocated;
        stats.reserved_bytes[0].current = counts.reserved;
        stats.reserved_bytes[0].peak = counts.peak_reserved;
        stats.num_alloc_retries = counts.retries;
        stats.num_ooms = counts.out_of_memory;
        return stats;
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex) override { reset_peaks(); }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
        const MemoryCounts counts = memory_counts();
        return {size_t(std::max<int64_t>(counts.total - counts.reserved, 0)), size_t(counts.total)};
    }
#else
struct DeviceAllocator final : c10::Allocator {
#endif
    c10::DataPtr allocate(size_t nbytes) override { return allocate_block(nbytes); }
    c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
    void copy_data(void* to, const void* from, size_t nbytes) const override {
        copy_blocks(to, from, nbytes);
    }
};

}  // namespace

char* kernel_address(const void* device_address) {
    if (!device_address) return nullptr;
    const ptrdiff_t offset = static_cast<const char*>(device_address) - mapping().device;
    TORCH_CHECK(offset >= 0 && size_t(offset) < kAddresses, "not an address of the test device");
    return mapping().kernel + offset;
}

MemoryCounts memory_counts() { return blocks().counts(); }
void reset_peaks() { blocks().reset_peaks(); }
void set_total_memory(int64_t nbytes) { blocks().set_total(nbytes); }
void set_poison(bool on) { poison = on; }

void empty_cache() {
    wait_for_all();
    blocks().empty();
}

void record_block(const c10::DataPtr& block, int64_t stream) {
    if (!block.get() || block.get_deleter() != &free_block) return;
    blocks().record(size_t(static_cast<char*>(block.get()) - mapping().device), end_of(stream));
}

static DeviceAllocator* const allocator = [] {
    auto* one = new DeviceAllocator;
    c10::SetAllocator(kDevice, one);
    return one;
}();

}  // namespace testdevice
