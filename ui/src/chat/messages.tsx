// The branch that is shown. Only messages near the view are in the document, so a thousand of them cost no more than a
// screenful; the view follows an answer only while the reader is at its end.

import { ArrowDown } from "lucide-react";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "react";
import { Virtualizer, type VirtualizerHandle } from "virtua";

import type { Message } from "../store/db.ts";
import { siblings, treeOf } from "../store/tree.ts";
import { MessageView } from "./message.tsx";

/** Nearer to the end than this counts as being there. */
const NEAR = 48;

/** Messages that an answer was given without, if the answer before it still had some of them. */
function newlyForgotten(path: Message[], index: number): number {
  const now = path[index]?.forgotten ?? 0;
  const before = now === 0 ? undefined : path.slice(0, index).findLast((message) => message.role === "assistant");
  return now > (before?.forgotten ?? 0) ? now : 0;
}

export function Messages({ path, messages }: { path: Message[]; messages: Message[] }) {
  const scroller = useRef<HTMLDivElement>(null);
  const list = useRef<VirtualizerHandle>(null);
  const atEnd = useRef(true);
  const [away, setAway] = useState(false);
  // While an answer streams the tree stays as it is, whatever its text.
  const shape = messages.map((message) => `${message.id}${message.parent}`).join();
  const tree = useMemo(() => treeOf(messages), [shape]);
  const last = path.at(-1);

  const toEnd = () => {
    const element = scroller.current;
    if (element) element.scrollTop = element.scrollHeight;
  };
  useLayoutEffect(() => {
    if (atEnd.current) toEnd();
  });
  useEffect(() => {
    // Heights of messages are known only when they were drawn once.
    const element = scroller.current?.firstElementChild;
    if (!element) return;
    const observer = new ResizeObserver(() => atEnd.current && toEnd());
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    atEnd.current = true;
    list.current?.scrollToIndex(path.length - 1, { align: "end" });
    toEnd();
  }, [last?.id]);

  return (
    <div className="messages-box">
      <div
        ref={scroller}
        className="messages"
        role="log"
        aria-live="off"
        aria-label="Messages"
        tabIndex={0}
        onScroll={(event) => {
          const { scrollTop, scrollHeight, clientHeight } = event.currentTarget;
          atEnd.current = scrollHeight - scrollTop - clientHeight < NEAR;
          setAway(!atEnd.current && scrollHeight - scrollTop - clientHeight > 200);
        }}
        onWheel={(event) => {
          if (event.deltaY < 0) atEnd.current = false;
        }}
      >
        <div className="messages-inner">
          <Virtualizer ref={list} scrollRef={scroller} bufferSize={600}>
            {path.map((message, index) => (
              <MessageView
                key={message.id}
                message={message}
                others={siblings(tree, message)}
                isLast={message.id === last?.id}
                forgotten={newlyForgotten(path, index)}
              />
            ))}
          </Virtualizer>
        </div>
      </div>
      {away && (
        <button
          type="button"
          className="button to-end"
          onClick={() => {
            atEnd.current = true;
            toEnd();
          }}
        >
          <ArrowDown size={15} aria-hidden />
          To the end
        </button>
      )}
    </div>
  );
}
