import "./playground.css";

import { useMemo, useState } from "react";
import { Link, useLocation } from "wouter";

import { json } from "../api/client.ts";
import type { ModelCard } from "../api/types.ts";
import { parseWhole } from "../chat/json-tree.tsx";
import { CodeBlock } from "../chat/markdown.tsx";
import { CONTROLS, NumberField } from "../chat/settings-panel.tsx";
import { NeedsScope } from "../components/frame.tsx";
import { plural } from "../format.ts";
import { defaultModel } from "../store/chat.ts";
import type { ChatSettings } from "../store/db.ts";
import { useServer } from "../store/server.ts";
import { type Use, cardOf, uses } from "../store/uses.ts";
import { Layout, Text, useRun } from "./bench.tsx";
import { StructuredTab } from "./structured.tsx";
import { type TokenScore, Tokens, pieces } from "./tokens.tsx";

const TABS = [
  ["completion", "Completion"],
  ["tokens", "Tokens"],
  ["template", "Chat template"],
  ["embeddings", "Embeddings"],
  ["structured", "Structured output"],
] as const;

/** Purposes of the models of a tab, the most suitable first; other tabs are for all models. */
const SUITS: Record<string, Use[]> = {
  completion: ["text", "chat"],
  template: ["chat"],
  structured: ["chat"],
  embeddings: ["embeddings"],
};

export function PlaygroundPage({ tab, wanted }: { tab: string; wanted: string | null }) {
  const models = useServer((server) => server.models);
  const [, navigate] = useLocation();
  const able = models.filter((one) => one.problem === null && suits(one, tab));
  const best = tab === "embeddings" ? able.find((one) => uses(one, "embeddings"))?.name : undefined;
  const usual = cardOf(able, defaultModel())?.name;
  const model = cardOf(able, wanted)?.name ?? best ?? usual ?? able[0]?.name ?? null;
  return (
    <NeedsScope scope="inference">
      <div className="page">
        <div className="inner">
          <header className="page-head">
            <div>
              <h1>Playground</h1>
              <p>One request at a time, with everything that comes back, and the same request for your own program.</p>
            </div>
            <select className="input model-choice" aria-label="Model" value={model ?? ""} onChange={(event) => navigate(`/playground/${tab}/${encodeURIComponent(event.target.value)}`)}>
              {able.map((one) => (
                <option key={one.name}>{one.name}</option>
              ))}
            </select>
          </header>
          <nav className="tabs" aria-label="Kinds of requests">
            {TABS.map(([id, name]) => (
              <Link key={id} href={wanted === null ? `/playground/${id}` : `/playground/${id}/${encodeURIComponent(wanted)}`} aria-current={tab === id ? "page" : undefined}>
                {name}
              </Link>
            ))}
          </nav>
          {!model && models.length > 0 && <p className="muted">No model here does this.</p>}
          {model && (
            <div key={tab}>
              {tab === "tokens" ? (
                <TokenTab model={model} />
              ) : tab === "template" ? (
                <TemplateTab model={model} />
              ) : tab === "embeddings" ? (
                <EmbeddingTab model={model} />
              ) : tab === "structured" ? (
                <StructuredTab model={model} />
              ) : (
                <CompletionTab model={model} />
              )}
            </div>
          )}
        </div>
      </div>
    </NeedsScope>
  );
}

export default PlaygroundPage;

/** True if a model is offered in a tab. Any model that generates has embeddings, too. */
function suits(model: ModelCard, tab: string): boolean {
  const wanted = SUITS[tab];
  if (!wanted) return true;
  return wanted.some((use) => uses(model, use)) || (tab === "embeddings" && (model.file?.capabilities.includes("embedding") ?? false));
}

