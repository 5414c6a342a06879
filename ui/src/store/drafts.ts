// Messages that are not sent yet, by conversation; those of a new chat are under the empty name. They survive a reload.

import type { Attachment, ChatSettings } from "./db.ts";

export interface Draft {
  text: string;
  files: Attachment[];
  /** Of a new chat, which is kept nowhere else. */
  settings?: ChatSettings;
}

const PREFIX = "paguro.draft.";

/** Drafts of this page: the browser may refuse to keep long drafts, or all of them. */
const drafts = new Map<string, Draft>();

export function draftOf(id: string): Draft {
  const known = drafts.get(id);
  if (known) return known;
  let draft: Draft = { text: "", files: [] };
  try {
    const kept = JSON.parse(localStorage.getItem(PREFIX + id) ?? "null") as Partial<Draft> | null;
    if (kept && typeof kept === "object") draft = { ...draft, ...kept };
  } catch {
    // Anything else is no draft.
  }
  drafts.set(id, draft);
  return draft;
}

export function keepDraft(id: string, change: Partial<Draft>): void {
  const draft = { ...draftOf(id), ...change };
  drafts.set(id, draft);
  const isEmpty = !draft.text && draft.files.length === 0 && Object.keys(draft.settings ?? {}).length === 0;
  for (const kept of isEmpty ? [] : [draft, { ...draft, files: [] }]) {
    try {
      localStorage.setItem(PREFIX + id, JSON.stringify(kept));
      return;
    } catch {
      // Too long with its files: the text alone.
    }
  }
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // A browser that keeps nothing.
  }
}

export function dropDraft(id: string): void {
  drafts.delete(id);
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // A browser that keeps nothing.
  }
}
