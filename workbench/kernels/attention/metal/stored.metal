// A row of the cache: HEAD_DIM numbers, or codes of 8 bits and then their scale, see workbench/kernels/attention/stored.py.

template <typename S>
METAL_FUNC float scale_of(const device S* row, int head_dim) {
  return 1.0f;
}

METAL_FUNC float scale_of(const device int8_t* row, int head_dim) {
  return *(const device float*)(row + head_dim);
}
