// Backends: the kernel interfaces that move blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "request.h"

namespace offload {

// The result of a transfer: bytes moved, or a negative errno.
struct Ended {
    unsigned slot;
    long result;
};

// Thrown if this system refuses a system call that a backend needs. `error` is an errno.
struct Refused {
    int error;
    std::string call;
};

// A kernel interface that moves blocks. One thread makes, uses and destroys a backend; any thread
// may call `wake`. Nothing may be in flight when a backend is destroyed.
class Backend {
  public:
    virtual ~Backend() = default;

    // Adds a transfer. The caller keeps at most the backend's depth in flight.
    virtual void add(const Transfer& transfer) = 0;

    // Starts the added transfers and appends those that have ended. With `wait`, waits until a
    // transfer has ended or `wake` was called. Something must be in flight. A backend whose
    // transfers block the thread starts them only with `wait`.
    virtual void run(std::vector<Ended>& ended, bool wait) = 0;

    // Ends the current `run` or the next one. Any thread may call this.
    virtual void wake() {}

    // Registers memory, whose pages are pinned, or a file with the kernel, which saves work for
    // each transfer. Both must stay as they are as long as the backend exists. Returns the bytes
    // that were registered, or true.
    virtual std::size_t register_memory(char*, std::size_t) { return 0; }
    virtual bool register_file(int) { return false; }
};

enum class Kind { kUring, kLibaio, kThreads };

// Throws `Refused`. `depth` transfers may be in flight (one, for threads).
[[nodiscard]] std::unique_ptr<Backend> open_backend(Kind kind, unsigned depth);

[[nodiscard]] std::unique_ptr<Backend> open_uring(unsigned depth);
[[nodiscard]] std::unique_ptr<Backend> open_libaio(unsigned depth);
[[nodiscard]] std::unique_ptr<Backend> open_calls();

// Stands for the slot in the end of a poll of the bell, which has no slot.
inline constexpr std::uint64_t kBell = ~std::uint64_t{0};

// An eventfd: `ring` from any thread makes it readable.
class Bell {
  public:
    Bell();
    ~Bell();
    Bell(const Bell&) = delete;
    Bell& operator=(const Bell&) = delete;

    void ring() const;
    // Waits for a ring and resets the eventfd.
    void clear() const;
    [[nodiscard]] int descriptor() const { return descriptor_; }

  private:
    int descriptor_;
};

}  // namespace offload
