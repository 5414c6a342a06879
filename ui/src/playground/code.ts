// A request as one would write it elsewhere. The key is a name, never the one that this page uses.

import { storedKey } from "../api/client.ts";

export function asCurl(origin: string, path: string, body: unknown): string {
  const key = storedKey() ? ` \\\n  -H "Authorization: Bearer $PAGURO_KEY"` : "";
  const text = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${origin}${path}${key} \\\n  -H "Content-Type: application/json" \\\n  -d '${text}'`;
}

export function asPython(origin: string, path: string, body: unknown): string {
  const headers = storedKey() ? `\n    headers={"Authorization": f"Bearer {os.environ['PAGURO_KEY']}"},` : "";
  const imports = storedKey() ? "import os\n\nimport requests" : "import requests";
  return `${imports}\n\nanswer = requests.post(\n    "${origin}${path}",${headers}\n    json=${python(body, 1)},\n)\nprint(answer.json())`;
}

export function asJavaScript(origin: string, path: string, body: unknown): string {
  const key = storedKey() ? ", Authorization: `Bearer ${process.env.PAGURO_KEY}`" : "";
  const text = JSON.stringify(body, null, 2).replaceAll("\n", "\n  ");
  return `const answer = await fetch("${origin}${path}", {\n  method: "POST",\n  headers: { "Content-Type": "application/json"${key} },\n  body: JSON.stringify(${text}),\n});\nconsole.log(await answer.json());`;
}

function python(value: unknown, depth: number): string {
  const [inner, outer] = ["    ".repeat(depth + 1), "    ".repeat(depth)];
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return value.length ? `[\n${value.map((one) => inner + python(one, depth + 1)).join(",\n")},\n${outer}]` : "[]";
  if (typeof value === "object") {
    const entries = Object.entries(value).map(([key, one]) => `${inner}${JSON.stringify(key)}: ${python(one, depth + 1)}`);
    return entries.length ? `{\n${entries.join(",\n")},\n${outer}}` : "{}";
  }
  return JSON.stringify(value);
}
