// A floating-point number as it lies in memory: -DGRAD=0 (fp32), 1 (bf16), 2 (fp16). 16-bit numbers are
// their bits. Stands in front of the sources of kernels that read gradients.

#if GRAD == 0
typedef float Grad;
__device__ __forceinline__ float wide(float value) { return value; }
#else
typedef unsigned short Grad;
#if GRAD == 1
__device__ __forceinline__ float wide(unsigned short bits) {
    return __uint_as_float((unsigned int)bits << 16);
}
#else
__device__ __forceinline__ float wide(unsigned short bits) {
    const unsigned int magnitude = bits & 0x7FFFu;
    // 2^112: exact, for denormals too.
    const float scaled = __fmul_rn(__uint_as_float(magnitude << 13), 5192296858534827628530496329220096.0f);
    const unsigned int whole =
        magnitude >= 0x7C00u ? (magnitude << 13) | 0x7F800000u : __float_as_uint(scaled);
    return __uint_as_float(whole | (unsigned int)(bits & 0x8000u) << 16);
}
#endif
#endif
