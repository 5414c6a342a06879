import { ArrowUp, FileText, FileUp, Gauge, Paperclip, Square, X } from "lucide-react";
import { useEffect, useRef, useState } from "react";
import { Link } from "wouter";

import { attempt } from "../components/toasts.tsx";
import { count, grouped } from "../format.ts";
import { useChat } from "../store/chat.ts";
import type { Fullness } from "../store/context.ts";
import type { Attachment } from "../store/db.ts";
import { draftOf, keepDraft } from "../store/drafts.ts";
import { useServer } from "../store/server.ts";
import { cardOf } from "../store/uses.ts";
import { readFile, withFile } from "./attach.ts";
import { ToolMenu } from "./tool-menu.tsx";

export function Composer({
  conversation,
  model,
  blocked,
  full,
  servers,
  setServers,
  send,
}: {
  conversation: string | null;
  model: string | null;
  /** Reason for which the model cannot chat. */
  blocked: string | null;
  /** How full the context is, if it nearly is. */
  full: Fullness | null;
  /** Servers of tools that the model may use. */
  servers: string[];
  setServers: (servers: string[]) => void;
  send: (text: string, attachments: Attachment[]) => Promise<void>;
}) {
  const draft = conversation ?? "";
  const [text, setText] = useState(() => draftOf(draft).text);
  const [files, setFiles] = useState<Attachment[]>(() => draftOf(draft).files);
  const busy = useChat((chat) => (conversation ? chat.streaming[conversation] !== undefined : false));
  const area = useRef<HTMLTextAreaElement>(null);
  const input = useRef<HTMLInputElement>(null);
  const box = useRef<HTMLDivElement>(null);
  const modelsKnown = useServer((server) => server.modelsKnown);
  const card = useServer((server) => cardOf(server.models, model));
  const blind = files.some((file) => file.image) && card?.file?.capabilities.includes("vision") === false;
  const canSend = !busy && blocked === null && !blind && (model !== null || !modelsKnown) && (text.trim() !== "" || files.length > 0);

  useEffect(() => keepDraft(draft, { text, files }), [draft, text, files]);
  useEffect(() => {
    // Short messages of the page keep clear of this box.
    const element = box.current;
    if (!element) return;
    const root = document.documentElement;
    const observer = new ResizeObserver(() => root.style.setProperty("--composer", `${element.offsetHeight}px`));
    observer.observe(element);
    return () => {
      observer.disconnect();
      root.style.removeProperty("--composer");
    };
  }, []);
  useEffect(() => {
    const element = area.current;
    if (!element) return;
    element.style.height = "auto";
    element.style.height = `${Math.min(element.scrollHeight, innerHeight * 0.4)}px`;
  }, [text]);
  useEffect(() => {
    if (!matchMedia("(pointer: coarse)").matches) area.current?.focus();
    const listen = (event: KeyboardEvent) => {
      if (event.key === "Escape" && !event.defaultPrevented) useChat.getState().stop();
      // As on many sites: a slash goes to where one writes.
      if (event.key === "/" && event.target === document.body) {
        event.preventDefault();
        area.current?.focus();
      }
    };
    addEventListener("keydown", listen);
    return () => removeEventListener("keydown", listen);
  }, []);

  const submit = () => {
    if (!canSend) return;
    setText("");
    setFiles([]);
    // The box of the new chat may be drawn before this one keeps its emptiness.
    keepDraft(draft, { text: "", files: [] });
    void attempt(() => send(text.trim(), files));
  };
  const add = (list: FileList | File[]) => {
    for (const file of list) {
      void attempt(async () => {
        const read = await readFile(file);
        setFiles((before) => withFile(before, read));
      });
    }
  };
  const over = useDrop(add);

  return (
    <div className="composer-box" ref={box}>
      {over && (
        <div className="drop" aria-hidden>
          <FileUp size={28} />
          Drop images, text files or PDFs to attach them
        </div>
      )}
      {blocked !== null ? (
        <p className="composer-note bad" role="status">
          {blocked}
        </p>
      ) : blind ? (
        <p className="composer-note bad" role="status">
          {model} reads text only. Remove the image, or choose a model that sees.
        </p>
      ) : (
        full && <ContextNote full={full} />
      )}
      <div className={`composer${over ? " over" : ""}`}>
        {files.length > 0 && (
          <ul className="files" aria-label="Attached files">
            {files.map((file) => (
              <li key={file.name} className="tag">
                {file.image ? <img className="thumb" src={file.image} alt="" /> : <FileText size={13} aria-hidden />}
                {file.name}
                {!file.image && <span className="num">{count(file.text.length)} characters</span>}
                <button
                  type="button"
                  aria-label={`Remove ${file.name}`}
                  onClick={() => setFiles(files.filter((other) => other !== file))}
                >
                  <X size={13} aria-hidden />
                </button>
              </li>
            ))}
          </ul>
        )}
        <textarea
          ref={area}
          rows={1}
          aria-label="Message"
          placeholder={model ? `Message ${model}` : modelsKnown ? "Pull a model first" : "Message"}
          value={text}
          onChange={(event) => setText(event.target.value)}
          onPaste={(event) => {
            if (event.clipboardData.files.length) {
              event.preventDefault();
              add(event.clipboardData.files);
            }
          }}
          onKeyDown={(event) => {
            if (event.key === "Enter" && !event.shiftKey && !event.nativeEvent.isComposing) {
              event.preventDefault();
              submit();
            }
          }}
        />
        <div className="composer-row">
          <button type="button" className="button quiet icon" aria-label="Attach images, text files or PDFs" title="Attach images, text files or PDFs" onClick={() => input.current?.click()}>
            <Paperclip size={18} aria-hidden />
          </button>
          <input
            ref={input}
            type="file"
            multiple
            hidden
            aria-label="Files"
            onChange={(event) => {
              if (event.target.files) add([...event.target.files]);
              event.target.value = "";
            }}
          />
          <ToolMenu enabled={servers} change={setServers} />
          <span className="grow muted small hint">Enter sends, Shift Enter begins a line, Esc stops</span>
          {busy ? (
            <button type="button" className="button icon" aria-label="Stop" title="Stop (Esc)" onClick={() => useChat.getState().stop()}>
              <Square size={14} fill="currentColor" aria-hidden />
            </button>
          ) : (
            <button type="button" className="button primary icon" aria-label="Send" title="Send (Enter)" disabled={!canSend} onClick={submit}>
              <ArrowUp size={18} aria-hidden />
            </button>
          )}
        </div>
      </div>
    </div>
  );
}

