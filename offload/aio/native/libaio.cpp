// A backend on Linux's older asynchronous I/O (io_setup and related calls), by raw system calls.
// Docker's default seccomp profile allows these, but not io_uring.

#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <ctime>
#include <thread>
#include <utility>
#include <vector>

#include "backend.h"

namespace offload {
namespace {

constexpr unsigned kPoll = 5;  // IOCB_CMD_POLL, of Linux 4.18

class Libaio final : public Backend {
  public:
    explicit Libaio(unsigned depth) : commands_(depth), events_(depth + 1) {
        added_.reserve(depth + 1);  // none is allocated later
        if (syscall(SYS_io_setup, depth + 1, &context_) != 0) throw Refused{errno, "io_setup"};
        // Polling shows at once if this kernel is new enough.
        listen();
        iocb* first = added_.front();
        if (syscall(SYS_io_submit, context_, 1, &first) != 1) {
            const int error = errno;
            syscall(SYS_io_destroy, context_);
            throw Refused{error, "io_submit"};
        }
        added_.clear();
    }

    // Waits for the poll to be cancelled.
    ~Libaio() override { syscall(SYS_io_destroy, context_); }

    void add(const Transfer& transfer) override {
        iocb& command = commands_[transfer.slot];
        command = {};
        command.aio_data = transfer.slot;
        command.aio_lio_opcode =
            transfer.operation == Operation::kRead ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
        command.aio_fildes = static_cast<std::uint32_t>(transfer.descriptor);
        command.aio_buf = reinterpret_cast<std::uintptr_t>(transfer.data);
        command.aio_nbytes = transfer.nbytes;
        command.aio_offset = static_cast<std::int64_t>(transfer.offset);
        added_.push_back(&command);
    }

    void run(std::vector<Ended>& ended, bool wait) override {
        const std::size_t before = ended.size();
        bool over = !wait;
        do {
            submit(ended);
            over |= ended.size() > before;
            over |= reap(ended, !over);
        } while (!over && ended.size() == before);
    }

    void wake() override { bell_.ring(); }

  private:
    void listen() {
        poll_ = {};
        poll_.aio_data = kBell;
        poll_.aio_lio_opcode = kPoll;
        poll_.aio_fildes = static_cast<std::uint32_t>(bell_.descriptor());
        poll_.aio_buf = POLLIN;
        added_.push_back(&poll_);
    }

    // A transfer that is refused at once has ended. If the kernel is short of a resource, the next
    // call retries the remaining transfers.
    void submit(std::vector<Ended>& ended) {
        std::size_t begun = 0;
        while (begun < added_.size()) {
            const long count =
                syscall(SYS_io_submit, context_, added_.size() - begun, added_.data() + begun);
            for (long i = 0; i < count; ++i) in_flight_ += added_[begun++] != &poll_;
            if (count > 0) continue;
            const int error = count == 0 ? EAGAIN : errno;
            if (error == EINTR) continue;
            if (error == EAGAIN) {
                if (in_flight_ == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                break;
            }
            const iocb* refused = added_[begun++];
            if (refused == &poll_) {
                deaf_ = true;
            } else {
                // EINVAL is also the error for files that do not support asynchronous I/O at all.
                const long result = error == EINVAL ? call(*refused) : -error;
                ended.push_back({static_cast<unsigned>(refused->aio_data), result});
            }
        }
        added_.erase(added_.begin(), added_.begin() + static_cast<std::ptrdiff_t>(begun));
        if (std::exchange(deaf_, false)) listen();  // retry at the next call
    }

    static long call(const iocb& command) {
        void* data = reinterpret_cast<void*>(command.aio_buf);
        const int file = static_cast<int>(command.aio_fildes);
        const ssize_t count = command.aio_lio_opcode == IOCB_CMD_PREAD
                                  ? pread(file, data, command.aio_nbytes, command.aio_offset)
                                  : pwrite(file, data, command.aio_nbytes, command.aio_offset);
        return count < 0 ? -errno : count;
    }

    // Returns true if the bell rang.
    bool reap(std::vector<Ended>& ended, bool wait) {
        if (in_flight_ == 0) wait = false;
        timespec no_time{0, 0};
        const long count = syscall(SYS_io_getevents, context_, wait ? 1 : 0, events_.size(),
                                   events_.data(), wait ? nullptr : &no_time);
        bool rang = false;
        for (long i = 0; i < count; ++i) {
            const auto& event = events_[static_cast<std::size_t>(i)];
            if (event.data == kBell) {
                bell_.clear();
                listen();
                rang = true;
            } else {
                --in_flight_;
                ended.push_back({static_cast<unsigned>(event.data), static_cast<long>(event.res)});
            }
        }
        // The caller retries after EINTR; any other error must not make it spin.
        if (count < 0 && errno != EINTR) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return rang;
    }

    Bell bell_;
    aio_context_t context_ = 0;
    iocb poll_{};
    std::vector<iocb> commands_;  // one for each slot
    std::vector<iocb*> added_;    // not yet submitted
    std::vector<io_event> events_;
    bool deaf_ = false;          // the poll was refused
    std::size_t in_flight_ = 0;  // transfers, not the poll
};

}  // namespace

std::unique_ptr<Backend> open_libaio(unsigned depth) { return std::make_unique<Libaio>(depth); }

}  // namespace offload
