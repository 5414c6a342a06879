//! The embedded model's files: their programs, and their results compared with the reference.

use std::{fs, path::Path};

use expect_test::{Expect, expect};
use paguro_backend::{FeedForward, Layer, Mixer};
use paguro_model::{LoadOptions, Model};

use crate::{shared, tiny::run};

fn open(path: &Path) -> Model {
    Model::open(path, &LoadOptions::default()).unwrap_or_else(|error| panic!("{error}"))
}

/// A model in a few lines.
fn describe(model: &Model) -> String {
    let program = &model.program;
    let shape = |layer: &Layer| match (&layer.mixer, &layer.ffn) {
        (Mixer::Attention(attention), FeedForward::Dense(dense)) => (attention.heads, dense.width),
        _ => panic!("{layer:?}"),
    };
    let (heads, ffn) = shape(&program.layers[0]);
    assert!(program.layers.iter().all(|layer| shape(layer) == (heads, ffn)), "layers differ");
    let mut formats: Vec<_> = model.weights.matrices.iter().map(|matrix| matrix.format.name()).collect();
    formats.sort_unstable();
    formats.dedup();
    format!(
        "{} ({}), {:?}\n\
         context {}, hidden {}, vocab {}, heads {}, ffn {}, {:?}\n\
         {:?}, {} frequencies, magnitude {}\n\
         {} layers\n\
         {} matrices in {}, {} vectors; stops at {:?}\n\
         temperature {:?}, top-p {:?}, {:?} tokens\n",
        model.name,
        model.architecture,
        model.description,
        model.context_length,
        program.hidden,
        program.vocab,
        heads,
        ffn,
        program.kv,
        program.ropes[0].style,
        program.ropes[0].frequencies.len(),
        program.ropes[0].magnitude,
        program.layers.len(),
        model.weights.matrices.len(),
        formats.join(" "),
        model.weights.vectors.len(),
        model.stop_tokens,
        model.defaults.recommended.temperature,
        model.defaults.recommended.top_p,
        model.defaults.max_tokens,
    )
}

#[track_caller]
fn check(file: &str, expected: Expect) {
    let Some(path) = shared::folder(&format!("model/{file}")) else { return };
    let model = open(&path);
    model.program.check(&model.weights).unwrap();
    expected.assert_eq(&describe(&model));
}

#[test]
fn files_lower_to_the_same_program() {
    check(
        "tales-f16.gguf",
        expect![[r#"
        Tales 21M (llama), Description { parameters: 20978176, file_bytes: 42102464, quantization: "F16" }
        context 2048, hidden 512, vocab 4096, heads 8, ffn 1536, KvLayout { groups: [KvGroup { window: None, spans: false, layer_slots: 6, kv_heads: 4, head_dim: 64 }] }
        Interleaved, 32 frequencies, magnitude 1
        6 layers
        43 matrices in F16, 13 vectors; stops at [1]
        temperature None, top-p None, None tokens
    "#]],
    );
    check(
        "tales-Q8_0.gguf",
        expect![[r#"
        Tales 21M (llama), Description { parameters: 20978176, file_bytes: 22441664, quantization: "Q8_0" }
        context 2048, hidden 512, vocab 4096, heads 8, ffn 1536, KvLayout { groups: [KvGroup { window: None, spans: false, layer_slots: 6, kv_heads: 4, head_dim: 64 }] }
        Interleaved, 32 frequencies, magnitude 1
        6 layers
        43 matrices in Q8_0, 13 vectors; stops at [1]
        temperature None, top-p None, None tokens
    "#]],
    );
    check(
        "tales-Q4_K_M.gguf",
        expect![[r#"
        Tales 21M (llama), Description { parameters: 20978176, file_bytes: 12969664, quantization: "Q4_K_M" }
        context 2048, hidden 512, vocab 4096, heads 8, ffn 1536, KvLayout { groups: [KvGroup { window: None, spans: false, layer_slots: 6, kv_heads: 4, head_dim: 64 }] }
        Interleaved, 32 frequencies, magnitude 1
        6 layers
        43 matrices in Q4_K Q6_K, 13 vectors; stops at [1]
        temperature None, top-p None, None tokens
    "#]],
    );
    check(
        "hf",
        expect![[r#"
        hf (LlamaForCausalLM), Description { parameters: 20978176, file_bytes: 41962440, quantization: "F16" }
        context 2048, hidden 512, vocab 4096, heads 8, ffn 1536, KvLayout { groups: [KvGroup { window: None, spans: false, layer_slots: 6, kv_heads: 4, head_dim: 64 }] }
        HalfSplit, 32 frequencies, magnitude 1
        6 layers
        43 matrices in F16, 13 vectors; stops at [1]
        temperature Some(0.7), top-p Some(0.95), Some(512) tokens
    "#]],
    );
}

/// Llama's Q and K are stored in different orders in the two formats, and the rotation differs with them.
#[test]
fn gguf_and_safetensors_give_the_same_logits() {
    let (Some(gguf), Some(hf)) = (shared::folder("model/tales-f16.gguf"), shared::folder("model/hf")) else {
        return;
    };
    let tokens: Vec<u32> = (0..40).map(|i| 6 + 37 * i % 4000).collect();
    let (a, b) = (run::logits(&open(&gguf), &tokens), run::logits(&open(&hf), &tokens));
    for (position, (a, b)) in a.iter().zip(&b).enumerate() {
        let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-3, "logits at {position} differ by {worst}");
    }
}

/// Greedy runs of a plain float32 implementation: the same tokens, and the same best five logits to a hundredth.
#[test]
fn logits_are_those_of_the_reference_implementation() {
    let (Some(reference), Some(hf)) = (shared::folder("model/reference.json"), shared::folder("model/hf"))
    else {
        return;
    };
    let reference: serde_json::Value = serde_json::from_slice(&fs::read(reference).unwrap()).unwrap();
    let model = open(&hf);
    for run in &reference["runs"].as_array().unwrap()[..3] {
        let ids = |key: &str| -> Vec<u32> {
            run[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let (prompt, output) = (ids("prompt_ids"), ids("output_ids"));
        let tokens = [prompt.as_slice(), &output[..output.len() - 1]].concat();
        let logits = run::logits(&model, &tokens);
        for (step, (&next, top)) in output.iter().zip(run["top5"].as_array().unwrap()).enumerate() {
            let logits = &logits[prompt.len() - 1 + step];
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            assert_eq!(best as u32, next, "step {step}");
            for pair in top.as_array().unwrap() {
                let (id, expected) = (pair[0].as_u64().unwrap() as usize, pair[1].as_f64().unwrap() as f32);
                assert!((logits[id] - expected).abs() < 1e-2, "step {step}: {} for {expected}", logits[id]);
            }
        }
    }
}
