#include "numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace offload {
namespace {

constexpr unsigned long kOfTheNode = 1 | 2;  // MPOL_F_NODE | MPOL_F_ADDR

std::string read_list(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

bool has_several_nodes() {
    const cpu_set_t nodes = parse_cpus(read_list("/sys/devices/system/node/online"));
    return CPU_COUNT(&nodes) > 1;
}

}  // namespace

cpu_set_t parse_cpus(const std::string& list) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    std::istringstream parts(list);
    for (std::string part; std::getline(parts, part, ',');) {
        char* end = nullptr;
        const long first = std::strtol(part.c_str(), &end, 10);
        if (end == part.c_str()) continue;
        const long last = *end == '-' ? std::strtol(end + 1, nullptr, 10) : first;
        for (long cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) {
            CPU_SET(static_cast<std::size_t>(cpu), &cpus);
        }
    }
    return cpus;
}

int node_of(const void* memory) {
    static const bool several = has_several_nodes();
    if (!several || memory == nullptr) return -1;
    int node = -1;
    if (syscall(SYS_get_mempolicy, &node, nullptr, 0, memory, kOfTheNode) != 0) return -1;
    return node;
}

void run_beside(int node, const cpu_set_t& allowed) {
    const auto path = "/sys/devices/system/node/node" + std::to_string(node) + "/cpulist";
    const cpu_set_t beside = node < 0 ? allowed : parse_cpus(read_list(path));
    cpu_set_t both;
    CPU_AND(&both, &beside, &allowed);
    const cpu_set_t& chosen = CPU_COUNT(&both) > 0 ? both : allowed;
    sched_setaffinity(0, sizeof chosen, &chosen);  // if refused, any processor will do
}

}  // namespace offload
