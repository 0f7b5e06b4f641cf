// The loop that all rules share. A rule is
//     static constexpr int kMoments;
//     static constexpr bool kRoots[2];  // which moments have no sign: codes hold their roots
//     struct Scalars { explicit Scalars(const double* settings); };
//     static float step(const Scalars&, float weight, float grad, float& first, float& second);
// and each of its operations is that of the formula it cites, rounded once: see [Note: same bits].
// Choices that a segment makes are selected by value, not by branch, so that one loop serves all.
// A rule with `kWithoutGrad` is given no gradient.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "bits.h"
#include "isa.h"
#include "moments.h"
#include "noise.h"
#include "update.h"

namespace offload {

// A master weight in fp32, in two halves, or beside an fp16 weight.
struct WholeMaster {
    static constexpr bool kRounded = false;
    float* value;
};
struct SplitMaster {
    static constexpr bool kRounded = false;
    Bf16* weight;
    std::int16_t* residual;
};
struct Bf24Master {
    static constexpr bool kRounded = true;
    Bf16* weight;
    std::int8_t* residual;
};
struct HalfMaster {
    static constexpr bool kRounded = false;
    Fp16* weight;
    float* value;
};

OFFLOAD_INLINE float load(const WholeMaster& master, std::size_t i) { return master.value[i]; }
OFFLOAD_INLINE float load(const HalfMaster& master, std::size_t i) { return master.value[i]; }
OFFLOAD_INLINE float load(const SplitMaster& master, std::size_t i) {
    return join(master.weight[i], master.residual[i]);
}
OFFLOAD_INLINE float load(const Bf24Master& master, std::size_t i) {
    return join(master.weight[i], master.residual[i]);
}

// The `random` bits round a bf24 master.
OFFLOAD_INLINE void store(const WholeMaster& master, std::size_t i, float value, std::uint32_t) {
    master.value[i] = value;
}
OFFLOAD_INLINE void store(const HalfMaster& master, std::size_t i, float value, std::uint32_t) {
    master.value[i] = value;
    store(&master.weight[i], value);
}
OFFLOAD_INLINE void store(const SplitMaster& master, std::size_t i, float value, std::uint32_t) {
    split(value, &master.weight[i], &master.residual[i]);
}
OFFLOAD_INLINE void store(const Bf24Master& master, std::size_t i, float value,
                          std::uint32_t random) {
    split(value, random, &master.weight[i], &master.residual[i]);
}

// The random bits that `store` takes for an element; none are computed for other masters.
template <class Master>
OFFLOAD_INLINE std::uint32_t master_bits(const Noise& noise, std::uint32_t element) {
    if constexpr (Master::kRounded) {
        return random_bits(noise, element);
    } else {
        return 0;
    }
}

// The same, from element `start` on.
OFFLOAD_INLINE WholeMaster from(const WholeMaster& master, std::size_t start) {
    return {master.value + start};
}
OFFLOAD_INLINE HalfMaster from(const HalfMaster& master, std::size_t start) {
    return {master.weight + start, master.value + start};
}
OFFLOAD_INLINE SplitMaster from(const SplitMaster& master, std::size_t start) {
    return {master.weight + start, master.residual + start};
}
OFFLOAD_INLINE Bf24Master from(const Bf24Master& master, std::size_t start) {
    return {master.weight + start, master.residual + start};
}

// Each tile asks for the one kAhead elements on. On two cores of a Zen 4 that took the update from
// 0.90 to 0.96 of the bandwidth of a plain loop over the same five arrays. Past the end of an
// array a prefetch does nothing.
inline constexpr std::size_t kTile = 32;
inline constexpr std::size_t kAhead = 256;
inline constexpr std::size_t kCacheLine = 64;

template <class T>
OFFLOAD_INLINE void prefetch_tile(const T* tile) {
    const char* at = reinterpret_cast<const char*>(tile);
    for (std::size_t line = 0; line < kTile * sizeof(T); line += kCacheLine) {
        __builtin_prefetch(at + line);
    }
}

OFFLOAD_INLINE void prefetch_tile(const WholeMaster& master, std::size_t i) {
    prefetch_tile(master.value + i);
}
OFFLOAD_INLINE void prefetch_tile(const HalfMaster& master, std::size_t i) {
    prefetch_tile(master.value + i);
}
OFFLOAD_INLINE void prefetch_tile(const SplitMaster& master, std::size_t i) {
    prefetch_tile(master.weight + i);
    prefetch_tile(master.residual + i);
}
OFFLOAD_INLINE void prefetch_tile(const Bf24Master& master, std::size_t i) {
    prefetch_tile(master.weight + i);
    prefetch_tile(master.residual + i);
}

template <class R>
inline constexpr bool kTakesGrad = !requires { R::kWithoutGrad; };

template <class R, class Master, class Moment, class Grad>
struct Update {
    struct Part {
        std::size_t start;
        std::size_t stop;
        typename R::Scalars scalars;
        Noise noise;  // of moments
        Noise of_masters;
    };

