import { ArrowUpRight, Boxes } from "lucide-react";
import { Link } from "wouter";

import { Mark } from "../components/frame.tsx";
import { bytes } from "../format.ts";
import { useCatalogue } from "../store/catalogue.ts";
import { useServer } from "../store/server.ts";
import { cardOf, chats } from "../store/uses.ts";

const TALES = [
  "Tell me a story about a shy fox who lost a key",
  "Tell me a story about a little boat that was afraid of the sea",
  "Tell me a story about two friends and a magic stone",
];

const GENERAL = [
  "Explain how vaccines work, as to a curious child",
  "Write a short, friendly mail that moves a meeting to Thursday",
  "Write a Python function that finds duplicate files in a folder",
];

/** The beginning of a new chat: prompts that suit the model, and links. */
export function Empty({ model, blocked, send }: { model: string | null; blocked: boolean; send: (text: string) => void }) {
  const { models, memory, modelsKnown, session } = useServer();
  const catalogue = useCatalogue();
  const next = catalogue?.models.find((one) => one.needs <= memory.limit && !one.here);
  const card = cardOf(models, model);
  const others = models.filter((other) => other !== card && chats(other) && other.bytes <= memory.limit);
  const isTales = card ? card.built_in : model === "tales";
  if (modelsKnown && !model) {
    return (
      <div className="empty grow">
        <Boxes size={28} aria-hidden />
        <h2>There is no model to chat with yet</h2>
        <p>Pull one by its name on the page Models.</p>
        <Link href="/models" className="button primary">
          Go to Models
        </Link>
      </div>
    );
  }
  // Which prompts suit is known with the models: until then nothing moves under the pointer.
  if (!modelsKnown && (!session || session.scopes.includes("inference"))) return <div className="grow" />;
  return (
    <div className="start">
      <div className="start-inner">
        <Mark size={40} />
        <h1>What shall {isTales ? "the tale be about" : "we talk about"}?</h1>
        <p className="muted">
          {isTales
            ? "Tales is the small model inside of this program. It tells short stories and knows nothing else: ask for “a story about …”."
            : "Everything stays on this machine: the model, the chat, and what is kept of it."}
        </p>
        <div className="prompts">
          {(isTales ? TALES : GENERAL).map((prompt) => (
            <button key={prompt} type="button" className="prompt" onClick={() => send(prompt)} disabled={!model || blocked}>
              <span>{prompt}</span>
              <ArrowUpRight size={16} aria-hidden />
            </button>
          ))}
        </div>
        <p className="muted small">
          {next && `${next.title} runs here as well (about ${bytes(next.needs)} of memory). `}
          {others.length > 0
            ? `Also here: ${others.slice(0, 3).map((other) => `${other.name} (${bytes(other.bytes)})`).join(", ")}. `
            : ""}
          <Link href="/models">{others.length > 0 ? "All models" : "Get a larger model for other questions"}</Link>
        </p>
      </div>
    </div>
  );
}
