// Instructions that C++ has no words for. The tests replace this file by an emulation of a GPU on the CPU.

#define DEVICE __device__ __forceinline__
#define CONSTEXPR __host__ __device__ constexpr

constexpr unsigned ALL_LANES = 0xffffffffu;

// The block's shared memory: its size is given at the launch.
DEVICE float* shared_memory() {
    extern __shared__ float4 shared[];
    return reinterpret_cast<float*>(shared);
}

// 2^x and 1 / x, with relative errors of about 2^-22.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float shuffle(float x, int lane) { return __shfl_sync(ALL_LANES, x, lane); }
DEVICE float shuffle_xor(float x, int bits) { return __shfl_xor_sync(ALL_LANES, x, bits); }
DEVICE int max_warp(int x) { return __reduce_max_sync(ALL_LANES, x); }
DEVICE int bits_of(float x) { return __float_as_int(x); }
DEVICE float float_of(int x) { return __int_as_float(x); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE void sync_block() { __syncthreads(); }

// Makes what the block has added to device memory visible to all of its threads.
DEVICE void sync_block_memory() {
    __threadfence();
    __syncthreads();
}

// Reads what other threads of the block have added, past this multiprocessor's cache.
DEVICE float load_added(const float* p) { return __ldcg(p); }

// Additions to device memory that nothing waits for; the second one needs p at a multiple of 8 bytes.
DEVICE void add(float* p, float x) { asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory"); }
DEVICE void add2(float* p, float x, float y) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(p), "f"(x), "f"(y) : "memory");
#else
    add(p, x), add(p + 1, y);
#endif
}

// c += a b on the tensor cores, for a (16, 8), b (8, 8) and c (16, 8) in the fragment layouts of the PTX manual,
// "Matrix Fragments for mma.m16n8k8"; of a and b the last 13 bits are ignored.
DEVICE void tensor_core(float (&c)[4], const int (&a)[4], const int (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same number, of which the compiler no longer knows that it is the same each time. It would compute all addresses
// that follow from it ahead of a loop, for which registers are too few.
DEVICE int renewed(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

DEVICE int thread_index() { return threadIdx.x; }
// The same in all lanes, as the compiler learns from the shuffle: it need not care for lanes that part.
DEVICE int warp_index() { return __shfl_sync(ALL_LANES, threadIdx.x / 32, 0); }
DEVICE int block_index() { return blockIdx.x; }
DEVICE int block_index_y() { return blockIdx.y; }
