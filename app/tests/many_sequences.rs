//! 32 sequences of different lengths on the real engine, the CPU backend and the embedded model. The pages hold about 10 of
//! them. Text and log-probabilities of each sequence, some with those of the prompt, are equal bit for bit to a run alone,
//! and no page is lost.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use paguro_backend::SamplingParams;
use paguro_backend_cpu::{Cpu, CpuOptions};
use paguro_engine::{Engine, EngineOptions, Event, Generation, PageBudget, Request, Score};
use paguro_model::{LoadOptions, Model, tokenizer::SpecialTokens};

const SEQUENCES: u64 = 32;
const PAGES_FOR: usize = 10;
const BLOCK: usize = 16;

/// Request number `i`: a prompt of 4 to about 150 tokens and an answer of 5 to 154.
fn request(model: &Model, i: u64) -> Request {
    let names = ["a shy fox", "a brave mouse", "a robot in space", "an old owl", "the moon", "two friends"];
    let name = names[i as usize % names.len()];
    let mut text = format!("<|user|>\nTell me a story about {name} number {i}");
    for turn in 0..i % 12 {
        text += &format!(
            ", and then about {} who was {turn} years old",
            names[(i + turn) as usize % names.len()]
        );
    }
    text += ".<|end|>\n<|assistant|>\n";
    Request {
        prompt: model.tokenizer.encode_prompt(&text, SpecialTokens::Parse),
        max_tokens: Some(5 + (i * 37 % 150) as usize),
        ignore_stop_tokens: true,
        sampling: SamplingParams {
            temperature: if i.is_multiple_of(3) { 0.0 } else { 0.9 },
            top_k: 40,
            repetition_penalty: 1.1,
            seed: i,
            ..SamplingParams::default()
        },
        logprobs: Some(if i.is_multiple_of(4) { 2 } else { 0 }),
        score_prompt_from: i.is_multiple_of(4).then_some(0),
        deadline: Some(Instant::now() + Duration::from_secs(400)),
        ..Request::default()
    }
}

/// Tokens with the bits of their log-probabilities, the text, and the same bits of the prompt's tokens and of the best
/// ones in their places.
#[derive(Debug, Default, PartialEq)]
struct Answer {
    tokens: Vec<(u32, u32)>,
    text: String,
    prompt: Vec<(u32, Vec<(u32, u32)>)>,
}

fn read(mut generation: Generation) -> Answer {
    let mut answer = Answer::default();
    while let Some(event) = generation.next_blocking() {
        match event {
            Event::Token { token, text, logprob, .. } => {
                answer.tokens.push((token, logprob.expect("it was asked for").to_bits()));
                answer.text += &text;
            }
            Event::PromptScores { scores, .. } => {
                let bits = |&(token, logprob): &(u32, f32)| (token, logprob.to_bits());
                let of = |score: &Score| (score.logprob.to_bits(), score.top.iter().map(bits).collect());
                answer.prompt.extend(scores.iter().map(of));
            }
            Event::Finished { text, .. } => answer.text += &text,
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    answer
}

#[test]
fn a_crowd_with_too_few_pages_gets_what_each_would_get_alone() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tales/tales-Q8_0.gguf");
    let model = Model::open(&file, &LoadOptions::default()).unwrap();
    let requests: Vec<Request> = (0..SEQUENCES).map(|i| request(&model, i)).collect();
    let total: usize =
        requests.iter().map(|request| request.prompt.len() + request.max_tokens.unwrap()).sum();
    let backend =
        |threads| Cpu::new(CpuOptions { threads: Some(threads), poison: true, ..CpuOptions::default() });

    let alone = EngineOptions {
        block_size: BLOCK,
        pages: PageBudget::Tokens(512),
        max_context: Some(512),
        prefix_cache: false,
        ..EngineOptions::default()
    };
    let solo = Engine::start(&backend(1), &model, alone).unwrap();
    let expected: Vec<Answer> =
        requests.iter().map(|request| read(solo.handle().generate(request.clone()).unwrap())).collect();
    solo.shutdown();

    let together = EngineOptions {
        block_size: BLOCK,
        pages: PageBudget::Tokens(total * PAGES_FOR / SEQUENCES as usize),
        max_context: Some(512),
        max_batch_tokens: 96,
        step_time: Duration::from_millis(20),
        max_scores: 24,
        ..EngineOptions::default()
    };
    let engine = Engine::start(&backend(2), &model, together).unwrap();
    let handle = engine.handle();
    let answers: Vec<Answer> = thread::scope(|scope| {
        let clients: Vec<_> = requests
            .iter()
            .map(|request| {
                let generation = handle.generate(request.clone()).unwrap();
                scope.spawn(move || read(generation))
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    for (i, (answer, expected)) in answers.iter().zip(&expected).enumerate() {
        assert_eq!(answer.tokens.len(), requests[i].max_tokens.unwrap());
        let scored = if i % 4 == 0 { requests[i].prompt.len() - 1 } else { 0 };
        assert_eq!(answer.prompt.len(), scored);
        assert_eq!(answer, expected, "request {i}");
    }

    while handle.stats().running > 0 {
        thread::sleep(Duration::from_millis(1));
    }
    let stats = handle.stats();
    assert!(stats.evictions > 0, "there were pages for all: {stats:?}");
    assert_eq!((stats.waiting, stats.pages_used), (0, 0), "{stats:?}");
    handle.check_pages().unwrap().unwrap();
}
