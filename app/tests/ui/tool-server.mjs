// A small server of the Model Context Protocol: over standard streams as a program, over HTTP for a test that imports it.
// Calls are written into the file that CALLS names.

import { appendFileSync } from "node:fs";
import { createServer } from "node:http";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const numbers = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"] };

const TOOLS = [
  { name: "add", description: "Adds two integers.", inputSchema: numbers, annotations: { readOnlyHint: true } },
  { name: "erase", description: "Erases everything.", inputSchema: { type: "object" } },
];

/** The answer to a message; `null` for what is not answered. */
export function answer({ id, method, params }) {
  if (id === undefined) return null;
  const results = {
    initialize: () => ({ protocolVersion: params.protocolVersion, capabilities: { tools: {} }, serverInfo: { name: "numbers", version: "1" } }),
    "tools/list": () => ({ tools: TOOLS }),
    "tools/call": () => {
      if (process.env.CALLS) appendFileSync(process.env.CALLS, `${params.name} ${JSON.stringify(params.arguments)}\n`);
      return { content: [{ type: "text", text: String(params.arguments.a + params.arguments.b) }] };
    },
  };
  return { jsonrpc: "2.0", id, result: results[method]() };
}

/** A server at an address of its own. */
export async function serveHttp() {
  const server = createServer(async (request, response) => {
    let body = "";
    for await (const part of request) body += part;
    const message = request.method === "POST" ? answer(JSON.parse(body)) : null;
    if (message === null) return response.writeHead(202).end();
    response.writeHead(200, { "content-type": "text/event-stream" }).end(`event: message\ndata: ${JSON.stringify(message)}\n\n`);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { url: `http://127.0.0.1:${server.address().port}/mcp`, close: () => server.close() };
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  for await (const line of createInterface({ input: process.stdin })) {
    const message = answer(JSON.parse(line));
    if (message !== null) process.stdout.write(`${JSON.stringify(message)}\n`);
  }
}
