// PPO's loss and its gradient for small transformers, of many runs at once, in one kernel; and the policy for rollouts.
//
// Files, in this order after the constants of `layout.cuh`: gpu, layout, warp, encoder, pooling, heads, kernels.
//
// A block belongs to one run, whose weights it holds in shared memory. A warp takes SAMPLES samples through the whole
// network and back; only the sums of gradients and what the backward pass needs again go to device memory, where they
// stay in the cache.

// Copies a matrix to shared memory, so that element (i, j) lies at i ROW_STEP + j COLUMN_STEP.
template <int COLUMNS, int ROW_STEP, int COLUMN_STEP>
DEVICE void load_matrix(float* to, const float* from, int rows) {
#pragma unroll 1
    for (int i = thread_index(); i < rows * COLUMNS; i += WARPS * 32)
        to[i / COLUMNS * ROW_STEP + i % COLUMNS * COLUMN_STEP] = from[i];
}

DEVICE void load_vector_weights(float* to, const float* from, int size) { load_matrix<1, 1, 1>(to, from, size); }

// Columns in groups of float4, one group of heads each.
DEVICE void load_output(float* to, const float* from) {
    for (int i = thread_index(); i < WIDTH * WIDTH; i += WARPS * 32)
        to[i / WIDTH * PAD + i % WIDTH / GROUP * 4 + i % WIDTH % GROUP] = from[i];
}

DEVICE void load_layer(float* to, const float* from) {
    load_matrix<WIDTH, PAD, 1>(to + LayerAt::QUERY_KEY_VALUE, from + AT_QUERY_KEY_VALUE, 3 * WIDTH);
    load_output(to + LayerAt::OUTPUT, from + AT_OUTPUT);
    load_matrix<WIDTH, PAD, 1>(to + LayerAt::FIRST, from + AT_FIRST, HIDDEN);
    load_matrix<HIDDEN, 1, PAD>(to + LayerAt::SECOND, from + AT_SECOND, WIDTH);
    load_vector_weights(to + LayerAt::FIRST_BIAS, from + AT_FIRST_BIAS, HIDDEN);
    load_vector_weights(to + LayerAt::SECOND_BIAS, from + AT_SECOND_BIAS, WIDTH);
    load_vector_weights(to + LayerAt::NORM_ATTENTION, from + AT_NORM_ATTENTION_WEIGHT, WIDTH);
    load_vector_weights(to + LayerAt::NORM_ATTENTION + PAD, from + AT_NORM_ATTENTION_BIAS, WIDTH);
    load_vector_weights(to + LayerAt::NORM_FEEDFORWARD, from + AT_NORM_FEEDFORWARD_WEIGHT, WIDTH);
    load_vector_weights(to + LayerAt::NORM_FEEDFORWARD + PAD, from + AT_NORM_FEEDFORWARD_BIAS, WIDTH);
}

DEVICE void load_head(float* to, const float* from, int outputs) {
    load_matrix<WIDTH, 1, UNIT_STEP>(to + HeadAt::FIRST, from + HeadSums::FIRST, UNITS);
    load_matrix<UNITS, UNIT_STEP, 1>(to + HeadAt::SECOND, from + HeadSums::SECOND, UNITS);
    load_matrix<UNITS, UNIT_STEP, 1>(to + HeadAt::THIRD, from + HeadSums::THIRD, outputs);
    load_vector_weights(to + HeadAt::FIRST_BIAS, from + HeadSums::FIRST_BIAS, UNITS);
    load_vector_weights(to + HeadAt::SECOND_BIAS, from + HeadSums::SECOND_BIAS, UNITS);
    load_vector_weights(to + HeadAt::THIRD + outputs * UNIT_STEP, from + HeadSums::THIRD + outputs * UNITS, outputs);
}

// The embedding's table from projection and role embedding: the row of a role is the projection of its embedding, and
// the bias.
DEVICE void load_table(float* to, const float* from) {
    const float* matrix = from + AT_PROJECT;
    for (int i = thread_index(); i < TABLE_ROWS * WIDTH; i += WARPS * 32) {
        const int row = i / WIDTH, c = i % WIDTH;
        float x = row < FEATURES ? matrix[c * PROJECT_INPUTS + row] : from[AT_PROJECT_BIAS + c];
        if (ROLES > 0 && row >= FEATURES)
            for (int j = 0; j < ROLE_DIM; j++)
                x = fmaf(matrix[c * PROJECT_INPUTS + FEATURES + j], from[AT_ROLE + (row - FEATURES) * ROLE_DIM + j], x);
        to[row * PAD + c] = x;
    }
}

