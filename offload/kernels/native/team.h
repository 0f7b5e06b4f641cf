// A team of threads that processes one range at a time, divided into chunks.
#pragma once

#include <cstddef>
#include <functional>

namespace offload {

// A task receives [begin, end); `begin` is a multiple of kChunk, and so is every `end` but the
// last.
using RangeTask = std::function<void(std::size_t begin, std::size_t end)>;

inline constexpr std::size_t kChunk = 32768;  // elements that a thread claims at a time

// Returns the number of threads that a call may use, the calling one included; at least 1.
void set_thread_count(int count);
[[nodiscard]] int thread_count();

// Calls `task` once for each chunk of [0, numel), on the team and on the calling thread, and
// returns when all are done. A range of one chunk is processed by the calling thread alone, and so
// is each chunk at whose turn the team is busy with another caller. `task` must not throw. On a
// machine with several NUMA nodes the team runs on the node of `memory`, which the task works on.
void share_out(std::size_t numel, const RangeTask& task, const void* memory = nullptr);

}  // namespace offload
