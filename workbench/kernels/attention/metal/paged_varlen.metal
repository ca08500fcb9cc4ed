// paged_varlen: attention over a paged KV cache, decode rows and chunk tiles in one launch.
//
// A threadgroup computes one item of the work list for one KV head. The item is some query rows of a sequence and a
// range of its KV positions; with the query heads of the KV head packed in, the rows form a tile of pairs (tile.metal).
//
//     a decode, up to 8 pairs                      a chunk, up to 8 * NUM_SIMDGROUPS pairs
//
//             KV positions ->                              KV positions ->
//             | s0 | s1 | s2 | s3 | s0 | ...               |  tile  |  tile  |  tile  | ...
//     pairs   | each simdgroup reads its own       s0 pairs 0- 7 | all simdgroups read the same tile
//     0 - 7   | tiles straight from the cache      s1 pairs 8-15 | from threadgroup memory, filled by
//             | for all of the pairs               s2 ...        | one read of the cache
//
// Inputs are those of paged_varlen_v1, except that the host has already searched cu_seqlens_q and seqused_k and
// passes the result:
//
//     work_items      int   [num_items, NUM_COLUMNS], see WorkItemColumn
//     scoring         float [2], scale and softcap in units of log2, see Scoring
//
// Outputs: out as in v1. An item whose KV range is one of several splits of its rows (PARTIAL_START >= 0) writes sums
// that merge_splits.metal merges:
//
//     partial_out     float [num_partial_rows, num_heads, VALUE_DIM], sum of weight * value, not yet divided
//     partial_sums    float [num_partial_rows, num_heads, 2], maximum and total
//
// Template arguments: T, S (elements of the cache), HEAD_DIM (elements of a query and a key), VALUE_DIM (of a value and of
// the output), LATENT, BLOCK_SIZE, TILE_KV, NUM_SIMDGROUPS, WIDTH (elements per load).
//
// LATENT: a value is the first VALUE_DIM elements of its key, and v_cache is k_cache. A tile that was put into threadgroup
// memory as keys is used as values, too. With one simdgroup there is no such tile: every item is computed like a decode.
// Launch: threadgroups (num_items, num_kv_heads * head slices) of 32 * NUM_SIMDGROUPS threads; a head slice is
// the query heads of a KV head that fit into one tile.

constexpr int TILE_PAIRS = 8 * NUM_SIMDGROUPS;
constexpr int THREADS = 32 * NUM_SIMDGROUPS;
constexpr int GROUPS = TILE_KV / 8;
constexpr int COLUMNS = VALUE_DIM / 8;
constexpr int ROW_STRIDE = HEAD_DIM + 16 / sizeof(T);  // 16 bytes of padding spread a column over the memory banks
constexpr int TILE_STRIDE = (HEAD_DIM > VALUE_DIM ? HEAD_DIM : VALUE_DIM) + 16 / sizeof(T);
constexpr int STAGED_ROWS = NUM_SIMDGROUPS == 1 ? 0 : TILE_KV;
constexpr int LOADS_PER_ROW = HEAD_DIM / WIDTH;

// The queries, a tile of keys or values behind them, and at the end of a decode, instead of both, 8 rows of output.
threadgroup Wide<T, WIDTH> query_rows[(TILE_PAIRS * ROW_STRIDE + STAGED_ROWS * TILE_STRIDE) / WIDTH];
threadgroup Wide<T, WIDTH>* tile_rows = query_rows + TILE_PAIRS * ROW_STRIDE / WIDTH;
threadgroup float shared_sums[2 * 8];
threadgroup float* shared_output = (threadgroup float*)query_rows;
static_assert(NUM_SIMDGROUPS == 1 || 8 * VALUE_DIM * sizeof(float) <= sizeof(query_rows), "8 rows of output fit");

const int simdgroup_id = simdgroup_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const int thread_id = thread_index_in_threadgroup;
const LanePlace place = place_of_lane(lane);

const int num_heads = q_shape[1];
const int num_kv_heads = k_cache_shape[2];
const int stored_dim = k_cache_shape[3];
const int stored_value_dim = LATENT || HEAD_DIM == VALUE_DIM ? stored_dim : v_cache_shape[3];
const int heads_per_kv_head = num_heads / num_kv_heads;
const int kv_head = threadgroup_position_in_grid.y % num_kv_heads;
const int packed_heads = min(heads_per_kv_head, TILE_PAIRS);
const int first_head = threadgroup_position_in_grid.y / num_kv_heads * packed_heads;  // within the KV head

const device int* item = work_items + long(threadgroup_position_in_grid.x) * NUM_COLUMNS;
const int kv_start = item[KV_START];
const int kv_end = item[KV_END];
const int num_rows = item[NUM_ROWS];
const int num_pairs = num_rows * packed_heads;
const bool is_decode = num_pairs <= 8;
const auto sequence_blocks = block_table + long(item[SEQ]) * block_table_shape[1];

