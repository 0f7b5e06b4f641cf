// A libcuda that runs what libnvrtc.cpp compiles, at once and on the CPU, and records all calls. It
// refuses what the driver refuses: calls before cuInit, launches without a current context, images
// that it does not know.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr int kInvalidValue = 1, kNotInitialized = 3, kInvalidDevice = 101, kInvalidImage = 200,
              kInvalidContext = 201, kNotFound = 500, kLaunchFailed = 719;

using Run = bool (*)(unsigned, unsigned, void**);

struct Context {
    int device;
};

std::mutex mutex;
std::string calls, refused;
int refusal = 0;
bool initialized = false;
Context contexts[2] = {{0}, {1}};
thread_local std::vector<Context*> stack;

template <class... Values>
int record(const char* name, const char* format, Values... values) {
    const std::lock_guard<std::mutex> lock(mutex);
    char line[256];
    std::snprintf(line, sizeof line, format, values...);
    calls += std::string(name) + line + "\n";
    if (refused == name) return refusal;
    return initialized ? 0 : kNotInitialized;
}

}  // namespace

extern "C" {

// For tests: the calls since the last time, a line each.
const char* fake_calls() {
    static std::string last;
    const std::lock_guard<std::mutex> lock(mutex);
    last = calls;
    calls.clear();
    return last.c_str();
}

// For tests: lets a function return an error from now on; none with an empty name.
void fake_refuse(const char* name, int result) {
    const std::lock_guard<std::mutex> lock(mutex);
    refused = name, refusal = result;
}

int cuInit(unsigned flags) {
    initialized = true;
    return record("cuInit", " %u", flags);
}
int cuGetErrorName(int result, const char** text) {
    if (result == kLaunchFailed) return *text = "CUDA_ERROR_LAUNCH_FAILED", 0;
    if (result == kInvalidImage) return *text = "CUDA_ERROR_INVALID_IMAGE", 0;
    if (result == kInvalidContext) return *text = "CUDA_ERROR_INVALID_CONTEXT", 0;
    return *text = nullptr, kInvalidValue;
}
int cuGetErrorString(int result, const char** text) {
    if (result == kLaunchFailed) return *text = "unspecified launch failure", 0;
    return *text = nullptr, kInvalidValue;
}
int cuDeviceGet(int* device, int ordinal) {
    if (ordinal < 0 || ordinal > 1) return kInvalidDevice;
    *device = ordinal + 40;
    return record("cuDeviceGet", " %d", ordinal);
}
int cuDevicePrimaryCtxRetain(Context** context, int device) {
    if (device < 40 || device > 41) return kInvalidDevice;
    *context = &contexts[device - 40];
    return record("cuDevicePrimaryCtxRetain", " %d", device);
}
int cuCtxPushCurrent_v2(Context* context) {
    const int result = record("cuCtxPushCurrent", " %d", context->device);
    if (!result) stack.push_back(context);
    return result;
}
int cuCtxPopCurrent_v2(Context** context) {
    if (stack.empty()) return kInvalidContext;
    *context = stack.back();
    stack.pop_back();
    return record("cuCtxPopCurrent", " %d", (*context)->device);
}

int cuModuleLoadData(void** module, const char* image) {
    if (stack.empty()) return kInvalidContext;
    const bool machine = !std::memcmp(image, "fakecubn", 8);
    if (!machine && std::memcmp(image, "fake ptx", 8)) return kInvalidImage;
    std::uint64_t size;
    std::memcpy(&size, image + 8, 8);
    // A file in memory that is never closed, so that each program has a path of its own.
    const int file = memfd_create("kernel", MFD_CLOEXEC);
    if (file < 0 || write(file, image + 16, size) != static_cast<ssize_t>(size))
        return kInvalidImage;
    *module = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!*module) return kInvalidImage;
    return record("cuModuleLoadData", " %s", machine ? "cubin" : "PTX");
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    *function = dlsym(module, ("run_" + std::string(name)).c_str());
    return *function ? record("cuModuleGetFunction", " %s", name) : kNotFound;
}
int cuLaunchKernel(void* function, unsigned blocks, unsigned y, unsigned z, unsigned threads,
                   unsigned thread_y, unsigned thread_z, unsigned shared, void* stream,
                   void** arguments, void** extra) {
    if (stack.empty()) return kInvalidContext;
    if (!blocks || !threads || threads > 1024 || y != 1 || z != 1 || thread_y != 1 ||
        thread_z != 1) {
        return kInvalidValue;
    }
    if (shared || extra) return kInvalidValue;
    const int result =
        record("cuLaunchKernel", " %u %u %llx", blocks, threads,
               static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(stream)));
    if (result) return result;
    const std::lock_guard<std::mutex> lock(mutex);
    return reinterpret_cast<Run>(function)(blocks, threads, arguments) ? 0 : kLaunchFailed;
}

}  // extern "C"
