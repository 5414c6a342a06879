// llmprobe: the conformance of all APIs. How much the model itself can do is no matter of the server's.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { MODEL, execute, start } from "./server.mjs";

// A name from the last turn, which Tales does not remember. The prompt is that of the same chat in one request, as
// app/tests/serve/responses.rs checks.
const OF_THE_MODEL = ["responses-previous-response-id"];

test("conformance", { timeout: 240_000 }, async () => {
  const server = await start();
  try {
    const report = join(server.home, "report.json");
    const args = [server.address, "-m", MODEL, "--no-bench", "--no-save", "--no-color", "--save", report];
    const ran = await execute("llmprobe", args, { cwd: server.home, env: { HOME: server.home } });
    const { results } = JSON.parse(readFileSync(report, "utf8")).conformance;
    assert.ok(results.length > 80, ran.output);
    const failed = results.filter(({ id, outcome }) => outcome === "fail" && !OF_THE_MODEL.includes(id));
    assert.deepEqual(failed, [], ran.output);
    const surfaces = new Set(results.map(({ surface }) => surface));
    for (const surface of ["models", "chat", "responses", "messages", "count-tokens", "embeddings", "completions"]) {
      assert.ok(surfaces.has(surface), surface);
    }
  } finally {
    await server.stop();
  }
});
