//! Each architecture, from both file formats.

use std::fs;

use crate::tiny::{
    models::{self, Tiny, VOCAB},
    run,
};
use expect_test::{Expect, expect};
use paguro_backend::{FeedForward, Mixer};
use paguro_model::{LoadOptions, Model, ModelFile};

pub(crate) fn open_gguf(model: &Tiny, options: &LoadOptions) -> Model {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    fs::write(&path, model.gguf().write()).unwrap();
    Model::open(&path, options).unwrap_or_else(|error| panic!("{}: {error}", model.name))
}

pub(crate) fn open_hf(model: &Tiny, options: &LoadOptions) -> Model {
    let folder = tempfile::tempdir().unwrap();
    model.write_hf(folder.path());
    Model::open(folder.path(), options).unwrap_or_else(|error| panic!("{}: {error}", model.name))
}

fn prompt() -> Vec<u32> {
    (0..40).map(|i| 3 + (i * i * 31 + 7 * i) % (VOCAB as u32 - 3)).collect()
}

fn worst_difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Both formats hold the same model in different ways: other orders of rows, other offsets of norms, fused or computed
/// factors. The logits have to be equal except for rounding.
#[test]
fn gguf_and_safetensors_give_the_same_logits() {
    for model in models::all() {
        let options = LoadOptions::default();
        let (gguf, hf) = (open_gguf(&model, &options), open_hf(&model, &options));
        gguf.program.check(&gguf.weights).unwrap();
        hf.program.check(&hf.weights).unwrap();
        let (a, b) = (run::logits(&gguf, &prompt()), run::logits(&hf, &prompt()));
        let largest = a.iter().flatten().fold(0f32, |most, value| most.max(value.abs()));
        let worst = worst_difference(&a, &b);
        assert!(largest > 1.0, "{}: logits say nothing ({largest})", model.name);
        assert!(worst < 1e-4 * largest, "{}: logits of {largest} differ by {worst}", model.name);
    }
}

/// Describes the differences between architectures.
fn describe(model: &Model) -> String {
    let program = &model.program;
    let mut lines = Vec::new();
    let windows: Vec<_> = program.kv.groups.iter().map(|group| group.window.unwrap_or(0)).collect();
    lines.push(format!("windows of groups {windows:?}, {} slots", program.kv.groups[0].layer_slots));
    for rope in &program.ropes {
        let (first, last) = (rope.frequencies[0], rope.frequencies[rope.frequencies.len() - 1]);
        let pairs = rope.frequencies.len();
        lines.push(format!(
            "rope {:?}, {pairs} pairs, {first:.3} to {last:.3e} x {:.4}",
            rope.style, rope.magnitude
        ));
    }
    let embed = program.embed().expect("a program of tokens");
    lines.push(format!("embed: scale {}", embed.scale));
    for (index, layer) in program.layers.iter().enumerate() {
        let Mixer::Attention(op) = &layer.mixer else { panic!("{:?}", layer.mixer) };
        let FeedForward::Dense(dense) = &layer.ffn else { panic!("{:?}", layer.ffn) };
        lines.push(format!(
            "layer {index}: {} heads, biases {}{}{}, head norms {}, rope {:?}, {}.{}",
            op.heads,
            u8::from(op.q.bias.is_some()),
            u8::from(op.k.is_some_and(|k| k.bias.is_some())),
            u8::from(op.v.is_some_and(|v| v.bias.is_some())),
            op.qk_norm.is_some(),
            op.rope,
            op.kv.group,
            op.kv.layer_slot,
        ));
        // Of the other layers only what differs.
        if index == 0 {
            let bias = op.out.bias.is_some();
            lines.push(format!("  attention: scale {:.4}, cap {:?}, bias {bias}", op.scale, op.soft_cap));
            lines.push(format!("  ffn: {}, {:?}", dense.width, dense.activation));
            let after = [op.post_norm, dense.post_norm].map(|norm| norm.is_some());
            lines.push(format!("  norms after: {after:?}"));
        }
    }
    let head = program.head().expect("a program with logits");
    let tied = head.linear.matrix == embed.table;
    lines.push(format!("head: tied {tied}, cap {:?}", head.soft_cap));
    lines.join("\n") + "\n"
}

#[track_caller]
fn check(name: &str, expected: Expect) {
    let model = models::all().into_iter().find(|model| model.name == name).unwrap();
    let options = LoadOptions::default();
    let gguf = describe(&open_gguf(&model, &options));
    let hf = describe(&open_hf(&model, &options));
    // The formats differ in nothing but the order of what is rotated.
    assert_eq!(hf, gguf.replace("Interleaved", "HalfSplit"), "from safetensors");
    expected.assert_eq(&gguf);
}

