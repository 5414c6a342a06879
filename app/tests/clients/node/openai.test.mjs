// openai, the official client.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import OpenAI from "openai";

import { MODEL, QUESTION, start } from "./server.mjs";

let server, client;
before(async () => {
  server = await start();
  client = new OpenAI({ baseURL: server.address + "/v1", apiKey: "none", maxRetries: 0 });
});
after(() => server.stop());

const messages = [{ role: "user", content: QUESTION }];
const options = { model: MODEL, messages, max_tokens: 16, temperature: 0 };

test("an answer, and the same as a stream", async () => {
  const answer = await client.chat.completions.create(options);
  assert.equal(answer.usage.completion_tokens, 16);
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...options, stream: true }))
    text += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(text, answer.choices[0].message.content);
});

test("a stream that is left", async () => {
  const stream = await client.chat.completions.create({ ...options, max_tokens: 400, stream: true });
  for await (const _ of stream) break;
  await client.chat.completions.create(options);
});

test("responses", async () => {
  const options = { model: MODEL, max_output_tokens: 8, temperature: 0 };
  const first = await client.responses.create({ ...options, input: QUESTION });
  assert.ok(first.output_text);
  const second = { ...options, input: "Go on", previous_response_id: first.id, stream: true };
  let last;
  for await (const event of await client.responses.create(second)) last = event;
  assert.equal(last.type, "response.incomplete");
});

test("models and errors", async () => {
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  assert.deepEqual(models, [MODEL]);
  await assert.rejects(client.chat.completions.create({ ...options, model: "gpt-5" }), OpenAI.NotFoundError);
  const refused = client.chat.completions.create({ ...options, temprature: 1 });
  await assert.rejects(refused, error => error.status === 400 && error.param === "temprature");
  const ignored = await client.chat.completions.create({ ...options, colour: "red" }).asResponse();
  assert.equal(ignored.headers.get("x-paguro-ignored"), "colour");
});

const hero = {
  type: "object",
  properties: { age: { enum: [3, 30] }, brave: { type: "boolean" } },
  required: ["age", "brave"],
  additionalProperties: false,
};

test("structured output and tools", async () => {
  const format = { type: "json_schema", json_schema: { name: "hero", schema: hero, strict: true } };
  const answer = await client.chat.completions.create({ model: MODEL, messages, response_format: format });
  assert.ok([3, 30].includes(JSON.parse(answer.choices[0].message.content).age));
  const tools = [{ type: "function", function: { name: "meet", parameters: hero } }];
  const called = await client.chat.completions.create({
    model: MODEL, messages, tools, tool_choice: "required", parallel_tool_calls: false,
  });
  const calls = called.choices[0].message.tool_calls;
  assert.deepEqual([calls.length, calls[0].function.name], [1, "meet"]);
  assert.equal(typeof JSON.parse(calls[0].function.arguments).brave, "boolean");
});

test("embeddings", async () => {
  const answer = await client.embeddings.create({ model: MODEL, input: ["A fox lost a key", "The sea is deep"] });
  assert.equal(answer.data.length, 2);
  assert.ok(Math.abs(Math.hypot(...answer.data[1].embedding) - 1) < 1e-4);
});
