// A hub on loopback with one repository: the two requests of the real one that a pull needs.

import { createHash } from "node:crypto";
import { createServer } from "node:http";

const COMMIT = "0".repeat(40);
const PIECE = 1 << 20;

/** Serves `file` as `repository`'s; each mebibyte takes `delay()` milliseconds. */
export async function startHub(repository, name, file, delay) {
  const sha256 = createHash("sha256").update(file).digest("hex");
  const list = { id: repository, sha: COMMIT, siblings: [{ rfilename: name, size: file.length, blobId: COMMIT, lfs: { sha256, size: file.length, pointerSize: 100 } }] };
  const server = createServer(async (request, response) => {
    const { pathname } = new URL(request.url, "http://hub");
    if (pathname.startsWith(`/api/models/${repository}/revision/`)) {
      return response.writeHead(200, { "content-type": "application/json" }).end(JSON.stringify(list));
    }
    if (pathname !== `/${repository}/resolve/${COMMIT}/${name}`) return response.writeHead(404).end("not found");
    const from = Number(/^bytes=(\d+)-/.exec(request.headers.range ?? "")?.[1] ?? 0);
    const to = Number(/-(\d+)$/.exec(request.headers.range ?? "")?.[1] ?? file.length - 1);
    const headers = { "content-length": to + 1 - from, etag: `"${sha256}"`, "accept-ranges": "bytes" };
    if (request.headers.range) headers["content-range"] = `bytes ${from}-${to}/${file.length}`;
    response.writeHead(request.headers.range ? 206 : 200, headers);
    for (let at = from; at <= to && !response.destroyed; at += PIECE) {
      response.write(file.subarray(at, Math.min(at + PIECE, to + 1)));
      await new Promise((resolve) => setTimeout(resolve, delay()));
    }
    response.end();
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { endpoint: `http://127.0.0.1:${server.address().port}`, close: () => server.close() };
}
