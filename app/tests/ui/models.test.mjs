// Models: pulled from a hub on loopback, imported by path, with defaults of their own.

import assert from "node:assert/strict";
import { copyFileSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { startHub } from "./hub.mjs";
import { Server, browser, findings, go, open, picture } from "./harness.mjs";

const TALES = process.env.PAGURO_TALES;

let server, chromium, hub, folder;
let delay = 0;
before(async () => {
  hub = await startHub("fox/Stories-GGUF", "stories-Q8_0.gguf", readFileSync(TALES), () => delay);
  folder = mkdtempSync(join(tmpdir(), "paguro-models-"));
  copyFileSync(TALES, join(folder, "nightly.gguf"));
  // Without its chat template the model is a base model.
  const base = readFileSync(TALES);
  base.write("tokenizer.chat_templatX", base.indexOf("tokenizer.chat_template"));
  writeFileSync(join(folder, "base.gguf"), base);
  server = new Server(0, "--memory", "2GiB");
  server.more = { HF_ENDPOINT: hub.endpoint };
  await server.start();
  chromium = await browser();
});
after(async () => {
  await chromium?.close();
  await server?.stop();
  hub?.close();
  rmSync(folder, { recursive: true, force: true });
});

const row = (page, name) => page.getByRole("listitem").filter({ has: page.locator(".name", { hasText: name }) });

test("a model is pulled, pinned, given defaults and deleted", { timeout: 90_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  await go(page, "/models");
  const pull = async () => {
    await page.getByLabel("Pull a model from the hub").fill("hf.co/fox/Stories-GGUF");
    await page.getByRole("button", { name: "Pull", exact: true }).click();
  };
  // Slow enough to be seen, and to be cancelled.
  delay = 400;
  await pull();
  await page.locator(".pulling .bar").waitFor();
  await page.getByText(/MB of 22\.\d MB/).waitFor();
  assert.deepEqual(await findings(page), []);
  await picture(page, "models-pulling");
  await page.locator(".pulling").getByRole("button", { name: "Cancel" }).click();
  await page.locator(".pulling").waitFor({ state: "detached" });
  delay = 0;
  await pull();
  const model = row(page, "fox/Stories-GGUF");
  await model.getByText("Needs").waitFor();
  assert.match(await model.innerText(), /fits, with 2048 tokens of context/);

  await model.getByRole("button", { name: /^Defaults of/ }).click();
  await page.getByLabel("Context").fill("512");
  await page.getByLabel("K and V").selectOption("q8");
  await page.getByLabel("Longest answer").fill("3");
  assert.deepEqual(await findings(page), []);
  await picture(page, "models-defaults");
  await page.getByRole("button", { name: "Save" }).click();
  await model.getByText(/fits, with 512 tokens of context/).waitFor();

  await model.getByRole("button", { name: /^Load / }).click();
  await model.getByRole("button", { name: /^Keep / }).click();
  await model.getByText("stays loaded").waitFor();
  await model.getByRole("button", { name: /^Delete / }).click();
  assert.match(await page.getByRole("dialog").innerText(), /can be pulled again/);
  await page.getByRole("button", { name: "Delete", exact: true }).click();
  await model.waitFor({ state: "detached" });
  assert.deepEqual(problems, []);
  await context.close();
});

test("a model is imported by its path, and a wrong path is told", { timeout: 60_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  await go(page, "/models");
  await page.getByRole("button", { name: "Import" }).click();
  const dialog = page.getByRole("dialog");
  await dialog.getByLabel("Path").fill("nightly.gguf");
  await dialog.getByRole("button", { name: "Import" }).click();
  await dialog.getByText("must be a whole path on the server's machine").waitFor();
  assert.deepEqual(await findings(page), []);
  await picture(page, "models-import");
  await dialog.getByLabel("Path").fill(join(folder, "nightly.gguf"));
  await dialog.getByLabel("Name").fill("nightly");
  await dialog.getByRole("button", { name: "Import" }).click();
  await row(page, "nightly").getByText("Needs").waitFor();
  assert.deepEqual(problems, []);
  await context.close();
});

test("a model is offered for what it can do, and an alias is no model of its own", { timeout: 60_000 }, async () => {
  server.run("import", join(folder, "base.gguf"), "--name", "bare");
  server.run("preset", "bare", "--alias", "naked");
  const { page, context, problems } = await open(chromium, server);
  // The model inside the program is the default only while there is no other to chat with.
  await page.getByRole("heading", { name: "What shall we talk about?" }).waitFor();
  await go(page, "/models");
  const model = row(page, "bare");
  await model.getByText("also naked").waitFor();
  assert.equal(await page.locator(".models .name", { hasText: "naked" }).count(), 0);
  assert.match(await model.innerText(), /continues text[^]*imported where it is/);
  assert.equal(await model.getByRole("button", { name: "Chat" }).count(), 0);
  await model.getByRole("button", { name: /^Delete / }).click();
  assert.match(await page.getByRole("dialog").innerText(), /Its files stay where they are.*Its alias is removed as well/);
  await page.getByRole("button", { name: "Keep" }).click();
  await model.getByRole("link", { name: "Continue text" }).click();
  await page.getByLabel("Text to continue").waitFor();
  assert.equal(await page.getByRole("combobox", { name: "Model" }).inputValue(), "bare");
  await page.getByLabel("Tokens").fill("4");
  await page.getByRole("button", { name: "Run" }).click();
  await page.locator(".scored-token").first().waitFor();
  await go(page, "/chat");
  await page.getByRole("button", { name: /^Model: / }).click();
  const items = await page.getByRole("menuitem").allInnerTexts();
  assert.ok(items.some((item) => /^bare\s+Continue text/.test(item)) && items.some((item) => item.startsWith("tales")), items.join(" | "));
  assert.deepEqual(problems, []);
  await context.close();
});

test("what runs here is told before it is pulled", { timeout: 60_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  await go(page, "/models");
  const list = page.getByRole("region", { name: "What runs here" });
  await list.getByRole("listitem").first().waitFor();
  assert.ok((await list.getByText("fits now").count()) > 0);
  await list.getByRole("button", { name: /^Show all/ }).click();
  assert.ok((await list.getByText("2.1 GB are allowed").count()) > 0);
  assert.deepEqual(problems, []);
  await context.close();
});
