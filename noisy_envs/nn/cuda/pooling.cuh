// The four pooling heads: embeddings of a sample's tokens to one vector, which all lanes of the sample get, and back.
//
// With a class token, the last layer of the encoder belongs to the pooling head, for only one token of it is used. Like
// AdaPool it is attention of one query of each sample.

constexpr int ENCODED = LAYERS - CLASS_TOKENS;  // layers that are computed for all tokens
constexpr int POOL_TOKEN = POOL == CLS_TOKEN ? 0 : QUERY;  // whose query it is

// What the backward pass of a pooling head needs besides what is saved.
struct Pooled {
    Vector value;  // the result
    Vector count;  // AvgPool: 1 / number of keys; MaxPool: number of tokens with the largest value
    Vector query;  // attention's query, scaled as in `project_heads`
    Vector mixed;  // attention's weighted sums of values
};

DEVICE void token_of(const Lane& at, const Rows& x, int token, Vector& result) {
    const int lane = at.sample * LANES + token % LANES;
    EACH(c, WIDTH) result[c] = shuffle(x[token / LANES][c], lane);
}

// Adds the output of attention of POOL_TOKEN to `result`. `matrix` has the rows of queries, keys, values and output.
template <bool TRAIN>
DEVICE void attend_once(const Lane& at, const float* matrix, const Rows& n, Pooled& out, Vector& result) {
    Rows k, v, p;
    Vector own;
    token_of(at, n, POOL_TOKEN, own);
    EACH(c, WIDTH) {
        const Padded wq = load_vector(matrix + c * PAD), wk = load_vector(matrix + (WIDTH + c) * PAD),
                     wv = load_vector(matrix + (2 * WIDTH + c) * PAD);
        out.query[c] = dot(own, wq.v, 0.0f) * (SCORE_SCALE * LOG2_E);
        EACH(r, ROWS) {
            k[r][c] = dot(n[r], wk.v, 0.0f);
            v[r][c] = dot(n[r], wv.v, 0.0f);
        }
    }
    EACH(c, WIDTH) {
        float largest = -1e30f, total = 0.0f, sum = 0.0f;
        EACH(r, ROWS) {
            p[r][c] = out.query[c] * k[r][c];
            largest = at.key[r] ? fmaxf(largest, p[r][c]) : largest;
        }
        largest = max_lanes<LANES>(largest);
        EACH(r, ROWS) {
            p[r][c] = at.key[r] ? exp2_fast(p[r][c] - largest) : 0.0f;
            total += p[r][c];
            sum = fmaf(p[r][c], v[r][c], sum);
        }
        const float inverse = reciprocal(fmaxf(sum_lanes<LANES>(total), 1e-30f));
        out.mixed[c] = sum_lanes<LANES>(sum) * inverse;
        EACH(r, ROWS) p[r][c] *= inverse;
    }
    EACH(c, WIDTH) result[c] = dot(out.mixed, load_vector(matrix + (3 * WIDTH + c) * PAD).v, result[c]);
    if constexpr (TRAIN) {
        save(at, LAYERS, SAVED_KEY, k);
        save(at, LAYERS, SAVED_VALUE, v);
        save(at, LAYERS, SAVED_WEIGHT, p);
    }
}

