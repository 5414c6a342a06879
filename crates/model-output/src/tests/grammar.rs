//! Grammars of answers, and the texts that they allow.

use super::*;

#[test]
fn control_tokens_are_no_text_to_a_grammar() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let tools = [OfferedTool { name: "add", description: None, parameters: Some(&schema) }];
    let rules = AnswerRules {
        tools: &tools,
        parallel: true,
        otherwise: None,
        thought: Thought::Begun,
        in_answer: false,
    };
    let control = |name: &str| ["[TOOL_CALLS]", "[ARGS]", "</think>"].iter().position(|&n| n == name);
    let grammar =
        |name| rules.grammar(&format(name), |name| control(name).map(|at| at as u32)).expect("read");
    expect![[r#"
        start: thought (calls)
        calls:  call more
        more: ( call)* 
        call: call_0
        call_0: <[0]> "add" <[1]> arguments_0 
        arguments_0: %json {"type":"object","properties":{"a":{"type":"integer"}},"x-guidance":{"item_separator":", ","key_separator":": ","whitespace_flexible":false}}
        thought: reasoning /\n{0,2}/
        reasoning: /(?s:.*)/ <[2]>

        start: thought (calls)
        calls:  call more
        more: ("\n" call)* 
        call: call_0
        call_0: "<tool_call>\n{\"name\": \"add\", \"arguments\": " arguments_0 "}\n</tool_call>"
        arguments_0: %json {"type":"object","properties":{"a":{"type":"integer"}},"x-guidance":{"item_separator":", ","key_separator":": ","whitespace_flexible":false}}
        thought: reasoning /\n{0,2}/
        reasoning: /(?s:.*)/ <[2]>"#]].assert_eq(&(grammar("mistral-args") + "\n\n" + &grammar("hermes")));
}

/// Generates a random text that a grammar accepts, byte by byte. After the last choice it takes the shortest way to the
/// end.
fn walk(grammar: String, format: Format, thought: Thought, choices: &[Index]) -> String {
    let env = ApproximateTokEnv::single_byte_env();
    let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &[]).expect("a factory");
    let mut matcher = Matcher::new(factory.create_parser(TopLevelGrammar::from_lark(grammar)));
    let mut bytes = Vec::new();
    let (open, close) = format.reasoning.expect("reasoning");
    // A text between marks ends with the mark.
    let ends: Vec<&str> = match format.calls.expect("read").reading {
        Reading::Elements(elements) => vec![elements.value.1.trim_start()],
        Reading::Braces => vec![braces::QUOTE],
        _ => Vec::new(),
    };
    for step in 0..1000 {
        if matcher.is_stopped() {
            return String::from_utf8(bytes).expect("UTF-8");
        }
        let mask: SimpleVob = matcher.compute_mask().expect("a mask");
        let eos = env.tok_trie().eos_token();
        let allowed: Vec<u32> = mask.iter().filter(|&token| token != eos && token < 256).collect();
        let choice = choices.get(step);
        if mask.is_allowed(eos) && (allowed.is_empty() || choice.is_none()) {
            return String::from_utf8(bytes).expect("UTF-8");
        }
        let token = match choice {
            Some(choice) => allowed[choice.index(allowed.len())],
            None => {
                let may = |byte: u8| allowed.contains(&byte.into());
                let thinks = (thought == Thought::Begun || bytes.starts_with(open.as_bytes()))
                    && !bytes.windows(close.len()).any(|part| part == close.as_bytes());
                let next_of = |text: &str| {
                    let written = (0..text.len()).rev().find(|&end| bytes.ends_with(&text.as_bytes()[..end]));
                    written.map(|written| text.as_bytes()[written])
                };
                let free = allowed.len() > 150;
                let ends = ends.iter().filter(|_| free).filter_map(|end| next_of(end));
                let way_out = next_of(close)
                    .filter(|_| thinks)
                    .into_iter()
                    .chain(ends)
                    .find(|&byte| may(byte))
                    .or_else(|| b"\"}])><s\n".iter().copied().find(|&byte| may(byte)));
                way_out.map_or(allowed[0], u32::from)
            }
        };
        matcher.consume_token(token).expect("an allowed token");
        bytes.push(u8::try_from(token).expect("a byte"));
    }
    panic!("it does not end: {:?}", String::from_utf8_lossy(&bytes));
}

fn syntax() -> impl Strategy<Value = &'static str> {
    let names: Vec<_> = SYNTAXES.iter().chain([&GENERIC]).map(|syntax| syntax.name).collect();
    prop::sample::select(names)
}

