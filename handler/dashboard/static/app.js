// Shows the current view and refreshes it. The address after `#` names the view, so that a reload,
// the back button and bookmarks work; htmx fetches the views, which the server renders.

import { drawPlot } from "./plot.js";
import * as session from "./session.js";
import { wireForm } from "./upload.js";
import { find, forgetNotice, localise, messageOf, notice, say } from "./words.js";

const VIEWS = "/dashboard/view";
const REFRESH_SECONDS = 5;
const MAX_REFRESH_SECONDS = 60;
let pause = REFRESH_SECONDS;
let timer = null;
let shown = null;

/** Return the path of the view in the address. Only known views are returned: a crafted link must
 * not lead to replies that are not meant to be shown. */
function pathOfView() {
  const [path, query] = location.hash.slice(1).split("?");
  if (path === "/new") return `${VIEWS}/new`;
  const [, batch] = /^\/batches\/([\w-]{1,64})$/.exec(path) || [];
  if (batch) return `${VIEWS}/batches/${batch}`;
  const after = new URLSearchParams(query).get("after");
  return `${VIEWS}/batches${after ? `?after=${encodeURIComponent(after)}` : ""}`;
}

/** Fetch the view that the address names and replace the present one. */
async function open() {
  clearTimeout(timer);
  shown = pathOfView();
  await fetchInto({ source: "#content", target: "#content", swap: "innerHTML" });
}

/** Refresh only the changing part of the view. */
async function refresh() {
  clearTimeout(timer);
  if (!session.isSignedIn() || document.hidden || !find("#live")) return;
  await fetchInto({ source: "#live", target: "#live", select: "#live", swap: "outerHTML" });
}

/** Have htmx fetch the view; its events, below, report failures. */
function fetchInto(place) {
  return htmx.ajax("GET", shown, place).catch(() => {});
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
  }
}

function enterView() {
  const heading = find("#content h1");
  document.title = heading ? `${heading.textContent} · Tidemill` : "Tidemill";
  heading?.focus();
}

function wireRequests() {
  const body = document.body;
  let before = new Map();
  let failed = null;
  body.addEventListener("htmx:configRequest", (event) => {
    event.detail.headers.Authorization = `Bearer ${session.key()}`;
  });
  body.addEventListener("htmx:beforeSwap", (event) => {
    const isView = event.detail.xhr.getResponseHeader("Content-Type")?.startsWith("text/html");
    event.detail.shouldSwap &&= Boolean(isView);
    before = statuses();
    failed = find("#live")?.dataset.failed;
  });
  // At the moment of the swap: later it would take the focus from a user who has moved on.
  body.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target.id === "content") enterView();
  });
  body.addEventListener("htmx:afterSettle", (event) => {
    pause = REFRESH_SECONDS;
    forgetNotice(true);
    localise(event.detail.elt);
    if (event.detail.target.id !== "content") tellChanges(before);
    if (event.detail.target.id === "live" && find("#live").dataset.failed !== failed) htmx.trigger("#errors", "changed");
    drawPlot();
    wireForm();
    plan();
  });
  body.addEventListener("htmx:responseError", (event) => {
    const { status, responseText } = event.detail.xhr;
    if (session.isRefusal(status)) session.refused();
    else fail(event, messageOf(responseText, status));
  });
  for (const name of ["htmx:sendError", "htmx:timeout"]) {
    body.addEventListener(name, (event) => fail(event, "The server cannot be reached."));
  }
}

/** Show the error; a refresh is retried at increasing intervals. */
function fail(event, words) {
  if (event.detail.target?.id === "content") {
    showMissing(words);
    return;
  }
  pause = Math.min(2 * pause, MAX_REFRESH_SECONDS);
  notice(`${words} This view may be outdated; retrying.`, true);
  plan();
}

/** Show the message in place of a view that failed to load: the old view has another address. */
function showMissing(words) {
  const missing = find("#missing").content.cloneNode(true);
  missing.querySelector(".words").textContent = words;
  find("#content").replaceChildren(missing);
  drawPlot();
  enterView();
}

/** Have the browser fetch a file from S3; the URL is valid for a limited time. */
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
};

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
    "close", () => (find("#cancel") || find("#content h1")).focus(), { capture: true },
  );
}

if (document.body.dataset.auth === "keys") {
  wireRequests();
  wireClicks();
  addEventListener("hashchange", () => session.isSignedIn() && open());
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  session.begin(() => (shown === pathOfView() ? refresh() : open()));
}
