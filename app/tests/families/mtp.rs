//! A trained head for multi-token prediction (`app/tests/mtp/train.py`) on the small model of Qwen 3.5's architecture.

use std::{fs, path::PathBuf, sync::Arc};

use paguro_backend::{
    AttentionMode, Backend, GivenRows, KvDtype, Limits, Output, OutputKind, OutputValue, PageId, Program,
    SamplingParams, StateId, Step, StepOutput, StepSequence, Weights, reference::Reference,
};
use paguro_backend_cpu::{Cpu, CpuOptions};
use paguro_engine::{DraftModel, DraftOptions, Engine, EngineOptions, Event, PageBudget, Request};
use paguro_model::{LoadOptions, Model, ModelFile, gguf::Contents};
use serde_json::Value;

use super::folders::{Entry, write};
use crate::common::shared;

/// Tokens of a step.
const CHUNK: usize = 24;

/// Returns a folder of the model with its head, written once for each test.
fn folder(name: &str) -> Option<PathBuf> {
    let base = shared("model/families/qwen35-hf")?;
    let mut config: Value = serde_json::from_slice(&fs::read(base.join("config.json")).unwrap()).unwrap();
    config["mtp_num_hidden_layers"] = 1.into();
    let file = ModelFile::open(&base).unwrap();
    let entry = |tensor: &paguro_model::tensor::Tensor| {
        let bytes = tensor.bytes.read().unwrap().into_owned();
        (tensor.name.clone(), Entry { dtype: "F16", shape: tensor.shape.clone(), bytes })
    };
    let mut tensors: Vec<_> = file.tensors().iter().map(entry).collect();
    let head = include_bytes!("../mtp/head.safetensors");
    let (len, rest) = head.split_first_chunk::<8>().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let header: Value = serde_json::from_slice(header).unwrap();
    for (name, tensor) in header.as_object().unwrap().iter().filter(|(name, _)| name.starts_with("mtp.")) {
        let number = |value: &Value| value.as_u64().unwrap() as usize;
        let shape = tensor["shape"].as_array().unwrap().iter().map(number).collect();
        let [from, to] = [0, 1].map(|at| number(&tensor["data_offsets"][at]));
        assert_eq!(tensor["dtype"], "F16");
        tensors.push((name.clone(), Entry { dtype: "F16", shape, bytes: data[from..to].to_vec() }));
    }
    write(name, &config, tensors)
}

/// Returns the model as a folder and as the GGUF file that it is converted to.
fn models(name: &str) -> Option<[Model; 2]> {
    let folder = folder(name)?;
    let options = LoadOptions::default();
    let contents: Contents = ModelFile::open(&folder).unwrap().contents().unwrap();
    assert_eq!(contents.metadata.u32("qwen35.nextn_predict_layers"), Some(1));
    let gguf = folder.with_extension("gguf");
    contents.write(fs::File::create(&gguf).unwrap()).unwrap();
    Some([&folder, &gguf].map(|path| Model::open(path, &options).unwrap()))
}

/// Outputs of all rows of a text, computed in chunks. `given` are rows that are joined with its tokens.
fn outputs(
    backend: &dyn Backend,
    (program, weights): (&Program, &Weights),
    tokens: &[u32],
    given: &[Vec<f32>],
    kind: OutputKind<'_>,
) -> Vec<Vec<f32>> {
    let (groups, blocks) = (program.kv.groups.len(), tokens.len().div_ceil(32));
    let limits = Limits {
        block_size: 32,
        pages: 1 + groups * blocks,
        max_rows: CHUNK,
        max_sequences: 1,
        max_outputs: CHUNK,
        max_context: 32 * blocks,
        states: usize::from(!program.state.is_empty()),
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
    };
    let mut runner = backend.load(program, weights.clone(), limits).unwrap();
    let mut all = Vec::new();
    for (index, chunk) in tokens.chunks(CHUNK).enumerate() {
        let start = index * CHUNK;
        let end = start + chunk.len();
        let page = |group: usize, block: usize| PageId((1 + group * blocks + block) as u32);
        let table = |group| (0..end.div_ceil(32)).map(move |block| page(group, block));
        let pages: Vec<_> = (0..groups).flat_map(table).collect();
        let state = program.state.in_place(StateId(0));
        let values = given.get(start..end).unwrap_or_default().concat();
        let rows = [GivenRows { rows: 0..chunk.len(), values: &values }];
        let outputs: Vec<_> = (0..chunk.len()).map(|row| Output { row, kind }).collect();
        let sequences = [StepSequence { rows: 0..chunk.len(), start, tables: 0..pages.len(), state }];
        let step = Step {
            tokens: chunk,
            given: if given.is_empty() { &[] } else { &rows },
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
            ..Step::default()
        };
        let mut out = StepOutput::default();
        let ticket = runner.submit(&step).unwrap();
        runner.collect(ticket, &mut out).unwrap();
        all.extend(out.outcomes.into_iter().map(|outcome| match outcome {
            OutputValue::Logits(row) | OutputValue::Embedding(row) => row,
            other => panic!("{other:?}"),
        }));
    }
    all
}

