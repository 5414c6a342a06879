//! Coding agents over several turns. `agents/` has recorded requests of real programs to a model with the same answers,
//! with long texts shortened.

use std::{fs, path::Path};

use serde_json::{Map, Value, json};

use super::{
    http::{Answer, Server},
    scripted,
};

/// The content of an answer, in the same form for all APIs.
#[derive(Debug, Default, PartialEq)]
struct Turn {
    text: String,
    /// Names and arguments.
    calls: Vec<(String, Value)>,
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default)]
struct Tokens {
    prompt: u64,
    cached: u64,
    answer: u64,
}

/// Replaces `<text N: LENGTH>` by a text of that length, which other numbers do not have.
fn expand(value: &Value) -> Value {
    match value {
        Value::String(text) => {
            let short = text.strip_prefix("<text ").and_then(|text| text.strip_suffix('>'));
            let Some((number, length)) = short.and_then(|text| text.split_once(": ")) else {
                return value.clone();
            };
            let words = (0..).map(|word| format!("Rule {number}.{word}: read the file, then change it.\n"));
            let mut long = String::new();
            let length: usize = length.parse().unwrap();
            words
                .take_while(|word| {
                    long += word;
                    long.len() < length
                })
                .for_each(drop);
            json!(long)
        }
        Value::Array(items) => items.iter().map(expand).collect(),
        Value::Object(fields) => fields.iter().map(|(name, value)| (name.clone(), expand(value))).collect(),
        other => other.clone(),
    }
}

/// The content of an answer as the model writes it.
fn written(answer: &str) -> Turn {
    let (text, calls) = answer.split_once("<tool_call>").unwrap_or((answer, ""));
    let calls = calls.split("<tool_call>").filter(|call| !call.is_empty()).map(|call| {
        let call: Value = serde_json::from_str(call.trim().trim_end_matches("</tool_call>")).unwrap();
        (call["name"].as_str().unwrap().to_owned(), call["arguments"].clone())
    });
    Turn { text: text.trim().to_owned(), calls: calls.collect() }
}

fn data(answer: &Answer) -> Vec<Value> {
    let lines = answer.body.lines().filter_map(|line| line.strip_prefix("data: "));
    let events = lines.filter(|line| *line != "[DONE]");
    events.map(|event| serde_json::from_str(event).unwrap()).collect()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn string(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Reads a stream as the official clients do.
fn read(path: &str, answer: &Answer) -> (Turn, Tokens) {
    let mut turn = Turn::default();
    let mut calls: Vec<(String, String)> = Vec::new();
    let mut tokens = Tokens::default();
    for event in data(answer) {
        if path.starts_with("/v1/messages") {
            match string(&event["type"]) {
                "content_block_start" if event["content_block"]["type"] == "tool_use" => {
                    calls.push((string(&event["content_block"]["name"]).to_owned(), String::new()));
                }
                "content_block_delta" => {
                    turn.text += string(&event["delta"]["text"]);
                    if let Some(call) = calls.last_mut() {
                        call.1 += string(&event["delta"]["partial_json"]);
                    }
                }
                "message_delta" if event["delta"]["stop_reason"].is_string() => {
                    let usage = &event["usage"];
                    let cached = number(&usage["cache_read_input_tokens"]);
                    tokens = Tokens {
                        prompt: number(&usage["input_tokens"]) + cached,
                        cached,
                        answer: number(&usage["output_tokens"]),
                    };
                    let reason = if calls.is_empty() { "end_turn" } else { "tool_use" };
                    assert_eq!(event["delta"]["stop_reason"], reason);
                }
                _ => {}
            }
        } else if path == "/v1/responses" {
            if event["type"] != "response.completed" {
                continue;
            }
            let response = &event["response"];
            for item in response["output"].as_array().unwrap() {
                match string(&item["type"]) {
                    "message" => turn.text += string(&item["content"][0]["text"]),
                    "function_call" => {
                        calls.push((string(&item["name"]).to_owned(), string(&item["arguments"]).to_owned()));
                    }
                    other => panic!("an item `{other}`"),
                }
            }
            let usage = &response["usage"];
            tokens = Tokens {
                prompt: number(&usage["input_tokens"]),
                cached: number(&usage["input_tokens_details"]["cached_tokens"]),
                answer: number(&usage["output_tokens"]),
            };
        } else {
            let choice = &event["choices"][0];
            turn.text += string(&choice["delta"]["content"]);
            for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
                let function = &call["function"];
                if call["id"].is_string() {
                    calls.push((string(&function["name"]).to_owned(), String::new()));
                }
                calls[number(&call["index"]) as usize].1 += string(&function["arguments"]);
            }
            if let Some(reason) = choice["finish_reason"].as_str() {
                assert_eq!(reason, if calls.is_empty() { "stop" } else { "tool_calls" });
            }
            if event["usage"].is_object() {
                let usage = &event["usage"];
                tokens = Tokens {
                    prompt: number(&usage["prompt_tokens"]),
                    cached: number(&usage["prompt_tokens_details"]["cached_tokens"]),
                    answer: number(&usage["completion_tokens"]),
                };
            }
        }
    }
    let read = |(name, arguments): (String, String)| (name, serde_json::from_str(&arguments).unwrap());
    turn.calls = calls.into_iter().map(read).collect();
    turn.text = turn.text.trim().to_owned();
    (turn, tokens)
}

#[test]
fn agents_call_tools_over_turns_that_the_cache_has() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve/agents");
    let tales =
        fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tales/tales-Q8_0.gguf")).unwrap();
    let home = tempfile::tempdir().unwrap();
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert_eq!(files.len(), 3);
    for file in files {
        let recorded: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        let client = string(&recorded["client"]);
        let answers: Vec<_> = recorded["answers"].as_array().unwrap().iter().map(string).collect();
        let model = home.path().join("scripted.gguf");
        fs::write(&model, scripted::model(&tales, &answers)).unwrap();
        let server = Server::start(&[model.to_str().unwrap(), "--alias", "*=scripted"]);
        let path = string(&recorded["path"]);
        let headers = recorded["headers"].as_object().unwrap();
        let headers: Vec<_> = headers.iter().map(|(name, value)| (name.as_str(), string(value))).collect();
        let turns = recorded["turns"].as_array().unwrap();
        let mut before = Tokens::default();
        for (number, turn) in turns.iter().enumerate() {
            let fields = [&recorded["body"], turn].map(|fields| fields.as_object().unwrap().clone());
            let body: Map<String, Value> = fields.into_iter().flatten().collect();
            let answer = server.request("POST", path, &headers, &expand(&body.into()).to_string());
            assert_eq!(answer.status, 200, "{client}, turn {number}: {}", answer.body);
            let (found, tokens) = read(path, &answer);
            assert_eq!(found, written(answers[number]), "{client}, turn {number}: {}", answer.body);
            let known = before.prompt + before.answer;
            assert!(
                tokens.cached as f64 >= 0.95 * known as f64,
                "{client}, turn {number}: {tokens:?} after {before:?}"
            );
            println!("{client}, turn {number}: {tokens:?}");
            before = tokens;
        }
        assert!(before.prompt > 2000 && turns.len() == 3, "{client}: {before:?}");
    }
}

