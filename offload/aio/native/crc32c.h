// CRC-32C (Castagnoli), as in iSCSI (RFC 3720) and ext4.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace offload {

// Continues `crc`, the value of the bytes before (0 at the start), over `nbytes` bytes of `data`.
[[nodiscard]] std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t nbytes);

// The ways that this processor knows, slowest first: "table", "instruction", "folding".
[[nodiscard]] const std::vector<std::string_view>& crc32c_ways();

// The same as `crc32c`, by one of them. Throws std::invalid_argument where it is none.
[[nodiscard]] std::uint32_t crc32c_by(std::string_view way, std::uint32_t crc, const void* data,
                                      std::size_t nbytes);

// Blocks that end in any order add up to the CRC of the whole: a CRC without its inversions is the
// remainder of the bytes as a polynomial, so that of a sum is the sum of those.
//
//     crc32c(whole) = crc32c_of_start(size of whole)
//                     xor, over all blocks, crc32c_shifted(crc32c_raw(block), bytes behind it)

// The remainder of `data` itself.
[[nodiscard]] std::uint32_t crc32c_raw(const void* data, std::size_t nbytes);
// The remainder that `crc` is, followed by `nbytes` bytes of zero.
[[nodiscard]] std::uint32_t crc32c_shifted(std::uint32_t crc, std::size_t nbytes);
// The share of the inversions at both ends.
[[nodiscard]] std::uint32_t crc32c_of_start(std::size_t nbytes);

}  // namespace offload
