import { ChevronLeft, ChevronRight, CirclePlay, FileText, LoaderCircle, PencilLine, Play, RotateCw, Scissors, Trash2, TriangleAlert, Wrench } from "lucide-react";
import { memo, useEffect, useState } from "react";

import type { ToolCall } from "../api/types.ts";
import { Mark } from "../components/frame.tsx";
import { Fallback } from "../components/recover.tsx";
import { attempt, toast } from "../components/toasts.tsx";
import { count, grouped, plural, rate, seconds } from "../format.ts";
import { useChat } from "../store/chat.ts";
import type { AnswerStats, Message } from "../store/db.ts";
import { usePrefs } from "../store/prefs.ts";
import { useServer } from "../store/server.ts";
import { cardOf } from "../store/uses.ts";
import { type FoundTool, isTrusted, toolOf, trustName, useTools } from "../store/tools.ts";
import { JsonTree, parseWhole } from "./json-tree.tsx";
import { CopyButton, Markdown } from "./markdown.tsx";

interface Props {
  message: Message;
  others: Message[];
  isLast: boolean;
  /** Messages at the beginning of the branch that this answer, and not the one before, was given without. */
  forgotten: number;
}

export const MessageView = memo(
  function MessageView(props: Props) {
    const { role } = props.message;
    return (
      <Fallback text={props.message.content}>
        {role === "user" ? <UserMessage {...props} /> : role === "tool" ? <ToolResult message={props.message} /> : <Answer {...props} />}
      </Fallback>
    );
  },
  (a, b) =>
    a.message === b.message && a.isLast === b.isLast && a.forgotten === b.forgotten && a.others.length === b.others.length && a.others.at(-1)?.id === b.others.at(-1)?.id,
);

/** True while an answer of this chat is on its way: then nothing of it is changed. */
const useBusy = (message: Message) => useChat((chat) => chat.streaming[message.conversation] !== undefined);

/** Changes the text of a message: in its place, or of a turn of the person as another branch. */
function Editor({ message, label, close }: { message: Message; label: string; close: () => void }) {
  const [text, setText] = useState(message.content);
  const asked = message.role === "user";
  const can = text.trim() !== "" || (message.attachments?.length ?? 0) > 0;
  const save = () => {
    close();
    if (text !== message.content) void attempt(() => useChat.getState().edit(message, text));
  };
  const send = () => {
    close();
    void attempt(() => useChat.getState().send(text, message.attachments ?? [], message.parent));
  };
  return (
    <form
      className="edit"
      onSubmit={(event) => {
        event.preventDefault();
        if (!can) return;
        if (asked) send();
        else save();
      }}
    >
      <textarea
        className="input"
        aria-label={label}
        autoFocus
        rows={Math.min(asked ? 12 : 20, text.split("\n").length + 1)}
        value={text}
        onChange={(event) => setText(event.target.value)}
        onKeyDown={(event) => {
          if (event.key === "Escape") {
            event.preventDefault();
            close();
          }
          const submits = event.key === "Enter" && !event.nativeEvent.isComposing && (asked ? !event.shiftKey : event.ctrlKey || event.metaKey);
          if (submits) {
            event.preventDefault();
            event.currentTarget.form?.requestSubmit();
          }
        }}
      />
      <div className="row wrap">
        <span className="muted small grow">{asked ? "Send makes another branch. Save changes the message here, for later answers." : "Later answers read the changed text."}</span>
        <button type="button" className="button small" onClick={close}>
          Cancel
        </button>
        <button type={asked ? "button" : "submit"} className={`button small${asked ? "" : " primary"}`} disabled={!can} onClick={asked ? save : undefined}>
          Save
        </button>
        {asked && (
          <button type="submit" className="button primary small" disabled={!can}>
            Send
          </button>
        )}
      </div>
    </form>
  );
}

function DeleteButton({ message, what }: { message: Message; what: string }) {
  const remove = () =>
    void attempt(async () => {
      const undo = await useChat.getState().deleteMessage(message);
      toast(`The ${what} is deleted.`, { action: { name: "Undo", run: () => void attempt(undo) } });
    });
  return (
    <button type="button" className="button quiet icon small" aria-label={`Delete the ${what}`} title={`Delete the ${what} alone`} onClick={remove}>
      <Trash2 size={15} aria-hidden />
    </button>
  );
}

