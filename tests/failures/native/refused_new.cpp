// Preloaded into a process: one call of `operator new` by the native code of the package finds no
// memory, as `refuse_new` says. All other code gets what it asks for.
#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<long> left{-1};    // calls until the one that fails; below 0, none will
std::atomic<long> refused{0};  // calls that have failed

bool is_ours(const void* caller) {
    Dl_info about;
    return dladdr(caller, &about) != 0 && about.dli_fname != nullptr &&
           std::strstr(about.dli_fname, "/offload/") != nullptr &&
           std::strstr(about.dli_fname, "/_native.") != nullptr;
}

}  // namespace

// Lets the call after `calls` others fail; -1 for none. Returns how many have failed so far.
extern "C" long refuse_new(long calls) {
    left = calls;
    return refused;
}

void* operator new(std::size_t nbytes) {
    if (left >= 0 && is_ours(__builtin_return_address(0)) && left.fetch_sub(1) == 0) {
        ++refused;
        throw std::bad_alloc();
    }
    if (void* memory = std::malloc(nbytes == 0 ? 1 : nbytes)) return memory;
    throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
