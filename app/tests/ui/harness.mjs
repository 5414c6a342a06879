// A server with a home of its own, and a browser in front of it.

import { execFileSync, spawn } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createRequire } from "node:module";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";

import { chromium } from "playwright-core";

export const STORY = "Tell me a story about a shy fox who lost a key";

/** Longest wait for anything on the page. */
export const PATIENCE = 20_000;

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

/** Folder for pictures, if they are wanted. */
export const pictures = process.env.PAGURO_SCREENSHOTS;

export async function freePort() {
  const server = createServer();
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address();
  await new Promise((resolve) => server.close(resolve));
  return port;
}

export class Server {
  home = mkdtempSync(join(tmpdir(), "paguro-ui-"));
  /** More of the environment. */
  more = {};
  #child = null;

  constructor(port = 0, ...flags) {
    this.port = port;
    this.flags = flags;
  }

  get environment() {
    const kept = Object.entries(process.env).filter(([name]) => !/^(PAGURO|XDG|HF)_/.test(name));
    return { ...Object.fromEntries(kept), HOME: this.home, ...this.more };
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
export async function open(browser, server, options = {}, prepare = async () => undefined) {
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
  await prepare(page);
  await page.goto(server.address);
  return { page, context, problems };
}

export async function send(page, text) {
  await page.getByRole("textbox", { name: "Message" }).fill(text);
  // Enter does nothing as long as the button cannot be pressed, which on a busy machine takes a moment after an answer.
  await page.locator("button[aria-label='Send']:enabled").waitFor();
  await page.keyboard.press("Enter");
  await page.locator(".bubble", { hasText: text.slice(0, 40).trim() }).last().waitFor();
}

/** Waits until no answer is on its way, and returns the last one's text. */
export async function answered(page) {
  const last = page.getByRole("article", { name: /^Answer of/ }).last();
  await last.waitFor();
  await page.waitForFunction(() => {
    const turns = document.querySelectorAll("article.turn");
    return turns[turns.length - 1]?.getAttribute("aria-busy") === "false";
  });
  return last.locator(".markdown, .card").first().innerText();
}

/** Bounds answers, so that tests are quick: the page's own control. */
export async function limit(page, tokens) {
  await page.getByRole("button", { name: "System prompt and sampling" }).click();
  await page.getByLabel(/Longest answer/).fill(String(tokens));
  await page.getByRole("button", { name: "Close" }).click();
}

/** Findings of the accessibility check. */
export async function findings(page) {
  // The page's policy keeps scripts out that are written into the document; this one comes through the debugger.
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  return violations
    .filter(({ impact }) => impact !== "minor")
    .map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.target.join(" ")).slice(0, 3).join("; ")}`);
}

/** Takes pictures of a page at three widths, light and dark. */
export async function picture(page, name) {
  if (!pictures) return;
  mkdirSync(pictures, { recursive: true });
  for (const [width, height] of [[1440, 900], [1024, 768], [390, 844]]) {
    await page.setViewportSize({ width, height });
    for (const theme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme: theme });
      await page.waitForTimeout(120);
      await page.screenshot({ path: join(pictures, `${name}-${width}-${theme}.png`) });
    }
  }
  await page.emulateMedia({ colorScheme: "light" });
  await page.setViewportSize({ width: 1440, height: 900 });
}

/** Goes to a page. */
export const go = async (page, path) => {
  await page.evaluate((hash) => (location.hash = hash), path);
};
