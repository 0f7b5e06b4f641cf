// A backend on io_uring by raw system calls, so that a build needs no liburing.

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "backend.h"
#include "uring_abi.h"

namespace offload {
namespace {

using namespace uring;

constexpr unsigned kSlots = 256;                              // of registered memory, and of files
constexpr std::size_t kLargestRegion = std::size_t{1} << 30;  // the kernel's limit
constexpr std::size_t kSmallestRegion = std::size_t{2} << 20;
// A transfer's length has 32 bits, and the kernel moves no more than this by one call.
constexpr std::size_t kLargestTransfer = 0x7ffff000;

// The kernel writes the head of one ring and the tail of the other concurrently.
std::uint32_t load(std::uint32_t* index) {
    return std::atomic_ref<std::uint32_t>(*index).load(std::memory_order_acquire);
}

void store(std::uint32_t* index, std::uint32_t value) {
    std::atomic_ref<std::uint32_t>(*index).store(value, std::memory_order_release);
}

class Descriptor {
  public:
    explicit Descriptor(int number) : number_(number) {}
    ~Descriptor() {
        if (number_ >= 0) close(number_);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    [[nodiscard]] int get() const { return number_; }

  private:
    int number_;
};

class Mapping {
  public:
    Mapping(int descriptor, std::uint64_t what, std::size_t nbytes) : nbytes_(nbytes) {
        start_ = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                      descriptor, static_cast<off_t>(what));
        if (start_ == MAP_FAILED) throw Refused{errno, "mmap"};
        madvise(start_, nbytes, MADV_DONTFORK);  // a forked child opens its own queues
    }
    ~Mapping() { munmap(start_, nbytes_); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    template <typename T>
    [[nodiscard]] T* at(std::size_t offset) const {
        return reinterpret_cast<T*>(static_cast<char*>(start_) + offset);
    }

  private:
    void* start_;
    std::size_t nbytes_;
};

int set_up(unsigned depth, Parameters& parameters) {
    // One extra entry for the bell. First with flags that save interrupts and locks: this thread
    // alone submits, and completions are processed when it asks for them.
    for (const std::uint32_t flags : {kSetupSingleIssuer | kSetupDeferTaskrun, 0u}) {
        parameters = {};
        parameters.flags = flags | kSetupClamp;
        const long made = syscall(kSetupCall, depth + 1, &parameters);
        if (made >= 0) return static_cast<int>(made);
        if (errno != EINVAL) break;
    }
    throw Refused{errno, "io_uring_setup"};
}

class Uring final : public Backend {
  public:
    explicit Uring(unsigned depth)
        : ring_(set_up(depth, parameters_)),
          indices_(ring_.get(), kRings, rings_nbytes()),
          submissions_(ring_.get(), kEntries, parameters_.submissions * sizeof(Submission)) {
        if (parameters_.submissions <= depth) throw Refused{E2BIG, "io_uring_setup"};
        const auto& submission = parameters_.submission;
        const auto& completion = parameters_.completion;
        tail_ = indices_.at<std::uint32_t>(submission.tail);
        mask_ = *indices_.at<std::uint32_t>(submission.mask);
        auto* order = indices_.at<std::uint32_t>(submission.array);
        for (std::uint32_t i = 0; i < parameters_.submissions; ++i) order[i] = i;
        completed_head_ = indices_.at<std::uint32_t>(completion.head);
        completed_tail_ = indices_.at<std::uint32_t>(completion.tail);
        completed_mask_ = *indices_.at<std::uint32_t>(completion.mask);
        completions_ = indices_.at<Completion>(completion.completions);
        ask_what_it_can();
        // None is allocated later.
        refused_.reserve(depth);
        regions_.reserve(kSlots);
        files_.reserve(kSlots);
        listen();
    }

    // The bell's read must end first: closing the ring would only start to cancel it.
    ~Uring() override {
        if (broken_ != 0) return;
        closing_ = true;
        bell_.ring();
        std::vector<Ended> none;
        run(none, true);
    }

