// Ways to keep the page usable when a part of it fails: a script that does not load because the server is away or has
// another build, or an error of the page itself.

import { RefreshCw, TriangleAlert } from "lucide-react";
import { Component, type ReactNode, useEffect } from "react";

import { describe } from "../api/client.ts";
import { useChat } from "../store/chat.ts";
import { connect, useServer } from "../store/server.ts";

const RELOADED = "paguro.reloaded";

/** Shortest time between two reloads that nobody asked for. */
const PAUSE = 20_000;

/** Loads the page anew, unless that has just been done without success, or an answer is on its way. */
function reloadOnce(): boolean {
  if (Object.keys(useChat.getState().streaming).length > 0) return false;
  try {
    if (Date.now() - Number(sessionStorage.getItem(RELOADED) ?? 0) < PAUSE) return false;
    sessionStorage.setItem(RELOADED, String(Date.now()));
  } catch {
    // Without memory there could be no end of reloads.
    return false;
  }
  location.reload();
  return true;
}

/** True for errors of scripts and styles that could not be loaded, as browsers word them. */
function isMissing(error: unknown): boolean {
  return /dynamically imported module|importing a module script|error loading dynamically|preload CSS|module script failed|MIME type/i.test(describe(error));
}

interface BoundaryProps {
  /** Another place has another chance. */
  place: string;
  children: ReactNode;
}

/** Shows what failed in place of a page, and the way on. */
export class Boundary extends Component<BoundaryProps, { error: unknown; place: string }> {
  override state = { error: null as unknown, place: this.props.place };

  static getDerivedStateFromError(error: unknown) {
    return { error };
  }

  static getDerivedStateFromProps({ place }: BoundaryProps, state: { place: string }) {
    return place === state.place ? null : { place, error: null };
  }

  override render(): ReactNode {
    if (this.state.error === null) return this.props.children;
    return <Failed error={this.state.error} />;
  }
}

function Failed({ error }: { error: unknown }) {
  const missing = isMissing(error);
  const online = useServer((server) => server.online);
  useEffect(() => {
    if (!missing) return;
    // The poll may not have noticed yet that the server is away.
    void connect().catch(() => undefined);
    const check = () => {
      if (useServer.getState().online) reloadOnce();
    };
    const timer = setTimeout(check, 300);
    const stop = useServer.subscribe(({ online: now }, { online: before }) => {
      if (now && !before) check();
    });
    return () => {
      clearTimeout(timer);
      stop();
    };
  }, [missing]);
  return (
    <div className="page">
      <div className="empty" role="alert">
        <TriangleAlert size={28} aria-hidden />
        <h2>{missing ? "This page could not be loaded" : "This page has failed"}</h2>
        <p>
          {!missing
            ? `${describe(error)} The chats and the message that you are writing are kept.`
            : online === false
              ? "The server does not answer. The page is loaded when it is back; chats and drafts are kept."
              : "The server may have been upgraded. Loading again gets its new page; chats and drafts are kept."}
        </p>
        <button type="button" className="button primary" onClick={() => location.reload()}>
          <RefreshCw size={15} aria-hidden />
          Try again
        </button>
      </div>
    </div>
  );
}

/** Shows a part as plain text if it cannot be drawn. */
export class Fallback extends Component<{ text: string; children: ReactNode }, { of: string | null }> {
  override state = { of: null as string | null };

  static getDerivedStateFromError() {
    return { of: "" };
  }

  override componentDidCatch(): void {
    this.setState({ of: this.props.text });
  }

  override componentDidUpdate(before: { text: string }): void {
    // The rest of an answer may be fine.
    if (this.state.of !== null && before.text !== this.props.text) this.setState({ of: null });
  }

  override render(): ReactNode {
    return this.state.of === null ? this.props.children : <pre className="plain">{this.props.text}</pre>;
  }
}

/** A line on every page while the server has another build of it. */
export function UpdateNote() {
  const outdated = useServer((server) => server.outdated && server.online);
  if (!outdated) return null;
  return (
    <div className="banner" role="status">
      <span>The server was updated. Reload this page for the new one; chats and drafts stay.</span>
      <button type="button" className="button small" onClick={() => location.reload()}>
        <RefreshCw size={14} aria-hidden />
        Reload
      </button>
    </div>
  );
}
