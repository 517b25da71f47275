// Downloads rows as one file. The server returns it in pieces, each after the rows of the one
// before; the browser joins them, on its disk where they are large.

import { request } from "./session.js";
import { find, messageOf, notice, say } from "./words.js";

const NEWLINE = 10;
const MAX_TRIES = 5;
const TYPES = { csv: "text/csv", parquet: "application/vnd.apache.parquet" };
const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));
let running = null;

/** Start the download of a button, or stop the one that it shows. */
export function wireExport() {
  document.body.addEventListener("click", ({ target }) => {
    const button = target.closest("#export [data-format]");
    if (!button) return;
    if (running) running.abort();
    else run(button, button.dataset.format, button.closest("#export").dataset);
  });
}

async function run(button, format, { export: path, name }) {
  running = new AbortController();
  const { signal } = running;
  const words = button.textContent;
  const others = [...document.querySelectorAll("#export [data-format]")].filter((other) => other !== button);
  others.forEach((other) => (other.disabled = true));
  const show = (count) => {
    button.textContent = `Cancel (${count.toLocaleString()} rows)`;
    if (!button.isConnected) running.abort(new Error("another page was opened."));
  };
  try {
    show(0);
    const { file, rows } = await join(`${path}&format=${format}`, TYPES[format], signal, show);
    save(file, `${name.split("/").pop().replace(/\.\w{1,8}(\.gz)?$/, "")}.answers.${format}`);
    say(`${rows.toLocaleString()} rows are downloaded.`);
  } catch (problem) {
    if (!signal.aborted || !button.isConnected) notice(`The rows could not be downloaded: ${problem.message}`);
  }
  running = null;
  button.textContent = words;
  others.forEach((other) => (other.disabled = false));
}

/** Return the file with all pieces and its number of rows. */
async function join(path, type, signal, onRows) {
  const parts = [];
  const groups = [];
  let [rows, start, columns, after] = [0, 0, "", 0];
  while (after !== null) {
    const given = new URLSearchParams({ after, start, columns });
    const piece = await next(`${path}&${given}`, signal);
    const [data, group] = piece.split(piece.about || 0);
    parts.push(data);
    if (group.size) groups.push(group);
    start += data.size;
    rows += piece.rows;
    if (piece.after === after) await sleep(1); // the rows of a running batch are being indexed
    ({ after, columns = "" } = piece);
    onRows(rows);
  }
  if (groups.length) {
    // The footer of Parquet names the place of each group.
    const about = new Blob(groups);
    const given = new URLSearchParams({ columns, end: [rows, groups.length, about.size] });
    const piece = await next(`${path}&${given}`, signal);
    const [begin, end] = piece.split(piece.about);
    parts.push(begin, about, end);
  }
  return { file: new Blob(parts, { type }), rows };
}

/** Fetch a piece; failures that may pass are repeated. */
async function next(path, signal) {
  for (let tried = 1; ; tried += 1) {
    const answer = await request(path, { signal }).catch((problem) => {
      if (signal.aborted || tried === MAX_TRIES) throw problem;
    });
    if (answer?.ok) return pieceOf(new Uint8Array(await answer.arrayBuffer()));
    if (answer && (answer.status < 500 || tried === MAX_TRIES)) {
      throw new Error(messageOf(await answer.text(), answer.status));
    }
    await sleep(2 ** tried / 4);
    signal.throwIfAborted();
  }
}

/** Return the values of a piece, and a function that splits its bytes before the last ones. */
function pieceOf(bytes) {
  const head = bytes.indexOf(NEWLINE);
  const split = (last) => [bytes.subarray(head + 1, bytes.length - last), bytes.subarray(bytes.length - last)]
    .map((some) => new Blob([some]));
  return { ...JSON.parse(new TextDecoder().decode(bytes.subarray(0, head))), split };
}

function save(file, name) {
  const link = document.createElement("a");
  const url = URL.createObjectURL(file);
  Object.assign(link, { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
