//! Errors of valid GGUF files that are not supported.

use std::sync::Arc;

use crate::tiny::{
    gguf::{RawTensor, Writer},
    models,
};
use expect_test::{Expect, expect};
use paguro_model::{
    LoadOptions, ModelFile,
    gguf::{Array, Value},
};

/// Checks the error of loading a tiny model after a change.
#[track_caller]
fn check_model(name: &str, change: impl FnOnce(&mut Writer), expected: Expect) {
    let mut writer = models::all().into_iter().find(|model| model.name == name).unwrap().gguf();
    change(&mut writer);
    // The file itself is readable.
    let file =
        ModelFile::from_bytes("tiny", Arc::new(writer.write())).unwrap_or_else(|error| panic!("{error}"));
    let error = file.load(&LoadOptions::default()).map(|_| ()).unwrap_err();
    expected.assert_eq(&error.to_string());
}

#[track_caller]
fn check(change: impl FnOnce(&mut Writer), expected: Expect) {
    check_model("llama", change, expected);
}

fn set(key: &'static str, value: Value) -> impl FnOnce(&mut Writer) {
    move |writer| {
        writer.metadata.retain(|entry| entry.0 != key);
        writer.metadata.push((key.to_owned(), value));
    }
}

fn remove(key: &'static str) -> impl FnOnce(&mut Writer) {
    move |writer| writer.metadata.retain(|entry| entry.0 != key)
}

fn tensor<'a>(writer: &'a mut Writer, name: &str) -> &'a mut RawTensor {
    writer.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
}

#[test]
fn architectures_are_named_with_what_is_supported() {
    check(
        set("general.architecture", Value::String("mamba".to_owned())),
        expect![
            "architecture `mamba` is not supported (supported: llama, mistral3, mistral4, qwen2, qwen2moe, qwen3, qwen3moe, qwen35, qwen35moe, qwen3next, lfm2, lfm2moe, mamba2, nemotron_h, nemotron_h_moe, granitehybrid, falcon-h1, qwen2vl, qwen3vl, qwen3vlmoe, gemma2, gemma3, gemma4, gemma4-assistant, gpt-oss, phi2, phi3, smollm3, granite, granitemoe, olmo2, olmoe, seed_oss, exaone4, hunyuan-dense, hunyuan-moe, ernie4_5, ernie4_5-moe, paddleocr, glm4, glm4moe, minimax-m2, deepseek, deepseek2, cohere2, nemotron, starcoder2, stablelm, gpt2, gptneox, bert, xlm-roberta, mpnet, nomic-bert, nomic-bert-moe, jina-bert-v2, modern-bert, eurobert, gemma-embedding)"
        ],
    );
    check(remove("general.architecture"), expect!["the metadata has no `general.architecture`"]);
    check(
        set("general.architecture", Value::U32(1)),
        expect!["metadata `general.architecture` is u32 1, expected a string"],
    );
}

#[test]
fn features_are_named() {
    check(set("llama.expert_count", Value::U32(8)), expect!["the metadata has no `llama.expert_used_count`"]);
    check(
        set("llama.rope.scaling.type", Value::String("ntk".to_owned())),
        expect![
            "`llama.rope.scaling.type` = `ntk` is not supported (supported: none, linear, yarn, longrope)"
        ],
    );
    check(
        set("llama.attention.value_length", Value::U32(32)),
        expect!["a value head (32) unlike a key head (16) is not supported"],
    );
    check(
        set("llama.attention.head_count_kv", Value::Array(Array::I32(vec![2, 4]))),
        expect!["`llama.attention.head_count_kv` that differs between layers is not supported"],
    );
    check(set("llama.logit_scale", Value::F32(0.5)), expect!["`llama.logit_scale` = 0.5 is not supported"]);
}