    struct Args {
        Master master;
        Moment* first;
        Moment* second;
        float* scales;  // of codes
        const Grad* grad;
        const std::vector<Part>* parts;
    };

    OFFLOAD_INLINE static void run(const Args& args, std::size_t begin, std::size_t end) {
        const auto& parts = *args.parts;
        auto part = std::partition_point(parts.begin(), parts.end(),
                                         [&](const Part& each) { return each.stop <= begin; });
        for (; part != parts.end() && part->start < end; ++part) {
            over(args, *part, std::max(begin, part->start), std::min(end, part->stop));
        }
    }

    OFFLOAD_INLINE static void over(const Args& args, const Part& part, std::size_t begin,
                                    std::size_t end) {
        if constexpr (std::is_same_v<Moment, Code>) {
            for (; begin + kMomentBlock <= end; begin += kMomentBlock) {
                for (std::size_t i = begin; i < begin + kMomentBlock; i += kTile) {
                    prefetch(args, i + kMomentBlock);
                }
                update_block<true>(args, part, begin, kMomentBlock);
            }
        } else {
            for (; begin + kTile <= end; begin += kTile) {
                prefetch(args, begin + kAhead);
                update(args, part, begin, begin + kTile);
            }
        }
        if (begin < end) rest(args, part, begin, end);
    }

    // The end of a part, smaller than a tile or a block. Every instruction set calls the same code,
    // which halves the compiler's work: all give the same bits.
    [[gnu::noinline]] static void rest(const Args& args, const Part& part, std::size_t begin,
                                       std::size_t end) {
        if constexpr (std::is_same_v<Moment, Code>) {
            update_block<false>(args, part, begin, end - begin);
        } else {
            update(args, part, begin, end);
        }
    }

    OFFLOAD_INLINE static void prefetch(const Args& args, std::size_t ahead) {
        prefetch_tile(args.master, ahead);
        if constexpr (R::kMoments > 0) prefetch_tile(args.first + ahead);
        if constexpr (R::kMoments > 1) prefetch_tile(args.second + ahead);
        if constexpr (kTakesGrad<R>) prefetch_tile(args.grad + ahead);
    }

    OFFLOAD_INLINE static float load_grad(const Grad* grad, std::size_t i) {
        if constexpr (kTakesGrad<R>) {
            return to_float(grad[i]);
        } else {
            return 0.0f;
        }
    }

    // One block of codes, or the start of one. The loops are apart, since each is vectorized by the
    // narrowest of its types.
    template <bool kFull>
    OFFLOAD_INLINE static void update_block(const Args& args, const Part& part, std::size_t begin,
                                            std::size_t count) {
        alignas(64) float m[kMomentBlock];
        alignas(64) float v[kMomentBlock];
        alignas(64) std::uint32_t random[kMomentBlock];
        const std::size_t numel = kFull ? kMomentBlock : count;
        const typename R::Scalars k = part.scalars;
        const Noise noise = part.noise;
        const Noise of_masters = part.of_masters;
        const std::uint32_t element = noise.shift + static_cast<std::uint32_t>(begin);
        const Master master = from(args.master, begin);
        const Grad* grad = args.grad + begin;
        float* scales = args.scales + begin / kMomentBlock * R::kMoments;
        decode_block<R::kRoots[0]>(args.first + begin, scales[0], numel, m);
        if constexpr (R::kMoments > 1) {
            decode_block<R::kRoots[1]>(args.second + begin, scales[1], numel, v);
        }
#pragma GCC ivdep
        for (std::size_t i = 0; i < numel; ++i) {
            float first = m[i];
            float second = R::kMoments > 1 ? v[i] : 0.0f;
            const float weight = R::step(k, load(master, i), load_grad(grad, i), first, second);
            m[i] = value_of<R::kRoots[0]>(first);
            if constexpr (R::kMoments > 1) v[i] = value_of<R::kRoots[1]>(second);
            store(master, i, weight,
                  master_bits<Master>(of_masters, element + static_cast<std::uint32_t>(i)));
        }
        for (std::size_t i = 0; i < numel; ++i) {
            random[i] = random_bits(noise, element + static_cast<std::uint32_t>(i));
        }
        scales[0] = encode_block<R::kRoots[0]>(m, numel, random, 0, args.first + begin);
        if constexpr (R::kMoments > 1) {
            scales[1] = encode_block<R::kRoots[1]>(v, numel, random, 16, args.second + begin);
        }
    }

