// ollama, the official client.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { Ollama } from "ollama";

import { MODEL, QUESTION, start } from "./server.mjs";

let server, client;
before(async () => {
  server = await start();
  client = new Ollama({ host: server.address });
});
after(() => server.stop());

const messages = [{ role: "user", content: QUESTION }];
const options = { num_predict: 16, temperature: 0 };

test("an answer, and the same line by line", async () => {
  const answer = await client.chat({ model: MODEL, messages, options });
  assert.deepEqual([answer.done_reason, answer.eval_count], ["length", 16]);
  let text = "";
  for await (const part of await client.chat({ model: MODEL, messages, options, stream: true }))
    text += part.message.content;
  assert.equal(text, answer.message.content);
  assert.ok((await client.generate({ model: MODEL, prompt: QUESTION, options })).response);
});

test("a format", async () => {
  const format = {
    type: "object", properties: { age: { enum: [3, 30] } }, required: ["age"], additionalProperties: false,
  };
  const answer = await client.chat({ model: MODEL, messages, format, options: { num_predict: 100 } });
  assert.ok([3, 30].includes(JSON.parse(answer.message.content).age));
});

test("embeddings", async () => {
  const answer = await client.embed({ model: MODEL, input: ["A fox lost a key", "The sea is deep"] });
  assert.equal(answer.embeddings.length, 2);
});

test("models and errors", async () => {
  assert.deepEqual((await client.list()).models.map(model => model.name), [MODEL + ":latest"]);
  assert.ok((await client.show({ model: MODEL })).capabilities.includes("completion"));
  await assert.rejects(client.chat({ model: "no-such-model", messages }), error => error.status_code === 404);
});
