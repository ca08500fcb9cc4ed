// Packets, in which a trace reaches a view: a JSON header and typed columns (see workbench/viz/layout/packet.py).

const TYPES = { d: Float64Array, f: Float32Array, i: Int32Array, H: Uint16Array, B: Uint8Array };

/** A typed array that grows; `data` may be longer than `length`. */
export class Column {
  constructor(code) {
    this.data = new TYPES[code](256);
    this.length = 0;
  }

  append(values) {
    const needed = this.length + values.length;
    if (needed > this.data.length) {
      const grown = new this.data.constructor(Math.max(needed, this.data.length * 2));
      grown.set(this.data.subarray(0, this.length));
      this.data = grown;
    }
    this.data.set(values, this.length);
    this.length = needed;
  }
}

/** Split a packet, given as a DataView, into its header, its typed arrays and its length; another one may follow. */
export function decodePacket(view) {
  // The columns are aligned to eight bytes within the packet; the arrays need it within the buffer.
  const aligned = view.byteOffset % 8 === 0;
  const bytes = aligned
    ? new Uint8Array(view.buffer, view.byteOffset, view.byteLength)
    : new Uint8Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
  const headerLength = new DataView(bytes.buffer, bytes.byteOffset, 4).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + headerLength)));
  const arrays = {};
  let offset = 4 + headerLength;
  for (const [name, code, count] of header.columns) {
    const type = TYPES[code];
    arrays[name] = new type(bytes.buffer, bytes.byteOffset + offset, count);
    offset += Math.ceil((count * type.BYTES_PER_ELEMENT) / 8) * 8;
  }
  return { header, arrays, length: offset };
}
