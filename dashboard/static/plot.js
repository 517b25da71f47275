// Throughput of a batch over time: a plot, with a sentence and a table for screen readers.

import { call } from "./session.js";
import { find, notice } from "./words.js";

const HEIGHT = 220;
const STALE_SECONDS = 15;
const MIN_STEPS = 3; // fewer measured steps are not worth a plot
const DELAY_SECONDS = 5;
const DAY_SECONDS = 24 * 3600;
const TICKS = [1, 2, 5, 10, 15, 30, 60, 120, 240, 360, 720, 1440, 2880, 10080].map((minutes) => 60 * minutes);
/** Largest share of the height that each curve takes: tokens grow with rows, and on a scale of the
 * same height one curve would hide the other. */
export const SHARES = { rows: 0.9, flow: 0.5 };
const MARGIN = { left: 56, right: 64, top: 8, bottom: 24 };
const NOTHING = { completed: 0, failed: 0, tokens: 0, input_tokens: 0, audio_seconds: 0 };
let drawn = [];
let drawnAt = 0;

/** Draw the plot of the view, if it has one; a recent plot is retained unless `force`. */
export async function drawPlot(force = false) {
  const place = find("#plot");
  if (!place) return;
  const isFresh = place.dataset.drawn && Date.now() - drawnAt < STALE_SECONDS * 1000;
  if (isFresh && !force) return;
  place.dataset.drawn = "yes";
  drawnAt = Date.now();
  try {
    const history = await call(place.dataset.history);
    const span = find("#live").dataset;
    if (!place.isConnected) return;
    find("#pace").hidden = history.data.length < MIN_STEPS;
    if (history.data.length >= MIN_STEPS) show(place, stretches(history.data, span), secondsOf(span), Number(span.rate) || 0);
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
    const stop = Math.min(bucket.start + bucket.seconds, end);
    if (last && last.end >= Math.min(start, stop) && stop - start < DELAY_SECONDS) {
      // Mostly rows of the period before, reported late.
      for (const key of Object.keys(NOTHING)) last[key] += bucket[key];
      last.end = Math.max(last.end, stop);
      continue;
    }
    if (last && last.end < start) found.push({ start: last.end, end: start, ...NOTHING });
    found.push({ ...bucket, start, end: Math.max(start + (isFirst && until ? 0.001 : 1), stop) });
  }
  return found.map((one) => ({ ...one, seconds: one.end - one.start }));
}

/** Return how long a batch has run, or ran; the page shows it as the duration. */
export function secondsOf({ from, until }) {
  return Math.max(until ? 0.001 : 1, (Number(until) || Date.now() / 1000) - Number(from));
}

/** Return the main measure of a batch's work besides rows: audio, generated or input tokens. */
export function flowOf(found) {
  const has = (key) => found.some((one) => one[key] > 0);
  if (has("audio_seconds")) return { key: "audio_seconds", label: "s of audio/s", head: "Seconds of audio" };
  if (has("input_tokens") && !has("tokens")) return { key: "input_tokens", label: "tokens in/s", head: "Tokens in" };
  return { key: "tokens", label: "tokens/s", head: "Tokens" };
}

function show(place, found, seconds, rate) {
  describe(place, found, seconds, rate);
  fillTable(found);
  paint(place, found);
}

