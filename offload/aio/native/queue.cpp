#include "queue.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <exception>
#include <iterator>
#include <utility>

namespace offload {
namespace {

std::uint64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

// Blocks signals in threads that are started during the lifetime of this object. Signals are for
// the caller's threads, and would only interrupt system calls of the drivers.
class NoSignals {
  public:
    NoSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    NoSignals(const NoSignals&) = delete;
    NoSignals& operator=(const NoSignals&) = delete;

  private:
    sigset_t before_;
};

constexpr unsigned kSteps = 8;  // steps of an octave

// Reads whose checksums are computed before free slots get blocks again. Reads end in bursts. When
// all checksums of a burst were computed at once, the drive was measured to idle for a sixth of the
// time.
constexpr std::size_t kChecks = 2;

// Pause before a transfer for which the kernel had no resources is retried.
constexpr auto kPause = std::chrono::microseconds(100);

}  // namespace

void Latencies::add(std::uint64_t nanoseconds) {
    const auto octave = static_cast<unsigned>(std::bit_width(nanoseconds | kSteps)) - 4;
    const auto step = static_cast<unsigned>(nanoseconds >> octave) & (kSteps - 1);
    ++counts_[octave * kSteps + step];
    ++total_;
}

double Latencies::quantile(double fraction) const {
    const auto wanted =
        static_cast<std::uint64_t>(std::ceil(fraction * static_cast<double>(total_)));
    std::uint64_t seen = 0;
    for (unsigned i = 0; i < counts_.size(); ++i) {
        seen += counts_[i];
        if (seen > 0 && seen >= wanted) {
            return std::ldexp(kSteps + i % kSteps + 0.5, static_cast<int>(i / kSteps)) * 1e-9;
        }
    }
    return 0;
}

Queue::Queue(const Opener& open, unsigned threads, unsigned depth, std::size_t block_bytes)
    : schedule_(std::size_t{threads} * depth, block_bytes) {
    try {
        const NoSignals guard;
        for (unsigned i = 0; i < threads; ++i) {
            Driver& driver = drivers_.emplace_back();
            driver.thread =
                std::thread([this, &driver, &open, depth] { drive(driver, open, depth); });
            pthread_setname_np(driver.thread.native_handle(), "offload-io");
        }
    } catch (...) {
        stop();  // a thread that is neither joined nor detached ends the process
        throw;
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ready_ == drivers_.size(); });
    lock.unlock();
    if (!refusal_) return;
    stop();
    std::rethrow_exception(refusal_);
}

bool Queue::submit(std::shared_ptr<Request> request) {
    const std::lock_guard lock(mutex_);
    if (closing_) return false;
    if (!request->has_block()) {
        request->finish();
        return true;
    }
    schedule_.add(std::move(request));
    work_.notify_one();  // a driver that leaves work behind wakes the next
    for (auto& driver : drivers_) {
        if (std::exchange(driver.could_take_more, false)) driver.backend->wake();
    }
    return true;
}

bool Queue::announce(Request& request, std::uint64_t tag) {
    const std::lock_guard lock(mutex_);
    if (request.done()) return false;
    // On the caller, who can be told that there is no memory; a driver could tell nobody.
    if (announced_.capacity() == pending_) announced_.reserve(2 * pending_ + 1);
    ++pending_;
    request.tag = tag;
    return true;
}

std::vector<std::uint64_t> Queue::announced() {
    std::unique_lock lock(mutex_);
    told_.wait(lock, [this] { return stopped_ || !announced_.empty(); });
    std::vector<std::uint64_t> tags(announced_);  // a copy: the room is for requests that go on
    pending_ -= announced_.size();
    announced_.clear();
    return tags;
}

std::size_t Queue::register_memory(char* data, std::size_t nbytes) {
    std::size_t least = nbytes;
    const bool all = on_each(
        [&](Backend& backend) { least = std::min(least, backend.register_memory(data, nbytes)); });
    return all ? least : 0;
}

bool Queue::register_file(int descriptor) {
    bool could = true;
    const bool all = on_each([&](Backend& backend) { could &= backend.register_file(descriptor); });
    return all && could;
}

bool Queue::on_each(const std::function<void(Backend&)>& errand) {
    const std::lock_guard one_at_a_time(errands_mutex_);
    for (auto& driver : drivers_) {
        std::unique_lock lock(mutex_);
        if (closing_) return false;
        driver.ran = false;
        driver.errand = errand;
        work_.notify_all();
        driver.backend->wake();
        changed_.wait(lock, [&] { return driver.ran; });
    }
    return true;
}

void Queue::close() {
    const std::lock_guard once(closing_mutex_);
    stop();
}

void Queue::stop() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    work_.notify_all();
    changed_.notify_all();
    for (auto& driver : drivers_) {
        if (driver.thread.joinable()) driver.thread.join();
    }
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    told_.notify_all();
}

std::uint64_t Queue::moved_bytes(Operation operation) const {
    const std::lock_guard lock(mutex_);
    return moved_bytes_[static_cast<std::size_t>(operation)];
}

double Queue::latency(Operation operation, double fraction) const {
    const std::lock_guard lock(mutex_);
    return latencies_[static_cast<std::size_t>(operation)].quantile(fraction);
}

