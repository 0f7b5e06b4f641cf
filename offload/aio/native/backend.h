// The ways to have blocks moved by the kernel.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "request.h"

namespace offload {

// A transfer that is over: bytes moved, or a negative errno.
struct Ended {
    unsigned slot;
    long result;
};

// This system does not give what a backend needs. `error` is an errno.
struct Refused {
    int error;
    std::string call;
};

// One way to move blocks. Made, used and destroyed by one thread, but for `wake`. Nothing may be in
// flight when it dies.
class Backend {
  public:
    virtual ~Backend() = default;

    // Takes one more transfer; never more at a time than the depth that it was made for.
    virtual void add(const Transfer& transfer) = 0;

    // Starts what was added, and if `wait`, waits until a transfer has ended or `wake` was called.
    // Appends those that have ended. Something must be in flight. What blocks its thread starts
    // only where it may wait.
    virtual void run(std::vector<Ended>& ended, bool wait) = 0;

    // Ends the present `run` or the next one. From any thread.
    virtual void wake() {}

    // Saves the kernel work for transfers in this memory, or of this file, which must stay as they
    // are as long as the backend lives: pages are pinned. The bytes that it could do so for.
    virtual std::size_t register_memory(char*, std::size_t) { return 0; }
    virtual bool register_file(int) { return false; }
};

enum class Kind { kUring, kLibaio, kThreads };

// Throws `Refused`. `depth` transfers may be in flight (one, for threads).
[[nodiscard]] std::unique_ptr<Backend> open_backend(Kind kind, unsigned depth);

[[nodiscard]] std::unique_ptr<Backend> open_uring(unsigned depth);
[[nodiscard]] std::unique_ptr<Backend> open_libaio(unsigned depth);
[[nodiscard]] std::unique_ptr<Backend> open_calls();

// An eventfd: `ring` from any thread makes it readable.
class Bell {
  public:
    Bell();
    ~Bell();
    Bell(const Bell&) = delete;
    Bell& operator=(const Bell&) = delete;

    void ring() const;
    // Makes it silent again; waits for a ring.
    void clear() const;
    [[nodiscard]] int descriptor() const { return descriptor_; }

  private:
    int descriptor_;
};

}  // namespace offload
