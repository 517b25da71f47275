// Downloads rows as one file. The server returns it in pieces, each after the rows of the one
// before; the browser joins them, on its disk where they are large.

import { request } from "./session.js";
import { find, messageOf, notice, say } from "./words.js";

const NEWLINE = 10;
const MAX_TRIES = 5;
const TOO_MANY_REQUESTS = 429;
const MAX_WAIT = 60;
const TYPES = { csv: "text/csv", parquet: "application/vnd.apache.parquet" };
const sleep = (seconds, signal) => new Promise((resolve) => {
  setTimeout(resolve, seconds * 1000);
  signal.addEventListener("abort", resolve, { once: true });
});
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

async function run(button, format, { export: path, name, running: isPartial }) {
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
    signal.throwIfAborted();
    if (!rows) throw new Error("no row matches.");
    save(file, `${name.split("/").pop().replace(/\.\w{1,8}(\.gz)?$/, "")}.answers.${format}`);
    say(`${rows.toLocaleString()} rows are downloaded${isPartial ? "; the batch is still running" : ""}.`);
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
    if (piece.after === after) await sleep(1, signal); // the rows of a running batch are being indexed
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
    let [problem, wait, mayPass] = [null, 2 ** tried / 4, true];
    try {
      const answer = await request(path, { signal });
      if (answer.ok) return pieceOf(new Uint8Array(await answer.arrayBuffer()));
      problem = new Error(messageOf(await answer.text(), answer.status));
      mayPass = answer.status >= 500 || answer.status === TOO_MANY_REQUESTS;
      wait = Math.min(Number(answer.headers.get("Retry-After")) || wait, MAX_WAIT);
    } catch (lost) {
      problem = lost;
    }
    if (!mayPass || signal.aborted || tried === MAX_TRIES) throw problem;
    await sleep(wait, signal);
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
