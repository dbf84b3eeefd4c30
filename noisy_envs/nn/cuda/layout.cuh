// Where everything lies: sizes that follow from the constants of a run, and the layouts of all memories.
//
// The constants that Python writes before this file:
//   INPUTS tokens of an observation, FEATURES of a token that are numbers, ROLES (0 without roles), ROLE_DIM,
//   WIDTH of an embedding (also the number of heads), LAYERS, HIDDEN units of a feed-forward network,
//   POOL, QUERY_INDEX, QUERY_VECTOR, PADDED, PADDING_FEATURE, PADDING,
//   CONTINUOUS, ACTIONS, LOG_STD_MIN, LOG_STD_MAX, TANH, ACTION_CENTER, ACTION_SCALE, LOG_ACTION_SCALE, DUAL_CLIP,
//   DROPOUT, SCORE_SCALE,
//   ROWS tokens of a lane, LANES of a sample, WARPS of a block, PYTHON_... sizes of memories,
//   AT_... where a weight begins in a run's flat vector of WEIGHTS numbers, LAYER_STEP from layer to layer.
// The names of sizes below are used in all files.

#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < (count); i++)

enum Pool { ADA_POOL, AVG_POOL, MAX_POOL, CLS_TOKEN };

CONSTEXPR int ceil_div(int a, int b) { return (a + b - 1) / b; }
CONSTEXPR int max_of(int a, int b) { return a > b ? a : b; }
CONSTEXPR int min_of(int a, int b) { return a < b ? a : b; }
// The least distance between rows of n numbers at which neither float4 stores of rows by lanes nor the loads of
// matrix fragments meet in a bank of shared memory: 4 modulo 8.
CONSTEXPR int row_step(int n) { return n + (12 - n % 8) % 8; }

// ---- tokens and lanes: a warp holds SAMPLES samples, and row r of a lane is token `first + r * LANES` of its sample
constexpr int CLASS_TOKENS = POOL == CLS_TOKEN;  // which precede all others
constexpr int TOKENS = INPUTS + CLASS_TOKENS;
constexpr int QUERY = QUERY_INDEX + CLASS_TOKENS;
constexpr int SAMPLES = 32 / LANES;
constexpr int WARP_ROWS = 32 * ROWS;
static_assert(ROWS * LANES >= TOKENS && 32 % LANES == 0, "the tokens of a sample fit its lanes");

// Loops over pairs visit all tokens, or with padding those up to the last one that is none, KEYS or QUERIES at a time.
constexpr int KEYS = !PADDED ? 1 : ROWS * LANES % 4 == 0 ? 4 : 2;
constexpr int QUERIES = PADDED ? 2 : 1;
constexpr int STORED = KEYS * ceil_div(TOKENS, KEYS);  // tokens of a sample in shared memory
constexpr int UNROLL_KEYS = KEYS == 1 ? 4 : 1, UNROLL_QUERIES = 2 / QUERIES;

// ---- vectors of WIDTH numbers, in memory padded to float4
constexpr int PAD = 4 * ceil_div(WIDTH, 4);
// Loops over pairs of tokens take so many heads at a time, as one float4 each of keys, values and so on.
constexpr int GROUP = WIDTH % 4 == 0 ? 4 : 3;
constexpr int GROUPS = WIDTH / GROUP;
static_assert(WIDTH % GROUP == 0 && PAD == 4 * GROUPS, "heads are divided into groups of 3 or 4");
static_assert(WIDTH <= 8, "a vector is half of a matrix fragment");

// ---- the embedding as a table: a row of WIDTH for each feature, then one for each role, or the bias without roles
constexpr int TABLE_ROWS = FEATURES + max_of(ROLES, 1);
constexpr int PROJECT_INPUTS = FEATURES + ROLE_DIM;
constexpr int TOKEN_SIZE = FEATURES + (ROLES > 0);  // numbers of a token in device memory
static_assert(TABLE_ROWS <= 16, "the table's gradient is one matrix fragment");

