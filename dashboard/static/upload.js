// A new batch: a file is chosen or dropped, uploaded, and submitted. The upload belongs to the page,
// not to a view: it continues while other views are shown.

import { endpointOf } from "./requests.js";
import { post } from "./session.js";
import { giveUp, transfer } from "./transfer.js";
import { find, randomKey, notice, say } from "./words.js";

let chosen = null;
let running = null;

const size = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });
function bytes(number) {
  const [unit, name] = number >= 1e9 ? [1e9, "GB"] : number >= 1e6 ? [1e6, "MB"] : [1e3, "kB"];
  return `${size.format(number / unit)} ${name}`;
}

/** Set up the view's form; a file that was chosen before is still chosen. */
export function wireForm() {
  const form = find("#new-form");
  if (!form || form.dataset.wired) return;
  form.dataset.wired = "yes";
  const input = find("#file");
  const zone = find("#drop-zone");
  input.addEventListener("change", () => choose(input.files[0]));
  zone.addEventListener("dragover", (event) => {
    event.preventDefault();
    zone.classList.add("over");
  });
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    choose(event.dataTransfer.files[0]);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    start(form);
  });
  // The user may have chosen a file before this ran.
  if (input.files[0]) choose(input.files[0]);
  else show();
}

function choose(file) {
  if (!file) return;
  chosen = file;
  find("#new-error").textContent = file.size ? "" : `${file.name} is empty.`;
  show();
  say(`${file.name} is chosen, ${bytes(file.size)}`);
}

function show() {
  find("#chosen").textContent = chosen ? `${chosen.name}, ${bytes(chosen.size)}` : "";
  // The field shows the name of a chosen file itself, but not of a dropped or earlier one.
  const files = new DataTransfer();
  if (chosen) files.items.add(chosen);
  find("#file").files = files.files;
  find("#start").disabled = running !== null;
}

async function start(form) {
  if (running) return;
  if (!chosen?.size) {
    find("#new-error").textContent = chosen ? `${chosen.name} is empty.` : "Choose a file first.";
    find("#file").focus();
    return;
  }
  const fields = Object.fromEntries(new FormData(form));
  const endpoints = form.dataset.endpoints.split(" ");
  running = { file: chosen, fields, endpoints, fileId: null, key: randomKey() };
  await run();
}

/** Upload the file and create the batch; finished steps are not repeated. */
async function run() {
  const { file, fields, endpoints, key } = running;
  running.control = new AbortController();
  find("#transfer").hidden = false;
  find("#transfer-again").hidden = true;
  find("#transfer-name").textContent = file.name;
  const rate = new Rate(file.size);
  try {
    running.fileId ??= await transfer(file, { signal: running.control.signal, onProgress: (sent) => rate.show(sent) });
    rate.done();
    const batch = await post("/v1/batches", {
      input_file_id: running.fileId, endpoint: await endpointOf(file, endpoints),
      completion_window: fields.window, on_invalid_line: fields.invalid,
      strict_parameters: fields.unknown === "refuse", idempotency_key: key,
    });
    end();
    say(`${file.name} is uploaded and its batch is created`);
    if (location.hash.startsWith("#/new")) location.hash = `#/batches/${batch.id}`;
  } catch (problem) {
    if (running?.control.signal.aborted) return;
    find("#transfer-words").textContent = `Stopped: ${problem.message}`;
    find("#transfer-again").hidden = false;
    notice(`${file.name} could not be uploaded: ${problem.message}`);
  }
}

function end() {
  running = null;
  chosen = null;
  find("#transfer").hidden = true;
  if (find("#new-form")) show();
}

async function stop() {
  const { file, control } = running;
  control.abort(new Error("given up"));
  end();
  say(`Upload of ${file.name} cancelled`);
  await giveUp(file);
}

/** Shows a transfer's progress, rate and remaining time. */
class Rate {
  constructor(total) {
    this.total = total;
    this.since = null;
  }

  show(sent) {
    const now = performance.now() / 1000;
    this.since ??= { now, sent };
    const seconds = now - this.since.now;
    const rate = seconds > 1 ? (sent - this.since.sent) / seconds : 0;
    const left = rate > 0 ? ` · ${bytes(rate)}/s · ${Math.ceil((this.total - sent) / rate)} s left` : "";
    find("#transfer-bar").value = sent / this.total;
    find("#transfer-words").textContent = `${bytes(sent)} of ${bytes(this.total)}${left}`;
  }

  done() {
    find("#transfer-bar").value = 1;
    find("#transfer-words").textContent = "Uploaded; creating the batch.";
  }
}

find("#transfer-stop")?.addEventListener("click", stop);
find("#transfer-again")?.addEventListener("click", run);
// A file dropped outside the drop zone must not replace the page.
for (const name of ["dragover", "drop"]) addEventListener(name, (event) => event.preventDefault());
addEventListener("beforeunload", (event) => {
  if (running && find("#transfer-again").hidden) event.preventDefault();
});
