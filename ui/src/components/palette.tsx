// Ctrl-K: everything the page can do, by name.

import * as Ariakit from "@ariakit/react";
import { MessageSquare, Moon, Plus, Square, Sun } from "lucide-react";
import { useEffect, useMemo, useState } from "react";
import { useLocation } from "wouter";
import { create } from "zustand";

import { useChat } from "../store/chat.ts";
import { usePrefs } from "../store/prefs.ts";
import { useServer } from "../store/server.ts";
import { PAGES } from "./frame.tsx";
import { attempt } from "./toasts.tsx";

export const usePalette = create<{ open: boolean; set(open: boolean): void }>((set) => ({
  open: false,
  set: (open) => set({ open }),
}));

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
    };
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  }, [navigate]);
  return (
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
  );
}

function Commands({ close }: { close: () => void }) {
  const [, navigate] = useLocation();
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
      ...models.map((model) => ({
        name: `Chat with ${model.name}`,
        hint: model.loaded ? "loaded" : "",
        icon: MessageSquare,
        run: () => {
          usePrefs.getState().set({ lastModel: model.name });
          if (current) void update(current, { model: model.name });
          else navigate("/chat");
        },
      })),
      ...models
        .filter((model) => !model.loaded)
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
  }, [conversations, models, navigate]);
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
