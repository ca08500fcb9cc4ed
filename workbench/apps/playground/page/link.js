// Everything a person has set, or a whole run, in the part of the address after "#", which browsers do not send to
// servers: JSON, or the lines of a trace file (workbench/viz/link.py), compressed, in the base64 of addresses.

/** Maximum size of what a link holds, unpacked, in bytes: a short link can unpack to anything. */
export const MAX_BYTES = 64 * 2 ** 20;

/** @throws {RangeError} More than MAX_BYTES come out of the stream. */
async function through(bytes, stream) {
  const parts = [], reader = new Blob([bytes]).stream().pipeThrough(stream).getReader();
  for (let size = 0;;) {
    const { done, value } = await reader.read();
    if (done) return new Uint8Array(await new Blob(parts).arrayBuffer());
    parts.push(value);
    size += value.byteLength;
    if (size > MAX_BYTES) {
      await reader.cancel();
      throw new RangeError(`the link unpacks to more than ${MAX_BYTES / 2 ** 20} MB`);
    }
  }
}

async function unpack(text) {
  const packed = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
  return await through(Uint8Array.from(packed, (c) => c.charCodeAt(0)), new DecompressionStream("deflate-raw"));
}

/** The state as the text of a link. */
export async function encodeState(state) {
  const bytes = await through(
    new TextEncoder().encode(JSON.stringify(state)),
    new CompressionStream("deflate-raw"),
  );
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** The state of a link, compressed or written by hand (preset=bursts&max_num_seqs=4); null if the text is neither. */
export async function decodeState(text) {
  if (text.startsWith("preset=")) {
    const { preset, router, replicas, ...config } = Object.fromEntries(new URLSearchParams(text));
    const settings = Object.fromEntries(Object.entries(config).map(([name, value]) => [name, read(value)]));
    return { preset, config: settings, ...replicas && { replicas: Number(replicas) }, ...router && { router } };
  }
  try {
    const state = JSON.parse(new TextDecoder().decode(await unpack(text)));
    return state && typeof state === "object" ? state : null;
  } catch {
    return null;
  }
}

/**
 * Say that a name of a link is not known; "" for one that is, or for none.
 * @param {string} kind What it names, such as "preset".
 * @param {unknown} name
 * @param {string[]} known All names.
 */
export function unknownName(kind, name, known) {
  if (name === undefined || known.includes(String(name))) return "";
  const given = String(name).slice(0, 40),
    [nearest] = known.toSorted((a, b) => distance(given, a) - distance(given, b));
  const like = distance(given, nearest) <= 2 ? `did you mean "${nearest}"?` : `there are ${known.join(", ")}.`;
  return `The link names a ${kind} "${given}", which does not exist: ${like}`;
}

/** Number of characters to add, drop or replace that makes one word of another. */
function distance(a, b) {
  let row = [...b, ""].map((_, i) => i);
  for (let i = 1; i <= a.length; i++) {
    const next = [i];
    for (let j = 1; j <= b.length; j++) {
      next.push(Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + Number(a[i - 1] !== b[j - 1])));
    }
    row = next;
  }
  return row[b.length];
}

/**
 * The run of a link such as #step=12&request=sky&run=pVfb...: the bytes of its trace file, and the place to open it at.
 * @returns {Promise<{ run: ArrayBuffer, place: object } | null>} Null if the text does not hold a run.
 * @throws {Error} It holds one that cannot be read; the message says why.
 */
export async function decodeRun(text) {
  const given = new URLSearchParams(text), run = given.get("run");
  if (!run) return null;
  const step = given.has("step") ? Number(given.get("step")) : null;
  const place = { step: Number.isInteger(step) ? step : null, follow: false, request: given.get("request") };
  try {
    return { run: (await unpack(run)).buffer, place };
  } catch (problem) {
    const why = problem instanceof RangeError ? problem.message : "it is cut off or damaged";
    throw new Error(`The run of this link cannot be read: ${why}. Ask for the whole link, or for the trace file.`);
  }
}

/** A value of a link that was written by hand: a number, true or false, or a word. */
function read(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}
