// OpenAI's client for Node against our server: each test is a use case from its README.
//
//     TIDEMILL_URL=http://127.0.0.1:8000 TIDEMILL_MODEL=… TIDEMILL_KEY=… node --test serve.mjs

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI, { toFile } from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const model = process.env.TIDEMILL_MODEL;
const client = new OpenAI({
  baseURL: `${process.env.TIDEMILL_URL}/v1`,
  apiKey: process.env.TIDEMILL_KEY,
  maxRetries: 0,
});
const messages = [{ role: "user", content: "What is 7 plus 5?" }];
const request = { model, messages, max_tokens: 24, temperature: 0 };
const Weather = z.object({ unit: z.enum(["celsius", "fahrenheit"]), is_wet: z.boolean() });

test("a chat is answered", async () => {
  const answer = await client.chat.completions.create(request);
  assert.equal(answer.object, "chat.completion");
  assert.match(answer.choices[0].message.content, /12/);
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

test("a stream has the same content, and its usage at the end", async () => {
  const whole = await client.chat.completions.create(request);
  const stream = await client.chat.completions.create({
    ...request,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = "";
  let usage = null;
  const reasons = [];
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    if (chunk.choices[0]?.finish_reason) reasons.push(chunk.choices[0].finish_reason);
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual(reasons, [whole.choices[0].finish_reason]);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test("an abandoned stream leaves nothing behind", async () => {
  const stream = await client.chat.completions.create({ ...request, max_tokens: 400, ignore_eos: true, stream: true });
  for await (const chunk of stream) {
    assert.equal(chunk.object, "chat.completion.chunk");
    break;
  }
  assert.ok(stream.controller.signal.aborted);
});

test("an answer is parsed with its schema", async () => {
  const answer = await client.chat.completions.parse({
    ...request,
    max_tokens: 120,
    response_format: zodResponseFormat(Weather, "weather"),
  });
  assert.ok(Weather.safeParse(answer.choices[0].message.parsed).success);
});

test("a required tool is called with valid arguments", async () => {
  const answer = await client.chat.completions.parse({
    ...request,
    max_tokens: 300,
    tools: [zodFunction({ name: "weather", parameters: Weather })],
    tool_choice: "required",
  });
  const [choice] = answer.choices;
  assert.equal(choice.finish_reason, "tool_calls");
  assert.equal(choice.message.tool_calls[0].function.name, "weather");
  assert.ok(Weather.safeParse(choice.message.tool_calls[0].function.parsed_arguments).success);
});

test("streamed calls are the same calls", async () => {
  const body = {
    ...request,
    max_tokens: 300,
    tools: [zodFunction({ name: "weather", parameters: Weather })],
    tool_choice: { type: "function", function: { name: "weather" } },
  };
  const whole = await client.chat.completions.create(body);
  const streamed = await client.chat.completions.stream(body).finalChatCompletion();
  const [one, other] = [whole, streamed].map((answer) => answer.choices[0].message.tool_calls);
  assert.equal(one.length, 1);
  assert.equal(other.length, 1);
  assert.equal(other[0].function.name, one[0].function.name);
  assert.deepEqual(JSON.parse(other[0].function.arguments), JSON.parse(one[0].function.arguments));
});

test("text completions are answered, whole and streamed", async () => {
  const body = { model, prompt: ["The tide", "The mill"], max_tokens: 8, temperature: 0 };
  const whole = await client.completions.create(body);
  const texts = ["", ""];
  for await (const chunk of await client.completions.create({ ...body, stream: true })) {
    for (const choice of chunk.choices) texts[choice.index] += choice.text;
  }
  assert.deepEqual(texts, whole.choices.map((choice) => choice.text));
});

test("a decision has typed answers in the order of its questions", async () => {
  const decision = await client.decisions.create({
    model,
    input: [{ role: "user", content: [{ type: "input_text", text: "Paris is a city." }] }],
    questions: [
      { type: "predicate", instructions: "Is a city named?", name: "city" },
      { type: "choice", instructions: "Which?", choices: [{ value: true }, { value: "true" }] },
      { type: "score", instructions: "How upset?", levels: [{ label: "calm" }, { label: "angry" }] },
    ],
  });
  const [city, which, tone] = decision.answers;
  assert.deepEqual([city.type, city.name], ["predicate", "city"]);
  assert.deepEqual(which.probabilities.map((each) => each.value), [true, "true"]);
  assert.ok(tone.score >= 0 && tone.score <= 1);
  assert.equal(decision.usage.total_tokens, decision.usage.input_tokens);
});

test("errors raise the client's own exceptions", async () => {
  await assert.rejects(client.chat.completions.create({ ...request, temperature: -1 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  await assert.rejects(
    client.chat.completions.create({ ...request, model: "another" }),
    OpenAI.NotFoundError,
  );
  await assert.rejects(
    new OpenAI({ baseURL: client.baseURL, apiKey: "wrong", maxRetries: 0 }).models.list(),
    OpenAI.AuthenticationError,
  );
});

test("models are listed", async () => {
  const names = [];
  for await (const one of client.models.list()) names.push(one.id);
  assert.ok(names.includes(model));
});

test("a batch is uploaded, run and downloaded", async () => {
  const lines = [1, 2, 3].map((number) =>
    JSON.stringify({ custom_id: `line-${number}`, method: "POST", url: "/v1/chat/completions", body: request }),
  );
  const file = await client.files.create({
    file: await toFile(Buffer.from(lines.join("\n")), "in.jsonl"),
    purpose: "batch",
  });
  let batch = await client.batches.create({
    input_file_id: file.id,
    endpoint: "/v1/chat/completions",
    completion_window: "24h",
  });
  while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
    await new Promise((resolve) => setTimeout(resolve, 50));
    batch = await client.batches.retrieve(batch.id);
  }
  assert.equal(batch.status, "completed");
  assert.equal(batch.request_counts.completed, 3);
  const text = await (await client.files.content(batch.output_file_id)).text();
  const rows = text.trim().split("\n").map((row) => JSON.parse(row));
  assert.deepEqual(rows.map((row) => row.custom_id), ["line-1", "line-2", "line-3"]);
  assert.ok((await client.files.delete(file.id)).deleted);
});
