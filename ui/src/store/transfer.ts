// Conversations as files: JSON that can be imported again, Markdown for reading.

import { type Conversation, type Message, db, newId } from "./db.ts";
import { pathTo, treeOf } from "./tree.ts";

interface Exported {
  format: "paguro-chats";
  version: 1;
  conversations: (Conversation & { messages: Message[] })[];
}

export async function exportJson(ids: string[]): Promise<string> {
  const conversations = await Promise.all(
    ids.map(async (id) => {
      const conversation = await db.conversations.get(id);
      const messages = await db.messages.where({ conversation: id }).toArray();
      return conversation ? { ...conversation, messages } : null;
    }),
  );
  const exported: Exported = {
    format: "paguro-chats",
    version: 1,
    conversations: conversations.filter((one) => one !== null),
  };
  return JSON.stringify(exported, null, 2);
}

export async function exportMarkdown(id: string): Promise<string> {
  const conversation = await db.conversations.get(id);
  const messages = await db.messages.where({ conversation: id }).toArray();
  const path = pathTo(treeOf(messages), conversation?.leaf ?? null);
  const parts = path.map(({ role, model, content, attachments }) => {
    const name = role === "user" ? "You" : role === "tool" ? "Tool" : (model ?? "Model");
    const files = (attachments ?? []).map((file) => `*Attached: ${file.name}*\n\n`).join("");
    return `## ${name}\n\n${files}${content.trim()}\n`;
  });
  return `# ${conversation?.title ?? ""}\n\n${parts.join("\n")}`;
}

/** Adds the conversations of a file, each under a new name. Returns how many. */
export async function importJson(text: string): Promise<number> {
  let file: Partial<Exported>;
  try {
    file = JSON.parse(text) as Partial<Exported>;
  } catch {
    throw new Error("The file is not JSON. Choose one that this page has exported.");
  }
  if (file.format !== "paguro-chats" || !Array.isArray(file.conversations)) {
    throw new Error("The file has no chats in it. Choose one that this page has exported.");
  }
  for (const { messages, ...conversation } of file.conversations) {
    const id = newId();
    const names = new Map<string, string>();
    for (const message of messages) names.set(message.id, newId());
    const renamed = (name: string | null) => (name === null ? null : (names.get(name) ?? null));
    await db.conversations.put({ ...conversation, id, leaf: renamed(conversation.leaf) });
    await db.messages.bulkPut(
      messages.map((message) => ({
        ...message,
        id: renamed(message.id) ?? newId(),
        parent: renamed(message.parent),
        conversation: id,
        state: message.state === "streaming" ? ("interrupted" as const) : message.state,
      })),
    );
  }
  return file.conversations.length;
}

export function download(name: string, text: string, type: string): void {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** Conversations in which a text occurs. */
export async function search(text: string): Promise<Set<string>> {
  const wanted = text.toLowerCase();
  const found = new Set<string>();
  await db.messages.each((message) => {
    if (!found.has(message.conversation) && message.content.toLowerCase().includes(wanted)) found.add(message.conversation);
  });
  return found;
}
