import "./models.css";

import { CircleStop, Download, Pin, Play, Square, Trash2, X } from "lucide-react";
import { type FormEvent, useEffect, useState } from "react";
import { useLocation } from "wouter";
import { create } from "zustand";

import { describe, jsonLines, request } from "../api/client.ts";
import type { ModelCard } from "../api/types.ts";
import { ConfirmButton } from "../components/dialog.tsx";
import { NeedsScope } from "../components/frame.tsx";
import { Tip } from "../components/tip.tsx";
import { attempt, toast } from "../components/toasts.tsx";
import { ago, bytes, count, percent, rate, seconds } from "../format.ts";
import { usePrefs } from "../store/prefs.ts";
import { useServer } from "../store/server.ts";

export default function ModelsPage() {
  return (
    <NeedsScope scope="inference">
      <Page />
    </NeedsScope>
  );
}

function Page() {
  const { models, memory, modelsKnown, session, refreshModels } = useServer();
  const [text, setText] = useState("");
  useEffect(() => {
    void attempt(refreshModels);
    const timer = setInterval(() => void refreshModels().catch(() => undefined), 5000);
    return () => clearInterval(timer);
  }, [refreshModels]);
  const wanted = text.trim().toLowerCase();
  const shown = models.filter((model) =>
    [model.name, model.file?.family, model.file?.quantization].some((part) => part?.toLowerCase().includes(wanted)),
  );
  const free = Math.max(0, memory.limit - memory.used);
  return (
    <div className="page">
      <div className="inner">
        <header className="page-head">
          <div>
            <h1>Models</h1>
            <p>A model is loaded when it is first asked for, and leaves when another one needs its memory.</p>
          </div>
          <div className="memory" title="Weights and pages of all loaded models, against --memory">
            <span className="label">
              Memory for models{" "}
              <span className="num">
                {bytes(memory.used)} of {bytes(memory.limit)}
              </span>
            </span>
            <div className="bar" role="img" aria-label={`${percent(memory.used, memory.limit)} of the memory for models is in use`}>
              <span style={{ width: `${memory.limit ? (100 * memory.used) / memory.limit : 0}%` }} />
            </div>
          </div>
        </header>
        {session?.library && session.scopes.includes("models") && <Pull />}
        <section className="card" aria-label="All models">
          <header>
            <h2>
              {models.length} {models.length === 1 ? "model" : "models"}
            </h2>
            <input
              type="search"
              className="input search"
              placeholder="Search by name, family or format"
              aria-label="Search models"
              value={text}
              onChange={(event) => setText(event.target.value)}
            />
          </header>
          {shown.length === 0 ? (
            <div className="empty">
              <h2>{modelsKnown ? "No model is called that" : "Reading the library"}</h2>
              {modelsKnown && <p>Search for less, or pull a model by its name above.</p>}
            </div>
          ) : (
            <ul className="models">
              {shown.map((model) => (
                <Model key={model.name} model={model} limit={memory.limit} free={free} />
              ))}
            </ul>
          )}
        </section>
      </div>
    </div>
  );
}

function Model({ model, limit, free }: { model: ModelCard; limit: number; free: number }) {
  const [, navigate] = useLocation();
  const { loading, load, unload, may, refreshModels } = useServer();
  const { file, loaded } = model;
  const needed = loaded?.bytes ?? model.bytes;
  const fits = loaded !== null || model.bytes <= free;
  const never = model.bytes > limit;
  const remove = () =>
    void attempt(async () => {
      await request("/api/delete", { method: "DELETE", body: { model: model.name } });
      await refreshModels();
      toast(`${model.name} is deleted.`);
    });
  return (
    <li className="model">
      <div className="model-name">
        <div className="row wrap">
          <span className="name">{model.name}</span>
          {loaded ? (
            <span className="tag sea">
              <span className="dot" aria-hidden /> loaded on {loaded.device}
            </span>
          ) : loading[model.name] !== undefined ? (
            <span className="tag sand">loading</span>
          ) : null}
          {file?.capabilities.filter((one) => one !== "completion").map((one) => (
            <span key={one} className="tag">
              {one}
            </span>
          ))}
          {loaded?.embeds && <span className="tag">embeddings</span>}
        </div>
        {model.problem ? (
          <p className="problem">{model.problem}</p>
        ) : (
          <p className="muted">
            {[
              file?.family,
              file && `${count(file.parameters)} parameters`,
              file?.quantization,
              file?.format,
              file?.context && `trained for ${file.context} tokens`,
              model.created > 0 ? `here since ${ago(model.created * 1000)}` : "inside the program",
            ]
              .filter(Boolean)
              .join(" · ")}
          </p>
        )}
      </div>
      <div className="model-memory">
        <span className="label">
          {loaded ? "In memory" : "Weights"}
          <span className="num">{bytes(needed)}</span>
        </span>
        <div className="bar" role="img" aria-label={`${percent(needed, limit)} of the memory for models`}>
          <span style={{ width: `${limit ? Math.min(100, (100 * needed) / limit) : 0}%`, background: never ? "var(--bad)" : fits ? "var(--sea)" : "var(--sand)" }} />
        </div>
        <span className="muted small">
          {loaded
            ? `${loaded.context} tokens of context · ${loaded.expires_in === null ? "stays loaded" : loaded.users > 0 ? "in use" : `leaves in ${seconds(loaded.expires_in)}`}`
            : never
              ? `needs ${bytes(model.bytes)}, ${bytes(limit)} are allowed`
              : fits
                ? "fits beside what is loaded"
                : `fits when others leave: ${bytes(free)} are free`}
        </span>
      </div>
      <div className="model-actions">
        <button
          type="button"
          className="button small"
          disabled={model.problem !== null}
          onClick={() => {
            usePrefs.getState().set({ lastModel: model.name });
            navigate("/chat");
          }}
        >
          Chat
        </button>
        {loaded ? (
          <>
            <Tip text={loaded.expires_in === null ? "Let it leave when it is not used" : "Keep it loaded"}>
              <button
                type="button"
                className={`button quiet icon small${loaded.expires_in === null ? " pinned" : ""}`}
                aria-label={`Keep ${model.name} loaded`}
                aria-pressed={loaded.expires_in === null}
                onClick={() => void attempt(() => load(model.name, loaded.expires_in === null ? 300 : -1))}
              >
                <Pin size={15} aria-hidden />
              </button>
            </Tip>
            <Tip text="Unload">
              <button type="button" className="button quiet icon small" aria-label={`Unload ${model.name}`} onClick={() => void attempt(() => unload(model.name))}>
                <CircleStop size={15} aria-hidden />
              </button>
            </Tip>
          </>
        ) : (
          <Tip text="Load">
            <button
              type="button"
              className="button quiet icon small"
              aria-label={`Load ${model.name}`}
              disabled={model.problem !== null || loading[model.name] !== undefined}
              onClick={() => void attempt(() => load(model.name))}
            >
              <Play size={15} aria-hidden />
            </button>
          </Tip>
        )}
        {model.in_library && may("models") && (
          <ConfirmButton
            label={`Delete ${model.name}`}
            title={`Delete ${model.name}?`}
            text={`Its ${bytes(model.bytes)} are removed from the library, as far as no other model has the same files. It can be pulled again.`}
            action={remove}
            className="button quiet icon small"
          >
            <Trash2 size={15} aria-hidden />
          </ConfirmButton>
        )}
      </div>
    </li>
  );
}

