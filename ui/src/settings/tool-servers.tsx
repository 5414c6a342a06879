import { Trash2 } from "lucide-react";
import { type FormEvent, useEffect, useState } from "react";

import { request } from "../api/client.ts";
import type { ToolServer } from "../api/types.ts";
import { ConfirmButton, Dialog } from "../components/dialog.tsx";
import { attempt, toast } from "../components/toasts.tsx";
import { plural } from "../format.ts";
import { usePrefs } from "../store/prefs.ts";
import { useServer } from "../store/server.ts";
import { trustName, useTools } from "../store/tools.ts";

/** Servers of tools, and which tools are called without a question. */
export function ToolServers() {
  const { servers, known, refresh } = useTools();
  const admin = useServer((server) => server.may("admin"));
  const [adding, setAdding] = useState(false);
  const [problem, setProblem] = useState<string | null>(null);
  useEffect(() => void attempt(refresh), [refresh]);
  const add = (event: FormEvent<HTMLFormElement>) => {
    event.preventDefault();
    const form = new FormData(event.currentTarget);
    const authorization = String(form.get("authorization") ?? "").trim();
    setProblem(null);
    const body = { name: form.get("name"), url: form.get("url"), ...(authorization ? { authorization } : {}) };
    request("/ui/v1/tools/servers", { body }).then(
      () => {
        setAdding(false);
        void attempt(refresh);
      },
      (error: unknown) => setProblem(error instanceof Error ? error.message : String(error)),
    );
  };
  return (
    <section className="card" aria-label="Tool servers">
      <header>
        <h2>Tool servers</h2>
        {admin && (
          <button type="button" className="button small" onClick={() => setAdding(true)}>
            Add one
          </button>
        )}
      </header>
      {servers.length === 0 ? (
        <div className="empty">
          <h2>{known ? "There are no tool servers" : "Asking for tools"}</h2>
          {known && (
            <p>
              Servers of the Model Context Protocol are named in the server's settings, under <code className="mono">[[mcp]]</code>. Chats can then use
              their tools.
            </p>
          )}
        </div>
      ) : (
        <ul className="tool-servers">
          {servers.map((server) => (
            <Server key={server.name} server={server} admin={admin} />
          ))}
        </ul>
      )}
      <Dialog open={adding} close={() => setAdding(false)} title="Add a tool server">
        <form className="stack" onSubmit={add}>
          <div className="field">
            <label htmlFor="tool-name">Name</label>
            <input id="tool-name" name="name" className="input" autoFocus required maxLength={40} placeholder="search" />
          </div>
          <div className="field">
            <label htmlFor="tool-url">Address</label>
            <input id="tool-url" name="url" className="input mono" type="url" required placeholder="https://example.com/mcp" />
          </div>
          <div className="field">
            <label htmlFor="tool-authorization">
              Authorization <span>if it wants a key</span>
            </label>
            <input id="tool-authorization" name="authorization" className="input mono" type="password" autoComplete="off" placeholder="Bearer …" />
          </div>
          <p className="muted small">It stays until the server ends. Programs, and servers that are to stay, are named in the settings' file.</p>
          {problem && (
            <div className="note bad" role="alert">
              {problem}
            </div>
          )}
          <div className="actions">
            <button type="button" className="button" onClick={() => setAdding(false)}>
              Cancel
            </button>
            <button type="submit" className="button primary">
              Add
            </button>
          </div>
        </form>
      </Dialog>
    </section>
  );
}

function Server({ server, admin }: { server: ToolServer; admin: boolean }) {
  const { trustedTools, trustTool } = usePrefs();
  const remove = () =>
    void attempt(async () => {
      await request(`/ui/v1/tools/servers/${encodeURIComponent(server.name)}`, { method: "DELETE" });
      toast(`${server.name} is removed.`);
      await useTools.getState().refresh();
    });
  return (
    <li>
      <div className="row wrap">
        <span className="name">{server.name}</span>
        <span className={`tag ${server.state === "ready" ? "sea" : server.state === "failed" ? "bad" : "sand"}`}>
          {server.state === "ready" ? plural(server.tools.length, "tool") : server.state}
        </span>
        <span className="mono muted small grow place">{server.place}</span>
        {server.added && admin && (
          <ConfirmButton
            label={`Remove ${server.name}`}
            title={`Remove ${server.name}?`}
            text="Chats lose its tools at once. It can be added again."
            confirm="Remove"
            className="button quiet icon small"
            action={remove}
          >
            <Trash2 size={15} aria-hidden />
          </ConfirmButton>
        )}
      </div>
      {server.problem && <p className="problem small">{server.problem}</p>}
      {server.tools.length > 0 && (
        <ul className="tools-of">
          {server.tools.map((tool) => {
            const name = trustName(server.name, tool.name);
            return (
              <li key={tool.name}>
                <span className="grow">
                  <span className="mono">{tool.name}</span> <span className="muted small">{tool.description.split("\n")[0]}</span>
                </span>
                <label className="check small" title={tool.trusted ? "The server's settings say so." : "Kept in this browser."}>
                  <input
                    type="checkbox"
                    checked={tool.trusted || trustedTools.includes(name)}
                    disabled={tool.trusted}
                    onChange={(event) => trustTool(name, event.target.checked)}
                  />
                  run without asking
                </label>
              </li>
            );
          })}
        </ul>
      )}
    </li>
  );
}
