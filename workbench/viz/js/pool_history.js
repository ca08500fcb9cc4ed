// The state of every KV block at any step: the changes of each step, with a full copy every so often, so that
// stepping back costs no more than stepping forward.

// As in workbench/trace/readings/pool_state.py.
export const RESERVED = 0;
export const FREE = 1;
export const CACHED = 2;
export const OWNED = 3;
const KEYFRAME_STEPS = 256;

export class PoolHistory {
  constructor() {
    this.size = 0;
    this.keyframes = []; // the pool before step i * KEYFRAME_STEPS
    this.newest = null; // the pool after the last step received
    this.newestStep = -1;
    this.current = null; // the pool at the step last asked for
    this.column = null;
    this.bounds = [0];
    this.used = 0; // the highest block that any step has changed
  }

  resize(size) {
    this.size = size;
    this.newest = emptyPool(size);
    this.newestStep = -1;
    this.used = 0;
  }

  /** Add a step, whose changes are the entries [begin, end) of the arrays that `column(name)` returns. */
  append(step, column, begin, end) {
    this.column = column;
    this.bounds.push(end);
    const blocks = column("pool.block");
    for (let i = begin; i < end; i++) if (blocks[i] > this.used) this.used = blocks[i];
    if (step % KEYFRAME_STEPS === 0) this.keyframes.push(copyPool(this.newest));
    this.apply(this.newest, begin, end, step);
    this.newestStep = step;
  }

  /** The pool after the scheduling of a step: { state, owner, references, changed, freed } by block id. */
  at(step) {
    if (this.newestStep < 0) return this.newest;
    const target = Math.max(0, Math.min(step, this.newestStep));
    if (target === this.newestStep) return this.newest;
    let pool = this.current;
    if (!pool || pool.step > target || target - pool.step > KEYFRAME_STEPS) {
      const frame = Math.floor(target / KEYFRAME_STEPS);
      pool = copyPool(this.keyframes[frame]);
      pool.step = frame * KEYFRAME_STEPS - 1;
    }
    for (let s = pool.step + 1; s <= target; s++) this.apply(pool, this.bounds[s], this.bounds[s + 1], s);
    return (this.current = pool);
  }

  /** The first entry of a step that its scheduling made: those before it are of the end of the step before. */
  firstChange(step) {
    return this.bounds[step] + this.column("num_earlier_changes")[step];
  }

  /** The blocks that the scheduling of a step changed. */
  changedIn(step) {
    const end = this.bounds[step + 1];
    return end === undefined ? [] : this.column("pool.block").subarray(this.firstChange(step), end);
  }

  /** Enter the changes of a step; when a block that was there before the first one last changed is not known. */
  apply(pool, begin, end, step) {
    const changed = this.firstChange(step);
    apply(pool, this.column, begin, changed, step - 1);
    apply(pool, this.column, changed, end, step);
  }
}

function emptyPool(size) {
  return {
    step: -1,
    serial: 0,
    state: emptyState(size),
    owner: new Int32Array(size).fill(-1),
    references: new Uint16Array(size),
    changed: new Int32Array(size).fill(-1), // the last step in which a block changed
    freed: new Int32Array(size).fill(-1), // order in which evictable blocks were freed: the smallest is evicted first
    counts: [Math.min(1, size), Math.max(0, size - 1), 0, 0],
  };
}

function emptyState(size) {
  const state = new Uint8Array(size).fill(FREE);
  if (size) state[0] = RESERVED;
  return state;
}

function copyPool(pool) {
  return {
    ...pool,
    state: pool.state.slice(),
    owner: pool.owner.slice(),
    references: pool.references.slice(),
    changed: pool.changed.slice(),
    freed: pool.freed.slice(),
    counts: pool.counts.slice(),
  };
}

function apply(pool, column, begin, end, step) {
  const blocks = column("pool.block"), states = column("pool.state");
  const owners = column("pool.owner"), references = column("pool.references");
  for (let i = begin; i < end; i++) {
    const block = blocks[i], state = states[i];
    pool.counts[pool.state[block]]--;
    pool.counts[state]++;
    if (state === CACHED && pool.state[block] !== CACHED) pool.freed[block] = pool.serial++;
    pool.state[block] = state;
    pool.owner[block] = owners[i];
    pool.references[block] = references[i];
    pool.changed[block] = step;
  }
  pool.step = step;
}
