// What a simdgroup does with one tile of keys and values: 8 query rows against TILE_KV KV positions.
//
// A note on words. A *pair* is one query row of one query head. All query heads that share a KV head are packed into
// the rows of a tile (GQA), so a key is read once for all of them: with 3 heads per KV head, pairs 0, 1, 2 are row 0
// with heads 0, 1, 2, pairs 3, 4, 5 are row 1, and so on. A *group* is 8 consecutive KV positions, the first of them
// a multiple of 8: it lies within one block, whatever the block size.
//
// simdgroup_matrix<float, 8, 8>: every lane holds two neighbouring elements of a row,
//
//     column    0    1    2    3    4    5    6    7         row    = bits 4, 2, 1 of the lane
//     row 0     0    0    1    1    8    8    9    9         column = bits 3, 0 of the lane, times two
//     row 1     2    2    3    3   10   10   11   11
//     row 2     4    4    5    5   12   12   13   13         lanes of one row differ in bits 0 and 3, so a maximum
//     row 3     6    6    7    7   14   14   15   15         over a row is: max with lane ^ 1, then with lane ^ 8
//     row 4    16   16   17   17   24   24   25   25
//     ...
//
// WIDE LOADS. As the right-hand matrix of q k^T, a lane's two elements belong to two different keys, which would
// make every load of a key a single element. But a dot product does not care in which order its dimensions are
// summed: let lane row r of WIDTH successive matrices stand for the dimensions WIDTH * r ... WIDTH * r + WIDTH - 1,
// which are neighbours in memory and one load, and do the same to q. The columns of the output are permuted the
// same way, and undone when they are written.
#include <metal_simdgroup_matrix>

// Columns of the work list that the host builds: one row of integers per work item.
enum WorkItemColumn { SEQ, Q_START, NUM_ROWS, KV_START, KV_END, SPLIT, NUM_SPLITS, FIRST_POSITION, PARTIAL_START, NUM_COLUMNS };

// What a lane loads at once.
template <typename T, int WIDTH>
using Wide = vec<T, WIDTH>;

// The matrix elements that a lane holds: (row, column) and (row, column + 1).
struct LanePlace {
  int row;
  int column;
};

METAL_FUNC LanePlace place_of_lane(int lane) {
  LanePlace place;
  place.row = ((lane & 16) >> 2) | ((lane & 6) >> 1);
  place.column = ((lane & 8) >> 1) | ((lane & 1) << 1);
  return place;
}

METAL_FUNC int lane_of_place(int row, int column) {
  return ((row & 4) << 2) | ((row & 3) << 1) | ((column & 4) << 1) | ((column & 2) >> 1);
}

METAL_FUNC void set_elements(thread simdgroup_float8x8& matrix, float first, float second) {
  matrix.thread_elements()[0] = first;
  matrix.thread_elements()[1] = second;
}

template <int COUNT>
METAL_FUNC void set_zero(thread simdgroup_float8x8 (&matrices)[COUNT]) {
  #pragma unroll
  for (int i = 0; i < COUNT; i++) {
    set_elements(matrices[i], 0.0f, 0.0f);
  }
}

// -- two places a tile can lie: threadgroup memory, shared by all simdgroups, or still in its blocks ------------

// Rows of ROW_STRIDE elements in threadgroup memory; rows that no pair may see are zero.
template <typename T, int WIDTH, int ROW_STRIDE>
struct StagedTile {
  const threadgroup Wide<T, WIDTH>* rows;
};

// KV rows in the cache. Positions outside [first_row, end_row) of the tile are never touched: they may lie in a
// block that was never written, or has been given to another request.
template <typename T, int WIDTH, int GROUPS>
struct PagedTile {
  const device T* cache;
  long group_offset[GROUPS];
  int row_stride;
  int first_row;
  int end_row;
};

// WIDTH elements of a row of the tile, from dimension `dim` on.
template <typename T, int WIDTH, int ROW_STRIDE>
METAL_FUNC Wide<T, WIDTH> load_wide(StagedTile<T, WIDTH, ROW_STRIDE> tile, int group, int row, int dim) {
  return tile.rows[((8 * group + row) * ROW_STRIDE + dim) / WIDTH];
}