interface PullState {
  name: string;
  status: string;
  done: number;
  total: number;
  /** Bytes a second, over the last moments. */
  speed: number;
  problem: string | null;
  abort: AbortController;
}

/** Pulls go on while other pages are open. */
const usePulls = create<{ pulls: PullState[] }>(() => ({ pulls: [] }));

function change(name: string, next: Partial<PullState> | null): void {
  usePulls.setState(({ pulls }) => ({
    pulls: next === null ? pulls.filter((one) => one.name !== name) : pulls.map((one) => (one.name === name ? { ...one, ...next } : one)),
  }));
}

async function pull(name: string): Promise<void> {
  const abort = new AbortController();
  const begun: PullState = { name, status: "asking the hub", done: 0, total: 0, speed: 0, problem: null, abort };
  usePulls.setState(({ pulls }) => ({ pulls: [...pulls.filter((one) => one.name !== name), begun] }));
  const files = new Map<string, { done: number; total: number }>();
  let [at, before] = [performance.now(), 0];
  try {
    const response = await request("/api/pull", { body: { model: name }, signal: abort.signal });
    for await (const line of jsonLines<{ status?: string; digest?: string; total?: number; completed?: number; error?: string }>(response)) {
      if (line.error) throw new Error(line.error);
      if (line.total !== undefined) files.set(line.digest ?? line.status ?? "", { done: line.completed ?? 0, total: line.total });
      const sum = (of: "done" | "total") => [...files.values()].reduce((all, file) => all + file[of], 0);
      const [done, now] = [sum("done"), performance.now()];
      const next: Partial<PullState> = { status: line.status ?? "", done, total: sum("total") };
      if (now - at > 800) {
        next.speed = Math.max(0, ((done - before) / (now - at)) * 1000);
        [at, before] = [now, done];
      }
      change(name, next);
    }
    change(name, null);
    toast(`${name} is here.`);
  } catch (error) {
    if (abort.signal.aborted) change(name, null);
    else change(name, { problem: describe(error) });
  }
  await useServer.getState().refreshModels().catch(() => undefined);
}

function Pull() {
  const pulls = usePulls((state) => state.pulls);
  const [name, setName] = useState("");
  const submit = (event: FormEvent) => {
    event.preventDefault();
    const wanted = name.trim().replace(/^hf:/, "hf.co/");
    if (!wanted) return;
    setName("");
    void pull(wanted);
  };
  return (
    <section className="card" aria-label="Pull a model">
      <form className="pull body" onSubmit={submit}>
        <div className="field grow">
          <label htmlFor="pull">Pull a model from the hub</label>
          <input
            id="pull"
            className="input mono"
            placeholder="hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0"
            value={name}
            autoComplete="off"
            spellCheck={false}
            onChange={(event) => setName(event.target.value)}
          />
        </div>
        <button type="submit" className="button primary" disabled={!name.trim()}>
          <Download size={16} aria-hidden />
          Pull
        </button>
      </form>
      {pulls.map((one) => (
        <div key={one.name} className="pulling" role="status">
          <div className="row">
            <span className="mono grow">{one.name}</span>
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
    </section>
  );
}
