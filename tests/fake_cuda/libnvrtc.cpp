// A libnvrtc that compiles kernels to C++: what it gives as machine code is a shared library behind
// 16 bytes, which libcuda.cpp loads. COMPILER and HEADER come from the build.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

struct Program {
    std::string source, log, image;
};

std::vector<std::string> commands;
std::string last;

std::string content(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// The names of all kernels of a source.
std::vector<std::string> kernels(const std::string& source) {
    const std::string mark = "__global__ void ";
    std::vector<std::string> found;
    for (auto at = source.find(mark); at != std::string::npos; at = source.find(mark, at)) {
        at += mark.size();
        found.push_back(source.substr(at, source.find('(', at) - at));
    }
    return found;
}

int copy(const std::string& from, char* to) {
    std::memcpy(to, from.data(), from.size());
    return 0;
}

}  // namespace

extern "C" {

// For tests: the options of each compilation so far, a line each.
const char* fake_compilations() {
    last.clear();
    for (const auto& command : commands) last += command + "\n";
    return last.c_str();
}

int nvrtcVersion(int* major, int* minor) {
    const char* version = std::getenv("FAKE_NVRTC_VERSION");
    return std::sscanf(version ? version : "99.1", "%d.%d", major, minor) == 2 ? 0 : 3;
}
int nvrtcGetNumSupportedArchs(int* count) { return *count = 3, 0; }
int nvrtcGetSupportedArchs(int* all) { return all[0] = 75, all[1] = 80, all[2] = 90, 0; }
const char* nvrtcGetErrorString(int result) {
    return result == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_INVALID_INPUT";
}

int nvrtcCreateProgram(Program** program, const char* source, const char*, int headers,
                       const char* const*, const char* const*) {
    if (headers != 0) return 3;
    *program = new Program{source, "", ""};
    return 0;
}
int nvrtcDestroyProgram(Program** program) {
    delete *program;
    *program = nullptr;
    return 0;
}

int nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    std::string defines, all;
    bool fused = true, machine = false;
    for (int i = 0; i < count; ++i) {
        const std::string option = options[i];
        all += option + " ";
        if (option.rfind("-D", 0) == 0) defines += " " + option;
        if (option == "--fmad=false") fused = false;
        if (option.rfind("--gpu-architecture=sm_", 0) == 0) machine = true;
    }
    commands.push_back(all);
    char folder[] = "/tmp/fake-nvrtc-XXXXXX";
    if (!mkdtemp(folder)) return 1;
    const std::string base = folder;
    {
        std::ofstream file(base + "/kernel.cpp");
        file << "#include \"" HEADER "\"\n" << program->source;
        for (const auto& name : kernels(program->source)) {
            file << "\nextern \"C\" bool run_" << name
                 << "(unsigned blocks, unsigned threads, void** arguments) {\n"
                 << "    return emulated::run(" << name << ", blocks, threads, arguments);\n}\n";
        }
    }
    const std::string command =
        COMPILER " -std=c++17 -O1 -shared -fPIC -Wno-unknown-pragmas -ffp-contract=" +
        std::string(fused ? "fast" : "off") + defines + " " + base + "/kernel.cpp -o " + base +
        "/kernel.so 2> " + base + "/log";
    const int failed = std::system(command.c_str());
    program->log = content(base + "/log");
    const std::string library = failed ? "" : content(base + "/kernel.so");
    const std::uint64_t size = library.size();
    program->image = std::string(machine ? "fakecubn" : "fake ptx") +
                     std::string(reinterpret_cast<const char*>(&size), 8) + library;
    std::system(("rm -r " + base).c_str());
    return failed ? 6 : 0;
}

int nvrtcGetProgramLogSize(Program* program, std::size_t* size) {
    return *size = program->log.size() + 1, 0;
}
int nvrtcGetProgramLog(Program* program, char* log) {
    return std::strcpy(log, program->log.c_str()), 0;
}
int nvrtcGetCUBINSize(Program* program, std::size_t* size) {
    return *size = program->image.rfind("fakecubn", 0) == 0 ? program->image.size() : 0, 0;
}
int nvrtcGetCUBIN(Program* program, char* image) { return copy(program->image, image); }
int nvrtcGetPTXSize(Program* program, std::size_t* size) {
    return *size = program->image.size(), 0;
}
int nvrtcGetPTX(Program* program, char* image) { return copy(program->image, image); }

}  // extern "C"