#[test]
fn llama_lowers_to() {
    check(
        "llama",
        expect![[r#"
            windows of groups [0], 2 slots
            rope Interleaved, 8 pairs, 0.500 to 1.581e-4 x 1.0000
            embed: scale 1
            layer 0: 4 heads, biases 000, head norms false, rope Some(0), 0.0
              attention: scale 0.2500, cap None, bias false
              ffn: 96, Silu
              norms after: [false, false]
            layer 1: 4 heads, biases 000, head norms false, rope Some(0), 0.1
            head: tied false, cap None
        "#]],
    );
}

#[test]
fn llama3_lowers_to() {
    check(
        "llama3",
        expect![[r#"
            windows of groups [0], 2 slots
            rope Interleaved, 16 pairs, 1.000 to 5.677e-7 x 1.0000
            embed: scale 1
            layer 0: 4 heads, biases 111, head norms false, rope Some(0), 0.0
              attention: scale 0.1768, cap None, bias true
              ffn: 96, Silu
              norms after: [false, false]
            layer 1: 4 heads, biases 111, head norms false, rope Some(0), 0.1
            head: tied true, cap None
        "#]],
    );
}

#[test]
fn mistral_lowers_to() {
    check(
        "mistral",
        expect![[r#"
            windows of groups [7], 2 slots
            rope Interleaved, 8 pairs, 1.000 to 3.162e-4 x 1.0000
            embed: scale 1
            layer 0: 4 heads, biases 000, head norms false, rope Some(0), 0.0
              attention: scale 0.2500, cap None, bias false
              ffn: 96, Silu
              norms after: [false, false]
            layer 1: 4 heads, biases 000, head norms false, rope Some(0), 0.1
            head: tied false, cap None
        "#]],
    );
}

#[test]
fn qwen2_lowers_to() {
    check(
        "qwen2",
        expect![[r#"
            windows of groups [0], 2 slots
            rope HalfSplit, 8 pairs, 1.000 to 1.406e-6 x 1.1386
            embed: scale 1
            layer 0: 4 heads, biases 111, head norms false, rope Some(0), 0.0
              attention: scale 0.2500, cap None, bias false
              ffn: 96, Silu
              norms after: [false, false]
            layer 1: 4 heads, biases 111, head norms false, rope Some(0), 0.1
            head: tied true, cap None
        "#]],
    );
}

#[test]
fn qwen3_lowers_to() {
    check(
        "qwen3",
        expect![[r#"
            windows of groups [0], 2 slots
            rope HalfSplit, 16 pairs, 1.000 to 2.371e-6 x 1.0000
            embed: scale 1
            layer 0: 4 heads, biases 000, head norms true, rope Some(0), 0.0
              attention: scale 0.1768, cap None, bias false
              ffn: 96, Silu
              norms after: [false, false]
            layer 1: 4 heads, biases 000, head norms true, rope Some(0), 0.1
            head: tied false, cap None
        "#]],
    );
}

#[test]
fn gemma2_lowers_to() {
    check(
        "gemma2",
        expect![[r#"
            windows of groups [6, 6, 0], 1 slots
            rope HalfSplit, 16 pairs, 1.000 to 1.778e-4 x 1.0000
            embed: scale 8
            layer 0: 4 heads, biases 000, head norms false, rope Some(0), 0.0
              attention: scale 0.1768, cap Some(20.0), bias false
              ffn: 96, GeluTanh
              norms after: [true, true]
            layer 1: 4 heads, biases 000, head norms false, rope Some(0), 2.0
            layer 2: 4 heads, biases 000, head norms false, rope Some(0), 1.0
            head: tied true, cap Some(5.0)
        "#]],
    );
}

#[test]
fn gemma3_lowers_to() {
    check(
        "gemma3",
        expect![[r#"
            windows of groups [5, 5, 5, 5, 5, 5, 0], 1 slots
            rope HalfSplit, 16 pairs, 0.125 to 2.964e-7 x 1.0000
            rope HalfSplit, 16 pairs, 1.000 to 1.778e-4 x 1.0000
            embed: scale 8
            layer 0: 4 heads, biases 000, head norms true, rope Some(1), 0.0
              attention: scale 0.1768, cap None, bias false
              ffn: 96, GeluTanh
              norms after: [true, true]
            layer 1: 4 heads, biases 000, head norms true, rope Some(1), 1.0
            layer 2: 4 heads, biases 000, head norms true, rope Some(1), 2.0
            layer 3: 4 heads, biases 000, head norms true, rope Some(1), 3.0
            layer 4: 4 heads, biases 000, head norms true, rope Some(1), 4.0
            layer 5: 4 heads, biases 000, head norms true, rope Some(0), 6.0
            layer 6: 4 heads, biases 000, head norms true, rope Some(1), 5.0
            head: tied true, cap None
        "#]],
    );
}

#[test]
fn phi3_lowers_to() {
    check(
        "phi3-longrope-long",
        expect![[r#"
            windows of groups [0], 2 slots
            rope HalfSplit, 6 pairs, 0.667 to 4.036e-5 x 1.4142
            embed: scale 1
            layer 0: 4 heads, biases 000, head norms false, rope Some(0), 0.0
              attention: scale 0.2500, cap None, bias false
              ffn: 96, Silu
              norms after: [false, false]
            layer 1: 4 heads, biases 000, head norms false, rope Some(0), 0.1
            head: tied false, cap None
        "#]],
    );
}

/// The factors of longrope depend on how long a context will be used; a window is one only in a longer context.
#[test]
fn the_largest_context_decides() {
    let phi3 = models::all().into_iter().find(|model| model.name == "phi3-longrope-long").unwrap();
    let last = |max_context| {
        let model = open_gguf(&phi3, &LoadOptions { max_context });
        assert_eq!(model.max_context, max_context.unwrap_or(256));
        *model.program.ropes[0].frequencies.last().unwrap()
    };
    assert_eq!(last(None), last(Some(17)));
    assert!(last(Some(16)) > last(Some(17)));

    let mistral = models::all().into_iter().find(|model| model.name == "mistral").unwrap();
    let window = |max_context| {
        let model = open_gguf(&mistral, &LoadOptions { max_context: Some(max_context) });
        model.program.kv.groups[0].window
    };
    assert_eq!(window(8), Some(7));
    assert_eq!(window(7), None);
}

/// A key exactly `window` positions back is not seen any more.
#[test]
fn a_window_of_seven_sees_seven() {
    let mistral = models::all().into_iter().find(|model| model.name == "mistral").unwrap();
    let model = open_gguf(&mistral, &LoadOptions::default());
    // With two layers, position p depends on positions > p - 13: each layer sees itself and six more.
    let mut tokens = prompt();
    let before = run::logits(&model, &tokens);
    tokens[0] = 200;
    let after = run::logits(&model, &tokens);
    let changed: Vec<usize> = (0..tokens.len()).filter(|&i| before[i] != after[i]).collect();
    assert_eq!(changed, (0..13).collect::<Vec<_>>());
}

#[test]
fn a_file_can_be_listed() {
    let model = models::llama();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    fs::write(&path, model.gguf().write()).unwrap();
    let file = ModelFile::open(&path).unwrap();
    assert_eq!(
        (file.name(), file.format().as_str(), file.architecture()),
        ("llama", "GGUF v3", Some("llama"))
    );
    assert_eq!(file.files(), [path]);
    let entries: Vec<_> =
        file.metadata().iter().map(|e| format!("{} ({}) = {}", e.key, e.kind, e.value)).collect();
    let tensors =
        file.tensors()[..3].iter().map(|t| format!("{} {} {:?} at {}", t.name, t.dtype, t.shape, t.offset));
    expect![[r#"
        general.architecture (string) = llama
        general.name (string) = llama
        llama.attention.head_count (u32) = 4
        llama.attention.head_count_kv (u32) = 2
        llama.attention.key_length (u32) = 16
        llama.attention.layer_norm_rms_epsilon (f32) = 0.00001
        llama.attention.value_length (u32) = 16
        llama.block_count (u32) = 2
        llama.context_length (u32) = 256
        llama.embedding_length (u32) = 64
        llama.feed_forward_length (u32) = 96
        llama.rope.scaling.factor (f32) = 2
        llama.rope.scaling.type (string) = linear
        tokenizer.ggml.bos_token_id (u32) = 1
        tokenizer.ggml.eos_token_id (u32) = 2
        tokenizer.ggml.model (string) = llama
        tokenizer.ggml.scores (array of f32) = [-0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, ...; 289]
        tokenizer.ggml.token_type (array of i32) = [2, 3, 3, 6, 6, 6, 6, 6, ...; 289]
        tokenizer.ggml.tokens (array of string) = ["<unk>", "<s>", "</s>", "<0x00>", "<0x01>", "<0x02>", "<0x03>", "<0x04>", ...; 289]
        token_embd.weight F32 [289, 64] at 8288
        blk.0.attn_norm.weight F32 [64] at 82272
        blk.0.ffn_norm.weight F32 [64] at 82528"#]].assert_eq(&entries.into_iter().chain(tensors).collect::<Vec<_>>().join("\n"));
}