DEVICE void arrange_weights(float* to, const float* from) {
    for (int layer = 0; layer < LAYERS; layer++)
        load_layer(to + At::LAYER + layer * LayerAt::SIZE, from + layer * LAYER_STEP);
    if constexpr (POOL == ADA_POOL) {
        load_matrix<WIDTH, PAD, 1>(to + At::POOLING, from + AT_POOL_QUERY, 3 * WIDTH);  // key and value follow
        load_output(to + At::POOLING + 3 * WIDTH * PAD, from + AT_POOL_OUTPUT);
    }
    if constexpr (POOL == CLS_TOKEN) load_vector_weights(to + At::POOLING, from + AT_CLASS_TOKEN, WIDTH);
    load_table(to + At::TABLE, from);
    if constexpr (QUERY_VECTOR) load_matrix<WIDTH, PAD, 1>(to + At::VECTORS, from + AT_QUERY_VECTOR, 2);
    load_head(to + At::ACTOR, from + AT_ACTOR, PARAMETERS);
    load_head(to + At::CRITIC, from + AT_CRITIC, 1);
}

// Copies a run's weights to shared memory in one go, and arranges them there. The copy lies where warps work later.
DEVICE void load_weights(float* shared, const float* weights) {
    if constexpr (WEIGHTS <= WARPS * WarpAt::SIZE) {
        float* copy = shared + At::WARP;
#pragma unroll 8
        for (int i = thread_index(); i < WEIGHTS; i += WARPS * 32) copy[i] = weights[i];
        sync_block();
        arrange_weights(shared, copy);
    } else {
        arrange_weights(shared, weights);
    }
}

// Turns the gradient of the embedding's table into those of projection and role embedding.
DEVICE void finish_table(const float* weights, float* sums) {
    for (int i = thread_index(); i < WIDTH * PROJECT_INPUTS; i += WARPS * 32) {
        const int c = i / PROJECT_INPUTS, j = i % PROJECT_INPUTS;
        float x = 0.0f;
        if (j < FEATURES) x = load_added(sums + TABLE_AT + j * WIDTH + c);
        if (ROLES > 0 && j >= FEATURES)
            for (int role = 0; role < ROLES; role++)
                x = fmaf(load_added(sums + TABLE_AT + (FEATURES + role) * WIDTH + c),
                         weights[AT_ROLE + role * ROLE_DIM + j - FEATURES], x);
        sums[AT_PROJECT + i] = x;
    }
    for (int c = thread_index(); c < WIDTH; c += WARPS * 32) {
        float x = 0.0f;
        for (int row = FEATURES; row < TABLE_ROWS; row++) x += load_added(sums + TABLE_AT + row * WIDTH + c);
        sums[AT_PROJECT_BIAS + c] = x;
    }
    for (int i = thread_index(); i < ROLES * ROLE_DIM; i += WARPS * 32) {
        const int role = i / max_of(ROLE_DIM, 1), j = i % max_of(ROLE_DIM, 1);
        float x = 0.0f;
        for (int c = 0; c < WIDTH; c++)
            x = fmaf(load_added(sums + TABLE_AT + (FEATURES + role) * WIDTH + c),
                     weights[AT_PROJECT + c * PROJECT_INPUTS + FEATURES + j], x);
        sums[AT_ROLE + i] = x;
    }
}

// A lane's place; the tokens of its sample are found by `load_tokens`.
DEVICE Lane place(float* shared, float* scratch) {
    const int warp = warp_index(), lane = thread_index() % 32;
    Lane at;
    at.lane = lane;
    at.first = lane % LANES;
    at.sample = lane / LANES;
    at.shared = shared + At::WARP + warp * WarpAt::SIZE;
    const size_t warp_of_grid = block_index() * WARPS + warp;
    at.scratch = reinterpret_cast<float4*>(scratch) + warp_of_grid * (SCRATCH_FLOATS / 4) + lane;
    return at;
}

template <bool TRAIN>
DEVICE void encode(const Lane& at, const float* weights, const Dropout& dropout, int sample, int visited, Rows& x) {
#pragma unroll 1
    for (int layer = 0; layer < ENCODED; layer++) {
        const float* w = weights + At::LAYER + layer * LayerAt::SIZE;
        attention<TRAIN>(at, w, layer, visited, x);
        feedforward<TRAIN>(at, w, layer, dropout, sample, x);
    }
}

DEVICE void encode_backward(
    const Lane& at, const float* weights, const Dropout& dropout, int visited, float* sums, Rows& dx) {
#pragma unroll 1
    for (int layer = ENCODED - 1; layer >= 0; layer--) {
        const float* w = weights + At::LAYER + layer * LayerAt::SIZE;
        feedforward_backward(at, w, layer, dropout, sums, dx);
        attention_backward(at, w, layer, visited, sums, dx);
    }
}

