// Cuts Markdown into blocks that can be rendered each on its own. While an answer streams only its last block changes,
// so everything above it stays as it is.

export type Block = { kind: "text"; text: string } | { kind: "code"; language: string; text: string; closed: boolean };

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;

export function blocksOf(text: string): Block[] {
  const blocks: Block[] = [];
  let lines: string[] = [];
  let inMath = false;
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
    if (/^\s*\$\$/.test(line) && !/\$\$.*\$\$/.test(line)) inMath = !inMath;
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

/** Writes LaTeX between `\(`, `\)`, `\[` and `\]` as Markdown's mathematics does. */
export function dollars(text: string): string {
  return text
    .replace(/\\\[([\s\S]+?)\\\]/g, (_, inside: string) => `\n$$\n${inside.trim()}\n$$\n`)
    .replace(/\\\((.+?)\\\)/g, (_, inside: string) => `$${inside}$`);
}

export function hasMath(text: string): boolean {
  return /\$[^\s$]|\$\$|\\\(|\\\[/.test(text);
}
