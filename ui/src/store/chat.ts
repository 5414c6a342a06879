// The open conversation and the answers that are being streamed.

import { create } from "zustand";

import { ApiError, describe, events, request } from "../api/client.ts";
import type { ToolCall, Usage } from "../api/types.ts";
import { toast } from "../components/toasts.tsx";
import {
  type AnswerStats,
  type Attachment,
  type ChatSettings,
  type Conversation,
  type Message,
  type MessageState,
  db,
  newId,
} from "./db.ts";
import { usePrefs } from "./prefs.ts";
import { useServer } from "./server.ts";
import { callTool, isTrusted, offeredTools, toolOf, useTools } from "./tools.ts";
import { newestLeaf, pathTo, siblings, treeOf } from "./tree.ts";

/** Rounds of trusted calls before the person is asked once more. */
const MOST_ROUNDS = 10;

interface Chat {
  conversations: Conversation[];
  known: boolean;
  current: string | null;
  messages: Message[];
  /** Conversations with an answer on its way. */
  streaming: Record<string, AbortController>;
  refresh(): Promise<void>;
  open(id: string | null): Promise<void>;
  create(model: string | null, settings?: ChatSettings): Promise<string>;
  update(id: string, change: Partial<Conversation>): Promise<void>;
  remove(id: string): Promise<void>;
  send(content: string, attachments: Attachment[], parent?: string | null): Promise<void>;
  /** Calls of tools that are running, by their ids. */
  calling: Record<string, AbortController>;
  toolResult(call: ToolCall, content: string, failed?: boolean, of?: Conversation): Promise<void>;
  /** Runs a call on the server that has its tool, and gives the model the result. */
  runTool(call: ToolCall, of?: Conversation): Promise<void>;
  regenerate(message: Message): Promise<void>;
  resume(message: Message): Promise<void>;
  stop(): void;
  select(message: Message): Promise<void>;
}

