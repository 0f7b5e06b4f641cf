// AdamW and Adam on a CUDA device, operation by operation as in native/adamw.cpp, so that the bits
// are the same: every operation is an intrinsic that rounds once, to nearest, and is never
// contracted.
//
// Compiled at run time, with -DWEIGHT=0 (fp32), 1 (bf16 with an int16 residual), 2 (fp16 with an
// fp32 master), 3 (bf16 with an int8 residual), and -DMOMENT=0 (fp32), 1 (bf16) or 2 (codes in
// blocks), behind floats.cu. 16-bit numbers are their bits.

// The random bits of an element: see [Note: stochastic rounding] in native/noise.h, which has the
// same operations. The key is that of the moments or of the masters.
__device__ __forceinline__ unsigned int random_bits(unsigned int before, unsigned int between,
                                                    unsigned int element) {
    unsigned int x = element ^ before;
    x ^= x >> 16;
    x *= 0x21F0AAADu;
    x ^= x >> 15;
    x += between;
    x *= 0xD35A2D97u;
    x ^= x >> 15;
    return x;
}

#if WEIGHT == 0
typedef float Weight;
typedef float Beside;  // none
__device__ __forceinline__ float load(const Weight* weight, const Beside*, unsigned long long i) {
    return weight[i];
}
__device__ __forceinline__ void store(Weight* weight, Beside*, unsigned long long i, float value,
                                      unsigned int) {
    weight[i] = value;
}
#elif WEIGHT == 1
typedef unsigned short Weight;
typedef short Beside;
__device__ __forceinline__ float load(const Weight* weight, const Beside* residual,
                                      unsigned long long i) {
    return __uint_as_float(((unsigned int)weight[i] << 16) + (unsigned int)(int)residual[i]);
}
__device__ __forceinline__ void store(Weight* weight, Beside* residual, unsigned long long i,
                                      float value, unsigned int) {
    unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) bits = 0x7FC00000u;
    weight[i] = (unsigned short)((bits + 0x8000u) >> 16);
    residual[i] = (short)(bits & 0xFFFFu);
}
#elif WEIGHT == 2
typedef unsigned short Weight;
typedef float Beside;
__device__ __forceinline__ float load(const Weight*, const Beside* master, unsigned long long i) {
    return master[i];
}
__device__ __forceinline__ void store(Weight* weight, Beside* master, unsigned long long i,
                                      float value, unsigned int) {
    master[i] = value;
    const unsigned int bits = __float_as_uint(value);
    const unsigned int magnitude = bits & 0x7FFFFFFFu;
    unsigned int half = (magnitude - 0x38000000u + 0x0FFFu + ((magnitude >> 13) & 1u)) >> 13;
    if (magnitude < 0x38800000u) {
        half = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3F000000u;
    }
    if (magnitude >= 0x477FF000u) half = 0x7C00u;
    if (magnitude > 0x7F800000u) half = 0x7E00u;
    weight[i] = (unsigned short)(half | ((bits >> 16) & 0x8000u));
}
#else
typedef unsigned short Weight;
typedef signed char Beside;
__device__ __forceinline__ float load(const Weight* weight, const Beside* residual,
                                      unsigned long long i) {
    return __uint_as_float(((unsigned int)weight[i] << 16) + ((unsigned int)(int)residual[i] << 8));
}
// See [Note: bf24 master] in native/bits.h.
__device__ __forceinline__ void store(Weight* weight, Beside* residual, unsigned long long i,
                                      float value, unsigned int random) {
    const unsigned int bits =
        value == value ? __float_as_uint(value) + (random & 0xFFu) : 0x7FC00000u;
    weight[i] = (unsigned short)((bits + 0x8000u) >> 16);
    residual[i] = (signed char)((bits >> 8) & 0xFFu);
}
#endif

struct Scalars {
    float grad_scale, keep, weight_decay, lerp_factor, beta2, one_minus_beta2, root_correction2,
        eps, minus_step_size;
    int lerp_from_grad, l2;
};

// The key of a segment's random bits, and the number of its first element.
struct Noise {
    unsigned int before, between, before_masters, between_masters, element;
};

