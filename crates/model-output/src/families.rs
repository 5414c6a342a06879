//! Syntax of tool calls by model family, as data: the layout for writing calls, and the marks for reading them.
//! Source: the chat templates of the models.

use super::syntax::{CallSyntax, Elements, Frame, Layout, Reading};

/// Fields that most families share; each row sets the others.
const BASE: CallSyntax = CallSyntax {
    name: "",
    signs: &[],
    layout: OBJECT,
    markers: &[],
    bare: false,
    reading: Reading::Objects,
    tail: &[],
    parallel: true,
    short_ids: false,
    frame: None,
};

/// A layout without texts.
const PLAIN: Layout = Layout { before: "", open: "", infix: "", close: "", between: "", after: "" };

/// A JSON object with name and arguments.
const OBJECT: Layout =
    Layout { open: r#"{"name": ""#, infix: r#"", "arguments": "#, close: "}", between: ", ", ..PLAIN };

/// JSON without markers, for templates without tools.
pub(super) static GENERIC: CallSyntax = CallSyntax {
    name: "json",
    layout: Layout { before: "[", after: "]", ..OBJECT },
    markers: &["<tool_call>"],
    bare: true,
    tail: &["]", "</tool_call>", "```"],
    ..BASE
};

/// All syntaxes. The first one with all its signs in a template applies.
pub(super) static SYNTAXES: &[CallSyntax] = &[
    // Gemma 4.
    CallSyntax {
        name: "gemma",
        signs: &[&["<|tool_call>call:"]],
        layout: Layout { open: "<|tool_call>call:", infix: "{", close: "}<tool_call|>", ..PLAIN },
        markers: &["<|tool_call>"],
        reading: Reading::Braces,
        tail: &["<tool_call|>"],
        ..BASE
    },
    // gpt-oss: every message has a channel.
    CallSyntax {
        name: "harmony",
        signs: &[&["<|channel|>", "<|message|>"]],
        layout: Layout {
            open: "<|channel|>commentary to=functions.",
            infix: " <|constrain|>json<|message|>",
            close: "<|call|>",
            between: "<|start|>assistant",
            ..PLAIN
        },
        markers: &["<|channel|>"],
        reading: Reading::Channels,
        parallel: false,
        frame: Some(Frame { answer: "<|channel|>final<|message|>", next: "<|start|>assistant" }),
        ..BASE
    },
    // MiniMax M2.
    CallSyntax {
        name: "minimax",
        signs: &[&["<minimax:tool_call>"]],
        layout: Layout {
            before: "<minimax:tool_call>\n",
            open: "<invoke name=\"",
            infix: "\">\n",
            close: "</invoke>\n",
            after: "</minimax:tool_call>",
            ..PLAIN
        },
        markers: &["<minimax:tool_call>", "<invoke name="],
        reading: Reading::Elements(&Elements {
            before: &["<invoke name="],
            name_ends: &[">"],
            key: ("<parameter name=\"", "\">"),
            gap: "",
            value: ("", "</parameter>"),
            ends: &["</invoke>", "</minimax:tool_call>"],
        }),
        tail: &["</minimax:tool_call>"],
        ..BASE
    },
    // Seed-OSS.
    CallSyntax {
        name: "seed",
        signs: &[&["<seed:tool_call>"]],
        layout: Layout {
            open: "<seed:tool_call>\n<function=",
            infix: ">\n",
            close: "</function>\n</seed:tool_call>",
            between: "\n",
            ..PLAIN
        },
        markers: &["<seed:tool_call>", "<function="],
        reading: Reading::Elements(&Elements {
            value: ("", "</parameter>"),
            ends: &["</function>", "</seed:tool_call>"],
            ..FUNCTION_ELEMENTS
        }),
        tail: &["</seed:tool_call>"],
        ..BASE
    },
    // Qwen3-Coder, Qwen3.5, Nemotron 3.
    CallSyntax {
        name: "function-elements",
        signs: &[&["<parameter="]],
        layout: Layout {
            open: "<tool_call>\n<function=",
            infix: ">\n",
            close: "</function>\n</tool_call>",
            between: "\n",
            ..PLAIN
        },
        markers: &["<tool_call>", "<function="],
        reading: Reading::Elements(&FUNCTION_ELEMENTS),
        tail: &["</tool_call>"],
        ..BASE
    },
    // Hunyuan V3: like GLM, with a mark after the name.
    CallSyntax {
        name: "hunyuan-elements",
        signs: &[&["<tool_sep>", "<arg_key>"]],
        layout: Layout {
            before: "<tool_calls>\n",
            open: "<tool_call>",
            infix: "<tool_sep>\n",
            close: "</tool_call>\n",
            after: "</tool_calls>",
            ..PLAIN
        },
        markers: &["<tool_calls>", "<tool_call>"],
        reading: Reading::Elements(&Elements { before: &["<tool_call>"], ..KEY_ELEMENTS }),
        tail: &["</tool_calls>"],
        ..BASE
    },
    // GLM 4.5 and later.
    CallSyntax {
        name: "glm",
        signs: &[&["<arg_key>"]],
        layout: Layout { open: "<tool_call>", infix: "\n", close: "</tool_call>", between: "\n", ..PLAIN },
        markers: &["<tool_call>"],
        reading: Reading::Elements(&KEY_ELEMENTS),
        tail: &["</tool_call>"],
        ..BASE
    },
    // GLM-4-0414: a name on a line of its own.
    CallSyntax {
        name: "glm-lines",
        signs: &[&["<|observation|>", "metadata"]],
        layout: Layout { infix: "\n", between: "\n", ..PLAIN },
        reading: Reading::Named { before: &[], after: &["\n"] },
        parallel: false,
        ..BASE
    },
    // OLMo 3.
    CallSyntax {
        name: "olmo",
        signs: &[&["<function_calls>"]],
        layout: Layout {
            before: "<function_calls>\n",
            infix: "(",
            close: ")",
            between: "\n",
            after: "\n</function_calls>",
            ..PLAIN
        },
        markers: &["<function_calls>"],
        reading: Reading::Keywords,
        tail: &["</function_calls>"],
        ..BASE
    },
    // LFM2.
    CallSyntax {
        name: "lfm",
        signs: &[&["<|tool_call_start|>"]],
        layout: Layout {
            before: "<|tool_call_start|>[",
            infix: "(",
            close: ")",
            between: ", ",
            after: "]<|tool_call_end|>",
            ..PLAIN
        },
        markers: &["<|tool_call_start|>"],
        reading: Reading::Keywords,
        tail: &["]", "<|tool_call_end|>"],
        ..BASE
    },
    // Nemotron.
    CallSyntax {
        name: "nemotron",
        signs: &[&["<TOOLCALL>"]],
        layout: Layout { before: "<TOOLCALL>[", after: "]</TOOLCALL>", ..OBJECT },
        markers: &["<TOOLCALL>"],
        tail: &["]", "</TOOLCALL>"],
        ..BASE
    },
    // Hunyuan's dense models.
    CallSyntax {
        name: "hunyuan-blocks",
        signs: &[&["<tool_sep>"]],
        layout: Layout {
            before: "<tool_calls>",
            open: "<tool_call>function<tool_sep>",
            infix: "\n```json\n",
            close: "\n```</tool_call>",
            between: "\n",
            after: "</tool_calls>",
        },
        markers: &["<tool_calls>", "<tool_call>"],
        reading: Reading::Named {
            before: &["<tool_call>", "function<tool_sep>"],
            after: &["```json", "<tool_sep>"],
        },
        tail: &["```", "</tool_call>", "</tool_calls>"],
        ..BASE
    },
    // Hunyuan A13B.
    CallSyntax {
        name: "hunyuan",
        signs: &[&["<tool_calls>"]],
        layout: Layout { before: "<tool_calls>[", after: "]</tool_calls>", ..OBJECT },
        markers: &["<tool_calls>"],
        tail: &["]", "</tool_calls>"],
        ..BASE
    },
    // Mistral since tokenizer v11 (Small 3.2, Magistral, Devstral).
    CallSyntax {
        name: "mistral-args",
        signs: &[&["[TOOL_CALLS]", "[ARGS]"]],
        layout: Layout { open: "[TOOL_CALLS]", infix: "[ARGS]", ..PLAIN },
        markers: &["[TOOL_CALLS]"],
        reading: Reading::Either { before: &[], after: &["[CALL_ID]", "[ARGS]"] },
        tail: &["]"],
        short_ids: true,
        ..BASE
    },
    CallSyntax {
        name: "mistral",
        signs: &[&["[TOOL_CALLS]"]],
        layout: Layout { before: "[TOOL_CALLS][", after: "]", ..OBJECT },
        markers: &["[TOOL_CALLS]"],
        reading: Reading::Either { before: &[], after: &["[CALL_ID]", "[ARGS]"] },
        tail: &["]"],
        short_ids: true,
        ..BASE
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
            after: "<｜tool▁calls▁end｜>",
            ..PLAIN
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
            after: "<|tool_calls_section_end|>",
            ..PLAIN
        },
        markers: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
        reading: Reading::Named {
            before: &["<|tool_call_begin|>", "functions."],
            after: &[":", "<|tool_call_argument_begin|>"],
        },
        tail: &["<|tool_call_end|>", "<|tool_calls_section_end|>"],
        ..BASE
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
        tail: &["]", "<|END_ACTION|>"],
        ..BASE
    },
    // Phi-4-mini.
    CallSyntax {
        name: "phi",
        signs: &[&["<|tool_call|>", "<|/tool_call|>"], &["<|tool|>", "<|/tool|>"]],
        layout: Layout { before: "<|tool_call|>[", after: "]<|/tool_call|>", ..OBJECT },
        markers: &["<|tool_call|>"],
        tail: &["]", "<|/tool_call|>"],
        ..BASE
    },
    // Granite 3.
    CallSyntax {
        name: "granite",
        signs: &[&["<|tool_call|>"]],
        layout: Layout { before: "<|tool_call|>[", after: "]", ..OBJECT },
        markers: &["<|tool_call|>", "<tool_call>"],
        tail: &["]"],
        ..BASE
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
        tail: &["]", "</tool_call>"],
        ..BASE
    },
    // Functionary 3.1, and Llama 3.1 with a template for this format.
    CallSyntax {
        name: "function-tag",
        signs: &[&["<function="]],
        layout: Layout { open: "<function=", infix: ">", close: "</function>", ..PLAIN },
        markers: &["<function="],
        reading: Reading::Named { before: &[], after: &[">"] },
        tail: &["</function>"],
        ..BASE
    },
    // Llama 3.1 to 3.3: the template refuses answers with two calls.
    CallSyntax {
        name: "llama",
        signs: &[&["\"parameters\"", "ipython"], &["<|python_tag|>"]],
        layout: Layout { infix: r#"", "parameters": "#, between: "; ", ..OBJECT },
        markers: &["<|python_tag|>"],
        bare: true,
        tail: &["]", "```", ";"],
        parallel: false,
        ..BASE
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
    reading: Reading::Named {
        before: &["<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>"],
        after: &["```json", "<｜tool▁sep｜>"],
    },
    tail: &["```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
    ..BASE
};

/// Marks of Qwen3-Coder: a tag for the function and one for each parameter, with values on lines of their own.
const FUNCTION_ELEMENTS: Elements = Elements {
    before: &["<function="],
    name_ends: &[">"],
    key: ("<parameter=", ">"),
    gap: "",
    value: ("\n", "\n</parameter>"),
    ends: &["</function>", "</tool_call>"],
};

/// Marks of GLM.
const KEY_ELEMENTS: Elements = Elements {
    before: &[],
    name_ends: &["\n", "<tool_sep>"],
    key: ("<arg_key>", "</arg_key>"),
    gap: "\n",
    value: ("<arg_value>", "</arg_value>"),
    ends: &["</tool_call>"],
};
