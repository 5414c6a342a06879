// Sequences as lanes over the last minute, like a profiler's tracks.

import { percent, plural } from "../format.ts";
import { useDark } from "../store/prefs.ts";
import { type Lane, type ModelFrame, laneState } from "./history.ts";
import { sequenceColor } from "./palette.ts";

const WINDOW = 60_000;
/** Lanes that are shown; the newest ones. */
const MOST = 64;

export function Lanes({
  model,
  lanes,
  now,
  hovered,
  hover,
}: {
  model: ModelFrame;
  lanes: Map<string, Lane> | undefined;
  now: number;
  hovered: string | null;
  hover: (id: string | null) => void;
}) {
  const dark = useDark((state) => state.dark);
  const start = now - WINDOW;
  const visible = [...(lanes?.values() ?? [])]
    .filter((lane) => lane.segments.some((segment) => segment.to >= start && segment.from <= now))
    .sort((a, b) => (a.segments[0]?.from ?? 0) - (b.segments[0]?.from ?? 0))
    .slice(-MOST);
  const running = new Map(model.sequences.map((one) => [one.id, one]));
  return (
    <section className="card" aria-label="Sequences">
      <header>
        <h2>Sequences</h2>
        <ul className="legend">
          <li>
            <i className="swatch queued" /> queued
          </li>
          <li>
            <i className="swatch prefill" /> prefill
          </li>
          <li>
            <i className="swatch running" /> decode
          </li>
          <li>
            <i className="swatch preempted" /> preempted
          </li>
        </ul>
      </header>
      {visible.length === 0 ? (
        <div className="empty">
          <p>No sequence ran in the last minute. Ask something in the chat and look here while it answers.</p>
        </div>
      ) : (
        <div className={`lanes${visible.length > 24 ? " dense" : ""}`} role="table" aria-label="Sequences of the last minute" tabIndex={0}>
          {visible.map((lane) => {
            const one = running.get(lane.id);
            const shared = one ? Math.min(one.pageCount, Math.floor(one.cached / model.block_size)) : 0;
            return (
              <div
                key={lane.id}
                className="lane"
                role="row"
                data-hovered={hovered === lane.id || undefined}
                onPointerEnter={() => hover(lane.id)}
                onPointerLeave={() => hover(null)}
              >
                <span role="rowheader" className="lane-id num">
                  <i style={{ background: sequenceColor(lane.color, dark) }} />
                  {lane.id}
                </span>
                <span role="cell" className="track">
                  {lane.segments.map((segment, index) => {
                    const from = Math.max(start, segment.from);
                    const to = Math.min(now, Math.max(segment.to, segment.from + 150));
                    if (to <= from) return null;
                    return (
                      <i
                        key={index}
                        className={`segment ${segment.state}`}
                        style={{
                          left: `${(100 * (from - start)) / WINDOW}%`,
                          width: `${(100 * (to - from)) / WINDOW}%`,
                          color: sequenceColor(lane.color, dark),
                        }}
                      />
                    );
                  })}
                </span>
                <span role="cell" className="lane-note num">
                  {one
                    ? laneState(one) === "prefill"
                      ? `prefill ${percent(one.computed, one.prompt)} of ${one.prompt}`
                      : laneState(one) === "decode"
                        ? `${plural(one.generated, "token")}, ${plural(one.pageCount, "page")}${shared ? `, ${shared} shared` : ""}`
                        : one.state === "preempted"
                          ? `preempted, ${plural(one.generated, "token")}`
                          : `waits, prompt of ${one.prompt}`
                    : "ended"}
                </span>
              </div>
            );
          })}
          <div className="lane axis" aria-hidden>
            <span />
            <span className="track">
              <span>60 s ago</span>
              <span>30 s</span>
              <span>now</span>
            </span>
            <span />
          </div>
        </div>
      )}
    </section>
  );
}
