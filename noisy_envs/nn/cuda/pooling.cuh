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
};

DEVICE void token_of(const Lane& at, const Rows& x, int token, Vector& result) {
    const int lane = at.sample * LANES + token % LANES;
    EACH(c, WIDTH) result[c] = shuffle(x[token / LANES][c], lane);
}

// What attention of one query of each sample keeps for its backward pass, in the warp's shared memory: its query, scaled
// as in `project_queries`, and its weighted sums of values; then the gradients of query and output.
struct Attention {
    float *query, *mixed, *dq, *d;  // (PAD,) each, of a sample

    DEVICE Attention(const Lane& at, int sample)
        : query(at.shared + WarpAt::POOLED + sample * 2 * PAD), mixed(query + PAD), dq(query + SAMPLES * 2 * PAD),
          d(dq + PAD) {}
};

// Adds the output of attention of POOL_TOKEN to `result`. `matrix` has the rows of queries, keys, values and output.
template <bool TRAIN>
DEVICE void attend_once(const Lane& at, const float* matrix, const Rows& n, RowsOf<1>& result) {
    const Attention kept(at, at.sample);
    RowsOf<1> own;
    token_of(at, n, POOL_TOKEN, own[0]);
#pragma unroll 1
    for (int group = 0; group < GROUPS; group++) {
        Group k, v, p;
        float q[1][GROUP], mixed[1][GROUP];
        project_queries<1>(matrix, group * GROUP, own, q);
        project_keys(matrix, group * GROUP, n, k, v);
        EACH(c, GROUP) {
            float largest = -1e30f, total = 0.0f, sum = 0.0f;
            EACH(r, ROWS) {
                p[r][c] = q[0][c] * k[r][c];
                largest = at.key[r] ? fmaxf(largest, p[r][c]) : largest;
            }
            largest = max_lanes<LANES>(largest);
            EACH(r, ROWS) {
                p[r][c] = at.key[r] ? exp2_fast(p[r][c] - largest) : 0.0f;
                total += p[r][c];
                sum = fmaf(p[r][c], v[r][c], sum);
            }
            const float inverse = reciprocal(fmaxf(sum_lanes<LANES>(total), 1e-30f));
            mixed[0][c] = sum_lanes<LANES>(sum) * inverse;
            EACH(r, ROWS) p[r][c] *= inverse;
            if (TRAIN && at.first == 0) {
                kept.query[group * GROUP + c] = q[0][c];
                kept.mixed[group * GROUP + c] = mixed[0][c];
            }
        }
        add_output<1>(matrix + 3 * WIDTH * PAD, group, mixed, result);
        if constexpr (TRAIN) save_group(at, LAYERS, SAVED_WEIGHT, group, p);
    }
}

// Adds a matrix to device memory that is the sum over samples of a product of two vectors, x(sample) y(sample)^T.
DEVICE void add_outer(float* sums, const float* x, int x_step, const float* y, int y_step, int lane) {
#pragma unroll 1
    for (int i = lane; i < WIDTH * WIDTH; i += 32) {
        float total = 0.0f;
        EACH(s, SAMPLES) total = fmaf(x[s * x_step + i / WIDTH], y[s * y_step + i % WIDTH], total);
        add(sums + i, total);
    }
}

// Where `add_products` adds the gradient of the matrix of keys, or values: columns are in groups of float4.
template <bool EVEN> struct GroupedTarget {
    float* p;

    DEVICE bool takes_first(int) const { return true; }
    DEVICE void add_pair(int i, int j, float x0, float x1) const {
        if (i < PAD && i % 4 < GROUP)
            Target<WIDTH, WIDTH, WIDTH, 1, EVEN>{p}.add_pair(i / 4 * GROUP + i % 4, j, x0, x1);
    }
};

