// The embedding of tokens and the layers of the encoder, forward and backward.
//
// All heads are of width one: a query q, a key k and a value v are one number each. This allows two shortcuts.
//
// 1. The largest score of a query belongs to the largest or the smallest key. If keys are shifted by the middle of
//    their range (softmax does not change), it is |q| times half the range: no pass over pairs for the maximum.
// 2. The gradient of a query is do * scale * Cov(v, k), do being the gradient of its output and Cov the covariance of
//    values and keys under its weights. The forward pass sums it beside the output, so the backward pass needs a single
//    loop over pairs, for keys and values.

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// ---- embedding
// Reads a token's features; padding becomes zeros, of role 0, whatever it holds. Returns whether it is a key.
DEVICE bool load_token(const float* token, float (&features)[FEATURES], int& role) {
    EACH(i, FEATURES) features[i] = token[i];
    role = 0;
    float marker = token[PADDING_FEATURE];
    const bool key = !PADDED || marker != PADDING;
    if constexpr (ROLES > 0) role = key ? min_of(max_of(int(token[FEATURES]), 0), ROLES - 1) : 0;
    EACH(i, FEATURES) features[i] = key ? features[i] : 0.0f;
    return key;
}

struct Tokens {
    float features[ROWS][FEATURES];
    int role[ROWS];
};

DEVICE Tokens load_tokens(Lane& at, const float* tokens, size_t sample) {
    Tokens result;
    EACH(r, ROWS) {
        EACH(i, FEATURES) result.features[r][i] = 0.0f;
        result.role[r] = 0;
        at.key[r] = at.exists(r);
        if (at.is_input(r)) {
            const float* token = tokens + (sample * INPUTS + at.token(r) - CLASS_TOKENS) * TOKEN_SIZE;
            at.key[r] = load_token(token, result.features[r], result.role[r]);
        }
    }
    return result;
}

// The projection's output, before GELU.
DEVICE void project(const float* weights, const Tokens& tokens, Rows& z) {
    EACH(r, ROWS) {
        const Padded start = load_vector(weights + At::TABLE + (FEATURES + tokens.role[r]) * PAD);
        EACH(c, WIDTH) z[r][c] = start.v[c];
    }
    EACH(i, FEATURES) {
        const Padded column = load_vector(weights + At::TABLE + i * PAD);
        EACH(r, ROWS) add_scaled(z[r], tokens.features[r][i], column.v);
    }
}

DEVICE void embed(Lane& at, const float* weights, const float* observations, size_t sample, Rows& x) {
    const Tokens tokens = load_tokens(at, observations, sample);
    project(weights, tokens, x);
    EACH(r, ROWS) EACH(c, WIDTH) x[r][c] = gelu(x[r][c]);
    if constexpr (QUERY_VECTOR) {
        EACH(r, ROWS) {
            const Padded vector = load_vector(weights + At::VECTORS + (at.token(r) == QUERY ? 0 : PAD));
            add_scaled(x[r], 1.0f, vector.v);
        }
    }
    if constexpr (POOL == CLS_TOKEN) {
        const Padded vector = load_vector(weights + At::POOLING);
        if (at.token(0) == 0) EACH(c, WIDTH) x[0][c] = vector.v[c];
    }
}

