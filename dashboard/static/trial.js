// Cuts the first rows off a file, without reading the rest of it.

const GZIP = [0x1f, 0x8b];
const MAX_BYTES = 2 ** 28;
const [NEWLINE, QUOTE, BACKSLASH] = [10, 34, 92];
const [OPENING, CLOSING] = [new Set([91, 123]), new Set([93, 125])];

/** Return a file of the first rows of another one, decompressed. `cut` is how rows are separated:
 * "lines", "csv" with a header, or an "array" of objects. */
export async function firstRows(file, cut, count, ending) {
  const endOf = { lines: byLine, csv: byRecord, array: byElement }[cut](count);
  const reader = (await textOf(file)).getReader();
  const pieces = [];
  let size = 0;
  let end = null;
  while (end === null) {
    const { done, value } = await reader.read();
    if (done) break;
    end = endOf(value);
    pieces.push(end === null ? value : value.subarray(0, end));
    size += value.length;
    if (size > MAX_BYTES) throw new Error("The first rows are too large to be cut off: upload the whole file.");
  }
  // A truncated stream cannot be read to its end.
  reader.cancel().catch(() => {});
  if (cut === "array" && end !== null) pieces.push("]");
  return new File(pieces, file.name.replace(/\.gz$/i, "") + ending);
}

async function textOf(file) {
  const start = new Uint8Array(await file.slice(0, GZIP.length).arrayBuffer());
  const isPacked = GZIP.every((byte, place) => start[place] === byte);
  return isPacked ? file.stream().pipeThrough(new DecompressionStream("gzip")) : file.stream();
}

/** Return a function of the next bytes that returns the end of the last row wanted, or null. */
function byLine(left) {
  return (bytes) => {
    for (let place = 0; place < bytes.length; place += 1) {
      if (bytes[place] === NEWLINE && (left -= 1) === 0) return place + 1;
    }
    return null;
  };
}

function byRecord(count) {
  let left = count + 1;
  let isQuoted = false;
  return (bytes) => {
    for (let place = 0; place < bytes.length; place += 1) {
      if (bytes[place] === QUOTE) isQuoted = !isQuoted;
      else if (bytes[place] === NEWLINE && !isQuoted && (left -= 1) === 0) return place + 1;
    }
    return null;
  };
}

function byElement(left) {
  let depth = 0;
  let isQuoted = false;
  let isEscaped = false;
  return (bytes) => {
    for (let place = 0; place < bytes.length; place += 1) {
      const byte = bytes[place];
      if (isEscaped) isEscaped = false;
      else if (isQuoted) [isQuoted, isEscaped] = [byte !== QUOTE, byte === BACKSLASH];
      else if (byte === QUOTE) isQuoted = true;
      else if (OPENING.has(byte)) depth += 1;
      else if (CLOSING.has(byte) && (depth -= 1) === 1 && (left -= 1) === 0) return place + 1;
    }
    return null;
  };
}
