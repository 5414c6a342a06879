import { GitFork, PanelLeft, SlidersHorizontal } from "lucide-react";
import { useEffect, useMemo, useState } from "react";
import { useLocation } from "wouter";

import { Tip } from "../components/tip.tsx";
import { attempt } from "../components/toasts.tsx";
import { defaultModel, useChat } from "../store/chat.ts";
import { fullness } from "../store/context.ts";
import type { Attachment, ChatSettings } from "../store/db.ts";
import { draftOf, keepDraft } from "../store/drafts.ts";
import { usePrefs } from "../store/prefs.ts";
import { useServer } from "../store/server.ts";
import { pathTo, treeOf } from "../store/tree.ts";
import { cardOf, noChat } from "../store/uses.ts";
import { Composer } from "./composer.tsx";
import { Empty } from "./empty.tsx";
import { Messages } from "./messages.tsx";
import { ModelPicker } from "./model-picker.tsx";
import { SettingsPanel } from "./settings-panel.tsx";
import { Sidebar } from "./sidebar.tsx";
import { TreeDialog } from "./tree-dialog.tsx";

/** True while the window fits a query. */
function useMedia(query: string): boolean {
  const [fits, setFits] = useState(() => matchMedia(query).matches);
  useEffect(() => {
    const media = matchMedia(query);
    const listen = () => setFits(media.matches);
    media.addEventListener("change", listen);
    return () => media.removeEventListener("change", listen);
  }, [query]);
  return fits;
}

const narrow = () => matchMedia("(max-width: 900px)").matches;

export function ChatPage({ id }: { id: string | null }) {
  const [, navigate] = useLocation();
  const { current, messages, conversations, known } = useChat();
  const models = useServer((server) => server.models);
  const modelsKnown = useServer((server) => server.modelsKnown);
  const prefs = usePrefs();
  const [side, setSide] = useState(() => !narrow() && prefs.sideOpen);
  const [settings, setSettings] = useState(false);
  const [tree, setTree] = useState(false);
  // A chat that has not begun is kept as a draft.
  const [draft, setDraft] = useState<{ model: string | null; settings: ChatSettings }>(() => ({ model: null, settings: draftOf("").settings ?? {} }));
  useEffect(() => keepDraft("", { settings: draft.settings }), [draft.settings]);

  useEffect(() => {
    if (useChat.getState().current !== id) void useChat.getState().open(id);
  }, [id]);
  // A window that becomes narrow, as one that is turned, shows the chat and not the list over it.
  useEffect(() => {
    const query = matchMedia("(max-width: 900px)");
    const listen = () => setSide(!query.matches && usePrefs.getState().sideOpen);
    query.addEventListener("change", listen);
    return () => query.removeEventListener("change", listen);
  }, []);
  useEffect(() => {
    if (id && known && !conversations.some((one) => one.id === id)) navigate("/chat", { replace: true });
  }, [id, known, conversations, navigate]);

  const conversation = id ? conversations.find((one) => one.id === id) : undefined;
  const shownModel = conversation?.model ?? draft.model ?? (models.length ? defaultModel() : null);
  const path = useMemo(
    () => (id && current === id ? pathTo(treeOf(messages), conversation?.leaf ?? null) : []),
    [id, current, messages, conversation?.leaf],
  );
  const branches = messages.length > path.length;

  const send = async (text: string, attachments: Attachment[]) => {
    const chat = useChat.getState();
    if (!id) {
      const created = await chat.create(shownModel, draft.settings);
      setDraft({ model: null, settings: {} });
      navigate(`/chat/${created}`);
    } else if (!conversation?.model && shownModel) await chat.update(id, { model: shownModel });
    await chat.send(text, attachments);
  };

  const choose = (model: string) => {
    prefs.set({ lastModel: model });
    if (id) void useChat.getState().update(id, { model });
    else setDraft({ ...draft, model });
  };

  const blocked = noChat(models, modelsKnown, shownModel);
  const chatSettings = conversation?.settings ?? draft.settings;
  const full = useMemo(() => fullness(path, cardOf(models, shownModel), chatSettings.max_tokens), [path, models, shownModel, chatSettings.max_tokens]);
  const changeSettings = (next: ChatSettings) =>
    id ? void useChat.getState().update(id, { settings: next }) : setDraft({ ...draft, settings: next });
  const setServers = (servers: string[]) => {
    const { servers: _, ...rest } = chatSettings;
    changeSettings(servers.length ? { ...rest, servers } : rest);
  };

  // Between a phone and a wide window there is room for the chats or the settings beside the talk.
  const medium = useMedia("(min-width: 901px) and (max-width: 1180px)");
  const sideShown = side && !(settings && medium);
  const toggleSide = () => {
    if (side && !sideShown) {
      setSettings(false);
      return;
    }
    setSide(!side);
    if (!narrow()) prefs.set({ sideOpen: !side });
  };

  return (
    <div className={`chat${sideShown ? " with-side" : ""}`}>
      {sideShown && (
        <>
          <div className="side-shade" onClick={() => setSide(false)} />
          <Sidebar current={id} picked={() => narrow() && setSide(false)} />
        </>
      )}
      <section className="talk" aria-label="Conversation">
        <header className="talk-head">
          {path.length > 0 && <h1 className="sr">{conversation?.title || "Chat"}</h1>}
          <Tip text={sideShown ? "Hide the chats" : "Show the chats"} placement="bottom">
            <button type="button" className="button quiet icon" aria-label={sideShown ? "Hide the chats" : "Show the chats"} aria-expanded={sideShown} onClick={toggleSide}>
              <PanelLeft size={18} aria-hidden />
            </button>
          </Tip>
          <ModelPicker model={shownModel} choose={choose} />
          <span className="grow" />
          {branches && (
            <Tip text="Show all branches" placement="bottom">
              <button type="button" className="button quiet icon" aria-label="Show all branches" onClick={() => setTree(true)}>
                <GitFork size={18} aria-hidden />
              </button>
            </Tip>
          )}
          <Tip text="System prompt and sampling" placement="bottom">
            <button
              type="button"
              className="button quiet icon"
              aria-label="System prompt and sampling"
              aria-expanded={settings}
              onClick={() => setSettings(!settings)}
            >
              <SlidersHorizontal size={18} aria-hidden />
            </button>
          </Tip>
        </header>
        {path.length > 0 && id ? (
          <Messages key={`messages ${id}`} path={path} messages={messages} />
        ) : id && current !== id ? (
          <div className="grow" />
        ) : (
          <Empty model={shownModel} blocked={blocked !== null} send={(text) => void attempt(() => send(text, []))} />
        )}
        <Composer
          key={`composer ${id ?? ""}`}
          conversation={id}
          model={shownModel}
          blocked={blocked}
          full={full}
          servers={chatSettings.servers ?? []}
          setServers={setServers}
          send={send}
        />
      </section>
      {settings && (
        <SettingsPanel
          model={shownModel}
          settings={chatSettings}
          change={changeSettings}
          close={() => setSettings(false)}
        />
      )}
      {id && <TreeDialog open={tree} close={() => setTree(false)} messages={messages} leaf={conversation?.leaf ?? null} />}
    </div>
  );
}
