//! Parsing of model outputs.

use std::fmt::Write;

use expect_test::{Expect, expect};
use llguidance::{
    Matcher, ParserFactory,
    api::TopLevelGrammar,
    toktrie::{ApproximateTokEnv, InferenceCapabilities, SimpleVob},
};
use proptest::{prelude::*, sample::Index};
use serde_json::{Value, json};

use super::*;
use crate::{families::SYNTAXES, syntax::ANALYSIS};

mod forms;
mod grammar;

/// The names of the tools in these tests.
const TOOLS: [&str; 2] = ["weather", "add"];

/// Schema of the arguments in these tests.
fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "value": {"type": "string"},
            "days": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["city"],
    })
}

/// Returns the format of a template with all signs of a syntax, and with reasoning.
fn format(name: &str) -> Format {
    let calls = SYNTAXES.iter().chain([&GENERIC]).find(|syntax| syntax.name == name);
    let reasoning = if name == "harmony" { ANALYSIS } else { ("<think>", "</think>") };
    Format { reasoning: Some(reasoning), answer: None, calls: Ok(calls.expect("a syntax of this name")) }
}

fn options(stream_arguments: bool) -> ParserOptions {
    ParserOptions {
        split_reasoning: true,
        in_reasoning: false,
        in_answer: false,
        tools: TOOLS.map(|name| ReadTool::new(name, Some(&schema()))).into(),
        lenient: true,
        stream_arguments,
    }
}

/// Returns all pieces of a text split into these deltas, with neighbours of one kind joined.
fn parse<'d>(
    format: Format,
    options: &ParserOptions,
    deltas: impl IntoIterator<Item = &'d str>,
) -> Vec<Piece> {
    let mut parser = OutputParser::new(format, options.clone());
    let mut pieces = Vec::new();
    for delta in deltas {
        pieces.extend(parser.push(delta));
    }
    pieces.extend(parser.finish(false));
    join(pieces)
}

fn join(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut joined: Vec<Piece> = Vec::new();
    for piece in pieces {
        match (joined.last_mut(), &piece) {
            (Some(Piece::Text(last)), Piece::Text(text))
            | (Some(Piece::Reasoning(last)), Piece::Reasoning(text))
            | (Some(Piece::Arguments(last)), Piece::Arguments(text)) => *last += text,
            _ => joined.push(piece),
        }
    }
    joined
}

fn show(pieces: &[Piece]) -> String {
    let mut lines = String::new();
    for piece in pieces {
        let _ = match piece {
            Piece::Reasoning(text) => writeln!(lines, "reasoning {text:?}"),
            Piece::Text(text) => writeln!(lines, "text {text:?}"),
            Piece::CallBegin { name } => write!(lines, "call {name} "),
            Piece::Arguments(text) => write!(lines, "{text}"),
            Piece::CallEnd { complete } => {
                writeln!(lines, "{}", if *complete { "" } else { " (incomplete)" })
            }
        };
    }
    lines
}

/// Checks the pieces of a text: with whole calls, and with streamed arguments if the result differs.
fn check(format: Format, text: &str, expected: Expect) {
    let whole = show(&parse(format, &options(false), [text]));
    let streamed = show(&parse(format, &options(true), [text]));
    expected.assert_eq(&if whole == streamed { whole } else { format!("{whole}streamed:\n{streamed}") });
}

