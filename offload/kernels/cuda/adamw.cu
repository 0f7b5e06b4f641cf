// AdamW and Adam on a CUDA device, operation by operation as in native/adamw.cpp, so that the bits are
// the same: every operation is an intrinsic that rounds once, to nearest, and is never contracted.
//
// Compiled at run time, with -DWEIGHT=0 (fp32), 1 (bf16 with an int16 residual), 2 (fp16 with an fp32
// master), and -DMOMENT=0 (fp32) or 1 (bf16), behind floats.cu. 16-bit numbers are their bits.

#if WEIGHT == 0
typedef float Weight;
typedef float Beside;  // none
__device__ __forceinline__ float load(const Weight* weight, const Beside*, unsigned long long i) {
    return weight[i];
}
__device__ __forceinline__ void store(Weight* weight, Beside*, unsigned long long i, float value) {
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
                                      float value) {
    unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) bits = 0x7FC00000u;
    weight[i] = (unsigned short)((bits + 0x8000u) >> 16);
    residual[i] = (short)(bits & 0xFFFFu);
}
#else
typedef unsigned short Weight;
typedef float Beside;
__device__ __forceinline__ float load(const Weight*, const Beside* master, unsigned long long i) {
    return master[i];
}
__device__ __forceinline__ void store(Weight* weight, Beside* master, unsigned long long i,
                                      float value) {
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
#endif

#if MOMENT == 0
typedef float Moment;
__device__ __forceinline__ float load(const Moment* moment, unsigned long long i) {
    return moment[i];
}
__device__ __forceinline__ void store(Moment* moment, unsigned long long i, float value,
                                      unsigned int) {
    moment[i] = value;
}
__device__ __forceinline__ unsigned int random_bits(unsigned int, unsigned int, unsigned int) {
    return 0;
}
#else
typedef unsigned short Moment;
__device__ __forceinline__ float load(const Moment* moment, unsigned long long i) {
    return __uint_as_float((unsigned int)moment[i] << 16);
}
// See [Note: stochastic rounding] in native/noise.h, which has the same operations.
__device__ __forceinline__ void store(Moment* moment, unsigned long long i, float value,
                                      unsigned int random) {
    const unsigned int sum = __float_as_uint(value) + (random & 0xFFFFu);
    moment[i] = (unsigned short)((value == value ? sum : 0x7FC00000u) >> 16);
}
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
#endif

extern "C" __global__ void adamw(Weight* weight, Beside* beside, Moment* exp_avg,
                                 Moment* exp_avg_sq, const Grad* grad, unsigned long long numel,
                                 unsigned int before, unsigned int between, unsigned int element,
                                 float grad_scale,
                                 float keep, float weight_decay, float lerp_factor, float beta2,
                                 float one_minus_beta2, float root_correction2, float eps,
                                 float minus_step_size, int lerp_from_grad, int l2) {
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < numel;
         i += stride) {
        const float p = load(weight, beside, i);
        float g = __fmul_rn(wide(grad[i]), grad_scale);
        if (l2) g = __fadd_rn(g, __fmul_rn(weight_decay, p));
        float m = load(exp_avg, i);
        m = __fadd_rn(lerp_from_grad ? g : m, __fmul_rn(lerp_factor, __fsub_rn(g, m)));
        const float v = __fadd_rn(__fmul_rn(load(exp_avg_sq, i), beta2),
                                  __fmul_rn(__fmul_rn(one_minus_beta2, g), g));
        const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), root_correction2), eps);
        const unsigned int random = random_bits(before, between, element + (unsigned int)i);
        store(exp_avg, i, m, random);
        store(exp_avg_sq, i, v, random >> 16);
        store(weight, beside, i,
              __fadd_rn(__fmul_rn(p, keep),
                        __fdiv_rn(__fmul_rn(minus_step_size, m), denominator)));
    }
}
