// Shows the rows that the URL selects; user content is only ever inserted as text.

const find = (id) => document.getElementById(id);
const FIELDS = { kind: "all", text: "", id: "", from: "1" };
let running = new AbortController();
let next = null;
let earlier = [];

function element(name, className, text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

function queryOfUrl() {
  const fields = new URLSearchParams(location.hash.slice(1));
  return Object.fromEntries(Object.entries(FIELDS).map(([name, none]) => [name, fields.get(name) || none]));
}

function search(fields) {
  const changed = Object.entries(fields).filter(([name, value]) => value !== FIELDS[name]);
  const hash = `#${new URLSearchParams(changed)}`;
  if (hash === (location.hash || "#")) show();
  else location.hash = hash;
}

function addKind(kind) {
  const known = [...find("kind").options].some((option) => option.value === kind);
  if (!known && find("kind").length < 50) find("kind").append(new Option(kind, kind));
}

/** Return an element with user text, in the text's own direction. */
function cell(className, text) {
  const made = element("pre", className, text);
  made.dir = "auto";
  made.tabIndex = 0;
  return made;
}

function render(row, isFull) {
  const made = element("article", row.is_failed ? "failed" : "");
  const head = element("div", "head");
  const number = element(isFull ? "strong" : "button", isFull ? "" : "number", `row ${row.number.toLocaleString("en")}`);
  if (!isFull) number.addEventListener("click", () => showFull(row.number));
  head.append(number, element("bdi", "id", row.custom_id ?? "without custom_id"), element("bdi", "words", row.words));
  const sides = element("div", "sides");
  const request = cell("request", row.request ?? "");
  request.hidden = !row.request;
  sides.append(request, cell("answer", row.text));
  made.append(head, sides);
  if (row.json) made.append(cell("json", row.json));
  return made;
}

async function* eventsOf(response) {
  let rest = "";
  for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line);
  }
}

async function show() {
  running.abort(); // the server ends a search without a reader
  const control = (running = new AbortController());
  const fields = queryOfUrl();
  addKind(fields.kind);
  for (const [id, name] of [["kind", "kind"], ["text", "text"], ["custom-id", "id"], ["from", "from"]]) find(id).value = fields[name];
  find("rows").replaceChildren();
  next = null;
  find("next").disabled = true;
  find("previous").disabled = fields.from === "1";
  find("stop").hidden = false;
  find("status").className = "";
  find("status").textContent = "Searching";
  const shown = new Map();
  let words = "";
  try {
    if (!fields.id) delete fields.id;
    const response = await fetch(`rows?${new URLSearchParams(fields)}`, { signal: control.signal });
    for await (const event of eventsOf(response)) {
      if (control.signal.aborted) return;
      if (event.error) throw new Error(event.error);
      if (event.row) {
        const made = render(event.row, false);
        shown.set(event.row.number, made);
        event.row.reasons.forEach(addKind);
        find("rows").append(made);
      } else if (event.request) {
        const request = shown.get(event.number).querySelector(".request");
        request.textContent = event.request;
        request.hidden = false;
      } else if ("next" in event) {
        next = event.next;
        find("next").disabled = next === null;
        words = shown.size ? "" : "No row matches.";
      } else if (event.read) find("status").textContent = `Searched ${event.read.toLocaleString("en")} rows`;
      else if (event.indexed) find("status").textContent = `Searched ${event.indexed.toLocaleString("en")} lines for requests`;
    }
  } catch (problem) {
    if (control !== running) return;
    words = control.signal.aborted ? "Stopped." : `The rows cannot be shown: ${problem.message}`;
    find("status").className = "error";
  }
  if (control !== running) return;
  find("status").textContent = words;
  find("stop").hidden = true;
}

async function showFull(number) {
  const place = find("full-row");
  place.replaceChildren("Reading");
  find("full").showModal();
  try {
    const row = await (await fetch(`row?from=${number}`)).json();
    if (row.html) {
      // The server escapes all texts of the row.
      const made = document.createElement("template");
      made.innerHTML = row.html;
      place.replaceChildren(made.content);
    } else place.replaceChildren(row.error ? element("p", "error", row.error) : render(row, true));
  } catch (problem) {
    place.replaceChildren(element("p", "error", `The row cannot be shown: ${problem.message}`));
  }
}

find("search").addEventListener("submit", (event) => {
  event.preventDefault();
  earlier = [];
  const from = find("from").value.replace(/\D/g, "") || "1";
  search({ kind: find("kind").value, text: find("text").value, id: find("custom-id").value, from });
});
// A new search starts at the first row.
for (const id of ["kind", "text", "custom-id"]) find(id).addEventListener("input", () => { find("from").value = "1"; });
find("kind").addEventListener("change", () => find("search").requestSubmit());
find("next").addEventListener("click", () => {
  earlier.push(queryOfUrl().from);
  search({ ...queryOfUrl(), from: String(next) });
});
find("previous").addEventListener("click", () => search({ ...queryOfUrl(), from: earlier.pop() ?? "1" }));
find("full-row").addEventListener("click", (event) => {
  const source = event.target.closest("button")?.dataset.copy;
  if (source) navigator.clipboard.writeText(find(source).textContent);
});
find("stop").addEventListener("click", () => running.abort());
addEventListener("hashchange", show);
show();
const about = await (await fetch("about")).json();
find("name").textContent = about.name;
document.title = `${about.name} – Tidemill`;
if (about.rows !== null) find("count").textContent = `${about.rows.toLocaleString("en")} rows`;