// Adds up the gradients of what `embed` uses; dx is that of its result.
DEVICE void embed_backward(
    Lane& at, const float* weights, const float* observations, size_t sample, const Rows& dx, float* sums) {
    if constexpr (POOL == CLS_TOKEN) {
        Vector d;
        EACH(c, WIDTH) d[c] = at.token(0) == 0 ? dx[0][c] : 0.0f;
        add_totals(sums + AT_CLASS_TOKEN, d, at.lane);
    }
    if constexpr (QUERY_VECTOR) {
        float d[2 * WIDTH] = {};
        EACH(r, ROWS) EACH(c, WIDTH) {
            const bool query = at.token(r) == QUERY, other = at.is_input(r) && !query;
            d[c] += query ? dx[r][c] : 0.0f;
            d[WIDTH + c] += other ? dx[r][c] : 0.0f;
        }
        add_totals(sums + AT_QUERY_VECTOR, d, at.lane);
    }
    const Tokens tokens = load_tokens(at, observations, sample);
    Rows z;
    project(weights, tokens, z);
    float* pairs = at.shared + WarpAt::PAIRS;  // features, then a 1 at the role
    Rows dz;
    EACH(r, ROWS) {
        float* row = pairs + at.row(r) * PAIR_STEP;
        EACH(i, FEATURES) row[i] = tokens.features[r][i];
        EACH(i, TABLE_ROWS - FEATURES) row[FEATURES + i] = i == tokens.role[r] ? 1.0f : 0.0f;
        EACH(c, WIDTH) {
            float slope;
            gelu(z[r][c], slope);
            dz[r][c] = at.is_input(r) ? dx[r][c] * slope : 0.0f;
        }
    }
    float* rows = at.shared + WarpAt::B_FIRST;
    store_rows(at, rows, dz);
    sync_warp();
    using First = Target<min_of(TABLE_ROWS, 8), WIDTH, WIDTH, 1, WIDTH % 2 == 0>;
    using Second = Target<TABLE_ROWS - min_of(TABLE_ROWS, 8), WIDTH, WIDTH, 1, WIDTH % 2 == 0>;
    add_products<ROWS>(First{sums + TABLE_AT}, Second{sums + TABLE_AT + 8 * WIDTH}, pairs, rows, rows, at.lane);
    sync_warp();
}

// ---- attention
// Heads pass in groups, one after another: a group's code serves all of them, so that more of the kernel stays in the
// instruction cache, and fewer numbers are in registers at a time.
using Group = float[ROWS][GROUP];  // a number of each of the group's heads, for each of a lane's tokens

DEVICE void set_zero(Group& x) { EACH(r, ROWS) EACH(c, GROUP) x[r][c] = 0.0f; }

// Reads and writes a group as a float4.
DEVICE void load_group(const float* p, float (&x)[GROUP]) {
    const float4 f = *reinterpret_cast<const float4*>(p);
    const float v[4] = {f.x, f.y, f.z, f.w};
    EACH(c, GROUP) x[c] = v[c];
}

DEVICE float4 as_float4(const float (&x)[GROUP]) { return make_float4(x[0], x[1], x[2], GROUP > 3 ? x[GROUP - 1] : 0.0f); }
DEVICE void store_group(float* p, const float (&x)[GROUP]) { *reinterpret_cast<float4*>(p) = as_float4(x); }

DEVICE void save_group(const Lane& at, int layer, int tensor, int group, const Group& x) {
    EACH(r, ROWS) scratch_at(at, layer, tensor, r)[group * 32] = as_float4(x[r]);
}

DEVICE void load_saved_group(const Lane& at, int layer, int tensor, int group, Group& x) {
    EACH(r, ROWS) load_group(reinterpret_cast<const float*>(scratch_at(at, layer, tensor, r) + group * 32), x[r]);
}

// Keys and values of normalised embeddings, for the heads from `head` on. `matrix` has the rows of queries, keys, values.
DEVICE void project_keys(const float* matrix, int head, const Rows& n, Group& k, Group& v) {
    EACH(c, GROUP) {
        const float* row = matrix + (WIDTH + head + c) * PAD;
        const Padded wk = load_vector(row), wv = load_vector(row + WIDTH * PAD);
        EACH(r, ROWS) {
            k[r][c] = dot(n[r], wk.v, 0.0f);
            v[r][c] = dot(n[r], wv.v, 0.0f);
        }
    }
}

// Queries, scaled so that 2^(q k) is the weight.
template <int R> DEVICE void project_queries(const float* matrix, int head, const RowsOf<R>& n, float (&q)[R][GROUP]) {
    EACH(c, GROUP) {
        const Padded w = load_vector(matrix + (head + c) * PAD);
        EACH(r, R) q[r][c] = dot(n[r], w.v, 0.0f) * (SCORE_SCALE * LOG2_E);
    }
}

