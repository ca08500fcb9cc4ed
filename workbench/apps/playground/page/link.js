// Everything a person has set, in the part of the address after "#", which browsers do not send to servers: JSON,
// compressed, in the base64 of addresses.

async function through(bytes, stream) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());
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
    const { preset, ...config } = Object.fromEntries(new URLSearchParams(text));
    return { preset, config: Object.fromEntries(Object.entries(config).map(([name, value]) => [name, read(value)])) };
  }
  try {
    const packed = atob(text.replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = await through(
      Uint8Array.from(packed, (c) => c.charCodeAt(0)),
      new DecompressionStream("deflate-raw"),
    );
    const state = JSON.parse(new TextDecoder().decode(bytes));
    return state && typeof state === "object" ? state : null;
  } catch {
    return null;
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