// Computes dn, the gradient of the embeddings n, which lie at B_FIRST, given d, that of attention's output. Adds up
// those of its matrices, (3 WIDTH, WIDTH) and (WIDTH, WIDTH).
template <bool EVEN>
DEVICE void attend_once_backward(
    const Lane& at, const float* matrix, const Vector& d, float* matrix_sums, float* output_sums, Rows& dn) {
    const Attention kept(at, at.sample);
    float* pairs = at.shared + WarpAt::PAIRS;
    Vector down = {};  // the gradient of the query's own embedding
    set_zero(dn);
#pragma unroll 1
    for (int group = 0; group < GROUPS; group++) {
        Group k, v, dk, dv;
        float dmixed[GROUP] = {};
        EACH(c, WIDTH) {
            float w[GROUP];
            load_group(matrix + (3 * WIDTH + c) * PAD + 4 * group, w);
            EACH(i, GROUP) dmixed[i] = fmaf(d[c], w[i], dmixed[i]);
        }
        load_saved_group(at, LAYERS, SAVED_WEIGHT, group, dv);
        {
            Rows n;
            load_rows(at, at.shared + WarpAt::B_FIRST, n);
            project_keys(matrix, group * GROUP, n, k, v);
        }
        EACH(c, GROUP) {
            const int head = group * GROUP + c;
            const float q = kept.query[head], mixed = kept.mixed[head];
            float dq = 0.0f;
            EACH(r, ROWS) {
                dv[r][c] *= dmixed[c];
                const float dscore = dv[r][c] * (v[r][c] - mixed);
                dk[r][c] = LN_2 * dscore * q;
                dq = fmaf(dscore, k[r][c], dq);
            }
            dq = sum_lanes<LANES>(dq) * SCORE_SCALE;
            if (at.first == 0) kept.dq[head] = dq;
            const float* row = matrix + head * PAD;
            const Padded wq = load_vector(row), wk = load_vector(row + WIDTH * PAD),
                         wv = load_vector(row + 2 * WIDTH * PAD);
            add_scaled(down, dq, wq.v);
            EACH(r, ROWS) {
                add_scaled(dn[r], dk[r][c], wk.v);
                add_scaled(dn[r], dv[r][c], wv.v);
            }
        }
        EACH(r, ROWS) {
            store_group(pairs + at.row(r) * PAIR_STEP + 4 * group, dk[r]);
            store_group(pairs + at.row(r) * PAIR_STEP + 8 + 4 * group, dv[r]);
        }
    }
    EACH(r, ROWS) EACH(c, WIDTH) dn[r][c] += at.token(r) == POOL_TOKEN ? down[c] : 0.0f;
    if (at.first == 0) store(kept.d, d);
    sync_warp();
    const float* input_rows = at.shared + WarpAt::B_FIRST;
    const float* own = input_rows + (POOL_TOKEN / LANES * 32 + POOL_TOKEN % LANES) * INPUT_STEP;  // of the first sample
    const Attention first_sample(at, 0);
    add_outer(matrix_sums, first_sample.dq, 2 * PAD, own, LANES * INPUT_STEP, at.lane);
    add_outer(output_sums, first_sample.d, 2 * PAD, first_sample.mixed, 2 * PAD, at.lane);
    const GroupedTarget<EVEN> key = {matrix_sums + WIDTH * WIDTH}, value = {matrix_sums + 2 * WIDTH * WIDTH};
    add_products<ROWS>(key, value, pairs, input_rows, input_rows, at.lane);
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
    attend_once<TRAIN>(at, layer + LayerAt::QUERY_KEY_VALUE, n, y);
    feedforward<TRAIN>(at, layer, ENCODED, dropout, sample, y);  // dropout is right in the lane that has the token
    EACH(c, WIDTH) out.value[c] = shuffle(y[0][c], at.sample * LANES);
}

DEVICE void class_token_layer_backward(
    const Lane& at, const float* weights, const Dropout& dropout, const Vector& d, float* sums, Rows& dx) {
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
    attend_once_backward<EVEN>(at, layer + LayerAt::QUERY_KEY_VALUE, middle, layer_sums + AT_QUERY_KEY_VALUE,
                               layer_sums + AT_OUTPUT, dn);
    EACH(r, ROWS) EACH(c, WIDTH) dx[r][c] = at.token(r) == POOL_TOKEN ? middle[c] : 0.0f;
    load_saved(at, LAYERS, SAVED_EMBEDDING, x);
    layer_norm_backward(at, layer + LayerAt::NORM_ATTENTION, layer_sums + AT_NORM_ATTENTION_WEIGHT,
                        layer_sums + AT_NORM_ATTENTION_BIAS, x, dn, dx);
}

DEVICE void ada_pool_backward(const Lane& at, const float* weights, const Vector& d, float* sums, Rows& dx) {
    constexpr bool EVEN = WIDTH % 2 == 0 && AT_POOL_QUERY % 2 == 0 && AT_POOL_OUTPUT % 2 == 0;
    Rows x;
    load_saved(at, LAYERS, SAVED_EMBEDDING, x);
    store_rows(at, at.shared + WarpAt::B_FIRST, x);
    attend_once_backward<EVEN>(at, weights + At::POOLING, d, sums + AT_POOL_QUERY, sums + AT_POOL_OUTPUT, dx);
    EACH(r, ROWS) EACH(c, WIDTH) dx[r][c] += at.token(r) == POOL_TOKEN ? d[c] : 0.0f;
}

// Pools embeddings x, those of the layers that are computed for all tokens.
template <bool TRAIN>
DEVICE void pool(const Lane& at, const float* weights, const Dropout& dropout, int sample, const Rows& x, Pooled& out) {
    if constexpr (TRAIN && POOL != AVG_POOL) save(at, LAYERS, SAVED_EMBEDDING, x);
    if constexpr (POOL == ADA_POOL) {
        RowsOf<1> y;
        token_of(at, x, POOL_TOKEN, y[0]);
        attend_once<TRAIN>(at, weights + At::POOLING, x, y);
        EACH(c, WIDTH) out.value[c] = y[0][c];
    }
    if constexpr (POOL == AVG_POOL) avg_pool(at, x, out);
    if constexpr (POOL == MAX_POOL) max_pool(at, x, out);
    if constexpr (POOL == CLS_TOKEN) class_token_layer<TRAIN>(at, weights, dropout, sample, x, out);
}

// Computes dx, the gradient of the embeddings, given d, that of the result, and adds up those of the weights.
DEVICE void pool_backward(const Lane& at, const float* weights, const Dropout& dropout, const Pooled& pooled,
                          const Vector& d, float* sums, Rows& dx) {
    if constexpr (POOL == ADA_POOL) {
        ada_pool_backward(at, weights, d, sums, dx);
    } else if constexpr (POOL == CLS_TOKEN) {
        class_token_layer_backward(at, weights, dropout, d, sums, dx);
    } else if constexpr (POOL == AVG_POOL) {
        EACH(r, ROWS) EACH(c, WIDTH) dx[r][c] = at.key[r] ? d[c] * pooled.count[c] : 0.0f;
    } else {
        Rows x;
        load_saved(at, LAYERS, SAVED_EMBEDDING, x);
        EACH(r, ROWS) EACH(c, WIDTH)
        dx[r][c] = at.key[r] && x[r][c] == pooled.value[c] ? d[c] / pooled.count[c] : 0.0f;
    }
}