void Queue::drive(Driver& driver, const Opener& open, unsigned depth) {
    bool opened = false;
    try {
        driver.backend = open();
        driver.blocks.resize(depth);
        // All that this thread will need: it may throw now, and has nobody to tell later.
        driver.free.reserve(depth);
        driver.fresh.reserve(depth);
        driver.ended.reserve(depth);
        driver.unchecked.reserve(2 * depth);
        driver.over.reserve(depth + kChecks);
        driver.checked.reserve(depth + kChecks);
        driver.finished.reserve(depth + kChecks);
        for (unsigned slot = depth; slot > 0; --slot) driver.free.push_back(slot - 1);
        opened = true;
    } catch (...) {
        const std::lock_guard lock(mutex_);
        refusal_ = std::current_exception();
    }
    {
        // `open` belongs to the constructor, which returns once all drivers are ready.
        const std::lock_guard lock(mutex_);
        ++ready_;
        changed_.notify_all();
    }
    if (opened) serve(driver);
    const std::lock_guard lock(mutex_);
    driver.backend.reset();
}

void Queue::serve(Driver& driver) {
    const auto at_the_end = [&] { return closing_ && schedule_.empty(); };
    for (;;) {
        {
            std::unique_lock lock(mutex_);
            if (driver.errand) {
                // Outside of the lock: pinning memory may take seconds. This thread alone uses the
                // backend.
                const auto errand = std::exchange(driver.errand, nullptr);
                lock.unlock();
                errand(*driver.backend);
                lock.lock();
                driver.ran = true;
                changed_.notify_all();
            }
            settle(driver);
            take(driver);
            if (at_the_end()) work_.notify_all();
            if (!driver.in_flight() && driver.unchecked.empty() && driver.finished.empty()) {
                work_.wait(lock,
                           [&] { return at_the_end() || driver.errand || schedule_.ready(); });
                if (at_the_end() && !driver.errand) return;
                continue;
            }
            if (schedule_.ready()) work_.notify_one();
            driver.could_take_more = !driver.free.empty();
        }
        finish(driver.finished);
        driver.finished.clear();
        move(driver);
    }
}

void Queue::finish(const std::vector<std::shared_ptr<Request>>& finished) {
    if (finished.empty()) return;
    for (const auto& request : finished) request->finish();
    const std::lock_guard lock(mutex_);
    for (const auto& request : finished) {
        if (request->tag != 0) announced_.push_back(request->tag);  // `announce` made room
    }
    if (!announced_.empty()) told_.notify_all();
}

void Queue::take(Driver& driver) {
    while (!driver.free.empty()) {
        auto block = schedule_.next();
        if (!block) return;
        const unsigned slot = driver.free.back();
        driver.free.pop_back();
        block->left.slot = slot;
        driver.blocks[slot] = std::move(*block);
        driver.fresh.push_back(slot);
    }
}

void Queue::settle(Driver& driver) {
    for (Block& block : driver.over) {
        const auto operation = static_cast<std::size_t>(block.left.operation);
        moved_bytes_[operation] += block.nbytes - block.left.nbytes;
        latencies_[operation].add(block.took_ns);
        const bool last = block.request->settle(block);
        schedule_.settle(block);
        if (last) driver.finished.push_back(std::move(block.request));
    }
    driver.over.clear();
}

void Queue::move(Driver& driver) {
    auto& checked = driver.checked;
    checked.clear();
    for (const unsigned slot : driver.fresh) {
        Block& block = driver.blocks[slot];
        block.started_ns = now_ns();
        driver.backend->add(block.left);
        if (block.left.operation == Operation::kWrite && block.request->wants_crc()) {
            checked.push_back(&block);
        }
    }
    driver.fresh.clear();
    const std::size_t reads = std::min(driver.unchecked.size(), kChecks);
    for (std::size_t i = 0; i < reads; ++i) checked.push_back(&driver.unchecked[i]);
    if (!checked.empty()) {
        // Checksums are computed while the kernel moves blocks: a write only reads its memory, and
        // a read that has ended has freed its slot.
        driver.ended.clear();
        if (driver.in_flight()) driver.backend->run(driver.ended, false);
        for (Block* block : checked) sum(*block);
        const auto first = driver.unchecked.begin();
        const auto last = first + static_cast<std::ptrdiff_t>(reads);
        std::move(first, last, std::back_inserter(driver.over));
        driver.unchecked.erase(first, last);
        collect(driver);
    }
    if (!driver.over.empty() || !driver.unchecked.empty() || !driver.in_flight()) return;
    driver.ended.clear();
    driver.backend->run(driver.ended, true);
    collect(driver);
}

void Queue::collect(Driver& driver) {
    const std::uint64_t now = driver.ended.empty() ? 0 : now_ns();
    for (const auto [slot, result] : driver.ended) {
        Block& block = driver.blocks[slot];
        const Next next = advance(block, result);
        if (next == Next::kAgain || next == Next::kLater) {
            if (next == Next::kLater) std::this_thread::sleep_for(kPause);
            driver.backend->add(block.left);
            continue;
        }
        block.took_ns = now - block.started_ns;
        bool unchecked = next == Next::kDone && block.left.operation == Operation::kRead &&
                         block.request->wants_crc();
        // Where reads end faster than they are checked, this one is checked at once.
        if (unchecked && driver.unchecked.size() == driver.unchecked.capacity()) {
            sum(block);
            unchecked = false;
        }
        (unchecked ? driver.unchecked : driver.over).push_back(std::move(block));
        driver.free.push_back(slot);
    }
}

}  // namespace offload
