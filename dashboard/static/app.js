// Shows the current view and refreshes it. The address after `#` names the view, so that a reload,
// the back button and bookmarks work.

import { wireExport } from "./export.js";
import { drawPlot } from "./plot.js";
import "./retry.js";
import { placeRequests, wireRows } from "./rows.js";
import * as session from "./session.js";
import { wireForm } from "./upload.js";
import { load } from "./views.js";
import { find, forgetNotice, notice, say } from "./words.js";

const { views: VIEWS, rows: onlyRows } = document.body.dataset;
const LISTED = ["status", "name", "after"];
const REFRESH_SECONDS = 5;
const MAX_REFRESH_SECONDS = 60;
let pause = REFRESH_SECONDS;
let timer = null;
let shown = null;

/** Return the path of the view in the address. Only known views are returned: a crafted link must
 * not lead to replies that are not meant to be shown. */
function pathOfView() {
  const [path, query] = location.hash.slice(1).split("?");
  if (onlyRows !== undefined) return `${VIEWS}/rows?${new URLSearchParams(query)}`;
  if (path === "/new") return `${VIEWS}/new`;
  const [, batch, part] = /^\/batches\/([\w-]{1,64})(\/rows)?$/.exec(path) || [];
  if (part) return `${VIEWS}/batches/${batch}/rows?${new URLSearchParams(query)}`;
  if (batch) return `${VIEWS}/batches/${batch}`;
  const given = [...new URLSearchParams(query)].filter(([key, value]) => LISTED.includes(key) && value);
  return `${VIEWS}/batches${given.length ? `?${new URLSearchParams(given)}` : ""}`;
}

/** Fetch the view that the address names and replace the present one. */
async function open() {
  clearTimeout(timer);
  const path = (shown = pathOfView());
  const busy = (isBusy) => find("#content").setAttribute("aria-busy", isBusy);
  busy(true);
  try {
    if (!(await load(path, "#content", { onPut: enterView }))) {
      if (path === shown) busy(false);
      return;
    }
    busy(false);
  } catch (problem) {
    busy(false);
    showMissing(problem.message);
    return;
  }
  find("#content").querySelectorAll("[data-view]").forEach(openPart);
  settle();
}

/** Fetch a part of the view that has a separate address, and then the parts of that part. */
async function openPart(place) {
  try {
    if (!(await load(place.dataset.view, `#${place.id}`))) return;
  } catch (problem) {
    notice(problem.message, true);
    return;
  }
  placeRequests();
  find(`#${place.id}`).querySelectorAll("[data-view]").forEach(openPart);
}

/** Refresh only the changing part of the view; failures are retried at increasing intervals. */
async function refresh() {
  clearTimeout(timer);
  if (!session.isSignedIn() || document.hidden || !find("#live")) return;
  const before = statuses();
  const { failed, done } = find("#live").dataset;
  try {
    if (!(await load(shown, "#live", { isPart: true }))) return;
  } catch (problem) {
    pause = Math.min(2 * pause, MAX_REFRESH_SECONDS);
    notice(`${problem.message} This view may be outdated; retrying.`, true);
    plan();
    return;
  }
  tellChanges(before);
  const hasFailed = find("#live").dataset.failed !== failed;
  if (hasFailed && find("#errors")) openPart(find("#errors"));
  // Shown rows are replaced only by failed ones.
  const rows = find(hasFailed ? "#first-rows" : "#first-rows:not(:has(.row))");
  if (rows && find("#live").dataset.done !== done) openPart(rows);
  settle();
}

function settle() {
  pause = REFRESH_SECONDS;
  forgetNotice(true);
  drawPlot();
  wireForm();
  plan();
}

function plan() {
  clearTimeout(timer);
  if (find("#live[data-live]")) timer = setTimeout(refresh, pause * 1000);
}

function statuses() {
  const found = [...document.querySelectorAll("[data-batch]")];
  return new Map(found.map((place) => [place.dataset.batch, place.dataset.status]));
}

/** Announce batches whose status has changed. */
function tellChanges(before) {
  for (const [id, status] of statuses()) {
    if (!before.has(id) || before.get(id) === status) continue;
    const place = find(`[data-batch="${id}"]`);
    const name = (place.querySelector("a") || find("#content h1")).textContent;
    say(`${name}: ${place.querySelector(".status").textContent}`);
    if (find("#plot")) drawPlot(true);
    if (find("#retry")) openPart(find("#retry"));
  }
}

function enterView() {
  const heading = find("#content h1");
  document.title = heading ? `${heading.textContent} · Tidemill` : "Tidemill";
  heading?.focus();
}

/** Show the message in place of a view that failed to load: the old view has another address. */
function showMissing(words) {
  const missing = find("#missing").content.cloneNode(true);
  missing.querySelector(".words").textContent = words;
  find("#content").replaceChildren(missing);
  drawPlot();
  enterView();
}

/** Have the browser fetch a file; the URL needs no key and is valid for a limited time. */
async function download(button) {
  button.setAttribute("aria-busy", "true");
  try {
    const { url } = await session.call(`${VIEWS}/files/${button.dataset.file}/link`);
    const link = document.createElement("a");
    Object.assign(link, { href: url, download: "", rel: "noreferrer" });
    link.click();
  } catch (problem) {
    notice(problem.message);
  }
  button.removeAttribute("aria-busy");
}

async function cancel() {
  const id = find("#live").dataset.batch;
  find("#cancel-dialog").close();
  try {
    await session.post(`/v1/batches/${id}/cancel`, {});
  } catch (problem) {
    notice(problem.message);
  }
  await refresh();
}

const CLICKS = {
  cancel: () => find("#cancel-dialog").showModal(),
  "cancel-no": () => find("#cancel-dialog").close(),
  "cancel-yes": cancel,
  "get-table": download,
  "get-output": download,
  "get-errors": download,
  "open-again": open,
  "month-before": turnMonth,
  "month-after": turnMonth,
};

/** Show another month; the focus stays in the section if its button is gone. */
async function turnMonth(button) {
  await load(button.dataset.path, "#month").catch((problem) => notice(problem.message, true));
  if (document.activeElement === document.body) find("#month-title")?.focus();
}

/** Search the list: the address contains the words, so that a reload repeats the search. */
function search(event) {
  if (event.target.id !== "search") return;
  event.preventDefault();
  const name = find("#search-name").value.trim();
  location.hash = `#/?${new URLSearchParams({ status: event.target.dataset.status, name })}`;
}

function wireClicks() {
  document.body.addEventListener("click", (event) => {
    if (event.target.id === "skip") {
      event.preventDefault();
      find("#view").focus();
    }
    const button = event.target.closest("button");
    CLICKS[button?.id]?.(button);
  });
  // The button that opened it may have been replaced since.
  document.body.addEventListener(
    "close",
    ({ target }) => (find(`#${target.dataset.opener}`) || find("#content h1"))?.focus(),
    { capture: true },
  );
}

if (document.body.dataset.auth !== "iam") {
  wireClicks();
  wireRows();
  wireExport();
  document.body.addEventListener("submit", search);
  addEventListener("hashchange", () => session.isSignedIn() && open());
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  session.begin(() => (shown === pathOfView() ? refresh() : open()));
}