#ifndef ONLY_FORWARD
// Adds up the gradient of the loss over this block's share of a run's M samples.
//
// The grid has `blocks` blocks for each run. weights (runs, WEIGHTS); tokens (runs, M, INPUTS, TOKEN_SIZE); the other
// samples likewise; keys (runs, 2) of dropout, words in int64; coefficients (runs, COEFFICIENTS). Results: sums
// (runs * blocks, SUMS), for `add_blocks`. scratch: SCRATCH_FLOATS for each warp of the grid.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) gradient(
    const float* weights, const float* tokens, const void* action, const float* parameters, const float* log_prob,
    const float* advantage, const float* target, const long long* keys, const float* coefficients, float* scratch,
    float* sums, int count, int blocks) {
    float* shared = shared_memory();
    const size_t run = block_index() / blocks, block = block_index() % blocks;
    weights += run * WEIGHTS;
    sums += size_t(block_index()) * SUMS;
    load_weights(shared, weights);
    for (int i = thread_index(); i < COEFFICIENTS; i += WARPS * 32)
        shared[At::COEFFICIENTS_AT + i] = coefficients[run * COEFFICIENTS + i];
    const Dropout& dropout = load_dropout(shared, keys + 2 * run, coefficients[run * COEFFICIENTS + DROPOUT_RATE]);
    for (int i = thread_index(); i < SUMS; i += WARPS * 32) sums[i] = 0.0f;
    sync_block_memory();

    const Samples samples = {action, parameters, log_prob, advantage, target, int(run), count};
    Lane at = place(shared, scratch);
    const int warp = warp_index();
    // All warps go round equally often, and wait for one another: then they run the same code at about the same time,
    // which the instruction cache holds for all of them.
    const int step = WARPS * blocks * SAMPLES;
#pragma unroll 1
    for (int round = int(block) * SAMPLES; round < count; round += step) {
        sync_block();
        const int begin = round + warp * blocks * SAMPLES;
        if (begin >= count) continue;  // nothing is left for this warp
        const int sample = min_of(begin + at.sample, count - 1);  // past the end, the last one again, with weight 0
        Rows x, dx;
        embed(at, shared, tokens, samples.index(sample), x);
        const int visited = last_token(at);
        encode<true>(at, shared, dropout, sample, visited, x);
        {
            Pooled pooled;
            Vector change;
            pool<true>(at, shared, dropout, sample, x, pooled);
            learn(at, shared, samples, begin, pooled.value, sums, change);
            pool_backward(at, shared, dropout, pooled, change, sums, dx);
        }
        encode_backward(at, shared, dropout, visited, sums, dx);
        embed_backward(at, shared, tokens, samples.index(sample), dx, sums);
    }
    sync_block_memory();
    finish_table(weights, sums);
}

// Adds the sums of a run's blocks: grad (runs, WEIGHTS) and parts (runs, PARTS). The grid is (SUMS / 32, runs).
extern "C" __global__ void add_blocks(const float* sums, float* grad, float* parts, int blocks) {
    constexpr int GROUPS_OF_BLOCKS = 8;  // of the run's blocks, each added by a warp
    float* shared = shared_memory();     // (GROUPS_OF_BLOCKS, 32)
    const int lane = thread_index() % 32, group = thread_index() / 32;
    const int column = block_index() * 32 + lane, run = block_index_y();
    float total = 0.0f;
    for (int block = group; block < blocks; block += GROUPS_OF_BLOCKS)
        total += sums[(size_t(run) * blocks + block) * SUMS + column];
    shared[thread_index()] = total;
    sync_block();
    if (group > 0) return;
    for (int i = 1; i < GROUPS_OF_BLOCKS; i++) total += shared[i * 32 + lane];
    if (column < WEIGHTS) grad[size_t(run) * WEIGHTS + column] = total;
    const int part = column - PARTS_AT;
    if (part >= 0 && part < PARTS) parts[run * PARTS + part] = total;
}

#endif
#ifndef ONLY_GRADIENT
// The policy: parameters (runs, M, PARAMETERS) and values (runs, M) from weights (runs, WEIGHTS) and tokens
// (runs, M, INPUTS, TOKEN_SIZE), without dropout. The grid has `blocks` blocks for each run.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) forward(
    const float* weights, const float* tokens, float* parameters, float* values, int count, int blocks) {
    float* shared = shared_memory();
    const size_t run = block_index() / blocks, block = block_index() % blocks;
    load_weights(shared, weights + run * WEIGHTS);
    sync_block();
    parameters += run * count * PARAMETERS;
    values += run * count;
    Lane at = place(shared, nullptr);
    const int warp = warp_index();
#pragma unroll 1
    for (int begin = (warp * blocks + int(block)) * SAMPLES; begin < count; begin += WARPS * blocks * SAMPLES) {
        const int sample = min_of(begin + at.sample, count - 1);
        Rows x;
        embed(at, shared, tokens, run * count + sample, x);
        encode<false>(at, shared, Dropout(), sample, last_token(at), x);
        Pooled pooled;
        pool<false>(at, shared, Dropout(), sample, x, pooled);
        act(at, shared, begin, count, pooled.value, parameters, values);
    }
}
#endif
