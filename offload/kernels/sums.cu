// Sums of squares on a CUDA device, added in the order of native/sums_body.h, so that the bits are the same.
// Compiled behind floats.cu.

#define BLOCK 4096  // elements of which the squares are added lane by lane
#define LANES 16

// A thread for each block of each chunk of `chunk` elements: sums, (chunks * blocks of a chunk,).
extern "C" __global__ void block_sums(const Grad* __restrict__ values, double* __restrict__ sums,
                                      unsigned long long numel, unsigned long long chunk) {
    const unsigned long long of_chunk = (chunk + BLOCK - 1) / BLOCK;
    const unsigned long long blocks = (numel + chunk - 1) / chunk * of_chunk;
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long block = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
         block < blocks; block += stride) {
        const unsigned long long end_of_chunk = (block / of_chunk + 1) * chunk;
        const unsigned long long start = block / of_chunk * chunk + block % of_chunk * BLOCK;
        unsigned long long stop = start + BLOCK < end_of_chunk ? start + BLOCK : end_of_chunk;
        if (stop > numel) stop = numel;
        double lanes[LANES];
        for (int lane = 0; lane < LANES; ++lane) lanes[lane] = 0.0;
        unsigned long long i = start;
#pragma unroll 4
        for (; i + LANES <= stop; i += LANES) {
#pragma unroll
            for (int lane = 0; lane < LANES; ++lane) {
                const double value = wide(values[i + lane]);
                lanes[lane] = __dadd_rn(lanes[lane], __dmul_rn(value, value));
            }
        }
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {
            if (i + lane < stop) {
                const double value = wide(values[i + lane]);
                lanes[lane] = __dadd_rn(lanes[lane], __dmul_rn(value, value));
            }
        }
#pragma unroll
        for (int half = LANES / 2; half > 0; half /= 2) {
#pragma unroll
            for (int lane = 0; lane < half; ++lane) {
                lanes[lane] = __dadd_rn(lanes[lane], lanes[lane + half]);
            }
        }
        sums[block] = lanes[0];
    }
}

// A thread for each chunk: totals, (chunks,), the sums of its blocks in order. A block beyond the end is 0.
extern "C" __global__ void chunk_sums(const double* __restrict__ sums, double* __restrict__ totals,
                                      unsigned long long chunks, unsigned long long of_chunk) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long chunk = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
         chunk < chunks; chunk += stride) {
        double total = 0.0;
#pragma unroll 8
        for (unsigned long long block = 0; block < of_chunk; ++block) {
            total = __dadd_rn(total, sums[chunk * of_chunk + block]);
        }
        totals[chunk] = total;
    }
}
