#include "moments.h"

#include "isa.h"

namespace offload {
namespace {

// Members of a team begin at a multiple of a chunk, which must be the first element of a block.
static_assert(kChunk % kMomentBlock == 0);

template <bool kRoot>
struct Encode {
    struct Args {
        const float* values;
        CodedMoment moment;
    };

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        alignas(64) float values[kMomentBlock];
        for (; begin < end; begin += kMomentBlock) {
            const std::size_t numel = std::min(kMomentBlock, end - begin);
            for (std::size_t i = 0; i < numel; ++i) {
                values[i] = value_of<kRoot>(args.values[begin + i]);
            }
            args.moment.scales[args.moment.stride * (begin / kMomentBlock)] =
                encode_block<kRoot>(values, numel, args.moment.codes + begin);
        }
    }
};

template <bool kRoot>
struct Decode {
    struct Args {
        CodedMoment moment;
        std::size_t offset;
        float* values;
    };

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        while (begin < end) {
            const std::size_t at = args.offset + begin;
            const std::size_t numel = std::min(kMomentBlock - at % kMomentBlock, end - begin);
            const float scale = args.moment.scales[args.moment.stride * (at / kMomentBlock)];
            decode_block<kRoot>(args.moment.codes + begin, scale, numel, args.values + begin);
            begin += numel;
        }
    }
};

}  // namespace

void encode_moments(const float* values, const CodedMoment& moment, std::size_t numel) {
    if (moment.root) return run_body<Encode<true>>({values, moment}, numel);
    run_body<Encode<false>>({values, moment}, numel);
}

void decode_moments(const CodedMoment& moment, std::size_t offset, float* values,
                    std::size_t numel) {
    if (moment.root) return run_body<Decode<true>>({moment, offset, values}, numel);
    run_body<Decode<false>>({moment, offset, values}, numel);
}

}  // namespace offload
