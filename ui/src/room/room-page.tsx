import "./room.css";

import { Pause, Play } from "lucide-react";
import { useEffect, useMemo, useState } from "react";
import { Link } from "wouter";

import type { TierTick } from "../api/types.ts";
import { NeedsScope } from "../components/frame.tsx";
import { attempt } from "../components/toasts.tsx";
import { bytes, count, percent, plural, rate, seconds } from "../format.ts";
import { useServer } from "../store/server.ts";
import { Chart, type Line } from "./charts.tsx";
import type { Frame, ModelFrame } from "./history.ts";
import { Images } from "./images.tsx";
import { Lanes } from "./lanes.tsx";
import { PageMap } from "./page-map.tsx";
import { Step } from "./step.tsx";
import { useRoom } from "./use-room.ts";

export default function RoomPage() {
  return (
    <NeedsScope scope="admin">
      <Page />
    </NeedsScope>
  );
}

function Page() {
  const room = useRoom();
  const [chosen, setChosen] = useState<string | null>(null);
  const [hovered, setHovered] = useState<string | null>(null);
  const { frame, history } = room;
  const model = frame?.models.find((one) => one.name === chosen) ?? busiest(frame);

  useEffect(() => {
    const listen = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.key !== " " || /^(INPUT|BUTTON|A|SELECT|TEXTAREA|SUMMARY)$/.test(target.tagName)) return;
      event.preventDefault();
      if (room.paused) room.play();
      else room.pause();
    };
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  });

  return (
    <div className="page room">
      <div className="inner">
        <header className="page-head">
          <div>
            <h1>Machine room</h1>
            <p>
              {model
                ? `${model.name} on ${model.device}: ${plural(model.stats.pages, "page")} of ${model.block_size} tokens, up to ${model.max_sequences} sequences at once.`
                : "What the engine is doing, as it does it."}
            </p>
          </div>
          {frame && frame.models.length > 1 && (
            <select className="input model-choice" aria-label="Model" value={model?.name} onChange={(event) => setChosen(event.target.value)}>
              {frame.models.map((one) => (
                <option key={one.name}>{one.name}</option>
              ))}
            </select>
          )}
        </header>
        {room.problem && <div className="note bad">{room.problem}</div>}
        {frame && model ? (
          <>
            <Player room={room} />
            <div className="room-grid">
              <div className="room-main">
                <section className="card" aria-label="Pages">
                  <header>
                    <h2>Pages</h2>
                    <span className="muted">
                      <span className="num">{percent(model.stats.pages_used, model.stats.pages)}</span> in use
                    </span>
                  </header>
                  <div className="body">
                    <PageMap model={model} times={history.times.get(model.name)} now={frame.time} hovered={hovered} hover={setHovered} />
                  </div>
                </section>
                <Step model={model} hovered={hovered} hover={setHovered} />
                <Lanes model={model} lanes={history.lanes.get(model.name)} now={frame.time} hovered={hovered} hover={setHovered} />
                {model.images && <Images images={model.images} />}
                <Kernels model={model} />
              </div>
              <aside className="room-side" aria-label="Figures">
                <Figures frame={frame} model={model} />
                <Charts frames={history.frames} index={room.index} model={model} />
              </aside>
            </div>
          </>
        ) : (
          <Nothing known={frame !== null} />
        )}
      </div>
    </div>
  );
}

function busiest(frame: Frame | null): ModelFrame | undefined {
  return frame?.models.toSorted((a, b) => b.stats.running - a.stats.running || b.stats.pages_used - a.stats.pages_used)[0];
}

function Nothing({ known }: { known: boolean }) {
  const first = useServer((server) => server.models[0]);
  const loading = useServer((server) => Object.keys(server.loading).length > 0);
  return (
    <section className="card">
      <div className="empty tall">
        <h2>{known ? "No model is loaded" : "Connecting to the engine"}</h2>
        {known && (
          <>
            <p>Pages, sequences and steps appear here as soon as a model is loaded.</p>
            <div className="row">
              {first && (
                <button type="button" className="button primary" disabled={loading} onClick={() => void attempt(() => useServer.getState().load(first.name))}>
                  {loading ? "Loading" : `Load ${first.name}`}
                </button>
              )}
              <Link href="/chat" className="button">
                Start a chat
              </Link>
            </div>
          </>
        )}
      </div>
    </section>
  );
}

/** Pause and replay of the last minutes. */
function Player({ room }: { room: ReturnType<typeof useRoom> }) {
  const { frames } = room.history;
  const [first, last] = [frames[0]?.time ?? 0, frames.at(-1)?.time ?? 0];
  const behind = (last - (room.frame?.time ?? last)) / 1000;
  return (
    <div className="player">
      <button type="button" className="button small" onClick={() => (room.paused ? room.play() : room.pause())} title="Space">
        {room.paused ? <Play size={14} aria-hidden /> : <Pause size={14} aria-hidden />}
        {room.paused ? "Live" : "Pause"}
      </button>
      <input
        type="range"
        aria-label="Moment that is shown"
        aria-valuetext={room.paused ? `${seconds(behind)} ago` : "now"}
        min={0}
        max={Math.max(1, frames.length - 1)}
        value={Math.max(0, room.index)}
        onChange={(event) => room.seek(Number(event.target.value))}
      />
      <span className="num muted when">{room.paused ? `${seconds(behind)} ago` : `live, ${seconds((last - first) / 1000)} kept`}</span>
    </div>
  );
}

