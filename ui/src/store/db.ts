// Conversations, kept in this browser's IndexedDB. Messages of one form a tree: an edited or repeated turn is a
// sibling of the one before, and branches share everything above them.

import Dexie, { type EntityTable } from "dexie";

import type { ToolCall, Usage } from "../api/types.ts";

export interface ChatSettings {
  system?: string;
  temperature?: number;
  top_k?: number;
  top_p?: number;
  min_p?: number;
  repetition_penalty?: number;
  frequency_penalty?: number;
  presence_penalty?: number;
  max_tokens?: number;
  seed?: number;
  stop?: string[];
  reasoning_effort?: string;
  /** Definitions of tools as OpenAI's API has them, in JSON. */
  tools?: string;
  /** Servers of tools that the model may use. */
  servers?: string[];
}

export interface Conversation {
  id: string;
  title: string;
  created: number;
  updated: number;
  model: string | null;
  settings: ChatSettings;
  /** The message at the end of the branch that is shown. */
  leaf: string | null;
}

export interface Attachment {
  name: string;
  /** Text of the file; empty for an image. */
  text: string;
  /** Data URL of an image. */
  image?: string;
}

/** How an answer went. Times are in seconds. */
export interface AnswerStats {
  usage?: Usage;
  firstToken?: number;
  total: number;
  /** Tokens per second after the first one. */
  rate?: number;
  blockSize?: number;
  /** Most tokens of prompt and answer. */
  context?: number;
  /** Pages, where they follow from the length. */
  pages?: number;
  sharedPages?: number;
}

export type MessageState = "done" | "streaming" | "stopped" | "length" | "interrupted" | "failed";

export interface Message {
  id: string;
  conversation: string;
  parent: string | null;
  role: "user" | "assistant" | "tool";
  content: string;
  created: number;
  state: MessageState;
  reasoning?: string;
  reasoningSeconds?: number;
  toolCalls?: ToolCall[];
  /** Of a tool's result: which call it answers. */
  toolCall?: { id: string; name: string };
  /** Of a tool's result: the tool says that it failed. */
  toolFailed?: boolean;
  attachments?: Attachment[];
  model?: string;
  stats?: AnswerStats;
  error?: string;
  /** Of an answer: messages at the beginning of its branch that were left out, because they no longer fit. */
  forgotten?: number;
  /** The person has changed the text. */
  edited?: boolean;
  /** Something above was changed or removed since, so that the counts of tokens are those of another text. */
  stale?: boolean;
}

const db = new Dexie("paguro") as Dexie & {
  conversations: EntityTable<Conversation, "id">;
  messages: EntityTable<Message, "id">;
};

db.version(1).stores({ conversations: "id, updated", messages: "id, conversation" });

export { db };

/** A new name. `crypto.randomUUID` exists in secure contexts only, and this page may come from another machine. */
export function newId(): string {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
