// The work of a simdgroup on one tile of keys and values: 8 query rows times TILE_KV KV positions.
//
// Terms: a *pair* is one query row of one query head. All query heads that share a KV head are packed into the rows
// of a tile (GQA), so a key is read once for all of them. With 3 heads per KV head, pairs 0, 1, 2 are row 0 with heads
// 0, 1, 2, pairs 3, 4, 5 are row 1, and so on. A *group* is 8 consecutive KV positions that start at a multiple of 8,
// so it lies within one block for every block size.
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
// WIDE LOADS. In the right-hand matrix of q k^T, a lane's two elements belong to two different keys, so every load of
// a key would be a single element. But the dimensions of a dot product can be summed in any order. So lane row r of
// WIDTH successive matrices stands for the dimensions WIDTH * r ... WIDTH * r + WIDTH - 1, which are neighbours in
// memory and one load, and q is permuted in the same way. The columns of the output are permuted too, and put back in
// order when they are written.
//
// TWO KINDS OF TILES. Most tiles lie inside the range of their item and are seen by every row. Nothing has to be tested
// there, so the loop is one run of loads and products without branches, and the loads can run ahead of the products.
// The other tiles, at the ends of a range, on the diagonal of a chunk or at the edge of a window, are CHECKED (a load
// outside the range returns 0) and MASKED (a score that a row must not see becomes -inf). The kernel chooses once per
// tile; inside a tile both are template arguments.
#include <metal_simdgroup_matrix>

// Columns of the work list that the host builds: one row of integers per work item.
enum WorkItemColumn { SEQ, Q_START, NUM_ROWS, KV_START, KV_END, SPLIT, NUM_SPLITS, FIRST_POSITION, PARTIAL_START, NUM_COLUMNS };

// The elements that a lane loads at once.
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

// -- two places of a tile: threadgroup memory, shared by all simdgroups, or the blocks of the cache -------------

// Rows of ROW_STRIDE elements in threadgroup memory; rows that no pair may see are zero.
template <typename T, int WIDTH, int ROW_STRIDE>
struct StagedTile {
  const threadgroup Wide<T, WIDTH>* rows;
};

// KV rows in the cache. Positions outside [first_row, end_row) of the tile are never read: their block may never have
// been written, or may belong to another request by now.
template <typename T, typename S, int WIDTH, int GROUPS>
struct PagedTile {
  const device S* cache;
  long group_offset[GROUPS];
  int row_stride;
  int head_dim;
  int first_row;
  int end_row;
};

// WIDTH elements of a row of the tile, from dimension `dim` on.
template <bool CHECKED, typename T, int WIDTH, int ROW_STRIDE>
METAL_FUNC Wide<T, WIDTH> load_wide(StagedTile<T, WIDTH, ROW_STRIDE> tile, int group, int row, int dim) {
  return tile.rows[((8 * group + row) * ROW_STRIDE + dim) / WIDTH];
}

template <typename T, int WIDTH>
METAL_FUNC Wide<T, WIDTH> read_row(const device T* row, int dim, int head_dim) {
  return *(const device Wide<T, WIDTH>*)(row + dim);
}

template <typename T, int WIDTH>
METAL_FUNC Wide<T, WIDTH> read_row(const device int8_t* row, int dim, int head_dim) {
  const Wide<char, WIDTH> codes = *(const device Wide<char, WIDTH>*)(row + dim);
  const float scale = scale_of(row, head_dim);
  Wide<T, WIDTH> numbers;
  #pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    numbers[i] = T(float(int8_t(codes[i])) * scale);  // char is unsigned on some processors
  }
  return numbers;
}

template <bool CHECKED, typename T, typename S, int WIDTH, int GROUPS>
METAL_FUNC Wide<T, WIDTH> load_wide(PagedTile<T, S, WIDTH, GROUPS> tile, int group, int row, int dim) {
  const int tile_row = 8 * group + row;
  if (CHECKED && (tile_row < tile.first_row || tile_row >= tile.end_row)) {
    return Wide<T, WIDTH>(T(0.0f));
  }
  return read_row<T, WIDTH>(tile.cache + tile.group_offset[group] + row * tile.row_stride, dim, tile.head_dim);
}

