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
  assert.match(await stats(page).innerText(), /first token .* · \d+ tokens/);
  await stats(page).click();
  assert.match(await page.locator(".stats-more").innerText(), /\d+ of \d+ tokens cached[^]*\d+ pages?, \d+ shared/);
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
  // A file over the page is seen, and one that is dropped anywhere is attached.
  const drag = (kind) =>
    page.evaluate((kind) => {
      const dataTransfer = new DataTransfer();
      dataTransfer.items.add(new File(["Look up."], "dropped.txt"));
      dispatchEvent(new DragEvent(kind, { dataTransfer, cancelable: true }));
    }, kind);
  await drag("dragenter");
  await page.getByText("Drop images, text files or PDFs to attach them").waitFor();
  await drag("drop");
  await page.getByText("Drop images, text files or PDFs to attach them").waitFor({ state: "detached" });
  await page.getByRole("button", { name: "Remove dropped.txt" }).click();
  await input.setInputFiles({ name: "photo.bin", mimeType: "application/octet-stream", buffer: Buffer.from([0x89, 0x50, 0, 1]) });
  await page.getByText("“photo.bin” is not text").waitFor();
  // The message is above the box, and can be closed.
  const [note, box] = [await page.locator(".toasts .note").boundingBox(), await page.locator(".composer").boundingBox()];
  assert.ok(note.y + note.height <= box.y, `${JSON.stringify(note)} covers ${JSON.stringify(box)}`);
  await page.getByRole("button", { name: "Close the message" }).click();
  await page.getByText("“photo.bin” is not text").waitFor({ state: "detached" });
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
  // The chat that has not begun is still as it was.
  assert.equal(await page.getByLabel("System prompt", { exact: true }).inputValue(), "Tell it to a child.");
  await page.getByRole("button", { name: "Back to the model's own" }).click();
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
    // A part that no reader of Markdown survives is shown as it was written, and the rest as it should be.
    `${"> ".repeat(3000)}deep`,
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
  await answer.locator("pre.plain").nth(1).waitFor();
  assert.equal(await answer.locator("script, iframe, img, style, [onerror]").count(), 0);
  const links = await answer.locator("a").evaluateAll((all) => all.map((a) => a.protocol));
  assert.ok(links.every((protocol) => /^https?:$/.test(protocol)), links.join());
  assert.equal(await page.evaluate("window.hacked"), undefined);
  const box = await page.locator(".talk").boundingBox();
  assert.ok(box.width <= 1440, "a wide table does not widen the page");
  assert.deepEqual(problems.filter((problem) => !/^RangeError: Maximum call stack/.test(problem)), []);
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

/** Puts chats into the page as its own import does. */
async function importChats(page, conversations) {
  const chats = { format: "paguro-chats", version: 1, conversations };
  await page.locator("input[accept*=json]").setInputFiles({ name: "chats.json", mimeType: "application/json", buffer: Buffer.from(JSON.stringify(chats)) });
}

const conversation = (title, texts, more = {}) => ({
  id: title, title, created: 1, updated: 1, model: "tales", settings: {}, leaf: `${texts.length - 1}`, ...more,
  messages: texts.map((content, index) => ({
    id: `${index}`, conversation: title, parent: index ? `${index - 1}` : null, role: index % 2 ? "assistant" : "user", content, created: index, state: "done",
    ...(index % 2 ? { model: "tales" } : {}),
  })),
});

test("single messages are changed and deleted, and a deletion is taken back", { timeout: 90_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  await importChats(page, [conversation("Four", ["My name is Tom.", "Hello, Tim.", "What is my name?", "Your name is Tim."], { settings: { max_tokens: 6 } })]);
  await page.getByRole("link", { name: "Four" }).click();
  const answers = page.getByRole("article", { name: /^Answer of/ });
  // A change of an answer stays where it is, and is what the model reads.
  await answers.first().getByRole("button", { name: "Edit the answer" }).click();
  await page.getByRole("textbox", { name: "Edit the answer" }).fill("Hello, **Tom**.");
  await page.keyboard.press("Control+Enter");
  await page.locator("strong", { hasText: "Tom" }).waitFor();
  assert.match(await answers.first().innerText(), /^tales\s+Hello, Tom\./);
  await answers.nth(1).getByRole("button", { name: "Delete the answer" }).click();
  await page.getByText("The answer is deleted.").waitFor();
  assert.equal(await answers.count(), 1);
  await page.getByRole("button", { name: "Undo" }).click();
  await page.getByText("Your name is Tim.").waitFor();
  await answers.nth(1).getByRole("button", { name: "Delete the answer" }).click();
  // The last message has no answer now.
  const asked = page.waitForRequest("**/v1/chat/completions");
  await page.getByRole("button", { name: "Answer", exact: true }).click();
  assert.deepEqual((await asked).postDataJSON().messages.map(({ content }) => content), ["My name is Tom.", "Hello, **Tom**.", "What is my name?"]);
  await answered(page);
  // Without the first answer, two messages of the person follow each other: the model reads them as one.
  await answers.first().getByRole("button", { name: "Delete the answer" }).click();
  const saved = page.getByRole("article", { name: "Your message" }).last();
  await saved.getByRole("button", { name: "Edit", exact: true }).click();
  await page.getByRole("textbox", { name: "Edit your message" }).fill("Who am I?");
  await page.getByRole("button", { name: "Save", exact: true }).click();
  const again = page.waitForRequest("**/v1/chat/completions");
  await page.getByRole("button", { name: "Answer again" }).last().click();
  assert.deepEqual((await again).postDataJSON().messages, [{ role: "user", content: "My name is Tom.\n\nWho am I?" }]);
  await answered(page);
  await page.reload();
  await page.getByText("Who am I?").waitFor();
  assert.equal(await page.getByText("Hello, Tom.").count(), 0);
  assert.deepEqual(problems, []);
  await context.close();
});

