// A recording of a kernel, from the bytes that workbench/kernels/msl/recording_file.py describes.

const TYPES = { "|u1": Uint8Array, "<u2": Uint16Array, "<u4": Uint32Array, "<i8": BigInt64Array };

/** The kinds of events, as workbench/kernels/msl/recording.py numbers them. */
export const KIND = {
  LOAD: 0,
  STORE: 1,
  ATOMIC_LOAD: 2,
  ATOMIC_STORE: 3,
  ATOMIC_UPDATE: 4,
  BARRIER_WAIT: 8,
  BARRIER_PASSED: 9,
  SIMDGROUP_BARRIER: 10,
  SIMD_FUNCTION: 11,
  WATCH: 12,
  RETURN: 13,
  FAULT: 14,
};
export const LANES = 32;
const NO_ARRAY = 0xffff, VALUE_BYTES = 16, LANE_BYTES = 8, MEETING_COLUMNS = 7;

export const reads = (kind) => kind === KIND.LOAD || kind === KIND.ATOMIC_LOAD || kind === KIND.ATOMIC_UPDATE;
export const writes = (kind) => kind === KIND.STORE || kind === KIND.ATOMIC_STORE || kind === KIND.ATOMIC_UPDATE;

/** Bytes of an element. */
export const itemsize = (dtype) => dtype === "bool" ? 1 : Number(/\d+$/.exec(dtype)[0]) / 8;

export class KernelRun {
  /** @param {DataView} view The uncompressed bytes. */
  constructor(view) {
    const bytes = new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
    const end = bytes.indexOf(10) + 1;
    this.header = JSON.parse(new TextDecoder().decode(bytes.subarray(0, end)));
    this.columns = {};
    let start = end;
    for (const [name, dtype, count] of this.header.columns) {
      const Type = TYPES[dtype], length = count * Type.BYTES_PER_ELEMENT;
      // A copy, because typed arrays need an aligned place.
      this.columns[name] = new Type(bytes.slice(start, start + length).buffer);
      start += Math.ceil(length / 8) * 8;
    }
    const { columns } = this;
    this.numEvents = columns.kind.length;
    this.offsets = Float64Array.from(columns.offset, Number);
    this.sizes = this.header.arrays.map(({ dtype }) => itemsize(dtype));
    this.size = columns.active.length;
    this.instructionOf = new Uint32Array(this.numEvents);
    for (let i = 0; i < this.size; i++) for (const event of this.eventsOf(i)) this.instructionOf[event] = i;
    this.barriers = [0];
    for (let i = 0; i < this.size; i++) if (this.startsAnew(i)) this.barriers.push(i);
    this.table = new DataView(columns.values.buffer);
  }

  /** Whether an instruction passes a barrier, or is the first of a threadgroup. */
  startsAnew(i) {
    const event = this.first(i), { kind, group } = this.columns;
    return kind[event] === KIND.BARRIER_PASSED || (i > 0 && group[event] !== group[this.first(i - 1)]);
  }

  /** The events of an instruction, one per lane. */
  eventsOf(i) {
    const { order, starts } = this.columns;
    return order.subarray(starts[i], starts[i + 1]);
  }

  /** The first event of an instruction. */
  first(i) {
    return this.columns.order[this.columns.starts[i]];
  }

