//! The trained model that sees: rows of its tower, answers, and what its pictures share.

use std::{
    fs,
    path::Path,
    sync::{Arc, Mutex},
};

use paguro_backend::{
    AttentionMode, Backend, GivenRows, KvDtype, Limits, Output, OutputKind, OutputValue, PageId, Step,
    StepOutput, StepSequence,
};
use paguro_backend_cpu::{Cpu, CpuOptions};
use paguro_engine::{Engine, EngineOptions, Event, EventSink, ExtraKey, KvEvent, Picture, Request, Stats};
use paguro_model::{LoadOptions, Model, Tower, Vision};
use paguro_vision::{Budget, Pixels, decode};
use serde_json::Value;

use crate::common::shared;

/// Differences of two logits that float32 sums in another order and K and V in half precision make.
const TOLERANCE: f32 = 0.05;

fn cpu() -> Cpu {
    Cpu::new(CpuOptions { threads: Some(2), ..CpuOptions::default() })
}

/// One question of the reference.
struct Question {
    prompt: Vec<u32>,
    pictures: Vec<Arc<Pixels>>,
    /// Five best tokens of each step with their logits, the chosen one first.
    steps: Vec<Vec<(u32, f32)>>,
    /// Means of the rows of the tower.
    means: Option<Vec<f32>>,
}

struct Fixture {
    model: Model,
    questions: Vec<Question>,
}

fn fixture() -> Option<Fixture> {
    let folder = shared("model/vision/qwen3vl-hf")?;
    let model = Model::open(&folder, &LoadOptions { max_context: Some(512) }).unwrap();
    let vision = model.vision.as_ref().unwrap();
    let json: Value =
        serde_json::from_slice(&fs::read(folder.join("reference/reference.json")).unwrap()).unwrap();
    let questions = json.as_array().unwrap().iter().map(|entry| question(vision, &folder, entry)).collect();
    Some(Fixture { model, questions })
}

fn question(vision: &Vision, folder: &Path, entry: &Value) -> Question {
    let list = |value: &Value| value.as_array().unwrap().clone();
    let id = |value: &Value| value.as_u64().unwrap() as u32;
    let number = |value: &Value| value.as_f64().unwrap() as f32;
    let picture = |name: &Value| {
        let bytes = fs::read(folder.join("reference").join(name.as_str().unwrap())).unwrap();
        let rgb = decode(&bytes, &paguro_vision::Limits::default()).unwrap();
        let plan = vision.processor.plan(rgb.width, rgb.height, Budget::default()).unwrap();
        Arc::new(vision.processor.prepare(&rgb, &plan))
    };
    let steps = list(&entry["steps"]);
    let step = |step: &Value| {
        let (ids, logits) = (list(&step["ids"]), list(&step["logits"]));
        ids.iter().map(id).zip(logits.iter().map(number)).collect()
    };
    Question {
        prompt: list(&entry["prompt"]).iter().map(id).collect(),
        pictures: list(&entry["pictures"]).iter().map(picture).collect(),
        steps: steps.iter().map(step).collect(),
        means: entry["tower"]
            .is_object()
            .then(|| list(&entry["tower"]["means"]).iter().map(number).collect()),
    }
}

/// Returns the request of a question; pictures are named by `first` and the following numbers.
fn request(vision: &Vision, question: &Question, first: u8) -> Request {
    let mut places: Vec<std::ops::Range<usize>> = Vec::new();
    for (at, _) in question.prompt.iter().enumerate().filter(|(_, token)| **token == vision.image_token) {
        match places.last_mut().filter(|place| place.end == at) {
            Some(place) => place.end += 1,
            None => places.push(at..at + 1),
        }
    }
    let pictures = question.pictures.iter().zip(places).zip(first..).map(|((pixels, place), key)| Picture {
        key: [key; 32],
        rows: vec![place],
        grid: [pixels.parts[0].rows, pixels.parts[0].columns],
        pixels: Arc::new(Arc::clone(pixels)),
    });
    Request {
        pictures: pictures.collect(),
        max_tokens: Some(question.steps.len() + 2),
        logprobs: Some(5),
        ..Request::new(question.prompt.clone())
    }
}

