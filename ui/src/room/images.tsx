// Images on their way to the text model, and the rows of those that are kept for later turns.

import type { ImagesTick } from "../api/types.ts";
import { bytes, count, percent, plural, seconds } from "../format.ts";

export function Images({ images }: { images: ImagesTick }) {
  const found = images.cache_hits + images.encoded;
  const figures: [string, string, string][] = [
    ["Waiting", count(images.waiting), "images that sequences wait for"],
    ["Encoded", count(images.encoded), `images, in ${seconds(images.encoder_seconds)}`],
    ["Cache hits", percent(images.cache_hits, found), `${count(images.cache_hits)} of ${plural(found, "image")} had been encoded for an earlier one`],
    ["In the cache", count(images.cached), `images of ${plural(images.cached_rows, "row")}; ${bytes(images.cached_bytes)} of ${bytes(images.cache_limit)}`],
  ];
  return (
    <section className="card" aria-label="Images">
      <header>
        <h2>Images</h2>
        <span className="muted">{images.encoding ? "one is being encoded" : "none is being encoded"}</span>
      </header>
      <dl className="figures">
        {figures.map(([name, value, meaning]) => (
          <div key={name} title={meaning}>
            <dt>{name}</dt>
            <dd className="num">{value}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}
