//! Comparison of every architecture and weight format with llama.cpp's logits.
//!
//! `make.py` created tiny models with random weights and recorded llama.cpp's logits in `cases/`. Prompts are longer
//! than the sliding windows, and run here in chunks over scattered pages.

pub mod assistants;
pub mod hf;
mod mlx;
mod towers;
mod weights;

use std::path::Path;

use paguro_backend::{
    AdapterId, AdapterUse, AttentionMode, Backend, GivenRows, KvDtype, KvGroup, Limits, LoadError, LowRank,
    Output, OutputKind, OutputValue, PageId, Program, StateId, Step, StepOutput, StepSequence, Weights,
    reference::Reference,
};
use paguro_backend_conformance::Draw;
use paguro_backend_cpu::{Cpu, CpuOptions};
use paguro_model::{LoadOptions, Model};
use serde_json::Value;

const BLOCK_SIZE: usize = 16;
/// Rows of each step; neither multiples of a page nor of each other.
const CHUNKS: [usize; 7] = [37, 1, 20, 38, 1, 150, 300];

// Tolerances of logits, relative to their standard deviation. The models amplify errors, because their attention is
// sharp.

/// The reference computes in f32 and f64, llama.cpp in f32: the difference is rounding, most of it of the angles of
/// large positions.
const ROUNDING: f32 = 2e-5;
/// llama.cpp reads GELU from a table in f16.
const GELU_TABLE: f32 = 1e-3;
/// Backends store K and V in f16. The reference, with K and V rounded in the same way, has the same error as the CPU
/// backend: 4e-4 to 7e-4 in most cases, 1.1e-3 in `olmoe` and 1.7e-3 in `qwen3moe`, whose sharp routers weight four of
/// sixteen experts and so amplify the error of attention.
const HALF_PAGES: f32 = 2e-3;
/// Tolerance for models whose sharp routers weight experts by a softmax without renormalization, or by a scale for each
/// expert, which amplifies the error of attention further.
const HALF_PAGES_AMPLIFIED: f32 = 6e-3;
const AMPLIFIED: [&str; 3] = ["deepseek2-v2", "deepseek_v2", "gemma4-moe"];
/// Our error of quantized activations may be slightly larger than llama.cpp's: both round differently, so neither error
/// contains the other, but they have one magnitude.
const PEER_ERRORS: f32 = 1.25;

#[test]
fn logits_equal_those_of_llama_cpp() {
    let cpu = Cpu::new(CpuOptions { poison: true, ..CpuOptions::default() });
    let reference = Reference { poison: Some(7), ..Reference::default() };
    compare(cases(), &[(&reference, false), (&cpu, true)]);
}

#[test]
fn logits_equal_those_of_transformers() {
    let cpu = Cpu::new(CpuOptions { poison: true, ..CpuOptions::default() });
    let reference = Reference { poison: Some(7), ..Reference::default() };
    hf::compare(&[(&reference, false), (&cpu, true)], Draw::All);
}

#[test]
fn rows_of_pictures_equal_those_of_transformers() {
    let cpu = Cpu::new(CpuOptions { poison: true, ..CpuOptions::default() });
    let reference = Reference { poison: Some(7), ..Reference::default() };
    towers::compare(&[(&reference, ROUNDING), (&cpu, HALF_PAGES)], &cpu);
}

#[test]
fn folders_of_mlx_compute_the_same() {
    mlx::compare(&Reference { poison: Some(7), ..Reference::default() });
}

#[test]
fn folders_of_assistants_are_lowered_as_their_files() {
    assistants::compare_folder();
}

#[test]
fn converted_folders_compute_the_same() {
    hf::convert_all(&Reference { poison: Some(7), ..Reference::default() });
}

/// A model, and llama.cpp's results.
#[derive(Clone)]
struct Case {
    name: String,
    file: Vec<u8>,
    context: usize,
    vocab: u64,
    positions: Vec<usize>,
    /// `[positions, vocab]`
    logits: Vec<f32>,
    /// Error of llama.cpp itself, if it quantizes activations.
    peer_error: f32,
    /// True if the logits are those of the model's head for multi-token prediction.
    of_head: bool,
    /// File of the model, if this one is its assistant.
    model: Option<Vec<u8>>,
}