#[test]
fn metadata_is_named() {
    check(remove("llama.block_count"), expect!["the metadata has no `llama.block_count`"]);
    check(
        remove("llama.attention.layer_norm_rms_epsilon"),
        expect!["the metadata has no `llama.attention.layer_norm_rms_epsilon`"],
    );
    check(
        set("llama.embedding_length", Value::F32(64.0)),
        expect!["metadata `llama.embedding_length` is f32 64, expected an unsigned 32-bit integer"],
    );
    check(
        set("llama.block_count", Value::U32(u32::MAX)),
        expect!["the model's configuration is not usable: 4294967295 layers, but only 21 tensors"],
    );
    check(
        set("llama.attention.head_count", Value::U32(0)),
        expect!["the model's configuration is not usable: the number of heads is 0"],
    );
    check(
        set("llama.context_length", Value::U32(0)),
        expect!["the model's configuration is not usable: the context length is 0"],
    );
    check(
        |writer| {
            set("llama.rope.scaling.type", Value::String("yarn".to_owned()))(writer);
            set("llama.rope.scaling.factor", Value::F32(4.0))(writer);
            set("llama.rope.scaling.original_context_length", Value::U32(0))(writer);
        },
        expect![
            "the model's configuration is not usable: RoPE scaling has original context 0, expected 1 to 1000000000000"
        ],
    );
    check(
        remove("tokenizer.ggml.model"),
        expect!["the model's tokenizer is not usable: the metadata has no `tokenizer.ggml.model`"],
    );
}

#[test]
fn tensors_are_named() {
    let drop_tensor =
        |name: &'static str| move |writer: &mut Writer| writer.tensors.retain(|tensor| tensor.name != name);
    check(
        drop_tensor("blk.1.ffn_down.weight"),
        expect!["tensor `blk.1.ffn_down.weight` is missing (a llama model has it with shape [64, 96])"],
    );
    check(
        drop_tensor("token_embd.weight"),
        expect![
            "the model's configuration is not usable: the embedding table, tensor `token_embd.weight`, is missing or empty"
        ],
    );
    check(
        set("llama.feed_forward_length", Value::U32(95)),
        expect!["tensor `blk.0.ffn_gate.weight` has shape [96, 64], expected [95, 64]"],
    );
    check(
        set("llama.block_count", Value::U32(1)),
        expect![
            "9 tensors do not belong to a llama model as Paguro knows it: `blk.1.attn_k.weight`, `blk.1.attn_norm.weight`, `blk.1.attn_output.weight`, `blk.1.attn_q.weight`, ..."
        ],
    );
    let rename = |writer: &mut Writer| {
        tensor(writer, "blk.0.ffn_gate.weight").name = "blk.0.ffn_gate_exps.weight".to_owned()
    };
    check(
        rename,
        expect!["tensor `blk.0.ffn_gate.weight` is missing (a llama model has it with shape [96, 64])"],
    );
    check_model(
        "qwen3",
        drop_tensor("blk.0.attn_q_norm.weight"),
        expect!["tensor `blk.0.attn_q_norm.weight` is missing (a qwen3 model has it with shape [32])"],
    );
    check_model(
        "phi3-longrope-long",
        |writer| tensor(writer, "rope_factors_long.weight").bytes.fill(0),
        expect!["the model's configuration is not usable: RoPE's factors are not all positive numbers"],
    );
}

#[test]
fn types_of_tensors_are_named() {
    // I32 elements are as large as those of F32.
    check(
        |writer| tensor(writer, "blk.0.attn_q.weight").kind = 26,
        expect![
            "tensor `blk.0.attn_q.weight` has type I32, which is not supported (supported: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, Q1_0, Q2_0, MXFP4, NVFP4, NVFP4_SCALED)"
        ],
    );
    check(
        |writer| tensor(writer, "blk.0.attn_norm.weight").kind = 26,
        expect![
            "tensor `blk.0.attn_norm.weight` has type I32, which is not supported (supported: F32, F16, BF16)"
        ],
    );
    // A type from the future: nobody knows its size.
    check(
        |writer| tensor(writer, "output.weight").kind = 500,
        expect![
            "tensor `output.weight` has type 500 (unknown), which is not supported (supported: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, Q1_0, Q2_0, MXFP4, NVFP4, NVFP4_SCALED)"
        ],
    );
    let quantized_norm = |writer: &mut Writer| {
        let norm = tensor(writer, "output_norm.weight");
        (norm.kind, norm.bytes) = (8, vec![0; 68]); // 64 elements of Q8_0
    };
    check(
        quantized_norm,
        expect![
            "tensor `output_norm.weight` has type Q8_0, which is not supported (supported: F32, F16, BF16)"
        ],
    );
}

