// A server with a home of its own, and a browser in front of it.

import { execFileSync, spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";

import { chromium } from "playwright-core";

export const STORY = "Tell me a story about a shy fox who lost a key";

/** Longest wait for anything on the page. */
export const PATIENCE = 20_000;

export async function freePort() {
  const server = createServer();
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address();
  await new Promise((resolve) => server.close(resolve));
  return port;
}

export class Server {
  home = mkdtempSync(join(tmpdir(), "paguro-ui-"));
  #child = null;

  constructor(port = 0, ...flags) {
    this.port = port;
    this.flags = flags;
  }

  get environment() {
    const kept = Object.entries(process.env).filter(([name]) => !/^(PAGURO|XDG|HF)_/.test(name));
    return { ...Object.fromEntries(kept), HOME: this.home };
  }

  async start() {
    const flags = ["serve", "--port", String(this.port), "--log", "warn", ...this.flags];
    const child = spawn(process.env.PAGURO_BINARY, flags, { env: this.environment, stdio: ["ignore", "pipe", "inherit"] });
    this.#child = child;
    const lines = createInterface({ input: child.stdout });
    const first = await Promise.race([
      lines[Symbol.asyncIterator]().next(),
      new Promise((_, reject) => setTimeout(() => reject(new Error("the server did not start in time")), PATIENCE).unref()),
    ]);
    this.address = first.value.replace("listening at ", "");
    return this;
  }

  /** Ends the process, at once. */
  async kill() {
    const child = this.#child;
    if (!child) return;
    this.#child = null;
    const ended = new Promise((resolve) => child.once("exit", resolve));
    child.kill("SIGKILL");
    await ended;
  }

  async stop() {
    await this.kill();
    rmSync(this.home, { recursive: true, force: true });
  }

  /** Runs the program with the server's home. */
  run(...args) {
    return execFileSync(process.env.PAGURO_BINARY, args, { env: this.environment, encoding: "utf8", timeout: PATIENCE }).trim();
  }
}

export async function browser() {
  return chromium.launch({ executablePath: process.env.PAGURO_CHROMIUM, args: ["--no-sandbox", "--disable-gpu"] });
}

/** A page whose errors and foreign requests are kept. */
export async function open(browser, server, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1440, height: 900 }, reducedMotion: "reduce", ...options });
  context.setDefaultTimeout(PATIENCE);
  const page = await context.newPage();
  const problems = [];
  page.on("pageerror", (error) => problems.push(String(error)));
  page.on("console", (message) => {
    // A server that is away, or refuses, is a line of the browser's own.
    if (message.type() === "error" && !/Failed to load resource/.test(message.text())) problems.push(message.text());
  });
  page.on("request", (request) => {
    const { protocol, origin } = new URL(request.url());
    if (protocol.startsWith("http") && origin !== server.address) problems.push(`a request to ${request.url()}`);
  });
  await page.goto(server.address);
  return { page, context, problems };
}

export async function send(page, text) {
  await page.getByRole("textbox", { name: "Message" }).fill(text);
  await page.keyboard.press("Enter");
}

/** Waits until no answer is on its way, and returns the last one's text. */
export async function answered(page) {
  const last = page.getByRole("article", { name: /^Answer of/ }).last();
  await last.waitFor();
  await page.waitForFunction(() => {
    const answers = document.querySelectorAll("article.answer");
    return answers[answers.length - 1]?.getAttribute("aria-busy") === "false";
  });
  return last.locator(".markdown, .card").first().innerText();
}

/** Bounds answers, so that tests are quick: the page's own control. */
export async function limit(page, tokens) {
  await page.getByRole("button", { name: "System prompt and sampling" }).click();
  await page.getByLabel(/Longest answer/).fill(String(tokens));
  await page.getByRole("button", { name: "Close" }).click();
}
