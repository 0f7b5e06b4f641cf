// The queue over the kernel: the same work through each way to have blocks moved.

#include "backend.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "queue.h"
#include "storm.h"

namespace {

using namespace offload;
using check::Random;
using storm::Memory;
using storm::Storm;

// A file without a name, open twice; directly where the file system can.
class File {
  public:
    explicit File(std::size_t nbytes) {
        const char* folder = std::getenv("TMPDIR");
        std::string path = std::string(folder ? folder : "/tmp") + "/offload-native-XXXXXX";
        descriptors_.buffered = mkstemp(path.data());
        CHECK(descriptors_.buffered >= 0);
        descriptors_.direct = open(path.c_str(), O_RDWR | O_CLOEXEC | O_DIRECT);
        unlink(path.c_str());
        CHECK(ftruncate(descriptors_.buffered, static_cast<off_t>(nbytes)) == 0);
    }
    ~File() {
        close(descriptors_.buffered);
        if (descriptors_.direct >= 0) close(descriptors_.direct);
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    [[nodiscard]] const Descriptors& descriptors() const { return descriptors_; }
    [[nodiscard]] std::vector<char> bytes(std::size_t nbytes) const {
        std::vector<char> all(nbytes);
        const auto count = pread(descriptors_.buffered, all.data(), nbytes, 0);
        CHECK(count == static_cast<ssize_t>(nbytes));
        return all;
    }

  private:
    Descriptors descriptors_{};
};

constexpr struct {
    Kind kind;
    const char* name;
} kKinds[] = {{Kind::kUring, "io_uring"}, {Kind::kLibaio, "libaio"}, {Kind::kThreads, "threads"}};

// Runs `test` with a queue of one driver and one of three, through each way that this system gives.
void with_each(const std::function<void(Queue&, Kind)>& test) {
    for (const auto [kind, name] : kKinds) {
        for (const unsigned threads : {1u, 3u}) {
            const unsigned depth = kind == Kind::kThreads ? 1 : 16;
            std::unique_ptr<Queue> queue;
            try {
                const auto open = [kind = kind, depth] { return open_backend(kind, depth); };
                queue = std::make_unique<Queue>(open, threads, depth, 8 * kPage);
            } catch (const Refused& refused) {
                std::printf("  skipped: %s: %s: %s\n", name, refused.call.c_str(),
                            std::strerror(refused.error));
                break;
            }
            test(*queue, kind);
        }
    }
}

TEST(backends_read_and_write_at_random) {
    with_each([](Queue& queue, Kind) {
        const File file(3 * 400'001);
        Storm storm({.file = file.descriptors(), .part = 400'001, .bad = {}});
        storm.rage(queue);
        CHECK(storm.failed() == 0);
        CHECK(storm.fits(file.bytes(storm.file_bytes()).data()));
        for (const auto operation : {Operation::kRead, Operation::kWrite}) {
            CHECK(queue.moved_bytes(operation) == storm.asked_bytes(operation));
            const double median = queue.latency(operation, 0.5);
            CHECK(median > 0 && median <= queue.latency(operation, 0.99));
        }
    });
}

TEST(backends_move_thousands_of_small_requests) {
    with_each([](Queue& queue, Kind) {
        const File file(3 * 20'001);
        Storm storm({.file = file.descriptors(), .part = 20'001, .cuts = 300, .bad = {}});
        storm.rage(queue);
        CHECK(storm.fits(file.bytes(storm.file_bytes()).data()));
    });
}

TEST(backends_move_registered_memory_of_registered_files) {
    with_each([](Queue& queue, Kind kind) {
        const File file(3 * 400'001);
        Storm storm({.file = file.descriptors(), .part = 400'001, .bad = {}});
        // Before, and while work goes on. The rest of the memory and the file stays as it is.
        const auto& [direct, buffered] = file.descriptors();
        const auto& first = storm.memory()[0];
        const auto registered = queue.register_memory(first.data(), first.size());
        CHECK(registered <= first.size());
        const bool file_too = queue.register_file(buffered);
        if (kind != Kind::kUring) CHECK(registered == 0 && !file_too);
        std::thread working([&] { storm.rage(queue); });
        const auto& second = storm.memory()[1];
        CHECK(queue.register_memory(second.data(), second.size()) <= second.size());
        if (direct >= 0) CHECK(queue.register_file(direct) == file_too);
        CHECK(!queue.register_file(-1));
        working.join();
        CHECK(storm.fits(file.bytes(storm.file_bytes()).data()));
        queue.close();  // before the memory goes
    });
}

TEST(backends_say_what_failed) {
    with_each([](Queue& queue, Kind) {
        const File file(10'000);
        Memory memory(16 * kPage);
        char* data = memory.data();
        const Descriptors good = file.descriptors();
        const Descriptors reading{-1, open("/dev/null", O_RDONLY | O_CLOEXEC)};
        const auto ask = [&](Operation operation, std::vector<Piece> pieces) {
            auto request = std::make_shared<Request>(operation, Priority::kNormal,
                                                     std::move(pieces), Checksum{});
            CHECK(queue.submit(request));
            return request;
        };
        const auto past =
            ask(Operation::kRead, {{good, 0, data, 10}, {good, 8'192, data + kPage, 1'809}});
        const auto whole = ask(Operation::kRead, {{good, 0, data + 4 * kPage, 10'000}});
        const auto refused = ask(Operation::kWrite, {{reading, 0, data + 8 * kPage, 10}});
        const auto unknown = ask(Operation::kRead, {{{-1, -1}, 0, data + 9 * kPage, 10}});
        for (const auto& request : {past, whole, refused, unknown}) storm::wait(*request);
        CHECK(past->error() == ENODATA && past->failed_piece() == 1);
        CHECK(whole->error() == 0);
        CHECK(refused->error() == EBADF && unknown->error() == EBADF);
        close(reading.buffered);
    });
}

TEST(backends_come_and_go) {
    for (const auto [kind, name] : kKinds) {
        for (int turn = 0; turn < 20; ++turn) {
            try {
                const auto unused = open_backend(kind, 1 + static_cast<unsigned>(turn));
                unused->wake();
            } catch (const Refused&) {
                break;
            }
        }
    }
}

}  // namespace