// The number of tokens that loops over pairs visit: up to the last key of all samples of the warp, and the query, whose
// own row of gradients counts even if it is padding.
DEVICE int last_token(const Lane& at) {
    if constexpr (!PADDED) return TOKENS;
    int last = QUERY;
    EACH(r, ROWS) last = at.key[r] ? max_of(last, at.token(r)) : last;
    return KEYS * ceil_div(max_warp(last) + 1, KEYS);
}

// Where the middles of a group's keys are kept for the backward pass; half of their ranges follow after PAD.
DEVICE float* key_range_of(const Lane& at, int layer, int group) {
    return at.shared + WarpAt::KEY_RANGE + (layer * SAMPLES + at.sample) * 2 * PAD + 4 * group;
}

// Shifts keys by the middle of their range over a sample's tokens, and stores the middles and half the ranges.
DEVICE void center_keys(const Lane& at, float* key_range, Group& k, float (&half)[GROUP]) {
    float middle[GROUP];
    EACH(c, GROUP) {
        float high = -1e30f, low = -1e30f;  // of keys, and of their negatives
        EACH(r, ROWS) if (at.key[r]) {
            high = fmaxf(high, k[r][c]);
            low = fmaxf(low, -k[r][c]);
        }
        high = max_lanes<LANES>(high);
        low = max_lanes<LANES>(low);
        middle[c] = 0.5f * (high - low);
        half[c] = fmaxf(0.5f * (high + low), 0.0f);  // 0 if all tokens are padding
        EACH(r, ROWS) k[r][c] -= middle[c];
    }
    if (at.first == 0) {
        store_group(key_range, middle);
        store_group(key_range + PAD, half);
    }
}

// Stores a lane's keys and values, and their products for the covariance. Padding has the weight 2^0 times 0.
template <bool TRAIN> DEVICE void store_keys(const Lane& at, const Group& k, const Group& v) {
    float* keys = at.shared + WarpAt::PAIRS + at.sample * KEY_SAMPLE;
    EACH(r, ROWS) if (at.stored(r)) {
        float* row = keys + at.token(r) * KEY_STEP;
        float kept_k[GROUP], kept_v[GROUP], product[GROUP];
        EACH(c, GROUP) {
            kept_k[c] = at.key[r] ? k[r][c] : 0.0f;
            kept_v[c] = at.key[r] ? v[r][c] : 0.0f;
            product[c] = kept_k[c] * kept_v[c];
        }
        store_group(row, kept_k);
        store_group(row + 4, kept_v);
        if constexpr (TRAIN) store_group(row + 8, product);
        if constexpr (PADDED) row[12] = at.key[r] ? 1.0f : 0.0f;
    }
}

// Attention of a lane's queries, as mixtures of values, and what its gradient needs.
struct Attended {
    Group mixed, inverse, covariance;  // the second is 1 / sum of weights 2^(q k - largest)
};

