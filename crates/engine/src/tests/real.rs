//! The engine with the reference backend: logits of real attention over real pages. Pages initially contain noise, so
//! reads of unwritten data are detected.

use std::path::Path;

use paguro_backend::{
    AttentionMode, Backend, DeltaShape, Limits, Output, OutputKind, OutputValue, PageId, SamplingParams,
    Score, StateId, Step, StepOutput, StepSequence, Weights, reference::Reference,
};
use paguro_backend_conformance::{ModelShape, RecurrentShape, Rng};
use paguro_model::{
    LoadOptions, Model, Pooling,
    tokenizer::{SpecialText, SpecialTokens},
};

use super::fake::{self, FakeBackend};
use crate::{
    DraftOptions, Engine, EngineOptions, Event, FinishReason, Generation, Handle, ModelParts, PageBudget,
    PageOrder, Replay, Request,
};

pub(super) const BACKEND: Reference =
    Reference { kv: paguro_backend::reference::KvRounding::F32, poison: Some(7) };

fn model(windows: &[Option<u32>]) -> ModelParts {
    model_of(windows, "")
}

/// Creates a model with these mixers; see [`ModelShape::mixers`].
pub(super) fn model_of(windows: &[Option<u32>], mixers: &'static str) -> ModelParts {
    let delta = DeltaShape { key_heads: 1, value_heads: 2, key_dim: 8, value_dim: 8 };
    let shape = ModelShape {
        mixers,
        recurrent: RecurrentShape { width: 24, delta, droppable: 9, ..RecurrentShape::default() },
        hidden: 24,
        vocab: 61,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        ffn: 32,
        windows: windows.to_vec(),
        ..ModelShape::default()
    };
    let model = shape.build(3);
    ModelParts {
        vision: None,
        program: model.program,
        weights: model.weights,
        tokenizer: None,
        stop_tokens: Vec::new(),
        max_context: 160,
    }
}

/// A token with the bits of its log-probability.
pub(super) type Answer = Vec<Vec<(u32, u32)>>;

pub(super) fn answer(handle: &Handle, request: &Request) -> Answer {
    read(handle.generate(request.clone()).unwrap(), request.branches)
}