  /** The last instruction up to `now` that passes a barrier or begins a threadgroup. */
  lastBarrier(now) {
    let low = 0, high = this.barriers.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.barriers[middle] <= now) low = middle;
      else high = middle - 1;
    }
    return this.barriers[low];
  }

  /** The array of an event, or null. */
  arrayOf(event) {
    const number = this.columns.array[event];
    return number === NO_ARRAY ? null : this.header.arrays[number];
  }

  /** First element and number of elements of an access. */
  span(event) {
    const size = this.sizes[this.columns.array[event]], offset = this.offsets[event];
    return [Math.floor(offset / size), Math.max(1, Math.round(this.columns.bytes[event] / size))];
  }

  place(event) {
    return this.header.places[this.columns.place[event]];
  }

  /** The lines through which an event was reached, the outermost call first and its own line last. */
  lines(event) {
    return [...this.header.stacks[this.columns.stack[event]], this.place(event)];
  }

  /** The line of an event at a depth of calls, 0 for the kernel's own text; its own line if it lies less deep. */
  lineAt(event, depth) {
    const lines = this.lines(event);
    return lines[Math.min(depth, lines.length - 1)];
  }

  name(event) {
    return this.header.names[this.columns.name[event]];
  }

  /** The elements that an event loaded, stored or shows. */
  valuesOf(event) {
    const { has_value: has, bytes, kind, detail, value } = this.columns;
    if (!has[event] || !bytes[event]) return [];
    const dtype = kind[event] === KIND.WATCH ? DTYPES[detail[event]] : this.arrayOf(event).dtype;
    return elements(this.table, VALUE_BYTES * value[event], bytes[event], dtype);
  }

  /** Inputs and results of a simd function, for each lane a list of floats (or bytes if they are smaller). */
  meetingOf(event) {
    if (!this.meetingRow) {
      this.meetingRow = new Map();
      for (let e = 0; e < this.numEvents; e++) {
        if (this.columns.kind[e] === KIND.SIMD_FUNCTION) this.meetingRow.set(e, this.meetingRow.size);
      }
      this.lanes = new DataView(this.columns.lanes.buffer);
    }
    const row = this.meetingRow.get(event) * MEETING_COLUMNS, { meetings } = this.columns;
    const [given, got, ...places] = meetings.subarray(row, row + MEETING_COLUMNS);
    const read = (place, lane, count) => {
      const start = (place * LANES + lane) * LANE_BYTES, wide = count % 4 === 0;
      return elements(this.lanes, start, count, wide ? "float32" : "uint8");
    };
    return Array.from({ length: LANES }, (_, lane) => {
      const inputs = [];
      for (let part = 0; part * LANE_BYTES < given; part++) {
        inputs.push(...read(places[part], lane, Math.min(LANE_BYTES, given - part * LANE_BYTES)));
      }
      return { inputs, results: read(places[3], lane, got), source: read(places[4], lane, 1)[0] };
    });
  }
}

const DTYPES = [
  "float32",
  "float16",
  "bfloat16",
  "int32",
  "uint32",
  "int16",
  "uint16",
  "int8",
  "uint8",
  "bool",
  "int64",
  "uint64",
];

/** Bytes as elements of a dtype. */
export function elements(view, start, bytes, dtype) {
  const size = itemsize(dtype), found = [];
  for (let at = start; at + size <= start + bytes; at += size) found.push(READERS[dtype](view, at));
  return found;
}

function half(bits) {
  const exponent = bits >> 10 & 31, fraction = bits & 1023, sign = bits & 0x8000 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * fraction / 1024);
}

const scratch = new DataView(new ArrayBuffer(4));

function bfloat(bits) {
  scratch.setUint32(0, bits << 16);
  return scratch.getFloat32(0);
}

const READERS = {
  float32: (view, at) => view.getFloat32(at, true),
  float16: (view, at) => half(view.getUint16(at, true)),
  bfloat16: (view, at) => bfloat(view.getUint16(at, true)),
  int32: (view, at) => view.getInt32(at, true),
  uint32: (view, at) => view.getUint32(at, true),
  int16: (view, at) => view.getInt16(at, true),
  uint16: (view, at) => view.getUint16(at, true),
  int8: (view, at) => view.getInt8(at),
  uint8: (view, at) => view.getUint8(at),
  bool: (view, at) => view.getUint8(at),
  int64: (view, at) => Number(view.getBigInt64(at, true)),
  uint64: (view, at) => Number(view.getBigUint64(at, true)),
};
