import { Activity, Boxes, FlaskConical, MessageSquare, Moon, PlugZap, Settings2, Sun } from "lucide-react";
import { type FormEvent, type ReactNode, useState } from "react";
import { Link, useLocation } from "wouter";

import { rate } from "../format.ts";
import { lastChat, useChat } from "../store/chat.ts";
import { useDark, usePrefs } from "../store/prefs.ts";
import { useServer } from "../store/server.ts";
import { Tip } from "./tip.tsx";

export const PAGES = [
  { path: "/chat", name: "Chat", icon: MessageSquare },
  { path: "/models", name: "Models", icon: Boxes },
  { path: "/room", name: "Machine room", icon: Activity },
  { path: "/playground", name: "Playground", icon: FlaskConical },
  { path: "/settings", name: "Settings", icon: Settings2 },
] as const;

/** The shell of a hermit crab, in pages. */
export function Mark({ size = 24 }: { size?: number }) {
  return (
    <svg width={size} height={size} viewBox="0 0 28 28" fill="var(--coral)" aria-hidden="true">
      <rect x="2" y="2" width="11" height="11" rx="2" />
      <rect x="15" y="2" width="11" height="11" rx="2" opacity=".82" />
      <rect x="15" y="15" width="11" height="11" rx="2" opacity=".64" />
      <rect x="8" y="15" width="5" height="5" rx="1" opacity=".5" />
      <rect x="2" y="15" width="4" height="4" rx="1" opacity=".38" />
      <rect x="9" y="22" width="4" height="4" rx="1" opacity=".28" />
    </svg>
  );
}

export function Rail() {
  const [location] = useLocation();
  // Back to the chat that was left; the button above the chats begins another one.
  const current = useChat((chat) => chat.current) ?? lastChat();
  return (
    <nav className="rail" aria-label="Pages">
      <span className="mark">
        <Mark />
      </span>
      {PAGES.map(({ path, name, icon: Icon }) => (
        <Tip key={path} text={name} placement="right">
          <Link href={path === "/chat" && current ? `/chat/${current}` : path} aria-label={name} aria-current={location.startsWith(path) ? "page" : undefined}>
            <Icon size={20} strokeWidth={1.75} aria-hidden />
            <span className="name">{name === "Machine room" ? "Machine" : name}</span>
          </Link>
        </Tip>
      ))}
      <span className="spacer" />
      <ThemeButton />
    </nav>
  );
}

function ThemeButton() {
  const isDark = useDark((state) => state.dark);
  const text = isDark ? "Use light colours" : "Use dark colours";
  return (
    <Tip text={text} placement="right">
      <button
        type="button"
        className="desktop"
        aria-label={text}
        onClick={() => usePrefs.getState().set({ theme: isDark ? "light" : "dark" })}
      >
        {isDark ? <Sun size={18} strokeWidth={1.75} /> : <Moon size={18} strokeWidth={1.75} />}
      </button>
    </Tip>
  );
}

/** The server's activity, in one line on every page. */
export function Strip() {
  const { status, online, rate: perSecond } = useServer();
  const models = status?.models ?? [];
  const sum = (of: (model: (typeof models)[number]) => number) => models.reduce((total, model) => total + of(model), 0);
  const busiest = models.toSorted((a, b) => b.running - a.running)[0];
  const queue = sum((model) => model.waiting);
  if (online === false) {
    return (
      <footer className="foot">
        <Link href="/room" className="strip away">
          <span>
            <span className="dot" aria-hidden />
            The server does not answer
          </span>
        </Link>
      </footer>
    );
  }
  return (
    <footer className="foot">
      <Link href="/room" className="strip" title="Open the machine room">
        <span>
          <span className={`dot${busiest ? " on" : ""}`} aria-hidden />
          <span className="strip-name">{busiest ? busiest.name : status ? "No model is loaded" : "Connecting"}</span>
          {models.length > 1 && <span className="muted">+{models.length - 1}</span>}
        </span>
        {busiest && <span className="wide">{busiest.device}</span>}
        <span>
          <span className="num">{rate(perSecond)}</span> tok/s
        </span>
        <span className="roomy" title="Pages of keys and values in use">
          <span className="num">
            {sum((model) => model.pages_used)}/{sum((model) => model.pages)}
          </span>{" "}
          pages
        </span>
        <span className="wide">
          <span className="num">{sum((model) => model.running)}</span> running
        </span>
        <span className="wide">
          <span className="num">{queue}</span> waiting
        </span>
        <span className="grow" />
        <span className="wide">
          <kbd className="kbd">Ctrl K</kbd>
        </span>
      </Link>
    </footer>
  );
}

export function AwayNote() {
  const online = useServer((server) => server.online);
  if (online !== false) return null;
  return (
    <div className="banner bad" role="alert">
      <PlugZap size={16} aria-hidden />
      <span>The server does not answer. The page goes on by itself when it is back.</span>
    </div>
  );
}

export function KeyPage() {
  const [key, setKey] = useState("");
  const [problem, setProblem] = useState<string | null>(null);
  const submit = async (event: FormEvent) => {
    event.preventDefault();
    setProblem(await useServer.getState().signIn(key));
  };
  return (
    <main className="key-page">
      <form className="card" onSubmit={(event) => void submit(event)}>
        <div className="row">
          <Mark />
          <h1>Paguro</h1>
        </div>
        <p className="muted">
          This server wants a key. <code className="mono">paguro keys add NAME</code> makes one on the server's machine.
        </p>
        <div className="field">
          <label htmlFor="key">Key</label>
          <input
            id="key"
            className="input mono"
            type="password"
            autoComplete="off"
            autoFocus
            value={key}
            placeholder="pg-…"
            onChange={(event) => setKey(event.target.value)}
          />
        </div>
        {problem && (
          <div className="note bad" role="alert">
            {problem}
          </div>
        )}
        <button className="button primary" type="submit" disabled={!key.trim()}>
          Use this key
        </button>
        <p className="muted">It is kept in this browser and sent to this server only.</p>
      </form>
    </main>
  );
}

/** For pages that a key does not open. */
export function NeedsScope({ scope, children }: { scope: "inference" | "models" | "admin"; children: ReactNode }) {
  const session = useServer((server) => server.session);
  if (!session || session.scopes.includes(scope)) return children;
  return (
    <div className="page">
      <div className="empty">
        <h2>This key does not open this page</h2>
        <p>
          It needs the scope <span className="mono">{scope}</span>. On the server's machine:{" "}
          <code className="mono">paguro keys add NAME --scope {scope}</code>
        </p>
      </div>
    </div>
  );
}
