// A new batch: a file is chosen or dropped, uploaded, and submitted. The upload belongs to the page,
// not to a view: it continues while other views are shown.

import { check, recipeOf } from "./check.js";
import { post } from "./session.js";
import { giveUp, transfer } from "./transfer.js";
import { firstRows } from "./trial.js";
import { find, randomKey, notice, say } from "./words.js";

const TYPING_SECONDS = 0.4;
let chosen = null;
let running = null;
let typing = null;
let checks = 0;

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
  form.addEventListener("input", (event) => {
    if (event.target === input || event.target.name === "window") return;
    allow(false);
    clearTimeout(typing);
    typing = setTimeout(look, TYPING_SECONDS * 1000);
  });
  find("#try").addEventListener("click", () => start(form, true));
  find("#check").addEventListener("click", insertColumn);
  restore(form);
  // The user may have chosen a file before this ran.
  if (input.files[0]) choose(input.files[0]);
  else show();
}

function choose(file) {
  if (!file) return;
  chosen = file;
  find("#check").replaceChildren();
  show();
}

function show() {
  find("#chosen").textContent = chosen ? `${chosen.name}, ${bytes(chosen.size)}` : "";
  // The field shows the name of a chosen file itself, but not of a dropped or earlier one.
  const files = new DataTransfer();
  if (chosen) files.items.add(chosen);
  find("#file").files = files.files;
  look();
}

/** Have the server check the chosen file, and allow its upload if it is a batch. */
async function look() {
  clearTimeout(typing);
  const form = find("#new-form");
  const number = (checks += 1);
  allow(false);
  if (!form) return;
  find("#new-error").textContent = chosen && !chosen.size ? `${chosen.name} is empty.` : "";
  if (!chosen?.size) {
    find("#check").replaceChildren();
    find("#table-fields").hidden = true;
    return;
  }
  if (!find("#checked")) find("#check").textContent = "Checking the file…";
  try {
    if (!(await check(chosen, fieldsOf(form), () => number === checks))) return;
  } catch (problem) {
    if (!find("#new-form") || number !== checks) return;
    find("#check").replaceChildren();
    find("#new-error").textContent = `${chosen.name} could not be checked: ${problem.message}`;
    return;
  }
  const { dataset } = find("#checked");
  find("#table-fields").hidden = !("table" in dataset);
  allow("ready" in dataset, "try" in dataset);
  say((find("#check-errors") || find("#checked p")).textContent.replace(/\s+/g, " ").trim());
}

/** Enable the buttons, unless an upload runs. */
function allow(isReady, canTry = false) {
  if (!find("#start")) return;
  find("#start").disabled = running !== null || !isReady;
  find("#try").hidden = !canTry;
  find("#try").disabled = running !== null || !isReady;
}

const fieldsOf = (form) => Object.fromEntries(new FormData(form));

function insertColumn(event) {
  const button = event.target.closest("[data-insert]");
  if (!button) return;
  const prompt = find("#prompt");
  prompt.focus();
  prompt.setRangeText(button.dataset.insert, prompt.selectionStart, prompt.selectionEnd, "end");
  prompt.dispatchEvent(new Event("input", { bubbles: true }));
}

// The form after a trial, for the whole file; another tenant of this tab must not see it.
const saved = () => `tidemill-form ${find("#tenant").textContent}`;

function restore(form) {
  const fields = JSON.parse(sessionStorage.getItem(saved()) || "{}");
  for (const [name, value] of Object.entries(fields)) {
    if (form.elements[name] && name !== "file") form.elements[name].value = value;
  }
}

async function start(form, isTrial = false) {
  if (running || find("#start").disabled || !form.reportValidity()) return;
  const fields = fieldsOf(form);
  const { dataset } = find("#checked");
  const about = {
    endpoint: dataset.endpoint || form.dataset.endpoints.split(" ")[0],
    recipe: "table" in dataset ? recipeOf(fields) : undefined,
  };
  running = { file: chosen, fields, about, fileId: null, key: randomKey() };
  allow(false);
  if (isTrial) {
    sessionStorage.setItem(saved(), JSON.stringify(fields));
    const { trialRows, trialEnding } = form.dataset;
    try {
      running.file = await firstRows(chosen, dataset.cut, Number(trialRows), trialEnding);
    } catch (problem) {
      running = null;
      await look();
      find("#new-error").textContent = problem.message;
      return;
    }
    running.whole = chosen;
  } else {
    sessionStorage.removeItem(saved());
  }
  await run();
}

/** Upload the file and create the batch; finished steps are not repeated. */
async function run() {
  const { file, fields, about, key } = running;
  running.control = new AbortController();
  find("#transfer").hidden = false;
  find("#transfer-again").hidden = true;
  find("#transfer-name").textContent = file.name;
  const rate = new Rate(file.size);
  try {
    running.fileId ??= await transfer(file, { signal: running.control.signal, onProgress: (sent) => rate.show(sent) });
    rate.done();
    const batch = await post("/v1/batches", {
      input_file_id: running.fileId, ...about, completion_window: fields.window, on_invalid_line: fields.invalid,
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
  chosen = running.whole || null;
  running = null;
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
