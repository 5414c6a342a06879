// Files as text, and images, read in the browser. The reader for PDFs is loaded when the first one comes.

import type { Attachment } from "../store/db.ts";

const MOST_BYTES = 20_000_000;
const MOST_CHARACTERS = 400_000;

/** Formats of images that the server decodes. */
const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];

/** Adds a file in place of one with the same name. Pasted images all have one name: each is kept under another. */
export function withFile(files: Attachment[], file: Attachment): Attachment[] {
  const same = files.find((other) => other.name === file.name);
  if (!same || !file.image || !same.image || same.image === file.image) return [...files.filter((other) => other !== same), file];
  for (let number = 2; ; number++) {
    const name = file.name.replace(/(\.[^.]*)?$/, (end) => ` ${number}${end}`);
    if (!files.some((other) => other.name === name)) return [...files, { ...file, name }];
  }
}

export async function readFile(file: File): Promise<Attachment> {
  if (file.size > MOST_BYTES) throw new Error(`“${file.name}” has ${Math.round(file.size / 1e6)} MB; at most 20 MB can be attached.`);
  if (IMAGES.includes(file.type)) return { name: file.name, text: "", image: await dataUrl(file) };
  if (file.type.startsWith("image/") && file.type !== "image/svg+xml") {
    throw new Error(`“${file.name}” is an image that is not read. Save it as PNG or JPEG.`);
  }
  const isPdf = file.type === "application/pdf" || file.name.toLowerCase().endsWith(".pdf");
  const text = isPdf ? await pdfText(file) : await plainText(file);
  if (text.length > MOST_CHARACTERS) {
    throw new Error(`“${file.name}” has ${text.length} characters; at most ${MOST_CHARACTERS} can be attached. Attach a part of it.`);
  }
  return { name: file.name, text };
}

function dataUrl(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result));
    reader.onerror = () => reject(new Error(`“${file.name}” cannot be read.`));
    reader.readAsDataURL(file);
  });
}

async function plainText(file: File): Promise<string> {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // Not UTF-8: told below.
  }
  throw new Error(`“${file.name}” is not text. Attach text files or PDFs.`);
}

async function pdfText(file: File): Promise<string> {
  const [pdf, { default: worker }] = await Promise.all([
    import("pdfjs-dist"),
    import("pdfjs-dist/build/pdf.worker.min.mjs?url"),
  ]).catch(() => {
    throw new Error("The reader of PDFs could not be loaded. Reload the page when the server answers; the draft is kept.");
  });
  pdf.GlobalWorkerOptions.workerSrc = worker;
  const task = pdf.getDocument({ data: await file.arrayBuffer(), useSystemFonts: true });
  try {
    const document = await task.promise;
    const pages: string[] = [];
    for (let number = 1; number <= document.numPages; number++) {
      const { items } = await (await document.getPage(number)).getTextContent();
      pages.push(items.map((item) => ("str" in item ? item.str + (item.hasEOL ? "\n" : "") : "")).join(""));
    }
    const text = pages.join("\n\n").trim();
    if (!text) throw new Error("it holds pictures only");
    return text;
  } catch (error) {
    const reason = error instanceof Error ? error.message : "it cannot be read";
    throw new Error(`No text comes out of “${file.name}”: ${reason}.`);
  } finally {
    await task.destroy();
  }
}