/// Inputs of a program.
#[derive(Clone, Copy)]
struct Text<'a> {
    tokens: &'a [u32],
    /// For heads, the model's row before each token: `[tokens, hidden]`.
    given: &'a [f32],
    /// Pairs of an adapter of all tokens.
    pairs: &'a [LowRank],
}

/// Returns the GGUF file of a case.
pub fn gguf(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/architectures/cases");
    let all: Value = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let case = all["cases"].as_array().unwrap().iter().find(|case| case["name"] == name).unwrap();
    weights::gguf(&std::fs::read(folder.join(format!("{name}.header"))).unwrap(), case, &all["blocks"])
}

fn cases() -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/architectures/cases");
    let read =
        |name: &str| std::fs::read(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    let all: Value = serde_json::from_slice(&read("cases.json")).expect("cases.json");
    let vocab = all["vocab"].as_u64().expect("a vocabulary");
    let case = |case: &Value| {
        let name = case["name"].as_str().expect("a name").to_owned();
        let file = weights::gguf(&read(&format!("{name}.header")), case, &all["blocks"]);
        let checksum = case["adler32"].as_u64().expect("a checksum");
        assert_eq!(
            u64::from(weights::adler32(&file)),
            checksum,
            "{name}: not the file that llama.cpp has read"
        );
        let logits = read(&format!("{name}.logits"));
        let positions = case["positions"].as_array().expect("positions");
        Case {
            file,
            vocab,
            context: case["context"].as_u64().expect("a context") as usize,
            positions: positions.iter().map(|number| weights::number(number) as usize).collect(),
            logits: logits.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect(),
            peer_error: weights::number(&case["peer_error"]),
            of_head: case["head"] == true,
            model: case["assistant_of"].as_str().map(gguf),
            name,
        }
    };
    all["cases"].as_array().expect("cases").iter().map(case).collect()
}