function UserMessage({ message, others, isLast }: Props) {
  const [editing, setEditing] = useState(false);
  const busy = useBusy(message);
  if (editing) {
    return (
      <article className="turn user editing" aria-label="Your message">
        <Editor message={message} label="Edit your message" close={() => setEditing(false)} />
      </article>
    );
  }
  return (
    <article className="turn user" aria-label="Your message">
      <div className="bubble">
        <Images message={message} />
        {message.attachments?.filter((file) => !file.image).map((file) => (
          <details key={file.name} className="attached">
            <summary>
              <FileText size={14} aria-hidden /> {file.name} <span className="muted">{count(file.text.length)} characters</span>
            </summary>
            <pre>{file.text}</pre>
          </details>
        ))}
        {message.content && <div className="said">{message.content}</div>}
      </div>
      <div className="tools">
        <Branches message={message} others={others} />
        <CopyButton text={message.content} label="Copy the message" />
        {!busy && (
          <>
            <button type="button" className="button quiet icon small" aria-label="Edit" title="Edit the message" onClick={() => setEditing(true)}>
              <PencilLine size={15} aria-hidden />
            </button>
            <DeleteButton message={message} what="message" />
          </>
        )}
        {isLast && !busy && (
          <button type="button" className="button small" onClick={() => void attempt(() => useChat.getState().regenerate(message))}>
            Answer
          </button>
        )}
      </div>
    </article>
  );
}

function Answer({ message, others, isLast, forgotten }: Props) {
  const [editing, setEditing] = useState(false);
  const busy = useBusy(message);
  // Where the message above was deleted, there is nothing to answer again.
  const answers = useChat((chat) => chat.messages.some((one) => one.id === message.parent && one.role !== "assistant"));
  const streaming = message.state === "streaming";
  const waiting = streaming && !message.content && !message.reasoning && !message.toolCalls;
  const data = !streaming && message.content ? parseWhole(message.content) : undefined;
  const [asText, setAsText] = useState(false);
  const resumable = isLast && !streaming && (message.state === "stopped" || message.state === "length" || message.state === "interrupted" || message.edited === true);
  return (
    <article className="turn answer" aria-label={`Answer of ${message.model ?? "the model"}`} aria-busy={streaming}>
      <div className="who">
        <Mark size={16} />
        <span>{message.model}</span>
      </div>
      {forgotten > 0 && (
        <p className="forgotten">
          <Scissors size={14} aria-hidden />
          <span>
            The chat no longer fits into {message.stats?.context === undefined ? "the context" : `${grouped(message.stats.context)} tokens`}; this answer was given without the{" "}
            {forgotten === 1 ? "oldest message" : `${forgotten} oldest messages`}.
          </span>
        </p>
      )}
      {message.reasoning && <Reasoning message={message} />}
      {waiting && <Waiting model={message.model} />}
      {editing ? (
        <Editor message={message} label="Edit the answer" close={() => setEditing(false)} />
      ) : data !== undefined && !asText ? (
        <div className="card body-pad">
          <JsonTree value={data} />
        </div>
      ) : (
        message.content && <Markdown text={message.content} />
      )}
      {data !== undefined && !editing && (
        <button type="button" className="button quiet small" onClick={() => setAsText(!asText)}>
          {asText ? "Show as a tree" : "Show as text"}
        </button>
      )}
      {message.toolCalls?.map((call) => <Call key={call.id} call={call} message={message} isLast={isLast} />)}
      {message.state === "failed" && (
        <div className="note bad" role="alert">
          <TriangleAlert size={16} aria-hidden />
          <span className="grow">{message.error}</span>
          {answers && !busy && (
            <button type="button" className="button small" onClick={() => void attempt(() => useChat.getState().regenerate(message))}>
              Try again
            </button>
          )}
        </div>
      )}
      {message.state === "interrupted" && (
        <div className="note">
          <TriangleAlert size={16} aria-hidden />
          <span className="grow">The answer was cut off. {message.error}</span>
        </div>
      )}
      <div className="tools">
        {streaming ? (
          <span className="sr" role="status">
            Answering
          </span>
        ) : (
          <>
            <Branches message={message} others={others} />
            <CopyButton text={message.content} label="Copy the answer" />
            {!busy && (
              <>
                {answers && (
                  <button
                    type="button"
                    className="button quiet icon small"
                    aria-label="Answer again"
                    title="Answer again: makes another branch"
                    onClick={() => void attempt(() => useChat.getState().regenerate(message))}
                  >
                    <RotateCw size={15} aria-hidden />
                  </button>
                )}
                <button type="button" className="button quiet icon small" aria-label="Edit the answer" title="Edit the answer" onClick={() => setEditing(true)}>
                  <PencilLine size={15} aria-hidden />
                </button>
                <DeleteButton message={message} what="answer" />
              </>
            )}
            {resumable && !busy && !editing && message.content && (
              <button type="button" className="button quiet small" onClick={() => void attempt(() => useChat.getState().resume(message))}>
                <CirclePlay size={15} aria-hidden />
                Continue
              </button>
            )}
            {message.stats && <Stats stats={message.stats} message={message} />}
          </>
        )}
      </div>
    </article>
  );
}

