import * as Ariakit from "@ariakit/react";
import { Download, Ellipsis, FileText, FileUp, PencilLine, Plus, Search, Trash2 } from "lucide-react";
import { useEffect, useMemo, useRef, useState } from "react";
import { Link, useLocation } from "wouter";

import { Dialog } from "../components/dialog.tsx";
import { attempt, toast } from "../components/toasts.tsx";
import { plural } from "../format.ts";
import { useChat } from "../store/chat.ts";
import type { Conversation } from "../store/db.ts";
import { download, exportJson, exportMarkdown, importJson, search } from "../store/transfer.ts";

export function Sidebar({ current, picked }: { current: string | null; picked: () => void }) {
  const conversations = useChat((chat) => chat.conversations);
  const streaming = useChat((chat) => chat.streaming);
  const [text, setText] = useState("");
  const [found, setFound] = useState<Set<string> | null>(null);
  const file = useRef<HTMLInputElement>(null);

  useEffect(() => {
    const wanted = text.trim();
    if (wanted.length < 2) {
      setFound(null);
      return;
    }
    const timer = setTimeout(() => void search(wanted).then(setFound), 150);
    return () => clearTimeout(timer);
  }, [text]);

  const shown = useMemo(() => {
    const wanted = text.trim().toLowerCase();
    if (!wanted) return conversations;
    return conversations.filter((one) => one.title.toLowerCase().includes(wanted) || found?.has(one.id));
  }, [conversations, text, found]);
  const groups = useMemo(() => byDay(shown), [shown]);

  const importFile = (chosen: File) =>
    attempt(async () => {
      const count = await importJson(await chosen.text());
      await useChat.getState().refresh();
      toast(`${plural(count, "chat")} imported.`);
    });

  return (
    <aside className="side" aria-label="Chats">
      <div className="side-head">
        <Link href="/chat" className="button" onClick={picked}>
          <Plus size={16} aria-hidden />
          New chat
        </Link>
        <Ariakit.MenuProvider placement="bottom-end">
          <Ariakit.MenuButton className="button quiet icon" aria-label="Export and import">
            <Ellipsis size={18} aria-hidden />
          </Ariakit.MenuButton>
          <Ariakit.Menu className="menu" gutter={4} unmountOnHide>
            <Ariakit.MenuItem
              className="menu-item"
              disabled={conversations.length === 0}
              onClick={() =>
                void attempt(async () =>
                  download("paguro-chats.json", await exportJson(conversations.map((one) => one.id)), "application/json"),
                )
              }
            >
              <Download size={16} aria-hidden /> Export all chats
            </Ariakit.MenuItem>
            <Ariakit.MenuItem className="menu-item" onClick={() => file.current?.click()}>
              <FileUp size={16} aria-hidden /> Import chats
            </Ariakit.MenuItem>
          </Ariakit.Menu>
        </Ariakit.MenuProvider>
        <input
          ref={file}
          type="file"
          accept="application/json,.json"
          hidden
          aria-label="File with chats"
          onChange={(event) => {
            const chosen = event.target.files?.[0];
            event.target.value = "";
            if (chosen) void importFile(chosen);
          }}
        />
      </div>
      <div className="side-search">
        <Search size={15} aria-hidden />
        <input type="search" placeholder="Search" aria-label="Search chats" value={text} onChange={(event) => setText(event.target.value)} />
      </div>
      <div className="side-list">
        {groups.map(([day, list]) => (
          <div key={day}>
            <h2>{day}</h2>
            <ul>
              {list.map((one) => (
                <Entry key={one.id} conversation={one} current={one.id === current} busy={streaming[one.id] !== undefined} picked={picked} />
              ))}
            </ul>
          </div>
        ))}
        {shown.length === 0 && (
          <p className="side-empty">{text ? "No chat has these words." : "Chats appear here. They are kept in this browser."}</p>
        )}
      </div>
    </aside>
  );
}

function Entry({ conversation, current, busy, picked }: { conversation: Conversation; current: boolean; busy: boolean; picked: () => void }) {
  const [, navigate] = useLocation();
  const [renaming, setRenaming] = useState(false);
  const [deleting, setDeleting] = useState(false);
  const title = conversation.title || "New chat";
  return (
    <li className="entry" data-current={current || undefined}>
      <Link href={`/chat/${conversation.id}`} aria-current={current ? "page" : undefined} onClick={picked}>
        {busy && <span className="dot pulse" aria-label="answering" role="img" />}
        <span className="entry-title">{title}</span>
      </Link>
      <Ariakit.MenuProvider placement="bottom-end">
        <Ariakit.MenuButton className="button quiet icon small" aria-label={`More about ${title}`}>
          <Ellipsis size={16} aria-hidden />
        </Ariakit.MenuButton>
        <Ariakit.Menu className="menu" gutter={4} unmountOnHide>
          <Ariakit.MenuItem className="menu-item" onClick={() => setRenaming(true)}>
            <PencilLine size={16} aria-hidden /> Rename
          </Ariakit.MenuItem>
          <Ariakit.MenuItem
            className="menu-item"
            onClick={() => void attempt(async () => download(`${title}.md`, await exportMarkdown(conversation.id), "text/markdown"))}
          >
            <FileText size={16} aria-hidden /> Export as Markdown
          </Ariakit.MenuItem>
          <Ariakit.MenuItem
            className="menu-item"
            onClick={() => void attempt(async () => download(`${title}.json`, await exportJson([conversation.id]), "application/json"))}
          >
            <Download size={16} aria-hidden /> Export as JSON
          </Ariakit.MenuItem>
          <hr className="menu-separator" />
          <Ariakit.MenuItem className="menu-item" onClick={() => setDeleting(true)}>
            <Trash2 size={16} aria-hidden /> Delete
          </Ariakit.MenuItem>
        </Ariakit.Menu>
      </Ariakit.MenuProvider>
      <Dialog open={renaming} close={() => setRenaming(false)} title="Rename the chat">
        <form
          className="stack"
          onSubmit={(event) => {
            event.preventDefault();
            const next = new FormData(event.currentTarget).get("title");
            if (typeof next === "string" && next.trim()) void useChat.getState().update(conversation.id, { title: next.trim() });
            setRenaming(false);
          }}
        >
          <input className="input" name="title" defaultValue={title} aria-label="Title" autoFocus />
          <div className="actions">
            <button type="button" className="button" onClick={() => setRenaming(false)}>
              Cancel
            </button>
            <button type="submit" className="button primary">
              Rename
            </button>
          </div>
        </form>
      </Dialog>
      <Dialog open={deleting} close={() => setDeleting(false)} title="Delete the chat?">
        <p>“{title}” and all of its branches are removed from this browser. There is no other copy.</p>
        <div className="actions">
          <button type="button" className="button" onClick={() => setDeleting(false)}>
            Keep
          </button>
          <button
            type="button"
            className="button danger"
            onClick={() => {
              setDeleting(false);
              void useChat.getState().remove(conversation.id);
              if (current) navigate("/chat");
            }}
          >
            Delete
          </button>
        </div>
      </Dialog>
    </li>
  );
}

function byDay(conversations: Conversation[]): [string, Conversation[]][] {
  const today = new Date().setHours(0, 0, 0, 0);
  const day = 86_400_000;
  const groups = new Map<string, Conversation[]>();
  for (const one of conversations) {
    const name =
      one.updated >= today ? "Today" : one.updated >= today - day ? "Yesterday" : one.updated >= today - 7 * day ? "This week" : "Earlier";
    groups.set(name, [...(groups.get(name) ?? []), one]);
  }
  return [...groups];
}
