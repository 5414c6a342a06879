// Chats that exceed the context of their model: the oldest turns are left out, as in the terminal's chat.

import { ApiError, json } from "../api/client.ts";
import type { ModelCard } from "../api/types.ts";
import type { Message } from "./db.ts";
import { useServer } from "./server.ts";
import { cardOf } from "./uses.ts";

/** Divisor of the context. The quotient is kept free for an answer. */
const ANSWER_SHARE = 4;

/** Part of the context from which on the page says how full it is. */
const NEARLY = 0.6;

/** Fewest bytes of an average token, so that a text has no more tokens than its bytes divided by this. */
const LEAST_BYTES = 2;

/** Most tokens of prompt and answer, as the model is loaded or would be. */
export function contextOf(model: ModelCard | undefined): number | null {
  return model?.loaded?.context ?? model?.needs?.context ?? null;
}

export interface Fitted {
  /** Index of the first message that the model reads. */
  from: number;
}

export interface Counting {
  model: string;
  tools: unknown;
  begun: string;
  /** Longest answer. */
  longest: number | undefined;
  signal: AbortSignal;
}

/** Tokens that are kept free for an answer. */
function roomFor(limit: number, longest: number | undefined): number {
  return Math.min(longest ?? Infinity, Math.floor(limit / ANSWER_SHARE));
}

/** Indices at which the path can begin: its first message, and each turn of the person. */
function beginnings(path: Message[]): number[] {
  return path.flatMap((message, index) => (index === 0 || (message.role === "user" && path[index - 1]?.role !== "user") ? [index] : []));
}

/** Returns where a path begins so that an answer has room, at least at `least`; `null` if no turn can be left out. The last
    turn is always kept. `before` is where the answer before began. */
export async function fit(
  path: Message[],
  before: number,
  least: number,
  messages: (from: number) => unknown[],
  counting: Counting,
): Promise<Fitted | null> {
  const all = beginnings(path).filter((index) => index >= least);
  const last = all.length - 1;
  if (last < 0) return null;
  const known = contextOf(cardOf(useServer.getState().models, counting.model));
  const room = (limit: number) => roomFor(limit, counting.longest);
  // Most chats are far from the end of the context, and nothing is counted.
  const bytes = new TextEncoder().encode(JSON.stringify(messages(0))).length + JSON.stringify(counting.tools ?? "").length;
  if (least === 0 && known !== null && bytes / LEAST_BYTES + room(known) <= known) return { from: 0 };
  if (least === 0 && known === null) return { from: 0 };
  const fits = async (index: number) => {
    const { count, limit } = await tokens(messages(all[index] ?? 0), counting);
    return count + room(limit) <= limit;
  };
  const guess = Math.max(0, all.indexOf(before));
  return { from: all[await firstThatFits(last, guess, fits)] ?? 0 };
}

/** The smallest number that fits, or `last`. A larger number fits where a smaller one does; numbers near the guess come first. */
async function firstThatFits(last: number, guess: number, fits: (index: number) => Promise<boolean>): Promise<number> {
  let [low, high] = [0, last];
  const probe = async (index: number) => {
    if (await fits(index)) high = index;
    else low = index + 1;
  };
  for (const index of [guess, guess - 1, guess + 1]) if (index >= low && index < high) await probe(index);
  while (low < high) await probe(Math.floor((low + high) / 2));
  return low;
}

interface Tokenized {
  count: number;
  max_model_len: number;
}

async function tokens(messages: unknown[], { model, tools, begun, signal }: Counting): Promise<{ count: number; limit: number }> {
  const body = { model, messages, ...(tools ? { tools } : {}), ...(begun ? { continue_final_message: true, add_generation_prompt: false } : {}) };
  try {
    const { count, max_model_len } = await json<Tokenized>("/tokenize", { body, signal });
    return { count, limit: max_model_len };
  } catch (error) {
    // So long that it is not even counted.
    if (error instanceof ApiError && error.code === "context_length_exceeded") return { count: Infinity, limit: 1 };
    throw error;
  }
}

export interface Fullness {
  used: number;
  limit: number;
  /** The next answer will leave turns out. */
  isFull: boolean;
  /** The model can have a larger context than it has. */
  canGrow: boolean;
}

/** How full the context is after the last answer, if it is nearly full. */
export function fullness(path: Message[], model: ModelCard | undefined, longest: number | undefined): Fullness | null {
  const limit = contextOf(model);
  const last = path.findLast((message) => message.stats?.usage);
  if (limit === null || !last?.stats?.usage || last.stale) return null;
  const used = last.stats.usage.prompt_tokens + last.stats.usage.completion_tokens;
  if (used < NEARLY * limit) return null;
  const isFull = used + roomFor(limit, longest) > limit;
  return { used: Math.min(used, limit), limit, isFull, canGrow: (model?.file?.context ?? 0) > limit };
}
