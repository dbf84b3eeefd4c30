// A GPU on the CPU, for tests: what `noisy_envs/nn/cuda/gpu.cuh` gives the kernels, one fiber for each thread.
//
// A fiber runs until an operation of its whole warp or block, then the next one does. Between two such operations the
// lanes of a warp run one after another, forwards and backwards in turn, and so do the warps of a block, so that a
// missing synchronisation gives wrong results. Shared memory begins as NaN, and what lies around it must stay as it was. Lanes that meet at different
// operations, as they must not, end the launch with an error.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>
#include <ucontext.h>

#define DEVICE inline
#define CONSTEXPR constexpr
#define __global__
#define __launch_bounds__(...)

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {
enum State { READY, SHUFFLE, SHUFFLE_XOR, MAX, TENSOR_CORE, WARP_SYNC, BLOCK_SYNC, DONE };
constexpr int MAX_THREADS = 512, STACK = 1 << 18, GUARD = 1 << 12;  // bytes, floats

struct Message {  // what a lane shows the others
    float value;
    int a[4], b[2];
};
struct Thread {
    ucontext_t context;
    State state;
    int round;
    Message messages[2];
};

static Thread threads[MAX_THREADS];
static char* stacks;
static ucontext_t scheduler;
static int current, block_x, block_y;
static float* shared;
static void (*entry)();

inline void stop_at(State state) {
    Thread& t = threads[current];
    t.state = state;
    t.round ^= 1;
    swapcontext(&t.context, &scheduler);
}
inline Message& outgoing() { return threads[current].messages[threads[current].round]; }
inline const Message& incoming(int lane) {  // after the operation, whose messages lie in the other half
    return threads[current / 32 * 32 + lane].messages[threads[current].round ^ 1];
}
inline void run_thread() {
    entry();
    threads[current].state = DONE;
    swapcontext(&threads[current].context, &scheduler);
}

// Runs each warp up to the block's next barrier; returns whether any thread goes on, or -1 after an error.
inline int run_block_phase(int num_threads, bool warps_backwards) {
    bool any = false;
    for (int turn = 0; turn < num_threads; turn += 32) {
        const int warp = warps_backwards ? num_threads - 32 - turn : turn;
        if (threads[warp].state == DONE) continue;
        bool backwards = false;
        do {
            for (int i = 0; i < 32; i++) {
                current = warp + (backwards ? 31 - i : i);
                swapcontext(&scheduler, &threads[current].context);
            }
            backwards = !backwards;
            for (int i = 1; i < 32; i++)
                if (threads[warp + i].state != threads[warp].state) return -1;
        } while (threads[warp].state != BLOCK_SYNC && threads[warp].state != DONE);
        any |= threads[warp].state != DONE;
    }
    for (int i = 32; i < num_threads; i++)
        if (threads[i].state != threads[0].state) return -1;
    return any;
}

// Returns 0, 1 if threads met at different operations, or 2 if something was written around shared memory.
inline int launch(int grid_x, int grid_y, int num_threads, int shared_bytes, void (*kernel)()) {
    const int size = shared_bytes / 4;
    float* memory = new (std::align_val_t(16)) float[size + 2 * GUARD];
    stacks = new char[size_t(num_threads) * STACK];
    entry = kernel;
    int result = 0;
    for (int block = 0; block < grid_x * grid_y && result == 0; block++) {
        block_x = block % grid_x, block_y = block / grid_x;
        for (int i = 0; i < size + 2 * GUARD; i++) memory[i] = NAN;
        shared = memory + GUARD;
        for (int i = 0; i < num_threads; i++) {
            Thread& t = threads[i];
            getcontext(&t.context);
            t.context.uc_stack.ss_sp = stacks + size_t(i) * STACK;
            t.context.uc_stack.ss_size = STACK;
            t.context.uc_link = nullptr;
            t.state = READY;
            t.round = 0;
            makecontext(&t.context, run_thread, 0);
        }
        int more = 1;
        for (int phase = 0; more > 0; phase++) more = run_block_phase(num_threads, phase % 2 == 1);
        if (more < 0) result = 1;
        for (int i = 0; i < GUARD; i++)
            if (!std::isnan(memory[i]) || !std::isnan(memory[GUARD + size + i])) result = 2;
    }
    delete[] stacks;
    ::operator delete[](memory, std::align_val_t(16));
    return result;
}

// Calls a kernel with arguments given by their addresses, as a driver does.
template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(arguments[I])...);
}
template <typename... A> void call(void (*kernel)(A...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>());
}
static void** arguments;

