import { ArrowUpRight, Boxes } from "lucide-react";
import { Link } from "wouter";

import { Mark } from "../components/frame.tsx";
import { bytes } from "../format.ts";
import { useCatalogue } from "../store/catalogue.ts";
import { useServer } from "../store/server.ts";

const TALES = [
  "Tell me a story about a shy fox who lost a key",
  "Tell me a story about a little boat that was afraid of the sea",
  "Tell me a story about two friends and a magic stone",
];

const GENERAL = [
  "Explain how a page table works, with a small example",
  "Write a function that merges two sorted lists, and say what it costs",
  "Compare three ways to store time series in a table",
];

/** The beginning of a new chat: prompts that suit the model, and links. */
export function Empty({ model, send }: { model: string | null; send: (text: string) => void }) {
  const { models, memory, modelsKnown } = useServer();
  const catalogue = useCatalogue();
  const next = catalogue?.models.find((one) => one.needs <= memory.limit && !one.here);
  const others = models.filter((other) => other.name !== model && other.bytes <= memory.limit);
  if (modelsKnown && !model) {
    return (
      <div className="empty grow">
        <Boxes size={28} aria-hidden />
        <h2>There is no model here yet</h2>
        <p>Pull one by its name on the page Models.</p>
        <Link href="/models" className="button primary">
          Go to Models
        </Link>
      </div>
    );
  }
  return (
    <div className="start">
      <div className="start-inner">
        <Mark size={40} />
        <h1>What shall {model === "tales" ? "the tale be about" : "we talk about"}?</h1>
        <p className="muted">
          {model === "tales"
            ? "Tales is the small model inside of this program. It tells short stories and knows nothing else."
            : "Everything stays on this machine: the model, the chat, and what is kept of it."}
        </p>
        <div className="prompts">
          {(model === "tales" ? TALES : GENERAL).map((prompt) => (
            <button key={prompt} type="button" className="prompt" onClick={() => send(prompt)} disabled={!model}>
              <span>{prompt}</span>
              <ArrowUpRight size={16} aria-hidden />
            </button>
          ))}
        </div>
        <p className="muted small">
          {next && `${next.title} runs here, too (about ${bytes(next.needs)} of memory). `}
          {others.length > 0
            ? `Also here: ${others.slice(0, 3).map((other) => `${other.name} (${bytes(other.bytes)})`).join(", ")}. `
            : ""}
          <Link href="/models">{others.length > 0 ? "All models" : "Get a larger model for other questions"}</Link>
        </p>
      </div>
    </div>
  );
}
