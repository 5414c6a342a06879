//! The trained model that sees, through every API: answers equal the reference, an image of an earlier turn is neither decoded nor
//! encoded again, and requests of programs with images are answered.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use super::{
    common::shared,
    http::{Answer, Server},
};

const MODEL: &str = "qwen3vl-hf";

/// A question of the reference.
struct Question {
    text: String,
    answer: String,
    /// PNG files in base64.
    images: Vec<String>,
}

fn folder() -> Option<PathBuf> {
    shared("model/vision/qwen3vl-hf")
}

fn questions(folder: &Path) -> Vec<Question> {
    let list: Value =
        serde_json::from_slice(&fs::read(folder.join("reference/reference.json")).unwrap()).unwrap();
    let question = |entry: &Value| Question {
        text: entry["question"].as_str().unwrap().to_owned(),
        answer: entry["answer"].as_str().unwrap().to_owned(),
        images: entry["pictures"]
            .as_array()
            .unwrap()
            .iter()
            .map(|name| {
                let file = folder.join("reference").join(name.as_str().unwrap());
                base64(&fs::read(file).unwrap())
            })
            .collect(),
    };
    list.as_array().unwrap().iter().map(question).collect()
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let four = |three: &[u8]| {
        let bits = three.iter().fold(0, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - three.len()));
        let letter = move |at: usize| match at > three.len() {
            true => '=',
            false => char::from(LETTERS[(bits >> (18 - 6 * at) & 63) as usize]),
        };
        [0, 1, 2, 3].map(letter)
    };
    bytes.chunks(3).flat_map(four).collect()
}

fn start(folder: &Path, more: &[&str]) -> Server {
    let model = folder.to_str().unwrap();
    Server::start(&[&[model, "--device", "cpu"], more].concat())
}

impl Question {
    fn urls(&self) -> impl Iterator<Item = String> {
        self.images.iter().map(|image| format!("data:image/png;base64,{image}"))
    }

    /// Content of OpenAI's chat.
    fn parts(&self) -> Value {
        let images = self.urls().map(|url| json!({"type": "image_url", "image_url": {"url": url}}));
        images.chain([json!({"type": "text", "text": self.text})]).collect()
    }

    /// Content of Anthropic's messages.
    fn blocks(&self) -> Value {
        let source = |data: &String| json!({"type": "base64", "media_type": "image/png", "data": data});
        let images = self.images.iter().map(|data| json!({"type": "image", "source": source(data)}));
        images.chain([json!({"type": "text", "text": self.text})]).collect()
    }

    /// Requests in the words of every API, each with the place of the text in the answer.
    fn requests(&self) -> Vec<(&'static str, Value, &'static str)> {
        let words = json!({"type": "input_text", "text": self.text});
        let inputs: Value = self
            .urls()
            .map(|url| json!({"type": "input_image", "image_url": url, "detail": "auto"}))
            .chain([words])
            .collect();
        let ollama = json!({"role": "user", "content": self.text, "images": self.images});
        let options = json!({"temperature": 0, "num_predict": 40});
        let places = "<__media__>".repeat(self.images.len());
        let prompt = format!("<|user|>\n{places}{}<|end|>\n<|assistant|>\n", self.text);
        vec![
            (
                "/completion",
                json!({
                    "prompt": {"prompt_string": prompt, "multimodal_data": self.images},
                    "n_predict": 40,
                    "temperature": 0,
                }),
                "/content",
            ),
            (
                "/v1/chat/completions",
                json!({"messages": [{"role": "user", "content": self.parts()}], "temperature": 0, "max_tokens": 40}),
                "/choices/0/message/content",
            ),
            (
                "/v1/responses",
                json!({"input": [{"role": "user", "content": inputs}], "temperature": 0, "max_output_tokens": 40}),
                "/output/0/content/0/text",
            ),
            (
                "/v1/messages",
                json!({"messages": [{"role": "user", "content": self.blocks()}], "temperature": 0, "max_tokens": 40}),
                "/content/0/text",
            ),
            (
                "/api/chat",
                json!({"messages": [ollama], "stream": false, "options": options}),
                "/message/content",
            ),
            (
                "/api/generate",
                json!({"prompt": self.text, "images": self.images, "stream": false, "options": options}),
                "/response",
            ),
        ]
    }
}

fn named(mut body: Value) -> Value {
    body["model"] = MODEL.into();
    body
}

#[track_caller]
fn text_of<'a>(answer: &'a Value, place: &str) -> &'a str {
    answer.pointer(place).and_then(Value::as_str).unwrap_or_else(|| panic!("no {place}: {answer}"))
}

