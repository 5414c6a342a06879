// Short messages about what was done or could not be done.

import { X } from "lucide-react";
import { create } from "zustand";

import { Unreachable, describe } from "../api/client.ts";
import { useServer } from "../store/server.ts";

interface Toast {
  id: number;
  text: string;
  bad: boolean;
  /** True for a message that holds only while the server is away. */
  away: boolean;
  action?: { name: string; run: () => void };
}

const useToasts = create<{ toasts: Toast[] }>(() => ({ toasts: [] }));
let next = 0;

/** Most messages at once; older ones leave first. */
const MOST = 3;

function close(id: number): void {
  useToasts.setState(({ toasts }) => ({ toasts: toasts.filter((one) => one.id !== id) }));
}

export function toast(text: string, { bad = false, away = false, action }: { bad?: boolean; away?: boolean; action?: Toast["action"] } = {}): void {
  const id = next++;
  const added: Toast = { id, text, bad, away, ...(action ? { action } : {}) };
  // The same message again replaces the one before.
  useToasts.setState(({ toasts }) => ({ toasts: [...toasts.filter((one) => one.text !== text || action), added].slice(-MOST) }));
  setTimeout(() => close(id), bad || action ? 8000 : 3000);
}

/** Does something and tells what went wrong. */
export async function attempt(work: () => Promise<unknown>): Promise<boolean> {
  try {
    await work();
    return true;
  } catch (error) {
    toast(describe(error), { bad: true, away: error instanceof Unreachable });
    return false;
  }
}

export function Toasts() {
  const online = useServer((state) => state.online);
  const toasts = useToasts((state) => state.toasts).filter((one) => !one.away || !online);
  return (
    <section className="toasts" role="status" aria-live="polite" aria-label="Messages of the page">
      {toasts.map(({ id, text, bad, action }) => (
        <div key={id} className={`note ${bad ? "bad" : "good"}`}>
          <span className="grow">{text}</span>
          {action && (
            <button
              type="button"
              className="button small"
              onClick={() => {
                close(id);
                action.run();
              }}
            >
              {action.name}
            </button>
          )}
          <button type="button" className="button quiet icon small" aria-label="Close the message" onClick={() => close(id)}>
            <X size={15} aria-hidden />
          </button>
        </div>
      ))}
    </section>
  );
}
