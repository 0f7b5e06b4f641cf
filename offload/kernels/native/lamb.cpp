// You et al., "Large Batch Optimization for Deep Learning", 2020. As in DeepSpeed, the correction
// of the moments' bias is a factor of the step and not of the direction, so the ratio is without
// it:
//
//     m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g * g
//     u = m / (sqrt(v) + eps) + weight_decay * p
//     p = p - lr * sqrt(1 - beta2^t) / (1 - beta1^t) * ratio * u
//
// The ratio of a parameter is |p| / |u|, so there are two passes: the first updates the moments and
// adds up squares, the second computes u once more and moves the weight.
#include <cmath>
#include <vector>

#include "sums_body.h"
#include "update_body.h"

namespace offload {
namespace {

double correction(const double* s) {
    return std::sqrt(1.0 - std::pow(s[2], s[5])) / (1.0 - std::pow(s[1], s[5]));
}

struct Scalars {
    explicit Scalars(const double* s)
        : beta1(static_cast<float>(s[1])),
          one_minus_beta1(static_cast<float>(1.0 - s[1])),
          beta2(static_cast<float>(s[2])),
          one_minus_beta2(static_cast<float>(1.0 - s[2])),
          eps(static_cast<float>(s[3])),
          weight_decay(static_cast<float>(s[4])),
          grad_scale(static_cast<float>(s[6])),
          minus_step_size(static_cast<float>(-(s[0] * correction(s) * s[7]))) {}

    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float eps;
    float weight_decay;
    float grad_scale;
    float minus_step_size;
};

OFFLOAD_INLINE float direction(const Scalars& k, float p, float m, float v) {
    return m / (std::sqrt(v) + k.eps) + k.weight_decay * p;
}

struct NewMoments {
    float m;
    float v;
};

OFFLOAD_INLINE NewMoments new_moments(const Scalars& k, float g, float m, float v) {
    g = g * k.grad_scale;
    return {k.beta1 * m + k.one_minus_beta1 * g, k.beta2 * v + k.one_minus_beta2 * g * g};
}

// Updates the moments of a tile, and computes its directions from the moments as stored. The second
// pass reads the stored moments, so the norm must be the norm of their directions.
template <class Moment>
struct Directions;

template <>
struct Directions<float> {
    OFFLOAD_INLINE static void run(const Scalars& scalars, const Tile& given, float* directions) {
        const Scalars k = scalars;
        const Tile tile = given;
        auto* first = static_cast<float*>(tile.moments[0]);
        auto* second = static_cast<float*>(tile.moments[1]);
#pragma GCC ivdep
        for (std::size_t i = 0; i < kTile; ++i) {
            const NewMoments now = new_moments(k, tile.grads[i], first[i], second[i]);
            first[i] = now.m;
            second[i] = now.v;
            directions[i] = direction(k, tile.weights[i], now.m, now.v);
        }
    }
};

template <>
struct Directions<Bf16> {
    OFFLOAD_INLINE static void run(const Scalars& scalars, const Tile& given, float* directions) {
        const Scalars k = scalars;
        const Tile tile = given;
        auto* first = static_cast<Bf16*>(tile.moments[0]);
        auto* second = static_cast<Bf16*>(tile.moments[1]);
        std::uint32_t number = tile.element;
#pragma GCC ivdep
        for (std::size_t i = 0; i < kHalf; ++i, number += 2) {
            const std::size_t j = kHalf + i;
            const std::uint32_t m = load_pair(first + 2 * i), v = load_pair(second + 2 * i);
            const NewMoments one =
                new_moments(k, tile.grads[i], first_of(Bf16{}, m), first_of(Bf16{}, v));
            const NewMoments other =
                new_moments(k, tile.grads[j], second_of(Bf16{}, m), second_of(Bf16{}, v));
            const std::uint32_t random[2] = {random_bits(tile.noise, number),
                                             random_bits(tile.noise, number + 1)};
            const std::uint32_t new_m =
                pair_of_uppers(rounded_bits(one.m, random[0]), rounded_bits(other.m, random[1]));
            const std::uint32_t new_v = pair_of_uppers(rounded_bits(one.v, random[0] >> 16),
                                                       rounded_bits(other.v, random[1] >> 16));
            store_pair(first + 2 * i, new_m);
            store_pair(second + 2 * i, new_v);
            directions[i] =
                direction(k, tile.weights[i], first_of(Bf16{}, new_m), first_of(Bf16{}, new_v));
            directions[j] =
                direction(k, tile.weights[j], second_of(Bf16{}, new_m), second_of(Bf16{}, new_v));
        }
    }
};

// The same for codes, in two loops, between which the moments are stored.
struct NewValues {
    OFFLOAD_INLINE static void run(const Scalars& scalars, const Tile& given) {
        const Scalars k = scalars;
        const Tile tile = given;
        auto* first = static_cast<float*>(tile.moments[0]);
        auto* second = static_cast<float*>(tile.moments[1]);
        for (std::size_t half = 0; half < 2; ++half) {
            std::uint32_t number = tile.element + static_cast<std::uint32_t>(half);
#pragma GCC ivdep
            for (std::size_t j = 0; j < kHalf; ++j, number += 2) {
                const std::size_t i = half * kHalf + j;
                const NewMoments now = new_moments(k, tile.grads[i], first[i], second[i]);
                first[i] = value_of<false>(now.m);
                second[i] = value_of<true>(now.v);
                store_chances<2>(tile, i, number);
            }
        }
    }
};

struct DirectionsOfStored {
    OFFLOAD_INLINE static void run(const Scalars& scalars, const float* weights, const float* m,
                                   const float* v, float* directions) {
        const Scalars k = scalars;
#pragma GCC ivdep
        for (std::size_t i = 0; i < kTile; ++i) {
            directions[i] = direction(k, weights[i], m[i], v[i]);
        }
    }
};

struct SumOfSquares {
    OFFLOAD_INLINE static double run(const float* values, std::size_t numel) {
        return block_sum(values, numel);
    }
};

struct Move {
    static constexpr bool kWithoutGrad = true;  // the moments have taken it in the first pass
    static constexpr int kMoments = 2;
    static constexpr bool kRoots[2] = {false, true};
    using Scalars = offload::Scalars;

