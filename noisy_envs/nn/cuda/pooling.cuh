// The four pooling heads: embeddings of a sample's tokens to one vector, which all lanes of the sample get, and back.

// What the backward pass of a pooling head needs besides the embeddings.
struct Pooled {
    Vector value;     // the result
    Vector count;     // AvgPool: 1 / number of keys; MaxPool: number of tokens with the largest value
    Vector own;       // AdaPool: the query's embedding
    Vector query;     // AdaPool: the query, scaled as in `project_heads`
    Vector mixed;     // AdaPool: weighted sums of values
    Rows k, v, p;     // AdaPool: keys, values and weights
};

DEVICE void token_of(const Lane& at, const Rows& x, int token, Vector& result) {
    const int lane = at.sample * LANES + token % LANES;
    EACH(c, WIDTH) result[c] = shuffle(x[token / LANES][c], lane);
}

DEVICE void ada_pool(const Lane& at, const float* weights, const Rows& x, Pooled& out) {
    const float* matrix = weights + At::POOLING;
    token_of(at, x, QUERY, out.own);
    EACH(c, WIDTH) {
        const Padded wq = load_vector(matrix + c * PAD), wk = load_vector(matrix + (WIDTH + c) * PAD),
                     wv = load_vector(matrix + (2 * WIDTH + c) * PAD);
        out.query[c] = dot(out.own, wq.v, 0.0f) * (SCORE_SCALE * LOG2_E);
        EACH(r, ROWS) {
            out.k[r][c] = dot(x[r], wk.v, 0.0f);
            out.v[r][c] = dot(x[r], wv.v, 0.0f);
        }
    }
    EACH(c, WIDTH) {
        float largest = -1e30f, total = 0.0f, sum = 0.0f;
        EACH(r, ROWS) {
            out.p[r][c] = out.query[c] * out.k[r][c];
            largest = at.key[r] ? fmaxf(largest, out.p[r][c]) : largest;
        }
        largest = max_lanes<LANES>(largest);
        EACH(r, ROWS) {
            out.p[r][c] = at.key[r] ? exp2_fast(out.p[r][c] - largest) : 0.0f;
            total += out.p[r][c];
            sum = fmaf(out.p[r][c], out.v[r][c], sum);
        }
        const float inverse = reciprocal(fmaxf(sum_lanes<LANES>(total), 1e-30f));
        out.mixed[c] = sum_lanes<LANES>(sum) * inverse;
        EACH(r, ROWS) out.p[r][c] *= inverse;
    }
    EACH(c, WIDTH) out.value[c] = dot(out.mixed, load_vector(matrix + (3 * WIDTH + c) * PAD).v, out.own[c]);
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

DEVICE void pool(const Lane& at, const float* weights, const Rows& x, Pooled& out) {
    if constexpr (POOL == ADA_POOL) ada_pool(at, weights, x, out);
    if constexpr (POOL == AVG_POOL) avg_pool(at, x, out);
    if constexpr (POOL == MAX_POOL) max_pool(at, x, out);
    if constexpr (POOL == CLS_TOKEN) token_of(at, x, 0, out.value);
}

// Gradients of the weights and of the embeddings x, given that of the result.
DEVICE void ada_pool_backward(
    const Lane& at, const float* weights, const Rows& x, const Pooled& pooled, const Vector& d, float* sums, Rows& dx) {
    const float* matrix = weights + At::POOLING;
    Vector dmixed = {}, dq = {}, down;
    EACH(c, WIDTH) add_scaled(dmixed, d[c], load_vector(matrix + (3 * WIDTH + c) * PAD).v);
    Rows dk, dv;
    EACH(r, ROWS) EACH(c, WIDTH) {
        dv[r][c] = pooled.p[r][c] * dmixed[c];
        const float dscore = dv[r][c] * (pooled.v[r][c] - pooled.mixed[c]);
        dk[r][c] = LN_2 * dscore * pooled.query[c];
        dq[c] = fmaf(dscore, pooled.k[r][c], dq[c]);
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
    // Gradients of query and output have one row for each sample: that of the query's token; the other rows are zero.
    sync_warp();
    float* changes = at.shared + WarpAt::ROWS_AT;  // (WARP_ROWS, CHANGE_STEP): dq, dk, dv, d
    EACH(r, ROWS) {
        const bool query = at.token(r) == QUERY;
        Vector own_dq, own_d;
        EACH(c, WIDTH) {
            dx[r][c] += query ? down[c] : 0.0f;
            own_dq[c] = query ? dq[c] : 0.0f;
            own_d[c] = query ? d[c] : 0.0f;
        }
        float* row = changes + at.row(r) * CHANGE_STEP;
        store(row, own_dq);
        store(row + WIDTH, dk[r]);
        store(row + 2 * WIDTH, dv[r]);
        store(row + 3 * WIDTH, own_d);
        store(at.shared + WarpAt::INPUT_A + at.row(r) * INPUT_STEP, x[r]);
        store(at.shared + WarpAt::INPUT_B + at.row(r) * INPUT_STEP, pooled.mixed);
    }
    sync_warp();
    constexpr bool EVEN = WIDTH % 2 == 0;
    add_products<3 * WIDTH, WIDTH, WIDTH, 1, CHANGE_STEP, INPUT_STEP, EVEN && AT_POOL_QUERY % 2 == 0>(
        sums + AT_POOL_QUERY, changes, at.shared + WarpAt::INPUT_A, at.lane);  // key and value follow the query
    add_products<WIDTH, WIDTH, WIDTH, 1, CHANGE_STEP, INPUT_STEP, EVEN && AT_POOL_OUTPUT % 2 == 0>(
        sums + AT_POOL_OUTPUT, changes + 3 * WIDTH, at.shared + WarpAt::INPUT_B, at.lane);
    sync_warp();
}

DEVICE void pool_backward(
    const Lane& at, const float* weights, const Rows& x, const Pooled& pooled, const Vector& d, float* sums, Rows& dx) {
    if constexpr (POOL == ADA_POOL) ada_pool_backward(at, weights, x, pooled, d, sums, dx);
    EACH(r, ROWS) EACH(c, WIDTH) {
        if constexpr (POOL == AVG_POOL) dx[r][c] = at.key[r] ? d[c] * pooled.count[c] : 0.0f;
        if constexpr (POOL == MAX_POOL) dx[r][c] = at.key[r] && x[r][c] == pooled.value[c] ? d[c] / pooled.count[c] : 0.0f;
        if constexpr (POOL == CLS_TOKEN) dx[r][c] = at.token(r) == 0 ? d[c] : 0.0f;
    }
}
