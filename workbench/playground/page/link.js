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

/** The state of a link; null where the text is none. */
export async function decodeState(text) {
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