/// The head's logits are those of the PyTorch code that trained it, with the model's rows and the tokens in their places.
#[test]
fn logits_of_a_trained_head_equal_those_of_its_trainer() {
    let Some(models) = models("qwen35-mtp-logits") else { return };
    let texts: Value = serde_json::from_slice(include_bytes!("../mtp/reference.json")).unwrap();
    let cpu = Cpu::new(CpuOptions::default());
    let backends: [&dyn Backend; 2] = [&Reference::default(), &cpu];
    for (model, backend) in models.iter().flat_map(|model| backends.map(|backend| (model, backend))) {
        let head = model.mtp.as_ref().unwrap();
        let (mut worst, mut best) = (0.0_f32, (0, 0));
        for text in texts.as_array().unwrap() {
            let list = |key: &str| text[key].as_array().unwrap().clone();
            let tokens: Vec<u32> = list("tokens").iter().map(|id| id.as_u64().unwrap() as u32).collect();
            let whole = (&model.program, &model.weights);
            let mut rows = outputs(backend, whole, &tokens, &[], OutputKind::Embedding);
            rows.pop();
            let own = (&head.program, &head.weights);
            let logits = outputs(backend, own, &tokens[1..], &rows, OutputKind::Logits);
            for ((logits, ids), values) in logits.iter().zip(list("ids")).zip(list("logits")) {
                let pairs = ids.as_array().unwrap().iter().zip(values.as_array().unwrap());
                let off = pairs.map(|(id, value)| {
                    (logits[id.as_u64().unwrap() as usize] - value.as_f64().unwrap() as f32).abs()
                });
                worst = off.fold(worst, f32::max);
                let first = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
                best = (best.0 + usize::from(Some(first as u64) == ids[0].as_u64()), best.1 + 1);
            }
        }
        println!("{} on {}: {worst} off, {best:?} the same", model.name, backend.name());
        assert!(worst < 0.1 && best.0 * 100 >= best.1 * 97, "{} {worst} {best:?}", backend.name());
    }
}

/// Drafts of the trained head are accepted as often as the head and the model agree, and change no text.
#[test]
fn drafts_of_a_trained_head_are_accepted_and_change_no_text() {
    let Some([_, model]) = models("qwen35-mtp-drafts") else { return };
    let head = model.mtp.clone().unwrap();
    let model = Arc::new(model);
    let cpu = Cpu::new(CpuOptions::default());
    let start = |speculate| {
        let draft = Some(DraftModel::head(&head, model.max_context));
        let pages = PageBudget::Tokens(2048);
        let options = EngineOptions { speculate, draft, pages, max_sequences: 1, ..EngineOptions::default() };
        Engine::start(&cpu, &model, options).unwrap()
    };
    let (plain, drafting) = (start(false), start(true));
    let prompts = ["Once upon a time", "The miller and the cat", "In a small house by the sea lived"];
    let answer = |engine: &Engine, request: Request| {
        let mut generation = engine.handle().generate(request).unwrap();
        let mut tokens = Vec::new();
        while let Some(event) = generation.next_blocking() {
            match event {
                Event::Token { token, .. } => tokens.push(token),
                Event::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
        tokens
    };
    for (most, least) in [(1, 0.6), (3, 0.4)] {
        let before = drafting.handle().stats();
        for (index, prompt) in prompts.iter().enumerate() {
            for temperature in [0.0, 0.8] {
                let sampling =
                    SamplingParams { temperature, seed: index as u64, ..SamplingParams::default() };
                let prompt = model.tokenizer.encode(prompt, paguro_model::tokenizer::SpecialTokens::AsText);
                let drafts = DraftOptions { most, eager: true, ..DraftOptions::default() };
                let request = Request { sampling, drafts, max_tokens: Some(150), ..Request::new(prompt) };
                assert_eq!(answer(&drafting, request.clone()), answer(&plain, request), "{prompts:?}");
            }
        }
        let after = drafting.handle().stats();
        let accepted = (after.accepted_tokens - before.accepted_tokens) as f64;
        let share = accepted / (after.draft_tokens - before.draft_tokens) as f64;
        println!("{most} drafted tokens: {share:.3} accepted");
        assert!(share > least, "{most}: {share}");
    }
}
