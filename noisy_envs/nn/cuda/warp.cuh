// What the lanes of a warp compute with: vectors, GELU, layer normalisation, sums over lanes, gradients of matrices.

using Vector = float[WIDTH];
template <int R> using RowsOf = float[R][WIDTH];
using Rows = RowsOf<ROWS>;  // a vector of each of a lane's tokens

struct Padded {
    float v[PAD];
};

// Where a lane works.
struct Lane {
    int lane;          // in its warp
    int first;         // its first token
    int sample;        // its sample in the warp
    float* shared;     // of the warp, see WarpAt
    float4* scratch;   // of the warp in device memory, at this lane's first number
    bool key[ROWS];    // whether a token exists and is no padding

    DEVICE int token(int r) const { return first + r * LANES; }
    DEVICE bool exists(int r) const { return ROWS * LANES == TOKENS || token(r) < TOKENS; }
    DEVICE bool stored(int r) const { return ROWS * LANES == STORED || token(r) < STORED; }
    DEVICE bool is_input(int r) const { return exists(r) && token(r) >= CLASS_TOKENS; }
    DEVICE int row(int r) const { return r * 32 + lane; }
};

// ---- memory
DEVICE Padded load_vector(const float* p) {
    Padded result;
    EACH(i, PAD / 4) {
        float4 x = reinterpret_cast<const float4*>(p)[i];
        result.v[4 * i] = x.x, result.v[4 * i + 1] = x.y, result.v[4 * i + 2] = x.z, result.v[4 * i + 3] = x.w;
    }
    return result;
}

// Stores numbers in the widest pieces that their count allows; p lies at a multiple of such a piece.
template <int COUNT> DEVICE void store(float* p, const float (&x)[COUNT]) {
    if constexpr (COUNT % 4 == 0) {
        EACH(i, COUNT / 4)
        reinterpret_cast<float4*>(p)[i] = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    } else if constexpr (COUNT % 2 == 0) {
        EACH(i, COUNT / 2) reinterpret_cast<float2*>(p)[i] = make_float2(x[2 * i], x[2 * i + 1]);
    } else {
        EACH(i, COUNT) p[i] = x[i];
    }
}

DEVICE void store_zeros(float* p) {
    const Vector zeros = {};
    store(p, zeros);
}

// Stores a vector of each token of a lane in the warp's rows.
template <int R> DEVICE void store_rows(const Lane& at, float* rows, const RowsOf<R>& x) {
    EACH(r, R) store(rows + at.row(r) * INPUT_STEP, x[r]);
}

// Loads them again.
DEVICE void load_rows(const Lane& at, const float* rows, Rows& x) {
    EACH(r, ROWS) {
        const Padded row = load_vector(rows + at.row(r) * INPUT_STEP);
        EACH(c, WIDTH) x[r][c] = row.v[c];
    }
}

// Scratch: lanes lie side by side in each float4 of a token's vector.
DEVICE float4* scratch_at(const Lane& at, int layer, int tensor, int r) {
    return at.scratch + ((layer * SAVED_TENSORS + tensor) * ROWS + r) * (PAD / 4) * 32;
}

template <int R> DEVICE void save(const Lane& at, int layer, int tensor, const RowsOf<R>& x) {
    EACH(r, R) EACH(i, PAD / 4) {
        float v[4];
        EACH(c, 4) v[c] = 4 * i + c < WIDTH ? x[r][min_of(4 * i + c, WIDTH - 1)] : 0.0f;
        scratch_at(at, layer, tensor, r)[i * 32] = make_float4(v[0], v[1], v[2], v[3]);
    }
}

template <int R> DEVICE void load_saved(const Lane& at, int layer, int tensor, RowsOf<R>& x) {
    EACH(r, R) EACH(i, PAD / 4) {
        const float4 f = scratch_at(at, layer, tensor, r)[i * 32];
        const float v[4] = {f.x, f.y, f.z, f.w};
        EACH(c, 4) if (4 * i + c < WIDTH) x[r][min_of(4 * i + c, WIDTH - 1)] = v[c];
    }
}

// Stores two of them side by side, see `add_products`.
DEVICE void store_pairs(const Lane& at, const Rows& x, const Rows& y) {
    EACH(r, ROWS) {
        float* row = at.shared + WarpAt::PAIRS + at.row(r) * PAIR_STEP;
        store(row, x[r]);
        store(row + 8, y[r]);
    }
}

// ---- arithmetic
template <int R> DEVICE void set_zero(RowsOf<R>& x) {
    EACH(r, R) EACH(c, WIDTH) x[r][c] = 0.0f;
}

template <int COUNT> DEVICE float dot(const float (&x)[WIDTH], const float (&y)[COUNT], float start) {
    EACH(c, WIDTH) start = fmaf(x[c], y[c], start);
    return start;
}

