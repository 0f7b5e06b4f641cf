#include "queue.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace offload {
namespace {

constexpr std::size_t kPage = 4096;

// A thread that needs data waits for a read; a write only holds a buffer. So reads go first, but a
// write that waits is not passed over for ever.
constexpr unsigned kReadsBeforeAWrite = 8;

}  // namespace

bool Request::wait(double seconds) {
    if (done()) return true;
    std::unique_lock lock(mutex_);
    return finished_.wait_for(lock, std::chrono::duration<double>(seconds),
                              [this] { return done(); });
}

void Request::finish() {
    // Under the lock, so that a waiter between its check and its sleep is not missed.
    std::lock_guard lock(mutex_);
    done_.store(true, std::memory_order_release);
    finished_.notify_all();
}

Queue::Queue(unsigned threads, std::size_t block_bytes)
    : block_bytes_(std::max(block_bytes / kPage * kPage, kPage)) {
    threads_.reserve(threads);
    try {
        for (unsigned i = 0; i < threads; ++i) {
            threads_.emplace_back([this] { run(); });
            pthread_setname_np(threads_.back().native_handle(), "offload-io");
        }
    } catch (...) {
        close();  // a thread that is neither joined nor detached ends the process
        throw;
    }
}

bool Queue::submit(const std::shared_ptr<Request>& request) {
    // O_DIRECT wants offset, address and length at multiples of a page. What sticks out at either
    // end goes through the buffered descriptor, and so does everything where offset and address do
    // not fit each other. The kernel keeps both coherent: a direct transfer first writes back and
    // drops cached pages.
    const auto address = reinterpret_cast<std::uintptr_t>(request->data_);
    const std::size_t nbytes = request->nbytes_;
    std::size_t first = nbytes;  // the direct part is [first, last)
    std::size_t last = nbytes;
    if (request->file_.direct >= 0 && (address - request->offset_) % kPage == 0) {
        const std::size_t head = (kPage - request->offset_ % kPage) % kPage;
        if (head + kPage <= nbytes) {
            first = head;
            last = head + (nbytes - head) / kPage * kPage;
        }
    }
    std::vector<Block> blocks;
    auto cut = [&](std::size_t start, std::size_t stop, bool direct) {
        for (; start < stop; start += block_bytes_) {
            blocks.push_back({request, start, std::min(block_bytes_, stop - start), direct});
        }
    };
    cut(0, first, false);
    cut(first, last, true);
    cut(last, nbytes, false);
    if (blocks.empty()) {
        request->finish();
        return true;
    }
    request->blocks_left_.store(blocks.size());
    {
        std::lock_guard lock(mutex_);
        if (closing_) return false;
        auto& queue = request->operation_ == Operation::kRead ? reads_ : writes_;
        queue.insert(queue.end(), blocks.begin(), blocks.end());
    }
    if (blocks.size() == 1) {
        queued_.notify_one();
    } else {
        queued_.notify_all();
    }
    return true;
}

void Queue::close() {
    std::lock_guard once(closing_mutex_);
    {
        std::lock_guard lock(mutex_);
        closing_ = true;
    }
    queued_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
}

void Queue::run() {
    for (;;) {
        Block block = next_block();
        if (!block.request) return;
        if (block.request->error() == 0) move(block);
        if (block.request->blocks_left_.fetch_sub(1) == 1) block.request->finish();
    }
}

Queue::Block Queue::next_block() {
    std::unique_lock lock(mutex_);
    queued_.wait(lock, [this] { return closing_ || !reads_.empty() || !writes_.empty(); });
    const bool write_is_due = reads_.empty() || reads_in_a_row_ >= kReadsBeforeAWrite;
    const bool take_write = !writes_.empty() && write_is_due;
    auto& queue = take_write ? writes_ : reads_;
    if (queue.empty()) return {};  // closing, and nothing is left
    reads_in_a_row_ = take_write ? 0 : reads_in_a_row_ + 1;
    Block block = std::move(queue.front());
    queue.pop_front();
    return block;
}

void Queue::move(const Block& block) {
    Request& request = *block.request;
    const bool reading = request.operation_ == Operation::kRead;
    int descriptor = block.direct ? request.file_.direct : request.file_.buffered;
    std::size_t moved = 0;
    while (moved < block.nbytes) {
        char* data = request.data_ + block.start + moved;
        const std::size_t left = block.nbytes - moved;
        const auto offset = static_cast<off_t>(request.offset_ + block.start + moved);
        const ssize_t count = reading ? pread(descriptor, data, left, offset)
                                      : pwrite(descriptor, data, left, offset);
        if (count > 0) {
            moved += static_cast<std::size_t>(count);
            // A direct transfer that stopped within a page cannot go on directly.
            if (count % kPage != 0) descriptor = request.file_.buffered;
            continue;
        }
        int error = count == 0 ? (reading ? ENODATA : EIO) : errno;
        if (error == EINTR) continue;
        if (error == EAGAIN) {
            sched_yield();
            continue;
        }
        if (error == EINVAL && descriptor != request.file_.buffered) {
            descriptor = request.file_.buffered;  // a file system with coarser rules than pages
            continue;
        }
        int none = 0;
        request.error_.compare_exchange_strong(none, error);
        break;
    }
    (reading ? read_bytes_ : written_bytes_).fetch_add(moved);
}

}  // namespace offload
