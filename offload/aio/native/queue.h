// A queue of reads and writes, cut into blocks that a team of threads moves by pread and pwrite.
//
// Free of Python, so that it can run under sanitizers by itself.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace offload {

enum class Operation { kRead, kWrite };

// One file, open twice. Owned by the caller, who keeps both open until every request on it is done.
struct Descriptors {
    int direct;  // with O_DIRECT, or -1 where the file system has none
    int buffered;
};

// One read or write. The queue and whoever waits share it; `data` is the caller's until `done()`.
class Request {
  public:
    Request(Operation operation, Descriptors file, std::uint64_t offset, char* data,
            std::size_t nbytes)
        : operation_(operation), file_(file), offset_(offset), data_(data), nbytes_(nbytes) {}

    [[nodiscard]] bool done() const { return done_.load(std::memory_order_acquire); }

    // Waits at most `seconds`; whether the request is done.
    [[nodiscard]] bool wait(double seconds);

    // The first error (an errno), or 0. Valid once `done()`.
    [[nodiscard]] int error() const { return error_.load(std::memory_order_relaxed); }

    [[nodiscard]] Operation operation() const { return operation_; }
    [[nodiscard]] std::uint64_t offset() const { return offset_; }
    [[nodiscard]] std::size_t nbytes() const { return nbytes_; }

  private:
    friend class Queue;

    void finish();

    const Operation operation_;
    const Descriptors file_;
    const std::uint64_t offset_;
    char* const data_;
    const std::size_t nbytes_;
    std::atomic<std::size_t> blocks_left_{0};
    std::atomic<int> error_{0};
    std::atomic<bool> done_{false};
    std::mutex mutex_;
    std::condition_variable finished_;
};

class Queue {
  public:
    // std::system_error where the threads cannot be had.
    Queue(unsigned threads, std::size_t block_bytes);

    // Closes. A forked child must not come here: it has no threads to join.
    ~Queue() { close(); }

    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    // Cuts `request` into blocks and queues them; false after `close`.
    [[nodiscard]] bool submit(const std::shared_ptr<Request>& request);

    // Runs what is queued, then joins the threads; idempotent.
    void close();

    [[nodiscard]] std::uint64_t read_bytes() const { return read_bytes_.load(); }
    [[nodiscard]] std::uint64_t written_bytes() const { return written_bytes_.load(); }

  private:
    struct Block {
        std::shared_ptr<Request> request;
        std::size_t start;
        std::size_t nbytes;
        bool direct;
    };

    void run();
    [[nodiscard]] Block next_block();
    void move(const Block& block);

    const std::size_t block_bytes_;
    std::atomic<std::uint64_t> read_bytes_{0};
    std::atomic<std::uint64_t> written_bytes_{0};
    std::mutex mutex_;
    std::condition_variable queued_;
    std::deque<Block> reads_;
    std::deque<Block> writes_;
    unsigned reads_in_a_row_ = 0;
    bool closing_ = false;
    std::mutex closing_mutex_;
    std::vector<std::thread> threads_;
};

}  // namespace offload
