import "./settings.css";

import { KeyRound, Trash2 } from "lucide-react";
import { type FormEvent, type ReactNode, useCallback, useEffect, useState } from "react";

import { json, request, storeKey, storedKey } from "../api/client.ts";
import type { KeyInfo, RequestEntry, Scope, SettingsInForce } from "../api/types.ts";
import { CopyButton } from "../chat/markdown.tsx";
import { ConfirmButton, Dialog } from "../components/dialog.tsx";
import { attempt, toast } from "../components/toasts.tsx";
import { ago, seconds } from "../format.ts";
import { type Theme, usePrefs } from "../store/prefs.ts";
import { connect, useServer } from "../store/server.ts";
import { ToolServers } from "./tool-servers.tsx";

export default function SettingsPage() {
  const session = useServer((server) => server.session);
  const admin = session?.scopes.includes("admin") ?? false;
  return (
    <div className="page">
      <div className="inner settings">
        <header className="page-head">
          <div>
            <h1>Settings and status</h1>
            <p>
              Paguro {session?.version}. Documents of its APIs: <a href="/docs">all paths and fields</a>,{" "}
              <a href="/openapi.json">the same for programs</a>, <a href="/ui/licenses.txt">licenses of this page's parts</a>.
            </p>
          </div>
        </header>
        <Browser />
        {session?.scopes.includes("inference") && <ToolServers />}
        {admin ? (
          <>
            <Keys />
            <InForce />
            <Requests />
          </>
        ) : (
          session && (
            <div className="note">
              <KeyRound size={16} aria-hidden />
              Keys, the server's settings and the last requests need a key with the scope admin.
            </div>
          )
        )}
      </div>
    </div>
  );
}

function Section({ title, aside, children }: { title: string; aside?: ReactNode; children: ReactNode }) {
  return (
    <section className="card" aria-label={title}>
      <header>
        <h2>{title}</h2>
        {aside}
      </header>
      {children}
    </section>
  );
}

function Browser() {
  const { theme, set } = usePrefs();
  const session = useServer((server) => server.session);
  const themes: [Theme, string][] = [
    ["system", "As the system"],
    ["light", "Light"],
    ["dark", "Dark"],
  ];
  return (
    <Section title="This browser">
      <div className="body row wrap spread">
        <div role="radiogroup" aria-label="Colours" className="choice">
          {themes.map(([value, name]) => (
            <label key={value}>
              <input type="radio" name="theme" checked={theme === value} onChange={() => set({ theme: value })} />
              <span>{name}</span>
            </label>
          ))}
        </div>
        <span className="muted">Chats and presets are kept here and nowhere else.</span>
        {session?.needs_key && storedKey() !== "" && (
          <button
            type="button"
            className="button"
            onClick={() => {
              storeKey("");
              void connect();
            }}
          >
            Forget the key
          </button>
        )}
      </div>
    </Section>
  );
}

const SCOPES: [Scope, string][] = [
  ["inference", "ask models"],
  ["models", "pull and delete models"],
  ["admin", "see and change the server"],
];

