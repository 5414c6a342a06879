// anthropic, the official client.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import Anthropic from "@anthropic-ai/sdk";

import { MODEL, QUESTION, start } from "./server.mjs";

let server, client;
before(async () => {
  server = await start();
  client = new Anthropic({ baseURL: server.address, apiKey: "none", maxRetries: 0 });
});
after(() => server.stop());

const options = { model: MODEL, max_tokens: 16, temperature: 0, messages: [{ role: "user", content: QUESTION }] };

test("an answer, and a stream", async () => {
  const message = await client.messages.create(options);
  assert.deepEqual([message.stop_reason, message.usage.output_tokens], ["max_tokens", 16]);
  const final = await client.messages.stream(options).finalMessage();
  assert.equal(final.usage.output_tokens, 16);
  const count = await client.messages.countTokens({ model: MODEL, messages: options.messages });
  assert.ok(count.input_tokens > 5);
});

test("a tool that must be called", async () => {
  const schema = { type: "object", properties: { age: { enum: [3, 30] } }, required: ["age"], additionalProperties: false };
  const tools = [{ name: "meet", input_schema: schema }];
  const tool_choice = { type: "tool", name: "meet" };
  const message = await client.messages.create({ ...options, max_tokens: 100, tools, tool_choice });
  assert.equal(message.stop_reason, "tool_use");
  assert.ok([3, 30].includes(message.content[0].input.age));
});

test("errors", async () => {
  await assert.rejects(client.messages.create({ ...options, model: "claude" }), Anthropic.NotFoundError);
  await assert.rejects(client.messages.create({ ...options, temprature: 1 }), Anthropic.BadRequestError);
});