/** Progress before the first token. */
function Waiting({ model }: { model: string | undefined }) {
  const loaded = useServer((server) => cardOf(server.models, model)?.loaded);
  return <p className="waiting">{loaded ? "Reading the prompt" : `Loading ${model ?? "the model"}`}</p>;
}

function Reasoning({ message }: { message: Message }) {
  const thinking = message.state === "streaming" && !message.content;
  return (
    <details className="reasoning">
      <summary>{thinking ? "Thinking" : `Thought for ${seconds(message.reasoningSeconds ?? 0)}`}</summary>
      <div>{message.reasoning}</div>
    </details>
  );
}

/** The `2/3` of a turn that has siblings. */
function Branches({ message, others }: { message: Message; others: Message[] }) {
  if (others.length < 2) return null;
  const index = others.findIndex((other) => other.id === message.id);
  const go = (to: number) => {
    const next = others[to];
    if (next) void useChat.getState().select(next);
  };
  return (
    <span className="branches" role="group" aria-label="Branches">
      <button type="button" className="button quiet icon small" aria-label="Branch before" disabled={index <= 0} onClick={() => go(index - 1)}>
        <ChevronLeft size={15} aria-hidden />
      </button>
      <span className="num" title="Branches share the pages of everything above">
        {index + 1}/{others.length}
      </span>
      <button
        type="button"
        className="button quiet icon small"
        aria-label="Next branch"
        disabled={index >= others.length - 1}
        onClick={() => go(index + 1)}
      >
        <ChevronRight size={15} aria-hidden />
      </button>
    </span>
  );
}

function Stats({ stats, message }: { stats: AnswerStats; message: Message }) {
  const { usage } = stats;
  const { state } = message;
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const accepted = usage?.completion_tokens_details?.accepted_prediction_tokens ?? 0;
  const drafted = accepted + (usage?.completion_tokens_details?.rejected_prediction_tokens ?? 0);
  const parts = [
    message.edited ? "edited" : null,
    state === "length" ? "cut at the limit" : state === "stopped" ? "stopped" : null,
    stats.rate === undefined ? null : `${rate(stats.rate)} tok/s`,
    stats.firstToken === undefined ? null : `first token ${seconds(stats.firstToken)}`,
    usage ? plural(usage.completion_tokens, "token") : null,
  ].filter((part) => part !== null);
  if (parts.length === 0) return null;
  const first = stats.firstToken ?? stats.total;
  const share = stats.total > 0 ? (100 * first) / stats.total : 0;
  return (
    <details className="stats">
      <summary>{parts.join(" · ")}</summary>
      <div className="stats-more">
        <div className="time-bar" aria-hidden>
          <span className="before" style={{ width: `${share}%` }} />
          <span className="after" />
        </div>
        <dl>
          <dt>Until the first token</dt>
          <dd className="num">{seconds(first)}</dd>
          <dt>From then on</dt>
          <dd className="num">{seconds(Math.max(0, stats.total - first))}</dd>
          {usage && (
            <>
              <dt>Prompt</dt>
              <dd className="num">
                {cached} of {usage.prompt_tokens} tokens cached
              </dd>
              <dt>Answer</dt>
              <dd className="num">{usage.completion_tokens} tokens</dd>
              {drafted > 0 && (
                <>
                  <dt title="Tokens that earlier text predicted. Several are checked in one step; those that the model writes itself are accepted.">Drafts</dt>
                  <dd className="num">
                    {accepted} of {drafted} tokens accepted
                  </dd>
                </>
              )}
              {stats.context !== undefined && (
                <>
                  <dt>Context</dt>
                  <dd className="num">
                    {grouped(usage.prompt_tokens + usage.completion_tokens)} of {grouped(stats.context)} tokens
                  </dd>
                </>
              )}
            </>
          )}
          {stats.pages !== undefined && stats.blockSize !== undefined && (
            <>
              <dt title="A page holds the keys and values of a run of tokens. Answers with the same beginning share pages.">Pages of {stats.blockSize} tokens</dt>
              <dd className="num">
                {plural(stats.pages, "page")}, {stats.sharedPages ?? 0} shared
              </dd>
            </>
          )}
        </dl>
      </div>
    </details>
  );
}

