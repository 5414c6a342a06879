//! The backends against the float32 reference of the embedded model's recipe: `reference.json` has 20 greedy runs
//! on the F16 weights with the five best logits of every step.

use std::fs;

use crate::common::shared;
use paguro_backend::{
    AttentionMode, Backend, KvDtype, Limits, Output, OutputKind, OutputValue, PageId, Runner, Step,
    StepOutput, StepSequence,
};
use paguro_backend_cpu::{Cpu, CpuOptions};
use paguro_engine::{Engine, EngineOptions, Event, FinishReason, Request};
use paguro_model::{LoadOptions, Model, tokenizer::SpecialTokens};
use serde_json::Value;

/// Float32 sums in another order differ by less; F16 weights times rounded activations by more.
const TOLERANCE: f32 = 1e-2;
const BLOCK: usize = 32;

/// One run of the reference.
#[derive(Clone)]
struct Run {
    prompt: String,
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
    /// `[steps][5]`
    top5: Vec<Vec<(u32, f32)>>,
}

fn reference() -> Option<(Model, Vec<Run>)> {
    let (file, json) = shared("model/tales-f16.gguf").zip(shared("model/reference.json"))?;
    let model = Model::open(&file, &LoadOptions::default()).unwrap();
    let json: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    let ids =
        |value: &Value| value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    let top = |pair: &Value| (pair[0].as_u64().unwrap() as u32, pair[1].as_f64().unwrap() as f32);
    let runs: Vec<_> = json["runs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|run| Run {
            prompt: run["prompt"].as_str().unwrap().to_owned(),
            prompt_ids: ids(&run["prompt_ids"]),
            output_ids: ids(&run["output_ids"]),
            top5: run["top5"]
                .as_array()
                .unwrap()
                .iter()
                .map(|step| step.as_array().unwrap().iter().map(top).collect())
                .collect(),
        })
        .collect();
    assert_eq!(runs.len(), 20);
    Some((model, runs))
}

/// A sequence that is decoded by hand.
struct Sequence<'a> {
    run: &'a Run,
    /// The prompt, then what the reference answered.
    tokens: Vec<u32>,
    computed: usize,
    pages: Vec<PageId>,
}

#[test]
fn greedy_runs_are_the_reference_s_token_by_token() {
    token_by_token(&Cpu::new(CpuOptions { poison: true, ..CpuOptions::default() }), |runs| runs);
}

fn token_by_token(backend: &dyn Backend, choose: impl Fn(Vec<Run>) -> Vec<Run>) {
    let Some((model, runs)) = reference() else { return };
    let runs = choose(runs);
    for run in &runs {
        assert_eq!(
            model.tokenizer.encode_prompt(&run.prompt, SpecialTokens::Parse),
            run.prompt_ids,
            "{}",
            run.prompt
        );
    }
    let most = runs.iter().map(|run| run.prompt_ids.len() + run.output_ids.len()).max().unwrap();
    let blocks = most.div_ceil(BLOCK);
    let limits = Limits {
        block_size: BLOCK,
        pages: 1 + runs.len() * blocks,
        max_rows: runs.iter().map(|run| run.prompt_ids.len()).sum(),
        max_sequences: runs.len(),
        max_outputs: runs.len(),
        max_context: blocks * BLOCK,
        states: 0,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
        expert_slots: None,
    };
    let mut runner = backend.load(&model.program, model.weights.clone(), limits).unwrap();

    let page = |sequence: usize, block: usize| PageId((1 + sequence * blocks + block) as u32);
    let mut sequences: Vec<_> = runs
        .iter()
        .enumerate()
        .map(|(i, run)| Sequence {
            run,
            tokens: run.prompt_ids.clone(),
            computed: 0,
            pages: (0..blocks).map(|block| page(i, block)).collect(),
        })
        .collect();
    let (mut widest, mut ties) = (0.0_f32, 0);
    // All in one step each time, the shorter ones drop out.
    for step in 0.. {
        sequences.retain(|sequence| step < sequence.run.output_ids.len());
        if sequences.is_empty() {
            break;
        }
        let rows = logits(runner.as_mut(), &mut sequences);
        for (sequence, logits) in sequences.iter_mut().zip(rows) {
            let (top5, expected) = (&sequence.run.top5[step], sequence.run.output_ids[step]);
            for &(id, logit) in top5 {
                let difference = (logits[id as usize] - logit).abs();
                widest = widest.max(difference);
                assert!(
                    difference <= TOLERANCE,
                    "{} step {step}: token {id}: {difference}",
                    sequence.run.prompt
                );
            }
            let best = (0..logits.len())
                .max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)))
                .unwrap() as u32;
            if best != expected {
                // Only a tie may go the other way: both are among the reference's best, closer than the tolerance.
                let of = |id: u32| top5.iter().find(|top| top.0 == id).map(|top| top.1);
                let gap = of(expected).zip(of(best)).map(|(expected, best)| expected - best);
                assert!(
                    gap.is_some_and(|gap| gap <= TOLERANCE),
                    "{} step {step}: {best}, not {expected}",
                    sequence.run.prompt
                );
                println!(
                    "a tie: {} step {step}: {best} and {expected} are {gap:?} apart",
                    sequence.run.prompt
                );
                ties += 1;
            }
            sequence.tokens.push(expected);
        }
    }
    println!("largest difference {widest}, {ties} ties");
}