// -- the queries, once ------------------------------------------------------------------------------------------

const int staged_pairs = (num_pairs + 7) / 8 * 8;
for (int i = thread_id; i < staged_pairs * LOADS_PER_ROW; i += THREADS) {
  const int pair = i / LOADS_PER_ROW;
  const int dim = i % LOADS_PER_ROW * WIDTH;
  const int head_in_group = first_head + pair % packed_heads;
  Wide<T, WIDTH> wide = Wide<T, WIDTH>(T(0.0f));
  if (pair < num_pairs && head_in_group < heads_per_kv_head) {
    const long row = item[Q_START] + pair / packed_heads;
    const int head = kv_head * heads_per_kv_head + head_in_group;
    wide = *(const device Wide<T, WIDTH>*)(q + (row * num_heads + head) * HEAD_DIM + dim);
  }
  query_rows[(pair * ROW_STRIDE + dim) / WIDTH] = wide;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// -- this lane's row of the tile: its query head, its position, the range it may see, its sums ----------------------

const int first_pair = is_decode ? 0 : 8 * simdgroup_id;
const bool has_pairs = first_pair < num_pairs;
const int pair = min(first_pair + place.row, num_pairs - 1);  // rows past the last pair repeat it and are not written
const int head_in_group = first_head + pair % packed_heads;
const bool is_pair = first_pair + place.row < num_pairs && head_in_group < heads_per_kv_head;
const int head = kv_head * heads_per_kv_head + min(head_in_group, heads_per_kv_head - 1);
const int row_in_item = pair / packed_heads;
const int position = item[FIRST_POSITION] + row_in_item;

// A sink counts once: in the first split, and in a decode's first simdgroup.
const bool has_sink = item[SPLIT] == 0 && (!is_decode || simdgroup_id == 0) && sinks[head] != -INFINITY;
RowState row_state;
row_state.maximum = has_sink ? sinks[head] * M_LOG2E_F : -INFINITY;
row_state.total = has_sink ? 1.0f : 0.0f;
row_state.first_visible = max(kv_start, window[0] < 0 ? 0 : position - window[0]);
if (window[0] < -1) {  // chunks of -window[0] positions, which no row looks out of
  row_state.first_visible = max(row_state.first_visible, position - position % -window[0]);
}
row_state.last_visible = min(kv_end - 1, position);

// The range that all 8 rows see, and the range that at least one of them sees.
const int all_first = simd_max(row_state.first_visible);
const int all_last = simd_min(row_state.last_visible);
const int any_first = simd_min(row_state.first_visible);
const int any_last = simd_max(row_state.last_visible);

Scoring row_scoring;
row_scoring.scale = scoring[0];
row_scoring.softcap = scoring[1];
simdgroup_float8x8 scores[GROUPS];
simdgroup_float8x8 output[COLUMNS];
set_zero(output);
StagedTile<T, WIDTH, ROW_STRIDE> queries;
queries.rows = query_rows + first_pair * ROW_STRIDE / WIDTH;
PagedTile<T, S, WIDTH, GROUPS> keys;
keys.cache = k_cache + kv_head * stored_dim;
keys.row_stride = num_kv_heads * stored_dim;
keys.head_dim = HEAD_DIM;
PagedTile<T, S, WIDTH, GROUPS> values = keys;
values.cache = v_cache + kv_head * stored_value_dim;
values.row_stride = num_kv_heads * stored_value_dim;
values.head_dim = LATENT ? HEAD_DIM : VALUE_DIM;
const int first_tile = kv_start / 8 * 8;

if (NUM_SIMDGROUPS == 1 || is_decode) {
  // -- each simdgroup takes every NUM_SIMDGROUPS-th tile, straight from the cache: no barrier, loads run ahead ------

  for (int tile_start = first_tile + simdgroup_id * TILE_KV; tile_start < kv_end; tile_start += NUM_SIMDGROUPS * TILE_KV) {
    find_groups<BLOCK_SIZE>(keys, values, sequence_blocks, tile_start, kv_start, kv_end);
    if (tile_start >= all_first && tile_start + TILE_KV - 1 <= all_last) {
      multiply_keys<false, HEAD_DIM>(scores, queries, keys, place);
      scores_to_weights<false>(scores, output, row_state, row_scoring, tile_start, place);
      add_values<false, false, WIDTH>(output, scores, values, row_state, tile_start, place);
    } else {
      multiply_keys<true, HEAD_DIM>(scores, queries, keys, place);
      scores_to_weights<true>(scores, output, row_state, row_scoring, tile_start, place);
      add_values<true, true, WIDTH>(output, scores, values, row_state, tile_start, place);
    }
  }

  // -- merge the simdgroups into simdgroup 0, one after the other -------------------------------------------------

  for (int other = 1; other < NUM_SIMDGROUPS; other++) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup_id == other) {
      if (place.column == 0) {
        shared_sums[2 * place.row] = row_state.maximum;
        shared_sums[2 * place.row + 1] = row_state.total;
      }
      #pragma unroll
      for (int column = 0; column < COLUMNS; column++) {
        simdgroup_store(output[column], shared_output + 8 * column, VALUE_DIM);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup_id == 0) {
      const float other_maximum = shared_sums[2 * place.row];
      const float maximum = max(row_state.maximum, other_maximum);
      const float base = maximum == -INFINITY ? 0.0f : maximum;
      const float rescale = exp2(row_state.maximum - base);
      const float other_rescale = exp2(other_maximum - base);
      row_state.maximum = maximum;
      row_state.total = row_state.total * rescale + shared_sums[2 * place.row + 1] * other_rescale;
      #pragma unroll
      for (int column = 0; column < COLUMNS; column++) {
        simdgroup_float8x8 other_output;
        simdgroup_load(other_output, shared_output + 8 * column, VALUE_DIM);
        #pragma unroll
        for (int i = 0; i < 2; i++) {
          output[column].thread_elements()[i] = output[column].thread_elements()[i] * rescale +
                                                other_output.thread_elements()[i] * other_rescale;
        }
      }
    }
  }
} else {
  // -- all simdgroups share each tile; keys and then values pass through the same threadgroup memory ----------------

  StagedTile<T, WIDTH, TILE_STRIDE> staged;
  staged.rows = tile_rows;
  for (int tile_start = first_tile; tile_start < kv_end; tile_start += TILE_KV) {
    const bool sees_tile = has_pairs && tile_start <= any_last && tile_start + TILE_KV > any_first;
    const bool is_inside = tile_start >= kv_start && tile_start + TILE_KV <= kv_end;
    const bool masked = tile_start < all_first || tile_start + TILE_KV - 1 > all_last;
    find_groups<BLOCK_SIZE>(keys, values, sequence_blocks, tile_start, kv_start, kv_end);
    #pragma unroll
    for (int part = 0; part < 2; part++) {
      if (part == 0 && is_inside) {
        stage_tile<false, HEAD_DIM, TILE_STRIDE, THREADS>(tile_rows, keys, thread_id);
      } else if (part == 0) {
        stage_tile<true, HEAD_DIM, TILE_STRIDE, THREADS>(tile_rows, keys, thread_id);
      } else if (!LATENT && is_inside) {
        stage_tile<false, VALUE_DIM, TILE_STRIDE, THREADS>(tile_rows, values, thread_id);
      } else if (!LATENT) {
        stage_tile<true, VALUE_DIM, TILE_STRIDE, THREADS>(tile_rows, values, thread_id);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (sees_tile && part == 0) {
        multiply_keys<false, HEAD_DIM>(scores, queries, staged, place);
        if (masked) {
          scores_to_weights<true>(scores, output, row_state, row_scoring, tile_start, place);
        } else {
          scores_to_weights<false>(scores, output, row_state, row_scoring, tile_start, place);
        }
      }
      if (sees_tile && part == 1) {
        if (masked) {
          add_values<false, true, WIDTH>(output, scores, staged, row_state, tile_start, place);
        } else {
          add_values<false, false, WIDTH>(output, scores, staged, row_state, tile_start, place);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);  // no thread reads the tile any more
    }
  }
}

// -- write the rows, with the columns back in order: see WIDE LOADS in tile.metal -----------------------------------

if (is_pair && !(is_decode && simdgroup_id > 0)) {
  const long row = item[Q_START] + row_in_item;
  const long out_offset = (row * num_heads + head) * VALUE_DIM;
#ifdef HAS_SPLITS
  const bool is_partial = item[PARTIAL_START] >= 0;
  const bool writes_out = item[SPLIT] == 0;  // the first split fills the row until the merged row replaces it
  const long partial_row = long(item[PARTIAL_START] + row_in_item) * num_heads + head;
  if (is_partial && place.column == 0) {
    partial_sums[partial_row * 2] = row_state.maximum;
    partial_sums[partial_row * 2 + 1] = row_state.total;
  }
#endif
  // One division, and only if something was summed; an epsilon would shrink small totals.
  const float divisor = row_state.total == 0.0f ? 1.0f : row_state.total;
  #pragma unroll
  for (int column = 0; column < COLUMNS; column += WIDTH / 2) {
    const int dim = 8 * column + WIDTH * (place.column / 2);
    Wide<T, WIDTH> wide;
    #pragma unroll
    for (int i = 0; i < WIDTH; i++) {
      wide[i] = T(output[column + i / 2].thread_elements()[i % 2] / divisor);
    }
#ifdef HAS_SPLITS
    if (is_partial) {
      #pragma unroll
      for (int i = 0; i < WIDTH; i++) {
        partial_out[partial_row * VALUE_DIM + dim + i] = output[column + i / 2].thread_elements()[i % 2];
      }
    }
    if (writes_out)
#endif
      *(device Wide<T, WIDTH>*)(out + out_offset + dim) = wide;
  }
}
