// Every page, with its accessibility checked and its picture taken.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { PATIENCE, STORY, Server, answered, browser, findings, go, limit, open, picture, pictures, send } from "./harness.mjs";

let server, chromium;
before(async () => {
  server = await new Server().start();
  chromium = await browser();
});
after(async () => {
  await chromium?.close();
  await server?.stop();
});

test("the chat, empty and with an answer", { timeout: 90_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  await page.getByRole("heading", { name: /What shall/ }).waitFor();
  assert.deepEqual(await findings(page), []);
  await picture(page, "chat-empty");
  await limit(page, 120);
  await send(page, STORY);
  await answered(page);
  assert.deepEqual(await findings(page), []);
  await picture(page, "chat");
  await page.getByRole("button", { name: "System prompt and sampling" }).click();
  await page.getByRole("slider", { name: "Temperature", exact: true }).waitFor();
  assert.deepEqual(await findings(page), []);
  await picture(page, "chat-settings");
  await page.getByRole("button", { name: "Close", exact: true }).click();
  await page.locator("body").click({ position: { x: 700, y: 450 } });
  await page.keyboard.press("?");
  await page.getByRole("dialog").getByText("Begin a new chat").waitFor();
  assert.deepEqual(await findings(page), []);
  await page.keyboard.press("Escape");
  await page.keyboard.press("Control+k");
  await page.getByRole("combobox", { name: "Search" }).fill("machine");
  await page.getByRole("option", { name: /Machine room/ }).click();
  await page.waitForURL(/#\/room/);
  assert.deepEqual(problems, []);
  await context.close();
});

test("the machine room shows what runs", { timeout: 90_000 }, async (t) => {
  const { page, context, problems } = await open(chromium, server);
  await go(page, "/room");
  // Six clients that share a beginning and ask again and again, for as long as the page is looked at.
  const abort = new AbortController();
  t.after(() => abort.abort());
  const client = async (index) => {
    for (let round = 0; !abort.signal.aborted; round++) {
      const prompt = `${"Once upon a time there was a fox. ".repeat(16 + 2 * index)}${index} ${round}`;
      const body = JSON.stringify({ model: "tales", prompt, max_tokens: 300 + 90 * index, ignore_eos: true, seed: index });
      await fetch(`${server.address}/v1/completions`, { method: "POST", signal: abort.signal, body }).then((answer) => answer.text(), () => null);
    }
  };
  const asked = Array.from({ length: 6 }, (_, index) => client(index));
  await page.getByRole("img", { name: /Page map: \d+ pages, [1-9]\d* in use/ }).waitFor();
  await page.locator(".lane .segment.decode").nth(3).waitFor();
  await page.getByText("Speed").waitFor();
  await page.waitForTimeout(pictures ? 4000 : 1000);
  assert.deepEqual(await findings(page), []);
  await picture(page, "room");
  await page.getByRole("button", { name: "Pause" }).click();
  const moment = page.getByRole("slider", { name: "Moment that is shown" });
  await moment.focus();
  await page.keyboard.press("Home");
  assert.match(await moment.getAttribute("aria-valuetext"), /ago/);
  await page.getByRole("button", { name: "Live" }).click();
  assert.equal(await moment.getAttribute("aria-valuetext"), "now");
  abort.abort();
  await Promise.all(asked);
  assert.deepEqual(problems, []);
  await context.close();
});

test("the machine room is readable at 64 sequences", { timeout: 120_000 }, async (t) => {
  const { page, context, problems } = await open(chromium, server);
  await go(page, "/room");
  const abort = new AbortController();
  t.after(() => abort.abort());
  const asked = Array.from({ length: 64 }, (_, index) => {
    const prompt = `${"Once upon a time there was a crab. ".repeat(4 + (index % 8))}${index}`;
    const body = JSON.stringify({ model: "tales", prompt, max_tokens: 1500, ignore_eos: true, seed: index });
    return fetch(`${server.address}/v1/completions`, { method: "POST", signal: abort.signal, body }).then((answer) => answer.text(), () => null);
  });
  await page.waitForFunction(() => document.querySelectorAll(".lane").length >= 64, null, { timeout: 60_000 });
  if (pictures) await page.waitForTimeout(3000);
  const box = await page.locator(".page").boundingBox();
  assert.ok((await page.evaluate(() => document.documentElement.scrollWidth)) <= 1440, `nothing is wider than the page: ${box?.width}`);
  assert.deepEqual(await findings(page), []);
  await picture(page, "room-64");
  abort.abort();
  await Promise.all(asked);
  assert.deepEqual(problems, []);
  await context.close();
});

test("the models are listed, loaded and unloaded", { timeout: 60_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  await go(page, "/models");
  const model = page.getByRole("listitem").filter({ hasText: "tales" });
  await model.getByText(/parameters/).waitFor();
  if (await model.getByRole("button", { name: "Unload tales" }).isVisible()) {
    await model.getByRole("button", { name: "Unload tales" }).click();
  }
  await model.getByRole("button", { name: "Load tales" }).click();
  await model.getByText(/loaded on/).waitFor();
  assert.deepEqual(await findings(page), []);
  await picture(page, "models");
  // What the hub does not have is told in a sentence. (The name is none that any hub could have.)
  await page.getByLabel("Pull a model from the hub").fill("not a name");
  await page.getByRole("button", { name: "Pull", exact: true }).click();
  await page.locator(".pulling .problem").waitFor();
  assert.deepEqual(problems, []);
  await context.close();
});

test("the playground answers every kind of request", { timeout: 90_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  const run = async (tab, shown) => {
    await go(page, `/playground/${tab}`);
    await page.getByRole("button", { name: "Run" }).click();
    await page.locator(".bench-out").locator(shown).first().waitFor();
    assert.deepEqual(await findings(page), []);
    await picture(page, `playground-${tab}`);
  };
  await run("completion", ".scored-token");
  await page.locator(".scored-token").first().hover();
  assert.equal(await page.locator(".alternatives > div").count(), 5);
  await run("tokens", ".token-list li");
  await run("template", ".rendered");
  assert.match(await page.locator(".rendered").first().innerText(), /story about a crab/);
  await run("embeddings", "td.num");
  await run("structured", ".json");
  await page.getByText("fits the schema").waitFor();
  for (const [kind, pattern] of [
    ["Grammar", /^The (fox|crab) is [1-9][0-9]? years old\.$/],
    ["Expression", /^(red|blue|green) [0-9]{2}$/],
    ["Choices", /^(yes|no|perhaps)$/],
  ]) {
    await page.getByRole("button", { name: kind, exact: true }).click();
    await page.getByRole("button", { name: "Run" }).click();
    await page.getByText(`fits the ${kind.toLowerCase()}`).waitFor();
    assert.match((await page.locator(".bench-out .rendered").innerText()).trim(), pattern);
    if (kind === "Grammar") await picture(page, "playground-grammar");
  }
  assert.match(await page.locator(".bench-code").innerText(), /"structured_outputs"/);
  await page.getByRole("button", { name: "Python" }).click();
  assert.match(await page.locator(".bench-code").innerText(), /requests\.post/);
  assert.deepEqual(problems, []);
  await context.close();
});

test("the first key is made, used and revoked; a wrong one is refused", { timeout: 60_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  await go(page, "/settings");
  await page.getByText("There are no keys").waitFor();
  await page.getByText("keep-alive").waitFor();
  assert.deepEqual(await findings(page), []);
  await picture(page, "settings");
  await page.getByRole("button", { name: "New key" }).click();
  await page.getByLabel("What it is for").fill("laptop");
  await page.getByRole("button", { name: "Make the key" }).click();
  const key = await page.locator(".secret code").innerText();
  assert.match(key, /^pg-/);
  await page.getByRole("button", { name: "Done" }).click();
  await page.getByRole("cell", { name: "laptop", exact: true }).waitFor();

  // Servers look for new keys twice a second.
  await new Promise((resolve) => setTimeout(resolve, 1100));
  const other = await open(chromium, server);
  await other.page.getByLabel("Key").fill("pg-nonsense");
  await other.page.getByRole("button", { name: "Use this key" }).click();
  await other.page.getByText("does not know this key").waitFor();
  assert.deepEqual(await findings(other.page), []);
  await picture(other.page, "key");
  await other.page.getByLabel("Key").fill(key);
  await other.page.getByRole("button", { name: "Use this key" }).click();
  await other.page.getByRole("heading", { name: /What shall/ }).waitFor();
  assert.ok(!other.page.url().includes("pg-"), "no secret in the address");
  await other.context.close();

  await page.getByRole("button", { name: "Revoke laptop" }).click();
  await page.getByRole("button", { name: "Revoke", exact: true }).click();
  await page.getByText("There are no keys").waitFor({ timeout: PATIENCE });
  assert.deepEqual([...problems, ...other.problems], []);
  await context.close();
});
