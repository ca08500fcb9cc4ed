// paged_varlen_v1: attention over a paged KV cache, one query row and one head per threadgroup.
//
// The kernel to read first. It is correct and simple, not fast: every row reads its whole context separately. The tiled
// kernel in paged_varlen.metal computes the same and shares its reads.
//
// This text is the body of a kernel; MLX puts the signature in front of it:
//
//     q               T     [num_tokens, num_heads, HEAD_DIM], the rows of all sequences, packed
//     k_cache         S     [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM], T or codes, see stored.metal
//     v_cache         S     [num_blocks, BLOCK_SIZE, num_kv_heads, VALUE_DIM], or k_cache again if LATENT: a value is then
//                           the first VALUE_DIM elements of its key
//     cu_seqlens_q    int   [num_seqs + 1], sequence i owns the rows [cu_seqlens_q[i], cu_seqlens_q[i + 1])
//     seqused_k       int   [num_seqs], KV positions of each sequence, those of its rows included
//     block_table     int   [num_seqs, max_blocks], entry j is the block that holds positions [j * BLOCK_SIZE, ...)
//     sinks           float [num_heads], -inf for a head without an attention sink
//     scoring         float [2], softmax_scale and softcap (0 for none)
//     window          int   [1], left window: a row at position p sees [p - window, p]; -1 for all of [0, p]; -n for
//                           [p - p % n, p], chunks of n positions
//     out             T     [num_tokens, num_heads, VALUE_DIM]
//
// Template arguments: T, HEAD_DIM, VALUE_DIM, LATENT, BLOCK_SIZE, NUM_SIMDGROUPS.
// Launch: threadgroups (num_heads, num_tokens) of 32 * NUM_SIMDGROUPS threads.

constexpr int LANES = 32;
constexpr int DIMS_PER_LANE = (HEAD_DIM + LANES - 1) / LANES;
constexpr int VALUES_PER_LANE = (VALUE_DIM + LANES - 1) / LANES;

const int head = threadgroup_position_in_grid.x;
const int row = threadgroup_position_in_grid.y;
const int simdgroup_id = simdgroup_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const int num_heads = q_shape[1];
const int num_kv_heads = k_cache_shape[2];
const int kv_head = head / (num_heads / num_kv_heads);  // GQA: neighbouring query heads share a KV head

// 1. Which sequence owns the row, and at which position? A sequence's rows are the last of its context.
const int seq = find_seq_idx(cu_seqlens_q, seqused_k_shape[0], row);
const int position = seqused_k[seq] - (cu_seqlens_q[seq + 1] - row);

// 2. What may it see? The range ends at its own position (causality) and starts with the sliding window or the chunk.
const int window_start = window[0] < 0 ? 0 : max(0, position - window[0]);
const int first_visible = window[0] < -1 ? position - position % -window[0] : window_start;

// 3. Each simdgroup takes every NUM_SIMDGROUPS-th visible position. Its lanes share the dimensions of the head:
//    lane 0 holds dimensions 0, 32, 64, ..., lane 1 holds 1, 33, 65, ...
float query[DIMS_PER_LANE];
float output[VALUES_PER_LANE];  // sum of weight * value so far
const long query_offset = (long(row) * num_heads + head) * HEAD_DIM;
for (int i = 0; i < DIMS_PER_LANE; i++) {
  const int dim = lane + i * LANES;
  query[i] = dim < HEAD_DIM ? float(q[query_offset + dim]) : 0.0f;
}
for (int i = 0; i < VALUES_PER_LANE; i++) {
  output[i] = 0.0f;
}

// An attention sink is a score that takes part in the softmax but has no value. It counts once: in simdgroup 0.
const bool has_sink = simdgroup_id == 0 && sinks[head] != -INFINITY;
float maximum = has_sink ? sinks[head] : -INFINITY;  // largest score so far
float total = has_sink ? 1.0f : 0.0f;                // sum of exp(score - maximum) so far

for (int kv_position = first_visible + simdgroup_id; kv_position <= position; kv_position += NUM_SIMDGROUPS) {
  // 4. The block table turns a position into a place in memory.
  const int block = block_table[long(seq) * block_table_shape[1] + kv_position / BLOCK_SIZE];
  const long slot = long(block) * BLOCK_SIZE + kv_position % BLOCK_SIZE;
  const long kv_offset = (slot * num_kv_heads + kv_head) * k_cache_shape[3];
  const long value_offset = (slot * num_kv_heads + kv_head) * v_cache_shape[3];

  float product = 0.0f;
  for (int i = 0; i < DIMS_PER_LANE; i++) {
    const int dim = lane + i * LANES;
    product += dim < HEAD_DIM ? query[i] * float(k_cache[kv_offset + dim]) : 0.0f;
  }
  float score = simd_sum(product) * scale_of(k_cache + kv_offset, HEAD_DIM) * scoring[0];
  if (scoring[1] > 0.0f) {
    score = scoring[1] * tanh(score / scoring[1]);
  }

  // 5. Online softmax: when a larger score appears, the sums so far are rescaled to it. As long as every score was
  //    -inf, so is the maximum, and -inf - -inf would be NaN; with a base of 0 the weights are 0.
  const float maximum_before = maximum;
  maximum = max(maximum, score);
  const float base = maximum == -INFINITY ? 0.0f : maximum;
  const float rescale = exp(maximum_before - base);
  const float weight = exp(score - base);
  total = total * rescale + weight;
  const float value_weight = weight * scale_of(v_cache + value_offset, LATENT ? HEAD_DIM : VALUE_DIM);
  for (int i = 0; i < VALUES_PER_LANE; i++) {
    const int dim = lane + i * LANES;
    output[i] = output[i] * rescale + (dim < VALUE_DIM ? value_weight * float(v_cache[value_offset + dim]) : 0.0f);
  }
}

// 6. The simdgroups have summed different positions relative to different maxima: merge their sums.
threadgroup float shared_maximum[NUM_SIMDGROUPS];
threadgroup float shared_total[NUM_SIMDGROUPS];
threadgroup float shared_output[NUM_SIMDGROUPS * VALUE_DIM];
if (lane == 0) {
  shared_maximum[simdgroup_id] = maximum;
  shared_total[simdgroup_id] = total;
}
for (int i = 0; i < VALUES_PER_LANE; i++) {
  const int dim = lane + i * LANES;
  if (dim < VALUE_DIM) {
    shared_output[simdgroup_id * VALUE_DIM + dim] = output[i];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

float row_maximum = -INFINITY;
for (int i = 0; i < NUM_SIMDGROUPS; i++) {
  row_maximum = max(row_maximum, shared_maximum[i]);
}
const long out_offset = (long(row) * num_heads + head) * VALUE_DIM;
for (int dim = simdgroup_id * LANES + lane; dim < VALUE_DIM; dim += NUM_SIMDGROUPS * LANES) {
  float row_total = 0.0f;
  float row_output = 0.0f;
  for (int i = 0; i < NUM_SIMDGROUPS; i++) {
    // A simdgroup that saw no position has maximum -inf and contributes nothing: exp(-inf) is 0.
    const float rescale = exp(shared_maximum[i] - row_maximum);
    row_total += shared_total[i] * rescale;
    row_output += shared_output[i * VALUE_DIM + dim] * rescale;
  }
  out[out_offset + dim] = T(row_output / row_total);
}
