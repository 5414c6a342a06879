import { ArrowUp, FileText, Paperclip, Square, X } from "lucide-react";
import { type DragEvent, useEffect, useRef, useState } from "react";

import { attempt } from "../components/toasts.tsx";
import { count } from "../format.ts";
import { useChat } from "../store/chat.ts";
import type { Attachment } from "../store/db.ts";
import { useServer } from "../store/server.ts";
import { readFile } from "./attach.ts";
import { ToolMenu } from "./tool-menu.tsx";

/** Texts that are not sent yet, by conversation. */
const drafts = new Map<string, string>();

export function Composer({
  conversation,
  model,
  servers,
  setServers,
  send,
}: {
  conversation: string | null;
  model: string | null;
  /** Servers of tools that the model may use. */
  servers: string[];
  setServers: (servers: string[]) => void;
  send: (text: string, attachments: Attachment[]) => Promise<void>;
}) {
  const draft = conversation ?? "";
  const [text, setText] = useState(drafts.get(draft) ?? "");
  const [files, setFiles] = useState<Attachment[]>([]);
  const [over, setOver] = useState(false);
  const busy = useChat((chat) => (conversation ? chat.streaming[conversation] !== undefined : false));
  const area = useRef<HTMLTextAreaElement>(null);
  const input = useRef<HTMLInputElement>(null);
  const modelsKnown = useServer((server) => server.modelsKnown);
  const canSend = !busy && (model !== null || !modelsKnown) && (text.trim() !== "" || files.length > 0);

  useEffect(() => void drafts.set(draft, text), [draft, text]);
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
    drafts.delete(draft);
    void attempt(() => send(text.trim(), files));
  };
  const add = (list: FileList | File[]) => {
    for (const file of list) {
      void attempt(async () => {
        const read = await readFile(file);
        setFiles((before) => [...before.filter((other) => other.name !== read.name), read]);
      });
    }
  };
  const drop = (event: DragEvent) => {
    event.preventDefault();
    setOver(false);
    add(event.dataTransfer.files);
  };

  return (
    <div className="composer-box">
      <div
        className={`composer${over ? " over" : ""}`}
        onDragOver={(event) => {
          event.preventDefault();
          setOver(true);
        }}
        onDragLeave={() => setOver(false)}
        onDrop={drop}
      >
        {files.length > 0 && (
          <ul className="files" aria-label="Attached files">
            {files.map((file) => (
              <li key={file.name} className="tag">
                <FileText size={13} aria-hidden />
                {file.name}
                <span className="num">{count(file.text.length)} characters</span>
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
          <button type="button" className="button quiet icon" aria-label="Attach text files or PDFs" title="Attach text files or PDFs" onClick={() => input.current?.click()}>
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