#[test]
fn ollamas_stream_has_calls_with_their_arguments() {
    let tales =
        fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tales/tales-Q8_0.gguf")).unwrap();
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("scripted.gguf");
    let calls = "I look.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"at\": \"fox\"}}\n</tool_call>\n\
                 <tool_call>\n{\"name\": \"wait\", \"arguments\": {}}\n</tool_call>";
    fs::write(&model, scripted::model(&tales, &[calls, "It is red."])).unwrap();
    let server = Server::start(&[model.to_str().unwrap()]);
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
    let body = |stream: bool| {
        let messages = json!([{"role": "user", "content": "Look at the fox"}]);
        json!({"model": "scripted", "messages": messages, "tools": [tool("look"), tool("wait")], "stream": stream})
    };
    let read = |messages: &[Value]| {
        let mut turn = Turn::default();
        for message in messages {
            turn.text += string(&message["content"]);
            for call in message["tool_calls"].as_array().into_iter().flatten() {
                let function = &call["function"];
                turn.calls.push((string(&function["name"]).to_owned(), function["arguments"].clone()));
            }
        }
        turn.text = turn.text.trim().to_owned();
        turn
    };
    let whole = server.post("/api/chat", &body(false)).ok();
    assert_eq!(read(&[whole["message"].clone()]), written(calls));
    let lines = server.post("/api/chat", &body(true)).body;
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let messages: Vec<_> = lines.iter().map(|line| line["message"].clone()).collect();
    assert_eq!(read(&messages), written(calls));
}

/// Calls as families write them that do not write JSON.
#[test]
fn calls_between_marks_are_calls_in_all_apis() {
    let tales =
        fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tales/tales-Q8_0.gguf")).unwrap();
    let home = tempfile::tempdir().unwrap();
    let families = [
        (
            "coder",
            "<parameter=",
            "I look.\n<tool_call>\n<function=look>\n<parameter=at>\n12\n</parameter>\n<parameter=times>\n[3, 4]\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "glm",
            "<arg_key>",
            "I look.\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>12</arg_value>\n<arg_key>times</arg_key>\n<arg_value>[3, 4]</arg_value>\n</tool_call>",
        ),
        (
            "minimax",
            "<minimax:tool_call>",
            "I look.\n<minimax:tool_call>\n<invoke name=\"look\">\n<parameter name=\"at\">12</parameter>\n<parameter name=\"times\">[3, 4]</parameter>\n</invoke>\n</minimax:tool_call>",
        ),
        (
            "olmo",
            "<function_calls>",
            "I look.\n<function_calls>\nlook(at=\"12\", times=[3, 4])\n</function_calls>",
        ),
    ];
    let files: Vec<_> = families
        .iter()
        .map(|(name, sign, answer)| {
            let file = home.path().join(format!("{name}.gguf"));
            fs::write(&file, scripted::model_with(&tales, &[answer, "It is red."], sign)).unwrap();
            file.to_str().unwrap().to_owned()
        })
        .collect();
    let server = Server::start(&files.iter().map(String::as_str).collect::<Vec<_>>());
    let schema = json!({"type": "object", "required": ["at"], "properties": {
        "at": {"type": "string"}, "times": {"type": "array", "items": {"type": "integer"}}}});
    let expected = json!({"at": "12", "times": [3, 4]});
    for (name, ..) in families {
        let tool = json!({"type": "function", "function": {"name": "look", "parameters": schema}});
        let messages = json!([{"role": "user", "content": "Look at the fox"}]);
        let body = json!({"model": name, "messages": messages, "tools": [tool]});
        let chat = server.post("/v1/chat/completions", &body).ok();
        let message = &chat["choices"][0]["message"];
        let call = &message["tool_calls"][0]["function"];
        assert_eq!((string(&call["name"]), string(&message["content"])), ("look", "I look."), "{chat}");
        assert_eq!(serde_json::from_str::<Value>(string(&call["arguments"])).unwrap(), expected);

        let tool = json!({"name": "look", "input_schema": schema});
        let body = json!({"model": name, "max_tokens": 100, "messages": messages, "tools": [tool]});
        let answer = server.post("/v1/messages", &body).ok();
        assert_eq!(answer["content"][1]["input"], expected, "{answer}");
    }
}
