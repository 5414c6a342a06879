//! Call syntaxes other than JSON between two marks.

use expect_test::expect;
use serde_json::json;

use super::*;

/// Calls with separate arguments: strings without quotes, other values as JSON.
#[test]
fn arguments_between_marks_have_the_kinds_of_the_schema() {
    let expected =
        "call weather {\"city\": \"1 < 2\\n\\\"x\\\"\", \"days\": [1,2], \"more\": true}\ncall add {}\n";
    let cases = [
        (
            "function-elements",
            "<tool_call>\n<function=weather>\n<parameter=city>\n1 < 2\n\"x\"\n</parameter>\n<parameter=days>\n[1, 2]\n</parameter>\n<parameter=more>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n</function>\n</tool_call>",
        ),
        // Without the outer tag, and without the end of the function.
        (
            "function-elements",
            "<function=weather>\n<parameter=city>\n1 < 2\n\"x\"\n</parameter>\n<parameter=days>[1, 2]</parameter><parameter=more>true</parameter>\n</tool_call>\n<tool_call><function=add></tool_call>",
        ),
        (
            "seed",
            "<seed:tool_call>\n<function=weather>\n<parameter=city>1 < 2\n\"x\"</parameter>\n<parameter=days>[1, 2]</parameter>\n<parameter=more>True</parameter>\n</function>\n</seed:tool_call><seed:tool_call><function=add></function></seed:tool_call>",
        ),
        (
            "minimax",
            "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">1 < 2\n\"x\"</parameter>\n<parameter name=\"days\">[1, 2]</parameter>\n<parameter name=\"more\">true</parameter>\n</invoke>\n<invoke name=\"add\">\n</invoke>\n</minimax:tool_call>",
        ),
        (
            "glm",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>1 < 2\n\"x\"</arg_value>\n<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n<arg_key>more</arg_key>\n<arg_value>true</arg_value>\n</tool_call>\n<tool_call>add\n</tool_call>",
        ),
        (
            "glm",
            "<tool_call>\nweather<arg_key>city</arg_key><arg_value>1 < 2\n\"x\"</arg_value><arg_key>days</arg_key><arg_value>[1, 2]</arg_value><arg_key>more</arg_key><arg_value>true</arg_value></tool_call><tool_call>add</tool_call>",
        ),
        (
            "hunyuan-elements",
            "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>1 < 2\n\"x\"</arg_value>\n<arg_key>days</arg_key>\n<arg_value>[1, 2]</arg_value>\n<arg_key>more</arg_key><arg_value>true</arg_value>\n</tool_call>\n<tool_call>add<tool_sep>\n</tool_call>\n</tool_calls>",
        ),
    ];
    for (name, text) in cases {
        for stream in [false, true] {
            assert_eq!(show(&parse(format(name), &options(stream), [text])), expected, "{name}: {text}");
        }
    }
    // JSON in the tag is accepted; an unknown tool and malformed marks are text.
    let json = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    assert_eq!(show(&parse(format("function-elements"), &options(false), [json])), "call add {\"a\": 1}\n");
    for text in [
        "<tool_call>\n<function=rm>\n</function>\n</tool_call>",
        "<tool_call>\n<function=add>\nno\n</function>",
    ] {
        let pieces = parse(format("function-elements"), &options(false), [text]);
        assert_eq!(pieces, [Piece::Text(text.into())]);
    }
}

#[test]
fn values_between_marks_are_what_the_schema_takes() {
    let schema = json!({"properties": {
        "text": {"type": "string"},
        "whole": {"type": "integer"},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "null": {"type": ["string", "null"]},
        "choice": {"enum": ["1", "2"]},
        "any": {},
    }});
    let tool = ReadTool::new("t", Some(&schema));
    let cases = [
        ("text", "12", json!("12")),
        ("text", "[1]", json!("[1]")),
        ("whole", " 12\n", json!(12)),
        // A value that violates the schema stays text, so that its validation can report it.
        ("whole", "twelve", json!("twelve")),
        ("either", "12", json!(12)),
        ("either", "a 12", json!("a 12")),
        ("either", "\"quoted\"", json!("\"quoted\"")),
        ("null", "null", json!(null)),
        ("null", "None", json!(null)),
        ("choice", "1", json!("1")),
        ("any", "{'a': [True, None, (1, 2.5)]}", json!({"a": [true, null, [1, 2.5]]})),
        ("unknown", "{\"a\": 1}", json!({"a": 1})),
        ("unknown", "word", json!("word")),
    ];
    for (parameter, text, expected) in cases {
        assert_eq!(tool.value(parameter, text), expected, "{parameter}: {text}");
    }
}

