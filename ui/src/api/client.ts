// Requests to the server that this page came from. The key travels in a header, never in an address.

import type { Session } from "./types.ts";

const KEY = "paguro.key";

/** Proves to the server that a request is this page's. Each start of the server makes another one. */
let token = "";

let key = localStorage.getItem(KEY) ?? "";

export function storedKey(): string {
  return key;
}

export function storeKey(next: string): void {
  key = next;
  if (next) localStorage.setItem(KEY, next);
  else localStorage.removeItem(KEY);
}

/** An answer that is an error, in the server's own words. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    /** Kind of the error in OpenAI's dialect. */
    readonly code: string | null = null,
  ) {
    super(message);
  }
}

/** The server cannot be reached. */
export class Unreachable extends Error {
  constructor() {
    super("The server does not answer. Check that it runs; this page tries again by itself.");
  }
}

export interface Call {
  method?: string;
  body?: unknown;
  signal?: AbortSignal;
}

function send(path: string, { method, body, signal }: Call): Promise<Response> {
  const headers = new Headers();
  if (key) headers.set("authorization", `Bearer ${key}`);
  if (token) headers.set("x-paguro-page", token);
  if (body !== undefined) headers.set("content-type", "application/json");
  return fetch(path, {
    method: method ?? (body === undefined ? "GET" : "POST"),
    headers,
    body: body === undefined ? null : JSON.stringify(body),
    signal: signal ?? null,
    cache: "no-store",
  });
}

export async function request(path: string, call: Call = {}): Promise<Response> {
  let response: Response;
  try {
    response = await send(path, call);
    // The server may have been started again.
    if (response.status === 403 && path !== SESSION) {
      const before = token;
      await session().catch(() => undefined);
      if (token !== before) response = await send(path, call);
    }
  } catch (error) {
    if (call.signal?.aborted) throw error;
    throw new Unreachable();
  }
  if (!response.ok) {
    const { text, code } = errorOf(await response.text());
    throw new ApiError(response.status, sentence(text, response.status), code);
  }
  return response;
}

const SESSION = "/ui/v1/session";

let seen: (session: Session) => void = () => undefined;

/** Calls a function with every answer of [`session`]. */
export function onSession(listener: (session: Session) => void): void {
  seen = listener;
}

/** Permissions of this page, and its token. */
export async function session(): Promise<Session> {
  const answer = await json<Session>(SESSION);
  token = answer.token;
  seen(answer);
  return answer;
}

export async function json<T>(path: string, call?: Call): Promise<T> {
  return (await (await request(path, call)).json()) as T;
}

/** The message of an error in any of the server's dialects, and its code. */
function errorOf(body: string): { text: string; code: string | null } {
  try {
    const value = JSON.parse(body) as { error?: string | { message?: string; code?: string | null } };
    if (typeof value.error === "string") return { text: value.error, code: null };
    return { text: value.error?.message ?? body, code: value.error?.code ?? null };
  } catch {
    return { text: body, code: null };
  }
}

function sentence(text: string, status: number): string {
  if (!text) return `The server answered with status ${status}.`;
  const first = text.slice(0, 1).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(first) ? first : `${first}.`;
}

export function describe(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** Lines of a body, as they come. */
async function* lines(response: Response): AsyncGenerator<string> {
  const reader = response.body?.getReader();
  if (!reader) return;
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += decoder.decode(value, { stream: !done });
      const parts = rest.split("\n");
      rest = parts.pop() ?? "";
      yield* parts;
      if (done) break;
    }
    if (rest) yield rest;
  } finally {
    reader.releaseLock();
  }
}

/** Server-sent events: their data, as they come. */
export async function* events(response: Response): AsyncGenerator<string> {
  let data = "";
  for await (const line of lines(response)) {
    if (line.startsWith("data:")) data += line.slice(5).trimStart();
    else if (line === "" && data) {
      yield data;
      data = "";
    }
  }
}

/** Lines of JSON, as they come. */
export async function* jsonLines<T>(response: Response): AsyncGenerator<T> {
  for await (const line of lines(response)) if (line.trim()) yield JSON.parse(line) as T;
}
