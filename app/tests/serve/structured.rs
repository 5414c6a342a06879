//! Answers with schemas and required calls, enforced on every API that supports them.

use serde_json::{Value, json};

use super::{
    ask,
    http::{Answer, Server},
};

/// A schema that a small model can follow.
fn hero() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 1, "maximum": 99},
            "mood": {"enum": ["happy", "sad", null]},
        },
        "required": ["name", "age", "mood"],
        "additionalProperties": false,
    })
}

fn weather(strict: bool) -> Value {
    json!({"type": "function", "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": false,
        },
        "strict": strict,
    }})
}

fn clock() -> Value {
    json!({"type": "function", "function": {"name": "clock"}})
}

#[track_caller]
fn fits(schema: &Value, text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
    assert!(jsonschema::is_valid(schema, &value), "{text:?}");
}

fn chat(server: &Server, more: Value) -> Answer {
    let mut body = ask(json!({"max_tokens": 300, "temperature": 1}));
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    server.post("/v1/chat/completions", &body)
}

#[test]
fn chat_completions_fit_their_format() {
    let server = Server::start(&[]);
    for (i, strict) in [json!(true), json!(false), Value::Null].into_iter().enumerate() {
        let schema = json!({"name": "hero", "schema": hero(), "strict": strict});
        let format =
            json!({"response_format": {"type": "json_schema", "json_schema": schema}, "seed": i, "n": 3});
        let answer = chat(&server, format.clone()).ok();
        let texts: Vec<_> = (0..3)
            .map(|choice| {
                let choice = &answer["choices"][choice];
                assert_eq!(choice["finish_reason"], "stop", "{answer}");
                choice["message"]["content"].as_str().unwrap().to_owned()
            })
            .collect();
        texts.iter().for_each(|text| fits(&hero(), text));
        // As a stream it is the same.
        let mut streamed = vec![String::new(); 3];
        let mut format = format;
        format["stream"] = true.into();
        for event in chat(&server, format).events() {
            for part in event["choices"].as_array().unwrap() {
                let index = part["index"].as_u64().unwrap() as usize;
                streamed[index] += part["delta"]["content"].as_str().unwrap_or_default();
            }
        }
        assert_eq!(streamed, texts);
    }
    // An object that has no schema may be empty.
    let braces = json!({token(&server, "{"): 100, token(&server, "}"): 100});
    let object = json!({"response_format": {"type": "json_object"}, "logit_bias": braces});
    let answer = chat(&server, object).ok();
    assert_eq!(answer["choices"][0]["message"]["content"], "{}", "{answer}");
    // Text that goes on, too.
    let body = json!({
        "model": "tales", "prompt": "The fox is", "max_tokens": 300, "seed": 3, "temperature": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "hero", "schema": hero()}},
    });
    let answer = server.post("/v1/completions", &body).ok();
    fits(&hero(), answer["choices"][0]["text"].as_str().unwrap());
    // A stop string ends an answer wherever it comes up.
    let schema = json!({"type": "array", "items": {"const": "fox"}, "minItems": 3, "maxItems": 3});
    let format = json!({
        "response_format": {"type": "json_schema", "json_schema": {"name": "foxes", "schema": schema}},
        "stop": "fox\"", "temperature": 0,
    });
    assert_eq!(chat(&server, format).ok()["choices"][0]["message"]["content"], "[\"");
}

/// The token that writes this text, as a key of `logit_bias`.
fn token(server: &Server, text: &str) -> String {
    let prompt = json!({"model": "tales", "prompt": format!("a{text}"), "add_special_tokens": false});
    let tokens = server.post("/tokenize", &prompt).ok();
    tokens["tokens"].as_array().unwrap().last().unwrap().to_string()
}

/// Checks calls of chat completions; says the names.
#[track_caller]
fn calls(choice: &Value) -> Vec<String> {
    assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
    let call = |call: &Value| {
        let (name, arguments) = (&call["function"]["name"], call["function"]["arguments"].as_str().unwrap());
        match name.as_str().unwrap() {
            "weather" => fits(&weather(true)["function"]["parameters"], arguments),
            "clock" => assert_eq!(arguments, "{}"),
            other => panic!("{other}"),
        }
        name.as_str().unwrap().to_owned()
    };
    choice["message"]["tool_calls"]
        .as_array()
        .unwrap_or_else(|| panic!("{choice}"))
        .iter()
        .map(call)
        .collect()
}