// Find the groups of a tile in the caches. One lookup in the block table per group serves all of its keys and values,
// and all threads read the same entry.
template <int BLOCK_SIZE, typename T, typename S, int WIDTH, int GROUPS, typename IntPointer>
METAL_FUNC void find_groups(thread PagedTile<T, S, WIDTH, GROUPS>& keys, thread PagedTile<T, S, WIDTH, GROUPS>& values,
                            IntPointer sequence_blocks, int tile_start, int kv_start, int kv_end) {
  keys.first_row = values.first_row = kv_start - tile_start;
  keys.end_row = values.end_row = kv_end - tile_start;
  #pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    const int group_start = min(tile_start + 8 * group, kv_end - 1);  // a group past the end has no entry
    const long slot = long(sequence_blocks[group_start / BLOCK_SIZE]) * BLOCK_SIZE + group_start % BLOCK_SIZE;
    keys.group_offset[group] = slot * keys.row_stride;
    values.group_offset[group] = slot * values.row_stride;
  }
}

// Copy a tile from the cache to threadgroup memory, with all threads of the threadgroup.
template <bool CHECKED, int HEAD_DIM, int ROW_STRIDE, int THREADS, typename T, typename S, int WIDTH, int GROUPS>
METAL_FUNC void stage_tile(threadgroup Wide<T, WIDTH>* rows, PagedTile<T, S, WIDTH, GROUPS> tile, int thread_id) {
  constexpr int LOADS_PER_ROW = HEAD_DIM / WIDTH;
  #pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    for (int i = thread_id; i < 8 * LOADS_PER_ROW; i += THREADS) {
      const int row = i / LOADS_PER_ROW;
      const int dim = i % LOADS_PER_ROW * WIDTH;
      rows[((8 * group + row) * ROW_STRIDE + dim) / WIDTH] = load_wide<CHECKED>(tile, group, row, dim);
    }
  }
}

// -- scores = q k^T ---------------------------------------------------------------------------------------------

template <bool CHECKED, int HEAD_DIM, typename T, int WIDTH, int ROW_STRIDE, int GROUPS, typename Tile>
METAL_FUNC void multiply_keys(thread simdgroup_float8x8 (&scores)[GROUPS], StagedTile<T, WIDTH, ROW_STRIDE> queries,
                              Tile keys, LanePlace place) {
  set_zero(scores);
  for (int dim = 0; dim < HEAD_DIM; dim += 8 * WIDTH) {
    const Wide<T, WIDTH> query_0 = load_wide<false>(queries, 0, place.row, dim + WIDTH * place.column);
    const Wide<T, WIDTH> query_1 = load_wide<false>(queries, 0, place.row, dim + WIDTH * (place.column + 1));
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const Wide<T, WIDTH> key_0 = load_wide<CHECKED>(keys, group, place.column, dim + WIDTH * place.row);
      const Wide<T, WIDTH> key_1 = load_wide<CHECKED>(keys, group, place.column + 1, dim + WIDTH * place.row);
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

// The factors that turn a product q . k into a score in units of log2, so that exp2 applies.
struct Scoring {
  float scale;
  float softcap;  // 0 for none
};

// The sums so far of a lane's row, and the positions that it may see: [first_visible, last_visible].
struct RowState {
  float maximum;
  float total;
  int first_visible;
  int last_visible;
};

METAL_FUNC bool is_visible(RowState row, int position) {
  return position >= row.first_visible && position <= row.last_visible;
}

template <bool MASKED, int GROUPS, int COLUMNS>
METAL_FUNC void scores_to_weights(thread simdgroup_float8x8 (&scores)[GROUPS],
                                  thread simdgroup_float8x8 (&output)[COLUMNS], thread RowState& row,
                                  Scoring scoring, int tile_start, LanePlace place) {
  #pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    scores[group].thread_elements()[0] *= scoring.scale;
    scores[group].thread_elements()[1] *= scoring.scale;
  }
  if (scoring.softcap > 0.0f) {
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      scores[group].thread_elements()[0] = scoring.softcap * tanh(scores[group].thread_elements()[0]);
      scores[group].thread_elements()[1] = scoring.softcap * tanh(scores[group].thread_elements()[1]);
    }
  }
  float maximum = row.maximum;
  #pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      float score = scores[group].thread_elements()[i];
      if (MASKED && !is_visible(row, tile_start + 8 * group + place.column + i)) {
        score = -INFINITY;
      }
      scores[group].thread_elements()[i] = score;
      maximum = max(maximum, score);
    }
  }
  maximum = max(maximum, simd_shuffle_xor(maximum, 1));
  maximum = max(maximum, simd_shuffle_xor(maximum, 8));

  // The maximum of a row that has seen nothing is -inf and stays -inf. Any other number, such as 0, would remain the
  // maximum, and the weights of later, very negative scores would vanish. -inf - -inf is NaN, so the base is 0 in
  // this case; exp2(-inf - 0) is 0.
  const float base = maximum == -INFINITY ? 0.0f : maximum;
  const float rescale = exp2(row.maximum - base);
  float total = 0.0f;
  #pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      // fast::exp2 is off by up to 3 + 2 |x| units in the last place of 2^x, and x is at most 0 here: never more than
      // 3 units of the largest weight. `rescale` stays precise, because its errors would multiply from tile to tile.
      const float weight = fast::exp2(scores[group].thread_elements()[i] - base);
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

