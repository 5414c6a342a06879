// The chat, in a browser, with the model inside the program.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { STORY, Server, answered, browser, freePort, limit, open, send } from "./harness.mjs";

let server, chromium;
before(async () => {
  server = await new Server(await freePort()).start();
  chromium = await browser();
});
after(async () => {
  await chromium?.close();
  await server?.stop();
});

const stats = (page) => page.locator(".stats summary").last();

test("an answer streams, another branch is made, and both are kept", { timeout: 90_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  await limit(page, 40);
  await send(page, STORY);
  const first = await answered(page);
  assert.ok(first.length > 40, first);
  assert.match(await stats(page).innerText(), /tok\/s · first token .* prompt tokens cached · \d+ pages?, \d+ shared/);
  await page.getByRole("button", { name: "Answer again" }).click();
  await page.getByText("2/2").waitFor();
  await answered(page);
  await page.getByRole("button", { name: "Branch before" }).click();
  await page.getByText("1/2").waitFor();
  assert.equal(await answered(page), first);
  // Editing makes a branch of the turn itself.
  await page.getByRole("button", { name: "Edit" }).first().click();
  await page.getByRole("textbox", { name: "Edit your message" }).fill("Tell me a story about a boat");
  await page.getByRole("button", { name: "Send", exact: true }).first().click();
  await page.getByText("2/2").first().waitFor();
  await answered(page);
  await page.getByRole("button", { name: "Show all branches" }).click();
  assert.match(await page.getByRole("dialog").innerText(), /3 ends/);
  await page.keyboard.press("Escape");
  // All of it is still there after a reload.
  await page.reload();
  await page.getByText("Tell me a story about a boat").last().waitFor();
  assert.equal(await page.getByText("2/2").first().isVisible(), true);
  await page.getByRole("link", { name: "New chat" }).click();
  await page.getByRole("heading", { name: /What shall/ }).waitFor();
  assert.equal(await page.locator("article").count(), 0);
  assert.deepEqual(problems, []);
  await context.close();
});

test("an answer is stopped and continued", { timeout: 90_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  await limit(page, 160);
  // In the page, because a quick machine has ended the answer before a click from outside arrives.
  await page.evaluate(() => {
    const observer = new MutationObserver(() => {
      if (!document.querySelector("article.answer .markdown")) return;
      observer.disconnect();
      document.querySelector("button[aria-label=Stop]").click();
    });
    observer.observe(document.body, { childList: true, subtree: true });
  });
  await send(page, STORY);
  const begun = await answered(page);
  assert.match(await stats(page).innerText(), /^stopped/);
  await page.getByRole("button", { name: "Continue" }).click();
  await page.waitForFunction((length) => (document.querySelector("article.answer .markdown")?.textContent.length ?? 0) > length, begun.length + 20);
  const whole = await answered(page);
  assert.ok(whole.startsWith(begun.slice(0, 20)), `${begun} / ${whole}`);
  assert.deepEqual(problems, []);
  await context.close();
});

test("a server that goes away and comes back is survived", { timeout: 90_000 }, async () => {
  const { page, context } = await open(chromium, server);
  await limit(page, 1800);
  // The first answer goes on for as long as it may, so that it is on its way when the server goes.
  await page.route("**/v1/chat/completions", (route) => {
    const body = { ...route.request().postDataJSON(), ignore_eos: true };
    return route.continue({ postData: JSON.stringify(body) });
  }, { times: 1 });
  await send(page, STORY);
  await page.locator("article.answer .markdown").waitFor();
  await server.kill();
  await page.getByText("The answer was cut off.").waitFor();
  await page.getByText("The page goes on by itself when it is back.").waitFor();
  await server.start();
  await page.getByText("The page goes on by itself when it is back.").waitFor({ state: "detached" });
  const begun = await answered(page);
  await page.getByRole("button", { name: "Continue" }).click();
  await page.waitForFunction((length) => (document.querySelector("article.answer .markdown")?.textContent.length ?? 0) > length, begun.length);
  await answered(page);
  await context.close();
});

/** The smallest PDF with a line of text. */
function pdf(text) {
  const content = `BT /F1 18 Tf 40 120 Td (${text}) Tj ET`;
  const objects = [
    "<< /Type /Catalog /Pages 2 0 R >>",
    "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
    "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 200] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
    `<< /Length ${content.length} >>\nstream\n${content}\nendstream`,
    "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
  ];
  let file = "%PDF-1.4\n";
  const places = objects.map((object, index) => {
    const place = file.length;
    file += `${index + 1} 0 obj\n${object}\nendobj\n`;
    return `${String(place).padStart(10, "0")} 00000 n \n`;
  });
  const table = file.length;
  return Buffer.from(`${file}xref\n0 6\n0000000000 65535 f \n${places.join("")}trailer\n<< /Size 6 /Root 1 0 R >>\nstartxref\n${table}\n%%EOF\n`);
}

test("text files and PDFs are attached as text, and others are refused", { timeout: 60_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  await limit(page, 8);
  const input = page.getByLabel("Files", { exact: true });
  await input.setInputFiles([
    { name: "note.txt", mimeType: "text/plain", buffer: Buffer.from("The key is under the stone.") },
    { name: "map.pdf", mimeType: "application/pdf", buffer: pdf("The stone is behind the mill.") },
  ]);
  const files = page.getByRole("list", { name: "Attached files" });
  await files.getByText("note.txt").waitFor();
  await files.getByText("map.pdf").waitFor();
  await input.setInputFiles({ name: "photo.png", mimeType: "image/png", buffer: Buffer.from([0x89, 0x50, 0, 1]) });
  await page.getByText("“photo.png” is not text").waitFor();
  await input.setInputFiles({ name: "broken.pdf", mimeType: "application/pdf", buffer: Buffer.from("%PDF-1.4 no") });
  await page.getByText("No text comes out of “broken.pdf”").waitFor();
  const asked = page.waitForRequest("**/v1/chat/completions");
  await send(page, "Where is the key?");
  const [message] = (await asked).postDataJSON().messages.slice(-1);
  assert.equal(message.content, '<file name="note.txt">\nThe key is under the stone.\n</file>\n\n<file name="map.pdf">\nThe stone is behind the mill.\n</file>\n\nWhere is the key?');
  await answered(page);
  await page.locator(".attached summary").last().click();
  await page.getByText("The stone is behind the mill.").waitFor();
  assert.deepEqual(problems, []);
  await context.close();
});

