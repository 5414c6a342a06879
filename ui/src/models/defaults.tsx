import { type FormEvent, useEffect, useState } from "react";

import { describe, json, request } from "../api/client.ts";
import type { ModelCard, ModelPreset, PresetCard } from "../api/types.ts";
import { CONTROLS } from "../chat/settings-panel.tsx";
import { Dialog } from "../components/dialog.tsx";
import { toast } from "../components/toasts.tsx";
import { useServer } from "../store/server.ts";

/** Sampling controls under the names of Ollama's options. */
const OPTIONS = [
  ...CONTROLS.map(({ name, label, meaning, min, max, step }) => ({ name: name === "repetition_penalty" ? "repeat_penalty" : name, label, meaning, min, max, step })),
  { name: "num_predict", label: "Longest answer", meaning: "Tokens of an answer, at most.", min: 1, max: undefined, step: 1 },
];

/** Defaults of one model, kept on the server for all of its clients. */
export function DefaultsDialog({ model, open, close }: { model: ModelCard; open: boolean; close: () => void }) {
  return (
    <Dialog open={open} close={close} title={`Defaults of ${model.name}`}>
      <Defaults model={model} close={close} />
    </Dialog>
  );
}

function Defaults({ model, close }: { model: ModelCard; close: () => void }) {
  const may = useServer((server) => server.may("models"));
  const [card, setCard] = useState<PresetCard | null>(null);
  const [problem, setProblem] = useState<string | null>(null);
  const { name } = model;
  useEffect(() => {
    const abort = new AbortController();
    json<PresetCard>(`/ui/v1/preset?model=${encodeURIComponent(name)}`, { signal: abort.signal }).then(setCard, (error: unknown) => {
      if (!abort.signal.aborted) setProblem(describe(error));
    });
    return () => abort.abort();
  }, [name]);
  if (!card) return <p className={problem ? "problem" : "muted"}>{problem ?? "Reading them"}</p>;
  const fixed = !card.can_change || !may;
  const save = (event: FormEvent<HTMLFormElement>) => {
    event.preventDefault();
    const form = new FormData(event.currentTarget);
    const text = (field: string) => String(form.get(field) ?? "").trim() || null;
    const number = (field: string) => (text(field) === null ? null : Number(text(field)));
    // Options that this dialog does not show stay.
    const options = { ...card.preset.options };
    for (const option of OPTIONS) {
      const value = number(option.name);
      if (value === null) delete options[option.name];
      else options[option.name] = value;
    }
    const preset: ModelPreset = {
      context: number("context"),
      kv_dtype: text("kv_dtype"),
      chat_template: text("chat_template"),
      system: text("system"),
      options,
    };
    setProblem(null);
    request("/ui/v1/preset", { body: { model: name, preset } }).then(
      async () => {
        close();
        toast(`The defaults of ${name} are saved.`);
        await useServer.getState().refreshModels();
      },
      (error: unknown) => setProblem(describe(error)),
    );
  };
  const { preset, settings } = card;
  const own = model.loaded?.sampling as Record<string, number> | undefined;
  const stronger = Object.entries({ ...settings, ...settings.options }).filter(([key, value]) => key !== "options" && value !== null);
  return (
    <form className="stack defaults" onSubmit={save}>
      <p className="muted small">
        {card.can_change
          ? may
            ? "For all clients of this server, in requests that do not say otherwise. Context, K/V type and template take effect when the model is loaded next: at the next request, if it is not in use."
            : "Changing them needs a key with the scope models."
          : `${name} is not in the library. Its defaults stand in the file with the server's settings, under [preset.${name}].`}
      </p>
      {stronger.length > 0 && (
        <div className="note">
          <span>The server's settings are stronger: {stronger.map(([key, value]) => `${key} = ${String(value).slice(0, 60)}`).join(", ")}.</span>
        </div>
      )}
      <fieldset disabled={fixed} className="stack">
        <div className="numbers">
          <div className="field" title="Most tokens of prompt and answer. 0 is all that the model was trained for.">
            <label htmlFor="default-context">
              Context <span>tokens</span>
            </label>
            <input id="default-context" name="context" className="input num" type="number" min={0} step={1} placeholder={String(model.needs?.context ?? "")} defaultValue={preset.context ?? ""} />
          </div>
          <div className="field" title="q8 takes half the memory of f16, and q4 a quarter.">
            <label htmlFor="default-kv">K and V</label>
            <select id="default-kv" name="kv_dtype" className="input" defaultValue={preset.kv_dtype ?? ""}>
              <option value="">as the server</option>
              <option value="f16">f16</option>
              <option value="q8">q8 (half)</option>
              <option value="q4">q4 (a quarter)</option>
            </select>
          </div>
        </div>
        <div className="numbers" role="group" aria-label="Sampling">
          {OPTIONS.map(({ name: option, label, meaning, min, max, step }) => (
            <div key={option} className="field" title={meaning}>
              <label htmlFor={`default-${option}`}>{label}</label>
              <input
                id={`default-${option}`}
                name={option}
                className="input num"
                type="number"
                min={min}
                max={max}
                step={step === 1 ? 1 : "any"}
                placeholder={own?.[option] === undefined ? "default" : String(Number(own[option].toPrecision(4)))}
                defaultValue={typeof preset.options[option] === "number" ? preset.options[option] : ""}
              />
            </div>
          ))}
        </div>
        <div className="field">
          <label htmlFor="default-system">
            System prompt <span>of chats that have none</span>
          </label>
          <textarea id="default-system" name="system" className="input" rows={3} defaultValue={preset.system ?? ""} />
        </div>
        <details>
          <summary className="label">Chat template</summary>
          <div className="field">
            <textarea
              name="chat_template"
              className="input mono"
              rows={6}
              aria-label="Chat template"
              placeholder="The model's own. Another one in jinja goes here."
              defaultValue={preset.chat_template ?? ""}
            />
          </div>
        </details>
      </fieldset>
      {problem && (
        <div className="note bad" role="alert">
          {problem}
        </div>
      )}
      <div className="actions">
        <button type="button" className="button" onClick={close}>
          {fixed ? "Close" : "Cancel"}
        </button>
        {!fixed && (
          <button type="submit" className="button primary">
            Save
          </button>
        )}
      </div>
    </form>
  );
}