// Sums over keys.
template <bool TRAIN>
DEVICE void sum_keys(const Lane& at, int visited, const Group& q, const float (&half)[GROUP], Attended& out) {
    const float* keys = at.shared + WarpAt::PAIRS + at.sample * KEY_SAMPLE;
    Group total = {}, sum_v = {}, sum_k = {}, sum_kv = {}, largest;
    EACH(r, ROWS) EACH(c, GROUP) largest[r][c] = fabsf(q[r][c]) * half[c];
#pragma unroll UNROLL_KEYS
    for (int begin = 0; begin < visited; begin += KEYS) EACH(j, KEYS) {
        const float* row = keys + (begin + j) * KEY_STEP;
        float kj[GROUP], vj[GROUP], kvj[GROUP];
        load_group(row, kj);
        load_group(row + 4, vj);
        if constexpr (TRAIN) load_group(row + 8, kvj);
        const float one = PADDED ? row[12] : 1.0f;
        EACH(r, ROWS) EACH(c, GROUP) {
            const float p = exp2_fast(fmaf(q[r][c], kj[c], -largest[r][c]));
            total[r][c] = PADDED ? fmaf(p, one, total[r][c]) : total[r][c] + p;
            sum_v[r][c] = fmaf(p, vj[c], sum_v[r][c]);
            if constexpr (TRAIN) {
                sum_k[r][c] = fmaf(p, kj[c], sum_k[r][c]);
                sum_kv[r][c] = fmaf(p, kvj[c], sum_kv[r][c]);
            }
        }
    }
    EACH(r, ROWS) EACH(c, GROUP) {
        const float inverse = reciprocal(PADDED ? fmaxf(total[r][c], 1e-30f) : total[r][c]);
        const float mixed = sum_v[r][c] * inverse;
        out.inverse[r][c] = inverse;
        out.mixed[r][c] = mixed;
        if constexpr (TRAIN) out.covariance[r][c] = fmaf(-mixed, sum_k[r][c] * inverse, sum_kv[r][c] * inverse);
    }
}

// Adds the output of a group of heads, of a vector of each of R tokens, to x.
template <int R> DEVICE void add_output(const float* matrix, int group, const float (&mixed)[R][GROUP], RowsOf<R>& x) {
    EACH(c, WIDTH) {
        float w[GROUP];
        load_group(matrix + c * PAD + 4 * group, w);
        EACH(r, R) EACH(i, GROUP) x[r][c] = fmaf(mixed[r][i], w[i], x[r][c]);
    }
}

// Adds attention's output to x. For the backward pass it saves what `attention_backward` reads.
template <bool TRAIN> DEVICE void attention(const Lane& at, const float* weights, int layer, int visited, Rows& x) {
    if constexpr (TRAIN) save(at, layer, SAVED_INPUT, x);
    Rows n;
    layer_norm(weights + LayerAt::NORM_ATTENTION, x, n);
#pragma unroll 1
    for (int group = 0; group < GROUPS; group++) {
        Group q, k, v;
        Attended attended;
        float half[GROUP];
        project_queries<ROWS>(weights + LayerAt::QUERY_KEY_VALUE, group * GROUP, n, q);
        project_keys(weights + LayerAt::QUERY_KEY_VALUE, group * GROUP, n, k, v);
        center_keys(at, key_range_of(at, layer, group), k, half);
        store_keys<TRAIN>(at, k, v);
        sync_warp();
        sum_keys<TRAIN>(at, visited, q, half, attended);
        sync_warp();
        if constexpr (TRAIN) {
            save_group(at, layer, SAVED_MIXED, group, attended.mixed);
            save_group(at, layer, SAVED_INVERSE, group, attended.inverse);
            save_group(at, layer, SAVED_COVARIANCE, group, attended.covariance);
        }
        add_output<ROWS>(weights + LayerAt::OUTPUT, group, attended.mixed, x);
    }
}

// Stores, for each query of the warp, what its weights and their gradients need: q, the largest score, do / total,
// q do / total and q do o / total, with o its output and do the gradient of that.
DEVICE void store_queries(
    const Lane& at, const Group& q, const float (&half)[GROUP], const Group& scaled_do, const Group& mixed) {
    float* queries = at.shared + WarpAt::PAIRS + at.sample * QUERY_SAMPLE;
    EACH(r, ROWS) if (at.stored(r)) {
        float* row = queries + at.token(r) * QUERY_STEP;
        float largest[GROUP], product[GROUP], product_mixed[GROUP];
        EACH(c, GROUP) {
            largest[c] = fabsf(q[r][c]) * half[c];
            product[c] = q[r][c] * scaled_do[r][c];
            product_mixed[c] = product[c] * mixed[r][c];
        }
        store_group(row, q[r]);
        store_group(row + 4, largest);
        store_group(row + 8, scaled_do[r]);
        store_group(row + 12, product);
        store_group(row + 16, product_mixed);
    }
}