test("a preset has system prompt and sampling, and stays in the browser", { timeout: 60_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  await page.getByRole("button", { name: "System prompt and sampling" }).click();
  await page.getByLabel("System prompt", { exact: true }).fill("Tell it to a child.");
  await page.getByRole("slider", { name: "Temperature", exact: true }).fill("0.35");
  await page.getByRole("button", { name: "Presets" }).click();
  await page.getByRole("menuitem", { name: /Save these/ }).click();
  await page.getByRole("textbox", { name: "Name" }).fill("Bedtime");
  await page.getByRole("button", { name: "Save", exact: true }).click();
  await page.reload();
  await page.getByRole("button", { name: "System prompt and sampling" }).click();
  assert.equal(await page.getByLabel("System prompt", { exact: true }).inputValue(), "");
  await page.getByRole("button", { name: "Presets" }).click();
  await page.getByRole("menuitem", { name: /^Bedtime/ }).click();
  assert.equal(await page.getByLabel("System prompt", { exact: true }).inputValue(), "Tell it to a child.");
  const asked = page.waitForRequest("**/v1/chat/completions");
  await page.getByLabel(/Longest answer/).fill("4");
  await send(page, STORY);
  const body = (await asked).postDataJSON();
  assert.deepEqual([body.messages[0], body.temperature], [{ role: "system", content: "Tell it to a child." }, 0.35]);
  await answered(page);
  assert.deepEqual(problems, []);
  await context.close();
});

test("nothing that a model writes is executed", { timeout: 60_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  const row = `| ${"cell | ".repeat(40)}\n`;
  const hostile = [
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>",
    "[press](javascript:window.hacked=1) <a href='javascript:window.hacked=1'>press</a> [d](data:text/html,<script>1</script>)",
    "![spy](http://example.invalid/spy.png)",
    "<iframe src='http://example.invalid'></iframe><style>body { display: none }</style>",
    "$\\href{javascript:window.hacked=1}{x}$ and $$\\frac{1}{2}$$",
    "```html\n<script>window.hacked = 1</script>\n```",
    `${row}| ${"--- | ".repeat(40)}\n${row.repeat(60)}`,
    // More than can be laid out in time is shown as it was written.
    `| a |\n| - |\n${"| b |\n".repeat(20_000)}`,
  ].join("\n\n");
  const chat = {
    format: "paguro-chats",
    version: 1,
    conversations: [
      {
        id: "a", title: "Hostile", created: 1, updated: 1, model: "tales", settings: {}, leaf: "2",
        messages: [
          { id: "1", conversation: "a", parent: null, role: "user", content: hostile, created: 1, state: "done" },
          { id: "2", conversation: "a", parent: "1", role: "assistant", content: hostile, created: 2, state: "done", model: "tales" },
        ],
      },
    ],
  };
  await page.locator("input[accept*=json]").setInputFiles({ name: "chats.json", mimeType: "application/json", buffer: Buffer.from(JSON.stringify(chat)) });
  await page.getByRole("link", { name: "Hostile" }).click();
  const answer = page.locator("article.answer .markdown");
  await answer.locator("math").first().waitFor();
  await answer.locator("table").waitFor();
  await answer.locator("pre.plain").waitFor();
  assert.equal(await answer.locator("script, iframe, img, style, [onerror]").count(), 0);
  const links = await answer.locator("a").evaluateAll((all) => all.map((a) => a.protocol));
  assert.ok(links.every((protocol) => /^https?:$/.test(protocol)), links.join());
  assert.equal(await page.evaluate("window.hacked"), undefined);
  const box = await page.locator(".talk").boundingBox();
  assert.ok(box.width <= 1440, "a wide table does not widen the page");
  assert.deepEqual(problems, []);
  await context.close();
});

test("a thousand messages and a long answer stay quick", { timeout: 60_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  const paragraph = "The fox looked under the *old* bridge and found `a key`, but it was not **her** key.\n\n";
  const messages = Array.from({ length: 1000 }, (_, index) => ({
    id: `m${index}`, conversation: "b", parent: index ? `m${index - 1}` : null, role: index % 2 ? "assistant" : "user",
    content: index === 999 ? paragraph.repeat(600) : `${index}: ${paragraph}`, created: index, state: "done", model: "tales",
  }));
  const chat = { format: "paguro-chats", version: 1, conversations: [{ id: "b", title: "Long", created: 1, updated: 1, model: "tales", settings: {}, leaf: "m999", messages }] };
  await page.locator("input[accept*=json]").setInputFiles({ name: "chats.json", mimeType: "application/json", buffer: Buffer.from(JSON.stringify(chat)) });
  await page.getByRole("link", { name: "Long" }).click();
  await page.locator("article.answer .markdown").last().waitFor();
  // Only what is near the view is in the document.
  const turns = await page.locator("article.turn").count();
  assert.ok(turns < 60, `${turns} turns are in the document`);
  assert.deepEqual(problems, []);
  await context.close();
});
