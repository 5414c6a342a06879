//! A trained head for multi-token prediction (`head/train.py`) on the small model of Qwen 3.5's architecture: its logits, and the
//! share of its drafts that is accepted. Without shared data, nothing is tested.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use paguro_backend::{
    AttentionMode, Backend, GivenRows, KvDtype, Limits, Output, OutputKind, OutputValue, PageId, Program,
    SamplingParams, StateId, Step, StepOutput, StepSequence, Weights,
};
use paguro_model::{LoadOptions, Model, ModelFile, tokenizer::SpecialTokens};
use serde_json::{Map, Value, json};

use super::real::BACKEND;
use crate::{DraftModel, DraftOptions, Engine, EngineOptions, Event, PageBudget, Request};

/// Tokens of a step.
const CHUNK: usize = 24;

/// Writes a folder of the model with its head.
fn write_folder(folder: &Path) -> Option<()> {
    let shared = env::var_os("PAGURO_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared"), PathBuf::from);
    let base = shared.join("model/families/qwen35-hf");
    if !base.is_dir() {
        println!("skipped: {} not present", base.display());
        return None;
    }
    fs::copy(base.join("tokenizer.json"), folder.join("tokenizer.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(base.join("config.json")).unwrap()).unwrap();
    config["mtp_num_hidden_layers"] = 1.into();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let (mut header, mut data) = (Map::new(), Vec::new());
    let mut add = |name: &str, shape: Value, bytes: &[u8]| {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.into(), json!({"dtype": "F16", "shape": shape, "data_offsets": offsets}));
        data.extend_from_slice(bytes);
    };
    for tensor in ModelFile::open(&base).unwrap().tensors() {
        add(&tensor.name, json!(tensor.shape), &tensor.bytes.read().unwrap());
    }
    let head = include_bytes!("head/head.safetensors");
    let (len, rest) = head.split_first_chunk::<8>().unwrap();
    let (own, bytes) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let own: Value = serde_json::from_slice(own).unwrap();
    for (name, tensor) in own.as_object().unwrap().iter().filter(|(name, _)| name.starts_with("mtp.")) {
        assert_eq!(tensor["dtype"], "F16");
        let [from, to] = [0, 1].map(|at| tensor["data_offsets"][at].as_u64().unwrap() as usize);
        add(name, tensor["shape"].clone(), &bytes[from..to]);
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    fs::write(folder.join("model.safetensors"), file).unwrap();
    Some(())
}

/// Returns the model of a folder, and of the GGUF file to which it is converted.
fn models(folder: &Path) -> Option<[Model; 2]> {
    write_folder(folder)?;
    let contents = ModelFile::open(folder).unwrap().contents().unwrap();
    assert_eq!(contents.metadata.u32("qwen35.nextn_predict_layers"), Some(1));
    let gguf = folder.join("model.gguf");
    contents.write(fs::File::create(&gguf).unwrap()).unwrap();
    Some([folder, &gguf].map(|path| Model::open(path, &LoadOptions::default()).unwrap()))
}

/// Returns outputs of all rows of a text, computed in chunks. `given` are rows that are joined with its tokens.
fn outputs(
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
        expert_slots: None,
    };
    let mut runner = BACKEND.load(program, weights.clone(), limits).unwrap();
    let mut all = Vec::new();
    for (index, chunk) in tokens.chunks(CHUNK).enumerate() {
        let (start, end) = (index * CHUNK, index * CHUNK + chunk.len());
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
    let folder = tempfile::tempdir().unwrap();
    let Some(models) = models(folder.path()) else { return };
    let texts: Value = serde_json::from_slice(include_bytes!("head/reference.json")).unwrap();
    for model in &models {
        let head = model.mtp.as_ref().unwrap();
        let (mut worst, mut same, mut all) = (0.0_f32, 0, 0);
        for text in texts.as_array().unwrap() {
            let list = |key: &str| text[key].as_array().unwrap().clone();
            let tokens: Vec<u32> = list("tokens").iter().map(|id| id.as_u64().unwrap() as u32).collect();
            let whole = (&model.program, &model.weights);
            let mut rows = outputs(whole, &tokens, &[], OutputKind::Embedding);
            rows.pop();
            let own = (&head.program, &head.weights);
            let logits = outputs(own, &tokens[1..], &rows, OutputKind::Logits);
            for ((logits, ids), values) in logits.iter().zip(list("ids")).zip(list("logits")) {
                for (id, value) in ids.as_array().unwrap().iter().zip(values.as_array().unwrap()) {
                    let ours = logits[id.as_u64().unwrap() as usize];
                    worst = worst.max((ours - value.as_f64().unwrap() as f32).abs());
                }
                let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
                (same, all) = (same + usize::from(ids[0] == best), all + 1);
            }
        }
        println!("{}: {worst} off, {same} of {all} best tokens are the same", model.architecture);
        assert!(worst < 0.05 && same * 100 >= all * 97, "{worst} {same} {all}");
    }
}

/// Drafts of the trained head are accepted, and change no text.
#[test]
fn drafts_of_a_trained_head_are_accepted_and_change_no_text() {
    let folder = tempfile::tempdir().unwrap();
    let Some([_, model]) = models(folder.path()) else { return };
    let head = model.mtp.clone().unwrap();
    let start = |speculate| {
        let draft = Some(DraftModel::head(&head, model.max_context));
        let pages = PageBudget::Tokens(512);
        let options = EngineOptions { speculate, draft, pages, max_sequences: 1, ..EngineOptions::default() };
        Engine::start(&BACKEND, &model, options).unwrap()
    };
    let (plain, drafting) = (start(false), start(true));
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
    for (most, least) in [(1, 0.4), (2, 0.3)] {
        let before = drafting.handle().stats();
        for (seed, prompt) in ["Once upon a time", "The miller and the cat"].into_iter().enumerate() {
            let temperature = 0.5 * seed as f32;
            let sampling = SamplingParams { temperature, seed: 3, ..SamplingParams::default() };
            let drafts = DraftOptions::default().of_model(most);
            let prompt = model.tokenizer.encode(prompt, SpecialTokens::AsText);
            let request = Request { sampling, drafts, max_tokens: Some(60), ..Request::new(prompt) };
            assert_eq!(answer(&drafting, request.clone()), answer(&plain, request));
        }
        let after = drafting.handle().stats();
        let accepted = (after.accepted_tokens - before.accepted_tokens) as f64;
        let share = accepted / (after.draft_tokens - before.draft_tokens) as f64;
        println!("{most} drafted tokens: {share:.3} accepted");
        assert!(share > least, "{most}: {share}");
    }
}
