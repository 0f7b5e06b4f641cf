// A team of threads that shares out one range at a time.
#pragma once

#include <cstddef>
#include <functional>

namespace offload {

// A task gets [begin, end); `begin` is always a multiple of kChunk, and so is `end` but the last.
using RangeTask = std::function<void(std::size_t begin, std::size_t end)>;

inline constexpr std::size_t kChunk = 32768;  // elements: what one thread claims at a time

// Threads that a call may use, the calling one included; at least 1.
void set_thread_count(int count);
[[nodiscard]] int thread_count();

// Calls `task` once for each chunk of [0, numel), on the team and on the calling thread, and
// returns when all are done. A range of one chunk, or one that finds the team busy with another
// caller, is done wholly by the calling thread. `task` must not throw. On a machine with several
// NUMA nodes the team runs beside `memory`, which the task works on.
void share_out(std::size_t numel, const RangeTask& task, const void* memory = nullptr);

}  // namespace offload
