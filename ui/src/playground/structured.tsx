// Answers that follow a schema, an expression, a list of choices or a grammar.

import { useMemo, useState } from "react";

import { json } from "../api/client.ts";
import { JsonTree, parseWhole } from "../chat/json-tree.tsx";
import { Layout, Text, useRun } from "./bench.tsx";

interface Chat {
  choices: { message: { content: string | null }; finish_reason: string }[];
}

type Kind = "schema" | "grammar" | "regex" | "choice";

interface KindInfo {
  name: string;
  label: string;
  example: string;
  help: string;
}

const SCHEMA = {
  type: "object",
  properties: {
    hero: { type: "string", maxLength: 30 },
    kind: { enum: ["fox", "crab", "bear"] },
    age: { type: "integer", minimum: 1, maximum: 99 },
  },
  required: ["hero", "kind", "age"],
};

const KINDS: Record<Kind, KindInfo> = {
  schema: { name: "JSON schema", label: "JSON schema", example: JSON.stringify(SCHEMA, null, 2), help: "The answer is JSON that the schema validates." },
  grammar: {
    name: "Grammar",
    label: "Grammar in GBNF or Lark",
    example: 'root ::= hero " is " age " years old."\nhero ::= "The fox" | "The crab"\nage ::= [1-9] [0-9]?',
    help: "Texts in quotes, classes in brackets, rules by their names. The answer is what the rule root derives (GBNF, with ::=), or the rule start (Lark, with a colon).",
  },
  regex: { name: "Expression", label: "Regular expression", example: "(red|blue|green) [0-9]{2}", help: "It matches the answer as a whole. Look-around is not supported." },
  choice: { name: "Choices", label: "Answers, one a line", example: "yes\nno\nperhaps", help: "The answer is one of these texts." },
};

/** Fields of a request that say what the answer must be. */
function rules(kind: Kind, text: string): Record<string, unknown> {
  if (kind === "schema") return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: parseWhole(text), strict: true } } };
  const value = kind === "choice" ? text.split("\n").filter((line) => line.trim()) : text;
  return { structured_outputs: { [kind]: value } };
}

export function StructuredTab({ model }: { model: string }) {
  const [prompt, setPrompt] = useState("Who is the hero of the story?");
  const [kind, setKind] = useState<Kind>("schema");
  const [texts, setTexts] = useState(() => Object.fromEntries(Object.entries(KINDS).map(([name, { example }]) => [name, example])) as Record<Kind, string>);
  const run = useRun<Chat & { kind: Kind }>();
  const text = texts[kind];
  const isBroken = kind === "schema" && parseWhole(text) === undefined;
  const body = useMemo(() => ({ model, messages: [{ role: "user", content: prompt }], max_tokens: 400, ...rules(kind, text) }), [model, prompt, kind, text]);
  const go = () =>
    run.run(async (signal) => {
      if (isBroken) throw new Error('The schema is not JSON. A schema is an object: {"type": "object", …}.');
      return { ...(await json<Chat>("/v1/chat/completions", { body, signal })), kind };
    });
  const choice = run.result?.choices[0];
  const content = choice?.message.content ?? "";
  const value = parseWhole(content);
  const isWhole = choice?.finish_reason === "stop";
  const shown = run.result?.kind ?? kind;
  return (
    <Layout
      path="/v1/chat/completions"
      body={body}
      run={run}
      go={go}
      left={
        <>
          <Text label="Question" value={prompt} set={setPrompt} rows={2} />
          <div className="tabs small-tabs" role="group" aria-label="What the answer must be">
            {(Object.keys(KINDS) as Kind[]).map((one) => (
              <button key={one} type="button" aria-pressed={kind === one} onClick={() => setKind(one)}>
                {KINDS[one].name}
              </button>
            ))}
          </div>
          <Text key={kind} label={KINDS[kind].label} value={text} set={(next) => setTexts({ ...texts, [kind]: next })} rows={12} mono />
          {isBroken ? <p className="problem small">This is not JSON yet.</p> : <p className="muted small">{KINDS[kind].help}</p>}
        </>
      }
      right={
        <>
          <p className="row wrap">
            {isWhole ? (
              <span className="tag sea">fits the {shown === "schema" ? "schema" : KINDS[shown].name.toLowerCase()}</span>
            ) : (
              <span className="tag sand">not whole: ended by {choice?.finish_reason}</span>
            )}
            <span className="muted small">Every token was drawn from those that it allows.</span>
          </p>
          {value === undefined ? <pre className="rendered">{content}</pre> : <JsonTree value={value} />}
        </>
      }
    />
  );
}
