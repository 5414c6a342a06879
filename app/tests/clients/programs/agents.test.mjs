// Claude Code, Codex and opencode: each reads a file and counts its lines with its own tools, as the answers of its scripted
// model say (app/tests/serve/agents), and prints the last answer.

import assert from "node:assert/strict";
import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { execute, start } from "./server.mjs";

const LAST = "The note is about a fox that lives in the old mill.";
const TASK = "Read note.txt and tell me what it says";

const AGENTS = {
  "claude-code": {
    program: "claude",
    args: ["-p", TASK, "--allowedTools", "Read,Bash", "--model", "claude-sonnet-4-6"],
    env: address => ({
      ANTHROPIC_BASE_URL: address,
      ANTHROPIC_API_KEY: "none",
      CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    }),
    alias: "claude-*",
  },
  codex: {
    program: "codex",
    args: ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "gpt-5", TASK],
    files: address => ({
      "home/config.toml": `model_provider = "paguro"
[model_providers.paguro]
name = "Paguro"
base_url = "${address}/v1"
wire_api = "responses"
`,
    }),
    env: (address, home) => ({ CODEX_HOME: home }),
    alias: "gpt-5",
  },
  opencode: {
    program: "opencode",
    args: ["run", "-m", "paguro/opencode", TASK],
    files: address => ({
      "work/opencode.json": JSON.stringify({
        autoupdate: false,
        provider: {
          paguro: {
            npm: "@ai-sdk/openai-compatible",
            options: { baseURL: `${address}/v1` },
            models: { opencode: { limit: { context: 65536, output: 4096 } } },
          },
        },
      }),
    }),
    env: () => ({}),
    alias: "opencode-*",
  },
};

for (const [name, { program, args, files, env, alias }] of Object.entries(AGENTS)) {
  test(name, { timeout: 240_000 }, async () => {
    const model = join(process.env.PAGURO_SCRIPTED, `${name}.gguf`);
    const server = await start([model, "--alias", `${alias}=${name}`]);
    try {
      const [work, home] = ["work", "home"].map(folder => join(server.home, folder));
      [work, home].forEach(folder => mkdirSync(folder));
      writeFileSync(join(work, "note.txt"), "A fox lives in the old mill.\n");
      for (const [path, text] of Object.entries(files?.(server.address) ?? {})) {
        writeFileSync(join(server.home, path), text);
      }
      const ran = await execute(program, args, { cwd: work, env: { HOME: home, ...env(server.address, home) } });
      assert.equal(ran.code, 0, ran.output);
      assert.ok(ran.output.includes(LAST), ran.output);
      const requests = server.requests();
      assert.ok(requests.every(({ status }) => status < 400), JSON.stringify(requests));
      // Each turn of the agent goes on from the last one. Other requests, for a title, have short prompts.
      const longest = Math.max(...requests.map(({ prompt }) => prompt));
      const turns = requests.filter(({ prompt }) => prompt > longest / 2);
      assert.equal(turns.length, 3, JSON.stringify(requests));
      for (const [index, { cached }] of turns.slice(1).entries()) {
        const before = turns[index];
        assert.ok(cached >= 0.95 * (before.prompt + before.answer), JSON.stringify(requests));
      }
    } finally {
      await server.stop();
    }
  });
}
