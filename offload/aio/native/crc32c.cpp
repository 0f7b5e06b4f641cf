#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace offload {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reflected

// Slicing by 8 (Kounavis and Berry, 2005): tables[k][b] is the CRC of byte b followed by k zeros.
constexpr std::array<std::array<std::uint32_t, 256>, 8> make_tables() {
    std::array<std::array<std::uint32_t, 256>, 8> tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
        tables[0][byte] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k) {
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t before = tables[k - 1][byte];
            tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
        }
    }
    return tables;
}

constexpr auto kTables = make_tables();

std::uint32_t by_table(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) {
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        std::uint32_t low = 0;
        std::uint32_t high = 0;
        for (int i = 0; i < 4; ++i) {
            low |= std::uint32_t{data[i]} << (8 * i);
            high |= std::uint32_t{data[4 + i]} << (8 * i);
        }
        low ^= crc;
        crc = 0;
        for (int i = 0; i < 4; ++i) {
            crc ^=
                kTables[7 - i][(low >> (8 * i)) & 0xFF] ^ kTables[3 - i][(high >> (8 * i)) & 0xFF];
        }
    }
    for (; nbytes > 0; ++data, --nbytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xFF];
    return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t by_instruction(std::uint32_t crc,
                                                               const unsigned char* data,
                                                               std::size_t nbytes) {
    std::uint64_t wide = crc;
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        std::uint64_t word;
        std::memcpy(&word, data, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    crc = static_cast<std::uint32_t>(wide);
    for (; nbytes > 0; ++data, --nbytes) crc = _mm_crc32_u8(crc, *data);
    return crc;
}
#endif

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t nbytes) {
    const auto* bytes = static_cast<const unsigned char*>(data);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) return ~by_instruction(~crc, bytes, nbytes);
#endif
    return ~by_table(~crc, bytes, nbytes);
}

std::uint32_t crc32c_by_table(std::uint32_t crc, const void* data, std::size_t nbytes) {
    return ~by_table(~crc, static_cast<const unsigned char*>(data), nbytes);
}

}  // namespace offload