/** Name, value and meaning of a tier's figure, if the model has the tier. */
function tier(name: string, stats: TierTick | undefined, place: string): [string, string, string][] {
  if (!stats) return [];
  const saved = `about ${seconds(stats.saved_seconds)} of computing saved`;
  return [[name, count(stats.hit_tokens), `tokens that came from ${place} in ${count(stats.loads)} loads, ${bytes(stats.loaded_bytes)}; ${saved}; ${count(stats.stored)} blocks passed to it`]];
}

function Figures({ frame, model }: { frame: Frame; model: ModelFrame }) {
  const { stats } = model;
  const figures: [string, string, string][] = [
    ["Running", `${stats.running}`, `of ${model.max_sequences} sequences at most`],
    ["Waiting", `${stats.waiting}`, "sequences in the queue, preempted ones included"],
    ["Prefix hits", percent(stats.prefix_hit_tokens, stats.prefix_query_tokens), `${count(stats.prefix_hit_tokens)} of ${count(stats.prefix_query_tokens)} prompt tokens came from the cache`],
    ...tier("From host", stats.host, "memory of the host"),
    ...tier("From disk", stats.disk, "the disk"),
    ["Evicted", count(stats.evictions), "cached pages given up for others"],
    ["Drafts", percent(stats.accepted_tokens, stats.draft_tokens), `${count(stats.accepted_tokens)} of ${count(stats.draft_tokens)} drafted tokens accepted; about ${seconds(stats.draft_saved_seconds)} saved`],
    ["Preempted", count(stats.preemptions), "sequences that lost their pages for a while"],
    ["Page copies", count(stats.page_copies), "shared pages that were copied before a branch wrote them"],
    ["Model", bytes(model.bytes), "weights and pages"],
    ["Process", frame.memory === null ? "–" : bytes(frame.memory), "resident memory of the server"],
  ];
  return (
    <dl className="card figures">
      {figures.map(([name, value, meaning]) => (
        <div key={name} title={meaning}>
          <dt>{name}</dt>
          <dd className="num">{value}</dd>
        </div>
      ))}
    </dl>
  );
}

function Charts({ frames, index, model }: { frames: Frame[]; index: number; model: ModelFrame }) {
  const shown = frames.slice(0, index + 1);
  const end = shown.at(-1)?.time ?? 0;
  const times = shown.map((frame) => (frame.time - end) / 1000);
  const of = (value: (model: ModelFrame) => number) =>
    shown.map((frame) => {
      const found = frame.models.find((one) => one.name === model.name);
      return found ? value(found) : null;
    });
  const last = shown.at(-1);
  const lines: Record<string, Line[]> = useMemo(
    () => ({
      speed: [
        { label: "generated", color: "--coral", fill: true, values: of((one) => one.tokenRate) },
        { label: "prompt", color: "--sand", values: of((one) => one.promptRate) },
      ],
      first: [
        { label: "p50", color: "--sea", values: shown.map((frame) => frame.firstToken.p50) },
        { label: "p95", color: "--sand", values: shown.map((frame) => frame.firstToken.p95) },
      ],
      gap: [
        { label: "p50", color: "--sea", values: shown.map((frame) => frame.tokenGap.p50) },
        { label: "p95", color: "--sand", values: shown.map((frame) => frame.tokenGap.p95) },
      ],
      pages: [
        { label: "in use", color: "--coral", fill: true, values: of((one) => one.stats.pages_used) },
        { label: "with cached", color: "--sea", values: of((one) => one.stats.pages_used + one.stats.pages_cached) },
        { label: "all", color: "--line-strong", dash: [4, 4], values: of((one) => one.stats.pages) },
      ],
    }),
    [end, shown.length, model.name],
  );
  const latency = (value: number | null | undefined) => (value === null || value === undefined ? "–" : seconds(value));
  return (
    <div className="card charts">
      <Chart title="Speed" unit="tok/s" times={times} lines={lines["speed"] ?? []} format={rate} now={`${rate(model.tokenRate)} tok/s`} />
      <Chart title="First token" unit="last minute" times={times} lines={lines["first"] ?? []} format={seconds} now={`p50 ${latency(last?.firstToken.p50)}`} />
      <Chart title="Between tokens" unit="last 10 s" times={times} lines={lines["gap"] ?? []} format={seconds} now={`p50 ${latency(last?.tokenGap.p50)}`} />
      <Chart title="Pages" unit="" times={times} lines={lines["pages"] ?? []} format={(value) => count(Math.round(value))} now={`${model.stats.pages_used} of ${model.stats.pages}`} />
    </div>
  );
}

function Kernels({ model }: { model: ModelFrame }) {
  const timed = model.kernels.some((kernel) => kernel.nanoseconds > 0);
  const of = (kernel: ModelFrame["kernels"][number]) => (timed ? kernel.nanoseconds : kernel.launches);
  const ran = model.kernels.filter((kernel) => kernel.launches > 0).toSorted((a, b) => of(b) - of(a));
  const all = ran.reduce((sum, kernel) => sum + of(kernel), 0);
  return (
    <section className="card" aria-label="Kernels">
      <header>
        <h2>Kernels</h2>
        <span className="muted">{timed ? "share of the time" : "share of the launches; this device does not time them"}</span>
      </header>
      {ran.length === 0 ? (
        <div className="empty">
          <p>No kernel has run yet.</p>
        </div>
      ) : (
        <ul className="kernels">
          {ran.slice(0, 12).map((kernel) => (
            <li key={kernel.name}>
              <span className="mono">{kernel.name}</span>
              <span className="bar" aria-hidden>
                <span style={{ width: `${all ? (100 * of(kernel)) / all : 0}%` }} />
              </span>
              <span className="num">{percent(of(kernel), all)}</span>
              <span className="num muted">{count(kernel.launches)} launches</span>
            </li>
          ))}
        </ul>
      )}
    </section>
  );
}