#[test]
fn calls_in_the_form_of_python_are_read() {
    let cases = [
        (
            "olmo",
            "<function_calls>\nweather(city=\"Ro)ma\", days=[1, 2])\nadd()\n</function_calls>",
            "call weather {\"city\":\"Ro)ma\",\"days\":[1,2]}\ncall add {}\n",
        ),
        (
            "lfm",
            "<|tool_call_start|>[weather(city='L\\'Aquila', more={'a': True}), add(a=-1.5,)]<|tool_call_end|>Done.",
            "call weather {\"city\":\"L'Aquila\",\"more\":{\"a\":true}}\ncall add {\"a\":-1.5}\ntext \"Done.\"\n",
        ),
    ];
    for (name, text, expected) in cases {
        for stream in [false, true] {
            assert_eq!(show(&parse(format(name), &options(stream), [text])), expected, "{name}: {text}");
        }
    }
    for text in ["<function_calls>\nrm(a=1)", "<function_calls>\nadd(1)", "<function_calls>\nadd(a=x)"] {
        assert_eq!(parse(format("olmo"), &options(false), [text]), [Piece::Text(text.into())]);
    }
}

#[test]
fn a_name_on_a_line_of_its_own_is_a_call() {
    let check = |text, expected| check(format("glm-lines"), text, expected);
    check(
        "weather\n{\"city\": \"Roma\"}",
        expect![[r#"
            call weather {"city": "Roma"}
        "#]],
    );
    check(
        "weather in Rome",
        expect![[r#"
            text "weather in Rome"
        "#]],
    );
}

#[test]
fn harmony_has_a_message_for_each_part() {
    let check = |text, expected| check(format("harmony"), text, expected);
    check(
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me \
         see.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{\"a\": 1}<|call|>",
        expect![[r#"
            reasoning "I add."
            text "Let me see."
            call add {"a": 1}
        "#]],
    );
    check(
        " to=functions.add<|channel|>commentary json<|message|>{}<|call|>",
        expect![[r#"
            call add {}
        "#]],
    );
    check(
        "<|channel|>analysis<|message|>2 < 3<|end|><|start|>assistant<|channel|>final<|message|>Yes: **2 <| 3**<|return|>",
        expect![[r#"
            reasoning "2 < 3"
            text "Yes: **2 <| 3**"
        "#]],
    );
    // An unknown tool, invalid arguments, and a deviation from the format.
    check(
        "<|channel|>commentary to=browser.search code<|message|>{\"q\": 1}<|call|>",
        expect![[r#"
            text "{\"q\": 1}"
        "#]],
    );
    check(
        "<|channel|>commentary to=functions.add<|message|>one<|call|>",
        expect![[r#"
            text "one"
        "#]],
    );
    check(
        "<b>plain</b> text",
        expect![[r#"
            text "<b>plain</b> text"
        "#]],
    );
    check(
        "<|channel|>commentary to=functions.add<|message|>{\"a\": ",
        expect![[r#"
            text "{\"a\": "
            streamed:
            call add {"a":  (incomplete)
        "#]],
    );
    // The prompt has begun the answer.
    let options = ParserOptions { in_answer: true, ..options(false) };
    assert_eq!(show(&parse(format("harmony"), &options, [" and on<|return|>"])), "text \" and on\"\n");
}

#[test]
fn tags_around_the_answer_are_not_shown() {
    let tags = Format {
        reasoning: Some(("<think>", "</think>")),
        answer: Some(("<response>", "</response>")),
        ..format("hermes")
    };
    for (text, expected) in [
        ("<think>a</think>\n<response>b</response>\n", "reasoning \"a\"\ntext \"b\"\n"),
        ("<think>a</think>b </response>", "reasoning \"a\"\ntext \"b </response>\"\n"),
        ("<response>b", "text \"b\"\n"),
        ("b <response>", "text \"b <response>\"\n"),
    ] {
        assert_eq!(show(&parse(tags, &options(false), [text])), expected, "{text}");
    }
}

#[test]
fn harmony_is_told_from_template_and_prompt() {
    let format = Format::detect("<|start|>assistant<|channel|>analysis<|message|>");
    assert_eq!(format.calls().map(|syntax| syntax.name), Ok("harmony"));
    for (prompt, in_answer, thought) in [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", false, Thought::Optional),
        ("<|start|>assistant<|channel|>analysis<|message|>", true, Thought::Begun),
        ("<|start|>assistant<|channel|>final<|message|>Well", true, Thought::None),
    ] {
        assert_eq!((format.in_answer(prompt), format.thought(prompt)), (in_answer, thought), "{prompt}");
    }
    let closing = format.closing();
    assert_eq!(closing.as_deref(), Some("<|end|><|start|>assistant<|channel|>final<|message|>"));
}
