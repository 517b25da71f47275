// Endpoint of a file of requests, guessed from its beginning.

const HEAD_BYTES = 65536;
const GZIP = [0x1f, 0x8b];

/** Return the endpoint of a file's first request if it is one of `endpoints`, else the first of
 * these. The server validates all lines. */
export async function endpointOf(file, endpoints) {
  const text = await headOf(file).catch(() => "");
  for (const [, url] of text.matchAll(/"url"\s*:\s*"(\/[^"\\]*)"/g)) {
    const found = endpoints.find((one) => one === url || one === `/v1${url}`);
    if (found) return found;
  }
  return endpoints[0];
}

async function headOf(file) {
  const head = file.slice(0, HEAD_BYTES);
  const start = new Uint8Array(await head.slice(0, GZIP.length).arrayBuffer());
  if (!GZIP.every((byte, place) => start[place] === byte)) return head.text();
  const reader = head.stream().pipeThrough(new DecompressionStream("gzip")).getReader();
  const { value } = await reader.read();
  // A truncated stream cannot be read to its end.
  reader.cancel().catch(() => {});
  return new TextDecoder().decode(value);
}