/// Computes what is new in each sequence; the logits after its last token.
fn logits(runner: &mut dyn Runner, sequences: &mut [Sequence<'_>]) -> Vec<Vec<f32>> {
    let (mut tokens, mut parts, mut pages, mut outputs) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for sequence in sequences {
        let (rows, table) = (tokens.len(), pages.len());
        tokens.extend_from_slice(&sequence.tokens[sequence.computed..]);
        pages.extend_from_slice(&sequence.pages[..sequence.tokens.len().div_ceil(BLOCK)]);
        parts.push(StepSequence {
            rows: rows..tokens.len(),
            start: sequence.computed,
            tables: table..pages.len(),
            state: None,
        });
        outputs.push(Output { row: tokens.len() - 1, kind: OutputKind::Logits });
        sequence.computed = sequence.tokens.len();
    }
    let step =
        Step { tokens: &tokens, sequences: &parts, pages: &pages, outputs: &outputs, ..Step::default() };
    let mut out = StepOutput::default();
    let ticket = runner.submit(&step).unwrap();
    runner.collect(ticket, &mut out).unwrap();
    let rows = out.outcomes.into_iter().map(|outcome| match outcome {
        OutputValue::Logits(logits) => logits,
        other => panic!("asked for logits, got {other:?}"),
    });
    rows.collect()
}

/// The same through the engine, all requests at once.
#[test]
fn the_engine_s_greedy_answers_are_the_reference_s() {
    through_the_engine(&Cpu::new(CpuOptions::default()), |runs| runs);
}

fn through_the_engine(backend: &dyn Backend, choose: impl Fn(Vec<Run>) -> Vec<Run>) {
    let Some((model, runs)) = reference() else { return };
    let runs = choose(runs);
    let engine = Engine::start(backend, &model, EngineOptions::default()).unwrap();
    let handle = engine.handle();
    let submit = |run: &Run| {
        handle.generate(Request { max_tokens: Some(64), ..Request::new(run.prompt_ids.clone()) }).unwrap()
    };
    let generations: Vec<_> = runs.iter().map(submit).collect();
    for (run, mut generation) in runs.iter().zip(generations) {
        let mut ids = Vec::new();
        while let Some(event) = generation.next_blocking() {
            match event {
                Event::Token { token, .. } => ids.push(token),
                Event::Finished { reason: FinishReason::Stop(token), .. } if ids.last() != Some(&token) => {
                    ids.push(token)
                }
                Event::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
        // A tie goes its own way from there on; the test above shows which steps are ties.
        let same = ids.iter().zip(&run.output_ids).take_while(|(a, b)| a == b).count();
        if same < run.output_ids.len() {
            let top5 = &run.top5[same];
            assert!(top5[0].1 - top5[1].1 <= TOLERANCE, "{} differs at {same}", run.prompt);
        } else {
            assert_eq!(ids, run.output_ids, "{}", run.prompt);
        }
    }
}

/// The models on this machine's first GPU, which may be a software driver.
#[cfg(any(feature = "gpu", target_os = "macos"))]
mod gpu {
    use super::*;
    use crate::common::{draw, gpu, run};

    #[test]
    fn greedy_runs_are_the_reference_s_token_by_token_on_a_gpu() {
        if let Some(gpu) = gpu() {
            token_by_token(&gpu, |runs| draw().some("token by token", &runs, 1));
        }
    }

    #[test]
    fn the_engine_s_greedy_answers_are_the_reference_s_on_a_gpu() {
        if let Some(gpu) = gpu() {
            through_the_engine(&gpu, |runs| draw().some("through the engine", &runs, 1));
        }
    }

    /// Of text that the model was not trained on, always the same: with sampled text, 126 tokens and activations of eight
    /// bits the two can be further apart by chance.
    #[test]
    fn perplexity_on_a_gpu_is_the_cpu_s() {
        let files = shared("model/heldout.txt").zip(shared("model/tales-f16.gguf"));
        let (Some((text, f16)), Some(_)) = (files, gpu()) else { return };
        for model in draw().some("perplexity", &[None, Some(f16)], 1) {
            let perplexity = |device| {
                let args = ["eval", "-f", text.to_str().unwrap(), "-c", "128", "--chunks", "2", "--json"];
                let model = model.iter().flat_map(|file| ["-m", file.to_str().unwrap()]);
                let args: Vec<_> = args.into_iter().chain(["--device", device]).chain(model).collect();
                run(&args).json()["perplexity"].as_f64().unwrap()
            };
            let [cpu, gpu] = ["cpu", "gpu"].map(perplexity);
            let name = model.as_ref().map_or("embedded".into(), |file| file.display().to_string());
            assert!((gpu / cpu - 1.0).abs() < 2e-3, "{name}: {gpu} on the GPU, {cpu} on the CPU");
        }
    }
}