    OFFLOAD_INLINE static void update(const Args& args, const Part& part, std::size_t begin,
                                      std::size_t end) {
        const typename R::Scalars k = part.scalars;
        const Noise noise = part.noise;
        const Noise of_masters = part.of_masters;
        const std::uint32_t element = noise.shift + static_cast<std::uint32_t>(begin);
        const Master master = args.master;
        Moment* first = args.first;
        Moment* second = args.second;
        const Grad* grad = args.grad;
#pragma GCC ivdep
        for (std::size_t i = begin; i < end; ++i) {
            float m = 0.0f;
            float v = 0.0f;
            if constexpr (R::kMoments > 0) m = to_float(first[i]);
            if constexpr (R::kMoments > 1) v = to_float(second[i]);
            const float weight = R::step(k, load(master, i), load_grad(grad, i), m, v);
            const std::uint32_t number = element + static_cast<std::uint32_t>(i - begin);
            const std::uint32_t random = bits_for<Moment>(noise, number);
            if constexpr (R::kMoments > 0) store_moment(&first[i], m, random);
            if constexpr (R::kMoments > 1) store_moment(&second[i], v, random >> 16);
            store(master, i, weight, master_bits<Master>(of_masters, number));
        }
    }
};

template <class R, class Master, class Moment, class Grad>
void run_update(const Buffers& b, Master master, const std::vector<Segment>& segments) {
    using Body = Update<R, Master, Moment, Grad>;
    std::vector<typename Body::Part> parts;
    parts.reserve(segments.size());
    for (const Segment& each : segments) {
        const typename R::Scalars scalars(each.settings);
        const std::size_t first = each.start;
        const std::uint64_t of_masters = master_stream(each.stream);
        each_key(each.element, each.stop - first,
                 [&](std::size_t start, std::size_t stop, std::uint64_t element) {
                     parts.push_back({first + start, first + stop, scalars,
                                      noise_of(each.stream, element, first + start),
                                      noise_of(of_masters, element, first + start)});
                 });
    }
    run_body<Body>({master, static_cast<Moment*>(b.moments[0]), static_cast<Moment*>(b.moments[1]),
                    b.scales, static_cast<const Grad*>(b.grad), &parts},
                   b.numel, b.weight);
}

template <class R, class Master, class Moment>
void run_update(const Buffers& b, Master master, const std::vector<Segment>& segments) {
    if constexpr (!kTakesGrad<R>) return run_update<R, Master, Moment, float>(b, master, segments);
    switch (b.grad_type) {
        case Element::kFloat:
            return run_update<R, Master, Moment, float>(b, master, segments);
        case Element::kBf16:
            return run_update<R, Master, Moment, Bf16>(b, master, segments);
        case Element::kFp16:
            return run_update<R, Master, Moment, Fp16>(b, master, segments);
        case Element::kCode:
        case Element::kBf24:
            return;  // no gradient is one
    }
}

template <class R, class Master>
void run_update(const Buffers& b, Master master, const std::vector<Segment>& segments) {
    if constexpr (R::kMoments > 0) {
        if (b.moment_type == Element::kBf16) {
            return run_update<R, Master, Bf16>(b, master, segments);
        }
        if (b.moment_type == Element::kCode) {
            return run_update<R, Master, Code>(b, master, segments);
        }
    }
    return run_update<R, Master, float>(b, master, segments);
}

// Calls `use` with the master of the weight's kind.
template <class Use>
void with_master(const Buffers& b, Use use) {
    switch (b.weight_type) {
        case Element::kFloat:
            return use(WholeMaster{static_cast<float*>(b.weight)});
        case Element::kBf16:
            return use(
                SplitMaster{static_cast<Bf16*>(b.weight), static_cast<std::int16_t*>(b.beside)});
        case Element::kBf24:
            return use(
                Bf24Master{static_cast<Bf16*>(b.weight), static_cast<std::int8_t*>(b.beside)});
        case Element::kFp16:
            return use(HalfMaster{static_cast<Fp16*>(b.weight), static_cast<float*>(b.beside)});
        case Element::kCode:
            return;  // no weight is one
    }
}

template <class R>
void run_update(const Buffers& b, const std::vector<Segment>& segments) {
    with_master(b, [&](auto master) { run_update<R>(b, master, segments); });
}

}  // namespace offload