test("a full context drops the oldest turns with a line, and is announced before", { timeout: 120_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  const tale = "Once upon a time there was a fox who lost a key. ".repeat(20).trim();
  const texts = Array.from({ length: 16 }, (_, index) => (index % 2 ? tale : `Tale number ${index / 2}`));
  await importChats(page, [conversation("Full", texts, { settings: { max_tokens: 20 } })]);
  await page.getByRole("link", { name: "Full" }).click();
  // Before the models are known, the server's refusal says what fits.
  const asked = [];
  page.on("request", (request) => request.url().endsWith("/v1/chat/completions") && asked.push(request.postDataJSON().messages));
  await send(page, "And the last tale?");
  await answered(page);
  const messages = asked.at(-1);
  assert.ok(messages.length < 17 && messages.length > 4 && messages[0].role === "user", `${messages.length} messages`);
  await page.getByText(/The chat no longer fits into 2,048 tokens; this answer was given without the \d+ oldest messages\./).waitFor();
  assert.match(await page.locator(".composer-note").innerText(), /^1,\d{3} of 2,048 tokens of context\. /);
  assert.match(await stats(page).innerText(), /tok\/s|first token/);
  // It goes on, for as long as one likes, and each answer drops no more than it must.
  await send(page, "One more?");
  await answered(page);
  assert.equal(await page.locator(".turn .note.bad").count(), 0);
  // A message that cannot fit says so in the chat's own words, and the next one is answered.
  await send(page, "long ".repeat(2500));
  await page.getByText(/^This message .*message and answer together can have 2,048\. Shorten it/).waitFor();
  await page.getByRole("button", { name: "Delete the message" }).last().click();
  await send(page, "And now?");
  await page.waitForFunction(() => [...document.querySelectorAll("article.answer")].at(-1)?.querySelector(".markdown")?.textContent);
  await answered(page);
  assert.deepEqual(problems, []);
  await context.close();
});

test("prices stay prices, formulas become formulas, and code is shown whole", { timeout: 60_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  const plain = [
    "It costs $5 and $6.", "From $10k to $20k, or 30$ and 40$.", "**$1,000** or US$5 and A$6.", "$20 USD and 30$", "$5-$6", "`$a$ and $b$`", "$HOME and $PATH", "x=$a;y=$b", "| $5 | $6 |", "a \\$5\\$ b",
  ];
  const maths = ["$x^2$", "so $n$th and $2 \\times 3$.", "\\(a+b\\)", "$$c$$ here", "1. Then:\n   \\[\n   d\n\n   e\n   \\]"];
  await importChats(page, [conversation("Prices", ["?", [...plain, ...maths].join("\n\n") + "\n\n```js\n" + "if (a <= b) f();\n".repeat(90) + "```\n\nThat is `\\(code\\)`."])]);
  await page.getByRole("link", { name: "Prices" }).click();
  const answer = page.locator("article.answer .markdown");
  await answer.locator("math").nth(5).waitFor();
  assert.equal(await answer.locator("math").count(), 6);
  assert.equal(await answer.locator("math[display=block]").count(), 1);
  const text = await answer.innerText();
  for (const shown of ["It costs $5 and $6.", "From $10k to $20k, or 30$ and 40$.", "$1,000 or US$5 and A$6.", "$20 USD and 30$", "$5-$6", "$a$ and $b$", "$HOME and $PATH", "x=$a;y=$b", "a $5$ b", "\\(code\\)"]) {
    assert.ok(text.includes(shown), `${shown} in ${text.slice(0, 600)}`);
  }
  const code = answer.locator(".code pre");
  assert.ok(await code.evaluate((pre) => pre.scrollHeight <= pre.clientHeight + 1), "code has no height of its own");
  assert.equal(await code.evaluate((pre) => getComputedStyle(pre.firstElementChild).fontVariantLigatures), "none");
  // Messages and the box below them have one width.
  const right = (of) => page.locator(of).evaluate((element) => Math.round(element.getBoundingClientRect().right));
  assert.equal(await right("article.answer .markdown"), await right(".composer"));
  assert.deepEqual(problems, []);
  await context.close();
});

