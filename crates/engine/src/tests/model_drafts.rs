//! Drafts by models: heads, assistants, and models of their own.

use std::{sync::Arc, time::Duration};

use paguro_backend::{Backend, MatrixId, SamplingParams, WeightFormat, reference::Reference};
use paguro_backend_conformance::{ModelShape, PagesOf, RandomModel, Rng};

use super::{
    fake::{self, FakeBackend},
    real::{BACKEND, answer, model_of, read, requests},
};
use crate::{
    DraftModel, DraftOptions, Engine, EngineOptions, Event, Grammar, Handle, ModelParts, PageBudget, Request,
    Stats,
};

/// Returns a random model as one that drafts.
fn draft_of(model: &ModelParts) -> Arc<DraftModel> {
    let ModelParts { program, weights, max_context, .. } = model.clone();
    Arc::new(DraftModel { program, weights, max_context, shared: None })
}

/// Returns the shape of a random head for random models of these tests.
fn head_shape() -> ModelShape {
    ModelShape {
        joined: true,
        given_parts: 1,
        hidden: 24,
        vocab: 61,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        ffn: 32,
        windows: vec![None],
        ..ModelShape::default()
    }
}

/// Returns a random assistant, whose rows are narrower than those of the model. It has a layer of each kind that the model has.
fn random_assistant(parts: &ModelParts) -> Arc<DraftModel> {
    let mut windows: Vec<_> = parts.program.kv.groups.iter().map(|group| group.window).collect();
    windows.dedup();
    let pages_of = Some(PagesOf::program(&parts.program));
    shared_head(&ModelShape { hidden: 16, windows, pages_of, ..head_shape() }, parts)
}

/// Returns a random head for random models of these tests.
fn random_head(parts: &ModelParts) -> Arc<DraftModel> {
    shared_head(&head_shape(), parts)
}

/// Returns a random head that has its embeddings in common with a model.
fn shared_head(shape: &ModelShape, parts: &ModelParts) -> Arc<DraftModel> {
    let RandomModel { program, mut weights, .. } = shape.build(9);
    let own = program.embed().unwrap().table;
    let table = parts.program.embed().unwrap().table;
    weights.matrices[own.0 as usize] = parts.weights.matrix(table).clone();
    Arc::new(DraftModel { program, weights, max_context: 160, shared: Some(vec![(own, table)]) })
}

/// All kinds of requests, beside others, with few pages: whatever a model drafts, answers are those without drafts.
#[test]
fn answers_with_drafts_of_models_are_bit_for_bit_those_without() {
    for (windows, mixers) in
        [(&[None, None][..], ""), (&[Some(9), None, Some(9)], ""), (&[None, None, None], "dac")]
    {
        let parts = model_of(windows, mixers);
        let options = EngineOptions { block_size: 4, speculate: false, ..EngineOptions::default() };
        let plain = Engine::start(&BACKEND, parts.clone(), options.clone()).unwrap();
        let requests = requests(parts.program.vocab);
        let expected: Vec<_> = requests.iter().map(|request| answer(&plain.handle(), request)).collect();
        let models = [
            ("itself", draft_of(&parts)),
            ("with windows", draft_of(&model_of(&[Some(5), None], ""))),
            ("a hybrid", draft_of(&model_of(&[None, None, None], "dac"))),
            ("a head", random_head(&parts)),
            ("an assistant", random_assistant(&parts)),
        ];
        for (name, draft) in models {
            let pages = PageBudget::Tokens(300);
            let draft = Some(draft);
            let options =
                EngineOptions { speculate: true, pages, max_batch_tokens: 64, draft, ..options.clone() };
            let engine = Engine::start(&BACKEND, parts.clone(), options).unwrap();
            let handle = engine.handle();
            for eager in [true, false] {
                let drafted = requests.iter().enumerate().map(|(index, request)| {
                    let drafts = DraftOptions { most: 1 + index % 7, eager, ..DraftOptions::default() };
                    Request { drafts, ..request.clone() }
                });
                let all: Vec<_> =
                    drafted.map(|request| (request.branches, handle.generate(request).unwrap())).collect();
                let got: Vec<_> = all.into_iter().map(|(branches, one)| read(one, branches)).collect();
                assert_eq!(got, expected, "{windows:?} {mixers} {name} {eager}");
                assert_eq!(handle.check_pages().unwrap(), Ok(()));
            }
            let stats = handle.stats();
            assert!(stats.draft_tokens > 100 && stats.draft_model_nanoseconds > 0, "{name} {stats:?}");
            assert_eq!(stats.pages_used, 0);
        }
    }
}

