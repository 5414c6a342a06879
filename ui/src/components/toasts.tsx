// Short messages about what was done or could not be done.

import { create } from "zustand";

import { describe } from "../api/client.ts";

interface Toast {
  id: number;
  text: string;
  bad: boolean;
}

const useToasts = create<{ toasts: Toast[] }>(() => ({ toasts: [] }));
let next = 0;

export function toast(text: string, bad = false): void {
  const id = next++;
  useToasts.setState(({ toasts }) => ({ toasts: [...toasts, { id, text, bad }] }));
  setTimeout(() => useToasts.setState(({ toasts }) => ({ toasts: toasts.filter((one) => one.id !== id) })), bad ? 8000 : 3000);
}

/** Does something and tells what went wrong. */
export async function attempt(work: () => Promise<unknown>): Promise<boolean> {
  try {
    await work();
    return true;
  } catch (error) {
    toast(describe(error), true);
    return false;
  }
}

export function Toasts() {
  const toasts = useToasts((state) => state.toasts);
  return (
    <div className="toasts" role="status" aria-live="polite">
      {toasts.map(({ id, text, bad }) => (
        <div key={id} className={`note ${bad ? "bad" : "good"}`}>
          {text}
        </div>
      ))}
    </div>
  );
}
