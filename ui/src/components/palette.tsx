// Ctrl-K: everything the page can do, by name.

import * as Ariakit from "@ariakit/react";
import { FlaskConical, Keyboard, MessageSquare, Moon, Plus, Square, Sun } from "lucide-react";
import { useEffect, useMemo, useState } from "react";
import { useLocation } from "wouter";
import { create } from "zustand";

import { useChat } from "../store/chat.ts";
import { usePrefs } from "../store/prefs.ts";
import { useServer } from "../store/server.ts";
import { chats, playgroundOf } from "../store/uses.ts";
import { Dialog } from "./dialog.tsx";
import { PAGES } from "./frame.tsx";
import { attempt } from "./toasts.tsx";

export const usePalette = create<{ open: boolean; keys: boolean; set(open: boolean): void; showKeys(keys: boolean): void }>((set) => ({
  open: false,
  keys: false,
  set: (open) => set({ open }),
  showKeys: (keys) => set({ keys }),
}));

const KEYS = [
  ["Ctrl K", "Find chats, models and commands"],
  ["Ctrl Shift O", "Begin a new chat"],
  ["/", "Go to the message"],
  ["Enter", "Send the message"],
  ["Shift Enter", "Begin another line"],
  ["Esc", "Stop the answer, or close what is open"],
  ["Ctrl Enter", "Run the request of the playground, or save an edited answer"],
  ["Space", "Pause the machine room"],
  ["?", "Show these shortcuts"],
] as const;

/** True where a key is text. */
function isWriting(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}

function Shortcuts() {
  const { keys, showKeys } = usePalette();
  return (
    <Dialog open={keys} close={() => showKeys(false)} title="Keyboard shortcuts">
      <dl className="keys">
        {KEYS.map(([key, meaning]) => (
          <div key={key}>
            <dt>
              <kbd className="kbd">{key}</kbd>
            </dt>
            <dd>{meaning}</dd>
          </div>
        ))}
      </dl>
      <p className="muted small">On a Mac, ⌘ is Ctrl.</p>
    </Dialog>
  );
}

export function Palette() {
  const { open, set } = usePalette();
  const [, navigate] = useLocation();
  useEffect(() => {
    const listen = (event: KeyboardEvent) => {
      if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
        event.preventDefault();
        usePalette.getState().set(!usePalette.getState().open);
      }
      if ((event.ctrlKey || event.metaKey) && event.shiftKey && event.key.toLowerCase() === "o") {
        event.preventDefault();
        navigate("/chat");
      }
      if (event.key === "?" && !isWriting(event.target)) usePalette.getState().showKeys(true);
    };
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  }, [navigate]);
  return (
    <>
      <Shortcuts />
      <Ariakit.Dialog
        open={open}
        onClose={() => set(false)}
        backdrop={<div className="backdrop" />}
        className="palette"
        aria-label="Commands"
        unmountOnHide
      >
        <Commands close={() => set(false)} />
      </Ariakit.Dialog>
    </>
  );
}

function Commands({ close }: { close: () => void }) {
  const [location, navigate] = useLocation();
  const [text, setText] = useState("");
  const conversations = useChat((chat) => chat.conversations);
  const models = useServer((server) => server.models);
  const commands = useMemo(() => {
    const { current, streaming, update, stop } = useChat.getState();
    return [
      { name: "New chat", hint: "Ctrl Shift O", icon: Plus, run: () => navigate("/chat") },
      ...(current && streaming[current] ? [{ name: "Stop the answer", hint: "", icon: Square, run: stop }] : []),
      ...PAGES.map(({ name, path, icon }) => ({ name: `Go to ${name}`, hint: "", icon, run: () => navigate(path) })),
      { name: "Use light colours", hint: "", icon: Sun, run: () => usePrefs.getState().set({ theme: "light" }) },
      { name: "Use dark colours", hint: "", icon: Moon, run: () => usePrefs.getState().set({ theme: "dark" }) },
      { name: "Keyboard shortcuts", hint: "?", icon: Keyboard, run: () => usePalette.getState().showKeys(true) },
      ...models.filter(chats).map((model) => ({
        name: `Chat with ${model.name}`,
        hint: model.loaded ? "loaded" : "",
        icon: MessageSquare,
        run: () => {
          usePrefs.getState().set({ lastModel: model.name });
          // The chat that is shown goes on with it.
          if (current && location === `/chat/${current}`) void attempt(() => update(current, { model: model.name }));
          else navigate("/chat");
        },
      })),
      ...models.flatMap((model) => {
        const bench = playgroundOf(model);
        return bench ? [{ name: `${bench.name} with ${model.name}`, hint: "playground", icon: FlaskConical, run: () => navigate(bench.path) }] : [];
      }),
      ...models
        .filter((model) => !model.loaded && model.problem === null)
        .map((model) => ({
          name: `Load ${model.name}`,
          hint: "",
          icon: PAGES[1].icon,
          run: () => void attempt(() => useServer.getState().load(model.name)),
        })),
      ...conversations.map((one) => ({
        name: one.title || "New chat",
        hint: "chat",
        icon: MessageSquare,
        run: () => navigate(`/chat/${one.id}`),
      })),
    ];
  }, [conversations, models, location, navigate]);
  const wanted = text.toLowerCase().split(/\s+/);
  const found = commands.filter(({ name }) => wanted.every((word) => name.toLowerCase().includes(word))).slice(0, 40);
  return (
    <Ariakit.ComboboxProvider open setValue={setText} focusLoop includesBaseElement={false}>
      <Ariakit.Combobox autoFocus autoSelect="always" placeholder="Search chats, models and commands" aria-label="Search" />
      <Ariakit.ComboboxList className="results" alwaysVisible aria-label="Results">
        {found.map(({ name, hint, icon: Icon, run }, index) => (
          <Ariakit.ComboboxItem
            key={`${index} ${name}`}
            className="menu-item"
            value={name}
            setValueOnClick={false}
            hideOnClick={false}
            onClick={() => {
              close();
              run();
            }}
          >
            <Icon size={16} aria-hidden />
            <span className="grow">{name}</span>
            <span className="muted">{hint}</span>
          </Ariakit.ComboboxItem>
        ))}
        {found.length === 0 && <div className="empty">Nothing is called that. Try a chat's title or a model's name.</div>}
      </Ariakit.ComboboxList>
    </Ariakit.ComboboxProvider>
  );
}
