// A backend that follows a script, over a file in memory: what the kernel may do, it does often.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "queue.h"
#include "storm.h"

namespace scripted {

using namespace offload;
using check::Random;
using storm::Bad;

inline constexpr Descriptors kFile{7, 8};

// A file in memory, and how the backends over it behave.
struct Disk {
    explicit Disk(std::size_t nbytes) : bytes(nbytes) {}

    std::vector<char> bytes;
    bool trouble = false;  // short counts, EINTR, EAGAIN
    bool coarse = false;   // O_DIRECT refuses everything
    Bad bad;
    std::size_t most_registered = ~std::size_t{0};      // by the first backend
    std::array<std::atomic<std::uint64_t>, 2> moved{};  // bytes, by operation
    std::atomic<unsigned> opened{0};
    std::atomic<unsigned> alive{0};
    std::atomic<unsigned> registered{0};

    // Closed, backends only take transfers and hold them back, until it opens.
    void open_gate(bool open) {
        const std::lock_guard lock(mutex);
        gate = open;
        changed.notify_all();
    }
    // Waits until so many transfers are held back.
    void wait_for_held(std::size_t count) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return held >= count; });
    }
    std::mutex mutex;
    std::condition_variable changed;
    bool gate = true;
    std::size_t held = 0;
    std::vector<std::uint64_t> offsets;  // of transfers, in the order in which they came
};

class Scripted final : public Backend {
  public:
    Scripted(Disk& disk, unsigned depth)
        : disk_(disk), depth_(depth), number_(disk.opened++), random_(number_) {
        ++disk_.alive;
    }
    ~Scripted() override {
        CHECK(std::this_thread::get_id() == maker_ && moving_.empty());
        --disk_.alive;
    }

    void add(const Transfer& transfer) override {
        CHECK(std::this_thread::get_id() == maker_);
        CHECK(moving_.size() < depth_ && transfer.slot < depth_ && transfer.nbytes > 0);
        for (const auto& other : moving_) CHECK(other.slot != transfer.slot);
        moving_.push_back(transfer);
        const std::lock_guard lock(disk_.mutex);
        disk_.offsets.push_back(transfer.offset);
    }

    void run(std::vector<Ended>& ended, bool wait) override {
        CHECK(std::this_thread::get_id() == maker_ && !moving_.empty());
        if (!wait && random_.one_in(2)) return;
        {
            std::unique_lock lock(disk_.mutex);
            if (!disk_.gate) {
                disk_.held += moving_.size() - held_;
                held_ = moving_.size();
                disk_.changed.notify_all();
                disk_.changed.wait(lock, [&] { return disk_.gate || woken_ || !wait; });
                if (!disk_.gate && !wait) return;
                if (std::exchange(woken_, false)) return;
            }
            disk_.held -= std::exchange(held_, 0);
            woken_ = false;
        }
        for (std::size_t n = random_.between(1, moving_.size()); n > 0; --n) {
            std::swap(moving_[random_.below(moving_.size())], moving_.back());
            ended.push_back({moving_.back().slot, move(moving_.back())});
            moving_.pop_back();
        }
    }

    void wake() override {
        const std::lock_guard lock(disk_.mutex);
        woken_ = true;
        disk_.changed.notify_all();
    }

    std::size_t register_memory(char*, std::size_t nbytes) override {
        CHECK(std::this_thread::get_id() == maker_);
        ++disk_.registered;
        return number_ == 0 ? std::min(nbytes, disk_.most_registered) : nbytes;
    }

    bool register_file(int descriptor) override {
        CHECK(std::this_thread::get_id() == maker_);
        ++disk_.registered;
        return number_ > 0 || descriptor == kFile.direct;
    }

  private:
    // What the kernel would return.
    long move(const Transfer& transfer) {
        if (disk_.trouble && random_.one_in(8)) return random_.one_in(2) ? -EINTR : -EAGAIN;
        std::size_t nbytes = transfer.nbytes;
        if (transfer.descriptor == kFile.direct) {
            const auto address = reinterpret_cast<std::uintptr_t>(transfer.data);
            CHECK((address | transfer.offset | nbytes) % kPage == 0);
            if (disk_.coarse) return -EINVAL;
        } else {
            CHECK(transfer.descriptor == kFile.buffered);
        }
        if (transfer.offset >= disk_.bytes.size()) return 0;
        nbytes = std::min<std::size_t>(nbytes, disk_.bytes.size() - transfer.offset);
        if (disk_.bad.touches(transfer.offset, nbytes)) {
            if (transfer.offset >= disk_.bad.first) return -EIO;
            nbytes = disk_.bad.first - transfer.offset;
        }
        if (disk_.trouble && random_.one_in(3)) nbytes = random_.between(1, nbytes);
        disk_.moved[static_cast<std::size_t>(transfer.operation)] += nbytes;
        char* there = disk_.bytes.data() + transfer.offset;
        if (transfer.operation == Operation::kRead) {
            std::memcpy(transfer.data, there, nbytes);
        } else {
            std::memcpy(there, transfer.data, nbytes);
        }
        return static_cast<long>(nbytes);
    }

    Disk& disk_;
    const std::size_t depth_;
    const unsigned number_;
    const std::thread::id maker_ = std::this_thread::get_id();
    Random random_;
    std::vector<Transfer> moving_;
    std::size_t held_ = 0;  // of those, counted by the disk
    bool woken_ = false;
};

inline Queue::Opener opener(Disk& disk, unsigned depth) {
    return [&disk, depth] { return std::make_unique<Scripted>(disk, depth); };
}

// A request of one piece of that file.
inline std::shared_ptr<Request> ask(Operation operation, Priority priority, std::uint64_t offset,
                                    char* data, std::size_t nbytes) {
    const std::vector<Piece> pieces{{kFile, offset, data, nbytes}};
    return std::make_shared<Request>(operation, priority, pieces, Checksum{});
}

}  // namespace scripted
