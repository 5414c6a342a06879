// The stream of the machine room, open for as long as the page is.

import { useEffect, useRef, useState } from "react";

import { ApiError, describe, events, request } from "../api/client.ts";
import type { Tick } from "../api/types.ts";
import { type Frame, History } from "./history.ts";

export interface Room {
  history: History;
  /** The frame that is shown: the newest one, or the one at which it was paused. */
  frame: Frame | null;
  paused: boolean;
  /** Index of the frame that is shown. */
  index: number;
  problem: string | null;
  pause(): void;
  play(): void;
  seek(index: number): void;
}

export function useRoom(): Room {
  const history = useRef(new History());
  const [, draw] = useState(0);
  const [pausedAt, setPausedAt] = useState<number | null>(null);
  const [problem, setProblem] = useState<string | null>(null);
  const paused = useRef(false);
  paused.current = pausedAt !== null;

  useEffect(() => {
    const abort = new AbortController();
    const run = async () => {
      while (!abort.signal.aborted) {
        try {
          const response = await request("/ui/v1/live", { signal: abort.signal });
          setProblem(null);
          history.current.restart();
          setPausedAt(null);
          for await (const data of events(response)) {
            history.current.add(JSON.parse(data) as Tick);
            if (!paused.current && !document.hidden) draw((count) => count + 1);
          }
        } catch (error) {
          if (abort.signal.aborted) return;
          setProblem(describe(error));
          if (error instanceof ApiError && error.status < 500) return;
        }
        await new Promise((resolve) => setTimeout(resolve, 1000));
      }
    };
    void run();
    return () => abort.abort();
  }, []);

  const frames = history.current.frames;
  // Old frames leave at the front: the one that is shown is known by its time.
  const index = pausedAt === null ? frames.length - 1 : Math.max(0, frames.findIndex((frame) => frame.time >= pausedAt));
  return {
    history: history.current,
    frame: frames[index] ?? null,
    paused: pausedAt !== null,
    index,
    problem,
    pause: () => setPausedAt(frames.at(-1)?.time ?? null),
    play: () => setPausedAt(null),
    seek: (to) => setPausedAt(frames[to]?.time ?? null),
  };
}
