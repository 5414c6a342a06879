// Preferences that this browser stores: looks and presets.

import { create } from "zustand";
import { persist } from "zustand/middleware";

import type { ChatSettings } from "./db.ts";

export type Theme = "system" | "light" | "dark";

export interface Preset {
  name: string;
  settings: ChatSettings;
}

interface Prefs {
  theme: Theme;
  sideOpen: boolean;
  lastModel: string | null;
  presets: Preset[];
  /** Tools that are called without a question, as `server/tool`. */
  trustedTools: string[];
  set(change: Partial<Pick<Prefs, "theme" | "sideOpen" | "lastModel">>): void;
  savePreset(preset: Preset): void;
  deletePreset(name: string): void;
  trustTool(name: string, trusted: boolean): void;
}

export const usePrefs = create<Prefs>()(
  persist(
    (set) => ({
      theme: "system",
      sideOpen: true,
      lastModel: null,
      presets: [],
      trustedTools: [],
      set: (change) => set(change),
      savePreset: (preset) =>
        set(({ presets }) => ({ presets: [...presets.filter((other) => other.name !== preset.name), preset] })),
      trustTool: (name, trusted) =>
        set(({ trustedTools }) => ({ trustedTools: [...trustedTools.filter((other) => other !== name), ...(trusted ? [name] : [])] })),
      deletePreset: (name) => set(({ presets }) => ({ presets: presets.filter((preset) => preset.name !== name) })),
    }),
    { name: "paguro.prefs" },
  ),
);

const dark = matchMedia("(prefers-color-scheme: dark)");

/** True while the dark colours are shown. */
export const useDark = create<{ dark: boolean }>(() => ({ dark: false }));

function applyTheme(): void {
  const { theme } = usePrefs.getState();
  const isDark = theme === "system" ? dark.matches : theme === "dark";
  document.documentElement.dataset["theme"] = isDark ? "dark" : "light";
  useDark.setState({ dark: isDark });
}

export function watchTheme(): void {
  applyTheme();
  usePrefs.subscribe(applyTheme);
  dark.addEventListener("change", applyTheme);
}
