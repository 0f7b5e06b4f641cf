#include "crc32c.h"

#include <array>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#define OFFLOAD_CRC_TARGET __attribute__((target("sse4.2,crc32")))
#define OFFLOAD_FOLD_TARGET \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,vpclmulqdq,sse4.2,crc32")))
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

// The bytes of a page, and of a range that is interleaved with two others.
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

#if defined(OFFLOAD_CRC_TARGET)

constexpr std::size_t kLine = 64;

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
// Compilers gate the intrinsics in different ways if the build does not target ARMv8.1.
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

// Three stretches. The instruction takes three cycles and one can start each cycle, so they are
// interleaved.
struct Three {
    Register first;
    Register second = 0;
    Register third = 0;
};

OFFLOAD_CRC_TARGET inline Three three_stretches(std::uint32_t crc, const unsigned char* data) {
    Three sums{crc};
    for (std::size_t line = 0; line < kStretch; line += kLine) {
        // For the next round: the hardware prefetcher does not follow the jumps.
        for (std::size_t next = 3; next < 6; ++next) {
            __builtin_prefetch(data + next * kStretch + line);
        }
        for (std::size_t i = line; i < line + kLine; i += 8) {
            sums.first = step(sums.first, word_at(data + i));
            sums.second = step(sums.second, word_at(data + kStretch + i));
            sums.third = step(sums.third, word_at(data + 2 * kStretch + i));
        }
    }
    return sums;
}

OFFLOAD_CRC_TARGET std::uint32_t by_instruction(std::uint32_t crc, const unsigned char* data,
                                                std::size_t nbytes) {
    for (; nbytes >= 3 * kStretch; data += 3 * kStretch, nbytes -= 3 * kStretch) {
        const Three sums = three_stretches(crc, data);
        crc = past_a_stretch(static_cast<std::uint32_t>(sums.first)) ^
              static_cast<std::uint32_t>(sums.second);
        crc = past_a_stretch(crc) ^ static_cast<std::uint32_t>(sums.third);
    }
    Register last = crc;
    for (; nbytes >= 8; data += 8, nbytes -= 8) last = step(last, word_at(data));
    for (; nbytes > 0; ++data, --nbytes) last = step_byte(last, *data);
    return static_cast<std::uint32_t>(last);
}

OFFLOAD_CRC_TARGET void pages_by_instruction(const unsigned char* data, std::size_t count,
                                             std::uint32_t* remainders) {
    for (; count >= 3; data += 3 * kStretch, count -= 3, remainders += 3) {
        const Three sums = three_stretches(0, data);
        remainders[0] = static_cast<std::uint32_t>(sums.first);
        remainders[1] = static_cast<std::uint32_t>(sums.second);
        remainders[2] = static_cast<std::uint32_t>(sums.third);
    }
    for (; count > 0; data += kStretch, --count) *remainders++ = by_instruction(0, data, kStretch);
}

#endif

#if defined(__x86_64__)

// Folding (Gopal et al., "Fast CRC Computation Using PCLMULQDQ", 2009): 256 bytes at a time are
// multiplied by their weight 256 bytes further on, and added to the bytes there. This reaches the
// bandwidth of memory, which the instruction alone does not.
//
// A lane of 128 bits is A x^64 + B, its first byte the highest. D bits on it counts as
// A (x^(64 + D) mod P) + B (x^D mod P). A product of reflected halves comes out one bit low, so the
// factors are one power less; they are the high halves of 64 bits.
constexpr std::size_t kFold = 256;
constexpr std::uint64_t factor(std::size_t bits) {  // x^(bits - 1) mod P; `bits` of whole bytes
    return std::uint64_t{multiply(shifted(1u << 31, bits / 8 - 1), 1u << 24)} << 32;
}
constexpr std::uint64_t kFactorA = factor(8 * kFold + 64);
constexpr std::uint64_t kFactorB = factor(8 * kFold);

