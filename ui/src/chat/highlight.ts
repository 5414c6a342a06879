// Colours of code. The highlighter is loaded when the first code is shown.

import { toJsxRuntime } from "hast-util-to-jsx-runtime";
import type { ReactNode } from "react";
import { Fragment, jsx, jsxs } from "react/jsx-runtime";

let loading: ReturnType<typeof load> | null = null;

async function load() {
  const { common, createLowlight } = await import("lowlight");
  return createLowlight(common);
}

export async function highlight(text: string, language: string): Promise<ReactNode> {
  // Without the server there are no colours; the next code tries again.
  loading ??= load().catch((error: unknown) => {
    loading = null;
    throw error;
  });
  const lowlight = await loading;
  if (!language || !lowlight.registered(language)) return text;
  return toJsxRuntime(lowlight.highlight(language, text), { Fragment, jsx, jsxs });
}
