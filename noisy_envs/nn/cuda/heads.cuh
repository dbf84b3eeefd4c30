// Actor and critic, three linear layers with GELU each, and PPO's loss (Schulman et al. 2017), forward and backward.
//
// A lane is a hidden unit. HEAD_SAMPLES samples pass at a time, through a piece of the warp's shared memory.

struct HeadMemory {
    float* pooled;     // (SAMPLES, PAD)
    float* change;     // (SAMPLES, PAD): gradient of the above
    float* first;      // (HEAD_SAMPLES, UNITS): outputs of hidden units
    float* second;
    float* slope;      // (HEAD_SAMPLES, UNITS): gradients of inputs of hidden units
    float* out;        // (HEAD_SAMPLES, PARAMETERS)
    float* out_change; // the same: their gradient

    DEVICE HeadMemory(float* p)
        : pooled(p), change(p + SAMPLES * PAD), first(change + SAMPLES * PAD), second(first + HEAD_SAMPLES * UNITS),
          slope(second + HEAD_SAMPLES * UNITS), out(slope + HEAD_SAMPLES * UNITS),
          out_change(out + HEAD_SAMPLES * PARAMETERS) {}
};

// A lane's hidden unit of each layer, in each sample: its output and slope.
struct Units {
    float first[HEAD_SAMPLES], first_slope[HEAD_SAMPLES], second[HEAD_SAMPLES], second_slope[HEAD_SAMPLES];
};

// The sum over units of x and y.
DEVICE float dot_units(const float* x, const float* y) {
    float sum = 0.0f;
#pragma unroll 4
    for (int k = 0; k < UNITS; k += 4) {
        const float4 a = *reinterpret_cast<const float4*>(x + k), b = *reinterpret_cast<const float4*>(y + k);
        sum = fmaf(a.x, b.x, fmaf(a.y, b.y, fmaf(a.z, b.z, fmaf(a.w, b.w, sum))));
    }
    return sum;
}

// Where a head's weights and their gradients lie in device memory, in torch's layouts.
struct HeadSums {
    static constexpr int FIRST = 0;                                // (UNITS, WIDTH)
    static constexpr int FIRST_BIAS = FIRST + UNITS * WIDTH;       // (UNITS,)
    static constexpr int SECOND = FIRST_BIAS + UNITS;              // (UNITS, UNITS)
    static constexpr int SECOND_BIAS = SECOND + UNITS * UNITS;     // (UNITS,)
    static constexpr int THIRD = SECOND_BIAS + UNITS;              // (outputs, UNITS), then their biases
};

// Actor or critic. A loop over both runs the same code, which halves it.
struct Head {
    const float* weights;  // see HeadAt
    float* sums;           // see HeadSums
    int outputs;

    DEVICE Head(bool critic, const float* all_weights, float* all_sums)
        : weights(all_weights + (critic ? At::CRITIC : At::ACTOR)), sums(all_sums + (critic ? AT_CRITIC : AT_ACTOR)),
          outputs(critic ? 1 : PARAMETERS) {}
};

// Computes (HEAD_SAMPLES, outputs) from pooled vectors (HEAD_SAMPLES, PAD).
DEVICE void run_head(const Head& head, const HeadMemory& memory, const float* pooled, int lane, Units& units) {
    const float* weights = head.weights;
    lane = renewed(lane);
    EACH(t, HEAD_SAMPLES) units.first[t] = weights[HeadAt::FIRST_BIAS + lane];
    EACH(i, WIDTH) {
        const float w = weights[HeadAt::FIRST + i * UNIT_STEP + lane];
        EACH(t, HEAD_SAMPLES) units.first[t] = fmaf(pooled[t * PAD + i], w, units.first[t]);
    }
    EACH(t, HEAD_SAMPLES) {
        units.first[t] = gelu(units.first[t], units.first_slope[t]);
        memory.first[t * UNITS + lane] = units.first[t];
        units.second[t] = weights[HeadAt::SECOND_BIAS + lane];
    }
    sync_warp();
#pragma unroll 2
    for (int k = 0; k < UNITS; k += 4) {
        const float4 w = *reinterpret_cast<const float4*>(weights + HeadAt::SECOND + lane * UNIT_STEP + k);
        EACH(t, HEAD_SAMPLES) {
            const float4 a = *reinterpret_cast<const float4*>(memory.first + t * UNITS + k);
            units.second[t] = fmaf(a.x, w.x, fmaf(a.y, w.y, fmaf(a.z, w.z, fmaf(a.w, w.w, units.second[t]))));
        }
    }
    EACH(t, HEAD_SAMPLES) {
        units.second[t] = gelu(units.second[t], units.second_slope[t]);
        memory.second[t * UNITS + lane] = units.second[t];
    }
    sync_warp();
#pragma unroll 1
    for (int i = lane; i < HEAD_SAMPLES * head.outputs; i += 32) {
        const int t = i / head.outputs, o = i % head.outputs;
        const float* third = weights + HeadAt::THIRD;
        memory.out[i] = third[head.outputs * UNIT_STEP + o] + dot_units(memory.second + t * UNITS, third + o * UNIT_STEP);
    }
    sync_warp();
}

