//! Syntaxes of tool calls and reasoning, and their detection in chat templates. `families.rs` has the syntax of each
//! family.

use std::borrow::Cow;

use sha2::{Digest, Sha256};

use super::{
    braces, channels,
    families::{GENERIC, SYNTAXES},
    grammar::Thought,
};

/// Syntax of tool calls.
#[derive(Debug)]
pub struct CallSyntax {
    /// Its name.
    pub name: &'static str,
    /// Signs in chat templates: the syntax applies if a template contains all texts of one of these lists.
    pub(super) signs: &'static [&'static [&'static str]],
    pub(super) layout: Layout,
    /// Texts that begin a call anywhere.
    pub(super) markers: &'static [&'static str],
    /// True if an answer that begins with a JSON object, or with an array of them, is calls.
    pub(super) bare: bool,
    pub(super) reading: Reading,
    /// Texts that may follow a call and belong to it, in order.
    pub(super) tail: &'static [&'static str],
    /// True if an answer may have several calls.
    pub parallel: bool,
    /// True if ids of calls have nine characters.
    pub(super) short_ids: bool,
    /// Texts around answers, if reasoning and answer are separate messages.
    pub(super) frame: Option<Frame>,
}

/// Texts around the parts of an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    /// Text before an answer without calls.
    pub answer: &'static str,
    /// Text after reasoning; it begins the next part.
    pub next: &'static str,
}

/// Text of calls as the model was trained: `before (open NAME infix ARGUMENTS close)+ after`, with `between` between
/// calls.
#[derive(Debug)]
pub(super) struct Layout {
    pub before: &'static str,
    pub open: &'static str,
    pub infix: &'static str,
    pub close: &'static str,
    pub between: &'static str,
    pub after: &'static str,
}

/// Text after a marker.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reading {
    /// JSON objects with name and arguments, alone or in an array.
    Objects,
    /// A name, after the texts of `before` that are present and up to the first of `after`; then the arguments as a
    /// JSON object. The call's id may stand between two of `after`.
    Named { before: &'static [&'static str], after: &'static [&'static str] },
    /// `Named` or `Objects`.
    Either { before: &'static [&'static str], after: &'static [&'static str] },
    /// A name, and each argument between marks; or `Objects`.
    Elements(&'static Elements),
    /// `call:`, a name, and the arguments in braces, see [`braces`].
    Braces,
    /// Python syntax: a name, and keyword arguments in parentheses.
    Keywords,
    /// A message whose header names the tool and whose body is the arguments as a JSON object (Harmony).
    Channels,
}

/// Marks of a call with separate arguments: `before NAME name_end (key.0 KEY key.1 gap value.0 VALUE value.1 "\n")*
/// end`. For a string parameter, the value is the text itself, otherwise JSON.
#[derive(Debug)]
pub(super) struct Elements {
    /// Optional texts before the name.
    pub before: &'static [&'static str],
    /// Text after the name: one of these, the first key, or the end.
    pub name_ends: &'static [&'static str],
    pub key: (&'static str, &'static str),
    pub gap: &'static str,
    pub value: (&'static str, &'static str),
    /// Text after the arguments: one of these.
    pub ends: &'static [&'static str],
}

/// Signs and names of call syntaxes that are not supported.
const UNREAD: &[(&str, &str)] = &[
    ("<|tool_calls_begin|>", "tool sections"),
    ("<start_function_call>", "function declarations"),
    ("｜DSML｜", "DSML"),
];

/// Texts that begin and end reasoning.
pub(super) type Tags = (&'static str, &'static str);

const REASONING: &[Tags] = &[
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    // Gemma 4.
    ("<|channel>thought", "<channel|>"),
];

/// Tags of Harmony: a message of the channel for analysis.
pub(super) const ANALYSIS: Tags = ("<|channel|>analysis<|message|>", "<|end|>");

/// Tags around the answer after reasoning, by signs of the chat template.
const ANSWERS: &[(&[&str], Tags)] = &[
    // Granite 3, ERNIE 4.5.
    (&["<response></response>", "<response>\\n"], ("<response>", "</response>")),
    // Hunyuan.
    (&["<answer>\\n"], ("<answer>", "</answer>")),
];

/// A model's syntax of reasoning and calls, derived from its chat template.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    pub(super) reasoning: Option<Tags>,
    /// Optional tags around the answer.
    pub(super) answer: Option<Tags>,
    pub(super) calls: Result<&'static CallSyntax, UnreadCalls>,
}

