import * as Ariakit from "@ariakit/react";
import { Bookmark, ChevronDown, RotateCcw, Trash2, X } from "lucide-react";
import { useId, useState } from "react";

import type { Sampling } from "../api/types.ts";
import { Dialog } from "../components/dialog.tsx";
import type { ChatSettings } from "../store/db.ts";
import { usePrefs } from "../store/prefs.ts";
import { useServer } from "../store/server.ts";

type NumberName = Exclude<keyof ChatSettings, "system" | "stop" | "reasoning_effort" | "tools" | "servers">;

interface Control {
  name: NumberName;
  label: string;
  meaning: string;
  min: number;
  max?: number;
  step: number;
}

export const CONTROLS: Control[] = [
  { name: "temperature", label: "Temperature", meaning: "Divides the logits. 0 always takes the best token.", min: 0, max: 2, step: 0.05 },
  { name: "top_k", label: "Top-k", meaning: "Keeps this many best tokens. 0 keeps all.", min: 0, max: 200, step: 1 },
  { name: "top_p", label: "Top-p", meaning: "Keeps the best tokens until their probability reaches this.", min: 0, max: 1, step: 0.01 },
  { name: "min_p", label: "Min-p", meaning: "Keeps tokens with at least this fraction of the best one's probability.", min: 0, max: 1, step: 0.01 },
  { name: "repetition_penalty", label: "Repetition penalty", meaning: "Weakens tokens that occur already. 1 is off.", min: 1, max: 2, step: 0.01 },
  { name: "frequency_penalty", label: "Frequency penalty", meaning: "Subtracted for each occurrence of a token.", min: -2, max: 2, step: 0.05 },
  { name: "presence_penalty", label: "Presence penalty", meaning: "Subtracted if a token occurs.", min: -2, max: 2, step: 0.05 },
];

export function SettingsPanel({
  model,
  settings,
  change,
  close,
}: {
  model: string | null;
  settings: ChatSettings;
  change: (settings: ChatSettings) => void;
  close: () => void;
}) {
  const card = useServer((server) => server.models.find((one) => one.name === model));
  const set = <K extends keyof ChatSettings>(name: K, value: ChatSettings[K] | undefined) => {
    const next = { ...settings };
    if (value === undefined || value === "") delete next[name];
    else next[name] = value;
    change(next);
  };
  const toolsProblem = problemOfTools(settings.tools);
  return (
    <aside className="panel" aria-label="System prompt and sampling">
      <header>
        <h2 className="grow">This chat</h2>
        <Presets settings={settings} change={change} />
        <button type="button" className="button quiet icon small" aria-label="Close" onClick={close}>
          <X size={16} aria-hidden />
        </button>
      </header>
      <div className="panel-body">
        <div className="field">
          <label htmlFor="system">System prompt</label>
          <textarea
            id="system"
            className="input"
            rows={4}
            placeholder="What the model is told before everything else"
            value={settings.system ?? ""}
            onChange={(event) => set("system", event.target.value)}
          />
        </div>
        {card?.file?.capabilities.includes("thinking") && (
          <div className="field">
            <label htmlFor="effort">Thinking</label>
            <select id="effort" className="input" value={settings.reasoning_effort ?? ""} onChange={(event) => set("reasoning_effort", event.target.value)}>
              <option value="">As the model does by itself</option>
              <option value="none">None</option>
              <option value="low">Little</option>
              <option value="medium">Medium</option>
              <option value="high">Much</option>
            </select>
          </div>
        )}
        <SamplingFields settings={settings} defaults={card?.loaded?.sampling ?? null} set={set} />
        <NumberField label="Longest answer" hint="tokens" placeholder="to the end of the context" value={settings.max_tokens} min={1} set={(value) => set("max_tokens", value)} />
        <NumberField label="Seed" hint="the same seed, the same answer" placeholder="random" value={settings.seed} min={0} set={(value) => set("seed", value)} />
        <div className="field">
          <label htmlFor="stop">Stop texts, one a line</label>
          <textarea
            id="stop"
            className="input"
            rows={2}
            value={(settings.stop ?? []).join("\n")}
            onChange={(event) => set("stop", event.target.value ? event.target.value.split("\n") : undefined)}
          />
        </div>
        <details>
          <summary className="label">Tools of your own</summary>
          <div className="field">
            <textarea
              className="input mono"
              rows={6}
              aria-label="Tools as JSON"
              aria-invalid={toolsProblem !== null}
              placeholder={'[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'}
              value={settings.tools ?? ""}
              onChange={(event) => set("tools", event.target.value)}
            />
            <p className="muted small">{toolsProblem ?? "Calls appear in the chat, and you give their results."}</p>
          </div>
        </details>
        <button type="button" className="button" disabled={Object.keys(settings).length === 0} onClick={() => change({})}>
          <RotateCcw size={15} aria-hidden />
          Back to the model's own
        </button>
      </div>
    </aside>
  );
}

