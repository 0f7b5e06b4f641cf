// Requests to the queue, and the blocks in which they are moved.
//
// Free of Python, so that tests can run this code under sanitizers.
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

// Priority of a request, highest first. Urgent: a thread waits for the request now.
enum class Priority { kUrgent, kNormal, kBackground };
constexpr std::size_t kPriorities = 3;

constexpr std::size_t kPage = 4096;

// A file, opened twice. The caller keeps both descriptors open until every request on it is done.
struct Descriptors {
    int direct;  // with O_DIRECT, or -1 if the file system refuses it
    int buffered;
};

// A range of a file, and the memory that the bytes go to or come from.
struct Piece {
    Descriptors file;
    std::uint64_t offset;
    char* data;
    std::size_t nbytes;
};

// Checksum options of a request: compute the CRC-32C of the whole and of each page, and compare the
// CRC-32C of the whole with an expected one.
struct Checksum {
    bool wanted = false;
    std::optional<std::uint32_t> expected;
};

// The bytes that one system call moves, or the rest of them.
struct Transfer {
    Operation operation;
    int descriptor;
    std::uint64_t offset;
    char* data;
    std::size_t nbytes;
    unsigned slot = 0;  // of the driver that moves it
};

class Request;

// A part of one piece of a request. Either all of a block is direct or none.
struct Block {
    std::shared_ptr<Request> request;
    Transfer left;  // not yet moved
    char* data;     // all of the block
    std::size_t nbytes;
    std::size_t piece;
    std::size_t behind;  // bytes of the request after this block
    std::size_t at;      // bytes from the page in which the request begins to this block
    int buffered;        // the descriptor for bytes that O_DIRECT refuses
    std::uint64_t started_ns = 0;
    std::uint64_t took_ns = 0;
    // Set by `sum`: the remainder of the block, and the remainder of each part of a page in it.
    std::uint32_t crc = 0;
    std::vector<std::uint32_t> pages{};
    int error = 0;
};

// Computes the remainders of a block's bytes. Any thread may call it, for a block of its own.
void sum(Block& block);

// A read or write, shared by the queue and the threads that wait for it. The queue owns the memory
// until the request is `done`.
class Request {
  public:
    Request(Operation operation, Priority priority, std::vector<Piece> pieces, Checksum checksum);

    [[nodiscard]] bool done() const { return done_.load(std::memory_order_acquire); }

    // Waits at most `seconds`. Returns true if the request is done.
    [[nodiscard]] bool wait(double seconds);

    // Valid once `done`: the first error (an errno) or 0, and the piece in which it occurred.
    [[nodiscard]] int error() const { return error_; }
    [[nodiscard]] std::size_t failed_piece() const { return failed_piece_; }

    // Valid once `done` without an error, if a checksum was requested.
    [[nodiscard]] std::uint32_t crc() const { return crc_; }
    // The same for each page, over the bytes of the request in it. The first page is the page of
    // the file in which the first piece begins.
    [[nodiscard]] const std::vector<std::uint32_t>& page_crcs() const { return page_crcs_; }

    [[nodiscard]] Operation operation() const { return operation_; }
    [[nodiscard]] Priority priority() const { return priority_; }
    [[nodiscard]] bool wants_crc() const { return checksum_.wanted; }

    // The queue alone calls the following, under its lock except for `finish`.

    // Returns true if `next_block` would return a block.
    [[nodiscard]] bool has_block() const { return piece_ < pieces_.size(); }
    // Cuts the next block, of at most `block_bytes`, a multiple of a page.
    [[nodiscard]] Block next_block(std::size_t block_bytes);
    // Records a block that was moved or has failed. Returns true if it was the last one. After an
    // error no further block is cut.
    [[nodiscard]] bool settle(const Block& block);
    // Wakes waiting threads. Unless the caller holds a reference, the request may be destroyed when
    // this returns.
    void finish();

    // The tag under which the queue announces the end; 0 for none. Guarded by the queue's lock.
    std::uint64_t tag = 0;

  private:
    void skip_empty();
    void compare();
    // Bytes from the page in which the request begins to the first byte, and to the end.
    [[nodiscard]] std::size_t first() const {
        return pieces_.empty() ? 0 : pieces_[0].offset % kPage;
    }
    [[nodiscard]] std::size_t end() const { return first() + nbytes_; }

    const Operation operation_;
    const Priority priority_;
    const Checksum checksum_;
    const std::vector<Piece> pieces_;
    std::size_t piece_ = 0;   // where the next block is cut:
    std::size_t start_ = 0;   // this many bytes into that piece,
    std::size_t behind_ = 0;  // with this many bytes not yet cut
    std::size_t nbytes_ = 0;  // all bytes
    std::size_t cut_ = 0;     // blocks in flight
    std::size_t failed_piece_ = 0;
    int error_ = 0;
    std::uint32_t crc_ = 0;
    std::vector<std::uint32_t> page_crcs_;
    std::atomic<bool> done_{false};
    std::mutex mutex_;
    std::condition_variable finished_;
};

// The action after a system call moved `result` bytes, or failed with errno -`result`.
enum class Next { kDone, kAgain, kLater, kFailed };

// Advances `block`. kAgain: move `block.left` now. kLater: move `block.left` after other blocks had
// their turn. kFailed: `block.error` is the errno.
[[nodiscard]] Next advance(Block& block, long result);

}  // namespace offload
