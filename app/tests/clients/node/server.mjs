// The server that the clients are tried on: on a free port, with a home of its own.

import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";

export const MODEL = "tales";
export const QUESTION = "Tell me a story about a shy fox who lost a key";

export async function start() {
  const home = mkdtempSync(join(tmpdir(), "paguro-"));
  const kept = Object.entries(process.env).filter(([name]) => !/^(PAGURO|XDG)_/.test(name));
  const child = spawn(process.env.PAGURO_BINARY, ["serve", "--port", "0", "--log", "warn"], {
    env: { ...Object.fromEntries(kept), HOME: home },
    stdio: ["ignore", "pipe", "inherit"],
  });
  const lines = createInterface({ input: child.stdout });
  const { value } = await lines[Symbol.asyncIterator]().next();
  const stop = async () => {
    child.kill();
    await new Promise(resolve => child.once("exit", resolve));
    rmSync(home, { recursive: true });
  };
  return { address: value.replace("listening at ", ""), stop };
}
