// What the page says: errors where they are seen and heard, the rest for those who listen.

export const find = (selector) => document.querySelector(selector);

/** Show an error until it is closed; a passing one goes with the next answer that is good. */
export function notice(words, isPassing = false) {
  find("#notice-words").textContent = words;
  find("#notice").dataset.passing = isPassing ? "yes" : "";
  find("#notice").hidden = false;
}

export function forgetNotice(onlyPassing = false) {
  if (!onlyPassing || find("#notice").dataset.passing) find("#notice").hidden = true;
}

/** Tell a screen reader what others see. */
export function say(words) {
  find("#announcement").textContent = words;
}

/** Return an answer's error in words. */
export function messageOf(text, status) {
  try {
    const found = JSON.parse(text);
    return found.error?.message || found.message || `The server answered ${status}.`;
  } catch {
    return `The server answered ${status}.`;
  }
}

/** Put times into the reader's own zone. */
export function localise(place) {
  const format = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
  for (const time of place.querySelectorAll("time[datetime]")) {
    time.title = time.textContent;
    time.textContent = format.format(new Date(time.dateTime));
  }
}

find("#notice-close")?.addEventListener("click", () => forgetNotice());