// Adds a multiple of y to x.
template <int COUNT> DEVICE void add_scaled(float (&x)[WIDTH], float factor, const float (&y)[COUNT]) {
    EACH(c, WIDTH) x[c] = fmaf(factor, y[c], x[c]);
}

// The normal distribution function: exp(-x^2 / 2) times a polynomial in 1 / (1 + 0.276 |x|), of the form of Abramowitz
// and Stegun 7.1.26 but with one term more, fitted to an absolute error of 4e-9: errors of 1e-7, as of theirs, add up
// to more than float32's own. `density` is sqrt(2 pi) times the density.
DEVICE float normal_cdf(float x, float& density) {
    const float t = reciprocal(fmaf(fabsf(x), 0.276f, 1.0f));
    density = exp2_fast(x * x * -0.72134752f);
    float p = fmaf(t, -0.11345130f, 0.44081141f);
    p = fmaf(t, p, -0.31385587f);
    p = fmaf(t, p, 0.32214891f);
    p = fmaf(t, p, 0.046722572f);
    p = fmaf(t, p, 0.11762427f);
    p *= t * density;
    return x >= 0.0f ? 1.0f - p : p;
}

DEVICE float gelu(float x) {
    float density;
    return x * normal_cdf(x, density);
}

DEVICE float gelu(float x, float& slope) {
    float density;
    const float p = normal_cdf(x, density);
    slope = fmaf(x * density, 0.39894228f, p);
    return x * p;
}

// Layer normalisation without weight and bias; returns the inverse standard deviation.
DEVICE float normalize(const Vector& x, Vector& result) {
    float mean = 0.0f, variance = 0.0f;
    EACH(c, WIDTH) mean += x[c];
    mean *= 1.0f / WIDTH;
    EACH(c, WIDTH) {
        result[c] = x[c] - mean;
        variance = fmaf(result[c], result[c], variance);
    }
    const float inverse = rsqrtf(fmaf(variance, 1.0f / WIDTH, 1e-5f));
    EACH(c, WIDTH) result[c] *= inverse;
    return inverse;
}

// Layer normalisation, with weight and bias (2, PAD).
template <int R> DEVICE void layer_norm(const float* norm, const RowsOf<R>& x, RowsOf<R>& result) {
    const Padded weight = load_vector(norm), bias = load_vector(norm + PAD);
    EACH(r, R) {
        normalize(x[r], result[r]);
        EACH(c, WIDTH) result[r][c] = fmaf(result[r][c], weight.v[c], bias.v[c]);
    }
}

// ---- sums over lanes
template <int COUNT> DEVICE float sum_lanes(float x) {  // of each COUNT neighbouring lanes
#pragma unroll
    for (int bits = COUNT / 2; bits > 0; bits /= 2) x += shuffle_xor(x, bits);
    return x;
}

template <int COUNT> DEVICE float max_lanes(float x) {
#pragma unroll
    for (int bits = COUNT / 2; bits > 0; bits /= 2) x = fmaxf(x, shuffle_xor(x, bits));
    return x;
}

CONSTEXPR int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

template <int COUNT, int KEPT> DEVICE void halve_to(float (&x)[COUNT], int lane) {
    const bool upper = lane & KEPT;
    EACH(i, KEPT) {
        const float away = upper ? x[i] : x[i + KEPT], own = upper ? x[i + KEPT] : x[i];
        x[i] = own + shuffle_xor(away, KEPT);
    }
    if constexpr (KEPT > 1) halve_to<COUNT, KEPT / 2>(x, lane);
}

// Adds the warp's totals of COUNT numbers of each lane to sums in device memory. Lanes exchange halves of what they
// have until each has one number.
template <int COUNT> DEVICE void add_totals(float* sums, const float (&x)[COUNT], int lane) {
    constexpr int POWER = power_of_two(COUNT);
    static_assert(POWER <= 32, "each number ends in a lane of its own");
    float rest[POWER];
    EACH(i, POWER) rest[i] = i < COUNT ? x[min_of(i, COUNT - 1)] : 0.0f;
    if constexpr (POWER > 1) halve_to<POWER, POWER / 2>(rest, lane);
    float total = rest[0];
#pragma unroll
    for (int bits = POWER; bits < 32; bits *= 2) total += shuffle_xor(total, bits);
    if (lane < COUNT) add(sums + lane, total);
}

