//! Small trained models of architectures beyond Llama, against the float32 runs of transformers that come with them: four
//! greedy texts with the five best logits of every step.

mod folders;
mod turns;

use std::{fs, path::Path};

use crate::common::shared;
use paguro_backend::{
    AttentionMode, Backend, KvDtype, Limits, Output, OutputKind, OutputValue, PageId, StateId, Step,
    StepOutput, StepSequence, reference::Reference,
};
use paguro_backend_cpu::{Cpu, CpuOptions};
use paguro_model::{LoadOptions, Model};
use serde_json::Value;

const BLOCK: usize = 32;

/// One run of the reference: what it was given and what it answered, and the best logits of each answer.
struct Run {
    tokens: Vec<u32>,
    prompt: usize,
    /// `[steps][5]`
    top: Vec<Vec<(u32, f32)>>,
}

fn runs(path: &Path) -> Vec<Run> {
    let json: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let id = |value: &Value| value.as_u64().unwrap() as u32;
    let run = |run: &Value| {
        let steps = run["steps"].as_array().unwrap();
        let mut tokens: Vec<u32> = run["prompt_tokens"].as_array().unwrap().iter().map(id).collect();
        let prompt = tokens.len();
        tokens.extend(steps.iter().map(|step| id(&step["token"])));
        let top = |step: &Value| {
            let pairs = step["top"].as_array().unwrap().iter();
            pairs.map(|pair| (id(&pair[0]), pair[1].as_f64().unwrap() as f32)).collect()
        };
        Run { tokens, prompt, top: steps.iter().map(top).collect() }
    };
    json["runs"].as_array().unwrap().iter().map(run).collect()
}

/// Logits for each token that a run answered, computed in chunks of some rows.
fn logits(backend: &dyn Backend, model: &Model, run: &Run, chunk: usize) -> Vec<Vec<f32>> {
    let tokens = &run.tokens[..run.tokens.len() - 1];
    let blocks = tokens.len().div_ceil(BLOCK);
    let groups = model.program.kv.groups.len();
    let limits = Limits {
        block_size: BLOCK,
        pages: 1 + groups * blocks,
        max_rows: chunk,
        max_sequences: 1,
        max_outputs: chunk,
        max_context: blocks * BLOCK,
        states: 1,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
        expert_slots: None,
    };
    let mut runner = backend.load(&model.program, model.weights.clone(), limits).unwrap();
    let (mut all, mut start) = (Vec::new(), 0);
    for tokens in tokens.chunks(chunk) {
        let end = start + tokens.len();
        let pages: Vec<PageId> = (0..groups)
            .flat_map(|group| (0..end.div_ceil(BLOCK)).map(move |block| (1 + group * blocks + block) as u32))
            .map(PageId)
            .collect();
        let state = model.program.state.in_place(StateId(0));
        let sequences = [StepSequence { rows: 0..tokens.len(), start, tables: 0..pages.len(), state }];
        let answers = (start..end).filter(|position| position + 1 >= run.prompt);
        let outputs: Vec<_> =
            answers.map(|position| Output { row: position - start, kind: OutputKind::Logits }).collect();
        let step =
            Step { tokens, sequences: &sequences, pages: &pages, outputs: &outputs, ..Step::default() };
        let mut out = StepOutput::default();
        let ticket = runner.submit(&step).unwrap();
        runner.collect(ticket, &mut out).unwrap();
        all.extend(out.outcomes.into_iter().map(|outcome| match outcome {
            OutputValue::Logits(logits) => logits,
            other => panic!("{other:?}"),
        }));
        start = end;
    }
    all
}

/// Checks that the best logits are within `tolerance` of the reference in all steps except a share of `flips`, in which rounding
/// chose another expert, and that the best token is the reference's wherever it leads by more than the tolerance. Rows come in chunks of 64.
fn check(backend: &dyn Backend, file: &Path, reference: &str, tolerance: f32, flips: f32) {
    let Some(reference) = shared(&format!("model/families/{reference}")) else { return };
    check_runs(backend, file, &runs(&reference), 64, tolerance, flips);
}