function Keys() {
  const [keys, setKeys] = useState<KeyInfo[] | null>(null);
  const [making, setMaking] = useState(false);
  const [made, setMade] = useState<{ key: string; info: KeyInfo } | null>(null);
  const refresh = useCallback(() => attempt(async () => setKeys((await json<{ keys: KeyInfo[] }>("/ui/v1/keys")).keys)), []);
  useEffect(() => void refresh(), [refresh]);
  const first = keys?.length === 0;
  const make = (event: FormEvent<HTMLFormElement>) => {
    event.preventDefault();
    const form = new FormData(event.currentTarget);
    const scopes = SCOPES.map(([scope]) => scope).filter((scope) => form.get(scope) !== null);
    void attempt(async () => {
      const next = await json<{ key: string; info: KeyInfo }>("/ui/v1/keys", { body: { name: form.get("name"), scopes } });
      setMaking(false);
      setMade(next);
      // From the first key on the server wants one from this page, too.
      if (first) storeKey(next.key);
      await refresh();
    });
  };
  return (
    <Section
      title="API keys"
      aside={
        <button type="button" className="button small" onClick={() => setMaking(true)}>
          New key
        </button>
      }
    >
      {keys?.length ? (
        <div className="scroll-x" tabIndex={0} role="group" aria-label="Table">
          <table className="list">
            <thead>
              <tr>
                <th>Name</th>
                <th>Id</th>
                <th>Scopes</th>
                <th>Made</th>
                <th>
                  <span className="sr">Actions</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {keys.map((key) => (
                <tr key={key.id}>
                  <td>{key.name}</td>
                  <td className="mono">{key.id}</td>
                  <td>
                    <span className="row wrap">
                      {key.scopes.map((scope) => (
                        <span key={scope} className="tag">
                          {scope}
                        </span>
                      ))}
                    </span>
                  </td>
                  <td className="muted">{ago(key.created * 1000)}</td>
                  <td className="right">
                    <ConfirmButton
                      label={`Revoke ${key.name}`}
                      title={`Revoke ${key.name}?`}
                      text="Programs that use this key are refused within a second. It cannot be brought back."
                      confirm="Revoke"
                      className="button quiet icon small"
                      action={() =>
                        void attempt(async () => {
                          await request(`/ui/v1/keys/${encodeURIComponent(key.id)}`, { method: "DELETE" });
                          toast(`${key.name} is revoked.`);
                          await refresh();
                        })
                      }
                    >
                      <Trash2 size={15} aria-hidden />
                    </ConfirmButton>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : (
        <div className="empty">
          <h2>There are no keys</h2>
          <p>Whoever can reach this address can use the server. From the first key on, everybody needs one.</p>
        </div>
      )}
      {/* One dialog for both: one that opens while another closes would be closed with it, and the key lost. */}
      <Dialog
        open={making || made !== null}
        close={() => {
          setMaking(false);
          setMade(null);
        }}
        title={made ? "The new key" : "New key"}
      >
        {made ? (
          <>
            <p>Copy it now: the server keeps only its hash.</p>
            <div className="secret">
              <code className="mono">{made.key}</code>
              <CopyButton text={made.key} label="Copy the key" />
            </div>
            <div className="actions">
              <button
                type="button"
                className="button primary"
                onClick={() => {
                  setMade(null);
                  void connect();
                }}
              >
                Done
              </button>
            </div>
          </>
        ) : (
          <form className="stack" onSubmit={make}>
            <div className="field">
              <label htmlFor="key-name">What it is for</label>
              <input id="key-name" name="name" className="input" autoFocus required maxLength={100} placeholder="laptop" />
            </div>
            <fieldset className="scopes">
              <legend className="label">It may</legend>
              {SCOPES.map(([scope, meaning]) => (
                <label key={scope} className="check">
                  <input type="checkbox" name={scope} defaultChecked={scope === "inference" || first} />
                  {meaning}
                </label>
              ))}
            </fieldset>
            {first && <p className="muted">This is the first key: this browser uses it from then on. Without the scope admin nobody could make another one here.</p>}
            <div className="actions">
              <button type="button" className="button" onClick={() => setMaking(false)}>
                Cancel
              </button>
              <button type="submit" className="button primary">
                Make the key
              </button>
            </div>
          </form>
        )}
      </Dialog>
    </Section>
  );
}

function InForce() {
  const [value, setValue] = useState<SettingsInForce | null>(null);
  useEffect(() => void attempt(async () => setValue(await json<SettingsInForce>("/ui/v1/settings"))), []);
  return (
    <Section title="The server" aside={value && <span className="muted">{`${value.system}, ${value.architecture}`}</span>}>
      <div className="body devices">
        {value?.devices.map((device) => (
          <p key={device}>
            <span className="muted">Device</span> {device}
          </p>
        ))}
      </div>
      <div className="scroll-x" tabIndex={0} role="group" aria-label="Table">
        <table className="list">
          <thead>
            <tr>
              <th>Setting</th>
              <th>Value</th>
              <th>Set by</th>
            </tr>
          </thead>
          <tbody>
            {value?.settings.map((setting) => (
              <tr key={setting.name}>
                <td className="mono">{setting.name}</td>
                <td className="value">{setting.value}</td>
                <td>
                  <span className={`tag ${setting.origin === "default" ? "" : "sea"}`}>{setting.origin}</span>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Section>
  );
}

function Requests() {
  const [requests, setRequests] = useState<RequestEntry[] | null>(null);
  useEffect(() => {
    const refresh = () =>
      void json<{ requests: RequestEntry[] }>("/ui/v1/requests").then(
        (answer) => setRequests(answer.requests),
        () => undefined,
      );
    refresh();
    const timer = setInterval(refresh, 3000);
    return () => clearInterval(timer);
  }, []);
  const shown = requests?.filter((one) => one.path !== "/status").slice(0, 50) ?? [];
  return (
    <Section title="Last requests" aside={<span className="muted">without their text</span>}>
      {shown.length === 0 ? (
        <div className="empty">
          <p>Nothing was asked yet.</p>
        </div>
      ) : (
        <div className="scroll-x requests" tabIndex={0} role="group" aria-label="Table of requests">
          <table className="list">
            <thead>
              <tr>
                <th>When</th>
                <th>Path</th>
                <th>Status</th>
                <th className="right">Until the answer began</th>
              </tr>
            </thead>
            <tbody>
              {shown.map((one) => (
                <tr key={`${one.id} ${one.time} ${one.path}`} title={one.id}>
                  <td className="muted">{new Date(one.time * 1000).toLocaleTimeString()}</td>
                  <td className="mono">
                    {one.method} {one.path}
                  </td>
                  <td>
                    <span className={`tag ${one.status >= 400 ? "bad" : ""}`}>{one.status}</span>
                  </td>
                  <td className="num right">{seconds(one.milliseconds / 1000)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Section>
  );
}