// ---- actor and critic, whose hidden layers have a unit in each lane
constexpr int UNITS = 32;
constexpr int UNIT_STEP = row_step(UNITS);
constexpr int PARAMETERS = CONTINUOUS ? 2 * ACTIONS : ACTIONS;  // of the action distribution
constexpr int HEAD_SAMPLES = min_of(SAMPLES, 4);  // at a time

// ---- numbers of a run that are no weights
enum Coefficient { CLIP, ENTROPY_WEIGHT, VALUE_WEIGHT, KL_WEIGHT, DROPOUT_RATE, DUAL, COEFFICIENTS };
static_assert(COEFFICIENTS <= 8, "they fit their place in shared memory");

// ---- weights in shared memory, in floats
struct LayerAt {  // from the beginning of a layer; vectors of WIDTH are padded to PAD
    static constexpr int QUERY_KEY_VALUE = 0;                           // (3 WIDTH, PAD)
    static constexpr int OUTPUT = QUERY_KEY_VALUE + 3 * WIDTH * PAD;    // (WIDTH, PAD), columns in groups of float4
    static constexpr int FIRST = OUTPUT + WIDTH * PAD;                  // (HIDDEN, PAD)
    static constexpr int SECOND = FIRST + HIDDEN * PAD;                 // (HIDDEN, PAD), transposed
    static constexpr int FIRST_BIAS = SECOND + HIDDEN * PAD;            // (HIDDEN,)
    static constexpr int SECOND_BIAS = FIRST_BIAS + 4 * ceil_div(HIDDEN, 4);
    static constexpr int NORM_ATTENTION = SECOND_BIAS + PAD;            // (2, PAD): weight and bias
    static constexpr int NORM_FEEDFORWARD = NORM_ATTENTION + 2 * PAD;   // (2, PAD)
    static constexpr int SIZE = NORM_FEEDFORWARD + 2 * PAD;
};

struct HeadAt {  // from the beginning of actor or critic
    static constexpr int FIRST = 0;                                // (WIDTH, UNIT_STEP), transposed
    static constexpr int SECOND = FIRST + WIDTH * UNIT_STEP;       // (UNITS, UNIT_STEP)
    static constexpr int FIRST_BIAS = SECOND + UNITS * UNIT_STEP;  // (UNITS,)
    static constexpr int SECOND_BIAS = FIRST_BIAS + UNITS;         // (UNITS,)
    static constexpr int THIRD = SECOND_BIAS + UNITS;              // (outputs, UNIT_STEP), then their biases

    static CONSTEXPR int size(int outputs) { return THIRD + outputs * UNIT_STEP + 4 * ceil_div(outputs, 4); }
};

struct At {  // from the beginning of shared memory
    static constexpr int LAYER = 0;
    static constexpr int POOLING = LAYERS * LayerAt::SIZE;  // (4, WIDTH, PAD): query, key, value, output; or (PAD,)
    static constexpr int POOLING_SIZE = POOL == ADA_POOL ? 4 * WIDTH * PAD : POOL == CLS_TOKEN ? PAD : 0;
    static constexpr int TABLE = POOLING + POOLING_SIZE;                     // (TABLE_ROWS, PAD)
    static constexpr int VECTORS = TABLE + TABLE_ROWS * PAD;                 // (2, PAD)
    static constexpr int ACTOR = VECTORS + (QUERY_VECTOR ? 2 * PAD : 0);
    static constexpr int CRITIC = ACTOR + HeadAt::size(PARAMETERS);
    static constexpr int DROPOUT = CRITIC + HeadAt::size(1);                    // (4,), see `Dropout`
    static constexpr int COEFFICIENTS_AT = DROPOUT + 4;                      // (COEFFICIENTS,)
    static constexpr int WARP = COEFFICIENTS_AT + 8;                         // WARPS times WarpAt::SIZE
};

