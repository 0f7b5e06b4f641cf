// A test suite without a framework: TEST names a test, CHECK ends the process where it does not
// hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>

namespace check {

// Takes note of a test; the value is there to be the initializer of something.
bool list(const char* name, void (*test)());

// Prints where, and ends the process at once: other threads may still be running.
[[noreturn]] void fail(const char* file, int line, const char* condition);

// The same numbers on every machine, which the standard's distributions do not promise.
class Random {
  public:
    explicit Random(std::uint64_t seed) : engine_(seed) {}

    std::size_t below(std::size_t limit) { return engine_() % limit; }
    std::size_t between(std::size_t least, std::size_t most) {
        return least + below(most - least + 1);
    }
    bool one_in(std::size_t n) { return below(n) == 0; }
    void fill(char* data, std::size_t nbytes) {
        for (; nbytes >= 8; data += 8, nbytes -= 8) {
            const std::uint64_t word = engine_();
            std::memcpy(data, &word, 8);
        }
        for (; nbytes > 0; --nbytes) *data++ = static_cast<char>(engine_());
    }

  private:
    std::mt19937_64 engine_;
};

}  // namespace check

#define CHECK(condition)                                                 \
    do {                                                                 \
        if (!(condition)) ::check::fail(__FILE__, __LINE__, #condition); \
    } while (false)

#define TEST(name)                                                                    \
    static void name();                                                               \
    [[maybe_unused]] static const bool name##_is_listed = ::check::list(#name, name); \
    static void name()