// Sums over queries the gradients of this lane's keys and values.
DEVICE void sum_queries(const Lane& at, int visited, const Group& k, const Group& v, Group& dk, Group& dv) {
    const float* queries = at.shared + WarpAt::PAIRS + at.sample * QUERY_SAMPLE;
    Group sum_do = {}, sum_qdo = {}, sum_qdoo = {};
#pragma unroll UNROLL_QUERIES
    for (int begin = 0; begin < visited; begin += QUERIES) EACH(i, QUERIES) {
        const float* row = queries + (begin + i) * QUERY_STEP;
        float q[GROUP], largest[GROUP], d[GROUP], qd[GROUP], qdo[GROUP];
        load_group(row, q);
        load_group(row + 4, largest);
        load_group(row + 8, d);
        load_group(row + 12, qd);
        load_group(row + 16, qdo);
        EACH(r, ROWS) EACH(c, GROUP) {
            const float p = exp2_fast(fmaf(q[c], k[r][c], -largest[c]));
            sum_do[r][c] = fmaf(p, d[c], sum_do[r][c]);
            sum_qdo[r][c] = fmaf(p, qd[c], sum_qdo[r][c]);
            sum_qdoo[r][c] = fmaf(p, qdo[c], sum_qdoo[r][c]);
        }
    }
    EACH(r, ROWS) EACH(c, GROUP) {  // padding is no key; its sums may be infinite
        dv[r][c] = at.key[r] ? sum_do[r][c] : 0.0f;
        dk[r][c] = at.key[r] ? LN_2 * fmaf(v[r][c], sum_qdo[r][c], -sum_qdoo[r][c]) : 0.0f;
    }
}

// Gradients of a group of heads: of its queries, keys and values, from dx, that of the layer's middle.
struct HeadGradients {
    Group dq, dk, dv, mixed;  // the last is the group's output, whose product with dx is the output matrix's gradient
};

DEVICE void heads_backward(
    const Lane& at, const float* weights, int layer, int group, int visited, HeadGradients& out) {
    Group k, v;
    {
        Group q, d = {};
        Rows x;
        load_rows(at, at.shared + WarpAt::B_SECOND, x);  // dx
        EACH(c, WIDTH) {
            float w[GROUP];
            load_group(weights + LayerAt::OUTPUT + c * PAD + 4 * group, w);
            EACH(r, ROWS) EACH(i, GROUP) d[r][i] = fmaf(x[r][c], w[i], d[r][i]);
        }
        load_rows(at, at.shared + WarpAt::B_FIRST, x);  // normalised embeddings
        project_queries<ROWS>(weights + LayerAt::QUERY_KEY_VALUE, group * GROUP, x, q);
        project_keys(weights + LayerAt::QUERY_KEY_VALUE, group * GROUP, x, k, v);
        load_saved_group(at, layer, SAVED_COVARIANCE, group, out.dq);
        EACH(r, ROWS) EACH(c, GROUP) out.dq[r][c] *= d[r][c] * SCORE_SCALE;
        Group inverse;
        load_saved_group(at, layer, SAVED_INVERSE, group, inverse);
        EACH(r, ROWS) EACH(c, GROUP) d[r][c] *= inverse[r][c];
        load_saved_group(at, layer, SAVED_MIXED, group, out.mixed);
        float middle[GROUP], half[GROUP];
        const float* key_range = key_range_of(at, layer, group);
        load_group(key_range, middle);
        load_group(key_range + PAD, half);
        EACH(r, ROWS) EACH(c, GROUP) k[r][c] -= middle[c];
        store_queries(at, q, half, d, out.mixed);
    }
    sync_warp();
    sum_queries(at, visited, k, v, out.dk, out.dv);
    sync_warp();
}