// Returns the new master, and replaces both moments, which are not rounded yet.
__device__ __forceinline__ float step(const Scalars& k, float p, float g, float& m, float& v) {
    g = __fmul_rn(g, k.grad_scale);
    if (k.l2) g = __fadd_rn(g, __fmul_rn(k.weight_decay, p));
    m = __fadd_rn(k.lerp_from_grad ? g : m, __fmul_rn(k.lerp_factor, __fsub_rn(g, m)));
    v = __fadd_rn(__fmul_rn(v, k.beta2), __fmul_rn(__fmul_rn(k.one_minus_beta2, g), g));
    const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), k.root_correction2), k.eps);
    return __fadd_rn(__fmul_rn(p, k.keep), __fdiv_rn(__fmul_rn(k.minus_step_size, m), denominator));
}

__device__ __forceinline__ unsigned int random_of_moments(const Noise& noise, unsigned int i) {
#if MOMENT == 0
    return 0;
#else
    return random_bits(noise.before, noise.between, noise.element + i);
#endif
}

__device__ __forceinline__ unsigned int random_of_masters(const Noise& noise, unsigned int i) {
#if WEIGHT == 3
    return random_bits(noise.before_masters, noise.between_masters, noise.element + i);
#else
    return 0;
#endif
}

#if MOMENT != 2

#if MOMENT == 0
typedef float First;
typedef float Second;
__device__ __forceinline__ float load(const float* moment, unsigned long long i) {
    return moment[i];
}
__device__ __forceinline__ void store(float* moment, unsigned long long i, float value,
                                      unsigned int) {
    moment[i] = value;
}
#else
typedef unsigned short First;
typedef unsigned short Second;
__device__ __forceinline__ float load(const unsigned short* moment, unsigned long long i) {
    return __uint_as_float((unsigned int)moment[i] << 16);
}
__device__ __forceinline__ void store(unsigned short* moment, unsigned long long i, float value,
                                      unsigned int random) {
    const unsigned int sum = __float_as_uint(value) + (random & 0xFFFFu);
    moment[i] = (unsigned short)((value == value ? sum : 0x7FC00000u) >> 16);
}
#endif

__device__ __forceinline__ void update(Weight* weight, Beside* beside, First* exp_avg,
                                       Second* exp_avg_sq, float*, const Grad* grad,
                                       unsigned long long numel, const Noise& noise,
                                       const Scalars& k) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
         i < numel; i += stride) {
        float m = load(exp_avg, i), v = load(exp_avg_sq, i);
        const float p = step(k, load(weight, beside, i), wide(grad[i]), m, v);
        const unsigned int random = random_of_moments(noise, (unsigned int)i);
        store(exp_avg, i, m, random);
        store(exp_avg_sq, i, v, random >> 16);
        store(weight, beside, i, p, random_of_masters(noise, (unsigned int)i));
    }
}

#else  // codes: see [Note: codes of moments] in native/moments.h

typedef signed char First;     // multiples of the scale
typedef unsigned char Second;  // of the root
#define BLOCK 256
#define WARP 32
#define OF_THREAD (BLOCK / WARP)

// How the values of a block become codes.
struct BlockScale {
    float scale, factor;
    unsigned int mask;  // of a value's bits: none remain where the block is not finite
};

// `largest` has the bits of the largest magnitude of the block, which stands for `most`.
__device__ __forceinline__ BlockScale block_scale(unsigned int largest, float most) {
    BlockScale found = {0.0f, 0.0f, 0u};
    if (largest >= 0x7F800000u) {
        found.scale = __uint_as_float(0x7FC00000u);
    } else if (largest != 0u) {
        const float exact = __fdiv_rn(__uint_as_float(largest), most);
        const float cut = __uint_as_float(__float_as_uint(exact) & 0xFFFFFF00u);
        const float least = __uint_as_float(0x0D800000u);  // 2^-100
        found.scale = cut < least ? least : cut;
        found.factor = __fdiv_rn(65536.0f, found.scale);
        found.mask = 0x7FFFFFFFu;
    }
    return found;
}

// The code of a magnitude, at most `most`, from the lower 16 of the random bits.
__device__ __forceinline__ int magnitude_code(const BlockScale& of, unsigned int bits,
                                              unsigned int random, int most) {
    const unsigned int half = random & 0xFFFFu;
    const int chance = (int)(half < 4u ? 4u : half > 0xFFFBu ? 0xFFFBu : half);
    const int fixed = (int)__fmul_rn(__uint_as_float(bits & of.mask), of.factor);
    const int rounded = (fixed + chance) >> 16;
    return rounded < most ? rounded : most;
}

