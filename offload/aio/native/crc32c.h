// CRC-32C (Castagnoli), as in iSCSI (RFC 3720) and ext4.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload {

// Continues `crc`, the value of the bytes before (0 at the start), over `nbytes` bytes of `data`.
[[nodiscard]] std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t nbytes);

// The same, without the instruction of SSE4.2.
[[nodiscard]] std::uint32_t crc32c_by_table(std::uint32_t crc, const void* data,
                                            std::size_t nbytes);

}  // namespace offload
