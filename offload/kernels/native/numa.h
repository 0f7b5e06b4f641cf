// Which node of a NUMA machine memory lies on, and which processors are beside it.
#pragma once

#include <sched.h>

#include <string>

namespace offload {

// The processors of a list as Linux writes it: "0-3,8,10-11". What is no list is none.
[[nodiscard]] cpu_set_t parse_cpus(const std::string& list);

// The node that the page of `memory` lies on; -1 on a machine with one node, or where nobody knows.
[[nodiscard]] int node_of(const void* memory);

// Lets the calling thread run on those of `allowed` that are beside `node`, or on all of `allowed`
// where none is.
void run_beside(int node, const cpu_set_t& allowed);

}  // namespace offload