fn check_runs(backend: &dyn Backend, file: &Path, runs: &[Run], chunk: usize, tolerance: f32, flips: f32) {
    let model = Model::open(file, &LoadOptions::default()).unwrap();
    let (mut differences, mut wrong, mut far_at) = (Vec::new(), 0, Vec::new());
    for (index, run) in runs.iter().enumerate() {
        let all = logits(backend, &model, run, chunk);
        for (step, (logits, top)) in all.iter().zip(&run.top).enumerate() {
            let off = top.iter().map(|&(id, logit)| (logits[id as usize] - logit).abs());
            let off = off.fold(0.0, f32::max);
            differences.push(off);
            if off > tolerance {
                far_at.push((index, run.prompt + step - 1));
            }
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            let leads = top[0].1 - top[1].1 > 2.0 * tolerance;
            wrong += usize::from(leads && best as u32 != run.tokens[run.prompt + step] && off <= tolerance);
        }
    }
    let far = far_at.len();
    let worst = differences.iter().copied().fold(0.0, f32::max);
    let mean = differences.iter().sum::<f32>() / differences.len() as f32;
    let (count, file, backend) = (differences.len(), file.display(), backend.name());
    println!(
        "{file} on {backend}: {mean:.4} off in the mean, {worst:.4} at most, {far} of {count} by more than {tolerance}, \
         at these runs and positions: {far_at:?}"
    );
    assert!(wrong == 0, "{file} on {backend}: {wrong} tokens are not the reference's");
    assert!(
        far as f32 <= flips * count as f32,
        "{file} on {backend}: {far} of {count} steps are off by more than {tolerance}"
    );
}

fn cpu() -> Cpu {
    Cpu::new(CpuOptions { poison: true, ..CpuOptions::default() })
}

const QWEN3MOE: &str = "model/families/tales-qwen3moe-Q8_0.gguf";
const GPT_OSS: &str = "model/families/tales-gptoss-MXFP4.gguf";

#[test]
fn qwen3moe_tells_its_stories() {
    let Some(file) = shared(QWEN3MOE) else { return };
    check(&cpu(), &file, "qwen3moe-reference.json", 0.5, 0.02);
}

/// The same weights in half precision, from a folder.
#[test]
fn qwen3moe_tells_its_stories_from_a_folder() {
    let Some(folder) = folders::qwen3moe() else { return };
    check(&cpu(), &folder, "qwen3moe-reference.json", 0.5, 0.02);
}

/// Float16 weights: exactly those of the reference.
#[test]
fn gpt_oss_tells_its_stories_from_a_folder() {
    let Some(folder) = shared("model/families/gptoss-hf") else { return };
    check(&cpu(), &folder, "gptoss-hf/reference.json", 0.02, 0.01);
}

/// Experts in four bits give slightly different answers.
#[test]
fn gpt_oss_tells_its_stories_in_mxfp4() {
    let Some(file) = shared(GPT_OSS) else { return };
    check(&cpu(), &file, "gptoss-hf/reference.json", 3.0, 0.1);
}

/// A folder with experts in MXFP4 gives the same bits as the GGUF file with the same weights.
#[test]
fn gpt_oss_in_mxfp4_is_the_same_from_a_folder() {
    let Some((file, folder)) = shared(GPT_OSS).zip(folders::gpt_oss_mxfp4()) else { return };
    let Some(reference) = shared("model/families/gptoss-hf/reference.json") else { return };
    let run = &runs(&reference)[0];
    let short = run.tokens[..run.prompt + 40].to_vec();
    let run = Run { tokens: short, prompt: run.prompt, top: Vec::new() };
    let [file, folder] = [file, folder].map(|path| {
        let model = Model::open(&path, &LoadOptions::default()).unwrap();
        logits(&Reference::default(), &model, &run, 64)
    });
    assert_eq!(file, folder);
}

/// Layers with a state from a file whose value heads were reordered.
#[test]
fn qwen35_tells_its_stories() {
    let Some(file) = shared("model/families/tales-qwen35-Q8_0.gguf") else { return };
    check(&cpu(), &file, "qwen35-hf/reference.json", 0.5, 0.02);
}

/// Float16 weights: exactly those of the reference, with norms' weights as differences from one.
#[test]
fn qwen35_tells_its_stories_from_a_folder() {
    let Some(folder) = shared("model/families/qwen35-hf") else { return };
    check(&cpu(), &folder, "qwen35-hf/reference.json", 0.02, 0.01);
}

/// Its routers decide narrowly: weights in eight bits choose another expert in one of thirty steps.
#[test]
fn qwen35moe_tells_its_stories() {
    let Some(file) = shared("model/families/tales-qwen35moe-Q8_0.gguf") else { return };
    check(&cpu(), &file, "qwen35moe-reference.json", 0.5, 0.05);
}