#[test]
fn chat_completions_call_what_they_must() {
    let server = Server::start(&[]);
    let tools = json!([weather(false), clock()]);
    for seed in 0..4 {
        let one =
            json!({"tools": tools, "tool_choice": "required", "parallel_tool_calls": false, "seed": seed});
        let answer = chat(&server, one.clone()).ok();
        assert_eq!(calls(&answer["choices"][0]).len(), 1);
        let named = json!({
            "tools": tools, "seed": seed,
            "tool_choice": {"type": "function", "function": {"name": "clock"}},
        });
        assert_eq!(calls(&chat(&server, named).ok()["choices"][0]), ["clock"]);
        // As a stream it is the same call.
        let mut one = one;
        one["stream"] = true.into();
        let (mut name, mut arguments) = (String::new(), String::new());
        for event in chat(&server, one).events() {
            let call = &event["choices"][0]["delta"]["tool_calls"][0];
            assert!(call.is_null() || call["index"] == 0, "{event}");
            name += call["function"]["name"].as_str().unwrap_or_default();
            arguments += call["function"]["arguments"].as_str().unwrap_or_default();
        }
        let whole = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!((&json!(name), &json!(arguments)), (&whole["name"], &whole["arguments"]));
    }
    // A strict tool need not be called; but who begins a call (by a nudge here) keeps to its schema.
    let nudged = json!({
        "tools": [weather(true)], "logit_bias": {token(&server, "["): 100}, "temperature": 0,
        "parallel_tool_calls": false,
    });
    let answer = chat(&server, nudged).ok();
    assert_eq!(calls(&answer["choices"][0]), ["weather"]);
    // An answer that does not begin with a call is free text.
    let plain = json!({"tools": [weather(true)], "max_tokens": 8, "logit_bias": {token(&server, "["): -100}});
    let answer = chat(&server, plain).ok();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert!(!answer["choices"][0]["message"]["content"].as_str().unwrap().is_empty());
}

#[test]
fn answers_follow_expressions_choices_and_grammars() {
    let server = Server::start(&[]);
    let ask = |path: &str, base: Value, more: &Value| {
        let mut body = json!({"model": "tales", "max_tokens": 40});
        body.as_object_mut().unwrap().extend(base.as_object().unwrap().clone());
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post(path, &body)
    };
    let chat = |more: &Value| {
        let messages = json!([{"role": "user", "content": "Who is it?"}]);
        ask("/v1/chat/completions", json!({"messages": messages}), more)
    };
    let of = |text: &str, letters: &str, length: usize| {
        text.chars().count() == length && text.chars().all(|c| letters.contains(c))
    };
    let sentence = |text: &str| {
        let parts = text.split_once(" is ");
        parts.is_some_and(|(who, what)| ["fox", "crab"].contains(&who) && of(what, "abcd", 3))
    };
    let gbnf = "root ::= who \" is \" [a-d]{3}\nwho ::= \"fox\" | # or\n  \"crab\"";
    let lark = "start: who \" is \" /[a-d]{3}/\nwho: \"fox\" | \"crab\"";
    type Case<'c> = (Value, &'c dyn Fn(&str) -> bool);
    let cases: [Case<'_>; 11] = [
        (json!({"structured_outputs": {"regex": "[xy]{4}"}}), &|text| of(text, "xy", 4)),
        (json!({"guided_regex": "[xy]{4}"}), &|text| of(text, "xy", 4)),
        (json!({"structured_outputs": {"choice": ["a.b", "c|d"]}}), &|text| ["a.b", "c|d"].contains(&text)),
        (json!({"guided_choice": ["fox", "crab"]}), &|text| ["fox", "crab"].contains(&text)),
        (json!({"structured_outputs": {"grammar": lark}}), &sentence),
        (json!({"guided_grammar": lark}), &sentence),
        (json!({"structured_outputs": {"grammar": gbnf}}), &sentence),
        (json!({"guided_grammar": gbnf}), &sentence),
        (json!({"grammar": gbnf}), &sentence),
        (json!({"structured_outputs": {"json": {"enum": [17]}}}), &|text| text == "17"),
        (json!({"structured_outputs": {"json_object": true}}), &|text| text.starts_with('{')),
    ];
    for (fields, is_expected) in cases {
        let answer = chat(&fields).ok();
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(is_expected(text), "{fields}: {text:?}");
        let answer = ask("/v1/completions", json!({"prompt": "Once"}), &fields).ok();
        let text = answer["choices"][0]["text"].as_str().unwrap();
        assert!(is_expected(text), "{fields}: {text:?}");
    }
    for (fields, problem) in [
        (json!({"structured_outputs": {"regex": "a(?=b)"}}), "`structured_outputs`: the regular expression"),
        (
            json!({"structured_outputs": {"grammar": "start: nothing"}}),
            "`structured_outputs.grammar`: the Lark grammar",
        ),
        (json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}), "more than once"),
        (json!({"guided_regex": "a", "response_format": {"type": "json_object"}}), "give one"),
        (json!({"guided_regex": "a", "tools": [clock()]}), "send it without `tools`"),
        (json!({"grammar": gbnf, "tools": [clock()]}), "`grammar`: a regular expression"),
        (json!({"grammar": "root ::= <nothing>"}), "line 1, column 10: `<nothing>` is not one token"),
    ] {
        let answer = chat(&fields);
        assert_eq!(answer.status, 400, "{fields}: {}", answer.body);
        assert!(answer.error().contains(problem), "{fields}: {}", answer.error());
    }
}

