// How a tile's weights, gradients and codes become fp32 and back, whatever their types.
#pragma once

#include <array>

#include "isa.h"
#include "tile.h"
#include "update.h"

namespace offload {

// The functions of one instruction set for the types of one partition. Each is given a partition
// that begins with the tile.
struct Forms {
    // Return where the fp32 values are: in the partition, or in `room`.
    float* (*load_weights)(const Buffers& at, float* room);
    const float* (*load_grads)(const Buffers& at, float* room);
    // Stores the values that `load_weights` returned, after the step. Noise rounds bf24 masters:
    // `element` is the number of the tile's first element.
    void (*store_weights)(const Buffers& at, const float* weights, const Noise& noise,
                          std::uint32_t element);
    // Copies the values of a tile in order.
    void (*copy_in_order)(const float* values, float* to);
};

// Bytes of an element, and of the residual or master of a weight.
[[nodiscard]] std::size_t size_of(Element type);
[[nodiscard]] std::size_t size_beside(Element weight);

// Beside moments of that type.
[[nodiscard]] inline Order order_of(Element moment_type) {
    return moment_type == Element::kFloat ? Order::kLinear : Order::kPairs;
}

[[nodiscard]] Forms forms_of(const Buffers& buffers, Order order, Isa isa);

// Functions for codes, in pairs; index 1 is for codes of roots. They encode values of codes: see
// moments.h.
struct CodeForms {
    void (*decode[2])(const Code* codes, float scale, float* moments);
    // Returns the scale.
    float (*encode[2])(const float* values, const std::uint32_t* chances, Code* codes);
};

[[nodiscard]] CodeForms code_forms(Isa isa);

// The arrays from element `start` on. With codes, `start` begins a block, and each block has one
// scale for each of the `moments`.
[[nodiscard]] Buffers from(const Buffers& buffers, std::size_t start, int moments);

// A tile whose first `numel` elements come from a partition; the other elements are zeros.
class PartialTile {
  public:
    PartialTile(const Buffers& at, std::size_t numel);
    PartialTile(const PartialTile&) = delete;
    PartialTile& operator=(const PartialTile&) = delete;

    // Its scales are the partition's own.
    [[nodiscard]] const Buffers& buffers() const { return tile_; }
    // Copies the arrays that the step writes.
    void copy_back() const;

  private:
    static constexpr std::size_t kOfWeights = 2;  // arrays; those of moments follow
    static constexpr std::size_t kWritten = 4;    // behind them there is room for the gradient

    struct Array {
        void* there;
        std::size_t bytes;
    };

    alignas(64) std::byte room_[kWritten + 1][kTile * sizeof(float)] = {};
    std::array<Array, kWritten> arrays_;
    Buffers tile_;
};

}  // namespace offload