/** How full the context is, and what happens then. */
function ContextNote({ full }: { full: Fullness }) {
  return (
    <p className="composer-note" role="status">
      <Gauge size={14} aria-hidden />
      <span>
        <span className="num">
          {grouped(full.used)} of {grouped(full.limit)}
        </span>{" "}
        tokens of context.{" "}
        {full.isFull ? "The next answer is given without the oldest turns." : "Soon the oldest turns will be left out."}
        {full.canGrow && (
          <>
            {" "}
            <Link href="/models">Models</Link> can give it more, under the defaults of the model.
          </>
        )}
      </span>
    </p>
  );
}

/** Accepts files that are dropped anywhere on the page. Returns true while some are dragged over it. */
function useDrop(add: (files: FileList) => void): boolean {
  const [over, setOver] = useState(false);
  const latest = useRef(add);
  latest.current = add;
  useEffect(() => {
    // Every element that the pointer enters is left later.
    let depth = 0;
    const hasFiles = (event: DragEvent) => event.dataTransfer?.types.includes("Files") ?? false;
    const enter = (event: DragEvent) => {
      if (!hasFiles(event)) return;
      depth += 1;
      setOver(true);
    };
    const leave = (event: DragEvent) => {
      if (!hasFiles(event)) return;
      depth = Math.max(0, depth - 1);
      if (depth === 0) setOver(false);
    };
    const move = (event: DragEvent) => {
      // Without this the browser would open the file in place of the page.
      if (hasFiles(event)) event.preventDefault();
    };
    const drop = (event: DragEvent) => {
      depth = 0;
      setOver(false);
      if (!hasFiles(event) || !event.dataTransfer) return;
      event.preventDefault();
      latest.current(event.dataTransfer.files);
    };
    addEventListener("dragenter", enter);
    addEventListener("dragleave", leave);
    addEventListener("dragover", move);
    addEventListener("drop", drop);
    return () => {
      removeEventListener("dragenter", enter);
      removeEventListener("dragleave", leave);
      removeEventListener("dragover", move);
      removeEventListener("drop", drop);
    };
  }, []);
  return over;
}
