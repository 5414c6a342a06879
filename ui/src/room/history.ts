// The last minutes of the engines, made of the stream's changes. Every frame is a whole picture, so that the scrubber
// can show any of them; what did not change between two frames is shared by both.

import type { Latency, ModelTick, Run, SequenceTick, Tick } from "../api/types.ts";

/** Frames that are kept: three minutes at five a second. */
const KEPT = 900;
export const COLORS = 12;
/** A model that was not heard of for longer has been unloaded. */
const PATIENCE = 5000;

export interface SequenceFrame extends SequenceTick {
  runs: Run[];
  pageCount: number;
  color: number;
}

export interface ModelFrame extends Omit<ModelTick, "sequences" | "cached_added" | "cached_removed" | "kernels"> {
  sequences: SequenceFrame[];
  cached: Run[];
  kernels: NonNullable<ModelTick["kernels"]>;
  /** Over the last second. */
  tokenRate: number;
  promptRate: number;
  /** When the engine answered last, in milliseconds of the server's clock. */
  seen: number;
}

export interface Frame {
  /** Milliseconds of the server's clock. */
  time: number;
  memory: number | null;
  firstToken: Latency;
  tokenGap: Latency;
  models: ModelFrame[];
}

export type LaneState = "queued" | "prefill" | "decode" | "preempted";

export interface Lane {
  id: string;
  color: number;
  segments: { state: LaneState; from: number; to: number }[];
}

/** When something happened to each page, in milliseconds of the server's clock. */
export interface PageTimes {
  cached: Float64Array;
  evicted: Float64Array;
}

export class History {
  frames: Frame[] = [];
  readonly lanes = new Map<string, Map<string, Lane>>();
  readonly times = new Map<string, PageTimes>();

  /** The stream begins anew: its first event has everything. */
  restart(): void {
    this.frames = [];
    this.lanes.clear();
    this.times.clear();
  }

  add(tick: Tick): void {
    const last = this.frames.at(-1);
    const models = tick.models.map((model) => this.model(tick, model, last?.models.find((one) => one.name === model.name)));
    // An engine in a long step is left out of a tick and is shown as it was.
    const silent = last?.models.filter((one) => tick.time - one.seen < PATIENCE && !models.some(({ name }) => name === one.name));
    models.push(...(silent ?? []));
    this.frames.push({ time: tick.time, memory: tick.memory, firstToken: tick.first_token, tokenGap: tick.token_gap, models });
    if (this.frames.length > KEPT) this.frames.splice(0, this.frames.length - KEPT);
  }

  private model(tick: Tick, model: ModelTick, last: ModelFrame | undefined): ModelFrame {
    const { sequences, cached_added, cached_removed, kernels, ...rest } = model;
    const used = new Set(
      sequences.map(({ id }) => last?.sequences.find((one) => one.id === id)?.color).filter((color) => color !== undefined),
    );
    const frames = sequences.map((sequence): SequenceFrame => {
      const before = last?.sequences.find((one) => one.id === sequence.id);
      const runs = sequence.pages ?? before?.runs ?? [];
      let color = before?.color;
      if (color === undefined) {
        color = 0;
        while (used.has(color) && color < COLORS - 1) color += 1;
        if (used.has(color)) color = Number(sequence.id.split(".")[0]) % COLORS;
        used.add(color);
      }
      return { ...sequence, runs, pageCount: runs.reduce((sum, run) => sum + run[1], 0), color };
    });
    const changed = cached_added.length + cached_removed.length > 0;
    const cached = changed || !last ? join(subtract(last?.cached ?? [], cached_removed), cached_added) : last.cached;
    this.time(tick.time, model, cached_added, cached_removed, frames);
    this.lane(tick.time, model.name, frames);
    // One second back; less at the beginning.
    const from = this.frames.findLast((frame) => tick.time - frame.time >= 1000) ?? this.frames[0];
    const then = from?.models.find((one) => one.name === model.name);
    const passed = from ? (tick.time - from.time) / 1000 : 0;
    const speed = (now: number, before: number | undefined) =>
      before !== undefined && passed > 0 && now >= before ? (now - before) / passed : 0;
    const tokenRate = speed(model.stats.tokens, then?.stats.tokens);
    return {
      ...rest,
      sequences: frames,
      cached,
      kernels: kernels ?? last?.kernels ?? [],
      tokenRate,
      seen: tick.time,
      promptRate: Math.max(0, speed(model.stats.rows, then?.stats.rows) - tokenRate),
    };
  }

  private time(now: number, model: ModelTick, added: Run[], removed: Run[], sequences: SequenceFrame[]): void {
    let times = this.times.get(model.name);
    const size = model.stats.pages + 1;
    if (times?.cached.length !== size) {
      times = { cached: new Float64Array(size).fill(-Infinity), evicted: new Float64Array(size).fill(-Infinity) };
      this.times.set(model.name, times);
    }
    for (const page of pagesOf(added)) times.cached[page] = now;
    if (removed.length === 0) return;
    const held = new Set<number>();
    for (const { runs } of sequences) for (const page of pagesOf(runs)) held.add(page);
    for (const page of pagesOf(removed)) if (!held.has(page)) times.evicted[page] = now;
  }

  private lane(now: number, name: string, sequences: SequenceFrame[]): void {
    let lanes = this.lanes.get(name);
    if (!lanes) {
      lanes = new Map();
      this.lanes.set(name, lanes);
    }
    for (const sequence of sequences) {
      const state = laneState(sequence);
      let lane = lanes.get(sequence.id);
      if (!lane) {
        lane = { id: sequence.id, color: sequence.color, segments: [] };
        lanes.set(sequence.id, lane);
      }
      const segment = lane.segments.at(-1);
      if (segment && segment.state === state && now - segment.to < 3000) segment.to = now;
      else {
        if (segment && now - segment.to < 3000) segment.to = now;
        lane.segments.push({ state, from: now, to: now });
      }
    }
    const oldest = this.frames[0]?.time ?? now;
    for (const [id, lane] of lanes) if ((lane.segments.at(-1)?.to ?? 0) < oldest) lanes.delete(id);
  }
}

export function laneState({ state, computed, prompt }: SequenceTick): LaneState {
  if (state === "waiting") return "queued";
  if (state === "preempted") return "preempted";
  return computed < prompt ? "prefill" : "decode";
}

export function* pagesOf(runs: Run[]): Generator<number> {
  for (const [first, length] of runs) for (let page = first; page < first + length; page++) yield page;
}

function subtract(runs: Run[], without: Run[]): Run[] {
  if (without.length === 0) return runs;
  const gone = new Set(pagesOf(without));
  return toRuns([...pagesOf(runs)].filter((page) => !gone.has(page)));
}

function join(runs: Run[], more: Run[]): Run[] {
  if (more.length === 0) return runs;
  return toRuns([...new Set([...pagesOf(runs), ...pagesOf(more)])].sort((a, b) => a - b));
}

function toRuns(pages: number[]): Run[] {
  const runs: Run[] = [];
  for (const page of pages) {
    const last = runs.at(-1);
    if (last && last[0] + last[1] === page) last[1] += 1;
    else runs.push([page, 1]);
  }
  return runs;
}