export const useChat = create<Chat>((set, get) => {
  const conversation = () => get().conversations.find((one) => one.id === get().current);

  /** Shows a message as it is now, if its conversation is open. */
  const show = (message: Message) => {
    if (message.conversation !== get().current) return;
    set(({ messages }) => {
      const index = messages.findIndex((other) => other.id === message.id);
      return { messages: index < 0 ? [...messages, message] : messages.with(index, message) };
    });
  };

  const put = async (message: Message) => {
    show(message);
    await db.messages.put(message);
  };

  const answer = async (of: Conversation, parent: string, begun?: Message) => {
    const model = of.model ?? useServer.getState().models[0]?.name;
    if (!model || get().streaming[of.id]) return;
    const message: Message = begun
      ? { ...begun, state: "streaming" }
      : {
          id: newId(),
          conversation: of.id,
          parent,
          role: "assistant",
          content: "",
          created: Date.now(),
          state: "streaming",
          model,
        };
    delete message.error;
    const abort = new AbortController();
    set(({ streaming }) => ({ streaming: { ...streaming, [of.id]: abort } }));
    await put(message);
    await get().update(of.id, { leaf: message.id });
    const path = pathTo(treeOf(await db.messages.where({ conversation: of.id }).toArray()), parent);
    const done = await new Answering(message, show).run(model, of.settings, path, abort);
    set(({ streaming: { [of.id]: _, ...rest } }) => ({ streaming: rest }));
    if (done.state === "done" && done.toolCalls?.length) void runTrusted(of.id, done, path).catch((error: unknown) => toast(describe(error), true));
    void useServer.getState().refreshModels().catch(() => undefined);
  };

  /** Runs the calls of an answer that need no question. */
  const runTrusted = async (id: string, message: Message, path: Message[]) => {
    const turn = path.slice(path.findLastIndex((one) => one.role === "user"));
    if (turn.filter((one) => one.toolCalls?.length).length >= MOST_ROUNDS) return;
    for (const call of message.toolCalls ?? []) {
      const of = get().conversations.find((one) => one.id === id);
      const found = of && toolOf(useTools.getState().servers, of.settings.servers, call.name);
      if (found && isTrusted(found)) await get().runTool(call, of);
    }
  };

  return {
    conversations: [],
    known: false,
    calling: {},
    current: null,
    messages: [],
    streaming: {},

    async refresh() {
      const conversations = await db.conversations.orderBy("updated").reverse().toArray();
      set({ conversations, known: true });
    },

    async open(id) {
      if (id === null) {
        set({ current: null, messages: [] });
        return;
      }
      const messages = await db.messages.where({ conversation: id }).toArray();
      // An answer that no page is reading any more was cut off when its page was closed.
      const live = get().streaming[id];
      for (const message of messages) {
        if (message.state === "streaming" && !live) {
          message.state = "interrupted";
          await db.messages.put(message);
        }
      }
      set({ current: id, messages });
    },

    async create(model, settings = {}) {
      const now = Date.now();
      const id = newId();
      await db.conversations.put({ id, title: "", created: now, updated: now, model, settings, leaf: null });
      await get().refresh();
      set({ current: id, messages: [] });
      return id;
    },

    async update(id, change) {
      await db.conversations.update(id, change);
      set(({ conversations }) => ({
        conversations: conversations.map((one) => (one.id === id ? { ...one, ...change } : one)),
      }));
    },

    async remove(id) {
      get().streaming[id]?.abort();
      await db.messages.where({ conversation: id }).delete();
      await db.conversations.delete(id);
      if (get().current === id) set({ current: null, messages: [] });
      await get().refresh();
    },

    async send(content, attachments, parent) {
      const of = conversation();
      if (!of) return;
      const message: Message = {
        id: newId(),
        conversation: of.id,
        parent: parent === undefined ? of.leaf : parent,
        role: "user",
        content,
        created: Date.now(),
        state: "done",
        ...(attachments.length ? { attachments } : {}),
      };
      await put(message);
      const title = of.title || titleOf(content || (attachments[0]?.name ?? ""));
      await get().update(of.id, { leaf: message.id, updated: message.created, title });
      await get().refresh();
      await answer({ ...of, title, leaf: message.id }, message.id);
    },

    async toolResult(call, content, failed, given) {
      const of = get().conversations.find((one) => one.id === given?.id) ?? conversation();
      if (!of?.leaf) return;
      const message: Message = {
        id: newId(),
        conversation: of.id,
        parent: of.leaf,
        role: "tool",
        content,
        created: Date.now(),
        state: "done",
        toolCall: { id: call.id, name: call.name },
        ...(failed ? { toolFailed: true } : {}),
      };
      await put(message);
      await get().update(of.id, { leaf: message.id });
      // The model goes on when all of its calls are answered.
      const path = pathTo(treeOf(await db.messages.where({ conversation: of.id }).toArray()), message.id);
      const calls = path.findLast((one) => one.role === "assistant")?.toolCalls ?? [];
      const answered = new Set(path.map((one) => one.toolCall?.id));
      if (calls.every((one) => answered.has(one.id))) await answer({ ...of, leaf: message.id }, message.id);
    },

    async runTool(call, given) {
      const of = given ?? conversation();
      const found = of && toolOf(useTools.getState().servers, of.settings.servers, call.name);
      if (!found || get().calling[call.id]) return;
      const abort = new AbortController();
      set(({ calling }) => ({ calling: { ...calling, [call.id]: abort } }));
      try {
        const { text, is_error } = await callTool(found, call.arguments, abort.signal);
        await get().toolResult(call, text, is_error, of);
      } catch (error) {
        if (!abort.signal.aborted) throw error;
      } finally {
        set(({ calling: { [call.id]: _, ...rest } }) => ({ calling: rest }));
      }
    },

    async regenerate(message) {
      const of = conversation();
      if (of && message.parent !== null) await answer(of, message.parent);
    },

    async resume(message) {
      const of = conversation();
      if (of && message.parent !== null) await answer(of, message.parent, message);
    },

    stop() {
      const { current, streaming } = get();
      if (current) streaming[current]?.abort();
    },

    async select(message) {
      const of = conversation();
      if (of) await get().update(of.id, { leaf: newestLeaf(treeOf(get().messages), message.id) });
    },
  };
});