// Where `add_products` adds the gradients of a group's rows of the matrices of queries and keys (columns dq, then dk),
// and of values and output (columns dv, times embeddings, then the group's output, times dx).
constexpr bool EVEN_LAYERS = WIDTH % 2 == 0 && LAYER_STEP % 2 == 0;
using GroupRows = Target<GROUP, WIDTH, WIDTH, 1, EVEN_LAYERS && AT_QUERY_KEY_VALUE % 2 == 0>;

struct QueryKeyTarget {
    float* p;  // the group's first row of queries

    DEVICE void add_pair(int i, int j, float x0, float x1) const {
        GroupRows{p + i / 4 * WIDTH * WIDTH}.add_pair(i % 4, j, x0, x1);
    }
};

struct ValueOutputTarget {
    float* value;   // the group's first row of values
    float* output;  // its first column of the output matrix

    DEVICE bool takes_first(int i) const { return i < 4; }
    DEVICE void add_pair(int i, int j, float x0, float x1) const {
        if (i < 4) GroupRows{value}.add_pair(i, j, x0, x1);
        else Target<GROUP, WIDTH, 1, WIDTH, false>{output}.add_pair(i - 4, j, x0, x1);
    }
};

// Turns dx from the gradient of the layer's middle into that of its input.
DEVICE void attention_backward(const Lane& at, const float* weights, int layer, int visited, float* sums, Rows& dx) {
    float* pairs = at.shared + WarpAt::PAIRS;
    float* input_rows = at.shared + WarpAt::B_FIRST;
    float* change_rows = at.shared + WarpAt::B_SECOND;
    float* layer_sums = sums + layer * LAYER_STEP;
    Rows dn, x;
    load_saved(at, layer, SAVED_INPUT, x);
    layer_norm(weights + LayerAt::NORM_ATTENTION, x, dn);
    store_rows(at, input_rows, dn);
    store_rows(at, change_rows, dx);
    set_zero(dn);
#pragma unroll 1
    for (int group = 0; group < GROUPS; group++) {
        HeadGradients d;
        heads_backward(at, weights, layer, group, visited, d);
        EACH(r, ROWS) {
            float* row = pairs + at.row(r) * PAIR_STEP;
            store_group(row, d.dq[r]), store_group(row + 4, d.dk[r]);
            store_group(row + 8, d.dv[r]), store_group(row + 12, d.mixed[r]);
        }
        sync_warp();
        float* first_row = layer_sums + AT_QUERY_KEY_VALUE + group * GROUP * WIDTH;
        add_products<ROWS>(QueryKeyTarget{first_row},
                           ValueOutputTarget{first_row + 2 * WIDTH * WIDTH, layer_sums + AT_OUTPUT + group * GROUP},
                           pairs, input_rows, change_rows, at.lane);
        sync_warp();
        EACH(c, GROUP) {
            const float* row = weights + LayerAt::QUERY_KEY_VALUE + (group * GROUP + c) * PAD;
            const Padded wq = load_vector(row), wk = load_vector(row + WIDTH * PAD),
                         wv = load_vector(row + 2 * WIDTH * PAD);
            EACH(r, ROWS) {
                add_scaled(dn[r], d.dq[r][c], wq.v);
                add_scaled(dn[r], d.dk[r][c], wk.v);
                add_scaled(dn[r], d.dv[r][c], wv.v);
            }
        }
    }
    load_rows(at, change_rows, dx);
    load_saved(at, layer, SAVED_INPUT, x);
    layer_norm_backward(at, weights + LayerAt::NORM_ATTENTION, layer_sums + AT_NORM_ATTENTION_WEIGHT,
                        layer_sums + AT_NORM_ATTENTION_BIAS, x, dn, dx);
}

// ---- dropout
// The hash of `noisy_envs.randomness`.
DEVICE unsigned mix(unsigned x) {
    x ^= x >> 16;
    x *= 0x21F0AAADu;
    x ^= x >> 15;
    x *= 0x735A2D97u;
    return x ^ x >> 15;
}

