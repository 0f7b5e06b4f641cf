#include "backend.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace offload {
namespace {

// pread and pwrite, which block: one transfer at a time, so a queue uses several such threads.
class Calls final : public Backend {
  public:
    void add(const Transfer& transfer) override { transfer_ = transfer; }

    void run(std::vector<Ended>& ended, bool wait) override {
        if (!wait) return;
        const auto offset = static_cast<off_t>(transfer_.offset);
        const ssize_t count =
            transfer_.operation == Operation::kRead
                ? pread(transfer_.descriptor, transfer_.data, transfer_.nbytes, offset)
                : pwrite(transfer_.descriptor, transfer_.data, transfer_.nbytes, offset);
        ended.push_back({transfer_.slot, count < 0 ? -errno : count});
    }

  private:
    Transfer transfer_{};
};

}  // namespace

std::unique_ptr<Backend> open_calls() { return std::make_unique<Calls>(); }

std::unique_ptr<Backend> open_backend(Kind kind, unsigned depth) {
    switch (kind) {
        case Kind::kUring:
            return open_uring(depth);
        case Kind::kLibaio:
            return open_libaio(depth);
        case Kind::kThreads:
            break;
    }
    return open_calls();
}

Bell::Bell() : descriptor_(eventfd(0, EFD_CLOEXEC)) {
    if (descriptor_ < 0) throw Refused{errno, "eventfd"};
}

Bell::~Bell() { close(descriptor_); }

void Bell::ring() const {
    const std::uint64_t one = 1;
    // Fails only if the eventfd is readable already.
    [[maybe_unused]] const auto written = write(descriptor_, &one, sizeof one);
}

void Bell::clear() const {
    std::uint64_t count;
    [[maybe_unused]] const auto got = read(descriptor_, &count, sizeof count);
}

}  // namespace offload
