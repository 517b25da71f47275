// The API key: stored in this tab only, sent with every API request, requested again when rejected.
// A server without keys accepts any.

import { find, forgetNotice, messageOf } from "./words.js";

const KEY = "tidemill-key";
const REFUSED = new Set([401, 403]);
const needsKey = document.body.dataset.auth !== "none";
const waiting = [];
let tenant = null;

export const key = () => (needsKey ? sessionStorage.getItem(KEY) : "none");
export const isSignedIn = () => tenant !== null;
export const isRefusal = (status) => needsKey && REFUSED.has(status);

/** Resolve once there is a key that was accepted. */
export function signedIn() {
  return isSignedIn() ? Promise.resolve() : new Promise((resolve) => waiting.push(resolve));
}

/** Show the sign-in form; the view is retained in the meantime, so that nothing is lost. */
export function askForKey(words = "") {
  sessionStorage.removeItem(KEY);
  show(false);
  find("#sign-in-error").textContent = words;
  find("#key").focus();
}

/** Like fetch, with the key; resolves with an accepted response, after another sign-in if need be. */
export async function request(path, options = {}) {
  for (;;) {
    await signedIn();
    const headers = { ...options.headers, Authorization: `Bearer ${key()}` };
    const answer = await fetch(path, { ...options, headers });
    if (!isRefusal(answer.status)) return answer;
    refused();
  }
}

/** Like request, but resolves with the JSON; throws an Error with the API's message. */
export async function call(path, options = {}) {
  const answer = await request(path, options);
  const text = await answer.text();
  if (!answer.ok) {
    throw Object.assign(new Error(messageOf(text, answer.status)), { status: answer.status });
  }
  return JSON.parse(text);
}

export function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body) });
}

/** Handle a response that rejects the key. */
export function refused() {
  if (isSignedIn()) askForKey("Your key is no longer accepted. Sign in to continue.");
}

/** Set up the form and try this tab's key; `enter` is called after each sign-in. */
export function begin(enter) {
  if (!needsKey) {
    tenant = "";
    show(true);
    enter();
    return;
  }
  find("#sign-in-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const field = find("#key");
    if (await tryKey(field.value.trim())) {
      field.value = "";
      enter();
    } else {
      field.select();
      field.focus();
    }
  });
  find("#sign-out").addEventListener("click", () => {
    sessionStorage.removeItem(KEY);
    location.replace(location.pathname);
  });
  if (!key()) askForKey();
  else tryKey(key()).then((isGood) => (isGood ? enter() : askForKey(find("#sign-in-error").textContent)));
}

async function tryKey(tried) {
  const error = find("#sign-in-error");
  error.textContent = "";
  try {
    const headers = { Authorization: `Bearer ${tried}` };
    const answer = await fetch("/dashboard/view/session", { headers });
    if (isRefusal(answer.status)) error.textContent = "Invalid or revoked key.";
    else if (!answer.ok) error.textContent = messageOf(await answer.text(), answer.status);
    else return accept(tried, (await answer.json()).tenant);
  } catch (problem) {
    error.textContent =
      problem instanceof TypeError && /[^\x21-\x7e]/.test(tried)
        ? "Invalid key: keys contain no spaces or special characters."
        : "The server cannot be reached. Try again in a moment.";
  }
  return false;
}

function accept(accepted, its) {
  sessionStorage.setItem(KEY, accepted);
  // This tenant must not see another tenant's view, nor its address.
  if (find("#tenant").textContent && find("#tenant").textContent !== its) {
    location.replace(location.pathname);
    return false;
  }
  tenant = its;
  find("#tenant").textContent = its;
  show(true);
  forgetNotice();
  waiting.splice(0).forEach((resolve) => resolve());
  return true;
}

function show(isIn) {
  if (!isIn) tenant = null;
  if (needsKey) find("#sign-in").hidden = isIn;
  find("#content").hidden = !isIn;
  find("#main-nav").hidden = !isIn;
}
