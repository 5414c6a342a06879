// Tools of the servers that Paguro's settings name, and calls of them.

import { create } from "zustand";

import { ApiError, json } from "../api/client.ts";
import type { ToolCard, ToolServer } from "../api/types.ts";
import { usePrefs } from "./prefs.ts";

interface Tools {
  servers: ToolServer[];
  known: boolean;
  refresh(): Promise<void>;
}

export const useTools = create<Tools>((set, get) => ({
  servers: [],
  known: false,
  async refresh() {
    const { servers } = await json<{ servers: ToolServer[] }>("/ui/v1/tools");
    set({ servers, known: true });
    // A server may take a while to start.
    if (servers.some((server) => server.state === "starting")) {
      setTimeout(() => void get().refresh().catch(() => undefined), 1000);
    }
  },
}));

export interface FoundTool {
  server: ToolServer;
  tool: ToolCard;
}

/** The tool that a model means by the name of a function. */
export function toolOf(servers: ToolServer[], enabled: string[] | undefined, name: string): FoundTool | null {
  for (const server of servers) {
    if (!enabled?.includes(server.name)) continue;
    const tool = server.tools.find((one) => one.function === name);
    if (tool) return { server, tool };
  }
  return null;
}

/** Tools of the enabled servers as a request has them. Servers that this page does not know yet are asked for first. */
export async function offeredTools(enabled: string[] | undefined): Promise<unknown[]> {
  if (!enabled?.length) return [];
  const missing = () => enabled.filter((name) => useTools.getState().servers.find((server) => server.name === name)?.state !== "ready");
  if (missing().length > 0) await useTools.getState().refresh();
  const [first] = missing();
  if (first !== undefined) {
    const server = useTools.getState().servers.find((one) => one.name === first);
    const reason = server?.state === "starting" ? `“${first}” is still starting. Try again in a moment` : server ? (server.problem ?? "") : `There is no tool server “${first}” any more`;
    throw new ApiError(0, `${reason}. Or turn it off under the tools of this chat.`);
  }
  return useTools
    .getState()
    .servers.filter((server) => enabled.includes(server.name))
    .flatMap((server) => server.tools)
    .map((tool) => ({ type: "function", function: { name: tool.function, description: tool.description, parameters: tool.parameters } }));
}

/** True if a call needs no question: the settings trust the tool, or the person does in this browser. */
export function isTrusted({ server, tool }: FoundTool): boolean {
  return tool.trusted || usePrefs.getState().trustedTools.includes(trustName(server.name, tool.name));
}

export function trustName(server: string, tool: string): string {
  return `${server}/${tool}`;
}

export interface ToolOutcome {
  text: string;
  /** Data URLs of images. */
  images?: string[];
  is_error: boolean;
}

export async function callTool({ server, tool }: FoundTool, text: string, signal: AbortSignal): Promise<ToolOutcome> {
  let given: unknown;
  try {
    given = JSON.parse(text || "{}");
  } catch {
    return { text: "The arguments are not JSON.", is_error: true };
  }
  return json<ToolOutcome>("/ui/v1/tools/call", { body: { server: server.name, tool: tool.name, arguments: given }, signal });
}