/// Backends whose steps begin with tokens and rows from the host, and with those of the step before that were not read.
fn backends() -> [Box<dyn Backend>; 2] {
    [Box::new(BACKEND), Box::new(Reference::default())]
}

/// Generates an answer, and returns it with the statistics of the engine.
fn generate(engine: &Engine, request: Request) -> (Vec<u32>, Stats) {
    let mut generation = engine.handle().generate(request).unwrap();
    let mut tokens = Vec::new();
    while let Some(event) = generation.next_blocking() {
        match event {
            Event::Token { token, .. } => tokens.push(token),
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    (tokens, engine.handle().stats())
}

/// A model that is its own draft model guesses every token of a greedy answer, after prompts of all lengths, and on a device that never
/// computes a row within the time of a step.
#[test]
fn a_model_accepts_its_own_drafts() {
    let backends = backends();
    for (backend, mixers) in [(0, ""), (0, "dac"), (1, ""), (1, "dac")] {
        let backend = &*backends[backend];
        let parts = model_of(&[None; 3], mixers);
        let options = EngineOptions {
            block_size: 4,
            max_sequences: 1,
            draft: Some(draft_of(&parts)),
            pages: PageBudget::Tokens(160),
            ..EngineOptions::default()
        };
        let usual = options.step_time;
        let slow = Duration::from_nanos(1);
        for (prompt, step_time) in [
            (1, usual),
            (30, usual),
            (31, usual),
            (32, usual),
            (33, usual),
            (70, usual),
            (1, slow),
            (20, slow),
        ] {
            let options = EngineOptions { step_time, ..options.clone() };
            let engine = Engine::start(backend, parts.clone(), options).unwrap();
            let prompt = Rng::new(prompt as u64).tokens(prompt, parts.program.vocab);
            let drafts = DraftOptions { most: 5, eager: true, ..DraftOptions::default() };
            let sampling = SamplingParams::default();
            let request = Request { drafts, sampling, max_tokens: Some(60), ..Request::new(prompt) };
            let (tokens, stats) = generate(&engine, request);
            assert_eq!(tokens.len(), 60);
            // A text that repeats itself may have drafts of its own, with errors.
            assert!(
                stats.accepted_tokens * 10 >= stats.draft_tokens * 9 && stats.steps < 35,
                "{mixers} {stats:?}"
            );
        }
    }
}

fn f32s(values: impl Iterator<Item = f32>) -> paguro_backend::Bytes {
    values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>().into()
}

/// A model whose next token depends on the last one only, `next(token)`: its layers add nothing. And a head that ignores the token: from
/// the model's row of a token it computes the token after the next one. An assistant also computes the model's row of the next token.
fn chain(next: impl Fn(usize) -> usize, is_assistant: bool) -> (ModelParts, Arc<DraftModel>) {
    const VOCAB: usize = 61;
    let shape = ModelShape {
        hidden: 64,
        vocab: VOCAB,
        heads: 2,
        kv_heads: 1,
        head_dim: 32,
        ffn: 32,
        windows: vec![None],
        ..ModelShape::default()
    };
    let model = shape.build(1);
    let pages_of = is_assistant.then(|| PagesOf::program(&model.program));
    let head = ModelShape { joined: true, given_parts: 1, pages_of, ..shape.clone() }.build(1);
    let embedding = |token: usize, at: usize| f32::from(u8::from(token == at));
    let fill = |mut model: RandomModel, steps: usize| {
        let after = |token: usize| (0..steps).fold(token, |token, _| next(token));
        model.weights.vectors.iter_mut().for_each(|vector| vector.fill(1.0));
        let (embed, output) =
            (model.program.embed().unwrap().table, model.program.head().unwrap().linear.matrix);
        let joined = model.program.joined().map(|joined| joined.linear.matrix);
        let projection = model.program.head().unwrap().projection.map(|it| it.linear.matrix);
        for (id, matrix) in model.weights.matrices.iter_mut().enumerate() {
            assert_eq!(matrix.format, WeightFormat::F32);
            let (rows, cols, id) = (matrix.rows, matrix.cols, MatrixId(id as u32));
            let at = |row: usize, col: usize| match id {
                _ if id == embed => embedding(row, col),
                // Token `after(i)` has the row with which token `i` begins.
                _ if id == output => f32::from(u8::from(col < VOCAB && after(col) == row)),
                _ if Some(id) == joined => f32::from(u8::from(col == row + 64)),
                _ if Some(id) == projection => f32::from(u8::from(col < VOCAB && next(col) == row)),
                _ => 0.0,
            };
            matrix.bytes =
                f32s((0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))).map(|(r, c)| at(r, c)));
        }
        model
    };
    let (model, head) = (fill(model, 1), fill(head, 2));
    let parts = ModelParts {
        vision: None,
        program: model.program,
        weights: model.weights,
        tokenizer: None,
        stop_tokens: Vec::new(),
        max_context: 160,
    };
    let RandomModel { program, weights, .. } = head;
    let shared: Vec<(MatrixId, MatrixId)> = Vec::new();
    (parts, Arc::new(DraftModel { program, weights, max_context: 160, shared: Some(shared) }))
}

