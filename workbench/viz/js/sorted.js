// Binary search in sorted lists.

/** Number of leading entries that are <= x. */
export function upperBound(sorted, x, key = (entry) => entry) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (key(sorted[middle]) <= x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The last entry whose key is <= x, or null when there is none. */
export function lastAtOrBefore(sorted, x, key) {
  const n = upperBound(sorted, x, key);
  return n ? sorted[n - 1] : null;
}
