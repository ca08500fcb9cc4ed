// Marks of a launch as a whole: the threadgroups of its grid, and the turns of the kernel's outermost loops.

const PLANE = 6, MAX_CELL = 12, MAX_ROWS = 48;

/** Number of threadgroups along x, y and z. */
export const gridCounts = ({ header }) =>
  header.grid.map((threads, axis) => Math.ceil(threads / header.threadgroup[axis]));

/** The recorded threadgroups: { at: (x, y, z), group, now }. */
export function gridMarks(run, now) {
  const present = run.columns.group[run.first(now)];
  return run.header.threadgroups.map((at, group) => ({ at, group, now: group === present }));
}

/** Places of the rows of a grid, one along x for each y and z; of a large grid those with something recorded. */
export function gridRows(counts, marks, width) {
  const [columns, numRows, planes] = counts, cell = Math.max(0.5, Math.min(MAX_CELL, width / columns));
  const height = Math.max(4, Math.min(MAX_CELL, cell));
  let places = Array.from({ length: planes * numRows }, (_, i) => [i % numRows, Math.floor(i / numRows)]);
  if (places.length > MAX_ROWS) places = places.filter(([y, z]) => marks.some(({ at }) => at[1] === y && at[2] === z));
  const left = Math.max(0, planes * numRows - Math.min(places.length, MAX_ROWS));
  let top = 0;
  const rows = places.slice(0, MAX_ROWS).map(([y, z], index, all) => {
    if (index && all[index - 1][1] !== z) top += PLANE;
    top += height;
    return { y, z, top: top - height };
  });
  return { columns, cell, height, rows, left, bottom: top };
}

/** The recorded threadgroup at a point of a grid, or null. */
export function groupAt({ cell, height, rows }, marks, x, y) {
  const row = rows.find(({ top }) => y >= top && y < top + height);
  const beside = Math.max(0, 6 - cell) / 2; // a narrow cell is reached from beside it
  const isHit = ({ at }) =>
    at[1] === row.y && at[2] === row.z && x >= at[0] * cell - beside && x < (at[0] + 1) * cell + beside;
  return (row && marks.find(isHit)?.group) ?? null;
}

/**
 * The moments at which a simdgroup begins a turn of an outermost loop in the kernel's own text, such as a tile of keys.
 * A loop is what lies between a line and an earlier one, met before, to which the simdgroup goes back.
 * @returns {Uint8Array} 1 for each such moment.
 */
export function turns(run) {
  if (run.turns) return run.turns;
  const { group, thread } = run.columns, line = new Int32Array(run.size), before = new Int32Array(run.size).fill(-1);
  const latest = new Map(), met = new Map(), loops = [];
  for (let i = 0; i < run.size; i++) {
    const event = run.first(i), who = group[event] * 4096 + (thread[event] >> 5);
    line[i] = run.lineAt(event, 0).line;
    if (!line[i]) continue;
    before[i] = latest.get(who) ?? -1;
    latest.set(who, i);
    const lines = met.get(who) ?? met.set(who, new Set()).get(who);
    const from = before[i] < 0 ? 0 : line[before[i]];
    if (line[i] < from && lines.has(line[i])) loops.push([line[i], from]);
    lines.add(line[i]);
  }
  loops.sort(([a, b], [c, d]) => a - c || d - b);
  const outermost = [];
  for (const [first, last] of loops) {
    const outer = outermost.at(-1);
    if (outer && first <= outer[1]) outer[1] = Math.max(outer[1], last);
    else outermost.push([first, last]);
  }
  const loopOf = (at) => outermost.findIndex(([first, last]) => at >= first && at <= last);
  run.turns = Uint8Array.from(line, (own, i) => {
    const loop = own ? loopOf(own) : -1;
    if (loop < 0) return 0;
    const from = before[i] < 0 ? 0 : line[before[i]];
    return Number(loopOf(from) !== loop || (own < from && own === outermost[loop][0]));
  });
  return run.turns;
}
