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
// Queries (scaled so that 2^(q k) is the weight), keys and values of normalised embeddings.
DEVICE void project_heads(const float* matrix, const Rows& n, Rows& q, Rows& k, Rows& v) {
    EACH(c, WIDTH) {
        const Padded wq = load_vector(matrix + c * PAD), wk = load_vector(matrix + (WIDTH + c) * PAD),
                     wv = load_vector(matrix + (2 * WIDTH + c) * PAD);
        EACH(r, ROWS) {
            q[r][c] = dot(n[r], wq.v, 0.0f) * (SCORE_SCALE * LOG2_E);
            k[r][c] = dot(n[r], wk.v, 0.0f);
            v[r][c] = dot(n[r], wv.v, 0.0f);
        }
    }
}

// Head c of a vector within its groups of float4.
CONSTEXPR int in_groups(int c) { return c / GROUP * 4 + c % GROUP; }

DEVICE void store_groups(float* p, const Vector& x) {
    float grouped[PAD] = {};
    EACH(c, WIDTH) grouped[in_groups(c)] = x[c];
    store(p, grouped);
}

DEVICE void load_group(const float* p, float (&x)[4]) {
    const float4 f = *reinterpret_cast<const float4*>(p);
    x[0] = f.x, x[1] = f.y, x[2] = f.z, x[3] = f.w;
}

// The number of tokens that loops over pairs visit: up to the last key of all samples of the warp, and the query, whose
// own row of gradients counts even if it is padding.
DEVICE int last_token(const Lane& at) {
    if constexpr (!PADDED) return TOKENS;
    int last = QUERY;
    EACH(r, ROWS) last = at.key[r] ? max_of(last, at.token(r)) : last;
    return KEYS * ceil_div(max_warp(last) + 1, KEYS);
}

// Shifts keys by the middle of their range over a sample's tokens, and stores the middles and half the ranges.
DEVICE void center_keys(const Lane& at, float* key_range, Rows& k) {
    Vector middle, half;
    EACH(c, WIDTH) {
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
        store(key_range, middle);
        store(key_range + PAD, half);
    }
}

DEVICE float* key_range_of(const Lane& at, int layer) {
    return at.shared + WarpAt::KEY_RANGE + (layer * SAMPLES + at.sample) * 2 * PAD;
}

// Stores a lane's keys and values, and their products for the covariance. Padding has the weight 2^0 times 0.
template <bool TRAIN> DEVICE void store_keys(const Lane& at, const Rows& k, const Rows& v) {
    float* keys = at.shared + at.sample * KEY_SAMPLE;
    EACH(r, ROWS) if (at.stored(r)) {
        float* row = keys + at.token(r) * KEY_STEP;
        Vector kept_k, kept_v, product;
        EACH(c, WIDTH) {
            kept_k[c] = at.key[r] ? k[r][c] : 0.0f;
            kept_v[c] = at.key[r] ? v[r][c] : 0.0f;
            product[c] = kept_k[c] * kept_v[c];
        }
        store_groups(row, kept_k);
        store_groups(row + PAD, kept_v);
        if constexpr (TRAIN) store_groups(row + 2 * PAD, product);
        if constexpr (PADDED) row[3 * PAD] = at.key[r] ? 1.0f : 0.0f;
    }
}

// Attention of a lane's queries, as mixtures of values, and what its gradient needs.
struct Attended {
    Rows mixed, inverse, covariance;  // the second is 1 / sum of weights 2^(q k - largest)
};

// Sums over keys.
template <bool TRAIN>
DEVICE void sum_keys(const Lane& at, int visited, const Rows& q, const Padded& half, Attended& out) {
    const float* keys = at.shared + at.sample * KEY_SAMPLE;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float total[ROWS][GROUP] = {}, sum_v[ROWS][GROUP] = {}, sum_k[ROWS][GROUP] = {}, sum_kv[ROWS][GROUP] = {};
        float largest[ROWS][GROUP];
        EACH(r, ROWS) EACH(c, GROUP) largest[r][c] = fabsf(q[r][g * GROUP + c]) * half.v[g * GROUP + c];
#pragma unroll UNROLL_KEYS
        for (int begin = 0; begin < visited; begin += KEYS) EACH(j, KEYS) {
            const float* row = keys + (begin + j) * KEY_STEP;
            float kj[4], vj[4], kvj[4];
            load_group(row + 4 * g, kj);
            load_group(row + PAD + 4 * g, vj);
            if constexpr (TRAIN) load_group(row + 2 * PAD + 4 * g, kvj);
            const float one = PADDED ? row[3 * PAD] : 1.0f;
            EACH(r, ROWS) EACH(c, GROUP) {
                const float p = exp2_fast(fmaf(q[r][g * GROUP + c], kj[c], -largest[r][c]));
                total[r][c] = PADDED ? fmaf(p, one, total[r][c]) : total[r][c] + p;
                sum_v[r][c] = fmaf(p, vj[c], sum_v[r][c]);
                if constexpr (TRAIN) {
                    sum_k[r][c] = fmaf(p, kj[c], sum_k[r][c]);
                    sum_kv[r][c] = fmaf(p, kvj[c], sum_kv[r][c]);
                }
            }
        }
        EACH(r, ROWS) EACH(c, GROUP) {
            const int head = g * GROUP + c;
            const float inverse = reciprocal(PADDED ? fmaxf(total[r][c], 1e-30f) : total[r][c]);
            out.inverse[r][head] = inverse;
            out.mixed[r][head] = sum_v[r][c] * inverse;
            if constexpr (TRAIN)
                out.covariance[r][head] =
                    fmaf(-out.mixed[r][head], sum_k[r][c] * inverse, sum_kv[r][c] * inverse);
        }
    }
}

