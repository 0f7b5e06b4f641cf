// NUMA nodes of memory, and the processors of a node.
#pragma once

#include <sched.h>

#include <string>

namespace offload {

// Returns the processors of a list as Linux writes it: "0-3,8,10-11"; none if it is no list.
[[nodiscard]] cpu_set_t parse_cpus(const std::string& list);

// Returns the node of the page of `memory`; -1 on a machine with one node or if it is unknown.
[[nodiscard]] int node_of(const void* memory);

// Restricts the calling thread to the processors of `allowed` that belong to `node`, or to all of
// `allowed` if none does.
void run_beside(int node, const cpu_set_t& allowed);

}  // namespace offload
