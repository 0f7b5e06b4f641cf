// The part of CUDA C++ that the kernels use, for a C++ compiler: a grid is a loop over warps, and
// the threads of a warp are contexts that run one after the other, each up to its next shuffle.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <utility>

#define __device__
#define __forceinline__ inline
#define __global__

namespace emulated {

struct Index {
    unsigned x = 0;
};

constexpr unsigned kWarp = 32;

struct Thread {
    ucontext_t context;
    char stack[64 * 1024];
    bool there = false, waits = false;
    unsigned index = 0, mask = 0, source = 0;
    double value = 0;
};

struct Warp {
    ucontext_t scheduler;
    Thread threads[kWarp];
    void (*body)(void*) = nullptr;
    void* arguments = nullptr;
    unsigned running = 0;
};

inline Warp warp;
inline Index block_index, thread_index, block_dim, grid_dim;

inline double shuffle(unsigned mask, double value, unsigned source) {
    Thread& thread = warp.threads[warp.running];
    thread.waits = true;
    thread.mask = mask, thread.value = value, thread.source = source;
    swapcontext(&thread.context, &warp.scheduler);
    return thread.value;
}

inline void run_thread() {
    warp.body(warp.arguments);
    warp.threads[warp.running].there = false;
}

// Runs a thread up to its next shuffle or to its end.
inline void resume(unsigned lane) {
    Thread& thread = warp.threads[lane];
    warp.running = lane;
    thread_index.x = thread.index;
    swapcontext(&warp.scheduler, &thread.context);
}

// Exchanges the values of all that wait. Returns false where a thread of a mask is not at this
// shuffle, or where a value is taken from a thread outside of the mask: a GPU would hang, or take
// any value.
inline bool exchange() {
    double taken[kWarp] = {};
    for (unsigned lane = 0; lane < kWarp; ++lane) {
        const Thread& thread = warp.threads[lane];
        if (!thread.waits) continue;
        if (!(thread.mask >> lane & 1) || !(thread.mask >> thread.source & 1)) return false;
        for (unsigned other = 0; other < kWarp; ++other) {
            const Thread& peer = warp.threads[other];
            if ((thread.mask >> other & 1) && !(peer.waits && peer.mask == thread.mask))
                return false;
        }
        taken[lane] = warp.threads[thread.source].value;
    }
    for (unsigned lane = 0; lane < kWarp; ++lane) {
        Thread& thread = warp.threads[lane];
        if (thread.waits) thread.value = taken[lane];
        thread.waits = false;
    }
    return true;
}

// Runs the threads from `first` on, one warp of a block. Returns false after a wrong shuffle.
inline bool run_warp(unsigned first) {
    for (unsigned lane = 0; lane < kWarp; ++lane) {
        Thread& thread = warp.threads[lane];
        thread.there = first + lane < block_dim.x;
        thread.waits = false;
        thread.index = first + lane;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack;
        thread.context.uc_stack.ss_size = sizeof thread.stack;
        thread.context.uc_link = &warp.scheduler;
        makecontext(&thread.context, run_thread, 0);
    }
    for (bool more = true; more;) {
        more = false;
        for (unsigned lane = 0; lane < kWarp; ++lane) {
            if (warp.threads[lane].there) resume(lane);
            more = more || warp.threads[lane].there;
        }
        if (!exchange()) return false;
    }
    return true;
}

template <class... Types, std::size_t... Is>
void apply(void (*kernel)(Types...), void** arguments, std::index_sequence<Is...>) {
    kernel(*static_cast<std::remove_reference_t<Types>*>(arguments[Is])...);
}

template <class... Types>
struct Call {
    void (*kernel)(Types...);
    void** arguments;
    static void body(void* self) {
        const Call* call = static_cast<Call*>(self);
        apply(call->kernel, call->arguments, std::index_sequence_for<Types...>());
    }
};

// Runs a kernel on a grid, from arguments as cuLaunchKernel takes them.
template <class... Types>
bool run(void (*kernel)(Types...), unsigned blocks, unsigned threads, void** arguments) {
    Call<Types...> call{kernel, arguments};
    warp.body = &Call<Types...>::body, warp.arguments = &call;
    grid_dim.x = blocks, block_dim.x = threads;
    for (block_index.x = 0; block_index.x < blocks; ++block_index.x) {
        for (unsigned first = 0; first < threads; first += kWarp) {
            if (!run_warp(first)) return false;
        }
    }
    return true;
}

}  // namespace emulated

#define blockIdx emulated::block_index
#define threadIdx emulated::thread_index
#define blockDim emulated::block_dim
#define gridDim emulated::grid_dim

static inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
static inline double __shfl_sync(unsigned mask, double value, int source, int width) {
    const unsigned lane = threadIdx.x % emulated::kWarp;
    return emulated::shuffle(mask, value, lane / width * width + source % width);
}
static inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, unsigned lanes, int width) {
    const unsigned lane = threadIdx.x % emulated::kWarp, source = lane ^ lanes;
    // A double has every value of 32 bits.
    const bool within = source / width == lane / width;
    return static_cast<unsigned>(emulated::shuffle(mask, value, within ? source : lane));
}
static inline double __shfl_down_sync(unsigned mask, double value, unsigned delta, int width) {
    const unsigned lane = threadIdx.x % emulated::kWarp;
    return emulated::shuffle(mask, value, lane % width + delta < width ? lane + delta : lane);
}