// Adds the gradients of a layer normalisation's weight and bias to sums, and that of its input to dx; dy is that of its
// output.
template <int R>
DEVICE void layer_norm_backward(const Lane& at, const float* norm, float* weight_sums, float* bias_sums,
                                const RowsOf<R>& x, const RowsOf<R>& dy, RowsOf<R>& dx) {
    const Padded weight = load_vector(norm);
    Vector weight_grad = {}, bias_grad = {};
    EACH(r, R) {
        Vector unit, d;
        const float inverse = normalize(x[r], unit);
        float mean = 0.0f, product = 0.0f;
        EACH(c, WIDTH) {
            weight_grad[c] = fmaf(dy[r][c], unit[c], weight_grad[c]);
            bias_grad[c] += dy[r][c];
            d[c] = dy[r][c] * weight.v[c];
            mean += d[c];
            product = fmaf(d[c], unit[c], product);
        }
        mean *= 1.0f / WIDTH;
        product *= 1.0f / WIDTH;
        EACH(c, WIDTH) dx[r][c] = fmaf(inverse, d[c] - mean - unit[c] * product, dx[r][c]);
    }
    add_totals(weight_sums, weight_grad, at.lane);
    add_totals(bias_sums, bias_grad, at.lane);
}

// ---- gradients of matrices
// A float as two numbers of 11 bits each, which tensor cores multiply exactly ("TF32"): the sum of the three larger
// products of two such pairs has float32's precision.
struct Split {
    int high, low;
};

DEVICE Split split(float x) {
    const int high = bits_of(x) & 0xffffe000;
    return Split{high, bits_of(x - float_of(high))};
}

// Where a matrix (A, B) is added in device memory: element (i, j) at p[i A_STEP + j B_STEP]. EVEN tells that p and both
// steps allow pairs of neighbours j to be added together.
template <int A, int B, int A_STEP, int B_STEP, bool EVEN> struct Target {
    float* p;

    DEVICE bool takes_first(int) const { return false; }  // of two products, if it is the second target
    DEVICE void add_pair(int i, int j, float x0, float x1) const {
        if (i >= A) return;
        float* at = p + i * A_STEP + j * B_STEP;
        if (EVEN && B_STEP == 1) {
            if (j < B) add2(at, x0, x1);
        } else {
            if (j < B) add(at, x0);
            if (j + 1 < B) add(at + B_STEP, x1);
        }
    }
};

// Adds two products of matrices, a_1^T b_1 and a_2^T b_2, summed over R rows of each lane, to device memory.
//
// A row of `pairs` (32 R, PAIR_STEP) has up to 8 columns of a_1, then from column 8 on up to 8 of a_2, which fill a
// fragment of the tensor cores. b_first and b_second (32 R, INPUT_STEP) may be the same. The sums of the columns of
// a_1 are added to a_sums, unless it is null. The order of rows is free: a lane's two rows of a fragment are
// neighbours, which lie in different banks.
template <int R, class First, class Second>
DEVICE void add_products(First first, Second second, const float* pairs, const float* b_first, const float* b_second,
                         int lane, float* a_sums = nullptr, int a_count = 0) {
    lane = renewed(lane);
    const int i = lane / 4, j = 2 * (lane % 4);  // of this lane's numbers in fragments
    const bool same = b_first == b_second;
    float large[2][4] = {}, small[2][4] = {}, column = 0.0f;  // two chains of sums for each product
#pragma unroll 2
    for (int row = 0; row < 32 * R; row += 8) {
        const float* pa = pairs + (row + j) * PAIR_STEP + i;
        const float x[4] = {pa[0], pa[8], pa[PAIR_STEP], pa[PAIR_STEP + 8]};
        int a_high[4], a_low[4];
        EACH(k, 4) {
            const Split part = split(x[k]);
            a_high[k] = part.high, a_low[k] = part.low;
        }
        if (a_sums != nullptr) column += x[0] + x[2];
        EACH(k, same ? 1 : 2) {
            const float* pb = (k == 0 ? b_first : b_second) + (row + j) * INPUT_STEP + i;
            const Split b0 = split(pb[0]), b1 = split(pb[INPUT_STEP]);
            const int b_high[2] = {b0.high, b1.high}, b_low[2] = {b0.low, b1.low};
            tensor_core(small[k], a_low, b_high);
            tensor_core(large[k], a_high, b_high);
            tensor_core(small[k], a_high, b_low);
        }
    }
    first.add_pair(i, j, large[0][0] + small[0][0], large[0][1] + small[0][1]);
    const bool takes_first = same || second.takes_first(i);
    const float x2 = takes_first ? large[0][2] + small[0][2] : large[1][2] + small[1][2];
    const float x3 = takes_first ? large[0][3] + small[0][3] : large[1][3] + small[1][3];
    second.add_pair(i, j, x2, x3);
    if (a_sums != nullptr) {
        column = sum_lanes<4>(column);
        if (j == 0 && i < a_count) add(a_sums + i, column);
    }
}
