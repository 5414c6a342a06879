// The open conversation and the answers that are being streamed.

import { create } from "zustand";

import { describe } from "../api/client.ts";
import type { ToolCall } from "../api/types.ts";
import { toast } from "../components/toasts.tsx";
import { Answering } from "./answering.ts";
import { type Attachment, type ChatSettings, type Conversation, type Message, db, newId } from "./db.ts";
import { dropDraft } from "./drafts.ts";
import { usePrefs } from "./prefs.ts";
import { connect, useServer } from "./server.ts";
import { callTool, isTrusted, toolOf, useTools } from "./tools.ts";
import { below, newestLeaf, pathTo, siblings, treeOf } from "./tree.ts";
import { cardOf, chats } from "./uses.ts";

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
  toolResult(call: ToolCall, content: string, failed?: boolean, of?: Conversation, images?: string[]): Promise<void>;
  /** Runs a call on the server that has its tool, and gives the model the result. */
  runTool(call: ToolCall, of?: Conversation): Promise<void>;
  /** Answers a message of the person, or answers again. */
  regenerate(message: Message): Promise<void>;
  /** Changes the text of a message in its place. */
  edit(message: Message, content: string): Promise<void>;
  /** Deletes one message; what follows it stays. Returns the way back. */
  deleteMessage(message: Message): Promise<() => Promise<void>>;
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

  /** Replaces and removes messages of the open conversation at once. */
  const change = async (of: string, changed: Message[], removed: Message[]) => {
    await db.transaction("rw", db.messages, async () => {
      await db.messages.bulkPut(changed);
      await db.messages.bulkDelete(removed.map(({ id }) => id));
    });
    if (get().current === of) set({ messages: await db.messages.where({ conversation: of }).toArray() });
    tell(of);
  };

  const answer = async (of: Conversation, parent: string, begun?: Message) => {
    if (get().streaming[of.id]) return;
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
          ...(of.model ? { model: of.model } : {}),
        };
    delete message.error;
    const abort = new AbortController();
    set(({ streaming }) => ({ streaming: { ...streaming, [of.id]: abort } }));
    let [done, path]: [Message, Message[]] = [message, []];
    try {
      await put(message);
      await get().update(of.id, { leaf: message.id });
      path = pathTo(treeOf(await db.messages.where({ conversation: of.id }).toArray()), parent);
      tell(of.id);
      // A message may be sent before the models are known.
      const model = of.model ?? (await firstModel());
      if (model !== null && !of.model) {
        message.model = model;
        await get().update(of.id, { model });
      }
      const answering = new Answering(message, show);
      done = model === null ? await answering.fail(NO_MODEL) : await answering.run(model, of.settings, path, abort);
    } finally {
      // Also if the browser's memory is full.
      set(({ streaming: { [of.id]: _, ...rest } }) => ({ streaming: rest }));
      tell(of.id);
      // Other tabs may have added messages meanwhile.
      const messages = await db.messages.where({ conversation: of.id }).toArray().catch(() => null);
      if (messages && get().current === of.id && !get().streaming[of.id]) set({ messages });
    }
    if (done.state === "done" && done.toolCalls?.length) void runTrusted(of.id, done, path).catch((error: unknown) => toast(describe(error), { bad: true }));
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
      rememberChat(id);
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
      rememberChat(id);
      tell(id);
      return id;
    },

    async update(id, change) {
      await db.conversations.update(id, change);
      set(({ conversations }) => ({
        conversations: conversations.map((one) => (one.id === id ? { ...one, ...change } : one)),
      }));
      tell(id);
    },

    async remove(id) {
      get().streaming[id]?.abort();
      await db.messages.where({ conversation: id }).delete();
      await db.conversations.delete(id);
      dropDraft(id);
      tell(id);
      if (lastChat() === id) rememberChat(null);
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

    async toolResult(call, content, failed, given, images) {
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
        ...(images?.length ? { attachments: images.map((image, i) => ({ name: `image ${i + 1}`, text: "", image })) } : {}),
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
        const { text, is_error, images } = await callTool(found, call.arguments, abort.signal);
        await get().toolResult(call, text, is_error, of, images);
      } catch (error) {
        if (!abort.signal.aborted) throw error;
      } finally {
        set(({ calling: { [call.id]: _, ...rest } }) => ({ calling: rest }));
      }
    },

    async regenerate(message) {
      const of = conversation();
      const asked = message.role === "user" ? message.id : message.parent;
      if (of && asked !== null) await answer(of, asked);
    },

    async edit(message, content) {
      if (get().streaming[message.conversation]) return;
      const stale = below(treeOf(get().messages), message.id).map((one) => ({ ...one, stale: true }));
      const edited = { ...message, content, edited: true };
      await change(message.conversation, [edited, ...stale], []);
    },

    async deleteMessage(message) {
      const of = get().conversations.find((one) => one.id === message.conversation);
      if (!of || get().streaming[of.id]) return async () => undefined;
      const tree = treeOf(get().messages);
      const removed = [message];
      // Results belong to the calls of an answer.
      for (let next = tree.children.get(message.id); next?.[0]?.role === "tool"; next = tree.children.get(next[0].id)) removed.push(...next);
      const ids = new Set(removed.map(({ id }) => id));
      const later = below(tree, message.id).filter(({ id }) => !ids.has(id));
      const changed = later.map((one) => ({ ...one, stale: true, parent: one.parent !== null && ids.has(one.parent) ? message.parent : one.parent }));
      if (of.leaf !== null && ids.has(of.leaf)) {
        // First another end, so that the chat is never without one.
        const rest = treeOf(get().messages.filter(({ id }) => !ids.has(id)));
        const first = rest.children.get(message.parent)?.at(-1);
        await get().update(of.id, { leaf: first ? newestLeaf(rest, first.id) : message.parent });
      }
      await change(of.id, changed, removed);
      return async () => {
        if (!(await db.conversations.get(of.id))) return;
        await change(of.id, [...removed, ...later], []);
        await get().update(of.id, { leaf: of.leaf });
      };
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

const NO_MODEL = "There is no model here that can chat. Pull one on the page Models, then try again.";

/** The model of a chat that was begun before the models were known. */
async function firstModel(): Promise<string | null> {
  if (!useServer.getState().modelsKnown) await connect().catch(() => undefined);
  return defaultModel();
}

const LAST = "paguro.chat";

/** The chat of this tab that was open last, also after a reload; `null` if that was a new one. */
export function lastChat(): string | null {
  return sessionStorage.getItem(LAST);
}

function rememberChat(id: string | null): void {
  if (id === null) sessionStorage.removeItem(LAST);
  else sessionStorage.setItem(LAST, id);
}

/** Tells other tabs with this page that a conversation has changed. */
const tabs = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("paguro.chats");

function tell(conversation: string): void {
  tabs?.postMessage(conversation);
}

/** Shows what other tabs change, until the returned function is called. */
export function listenToTabs(): () => void {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const changed = new Set<string>();
  const read = async () => {
    const { current, streaming, refresh } = useChat.getState();
    await refresh();
    const again = current !== null && changed.has(current) && !streaming[current];
    changed.clear();
    if (!again) return;
    const messages = await db.messages.where({ conversation: current }).toArray();
    if (useChat.getState().current === current) useChat.setState({ messages });
  };
  const listen = ({ data }: MessageEvent) => {
    changed.add(String(data));
    // An answer changes its conversation several times at once.
    clearTimeout(timer);
    timer = setTimeout(() => void read(), 50);
  };
  tabs?.addEventListener("message", listen);
  return () => {
    clearTimeout(timer);
    tabs?.removeEventListener("message", listen);
  };
}

/** The model that a new conversation begins with: the last choice, one that is loaded, or the newest that fits. The model
    inside the program comes last, because it only tells stories. */
export function defaultModel(): string | null {
  const { models, memory } = useServer.getState();
  const able = models.filter(chats);
  const last = cardOf(able, usePrefs.getState().lastModel);
  const others = able.filter((model) => !model.built_in);
  const fitting = others.filter((model) => model.needs !== null && model.needs.least <= memory.limit).sort((a, b) => b.created - a.created);
  return (last ?? others.find((model) => model.loaded) ?? fitting[0] ?? able.find((model) => model.built_in) ?? able[0])?.name ?? null;
}
