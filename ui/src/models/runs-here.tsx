import { Download } from "lucide-react";
import { useState } from "react";

import { bytes } from "../format.ts";
import { useCatalogue } from "../store/catalogue.ts";
import { useServer } from "../store/server.ts";
import { pull, usePulls } from "./pulls.ts";

const FIRST = 6;

/** Well-known models that this machine can run, the largest first. */
export function RunsHere() {
  const catalogue = useCatalogue();
  const pulls = usePulls((state) => state.pulls);
  const { may, memory } = useServer();
  const [all, setAll] = useState(false);
  if (!catalogue) return null;
  const limit = catalogue.memory_limit;
  const free = Math.max(0, limit - memory.used);
  const fitting = catalogue.models.filter((model) => model.needs <= limit);
  const shown = all ? catalogue.models : fitting.slice(0, FIRST);
  return (
    <section className="card" aria-label="What runs here">
      <header>
        <h2>What runs here</h2>
        <span className="muted small">well-known models, the largest first</span>
      </header>
      {shown.length === 0 ? (
        <div className="empty">
          <h2>None of the well-known models fits</h2>
          <p>{bytes(limit)} are allowed for models. Raise --memory, or import a smaller one.</p>
        </div>
      ) : (
        <ul className="known">
          {shown.map((model) => {
            const pulling = pulls.some((one) => one.name === model.name && !one.problem);
            return (
              <li key={model.name}>
                <span className="grow">
                  <span className="name">{model.title}</span> <span className="mono muted small">{model.name}</span>
                  <span className="muted small what">{model.good_for}</span>
                </span>
                <span className="num small size" title="Its weights, and about an eighth more for K, V and buffers">
                  about {bytes(model.needs)}
                  <span className={model.needs > limit ? "problem" : "muted"}>
                    {model.needs > limit ? `${bytes(limit)} are allowed` : model.needs > free ? "when others leave" : "fits now"}
                  </span>
                </span>
                {model.here ? (
                  <span className="tag sea">here</span>
                ) : (
                  may("models") && (
                    <button type="button" className="button small" aria-label={`Pull ${model.name}`} disabled={pulling} onClick={() => void pull(model.name)}>
                      <Download size={14} aria-hidden />
                      {pulling ? "Pulling" : "Pull"}
                    </button>
                  )
                )}
              </li>
            );
          })}
        </ul>
      )}
      {catalogue.models.length > shown.length && !all && (
        <div className="body">
          <button type="button" className="button quiet small" onClick={() => setAll(true)}>
            Show all {catalogue.models.length}
          </button>
        </div>
      )}
    </section>
  );
}