/// Runs these cases on these backends; those that are not exact round like the CPU's.
fn compare(cases: Vec<Case>, backends: &[(&dyn Backend, bool)]) {
    let mut failures = Vec::new();
    for Case { name, file, context, vocab, positions, logits, peer_error, of_head, model } in cases {
        let tokens = weights::tokens(positions[positions.len() - 1] + 1, vocab);
        let has_gelu = ["gemma", "gpt2", "gptneox", "jina", "nomic", "phi2", "starcoder2"]
            .iter()
            .any(|family| name.starts_with(family));
        // Gemma 4's layers have a third GELU, and sixteen of them add up.
        let rounding = match has_gelu {
            true if name.starts_with("gemma4") => 2.0 * GELU_TABLE,
            true => GELU_TABLE,
            false => ROUNDING,
        };
        for &(backend, rounds) in backends {
            let tolerance =
                rounding + if rounds { half_pages(&name) + PEER_ERRORS * peer_error } else { 0.0 };
            let own = match &model {
                Some(model) => {
                    let (_folder, model) = assistants::load((&name, &file), model, context);
                    assistants::logits(backend, model, context, &tokens, &positions)
                }
                None => {
                    let model = load(&name, file.clone(), context);
                    match model.is_encoder() {
                        true => encode(backend, model, context, &tokens, &positions),
                        false if of_head => predict(backend, model, context, &tokens, &positions),
                        false => {
                            run(backend, model, context, &tokens, &CHUNKS, &positions, OutputKind::Logits)
                        }
                    }
                }
            };
            let Some(own) = own else { continue };
            let error = distance(&own, &logits);
            println!("{name:16} {:10} error {error:.1e} of {tolerance:.1e}", backend.name());
            if error.is_nan() || error > tolerance {
                failures
                    .push(format!("{name} on {}: {error:.1e}, more than {tolerance:.1e}", backend.name()));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// The rows of an encoder at `positions`; or what its dense layers make of the mean of all rows, if it has some.
fn encode(
    backend: &dyn Backend,
    model: Model,
    context: usize,
    tokens: &[u32],
    positions: &[usize],
) -> Option<Vec<f32>> {
    let (head, hidden) = (model.head.clone(), model.program.hidden);
    let all: Vec<usize> = (0..tokens.len()).collect();
    let positions = if head.dense.is_empty() { positions } else { &all[..] };
    let rows = run(backend, model, context, tokens, &[tokens.len()], positions, OutputKind::Embedding)?;
    if head.dense.is_empty() {
        return Some(rows);
    }
    let mut mean = vec![0.0; hidden];
    for row in rows.chunks_exact(hidden) {
        mean.iter_mut().zip(row).for_each(|(sum, x)| *sum += x / tokens.len() as f32);
    }
    Some(head.embedding(mean))
}

/// Logits of a model's head for multi-token prediction, which reads the token of each position and the model's row before it.
fn predict(
    backend: &dyn Backend,
    model: Model,
    context: usize,
    tokens: &[u32],
    positions: &[usize],
) -> Option<Vec<f32>> {
    let head = model.mtp.clone().expect("a head");
    let before: Vec<usize> = (0..tokens.len() - 1).collect();
    let rows = run(backend, model, context, tokens, &CHUNKS, &before, OutputKind::Embedding)?;
    let text = Text { tokens: &tokens[1..], given: &rows, pairs: &[] };
    let positions: Vec<_> = positions.iter().map(|position| position - 1).collect();
    let program = (&head.program, head.weights.clone());
    run_program(backend, program, context, text, &CHUNKS, &positions, OutputKind::Logits)
}

fn load(name: &str, file: Vec<u8>, context: usize) -> Model {
    let options = LoadOptions { max_context: Some(context) };
    Model::from_static(name, file.leak(), &options).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Runs `tokens` in these chunks and returns the logits or embeddings of the rows at `positions`, one after the other;
/// `None` if a GPU refuses the model, see [`gpus_may_refuse`].
fn run(
    backend: &dyn Backend,
    model: Model,
    context: usize,
    tokens: &[u32],
    chunks: &[usize],
    positions: &[usize],
    kind: OutputKind<'_>,
) -> Option<Vec<f32>> {
    let text = Text { tokens, given: &[], pairs: &[] };
    run_program(backend, (&model.program, model.weights), context, text, chunks, positions, kind)
}

fn run_program(
    backend: &dyn Backend,
    (program, weights): (&Program, Weights),
    context: usize,
    Text { tokens, given, pairs }: Text<'_>,
    chunks: &[usize],
    positions: &[usize],
    kind: OutputKind<'_>,
) -> Option<Vec<f32>> {
    let blocks = tokens.len().div_ceil(BLOCK_SIZE);
    let groups = &program.kv.groups;
    let limits = limits(groups.len(), blocks, context);
    let may_refuse = gpus_may_refuse(program);
    let mut runner = match backend.load(program, weights, limits) {
        Err(LoadError::Unsupported { what, .. }) if may_refuse && backend.name() == "gpu" => {
            println!("refused by {}: {what}", backend.name());
            return None;
        }
        loaded => loaded.expect("a supported model"),
    };
    let adapters = [AdapterUse { sequence: 0, adapter: AdapterId(0), scale: 1.0 }];
    if !pairs.is_empty() {
        runner.load_adapter(AdapterId(0), pairs).expect("pairs that fit");
    }
    let mut values = Vec::new();
    let mut start = 0;
    for &chunk in chunks.iter().cycle() {
        let end = tokens.len().min(start + chunk);
        if start == end {
            break;
        }
        let rows = end - start;
        let pages = tables(groups, blocks, start, end);
        let state = program.state.in_place(StateId(0));
        let before = given.get(start * program.hidden..end * program.hidden).unwrap_or_default();
        let joined = [GivenRows { rows: 0..rows, values: before }];
        let sequences = [StepSequence { rows: 0..rows, start, tables: 0..pages.len(), state }];
        let outputs: Vec<_> = positions
            .iter()
            .filter(|&position| (start..end).contains(position))
            .map(|position| Output { row: position - start, kind })
            .collect();
        let step = Step {
            tokens: &tokens[start..end],
            given: if given.is_empty() { &[] } else { &joined },
            adapters: if pairs.is_empty() { &[] } else { &adapters },
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
            ..Step::default()
        };
        let mut out = StepOutput::default();
        let ticket = runner.submit(&step).expect("a valid step");
        runner.collect(ticket, &mut out).expect("a submitted step");
        for outcome in out.outcomes {
            match outcome {
                OutputValue::Logits(row) | OutputValue::Embedding(row) => values.extend(row),
                other => panic!("asked for {kind:?}, got {other:?}"),
            }
        }
        start = end;
    }
    Some(values)
}

/// Returns limits for a sequence of `blocks` blocks.
fn limits(groups: usize, blocks: usize, context: usize) -> Limits {
    Limits {
        block_size: BLOCK_SIZE,
        pages: 2 * groups * blocks + 1,
        max_rows: 300,
        max_sequences: 1,
        max_outputs: 128,
        max_context: context,
        states: 1,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
        expert_slots: None,
    }
}

/// Returns the block tables of `end` tokens of a sequence of `blocks` blocks, for rows from `start` on: every other page, from the end to
/// the beginning; none where the window has passed.
fn tables(groups: &[KvGroup], blocks: usize, start: usize, end: usize) -> Vec<PageId> {
    let mut pages = Vec::new();
    for (group, kv) in groups.iter().enumerate() {
        let seen_from = kv.window.map_or(0, |window| (start + 1).saturating_sub(window as usize));
        for block in 0..end.div_ceil(BLOCK_SIZE) {
            let page = PageId(2 * (groups.len() * blocks - group * blocks - block) as u32 - 1);
            let passed = (block + 1) * BLOCK_SIZE <= seen_from;
            pages.push(if passed { PageId::SCRATCH } else { page });
        }
    }
    pages
}

/// Tolerance for the rounding of a model's K and V to half precision.
fn half_pages(name: &str) -> f32 {
    if AMPLIFIED.contains(&name) { HALF_PAGES_AMPLIFIED } else { HALF_PAGES }
}

/// True for programs that GPUs refuse by name: some encoders, and heads for multi-token prediction.
fn gpus_may_refuse(program: &Program) -> bool {
    program.bidirectional || program.joined().is_some()
}

/// Root of the mean square error, as a part of the spread of `expected`.
fn distance(actual: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(actual.len(), expected.len());
    let count = expected.len() as f64;
    let mean = expected.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
    let spread = expected.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>();
    let error =
        actual.iter().zip(expected).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum::<f64>();
    (error / spread).sqrt() as f32
}

/// The cases on this machine's first GPU, which may be a software driver.
#[cfg(any(feature = "gpu", target_os = "macos"))]
mod gpu {
    use super::*;
    use crate::common::{draw, gpu, shared};

    #[test]
    fn logits_on_a_gpu_equal_those_of_llama_cpp() {
        if let Some(gpu) = gpu() {
            compare(draw().some("architectures", &cases(), 10), &[(&gpu, true)]);
        }
    }

    #[test]
    fn logits_on_a_gpu_equal_those_of_transformers() {
        if let Some(gpu) = gpu() {
            hf::compare(&[(&gpu, true)], draw());
        }
    }

    #[test]
    fn towers_on_a_gpu_equal_those_of_transformers() {
        if let Some(gpu) = gpu() {
            towers::compare_on(&gpu, draw());
        }
    }

    /// Accumulated effect of attention in the residual stream, over 200 steps of one token each.
    #[test]
    fn two_hundred_steps_on_a_gpu_are_those_of_the_cpu() {
        // Weights are floats: with activations of eight bits, roundings that go the other way would hide the rest.
        const TOLERANCE: f32 = 1e-3;

        let Some(gpu) = gpu() else { return };
        let cpu = Cpu::new(CpuOptions::default());
        let mut chunks = vec![1; 201];
        chunks[0] = 37;
        let positions: Vec<_> = (37..237).collect();
        // Assistants compute nothing without their model.
        let float = |case: &Case| case.peer_error == 0.0 && case.context < 1000 && case.model.is_none();
        let runs = |case: &Case| !gpus_may_refuse(&load(&case.name, case.file.clone(), case.context).program);
        let cases = cases().into_iter().filter(|case| float(case) && runs(case));
        let mut models: Vec<_> = cases.map(|case| (case.name, case.file, case.context, case.vocab)).collect();
        if let Some(tales) = shared("model/tales-f16.gguf") {
            models.push(("tales".into(), std::fs::read(tales).expect("a model"), 512, 4096));
        }
        for (name, file, context, vocab) in draw().some("two hundred steps", &models, 2) {
            let tokens = weights::tokens(237, vocab);
            let [ours, theirs] = [&gpu as &dyn Backend, &cpu].map(|backend| {
                let model = load(&name, file.clone(), context);
                run(backend, model, context, &tokens, &chunks, &positions, OutputKind::Embedding)
            });
            let [Some(ours), Some(theirs)] = [ours, theirs] else { continue };
            let error = distance(&ours, &theirs);
            println!("{name:16} error {error:.1e} of {TOLERANCE:.1e}");
            assert!(error <= TOLERANCE, "{name}: {error}");
        }
    }
}
