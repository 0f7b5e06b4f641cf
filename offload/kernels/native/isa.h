// One body of code, compiled once for each instruction set and chosen at run time.
//
// [Note: same bits] A body is plain scalar C++ that the compiler vectorizes. Each of its operations
// is rounded once, to nearest, as in IEEE 754 (no contraction to fused multiply-add, no
// reassociation, denormals kept), so that every instruction set gives the same bits. Only the
// payload and sign of a NaN may differ. Elements do not depend on each other, so neither the
// number of threads nor the division of a range into calls affects the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "team.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define OFFLOAD_X86 1
#include <xmmintrin.h>
#define OFFLOAD_AVX2 __attribute__((target("avx2")))
#if defined(__clang__)
#define OFFLOAD_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define OFFLOAD_AVX512 \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#else
#define OFFLOAD_X86 0
#endif

namespace offload {

// "neon" is the code that a compiler generates for ARMv8, which includes vectors; "scalar" is the
// same code there.
enum class Isa { kScalar, kAvx2, kAvx512, kNeon };

[[nodiscard]] std::vector<std::string_view> supported_isas();  // worst first
void set_isa(std::string_view name);  // throws std::invalid_argument if it is not supported
[[nodiscard]] Isa active_isa();

// Overrides the caller's rounding and denormal modes: torch.set_flush_denormal sets them for one
// thread only, so members of the team would round differently from their caller.
class DefaultRounding {
  public:
#if OFFLOAD_X86
    DefaultRounding() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~DefaultRounding() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;

  public:
#elif defined(__aarch64__)
    DefaultRounding() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
        __asm__ volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
    }
    ~DefaultRounding() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

  private:
    std::uint64_t saved_;

  public:
#else
    DefaultRounding() = default;
#endif
    DefaultRounding(const DefaultRounding&) = delete;
    DefaultRounding& operator=(const DefaultRounding&) = delete;
};

// A Body has an always_inline static function `run`. Its versions take the same arguments, each by
// the instruction set of its name.
template <class Body, class Function = decltype(&Body::run)>
struct Versions;

template <class Body, class Result, class... Args>
struct Versions<Body, Result (*)(Args...)> {
    static Result scalar(Args... args) { return Body::run(args...); }
#if OFFLOAD_X86
    OFFLOAD_AVX2 static Result avx2(Args... args) { return Body::run(args...); }
    OFFLOAD_AVX512 static Result avx512(Args... args) { return Body::run(args...); }
#endif
};

template <class Body>
[[nodiscard]] auto version_for(Isa isa) {
#if OFFLOAD_X86
    if (isa == Isa::kAvx512) return &Versions<Body>::avx512;
    if (isa == Isa::kAvx2) return &Versions<Body>::avx2;
#endif
    (void)isa;
    return &Versions<Body>::scalar;
}

// Runs a body over [0, numel) on the team, with the active instruction set: it has `struct Args`
// and `run(const Args&, begin, end)`. `memory` is one of the arrays.
template <class Body>
void run_body(const typename Body::Args& args, std::size_t numel, const void* memory = nullptr) {
    const auto run = version_for<Body>(active_isa());
    share_out(
        numel,
        [&args, run](std::size_t begin, std::size_t end) {
            const DefaultRounding rounding;
            run(args, begin, end);
        },
        memory);
}

}  // namespace offload