/// An answer with the best tokens of each step, and the number of cached tokens.
type Answer = (Vec<u32>, Vec<Vec<(u32, f32)>>, usize);

fn answer(engine: &Engine, request: Request) -> Answer {
    let mut generation = engine.handle().generate(request).unwrap();
    let (mut tokens, mut tops, mut cached) = (Vec::new(), Vec::new(), 0);
    while let Some(event) = generation.next_blocking() {
        match event {
            Event::Token { token, top, .. } => {
                tokens.push(token);
                tops.push(top);
            }
            Event::Finished { stop_score, usage, .. } => {
                if let Some(score) = stop_score {
                    tokens.push(score.top[0].0);
                    tops.push(score.top);
                }
                cached = usage.cached_tokens;
            }
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    (tokens, tops, cached)
}

fn check(question: &Question, (tokens, tops, _): &Answer, what: &str) {
    let expected: Vec<u32> = question.steps.iter().map(|step| step[0].0).collect();
    assert_eq!(*tokens, expected, "{what}");
    for (top, step) in tops.iter().zip(&question.steps) {
        let of = |token: u32| top.iter().find(|(other, _)| *other == token).map(|(_, logprob)| *logprob);
        let [first, second] = [step[0], step[1]];
        let (Some(own_first), Some(own_second)) = (of(first.0), of(second.0)) else { continue };
        let off = (own_first - own_second) - (first.1 - second.1);
        assert!(off.abs() < TOLERANCE, "{what}: {top:?}, expected {step:?}");
    }
}

/// Returns the rows of a tower for the only part of a picture.
fn rows(tower: &Tower, pixels: &Pixels) -> Vec<Vec<f32>> {
    let part = &pixels.parts[0];
    let input = tower.input(part, &pixels.rgb).unwrap();
    let (count, square) = (input.order.len(), tower.patches_of_row());
    let patches = tower.step_rows(count);
    let blocks = patches.div_ceil(32);
    let limits = Limits {
        block_size: 32,
        pages: blocks + 1,
        max_rows: patches,
        max_sequences: 1,
        max_outputs: count,
        max_context: patches,
        states: 0,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
        expert_slots: None,
    };
    let mut runner = cpu().load(&tower.program, tower.weights.clone(), limits).unwrap();
    let pages: Vec<PageId> = (1..=blocks as u32).map(PageId).collect();
    let output = |row| Output { row: row * square, kind: OutputKind::Residual };
    let outputs: Vec<_> = (0..count).map(output).collect();
    let ticket = runner
        .submit(&Step {
            tokens: &vec![0; patches],
            given: &[GivenRows { rows: 0..patches, values: &input.given }],
            coordinates: &input.coordinates,
            sequences: &[StepSequence { rows: 0..patches, start: 0, tables: 0..blocks, state: None }],
            pages: &pages,
            outputs: &outputs,
            ..Step::default()
        })
        .unwrap();
    let mut out = StepOutput::default();
    runner.collect(ticket, &mut out).unwrap();
    let row = |outcome: OutputValue| match outcome {
        OutputValue::Residual(row) => row,
        other => panic!("{other:?}"),
    };
    out.outcomes.drain(..).map(row).collect()
}

#[test]
fn rows_and_answers_equal_the_reference() {
    let Some(Fixture { model, questions }) = fixture() else { return };
    let vision = model.vision.as_ref().unwrap();
    for question in questions.iter().filter(|question| question.means.is_some()) {
        let (rows, means) = (rows(&vision.tower, &question.pictures[0]), question.means.as_ref().unwrap());
        assert_eq!(rows.len(), means.len());
        for (row, mean) in rows.iter().zip(means) {
            let own = row[..model.program.hidden].iter().sum::<f32>() / model.program.hidden as f32;
            assert!((own - mean).abs() < 2e-3, "{own}, expected {mean}");
        }
    }
    let engine = Engine::start(&cpu(), &model, EngineOptions::default()).unwrap();
    for (number, question) in questions.iter().enumerate() {
        let found = answer(&engine, request(vision, question, 2 * number as u8));
        check(question, &found, &format!("question {number}"));
    }
}

/// Pictures are cut anywhere by the rows of steps, computed beside others, and started again.
#[test]
fn answers_do_not_depend_on_steps() {
    let Some(Fixture { model, questions }) = fixture() else { return };
    let vision = model.vision.as_ref().unwrap();
    let options =
        EngineOptions { max_batch_tokens: 7, max_sequences: 3, block_size: 16, ..EngineOptions::default() };
    let engine = Engine::start(&cpu(), &model, options).unwrap();
    let handle = engine.handle();
    let asked: Vec<_> = questions
        .iter()
        .enumerate()
        .map(|(number, question)| {
            let request = Request { branches: 1 + number % 2, ..request(vision, question, 2 * number as u8) };
            handle.generate(request).unwrap()
        })
        .collect();
    for (number, (mut generation, question)) in asked.into_iter().zip(&questions).enumerate() {
        let mut tokens = vec![Vec::new(); 2];
        while let Some(event) = generation.next_blocking() {
            match event {
                Event::Token { branch, token, .. } => tokens[branch].push(token),
                Event::Finished { branch, stop_score: Some(score), .. } => {
                    tokens[branch].push(score.top[0].0)
                }
                Event::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
        let expected: Vec<u32> = question.steps.iter().map(|step| step[0].0).collect();
        for tokens in &tokens[..1 + number % 2] {
            assert_eq!(*tokens, expected, "question {number}");
        }
    }
    assert_eq!(handle.check_pages().unwrap(), Ok(()));
}

/// The same picture is neither decoded nor encoded again, another one of the same size shares nothing behind the text before it.
#[test]
fn pictures_share_blocks_by_their_keys() {
    let Some(Fixture { model, questions }) = fixture() else { return };
    let vision = model.vision.as_ref().unwrap();
    let options = EngineOptions { block_size: 16, ..EngineOptions::default() };
    let engine = Engine::start(&cpu(), &model, options).unwrap();
    let stats = || -> Stats { engine.handle().stats() };
    let question = &questions[0];
    let (first, _, cached) = answer(&engine, request(vision, question, 1));
    assert_eq!((cached, stats().encoded_pictures), (0, 1));
    let (again, _, cached) = answer(&engine, request(vision, question, 1));
    assert_eq!((again, stats().encoded_pictures), (first.clone(), 1));
    assert_eq!(cached, (question.prompt.len() - 1) / 16 * 16);
    // Another picture with the same tokens around it.
    let mut other = request(vision, question, 2);
    let mut pixels = Pixels::clone(&question.pictures[0]);
    pixels.rgb.iter_mut().for_each(|value| *value = 255 - *value);
    other.pictures[0].pixels = Arc::new(Arc::new(pixels));
    let (changed, _, cached) = answer(&engine, other);
    assert_eq!((cached, stats().encoded_pictures), (0, 2));
    assert_ne!(changed, first, "an answer about another picture");
    // Without K and V, the rows of the first one are still there.
    let text = Request { prefix_salt: b"other".to_vec(), ..request(vision, question, 1) };
    let (salted, _, cached) = answer(&engine, text);
    assert_eq!((salted, cached, stats().encoded_pictures), (first, 0, 3), "a salt parts rows as well");
}

/// Routers learn of the pictures: blocks with the same tokens and other pictures have other hashes and other extra keys.
#[test]
fn events_of_blocks_name_their_pictures() {
    const BLOCK: usize = 16;
    /// Tokens, hash and extra keys of a block.
    type Block = (Vec<u32>, u64, Vec<ExtraKey>);

    let Some(Fixture { model, questions }) = fixture() else { return };
    let vision = model.vision.as_ref().unwrap();
    let question = questions.iter().find(|question| question.pictures.len() == 1).unwrap();
    let stored = |keys: &[u8]| -> Vec<Vec<Block>> {
        let blocks = Arc::<Mutex<Vec<Block>>>::default();
        let seen = Arc::clone(&blocks);
        let sink = move |events: Vec<KvEvent>| {
            for event in events {
                let KvEvent::Stored { hashes, tokens, extra, .. } = event else { continue };
                let texts = tokens.chunks_exact(BLOCK).map(<[u32]>::to_vec);
                seen.lock().unwrap().extend(texts.zip(hashes).zip(extra).map(|((t, h), e)| (t, h, e)));
            }
        };
        let options = EngineOptions {
            block_size: BLOCK,
            events: Some(EventSink(Arc::new(sink))),
            ..EngineOptions::default()
        };
        let engine = Engine::start(&cpu(), &model, options).unwrap();
        let of_request = keys.iter().map(|&key| {
            answer(&engine, Request { max_tokens: Some(1), ..request(vision, question, key) });
            std::mem::take(&mut *blocks.lock().unwrap())
        });
        of_request.collect()
    };
    let found = stored(&[1, 2, 1]);
    let [one, other, again] = &found[..] else { panic!("{found:?}") };
    assert!(again.is_empty(), "the third request finds the blocks of the first one: {again:?}");
    // The same picture in another process has the same hashes.
    assert_eq!(stored(&[1])[0], *one);
    let rows = request(vision, question, 1).pictures[0].rows[0].clone();
    let text = rows.start / BLOCK;
    let with_text = |block: usize| question.prompt[block * BLOCK..][..BLOCK].to_vec();
    assert_eq!(one.len(), question.prompt.len() / BLOCK);
    for (block, (tokens, _, extra)) in one.iter().enumerate() {
        let at = block * BLOCK;
        let key = ExtraKey::Picture { key: [1; 32], offset: rows.start as i64 - at as i64 };
        let has_rows = rows.start < at + BLOCK && at < rows.end;
        assert_eq!((tokens, extra), (&with_text(block), &Vec::from_iter(has_rows.then_some(key))));
    }
    // Blocks of text before the picture are shared; all others differ.
    assert_eq!(other.len(), one.len() - text);
    for (own, other) in one[text..].iter().zip(other) {
        assert_eq!(own.0, other.0);
        assert_ne!(own.1, other.1);
        assert_eq!(own.2.is_empty(), other.2.is_empty());
        assert!(own.2.is_empty() || own.2 != other.2);
    }
}

#[test]
fn requests_with_pictures_that_cannot_be_read_are_refused() {
    let Some(Fixture { model, questions }) = fixture() else { return };
    let vision = model.vision.as_ref().unwrap();
    let engine = Engine::start(&cpu(), &model, EngineOptions::default()).unwrap();
    let refused = |change: &dyn Fn(&mut Request)| {
        let mut request = request(vision, &questions[0], 1);
        change(&mut request);
        engine.handle().generate(request).err().map(|error| error.to_string())
    };
    assert_eq!(refused(&|_| ()), None);
    let outside = refused(&|request| request.pictures[0].rows[0] = 30..80).unwrap();
    assert!(outside.contains("`pictures` has picture 0 at 30..80"), "{outside}");
    let grid = refused(&|request| request.pictures[0].grid = [1, 1]).unwrap();
    assert!(grid.contains("1×1 rows in 25 places"), "{grid}");
    let of_text =
        Request { pictures: request(vision, &questions[0], 1).pictures, ..Request::new(vec![1; 40]) };
    let parts = paguro_engine::ModelParts { vision: None, ..(&model).into() };
    let engine = Engine::start(&cpu(), parts, EngineOptions::default()).unwrap();
    let error = engine.handle().generate(of_text).err().unwrap().to_string();
    assert!(error.contains("reads text only"), "{error}");
}
