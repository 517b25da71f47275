// Messages of the page: errors, visible and announced; status changes, for screen readers only.

export const find = (selector) => document.querySelector(selector);

/** Show an error until it is closed; a temporary one, until the next successful response. */
export function notice(words, isPassing = false) {
  find("#notice-words").textContent = words;
  find("#notice").dataset.passing = isPassing ? "yes" : "";
  find("#notice").hidden = false;
}

export function forgetNotice(onlyPassing = false) {
  if (!onlyPassing || find("#notice").dataset.passing) find("#notice").hidden = true;
}

/** Announce a change to screen readers. */
export function say(words) {
  find("#announcement").textContent = words;
}

/** Return the error message of a response. */
export function messageOf(text, status) {
  try {
    const found = JSON.parse(text);
    return found.error?.message || found.message || `The server returned ${status}.`;
  } catch {
    return `The server returned ${status}.`;
  }
}

/** Convert times to the local time zone. */
export function localise(place) {
  const format = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
  for (const time of place.querySelectorAll("time[datetime]")) {
    time.title = time.textContent;
    time.textContent = format.format(new Date(time.dateTime));
  }
}

/** Return a unique key; `randomUUID` does not exist on a page that was loaded by plain HTTP. */
export function randomKey() {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(36)).join("-");
}

find("#notice-close")?.addEventListener("click", () => forgetNotice());