export function titleOf(text: string): string {
  const line = text.trim().split("\n")[0] ?? "";
  return line.length > 60 ? `${line.slice(0, 57).trimEnd()}…` : line || "New chat";
}

export { siblings };

/** The part of a message that the model reads. */
export function spoken(message: Message): string {
  const files = (message.attachments ?? []).map(({ name, text }) => `<file name="${name}">\n${text}\n</file>\n\n`);
  return files.join("") + message.content;
}

function wire(message: Message): Record<string, unknown> {
  const { role, content, toolCalls, toolCall } = message;
  if (role === "tool") return { role, content, tool_call_id: toolCall?.id };
  if (role === "user") return { role, content: spoken(message) };
  const calls = toolCalls?.map(({ id, name, arguments: text }) => ({
    id,
    type: "function",
    function: { name, arguments: text || "{}" },
  }));
  return { role, content, ...(calls?.length ? { tool_calls: calls } : {}) };
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

/** One answer on its way from the server to the page and to the browser's memory. */
class Answering {
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
    const continues = this.message.content !== "";
    const messages: Record<string, unknown>[] = path.map(wire);
    if (settings.system?.trim()) messages.unshift({ role: "system", content: settings.system });
    if (continues) messages.push({ role: "assistant", content: this.message.content });
    let usage: Usage | undefined;
    let state: MessageState | null = null;
    try {
      const fields = requestFields(settings);
      const offered = await offeredTools(settings.servers);
      if (offered.length) fields["tools"] = [...((fields["tools"] as unknown[] | undefined) ?? []), ...offered];
      const response = await request("/v1/chat/completions", {
        signal: abort.signal,
        body: {
          model,
          messages,
          stream: true,
          stream_options: { include_usage: true },
          ...fields,
          ...(continues ? { continue_final_message: true } : {}),
        },
      });
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
      void db.messages.put({ ...message });
    }
  }

  private async end(state: MessageState, usage: Usage | undefined): Promise<void> {
    const stats: AnswerStats = { total: (performance.now() - this.started) / 1000 };
    if (this.first !== null) stats.firstToken = (this.first - this.started) / 1000;
    const card = () => useServer.getState().models.find((model) => model.name === this.message.model)?.loaded;
    // The first answer of a model has loaded it.
    if (usage && !card()) await useServer.getState().refreshModels().catch(() => undefined);
    const loaded = card();
    if (usage) {
      stats.usage = usage;
      const passed = (this.last - (this.first ?? this.last)) / 1000;
      // Tokens that come all at once have no speed.
      if (usage.completion_tokens > 1 && passed > 0.02) stats.rate = (usage.completion_tokens - 1) / passed;
      if (loaded) {
        stats.blockSize = loaded.block_size;
        if (loaded.one_kv_group) {
          stats.pages = Math.ceil((usage.prompt_tokens + usage.completion_tokens) / loaded.block_size);
          stats.sharedPages = Math.floor((usage.prompt_tokens_details?.cached_tokens ?? 0) / loaded.block_size);
        }
      }
    }
    this.message = { ...this.message, state, stats };
    this.show(this.message);
    await db.messages.put(this.message);
  }
}

/** The model that a new conversation begins with. */
export function defaultModel(): string | null {
  const { models } = useServer.getState();
  const { lastModel } = usePrefs.getState();
  const loaded = models.find((model) => model.loaded);
  return (models.find((model) => model.name === lastModel) ?? loaded ?? models[0])?.name ?? null;
}