// The gradient of a hidden unit's input, in each sample.
using Slopes = float[HEAD_SAMPLES];

DEVICE void store_slopes(const HeadMemory& memory, int lane, const Slopes& slope, float* bias_sums) {
    float bias = 0.0f;
    EACH(t, HEAD_SAMPLES) {
        bias += slope[t];
        memory.slope[t * UNITS + lane] = slope[t];
    }
    add(bias_sums + lane, bias);
    sync_warp();
}

// Computes the slopes of the second layer from the gradients of the outputs.
DEVICE void third_layer_backward(const Head& head, const HeadMemory& memory, int lane, const Units& units, Slopes& slope) {
    Slopes d = {};
    float* sums = head.sums + HeadSums::THIRD;
#pragma unroll 1
    for (int o = 0; o < head.outputs; o++) {
        const float w = head.weights[HeadAt::THIRD + o * UNIT_STEP + lane];
        float grad = 0.0f;
        EACH(t, HEAD_SAMPLES) {
            const float dout = memory.out_change[t * head.outputs + o];
            d[t] = fmaf(dout, w, d[t]);
            grad = fmaf(dout, units.second[t], grad);
        }
        add(sums + o * UNITS + lane, grad);
    }
    if (lane < head.outputs) {
        float bias = 0.0f;
        EACH(t, HEAD_SAMPLES) bias += memory.out_change[t * head.outputs + lane];
        add(sums + head.outputs * UNITS + lane, bias);
    }
    EACH(t, HEAD_SAMPLES) slope[t] = d[t] * units.second_slope[t];
}

// Computes the slopes of the first layer from those of the second, which are in shared memory.
DEVICE void second_layer_backward(
    const Head& head, const HeadMemory& memory, int lane, const Units& units, Slopes& slope) {
    Slopes d = {};
#pragma unroll 2
    for (int k = 0; k < UNITS; k += 4) {
        float grad[4] = {}, w[4];
        EACH(i, 4) w[i] = head.weights[HeadAt::SECOND + (k + i) * UNIT_STEP + lane];
        EACH(t, HEAD_SAMPLES) {
            const float4 f = *reinterpret_cast<const float4*>(memory.slope + t * UNITS + k);
            const float above[4] = {f.x, f.y, f.z, f.w};
            EACH(i, 4) {
                d[t] = fmaf(w[i], above[i], d[t]);
                grad[i] = fmaf(above[i], units.first[t], grad[i]);
            }
        }
        EACH(i, 4) add(head.sums + HeadSums::SECOND + (k + i) * UNITS + lane, grad[i]);
    }
    sync_warp();
    EACH(t, HEAD_SAMPLES) slope[t] = d[t] * units.first_slope[t];
}

// Adds the gradient of the pooled vectors to `change`, from the slopes of the first layer in shared memory.
DEVICE void first_layer_backward(
    const Head& head, const HeadMemory& memory, const float* pooled, float* change, int lane) {
    EACH(r, WIDTH) {  // the matrix (UNITS, WIDTH), 32 neighbouring numbers at a time
        const int unit = unsigned(32 * r + lane) / WIDTH, i = unsigned(32 * r + lane) % WIDTH;
        float grad = 0.0f;
        EACH(t, HEAD_SAMPLES) grad = fmaf(memory.slope[t * UNITS + unit], pooled[t * PAD + i], grad);
        add(head.sums + HeadSums::FIRST + 32 * r + lane, grad);
    }
    for (int i = lane; i < HEAD_SAMPLES * WIDTH; i += 32) {
        const int t = i / WIDTH, c = i % WIDTH;
        change[t * PAD + c] += dot_units(memory.slope + t * UNITS, head.weights + HeadAt::FIRST + c * UNIT_STEP);
    }
    sync_warp();
}

// Adds up the gradients of the weights, and adds that of the pooled vectors to `change`, given that of the outputs.
DEVICE void head_backward(const Head& head, const HeadMemory& memory, const float* pooled, float* change, int lane,
                          const Units& units) {
    lane = renewed(lane);
    Slopes slope;
    third_layer_backward(head, memory, lane, units, slope);
    store_slopes(memory, lane, slope, head.sums + HeadSums::SECOND_BIAS);
    second_layer_backward(head, memory, lane, units, slope);
    store_slopes(memory, lane, slope, head.sums + HeadSums::FIRST_BIAS);
    first_layer_backward(head, memory, pooled, change, lane);
}

