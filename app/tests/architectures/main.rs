//! Whether every architecture and weight format gives the logits that llama.cpp gives.
//!
//! `make.py` made the models, tiny ones with random weights, and had llama.cpp compute their logits; what it recorded
//! lies in `cases/`. Prompts are longer than the sliding windows, and run here in chunks over scattered pages.

mod weights;

use std::path::Path;

use paguro_backend::{
    AttentionMode, Backend, KvDtype, Limits, Outcome, Output, PageId, Step, StepOutput, StepSequence, Want,
    reference::Reference,
};
use paguro_backend_cpu::{Cpu, CpuOptions};
use paguro_model::{LoadOptions, Model};
use serde_json::Value;

const BLOCK_SIZE: usize = 16;
/// Rows of each step; neither multiples of a page nor of each other.
const CHUNKS: [usize; 7] = [37, 1, 20, 38, 1, 150, 300];

// How far off the logits may be, as a part of their spread. The models amplify errors: their attention looks sharply.

/// The reference computes in f32 and f64, llama.cpp in f32: what is left is rounding, most of it of the angles of
/// far positions.
const ROUNDING: f32 = 2e-5;
/// llama.cpp takes Gemma's GELU from a table in f16.
const GELU_TABLE: f32 = 1e-3;
/// The CPU backend keeps K and V in f16.
const HALF_PAGES: f32 = 1.5e-3;
/// What quantizing activations costs llama.cpp may cost us as well, and a little more: both round differently, so
/// neither error contains the other, but they are of one size.
const PEER_ERRORS: f32 = 1.25;

#[test]
fn logits_equal_those_of_llama_cpp() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/architectures/cases");
    let read =
        |name: &str| std::fs::read(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    let all: Value = serde_json::from_slice(&read("cases.json")).expect("cases.json");
    let vocab = all["vocab"].as_u64().expect("a vocabulary");

    let mut failures = Vec::new();
    for case in all["cases"].as_array().expect("cases") {
        let name = case["name"].as_str().expect("a name");
        let file = weights::gguf(&read(&format!("{name}.header")), case, &all["blocks"]);
        let checksum = case["adler32"].as_u64().expect("a checksum");
        assert_eq!(
            u64::from(weights::adler32(&file)),
            checksum,
            "{name}: not the file that llama.cpp has read"
        );
        let expected: Vec<f32> = read(&format!("{name}.logits"))
            .as_chunks()
            .0
            .iter()
            .map(|&bytes| f32::from_le_bytes(bytes))
            .collect();
        let positions = case["positions"].as_array().expect("positions");
        let positions: Vec<_> = positions.iter().map(|number| weights::number(number) as usize).collect();
        let tokens = weights::tokens(positions[positions.len() - 1] + 1, vocab);
        let context = case["context"].as_u64().expect("a context") as usize;
        let peer_error = weights::number(&case["peer_error"]);

        let rounding = if name.starts_with("gemma") { GELU_TABLE } else { ROUNDING };
        let cpu = Cpu::new(CpuOptions { poison: true, ..CpuOptions::default() });
        let reference = Reference { poison: Some(7), ..Reference::default() };
        let backends: [(&dyn Backend, f32); 2] =
            [(&reference, rounding), (&cpu, rounding + HALF_PAGES + PEER_ERRORS * peer_error)];
        for (backend, tolerance) in backends {
            let options = LoadOptions { max_context: Some(context) };
            let model = Model::from_static(name, file.clone().leak(), &options)
                .unwrap_or_else(|error| panic!("{name}: {error}"));
            let logits = run(backend, model, context, &tokens, &positions);
            let error = distance(&logits, &expected);
            println!("{name:16} {:10} error {error:.1e} of {tolerance:.1e}", backend.name());
            if error.is_nan() || error > tolerance {
                failures
                    .push(format!("{name} on {}: {error:.1e}, more than {tolerance:.1e}", backend.name()));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Logits at `positions`, `[positions, vocab]`.
fn run(backend: &dyn Backend, model: Model, context: usize, tokens: &[u32], positions: &[usize]) -> Vec<f32> {
    let blocks = tokens.len().div_ceil(BLOCK_SIZE);
    let groups = model.program.kv.groups.clone();
    let limits = Limits {
        block_size: BLOCK_SIZE,
        pages: 2 * groups.len() * blocks + 1,
        max_rows: 300,
        max_sequences: 1,
        max_outputs: 64,
        max_context: context,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
    };
    let mut runner = backend.load(&model.program, model.weights, limits).expect("a supported model");
    let mut logits = Vec::new();
    let mut start = 0;
    for chunk in CHUNKS.into_iter().cycle() {
        let end = tokens.len().min(start + chunk);
        if start == end {
            break;
        }
        let rows = end - start;
        let mut pages = Vec::new();
        for (group, kv) in groups.iter().enumerate() {
            let seen_from = kv.window.map_or(0, |window| (start + 1).saturating_sub(window as usize));
            for block in 0..end.div_ceil(BLOCK_SIZE) {
                // Every other page, from the end to the beginning; none where the window has passed.
                let page = PageId(2 * (groups.len() * blocks - group * blocks - block) as u32 - 1);
                let passed = (block + 1) * BLOCK_SIZE <= seen_from;
                pages.push(if passed { PageId::SCRATCH } else { page });
            }
        }
        let sequences = [StepSequence { rows: 0..rows, start, tables: 0..pages.len() }];
        let outputs: Vec<_> = positions
            .iter()
            .filter(|&position| (start..end).contains(position))
            .map(|position| Output { row: position - start, want: Want::Logits })
            .collect();
        let step = Step {
            tokens: &tokens[start..end],
            carried: &[],
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
        };
        let mut out = StepOutput::default();
        let ticket = runner.submit(&step).expect("a valid step");
        runner.collect(ticket, &mut out).expect("a submitted step");
        for outcome in out.outcomes {
            let Outcome::Logits(row) = outcome else { panic!("asked for logits, got {outcome:?}") };
            logits.extend(row);
        }
        start = end;
    }
    logits
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
