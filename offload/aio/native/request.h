// What is asked of the queue, and the blocks that it is moved in.
//
// Free of Python, so that it can run under sanitizers by itself.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace offload {

enum class Operation { kRead, kWrite };

// Which of two requests goes first. Urgent: somebody waits for it now.
enum class Priority { kUrgent, kNormal, kBackground };
constexpr std::size_t kPriorities = 3;

constexpr std::size_t kPage = 4096;

// One file, open twice. Owned by the caller, who keeps both open until every request on it is done.
struct Descriptors {
    int direct;  // with O_DIRECT, or -1 where the file system has none
    int buffered;
};

// A stretch of a file and the memory that it goes to or comes from.
struct Piece {
    Descriptors file;
    std::uint64_t offset;
    char* data;
    std::size_t nbytes;
};

// Whether a request computes the CRC-32C of its bytes, and compares it with one that is known.
struct Checksum {
    bool wanted = false;
    std::optional<std::uint32_t> expected;
};

// What one system call moves, or what is left of it.
struct Transfer {
    Operation operation;
    int descriptor;
    std::uint64_t offset;
    char* data;
    std::size_t nbytes;
    unsigned slot = 0;  // of the driver that moves it
};

class Request;

// A part of one piece of a request, all of it direct or none.
struct Block {
    std::shared_ptr<Request> request;
    Transfer left;  // not yet moved
    char* data;     // all of the block
    std::size_t nbytes;
    std::size_t piece;
    std::size_t behind;  // bytes of the request behind this block
    int buffered;        // the descriptor that takes what O_DIRECT refuses
    std::uint64_t started_ns = 0;
    std::uint64_t took_ns = 0;
    std::uint32_t crc = 0;
    int error = 0;
};

// One read or write. The queue and whoever waits share it; the memory is the caller's own again
// once it is `done`.
class Request {
  public:
    Request(Operation operation, Priority priority, std::vector<Piece> pieces, Checksum checksum);

    [[nodiscard]] bool done() const { return done_.load(std::memory_order_acquire); }

    // Waits at most `seconds`; whether the request is done.
    [[nodiscard]] bool wait(double seconds);

    // Valid once `done`: the first error (an errno) or 0, and the piece that it was met in.
    [[nodiscard]] int error() const { return error_; }
    [[nodiscard]] std::size_t failed_piece() const { return failed_piece_; }

    // Valid once `done` without an error, where it was wanted.
    [[nodiscard]] std::uint32_t crc() const { return crc_; }

    [[nodiscard]] Operation operation() const { return operation_; }
    [[nodiscard]] Priority priority() const { return priority_; }
    [[nodiscard]] bool wants_crc() const { return checksum_.wanted; }

    // The queue alone calls these, under its lock but for `finish`.

    // Whether a block is left to be cut.
    [[nodiscard]] bool has_block() const { return piece_ < pieces_.size(); }
    // Cuts the next block, of at most `block_bytes`, a multiple of a page.
    [[nodiscard]] Block next_block(std::size_t block_bytes);
    // Takes note of a block that is moved or has failed; whether it was the last one. After an
    // error no further block is cut.
    [[nodiscard]] bool settle(const Block& block);
    // Wakes who waits. The request may be gone when this returns, unless the caller holds it.
    void finish();

    // Not 0 where the queue is to announce the end. Under the queue's lock.
    std::uint64_t tag = 0;

  private:
    void skip_empty();
    void compare();

    const Operation operation_;
    const Priority priority_;
    const Checksum checksum_;
    const std::vector<Piece> pieces_;
    std::size_t piece_ = 0;   // where the next block is cut:
    std::size_t start_ = 0;   // this many bytes into that piece,
    std::size_t behind_ = 0;  // with this many bytes not yet cut
    std::size_t cut_ = 0;     // blocks that are on their way
    std::size_t failed_piece_ = 0;
    int error_ = 0;
    std::uint32_t crc_ = 0;
    std::atomic<bool> done_{false};
    std::mutex mutex_;
    std::condition_variable finished_;
};

// What is to be done after a system call moved `result` bytes, or failed with -`result`.
enum class Next { kDone, kAgain, kLater, kFailed };

// Advances `block`. kAgain: `block.left` is to be moved now; kLater: the same, once others had
// their turn; kFailed: `block.error` says why.
[[nodiscard]] Next advance(Block& block, long result);

}  // namespace offload
