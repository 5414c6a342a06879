// Writes the built page to where the server embeds it: each file compressed, and a table of them in Rust. The same
// sources give the same bytes on every machine, so the compressor is a JavaScript library of a fixed version and not
// the one of Node.

import { createHash } from "node:crypto";
import { existsSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";

import { gzipSync } from "fflate";
import type { Plugin } from "vite";

/** Kinds of files that are compressed already. */
const COMPRESSED = /\.woff2$/;

export function embed(folder: string): Plugin {
  const packages = new Set<string>();
  let [out, target] = ["", ""];
  return {
    name: "embed",
    apply: "build",
    configResolved(config) {
      out = join(config.root, config.build.outDir);
      target = join(config.root, folder);
    },
    generateBundle(_options, bundle) {
      for (const chunk of Object.values(bundle)) {
        const modules = chunk.type === "chunk" ? chunk.moduleIds : chunk.originalFileNames;
        for (const id of modules) {
          const found = /^(.*node_modules\/((?:@[^/]+\/)?[^/]+))\//.exec(id.replaceAll("\\", "/").replace(/^\0/, ""));
          if (found?.[1]) packages.add(found[1]);
        }
      }
      this.emitFile({ type: "asset", fileName: "licenses.txt", source: licenses([...packages]) });
    },
    closeBundle() {
      write(out, target);
    },
  };
}

/** The packages of the page, with their licenses. */
function licenses(folders: string[]): string {
  const texts = folders.map((folder) => {
    const about = JSON.parse(readFileSync(join(folder, "package.json"), "utf8")) as Record<string, unknown>;
    const file = readdirSync(folder).find((name) => /^(licen[cs]e|copying)/i.test(name));
    const text = file ? readFileSync(join(folder, file), "utf8").trim() : "";
    return `${String(about["name"])} ${String(about["version"])} (${String(about["license"])})\n\n${text}\n`;
  });
  return texts.sort().join(`\n${"-".repeat(80)}\n\n`);
}

function files(folder: string): string[] {
  return readdirSync(folder, { withFileTypes: true })
    .flatMap((entry) => (entry.isDirectory() ? files(join(folder, entry.name)) : [join(folder, entry.name)]))
    .sort();
}

/** Most bytes of the first load: the page, the scripts and styles that it names, and the font. */
const MOST_FIRST = 400_000;

/** Bytes of the first load, as they are sent. */
function firstLoad(from: string, to: string): number {
  const page = readFileSync(join(from, "index.html"), "utf8");
  const named = [...page.matchAll(/\/ui\/(assets\/[^"]+)"/g)].map((match) => `${match[1]}.gz`);
  const fonts = files(join(to, "assets")).filter((file) => COMPRESSED.test(file));
  const sent = ["index.html.gz", ...new Set(named)].map((name) => join(to, name)).concat(fonts);
  return sent.reduce((sum, file) => sum + readFileSync(file).length, 0);
}

/** Writes a file unless it has these bytes: a new time would have the server compiled again. */
function put(file: string, bytes: Uint8Array): void {
  if (existsSync(file) && readFileSync(file).equals(bytes)) return;
  mkdirSync(dirname(file), { recursive: true });
  writeFileSync(file, bytes);
}

/** Identifies this build: a hash of all files. */
function identity(from: string): string {
  const hash = createHash("sha256");
  for (const file of files(from)) hash.update(`${relative(from, file).replaceAll("\\", "/")}\n`).update(readFileSync(file));
  return hash.digest("hex").slice(0, 16);
}

function write(from: string, to: string): void {
  const table = join(to, "table.rs");
  const written = new Set([table]);
  // The page knows which build it is, and the server which one it has, so an open page notices an upgrade.
  const page = identity(from);
  const rows = files(from).map((file) => {
    const path = relative(from, file).replaceAll("\\", "/");
    const content = readFileSync(file);
    const bytes = path === "index.html" ? Buffer.from(content.toString().replace("<title>", `<meta name="paguro-page" content="${page}" />\n    <title>`)) : content;
    const gzip = !COMPRESSED.test(path);
    const name = gzip ? `${path}.gz` : path;
    written.add(join(to, name));
    put(join(to, name), gzip ? gzipSync(bytes, { level: 9, mtime: 0 }) : bytes);
    return `    File { path: "${path}", bytes: include_bytes!("${name}"), gzip: ${gzip} },\n`;
  });
  const head = "// Written by `npm run build` in `ui/`.\n\n";
  const build = `/// Identifies this build of the page.\npub const PAGE: &str = "${page}";\n\n`;
  put(table, Buffer.from(`${head}${build}/// All files, by path.\nconst FILES: &[File] = &[\n${rows.join("")}];\n`));
  files(to)
    .filter((file) => !written.has(file))
    .forEach((file) => rmSync(file));
  const first = firstLoad(from, to);
  if (first > MOST_FIRST) throw new Error(`the first load is ${first} bytes, and may be ${MOST_FIRST}: load what pages need when they open`);
  console.log(`the first load is ${Math.round(first / 1000)} kB`);
}
