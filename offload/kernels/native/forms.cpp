#include "forms.h"

#include <cstring>

#include "form_loops.h"

namespace offload {

std::size_t size_of(Element type) {
    switch (type) {
        case Element::kFloat:
            return sizeof(float);
        case Element::kCode:
            return sizeof(Code);
        case Element::kBf16:
        case Element::kBf24:
        case Element::kFp16:
            break;
    }
    return sizeof(Bf16);
}

std::size_t size_beside(Element weight) {
    switch (weight) {
        case Element::kBf16:
            return sizeof(std::int16_t);
        case Element::kBf24:
            return sizeof(std::int8_t);
        case Element::kFp16:
            return sizeof(float);
        case Element::kFloat:
        case Element::kCode:
            break;
    }
    return 0;
}

namespace {

void* moved(void* array, std::size_t bytes) {
    return array == nullptr ? nullptr : static_cast<std::byte*>(array) + bytes;
}

template <class Load, class Store>
void set_weights(Forms& forms, Isa isa) {
    forms.load_weights = version_for<Load>(isa);
    forms.store_weights = version_for<Store>(isa);
}

// The values of a tile in order.
struct Copy {
    OFFLOAD_INLINE static void run(const float* values, float* to) {
        for (std::size_t i = 0; i < kTile; ++i) to[i] = values[i];
    }
};

struct CopyPairs {
    OFFLOAD_INLINE static void run(const float* values, float* to) { put_together(values, to); }
};

struct StoreNothing {
    OFFLOAD_INLINE static void run(const Buffers&, const float*, const Noise&, std::uint32_t) {}
};

void set_linear(Forms& forms, const Buffers& b, Isa isa) {
    forms.copy_in_order = version_for<Copy>(isa);
    switch (b.weight_type) {
        case Element::kFloat:
        case Element::kCode:  // no weight is one
            set_weights<LoadFp32Weights, StoreNothing>(forms, isa);
            break;
        case Element::kBf16:
            set_weights<LoadBf16Weights<std::int16_t>, StoreBf16Weights>(forms, isa);
            break;
        case Element::kBf24:
            set_weights<LoadBf16Weights<std::int8_t>, StoreBf24Weights>(forms, isa);
            break;
        case Element::kFp16:
            set_weights<LoadFp16Weights, StoreFp16Weights>(forms, isa);
            break;
    }
    forms.load_grads = b.grad_type == Element::kBf16   ? version_for<LoadGrads<Bf16>>(isa)
                       : b.grad_type == Element::kFp16 ? version_for<LoadGrads<Fp16>>(isa)
                                                       : version_for<LoadFp32Grads>(isa);
}

void set_pairs(Forms& forms, const Buffers& b, Isa isa) {
    forms.copy_in_order = version_for<CopyPairs>(isa);
    switch (b.weight_type) {
        case Element::kFloat:
        case Element::kCode:  // no weight is one
            set_weights<LoadFp32WeightPairs, StoreFp32WeightPairs>(forms, isa);
            break;
        case Element::kBf16:
            set_weights<LoadBf16WeightPairs, StoreBf16WeightPairs>(forms, isa);
            break;
        case Element::kBf24:
            set_weights<LoadBf24WeightPairs, StoreBf24WeightPairs>(forms, isa);
            break;
        case Element::kFp16:
            set_weights<LoadFp16WeightPairs, StoreFp16WeightPairs>(forms, isa);
            break;
    }
    forms.load_grads = b.grad_type == Element::kBf16   ? version_for<LoadGradPairs<Bf16>>(isa)
                       : b.grad_type == Element::kFp16 ? version_for<LoadGradPairs<Fp16>>(isa)
                                                       : version_for<LoadFp32GradPairs>(isa);
}

}  // namespace

Forms forms_of(const Buffers& buffers, Order order, Isa isa) {
    Forms forms;
    if (order == Order::kPairs) {
        set_pairs(forms, buffers, isa);
    } else {
        set_linear(forms, buffers, isa);
    }
    return forms;
}

CodeForms code_forms(Isa isa) {
    return {{version_for<DecodePairs<false>>(isa), version_for<DecodePairs<true>>(isa)},
            {version_for<EncodePairs<false>>(isa), version_for<EncodePairs<true>>(isa)}};
}

Buffers from(const Buffers& buffers, std::size_t start, int moments) {
    Buffers found = buffers;
    found.weight = moved(buffers.weight, start * size_of(buffers.weight_type));
    found.beside = moved(buffers.beside, start * size_beside(buffers.weight_type));
    for (void*& moment : found.moments)
        moment = moved(moment, start * size_of(buffers.moment_type));
    if (buffers.scales != nullptr) {
        found.scales += start / kMomentBlock * static_cast<std::size_t>(moments);
    }
    found.grad = static_cast<const std::byte*>(buffers.grad) + start * size_of(buffers.grad_type);
    found.numel = buffers.numel - start;
    return found;
}

PartialTile::PartialTile(const Buffers& at, std::size_t numel) : tile_(at) {
    const std::size_t moment = numel * size_of(at.moment_type);
    arrays_ = {{{at.weight, numel * size_of(at.weight_type)},
                {at.beside, numel * size_beside(at.weight_type)},
                {at.moments[0], at.moments[0] == nullptr ? 0 : moment},
                {at.moments[1], at.moments[1] == nullptr ? 0 : moment}}};
    for (std::size_t i = 0; i < kWritten; ++i) {
        if (arrays_[i].bytes > 0) std::memcpy(room_[i], arrays_[i].there, arrays_[i].bytes);
    }
    std::memcpy(room_[kWritten], at.grad, numel * size_of(at.grad_type));
    tile_.weight = room_[0];
    tile_.beside = room_[1];
    tile_.moments[0] = room_[2];
    tile_.moments[1] = room_[3];
    tile_.grad = room_[kWritten];
}

void PartialTile::copy_back() const {
    const std::size_t begin = tile_.writes == Writes::kMoments ? kOfWeights : 0;
    const std::size_t end = tile_.writes == Writes::kWeights ? kOfWeights : kWritten;
    for (std::size_t i = begin; i < end; ++i) {
        if (arrays_[i].bytes > 0) std::memcpy(arrays_[i].there, room_[i], arrays_[i].bytes);
    }
}

}  // namespace offload