// ---- what a warp shares among its lanes, in floats
constexpr int INPUT_STEP = row_step(8);                       // of rows of a vector
constexpr int PAIR_STEP = row_step(16);                       // of rows of two vectors, see `add_products`
constexpr int CHUNK = HIDDEN / ceil_div(HIDDEN, 8);           // hidden units whose gradients are summed at a time
constexpr int KEY_STEP = row_step(3 * 4 + PADDED);            // of a group: k, v, k v, and 1 or 0 for padding
constexpr int QUERY_STEP = row_step(5 * 4);                   // of a group: see `store_queries`
constexpr int KEY_SAMPLE = STORED * KEY_STEP + 4;             // + 4: samples lie in different banks
constexpr int QUERY_SAMPLE = STORED * QUERY_STEP + 4;
constexpr bool ATTENDS_ONCE = POOL == ADA_POOL || POOL == CLS_TOKEN;
constexpr int HEAD_SIZE = SAMPLES * 2 * PAD + HEAD_SAMPLES * (3 * UNITS + 2 * PARAMETERS);

struct WarpAt {
    // Rows that `add_products` multiplies. The memory of pairs serves keys and queries too, all of it actor and critic.
    static constexpr int B_FIRST = 0;                               // (WARP_ROWS, INPUT_STEP)
    static constexpr int B_SECOND = WARP_ROWS * INPUT_STEP + 4;     // the same; + 4: other banks
    static constexpr int PAIRS = B_SECOND + WARP_ROWS * INPUT_STEP; // (WARP_ROWS, PAIR_STEP)
    static constexpr int PAIRS_SIZE =
        max_of(WARP_ROWS * PAIR_STEP, SAMPLES * max_of(QUERY_SAMPLE, KEY_SAMPLE));
    static constexpr int KEY_RANGE = max_of(PAIRS + PAIRS_SIZE, 4 * ceil_div(HEAD_SIZE, 4));  // (LAYERS, SAMPLES, 2, PAD)
    static constexpr int POOLED = KEY_RANGE + LAYERS * SAMPLES * 2 * PAD;  // (2, SAMPLES, 2, PAD), see `attend_once`
    static constexpr int KEPT = POOLED + (ATTENDS_ONCE ? 4 * SAMPLES * PAD : 0);  // (LAYERS, 32), what dropout keeps
    static constexpr int SIZE = KEPT + (DROPOUT ? LAYERS * 32 : 0);
};

constexpr int SHARED_BYTES = 4 * (At::WARP + WARPS * WarpAt::SIZE);

// ---- scratch in device memory: what a warp's backward pass needs of each layer, and what is saved once, as if of one
// layer more, (WARP_ROWS, PAD) each
enum Saved { SAVED_INPUT, SAVED_MIXED, SAVED_INVERSE, SAVED_COVARIANCE, SAVED_MIDDLE, SAVED_TENSORS };
// Little of it keeps more of it in the cache, so one place serves twice where the first use has ended.
constexpr int SAVED_EMBEDDING = 0, SAVED_WEIGHT = 1, SAVED_CHANGE = POOL == CLS_TOKEN ? 2 : 0;
constexpr int SAVED_ONCE = POOL == CLS_TOKEN ? 3 : POOL == ADA_POOL ? 2 : 1;
constexpr int SCRATCH_FLOATS = (LAYERS * SAVED_TENSORS + SAVED_ONCE) * WARP_ROWS * PAD;  // of a warp

// ---- sums of a block in device memory: gradients of a run's weights, parts of the loss, gradient of the table
enum Part { POLICY_LOSS, VALUE_LOSS, ENTROPY, KL, CLIPPED, PARTS };
constexpr int PARTS_AT = WEIGHTS;
constexpr int TABLE_AT = PARTS_AT + PARTS + (PARTS_AT + PARTS) % 2;
constexpr int SUMS = 32 * ceil_div(TABLE_AT + TABLE_ROWS * WIDTH, 32);

static_assert(SHARED_BYTES == PYTHON_SHARED_BYTES && SCRATCH_FLOATS == PYTHON_SCRATCH_FLOATS && SUMS == PYTHON_SUMS,
              "`memory_sizes` in fused_source.py agrees with this file");