// 0 * NaN is NaN: in a matrix product, a value that is not finite reaches every row, even rows that must not see it and
// have weight 0. So masked tiles multiply by 0 instead (`finite_or_zero`), and the rare tile that holds such a value is
// multiplied once more: a second product counts, for each row and dimension, what is not finite among the values that
// the row sees. A count is a sum of these, exact in a float: a tile has at most 32 positions.
constexpr constant float COUNT_OF_INFINITY = 1.0f;
constexpr constant float COUNT_OF_MINUS_INFINITY = 64.0f;
constexpr constant float COUNT_OF_NAN = 4096.0f;

METAL_FUNC float finite_or_zero(float value) {
  return isfinite(value) ? value : 0.0f;
}

METAL_FUNC float count_of(float value) {
  return isfinite(value) ? 0.0f
                         : value == INFINITY ? COUNT_OF_INFINITY
                                             : value == -INFINITY ? COUNT_OF_MINUS_INFINITY : COUNT_OF_NAN;
}

// The sum of the counted values: 0 for none of them, and infinity - infinity is NaN.
METAL_FUNC float sum_of_counted(float count) {
  const bool has_nan = count >= COUNT_OF_NAN;
  const int counts = has_nan ? 0 : int(count);
  const float positive = has_nan || counts % 64 != 0 ? INFINITY : 0.0f;
  const float negative = has_nan || counts >= 64 ? INFINITY : 0.0f;
  return positive - negative;
}

template <bool CHECKED, int WIDTH, int GROUPS, int COLUMNS, typename Tile>
METAL_FUNC void add_non_finite(thread simdgroup_float8x8 (&output)[COLUMNS],
                               thread simdgroup_float8x8 (&weights)[GROUPS], Tile values, RowState row, int tile_start,
                               LanePlace place) {
  #pragma unroll
  for (int column = 0; column < COLUMNS; column += WIDTH / 2) {
    simdgroup_float8x8 counts[WIDTH / 2];
    set_zero(counts);
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const auto wide = load_wide<CHECKED>(values, group, place.row, 8 * column + WIDTH * (place.column / 2));
      float sees[2];
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        const bool visible = is_visible(row, tile_start + 8 * group + place.column + i);
        const float factor = weights[group].thread_elements()[i] == 0.0f ? COUNT_OF_NAN : 1.0f;  // 0 * infinity is NaN
        sees[i] = visible ? factor : 0.0f;
      }
      simdgroup_float8x8 seen;
      set_elements(seen, sees[0], sees[1]);
      #pragma unroll
      for (int i = 0; i < WIDTH / 2; i++) {
        simdgroup_float8x8 count;
        set_elements(count, count_of(float(wide[2 * i])), count_of(float(wide[2 * i + 1])));
        simdgroup_multiply_accumulate(counts[i], seen, count, counts[i]);
      }
    }
    #pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) {
      output[column + i].thread_elements()[0] += sum_of_counted(counts[i].thread_elements()[0]);
      output[column + i].thread_elements()[1] += sum_of_counted(counts[i].thread_elements()[1]);
    }
  }
}

template <bool CHECKED, bool MASKED, int WIDTH, int GROUPS, int COLUMNS, typename Tile>
METAL_FUNC void add_values(thread simdgroup_float8x8 (&output)[COLUMNS], thread simdgroup_float8x8 (&weights)[GROUPS],
                           Tile values, RowState row, int tile_start, LanePlace place) {
  bool has_non_finite = false;
  #pragma unroll
  for (int column = 0; column < COLUMNS; column += WIDTH / 2) {
    #pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const auto wide = load_wide<CHECKED>(values, group, place.row, 8 * column + WIDTH * (place.column / 2));
      #pragma unroll
      for (int i = 0; i < WIDTH / 2; i++) {
        float value_0 = float(wide[2 * i]);
        float value_1 = float(wide[2 * i + 1]);
        if (MASKED) {
          has_non_finite |= !isfinite(value_0) | !isfinite(value_1);
          value_0 = finite_or_zero(value_0);
          value_1 = finite_or_zero(value_1);
        }
        simdgroup_float8x8 value;
        set_elements(value, value_0, value_1);
        simdgroup_multiply_accumulate(output[column + i], weights[group], value, output[column + i]);
      }
    }
  }
  if (MASKED && simd_any(has_non_finite)) {
    add_non_finite<CHECKED, WIDTH>(output, weights, values, row, tile_start, place);
  }
}
