// State of the server: its reachability, our identity, its models and their activity.

import { create } from "zustand";

import { ApiError, Unreachable, json, onSession, session as ask, storeKey } from "../api/client.ts";
import type { ModelCard, ModelCards, Scope, Session, Status } from "../api/types.ts";

interface Server {
  /** Unknown until the first answer. */
  online: boolean | null;
  session: Session | null;
  models: ModelCard[];
  memory: { limit: number; used: number };
  modelsKnown: boolean;
  status: Status | null;
  /** Tokens per second of all models together, between the last two polls. */
  rate: number;
  /** True when the server has another build of the page than this one. */
  outdated: boolean;
  /** Models that this page is loading, with the time at which that began. */
  loading: Record<string, number>;
  may(scope: Scope): boolean;
  signIn(key: string): Promise<string | null>;
  refreshModels(): Promise<void>;
  load(model: string, keepAlive?: number): Promise<void>;
  unload(model: string): Promise<void>;
}

export const useServer = create<Server>((set, get) => ({
  online: null,
  session: null,
  models: [],
  memory: { limit: 0, used: 0 },
  modelsKnown: false,
  status: null,
  rate: 0,
  outdated: false,
  loading: {},

  may: (scope) => get().session?.scopes.includes(scope) ?? false,

  async signIn(key) {
    storeKey(key.trim());
    await connect();
    const { session, online } = get();
    if (!online) return "The server does not answer.";
    if (session?.needs_key && !session.key_known) {
      storeKey("");
      return "The server does not know this key. `paguro keys list` shows those it knows by name.";
    }
    return null;
  },

  async refreshModels() {
    if (!get().may("inference")) return;
    const { models, memory_limit, memory_used } = await json<ModelCards>("/ui/v1/models");
    set({ models: models.map(complete), modelsKnown: true, memory: { limit: memory_limit, used: memory_used } });
  },

  async load(model, keepAlive) {
    if (get().loading[model] !== undefined) return;
    set(({ loading }) => ({ loading: { ...loading, [model]: Date.now() } }));
    try {
      await json("/api/generate", {
        body: { model, stream: false, ...(keepAlive === undefined ? {} : { keep_alive: keepAlive }) },
      });
    } finally {
      set(({ loading: { [model]: _, ...rest } }) => ({ loading: rest }));
      await get().refreshModels();
    }
  },

  async unload(model) {
    await json("/api/generate", { body: { model, stream: false, keep_alive: 0 } });
    // It goes when the request that said so has let it go.
    setTimeout(() => void get().refreshModels(), 300);
    await get().refreshModels();
  },
}));

/** The build of this page; the development server has none. */
const BUILD = document.querySelector<HTMLMetaElement>("meta[name=paguro-page]")?.content ?? null;

// Older servers do not say which build they have: then it is another one.
onSession(({ page }) => useServer.setState({ outdated: BUILD !== null && page !== BUILD }));

/** Asks who we are here, and for the models. */
export async function connect(): Promise<void> {
  try {
    const session = await ask();
    useServer.setState({ session, online: true });
    if (session.scopes.includes("inference")) await useServer.getState().refreshModels();
  } catch (error) {
    if (error instanceof Unreachable) useServer.setState({ online: false });
    else throw error;
  }
}

/** A card with all fields. Another build of the server, which an open page may meet after a restart, has others. */
function complete(model: ModelCard): ModelCard {
  const can = (name: string) => model.file?.capabilities?.includes(name) ?? false;
  const uses = model.file?.uses ?? (!can("completion") ? ["embeddings"] : model.file?.template ? ["chat"] : ["text"]);
  return {
    ...model,
    aliases: model.aliases ?? [],
    adapter: model.adapter ?? null,
    file: model.file && { ...model.file, uses, capabilities: model.file.capabilities ?? [] },
    problem: model.problem ?? null,
    needs: model.needs ?? null,
    loaded: model.loaded ?? null,
  };
}

/** Polls until the server is asked who it is: it may have been replaced between two of them. */
const ASK_AGAIN = 15;
let polls = 0;
let lastTokens: { at: number; tokens: Map<string, number> } | null = null;

async function poll(): Promise<void> {
  const { online, session } = useServer.getState();
  if (document.hidden) return;
  try {
    if (online !== true || session === null || ++polls % ASK_AGAIN === 0) {
      await connect();
      if (!useServer.getState().may("inference")) return;
    } else if (!session.scopes.includes("inference")) {
      await ask();
      return;
    }
    const status = await json<Status>("/status");
    const now = performance.now();
    const tokens = new Map(status.models.map((model) => [model.name, model.tokens]));
    let rate = 0;
    if (lastTokens) {
      const passed = (now - lastTokens.at) / 1000;
      for (const [name, value] of tokens) {
        const before = lastTokens.tokens.get(name);
        if (before !== undefined && value >= before) rate += (value - before) / passed;
      }
    }
    lastTokens = { at: now, tokens };
    const before = useServer.getState().status;
    useServer.setState({ status, rate });
    const names = (of: Status | null) => of?.models.map((model) => model.name).join("\n");
    if (names(before) !== names(status)) await useServer.getState().refreshModels();
  } catch (error) {
    if (error instanceof Unreachable) useServer.setState({ online: false, rate: 0 });
    // The key was revoked: ask for another one.
    if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
      await connect().catch(() => undefined);
    }
  }
}

/** Keeps asking for as long as the page is open. */
export function watchServer(): void {
  const again = () => void poll().finally(() => setTimeout(again, useServer.getState().online ? 2000 : 1000));
  again();
  document.addEventListener("visibilitychange", () => {
    polls = -1;
    void poll();
  });
}
