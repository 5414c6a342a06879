// The server that the clients are tried on: on a free port, with a home of its own.

import { spawn } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, openSync, closeSync } from "node:fs";
import { tmpdir } from "node:os";
import { delimiter, join } from "node:path";
import { createInterface } from "node:readline";

export const MODEL = "tales";
export const QUESTION = "Tell me a story about a shy fox who lost a key";

/** Variables of the environment that change nothing for the server and for programs. */
function clean() {
  const kept = Object.entries(process.env).filter(([name]) => /^(PATH|TMPDIR|LANG|LC_|SystemRoot|TEMP|TMP)/.test(name));
  return Object.fromEntries(kept);
}

/** Starts a server with more arguments. */
export async function start(args = []) {
  const home = mkdtempSync(join(tmpdir(), "paguro-"));
  const log = join(home, "log");
  const file = openSync(log, "w");
  const child = spawn(process.env.PAGURO_BINARY, ["serve", ...args, "--port", "0", "--log", "info"], {
    env: { ...clean(), HOME: home },
    stdio: ["ignore", "pipe", file],
  });
  closeSync(file);
  const lines = createInterface({ input: child.stdout });
  const { value } = await lines[Symbol.asyncIterator]().next();
  const stop = async () => {
    child.kill();
    await new Promise(resolve => child.once("exit", resolve));
    rmSync(home, { recursive: true });
  };
  /** Status and tokens of all requests so far that were answered, as the log has them. */
  const requests = () => {
    const answered = readFileSync(log, "utf8").split("\n").filter(line => line.includes(": answered "));
    const number = (line, name) => Number(line.match(new RegExp(`${name}=(\\d+)`))?.[1] ?? 0);
    const fields = line => ["status", "prompt", "cached", "answer"].map(name => [name, number(line, ` ${name}`)]);
    return answered.map(line => Object.fromEntries(fields(line)));
  };
  return { address: value.replace("listening at ", ""), home, requests, stop };
}

/** Runs an installed program to its end. Returns its exit status and all that it has written. */
export async function execute(program, args, { cwd, env }) {
  const bin = join(import.meta.dirname, "node_modules", ".bin");
  const path = [bin, process.env.PATH].join(delimiter);
  const child = spawn(join(bin, program), args, { cwd, env: { ...clean(), PATH: path, ...env }, stdio: ["ignore", "pipe", "pipe"] });
  let output = "";
  for (const stream of [child.stdout, child.stderr]) stream.on("data", data => (output += data));
  const limit = setTimeout(() => child.kill("SIGKILL"), 180_000);
  const code = await new Promise((resolve, reject) => child.once("close", resolve).once("error", reject));
  clearTimeout(limit);
  return { code, output };
}
