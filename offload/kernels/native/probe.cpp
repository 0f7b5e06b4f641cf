#include <algorithm>
#include <cstring>

#include "forms.h"
#include "isa.h"
#include "tile.h"
#include "update.h"

namespace offload {
namespace {

// Reads every word of a step's arrays, and writes the arrays that a step writes. It writes the same
// words, which the compiler cannot know.
struct Probe {
    struct Array {
        std::byte* bytes;
        std::size_t size;  // of an element
    };

    struct Args {
        Array written[4];
        Array read;
        std::uint64_t change;  // 0
    };

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        std::uint64_t seen = 0;
        for (; begin < end; begin += kTile) {
            const std::size_t numel = std::min(kTile, end - begin);
            for (const Array& each : args.written) rewrite(each, begin, numel, args.change);
            seen ^= read(args.read, begin, numel);
        }
        __asm__ volatile("" : : "r"(seen));
    }

    OFFLOAD_INLINE static void rewrite(const Array& array, std::size_t begin, std::size_t numel,
                                       std::uint64_t change) {
        std::byte* at = array.bytes + begin * array.size;
        const std::size_t bytes = numel * array.size;
        std::size_t i = 0;
        for (; i + kCacheLine <= bytes; i += kCacheLine) {
            __builtin_prefetch(at + kTile * array.size + i);
            for (std::size_t j = i; j < i + kCacheLine; j += sizeof change) {
                const std::uint64_t word = load(at + j) ^ change;
                std::memcpy(at + j, &word, sizeof word);
            }
        }
        for (; i < bytes; ++i) at[i] ^= static_cast<std::byte>(change);
    }

    OFFLOAD_INLINE static std::uint64_t read(const Array& array, std::size_t begin,
                                             std::size_t numel) {
        const std::byte* at = array.bytes + begin * array.size;
        std::uint64_t seen = 0;
        for (std::size_t i = 0; i + kCacheLine <= numel * array.size; i += kCacheLine) {
            __builtin_prefetch(at + kTile * array.size + i);
            for (std::size_t j = i; j < i + kCacheLine; j += sizeof seen) seen ^= load(at + j);
        }
        return seen;
    }

    OFFLOAD_INLINE static std::uint64_t load(const std::byte* at) {
        std::uint64_t word;
        std::memcpy(&word, at, sizeof word);
        return word;
    }
};

}  // namespace

void probe(const Buffers& b, const std::vector<Segment>& segments) {
    for (const Segment& segment : segments) {
        const Buffers at = from(b, segment.start, 2);
        const std::size_t moment = size_of(b.moment_type);
        const auto array = [](void* memory, std::size_t size) {
            return Probe::Array{static_cast<std::byte*>(memory), size};
        };
        run_body<Probe>({{array(at.weight, size_of(b.weight_type)),
                          array(at.beside, size_beside(b.weight_type)),
                          array(at.moments[0], moment), array(at.moments[1], moment)},
                         array(const_cast<void*>(at.grad), size_of(b.grad_type)),
                         static_cast<std::uint64_t>(segment.settings[0])},
                        segment.stop - segment.start, at.weight);
    }
}

}  // namespace offload
