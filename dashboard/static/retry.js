// Retry of a batch: the dialog's values become the request's fields, and the new batch is opened.

import { post } from "./session.js";
import { find, randomKey, say } from "./words.js";

let key = null;

function open() {
  // One per opening: a request that is sent twice creates one batch.
  key = randomKey();
  find("#retry-error").textContent = "";
  find("#retry-dialog").showModal();
}

/** Return the parameters to change; throws an Error for text that is not a JSON object. */
function editsOf(form) {
  const text = find("#retry-body").value.trim();
  let body = {};
  try {
    body = text ? JSON.parse(text) : {};
  } catch {
    body = null;
  }
  if (!body || typeof body !== "object" || Array.isArray(body)) {
    throw new Error('Other parameters must be a JSON object, such as {"seed": 1}.');
  }
  for (const { value, dataset } of form.querySelectorAll("[data-param]")) {
    if (!value) continue;
    body[dataset.param] = Number(value);
    if (dataset.replaces) body[dataset.replaces] = null;
  }
  return body;
}

async function send(form) {
  const button = find("#retry-yes");
  const prompt = find("#retry-prompt");
  if (button.disabled) return;
  button.disabled = true;
  try {
    const body = editsOf(form);
    const made = await post(`/v1/batches/${form.dataset.batch}/retry`, {
      include_invalid: find("#retry-invalid")?.checked || false,
      body: Object.keys(body).length ? body : null,
      prompt: prompt && prompt.value !== prompt.defaultValue ? prompt.value : null,
      idempotency_key: key,
    });
    find("#retry-dialog")?.close();
    say("The retry is created");
    location.hash = `#/batches/${made.id}`;
  } catch (problem) {
    // After an answer, the next request may be another one; without an answer, it is a repetition.
    if (problem.status) key = randomKey();
    const words = problem instanceof TypeError ? "The server cannot be reached." : problem.message;
    if (find("#retry-error")) find("#retry-error").textContent = words;
  }
  button.disabled = false;
}

document.body.addEventListener("click", ({ target }) => {
  if (target.id === "retry-open") open();
  if (target.id === "retry-no") find("#retry-dialog").close();
});
document.body.addEventListener("submit", (event) => {
  if (event.target.id !== "retry-form") return;
  event.preventDefault();
  send(event.target);
});