// The largest of all threads of the warp.
__device__ __forceinline__ unsigned int largest_of_warp(unsigned int value) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) {
        const unsigned int other = __shfl_xor_sync(0xFFFFFFFFu, value, mask, WARP);
        value = other > value ? other : value;
    }
    return value;
}

// A warp for each block, whose threads keep the values of 8 elements each until the scales are
// known.
__device__ __forceinline__ void update(Weight* weight, Beside* beside, First* exp_avg,
                                       Second* exp_avg_sq, float* scales, const Grad* grad,
                                       unsigned long long numel, const Noise& noise,
                                       const Scalars& k) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x / WARP;
    const unsigned int lane = threadIdx.x % WARP;
    for (unsigned long long block =
             ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
         block * BLOCK < numel; block += stride) {
        const float scale = scales[2 * block], scale_of_root = scales[2 * block + 1];
        float first[OF_THREAD], root[OF_THREAD];
        unsigned int largest = 0u, largest_root = 0u;
#pragma unroll
        for (int row = 0; row < OF_THREAD; ++row) {
            const unsigned long long i = block * BLOCK + row * WARP + lane;
            first[row] = root[row] = 0.0f;
            if (i >= numel) continue;
            float m = __fmul_rn((float)exp_avg[i], scale);
            float v = __fmul_rn((float)exp_avg_sq[i], scale_of_root);
            v = __fmul_rn(v, v);
            const float p = step(k, load(weight, beside, i), wide(grad[i]), m, v);
            store(weight, beside, i, p, random_of_masters(noise, (unsigned int)i));
            first[row] = m, root[row] = __fsqrt_rn(v);
            const unsigned int size = __float_as_uint(m) & 0x7FFFFFFFu;
            const unsigned int size_of_root = __float_as_uint(root[row]) & 0x7FFFFFFFu;
            largest = size > largest ? size : largest;
            largest_root = size_of_root > largest_root ? size_of_root : largest_root;
        }
        const BlockScale of_first = block_scale(largest_of_warp(largest), 127.0f);
        const BlockScale of_root = block_scale(largest_of_warp(largest_root), 255.0f);
#pragma unroll
        for (int row = 0; row < OF_THREAD; ++row) {
            const unsigned long long i = block * BLOCK + row * WARP + lane;
            if (i >= numel) continue;
            const unsigned int random = random_of_moments(noise, (unsigned int)i);
            const unsigned int bits = __float_as_uint(first[row]),
                               bits_of_root = __float_as_uint(root[row]);
            const int code = magnitude_code(of_first, bits, random, 127);
            const int code_of_root = magnitude_code(of_root, bits_of_root, random >> 16, 255);
            exp_avg[i] = (signed char)(bits >> 31 ? -code : code);
            // A second moment of zero would make a step as long as eps allows.
            const bool zero = (bits_of_root & of_root.mask) == 0u;
            exp_avg_sq[i] = (unsigned char)(code_of_root == 0 && !zero ? 1 : code_of_root);
        }
        // All threads have read them before the shuffles.
        if (lane == 0) scales[2 * block] = of_first.scale, scales[2 * block + 1] = of_root.scale;
    }
}
#endif

extern "C" __global__ void adamw(Weight* weight, Beside* beside, First* exp_avg, Second* exp_avg_sq,
                                 float* scales, const Grad* grad, unsigned long long numel,
                                 unsigned int before, unsigned int between,
                                 unsigned int before_masters, unsigned int between_masters,
                                 unsigned int element, float grad_scale, float keep,
                                 float weight_decay, float lerp_factor, float beta2,
                                 float one_minus_beta2, float root_correction2, float eps,
                                 float minus_step_size, int lerp_from_grad, int l2) {
    const Noise noise = {before, between, before_masters, between_masters, element};
    const Scalars k = {
        grad_scale,       keep, weight_decay,    lerp_factor,    beta2, one_minus_beta2,
        root_correction2, eps,  minus_step_size, lerp_from_grad, l2};
    update(weight, beside, exp_avg, exp_avg_sq, scales, grad, numel, noise, k);
}