inline float tensor_float(int bits) {
    const int kept = bits & 0xffffe000;
    float x;
    memcpy(&x, &kept, 4);
    return x;
}
}  // namespace emulator

inline float* shared_memory() { return emulator::shared; }
inline int thread_index() { return emulator::current; }
inline int renewed(int x) { return x; }
inline int warp_index() { return emulator::current / 32; }
inline int block_index() { return emulator::block_x; }
inline int block_index_y() { return emulator::block_y; }
inline int bits_of(float x) {
    int bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float float_of(int bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
// Fast instructions of a GPU have relative errors of about 2^-23; here the error is a hash of the result.
inline float inexact(float x) {
    const int units = int(uint32_t(bits_of(x)) * 0x9E3779B9u >> 16) % 3 - 1;
    return x * (1.0f + units * 0x1p-23f);
}
inline float exp2_fast(float x) { return inexact(exp2f(x)); }
inline float reciprocal(float x) { return inexact(1.0f / x); }
inline float rsqrtf(float x) { return inexact(1.0f / sqrtf(x)); }
inline float shuffle(float x, int lane) {
    emulator::outgoing().value = x;
    emulator::stop_at(emulator::SHUFFLE);
    return emulator::incoming(lane).value;
}
inline float shuffle_xor(float x, int bits) {
    const int lane = emulator::current % 32 ^ bits;
    emulator::outgoing().value = x;
    emulator::stop_at(emulator::SHUFFLE_XOR);
    return emulator::incoming(lane).value;
}
inline int max_warp(int x) {
    emulator::outgoing().a[0] = x;
    emulator::stop_at(emulator::MAX);
    for (int lane = 0; lane < 32; lane++) x = emulator::incoming(lane).a[0] > x ? emulator::incoming(lane).a[0] : x;
    return x;
}
inline void sync_warp() { emulator::stop_at(emulator::WARP_SYNC); }
inline void sync_block() { emulator::stop_at(emulator::BLOCK_SYNC); }
inline void sync_block_memory() { sync_block(); }
inline float load_added(const float* p) { return *p; }
inline void add(float* p, float x) { *p += x; }
inline void add2(float* p, float x, float y) {
    if (uintptr_t(p) % 8) fprintf(stderr, "add2: not at a multiple of 8 bytes\n"), abort();
    p[0] += x, p[1] += y;
}
inline void tensor_core(float (&c)[4], const int (&a)[4], const int (&b)[2]) {
    emulator::Message& out = emulator::outgoing();
    for (int i = 0; i < 4; i++) out.a[i] = a[i];
    for (int i = 0; i < 2; i++) out.b[i] = b[i];
    emulator::stop_at(emulator::TENSOR_CORE);
    const int lane = emulator::current % 32, group = lane / 4, place = lane % 4;
    for (int i = 0; i < 4; i++) {
        const int column = 2 * place + i % 2, half = i / 2;
        for (int k = 0; k < 8; k++) {
            const float x = emulator::tensor_float(emulator::incoming(group * 4 + k % 4).a[half + 2 * (k / 4)]);
            const float y = emulator::tensor_float(emulator::incoming(column * 4 + k % 4).b[k / 4]);
            c[i] += x * y;
        }
    }
}

// Lets other languages launch a kernel.
#define LAUNCHER(name)                                                                                \
    extern "C" int launch_##name(void** arguments, int grid_x, int grid_y, int threads, int shared) { \
        emulator::arguments = arguments;                                                              \
        return emulator::launch(grid_x, grid_y, threads, shared,                                      \
                                [] { emulator::call(name, emulator::arguments); });                   \
    }
