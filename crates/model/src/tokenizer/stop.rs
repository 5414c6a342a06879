//! Tokens recognised by name. Files do not always mark tokens that end a turn, or mark them as ordinary text; the names
//! are those of llama.cpp (`llama-vocab.cpp`).

use super::vocab::{TokenKind, Vocab};

/// Tokens that end a text, a turn or a message.
const ENDS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Names that are also ordinary text; they end a text only if the file marks them as control tokens.
const ENDS_IF_CONTROL: &[&str] = &["</s>", "<eos>"];

/// Tokens of fill-in-the-middle prompts that end the text in a gap.
const FILL_ENDS: &[&str] = &[
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// The other tokens of fill-in-the-middle prompts.
const FILL: &[&str] = &[
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
    "<|prefix|>",
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
    "<|suffix|>",
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "<|code_middle|>",
    "<|middle|>",
];

/// Marks all known control tokens, regardless of the file.
pub(super) fn mark_control(vocab: &mut Vocab) {
    for name in [ENDS, FILL_ENDS, FILL].into_iter().flatten() {
        if let Some(id) = vocab.find(name.as_bytes()) {
            vocab.set_kind(id, TokenKind::Control);
        }
    }
    // Phi-3 kept Llama's end of text as ordinary text; for Gemma, `</s>` is HTML.
    let kind = |vocab: &Vocab, name: &str| vocab.find(name.as_bytes()).and_then(|id| vocab.kind(id));
    if kind(vocab, "<s>") == Some(TokenKind::Control)
        && kind(vocab, "</s>") == Some(TokenKind::UserDefined)
        && let Some(id) = vocab.find(b"</s>")
    {
        vocab.set_kind(id, TokenKind::Control);
    }
}

/// Returns the tokens that end generation: `named` by the file, and those known by name. Sorted.
pub(super) fn stop_tokens(vocab: &Vocab, named: impl IntoIterator<Item = u32>) -> Vec<u32> {
    let find = |name: &str| vocab.find(name.as_bytes());
    let known = [ENDS, FILL_ENDS, ENDS_IF_CONTROL].into_iter().flatten().filter_map(|name| find(name));
    let known = known.filter(|&id| vocab.kind(id) == Some(TokenKind::Control));
    let mut ids: Vec<u32> =
        named.into_iter().filter(|&id| (id as usize) < vocab.len()).chain(known).collect();
    // If messages have their own ends, `<|end|>` ends only one of several messages (Harmony, Solar).
    let has = |name: &str| find(name).is_some_and(|id| ids.contains(&id));
    if (has("<|return|>") && has("<|call|>")) || (has("<|calls|>") && has("<|flush|>")) {
        let end = find("<|end|>");
        ids.retain(|&id| Some(id) != end);
    }
    ids.sort_unstable();
    ids.dedup();
    ids
}
