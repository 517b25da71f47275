// Throughput of a batch over time: a plot, with a sentence and a table for screen readers.

import { call } from "./session.js";
import { find, notice } from "./words.js";

const HEIGHT = 220;
const STALE_SECONDS = 15;
const DAY_SECONDS = 24 * 3600;
const TICKS = [1, 2, 5, 10, 15, 30, 60, 120, 240, 360, 720, 1440, 2880, 10080].map((minutes) => 60 * minutes);
const upTo = (share) => ({ range: (self, low, high) => [0, high / share || 1] });
/** Tokens grow with rows: on a scale of the same height one curve would hide the other. */
export const SCALES = { y: upTo(0.9), tokens: upTo(0.5) };
const NOTHING = { completed: 0, failed: 0, tokens: 0, input_tokens: 0, audio_seconds: 0 };
let drawn = null;
let drawnAt = 0;

/** Draw the plot of the view, if it has one; a recent plot is retained unless `force`. */
export async function drawPlot(force = false) {
  const place = find("#plot");
  if (!place) return forget();
  const isFresh = place.dataset.drawn && Date.now() - drawnAt < STALE_SECONDS * 1000;
  if (isFresh && !force) return;
  place.dataset.drawn = "yes";
  drawnAt = Date.now();
  try {
    const history = await call(place.dataset.history);
    const span = find("#live").dataset;
    if (place.isConnected) show(place, stretches(history.data, span), secondsOf(span));
  } catch (problem) {
    notice(problem.message, true);
  }
}

/** Return contiguous periods with the progress in each; the first and the last end where the batch
 * does, so that no rate includes time in which nothing could run. */
export function stretches(buckets, { from, until }) {
  const begin = Number(from);
  const end = Number(until) || Date.now() / 1000;
  const found = [];
  for (const bucket of buckets) {
    const last = found.at(-1);
    // Rows are reported with a delay: the first ones were produced since the beginning.
    const isFirst = !last && bucket.start - begin < bucket.seconds;
    const start = isFirst ? begin : Math.max(bucket.start, begin);
    if (last && last.end < start) found.push({ start: last.end, end: start, ...NOTHING });
    found.push({ ...bucket, start, end: Math.max(start + 1, Math.min(bucket.start + bucket.seconds, end)) });
  }
  return found.map((one) => ({ ...one, seconds: one.end - one.start }));
}

/** Return how long a batch has run, or ran; the page shows it as the duration. */
export function secondsOf({ from, until }) {
  return Math.max(1, (Number(until) || Date.now() / 1000) - Number(from));
}

/** Return the main measure of a batch's work besides rows: audio, generated or input tokens. */
export function flowOf(found) {
  const has = (key) => found.some((one) => one[key] > 0);
  if (has("audio_seconds")) return { key: "audio_seconds", label: "s of audio/s", head: "Seconds of audio" };
  if (has("input_tokens") && !has("tokens")) return { key: "input_tokens", label: "tokens in/s", head: "Tokens in" };
  return { key: "tokens", label: "tokens/s", head: "Tokens" };
}

function show(place, found, seconds) {
  find("#plot-empty").hidden = found.length > 0;
  find("#plot-shown").hidden = found.length === 0;
  if (found.length === 0) return;
  describe(place, found, seconds);
  fillTable(found);
  paint(place, found);
}

function paint(place, found) {
  forget();
  const colour = (name) => getComputedStyle(place).getPropertyValue(name).trim();
  const axis = { stroke: colour("--pico-muted-color"), grid: { stroke: colour("--pico-muted-border-color"), width: 1 }, ticks: { show: false } };
  const stepped = uPlot.paths.stepped({ align: 1 });
  const rate = (key) => [...found.map((one) => one[key] / one.seconds), found.at(-1)[key] / found.at(-1).seconds];
  const flow = flowOf(found);
  const isLong = found.at(-1).end - found[0].start > DAY_SECONDS;
  const time = new Intl.DateTimeFormat(undefined, { ...(isLong && { day: "numeric", month: "short" }), hour: "2-digit", minute: "2-digit" });
  const format = (self, value) => (value == null ? "–" : value.toFixed(value < 100 ? 1 : 0));
  const options = {
    width: place.clientWidth,
    height: HEIGHT,
    cursor: { drag: { x: false, y: false } },
    scales: SCALES,
    axes: [
      { ...axis, space: 80, incrs: TICKS, values: (self, splits) => splits.map((at) => time.format(at * 1000)) },
      { ...axis, label: "rows/s", labelSize: 20, size: 50 },
      { ...axis, scale: "tokens", side: 1, grid: { show: false }, label: flow.label, labelSize: 20, size: 60 },
    ],
    series: [
      { label: "Time", value: (self, at) => (at == null ? "–" : time.format(at * 1000)) },
      { label: "completed rows/s", stroke: colour("--run"), fill: colour("--plot-fill"), width: 2, paths: stepped, points: { show: false }, value: format },
      { label: "failed rows/s", stroke: colour("--bad"), width: 2, dash: [6, 4], paths: stepped, points: { show: false }, value: format },
      { label: flow.label, scale: "tokens", stroke: colour("--warn"), width: 1.5, dash: [2, 3], paths: stepped, points: { show: false }, value: format },
    ],
  };
  const times = [...found.map((one) => one.start), found.at(-1).end];
  drawn = new uPlot(options, [times, rate("completed"), rate("failed"), rate(flow.key)], place);
  drawn.tidemill = () => paint(place, found);
}

function forget() {
  drawn?.destroy();
  drawn = null;
}

function describe(place, found, seconds) {
  const rows = found.reduce((sum, one) => sum + one.completed + one.failed, 0);
  const most = Math.max(...found.map((one) => (one.completed + one.failed) / one.seconds));
  const words = `${(rows / seconds).toFixed(1)} rows per second on average, at most ${most.toFixed(1)}.`;
  place.setAttribute("aria-label", `Plot of rows and ${flowOf(found).label} over time. ${words}`);
  find("#plot-words").textContent = words;
}

function fillTable(found) {
  const time = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });
  const flow = flowOf(found);
  find("#plot-flow").textContent = flow.head;
  const rows = found.map((one) => {
    const row = document.createElement("tr");
    const cells = [time.format(new Date(one.start * 1000)), Math.round(one.seconds), one.completed, one.failed, one[flow.key]];
    for (const cell of cells) {
      row.appendChild(document.createElement("td")).textContent = typeof cell === "number" ? cell.toLocaleString() : cell;
    }
    return row;
  });
  find("#plot-rows").replaceChildren(...rows);
}

new ResizeObserver(() => {
  const place = find("#plot");
  if (drawn && place && Math.abs(place.clientWidth - drawn.width) > 1) drawn.setSize({ width: place.clientWidth, height: HEIGHT });
}).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn?.tidemill());
