// Checks a chosen file before its upload: the server parses its first bytes and renders the result.

import { load } from "./views.js";
import { find } from "./words.js";

const HEAD_BYTES = 65536;
const FOOTER_END_BYTES = 8; // its length, and "PAR1"
const MAX_TAIL_BYTES = 1048576;
const MAX_ROUNDS = 16;
const TOO_MANY_READS = "No prompts are shown before the upload: they need too many reads of the file.";

/** Show the check of a file while it `isCurrent`; resolves with whether it is shown. */
export async function check(file, fields, isCurrent) {
  const head = file.slice(0, HEAD_BYTES);
  const body = {
    name: file.name.slice(0, 1024).toWellFormed(), bytes: file.size,
    head: await base64Of(head), tail: await base64Of(await footerOf(file)), recipe: recipeOf(fields),
    parts: [], on_invalid_line: fields.invalid, strict_parameters: fields.unknown === "refuse",
  };
  for (let left = MAX_ROUNDS; isCurrent() && (await load("/dashboard/view/check", "#check", { body })); left -= 1) {
    const { ranges } = find("#checked").dataset;
    if (ranges && !left) {
      find("#checked").append(Object.assign(document.createElement("p"), { className: "aside", textContent: TOO_MANY_READS }));
    }
    if (!ranges || !left) return true;
    // More bytes with which the first rows of a Parquet or Arrow table can be read.
    body.parts.push(...(await Promise.all(ranges.split(",").map(async (range) => {
      const [start, end] = range.split("-").map(Number);
      return { start, data: await base64Of(file.slice(start, end)) };
    }))));
  }
  return false;
}

/** Return the recipe of a table as the form describes it; null without a prompt and questions. */
export function recipeOf(fields) {
  const list = (text, mark) => text.split(mark).map((item) => item.trim()).filter(Boolean);
  const ask = list(fields.questions, "\n");
  const labels = list(fields.labels, ",");
  if (!fields.prompt.trim() && !ask.length && !labels.length) return null;
  const recipe = { params: {} };
  if (fields.prompt.trim()) recipe.prompt = fields.prompt.toWellFormed();
  if (ask.length) recipe.ask = ask.map((question) => question.toWellFormed());
  if (labels.length) recipe.labels = labels.map((label) => label.toWellFormed());
  if (fields.id) recipe.id = fields.id.toWellFormed();
  if (fields.output) recipe.output = fields.output;
  if (fields.model) recipe.params.model = fields.model;
  if (fields.longest && !ask.length && !labels.length) recipe.params.max_tokens = Number(fields.longest);
  return recipe;
}

/** Return the footer of a Parquet file, which has the columns and the number of rows. */
async function footerOf(file) {
  if ((await file.slice(0, 4).text()) !== "PAR1") return new Blob();
  const end = new DataView(await file.slice(-FOOTER_END_BYTES).arrayBuffer());
  const size = end.byteLength === FOOTER_END_BYTES ? end.getUint32(0, true) + FOOTER_END_BYTES : 0;
  return file.slice(-Math.max(FOOTER_END_BYTES, Math.min(size, MAX_TAIL_BYTES)));
}

async function base64Of(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  let text = "";
  for (let start = 0; start < bytes.length; start += 8192) {
    text += String.fromCharCode(...bytes.subarray(start, start + 8192));
  }
  return btoa(text);
}
