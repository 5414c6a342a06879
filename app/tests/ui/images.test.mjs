// Images in a chat with a model that sees: pasted, dropped and attached, after a reload, and in later turns.

import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { after, before, test } from "node:test";

import { Server, answered, browser, findings, go, open, picture, send } from "./harness.mjs";

// The folder of the trained model, with pictures and their answers.
const folder = process.env.PAGURO_SEES;
const skip = folder && existsSync(folder) ? false : "no model that sees";
const server = new Server(0, ...(skip ? [] : [folder, "--device", "cpu"]));
let chromium;
let page;
let context;
let problems;

before(async () => {
  if (skip) return;
  await server.start();
  chromium = await browser();
  ({ page, context, problems } = await open(chromium, server));
});

after(async () => {
  await chromium?.close();
  await server.stop();
});

const reference = () => JSON.parse(readFileSync(`${folder}/reference/reference.json`, "utf8"));
const png = (name) => readFileSync(`${folder}/reference/${name}`);

/** The value of a counter of the server. */
async function metric(name) {
  const text = await (await fetch(`${server.address}/metrics`)).text();
  const lines = text.split("\n").filter((line) => line.startsWith(`paguro_${name}_total`));
  return lines.reduce((sum, line) => sum + Number(line.split(" ").at(-1)), 0);
}

/** Lets a file come as the clipboard or a drop brings it. */
async function bring(kind, name, bytes) {
  await page.evaluate(
    ([event, fileName, data]) => {
      const file = new File([Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0))], fileName, { type: "image/png" });
      const transfer = new DataTransfer();
      transfer.items.add(file);
      const target = document.querySelector("textarea");
      if (event === "paste") {
        target.dispatchEvent(new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true }));
      } else {
        for (const type of ["dragenter", "dragover", "drop"]) {
          target.dispatchEvent(new DragEvent(type, { dataTransfer: transfer, bubbles: true, cancelable: true }));
        }
      }
    },
    [kind, name, bytes.toString("base64")],
  );
}

const files = () => page.getByRole("list", { name: "Attached files" });

/** Asks the question of a reference in a new chat; the answer must be that of the reference. */
async function ask(entry, attach) {
  await page.goto(server.address);
  await page.getByRole("link", { name: "New chat", exact: true }).click();
  await settle();
  for (const name of entry.pictures) await attach(name, png(name));
  await files().locator("img").nth(entry.pictures.length - 1).waitFor();
  await send(page, entry.question);
  assert.equal(await answered(page), entry.answer);
}

/** Chooses answers that do not depend on chance. */
async function settle() {
  await page.getByRole("button", { name: "System prompt and sampling" }).click();
  const temperature = page.getByRole("slider", { name: "Temperature" });
  for (const value of ["0.05", "0"]) await temperature.fill(value);
  await page.getByRole("button", { name: "Close" }).click();
}

test("images are pasted, dropped and attached, and answered", { skip, timeout: 120_000 }, async () => {
  const all = reference();
  const [one, two, three] = all.filter((entry) => entry.pictures.length === 1);
  const pair = all.find((entry) => entry.pictures.length === 2);
  await ask(one, (_, bytes) => bring("paste", "image.png", bytes));
  await ask(two, (name, bytes) => bring("drop", name, bytes));
  await ask(three, (name, buffer) => page.getByLabel("Files", { exact: true }).setInputFiles({ name, mimeType: "image/png", buffer }));
  // The clipboard gives all images one name.
  await ask(pair, (_, bytes) => bring("paste", "image.png", bytes));
  assert.equal(await metric("images_encoded"), 5);
  assert.deepEqual(await findings(page), []);
  await picture(page, "images");
});

test("an image of an earlier turn is neither decoded nor encoded again, also after a reload", { skip, timeout: 120_000 }, async () => {
  const entry = reference().filter(({ pictures }) => pictures.length === 1)[3];
  await ask(entry, (_, bytes) => bring("paste", "image.png", bytes));
  const counts = async () => [await metric("images"), await metric("images_decoded"), await metric("images_encoded")];
  const first = await counts();
  await send(page, "What shape is it?");
  await answered(page);
  assert.deepEqual(await counts(), [first[0] + 1, first[1], first[2]]);
  await page.reload();
  await page.locator(".bubble").last().waitFor();
  await page.locator('img[alt^="image"]').first().waitFor();
  await send(page, "Is there a star?");
  await answered(page);
  assert.deepEqual(await counts(), [first[0] + 2, first[1], first[2]]);
  // The image is shown, and opens in full size.
  const summary = page.locator("summary[aria-label^='Image ']").first();
  await summary.click();
  await go(page, "/room");
  const panel = page.getByRole("region", { name: "Images" });
  await panel.getByText("none is being encoded").waitFor();
  const kept = panel.locator("div", { has: page.getByText("In the cache", { exact: true }) }).locator("dd");
  assert.equal(Number(await kept.innerText()), first[2]);
  assert.deepEqual(problems, []);
});