// Adds attention's output to x. For the backward pass it saves what `attention_backward` reads.
template <bool TRAIN> DEVICE void attention(const Lane& at, const float* weights, int layer, int visited, Rows& x) {
    if constexpr (TRAIN) save(at, layer, SAVED_INPUT, x);
    Attended attended;
    {
        Rows q, k, v, n;
        layer_norm(weights + LayerAt::NORM_ATTENTION, x, n);
        project_heads(weights + LayerAt::QUERY_KEY_VALUE, n, q, k, v);
        float* key_range = key_range_of(at, layer);
        center_keys(at, key_range, k);
        store_keys<TRAIN>(at, k, v);
        sync_warp();
        sum_keys<TRAIN>(at, visited, q, load_vector(key_range + PAD), attended);
        sync_warp();
    }
    if constexpr (TRAIN) {
        save(at, layer, SAVED_MIXED, attended.mixed);
        save(at, layer, SAVED_INVERSE, attended.inverse);
        save(at, layer, SAVED_COVARIANCE, attended.covariance);
        load_saved(at, layer, SAVED_INPUT, x);  // again, rather than in registers beside the sums
    }
    EACH(c, WIDTH) {
        const Padded w = load_vector(weights + LayerAt::OUTPUT + c * PAD);
        EACH(r, ROWS) x[r][c] = dot(attended.mixed[r], w.v, x[r][c]);
    }
}

// Stores, for each query of the warp, what its weights and their gradients need: q, the largest score, do / total,
// q do / total and q do o / total, with o its output and do the gradient of that.
DEVICE void store_queries(const Lane& at, const Rows& q, const Padded& half, const Rows& scaled_do, const Rows& mixed) {
    float* queries = at.shared + at.sample * QUERY_SAMPLE;
    EACH(r, ROWS) if (at.stored(r)) {
        float* row = queries + at.token(r) * QUERY_STEP;
        Vector largest, product, product_mixed;
        EACH(c, WIDTH) {
            largest[c] = fabsf(q[r][c]) * half.v[c];
            product[c] = q[r][c] * scaled_do[r][c];
            product_mixed[c] = product[c] * mixed[r][c];
        }
        store_groups(row, q[r]);
        store_groups(row + PAD, largest);
        store_groups(row + 2 * PAD, scaled_do[r]);
        store_groups(row + 3 * PAD, product);
        store_groups(row + 4 * PAD, product_mixed);
    }
}

// Sums over queries the gradients of this lane's keys and values.
DEVICE void sum_queries(const Lane& at, int visited, const Rows& k, const Rows& v, Rows& dk, Rows& dv) {
    const float* queries = at.shared + at.sample * QUERY_SAMPLE;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float sum_do[ROWS][GROUP] = {}, sum_qdo[ROWS][GROUP] = {}, sum_qdoo[ROWS][GROUP] = {};
#pragma unroll UNROLL_QUERIES
        for (int begin = 0; begin < visited; begin += QUERIES) EACH(i, QUERIES) {
            const float* row = queries + (begin + i) * QUERY_STEP + 4 * g;
            float q[4], largest[4], d[4], qd[4], qdo[4];
            load_group(row, q);
            load_group(row + PAD, largest);
            load_group(row + 2 * PAD, d);
            load_group(row + 3 * PAD, qd);
            load_group(row + 4 * PAD, qdo);
            EACH(r, ROWS) EACH(c, GROUP) {
                const float p = exp2_fast(fmaf(q[c], k[r][g * GROUP + c], -largest[c]));
                sum_do[r][c] = fmaf(p, d[c], sum_do[r][c]);
                sum_qdo[r][c] = fmaf(p, qd[c], sum_qdo[r][c]);
                sum_qdoo[r][c] = fmaf(p, qdo[c], sum_qdoo[r][c]);
            }
        }
        EACH(r, ROWS) EACH(c, GROUP) {  // padding is no key; its sums may be infinite
            const int head = g * GROUP + c;
            dv[r][head] = at.key[r] ? sum_do[r][c] : 0.0f;
            dk[r][head] = at.key[r] ? LN_2 * fmaf(v[r][head], sum_qdo[r][c], -sum_qdoo[r][c]) : 0.0f;
        }
    }
}