function Sampling({ settings, set }: { settings: ChatSettings; set: (settings: ChatSettings) => void }) {
  return (
    <div className="numbers">
      {CONTROLS.slice(0, 4).map(({ name, label, min, max, step, meaning }) => (
        <div key={name} className="field" title={meaning}>
          <label htmlFor={`play-${name}`}>{label}</label>
          <input
            id={`play-${name}`}
            className="input num"
            type="number"
            min={min}
            max={max}
            step={step}
            placeholder="default"
            value={settings[name] ?? ""}
            onChange={(event) => {
              const { [name]: _, ...rest } = settings;
              set(event.target.value === "" ? rest : { ...rest, [name]: Number(event.target.value) });
            }}
          />
        </div>
      ))}
      <NumberField
        label="Tokens"
        hint="at most"
        placeholder="16"
        min={1}
        value={settings.max_tokens}
        set={(value) => {
          const { max_tokens: _, ...rest } = settings;
          set(value === undefined ? rest : { ...rest, max_tokens: value });
        }}
      />
    </div>
  );
}

interface Completion {
  choices: {
    text: string;
    finish_reason: string;
    logprobs: { tokens: string[]; token_logprobs: (number | null)[]; top_logprobs: (Record<string, number> | null)[] } | null;
  }[];
  usage: { prompt_tokens: number; completion_tokens: number };
}

function CompletionTab({ model }: { model: string }) {
  const [prompt, setPrompt] = useState("Once upon a time there was a fox who");
  const [settings, setSettings] = useState<ChatSettings>({ max_tokens: 48, temperature: 0.8 });
  const run = useRun<Completion>();
  const body = useMemo(() => ({ model, prompt, ...settings, logprobs: 5 }), [model, prompt, settings]);
  const choice = run.result?.choices[0];
  const scores: TokenScore[] = (choice?.logprobs?.tokens ?? []).map((text, index) => ({
    text,
    logprob: choice?.logprobs?.token_logprobs[index] ?? null,
    top: Object.entries(choice?.logprobs?.top_logprobs[index] ?? {}).sort((a, b) => b[1] - a[1]),
  }));
  return (
    <Layout
      path="/v1/completions"
      body={body}
      run={run}
      go={() => run.run((signal) => json<Completion>("/v1/completions", { body, signal }))}
      left={
        <>
          <Text label="Text to continue" value={prompt} set={setPrompt} />
          <Sampling settings={settings} set={setSettings} />
        </>
      }
      right={
        <>
          <p className="muted small">
            Each token is shaded by its probability: the darker, the less certain. Point at one, or go to it with the keyboard, to see what else
            could have stood there.
          </p>
          <Tokens before={prompt} tokens={scores} />
          <p className="muted small">
            {run.result && `${plural(run.result.usage.prompt_tokens, "prompt token")}, ${plural(run.result.usage.completion_tokens, "token")} of answer, ended by ${choice?.finish_reason}`}
          </p>
        </>
      }
    />
  );
}

interface Tokenized {
  count: number;
  max_model_len: number;
  tokens: number[];
  token_strs?: string[];
}

function TokenTab({ model }: { model: string }) {
  const [text, setText] = useState("The hermit crab moved into a larger shell.");
  const run = useRun<Tokenized>();
  const body = useMemo(() => ({ model, prompt: text, return_token_strs: true }), [model, text]);
  return (
    <Layout
      path="/tokenize"
      body={body}
      run={run}
      go={() => run.run((signal) => json<Tokenized>("/tokenize", { body, signal }))}
      left={<Text label="Text" value={text} set={setText} rows={8} />}
      right={<TokenList result={run.result} />}
    />
  );
}

function TokenList({ result }: { result: Tokenized | null }) {
  if (!result) return null;
  return (
    <>
      <p className="muted small">
        {plural(result.count, "token")} of at most {result.max_model_len}
      </p>
      <ol className="token-list">
        {result.tokens.slice(0, 2000).map((token, index) => (
          <li key={index} className={`hue-${index % 4}`}>
            <span className="mono">{pieces(result.token_strs?.[index] ?? "")}</span>
            <span className="num muted">{token}</span>
          </li>
        ))}
      </ol>
      {result.tokens.length > 2000 && <p className="muted small">and {result.tokens.length - 2000} more</p>}
    </>
  );
}