template <typename T, int WIDTH, int GROUPS>
METAL_FUNC Wide<T, WIDTH> load_wide(PagedTile<T, WIDTH, GROUPS> tile, int group, int row, int dim) {
  const int tile_row = 8 * group + row;
  if (tile_row < tile.first_row || tile_row >= tile.end_row) {
    return Wide<T, WIDTH>(T(0.0f));
  }
  return *(const device Wide<T, WIDTH>*)(tile.cache + tile.group_offset[group] + row * tile.row_stride + dim);
}

// Where the groups of a tile lie. One look into the block table per group serves all of its keys and values, and all
// threads ask for the same entry.
template <int BLOCK_SIZE, typename T, int WIDTH, int GROUPS, typename IntPointer>
METAL_FUNC void find_groups(thread PagedTile<T, WIDTH, GROUPS>& tile, IntPointer sequence_blocks, int tile_start,
                            int kv_start, int kv_end) {
  tile.first_row = kv_start - tile_start;
  tile.end_row = kv_end - tile_start;
  #pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    const int group_start = min(tile_start + 8 * group, kv_end - 1);  // a group past the end has no entry
    const long slot = long(sequence_blocks[group_start / BLOCK_SIZE]) * BLOCK_SIZE + group_start % BLOCK_SIZE;
    tile.group_offset[group] = slot * tile.row_stride;
  }
}

// -- scores = q k^T ---------------------------------------------------------------------------------------------

template <int HEAD_DIM, typename T, int WIDTH, int ROW_STRIDE, int GROUPS, typename Tile>
METAL_FUNC void multiply_keys(thread simdgroup_float8x8 (&scores)[GROUPS], StagedTile<T, WIDTH, ROW_STRIDE> queries,
                              Tile keys, LanePlace place) {
  set_zero(scores);
  for (int dim = 0; dim < HEAD_DIM; dim += 8 * WIDTH) {
    const Wide<T, WIDTH> query_0 = load_wide(queries, 0, place.row, dim + WIDTH * place.column);
    const Wide<T, WIDTH> query_1 = load_wide(queries, 0, place.row, dim + WIDTH * (place.column + 1));
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const Wide<T, WIDTH> key_0 = load_wide(keys, group, place.column, dim + WIDTH * place.row);
      const Wide<T, WIDTH> key_1 = load_wide(keys, group, place.column + 1, dim + WIDTH * place.row);
      #pragma unroll
      for (int i = 0; i < WIDTH; i++) {
        simdgroup_float8x8 query;
        simdgroup_float8x8 key;
        set_elements(query, float(query_0[i]), float(query_1[i]));
        set_elements(key, float(key_0[i]), float(key_1[i]));
        simdgroup_multiply_accumulate(scores[group], query, key, scores[group]);
      }
    }
  }
}

// -- scores become weights, by online softmax -------------------------------------------------------------------

// How a product q . k becomes a score, in units of log2, so that exp2 serves.
struct Scoring {
  float scale;
  float softcap;  // 0 for none
};

// What the row of a lane has summed so far, and which positions it may see: [first_visible, last_visible].
struct RowState {
  float maximum;
  float total;
  int first_visible;
  int last_visible;
};

