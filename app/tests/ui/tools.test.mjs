// Tools of a small server that the settings name, called by a model whose answers are a script.

import assert from "node:assert/strict";
import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { Server, answered, browser, findings, go, open, picture, send } from "./harness.mjs";
import { serveHttp } from "./tool-server.mjs";

let server, chromium, folder, calls;
before(async () => {
  folder = mkdtempSync(join(tmpdir(), "paguro-tools-"));
  calls = join(folder, "calls");
  const config = join(folder, "serve.toml");
  const program = [process.execPath, join(import.meta.dirname, "tool-server.mjs")].map((word) => JSON.stringify(word));
  writeFileSync(config, `[[mcp]]\nname = "numbers"\ncommand = [${program.join(", ")}]\nenv = { CALLS = ${JSON.stringify(calls)} }\n`);
  server = await new Server(0, "--config", config, join(process.env.PAGURO_SCRIPTED, "adder.gguf")).start();
  chromium = await browser();
});
after(async () => {
  await chromium?.close();
  await server?.stop();
  rmSync(folder, { recursive: true, force: true });
});

const made = () => (existsSync(calls) ? readFileSync(calls, "utf8").trim().split("\n") : []);

/** A chat with the scripted model, which may use the tools. */
async function chat(page) {
  await page.getByRole("button", { name: /^Model: / }).click();
  await page.getByRole("menuitem", { name: /^adder/ }).click();
  await page.getByRole("button", { name: "Tools: 0 servers on" }).click();
  await page.getByRole("menuitemcheckbox", { name: /^numbers/ }).click();
  await page.keyboard.press("Escape");
  await page.getByRole("button", { name: "Tools: 1 server on" }).waitFor();
}

test("a call is shown, confirmed, run, and its result goes back to the model", { timeout: 90_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  await chat(page);
  await send(page, "What is 2 plus 40?");
  const call = page.locator(".call").first();
  await call.getByRole("button", { name: "Run" }).waitFor();
  assert.match(await call.innerText(), /add[\s\S]*numbers[\s\S]*40[\s\S]*changes nothing/);
  assert.deepEqual(made(), [], "nothing runs without a confirmation");
  assert.deepEqual(await findings(page), []);
  await picture(page, "chat-tool");
  // It waits, also for a page that was closed meanwhile.
  await page.reload();
  await call.getByText("Do not ask again for add").click();
  await call.getByRole("button", { name: "Run" }).click();
  await page.getByRole("article", { name: "Result of add" }).getByText("42").waitFor();
  await page.getByText("The sum is forty-two.").waitFor();
  assert.deepEqual(made(), ['add {"a":2,"b":40}']);

  // The tool is trusted now.
  await send(page, "And 19 plus 4?");
  await page.getByText("That makes twenty-three.").waitFor();
  assert.deepEqual(made().slice(1), ['add {"a":19,"b":4}']);
  assert.deepEqual(await findings(page), []);
  await picture(page, "chat-tools");

  await go(page, "/settings");
  const trusted = page.getByRole("region", { name: "Tool servers" }).getByRole("checkbox");
  await trusted.nth(1).waitFor();
  assert.deepEqual(await trusted.evaluateAll((all) => all.map((one) => one.checked)), [true, false]);
  await trusted.first().click();
  assert.deepEqual(await findings(page), []);
  await picture(page, "settings-tools");

  // A call that is declined is not made.
  await go(page, "/chat");
  await chat(page);
  await send(page, "What is 2 plus 40?");
  await page.locator(".call").getByRole("button", { name: "Decline" }).click();
  await page.getByText("The sum is forty-two.").waitFor();
  await answered(page);
  assert.equal(made().length, 2);
  assert.deepEqual(problems, []);
  await context.close();
});

test("a server is added by its address and removed", { timeout: 60_000 }, async (t) => {
  const web = await serveHttp();
  t.after(() => web.close());
  const { page, context, problems } = await open(chromium, server);
  await go(page, "/settings");
  const section = page.getByRole("region", { name: "Tool servers" });
  await section.getByRole("button", { name: "Add one" }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByLabel("Name").fill("two words");
  await dialog.getByLabel("Address").fill(web.url);
  await dialog.getByRole("button", { name: "Add" }).click();
  await dialog.getByText("letters, digits").waitFor();
  await dialog.getByLabel("Name").fill("web");
  await dialog.getByRole("button", { name: "Add" }).click();
  const added = section.getByRole("listitem").filter({ hasText: web.url });
  await added.getByText("2 tools").waitFor();
  await added.getByRole("button", { name: "Remove web" }).click();
  await page.getByRole("button", { name: "Remove", exact: true }).click();
  await added.waitFor({ state: "detached" });
  assert.deepEqual(problems, []);
  await context.close();
});
