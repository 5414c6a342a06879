//! The same schemas through every API: answers validate, and a refusal has the keyword and its place.

use std::thread;

use serde_json::{Value, json};

use super::http::{Answer, Server};

/// A way to send a schema, and the place of the answer's JSON.
type Api = (&'static str, fn(&Value) -> Value, fn(&Value) -> Option<String>);

fn messages() -> Value {
    json!([{"role": "user", "content": "Who is the hero?"}])
}

fn tools(function: Value) -> Value {
    json!({
        "model": "tales", "messages": messages(), "max_tokens": 300, "tools": [{"type": "function", "function": function}],
        "tool_choice": "required", "parallel_tool_calls": false,
    })
}

fn content(answer: &Value) -> Option<String> {
    let choice = &answer["choices"][0];
    (choice["finish_reason"] == "stop").then(|| choice["message"]["content"].as_str().unwrap().to_owned())
}

fn arguments(answer: &Value) -> Option<String> {
    let choice = &answer["choices"][0];
    let arguments = &choice["message"]["tool_calls"][0]["function"]["arguments"];
    (choice["finish_reason"] == "tool_calls").then(|| arguments.as_str().unwrap().to_owned())
}

fn text(answer: &Value) -> Option<String> {
    let choice = &answer["choices"][0];
    (choice["finish_reason"] == "stop").then(|| choice["text"].as_str().unwrap().to_owned())
}

const APIS: [Api; 12] = [
    (
        "/v1/chat/completions",
        |schema| {
            let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": true}});
            json!({"model": "tales", "messages": messages(), "max_tokens": 300, "response_format": format})
        },
        content,
    ),
    (
        "/v1/chat/completions",
        |schema| json!({"model": "tales", "messages": messages(), "max_tokens": 300, "json_schema": schema}),
        content,
    ),
    (
        "/v1/chat/completions",
        |schema| json!({"model": "tales", "messages": messages(), "max_tokens": 300, "guided_json": schema}),
        content,
    ),
    (
        "/v1/chat/completions",
        |schema| {
            let grammar = format!("start: %json {schema}");
            json!({"model": "tales", "messages": messages(), "max_tokens": 300, "structured_outputs": {"grammar": grammar}})
        },
        content,
    ),
    (
        "/v1/chat/completions",
        |schema| tools(json!({"name": "hero", "parameters": schema, "strict": true})),
        arguments,
    ),
    ("/v1/chat/completions", |schema| tools(json!({"name": "hero", "parameters": schema})), arguments),
    (
        "/v1/completions",
        |schema| json!({"model": "tales", "prompt": "The fox", "max_tokens": 300, "structured_outputs": {"json": schema}}),
        text,
    ),
    (
        "/v1/responses",
        |schema| {
            let format = json!({"type": "json_schema", "name": "x", "schema": schema});
            json!({"model": "tales", "input": "Who?", "max_output_tokens": 300, "text": {"format": format}})
        },
        |answer| {
            let text = &answer["output"][0]["content"][0]["text"];
            (answer["status"] == "completed").then(|| text.as_str().unwrap().to_owned())
        },
    ),
    (
        "/v1/messages",
        |schema| {
            let format = json!({"format": {"type": "json_schema", "schema": schema}});
            json!({"model": "tales", "messages": messages(), "max_tokens": 300, "output_config": format})
        },
        |answer| {
            let text = &answer["content"][0]["text"];
            (answer["stop_reason"] == "end_turn").then(|| text.as_str().unwrap().to_owned())
        },
    ),
    (
        "/v1/messages",
        |schema| {
            json!({
                "model": "tales", "messages": messages(), "max_tokens": 300, "tool_choice": {"type": "tool", "name": "hero"},
                "tools": [{"name": "hero", "input_schema": schema, "strict": true}],
            })
        },
        |answer| (answer["stop_reason"] == "tool_use").then(|| answer["content"][0]["input"].to_string()),
    ),
    (
        "/api/chat",
        |schema| {
            let options = json!({"num_predict": 300, "temperature": 1.3});
            json!({"model": "tales", "messages": messages(), "stream": false, "format": schema, "options": options})
        },
        |answer| {
            (answer["done_reason"] == "stop")
                .then(|| answer["message"]["content"].as_str().unwrap().to_owned())
        },
    ),
    (
        "/api/generate",
        |schema| {
            let options = json!({"num_predict": 300, "temperature": 1.3});
            json!({"model": "tales", "prompt": "The hero", "stream": false, "format": schema, "options": options})
        },
        |answer| (answer["done_reason"] == "stop").then(|| answer["response"].as_str().unwrap().to_owned()),
    ),
];

/// Sends a schema by each API at once.
fn each(server: &Server, schema: &Value) -> Vec<Answer> {
    thread::scope(|scope| {
        let send = |(path, body, _): &'static Api| {
            let mut body = body(schema);
            if !path.starts_with("/api") {
                body["temperature"] = 1.3.into();
            }
            scope.spawn(move || server.post(path, &body))
        };
        let answers: Vec<_> = APIS.iter().map(send).collect();
        answers.into_iter().map(|answer| answer.join().unwrap()).collect()
    })
}

#[test]
fn answers_validate_in_every_api() {
    let server = Server::start(&[]);
    let part = |kind: &str| {
        json!({
            "type": "object", "properties": {"kind": {"const": kind}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["kind"],
        })
    };
    let schemas = [
        json!({"type": "object", "properties": {"site": {"type": "string", "format": "file-path", "maxLength": 5}}, "required": ["site"]}),
        json!({"type": "object", "propertyNames": {"type": "string", "maxLength": 2}, "additionalProperties": {"type": "boolean"}, "maxProperties": 2}),
        json!({
            "type": "object", "properties": {"pet": {"oneOf": [part("fox"), part("owl")], "discriminator": {"propertyName": "kind"}}, "on": {"type": "boolean"}},
            "required": ["pet"],
        }),
        json!({"$defs": {"base": part("hen")}, "type": "object", "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"on": {"type": "boolean"}}}]}),
        json!({"type": "object", "properties": {"day": {"type": "string", "format": "date"}, "set": {"items": {"enum": ["a", "b"]}, "type": "array", "uniqueItems": true}}, "required": ["set"]}),
    ];
    let (mut ended, mut sent) = (0, 0);
    for schema in &schemas {
        let validator = jsonschema::options().should_validate_formats(true).build(schema).unwrap();
        for (answer, (path, _, read)) in each(&server, schema).iter().zip(&APIS) {
            let answer = answer.ok();
            sent += 1;
            let Some(text) = read(&answer) else { continue };
            ended += 1;
            let value: Value =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
            assert!(validator.is_valid(&value), "{path}: {text} of {schema}");
            assert!(value["age"].is_null() && value["pet"]["age"].is_null());
        }
    }
    assert!(ended * 10 >= sent * 9, "{ended} of {sent} answers came to their end");
}

#[test]
fn refusals_have_keyword_place_and_remedy_in_every_api() {
    let server = Server::start(&[]);
    let set = json!({"type": "array", "items": {"type": "string"}, "uniqueItems": true});
    let schema = json!({"type": "object", "properties": {"tags": set}, "required": ["tags"]});
    for (index, answer) in each(&server, &schema).iter().enumerate() {
        // A tool that is not strict is a hint.
        if index == 5 {
            answer.ok();
            continue;
        }
        assert_eq!(answer.status, 400, "{index}: {}", answer.body);
        for words in ["`uniqueItems` at `properties.tags`", "remove repeated items"] {
            assert!(answer.body.contains(words), "{index}: {}", answer.body);
        }
    }
}