    OFFLOAD_INLINE static float step(const Scalars& k, float p, float, float& m, float& v) {
        return p + k.minus_step_size * direction(k, p, m, v);
    }
};

// The first pass over a segment.
struct FirstPass {
    Buffers buffers;  // from the segment's start on
    Segment segment;
    double* sums;  // (ceil(numel / kBlock), 2): of the squares of p and of u
    Isa isa;
    Scalars scalars{segment.settings};
    Forms forms{forms_of(buffers, order_of(buffers.moment_type), isa)};
    CodeForms codes{code_forms(isa)};

    void run(std::size_t begin, std::size_t end) const {
        const auto sum = version_for<SumOfSquares>(isa);
        // The last tile of a block may be written beyond it.
        alignas(64) float weights[kBlock + kTile];
        alignas(64) float directions[kBlock + kTile];
        for (; begin < end; begin += kBlock) {
            const std::size_t numel = std::min(kBlock, end - begin);
            for (std::size_t done = 0; done < numel;) {
                const std::uint64_t element = segment.element + begin + done;
                // A new key may begin within the block, with codes at a border of theirs.
                const std::uint64_t left = kNoiseRange - element % kNoiseRange;
                const std::size_t most = std::min(kTile, numel - done);
                const std::size_t count = most > left ? static_cast<std::size_t>(left) : most;
                tile(begin + done, count, noise_of(segment.stream, element, 0), weights + done,
                     directions + done);
                done += count;
            }
            sums[2 * (begin / kBlock)] = sum(weights, numel);
            sums[2 * (begin / kBlock) + 1] = sum(directions, numel);
        }
    }

    void tile(std::size_t begin, std::size_t numel, const Noise& noise, float* weights,
              float* directions) const {
        const Buffers at = from(buffers, begin, Move::kMoments);
        if (numel == kTile) return update(at, numel, noise, weights, directions);
        PartialTile part(at, numel);
        update(part.buffers(), numel, noise, weights, directions);
        part.copy_back();
    }

    // Writes weights and directions of a tile in order.
    void update(const Buffers& at, std::size_t numel, const Noise& noise, float* weights,
                float* directions) const {
        alignas(64) float room[kTile];
        alignas(64) float grads[kTile];
        alignas(64) float found[kTile];
        const Tile tile{forms.load_weights(at, room),
                        forms.load_grads(at, grads),
                        {at.moments[0], at.moments[1]},
                        {},
                        noise,
                        noise.shift};
        if (at.moment_type == Element::kFloat) {
            version_for<Directions<float>>(isa)(scalars, tile, found);
        } else if (at.moment_type == Element::kBf16) {
            version_for<Directions<Bf16>>(isa)(scalars, tile, found);
        } else {
            directions_of_codes(at, tile, numel, found);
        }
        forms.copy_in_order(tile.weights, weights);
        forms.copy_in_order(found, directions);
    }

    void directions_of_codes(const Buffers& at, const Tile& tile, std::size_t numel,
                             float* directions) const {
        with_codes<Move, Writes::kAll>(codes, at, tile, numel, [&](const Tile& each) {
            version_for<NewValues>(isa)(scalars, each);
        });
        alignas(64) float stored[2][kTile];
        for (std::size_t i = 0; i < 2; ++i) {
            codes.decode[Move::kRoots[i]](static_cast<const Code*>(at.moments[i]), at.scales[i],
                                          stored[i]);
        }
        version_for<DirectionsOfStored>(isa)(scalars, tile.weights, stored[0], stored[1],
                                             directions);
    }
};

}  // namespace

void lamb_moments(const Buffers& b, const Segment& segment, double* sums) {
    const FirstPass pass{from(b, segment.start, Move::kMoments), segment, sums, active_isa()};
    share_out(segment.stop - segment.start, [&pass](std::size_t begin, std::size_t end) {
        const DefaultRounding rounding;
        pass.run(begin, end);
    });
}

void lamb_move(const Buffers& buffers, const std::vector<Segment>& segments) {
    run_update<Move, Writes::kAll>(buffers, segments);
}

}  // namespace offload
