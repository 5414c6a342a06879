// Mathematics, loaded when the first formula is shown. MathML needs neither fonts of ours nor inline styles, which the
// page's security policy excludes.

import type { Options } from "react-markdown";

type Plugin = NonNullable<Options["remarkPlugins"]>[number];

export interface Maths {
  plugin: Plugin;
  render(tex: string, display: boolean): string;
}

let loading: Promise<Maths> | null = null;

export function loadMaths(): Promise<Maths> {
  loading ??= Promise.all([import("remark-math"), import("katex")]).then(([math, { default: katex }]) => ({
    plugin: math.default,
    render: (tex: string, display: boolean) =>
      katex.renderToString(tex, {
        displayMode: display,
        output: "mathml",
        throwOnError: false,
        trust: false,
        maxExpand: 200,
        strict: "ignore",
      }),
  }));
  return loading;
}