#[test]
fn lfm2moe_tells_its_stories() {
    let Some(file) = shared("model/families/tales-lfm2moe-Q8_0.gguf") else { return };
    check(&cpu(), &file, "lfm2moe-reference.json", 0.5, 0.02);
}

/// Heads of two sizes, K and V shared by the last layers, embeddings for layers.
#[test]
fn gemma4_tells_its_stories() {
    let Some(file) = shared("model/families/tales-gemma4-Q8_0.gguf") else { return };
    check(&cpu(), &file, "gemma4-hf/reference.json", 0.5, 0.02);
}

/// Float16 weights: exactly those of the reference, except at position 128 of two runs. There the window of 128 first drops a token, and
/// the reference, which was computed with transformers' cache, differs by 5 from transformers' own forward pass without a cache,
/// which agrees.
#[test]
fn gemma4_tells_its_stories_from_a_folder() {
    let Some(folder) = shared("model/families/gemma4-hf") else { return };
    check(&cpu(), &folder, "gemma4-hf/reference.json", 0.02, 0.01);
}

/// Dense networks beside experts, and values that are keys.
#[test]
fn gemma4moe_tells_its_stories() {
    let Some(file) = shared("model/families/tales-gemma4moe-Q8_0.gguf") else { return };
    check(&cpu(), &file, "gemma4moe-reference.json", 0.5, 0.05);
}

/// Latent attention and experts in groups. The file does not say that scores are sigmoids; llama.cpp computes a softmax.
#[test]
fn dsv3_tells_its_stories() {
    let Some(file) = shared("model/families/tales-dsv3-Q8_0.gguf") else { return };
    check(&cpu(), &file, "dsv3-hf/reference.json", 0.5, 0.05);
}

/// Float16 weights: exactly those of the reference.
#[test]
fn dsv3_tells_its_stories_from_a_folder() {
    let Some(folder) = shared("model/families/dsv3-hf") else { return };
    check(&cpu(), &folder, "dsv3-hf/reference.json", 0.02, 0.02);
}

/// The models on this machine's first GPU, which may be a software driver.
#[cfg(any(feature = "gpu", target_os = "macos"))]
mod gpu {
    use super::*;
    use crate::common::gpu;

    fn check_on_gpu(file: &str, reference: &str, tolerance: f32, flips: f32) {
        let (Some(gpu), Some(file)) = (gpu(), shared(file)) else { return };
        let Some(reference) = shared(&format!("model/families/{reference}")) else { return };
        let runs = runs(&reference);
        check_runs(&gpu, &file, &runs, 64, tolerance, flips);
        // Each token in a step of its own.
        check_runs(&gpu, &file, &runs[..1], 1, tolerance, flips);
    }

    #[test]
    fn qwen3moe_tells_its_stories_on_a_gpu() {
        check_on_gpu(QWEN3MOE, "qwen3moe-reference.json", 0.5, 0.02);
    }

    #[test]
    fn qwen35moe_tells_its_stories_on_a_gpu() {
        check_on_gpu("model/families/tales-qwen35moe-Q8_0.gguf", "qwen35moe-reference.json", 0.5, 0.05);
    }

    #[test]
    fn lfm2moe_tells_its_stories_on_a_gpu() {
        check_on_gpu("model/families/tales-lfm2moe-Q8_0.gguf", "lfm2moe-reference.json", 0.5, 0.05);
    }

    #[test]
    fn gemma4_tells_its_stories_on_a_gpu() {
        check_on_gpu("model/families/tales-gemma4-Q8_0.gguf", "gemma4-hf/reference.json", 0.5, 0.02);
    }

    #[test]
    fn gemma4moe_tells_its_stories_on_a_gpu() {
        check_on_gpu("model/families/tales-gemma4moe-Q8_0.gguf", "gemma4moe-reference.json", 0.5, 0.05);
    }

    #[test]
    fn dsv3_tells_its_stories_on_a_gpu() {
        check_on_gpu("model/families/tales-dsv3-Q8_0.gguf", "dsv3-hf/reference.json", 0.5, 0.05);
    }

    #[test]
    fn gpt_oss_tells_its_stories_on_a_gpu() {
        check_on_gpu(GPT_OSS, "gptoss-hf/reference.json", 3.0, 0.1);
    }
}
