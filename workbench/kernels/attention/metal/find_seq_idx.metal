// The sequence that packed query row `row` belongs to: the largest i with cu_seqlens_q[i] <= row.
//
//     cu_seqlens_q   0   1   1       4          a decode, a sequence without rows, a chunk of 3 rows
//     row            0 | 1   2   3
//     sequence       0 | 2   2   2
//
// Sequences without rows share their start with the next one, and the largest index owns the row, so they are
// skipped. A template, because MLX passes `constant` pointers for inputs of fewer than 8 elements and `device`
// pointers for longer ones: the same batch with one more sequence has another pointer type.
template <typename IntPointer>
METAL_FUNC int find_seq_idx(IntPointer cu_seqlens_q, int num_seqs, int row) {
  int low = 0;
  int high = num_seqs;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (cu_seqlens_q[middle] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}