/** Draw the curves as SVG: completed and failed rows on the left scale, the flow on the right. */
function paint(place, found) {
  drawn = found;
  const [begin, end] = [found[0].start, found.at(-1).end];
  const width = Math.max(200, place.clientWidth) - MARGIN.left - MARGIN.right;
  const height = HEIGHT - MARGIN.top - MARGIN.bottom;
  const flow = flowOf(found);
  const rates = (key) => found.map((one) => one[key] / one.seconds);
  const curves = [
    { name: "failed", label: "failed rows/s", rates: rates("failed"), share: SHARES.rows },
    { name: "flow", label: flow.label, rates: rates(flow.key), share: SHARES.flow },
    { name: "completed", label: "completed rows/s", rates: rates("completed"), share: SHARES.rows },
  ];
  const most = Math.max(...curves[0].rates, ...curves[2].rates);
  const tops = { rows: most / SHARES.rows || 1, flow: Math.max(...curves[1].rates) / SHARES.flow || 1 };
  const x = (at) => ((at - begin) / (end - begin || 1)) * width;
  const svg = made("svg", { width: "100%", height: HEIGHT });
  const area = svg.appendChild(made("g", { transform: `translate(${MARGIN.left} ${MARGIN.top})` }));
  const text = (words, at) => Object.assign(area.appendChild(made("text", at)), { textContent: words });
  for (const [scale, edge, anchor] of [["rows", -6, "end"], ["flow", width + 6, "start"]]) {
    for (const value of valuesUpTo(tops[scale])) {
      const y = height * (1 - value / tops[scale]);
      if (scale === "rows") area.append(made("line", { class: "grid", x2: width, y1: y, y2: y }));
      text(value.toLocaleString(), { x: edge, y: y + 4, "text-anchor": anchor });
    }
  }
  const isLong = end - begin > DAY_SECONDS;
  const time = new Intl.DateTimeFormat(undefined, { ...(isLong && { day: "numeric", month: "short" }), hour: "2-digit", minute: "2-digit" });
  for (const at of timesBetween(begin, end, width)) text(time.format(at * 1000), { x: x(at), y: height + 18, "text-anchor": "middle" });
  for (const { name, rates: each } of curves) {
    const top = tops[name === "flow" ? "flow" : "rows"];
    const steps = each.map((rate, i) => `V${height * (1 - rate / top)}H${x(found[i].end)}`).join("");
    area.append(made("path", { class: name, d: `M0 ${height}${steps}${name === "completed" ? `V${height}` : ""}` }));
  }
  const mark = area.appendChild(made("line", { class: "mark", y2: height, visibility: "hidden" }));
  const legend = document.createElement("ul");
  const values = [["time", "Time"], ...[curves[2], curves[0], curves[1]].map(({ name, label }) => [name, label])].map(([name, label]) => {
    const item = legend.appendChild(document.createElement("li"));
    item.className = name;
    item.textContent = `${label}: `;
    return item.appendChild(document.createElement("span"));
  });
  const point = (index) => {
    const shares = index < 0 ? ["–", "–", "–", "–"] : [
      time.format(found[index].start * 1000), ...[curves[2], curves[0], curves[1]].map((curve) => curve.rates[index].toFixed(curve.rates[index] < 100 ? 1 : 0)),
    ];
    shares.forEach((words, i) => { values[i].textContent = words; });
    mark.setAttribute("visibility", index < 0 ? "hidden" : "visible");
  };
  svg.addEventListener("pointermove", (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left - MARGIN.left;
    mark.setAttribute("x1", at);
    mark.setAttribute("x2", at);
    point(found.findIndex((one) => at >= x(one.start) && at <= x(one.end)));
  });
  svg.addEventListener("pointerleave", () => point(-1));
  point(-1);
  place.replaceChildren(svg, legend);
}

function made(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

/** Return about four round values between 0 and `top`. */
function valuesUpTo(top) {
  const size = 10 ** Math.floor(Math.log10(top / 4));
  const step = [1, 2, 5, 10].map((times) => times * size).find((one) => one >= top / 4);
  return Array.from({ length: Math.floor(top / step) + 1 }, (_, i) => Number((i * step).toPrecision(6)));
}

/** Return round local times that leave room for their words. */
function timesBetween(begin, end, width) {
  const step = TICKS.find((one) => (end - begin) / one <= width / 80) ?? TICKS.at(-1);
  const shift = new Date(begin * 1000).getTimezoneOffset() * 60;
  const found = [];
  for (let at = Math.ceil((begin - shift) / step) * step + shift; at <= end; at += step) found.push(at);
  return found;
}

/** Describe the plot; the mean of an ended batch is the `rate` that the server states. */
function describe(place, found, seconds, rate) {
  const rows = found.reduce((sum, one) => sum + one.completed + one.failed, 0);
  const mean = rate || rows / seconds;
  const most = Math.max(mean, ...found.map((one) => (one.completed + one.failed) / one.seconds));
  const words = `${mean.toFixed(1)} rows per second on average, at most ${most.toFixed(1)}.`;
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

let widest = 0;
new ResizeObserver(() => {
  const place = find("#plot");
  if (!place?.firstChild || place.clientWidth === widest) return;
  widest = place.clientWidth;
  paint(place, drawn);
}).observe(document.body);
