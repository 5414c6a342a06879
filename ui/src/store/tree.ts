// The tree of a conversation's messages.

import type { Message } from "./db.ts";

export interface Tree {
  byId: Map<string, Message>;
  /** Children in the order in which they were made; under `null` are the first messages. */
  children: Map<string | null, Message[]>;
}

export function treeOf(messages: Message[]): Tree {
  const byId = new Map(messages.map((message) => [message.id, message]));
  const children = new Map<string | null, Message[]>();
  for (const message of [...messages].sort((a, b) => a.created - b.created)) {
    const list = children.get(message.parent);
    if (list) list.push(message);
    else children.set(message.parent, [message]);
  }
  return { byId, children };
}

/** From the first message to this one. */
export function pathTo(tree: Tree, leaf: string | null): Message[] {
  const path: Message[] = [];
  for (let at = leaf === null ? undefined : tree.byId.get(leaf); at; at = at.parent === null ? undefined : tree.byId.get(at.parent)) {
    path.push(at);
  }
  return path.reverse();
}

/** The newest end below a message. */
export function newestLeaf(tree: Tree, id: string): string {
  let at = id;
  for (;;) {
    const last = tree.children.get(at)?.at(-1);
    if (!last) return at;
    at = last.id;
  }
}

export function siblings(tree: Tree, message: Message): Message[] {
  return tree.children.get(message.parent) ?? [message];
}

/** All messages below one, on all branches. */
export function below(tree: Tree, id: string): Message[] {
  const found: Message[] = [];
  const open = [id];
  for (let at = open.pop(); at !== undefined; at = open.pop()) {
    for (const child of tree.children.get(at) ?? []) {
      found.push(child);
      open.push(child.id);
    }
  }
  return found;
}