OFFLOAD_FOLD_TARGET std::uint32_t by_folding(std::uint32_t crc, const unsigned char* data,
                                             std::size_t nbytes) {
    if (nbytes < 2 * kFold) return by_instruction(crc, data, nbytes);
    const __m512i factors = _mm512_set_epi64(kFactorB, kFactorA, kFactorB, kFactorA, kFactorB,
                                             kFactorA, kFactorB, kFactorA);
    __m512i sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = _mm512_loadu_si512(data + 64 * i);
    sums[0] =
        _mm512_xor_si512(sums[0], _mm512_castsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
    for (data += kFold, nbytes -= kFold; nbytes >= kFold; data += kFold, nbytes -= kFold) {
        for (int i = 0; i < 4; ++i) {
            const __m512i a = _mm512_clmulepi64_epi128(sums[i], factors, 0x00);
            const __m512i b = _mm512_clmulepi64_epi128(sums[i], factors, 0x11);
            const __m512i next = _mm512_loadu_si512(data + 64 * i);
            sums[i] = _mm512_xor_si512(_mm512_xor_si512(a, b), next);
        }
    }
    alignas(64) unsigned char rest[kFold];
    for (int i = 0; i < 4; ++i) _mm512_store_si512(rest + 64 * i, sums[i]);
    return by_instruction(by_instruction(0, rest, kFold), data, nbytes);
}

#endif

template <std::uint32_t (*way)(std::uint32_t, const unsigned char*, std::size_t)>
void pages_one_by_one(const unsigned char* data, std::size_t count, std::uint32_t* remainders) {
    for (; count > 0; data += kStretch, --count) *remainders++ = way(0, data, kStretch);
}

using Continue = std::uint32_t (*)(std::uint32_t, const unsigned char*, std::size_t);
using Pages = void (*)(const unsigned char*, std::size_t, std::uint32_t*);

struct Ways {
    Ways() {
        add("table", by_table, pages_one_by_one<by_table>);
#if defined(__x86_64__)
        if (!__builtin_cpu_supports("sse4.2")) return;
        add("instruction", by_instruction, pages_by_instruction);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("vpclmulqdq")) {
            add("folding", by_folding, pages_one_by_one<by_folding>);
        }
#elif defined(__aarch64__)
        if (getauxval(AT_HWCAP) & HWCAP_CRC32)
            add("instruction", by_instruction, pages_by_instruction);
#endif
    }

    void add(std::string_view name, Continue way, Pages of_pages) {
        names.push_back(name);
        functions.push_back(way);
        pages.push_back(of_pages);
    }

    [[nodiscard]] std::size_t number(std::string_view way) const {
        for (std::size_t i = 0; i < names.size(); ++i) {
            if (names[i] == way) return i;
        }
        throw std::invalid_argument("this processor has no way " + std::string(way));
    }

    std::vector<std::string_view> names;
    std::vector<Continue> functions;
    std::vector<Pages> pages;
};

const Ways kWays;
const Continue kBest = kWays.functions.back();

}  // namespace

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t nbytes) {
    return ~kBest(~crc, static_cast<const unsigned char*>(data), nbytes);
}

const std::vector<std::string_view>& crc32c_ways() { return kWays.names; }

std::uint32_t crc32c_by(std::string_view way, std::uint32_t crc, const void* data,
                        std::size_t nbytes) {
    const Continue function = kWays.functions[kWays.number(way)];
    return ~function(~crc, static_cast<const unsigned char*>(data), nbytes);
}

std::uint32_t crc32c_raw(const void* data, std::size_t nbytes) {
    return kBest(0, static_cast<const unsigned char*>(data), nbytes);
}

void crc32c_raw_pages(const void* data, std::size_t count, std::uint32_t* remainders) {
    kWays.pages.back()(static_cast<const unsigned char*>(data), count, remainders);
}

void crc32c_raw_pages_by(std::string_view way, const void* data, std::size_t count,
                         std::uint32_t* remainders) {
    kWays.pages[kWays.number(way)](static_cast<const unsigned char*>(data), count, remainders);
}

std::uint32_t crc32c_past_page(std::uint32_t crc) { return past_a_stretch(crc); }

std::uint32_t crc32c_shifted(std::uint32_t crc, std::size_t nbytes) { return shifted(crc, nbytes); }

std::uint32_t crc32c_of_start(std::size_t nbytes) { return ~shifted(~std::uint32_t{0}, nbytes); }

}  // namespace offload