    void add(const Transfer& transfer) override {
        if (broken_ != 0) {
            refused_.push_back(transfer.slot);
            return;
        }
        const bool reading = transfer.operation == Operation::kRead;
        Submission& entry = next_entry();
        entry.opcode = reading ? kRead : kWrite;
        entry.descriptor = transfer.descriptor;
        entry.offset = transfer.offset;
        entry.address = reinterpret_cast<std::uintptr_t>(transfer.data);
        entry.nbytes = static_cast<std::uint32_t>(std::min(transfer.nbytes, kLargestTransfer));
        entry.user_data = transfer.slot;
        for (std::size_t i = 0; i < regions_.size(); ++i) {
            if (!regions_[i].holds(transfer.data, entry.nbytes)) continue;
            entry.opcode = reading ? kReadFixed : kWriteFixed;
            entry.buffer = static_cast<std::uint16_t>(i);
            break;
        }
        const auto file = std::find(files_.begin(), files_.end(), transfer.descriptor);
        if (file != files_.end()) {
            entry.flags = kFixedFile;
            entry.descriptor = static_cast<std::int32_t>(file - files_.begin());
        }
    }

    void run(std::vector<Ended>& ended, bool wait) override {
        const std::size_t before = ended.size();
        bool woken = !wait;
        for (;;) {
            woken |= reap(ended);
            for (const unsigned slot : refused_) ended.push_back({slot, -broken_});
            refused_.clear();
            const bool over = woken || ended.size() > before;
            if ((over && added_ == 0) || (closing_ && broken_ != 0)) return;
            if (broken_ == 0) {
                enter(!over);
            } else if (!over) {
                pause();  // transfers in flight may still end
            }
        }
    }

    void wake() override { bell_.ring(); }

    std::size_t register_memory(char* data, std::size_t nbytes) override {
        if (!make_table(kBuffers2, has_buffers_)) return 0;
        // Pinned pages of users other than root count against RLIMIT_MEMLOCK: retry with fewer.
        std::size_t piece = kLargestRegion;
        std::size_t done = 0;
        while (done < nbytes && regions_.size() < kSlots) {
            const std::size_t size = std::min(piece, nbytes - done);
            iovec region{data + done, size};
            if (update(kBuffersUpdate, regions_.size(), &region)) {
                regions_.push_back({data + done, size});
                done += size;
            } else {
                piece = size / 2 / kSmallestRegion * kSmallestRegion;
                if (piece == 0) break;
            }
        }
        return done;
    }

    bool register_file(int descriptor) override {
        if (descriptor < 0 || files_.size() == kSlots || !make_table(kFiles2, has_files_))
            return false;
        std::int32_t number = descriptor;
        if (!update(kFilesUpdate2, files_.size(), &number)) return false;
        files_.push_back(descriptor);
        return true;
    }

  private:
    struct Region {
        char* data;
        std::size_t nbytes;

        [[nodiscard]] bool holds(const char* start, std::size_t count) const {
            return start >= data && start + count <= data + nbytes;
        }
    };

    [[nodiscard]] std::size_t rings_nbytes() const {
        const auto& p = parameters_;
        return std::max(p.submission.array + p.submissions * sizeof(std::uint32_t),
                        p.completion.completions + p.completions * sizeof(Completion));
    }

    // io_uring of Linux 5.1 to 5.5 lacks plain reads and writes.
    void ask_what_it_can() const {
        Probe probe{};
        if (syscall(kRegisterCall, ring_.get(), kProbe, &probe, 64) != 0) {
            throw Refused{errno, "io_uring_register"};
        }
        for (const auto opcode : {kRead, kWrite}) {
            if (opcode > probe.last || (probe.operations[opcode].flags & 1) == 0) {
                throw Refused{ENOSYS, "io_uring_register"};
            }
        }
    }

    Submission& next_entry() {
        Submission& entry = submissions_.at<Submission>(0)[(*tail_ + added_) & mask_];
        std::memset(&entry, 0, sizeof entry);
        ++added_;
        return entry;
    }