#[test]
fn hermes_calls_stand_in_tags() {
    let check = |text, expected| check(format("hermes"), text, expected);
    check(
        "<think>\nThe user wants\nweather.\n</think>\n\nLet me look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": \
         {\"city\": \"Roma\"}}\n</tool_call>",
        expect![[r#"
            reasoning "The user wants\nweather."
            text "Let me look."
            call weather {"city": "Roma"}
        "#]],
    );
    check(
        "<tool_call>\n{\"arguments\": {\"a\": 1}, \"name\": \"add\"}\n</tool_call>\n<tool_call>\n{\"name\": \
         \"add\"}\n</tool_call>\n",
        expect![[r#"
            call add {"a": 1}
            call add {}
        "#]],
    );
    // An unknown name, another key, or a value of another kind is text.
    check(
        "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>",
        expect![[r#"
            text "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>"
        "#]],
    );
    check(
        "<tool_call>\n{\"city\": 1}\n</tool_call> <tool_call>{\"name\":\"add\",\"arguments\":[]}",
        expect![[r#"
            text "<tool_call>\n{\"city\": 1}\n</tool_call> <tool_call>{\"name\":\"add\",\"arguments\":[]}"
        "#]],
    );
    // The second marker is found where the first call is malformed.
    check(
        "<tool_call><tool_call>{\"name\":\"add\",\"arguments\":{}}</tool_call>. Done, <b>and",
        expect![[r#"
            text "<tool_call>"
            call add {}
            text ". Done, <b>and"
        "#]],
    );
    // The text ends too early.
    check(
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Ro",
        expect![[r#"
            text "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Ro"
            streamed:
            call weather {"city": "Ro (incomplete)
        "#]],
    );
    check(
        "one <tool_ca",
        expect![[r#"
        text "one <tool_ca"
    "#]],
    );
    // The arguments are malformed.
    check(
        "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1,}}</tool_call>",
        expect![[r#"
            text "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1,}}</tool_call>"
            streamed:
            call add {"a": 1, (incomplete)
            text "}}</tool_call>"
        "#]],
    );
}

#[test]
fn what_a_limit_leaves_of_a_further_call_is_no_text() {
    let all = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>\n<tool_call>\n{\"name\": \
               \"weather\", \"arguments\": {\"city\": \"Roma\"}}\n</tool_call>";
    let first = all.find('}').unwrap() + 1;
    for stream_arguments in [false, true] {
        for end in (first..=all.len()).filter(|&end| all.is_char_boundary(end)) {
            let mut parser = OutputParser::new(format("hermes"), options(stream_arguments));
            let mut pieces = parser.push(&all[..end]);
            pieces.extend(parser.finish(true));
            let text = pieces.iter().any(|piece| matches!(piece, Piece::Text(_)));
            assert!(!text, "{:?}: {pieces:?}", &all[..end]);
        }
    }
    // Text before it is kept, as is a cut text without a call.
    for (text, left) in [("Hm. <tool_ca", "Hm. <tool_ca"), ("<tool_call>{\"na", "<tool_call>{\"na")] {
        let mut parser = OutputParser::new(format("hermes"), options(true));
        let mut pieces = parser.push(text);
        pieces.extend(parser.finish(true));
        assert_eq!(join(pieces), [Piece::Text(left.into())]);
    }
}

#[test]
fn llama_calls_are_the_whole_answer() {
    let check = |text, expected| check(format("llama"), text, expected);
    check(
        "{\"name\": \"weather\", \"parameters\": {\"city\": \"Roma\"}}",
        expect![[r#"
            call weather {"city": "Roma"}
        "#]],
    );
    check(
        "<|python_tag|>{\"type\": \"function\", \"name\": \"add\", \"parameters\": {\"a\": 1}}; {\"name\": \"add\", \
         \"parameters\": {}}",
        expect![[r#"
            call add {"a": 1}
            call add {}
        "#]],
    );
    check(
        "{\"city\": \"Roma\"} is JSON",
        expect![[r#"
        text "{\"city\": \"Roma\"} is JSON"
    "#]],
    );
    check(
        "Write {\"name\": \"add\"}",
        expect![[r#"
        text "Write {\"name\": \"add\"}"
    "#]],
    );
    check(
        "<|python_tag|>print(1)",
        expect![[r#"
        text "<|python_tag|>print(1)"
    "#]],
    );
}

#[test]
fn mistral_calls_are_a_list_or_names_with_arguments() {
    for name in ["mistral", "mistral-args"] {
        let check = |text, expected| check(format(name), text, expected);
        check(
            "[TOOL_CALLS][{\"name\": \"add\", \"arguments\": {\"a\": 1}, \"id\": \"abcdefghi\"}, {\"name\": \"weather\", \
             \"arguments\": {}}]",
            expect![[r#"
                call add {"a": 1}
                call weather {}
            "#]],
        );
        check(
            "Sure. [TOOL_CALLS]add[ARGS]{\"a\": 1}[TOOL_CALLS]weather[CALL_ID]x7[ARGS]{}",
            expect![[r#"
                text "Sure."
                call add {"a": 1}
                call weather {}
            "#]],
        );
        check(
            "[TOOL_CALLS]a word{}",
            expect![[r#"
            text "[TOOL_CALLS]a word{}"
        "#]],
        );
        check(
            "[1] see",
            expect![[r#"
            text "[1] see"
        "#]],
        );
    }
}

#[test]
fn deepseek_calls_have_a_name_and_a_block_of_json() {
    let call = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{\"a\": \
                1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(
        format("deepseek"),
        call,
        expect![[r#"
        call add {"a": 1}
        call weather {}
    "#]],
    );
    let call = "I will.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(
        format("deepseek-v3.1"),
        call,
        expect![[r#"
        text "I will."
        call add {"a": 1}
    "#]],
    );
}

#[test]
fn others_have_their_marks() {
    let cases = [
        ("phi", "<|tool_call|>[{\"name\": \"add\", \"arguments\": {\"a\": 1}}]<|/tool_call|>"),
        ("granite", "<|tool_call|>[{\"name\": \"add\", \"arguments\": {\"a\": 1}}]"),
        ("granite", "<tool_call>[{\"arguments\": {\"a\": 1}, \"name\": \"add\"}]"),
        (
            "cohere",
            "<|START_ACTION|>[\n{\"tool_call_id\": \"0\", \"tool_name\": \"add\", \"parameters\": {\"a\": 1}}\n]<|END_ACTION|>",
        ),
        (
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|><|tool_calls_section_end|>",
        ),
        ("function-tag", "<function=add>{\"a\": 1}</function>"),
        ("json", "```json\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n```"),
        ("json", "[{\"name\": \"add\", \"arguments\": {\"a\": 1}}]"),
    ];
    for (name, text) in cases {
        let pieces = parse(format(name), &options(false), [text]);
        assert_eq!(show(&pieces), "call add {\"a\": 1}\n", "{name}: {text}");
    }
}

/// Calls that deviate from the template.
#[test]
fn calls_are_read_in_many_forms() {
    let add = "call add {\"a\": 1}\n";
    let cases = [
        // Arguments as a string with an object, no arguments, and unused keys.
        ("hermes", r#"<tool_call>{"name": "add", "arguments": "{\"a\": 1}"}</tool_call>"#, add),
        ("hermes", r#"<tool_call>{"name": "add", "arguments": null}</tool_call>"#, "call add {}\n"),
        ("hermes", r#"<tool_call>{"name": "add", "arguments": ""}</tool_call>"#, "call add {}\n"),
        (
            "hermes",
            r#"<tool_call>{"name": "add", "reason": {"b": [1]}, "arguments": {}}</tool_call>"#,
            "call add {}\n",
        ),
        ("hermes", r#"<tool_call>{"why": "x", "arguments": {"a": 1}, "name": "add"}</tool_call>"#, add),
        (
            "hermes",
            r#"<tool_call>{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}</tool_call>"#,
            add,
        ),
        ("mistral", r#"[TOOL_CALLS][{"name": "add", "arguments": "{\"a\": 1}"}]"#, add),
        // Without markers, in a fence, after a sentence, after a thought, several.
        ("hermes", r#"{"name": "add", "arguments": {"a": 1}}"#, add),
        ("hermes", "{\n  \"name\": \"add\",\n  \"parameters\": {\"a\": 1}\n}\n", add),
        ("hermes", "```json\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n```", add),
        ("hermes", "```\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n```\n", add),
        ("deepseek", "```json\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n```", add),
        ("llama", "```json\n{\"name\": \"add\", \"parameters\": {\"a\": 1}}\n```", add),
        ("phi", r#"{"function": "add", "args": {"a": 1}}"#, add),
        ("hermes", r#"{"function": {"name": "add", "arguments": "{\"a\": 1}"}}"#, add),
        ("hermes", r#"[{"name": "add", "arguments": {"a": 1}}]"#, add),
        (
            "hermes",
            "I will add.\n\n```json\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n```\n",
            "text \"I will add.\"\ncall add {\"a\": 1}\n",
        ),
        (
            "hermes",
            "<think>\nAdd.\n</think>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}",
            "reasoning \"Add.\"\ncall add {\"a\": 1}\n",
        ),
        (
            "hermes",
            "{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n{\"name\": \"weather\", \"arguments\": {}}",
            "call add {\"a\": 1}\ncall weather {}\n",
        ),
        (
            "hermes",
            "```json\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n```\n```json\n{\"name\": \"weather\"}\n```",
            "call add {\"a\": 1}\ncall weather {}\n",
        ),
        ("deepseek", "[{\"name\": \"add\"}, {\"name\": \"weather\"}]", "call add {}\ncall weather {}\n"),
    ];
    for (name, text, expected) in cases {
        for stream in [false, true] {
            let pieces = parse(format(name), &options(stream), [text]);
            assert_eq!(show(&pieces), expected, "{name}: {text}");
        }
    }
    // JSON answers that are not calls: they name no tool, or have further keys.
    let texts = [
        r#"{"name": "Roma", "arguments": {"a": 1}}"#,
        r#"{"name": "add", "age": 3}"#,
        r#"{"name": "add", "arguments": [1]}"#,
        r#"{"name": "add", "arguments": "one"}"#,
        r#"{"a": {"name": "add", "arguments": {}}}"#,
        r#"{"tool": 1}"#,
        "[1, 2]",
        "Say:\n```json\n{\"name\": \"Roma\"}\n```\nDone.",
        "```\nplain\n```",
    ];
    for text in texts {
        for name in ["hermes", "deepseek", "json"] {
            let pieces = parse(format(name), &options(false), [text]);
            assert_eq!(pieces, [Piece::Text(text.into())], "{name}");
        }
        let strict = ParserOptions { lenient: false, ..options(false) };
        assert_eq!(parse(format("hermes"), &strict, [text]), [Piece::Text(text.into())]);
    }
    // JSON that is not a call is recognised after its first key.
    let mut parser = OutputParser::new(format("hermes"), options(true));
    assert_eq!(join(parser.push("{\"title\": \"A")), [Piece::Text("{\"title\": \"A".into())]);
}

#[test]
fn reasoning_begins_in_the_prompt_or_in_the_answer_or_not_at_all() {
    let read = |in_reasoning, split_reasoning, text| {
        let options = ParserOptions { in_reasoning, split_reasoning, tools: Arc::default(), ..options(true) };
        show(&parse(format("hermes"), &options, [text]))
    };
    let cases = [
        (true, true, "so\n</think>\n\nyes", "reasoning \"so\"\ntext \"yes\"\n"),
        (true, true, "<b></b> so", "reasoning \"<b></b> so\"\n"),
        (false, true, "\n<think>\n\n</think>\n\nyes", "text \"yes\"\n"),
        (false, true, " yes <think> no", "text \" yes <think> no\"\n"),
        (false, true, "<think", "text \"<think\"\n"),
        (false, false, "<think>a</think>b\n", "text \"<think>a</think>b\\n\"\n"),
        (
            false,
            true,
            "<tool_call>{\"name\":\"add\",\"arguments\":{}}</tool_call>",
            "text \"<tool_call>{\\\"name\\\":\\\"add\\\",\\\"arguments\\\":{}}</tool_call>\"\n",
        ),
    ];
    for (in_reasoning, split, text, expected) in cases {
        assert_eq!(read(in_reasoning, split, text), expected, "{text}");
    }
}

#[test]
fn text_is_held_back_no_longer_than_needed() {
    let mut parser = OutputParser::new(format("hermes"), options(true));
    let mut shown = String::new();
    for delta in [
        "Well",
        ", <",
        "b> ",
        "<tool",
        "_call>{\"name\": \"we",
        "ather\", \"arguments\": {\"ci",
        "ty\": \"R",
        "oma\"}",
        "}",
    ] {
        let _ = writeln!(shown, "{delta:?} → {:?}", show(&parser.push(delta)));
    }
    expect![[r#"
        "Well" → "text \"Well\"\n"
        ", <" → "text \",\"\n"
        "b> " → "text \" <b>\"\n"
        "<tool" → ""
        "_call>{\"name\": \"we" → ""
        "ather\", \"arguments\": {\"ci" → "call weather {\"ci"
        "ty\": \"R" → "ty\": \"R"
        "oma\"}" → "oma\"}\n"
        "}" → ""
    "#]]
    .assert_eq(&shown);
}

#[test]
fn templates_show_how_calls_are_written() {
    let shared = std::env::var_os("PAGURO_SHARED").map_or_else(
        || std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared"),
        std::path::PathBuf::from,
    );
    let Ok(folder) = std::fs::read_dir(shared.join("templates")) else {
        println!("skipped: no chat templates in {}", shared.display());
        return;
    };
    let mut lines: Vec<_> = folder
        .map(|file| {
            let path = file.expect("a file").path();
            let format = Format::detect(&std::fs::read_to_string(&path).expect("a template"));
            let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
            let reasoning = format.reasoning.map_or("no reasoning", |(open, _)| open);
            format!("{name}: {}, {reasoning}\n", format.calls().expect("is read").name)
        })
        .collect();
    lines.sort();
    expect![[r#"
        HuggingFaceTB-SmolLM3-3B: json, <think>
        NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use: hermes, no reasoning
        Qwen-Qwen2.5-7B-Instruct: hermes, no reasoning
        Qwen-Qwen3-0.6B: hermes, <think>
        deepseek-ai-DeepSeek-R1-Distill-Qwen-32B: deepseek, <think>
        google-gemma-2-2b-it: json, no reasoning
        ibm-granite-granite-3.3-2B-Instruct: granite, <think>
        meta-llama-Llama-3.2-3B-Instruct: llama, no reasoning
        microsoft-Phi-3.5-mini-instruct: json, no reasoning
        mistralai-Mistral-Nemo-Instruct-2407: mistral, no reasoning
    "#]]
    .assert_eq(&lines.concat());
}

#[test]
fn what_is_not_read_is_refused() {
    let calls = Format::detect("{{ '<start_function_call>' }}").calls();
    assert_eq!(
        calls.err().map(|error| error.to_string()).as_deref(),
        Some(
            "tools cannot be used with this model: its chat template writes tool calls as function declarations, which is not supported"
        )
    );
}