// Computes dn, the gradient of the embeddings n, which lie at B_FIRST, given d, that of attention's output. Adds up
// those of its matrices, (3 WIDTH, WIDTH) and (WIDTH, WIDTH).
template <bool EVEN>
DEVICE void attend_once_backward(const Lane& at, const float* matrix, const Pooled& pooled, const Vector& d,
                                 float* matrix_sums, float* output_sums, Rows& dn) {
    Vector dmixed = {}, dq = {}, down = {};
    EACH(c, WIDTH) add_scaled(dmixed, d[c], load_vector(matrix + (3 * WIDTH + c) * PAD).v);
    Rows dk, dv;
    {
        Rows k, v;
        load_saved(at, LAYERS, SAVED_WEIGHT, dv);
        load_saved(at, LAYERS, SAVED_KEY, k);
        load_saved(at, LAYERS, SAVED_VALUE, v);
        EACH(r, ROWS) EACH(c, WIDTH) {
            dv[r][c] *= dmixed[c];
            const float dscore = dv[r][c] * (v[r][c] - pooled.mixed[c]);
            dk[r][c] = LN_2 * dscore * pooled.query[c];
            dq[c] = fmaf(dscore, k[r][c], dq[c]);
        }
    }
    EACH(c, WIDTH) dq[c] = sum_lanes<LANES>(dq[c]) * SCORE_SCALE;
    set_zero(dn);
    EACH(c, WIDTH) {
        const Padded wq = load_vector(matrix + c * PAD), wk = load_vector(matrix + (WIDTH + c) * PAD),
                     wv = load_vector(matrix + (2 * WIDTH + c) * PAD);
        add_scaled(down, dq[c], wq.v);
        EACH(r, ROWS) {
            add_scaled(dn[r], dk[r][c], wk.v);
            add_scaled(dn[r], dv[r][c], wv.v);
        }
    }
    // The gradients of query and result have one row for each sample, that of the query's token; other rows are zero.
    Rows own_dq, own_d, rows;
    EACH(r, ROWS) EACH(c, WIDTH) {
        const bool query = at.token(r) == POOL_TOKEN;
        dn[r][c] += query ? down[c] : 0.0f;
        own_dq[r][c] = query ? dq[c] : 0.0f;
        own_d[r][c] = query ? d[c] : 0.0f;
        rows[r][c] = pooled.mixed[c];
    }
    float* pairs = at.shared + WarpAt::PAIRS;
    float* input_rows = at.shared + WarpAt::B_FIRST;
    float* mixed_rows = at.shared + WarpAt::B_SECOND;
    store_rows(at, mixed_rows, rows);
    using Matrix = Target<WIDTH, WIDTH, WIDTH, 1, EVEN>;
    const Matrix query = {matrix_sums}, key = {query.p + WIDTH * WIDTH}, value = {key.p + WIDTH * WIDTH};
    store_pairs(at, own_dq, dk);
    sync_warp();
    add_products<ROWS>(query, key, pairs, input_rows, input_rows, at.lane);
    sync_warp();
    store_pairs(at, dv, own_d);
    sync_warp();
    add_products<ROWS>(value, Matrix{output_sums}, pairs, input_rows, mixed_rows, at.lane);
    sync_warp();
}

DEVICE void avg_pool(const Lane& at, const Rows& x, Pooled& out) {
    float count = 0.0f;
    EACH(r, ROWS) count += at.key[r] ? 1.0f : 0.0f;
    count = sum_lanes<LANES>(count);
    EACH(c, WIDTH) {
        float sum = 0.0f;
        EACH(r, ROWS) sum += at.key[r] ? x[r][c] : 0.0f;
        out.count[c] = 1.0f / count;
        out.value[c] = sum_lanes<LANES>(sum) * out.count[c];
    }
}

DEVICE void max_pool(const Lane& at, const Rows& x, Pooled& out) {
    EACH(c, WIDTH) {
        float largest = -1e30f, count = 0.0f;
        EACH(r, ROWS) largest = at.key[r] ? fmaxf(largest, x[r][c]) : largest;
        out.value[c] = max_lanes<LANES>(largest);
        EACH(r, ROWS) count += at.key[r] && x[r][c] == out.value[c] ? 1.0f : 0.0f;
        out.count[c] = sum_lanes<LANES>(count);
    }
}

// The encoder's last layer, for the class token alone.
template <bool TRAIN>
DEVICE void class_token_layer(
    const Lane& at, const float* weights, const Dropout& dropout, int sample, const Rows& x, Pooled& out) {
    const float* layer = weights + At::LAYER + ENCODED * LayerAt::SIZE;
    Rows n;
    RowsOf<1> y;
    layer_norm(layer + LayerAt::NORM_ATTENTION, x, n);
    token_of(at, x, POOL_TOKEN, y[0]);
    attend_once<TRAIN>(at, layer + LayerAt::QUERY_KEY_VALUE, n, out, y[0]);
    feedforward<TRAIN>(at, layer, ENCODED, dropout, sample, y);  // dropout is right in the lane that has the token
    EACH(c, WIDTH) out.value[c] = shuffle(y[0][c], at.sample * LANES);
}

