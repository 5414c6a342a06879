//! How models write tool calls and reasoning: the kinds that there are, and which of them a chat template teaches. The families
//! are in `families.rs`.

use std::borrow::Cow;

use sha2::{Digest, Sha256};

use super::{
    braces, channels,
    families::{GENERIC, SYNTAXES},
    grammar::Thought,
};

/// A way to write tool calls.
#[derive(Debug)]
pub struct CallSyntax {
    /// Its name, for logs and errors.
    pub name: &'static str,
    /// It is the one of a chat template that contains all texts of one of these lists.
    pub(super) signs: &'static [&'static [&'static str]],
    pub(super) layout: Layout,
    /// Texts that begin a call wherever they stand.
    pub(super) markers: &'static [&'static str],
    /// Whether an answer that begins with a JSON object, or with an array of them, is calls.
    pub(super) bare: bool,
    pub(super) reading: Reading,
    /// What may stand after a call and belongs to it, in this order.
    pub(super) tail: &'static [&'static str],
    /// Whether an answer may have more than one call.
    pub parallel: bool,
    /// Whether ids of calls have nine characters.
    pub(super) short_ids: bool,
    /// What stands around answers, where reasoning and answer are messages of their own.
    pub(super) frame: Option<Frame>,
}

/// What stands around the parts of an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame {
    /// Begins an answer without calls.
    pub answer: &'static str,
    /// Follows the end of reasoning, and begins the next part.
    pub next: &'static str,
}

/// The text of calls, as the model is taught it: `before (open NAME infix ARGUMENTS close)+ after`, with `between`
/// between the calls.
#[derive(Debug)]
pub(super) struct Layout {
    pub before: &'static str,
    pub open: &'static str,
    pub infix: &'static str,
    pub close: &'static str,
    pub between: &'static str,
    pub after: &'static str,
}

/// What stands after a marker.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reading {
    /// JSON objects with name and arguments, alone or in an array.
    Objects,
    /// A name, after all of `before` that is there and up to the first of `after`; then the arguments as a JSON
    /// object. Between two of `after` may stand the call's id.
    Named { before: &'static [&'static str], after: &'static [&'static str] },
    /// As `Named`, or `Objects`.
    Either { before: &'static [&'static str], after: &'static [&'static str] },
    /// A name, and the arguments one by one between marks; or `Objects`.
    Elements(&'static Elements),
    /// `call:`, a name, and the arguments in braces, see [`braces`].
    Braces,
    /// As in Python: a name, and the arguments by keyword in parentheses.
    Keywords,
    /// A message whose header names the tool and whose body is the arguments as a JSON object (Harmony).
    Channels,
}

/// The marks of a call whose arguments stand one by one: `before NAME name_end (key.0 KEY key.1 gap value.0 VALUE value.1 "\n")* end`.
/// Where a parameter takes text, the value is the text as it is, otherwise JSON.
#[derive(Debug)]
pub(super) struct Elements {
    /// Before the name, where they are there.
    pub before: &'static [&'static str],
    /// After the name: one of these, or the first key, or the end.
    pub name_ends: &'static [&'static str],
    pub key: (&'static str, &'static str),
    pub gap: &'static str,
    pub value: (&'static str, &'static str),
    /// After the arguments: one of these.
    pub ends: &'static [&'static str],
}

/// Signs of templates that teach a way to write calls that is not read here, and its name.
const UNREAD: &[(&str, &str)] = &[
    ("<|tool_calls_begin|>", "tool sections"),
    ("<start_function_call>", "function declarations"),
    ("｜DSML｜", "DSML"),
];

/// What begins and ends reasoning.
pub(super) type Tags = (&'static str, &'static str);

const REASONING: &[Tags] = &[
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    // Gemma 4.
    ("<|channel>thought", "<channel|>"),
];

/// Harmony's: a message of the channel for analysis.
pub(super) const ANALYSIS: Tags = ("<|channel|>analysis<|message|>", "<|end|>");

/// What stands around the answer after reasoning, by what the chat template says of it.
const ANSWERS: &[(&[&str], Tags)] = &[
    // Granite 3, ERNIE 4.5.
    (&["<response></response>", "<response>\\n"], ("<response>", "</response>")),
    // Hunyuan.
    (&["<answer>\\n"], ("<answer>", "</answer>")),
];

/// How a model writes reasoning and calls, as far as can be told from its chat template.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    pub(super) reasoning: Option<Tags>,
    /// What may stand around the answer.
    pub(super) answer: Option<Tags>,
    pub(super) calls: Result<&'static CallSyntax, UnreadCalls>,
}

/// The chat template teaches a way to write calls that is not read here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "tools cannot be used with this model: its chat template has tool calls written as {0}, which is not read"
)]
pub struct UnreadCalls(&'static str);

impl Format {
    /// What a chat template says of it; a model without a template has the generic form.
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

    /// What stands around the parts of an answer, where each is a message.
    pub(super) fn frame(&self) -> Option<Frame> {
        self.calls.ok().and_then(|syntax| syntax.frame)
    }

    /// Whether text of an answer may follow this prompt, and not only the header of a message.
    pub fn in_answer(&self, prompt: &str) -> bool {
        self.frame().is_none_or(|frame| !prompt.trim_end().ends_with(frame.next))
    }

    /// The text that ends reasoning where a limit cuts it.
    pub fn closing(&self) -> Option<String> {
        let (_, close) = self.reasoning?;
        Some(match self.frame() {
            Some(Frame { answer, next }) => [close, next, answer].concat(),
            // A line of its own, as models write it.
            None if close.starts_with("</") => format!("\n{close}\n\n"),
            None => close.to_owned(),
        })
    }

    /// How calls are written.
    ///
    /// # Errors
    /// [`UnreadCalls`]: requests with tools are to be refused.
    pub fn calls(&self) -> Result<&'static CallSyntax, UnreadCalls> {
        self.calls
    }

    /// The id of a call as the chat template takes it: Mistral's refuse all that have not nine letters or digits.
    pub fn call_id<'i>(&self, id: &'i str) -> Cow<'i, str> {
        let short = self.calls.is_ok_and(|syntax| syntax.short_ids);
        if !short || (id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric())) {
            return id.into();
        }
        let digest = Sha256::digest(id);
        digest.iter().take(9).map(|byte| char::from(b'a' + byte % 26)).collect()
    }

    /// The texts that begin and end reasoning.
    pub fn tags(&self) -> Option<(&'static str, &'static str)> {
        self.reasoning
    }

    /// Whether the model may write reasoning before its answer.
    pub fn reasons(&self) -> bool {
        self.reasoning.is_some()
    }

    /// The texts that steer reading. Where one is a control token, decoding must show it: hidden, it could not be
    /// found.
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

    /// Returns the reasoning that an answer to this prompt begins with. Templates open it, leave it to the model, or write
    /// an empty one so that there is none.
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
