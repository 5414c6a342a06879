// Mathematics, loaded when the first formula is shown. MathML needs neither fonts of ours nor inline styles, which the
// page's security policy excludes.

import type { Options } from "react-markdown";

export interface Maths {
  plugins: NonNullable<Options["remarkPlugins"]>;
  render(tex: string, display: boolean): string;
}

let loading: Promise<Maths> | null = null;

/** Rejects if the server is away or has another build; the next call tries again. */
export function loadMaths(): Promise<Maths> {
  loading ??= load().catch((error: unknown) => {
    loading = null;
    throw error;
  });
  return loading;
}

async function load(): Promise<Maths> {
  const [math, { default: katex }] = await Promise.all([import("remark-math"), import("katex")]);
  return {
    // Which single dollars are formulas is decided by `formulas`.
    plugins: [[math.default, { singleDollarTextMath: false }]],
    render: (tex: string, display: boolean) =>
      katex.renderToString(tex, {
        displayMode: display,
        output: "mathml",
        throwOnError: false,
        trust: false,
        maxExpand: 200,
        strict: "ignore",
      }),
  };
}