DEVICE void class_token_layer_backward(const Lane& at, const float* weights, const Dropout& dropout,
                                       const Pooled& pooled, const Vector& d, float* sums, Rows& dx) {
    const float* layer = weights + At::LAYER + ENCODED * LayerAt::SIZE;
    float* layer_sums = sums + ENCODED * LAYER_STEP;
    constexpr bool EVEN =
        WIDTH % 2 == 0 && LAYER_STEP % 2 == 0 && AT_QUERY_KEY_VALUE % 2 == 0 && AT_OUTPUT % 2 == 0;
    RowsOf<1> dy;
    EACH(c, WIDTH) dy[0][c] = at.first == POOL_TOKEN ? d[c] : 0.0f;
    feedforward_backward(at, layer, ENCODED, dropout, sums, dy);
    Vector middle;
    EACH(c, WIDTH) middle[c] = shuffle(dy[0][c], at.sample * LANES);
    Rows x, dn;
    load_saved(at, LAYERS, SAVED_EMBEDDING, x);
    layer_norm(layer + LayerAt::NORM_ATTENTION, x, dn);
    store_rows(at, at.shared + WarpAt::B_FIRST, dn);
    attend_once_backward<EVEN>(at, layer + LayerAt::QUERY_KEY_VALUE, pooled, middle, layer_sums + AT_QUERY_KEY_VALUE,
                               layer_sums + AT_OUTPUT, dn);
    EACH(r, ROWS) EACH(c, WIDTH) dx[r][c] = at.token(r) == POOL_TOKEN ? middle[c] : 0.0f;
    load_saved(at, LAYERS, SAVED_EMBEDDING, x);
    layer_norm_backward(at, layer + LayerAt::NORM_ATTENTION, layer_sums + AT_NORM_ATTENTION_WEIGHT,
                        layer_sums + AT_NORM_ATTENTION_BIAS, x, dn, dx);
}

DEVICE void ada_pool_backward(
    const Lane& at, const float* weights, const Pooled& pooled, const Vector& d, float* sums, Rows& dx) {
    constexpr bool EVEN = WIDTH % 2 == 0 && AT_POOL_QUERY % 2 == 0 && AT_POOL_OUTPUT % 2 == 0;
    Rows x;
    load_saved(at, LAYERS, SAVED_EMBEDDING, x);
    store_rows(at, at.shared + WarpAt::B_FIRST, x);
    attend_once_backward<EVEN>(
        at, weights + At::POOLING, pooled, d, sums + AT_POOL_QUERY, sums + AT_POOL_OUTPUT, dx);
    EACH(r, ROWS) EACH(c, WIDTH) dx[r][c] += at.token(r) == POOL_TOKEN ? d[c] : 0.0f;
}

// Pools embeddings x, those of the layers that are computed for all tokens.
template <bool TRAIN>
DEVICE void pool(const Lane& at, const float* weights, const Dropout& dropout, int sample, const Rows& x, Pooled& out) {
    if constexpr (TRAIN) save(at, LAYERS, SAVED_EMBEDDING, x);
    if constexpr (POOL == ADA_POOL) {
        token_of(at, x, POOL_TOKEN, out.value);
        attend_once<TRAIN>(at, weights + At::POOLING, x, out, out.value);
    }
    if constexpr (POOL == AVG_POOL) avg_pool(at, x, out);
    if constexpr (POOL == MAX_POOL) max_pool(at, x, out);
    if constexpr (POOL == CLS_TOKEN) class_token_layer<TRAIN>(at, weights, dropout, sample, x, out);
}

// Computes dx, the gradient of the embeddings, given d, that of the result, and adds up those of the weights.
DEVICE void pool_backward(const Lane& at, const float* weights, const Dropout& dropout, const Pooled& pooled,
                          const Vector& d, float* sums, Rows& dx) {
    if constexpr (POOL == ADA_POOL) {
        ada_pool_backward(at, weights, pooled, d, sums, dx);
    } else if constexpr (POOL == CLS_TOKEN) {
        class_token_layer_backward(at, weights, dropout, pooled, d, sums, dx);
    } else if constexpr (POOL == AVG_POOL) {
        EACH(r, ROWS) EACH(c, WIDTH) dx[r][c] = at.key[r] ? d[c] * pooled.count[c] : 0.0f;
    } else {
        Rows x;
        load_saved(at, LAYERS, SAVED_EMBEDDING, x);
        EACH(r, ROWS) EACH(c, WIDTH)
        dx[r][c] = at.key[r] && x[r][c] == pooled.value[c] ? d[c] / pooled.count[c] : 0.0f;
    }
}
