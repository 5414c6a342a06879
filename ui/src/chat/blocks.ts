// Cuts Markdown into blocks that can be rendered each on its own. While an answer streams only its last block changes,
// so everything above it stays as it is.

export type Block = { kind: "text"; text: string } | { kind: "code"; language: string; text: string; closed: boolean };

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;

export function blocksOf(text: string): Block[] {
  const blocks: Block[] = [];
  let lines: string[] = [];
  let inMath: "$$" | "\\]" | false = false;
  const flush = () => {
    const joined = lines.join("\n");
    if (joined.trim()) blocks.push({ kind: "text", text: joined });
    lines = [];
  };
  const all = text.split("\n");
  for (let i = 0; i < all.length; i++) {
    const line = all[i] ?? "";
    const fence = inMath ? null : FENCE.exec(line);
    if (fence) {
      flush();
      const [, indent = "", marks = "", language = ""] = fence;
      const close = new RegExp(`^ {0,3}\\${marks[0] ?? "`"}{${marks.length},}\\s*$`);
      const code: string[] = [];
      let closed = false;
      for (i += 1; i < all.length; i++) {
        const inside = all[i] ?? "";
        if (close.test(inside)) {
          closed = true;
          break;
        }
        code.push(inside.startsWith(indent) ? inside.slice(indent.length) : inside);
      }
      blocks.push({ kind: "code", language, text: code.join("\n"), closed });
      continue;
    }
    // A displayed formula may have blank lines.
    if (inMath) inMath = !(inMath === "$$" ? line.includes("$$") : line.includes("\\]")) && inMath;
    else if (/^\s*\$\$/.test(line) && !/\$\$.*\$\$/.test(line)) inMath = "$$";
    else if (/^\s*\\\[/.test(line) && !line.includes("\\]")) inMath = "\\]";
    // A blank line ends a block, unless what follows may belong to the list or the quote before it.
    const next = all[i + 1];
    lines.push(line);
    if (!inMath && line.trim() === "" && next !== undefined && next.trim() !== "" && !/^(\s|[-*+>]\s|\d+[.)]\s)/.test(next)) {
      flush();
    }
  }
  flush();
  return blocks;
}

/** Rewrites the formulas of a text as remark-math reads them, with two dollars each; prices stay as they are. Between single
    dollars a formula is what Pandoc takes for one: no blank inside of the dollars, and no digit after the closing one.
    Code is left alone. Returns `null` if there is no formula. */
export function formulas(text: string): string | null {
  if (!/[$]|\\[([]/.test(text)) return null;
  let [out, found] = ["", false];
  let at = 0;
  /** Copies a part of the text. */
  const copy = (end: number) => {
    out += text.slice(at, end);
    at = end;
  };
  while (at < text.length) {
    const character = text[at];
    if (character === "`") {
      const [run = ""] = /^`+/.exec(text.slice(at)) ?? [];
      const close = closing(text, at + run.length, run);
      copy(close < 0 ? at + run.length : close + run.length);
      continue;
    }
    if (character === "\\") {
      const open = text[at + 1];
      const end = open === "(" ? text.indexOf("\\)", at + 2) : open === "[" ? text.indexOf("\\]", at + 2) : -1;
      const inside = end < 0 ? "" : text.slice(at + 2, end);
      const isFormula = inside.trim() !== "" && (open === "[" || !inside.includes("\n\n"));
      if (!isFormula) {
        copy(at + 2);
        continue;
      }
      found = true;
      out += open === "[" ? display(text, at, end + 2, inside) : `$$${inside.trim()}$$`;
      at = end + 2;
      continue;
    }
    if (character !== "$") {
      copy(at + 1);
      continue;
    }
    if (text[at + 1] === "$") {
      const end = text.indexOf("$$", at + 2);
      const inside = end < 0 ? "" : text.slice(at + 2, end);
      if (inside.trim() === "") {
        copy(at + 2);
        continue;
      }
      found = true;
      out += isAlone(text, at, end + 2) ? display(text, at, end + 2, inside) : `$$${inside.trim()}$$`;
      at = end + 2;
      continue;
    }
    const end = closingDollar(text, at);
    if (end < 0) {
      copy(at + 1);
      continue;
    }
    found = true;
    out += `$$${text.slice(at + 1, end)}$$`;
    at = end + 1;
  }
  return found ? out : null;
}

/** Index of the backticks that close a code span, or -1. */
function closing(text: string, from: number, run: string): number {
  for (let at = text.indexOf(run, from); at >= 0; ) {
    let end = at;
    while (text[end] === "`") end += 1;
    if (end - at === run.length) return at;
    at = text.indexOf(run, end);
  }
  return -1;
}

/** Index of the dollar that closes the formula that begins at `at`, or -1 if that dollar is a currency, a variable or a sign. */
function closingDollar(text: string, at: number): number {
  if (/[\p{L}\p{N}]/u.test(text[at - 1] ?? "") || !/[^\s$]/.test(text[at + 1] ?? "")) return -1;
  // A price and the words after it.
  const isPrice = /^\d[\d.,]*(?:[kKmMbB]\b|\s+\p{L}{2,})/u.test(text.slice(at + 1, at + 40));
  for (let end = at + 1; end < text.length; end++) {
    const character = text[end];
    if (character === "\n" || character === "`") return -1;
    if (character === "\\") end += 1;
    else if (character === "$") {
      if (text[end + 1] === "$") return -1;
      const [before, after] = [text[end - 1] ?? "", text[end + 1] ?? ""];
      if (/\s/.test(before) || /\d/.test(after)) {
        if (isPrice) return -1;
        continue;
      }
      // `$a=$b` are variables of a shell; `$n$th` is a formula.
      const isVariable = /[=+*/<>,(&|:-]/.test(before) && /\p{L}/u.test(after);
      return isPrice || isVariable ? -1 : end;
    }
  }
  return -1;
}

/** True if nothing else is on the line of a part. */
function isAlone(text: string, from: number, to: number): boolean {
  const before = text.slice(text.lastIndexOf("\n", from - 1) + 1, from);
  const [after = ""] = text.slice(to).split("\n", 1);
  return before.trim() === "" && after.trim() === "";
}

/** A displayed formula on lines of its own, as deep as the text around it. */
function display(text: string, from: number, to: number, inside: string): string {
  const line = text.slice(text.lastIndexOf("\n", from - 1) + 1, from);
  const indent = (/^\s*(?:(?:[-*+]|\d+[.)])\s+)?/.exec(line)?.[0] ?? "").replaceAll(/\S/g, " ");
  const body = inside.trim().split("\n").map((one) => indent + one.trim()).filter((one) => one.trim() !== "").join("\n");
  const begin = line.trim() === "" ? "" : `\n\n${indent}`;
  const [after = ""] = text.slice(to).split("\n", 1);
  return `${begin}$$\n${body}\n${indent}$$${after.trim() === "" ? "" : `\n\n${indent}`}`;
}