function problemOfTools(tools: string | undefined): string | null {
  if (!tools?.trim()) return null;
  try {
    return Array.isArray(JSON.parse(tools)) ? null : "This must be a list of tools.";
  } catch (error) {
    return error instanceof Error ? `This is not JSON: ${error.message}` : "This is not JSON.";
  }
}

export function SamplingFields({
  settings,
  defaults,
  set,
}: {
  settings: ChatSettings;
  defaults: Sampling | null;
  set: (name: NumberName, value: number | undefined) => void;
}) {
  return (
    <div className="sampling" role="group" aria-label="Sampling">
      {!defaults && <p className="muted small">The model's own values are known when it is loaded.</p>}
      {CONTROLS.map((control) => (
        <SliderField
          key={control.name}
          control={control}
          value={settings[control.name]}
          fallback={defaults?.[control.name as keyof Sampling]}
          set={(value) => set(control.name, value)}
        />
      ))}
    </div>
  );
}

/** Values of 32 bits, as people would write them. */
function tidy(value: number): number {
  return Number(value.toPrecision(4));
}

function SliderField({
  control,
  value,
  fallback,
  set,
}: {
  control: Control;
  value: number | undefined;
  fallback: number | undefined;
  set: (value: number | undefined) => void;
}) {
  const id = useId();
  const shown = value ?? (fallback === undefined ? undefined : tidy(fallback));
  return (
    <div className="slider" title={control.meaning}>
      <label htmlFor={id}>{control.label}</label>
      <span className={`num ${value === undefined ? "muted" : ""}`}>{shown ?? "–"}</span>
      <button type="button" className="button quiet icon small" aria-label={`${control.label}: the model's own`} disabled={value === undefined} onClick={() => set(undefined)}>
        <RotateCcw size={13} aria-hidden />
      </button>
      <input
        id={id}
        type="range"
        min={control.min}
        max={control.max}
        step={control.step}
        value={shown ?? control.min}
        aria-valuetext={shown === undefined ? "the model's own" : String(shown)}
        onChange={(event) => set(Number(event.target.value))}
      />
    </div>
  );
}

export function NumberField({
  label,
  hint,
  placeholder,
  value,
  min,
  set,
}: {
  label: string;
  hint: string;
  placeholder: string;
  value: number | undefined;
  min: number;
  set: (value: number | undefined) => void;
}) {
  const id = useId();
  return (
    <div className="field">
      <label htmlFor={id}>
        {label} <span>{hint}</span>
      </label>
      <input
        id={id}
        className="input num"
        type="number"
        min={min}
        step={1}
        placeholder={placeholder}
        value={value ?? ""}
        onChange={(event) => set(event.target.value === "" ? undefined : Math.max(min, Math.round(Number(event.target.value))))}
      />
    </div>
  );
}

function Presets({ settings, change }: { settings: ChatSettings; change: (settings: ChatSettings) => void }) {
  const { presets, savePreset, deletePreset } = usePrefs();
  const [naming, setNaming] = useState(false);
  return (
    <>
      <Ariakit.MenuProvider placement="bottom-end">
        <Ariakit.MenuButton className="button quiet small">
          Presets
          <ChevronDown size={13} aria-hidden />
        </Ariakit.MenuButton>
        <Ariakit.Menu className="menu" gutter={4} unmountOnHide>
          {presets.map((preset) => (
            <Ariakit.MenuItem key={preset.name} className="menu-item" onClick={() => change(preset.settings)}>
              <span className="grow">{preset.name}</span>
              <button
                type="button"
                className="button quiet icon small"
                aria-label={`Delete the preset ${preset.name}`}
                tabIndex={-1}
                onClick={(event) => {
                  event.stopPropagation();
                  deletePreset(preset.name);
                }}
              >
                <Trash2 size={14} aria-hidden />
              </button>
            </Ariakit.MenuItem>
          ))}
          {presets.length > 0 && <hr className="menu-separator" />}
          <Ariakit.MenuItem className="menu-item" onClick={() => setNaming(true)}>
            <Bookmark size={15} aria-hidden /> Save these as a preset
          </Ariakit.MenuItem>
        </Ariakit.Menu>
      </Ariakit.MenuProvider>
      <Dialog open={naming} close={() => setNaming(false)} title="Save as a preset">
        <form
          className="stack"
          onSubmit={(event) => {
            event.preventDefault();
            const name = new FormData(event.currentTarget).get("name");
            if (typeof name === "string" && name.trim()) savePreset({ name: name.trim(), settings });
            setNaming(false);
          }}
        >
          <input className="input" name="name" aria-label="Name" placeholder="Name" autoFocus />
          <p className="muted">System prompt, sampling and tools of this chat, kept in this browser.</p>
          <div className="actions">
            <button type="button" className="button" onClick={() => setNaming(false)}>
              Cancel
            </button>
            <button type="submit" className="button primary">
              Save
            </button>
          </div>
        </form>
      </Dialog>
    </>
  );
}
