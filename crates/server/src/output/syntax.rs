//! How model families write tool calls and reasoning. A family is a row of data: what its calls look like when they
//! are written, and what may stand around them when they are read.

use std::borrow::Cow;

use sha2::{Digest, Sha256};

use super::grammar::Thought;

/// A way to write tool calls.
#[derive(Debug)]
pub struct CallSyntax {
    /// Its name, for logs and errors.
    pub name: &'static str,
    /// It is the one of a chat template that contains all texts of one of these lists.
    signs: &'static [&'static [&'static str]],
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
}

const OBJECT: Layout = Layout {
    before: "",
    open: r#"{"name": ""#,
    infix: r#"", "arguments": "#,
    close: "}",
    between: ", ",
    after: "",
};

/// JSON without markers; for models whose template says nothing about tools.
pub static GENERIC: CallSyntax = CallSyntax {
    name: "json",
    signs: &[],
    layout: Layout { before: "[", after: "]", ..OBJECT },
    markers: &["<tool_call>"],
    bare: true,
    reading: Reading::Objects,
    tail: &["]", "</tool_call>", "```"],
    parallel: true,
    short_ids: false,
};

/// In the order in which templates are asked for them.
pub static SYNTAXES: &[CallSyntax] = &[
    // Mistral since tokenizer v11 (Small 3.2, Magistral, Devstral).
    CallSyntax {
        name: "mistral-args",
        signs: &[&["[TOOL_CALLS]", "[ARGS]"]],
        layout: Layout {
            before: "",
            open: "[TOOL_CALLS]",
            infix: "[ARGS]",
            close: "",
            between: "",
            after: "",
        },
        markers: &["[TOOL_CALLS]"],
        bare: false,
        reading: Reading::Either { before: &[], after: &["[CALL_ID]", "[ARGS]"] },
        tail: &["]"],
        parallel: true,
        short_ids: true,
    },
    CallSyntax {
        name: "mistral",
        signs: &[&["[TOOL_CALLS]"]],
        layout: Layout { before: "[TOOL_CALLS][", after: "]", ..OBJECT },
        markers: &["[TOOL_CALLS]"],
        bare: false,
        reading: Reading::Either { before: &[], after: &["[CALL_ID]", "[ARGS]"] },
        tail: &["]"],
        parallel: true,
        short_ids: true,
    },
    // DeepSeek V3 and R1, with their distilled models.
    DEEPSEEK,
    // DeepSeek V3.1 and later.
    CallSyntax {
        name: "deepseek-v3.1",
        signs: &[&["<｜tool▁calls▁begin｜>"]],
        layout: Layout {
            before: "<｜tool▁calls▁begin｜>",
            open: "<｜tool▁call▁begin｜>",
            infix: "<｜tool▁sep｜>",
            close: "<｜tool▁call▁end｜>",
            between: "",
            after: "<｜tool▁calls▁end｜>",
        },
        ..DEEPSEEK
    },
    CallSyntax {
        name: "kimi",
        signs: &[&["<|tool_calls_section_begin|>"]],
        layout: Layout {
            before: "<|tool_calls_section_begin|>",
            open: "<|tool_call_begin|>functions.",
            infix: ":0<|tool_call_argument_begin|>",
            close: "<|tool_call_end|>",
            between: "",
            after: "<|tool_calls_section_end|>",
        },
        markers: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
        bare: false,
        reading: Reading::Named {
            before: &["<|tool_call_begin|>", "functions."],
            after: &[":", "<|tool_call_argument_begin|>"],
        },
        tail: &["<|tool_call_end|>", "<|tool_calls_section_end|>"],
        parallel: true,
        short_ids: false,
    },
    CallSyntax {
        name: "cohere",
        signs: &[&["<|START_ACTION|>"]],
        layout: Layout {
            before: "<|START_ACTION|>[",
            open: r#"{"tool_name": ""#,
            infix: r#"", "parameters": "#,
            after: "]<|END_ACTION|>",
            ..OBJECT
        },
        markers: &["<|START_ACTION|>"],
        bare: false,
        reading: Reading::Objects,
        tail: &["]", "<|END_ACTION|>"],
        parallel: true,
        short_ids: false,
    },
    // Phi-4-mini.
    CallSyntax {
        name: "phi",
        signs: &[&["<|tool_call|>", "<|/tool_call|>"], &["<|tool|>", "<|/tool|>"]],
        layout: Layout { before: "<|tool_call|>[", after: "]<|/tool_call|>", ..OBJECT },
        markers: &["<|tool_call|>"],
        bare: false,
        reading: Reading::Objects,
        tail: &["]", "<|/tool_call|>"],
        parallel: true,
        short_ids: false,
    },
    // Granite 3.
    CallSyntax {
        name: "granite",
        signs: &[&["<|tool_call|>"]],
        layout: Layout { before: "<|tool_call|>[", after: "]", ..OBJECT },
        markers: &["<|tool_call|>", "<tool_call>"],
        bare: false,
        reading: Reading::Objects,
        tail: &["]"],
        parallel: true,
        short_ids: false,
    },
    // Hermes, Qwen 2.5 and 3, SmolLM, Granite 4.
    CallSyntax {
        name: "hermes",
        signs: &[&["<tool_call>"]],
        layout: Layout {
            open: "<tool_call>\n{\"name\": \"",
            close: "}\n</tool_call>",
            between: "\n",
            ..OBJECT
        },
        markers: &["<tool_call>"],
        bare: false,
        reading: Reading::Objects,
        tail: &["]", "</tool_call>"],
        parallel: true,
        short_ids: false,
    },
    // Functionary 3.1, and Llama 3.1 when it is taught so.
    CallSyntax {
        name: "function-tag",
        signs: &[&["<function="]],
        layout: Layout {
            before: "",
            open: "<function=",
            infix: ">",
            close: "</function>",
            between: "",
            after: "",
        },
        markers: &["<function="],
        bare: false,
        reading: Reading::Named { before: &[], after: &[">"] },
        tail: &["</function>"],
        parallel: true,
        short_ids: false,
    },
    // Llama 3.1 to 3.3: its template takes no answer with two calls.
    CallSyntax {
        name: "llama",
        signs: &[&["\"parameters\"", "ipython"], &["<|python_tag|>"]],
        layout: Layout { infix: r#"", "parameters": "#, between: "; ", ..OBJECT },
        markers: &["<|python_tag|>"],
        bare: true,
        reading: Reading::Objects,
        tail: &["]", "```", ";"],
        parallel: false,
        short_ids: false,
    },
];

const DEEPSEEK: CallSyntax = CallSyntax {
    name: "deepseek",
    signs: &[&["<｜tool▁calls▁begin｜>", "```json"]],
    layout: Layout {
        before: "<｜tool▁calls▁begin｜>",
        open: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        infix: "\n```json\n",
        close: "\n```<｜tool▁call▁end｜>",
        between: "\n",
        after: "<｜tool▁calls▁end｜>",
    },
    markers: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    bare: false,
    reading: Reading::Named {
        before: &["<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>"],
        after: &["```json", "<｜tool▁sep｜>"],
    },
    tail: &["```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
    parallel: true,
    short_ids: false,
};

/// Signs of templates that teach a way to write calls that is not read here, and its name.
const UNREAD: &[(&str, &str)] = &[
    ("<|channel|>", "harmony"),
    ("<parameter=", "XML parameters"),
    ("<arg_key>", "argument keys"),
    ("<|tool_calls_begin|>", "tool sections"),
    ("<start_function_call>", "function declarations"),
    ("<minimax:tool_call>", "invocations"),
];

/// What begins and ends reasoning.
pub(super) type Tags = (&'static str, &'static str);

const REASONING: &[Tags] = &[
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
];

/// How a model writes reasoning and calls, as far as can be told from its chat template.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    pub(super) reasoning: Option<Tags>,
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
        let reasoning = REASONING.iter().find(|(_, close)| template.contains(close)).copied();
        Self { reasoning, calls }
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
        let tags = self.reasoning.iter().flat_map(|(open, close)| [*open, *close]);
        let syntax = self.calls.unwrap_or(&GENERIC);
        let named = match syntax.reading {
            Reading::Objects => [&[][..], &[]],
            Reading::Named { before, after } | Reading::Either { before, after } => [before, after],
        };
        let lists = [syntax.markers, syntax.tail, named[0], named[1]];
        tags.chain(lists.into_iter().flatten().copied())
    }

    /// Returns the reasoning that an answer to this prompt begins with. Templates open it, leave it to the model, or write
    /// an empty one so that there is none.
    pub fn thought(&self, prompt: &str) -> Thought {
        let prompt = prompt.trim_end();
        match self.reasoning {
            Some((open, _)) if prompt.ends_with(open) => Thought::Begun,
            Some((_, close)) if !prompt.ends_with(close) => Thought::Optional,
            _ => Thought::None,
        }
    }
}
