// Types of the server's answers, as far as the page reads them.

export type Scope = "inference" | "models" | "admin";

export interface Session {
  version: string;
  needs_key: boolean;
  key_known: boolean;
  scopes: Scope[];
  library: boolean;
  /** The build of the page that the server has. */
  page: string;
  token: string;
}

export interface Sampling {
  temperature: number;
  top_k: number;
  top_p: number;
  min_p: number;
  repetition_penalty: number;
  frequency_penalty: number;
  presence_penalty: number;
}

export interface ModelCard {
  name: string;
  bytes: number;
  created: number;
  in_library: boolean;
  built_in: boolean;
  /** Its files stay when it is deleted. */
  in_place: boolean;
  /** It can be pulled again. */
  pulled: boolean;
  aliases: string[];
  /** The model that an adapter changes; null for models. */
  adapter: null | {
    /** Empty if there is none. */
    base: string;
    loaded: boolean;
  };
  file: null | {
    family: string;
    format: string;
    parameters: number;
    quantization: string;
    context: number | null;
    capabilities: string[];
    /** Purposes of the model. */
    uses: string[];
    template: string;
  };
  problem: string | null;
  needs: null | {
    weights: number;
    buffers: number;
    kv: number;
    total: number;
    least: number;
    context: number;
  };
  loaded: null | {
    device: string;
    bytes: number;
    context: number;
    block_size: number;
    one_kv_group: boolean;
    users: number;
    expires_in: number | null;
    embeds: boolean;
    sampling: Sampling;
  };
}

export interface ModelPreset {
  context: number | null;
  kv_dtype: string | null;
  chat_template: string | null;
  system: string | null;
  options: Record<string, unknown>;
}

export interface PresetCard {
  preset: ModelPreset;
  can_change: boolean;
  settings: ModelPreset;
}

export interface KnownModel {
  name: string;
  title: string;
  parameters: string;
  good_for: string;
  bytes: number;
  needs: number;
  here: boolean;
}

export interface Catalogue {
  models: KnownModel[];
  memory_limit: number;
}

export interface RemoteModel {
  name: string;
  bytes: number;
  needs: number;
  here: boolean;
}

export interface ModelCards {
  models: ModelCard[];
  memory_limit: number;
  memory_used: number;
}

export interface Status {
  version: string;
  models: {
    name: string;
    device: string;
    bytes: number;
    context: number;
    users: number;
    waiting: number;
    running: number;
    pages: number;
    pages_used: number;
    pages_cached: number;
    tokens: number;
  }[];
}

export interface Setting {
  name: string;
  value: string;
  origin: "flag" | "file" | "environment" | "default";
}

export interface SettingsInForce {
  version: string;
  system: string;
  architecture: string;
  devices: string[];
  settings: Setting[];
}

export interface KeyInfo {
  id: string;
  name: string;
  scopes: Scope[];
  created: number;
}

export interface RequestEntry {
  id: string;
  time: number;
  method: string;
  path: string;
  status: number;
  milliseconds: number;
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface ToolCard {
  name: string;
  function: string;
  title: string | null;
  description: string;
  parameters: unknown;
  read_only: boolean;
  trusted: boolean;
}

export interface ToolServer {
  name: string;
  place: string | null;
  added: boolean;
  state: "starting" | "ready" | "failed";
  problem: string | null;
  tools: ToolCard[];
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens: number };
  completion_tokens_details?: { reasoning_tokens: number; accepted_prediction_tokens?: number; rejected_prediction_tokens?: number };
}

/** First page and number of pages. */
export type Run = [number, number];

export interface SequenceTick {
  id: string;
  branches: number;
  state: "running" | "waiting" | "preempted";
  priority: number;
  prompt: number;
  cached: number;
  computed: number;
  generated: number;
  limit: number;
  rows: number;
  pages?: Run[];
}

export interface Latency {
  count: number;
  p50: number | null;
  p95: number | null;
}

export interface ModelTick {
  name: string;
  device: string;
  bytes: number;
  context: number;
  block_size: number;
  max_rows: number;
  max_sequences: number;
  stats: {
    pages: number;
    pages_used: number;
    pages_cached: number;
    waiting: number;
    running: number;
    steps: number;
    step_seconds: number;
    rows: number;
    tokens: number;
    prefix_query_tokens: number;
    prefix_hit_tokens: number;
    host?: TierTick;
    disk?: TierTick;
    evictions: number;
    preemptions: number;
    draft_tokens: number;
    accepted_tokens: number;
    draft_saved_seconds: number;
    page_copies: number;
    last_rows: number;
    last_sequences: number;
  };
  sequences: SequenceTick[];
  cached_added: Run[];
  cached_removed: Run[];
  images?: ImagesTick;
  kernels?: { name: string; launches: number; nanoseconds: number }[];
}

/** Images of requests, and the cache of encoded ones. */
export interface ImagesTick {
  waiting: number;
  encoding: boolean;
  encoded: number;
  encoder_seconds: number;
  cache_hits: number;
  cached: number;
  cached_rows: number;
  cached_bytes: number;
  cache_limit: number;
}

/** A tier of the cache behind the device's pages. */
export interface TierTick {
  hit_tokens: number;
  loads: number;
  loads_declined: number;
  stored: number;
  bytes: number;
  loaded_bytes: number;
  saved_seconds: number;
}

export interface Tick {
  time: number;
  memory: number | null;
  first_token: Latency;
  token_gap: Latency;
  models: ModelTick[];
}