// ---- the loss
// The samples of all runs, (runs M, ...). Pointers are those that the kernel was given, so that they need no registers.
struct Samples {
    const void* action;  // float (runs M, ACTIONS), or int64 (runs M,)
    const float* parameters;
    const float* log_prob;
    const float* advantage;
    const float* target;
    int run;
    int count;  // M

    DEVICE size_t index(int sample) const { return size_t(run) * count + sample; }
};

// Gradients of a log probability, an entropy and a divergence KL(old || new) with respect to the parameters.
struct Evaluation {
    float log_prob, entropy, kl;
    float log_prob_grad[PARAMETERS], entropy_grad[PARAMETERS], kl_grad[PARAMETERS];
};

// As in torch, NaN stays NaN: fminf and fmaxf would hide that a run has diverged.
DEVICE float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }
DEVICE float smaller(float x, float y) { return x < y ? x : y; }

// Independent normal distributions; see `noisy_envs.nn.distributions.Gaussian`.
DEVICE void gaussian(const float* raw, const float* old, const float* action, Evaluation& result) {
    result.log_prob = result.entropy = result.kl = 0.0f;
    EACH(i, ACTIONS) {
        const float unit = TANH ? tanhf(raw[i]) : raw[i], old_unit = TANH ? tanhf(old[i]) : old[i];
        const float mean = ACTION_CENTER + ACTION_SCALE * unit, old_mean = ACTION_CENTER + ACTION_SCALE * old_unit;
        const float mean_slope = TANH ? ACTION_SCALE * (1.0f - unit * unit) : ACTION_SCALE;
        const float x = raw[ACTIONS + i], log_std = clamp(x, LOG_STD_MIN, LOG_STD_MAX) + LOG_ACTION_SCALE;
        const float std_slope = x >= LOG_STD_MIN && x <= LOG_STD_MAX ? 1.0f : 0.0f;
        const float old_log_std = clamp(old[ACTIONS + i], LOG_STD_MIN, LOG_STD_MAX) + LOG_ACTION_SCALE;
        const float precision = expf(-log_std), distance = (action[i] - mean) * precision;
        result.log_prob -= 0.5f * distance * distance + log_std + 0.91893853320467f;  // log sqrt(2 pi)
        result.log_prob_grad[i] = distance * precision * mean_slope;
        result.log_prob_grad[ACTIONS + i] = (distance * distance - 1.0f) * std_slope;
        result.entropy += log_std + 1.41893853320467f;
        result.entropy_grad[i] = 0.0f;
        result.entropy_grad[ACTIONS + i] = std_slope;
        const float shift = (mean - old_mean) * precision, ratio = expf(2.0f * (old_log_std - log_std));
        result.kl += log_std - old_log_std + 0.5f * (shift * shift + ratio) - 0.5f;
        result.kl_grad[i] = shift * precision * mean_slope;
        result.kl_grad[ACTIONS + i] = (1.0f - shift * shift - ratio) * std_slope;
    }
}

// Subtracts the logarithm of the sum of exponentials.
DEVICE void log_softmax(const float* raw, float (&logs)[ACTIONS]) {
    float largest = raw[0], total = 0.0f;
    EACH(i, ACTIONS) largest = fmaxf(largest, raw[i]);
    EACH(i, ACTIONS) total += expf(raw[i] - largest);
    const float shift = largest + logf(total);
    EACH(i, ACTIONS) logs[i] = raw[i] - shift;
}

// One of several actions; see `noisy_envs.nn.distributions.Categorical`.
DEVICE void categorical(const float* raw, const float* old, int action, Evaluation& result) {
    float logs[ACTIONS], old_logs[ACTIONS];
    log_softmax(raw, logs);
    log_softmax(old, old_logs);
    result.log_prob = result.entropy = result.kl = 0.0f;
    EACH(i, ACTIONS) {
        const float p = expf(logs[i]), old_p = expf(old_logs[i]);
        result.log_prob += i == action ? logs[i] : 0.0f;
        result.entropy -= p * logs[i];
        result.kl += old_p * (old_logs[i] - logs[i]);
        result.log_prob_grad[i] = (i == action ? 1.0f : 0.0f) - p;
        result.kl_grad[i] = p - old_p;
    }
    EACH(i, ACTIONS) result.entropy_grad[i] = -expf(logs[i]) * (logs[i] + result.entropy);
}