proptest! {
    #[test]
    fn the_cuts_change_nothing(
        name in syntax(),
        parts in prop::collection::vec(prop::sample::select(vec![
            "<think>", "</think>", "<tool_call>", "</tool_call>", "{\"name\": \"add\", ", "\"arguments\": {", "\"a\": 1",
            "}", "}", "\n", " ", "[", "]", ",", "[TOOL_CALLS]", "[ARGS]", "add", "<function=", ">", "x<", "\"", "é",
            "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>", "```json", "```", "<|tool_call|>",
            "{\"name\": \"weather\", \"arguments\": {\"city\": \"Roma\"}}", "{\"a\": 1}", "<|python_tag|>", ";",
            "<parameter=city>", "</parameter>", "</function>", "<arg_key>city</arg_key>", "<arg_value>", "</arg_value>",
            "<|channel|>", "analysis", "commentary to=functions.add", "<|message|>", "<|end|>", "<|call|>", "add(a=1)",
            "<function_calls>", "weather\n",
        ]), 0..12),
        cuts in prop::collection::vec(any::<Index>(), 0..10),
        stream in any::<bool>(),
        in_reasoning in any::<bool>(),
    ) {
        let text = parts.concat();
        let mut borders: Vec<_> = cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).collect();
        borders.extend([0, text.len()]);
        borders.sort();
        let options = ParserOptions { in_reasoning, ..options(stream) };
        let deltas = borders.windows(2).map(|pair| &text[pair[0]..pair[1]]);
        let pieces = parse(format(name), &options, deltas);
        prop_assert_eq!(&pieces, &parse(format(name), &options, [text.as_str()]));

        // Without calls only whitespace and reasoning tags are dropped.
        if name != "harmony" && !pieces.iter().any(|piece| matches!(piece, Piece::CallBegin { .. })) {
            let solid = |text: &str| text.replace(char::is_whitespace, "").replace("<think>", "").replace("</think>", "");
            let all: String = pieces.iter().map(|piece| match piece {
                Piece::Reasoning(text) | Piece::Text(text) => text.as_str(),
                _ => "",
            }).collect();
            prop_assert_eq!(solid(&all), solid(&text));
        }
    }

    #[test]
    fn what_is_written_is_read(
        name in syntax(),
        calls in prop::collection::vec((prop::sample::select(TOOLS.to_vec()), "[a-z\"\\\\{}<>é \n]{0,12}"), 1..4),
        stream in any::<bool>(),
    ) {
        let calls: Vec<_> = calls.iter().map(|(name, value)| (*name, json!({"value": value}).to_string())).collect();
        let format = format(name);
        let text = format.calls().expect("read").write(calls.iter().map(|(name, arguments)| (*name, arguments.as_str())));
        let expected: Vec<_> = calls.into_iter().flat_map(|(name, arguments)| [
            Piece::CallBegin { name: name.into() },
            Piece::Arguments(arguments),
            Piece::CallEnd { complete: true },
        ]).collect();
        // JSON arguments are unchanged; others are converted to compact JSON.
        let compact = |piece| match piece {
            Piece::Arguments(text) => {
                Piece::Arguments(serde_json::from_str::<Value>(&text).expect("JSON").to_string())
            }
            piece => piece,
        };
        let pieces: Vec<_> = parse(format, &options(stream), [text.as_str()]).into_iter().map(compact).collect();
        prop_assert_eq!(pieces, expected, "{}", text);
    }

    #[test]
    fn what_a_grammar_forces_is_calls(
        name in syntax(),
        choices in prop::collection::vec(any::<Index>(), 0..120),
        thought in prop::sample::select(vec![Thought::None, Thought::Optional, Thought::Begun]),
        free in any::<bool>(),
    ) {
        let schema = json!({
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
            "required": ["city"],
        });
        let tools = [
            OfferedTool { name: "weather", description: None, parameters: Some(&schema) },
            OfferedTool { name: "add", description: None, parameters: None },
        ];
        let format = format(name);
        let rules = AnswerRules { tools: &tools, parallel: true, otherwise: free.then_some(Otherwise::Text), thought, in_answer: false };
        let text = walk(rules.grammar(&format, |_| None).expect("read"), format, thought, &choices);
        let in_reasoning = thought == Thought::Begun;
        let options = ParserOptions { in_reasoning, lenient: false, ..options(false) };
        let pieces = parse(format, &options, [text.as_str()]);
        prop_assert!(free || pieces.iter().any(|piece| matches!(piece, Piece::CallBegin { .. })), "{}", text);
        for piece in pieces {
            match piece {
                Piece::Text(extra) => prop_assert!(free, "text {extra:?} in {text:?}"),
                Piece::Arguments(arguments) => {
                    let arguments: Value = serde_json::from_str(&arguments).expect("JSON");
                    prop_assert!(arguments["city"].is_string() || arguments == json!({}), "{}", arguments);
                }
                Piece::CallEnd { complete } => prop_assert!(complete),
                Piece::Reasoning(_) | Piece::CallBegin { .. } => {}
            }
        }
    }
}
