// Purposes of models, and finding them by any of their names.

import type { ModelCard } from "../api/types.ts";

/** The model with this name or alias. */
export function cardOf(models: ModelCard[], name: string | null | undefined): ModelCard | undefined {
  if (!name) return undefined;
  return models.find((one) => one.name === name) ?? models.find((one) => one.aliases.includes(name));
}

export const uses = (model: ModelCard | undefined, use: Use): boolean => model?.problem === null && (model.file?.uses.includes(use) ?? false);

export type Use = "chat" | "text" | "embeddings" | "rerank" | "tools" | "thinking" | "images";

export const chats = (model: ModelCard | undefined): boolean => uses(model, "chat");

/** A page that suits a model, besides the chat: base models continue texts, encoders compute vectors. */
export function playgroundOf(model: ModelCard): { name: string; path: string } | null {
  const at = (tab: string) => `/playground/${tab}/${encodeURIComponent(model.name)}`;
  if (uses(model, "text")) return { name: "Continue text", path: at("completion") };
  if (uses(model, "embeddings")) return { name: "Embeddings", path: at("embeddings") };
  return null;
}

/** Reason for which a model cannot chat; `null` if it can, or if nothing is known about it yet. */
export function noChat(models: ModelCard[], known: boolean, name: string | null): string | null {
  if (!known || name === null) return null;
  const model = cardOf(models, name);
  if (!model) return `${name} is not here any more. Choose another model above.`;
  if (model.problem !== null) return `${name} cannot run: ${model.problem}`;
  if (uses(model, "embeddings")) return `${name} computes embeddings and cannot chat. Choose another model above.`;
  if (uses(model, "rerank")) return `${name} ranks texts and cannot chat. Choose another model above.`;
  if (uses(model, "text")) return `${name} has no chat template: it continues texts, in the playground. Choose another model above to chat.`;
  return null;
}
