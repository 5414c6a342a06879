import "./models.css";

import { CircleStop, Pin, Play, SlidersHorizontal, Trash2 } from "lucide-react";
import { useEffect, useState } from "react";
import { Link, useLocation } from "wouter";

import { request } from "../api/client.ts";
import type { ModelCard } from "../api/types.ts";
import { ConfirmButton } from "../components/dialog.tsx";
import { NeedsScope } from "../components/frame.tsx";
import { Tip } from "../components/tip.tsx";
import { attempt, toast } from "../components/toasts.tsx";
import { ago, bytes, count, percent, seconds } from "../format.ts";
import { usePrefs } from "../store/prefs.ts";
import { useServer } from "../store/server.ts";
import { chats, playgroundOf } from "../store/uses.ts";
import { DefaultsDialog } from "./defaults.tsx";
import { Get } from "./get.tsx";
import { RunsHere } from "./runs-here.tsx";

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
    [model.name, ...model.aliases, model.adapter?.base, model.file?.family, model.file?.quantization].some((part) => part?.toLowerCase().includes(wanted)),
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
        {session?.library && session.scopes.includes("models") && <Get />}
        <section className="card" aria-label="All models">
          <header>
            <h2>
              {models.length} {models.length === 1 ? "model" : "models"}
            </h2>
            <input
              type="search"
              className="input search"
              placeholder="Search"
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
        {modelsKnown && session?.library && <RunsHere />}
      </div>
    </div>
  );
}

/** The memory that loading a model needs, beside the free memory. */
function fit(model: ModelCard, limit: number, free: number): { bytes: number; state: "fits" | "tight" | "later" | "never"; text: string } {
  const { needs } = model;
  if (!needs) return { bytes: model.bytes, state: "never", text: "" };
  const whole = `${needs.context} tokens of context`;
  if (needs.least > limit) {
    return { bytes: needs.least, state: "never", text: `needs ${bytes(needs.least)}, ${bytes(limit)} are allowed; raise --memory or choose a smaller model` };
  }
  if (needs.total <= free) return { bytes: needs.total, state: "fits", text: `fits, with ${whole}; ${bytes(free)} are free` };
  if (needs.total <= limit) return { bytes: needs.total, state: "later", text: `fits when others leave: ${bytes(free)} are free` };
  return { bytes: needs.total, state: "tight", text: `${whole} do not fit into ${bytes(limit)}; it is loaded with fewer` };
}

/** Consequences of deleting a model, in words. */
function farewell(model: ModelCard, adapters: string[]): string {
  const left = adapters.length > 0 ? ` Its adapters stay, and have no model then: ${adapters.join(", ")}.` : "";
  const also = model.aliases.length > 0 ? ` ${model.aliases.length === 1 ? "Its alias is" : "Its aliases are"} removed as well.` : "";
  if (model.in_place) return `It is removed from the library. Its files stay where they are, and it can be imported again.${also}${left}`;
  const files = `Its ${bytes(model.bytes)} are removed from the disk, as far as no other model has the same files.`;
  return `${files} ${model.pulled ? "It can be pulled again." : "There may be no other copy of it."}${also}${left}`;
}

function Model({ model, limit, free }: { model: ModelCard; limit: number; free: number }) {
  const [, navigate] = useLocation();
  const { loading, load, unload, may, models, refreshModels } = useServer();
  const adapters = models.filter((one) => one.adapter?.base === model.name).map((one) => one.name);
  const { file, loaded } = model;
  const [defaults, setDefaults] = useState(false);
  const wanted = fit(model, limit, free);
  const needed = loaded?.bytes ?? wanted.bytes;
  const bench = playgroundOf(model);
  const never = !loaded && wanted.state === "never";
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
          {model.adapter && (
            <span className={model.adapter.loaded ? "tag sea" : "tag"}>
              adapter{model.adapter.base && ` of ${model.adapter.base}`}
              {model.adapter.loaded && ", loaded"}
            </span>
          )}
          {file?.uses.filter((one) => one !== "chat").map((one) => (
            <span key={one} className="tag">
              {one === "text" ? "continues text" : one}
            </span>
          ))}
          {adapters.length > 0 && <span className="muted small">with adapters {adapters.join(", ")}</span>}
          {model.aliases.length > 0 && <span className="muted small">also {model.aliases.join(", ")}</span>}
        </div>
        {model.problem ? (
          <p className="problem">{model.problem}</p>
        ) : (
          <p className="muted">
            {[
              file?.family,
              file && !model.adapter && `${count(file.parameters)} parameters`,
              !model.adapter && file?.quantization,
              !model.adapter && file?.format,
              `${bytes(model.bytes)} on disk`,
              file?.context && `trained for ${file.context} tokens`,
              model.built_in ? "inside the program" : model.created > 0 && `here since ${ago(model.created * 1000)}`,
              model.in_place && "imported where it is",
            ]
              .filter(Boolean)
              .join(" · ")}
          </p>
        )}
      </div>
      <div className="model-memory">
        <span className="label">
          {loaded ? "In memory" : model.needs ? (model.adapter ? "Needs, with its model" : "Needs") : "Weights"}
          <span className="num">{bytes(needed)}</span>
        </span>
        <div
          className="bar"
          role="img"
          aria-label={`${percent(needed, limit)} of the memory for models`}
          title={model.needs && !loaded ? `Weights ${bytes(model.needs.weights)}, K and V ${bytes(model.needs.kv)}, buffers ${bytes(model.needs.buffers)}` : undefined}
        >
          <span
            style={{
              width: `${limit ? Math.min(100, (100 * needed) / limit) : 0}%`,
              background: never ? "var(--bad)" : loaded || wanted.state === "fits" ? "var(--sea)" : "var(--sand)",
            }}
          />
        </div>
        <span className="muted small">
          {loaded
            ? `${loaded.context} tokens of context · ${loaded.expires_in === null ? "stays loaded" : loaded.users > 0 ? "in use" : `leaves in ${seconds(loaded.expires_in)}`}`
            : wanted.text}
        </span>
      </div>
      <div className="model-actions">
        {chats(model) ? (
          <button
            type="button"
            className="button small"
            onClick={() => {
              usePrefs.getState().set({ lastModel: model.name });
              navigate("/chat");
            }}
          >
            Chat
          </button>
        ) : (
          bench && (
            <Link href={bench.path} className="button small">
              {bench.name}
            </Link>
          )
        )}
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
              disabled={model.problem !== null || never || model.adapter?.loaded || loading[model.name] !== undefined}
              onClick={() => void attempt(() => load(model.name))}
            >
              <Play size={15} aria-hidden />
            </button>
          </Tip>
        )}
        <Tip text="Defaults of this model">
          <button type="button" className="button quiet icon small" aria-label={`Defaults of ${model.name}`} onClick={() => setDefaults(true)}>
            <SlidersHorizontal size={15} aria-hidden />
          </button>
        </Tip>
        <DefaultsDialog model={model} open={defaults} close={() => setDefaults(false)} />
        {model.in_library && may("models") && (
          <ConfirmButton
            label={`Delete ${model.name}`}
            title={`Delete ${model.name}?`}
            text={farewell(model, adapters)}
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
