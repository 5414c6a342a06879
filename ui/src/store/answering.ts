// One answer on its way from the server to the page and to the browser's memory.

import { ApiError, describe, events, request } from "../api/client.ts";
import type { Usage } from "../api/types.ts";
import { type Fitted, contextOf, fit } from "./context.ts";
import { type AnswerStats, type ChatSettings, type Message, type MessageState, db } from "./db.ts";
import { useServer } from "./server.ts";
import { offeredTools } from "./tools.ts";
import { cardOf } from "./uses.ts";

/** The part of a message that the model reads. */
export function spoken(message: Message): string {
  const texts = (message.attachments ?? []).filter(({ image }) => !image);
  const files = texts.map(({ name, text }) => `<file name="${name}">\n${text}\n</file>\n\n`);
  return files.join("") + message.content;
}

interface Wire {
  [field: string]: unknown;
  role: string;
  /** Texts and images, in order. */
  parts: Part[];
}

type Part = { text: string } | { image: string };

function wire(message: Message): Wire {
  const { role, content, toolCalls, toolCall } = message;
  const images = (message.attachments ?? []).flatMap(({ image }) => (image ? { image } : []));
  if (role === "tool") return { role, parts: [...images, { text: content }], tool_call_id: toolCall?.id };
  if (role === "user") return { role, parts: [...images, { text: spoken(message) }] };
  const calls = toolCalls?.map(({ id, name, arguments: text }) => ({
    id,
    type: "function",
    function: { name, arguments: text || "{}" },
  }));
  return { role, parts: [{ text: content }], ...(calls?.length ? { tool_calls: calls } : {}) };
}

/** The content of a message: a text, or a list if there are images. Neighbouring texts are one. */
function contentOf(parts: Part[]): string | unknown[] {
  const joined: Part[] = [];
  for (const part of parts) {
    const last = joined.at(-1);
    if ("text" in part && !part.text) continue;
    if ("text" in part && last && "text" in last) joined[joined.length - 1] = { text: `${last.text}\n\n${part.text}` };
    else joined.push(part);
  }
  const [first, ...others] = joined;
  if (!first) return "";
  if ("text" in first && !others.length) return first.text;
  return joined.map((part) => ("text" in part ? { type: "text", text: part.text } : { type: "image_url", image_url: { url: part.image } }));
}

/** Messages as a request has them. Where one between two others was deleted, those of one author are one message: many
    chat templates refuse two in a row. */
export function wired(system: string | undefined, path: Message[], begun = ""): Record<string, unknown>[] {
  const messages: Wire[] = system?.trim() ? [{ role: "system", parts: [{ text: system }] }] : [];
  const all = path.map(wire);
  if (begun) all.push({ role: "assistant", parts: [{ text: begun }] });
  for (const message of all) {
    const last = messages.at(-1);
    const joins = last?.role === message.role && (message.role === "user" || message.role === "assistant") && !last["tool_calls"];
    if (last && joins) messages[messages.length - 1] = { ...message, parts: [...last.parts, ...message.parts] };
    else messages.push(message);
  }
  return messages.map(({ parts, ...message }) => ({ ...message, content: contentOf(parts) }));
}

/** Fields of a request that these settings set. */
export function requestFields(settings: ChatSettings): Record<string, unknown> {
  const { system: _, tools, servers: __, stop, ...rest } = settings;
  const fields: Record<string, unknown> = { ...rest };
  const stops = stop?.filter((text) => text !== "");
  if (stops?.length) fields["stop"] = stops;
  if (tools?.trim()) {
    try {
      fields["tools"] = JSON.parse(tools);
    } catch {
      throw new ApiError(0, "The tools of this chat are not JSON. Correct them in its settings.");
    }
  }
  return fields;
}

interface Chunk {
  error?: { message?: string };
  choices?: {
    delta: {
      content?: string;
      reasoning_content?: string;
      tool_calls?: { index: number; id?: string; function: { name?: string; arguments?: string } }[];
    };
    finish_reason: "stop" | "length" | "tool_calls" | null;
  }[];
  usage?: Usage;
}

export class Answering {
  private shown = false;
  private saved = 0;
  private readonly started = performance.now();
  private reasoningStarted: number | null = null;
  private first: number | null = null;
  private last = 0;

  constructor(
    private message: Message,
    private readonly show: (message: Message) => void,
  ) {}

  async run(model: string, settings: ChatSettings, path: Message[], abort: AbortController): Promise<Message> {
    let usage: Usage | undefined;
    let state: MessageState | null = null;
    try {
      const fields = requestFields(settings);
      const offered = await offeredTools(settings.servers);
      if (offered.length) fields["tools"] = [...((fields["tools"] as unknown[] | undefined) ?? []), ...offered];
      const response = await this.ask(model, settings, fields, path, abort.signal);
      for await (const data of events(response)) {
        if (data === "[DONE]") {
          state ??= "done";
          break;
        }
        const chunk = JSON.parse(data) as Chunk;
        if (chunk.error) throw new ApiError(0, chunk.error.message ?? "The answer ended with an error.");
        usage = chunk.usage ?? usage;
        const choice = chunk.choices?.[0];
        if (choice) {
          this.take(choice.delta);
          if (choice.finish_reason) state = choice.finish_reason === "length" ? "length" : "done";
        }
      }
      // A stream that ends without its last line was cut.
      state ??= "interrupted";
    } catch (error) {
      if (abort.signal.aborted) state = "stopped";
      else if (error instanceof ApiError) {
        state = "failed";
        this.message.error = describe(error);
      } else {
        state = this.message.content || this.message.reasoning ? "interrupted" : "failed";
        this.message.error = "The connection to the server was lost.";
      }
    }
    await this.end(state, usage);
    return this.message;
  }