function TemplateTab({ model }: { model: string }) {
  const template = useServer((server) => server.models.find((one) => one.name === model)?.file?.template ?? "");
  const [messages, setMessages] = useState(
    JSON.stringify(
      [
        { role: "system", content: "You tell short tales." },
        { role: "user", content: "Tell me a story about a crab." },
      ],
      null,
      2,
    ),
  );
  const run = useRun<Tokenized & { text: string }>();
  const parsed = parseWhole(messages);
  const body = useMemo(() => ({ model, messages: parseWhole(messages), return_token_strs: true }), [model, messages]);
  const go = () =>
    run.run(async (signal) => {
      if (!Array.isArray(parsed)) throw new Error("The messages must be a list in JSON: [{\"role\": \"user\", \"content\": \"…\"}].");
      const tokens = await json<Tokenized>("/tokenize", { body, signal });
      const { prompt } = await json<{ prompt: string }>("/detokenize", { body: { model, tokens: tokens.tokens }, signal });
      return { ...tokens, text: prompt };
    });
  return (
    <Layout
      path="/tokenize"
      body={body}
      run={run}
      go={go}
      left={
        <>
          <Text label="Messages" value={messages} set={setMessages} rows={10} mono />
          <details>
            <summary className="label">The template itself</summary>
            <CodeBlock language="" text={template || "This model has no chat template."} closed />
          </details>
        </>
      }
      right={
        <>
          <p className="muted small">The text that the model reads, special tokens included: {plural(run.result?.count ?? 0, "token")}.</p>
          <pre className="rendered">{run.result?.text}</pre>
        </>
      }
    />
  );
}

interface Embeddings {
  data: { embedding: number[] }[];
}

function EmbeddingTab({ model }: { model: string }) {
  const [text, setText] = useState("A fox lost its key.\nThe key of the fox is gone.\nThe sea is deep and blue.");
  const run = useRun<Embeddings & { texts: string[] }>();
  const texts = text.split("\n").filter((line) => line.trim());
  const body = useMemo(() => ({ model, input: text.split("\n").filter((line) => line.trim()) }), [model, text]);
  const vectors = run.result?.data.map((one) => one.embedding) ?? [];
  const similarity = (a: number[], b: number[]) => a.reduce((sum, value, index) => sum + value * (b[index] ?? 0), 0);
  return (
    <Layout
      path="/v1/embeddings"
      body={body}
      run={run}
      go={() => run.run(async (signal) => ({ ...(await json<Embeddings>("/v1/embeddings", { body, signal })), texts }))}
      left={<Text label="Texts, one a line" value={text} set={setText} rows={8} />}
      right={
        <>
          <p className="muted small">
            Cosine similarity of {plural(vectors.length, "vector")} with {vectors[0]?.length ?? 0} dimensions. 1 is the same direction.
          </p>
          <div className="scroll-x" tabIndex={0} role="group" aria-label="Table">
            <table className="list similarity">
              <thead>
                <tr>
                  <th>Text</th>
                  {vectors.map((_, index) => (
                    <th key={index} className="right">
                      {index + 1}
                    </th>
                  ))}
                </tr>
              </thead>
              <tbody>
                {vectors.map((vector, row) => (
                  <tr key={row}>
                    <td title={run.result?.texts[row]}>
                      <span className="num muted">{row + 1}</span> {run.result?.texts[row]}
                    </td>
                    {vectors.map((other, column) => {
                      const value = similarity(vector, other);
                      return (
                        <td
                          key={column}
                          className="num right"
                          style={{ background: `color-mix(in srgb, var(--sea) ${Math.round(34 * Math.max(0, value))}%, transparent)` }}
                        >
                          {value.toFixed(3)}
                        </td>
                      );
                    })}
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </>
      }
    />
  );
}
