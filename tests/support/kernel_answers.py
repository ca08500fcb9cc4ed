"""Right answers to the puzzles about kernels, and wrong ones with what their hints have to say."""

RIGHT = {}
RIGHT["map"] = "uint i = thread_position_in_grid.x; y[i] = x[i] + 10.0f;"
RIGHT["zip"] = "uint i = thread_position_in_grid.x; y[i] = a[i] * b[i];"
RIGHT["guard"] = "uint i = thread_position_in_grid.x; if (i < uint(x_shape[0])) y[i] = x[i] + 10.0f;"
RIGHT["two_dimensions"] = """
const int row = thread_position_in_grid.y, column = thread_position_in_grid.x;
if (row < x_shape[0] && column < x_shape[1]) {
  const int i = row * x_shape[1] + column;
  y[i] = x[i] + 10.0f;
}"""
RIGHT["broadcast"] = """
const int row = thread_position_in_grid.y, column = thread_position_in_grid.x;
if (row < a_shape[0] && column < b_shape[0]) {
  y[row * b_shape[0] + column] = a[row] + b[column];
}"""
RIGHT["threadgroup_memory"] = """
threadgroup float own[64];
const uint i = thread_position_in_threadgroup.x;
own[i] = x[thread_position_in_grid.x];
threadgroup_barrier(mem_flags::mem_threadgroup);
y[thread_position_in_grid.x] = own[63 - i];
"""
RIGHT["pooling"] = """
threadgroup float own[66];
const int i = thread_position_in_threadgroup.x, place = thread_position_in_grid.x, n = x_shape[0];
own[i + 2] = place < n ? x[place] : 0.0f;
if (i < 2) own[i] = place >= 2 && place - 2 < n ? x[place - 2] : 0.0f;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (place < n) y[place] = own[i + 2] + own[i + 1] + own[i];
"""
RIGHT["dot"] = """
threadgroup float sums[8];
const int i = thread_position_in_threadgroup.x;
float sum = 0.0f;
for (int j = i; j < a_shape[0]; j += 256) sum += a[j] * b[j];
sum = simd_sum(sum);
if (thread_index_in_simdgroup == 0) sums[simdgroup_index_in_threadgroup] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simdgroup_index_in_threadgroup == 0) {
  const float all = simd_sum(thread_index_in_simdgroup < 8 ? sums[thread_index_in_simdgroup] : 0.0f);
  if (i == 0) y[0] = all;
}
"""
RIGHT["scan"] = """
threadgroup float sums[N];
const int i = thread_position_in_threadgroup.x;
float sum = x[i];
sums[i] = sum;
for (int distance = 1; distance < N; distance *= 2) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float before = i >= distance ? sums[i - distance] : 0.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sum += before;
  sums[i] = sum;
}
y[i] = sum;
"""
RIGHT["matrix_product"] = """
const int column = threadgroup_position_in_grid.x * 8, row = threadgroup_position_in_grid.y * 8;
const int inner = a_shape[1], columns = b_shape[1];
simdgroup_float8x8 left, right, sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
for (int k = 0; k < inner; k += 8) {
  simdgroup_load(left, a + row * inner + k, inner);
  simdgroup_load(right, b + k * columns + column, columns);
  simdgroup_multiply_accumulate(sum, left, right, sum);
}
simdgroup_store(sum, y + row * columns + column, columns);
"""
RIGHT["transpose"] = """
threadgroup float tile[32][33];
const uint2 place = thread_position_in_threadgroup.xy, corner = 32 * threadgroup_position_in_grid.xy;
const int rows = x_shape[0], columns = x_shape[1];
tile[place.y][place.x] = x[(corner.y + place.y) * columns + corner.x + place.x];
threadgroup_barrier(mem_flags::mem_threadgroup);
y[(corner.x + place.y) * rows + corner.y + place.x] = tile[place.x][place.y];
"""
RIGHT["softmax"] = """
const int lane = thread_position_in_threadgroup.x, n = x_shape[1];
const device float* row = x + thread_position_in_grid.y * n;
float largest = -INFINITY;
for (int i = lane; i < n; i += 32) largest = max(largest, row[i]);
largest = simd_max(largest);
float sum = 0.0f;
for (int i = lane; i < n; i += 32) sum += exp(row[i] - largest);
sum = simd_sum(sum);
for (int i = lane; i < n; i += 32) y[thread_position_in_grid.y * n + i] = exp(row[i] - largest) / sum;
"""
RIGHT["online_softmax"] = """
const int lane = thread_position_in_threadgroup.x, n = x_shape[1];
const device float* row = x + thread_position_in_grid.y * n;
float largest = -INFINITY, sum = 0.0f;
for (int i = lane; i < n; i += 32) {
  const float score = row[i], before = largest;
  largest = max(largest, score);
  sum = sum * exp(before - largest) + exp(score - largest);
}
const float all = simd_max(largest);
sum = simd_sum(largest == -INFINITY ? 0.0f : sum * exp(largest - all));
for (int i = lane; i < n; i += 32) y[thread_position_in_grid.y * n + i] = exp(row[i] - all) / sum;
"""
RIGHT["find_seq_idx"] = """
const int row = thread_position_in_grid.x;
int low = 0, high = cu_seqlens_q_shape[0] - 1;
if (row < cu_seqlens_q[high]) {
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (cu_seqlens_q[middle] <= row) low = middle; else high = middle;
  }
  y[row] = low;
}
"""
RIGHT["gather"] = """
const int d = thread_position_in_grid.x, position = thread_position_in_grid.y;
const int block = block_table[position / BLOCK_SIZE];
y[position * 32 + d] = cache[(block * BLOCK_SIZE + position % BLOCK_SIZE) * 32 + d];
"""
RIGHT["paged_row"] = """
const int d = thread_position_in_threadgroup.x, i = thread_position_in_grid.y;
const float query = q[i * 32 + d] / sqrt(32.0f);
float largest = -INFINITY, sum = 0.0f, output = 0.0f;
for (int position = 0; position < lengths[i]; position++) {
  const int block = block_table[i * block_table_shape[1] + position / BLOCK_SIZE];
  const int slot = block * BLOCK_SIZE + position % BLOCK_SIZE;
  const float score = simd_sum(query * keys[slot * 32 + d]);
  const float before = largest;
  largest = max(largest, score);
  const float rescale = exp(before - largest), weight = exp(score - largest);
  sum = sum * rescale + weight;
  output = output * rescale + weight * values[slot * 32 + d];
}
y[i * 32 + d] = output / sum;
"""

