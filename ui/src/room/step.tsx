// The last step: its budget of rows, cut into decode rows and prompt chunks.

import { plural } from "../format.ts";
import { useDark } from "../store/prefs.ts";
import type { ModelFrame } from "./history.ts";
import { sequenceColor } from "./palette.ts";

export function Step({ model, hovered, hover }: { model: ModelFrame; hovered: string | null; hover: (id: string | null) => void }) {
  const dark = useDark((state) => state.dark);
  const rows = model.sequences.filter((one) => one.rows > 0);
  // A row at or after the end of the prompt is one of the answer.
  const isDecode = (one: (typeof rows)[number]) => one.computed - one.rows >= one.prompt;
  const decode = rows.filter(isDecode);
  const prompt = rows.filter((one) => !isDecode(one));
  const sum = (list: typeof rows) => list.reduce((total, one) => total + one.rows, 0);
  const idle = model.stats.running === 0;
  return (
    <section className="card step" aria-label="The last step">
      <header>
        <h2>{idle ? "The last step" : "The step now"}</h2>
        <span className="muted">
          {idle ? "the engine sleeps" : `${plural(sum(decode), "decode row")}, ${plural(sum(prompt), "prompt row")} of `}
          {!idle && <span className="num">{model.max_rows}</span>}
        </span>
      </header>
      <div className="step-bar" role="img" aria-label={`${sum(rows)} of ${model.max_rows} rows`}>
        {[...decode, ...prompt].map((one) => (
          <span
            key={one.id}
            className={isDecode(one) ? "decode" : "chunk"}
            data-faded={(hovered !== null && hovered !== one.id) || undefined}
            title={`${one.id}: ${plural(one.rows, "row")}`}
            style={{ flexGrow: one.rows, color: sequenceColor(one.color, dark) }}
            onPointerEnter={() => hover(one.id)}
            onPointerLeave={() => hover(null)}
          />
        ))}
        <span className="rest" style={{ flexGrow: Math.max(0, model.max_rows - sum(rows)) }} />
      </div>
    </section>
  );
}