    // A read of the bell is always in flight, so that a wait for completions also waits for it.
    void listen() {
        Submission& entry = next_entry();
        entry.opcode = kRead;
        entry.descriptor = bell_.descriptor();
        entry.address = reinterpret_cast<std::uintptr_t>(&rung_);
        entry.nbytes = sizeof rung_;
        entry.user_data = kBell;
    }

    // Submits the added entries, and waits for a completion if `wait`.
    void enter(bool wait) {
        const std::uint32_t handed = added_;
        store(tail_, *tail_ + handed);
        added_ = 0;
        const long count =
            syscall(kEnterCall, ring_.get(), handed, wait ? 1 : 0, kEnterGetEvents, nullptr, 0);
        const int error = count < 0 ? errno : 0;
        const auto taken = count < 0 ? 0u : static_cast<std::uint32_t>(count);
        in_flight_ += taken;
        if (error == 0 && taken == handed) return;
        // The kernel reads entries during the call only, so the rest can be taken back.
        store(tail_, *tail_ - (handed - taken));
        added_ = handed - taken;
        if (error == 0 || error == EINTR) return;
        if (error == EAGAIN || error == EBUSY || error == ENOMEM) {
            // Short of memory, or of completion entries: both become available as transfers end.
            if (in_flight_ <= 1) pause();
            return;
        }
        // Other errors are permanent, such as a seccomp filter installed after the ring was made.
        broken_ = error;
        for (std::uint32_t i = 0; i < added_; ++i) {
            const auto& entry = submissions_.at<Submission>(0)[(*tail_ + i) & mask_];
            if (entry.user_data != kBell)
                refused_.push_back(static_cast<unsigned>(entry.user_data));
        }
        added_ = 0;
    }

    static void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

    // Returns true if the bell rang.
    bool reap(std::vector<Ended>& ended) {
        bool rang = false;
        std::uint32_t head = *completed_head_;
        for (const std::uint32_t tail = load(completed_tail_); head != tail; ++head) {
            const Completion& completion = completions_[head & completed_mask_];
            --in_flight_;
            if (completion.user_data == kBell) {
                rang = true;
            } else {
                ended.push_back({static_cast<unsigned>(completion.user_data), completion.result});
            }
        }
        store(completed_head_, head);
        if (rang && !closing_ && broken_ == 0) listen();
        return rang;
    }

    bool make_table(Register what, bool& made) {
        if (made) return true;
        const ResourceRegister table{kSlots, kSparse, 0, 0, 0};
        made = syscall(kRegisterCall, ring_.get(), what, &table, sizeof table) == 0;
        return made;
    }

    bool update(Register what, std::size_t slot, const void* value) {
        ResourceUpdate change{};
        change.offset = static_cast<std::uint32_t>(slot);
        change.data = reinterpret_cast<std::uintptr_t>(value);
        change.count = 1;
        return syscall(kRegisterCall, ring_.get(), what, &change, sizeof change) >= 0;
    }

    Parameters parameters_;
    Bell bell_;
    Descriptor ring_;
    Mapping indices_;
    Mapping submissions_;
    std::uint64_t rung_ = 0;
    std::uint32_t* tail_;
    std::uint32_t mask_;
    std::uint32_t* completed_head_;
    std::uint32_t* completed_tail_;
    std::uint32_t completed_mask_;
    const Completion* completions_;
    std::uint32_t added_ = 0;      // entries after the tail
    std::uint32_t in_flight_ = 0;  // includes the bell's read
    bool closing_ = false;
    int broken_ = 0;                 // an errno: the ring accepts no more entries
    std::vector<unsigned> refused_;  // slots that the ring did not accept
    bool has_buffers_ = false;
    bool has_files_ = false;
    std::vector<Region> regions_;
    std::vector<int> files_;
};

}  // namespace

std::unique_ptr<Backend> open_uring(unsigned depth) { return std::make_unique<Uring>(depth); }

}  // namespace offload
