// The loops that all rules share. A rule is
//     static constexpr int kMoments;
//     static constexpr bool kRoots[2];  // which moments have no sign: codes hold their roots
//     struct Scalars { explicit Scalars(const double* settings); };
//     static float step(const Scalars&, float weight, float grad, float& first, float& second);
// and each of its operations is an operation of the cited formula, rounded once: see [Note: same
// bits]. Choices that a segment makes are selected by value, not by branch, so that one loop serves
// all. A rule with `kWithoutGrad` is given no gradient. See [Note: tiles] for the code around the
// loops.
#pragma once

#include <algorithm>
#include <vector>

#include "forms.h"
#include "isa.h"
#include "tile.h"
#include "update.h"

namespace offload {

// A tile in fp32, as a rule's loop takes it.
struct Tile {
    float* weights;  // the new ones take the place of the old
    const float* grads;
    void* moments[2];           // as they are stored; of codes in fp32, then the values of codes
    std::uint32_t* chances[2];  // of codes: what rounds their values is written to it
    Noise noise;                // of moments
    std::uint32_t element;      // the number of the first one
};

template <class R>
inline constexpr bool kTakesGrad = !requires { R::kWithoutGrad; };

template <class R>
OFFLOAD_INLINE float grad_of(const Tile& tile, std::size_t i) {
    if constexpr (kTakesGrad<R>) {
        return tile.grads[i];
    } else {
        return 0.0f;
    }
}

// Moments that are written alone do not depend on the weight, and their step has none.
template <Writes kWrites>
OFFLOAD_INLINE float weight_of(const Tile& tile, std::size_t i) {
    if constexpr (kWrites == Writes::kMoments) {
        return 0.0f;
    } else {
        return tile.weights[i];
    }
}

template <Writes kWrites>
OFFLOAD_INLINE void put_weight(const Tile& tile, std::size_t i, float weight) {
    if constexpr (kWrites != Writes::kMoments) tile.weights[i] = weight;
}

template <class R, std::size_t kNumel, class Moment>
OFFLOAD_INLINE void prefetch_moments(const Moment* first, const Moment* second) {
    if constexpr (R::kMoments > 0) prefetch_next<kNumel>(first);
    if constexpr (R::kMoments > 1) prefetch_next<kNumel>(second);
}

template <class R, class Moment, Writes kWrites>
struct StepTile;

template <class R, Writes kWrites>
struct StepTile<R, float, kWrites> {
    OFFLOAD_INLINE static void run(const typename R::Scalars& scalars, const Tile& given) {
        const typename R::Scalars k = scalars;
        const Tile tile = given;
        auto* first = static_cast<float*>(tile.moments[0]);
        auto* second = static_cast<float*>(tile.moments[1]);
        for (std::size_t start = 0; start < kTile; start += kAtOnce) {
            prefetch_moments<R, kAtOnce>(first + start, second + start);
            // Where these are fp32, they are in the partition.
            if constexpr (kWrites != Writes::kMoments) {
                prefetch_next<kAtOnce>(tile.weights + start);
            }
            if constexpr (kTakesGrad<R>) prefetch_next<kAtOnce>(tile.grads + start);
#pragma GCC ivdep
            for (std::size_t j = 0; j < kAtOnce; ++j) {
                const std::size_t i = start + j;
                float m = R::kMoments > 0 ? first[i] : 0.0f;
                float v = R::kMoments > 1 ? second[i] : 0.0f;
                put_weight<kWrites>(
                    tile, i, R::step(k, weight_of<kWrites>(tile, i), grad_of<R>(tile, i), m, v));
                if constexpr (kWrites == Writes::kWeights) continue;
                if constexpr (R::kMoments > 0) first[i] = m;
                if constexpr (R::kMoments > 1) second[i] = v;
            }
        }
    }
};

// In pairs: see [Note: pairs].
template <class R, Writes kWrites>
struct StepTile<R, Bf16, kWrites> {
    OFFLOAD_INLINE static void run(const typename R::Scalars& scalars, const Tile& given) {
        const typename R::Scalars k = scalars;
        const Tile tile = given;
        auto* first = static_cast<Bf16*>(tile.moments[0]);
        auto* second = static_cast<Bf16*>(tile.moments[1]);
        for (std::size_t start = 0; start < kTile; start += 2 * kPairsAtOnce) {
            prefetch_moments<R, 2 * kPairsAtOnce>(first + start, second + start);
            // Counted apart: a register has half as many numbers of the 64 bits of an index.
            std::uint32_t number = tile.element + static_cast<std::uint32_t>(start);
#pragma GCC ivdep
            for (std::size_t j = 0; j < kPairsAtOnce; ++j, number += 2) {
                const std::size_t i = start / 2 + j;
                const std::uint32_t firsts = load_pair(first + 2 * i);
                const std::uint32_t seconds = R::kMoments > 1 ? load_pair(second + 2 * i) : 0;
                float m[2] = {first_of(Bf16{}, firsts), second_of(Bf16{}, firsts)};
                float v[2] = {first_of(Bf16{}, seconds), second_of(Bf16{}, seconds)};
                const std::size_t other = kHalf + i;
                put_weight<kWrites>(
                    tile, i,
                    R::step(k, weight_of<kWrites>(tile, i), grad_of<R>(tile, i), m[0], v[0]));
                put_weight<kWrites>(tile, other,
                                    R::step(k, weight_of<kWrites>(tile, other),
                                            grad_of<R>(tile, other), m[1], v[1]));
                if constexpr (kWrites == Writes::kWeights) continue;
                const std::uint32_t random[2] = {random_bits(tile.noise, number),
                                                 random_bits(tile.noise, number + 1)};
                store_pair(first + 2 * i, pair_of_uppers(rounded_bits(m[0], random[0]),
                                                         rounded_bits(m[1], random[1])));
                if constexpr (R::kMoments > 1) {
                    store_pair(second + 2 * i, pair_of_uppers(rounded_bits(v[0], random[0] >> 16),
                                                              rounded_bits(v[1], random[1] >> 16)));
                }
            }
        }
    }
};

// Writes the chances of element `i` of a tile, which has that number in the stream.
template <std::size_t kMoments>
OFFLOAD_INLINE void store_chances(const Tile& tile, std::size_t i, std::uint32_t number) {
    const std::uint32_t random = random_bits(tile.noise, number);
    tile.chances[0][i] = chance_of(random);
    if constexpr (kMoments > 1) tile.chances[1][i] = chance_of(random >> 16);
}

// In pairs, beside the bits that round what `step` returns.
template <class R, Writes kWrites>
struct StepTile<R, Code, kWrites> {
    OFFLOAD_INLINE static void run(const typename R::Scalars& scalars, const Tile& given) {
        const typename R::Scalars k = scalars;
        const Tile tile = given;
        auto* first = static_cast<float*>(tile.moments[0]);
        auto* second = static_cast<float*>(tile.moments[1]);
        for (std::size_t half = 0; half < 2; ++half) {
            std::uint32_t number = tile.element + static_cast<std::uint32_t>(half);
#pragma GCC ivdep
            for (std::size_t j = 0; j < kHalf; ++j, number += 2) {
                const std::size_t i = half * kHalf + j;
                float m = first[i];
                float v = R::kMoments > 1 ? second[i] : 0.0f;
                put_weight<kWrites>(
                    tile, i, R::step(k, weight_of<kWrites>(tile, i), grad_of<R>(tile, i), m, v));
                if constexpr (kWrites == Writes::kWeights) continue;
                first[i] = value_of<R::kRoots[0]>(m);
                if constexpr (R::kMoments > 1) second[i] = value_of<R::kRoots[1]>(v);
                store_chances<R::kMoments>(tile, i, number);
            }
        }
    }
};

template <class R, Writes kWrites>
[[nodiscard]] auto step_for(Element moment_type, Isa isa) {
    if constexpr (R::kMoments > 0) {
        if (moment_type == Element::kBf16) return version_for<StepTile<R, Bf16, kWrites>>(isa);
        if (moment_type == Element::kCode) return version_for<StepTile<R, Code, kWrites>>(isa);
    }
    return version_for<StepTile<R, float, kWrites>>(isa);
}

// Decodes a tile's moments, calls `step` with them in fp32, and encodes them again if they are
// written. The first `numel` elements come from a partition.
template <class R, Writes kWrites, class Step>
void with_codes(const CodeForms& codes, const Buffers& at, Tile tile, std::size_t numel,
                Step step) {
    alignas(64) float values[2][kTile];
    alignas(64) std::uint32_t chances[2][kTile];
    for (int i = 0; i < R::kMoments; ++i) {
        codes.decode[R::kRoots[i]](static_cast<const Code*>(at.moments[i]), at.scales[i],
                                   values[i]);
        tile.moments[i] = values[i];
        tile.chances[i] = chances[i];
    }
    step(tile);
    if constexpr (kWrites == Writes::kWeights) return;
    for (int i = 0; i < R::kMoments; ++i) {
        // Only the partition's elements determine a scale.
        for (std::size_t j = numel; j < kTile; ++j) values[i][j / 2 + j % 2 * kHalf] = 0.0f;
        at.scales[i] =
            codes.encode[R::kRoots[i]](values[i], chances[i], static_cast<Code*>(at.moments[i]));
    }
}

// A step of a rule on a partition.
template <class R, Writes kWrites>
struct Update {
    // Elements with one set of scalars and one key of their noise.
    struct Part {
        std::size_t start;
        std::size_t stop;
        typename R::Scalars scalars;
        Noise noise;  // of moments
        Noise of_masters;
    };