// Computes the gradients of queries, keys and values from dx, that of the layer's middle.
DEVICE void heads_backward(
    const Lane& at, const float* weights, int layer, int visited, const Rows& dx, Rows& dq, Rows& dk, Rows& dv) {
    Rows k, v;
    {
        Rows q, d, x;
        load_saved(at, layer, SAVED_INPUT, x);
        layer_norm(weights + LayerAt::NORM_ATTENTION, x, x);
        project_heads(weights + LayerAt::QUERY_KEY_VALUE, x, q, k, v);
        set_zero(d);
        EACH(c, WIDTH) {
            const Padded w = load_vector(weights + LayerAt::OUTPUT + c * PAD);
            EACH(r, ROWS) add_scaled(d[r], dx[r][c], w.v);
        }
        load_saved(at, layer, SAVED_COVARIANCE, x);
        EACH(r, ROWS) EACH(c, WIDTH) x[r][c] *= d[r][c] * SCORE_SCALE;
        save(at, layer, SAVED_COVARIANCE, x);  // now dq, which registers have no room for
        load_saved(at, layer, SAVED_INVERSE, x);
        EACH(r, ROWS) EACH(c, WIDTH) d[r][c] *= x[r][c];
        load_saved(at, layer, SAVED_MIXED, x);
        const float* key_range = key_range_of(at, layer);
        const Padded middle = load_vector(key_range), half = load_vector(key_range + PAD);
        EACH(r, ROWS) EACH(c, WIDTH) k[r][c] -= middle.v[c];
        store_queries(at, q, half, d, x);
    }
    sync_warp();
    sum_queries(at, visited, k, v, dk, dv);
    sync_warp();
    load_saved(at, layer, SAVED_COVARIANCE, dq);
}

// Turns dx from the gradient of the layer's middle into that of its input.
DEVICE void attention_backward(const Lane& at, const float* weights, int layer, int visited, float* sums, Rows& dx) {
    float* pairs = at.shared + WarpAt::PAIRS;
    float* input_rows = at.shared + WarpAt::B_FIRST;
    float* mixed_rows = at.shared + WarpAt::B_SECOND;
    float* layer_sums = sums + layer * LAYER_STEP;
    constexpr bool EVEN = WIDTH % 2 == 0 && LAYER_STEP % 2 == 0;
    using Matrix = Target<WIDTH, WIDTH, WIDTH, 1, EVEN && AT_QUERY_KEY_VALUE % 2 == 0>;
    using OutputMatrix = Target<WIDTH, WIDTH, WIDTH, 1, EVEN && AT_OUTPUT % 2 == 0>;
    const Matrix query = {layer_sums + AT_QUERY_KEY_VALUE}, key = {query.p + WIDTH * WIDTH},
                 value = {key.p + WIDTH * WIDTH};
    Rows dn, x;
    {
        Rows dq, dk, dv;
        heads_backward(at, weights, layer, visited, dx, dq, dk, dv);
        load_saved(at, layer, SAVED_INPUT, x);
        layer_norm(weights + LayerAt::NORM_ATTENTION, x, dn);
        store_rows(at, input_rows, dn);
        load_saved(at, layer, SAVED_MIXED, x);
        store_rows(at, mixed_rows, x);
        store_pairs(at, dq, dk);
        sync_warp();
        add_products<ROWS>(query, key, pairs, input_rows, input_rows, at.lane);
        sync_warp();
        store_pairs(at, dv, dx);
        sync_warp();
        add_products<ROWS>(value, OutputMatrix{layer_sums + AT_OUTPUT}, pairs, input_rows, mixed_rows, at.lane);
        sync_warp();
        set_zero(dn);
        EACH(c, WIDTH) {
            const float* matrix = weights + LayerAt::QUERY_KEY_VALUE + c * PAD;
            const Padded wq = load_vector(matrix), wk = load_vector(matrix + WIDTH * PAD),
                         wv = load_vector(matrix + 2 * WIDTH * PAD);
            EACH(r, ROWS) {
                add_scaled(dn[r], dq[r][c], wq.v);
                add_scaled(dn[r], dk[r][c], wk.v);
                add_scaled(dn[r], dv[r][c], wv.v);
            }
        }
    }
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
#pragma unroll
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
