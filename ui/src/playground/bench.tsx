import { Play, Square } from "lucide-react";
import { type ReactNode, useEffect, useMemo, useRef, useState } from "react";

import { describe } from "../api/client.ts";
import { CodeBlock } from "../chat/markdown.tsx";
import { seconds } from "../format.ts";
import { asCurl, asJavaScript, asPython } from "./code.ts";

export interface Run<T> {
  result: T | null;
  problem: string | null;
  busy: boolean;
  took: number;
  run(work: (signal: AbortSignal) => Promise<T>): void;
  stop(): void;
}

export function useRun<T>(): Run<T> {
  const [state, setState] = useState<Pick<Run<T>, "result" | "problem" | "busy" | "took">>({ result: null, problem: null, busy: false, took: 0 });
  const abort = useRef<AbortController | null>(null);
  useEffect(() => () => abort.current?.abort(), []);
  return {
    ...state,
    run(work) {
      abort.current?.abort();
      const own = new AbortController();
      abort.current = own;
      const started = performance.now();
      setState((before) => ({ ...before, busy: true, problem: null }));
      work(own.signal).then(
        (result) => setState({ result, problem: null, busy: false, took: (performance.now() - started) / 1000 }),
        (error: unknown) => {
          const problem = own.signal.aborted ? null : describe(error);
          setState((before) => ({ ...before, busy: false, problem }));
        },
      );
    },
    stop: () => abort.current?.abort(),
  };
}

/** A request on the left, its answer on the right, and the same request as code below. */
export function Layout({ left, right, path, body, run, go }: { left: ReactNode; right: ReactNode; path: string; body: unknown; run: Run<unknown>; go: () => void }) {
  return (
    <div className="bench">
      <section
        className="card body bench-in"
        aria-label="Request"
        onKeyDown={(event) => {
          if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) go();
        }}
      >
        {left}
        <div className="row">
          <span className="grow muted small">Ctrl Enter runs it</span>
          {run.busy ? (
            <button type="button" className="button" onClick={run.stop}>
              <Square size={13} aria-hidden /> Stop
            </button>
          ) : (
            <button type="button" className="button primary" onClick={go}>
              <Play size={14} aria-hidden /> Run
            </button>
          )}
        </div>
      </section>
      <section className="card bench-out" aria-label="Answer" aria-busy={run.busy}>
        <header>
          <h2>Answer</h2>
          <span className="muted num">{run.busy ? "running" : run.took > 0 ? seconds(run.took) : ""}</span>
        </header>
        <div className="body">
          {run.problem ? (
            <div className="note bad" role="alert">
              {run.problem}
            </div>
          ) : run.result === null ? (
            <div className="empty">
              <p>{run.busy ? "Waiting for the answer" : "The answer appears here."}</p>
            </div>
          ) : (
            right
          )}
        </div>
      </section>
      <Snippets path={path} body={body} />
    </div>
  );
}

function Snippets({ path, body }: { path: string; body: unknown }) {
  const [language, setLanguage] = useState<"bash" | "python" | "javascript">("bash");
  const text = useMemo(() => {
    const write = { bash: asCurl, python: asPython, javascript: asJavaScript }[language];
    return write(location.origin, path, body);
  }, [language, path, body]);
  return (
    <section className="bench-code" aria-label="The same request in code">
      <div className="tabs small-tabs" role="group" aria-label="Language">
        {(["bash", "python", "javascript"] as const).map((one) => (
          <button key={one} type="button" aria-pressed={language === one} onClick={() => setLanguage(one)}>
            {{ bash: "curl", python: "Python", javascript: "JavaScript" }[one]}
          </button>
        ))}
      </div>
      <CodeBlock language={language} text={text} closed />
    </section>
  );
}

export function Text({ label, value, set, rows = 5, mono = false }: { label: string; value: string; set: (value: string) => void; rows?: number; mono?: boolean }) {
  const id = label.toLowerCase().replaceAll(/\W+/g, "-");
  return (
    <div className="field">
      <label htmlFor={id}>{label}</label>
      <textarea id={id} className={`input${mono ? " mono" : ""}`} rows={rows} value={value} spellCheck={!mono} onChange={(event) => set(event.target.value)} />
    </div>
  );
}