#[test]
fn every_api_answers_as_the_reference() {
    let Some(folder) = folder() else { return };
    let server = start(&folder, &[]);
    for question in questions(&folder) {
        for (path, body, place) in question.requests() {
            let answer = server.post(path, &named(body)).ok();
            assert_eq!(text_of(&answer, place), question.answer, "{path}: {}", question.text);
        }
    }
    // Streams have the same text.
    let question = &questions(&folder)[0];
    let (path, body, _) = question.requests().remove(0);
    let mut body = named(body);
    body["stream"] = true.into();
    let pieces = server.post(path, &body).events();
    let text: String =
        pieces.iter().filter_map(|piece| piece["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, question.answer);
}

#[test]
fn an_image_of_an_earlier_turn_is_not_computed_again() {
    let Some(folder) = folder() else { return };
    let server = start(&folder, &[]);
    let question = &questions(&folder)[0];
    let counts = || {
        ["paguro_images_total", "paguro_images_decoded_total", "paguro_images_encoded_total"]
            .map(|name| server.metric(name).unwrap_or(0.0))
    };
    let first = json!({"role": "user", "content": question.parts()});
    let body = named(json!({"messages": [first], "temperature": 0, "max_tokens": 40}));
    let answer = server.post("/v1/chat/completions", &body).ok();
    assert_eq!(counts(), [1.0, 1.0, 1.0]);
    assert!(server.metric("paguro_encoder_seconds_total").unwrap() > 0.0);
    let more = [
        json!({"role": "assistant", "content": text_of(&answer, "/choices/0/message/content")}),
        json!({"role": "user", "content": "What shape is it?"}),
    ];
    let messages: Vec<Value> = [first].into_iter().chain(more).collect();
    let body = named(json!({"messages": messages, "temperature": 0, "max_tokens": 40}));
    let answer = server.post("/v1/chat/completions", &body).ok();
    assert_eq!(counts(), [2.0, 1.0, 1.0]);
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached >= 32, "{answer}");
    // Another text before the image: its rows are there, and K and V are not.
    let system = json!({"role": "system", "content": "Answer in one word."});
    let messages: Vec<Value> = [system].into_iter().chain(messages).collect();
    server.post("/v1/chat/completions", &named(json!({"messages": messages, "max_tokens": 2}))).ok();
    assert_eq!(counts(), [3.0, 1.0, 1.0]);
    assert_eq!(server.metric("paguro_encoder_cache_hits_total"), Some(1.0));
}

/// Requests as Open WebUI and Claude Code send them.
#[test]
fn programs_send_images_in_their_forms() {
    let Some(folder) = folder() else { return };
    let server = start(&folder, &[]);
    let question = &questions(&folder)[0];
    let recorded: Value = serde_json::from_str(include_str!("recorded/images.json")).unwrap();
    for entry in recorded.as_array().unwrap() {
        let body = entry["body"].to_string();
        let body = body.replace("IMAGE", &question.images[0]).replace("MODEL", MODEL);
        let body: Value = serde_json::from_str(&body.replace("QUESTION", &question.text)).unwrap();
        let (path, from) = (entry["path"].as_str().unwrap(), &entry["from"]);
        let answer = server.post(path, &body);
        let ignored = entry["ignored"].as_str();
        assert_eq!((answer.status, answer.header("x-paguro-ignored")), (200, ignored), "{from}: {answer:?}");
        let text = streamed(&answer);
        // The prompts of agents are not those that the model was trained with.
        if entry["answers"] == json!(true) {
            assert_eq!(text, question.answer, "{from}");
        }
        assert!(!text.is_empty(), "{from}: {answer:?}");
    }
    let count = json!({"messages": [{"role": "user", "content": question.blocks()}]});
    let count = server.post("/v1/messages/count_tokens", &named(count)).ok();
    assert_eq!(count["input_tokens"], 39, "the prompt of the reference");
    assert_eq!(server.metric("paguro_images_decoded_total"), Some(1.0), "all of them have one image");
}

/// The text of an answer, which may be a stream of either API.
fn streamed(answer: &Answer) -> String {
    if !answer.body.starts_with(['e', 'd']) {
        return text_of(&answer.json(), "/message/content").to_owned();
    }
    let events = answer.body.lines().filter_map(|line| line.strip_prefix("data: "));
    let events = events.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    events
        .filter_map(|event| {
            let openai = event.pointer("/choices/0/delta/content");
            openai.or_else(|| event.pointer("/delta/text"))?.as_str().map(str::to_owned)
        })
        .collect()
}
