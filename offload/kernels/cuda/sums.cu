// Sums of squares on a CUDA device, added in the order of native/sums_body.h, so that the bits are the same.
// Compiled behind floats.cu.
//
// What is read: each thread is one of the 16 lanes of that order, so 16 neighbouring threads read 16
// neighbouring elements: one sector of 32 bytes where elements have 16 bits, two where they have 32. Of
// every sector that is read all bytes are used, and no sector is read twice: numel * sizeof(Grad) / 32
// sectors, the least there can be, in numel / 32 loads of a warp. A gradient of 70M elements has 17,090
// blocks, 273,000 threads. A thread needs 36 registers at most, so as many run as a processor holds.
//
// What is computed: a conversion and a fused multiply-add in double for each element. A square of a float
// is exact in double, so the fused operation rounds as product and sum do one after the other. Where
// double runs at 1/64 of float's rate, this bounds the time, not the memory: a 4090 does 41.3 T fused
// operations/s in float (NVIDIA's figure), so 645 G in double, so 323 G elements/s if a conversion costs as
// much as an operation: 645 GB/s of 16-bit gradients, where its memory has 1008. Arithmetic: not measured
// on a GPU.

#define BLOCK 4096  // elements of which the squares are added lane by lane
#define LANES 16
#define WARP 32
#define AT_ONCE 8

// 16 threads for each block of each chunk of `chunk` elements: sums, (chunks * blocks of a chunk,).
extern "C" __global__ void block_sums(const Grad* __restrict__ values, double* __restrict__ sums,
                                      unsigned long long numel, unsigned long long chunk) {
    const unsigned long long of_chunk = (chunk + BLOCK - 1) / BLOCK;
    const unsigned long long blocks = (numel + chunk - 1) / chunk * of_chunk;
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x / LANES;
    const unsigned int lane = threadIdx.x % LANES;
    // The other half of the warp has a block of its own, which may be shorter or none at all.
    const unsigned int half_warp = 0xFFFFu << (threadIdx.x % WARP - lane);
    for (unsigned long long block =
             ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
         block < blocks; block += stride) {
        const unsigned long long end_of_chunk = (block / of_chunk + 1) * chunk;
        const unsigned long long start = block / of_chunk * chunk + block % of_chunk * BLOCK;
        unsigned long long stop = start + BLOCK < end_of_chunk ? start + BLOCK : end_of_chunk;
        if (stop > numel) stop = numel;
        double sum = 0.0;
        unsigned long long i = start + lane;
        // Reads come before the additions that need them, so that each thread has several under way.
#pragma unroll 1
        for (; i + (AT_ONCE - 1) * LANES < stop; i += AT_ONCE * LANES) {
            Grad read[AT_ONCE];
#pragma unroll
            for (int row = 0; row < AT_ONCE; ++row) read[row] = values[i + row * LANES];
#pragma unroll
            for (int row = 0; row < AT_ONCE; ++row) {
                const double value = wide(read[row]);
                sum = __fma_rn(value, value, sum);
            }
        }
        for (; i < stop; i += LANES) {
            const double value = wide(values[i]);
            sum = __fma_rn(value, value, sum);
        }
        // Lane l takes the sum of lane l + half. Those of l >= half are of no use, and nobody takes them.
#pragma unroll
        for (int half = LANES / 2; half > 0; half /= 2) {
            sum = __dadd_rn(sum, __shfl_down_sync(half_warp, sum, half, LANES));
        }
        if (lane == 0) sums[block] = sum;
    }
}

// A warp for each chunk: totals, (chunks,), the sums of its blocks in order. A block beyond the end is 0.
//
// The additions are a chain, 1024 in a chunk of 4M elements. The warp reads 32 sums at a time, the next
// ones while it adds, so that the chain waits for no read but the first. Every thread computes the total.
extern "C" __global__ void chunk_sums(const double* __restrict__ sums, double* __restrict__ totals,
                                      unsigned long long chunks, unsigned long long of_chunk) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x / WARP;
    const unsigned int lane = threadIdx.x % WARP;
    for (unsigned long long chunk = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
         chunk < chunks; chunk += stride) {
        const double* of = sums + chunk * of_chunk;
        double total = 0.0;
        double next = lane < of_chunk ? of[lane] : 0.0;
        for (unsigned long long first = 0; first < of_chunk; first += WARP) {
            const double here = next;
            const unsigned long long after = first + WARP + lane;
            next = after < of_chunk ? of[after] : 0.0;
            // Behind the last sum zeros are added, which change no bit: a sum of squares is not -0.
#pragma unroll
            for (int i = 0; i < WARP; ++i) {
                total = __dadd_rn(total, __shfl_sync(0xFFFFFFFFu, here, i, WARP));
            }
        }
        if (lane == 0) totals[chunk] = total;
    }
}