pub(super) fn read(mut generation: Generation, branches: usize) -> Answer {
    let mut branches = vec![Vec::new(); branches];
    while let Some(event) = generation.next_blocking() {
        match event {
            Event::Token { branch, token, logprob, .. } => {
                branches[branch].push((token, logprob.unwrap().to_bits()))
            }
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    branches
}

/// Prompts that share beginnings, and every kind of sampling.
pub(super) fn requests(vocab: usize) -> Vec<Request> {
    let mut rng = Rng::new(11);
    let families: Vec<_> = (0..3).map(|_| rng.tokens(40, vocab)).collect();
    let mut request = |i: usize| {
        let mut prompt = families[i % 3][..rng.below(40)].to_vec();
        let own = 1 + rng.below(9);
        prompt.extend(rng.tokens(own, vocab));
        let sampling = match i % 4 {
            0 => SamplingParams::default(),
            1 => SamplingParams { temperature: 0.8, top_k: 20, seed: i as u64, ..SamplingParams::default() },
            2 => SamplingParams {
                temperature: 1.3,
                top_p: 0.9,
                min_p: 0.02,
                seed: 5,
                ..SamplingParams::default()
            },
            _ => SamplingParams {
                temperature: 0.7,
                repetition_penalty: 1.2,
                frequency_penalty: 0.3,
                presence_penalty: 0.1,
                penalty_window: Some(16),
                logit_bias: vec![(3, 2.0)],
                seed: i as u64,
                ..SamplingParams::default()
            },
        };
        let (branches, max_tokens) = (1 + i % 5 / 3, Some(8 + rng.below(30)));
        Request { branches, max_tokens, sampling, logprobs: Some(0), ..Request::new(prompt) }
    };
    (0..28).map(&mut request).collect()
}

#[test]
fn answers_in_a_crowd_are_bit_for_bit_those_of_solo_runs() {
    for (windows, mixers) in [
        (&[None, None][..], ""),
        (&[Some(9), None, Some(9)], ""),
        (&[Some(21)], ""),
        (&[None, None, None], "dac"),
    ] {
        let parts = model_of(windows, mixers);
        let requests = requests(parts.program.vocab);
        let solo =
            EngineOptions { pages: PageBudget::Tokens(400), prefix_cache: false, ..EngineOptions::default() };
        let solo = Engine::start(&BACKEND, parts.clone(), solo).unwrap();
        let expected: Vec<_> = requests.iter().map(|request| answer(&solo.handle(), request)).collect();

        let crowded = EngineOptions {
            block_size: 4,
            pages: PageBudget::Tokens(120),
            max_batch_tokens: 19,
            max_sequences: 12,
            page_order: PageOrder::Scattered { seed: 1 },
            ..EngineOptions::default()
        };
        let crowded = Engine::start(&BACKEND, parts, crowded).unwrap();
        let handle = crowded.handle();
        let all: Vec<_> = requests.iter().map(|request| handle.generate(request.clone()).unwrap()).collect();
        let got: Vec<_> =
            all.into_iter().zip(&requests).map(|(generation, r)| read(generation, r.branches)).collect();
        assert_eq!(got, expected, "{windows:?} {mixers}");
        let stats = crowded.handle().stats();
        // Models with windows only hold few pages, so preemption may not occur.
        assert!(stats.preemptions > 0 || !windows.contains(&None), "{stats:?}");
        // Prefixes of models with states need checkpoints, for which pages may be missing.
        assert!(stats.prefix_hit_tokens > 0 || !mixers.is_empty(), "{stats:?}");
        assert!(stats.page_copies > 0, "{stats:?}");
        assert_eq!(crowded.handle().check_pages().unwrap(), Ok(()));
        let states = if mixers.is_empty() { 0 } else { 13 };
        assert_eq!((stats.pages_used, stats.states_used, stats.states_total), (0, 0, states));
    }
}

/// Drafts of a text that repeats itself, and drafts of the answer with and without errors, beside others.
#[test]
fn answers_with_drafts_are_bit_for_bit_those_without() {
    for (windows, mixers, chances) in [
        (&[None, None][..], "", [0.5, 1.0]),
        (&[Some(9), None, Some(9)], "", [0.8, 0.0]),
        (&[None, None, None], "dac", [0.9, 1.0]),
    ] {
        let parts = model_of(windows, mixers);
        let options = EngineOptions { block_size: 4, speculate: false, ..EngineOptions::default() };
        let plain = Engine::start(&BACKEND, parts.clone(), options.clone()).unwrap();
        let requests = requests(parts.program.vocab);
        let expected: Vec<_> = requests.iter().map(|request| answer(&plain.handle(), request)).collect();
        let pages = PageBudget::Tokens(300);
        let options = EngineOptions { speculate: true, pages, max_batch_tokens: 64, ..options };
        let engine = Engine::start(&BACKEND, parts, options).unwrap();
        let handle = engine.handle();
        for round in 0..3 {
            let drafted = requests.iter().zip(&expected).enumerate().map(|(index, (request, expected))| {
                let tokens = expected[0].iter().map(|&(token, _)| token).collect();
                let replay = (round > 0).then(|| Replay {
                    tokens,
                    chance: chances[round - 1],
                    seed: 9,
                    of_model: false,
                });
                let (most, eager) = (1 + index % 7, true);
                let drafts = DraftOptions { most, eager, replay, ..DraftOptions::default() };
                Request { drafts, ..request.clone() }
            });
            let all: Vec<_> =
                drafted.map(|request| (request.branches, handle.generate(request).unwrap())).collect();
            let got: Vec<_> = all.into_iter().map(|(branches, one)| read(one, branches)).collect();
            assert_eq!(got, expected, "{windows:?} {round}");
            assert_eq!(handle.check_pages().unwrap(), Ok(()));
        }
        let stats = handle.stats();
        assert!(stats.accepted_tokens > 100 && stats.accepted_tokens < stats.draft_tokens, "{stats:?}");
        assert_eq!(stats.pages_used, 0);
    }
}

/// 64 sequences of a hybrid model are submitted at once, with memory for twenty. Later most of them are submitted
/// again, the last ones first.
#[test]
fn sixty_four_sequences_of_a_hybrid_share_memory_for_twenty() {
    let parts = model_of(&[None, None, None], "dac");
    let mut rng = Rng::new(17);
    let shared = rng.tokens(64, parts.program.vocab);
    let request = |i: usize| {
        let mut prompt = shared[..16 * (i % 5)].to_vec();
        prompt.extend(Rng::new(i as u64).tokens(68 + i % 23 - prompt.len(), parts.program.vocab));
        Request { max_tokens: Some(20 + i % 30), logprobs: Some(0), ..Request::new(prompt) }
    };
    let mut requests: Vec<_> = (0..64).map(request).collect();
    let options = EngineOptions { block_size: 4, ..EngineOptions::default() };
    let solo = EngineOptions { prefix_cache: false, pages: PageBudget::Pages(40), ..options.clone() };
    let solo = Engine::start(&BACKEND, parts.clone(), solo).unwrap();
    let mut expected: Vec<_> = requests.iter().map(|request| answer(&solo.handle(), request)).collect();
    let crowded =
        EngineOptions { max_sequences: 20, max_batch_tokens: 64, pages: PageBudget::Pages(480), ..options };
    let crowded = Engine::start(&BACKEND, parts, crowded).unwrap();
    let handle = crowded.handle();
    for round in 0..2 {
        let all: Vec<_> = requests.iter().map(|request| handle.generate(request.clone()).unwrap()).collect();
        let got: Vec<_> = all.into_iter().map(|generation| read(generation, 1)).collect();
        assert_eq!(got, expected, "round {round}");
        assert_eq!(handle.check_pages().unwrap(), Ok(()));
        requests.reverse();
        expected.reverse();
        requests.truncate(20);
        expected.truncate(20);
    }
    let stats = handle.stats();
    assert_eq!((stats.pages_used, stats.states_used, stats.states_total), (0, 0, 21));
    assert!(stats.checkpoints > 0, "{stats:?}");
}

/// A device with a mebibyte, of which states get half.
#[test]
fn memory_for_states_bounds_the_places() {
    let backend = FakeBackend::default();
    for (state_bytes, places) in [(1 << 10, 16), (1 << 16, 7), (1 << 17, 3), (1 << 18, 1)] {
        let mut program = fake::program(&[None], true, false);
        let rows = program.state.layers[0].rows;
        program.state.layers[0].channels = state_bytes / size_of::<f32>() / rows;
        let options = EngineOptions { max_sequences: 16, ..EngineOptions::default() };
        let plan = Engine::plan(&backend, &program, &Weights::default(), None, 100, &options).unwrap();
        assert_eq!((plan.max_sequences, plan.state_bytes), (places, state_bytes as u64));
        let slots = if places > 1 { places + 1 } else { 1 };
        assert_eq!(plan.memory.states, (slots * state_bytes) as u64);
    }
}

/// Branches share a state until they continue; each then has its own.
#[test]
fn a_branch_of_a_hybrid_is_the_answer_of_its_own_seed() {
    branches_are_answers_of_their_own(model_of(&[None, None, None], "dac"));
}

#[test]
fn a_branch_is_the_answer_of_its_own_seed() {
    branches_are_answers_of_their_own(model(&[None, Some(6)]));
}

fn branches_are_answers_of_their_own(parts: ModelParts) {
    let engine = Engine::start(&BACKEND, parts, EngineOptions::default()).unwrap();
    let sampling = SamplingParams { temperature: 1.0, seed: 40, ..SamplingParams::default() };
    let prompt = Rng::new(1).tokens(37, 61);
    let request = |branches, seed| Request {
        branches,
        max_tokens: Some(20),
        sampling: SamplingParams { seed, ..sampling.clone() },
        logprobs: Some(0),
        ..Request::new(prompt.clone())
    };
    let together = answer(&engine.handle(), &request(4, 40));
    let alone: Vec<_> = (40..44).flat_map(|seed| answer(&engine.handle(), &request(1, seed))).collect();
    assert_eq!(together, alone);
    assert_ne!(together[0], together[1]);
}

#[test]
fn scores_of_a_prompt_are_the_log_probabilities_that_sampling_gave() {
    let options =
        EngineOptions { max_batch_tokens: 16, max_sequences: 4, max_scores: 5, ..EngineOptions::default() };
    let engine = Engine::start(&BACKEND, model(&[None, Some(7)]), options).unwrap();
    let prompt = Rng::new(2).tokens(23, 61);
    let sampling = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    let request =
        Request { max_tokens: Some(30), sampling, logprobs: Some(0), ..Request::new(prompt.clone()) };
    let sampled = answer(&engine.handle(), &request).remove(0);
    let mut whole = prompt.clone();
    whole.extend(sampled.iter().map(|&(token, _)| token));
    let request =
        Request { max_tokens: Some(0), score_prompt_from: Some(prompt.len() - 1), ..Request::new(whole) };
    let mut generation = engine.handle().generate(request).unwrap();
    let mut scores = None;
    while let Some(event) = generation.next_blocking() {
        if let Event::PromptScores { from, scores: found } = event {
            assert_eq!(from, prompt.len() - 1);
            scores = Some(found);
        }
    }
    let score = |&(_, bits): &(u32, u32)| Score { logprob: f32::from_bits(bits), top: Vec::new() };
    let expected: Vec<_> = sampled.iter().map(score).collect();
    assert_eq!(scores.unwrap(), expected);
}

/// Returns the reference's outputs for all rows of a prompt at once.
fn rows(parts: &ModelParts, prompt: &[u32], kind: OutputKind<'_>) -> Vec<OutputValue> {
    let limits = Limits {
        block_size: 64,
        pages: 3,
        max_rows: 64,
        max_sequences: 1,
        max_outputs: 64,
        max_context: 64,
        states: 1,
        attention: AttentionMode::Paged,
        expert_slots: None,
        kv_dtype: paguro_backend::KvDtype::F16,
    };
    let mut runner = BACKEND.load(&parts.program, parts.weights.clone(), limits).unwrap();
    let groups = parts.program.kv.groups.len();
    let state = parts.program.state.in_place(StateId(0));
    let sequences = [StepSequence { rows: 0..prompt.len(), start: 0, tables: 0..groups, state }];
    let outputs: Vec<_> = (0..prompt.len()).map(|row| Output { row, kind }).collect();
    let pages = &[PageId(1), PageId(2)][..groups];
    let step = Step { tokens: prompt, sequences: &sequences, pages, outputs: &outputs, ..Step::default() };
    let mut out = StepOutput::default();
    let ticket = runner.submit(&step).unwrap();
    runner.collect(ticket, &mut out).unwrap();
    out.outcomes
}

/// Returns the log-probabilities of a prompt's tokens except the first, and of the three most probable ones at each
/// position, by their definition.
fn scores_by_definition(parts: &ModelParts, prompt: &[u32]) -> Vec<Score> {
    let rows = rows(parts, prompt, OutputKind::Logits);
    let score = |(row, &token): (OutputValue, &u32)| {
        let OutputValue::Logits(logits) = row else { panic!("{row:?}") };
        let logits: Vec<_> = logits.into_iter().map(f64::from).collect();
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let ln_sum = logits.iter().map(|logit| (logit - largest).exp()).sum::<f64>().ln();
        let logprob = |token: u32| (logits[token as usize] - largest - ln_sum) as f32;
        let mut ranking: Vec<_> = (0..logits.len() as u32).collect();
        ranking.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
        Score {
            logprob: logprob(token),
            top: ranking.into_iter().take(3).map(|best| (best, logprob(best))).collect(),
        }
    };
    rows.into_iter().zip(&prompt[1..]).map(score).collect()
}

#[test]
fn scores_of_prompts_are_those_of_the_definition_however_they_are_computed() {
    for windows in [&[None, None][..], &[Some(9), None]] {
        let parts = model(windows);
        let mut rng = Rng::new(8);
        let shared = rng.tokens(24, parts.program.vocab);
        let requests: Vec<_> = (0..9)
            .map(|i| {
                let mut prompt = shared[..8 * (i % 4)].to_vec();
                prompt.extend(rng.tokens(1 + 4 * i, parts.program.vocab));
                Request {
                    branches: 1 + i % 2,
                    max_tokens: Some(10 * (i % 3)),
                    score_prompt_from: Some(0),
                    logprobs: Some(3),
                    ..Request::new(prompt)
                }
            })
            .collect();
        // One setup with a single step and a single request; the others with chunks, batches, a cache that contains the
        // prompts, and too few pages.
        let alone = EngineOptions { pages: PageBudget::Tokens(400), ..EngineOptions::default() };
        let crowded = EngineOptions {
            block_size: 4,
            pages: PageBudget::Tokens(100),
            max_batch_tokens: 19,
            max_sequences: 12,
            max_scores: 7,
            page_order: PageOrder::Scattered { seed: 1 },
            ..EngineOptions::default()
        };
        let alone = Engine::start(&BACKEND, parts.clone(), alone).unwrap();
        let one: Vec<_> = requests
            .iter()
            .map(|request| scores(alone.handle().generate(request.clone()).unwrap()))
            .collect();
        let crowded = Engine::start(&BACKEND, parts.clone(), crowded).unwrap();
        let handle = crowded.handle();
        let others: Vec<_> = requests
            .iter()
            .map(|request| Request { score_prompt_from: None, ..request.clone() })
            .map(|request| handle.generate(request).unwrap())
            .collect();
        let all: Vec<_> = requests.iter().map(|request| handle.generate(request.clone()).unwrap()).collect();
        let many: Vec<_> = all.into_iter().map(scores).collect();
        drop(others);
        assert_eq!(many, one);
        let stats = handle.stats();
        // Windows release pages, so preemption may not occur.
        assert!(stats.preemptions > 0 || windows.contains(&Some(9)), "{stats:?}");
        assert!(stats.prefix_hit_tokens > 0, "{stats:?}");

        for (request, found) in requests.iter().zip(&one) {
            let expected = scores_by_definition(&parts, &request.prompt);
            assert_eq!(found.len(), expected.len());
            let near = |a: f32, b: f32| (a - b).abs() < 1e-5;
            for (found, expected) in found.iter().zip(&expected) {
                assert!(near(found.logprob, expected.logprob), "{found:?}, not {expected:?}");
                let same = |(a, b): (&(u32, f32), &(u32, f32))| a.0 == b.0 && near(a.1, b.1);
                assert!(found.top.len() == 3 && found.top.iter().zip(&expected.top).all(same), "{found:?}");
            }
        }
    }
}

/// Returns the scores of a request, which precede its first token.
fn scores(mut generation: Generation) -> Vec<Score> {
    let mut scores = None;
    while let Some(event) = generation.next_blocking() {
        match event {
            Event::PromptScores { from: 0, scores: found } => assert_eq!(scores.replace(found), None),
            Event::Token { .. } | Event::Finished { .. } => assert!(scores.is_some(), "{event:?}"),
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    scores.unwrap()
}

#[test]
fn a_scored_prompt_takes_nothing_from_the_prefix_cache_and_leaves_it_its_blocks() {
    let options = EngineOptions { block_size: 4, ..EngineOptions::default() };
    let engine = Engine::start(&BACKEND, model(&[None]), options).unwrap();
    let prompt = Rng::new(4).tokens(21, 61);
    let cached = |score_prompt_from| {
        let request = Request { max_tokens: Some(1), score_prompt_from, ..Request::new(prompt.clone()) };
        let mut generation = engine.handle().generate(request).unwrap();
        let mut cached = None;
        while let Some(event) = generation.next_blocking() {
            if let Event::Started { cached_tokens, .. } = event {
                cached = Some(cached_tokens);
            }
        }
        cached.unwrap()
    };
    assert_eq!((cached(Some(0)), cached(Some(0)), cached(None), cached(Some(9))), (0, 0, 20, 8));
}

#[test]
fn a_stop_token_is_no_part_of_the_answer_but_has_a_score() {
    let engine = Engine::start(&BACKEND, model(&[None]), EngineOptions::default()).unwrap();
    let sampling = SamplingParams { temperature: 1.0, seed: 3, ..SamplingParams::default() };
    let prompt = Rng::new(6).tokens(9, 61);
    let request =
        Request { max_tokens: Some(12), sampling, logprobs: Some(2), ..Request::new(prompt.clone()) };
    let whole = answer(&engine.handle(), &request).remove(0);
    let (stop, _) = whole[5];
    let end = whole.iter().position(|&(token, _)| token == stop).unwrap();
    for logprobs in [Some(2), None] {
        let request = Request { stop_tokens: vec![stop], logprobs, ..request.clone() };
        let mut generation = engine.handle().generate(request).unwrap();
        let (mut tokens, mut last) = (0, None);
        while let Some(event) = generation.next_blocking() {
            match event {
                Event::Token { .. } => tokens += 1,
                Event::Finished { reason, stop_score, .. } => last = Some((reason, stop_score)),
                _ => {}
            }
        }
        let (reason, score) = last.unwrap();
        assert_eq!((tokens, reason), (end, FinishReason::Stop(stop)));
        let heard = score.map(|score| (score.logprob.to_bits(), score.top.len()));
        assert_eq!(heard, logprobs.map(|top| (whole[end].1, top)));
    }
}

/// Embeddings equal the runner's hidden states of all rows at once, pooled here.
#[test]
fn embeddings_are_pooled_hidden_states_however_they_are_computed() {
    let parts = model(&[None, Some(9)]);
    let prompt = Rng::new(5).tokens(45, parts.program.vocab);
    let rows: Vec<Vec<f32>> = rows(&parts, &prompt, OutputKind::Embedding)
        .into_iter()
        .map(|outcome| match outcome {
            OutputValue::Embedding(row) => row,
            other => panic!("{other:?}"),
        })
        .collect();
    let mean = |i: usize| (rows.iter().map(|row| f64::from(row[i])).sum::<f64>() / rows.len() as f64) as f32;
    let mean: Vec<f32> = (0..parts.program.hidden).map(mean).collect();
    let all = rows.concat();
    let expected = [
        (Pooling::Last, rows.last().unwrap()),
        (Pooling::Mean, &mean),
        (Pooling::First, &rows[0]),
        (Pooling::All, &all),
    ];
    for (pooling, expected) in expected {
        assert_eq!(pooling.pool(&all, parts.program.hidden), *expected, "{pooling:?}");
    }

    let options = EngineOptions {
        block_size: 4,
        max_batch_tokens: 8,
        max_sequences: 4,
        max_scores: 3,
        ..EngineOptions::default()
    };
    let engine = Engine::start(&BACKEND, parts, options).unwrap();
    for round in 0..2 {
        for (pooling, expected) in expected {
            let request =
                Request { embedding: Some(pooling), max_tokens: Some(round), ..Request::new(prompt.clone()) };
            let mut generation = engine.handle().generate(request).unwrap();
            let mut embedding = None;
            while let Some(event) = generation.next_blocking() {
                if let Event::Embedding { values } = event {
                    assert_eq!(embedding.replace(values), None);
                }
            }
            assert_eq!(embedding.as_ref(), Some(expected), "{pooling:?}");
        }
    }
}

#[test]
fn the_embedded_model_goes_on_with_a_story() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales/tales-Q8_0.gguf");
    let model = Model::open(&path, &LoadOptions { max_context: Some(128) }).unwrap();
    let engine = Engine::start(&BACKEND, &model, EngineOptions::default()).unwrap();
    let prompt = model.tokenizer.encode_prompt("Once upon a time", SpecialTokens::AsText);
    let mut generation =
        engine.handle().generate(Request { max_tokens: Some(10), ..Request::new(prompt.clone()) }).unwrap();
    let (mut tokens, mut text) = (prompt, String::new());
    while let Some(event) = generation.next_blocking() {
        match event {
            Event::Token { token, text: piece, .. } => {
                tokens.push(token);
                text += &piece;
            }
            Event::Finished { text: piece, .. } => text += &piece,
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    assert!(text.split_whitespace().count() > 4, "{text:?}");
    assert_eq!(format!("Once upon a time{text}"), model.tokenizer.decode(&tokens, SpecialText::Hide));
}