/// Makes the tiny Llama a mixture of four experts, of which it uses two.
fn to_experts(writer: &mut Writer) {
    for (key, value) in [("count", 4), ("used_count", 2), ("feed_forward_length", 32)] {
        writer.metadata.push((format!("llama.expert_{key}"), Value::U32(value)));
    }
    writer
        .tensors
        .retain(|tensor| !["ffn_gate", "ffn_up", "ffn_down"].iter().any(|part| tensor.name.contains(part)));
    let shapes: [(&str, &[u64]); 4] = [
        ("ffn_gate_inp", &[64, 4]),
        ("ffn_gate_exps", &[64, 32, 4]),
        ("ffn_up_exps", &[64, 32, 4]),
        ("ffn_down_exps", &[32, 64, 4]),
    ];
    for (layer, (part, dims)) in (0..2).flat_map(|layer| shapes.map(|shape| (layer, shape))) {
        let bytes = vec![0; 4 * dims.iter().product::<u64>() as usize];
        let name = format!("blk.{layer}.{part}.weight");
        writer.tensors.push(RawTensor { name, dims: dims.to_vec(), kind: 0, bytes });
    }
}

#[test]
fn mixtures_of_experts_are_refused_by_what_is_wrong() {
    let mut writer = models::llama().gguf();
    to_experts(&mut writer);
    let file = ModelFile::from_bytes("tiny", Arc::new(writer.write())).unwrap();
    file.load(&LoadOptions::default()).unwrap_or_else(|error| panic!("as it is, the model loads: {error}"));

    let keys = [
        ("count", 0, "tensor `blk.0.ffn_gate.weight` is missing (a llama model has it with shape [96, 64])"),
        ("count", 3, "tensor `blk.0.ffn_gate_inp.weight` has shape [4, 64], expected [3, 64]"),
        ("count", 70_000, "the model's configuration is not usable: the number of experts is 70000"),
        ("count", u32::MAX, "the model's configuration is not usable: the number of experts is 4294967295"),
        (
            "used_count",
            0,
            "the model's configuration is not usable: the number of experts for each token is 0",
        ),
        ("used_count", 5, "the model's configuration is not usable: 5 of 4 experts for each token"),
        (
            "feed_forward_length",
            31,
            "tensor `blk.0.ffn_gate_exps.weight` has shape [4, 32, 64], expected [4, 31, 64]",
        ),
        (
            "feed_forward_length",
            u32::MAX,
            "the model's configuration is not usable: the size of an expert is 4294967295",
        ),
        (
            "gating_func",
            9,
            "`llama.expert_gating_func` = 9 is not supported (supported: 1 (softmax), 2 (sigmoid))",
        ),
        ("group_count", 4, "a router with 4 groups of experts is not supported"),
    ];
    for (key, value, expected) in keys {
        let key = format!("llama.expert_{key}");
        let change = |writer: &mut Writer| {
            to_experts(writer);
            writer.metadata.retain(|entry| entry.0 != key);
            writer.metadata.push((key.clone(), Value::U32(value)));
        };
        assert_eq!(refusal(change), expected, "{key} = {value}");
    }

    let parts = [
        ("ffn_gate_inp", "[4, 64]"),
        ("ffn_gate_exps", "[4, 32, 64]"),
        ("ffn_up_exps", "[4, 32, 64]"),
        ("ffn_down_exps", "[4, 64, 32]"),
    ];
    for (part, shape) in parts {
        let name = format!("blk.1.{part}.weight");
        let missing = refusal(|writer| {
            to_experts(writer);
            writer.tensors.retain(|tensor| tensor.name != name);
        });
        assert_eq!(missing, format!("tensor `{name}` is missing (a llama model has it with shape {shape})"));
        let flat = refusal(|writer| {
            to_experts(writer);
            let tensor = tensor(writer, &name);
            tensor.dims = vec![tensor.dims.iter().product()];
        });
        let elements = shape.trim_matches(['[', ']']).split(", ").map(|dim| dim.parse::<u64>().unwrap());
        let elements: u64 = elements.product();
        assert_eq!(flat, format!("tensor `{name}` has shape [{elements}], expected {shape}"));
    }
}

/// Returns the error of loading the tiny Llama after a change.
fn refusal(change: impl FnOnce(&mut Writer)) -> String {
    let mut writer = models::llama().gguf();
    change(&mut writer);
    let file = ModelFile::from_bytes("tiny", Arc::new(writer.write())).unwrap();
    file.load(&LoadOptions::default()).map(|_| ()).unwrap_err().to_string()
}