function Call({ call, message, isLast }: { call: ToolCall; message: Message; isLast: boolean }) {
  const answered = useChat((chat) => chat.messages.some((one) => one.toolCall?.id === call.id && one.role === "tool"));
  const enabled = useChat((chat) => chat.conversations.find((one) => one.id === message.conversation)?.settings.servers);
  const { servers, known, refresh } = useTools();
  const found = toolOf(servers, enabled, call.name);
  const value = parseWhole(call.arguments);
  useEffect(() => {
    if (enabled?.length && !known) void refresh().catch(() => undefined);
  }, [enabled, known, refresh]);
  return (
    <div className="call">
      <div className="row">
        <Wrench size={15} aria-hidden />
        <span className="mono grow">{found?.tool.title ?? call.name}</span>
        {found && <span className="muted small">{found.server.name}</span>}
        <span className="tag sand">call</span>
      </div>
      {value === undefined ? <pre>{call.arguments}</pre> : <JsonTree value={value} />}
      {message.state !== "streaming" &&
        !answered &&
        (found ? <Confirm call={call} found={found} /> : <GiveResult call={call} disabled={!isLast && answered} />)}
    </div>
  );
}

/** Asks before a tool is called. */
function Confirm({ call, found }: { call: ToolCall; found: FoundTool }) {
  const running = useChat((chat) => chat.calling[call.id]);
  const [remember, setRemember] = useState(false);
  const [problem, setProblem] = useState(false);
  const { server, tool } = found;
  if (running) {
    return (
      <div className="row" role="status">
        <LoaderCircle size={15} className="spin" aria-hidden />
        <span className="grow muted">{server.name} is working</span>
        <button type="button" className="button small" onClick={() => running.abort()}>
          Cancel
        </button>
      </div>
    );
  }
  const run = () => {
    if (remember) usePrefs.getState().trustTool(trustName(server.name, tool.name), true);
    void attempt(() => useChat.getState().runTool(call)).then((fine) => setProblem(!fine));
  };
  return (
    <div className="stack">
      <p className="small muted">
        {tool.read_only ? "The tool says of itself that it changes nothing." : "The tool may change something outside of this chat."}
      </p>
      <div className="row wrap">
        {!isTrusted(found) && (
          <label className="check small grow">
            <input type="checkbox" checked={remember} onChange={(event) => setRemember(event.target.checked)} />
            Do not ask again for {tool.name}
          </label>
        )}
        <button type="button" className="button small" onClick={() => void useChat.getState().toolResult(call, "The person has declined this call.", true)}>
          Decline
        </button>
        <button type="button" className="button primary small" onClick={run}>
          <Play size={13} aria-hidden />
          {problem ? "Try again" : "Run"}
        </button>
      </div>
    </div>
  );
}

/** For tools that no server has: the person gives the result. */
function GiveResult({ call, disabled }: { call: ToolCall; disabled: boolean }) {
  const [result, setResult] = useState("");
  return (
    <form
      className="stack"
      onSubmit={(event) => {
        event.preventDefault();
        void useChat.getState().toolResult(call, result);
      }}
    >
      <textarea
        className="input"
        aria-label={`Result of ${call.name}`}
        placeholder="What the call returns. The model goes on with it."
        value={result}
        onChange={(event) => setResult(event.target.value)}
      />
      <div className="row">
        <span className="grow" />
        <button type="submit" className="button small" disabled={disabled}>
          Give the result
        </button>
      </div>
    </form>
  );
}

/** Images of a message; a click shows one in full size. */
function Images({ message }: { message: Message }) {
  const images = message.attachments?.filter((file) => file.image) ?? [];
  if (!images.length) return null;
  return (
    <div className="pictures">
      {images.map((file) => (
        <details key={file.name}>
          <summary aria-label={`Image ${file.name}`} title={file.name}>
            <img src={file.image} alt={file.name} />
          </summary>
        </details>
      ))}
    </div>
  );
}

function ToolResult({ message }: { message: Message }) {
  const value = parseWhole(message.content);
  return (
    <article className="turn answer" aria-label={`Result of ${message.toolCall?.name ?? "a tool"}`}>
      <div className={`call result${message.toolFailed ? " failed" : ""}`}>
        <div className="row">
          <Wrench size={15} aria-hidden />
          <span className="mono grow">{message.toolCall?.name}</span>
          <span className={`tag ${message.toolFailed ? "bad" : "sea"}`}>{message.toolFailed ? "failed" : "result"}</span>
        </div>
        <Images message={message} />
        {value === undefined ? (
          <pre className="tool-text" tabIndex={0}>
            {message.content}
          </pre>
        ) : (
          <JsonTree value={value} />
        )}
      </div>
    </article>
  );
}
