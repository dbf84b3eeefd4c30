// The four pooling heads: embeddings of a sample's tokens to one vector, which all lanes of the sample get, and back.

// What the backward pass of a pooling head needs besides what is saved.
struct Pooled {
    Vector value;  // the result
    Vector count;  // AvgPool: 1 / number of keys; MaxPool: number of tokens with the largest value
    Vector query;  // AdaPool: the query, scaled as in `project_heads`
    Vector mixed;  // AdaPool: weighted sums of values
};

DEVICE void token_of(const Lane& at, const Rows& x, int token, Vector& result) {
    const int lane = at.sample * LANES + token % LANES;
    EACH(c, WIDTH) result[c] = shuffle(x[token / LANES][c], lane);
}

template <bool TRAIN> DEVICE void ada_pool(const Lane& at, const float* weights, const Rows& x, Pooled& out) {
    const float* matrix = weights + At::POOLING;
    Rows k, v, p;
    Vector own;
    token_of(at, x, QUERY, own);
    EACH(c, WIDTH) {
        const Padded wq = load_vector(matrix + c * PAD), wk = load_vector(matrix + (WIDTH + c) * PAD),
                     wv = load_vector(matrix + (2 * WIDTH + c) * PAD);
        out.query[c] = dot(own, wq.v, 0.0f) * (SCORE_SCALE * LOG2_E);
        EACH(r, ROWS) {
            k[r][c] = dot(x[r], wk.v, 0.0f);
            v[r][c] = dot(x[r], wv.v, 0.0f);
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
    EACH(c, WIDTH) out.value[c] = dot(out.mixed, load_vector(matrix + (3 * WIDTH + c) * PAD).v, own[c]);
    if constexpr (TRAIN) {
        save(at, LAYERS, SAVED_KEY, k);
        save(at, LAYERS, SAVED_VALUE, v);
        save(at, LAYERS, SAVED_WEIGHT, p);
    }
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

template <bool TRAIN> DEVICE void pool(const Lane& at, const float* weights, const Rows& x, Pooled& out) {
    if constexpr (TRAIN) save(at, LAYERS, SAVED_EMBEDDING, x);
    if constexpr (POOL == ADA_POOL) ada_pool<TRAIN>(at, weights, x, out);
    if constexpr (POOL == AVG_POOL) avg_pool(at, x, out);
    if constexpr (POOL == MAX_POOL) max_pool(at, x, out);
    if constexpr (POOL == CLS_TOKEN) token_of(at, x, 0, out.value);
}

// Adds up the gradients of AdaPool's weights and computes that of the embeddings, given d, that of the result.
DEVICE void ada_pool_backward(
    const Lane& at, const float* weights, const Pooled& pooled, const Vector& d, float* sums, Rows& dx) {
    const float* matrix = weights + At::POOLING;
    Vector dmixed = {}, dq = {}, down;
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
    EACH(c, WIDTH) down[c] = d[c];
    set_zero(dx);
    EACH(c, WIDTH) {
        const Padded wq = load_vector(matrix + c * PAD), wk = load_vector(matrix + (WIDTH + c) * PAD),
                     wv = load_vector(matrix + (2 * WIDTH + c) * PAD);
        add_scaled(down, dq[c], wq.v);
        EACH(r, ROWS) {
            add_scaled(dx[r], dk[r][c], wk.v);
            add_scaled(dx[r], dv[r][c], wv.v);
        }
    }
    // The gradients of query and result have one row for each sample, that of the query's token; other rows are zero.
    Rows own_dq, own_d, rows;
    EACH(r, ROWS) EACH(c, WIDTH) {
        const bool query = at.token(r) == QUERY;
        dx[r][c] += query ? down[c] : 0.0f;
        own_dq[r][c] = query ? dq[c] : 0.0f;
        own_d[r][c] = query ? d[c] : 0.0f;
        rows[r][c] = pooled.mixed[c];
    }
    float* pairs = at.shared + WarpAt::PAIRS;
    float* input_rows = at.shared + WarpAt::B_FIRST;
    float* mixed_rows = at.shared + WarpAt::B_SECOND;
    store_rows(at, mixed_rows, rows);
    load_saved(at, LAYERS, SAVED_EMBEDDING, rows);
    store_rows(at, input_rows, rows);
    using Matrix = Target<WIDTH, WIDTH, WIDTH, 1, WIDTH % 2 == 0 && AT_POOL_QUERY % 2 == 0>;
    using OutputMatrix = Target<WIDTH, WIDTH, WIDTH, 1, WIDTH % 2 == 0 && AT_POOL_OUTPUT % 2 == 0>;
    const Matrix query = {sums + AT_POOL_QUERY}, key = {query.p + WIDTH * WIDTH}, value = {key.p + WIDTH * WIDTH};
    store_pairs(at, own_dq, dk);
    sync_warp();
    add_products(query, key, pairs, input_rows, input_rows, at.lane);
    sync_warp();
    store_pairs(at, dv, own_d);
    sync_warp();
    add_products(value, OutputMatrix{sums + AT_POOL_OUTPUT}, pairs, input_rows, mixed_rows, at.lane);
    sync_warp();
}

DEVICE void pool_backward(
    const Lane& at, const float* weights, const Pooled& pooled, const Vector& d, float* sums, Rows& dx) {
    if constexpr (POOL == ADA_POOL) {
        ada_pool_backward(at, weights, pooled, d, sums, dx);
    } else {
        Rows x;
        load_saved(at, LAYERS, SAVED_EMBEDDING, x);
        EACH(r, ROWS) EACH(c, WIDTH) {
            if constexpr (POOL == AVG_POOL) dx[r][c] = at.key[r] ? d[c] * pooled.count[c] : 0.0f;
            if constexpr (POOL == MAX_POOL)
                dx[r][c] = at.key[r] && x[r][c] == pooled.value[c] ? d[c] / pooled.count[c] : 0.0f;
            if constexpr (POOL == CLS_TOKEN) dx[r][c] = at.token(r) == 0 ? d[c] : 0.0f;
        }
    }
}
