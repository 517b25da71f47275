// Fetches views, which the server renders, and puts them in place.

import * as session from "./session.js";
import { find, localise, messageOf } from "./words.js";

const running = new Map();

/** Fetch a view into the element `selector`, or with `isPart` replace the element by its new self.
 * `onPut` is called at that moment: later it might take the focus from a user who has moved on.
 * With a `body` it is posted, after another
 * sign-in if need be. Resolves with whether it did: not if a later call has this place, or the key was refused. Throws
 * an Error with the server's message. */
export async function load(path, selector, { isPart = false, onPut = () => {}, body = null } = {}) {
  // A new page ends the requests for parts of the old one.
  for (const [place, other] of running) if (selector === "#content" || place === selector) other.abort();
  const control = new AbortController();
  running.set(selector, control);
  const headers = { Authorization: `Bearer ${session.key()}` };
  const posted = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  try {
    const answer = body
      ? await session.request(path, { ...posted, signal: control.signal })
      : await fetch(path, { headers, signal: control.signal });
    const text = await answer.text();
    if (session.isRefusal(answer.status)) session.refused();
    else if (!answer.ok) throw Object.assign(new Error(messageOf(text, answer.status)), { isMessage: true });
    else if (answer.headers.get("Content-Type")?.startsWith("text/html")) return put(selector, text, isPart) && (onPut(), true);
    return false;
  } catch (problem) {
    if (control.signal.aborted) return false;
    throw problem.isMessage ? problem : new Error("The server cannot be reached.");
  }
}

/** Replace an element by its new self if this is another one. */
function refresh(fresh) {
  const old = find(`#${fresh.id}`);
  localise(fresh);
  if (old && !old.isEqualNode(fresh)) old.replaceWith(fresh);
}

function put(selector, text, isPart) {
  const place = find(selector);
  const made = document.createElement("template");
  made.innerHTML = text;
  const view = isPart ? made.content.querySelector(selector) : made.content;
  if (!place || !view) return false;
  if (isPart) made.content.querySelectorAll("[data-fresh]").forEach(refresh);
  localise(view);
  const focused = place.contains(document.activeElement) ? document.activeElement.id : "";
  if (isPart) place.replaceWith(view);
  else place.replaceChildren(view);
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  return true;
}
