// The page on a phone, held in one hand, by somebody who sees it for the first time.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { STORY, Server, answered, browser, findings, go, limit, open } from "./harness.mjs";

const PHONE = { viewport: { width: 390, height: 844 }, hasTouch: true, isMobile: true };

/** Smallest side of what a finger can hit. */
const FINGER = 44;

let chromium;
before(async () => {
  chromium = await browser();
});
after(() => chromium?.close());

/** Controls that a finger may miss, with their sizes. Links within a text are as tall as it is. */
async function small(page) {
  return page.evaluate((finger) => {
    const controls = document.querySelectorAll("button, a[href], input, select, textarea, summary, [role=button], [role=menuitem], [role=tab], [role=slider]");
    const found = [];
    for (const control of controls) {
      // A label is hit as well as its box.
      const target = control.closest("label") ?? control;
      const { width, height } = target.getBoundingClientRect();
      const isShown = control.checkVisibility({ opacityProperty: true, visibilityProperty: true }) && width > 1 && height > 1;
      const isText = control.matches("a") && getComputedStyle(control).display === "inline";
      if (!isShown || isText || (width >= finger && height >= finger)) continue;
      const name = control.getAttribute("aria-label") ?? control.textContent?.trim().slice(0, 40) ?? "";
      found.push(`${control.tagName.toLowerCase()}.${control.className} "${name}": ${Math.round(width)} x ${Math.round(height)}`);
    }
    return found;
  }, FINGER);
}

/** Fails if a control is not in the part of the screen that a thumb reaches. */
async function withinReach(page, control) {
  const box = await control.boundingBox();
  const { width, height } = PHONE.viewport;
  assert.ok(box && box.y >= height / 2 && box.y + box.height <= height && box.x >= 0 && box.x + box.width <= width, `${control}: ${JSON.stringify(box)}`);
}

test("from the command to the first token, without reading and with one thumb", { timeout: 90_000 }, async (t) => {
  const begin = performance.now();
  const server = await new Server().start();
  t.after(() => server.stop());
  const { page, context, problems } = await open(chromium, server, PHONE);
  const suggestion = page.locator(".prompt").last();
  await suggestion.waitFor();
  await withinReach(page, suggestion);
  await suggestion.tap();
  await page.waitForFunction(() => document.querySelector("article.answer .markdown")?.textContent?.trim());
  const seconds = ((performance.now() - begin) / 1000).toFixed(1);
  console.log(`# from \`paguro serve\` to the first token in the browser: ${seconds} s`);
  await answered(page);
  // The next message, by thumb as well.
  const message = page.getByRole("textbox", { name: "Message" });
  await withinReach(page, message);
  await message.tap();
  await page.keyboard.type("And then?");
  const send = page.getByRole("button", { name: "Send" });
  await withinReach(page, send);
  await send.tap();
  await page.getByRole("article", { name: /^Answer of/ }).nth(1).waitFor();
  await answered(page);
  assert.deepEqual(problems, []);
  await context.close();
});

test("on a phone every control is large enough for a finger, and nothing is wider than the screen", { timeout: 90_000 }, async (t) => {
  const server = await new Server().start();
  t.after(() => server.stop());
  const { page, context, problems } = await open(chromium, server, PHONE);
  const wrong = [];
  const look = async (name) => {
    for (const control of await small(page)) wrong.push(`${name}: ${control}`);
    const { width } = PHONE.viewport;
    if ((await page.evaluate(() => document.documentElement.scrollWidth)) > width) wrong.push(`${name}: wider than the screen`);
  };
  await page.getByRole("button", { name: STORY }).waitFor();
  await look("empty chat");
  await limit(page, 12);
  await page.getByRole("button", { name: STORY }).tap();
  await answered(page);
  await look("chat");
  await page.getByRole("button", { name: "System prompt and sampling" }).tap();
  await page.getByRole("slider", { name: "Temperature", exact: true }).waitFor();
  await look("sampling");
  await page.getByRole("button", { name: "Close" }).tap();
  await page.getByRole("button", { name: "Show the chats" }).tap();
  await page.getByRole("searchbox", { name: "Search chats" }).waitFor();
  await look("list of chats");
  for (const [path, heading] of [["models", "Models"], ["room", "Machine room"], ["playground", "Playground"], ["settings", "Settings"]]) {
    await go(page, `/${path}`);
    await page.getByRole("heading", { name: heading, level: 1 }).waitFor();
    await page.waitForTimeout(300);
    await look(path);
  }
  // The documentation of the APIs, too: by use, with examples, and nothing wider than the screen.
  await page.goto(`${server.address}/docs`);
  const examples = page.locator(".example pre");
  await examples.first().waitFor();
  assert.match(await examples.first().innerText(), /^curl http:\/\/[^ ]+\/v1\/chat\/completions -d '\{/);
  await page.getByRole("searchbox", { name: "Search paths" }).fill("api chat");
  await page.getByText("/api/chat", { exact: true }).tap();
  await examples.nth(1).waitFor();
  await page.getByText("All types").tap();
  assert.ok(!(await page.locator("main").innerText()).includes("`"), "backticks are drawn as code");
  await look("docs");
  assert.deepEqual(wrong, []);
  assert.deepEqual(await findings(page), []);
  assert.deepEqual(problems, []);
  await context.close();
});
