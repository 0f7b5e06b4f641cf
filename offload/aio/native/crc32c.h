// CRC-32C (Castagnoli), as in iSCSI (RFC 3720) and ext4.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace offload {

// Continues `crc`, the CRC of the bytes before (0 at the start), over `nbytes` bytes of `data`.
[[nodiscard]] std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t nbytes);

// Returns the methods that this processor supports, slowest first: "table", "instruction",
// "folding".
[[nodiscard]] const std::vector<std::string_view>& crc32c_ways();

// Computes `crc32c` by one method. Throws std::invalid_argument if it is not supported.
[[nodiscard]] std::uint32_t crc32c_by(std::string_view way, std::uint32_t crc, const void* data,
                                      std::size_t nbytes);

// Blocks may end in any order and still give the CRC of the whole. A CRC without its inversions is
// the remainder of the bytes as a polynomial, and the remainder of a sum is the sum of the
// remainders.
//
//     crc32c(whole) = crc32c_of_start(size of whole)
//                     xor, over all blocks, crc32c_shifted(crc32c_raw(block), bytes after it)

// Returns the remainder of `data` itself.
[[nodiscard]] std::uint32_t crc32c_raw(const void* data, std::size_t nbytes);
// Returns the remainder of bytes with remainder `crc` followed by `nbytes` zero bytes.
[[nodiscard]] std::uint32_t crc32c_shifted(std::uint32_t crc, std::size_t nbytes);
// Writes the remainder of each of `count` pages of 4096 bytes to `remainders`.
void crc32c_raw_pages(const void* data, std::size_t count, std::uint32_t* remainders);
// The same by one method, as `crc32c_by`.
void crc32c_raw_pages_by(std::string_view way, const void* data, std::size_t count,
                         std::uint32_t* remainders);
// Returns `crc32c_shifted(crc, 4096)`, faster.
[[nodiscard]] std::uint32_t crc32c_past_page(std::uint32_t crc);
// Returns the contribution of the inversions at both ends.
[[nodiscard]] std::uint32_t crc32c_of_start(std::size_t nbytes);

}  // namespace offload
