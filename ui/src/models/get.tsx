import { Download, FolderInput, Square, X } from "lucide-react";
import { type FormEvent, useState } from "react";

import { describe, json } from "../api/client.ts";
import type { RemoteModel } from "../api/types.ts";
import { Dialog } from "../components/dialog.tsx";
import { toast } from "../components/toasts.tsx";
import { bytes, rate, seconds } from "../format.ts";
import { useServer } from "../store/server.ts";
import { change, pull, usePulls } from "./pulls.ts";

/** Ways to get a model: from the hub, and for administrators from a path on the server's machine. */
export function Get() {
  const admin = useServer((server) => server.may("admin"));
  const [importing, setImporting] = useState(false);
  return (
    <section className="card" aria-label="Get a model">
      <Pull more={admin ? () => setImporting(true) : null} />
      <Pulls />
      <Import open={importing} close={() => setImporting(false)} />
    </section>
  );
}

function Pull({ more }: { more: (() => void) | null }) {
  const limit = useServer((server) => server.memory.limit);
  const [name, setName] = useState("");
  const [asking, setAsking] = useState(false);
  const [large, setLarge] = useState<{ wanted: string; remote: RemoteModel } | null>(null);
  const [problem, setProblem] = useState<string | null>(null);
  const submit = (event: FormEvent) => {
    event.preventDefault();
    const wanted = name.trim().replace(/^hf:/, "hf.co/");
    if (!wanted || asking) return;
    setAsking(true);
    setProblem(null);
    // The hub is asked first, so that nobody waits for gigabytes that do not fit.
    json<RemoteModel>(`/ui/v1/remote?model=${encodeURIComponent(wanted)}`)
      .then(
        (remote) => {
          setName("");
          if (remote.needs > limit) setLarge({ wanted, remote });
          else void pull(wanted);
        },
        (error: unknown) => setProblem(describe(error)),
      )
      .finally(() => setAsking(false));
  };
  return (
    <>
      <form className="pull body" onSubmit={submit}>
        <div className="field grow">
          <label htmlFor="pull">Pull a model from the hub</label>
          <input
            id="pull"
            className="input mono"
            placeholder="qwen3:4b, or hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0"
            value={name}
            autoComplete="off"
            spellCheck={false}
            onChange={(event) => setName(event.target.value)}
          />
        </div>
        <button type="submit" className="button primary" disabled={!name.trim() || asking}>
          <Download size={16} aria-hidden />
          {asking ? "Asking the hub" : "Pull"}
        </button>
        {more && (
          <button type="button" className="button" onClick={more}>
            <FolderInput size={16} aria-hidden />
            Import
          </button>
        )}
      </form>
      {problem && (
        <div className="pulling">
          <p className="problem" role="alert">
            {problem}
          </p>
        </div>
      )}
      <Dialog open={large !== null} close={() => setLarge(null)} title={`${large?.remote.name ?? "It"} does not fit`}>
        <p>
          It has {bytes(large?.remote.bytes ?? 0)} and needs about {bytes(large?.remote.needs ?? 0)} of memory; {bytes(limit)} are allowed for models. A smaller
          quantization of it may fit.
        </p>
        <div className="actions">
          <button type="button" className="button" onClick={() => setLarge(null)}>
            Cancel
          </button>
          <button
            type="button"
            className="button primary"
            onClick={() => {
              if (large) void pull(large.wanted);
              setLarge(null);
            }}
          >
            Pull it all the same
          </button>
        </div>
      </Dialog>
    </>
  );
}

function Pulls() {
  const pulls = usePulls((state) => state.pulls);
  return (
    <>
      {pulls.map((one) => (
        <div key={one.name} className="pulling" role="status">
          <div className="row wrap">
            <span className="mono grow pull-name">{one.name}</span>
            {!one.problem && one.total > 0 && (
              <span className="num muted">
                {bytes(one.done)} of {bytes(one.total)}
                {one.speed > 0 && ` · ${rate(one.speed / 1e6)} MB/s · ${seconds((one.total - one.done) / one.speed)} left`}
              </span>
            )}
            {one.problem ? (
              <button type="button" className="button quiet icon small" aria-label="Dismiss" onClick={() => change(one.name, null)}>
                <X size={15} aria-hidden />
              </button>
            ) : (
              <button type="button" className="button small" onClick={() => one.abort.abort()}>
                <Square size={12} aria-hidden />
                Cancel
              </button>
            )}
          </div>
          {one.problem ? (
            <p className="problem" role="alert">
              {one.problem}
            </p>
          ) : (
            <>
              <div className="bar" role="progressbar" aria-label={`Pulling ${one.name}`} aria-valuenow={one.total ? Math.round((100 * one.done) / one.total) : 0}>
                <span style={{ width: `${one.total ? (100 * one.done) / one.total : 0}%` }} />
              </div>
              <span className="muted small">{one.status}</span>
            </>
          )}
        </div>
      ))}
    </>
  );
}

function Import({ open, close }: { open: boolean; close: () => void }) {
  const [busy, setBusy] = useState(false);
  const [problem, setProblem] = useState<string | null>(null);
  const submit = (event: FormEvent<HTMLFormElement>) => {
    event.preventDefault();
    const form = new FormData(event.currentTarget);
    const name = String(form.get("name") ?? "").trim();
    setBusy(true);
    setProblem(null);
    const body = { path: form.get("path"), copy: form.get("copy") !== null, ...(name ? { name } : {}) };
    json<{ name: string }>("/ui/v1/import", { body })
      .then(
        async (imported) => {
          close();
          toast(`${imported.name} is here.`);
          await useServer.getState().refreshModels();
        },
        (error: unknown) => setProblem(describe(error)),
      )
      .finally(() => setBusy(false));
  };
  return (
    <Dialog open={open} close={close} title="Import a model">
      <form className="stack" onSubmit={submit}>
        <div className="field">
          <label htmlFor="import-path">
            Path <span>on the server's machine</span>
          </label>
          <input id="import-path" name="path" className="input mono" required autoFocus autoComplete="off" spellCheck={false} placeholder="/models/llama-3.2-3b-Q4_K_M.gguf" />
        </div>
        <div className="field">
          <label htmlFor="import-name">
            Name <span>if not the file's</span>
          </label>
          <input id="import-name" name="name" className="input mono" autoComplete="off" spellCheck={false} placeholder="llama3.2:3b" />
        </div>
        <label className="check">
          <input type="checkbox" name="copy" />
          Copy it into the library. Otherwise the file must stay where it is.
        </label>
        <p className="muted small">
          <code className="mono">paguro list --found</code> shows models of Ollama, LM Studio and the Hugging Face cache on the server's
          machine, and how to import them.
        </p>
        {problem && (
          <div className="note bad" role="alert">
            {problem}
          </div>
        )}
        <div className="actions">
          <button type="button" className="button" onClick={close}>
            Cancel
          </button>
          <button type="submit" className="button primary" disabled={busy}>
            {busy ? "Reading the file" : "Import"}
          </button>
        </div>
      </form>
    </Dialog>
  );
}
