//! Answers with a grammar on the engine, the CPU backend and the embedded model: they fit their schema for any seed,
//! and other sequences of the batch are not affected.

use std::{path::Path, sync::LazyLock};

use expect_test::{Expect, expect};
use paguro_backend::SamplingParams;
use paguro_backend_cpu::{Cpu, CpuOptions};
use paguro_engine::{
    Engine, EngineOptions, Event, FinishReason, Generation, Grammar, PageBudget, Request, RequestError,
};
use paguro_model::{LoadOptions, Model, tokenizer::SpecialTokens};
use serde_json::{Value, json};

static MODEL: LazyLock<Model> = LazyLock::new(|| {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tales/tales-Q8_0.gguf");
    Model::open(&file, &LoadOptions { max_context: Some(1024) }).unwrap()
});

fn engine(options: EngineOptions) -> Engine {
    let backend = Cpu::new(CpuOptions { threads: Some(2), poison: true, ..CpuOptions::default() });
    Engine::start(&backend, &*MODEL, options).unwrap()
}

fn request(question: &str, seed: u64) -> Request {
    let text = format!("<|user|>\n{question}<|end|>\n<|assistant|>\n");
    Request {
        prompt: MODEL.tokenizer.encode_prompt(&text, SpecialTokens::Parse),
        max_tokens: Some(200),
        sampling: SamplingParams { temperature: 0.9, seed, ..SamplingParams::default() },
        logprobs: Some(0),
        ..Request::default()
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    text: String,
    /// Tokens with the bits of their log-probabilities.
    tokens: Vec<(u32, u32)>,
    reason: Option<FinishReason>,
}

fn read(mut generation: Generation, branches: usize) -> Result<Vec<Answer>, RequestError> {
    let mut answers = vec![Answer::default(); branches];
    while let Some(event) = generation.next_blocking() {
        match event {
            Event::Token { branch, token, text, logprob, .. } => {
                answers[branch].text += &text;
                answers[branch].tokens.push((token, logprob.expect("it was asked for").to_bits()));
            }
            Event::Finished { branch, text, reason, .. } => {
                answers[branch].text += &text;
                answers[branch].reason = Some(reason);
            }
            Event::Failed(error) => return Err(error),
            _ => {}
        }
    }
    Ok(answers)
}

fn schemas() -> Vec<Value> {
    vec![
        json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 12}}, "required": ["name", "age"], "additionalProperties": false}),
        json!({"type": "array", "items": {"enum": ["fox", "owl", "mouse", null, 7]}, "minItems": 2, "maxItems": 5}),
        json!({"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": {"a": [1, 2]}}]}),
        json!({"type": "number", "minimum": -2.5, "exclusiveMaximum": 8}),
        json!({"type": "string", "pattern": "^[a-z]{3,9}( [a-z]{2,7}){1,4}$"}),
        json!({"type": "string", "format": "date"}),
        json!({"$defs": {"node": {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "required": ["value", "next"], "additionalProperties": false}}, "$ref": "#/$defs/node"}),
        json!({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"b": {"type": "string", "enum": ["é", "日本\n\"x\"", "\\"]}}, "required": ["b"]}]}),
        json!({"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3}),
        json!({"type": "array", "prefixItems": [{"type": "string", "maxLength": 5}, {"type": "integer"}], "items": false, "minItems": 2}),
        json!({"type": ["integer", "null"], "multipleOf": 4}),
        json!({"oneOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "integer"}, {"type": "object", "properties": {"kind": {"const": "x"}}, "required": ["kind"]}]}),
        json!({}),
    ]
}

/// Half of the requests have a schema, with several branches, penalties and too few pages; the other half have none.
/// All must equal the bits of a solo run.
#[test]
fn answers_fit_their_schemas_and_neighbours_notice_nothing() {
    let schemas = schemas();
    let requests: Vec<_> = (0..48)
        .map(|i: usize| {
            let mut request =
                request(&format!("Tell me about number {i}, {}", "please, ".repeat(i % 7)), i as u64);
            let schema = i.is_multiple_of(2).then(|| i / 2 % schemas.len());
            if schema.is_some() {
                request.branches = 1 + i % 3;
                request.sampling.repetition_penalty = [1.0, 1.2][i / 2 % 2];
            } else {
                request.max_tokens = Some(40);
            }
            (request, schema)
        })
        .collect();
    let run = |options, together: bool| {
        let engine = engine(options);
        let handle = engine.handle();
        // Prepared in advance, so that they start together.
        let prepared: Vec<_> = requests
            .iter()
            .map(|(request, schema)| {
                let constraint =
                    schema.map(|index| handle.compile(&Grammar::JsonSchema(schemas[index].clone())).unwrap());
                Request { constraint, ..request.clone() }
            })
            .collect();
        let submit = |request: Request| (request.branches, handle.generate(request).unwrap());
        let finish = |(branches, generation)| read(generation, branches).unwrap();
        let answers: Vec<_> = if together {
            let generations: Vec<_> = prepared.into_iter().map(submit).collect();
            generations.into_iter().map(finish).collect()
        } else {
            prepared.into_iter().map(submit).map(finish).collect()
        };
        (answers, handle.stats())
    };
    let few = EngineOptions { block_size: 16, pages: PageBudget::Tokens(256), ..EngineOptions::default() };
    let (together, stats) = run(few, true);
    assert!(stats.preemptions > 0, "{stats:?}");
    let (alone, _) = run(EngineOptions { prefix_cache: false, ..EngineOptions::default() }, false);
    assert_eq!(together, alone);

    let mut whole = 0;
    for (answers, (_, schema)) in together.iter().zip(&requests) {
        let Some(schema) = schema.map(|index| &schemas[index]) else { continue };
        let validator =
            jsonschema::draft202012::options().should_validate_formats(true).build(schema).unwrap();
        for answer in answers {
            match &answer.reason {
                Some(FinishReason::Complete | FinishReason::Stop(_)) => {
                    let value = serde_json::from_str(&answer.text)
                        .unwrap_or_else(|error| panic!("{error}: {:?} for {schema}", answer.text));
                    assert!(validator.is_valid(&value), "{value} does not fit {schema}");
                    whole += 1;
                }
                reason => assert_eq!(reason, &Some(FinishReason::Length), "{:?} for {schema}", answer.text),
            }
        }
    }
    assert!(whole > 30, "only {whole} answers came to an end");
}

/// The text, how often the answer was cut, and why it ended.
fn check(grammar: Grammar, change: impl FnOnce(&mut Request), expected: Expect) {
    let engine = engine(EngineOptions::default());
    let handle = engine.handle();
    let mut request = request("Tell me a story about a shy fox", 3);
    request.sampling.temperature = 0.0;
    request.constraint = Some(handle.compile(&grammar).unwrap());
    change(&mut request);
    let said = match read(handle.generate(request).unwrap(), 1) {
        Ok(answers) => format!("{:?} {:?}", answers[0].text, answers[0].reason.as_ref().unwrap()),
        Err(error) => error.to_string(),
    };
    expected.assert_eq(&said);
}

fn regex(pattern: &str) -> Grammar {
    Grammar::Regex(pattern.into())
}

#[test]
fn an_answer_ends_where_its_grammar_does() {
    check(regex("The (red|blue) fox\\."), |_| {}, expect![[r#""The red fox." Complete"#]]);
    // Where the text may end but need not, the model decides.
    check(
        regex("[A-Z][a-z ,]+\\.( [A-Z][a-z ,]+\\.)*"),
        |r| r.max_tokens = Some(60),
        expect![[
            r#""Once upon a time, there was a shy fox. The fox lived in a valley between two mountains. When guests came, he turned as red as a tomato. The fox had a dream. He wanted to touch the evening star. One special day, he began. He tried standing on" Length"#
        ]],
    );
    check(
        Grammar::Lark(
            "start: pair (\", \" pair)*\npair: /[a-z]{2,5}/ \": \" NUMBER\nNUMBER: /[0-9]{1,3}/".into(),
        ),
        |r| r.max_tokens = Some(24),
        expect![[r#""theas: 48, agexo: 4, crack: 204, axeck:" Length"#]],
    );
    check(
        Grammar::JsonObject,
        |r| r.max_tokens = Some(40),
        expect![[
            r#""{\"name\": \"The Fox and the Lie: \"\n,\" said the shy fox to everyone she met. She lived in a valley between two mountains. She spoke so softly that hardly" Length"#
        ]],
    );
}

#[test]
fn other_ends_work_within_a_grammar() {
    check(regex("(fox |owl ){20}"), |r| r.max_tokens = Some(5), expect![[r#""fox o" Length"#]]);
    check(
        regex("(fox |owl ){20}!"),
        |r| r.stop_strings = vec!["never".into(), "x owl ow".into()],
        expect![[r#""fo" StopString("x owl ow")"#]],
    );
    // The end of the text is a token like any other then, and the grammar's end all the same.
    check(regex("(fox )?"), |r| r.ignore_stop_tokens = true, expect![[r#""fox " Complete"#]]);
    // Where the answer is whole with its last token, it is not cut.
    check(regex("a"), |r| r.max_tokens = Some(1), expect![[r#""a" Complete"#]]);
}

fn refused(grammar: Grammar, expected: Expect) {
    static ENGINE: LazyLock<Engine> = LazyLock::new(|| engine(EngineOptions::default()));
    expected.assert_eq(&ENGINE.handle().compile(&grammar).unwrap_err().to_string());
}

#[test]
fn what_cannot_be_honoured_is_refused_by_name() {
    refused(
        regex("a(?=b)"),
        expect![
            "the regular expression cannot be followed: look-around, including look-ahead and look-behind, is not supported"
        ],
    );
    refused(regex("(a"), expect!["the regular expression cannot be followed: unclosed group"]);
    refused(
        Grammar::Lark("begin: \"a\"".into()),
        expect!["the Lark grammar cannot be followed: no start rule found"],
    );
    refused(
        Grammar::Lark("start: body\nbody[temperature=0.5]: /a+/".into()),
        expect![
            "the Lark grammar cannot be followed: the attribute `temperature` is not supported; leave it out"
        ],
    );
    refused(
        Grammar::Lark("start: body\nbody[max_tokens=3, stop=\"x\"]: /a+/".into()),
        expect!["the Lark grammar cannot be followed: the attribute `stop` is not supported; leave it out"],
    );
    let schema = |schema| Grammar::JsonSchema(schema);
    refused(
        schema(json!({"type": "array", "uniqueItems": true})),
        expect![
            "the JSON schema cannot be followed: `uniqueItems` is supported for items of at most 8 values (`enum`); leave it out, and remove repeated items from the answer"
        ],
    );
    refused(
        schema(json!({"oneOf": [{"type": "integer"}, {"type": "number"}]})),
        expect![
            "the JSON schema cannot be followed: `oneOf`: a value may fit its alternatives 1 and 0 at once; use `anyOf`, or a required property with different values (`const`)"
        ],
    );
    refused(
        schema(json!({"$ref": "https://example.com/schema.json"})),
        expect![
            "the JSON schema cannot be followed: `$ref`: `https://example.com/schema.json` is in another document; copy it into `$defs` and refer to `#/$defs/...`"
        ],
    );
    refused(
        schema(json!({"type": "integer", "minimum": 3, "maximum": 2})),
        expect![
            "the JSON schema cannot be followed: Unsatisfiable schema: minimum (3) is greater than maximum (2)"
        ],
    );
    refused(
        schema(json!({"x-guidance": {"lenient": true}, "uniqueItems": true})),
        expect!["the JSON schema cannot be followed: the key `x-guidance` is not supported; leave it out"],
    );
    refused(schema(json!(false)), expect!["the JSON schema cannot be followed: `false` allows nothing"]);
    refused(
        schema(json!([1])),
        expect!["the JSON schema cannot be followed: a schema is an object or a boolean"],
    );
    // Keys that are no keywords are remarks, as the standard has it.
    let engine = engine(EngineOptions::default());
    engine.handle().compile(&schema(json!({"type": "null", "title": "Nothing", "x-order": 3}))).unwrap();
    let other =
        Request { constraint: Some(engine.handle().compile(&regex("a")).unwrap()), ..request("Hello", 0) };
    drop(engine);
    let engine = self::engine(EngineOptions::default());
    let error = engine.handle().generate(other).unwrap_err().to_string();
    expect!["`constraint` was made for another engine; make it with this one's handle"].assert_eq(&error);
}
