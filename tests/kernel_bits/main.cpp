// Prints a hash of what each kernel makes of the same numbers, a line a case: `scripts/aarch64.sh`
// compares the lines of two processors. An argument names the instruction set.
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "blocks.h"
#include "elementwise.h"
#include "isa.h"
#include "moments.h"
#include "update.h"

using namespace offload;

namespace {

constexpr std::size_t kNumel = 3 * 32768 + 257;  // several chunks, and a block that is not full
constexpr std::size_t kBlocks = (kNumel + kMomentBlock - 1) / kMomentBlock;
constexpr int kSteps = 3;

using Bytes = std::vector<std::uint8_t>;

std::uint64_t hash(const Bytes& bytes, std::uint64_t seed = 14695981039346656037u) {
    for (const std::uint8_t byte : bytes) seed = (seed ^ byte) * 1099511628211u;
    return seed;
}

// The same floats on each machine: sums of whole numbers, scaled by a power of two. Every 97th is
// tiny, so that denormals occur.
std::vector<float> floats(std::uint64_t seed, int exponent) {
    std::vector<float> made(kNumel);
    for (std::size_t i = 0; i < kNumel; ++i) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        const auto whole = static_cast<float>(static_cast<std::int32_t>(seed >> 40) - (1 << 23));
        made[i] = std::ldexp(whole, exponent - 23 - (i % 97 == 0 ? 120 : 0));
    }
    return made;
}

// Of 16 bits the upper half of a float's bits.
Bytes as(Element type, const std::vector<float>& values) {
    const std::size_t size = type == Element::kFloat ? 4 : 2;
    Bytes made(values.size() * size);
    for (std::size_t i = 0; i < values.size(); ++i)
        std::memcpy(&made[i * size], reinterpret_cast<const std::uint8_t*>(&values[i]) + (4 - size),
                    size);
    return made;
}

struct Kernel {
    const char* name;
    Rule rule;
    std::size_t moments;
    std::array<double, kSettings> settings;
    int step;  // which of the settings counts the steps; -1: none
};

const std::array<Kernel, 6> kKernels{{
    {"adamw", adamw, 2, {1e-3, 0.9, 0.999, 1e-8, 0.01, 1, 0.5, 1}, 5},
    {"adagrad", adagrad, 1, {1e-2, 0.1, 1e-10, 0.01, 1, 0.5}, 4},
    {"lion", lion, 1, {1e-4, 0.9, 0.99, 0.1, 0.5}, -1},
    {"sgd", sgd, 1, {1e-2, 0.9, 0, 0.01, 1, 0, 0.5}, -1},
    {"plain_sgd", plain_sgd, 0, {1e-2, 0.01, 0.5}, -1},
    {"lamb", lamb_move, 2, {1e-3, 0.9, 0.999, 1e-6, 0.01, 1, 0.5, 0.7}, 5},
}};

// What lies beside weights of these values.
Bytes beside_of(Element weight_type, const std::vector<float>& values, Bytes& weight) {
    Bytes beside;
    auto* bf16 = reinterpret_cast<Bf16*>(weight.data());
    if (weight_type == Element::kBf16) {
        beside.resize(kNumel * 2);
        split_master(values.data(), bf16, reinterpret_cast<std::int16_t*>(beside.data()), kNumel);
    } else if (weight_type == Element::kBf24) {
        beside.resize(kNumel);
        split_bf24(values.data(), bf16, reinterpret_cast<std::int8_t*>(beside.data()), kNumel, {});
    } else if (weight_type == Element::kFp16) {
        beside = as(Element::kFloat, values);
    }
    return beside;
}

void steps_of(const Kernel& kernel, Element weight_type, Element moment_type) {
    const auto values = floats(1, 0);
    Bytes weight = as(weight_type, values);
    Bytes beside = beside_of(weight_type, values, weight);
    const Element grad_type = weight_type == Element::kBf24 ? Element::kBf16 : weight_type;
    const std::size_t size = moment_type == Element::kFloat  ? 4
                             : moment_type == Element::kBf16 ? 2
                                                             : 1;
    std::array<Bytes, 2> moments{Bytes(kNumel * size), Bytes(kNumel * size)};
    std::vector<float> scales(2 * kBlocks);
    for (int step = 1; step <= kSteps; ++step) {
        const Bytes grad = as(grad_type, floats(100 + static_cast<std::uint64_t>(step), -6));
        Segment segment{0, kNumel, {}, 7, 0, nullptr};
        std::memcpy(segment.settings, kernel.settings.data(), sizeof segment.settings);
        if (kernel.step >= 0) segment.settings[kernel.step] = step;
        segment.stream = static_cast<std::uint64_t>(step);
        const Buffers buffers{weight.data(),
                              weight_type,
                              beside.empty() ? nullptr : beside.data(),
                              {kernel.moments > 0 ? moments[0].data() : nullptr,
                               kernel.moments > 1 ? moments[1].data() : nullptr},
                              moment_type,
                              moment_type == Element::kCode ? scales.data() : nullptr,
                              grad.data(),
                              grad_type,
                              kNumel};
        kernel.rule(buffers, {segment});
    }
    std::uint64_t all = hash(beside, hash(weight));
    for (std::size_t i = 0; i < kernel.moments; ++i) all = hash(moments[i], all);
    std::printf("%s weights %d moments %d: %016llx\n", kernel.name, static_cast<int>(weight_type),
                static_cast<int>(moment_type), static_cast<unsigned long long>(all));
}

void blocks_of(Format format, const char* name, std::size_t block, std::size_t bytes) {
    const auto values = floats(5, 0);
    Bytes blocks((kNumel + block - 1) / block * bytes);
    quantize(format, values.data(), blocks.data(), kNumel);
    std::vector<float> back(kNumel);
    dequantize(format, blocks.data(), back.data(), kNumel);
    std::printf("%s: %016llx\n", name,
                static_cast<unsigned long long>(hash(as(Element::kFloat, back), hash(blocks))));
}

void sums_of() {
    auto out = floats(9, 0);
    const double sum = accumulate(out.data(), floats(10, -3).data(), kNumel, true, kNumel)[0];
    std::printf("sums: %a %a %016llx\n", sum, sum_squares(out.data(), kNumel, kNumel)[0],
                static_cast<unsigned long long>(hash(as(Element::kFloat, out))));
}

}  // namespace

int main(int count, char** arguments) {
    if (count > 1) set_isa(arguments[1]);
    const DefaultRounding rounding;
    for (const auto& kernel : kKernels)
        for (const auto weight : {Element::kFloat, Element::kBf16, Element::kBf24, Element::kFp16})
            for (const auto moment : {Element::kFloat, Element::kBf16, Element::kCode})
                if (kernel.moments > 0 || moment == Element::kFloat)
                    steps_of(kernel, weight, moment);
    blocks_of(Format::kNf4, "nf4", 64, 34);
    blocks_of(Format::kInt8, "int8", 128, 130);
    sums_of();
}