/// The chat template uses a call syntax that is not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "tools cannot be used with this model: its chat template writes tool calls as {0}, which is not supported"
)]
pub struct UnreadCalls(&'static str);

impl Format {
    /// Detects the format of a chat template; a model without a template has the generic format.
    pub fn detect(template: &str) -> Self {
        let has = |text: &&str| template.contains(*text);
        let is_of = |syntax: &&CallSyntax| syntax.signs.iter().any(|signs| signs.iter().all(has));
        let unread = UNREAD.iter().find(|(sign, _)| has(sign));
        let calls = match unread {
            Some(&(_, name)) => Err(UnreadCalls(name)),
            None => Ok(SYNTAXES.iter().find(is_of).unwrap_or(&GENERIC)),
        };
        let reasoning = match calls {
            Ok(CallSyntax { reading: Reading::Channels, .. }) => Some(ANALYSIS),
            _ => REASONING.iter().find(|(_, close)| template.contains(close)).copied(),
        };
        let answer = ANSWERS.iter().find(|(signs, _)| signs.iter().any(has)).map(|(_, tags)| *tags);
        Self { reasoning, answer: answer.filter(|_| reasoning.is_some()), calls }
    }

    /// Returns the texts around the parts of an answer, if each is a message.
    pub(super) fn frame(&self) -> Option<Frame> {
        self.calls.ok().and_then(|syntax| syntax.frame)
    }

    /// Returns true if text of the answer may follow this prompt directly, without a message header.
    pub fn in_answer(&self, prompt: &str) -> bool {
        self.frame().is_none_or(|frame| !prompt.trim_end().ends_with(frame.next))
    }

    /// Returns the text that ends reasoning at a limit.
    pub fn closing(&self) -> Option<String> {
        let (_, close) = self.reasoning?;
        Some(match self.frame() {
            Some(Frame { answer, next }) => [close, next, answer].concat(),
            // On a line of its own, as models write it.
            None if close.starts_with("</") => format!("\n{close}\n\n"),
            None => close.to_owned(),
        })
    }

    /// Returns the syntax of calls.
    ///
    /// # Errors
    /// [`UnreadCalls`]: requests with tools must be refused.
    pub fn calls(&self) -> Result<&'static CallSyntax, UnreadCalls> {
        self.calls
    }

    /// Returns the id of a call in the form that the chat template accepts: Mistral's template requires nine letters or
    /// digits.
    pub fn call_id<'i>(&self, id: &'i str) -> Cow<'i, str> {
        let short = self.calls.is_ok_and(|syntax| syntax.short_ids);
        if !short || (id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric())) {
            return id.into();
        }
        let digest = Sha256::digest(id);
        digest.iter().take(9).map(|byte| char::from(b'a' + byte % 26)).collect()
    }

    /// Returns the texts that begin and end reasoning.
    pub fn tags(&self) -> Option<(&'static str, &'static str)> {
        self.reasoning
    }

    /// Returns true if the model may write reasoning before its answer.
    pub fn reasons(&self) -> bool {
        self.reasoning.is_some()
    }

    /// Returns the texts that the parser needs. Decoding must show those that are control tokens.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        let tags = self.reasoning.into_iter().chain(self.answer).flat_map(|(open, close)| [open, close]);
        let syntax = self.calls.unwrap_or(&GENERIC);
        let named = match syntax.reading {
            Reading::Objects | Reading::Keywords => [&[][..], &[]],
            Reading::Braces => [&[braces::QUOTE][..], &[]],
            Reading::Named { before, after } | Reading::Either { before, after } => [before, after],
            Reading::Elements(elements) => [elements.before, elements.ends],
            Reading::Channels => [channels::MARKS, &[]],
        };
        let pairs = match syntax.reading {
            Reading::Elements(Elements { key, value, name_ends, .. }) => {
                [&[key.0, key.1, value.0, value.1][..], name_ends].concat()
            }
            _ => Vec::new(),
        };
        let lists = [syntax.markers, syntax.tail, named[0], named[1]];
        let all = tags.chain(lists.into_iter().flatten().copied()).chain(pairs);
        all.map(str::trim).filter(|marker| !marker.is_empty())
    }

    /// Returns the reasoning at the beginning of an answer to this prompt. Templates open it, leave it to the model, or
    /// disable it by an empty one.
    pub fn thought(&self, prompt: &str) -> Thought {
        let prompt = prompt.trim_end();
        match self.reasoning {
            Some((open, _)) if prompt.ends_with(open) => Thought::Begun,
            _ if self.frame().is_some() && self.in_answer(prompt) => Thought::None,
            Some((_, close)) if !prompt.ends_with(close) => Thought::Optional,
            _ => Thought::None,
        }
    }
}