  /** Ends the answer with an error before it has begun. */
  async fail(error: string): Promise<Message> {
    this.message.error = error;
    await this.end("failed", undefined);
    return this.message;
  }

  /** Sends the request, without the oldest turns if they no longer fit. */
  private async ask(model: string, settings: ChatSettings, fields: Record<string, unknown>, path: Message[], signal: AbortSignal): Promise<Response> {
    const begun = this.message.content;
    const messages = (from: number) => wired(settings.system, path.slice(from), begun);
    const before = path.findLast((one) => one.role === "assistant" && one.id !== this.message.id)?.forgotten ?? 0;
    const count = { model, tools: fields["tools"], begun, longest: settings.max_tokens, signal };
    let fitted: Fitted | null = await fit(path, before, 0, messages, count);
    for (;;) {
      const from = fitted?.from ?? 0;
      if (from > 0) this.message.forgotten = from;
      else delete this.message.forgotten;
      try {
        const continued = begun ? { continue_final_message: true } : {};
        const body = { model, messages: messages(from), stream: true, stream_options: { include_usage: true }, ...fields, ...continued };
        return await request("/v1/chat/completions", { signal, body });
      } catch (error) {
        if (!(error instanceof ApiError) || error.code !== "context_length_exceeded") throw error;
        // The server counts more than the page does, such as a system prompt of the model's defaults.
        fitted = await fit(path, from, from + 1, messages, count);
        if (fitted !== null && fitted.from > from) continue;
        if (before > 0) this.message.forgotten = before;
        else delete this.message.forgotten;
        throw tooLong(error, begun !== "");
      }
    }
  }

  private take(delta: NonNullable<Chunk["choices"]>[number]["delta"]): void {
    const now = performance.now();
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      this.first ??= now;
      this.last = now;
    }
    const message = this.message;
    if (delta.reasoning_content) {
      this.reasoningStarted ??= now;
      message.reasoning = (message.reasoning ?? "") + delta.reasoning_content;
      message.reasoningSeconds = (now - this.reasoningStarted) / 1000;
    }
    if (delta.content) message.content += delta.content;
    for (const part of delta.tool_calls ?? []) {
      const calls = (message.toolCalls ??= []);
      const call = (calls[part.index] ??= { id: "", name: "", arguments: "" });
      call.id = part.id ?? call.id;
      call.name = part.function.name ?? call.name;
      call.arguments += part.function.arguments ?? "";
    }
    if (!this.shown) {
      this.shown = true;
      // Once per frame, however many tokens come; timers go on in hidden tabs.
      const draw = () => {
        this.shown = false;
        this.show({ ...this.message });
      };
      if (document.hidden) setTimeout(draw, 100);
      else requestAnimationFrame(draw);
    }
    if (now - this.saved > 1000) {
      this.saved = now;
      // The end saves it again, and reports what is wrong.
      void db.messages.put({ ...message }).catch(() => undefined);
    }
  }

  private async end(state: MessageState, usage: Usage | undefined): Promise<void> {
    const stats: AnswerStats = { total: (performance.now() - this.started) / 1000 };
    if (this.first !== null) stats.firstToken = (this.first - this.started) / 1000;
    const card = () => cardOf(useServer.getState().models, this.message.model);
    // The first answer of a model has loaded it.
    if (usage && !card()?.loaded) await useServer.getState().refreshModels().catch(() => undefined);
    const loaded = card()?.loaded;
    if (usage) {
      stats.usage = usage;
      const passed = (this.last - (this.first ?? this.last)) / 1000;
      // Tokens that come all at once have no speed.
      if (usage.completion_tokens > 1 && passed > 0.02) stats.rate = (usage.completion_tokens - 1) / passed;
      const context = contextOf(card());
      if (context !== null) stats.context = context;
      if (loaded) {
        stats.blockSize = loaded.block_size;
        if (loaded.one_kv_group) {
          stats.pages = Math.ceil((usage.prompt_tokens + usage.completion_tokens) / loaded.block_size);
          stats.sharedPages = Math.floor((usage.prompt_tokens_details?.cached_tokens ?? 0) / loaded.block_size);
        }
      }
    }
    this.message = { ...this.message, state, stats };
    delete this.message.stale;
    this.show(this.message);
    await db.messages.put(this.message);
  }
}

/** The error of a turn that alone exceeds the context, in words that fit a chat. */
function tooLong(error: ApiError, continues: boolean): ApiError {
  const [limit, prompt] = [/length is (\d+) tokens/, /(?:prompt|messages?)\D+ (\d+) tokens/].map((pattern) => Number(pattern.exec(error.message)?.[1]));
  if (!limit) return error;
  const tokens = prompt ? `has ${prompt.toLocaleString("en")} tokens` : "is too long";
  const subject = continues ? "This turn" : "This message";
  return new ApiError(
    error.status,
    `${subject} ${tokens}, and message and answer together can have ${limit.toLocaleString("en")}. Shorten it, or set a larger context in Models, under the defaults of this model.`,
    error.code,
  );
}
