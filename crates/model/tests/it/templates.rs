//! Chat templates compared with Python's jinja2; `templates/expected.py` writes the expected texts.

use std::{fs, path::Path};

use paguro_model::chat::{ChatInput, ChatTemplate, TemplateError, TemplateTokens, WallTime};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::shared;

/// 2024-07-06 13:05:09, as in `expected.py`.
const NOW: WallTime = WallTime { seconds: 1_720_271_109 };

/// The expected texts; another file of them (for another folder of templates) may be named by an environment variable.
fn expected() -> Value {
    let own = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/templates/expected.json");
    let path = std::env::var("PAGURO_EXPECTED_TEXTS").unwrap_or_else(|_| own.to_owned());
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn input(conversation: &Value) -> ChatInput {
    let extra: Map<String, Value> = conversation["extra"].as_object().cloned().unwrap_or_default();
    ChatInput {
        messages: conversation["messages"].clone(),
        tools: conversation.get("tools").cloned(),
        add_generation_prompt: conversation["add_generation_prompt"] == true,
        extra,
        now: Some(NOW),
    }
}

fn tokens(expected: &Value) -> TemplateTokens {
    let token = |name: &str| expected["tokens"][name].as_str().map(str::to_owned);
    TemplateTokens {
        bos: token("bos_token"),
        eos: token("eos_token"),
        pad: token("pad_token"),
        unk: token("unk_token"),
    }
}

/// How a rendering differs from what jinja2 gives: a text, `{"raises": message}` by the template itself, or
/// `{"error": ...}` by Python.
fn difference(
    source: &str,
    tokens: TemplateTokens,
    conversation: &Value,
    expected: &Value,
) -> Option<String> {
    let actual = ChatTemplate::new(source, tokens).and_then(|template| template.render(&input(conversation)));
    let agrees = match (&actual, expected) {
        (Ok(text), Value::String(expected)) => text == expected,
        (Err(TemplateError::Raised(message)), Value::Object(raised)) if raised.contains_key("raises") => {
            raised["raises"] == *message
        }
        (Err(_), Value::Object(raised)) => raised.contains_key("error"),
        _ => false,
    };
    (!agrees).then(|| match (&actual, expected) {
        (Ok(text), Value::String(expected)) => format!("got      {text:?}\nexpected {expected:?}"),
        _ => format!("got      {actual:?}\nexpected {expected}"),
    })
}

fn check_folder(folder: &Path, expected: &Value) {
    let mut differences = Vec::new();
    let mut checked = 0;
    for (name, template) in expected["templates"].as_object().unwrap() {
        let path = folder.join(name);
        let Ok(source) = fs::read_to_string(&path) else {
            println!("skipped: {} not present", path.display());
            continue;
        };
        let hash: String = Sha256::digest(&source).iter().map(|byte| format!("{byte:02x}")).collect();
        if template["sha256"] != hash {
            println!("skipped: {} is not the file that the expected texts were made from", path.display());
            continue;
        }
        for (conversation, text) in template["texts"].as_object().unwrap() {
            let case = &expected["conversations"][conversation];
            // Templates for tools are rendered with tools only. Python cannot iterate over none, minijinja can.
            if name.ends_with("tool_use.jinja") && case.get("tools").is_none() {
                continue;
            }
            let difference = difference(&source, tokens(expected), case, text);
            differences.extend(difference.map(|difference| format!("{name}, {conversation}:\n{difference}")));
            checked += 1;
        }
    }
    println!("{checked} texts of real templates");
    assert!(differences.is_empty(), "{} differences:\n{}", differences.len(), differences.join("\n\n"));
}

#[test]
fn real_templates_render_as_in_python() {
    let Some(folder) = shared::folder("templates") else { return };
    check_folder(&folder, &expected());
}

#[test]
fn each_feature_renders_as_in_python() {
    let expected = expected();
    let mut differences = Vec::new();
    let cases = expected["synthetic"].as_array().unwrap();
    for case in cases {
        let source = case["source"].as_str().unwrap();
        let conversation = &expected["conversations"][case["conversation"].as_str().unwrap()];
        let difference = difference(source, tokens(&expected), conversation, &case["text"]);
        differences.extend(difference.map(|difference| format!("{source}\n{difference}")));
    }
    println!("{} templates", cases.len());
    assert!(differences.is_empty(), "{} differences:\n{}", differences.len(), differences.join("\n\n"));
}