test("a draft survives a reload, the last chat is kept, and another tab follows", { timeout: 90_000 }, async () => {
  const { page, context, problems } = await open(chromium, server);
  await limit(page, 8);
  const message = page.getByRole("textbox", { name: "Message" });
  await message.fill("Tell me a story about a");
  await page.getByLabel("Files", { exact: true }).setInputFiles({ name: "note.txt", mimeType: "text/plain", buffer: Buffer.from("a crab") });
  await page.getByRole("list", { name: "Attached files" }).waitFor();
  await page.reload();
  await page.getByRole("list", { name: "Attached files" }).getByText("note.txt").waitFor();
  assert.equal(await message.inputValue(), "Tell me a story about a");
  const other = await context.newPage();
  await other.goto(server.address);
  await page.bringToFront();
  await message.press("Enter");
  await answered(page);
  assert.equal(await message.inputValue(), "");
  // The other tab shows the new chat without being asked.
  await other.getByRole("link", { name: "Tell me a story about a" }).waitFor();
  // Models and back: the same chat, not another one.
  const chat = page.url();
  await page.getByRole("link", { name: "Models" }).click();
  await page.getByRole("heading", { name: "Models", level: 1 }).waitFor();
  await page.reload();
  await page.getByRole("link", { name: "Chat", exact: true }).click();
  await page.getByText("a crab").first().waitFor({ state: "attached" });
  assert.equal(page.url(), chat);
  assert.deepEqual(problems, []);
  await context.close();
});

test("a message is shown at once, also before the models are known", { timeout: 60_000 }, async () => {
  const { page, context, problems } = await open(chromium, server, {}, async (page) => {
    await page.route("**/ui/v1/models", async (route) => {
      await new Promise((resolve) => setTimeout(resolve, 2500));
      await route.continue().catch(() => undefined);
    }, { times: 1 });
  });
  await page.getByRole("textbox", { name: "Message" }).fill("Tell me a story about a whale");
  await page.keyboard.press("Enter");
  await page.locator(".bubble", { hasText: "a whale" }).waitFor({ timeout: 2000 });
  await answered(page);
  assert.deepEqual(problems, []);
  await context.close();
});

test("a page whose script is missing comes by itself, or with one click", { timeout: 120_000 }, async () => {
  // As in a tab that is open while the program is replaced: scripts of its build are not there any more.
  const gone = (page) => page.route(/\/ui\/assets\/(models|settings|room|playground)-page/, (route) => route.fulfill({ status: 404, body: "" }));
  const { page, context } = await open(chromium, server, {}, gone);
  await page.getByRole("textbox", { name: "Message" }).fill("A draft");
  const reloaded = page.waitForEvent("load");
  await page.getByRole("link", { name: "Models" }).click();
  // It is loaded again once by itself; where that does not help, there is a sentence and a button, and no white page.
  await reloaded;
  await page.getByText("This page could not be loaded").waitFor();
  await page.unroute(/\/ui\/assets\/(models|settings|room|playground)-page/);
  await page.getByRole("button", { name: "Try again" }).click();
  await page.getByRole("heading", { name: "Models", level: 1 }).waitFor();
  await page.getByRole("link", { name: "Chat", exact: true }).click();
  assert.equal(await page.getByRole("textbox", { name: "Message" }).inputValue(), "A draft");
  await context.close();

  // The server is away at first, and another build of it comes back.
  const second = await open(chromium, server, {}, gone);
  await second.page.getByRole("heading", { name: /What shall/ }).waitFor();
  await server.kill();
  await second.page.getByRole("link", { name: "Settings" }).click();
  await second.page.getByText("The page is loaded when it is back").waitFor();
  await second.page.unroute(/\/ui\/assets\/(models|settings|room|playground)-page/);
  await server.start();
  await second.page.getByRole("heading", { name: "Settings and status" }).waitFor();
  // A tab of another build says so, and loads the new one with a click.
  await second.page.route("**/", async (route) => {
    const answer = await route.fetch();
    const { etag: _, ...headers } = answer.headers();
    await route.fulfill({ response: answer, headers, body: (await answer.text()).replace(/(name="paguro-page" content=")\w+/, "$10") });
  }, { times: 1 });
  await second.page.reload();
  await second.page.getByText("The server was updated.").waitFor();
  await second.page.getByRole("button", { name: "Reload" }).click();
  await second.page.getByText("The server was updated.").waitFor({ state: "detached" });
  await second.context.close();
});