// The actor's loss of one sample: adds its parts to sums, and stores the gradient of the parameters `raw`.
DEVICE void actor_loss(const Samples& samples, size_t sample, const float* coefficients, const float* raw,
                       float* change, float* parts) {
    const float weight = 1.0f / samples.count;
    const float* old = samples.parameters + sample * PARAMETERS;
    Evaluation now;
    if constexpr (CONTINUOUS) {
        gaussian(raw, old, static_cast<const float*>(samples.action) + sample * ACTIONS, now);
    } else {
        categorical(raw, old, int(static_cast<const long long*>(samples.action)[sample]), now);
    }
    const float advantage = samples.advantage[sample], ratio = expf(now.log_prob - samples.log_prob[sample]);
    const float clipped = clamp(ratio, 1.0f - coefficients[CLIP], 1.0f + coefficients[CLIP]);
    float objective = smaller(advantage * ratio, advantage * clipped);
    bool moves = clipped == ratio || advantage * ratio < advantage * clipped;  // whether it depends on the ratio
    if constexpr (DUAL_CLIP) {  // Ye et al. 2020: bounded below if the advantage is negative
        const float bound = coefficients[DUAL] * advantage;
        if (advantage < 0.0f && objective < bound) {
            objective = bound;
            moves = false;
        }
    }
    const float slope = moves ? -advantage * ratio : 0.0f;
    EACH(i, PARAMETERS) {
        const float grad = slope * now.log_prob_grad[i] + coefficients[KL_WEIGHT] * now.kl_grad[i];
        change[i] = weight * (grad - coefficients[ENTROPY_WEIGHT] * now.entropy_grad[i]);
    }
    add(parts + POLICY_LOSS, -objective * weight);
    add(parts + ENTROPY, now.entropy * weight);
    add(parts + KL, now.kl * weight);
    if (ratio != clipped) add(parts + CLIPPED, weight);
}

// The critic's loss of one sample, the same.
DEVICE void critic_loss(const Samples& samples, size_t sample, const float* coefficients, float value, float* change,
                        float* parts) {
    const float weight = 1.0f / samples.count, difference = value - samples.target[sample];
    *change = weight * coefficients[VALUE_WEIGHT] * 2.0f * difference;
    add(parts + VALUE_LOSS, difference * difference * weight);
}

// Puts the pooled vectors of the warp's samples where `head` reads them, and zeros where their gradient is added up.
DEVICE HeadMemory store_pooled(const Lane& at, const Vector& pooled) {
    const HeadMemory memory(at.shared);
    if (at.first == 0) {
        store(memory.pooled + at.sample * PAD, pooled);
        store_zeros(memory.change + at.sample * PAD);
    }
    sync_warp();
    return memory;
}

// Actor and critic of the warp's samples, from sample `begin` of M, with loss and gradient: `change` becomes that of
// the pooled vector.
DEVICE void learn(const Lane& at, const float* weights, const Samples& samples, int begin, const Vector& pooled,
                  float* sums, Vector& change) {
    const HeadMemory memory = store_pooled(at, pooled);
    const float* coefficients = weights + At::COEFFICIENTS_AT;
#pragma unroll 1
    for (int pass = 0; pass < 2 * SAMPLES / HEAD_SAMPLES; pass++) {
        const bool is_critic = pass % 2;
        const int t = pass / 2 * HEAD_SAMPLES;
        const Head head(is_critic, weights, sums);
        const int sample = begin + t + at.lane;
        Units units;
        run_head(head, memory, memory.pooled + t * PAD, at.lane, units);
        if (at.lane < HEAD_SAMPLES) {
            const int i = at.lane * head.outputs;
            for (int o = 0; o < head.outputs; o++) memory.out_change[i + o] = 0.0f;
            if (sample < samples.count) {
                const size_t index = samples.index(sample);
                if (is_critic) {
                    critic_loss(samples, index, coefficients, memory.out[i], memory.out_change + i, sums + PARTS_AT);
                } else {
                    actor_loss(samples, index, coefficients, memory.out + i, memory.out_change + i, sums + PARTS_AT);
                }
            }
        }
        sync_warp();
        head_backward(head, memory, memory.pooled + t * PAD, memory.change + t * PAD, at.lane, units);
    }
    const Padded result = load_vector(memory.change + at.sample * PAD);
    EACH(c, WIDTH) change[c] = result.v[c];
    sync_warp();
}

// Actor and critic without loss: stores parameters (M, PARAMETERS) and values (M,).
DEVICE void act(const Lane& at, const float* weights, int begin, int count, const Vector& pooled, float* parameters,
                float* values) {
    const HeadMemory memory = store_pooled(at, pooled);
#pragma unroll 1
    for (int pass = 0; pass < 2 * SAMPLES / HEAD_SAMPLES; pass++) {
        const bool is_critic = pass % 2;
        const int t = pass / 2 * HEAD_SAMPLES;
        const Head head(is_critic, weights, nullptr);
        Units units;
        run_head(head, memory, memory.pooled + t * PAD, at.lane, units);
        const int left = min_of(count - begin - t, HEAD_SAMPLES) * head.outputs;
        float* to = (is_critic ? values : parameters) + (begin + t) * head.outputs;
        for (int i = at.lane; i < left; i += 32) to[i] = memory.out[i];
        sync_warp();
    }
}