template <int GROUPS, int COLUMNS>
METAL_FUNC void scores_to_weights(thread simdgroup_float8x8 (&scores)[GROUPS],
                                  thread simdgroup_float8x8 (&output)[COLUMNS], thread RowState& row,
                                  Scoring scoring, int tile_start, bool masked, LanePlace place) {
  float maximum = row.maximum;
  #pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      float score = scores[group].thread_elements()[i] * scoring.scale;
      if (scoring.softcap > 0.0f) {
        score = scoring.softcap * tanh(score);
      }
      const int position = tile_start + 8 * group + place.column + i;
      if (masked && (position < row.first_visible || position > row.last_visible)) {
        score = -INFINITY;
      }
      scores[group].thread_elements()[i] = score;
      maximum = max(maximum, score);
    }
  }
  maximum = max(maximum, simd_shuffle_xor(maximum, 1));
  maximum = max(maximum, simd_shuffle_xor(maximum, 8));

  // While a row has seen nothing its maximum is -inf, and stays -inf: any other number, such as 0, would be kept as
  // the maximum and make the weights of later, very negative scores vanish. -inf - -inf is NaN, so a base of 0 is
  // selected there; exp2(-inf - 0) is 0.
  const float base = maximum == -INFINITY ? 0.0f : maximum;
  const float rescale = exp2(row.maximum - base);
  float total = 0.0f;
  #pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const float weight = exp2(scores[group].thread_elements()[i] - base);
      scores[group].thread_elements()[i] = weight;
      total += weight;
    }
  }
  total += simd_shuffle_xor(total, 1);
  total += simd_shuffle_xor(total, 8);
  row.maximum = maximum;
  row.total = row.total * rescale + total;
  #pragma unroll
  for (int i = 0; i < COLUMNS; i++) {
    output[i].thread_elements()[0] *= rescale;
    output[i].thread_elements()[1] *= rescale;
  }
}

// -- output += weights v ----------------------------------------------------------------------------------------

// 0 * NaN is NaN: in a matrix product a value that is not finite reaches every row, also those that must not see it
// and have weight 0. So in masked tiles such values are taken out of the product (`finite_or_zero`) and added to the rows
// that see them, one by one. It is rare; what is common is one test per value.
METAL_FUNC float finite_or_zero(float value) {
  return isfinite(value) ? value : 0.0f;
}

METAL_FUNC void add_non_finite(thread simdgroup_float8x8& output, thread simdgroup_float8x8& weights,
                               float value_0, float value_1, RowState row, int group_start, LanePlace place) {
  for (int k = 0; k < 8; k++) {
    const float weight_0 = simd_shuffle(weights.thread_elements()[0], ushort(lane_of_place(place.row, k)));
    const float weight_1 = simd_shuffle(weights.thread_elements()[1], ushort(lane_of_place(place.row, k)));
    const float weight = (k & 1) == 0 ? weight_0 : weight_1;
    const float other_0 = simd_shuffle(value_0, ushort(lane_of_place(k, place.column)));
    const float other_1 = simd_shuffle(value_1, ushort(lane_of_place(k, place.column)));
    if (group_start + k >= row.first_visible && group_start + k <= row.last_visible) {
      output.thread_elements()[0] += isfinite(other_0) ? 0.0f : weight * other_0;
      output.thread_elements()[1] += isfinite(other_1) ? 0.0f : weight * other_1;
    }
  }
}

template <int WIDTH, int GROUPS, int COLUMNS, typename Tile>
METAL_FUNC void add_values(thread simdgroup_float8x8 (&output)[COLUMNS], thread simdgroup_float8x8 (&weights)[GROUPS],
                           Tile values, RowState row, int tile_start, bool masked, LanePlace place) {
  #pragma unroll
  for (int column = 0; column < COLUMNS; column += WIDTH / 2) {
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const auto wide = load_wide(values, group, place.row, 8 * column + WIDTH * (place.column / 2));
      #pragma unroll
      for (int i = 0; i < WIDTH / 2; i++) {
        const float value_0 = float(wide[2 * i]);
        const float value_1 = float(wide[2 * i + 1]);
        simdgroup_float8x8 value;
        if (masked) {
          set_elements(value, finite_or_zero(value_0), finite_or_zero(value_1));
          simdgroup_multiply_accumulate(output[column + i], weights[group], value, output[column + i]);
          if (simd_any(!isfinite(value_0) || !isfinite(value_1))) {
            const int group_start = tile_start + 8 * group;
            add_non_finite(output[column + i], weights[group], value_0, value_1, row, group_start, place);
          }
        } else {
          set_elements(value, value_0, value_1);
          simdgroup_multiply_accumulate(output[column + i], weights[group], value, output[column + i]);
        }
      }
    }
  }
}
