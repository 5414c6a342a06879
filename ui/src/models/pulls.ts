// Pulls of models. They go on while other pages are open.

import { create } from "zustand";

import { describe, jsonLines, request } from "../api/client.ts";
import { toast } from "../components/toasts.tsx";
import { useServer } from "../store/server.ts";

export interface PullState {
  name: string;
  status: string;
  done: number;
  total: number;
  /** Bytes a second, over the last moments. */
  speed: number;
  problem: string | null;
  abort: AbortController;
}

export const usePulls = create<{ pulls: PullState[] }>(() => ({ pulls: [] }));

export function change(name: string, next: Partial<PullState> | null): void {
  usePulls.setState(({ pulls }) => ({
    pulls: next === null ? pulls.filter((one) => one.name !== name) : pulls.map((one) => (one.name === name ? { ...one, ...next } : one)),
  }));
}

export async function pull(name: string): Promise<void> {
  const abort = new AbortController();
  const begun: PullState = { name, status: "asking the hub", done: 0, total: 0, speed: 0, problem: null, abort };
  usePulls.setState(({ pulls }) => ({ pulls: [...pulls.filter((one) => one.name !== name), begun] }));
  const files = new Map<string, { done: number; total: number }>();
  let [at, before] = [performance.now(), 0];
  try {
    const response = await request("/api/pull", { body: { model: name }, signal: abort.signal });
    for await (const line of jsonLines<{ status?: string; digest?: string; total?: number; completed?: number; error?: string }>(response)) {
      if (line.error) throw new Error(line.error);
      if (line.total !== undefined) files.set(line.digest ?? line.status ?? "", { done: line.completed ?? 0, total: line.total });
      const sum = (of: "done" | "total") => [...files.values()].reduce((all, file) => all + file[of], 0);
      const [done, now] = [sum("done"), performance.now()];
      const next: Partial<PullState> = { status: line.status ?? "", done, total: sum("total") };
      if (now - at > 800) {
        next.speed = Math.max(0, ((done - before) / (now - at)) * 1000);
        [at, before] = [now, done];
      }
      change(name, next);
    }
    change(name, null);
    toast(`${name} is here.`);
  } catch (error) {
    if (abort.signal.aborted) change(name, null);
    else change(name, { problem: describe(error) });
  }
  await useServer.getState().refreshModels().catch(() => undefined);
}
