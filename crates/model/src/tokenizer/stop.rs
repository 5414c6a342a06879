//! Tokens that are known by their names. Files do not always say which tokens end a turn, or say that such a token is
//! ordinary text; llama.cpp recognizes these names (`llama-vocab.cpp`), and so do we.

use super::vocab::{TokenKind, Vocab};

/// End a text, a turn or a message.
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

/// The same, but the names are also those of ordinary text: only where the file says that they are control tokens.
const ENDS_IF_CONTROL: &[&str] = &["</s>", "<eos>"];

/// Tokens of fill-in-the-middle prompts after which a model has gone past its text.
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

/// Makes control tokens of all that are known to be, whatever the file says.
pub(super) fn mark_control(vocab: &mut Vocab) {
    for name in [ENDS, FILL_ENDS, FILL].into_iter().flatten() {
        if let Some(id) = vocab.find(name.as_bytes()) {
            vocab.set_kind(id, TokenKind::Control);
        }
    }
    // Phi-3 kept Llama's end of text but calls it text; to Gemma, `</s>` is HTML.
    let kind = |vocab: &Vocab, name: &str| vocab.find(name.as_bytes()).and_then(|id| vocab.kind(id));
    if kind(vocab, "<s>") == Some(TokenKind::Control)
        && kind(vocab, "</s>") == Some(TokenKind::UserDefined)
        && let Some(id) = vocab.find(b"</s>")
    {
        vocab.set_kind(id, TokenKind::Control);
    }
}

/// The tokens that end generation: `named` by the file, and those known by name. Sorted.
pub(super) fn stop_tokens(vocab: &Vocab, named: impl IntoIterator<Item = u32>) -> Vec<u32> {
    let find = |name: &str| vocab.find(name.as_bytes());
    let known = [ENDS, FILL_ENDS, ENDS_IF_CONTROL].into_iter().flatten().filter_map(|name| find(name));
    let known = known.filter(|&id| vocab.kind(id) == Some(TokenKind::Control));
    let mut ids: Vec<u32> =
        named.into_iter().filter(|&id| (id as usize) < vocab.len()).chain(known).collect();
    // Where messages have their own ends, `<|end|>` only ends one of several (Harmony, Solar).
    let has = |name: &str| find(name).is_some_and(|id| ids.contains(&id));
    if (has("<|return|>") && has("<|call|>")) || (has("<|calls|>") && has("<|flush|>")) {
        let end = find("<|end|>");
        ids.retain(|&id| Some(id) != end);
    }
    ids.sort_unstable();
    ids.dedup();
    ids
}
