// Markdown of models. It becomes React elements and never HTML, so nothing that a model writes is executed; addresses
// other than those of web pages and mail are dropped, and pictures are links, since no request leaves this page.

import { Check, Copy } from "lucide-react";
import { type ReactNode, memo, useEffect, useMemo, useState } from "react";
import ReactMarkdown, { type Components } from "react-markdown";
import remarkGfm from "remark-gfm";

import { type Block, blocksOf, formulas } from "./blocks.ts";
import { highlight } from "./highlight.ts";
import { type Maths, loadMaths } from "./maths.ts";
import { Fallback } from "../components/recover.tsx";

/** A single block past this would hold up the page: it is shown as it was written. */
const LARGEST = 40_000;

export const Markdown = memo(function Markdown({ text }: { text: string }) {
  const blocks = useMemo(() => blocksOf(text), [text]);
  return (
    <div className="markdown">
      {blocks.map((block, index) =>
        block.kind === "code" ? (
          <CodeBlock key={index} language={block.language} text={block.text} closed={block.closed} />
        ) : (
          <Fallback key={index} text={block.text}>
            <TextBlock text={block.text} />
          </Fallback>
        ),
      )}
    </div>
  );
});

export type { Block };

/** The reader of formulas, if it is wanted. Without the server, formulas are shown as they were written. */
function useMaths(wanted: boolean): Maths | null {
  const [maths, setMaths] = useState<Maths | null>(null);
  useEffect(() => {
    if (wanted && !maths) loadMaths().then(setMaths, () => undefined);
  }, [wanted, maths]);
  return wanted ? maths : null;
}

const components: Components = {
  a: ({ href, children }) =>
    href ? (
      <a href={href} target="_blank" rel="noopener noreferrer nofollow">
        {children}
      </a>
    ) : (
      <span>{children}</span>
    ),
  img: ({ src, alt }) => (
    <a href={typeof src === "string" ? src : undefined} target="_blank" rel="noopener noreferrer nofollow">
      {alt || "picture"}
    </a>
  ),
  table: ({ children }) => (
    // It scrolls, so the keyboard must reach it.
    <div className="table" tabIndex={0} role="region" aria-label="Table">
      <table>{children}</table>
    </div>
  ),
  input: ({ checked }) => <input type="checkbox" checked={checked ?? false} readOnly disabled aria-label="Task" />,
  pre: ({ children }) => <>{children}</>,
  code: ({ className, children }) => <Code className={className}>{children}</Code>,
};

const TextBlock = memo(function TextBlock({ text }: { text: string }) {
  const isLarge = text.length > LARGEST;
  const rewritten = useMemo(() => (isLarge ? null : formulas(text)), [text, isLarge]);
  const maths = useMaths(rewritten !== null);
  if (isLarge) return <pre className="plain">{text}</pre>;
  return (
    <ReactMarkdown remarkPlugins={[remarkGfm, ...(maths?.plugins ?? [])]} components={components}>
      {maths && rewritten !== null ? rewritten : text}
    </ReactMarkdown>
  );
});

function Code({ className, children }: { className: string | undefined; children: ReactNode }) {
  const text = typeof children === "string" ? children : "";
  if (className?.includes("language-math")) return <Formula tex={text} display={className.includes("math-display")} />;
  // Blocks with fences were cut out before; indented ones are left.
  if (text.includes("\n")) return <CodeBlock language="" text={text.replace(/\n$/, "")} closed />;
  return <code>{children}</code>;
}

function Formula({ tex, display }: { tex: string; display: boolean }) {
  const [html, setHtml] = useState<string | null>(null);
  useEffect(() => {
    loadMaths().then((maths) => setHtml(maths.render(tex, display)), () => undefined);
  }, [tex, display]);
  if (html === null) return <code>{tex}</code>;
  // KaTeX made this: MathML of elements that it knows, with all text escaped.
  return <span className={display ? "formula display" : "formula"} dangerouslySetInnerHTML={{ __html: html }} />;
}

export function CodeBlock({ language, text, closed }: { language: string; text: string; closed: boolean }) {
  const [colored, setColored] = useState<{ of: string; nodes: ReactNode } | null>(null);
  useEffect(() => {
    if (text.length > LARGEST) return;
    let dropped = false;
    // While it grows, colours come a moment later, so that every token does not cost a whole parse.
    const timer = setTimeout(
      () => highlight(text, language).then((nodes) => !dropped && setColored({ of: text, nodes }), () => undefined),
      closed ? 0 : 120,
    );
    return () => {
      dropped = true;
      clearTimeout(timer);
    };
  }, [text, language, closed]);
  const shown = colored && text.startsWith(colored.of) ? colored : null;
  return (
    <figure className="code">
      <figcaption>
        <span className="mono">{language || "text"}</span>
        <CopyButton text={text} label="Copy the code" />
      </figcaption>
      <pre tabIndex={0} aria-label={`Code: ${language || "text"}`}>
        <code>
          {shown?.nodes}
          {shown ? text.slice(shown.of.length) : text}
        </code>
      </pre>
    </figure>
  );
}

export function CopyButton({ text, label }: { text: string; label: string }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return (
    <button type="button" className="button quiet icon small" aria-label={copied ? "Copied" : label} title={label} onClick={() => void copy()}>
      {copied ? <Check size={15} aria-hidden /> : <Copy size={15} aria-hidden />}
    </button>
  );
}

/** The clipboard's own interface exists in secure contexts only. */
async function copyText(text: string): Promise<void> {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