    Buffers buffers;
    Forms forms;
    CodeForms codes;
    void (*step)(const typename R::Scalars&, const Tile&);
    std::vector<Part> parts;

    void run(std::size_t begin, std::size_t end) const {
        auto part = std::partition_point(parts.begin(), parts.end(),
                                         [&](const Part& each) { return each.stop <= begin; });
        for (; part != parts.end() && part->start < end; ++part) {
            over(*part, std::max(begin, part->start), std::min(end, part->stop));
        }
    }

    void over(const Part& part, std::size_t begin, std::size_t end) const {
        for (; begin + kTile <= end; begin += kTile) {
            update(part, from(buffers, begin, R::kMoments), begin, kTile);
        }
        if (begin >= end) return;
        PartialTile rest(from(buffers, begin, R::kMoments), end - begin);
        update(part, rest.buffers(), begin, end - begin);
        rest.copy_back();
    }

    void update(const Part& part, const Buffers& at, std::size_t begin, std::size_t numel) const {
        alignas(64) float weights[kTile];
        alignas(64) float grads[kTile];
        const std::uint32_t element = part.noise.shift + static_cast<std::uint32_t>(begin);
        Tile tile{nullptr, nullptr, {at.moments[0], at.moments[1]}, {}, part.noise, element};
        if constexpr (kWrites != Writes::kMoments) tile.weights = forms.load_weights(at, weights);
        if constexpr (kTakesGrad<R>) tile.grads = forms.load_grads(at, grads);
        const auto on = [&](const Tile& each) { step(part.scalars, each); };
        if (at.moment_type == Element::kCode) {
            with_codes<R, kWrites>(codes, at, tile, numel, on);
        } else {
            on(tile);
        }
        if constexpr (kWrites != Writes::kMoments) {
            forms.store_weights(at, tile.weights, part.of_masters, element);
        }
    }
};

template <class R, Writes kWrites>
void run_update(const Buffers& b, const std::vector<Segment>& segments) {
    const Isa isa = active_isa();
    Update<R, kWrites> update{
        b,
        forms_of(b, R::kMoments > 0 ? order_of(b.moment_type) : Order::kLinear, isa),
        code_forms(isa),
        step_for<R, kWrites>(b.moment_type, isa),
        {}};
    update.parts.reserve(segments.size());
    for (const Segment& each : segments) {
        const typename R::Scalars scalars(each.settings);
        const std::size_t first = each.start;
        const std::uint64_t of_masters = master_stream(each.stream);
        each_key(each.element, each.stop - first,
                 [&](std::size_t start, std::size_t stop, std::uint64_t element) {
                     update.parts.push_back({first + start, first + stop, scalars,
                                             noise_of(each.stream, element, first + start),
                                             noise_of(of_masters, element, first + start)});
                 });
    }
    share_out(
        b.numel,
        [&update](std::size_t begin, std::size_t end) {
            const DefaultRounding rounding;
            update.run(begin, end);
        },
        b.weight);
}

// An update that writes what `b` says.
template <class R>
void run_update(const Buffers& b, const std::vector<Segment>& segments) {
    switch (b.writes) {
        case Writes::kAll:
            return run_update<R, Writes::kAll>(b, segments);
        case Writes::kWeights:
            return run_update<R, Writes::kWeights>(b, segments);
        case Writes::kMoments:
            return run_update<R, Writes::kMoments>(b, segments);
    }
}

}  // namespace offload