// Dropout of a run, in shared memory.
struct Dropout {
    unsigned key0, key1;
    unsigned threshold;  // numbers whose 16 bits lie below are dropped
    float scale;         // of what is kept
};

// Stores a run's dropout: its words (2,) and the probability of dropping a number.
DEVICE const Dropout& load_dropout(float* shared, const long long* keys, float rate) {
    Dropout* dropout = reinterpret_cast<Dropout*>(shared + At::DROPOUT);
    if (thread_index() == 0)
        *dropout = {unsigned(keys[0]), unsigned(keys[1]), unsigned(rintf(rate * 65536.0f)), 1.0f / (1.0f - rate)};
    return *dropout;
}

// Draws which numbers of a lane's tokens are kept, as bits r * WIDTH + c; see `noisy_envs.nn.dropout_hash`.
template <int R> DEVICE unsigned draw_kept(const Lane& at, const Dropout& dropout, int sample, int layer) {
    static_assert(R * WIDTH <= 32, "one bit for each number");
    constexpr int WORDS = ceil_div(WIDTH, 2);
    unsigned kept = 0;
    EACH(r, R) EACH(i, WORDS) {
        const unsigned index = ((unsigned(sample) * LAYERS + layer) * TOKENS + at.token(r)) * WORDS + i;
        const unsigned word = mix(mix(dropout.key0 + index * 0x1E3779B9u) ^ dropout.key1);
        kept |= unsigned((word & 0xffffu) >= dropout.threshold) << (r * WIDTH + 2 * i);
        if (2 * i + 1 < WIDTH) kept |= unsigned((word >> 16) >= dropout.threshold) << (r * WIDTH + 2 * i + 1);
    }
    return kept;
}

DEVICE unsigned* kept_bits(const Lane& at, int layer) {
    return reinterpret_cast<unsigned*>(at.shared + WarpAt::KEPT) + layer * 32 + at.lane;
}

DEVICE float kept_factor(unsigned kept, int r, int c, const Dropout& dropout) {
    return kept >> (r * WIDTH + c) & 1 ? dropout.scale : 0.0f;
}

// ---- feed-forward network
// Adds the feed-forward network's output to x, the first R tokens of each lane; dropout depends on the `sample` of the
// run.
template <bool TRAIN, int R>
DEVICE void feedforward(
    const Lane& at, const float* weights, int layer, const Dropout& dropout, int sample, RowsOf<R>& x) {
    if constexpr (TRAIN) save(at, layer, SAVED_MIDDLE, x);
    constexpr bool DROPS = TRAIN && DROPOUT;
    RowsOf<R> n, change;
    layer_norm(weights + LayerAt::NORM_FEEDFORWARD, x, n);
    const Padded bias = load_vector(weights + LayerAt::SECOND_BIAS);
    EACH(r, R) EACH(c, WIDTH) change[r][c] = DROPS ? bias.v[c] : x[r][c] + bias.v[c];
#pragma unroll 4
    for (int unit = 0; unit < HIDDEN; unit++) {
        const Padded first = load_vector(weights + LayerAt::FIRST + unit * PAD),
                     second = load_vector(weights + LayerAt::SECOND + unit * PAD);
        const float first_bias = weights[LayerAt::FIRST_BIAS + unit];
        EACH(r, R) add_scaled(change[r], gelu(dot(n[r], first.v, first_bias)), second.v);
    }
    unsigned kept = 0;
    if constexpr (DROPS) {
        kept = draw_kept<R>(at, dropout, sample, layer);
        *kept_bits(at, layer) = kept;
    }
    EACH(r, R) EACH(c, WIDTH)
    x[r][c] = DROPS ? fmaf(change[r][c], kept_factor(kept, r, c, dropout), x[r][c]) : change[r][c];
}

