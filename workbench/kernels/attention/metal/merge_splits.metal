// merge_splits: merges the splits of long contexts, one row and head per simdgroup.
//
//     partial_out     float [num_partial_rows, num_heads, HEAD_DIM], sums of weight * value
//     partial_sums    float [num_partial_rows, num_heads, 2], maximum (in units of log2) and total
//     merge_rows      int   [num_merged_rows, 3], first partial row, distance between splits' rows, number of splits
//     out             T     [num_merged_rows, num_heads, HEAD_DIM]
//
// Template arguments: T, HEAD_DIM. Launch: threadgroups (num_heads, num_merged_rows) of 32 threads.

const int head = threadgroup_position_in_grid.x;
const int merged_row = threadgroup_position_in_grid.y;
const int lane = thread_index_in_simdgroup;
const int num_heads = partial_out_shape[1];
const int first_row = merge_rows[3 * merged_row];
const int rows_between = merge_rows[3 * merged_row + 1];
const int num_splits = merge_rows[3 * merged_row + 2];

float maximum = -INFINITY;
for (int split = 0; split < num_splits; split++) {
  maximum = max(maximum, partial_sums[(long(first_row + split * rows_between) * num_heads + head) * 2]);
}
const float base = maximum == -INFINITY ? 0.0f : maximum;

for (int dim = lane; dim < HEAD_DIM; dim += 32) {
  float total = 0.0f;
  float sum = 0.0f;
  for (int split = 0; split < num_splits; split++) {
    const long partial = long(first_row + split * rows_between) * num_heads + head;
    // A split in which the row saw nothing has maximum -inf and contributes nothing: exp2(-inf) is 0.
    const float rescale = exp2(partial_sums[2 * partial] - base);
    total += partial_sums[2 * partial + 1] * rescale;
    sum += partial_out[partial * HEAD_DIM + dim] * rescale;
  }
  out[(long(merged_row) * num_heads + head) * HEAD_DIM + dim] = T(total == 0.0f ? 0.0f : sum / total);
}