RIGHT["paged_tile"] = """
const float other_maximum = shared_sums[2 * place.row];
const float common = max(row_state.maximum, other_maximum);
const float base = common == -INFINITY ? 0.0f : common;
const float rescale = exp2(row_state.maximum - base), other_rescale = exp2(other_maximum - base);
row_state.total = row_state.total * rescale + shared_sums[2 * place.row + 1] * other_rescale;
row_state.maximum = common;
"""


def changed(name, old, new):
    """The right answer with a mistake."""
    assert old in RIGHT[name], (name, old)
    return RIGHT[name].replace(old, new)


NO_BARRIER = ("threadgroup_barrier(mem_flags::mem_threadgroup);", "")
WRONG = {
    "map": [
        ("uint i = thread_position_in_grid.x; y[i] = x[i];", "Which number has to be added?"),
        ("uint i = thread_position_in_grid.x; y[i + 1] = x[i] + 10.0f;", "an index that is one too far"),
        ("uint i = thread_position_in_grid.x; y[i] = x[i + 1] + 10.0f;", "an index that is one too far"),
        ("uint i = thread_position_in_threadgroup.x; y[i] = x[i] + 10.0f;", "each element of an output has one thread"),
        (
            "for (int i = 0; i < x_shape[0]; i++) if (i == int(thread_position_in_grid.x)) "
            "y[i] = x[i] + x[0] * 0 + 10.0f;",
            "loads each element of x",
        ),
        ("y[i] = x[i] + 10;", "undeclared"),
    ],
    "zip": [
        ("uint i = thread_position_in_grid.x; y[i] = a[i] + b[i];", "product"),
        ("uint i = thread_position_in_grid.x; y[i] = a[i] * b[0];", "product"),
        ("uint i = thread_position_in_grid.x; y[i] = a[i] * b[i + 1];", "one too far"),
        (
            "uint i = thread_position_in_grid.x; float s = 0; for (uint j = 0; j <= i; j++) s += a[j]; "
            "y[i] = a[i] * b[i] + 0.0f * s;",
            "loads each element of",
        ),
    ],
    "guard": [
        (RIGHT["map"], "nothing to do"),
        (changed("guard", "i < uint", "i <= uint"), "nothing to do"),
        (changed("guard", "uint(x_shape[0])", "32"), "nothing to do"),
        (changed("guard", "uint(x_shape[0])", "uint(x_shape[0]) - 1"), "Which thread writes"),
    ],
    "two_dimensions": [
        (changed("two_dimensions", "row * x_shape[1] + column", "row * x_shape[0] + column"), "one thread"),
        (changed("two_dimensions", "row < x_shape[0] && ", ""), "nothing to do"),
        (changed("two_dimensions", "column < x_shape[1]", "true"), "one thread"),
        (
            changed(
                "two_dimensions",
                "position_in_grid.y, column = thread_position_in_grid.x",
                "position_in_grid.x, column = thread_position_in_grid.y",
            ),
            "Which thread writes",
        ),
    ],
    "broadcast": [
        (changed("broadcast", "a[row] + b[column]", "a[column] + b[row]"), "one too far"),
        (changed("broadcast", "a[row] + b[column]", "a[row] + b[0]"), "b to the column"),
        (changed("broadcast", "y[row * b_shape[0] + column]", "y[column * a_shape[0] + row]"), "b to the column"),
        (changed("broadcast", "a[row] +", "a[row] + 0 * a[0] +"), "loads each element of a"),
    ],
    "threadgroup_memory": [
        (changed("threadgroup_memory", *NO_BARRIER), "threadgroup_barrier between"),
        (
            "const uint i = thread_position_in_threadgroup.x, g = thread_position_in_grid.x; y[g] = x[g - i + 63 - i];",
            "another thread's place",
        ),
        (changed("threadgroup_memory", "own[63 - i]", "own[64 - i]"), "Is the threadgroup array as long"),
        (changed("threadgroup_memory", "63 - i", "62 - i & 63"), "partner of place i"),
        (
            changed("threadgroup_memory", "threadgroup_barrier", "if (i < 32) threadgroup_barrier"),
            "threadgroup_barrier between",
        ),
        (changed("threadgroup_memory", "float own[64]", "float own[640]"), "bytes of threadgroup memory"),
    ],
    "pooling": [
        (
            "const int i = thread_position_in_grid.x; if (i < x_shape[0]) "
            "y[i] = x[i] + (i > 0 ? x[i - 1] : 0) + (i > 1 ? x[i - 2] : 0);",
            "loads each element of x",
        ),
        (changed("pooling", *NO_BARRIER), "threadgroup_barrier between"),
        (
            changed(
                "pooling",
                "if (i < 2) own[i] = place >= 2 && place - 2 < n ? x[place - 2] : 0.0f;",
                "if (i < 2) own[i] = 0.0f;",
            ),
            "the threadgroup before",
        ),
        (changed("pooling", "if (place < n) y", "y"), "nothing to do"),
        (changed("pooling", "own[i + 1] + own[i]", "own[i + 1] + own[i + 1]"), "the threadgroup before"),
    ],
    "dot": [
        (
            "float sum = 0; for (int j = 0; j < a_shape[0]; j++) sum += a[j] * b[j]; "
            "if (thread_position_in_grid.x == 0) y[0] = sum;",
            "loads each element of a 256 times",
        ),
        (
            "if (thread_position_in_grid.x == 0) { float sum = 0; for (int j = 0; j < a_shape[0]; j++) "
            "sum += a[j] * b[j]; "
            "y[0] = sum; }",
            "no lane adds for the others",
        ),
        (changed("dot", *NO_BARRIER), "threadgroup_barrier between"),
        (changed("dot", "j < a_shape[0]", "j < a_shape[0] / 2"), "Thread i takes the elements"),
        (
            changed(
                "dot",
                "thread_index_in_simdgroup < 8 ? sums[thread_index_in_simdgroup] : 0.0f",
                "sums[thread_index_in_simdgroup % 4]",
            ),
            "Thread i takes the elements",
        ),
    ],
    "scan": [
        (
            "const int i = thread_position_in_threadgroup.x; float s = 0; "
            "for (int j = 0; j <= i; j++) s += x[j]; y[i] = s;",
            "loads each element of x",
        ),
        (changed("scan", "y[i] = sum;", "y[i] = sum - x[i];"), "includes x[i]"),
        (
            changed(
                "scan",
                "sums[i - distance] : 0.0f;\n  threadgroup_barrier(mem_flags::mem_threadgroup);",
                "sums[i - distance] : 0.0f;",
            ),
            "threadgroup_barrier between",
        ),
        (changed("scan", "distance *= 2", "distance += 1"), "A sum of 2 * d"),
        (
            changed(
                "scan", "  sums[i] = sum;\n}", "  sums[i] = sum;\n  threadgroup_barrier(mem_flags::mem_threadgroup);\n}"
            ),
            "barriers, and",
        ),
        (changed("scan", "i >= distance", "i > distance"), "A sum of 2 * d"),
    ],
    "matrix_product": [
        (
            "const int lane = thread_index_in_simdgroup, row0 = threadgroup_position_in_grid.y * 8; "
            "const int column0 = threadgroup_position_in_grid.x * 8; for (int e = lane; e < 64; e += 32) { "
            "float s = 0; for (int k = 0; k < a_shape[1]; k++) s += a[(row0 + e / 8) * a_shape[1] + k] * "
            "b[k * b_shape[1] + column0 + e % 8]; y[(row0 + e / 8) * b_shape[1] + column0 + e % 8] = s; }",
            "no matrix product is used",
        ),
        (changed("matrix_product", "k += 8", "k += 16"), "Tile (r, c) of y"),
        (changed("matrix_product", "b + k * columns + column", "b + column * columns + k"), ""),
        (
            changed(
                "matrix_product",
                "simdgroup_multiply_accumulate(sum, left, right, sum);",
                "simdgroup_multiply_accumulate(sum, left, right, sum); simdgroup_float8x8 spare = "
                "make_filled_simdgroup_matrix<float, 8, 8>(0.0f); "
                "simdgroup_multiply_accumulate(spare, left, right, spare);",
            ),
            "a pair of tiles twice",
        ),
        (changed("matrix_product", "left, right, sum);", "right, left, sum);"), "Tile (r, c) of y"),
    ],
    "transpose": [
        (
            "const uint2 p = thread_position_in_grid.xy; y[p.x * x_shape[0] + p.y] = x[p.y * x_shape[1] + p.x];",
            "stores to y are scattered",
        ),
        (
            "const uint2 p = thread_position_in_grid.xy; const uint r = p.y * x_shape[1] + p.x; "
            "const uint rows = x_shape[0]; y[r] = x[r % rows * x_shape[1] + r / rows];",
            "loads of x are scattered",
        ),
        (changed("transpose", "[32][33]", "[32][32]"), "33 elements long"),
        (changed("transpose", *NO_BARRIER), "threadgroup_barrier between"),
        (changed("transpose", "tile[place.x][place.y];", "tile[place.y][place.x];"), "The tile moves"),
    ],
    "softmax": [
        (changed("softmax", "largest = simd_max(largest);", "largest = 0.0f;"), "subtract the row's maximum"),
        (changed("softmax", "sum = simd_sum(sum);", ""), "those of other lanes"),
        (
            changed(
                "softmax",
                "largest = simd_max(largest);",
                "largest = simd_max(largest); for (int i = lane; i < n; i += 32) "
                "largest = max(largest, row[i]); largest = simd_max(largest);",
            ),
            "loads each element of x",
        ),
        (
            "const int n = x_shape[1], lane = thread_position_in_threadgroup.x; "
            "const device float* row = x + thread_position_in_grid.y * n; if (lane == 0) { float m = row[0], s = 0; "
            "for (int i = 1; i < n; i++) m = max(m, row[i]); for (int i = 0; i < n; i++) s += exp(row[i] - m); "
            "for (int i = 0; i < n; i++) y[thread_position_in_grid.y * n + i] = exp(row[i] - m) / s; }",
            "each lane works alone",
        ),
    ],
    "online_softmax": [
        (RIGHT["softmax"], "keep a running maximum"),
        (changed("online_softmax", "sum = sum * exp(before - largest) +", "sum = sum +"), "the sum so far shrinks"),
        (changed("online_softmax", "sum * exp(largest - all)", "sum"), "the sum so far shrinks"),
        (changed("online_softmax", "float largest = -INFINITY, sum", "float largest = 0.0f, sum"), ""),
    ],
    "find_seq_idx": [
        (
            "const int row = thread_position_in_grid.x; int s = 0, n = cu_seqlens_q_shape[0] - 1; "
            "if (row < cu_seqlens_q[n]) { while (cu_seqlens_q[s + 1] <= row) s++; y[row] = s; }",
            "halve the range",
        ),
        (changed("find_seq_idx", "<= row) low", "< row) low"), "the last one owns it"),
        (changed("find_seq_idx", "if (row < cu_seqlens_q[high]) {", "{"), "nothing to do"),
        (changed("find_seq_idx", "high - low > 1", "high - low > 2"), "the last one owns it"),
    ],
    "gather": [
        (
            changed("gather", "block_table[position / BLOCK_SIZE]", "position / BLOCK_SIZE"),
            "NaN stands in blocks of others",
        ),
        (changed("gather", "block_table[position / BLOCK_SIZE]", "block_table[position % BLOCK_SIZE]"), ""),
        (changed("gather", "+ position % BLOCK_SIZE", ""), "The slot is block"),
        (
            changed("gather", "cache[(block", "0 * cache[block * BLOCK_SIZE * 32 + d] + cache[(block"),
            "loads each element of cache",
        ),
    ],
    "paged_row": [
        (changed("paged_row", "position < lengths[i]", "position <= lengths[i]"), ""),
        (changed("paged_row", " / sqrt(32.0f)", ""), "Rescale both"),
        (changed("paged_row", "output = output * rescale +", "output = output +"), "Rescale both"),
        (changed("paged_row", "sum = sum * rescale +", "sum = sum +"), "Rescale both"),
        (changed("paged_row", "simd_sum(query", "(query"), ""),
        (
            changed(
                "paged_row",
                "const float before",
                "largest = max(largest, keys[slot * 32 + d] * 0 + largest); const float before",
            ),
            "loads each element of keys",
        ),
    ],
    "paged_tile": [
        (
            changed(
                "paged_tile",
                "const float common = max(row_state.maximum, other_maximum)",
                "const float common = -INFINITY",
            ),
            "",
        ),
        (changed("paged_tile", "row_state.total * rescale +", "row_state.total +"), "The larger maximum"),
        (changed("paged_tile", "row_state.maximum = common;", ""), "The larger maximum"),
        (changed("paged_tile", "exp2(other_maximum - base)", "exp(other_maximum - base)"), "The larger maximum"),
        ("", "the answer is empty"),
        ("float rescale = 1.0f;", "other_rescale"),
    ],
}