/// A head whose guess depends on the model's row alone is right only if it gets the row of the token before the last one, after
/// prompts in chunks, after accepted and after rejected drafts.
#[test]
fn a_head_gets_the_row_of_the_token_before() {
    let backends = backends();
    // No period is shorter than the answer, so that the text's own drafts are none.
    for (is_assistant, most, share) in [
        (false, 1, 1.0),
        (false, 2, 0.5),
        (false, 3, 0.33),
        // Its row takes the place of the model's.
        (true, 1, 1.0),
        (true, 3, 1.0),
    ] {
        let (parts, head) = chain(|token| (token * 2 + 1) % 61, is_assistant);
        for (backend, rows) in [(0, 4), (0, 64), (1, 4), (1, 64)] {
            let backend = &*backends[backend];
            let options = EngineOptions {
                block_size: 4,
                max_sequences: 1,
                max_batch_tokens: rows,
                draft: Some(head.clone()),
                pages: PageBudget::Tokens(160),
                ..EngineOptions::default()
            };
            let engine = Engine::start(backend, parts.clone(), options).unwrap();
            assert_eq!(engine.handle().draft_problem(), None);
            let drafts = DraftOptions { most, eager: true, ..DraftOptions::default() };
            let prompt = (0..9).map(|at| at * 5).collect();
            let request = Request { drafts, max_tokens: Some(45), ..Request::new(prompt) };
            let (tokens, stats) = generate(&engine, request);
            let follows = |pair: &[u32]| pair[1] == (pair[0] * 2 + 1) % 61;
            assert!(tokens.len() == 45 && tokens.windows(2).all(follows), "{tokens:?}");
            let accepted = stats.accepted_tokens as f64 / stats.draft_tokens as f64;
            assert!(stats.draft_tokens > 15 && (accepted - share).abs() < 0.06, "{most} {rows}: {stats:?}");
        }
    }
}

/// Grammars, several answers, stops and cancellations beside drafts of a model that is mostly wrong.
#[test]
fn drafts_of_models_and_grammars_go_together() {
    let program = fake::program(&[None, Some(6)], false, false);
    let parts = ModelParts {
        vision: None,
        program,
        weights: paguro_backend::Weights::default(),
        tokenizer: Some(fake::tokenizer()),
        stop_tokens: Vec::new(),
        max_context: 120,
    };
    let grammars = ["( ?(pa|guro|日本?)!?)*", "(npa|sgu|bro|é){3,9}!!"];
    let requests = |handle: &Handle| -> Vec<Request> {
        let compile = |regex: &str| handle.compile(&Grammar::Regex(regex.into())).unwrap();
        let constraints = grammars.map(compile);
        let request = |index: u32| Request {
            constraint: constraints.get(index as usize % 4).cloned(),
            max_tokens: Some(5 + index as usize),
            branches: 1 + index as usize % 2,
            logprobs: Some(0),
            sampling: SamplingParams { temperature: 1.0, seed: index.into(), ..SamplingParams::default() },
            drafts: DraftOptions {
                most: index as usize % 6,
                eager: !index.is_multiple_of(3),
                ..DraftOptions::default()
            },
            ..Request::new((0..3 + index % 9).collect())
        };
        (0..24).map(request).collect()
    };
    let start = |draft| {
        let options = EngineOptions {
            block_size: 4,
            pages: PageBudget::Pages(60),
            max_batch_tokens: 64,
            max_sequences: 6,
            speculate: true,
            draft,
            ..EngineOptions::default()
        };
        Engine::start(&FakeBackend::default(), parts.clone(), options).unwrap()
    };
    let (plain, drafting) = (start(None), start(Some(draft_of(&parts))));
    let expected: Vec<_> =
        requests(&plain.handle()).iter().map(|request| answer(&plain.handle(), request)).collect();
    let handle = drafting.handle();
    let requests = requests(&handle);
    let all: Vec<_> = requests.iter().map(|request| handle.generate(request.clone()).unwrap()).collect();
    let got: Vec<_> = all.into_iter().zip(&requests).map(|(one, r)| read(one, r.branches)).collect();
    assert_eq!(got, expected);
    assert_eq!(handle.check_pages().unwrap(), Ok(()));
    assert!(handle.stats().draft_tokens > 20, "{:?}", handle.stats());
}
