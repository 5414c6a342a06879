// Lighthouse's report about the chat, as HTML in the folder where Lighthouse is installed; the last line has the scores.

import { spawnSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";

import { Server } from "./harness.mjs";

const folder = process.env.PAGURO_LIGHTHOUSE;
const server = await new Server().start();
try {
  const flags = ["--quiet", "--preset=desktop", "--output=html", "--output=json", `--output-path=${join(folder, "report")}`];
  const chrome = "--chrome-flags=--headless --no-sandbox --disable-gpu";
  const { status, stderr } = spawnSync(process.execPath, [join(folder, "node_modules/lighthouse/cli/index.js"), server.address, ...flags, chrome], {
    env: { ...process.env, CHROME_PATH: process.env.PAGURO_CHROMIUM },
    encoding: "utf8",
    timeout: 120_000,
  });
  if (status !== 0) throw new Error(stderr?.trim().split("\n").at(-1) || `Lighthouse ended with ${status}`);
  const { categories } = JSON.parse(readFileSync(join(folder, "report.report.json"), "utf8"));
  console.log(Object.values(categories).map(({ title, score }) => `${title} ${Math.round(100 * score)}`).join(", "));
} finally {
  await server.stop();
}
