//! Conversations with trained models: the prefix cache changes no bit, and spares nearly all of the history.

use std::path::Path;

use paguro_backend::Backend;
use paguro_engine::{Engine, EngineOptions, Event, PageBudget, Request};
use paguro_model::{LoadOptions, Model, chat::ChatInput};
use serde_json::{Value, json};

use super::cpu;
use crate::common::shared;

const TURNS: usize = 20;
const ANSWER: usize = 20;
/// Prompt tokens that a turn computes beyond those that are new to the history, at most: up to the beginning of a block, and
/// where there are states, as far as the end of a prompt may be from the checkpoint before it.
const MOST_AGAIN: usize = 32 + 64;

/// One turn's answer: tokens with the bits of their log-probabilities.
type Answer = Vec<(u32, u32)>;

/// Plays a conversation. Returns the answers, and for each turn the tokens of the prompt, those that the next turns share, and
/// those that were cached.
fn converse(
    backend: &dyn Backend,
    path: &Path,
    turns: usize,
    prefix_cache: bool,
) -> (Vec<Answer>, Vec<[usize; 3]>) {
    let model = Model::open(path, &LoadOptions { max_context: Some(2048) }).unwrap();
    let options = EngineOptions { prefix_cache, pages: PageBudget::Tokens(2048), ..EngineOptions::default() };
    let engine = Engine::start(backend, &model, options).unwrap();
    let template = model.chat_template.as_ref().unwrap();
    let mut messages: Vec<Value> = Vec::new();
    let (mut answers, mut counts) = (Vec::new(), Vec::new());
    for turn in 0..turns {
        let animal = ["fox", "owl", "hare", "crab"][turn % 4];
        let text = format!("Tell me more about the {animal} of day {turn}");
        messages.push(json!({"role": "user", "content": text}));
        let input = ChatInput::new(messages.iter().cloned().collect());
        let prompt = template.prompt(&input, &model.tokenizer).unwrap();
        let tokens = model.tokenizer.encode_chat(&prompt);
        let lasting = template.lasting_tokens(&input, &prompt, tokens.len(), &model.tokenizer);
        assert!((1..tokens.len()).contains(&lasting), "{lasting} of {}", tokens.len());
        let mut count = [tokens.len(), lasting, 0];
        let request = Request {
            max_tokens: Some(ANSWER),
            ignore_stop_tokens: true,
            logprobs: Some(0),
            lasting_tokens: Some(lasting),
            ..Request::new(tokens)
        };
        let mut generation = engine.handle().generate(request).unwrap();
        let (mut answer, mut text) = (Vec::new(), String::new());
        while let Some(event) = generation.next_blocking() {
            match event {
                Event::Started { cached_tokens, .. } => count[2] = cached_tokens,
                Event::Token { token, text: piece, logprob, .. } => {
                    answer.push((token, logprob.unwrap().to_bits()));
                    text += &piece;
                }
                Event::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
        answers.push(answer);
        counts.push(count);
        messages.push(json!({"role": "assistant", "content": text}));
    }
    assert_eq!(engine.handle().check_pages().unwrap(), Ok(()));
    (answers, counts)
}

/// Checks that a conversation's answers are the same with and without the prefix cache, and that turns compute little again.
fn check(backend: &dyn Backend, name: &str, turns: usize) {
    let Some(path) = shared(&format!("model/families/tales-{name}.gguf")) else { return };
    let (expected, without) = converse(backend, &path, turns, false);
    let (answers, counts) = converse(backend, &path, turns, true);
    assert!(answers == expected, "{name}: the prefix cache changes answers");
    assert!(without.iter().all(|&[_, _, cached]| cached == 0));
    for turn in counts.windows(2) {
        let ([_, lasting, _], [_, _, cached]) = (turn[0], turn[1]);
        assert!(cached + MOST_AGAIN >= lasting, "{name}: {counts:?}");
    }
    let all: usize = counts.iter().map(|[tokens, ..]| tokens).sum();
    let cached: usize = counts.iter().map(|[.., cached]| cached).sum();
    println!("{name}: {cached} of {all} prompt tokens in {turns} turns were cached");
}

#[test]
fn conversations_compute_what_is_new_and_answer_the_same() {
    for name in ["qwen35-Q8_0", "lfm2moe-Q8_0", "gptoss-MXFP4"] {
        check(&cpu(), name, TURNS);
    }
}

/// The same on this machine's first GPU, which may be a software driver: one hybrid, fewer turns.
#[cfg(any(feature = "gpu", target_os = "macos"))]
#[test]
fn conversations_on_a_gpu_answer_the_same() {
    if let Some(gpu) = crate::common::gpu() {
        check(&gpu, "lfm2moe-Q8_0", 3);
    }
}
