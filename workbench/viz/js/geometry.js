// The few places where a layout depends on pixels. workbench/viz/layout/ has the same functions for the static
// pictures; a browser test compares the two on random batches.

/**
 * Widths that keep segments of very different sizes readable: every segment gets `least` pixels (an equal share when
 * there is no room for that), and the rest is divided in proportion to the sizes.
 * @returns A list of { x0, x1, broken }; a broken segment is drawn shorter than its share of the true scale.
 */
export function readableScale(sizes, width, least) {
  const total = sizes.reduce((sum, size) => sum + size, 0);
  if (!sizes.length || total <= 0) return [];
  const floor = Math.min(least, width / sizes.length);
  const rest = width - floor * sizes.length;
  let x = 0;
  return sizes.map((size) => {
    const wide = floor + (rest * size) / total;
    const segment = { x0: x, x1: x + wide, broken: wide < (width * size) / total - 1e-9 };
    x += wide;
    return segment;
  });
}

/** Columns of the pool picture: a power of two, so that a block keeps its place; the picture stays near square. */
export function poolColumns(numBlocks) {
  let columns = 32;
  while (columns * columns < numBlocks && columns < 512) columns *= 2;
  return columns;
}

/** The first KV position that a row at a position may attend to, in a window of tokens; 0 for none. */
export function firstSeen(position, window) {
  return window > 0 ? Math.max(0, position - window + 1) : 0;
}

/** The kind of a tile of a q x kv rectangle: "full", "diagonal" (partly masked) or "skipped" (fully masked). */
export function tileKind(q0, q1, k0, k1, window) {
  // Rows and columns are positions in the sequence; the last row of the tile sees the most.
  if (k0 > q1 - 1) return "skipped";
  if (k1 - 1 < firstSeen(q0, window)) return "skipped";
  const causal = k1 - 1 <= q0, inWindow = k0 >= firstSeen(q1 - 1, window);
  return causal && inWindow ? "full" : "diagonal";
}
