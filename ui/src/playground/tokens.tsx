import { useState } from "react";

export interface TokenScore {
  text: string;
  logprob: number | null;
  top: [string, number][];
}

/** Spaces and line ends of a token, to be seen. */
export function pieces(text: string): string {
  // Byte-level and SentencePiece vocabularies have letters for them.
  return text.replaceAll(/[ Ġ▁]/g, "·").replaceAll("Ċ", "↵").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
}

/** Tokens with what could have stood in their places. The line of details is always there, so nothing jumps. */
export function Tokens({ before, tokens }: { before: string; tokens: TokenScore[] }) {
  const [at, setAt] = useState<number | null>(null);
  const shown = at === null ? null : tokens[at];
  return (
    <div className="scored">
      <p className="scored-text">
        <span className="muted">{before}</span>
        {tokens.map(({ text, logprob }, index) => {
          const probability = logprob === null ? 1 : Math.exp(logprob);
          return (
            <span
              key={index}
              tabIndex={0}
              className="scored-token"
              aria-label={`${text}, ${Math.round(100 * probability)} percent`}
              role="img"
              data-shown={at === index || undefined}
              style={{ background: `color-mix(in srgb, var(--sand) ${Math.round(70 * (1 - probability))}%, transparent)` }}
              onPointerEnter={() => setAt(index)}
              onFocus={() => setAt(index)}
            >
              {text}
            </span>
          );
        })}
      </p>
      <div className="alternatives" aria-live="polite">
        {shown ? (
          shown.top.map(([text, logprob]) => (
            <div key={text} className={text === shown.text ? "chosen" : undefined}>
              <span className="mono">{pieces(text)}</span>
              <span className="bar" aria-hidden>
                <span style={{ width: `${100 * Math.exp(logprob)}%` }} />
              </span>
              <span className="num">{(100 * Math.exp(logprob)).toFixed(1)} %</span>
              <span className="num muted">{logprob.toFixed(2)}</span>
            </div>
          ))
        ) : (
          <p className="muted">No token is chosen.</p>
        )}
      </div>
    </div>
  );
}