#[test]
fn responses_fit_and_call() {
    let server = Server::start(&[]);
    let create = |more: Value| {
        let mut body = json!({"model": "tales", "input": "Who is the hero?", "max_output_tokens": 300});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/responses", &body)
    };
    let answer = create(json!({"grammar": "root ::= \"a\"{3} | \"b\"{4}"})).ok();
    let text = answer["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(["aaa", "bbbb"].contains(&text), "{text:?}");
    for (kind, schema) in [("json_schema", hero()), ("json_object", json!({"type": "object"}))] {
        let mut format = json!({"type": kind});
        if kind == "json_schema" {
            format = json!({"type": kind, "name": "hero", "schema": schema, "strict": true});
        }
        let answer = create(json!({"text": {"format": format}})).ok();
        let text = answer["output"][0]["content"][0]["text"].as_str().unwrap();
        if answer["status"] == "completed" {
            fits(&schema, text);
        } else {
            assert!(text.starts_with('{'), "{text}");
        }
    }
    let tool = |named: &Value| {
        let function = &named["function"];
        let mut tool = function.clone();
        tool["type"] = "function".into();
        tool
    };
    let tools = json!([tool(&weather(true)), tool(&clock())]);
    for choice in [json!("required"), json!({"type": "function", "name": "weather"})] {
        let answer =
            create(json!({"tools": tools, "tool_choice": choice, "parallel_tool_calls": false})).ok();
        let output = answer["output"].as_array().unwrap();
        assert_eq!((output.len(), &output[0]["type"]), (1, &json!("function_call")), "{answer}");
        if output[0]["name"] == "weather" {
            fits(&weather(true)["function"]["parameters"], output[0]["arguments"].as_str().unwrap());
        }
    }
}

#[test]
fn messages_fit_and_call() {
    let server = Server::start(&[]);
    let create = |more: Value| {
        let messages = json!([{"role": "user", "content": "Who is the hero?"}]);
        let mut body = json!({"model": "tales", "max_tokens": 300, "messages": messages});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/messages", &body).ok()
    };
    let answer = create(json!({"output_config": {"format": {"type": "json_schema", "schema": hero()}}}));
    fits(&hero(), answer["content"][0]["text"].as_str().unwrap());
    let tool = |tool: Value, more: Value| {
        let function = &tool["function"];
        let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
        let schema = function.get("parameters").unwrap_or(&none);
        let mut tool = json!({"name": function["name"], "input_schema": schema});
        tool.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        tool
    };
    let tools = json!([tool(weather(true), json!({"strict": true})), tool(clock(), json!({}))]);
    let one = |choice: Value| {
        let answer = create(json!({"tools": tools, "tool_choice": choice}));
        let content = answer["content"].as_array().unwrap();
        assert_eq!((content.len(), &answer["stop_reason"]), (1, &json!("tool_use")), "{answer}");
        if content[0]["name"] == "weather" {
            fits(&weather(true)["function"]["parameters"], &content[0]["input"].to_string());
        }
        content[0]["name"].as_str().unwrap().to_owned()
    };
    one(json!({"type": "any", "disable_parallel_tool_use": true}));
    assert_eq!(one(json!({"type": "tool", "name": "clock"})), "clock");
    assert_eq!(one(json!({"type": "tool", "name": "weather", "disable_parallel_tool_use": true})), "weather");
}

/// However many tokens a limit leaves of calls, what streams after the first one is calls.
#[test]
fn a_limit_leaves_no_text_between_calls() {
    let server = Server::start(&[]);
    let schema = json!({"type": "object", "properties": {"hour": {"enum": [1, 2]}}, "required": ["hour"]});
    let tools = json!([{"name": "clock", "input_schema": schema, "strict": true}]);
    let mut cut_after_a_call = 0;
    for max_tokens in 20..60 {
        let body = json!({
            "model": "tales", "max_tokens": max_tokens, "messages": [{"role": "user", "content": "What is the time?"}],
            "tools": tools, "tool_choice": {"type": "any"}, "temperature": 2.0, "stream": true,
        });
        let answer = server.post("/v1/messages", &body);
        assert_eq!(answer.status, 200, "{answer:?}");
        let events = answer.body.lines().filter_map(|line| line.strip_prefix("data: "));
        let blocks: Vec<String> = events
            .map(|event| serde_json::from_str::<Value>(event).unwrap())
            .filter(|event| event["type"] == "content_block_start")
            .map(|event| event["content_block"]["type"].as_str().unwrap().to_owned())
            .collect();
        let calls = blocks.iter().filter(|block| *block == "tool_use").count();
        assert!(calls == 0 || calls == blocks.len(), "{blocks:?} of {}", answer.body);
        cut_after_a_call += usize::from(calls > 0 && answer.body.contains("\"max_tokens\""));
    }
    assert!(cut_after_a_call > 0, "no limit came after a call");
}

#[test]
fn ollamas_answers_fit_their_format() {
    let server = Server::start(&[]);
    for seed in 0..3 {
        let options = json!({"num_predict": 300, "seed": seed, "temperature": 1});
        let body = json!({
            "model": "tales", "messages": [{"role": "user", "content": "Who is the hero?"}], "stream": false,
            "format": hero(), "options": options,
        });
        fits(&hero(), server.post("/api/chat", &body).ok()["message"]["content"].as_str().unwrap());
        for raw in [true, false] {
            let body = json!({
                "model": "tales", "prompt": "The hero is", "raw": raw, "stream": false, "format": hero(),
                "options": options,
            });
            fits(&hero(), server.post("/api/generate", &body).ok()["response"].as_str().unwrap());
        }
    }
    let body = json!({"model": "tales", "prompt": "A", "stream": false, "format": "json", "options": {"num_predict": 20}});
    assert!(server.post("/api/generate", &body).ok()["response"].as_str().unwrap().starts_with('{'));
}

#[test]
fn what_a_schema_cannot_have_is_refused_by_name() {
    let server = Server::start(&[]);
    let refused = |schema: Value, name: &str| {
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        let error = chat(&server, json!({"response_format": format})).error();
        let start =
            "400 invalid_request_error/invalid_value response_format: `response_format`: the JSON schema ";
        assert!(error.starts_with(start) && error.contains(name), "{error}");
    };
    refused(json!({"type": "array", "uniqueItems": true}), "uniqueItems");
    refused(json!({"type": "strnig"}), "strnig");
    refused(json!({"type": "string", "pattern": "(?=a)b"}), "look");
    refused(json!({"$ref": "https://example.com/other.json"}), "example.com");
    refused(json!({"not": {"pattern": "a"}}), "not");
    refused(json!(false), "`false`");
    refused(json!({"properties": {"a": {"items": {"uniqueItems": true}}}}), "`properties.a.items`");
    refused(json!({"x-guidance": {}}), "x-guidance");
    let mut strange = weather(true);
    strange["function"]["parameters"]["properties"]["city"]["contentEncoding"] = json!("base64");
    strange["function"]["parameters"]["properties"]["days"] = json!({"type": "array", "uniqueItems": true});
    let tools = json!({"tools": [strange]});
    let error = chat(&server, tools).error();
    assert!(error.starts_with("400 ") && error.contains("the tool `weather`"), "{error}");
    // One that is not strict is a hint.
    strange["function"]["strict"] = false.into();
    chat(&server, json!({"tools": [strange], "tool_choice": "required", "max_tokens": 8})).ok();
}
