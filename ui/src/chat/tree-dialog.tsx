// All branches of a chat. Messages that the shown branch shares with others have the colour of shared pages.

import { Dialog } from "../components/dialog.tsx";
import { useChat } from "../store/chat.ts";
import type { Message } from "../store/db.ts";
import { type Tree, pathTo, treeOf } from "../store/tree.ts";

export function TreeDialog({ open, close, messages, leaf }: { open: boolean; close: () => void; messages: Message[]; leaf: string | null }) {
  if (!open) return null;
  const tree = treeOf(messages);
  const shown = new Set(pathTo(tree, leaf).map((message) => message.id));
  const leaves = messages.filter((message) => !tree.children.has(message.id)).length;
  return (
    <Dialog open={open} close={close} title="Branches">
      <p className="muted">
        {leaves} ends. Branches share the pages of everything above the fork: those turns are marked. A click shows a branch.
      </p>
      <div className="tree">
        <Level tree={tree} parent={null} shown={shown} pick={(message) => void useChat.getState().select(message).then(close)} />
      </div>
    </Dialog>
  );
}

function Level({ tree, parent, shown, pick }: { tree: Tree; parent: string | null; shown: Set<string>; pick: (message: Message) => void }) {
  // A run of turns without forks stays on one level, so that long chats do not march to the right.
  const rows: Message[] = [];
  let children = tree.children.get(parent) ?? [];
  while (children.length === 1 && children[0]) {
    rows.push(children[0]);
    children = tree.children.get(children[0].id) ?? [];
  }
  const forks = children.length > 1;
  return (
    <ul>
      {rows.map((message) => (
        <li key={message.id}>
          <Turn message={message} shared={forks || hasForkBelow(tree, message.id)} shown={shown.has(message.id)} pick={pick} />
        </li>
      ))}
      {children.map((message) => (
        <li key={message.id} className="fork">
          <Turn message={message} shared={hasForkBelow(tree, message.id)} shown={shown.has(message.id)} pick={pick} />
          <Level tree={tree} parent={message.id} shown={shown} pick={pick} />
        </li>
      ))}
    </ul>
  );
}

function hasForkBelow(tree: Tree, id: string): boolean {
  let children = tree.children.get(id) ?? [];
  while (children.length === 1 && children[0]) children = tree.children.get(children[0].id) ?? [];
  return children.length > 1;
}

function Turn({ message, shared, shown, pick }: { message: Message; shared: boolean; shown: boolean; pick: (message: Message) => void }) {
  return (
    <button type="button" className={`tree-turn${shared ? " shared" : ""}`} aria-current={shown || undefined} onClick={() => pick(message)}>
      <span className="tree-role">{message.role === "user" ? "You" : message.role === "tool" ? "Tool" : (message.model ?? "Model")}</span>
      <span className="tree-text">{message.content.slice(0, 120) || "…"}</span>
      {shared && <span className="tag sea">shared</span>}
    </button>
  );
}
