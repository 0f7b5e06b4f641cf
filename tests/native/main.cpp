// Runs every test, or those whose names contain one of the arguments.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.h"

namespace check {
namespace {

struct Test {
    std::string name;
    void (*run)();
};

std::vector<Test>& tests() {
    static std::vector<Test> all;  // within a function: other files list theirs at any time
    return all;
}

}  // namespace

bool list(const char* name, void (*test)()) {
    tests().push_back({name, test});
    return true;
}

void fail(const char* file, int line, const char* condition) {
    std::fprintf(stderr, "%s:%d: not so: %s\n", file, line, condition);
    std::_Exit(1);
}

}  // namespace check

int main(int count, char** arguments) {
    const std::vector<std::string> wanted(arguments + 1, arguments + count);
    int passed = 0;
    for (const auto& test : check::tests()) {
        const auto named = [&](const auto& part) {
            return test.name.find(part) != std::string::npos;
        };
        if (!wanted.empty() && std::none_of(wanted.begin(), wanted.end(), named)) continue;
        std::printf("%s\n", test.name.c_str());
        std::fflush(stdout);
        test.run();
        ++passed;
    }
    std::printf("%d passed\n", passed);
    return passed > 0 ? 0 : 1;
}
