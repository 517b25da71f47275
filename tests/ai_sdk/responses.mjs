// The AI SDK's default model of OpenAI against our server, as its documentation uses it.
//
//     TIDEMILL_URL=http://127.0.0.1:8000 TIDEMILL_MODEL=… TIDEMILL_KEY=… node --test responses.mjs

import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: `${process.env.TIDEMILL_URL}/v1`, apiKey: process.env.TIDEMILL_KEY });
const request = { model: openai(process.env.TIDEMILL_MODEL), temperature: 0, maxRetries: 0 };
const prompt = "What is the capital of France?";
const digit = z.number().int().min(0).max(9);
const add = tool({ inputSchema: z.object({ a: digit, b: digit }), execute: ({ a, b }) => a + b });
const calls = { ...request, tools: { add }, toolChoice: "required", stopWhen: stepCountIs(2), maxOutputTokens: 300 };

test("a text is generated, whole and streamed", async () => {
  const whole = await generateText({ ...request, system: "Answer in a word.", prompt });
  const stream = streamText({ ...request, system: "Answer in a word.", prompt });
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(whole.text, "Paris");
  assert.equal(text, whole.text);
  assert.deepEqual(await stream.usage, whole.usage);
});

test("an object has its schema", async () => {
  const output = Output.object({ schema: z.object({ city: z.string() }) });
  const question = "Extract the city as JSON: Maria is 34 years old and lives in Lisbon.";
  assert.deepEqual((await generateText({ ...request, output, prompt: question })).output, { city: "Lisbon" });
});

test("tools are called in several steps", async () => {
  const whole = await generateText({ ...calls, prompt: "What is 7 plus 5?" });
  const stream = streamText({ ...calls, prompt: "What is 7 plus 5?" });
  await stream.consumeStream();
  for (const steps of [whole.steps, await stream.steps]) {
    assert.deepEqual(steps.map((step) => step.finishReason), ["tool-calls", "tool-calls"]);
    for (const { toolResults } of steps) assert.equal(toolResults[0].output, toolResults[0].input.a + toolResults[0].input.b);
  }
});

test("a conversation refers to earlier messages by their IDs", async () => {
  const question = { role: "user", content: "What is 7 plus 5?" };
  const first = await generateText({ ...request, messages: [question] });
  const messages = [question, ...first.response.messages, { role: "user", content: "And 7 plus 6?" }];
  const next = await generateText({ ...request, messages });
  assert.equal(next.text, "13");
  assert.equal(next.request.body.input[1].type, "item_reference");
});

test("a stored response is continued by its ID", async () => {
  const store = { providerOptions: { openai: { store: true } } };
  const { providerMetadata } = await generateText({ ...request, ...store, prompt: "What is 7 plus 5?" });
  const previous = { openai: { previousResponseId: providerMetadata.openai.responseId } };
  const next = await generateText({ ...request, providerOptions: previous, prompt: "And 7 plus 6?" });
  assert.equal(next.text, "13");
});