// Computes CHUNK hidden units of each token again, and the gradients of their inputs, and stores pairs of both; adds
// the gradient of the normalised embeddings n to dn. `change` is that of the network's output.
template <int R>
DEVICE void units_backward(const Lane& at, const float* weights, int chunk, const RowsOf<R>& n,
                           const RowsOf<R>& change, RowsOf<R>& dn) {
    float* pairs = at.shared + WarpAt::PAIRS;
    constexpr int TOGETHER = CHUNK % 4 == 0 ? 4 : 2;  // units
#pragma unroll 1
    for (int i = 0; i < CHUNK; i += TOGETHER) {
        float active[R][TOGETHER], slope[R][TOGETHER];
        EACH(k, TOGETHER) {
            const int unit = chunk + i + k;
            const Padded first = load_vector(weights + LayerAt::FIRST + unit * PAD),
                         second = load_vector(weights + LayerAt::SECOND + unit * PAD);
            const float first_bias = weights[LayerAt::FIRST_BIAS + unit];
            EACH(r, R) {
                active[r][k] = gelu(dot(n[r], first.v, first_bias), slope[r][k]);
                slope[r][k] *= dot(change[r], second.v, 0.0f);
                add_scaled(dn[r], slope[r][k], first.v);
            }
        }
        EACH(r, R) {
            store(pairs + at.row(r) * PAIR_STEP + i, slope[r]);
            store(pairs + at.row(r) * PAIR_STEP + 8 + i, active[r]);
        }
    }
}

// Turns dx from the gradient of the layer's output into that of its middle.
template <int R>
DEVICE void feedforward_backward(
    const Lane& at, const float* weights, int layer, const Dropout& dropout, float* sums, RowsOf<R>& dx) {
    float* layer_sums = sums + layer * LAYER_STEP;
    save(at, LAYERS, SAVED_CHANGE, dx);  // registers have no room for it
    RowsOf<R> n, dn, change;
    load_saved(at, layer, SAVED_MIDDLE, n);
    layer_norm(weights + LayerAt::NORM_FEEDFORWARD, n, n);
    set_zero(dn);
    const unsigned kept = DROPOUT ? *kept_bits(at, layer) : 0;
    EACH(r, R) EACH(c, WIDTH) change[r][c] = dx[r][c] * (DROPOUT ? kept_factor(kept, r, c, dropout) : 1.0f);
    float* input_rows = at.shared + WarpAt::B_FIRST;
    float* change_rows = at.shared + WarpAt::B_SECOND;
    store_rows(at, input_rows, n);
    store_rows(at, change_rows, change);
    Vector bias_grad = {};
    EACH(r, R) add_scaled(bias_grad, 1.0f, change[r]);
    add_totals(layer_sums + AT_SECOND_BIAS, bias_grad, at.lane);
    constexpr bool EVEN = WIDTH % 2 == 0 && LAYER_STEP % 2 == 0 && AT_FIRST % 2 == 0;
#pragma unroll 1
    for (int chunk = 0; chunk < HIDDEN; chunk += CHUNK) {
        units_backward(at, weights, chunk, n, change, dn);
        sync_warp();
        const Target<CHUNK, WIDTH, WIDTH, 1, EVEN> first = {layer_sums + AT_FIRST + chunk * WIDTH};
        const Target<CHUNK, WIDTH, 1, HIDDEN, false> second = {layer_sums + AT_SECOND + chunk};
        add_products<R>(first, second, at.shared + WarpAt::PAIRS, input_rows, change_rows, at.lane,
                        layer_sums + AT_FIRST_BIAS + chunk, CHUNK);
        sync_warp();
    }
    RowsOf<R> x;
    load_saved(at, layer, SAVED_MIDDLE, x);
    load_saved(at, LAYERS, SAVED_CHANGE, dx);
    layer_norm_backward(at, weights + LayerAt::NORM_FEEDFORWARD, layer_sums + AT_NORM_FEEDFORWARD_WEIGHT,
                        layer_sums + AT_NORM_FEEDFORWARD_BIAS, x, dn, dx);
}
