#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define OFFLOAD_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <sys/auxv.h>
#define OFFLOAD_CRC_TARGET
#endif

namespace offload {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reflected: bit 31 is the coefficient of 1

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

// The product of two polynomials, modulo the polynomial.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (; a != 0; a <<= 1) {
        if (a >> 31) product ^= b;
        b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);
    }
    return product;
}

// kPowers[k] is x to the power of 8 * 2^k: a shift by 2^k bytes.
constexpr std::array<std::uint32_t, 64> make_powers() {
    std::array<std::uint32_t, 64> powers{};
    std::uint32_t power = 1u << 23;  // x^8
    for (auto& each : powers) {
        each = power;
        power = multiply(power, power);
    }
    return powers;
}

constexpr auto kPowers = make_powers();

constexpr std::uint32_t shifted(std::uint32_t crc, std::size_t nbytes) {
    for (std::size_t k = 0; nbytes != 0; ++k, nbytes >>= 1) {
        if (nbytes & 1) crc = multiply(kPowers[k], crc);
    }
    return crc;
}

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

#if defined(OFFLOAD_CRC_TARGET)

// The instruction takes three cycles and can start one each cycle, so three stretches go at a time.
constexpr std::size_t kStretch = 4096;

// kShift[i][b]: byte b at place i of a CRC, followed by kStretch zeros.
constexpr std::array<std::array<std::uint32_t, 256>, 4> make_shift() {
    std::array<std::array<std::uint32_t, 256>, 4> table{};
    const std::uint32_t power = shifted(1u << 31, kStretch);
    for (std::size_t i = 0; i < 4; ++i) {
        for (std::uint32_t bit = 0; bit < 8; ++bit) {
            const std::uint32_t one = multiply(power, 1u << (8 * i + bit));
            for (std::size_t byte = 0; byte < 256; ++byte) {
                if (byte >> bit & 1) table[i][byte] ^= one;
            }
        }
    }
    return table;
}

constexpr auto kShift = make_shift();

std::uint32_t past_a_stretch(std::uint32_t crc) {
    return kShift[0][crc & 0xFF] ^ kShift[1][crc >> 8 & 0xFF] ^ kShift[2][crc >> 16 & 0xFF] ^
           kShift[3][crc >> 24];
}

#if defined(__x86_64__)
using Register = std::uint64_t;
OFFLOAD_CRC_TARGET inline Register step(Register crc, std::uint64_t word) {
    return _mm_crc32_u64(crc, word);
}
OFFLOAD_CRC_TARGET inline Register step_byte(Register crc, unsigned char byte) {
    return _mm_crc32_u8(static_cast<std::uint32_t>(crc), byte);
}
#else
using Register = std::uint32_t;
// Compilers hide the intrinsics in different ways where they do not build for ARMv8.1 as a whole.
inline Register step(Register crc, std::uint64_t word) {
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    return crc;
}
inline Register step_byte(Register crc, unsigned char byte) {
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(byte));
    return crc;
}
#endif

inline std::uint64_t word_at(const unsigned char* data) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
    return word;
}

OFFLOAD_CRC_TARGET std::uint32_t by_instruction(std::uint32_t crc, const unsigned char* data,
                                                std::size_t nbytes) {
    for (; nbytes >= 3 * kStretch; data += 3 * kStretch, nbytes -= 3 * kStretch) {
        Register first = crc;
        Register second = 0;
        Register third = 0;
        for (std::size_t i = 0; i < kStretch; i += 8) {
            first = step(first, word_at(data + i));
            second = step(second, word_at(data + kStretch + i));
            third = step(third, word_at(data + 2 * kStretch + i));
        }
        crc =
            past_a_stretch(static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second);
        crc = past_a_stretch(crc) ^ static_cast<std::uint32_t>(third);
    }
    Register last = crc;
    for (; nbytes >= 8; data += 8, nbytes -= 8) last = step(last, word_at(data));
    for (; nbytes > 0; ++data, --nbytes) last = step_byte(last, *data);
    return static_cast<std::uint32_t>(last);
}

#endif

using Continue = std::uint32_t (*)(std::uint32_t, const unsigned char*, std::size_t);

Continue choose() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) return by_instruction;
#elif defined(__aarch64__)
    if (getauxval(AT_HWCAP) & HWCAP_CRC32) return by_instruction;
#endif
    return by_table;
}

const Continue kBest = choose();

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t nbytes) {
    return ~kBest(~crc, static_cast<const unsigned char*>(data), nbytes);
}

std::uint32_t crc32c_by_table(std::uint32_t crc, const void* data, std::size_t nbytes) {
    return ~by_table(~crc, static_cast<const unsigned char*>(data), nbytes);
}

bool crc32c_has_instruction() { return kBest != by_table; }

std::uint32_t crc32c_raw(const void* data, std::size_t nbytes) {
    return kBest(0, static_cast<const unsigned char*>(data), nbytes);
}

std::uint32_t crc32c_shifted(std::uint32_t crc, std::size_t nbytes) { return shifted(crc, nbytes); }

std::uint32_t crc32c_of_start(std::size_t nbytes) { return ~shifted(~std::uint32_t{0}, nbytes); }

}  // namespace offload
