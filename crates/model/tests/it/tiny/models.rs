//! One small model of each architecture, with the features that it can have.

use std::{f64::consts::TAU, fs, path::Path};

use paguro_model::gguf::{Array, Value};
use serde_json::{Value as Json, json};

use super::{Random, Tensor, gguf::Writer, safetensors};

/// Tokens: three special ones, all bytes, a few pieces, and one that llama.cpp expects of every Phi-3.
pub const VOCAB: usize = 3 + 256 + 29 + 1;

/// A model in both formats.
#[derive(Clone)]
pub struct Tiny {
    pub name: &'static str,
    /// `general.architecture`.
    pub architecture: &'static str,
    shape: Shape,
    /// `config.json`.
    pub config: Json,
    /// As Hugging Face stores them.
    pub tensors: Vec<Tensor>,
    /// Keys after `{architecture}.`, besides those of the shape.
    keys: Vec<(&'static str, Value)>,
    /// Tensors that only the GGUF file has.
    extra: Vec<Tensor>,
}

#[derive(Clone, Copy)]
struct Shape {
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    ffn: usize,
}

const SHAPE: Shape = Shape { layers: 2, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, ffn: 96 };

/// All of them.
pub fn all() -> Vec<Tiny> {
    vec![
        llama(),
        llama3(),
        mistral(),
        qwen2(),
        qwen3(),
        gemma2(),
        gemma3(),
        phi3("phi3", None),
        phi3("phi3-longrope-short", Some(512)),
        phi3("phi3-longrope-long", Some(16)),
    ]
}

/// As small as possible.
pub fn smallest() -> Tiny {
    let shape = Shape { layers: 1, hidden: 8, heads: 2, kv_heads: 1, head_dim: 4, ffn: 8 };
    Tiny::new("smallest", "llama", "LlamaForCausalLM", shape, json!({"tie_word_embeddings": true}))
}

/// The plain one.
pub fn llama() -> Tiny {
    let config = json!({"rope_scaling": {"type": "linear", "factor": 2.0}});
    Tiny::new("llama", "llama", "LlamaForCausalLM", SHAPE, config)
        .keys(vec![("rope.scaling.type", text("linear")), ("rope.scaling.factor", Value::F32(2.0))])
}

/// Llama 3's scaling, tied, with the biases that a few Llamas have.
fn llama3() -> Tiny {
    let shape = Shape { head_dim: 32, ..SHAPE };
    let config = json!({
        "rope_theta": 500000.0, "tie_word_embeddings": true, "attention_bias": true, "head_dim": 32,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 64},
    });
    // The value that llama.cpp's convert_hf_to_gguf.py stores for this rule.
    let factor = |pair: usize| {
        let wavelength = TAU * 500000f64.powf(2.0 * pair as f64 / 32.0);
        let smooth = (64.0 / wavelength - 1.0) / 3.0;
        match wavelength {
            w if w < 16.0 => 1.0,
            w if w > 64.0 => 8.0,
            _ => (1.0 / ((1.0 - smooth) / 8.0 + smooth)) as f32,
        }
    };
    let mut pair = 0..;
    let factors = Tensor::new("rope_freqs.weight", &[16], || factor(pair.next().unwrap()));
    Tiny::new("llama3", "llama", "LlamaForCausalLM", shape, config)
        .keys(vec![("rope.freq_base", Value::F32(500000.0))])
        .extra(vec![factors])
}

fn mistral() -> Tiny {
    let config = json!({"sliding_window": 7});
    Tiny::new("mistral", "llama", "MistralForCausalLM", SHAPE, config)
        .keys(vec![("attention.sliding_window", Value::U32(7))])
}

/// Biases, and YaRN.
fn qwen2() -> Tiny {
    let config = json!({
        "rope_theta": 1000000.0, "tie_word_embeddings": true, "sliding_window": 8, "use_sliding_window": false,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    });
    Tiny::new("qwen2", "qwen2", "Qwen2ForCausalLM", SHAPE, config).keys(vec![
        ("rope.freq_base", Value::F32(1000000.0)),
        ("rope.scaling.type", text("yarn")),
        ("rope.scaling.factor", Value::F32(4.0)),
        ("rope.scaling.original_context_length", Value::U32(128)),
    ])
}

/// Norms of query and key heads, which are wider than the hidden size divided by their number.
fn qwen3() -> Tiny {
    let shape = Shape { head_dim: 32, ..SHAPE };
    let config = json!({"head_dim": 32, "rope_theta": 1000000.0});
    Tiny::new("qwen3", "qwen3", "Qwen3ForCausalLM", shape, config)
        .keys(vec![("rope.freq_base", Value::F32(1000000.0))])
}

fn gemma2() -> Tiny {
    let shape = Shape { layers: 3, head_dim: 32, ..SHAPE };
    let config = json!({
        "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 6, "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 5.0, "hidden_activation": "gelu_pytorch_tanh",
    });
    Tiny::new("gemma2", "gemma2", "Gemma2ForCausalLM", shape, config).keys(vec![
        ("attention.sliding_window", Value::U32(6)),
        ("attn_logit_softcapping", Value::F32(20.0)),
        ("final_logit_softcapping", Value::F32(5.0)),
    ])
}

/// Seven layers, of which the sixth sees far, with its own, scaled RoPE.
fn gemma3() -> Tiny {
    let shape = Shape { layers: 7, head_dim: 32, ..SHAPE };
    let config = json!({
        "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "hidden_activation": "gelu_pytorch_tanh",
    });
    Tiny::new("gemma3", "gemma3", "Gemma3ForCausalLM", shape, config).keys(vec![
        ("attention.sliding_window", Value::U32(5)),
        ("rope.freq_base", Value::F32(1000000.0)),
        ("rope.scaling.type", text("linear")),
        ("rope.scaling.factor", Value::F32(8.0)),
    ])
}

/// Fused projections and partial rotation; with `original` also longrope, for a context of 256.
fn phi3(name: &'static str, original: Option<u32>) -> Tiny {
    let shape = Shape { kv_heads: 4, head_dim: 16, ..SHAPE };
    let (short, long): (Vec<_>, Vec<_>) =
        (0..6).map(|i| (1.0 + 0.1 * i as f32, 1.5 + 2.0 * i as f32)).unzip();
    let mut config = json!({"partial_rotary_factor": 0.75, "original_max_position_embeddings": 256});
    let mut keys = vec![];
    let mut extra = vec![];
    if let Some(original) = original {
        config["rope_scaling"] = json!({"type": "longrope", "short_factor": short, "long_factor": long});
        config["original_max_position_embeddings"] = json!(original);
        // The values that convert_hf_to_gguf.py stores.
        let scale = 256.0 / original as f32;
        let magnitude = if scale > 1.0 { (1.0 + scale.ln() / (original as f32).ln()).sqrt() } else { 1.0 };
        keys = vec![
            ("rope.scaling.type", text("longrope")),
            ("rope.scaling.original_context_length", Value::U32(original)),
            ("rope.scaling.attn_factor", Value::F32(magnitude)),
        ];
        for (name, values) in [("short", short), ("long", long)] {
            let mut values = values.into_iter();
            extra.push(Tensor::new(format!("rope_factors_{name}.weight"), &[6], || values.next().unwrap()));
        }
    }
    keys.push(("rope.dimension_count", Value::U32(12)));
    Tiny::new(name, "phi3", "Phi3ForCausalLM", shape, config).keys(keys).extra(extra)
}

fn text(text: &str) -> Value {
    Value::String(text.to_owned())
}

impl Tiny {
    fn new(
        name: &'static str,
        architecture: &'static str,
        class: &str,
        shape: Shape,
        differences: Json,
    ) -> Self {
        let mut config = json!({
            "architectures": [class], "hidden_size": shape.hidden, "intermediate_size": shape.ffn,
            "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads, "vocab_size": VOCAB, "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "eos_token_id": 2,
        });
        for (key, value) in differences.as_object().unwrap() {
            config[key] = value.clone();
        }
        let tensors = tensors(architecture, shape, &config);
        Self { name, architecture, shape, config, tensors, keys: vec![], extra: vec![] }
    }

    fn keys(self, keys: Vec<(&'static str, Value)>) -> Self {
        Self { keys, ..self }
    }

    fn extra(self, extra: Vec<Tensor>) -> Self {
        Self { extra, ..self }
    }

    /// As a GGUF file.
    pub fn gguf(&self) -> Writer {
        let Shape { layers, hidden, heads, kv_heads, head_dim, ffn } = self.shape;
        let key = |key: &str| format!("{}.{key}", self.architecture);
        let integer = |value: usize| Value::U32(value as u32);
        let mut metadata = vec![
            ("general.architecture".to_owned(), text(self.architecture)),
            ("general.name".to_owned(), text(self.name)),
            (key("context_length"), integer(256)),
            (key("embedding_length"), integer(hidden)),
            (key("block_count"), integer(layers)),
            (key("feed_forward_length"), integer(ffn)),
            (key("attention.head_count"), integer(heads)),
            (key("attention.head_count_kv"), integer(kv_heads)),
            (key("attention.key_length"), integer(head_dim)),
            (key("attention.value_length"), integer(head_dim)),
            (key("attention.layer_norm_rms_epsilon"), Value::F32(1e-5)),
        ];
        metadata.extend(self.keys.iter().map(|(name, value)| (key(name), value.clone())));
        metadata.extend(vocab());
        let mut tensors: Vec<_> = self.tensors.iter().map(|tensor| self.to_gguf(tensor)).collect();
        tensors.extend(self.extra.iter().cloned());
        Writer::new(metadata, &tensors)
    }

    /// As a Hugging Face folder.
    pub fn write_hf(&self, folder: &Path) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        fs::write(folder.join("tokenizer.json"), tokenizer_json().to_string()).unwrap();
        fs::write(folder.join("model.safetensors"), safetensors::write(&self.tensors)).unwrap();
    }

    /// Converts a tensor like llama.cpp's converter.
    pub fn to_gguf(&self, tensor: &Tensor) -> Tensor {
        let mut tensor = tensor.clone();
        let is_gemma = self.architecture.starts_with("gemma");
        if is_gemma && tensor.name.ends_with("norm.weight") {
            tensor.values.iter_mut().for_each(|value| *value += 1.0);
        }
        let heads = |part: &str| tensor.name.contains(&format!(".{part}."));
        if self.architecture == "llama" && (heads("q_proj") || heads("k_proj")) {
            interleave(&mut tensor, self.shape.head_dim);
        }
        tensor.name = gguf_name(&tensor.name, is_gemma);
        tensor
    }
}

/// From halves to neighbours: row `2i` of each head is row `i`, row `2i + 1` is row `n/2 + i`.
fn interleave(tensor: &mut Tensor, head_dim: usize) {
    let width = tensor.values.len() / tensor.shape[0];
    let old: Vec<Vec<f32>> = tensor.values.chunks(width).map(<[f32]>::to_vec).collect();
    let from = |row: usize| {
        let (head, in_head) = (row / head_dim, row % head_dim);
        head * head_dim + in_head / 2 + if in_head % 2 == 1 { head_dim / 2 } else { 0 }
    };
    tensor.values = (0..old.len()).flat_map(|row| old[from(row)].clone()).collect();
}

fn gguf_name(hf: &str, is_gemma: bool) -> String {
    let name = hf.strip_prefix("model.").unwrap_or(hf);
    let Some(rest) = name.strip_prefix("layers.") else {
        let (stem, suffix) = name.rsplit_once('.').unwrap();
        let stem = match stem {
            "embed_tokens" => "token_embd",
            "norm" => "output_norm",
            "lm_head" => "output",
            other => panic!("{other}"),
        };
        return format!("{stem}.{suffix}");
    };
    let (layer, rest) = rest.split_once('.').unwrap();
    let (stem, suffix) = rest.rsplit_once('.').unwrap();
    let stem = match stem.rsplit('.').next().unwrap() {
        "input_layernorm" => "attn_norm",
        "q_proj" => "attn_q",
        "k_proj" => "attn_k",
        "v_proj" => "attn_v",
        "qkv_proj" => "attn_qkv",
        "q_norm" => "attn_q_norm",
        "k_norm" => "attn_k_norm",
        "o_proj" => "attn_output",
        "post_attention_layernorm" if is_gemma => "post_attention_norm",
        "post_attention_layernorm" | "pre_feedforward_layernorm" => "ffn_norm",
        "post_feedforward_layernorm" => "post_ffw_norm",
        "gate_proj" => "ffn_gate",
        "up_proj" | "gate_up_proj" => "ffn_up",
        "down_proj" => "ffn_down",
        other => panic!("{other}"),
    };
    format!("blk.{layer}.{stem}.{suffix}")
}

/// Random weights, with a spread that keeps activations near one.
fn tensors(architecture: &str, shape: Shape, config: &Json) -> Vec<Tensor> {
    let Shape { layers, hidden, heads, kv_heads, head_dim, ffn } = shape;
    let (q, kv) = (heads * head_dim, kv_heads * head_dim);
    let mut random_weights = Random(architecture.bytes().map(u64::from).sum());
    let mut tensors = Vec::new();
    let is_gemma = architecture.starts_with("gemma");
    let norm_centre = if is_gemma { 0.0 } else { 1.0 };
    let mut matrix = |tensors: &mut Vec<Tensor>, name: String, rows: usize, cols: usize| {
        let spread = (4.0 / cols as f32).sqrt();
        tensors.push(Tensor::new(name, &[rows, cols], || spread * random_weights.float()));
    };
    let mut random_vectors = Random(1);
    let mut vector = |tensors: &mut Vec<Tensor>, name: String, len: usize, centre: f32| {
        tensors.push(Tensor::new(name, &[len], || centre + 0.3 * random_vectors.float()));
    };
    matrix(&mut tensors, "model.embed_tokens.weight".to_owned(), VOCAB, hidden);
    for layer in 0..layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let mut norms = vec!["input_layernorm", "post_attention_layernorm"];
        if is_gemma {
            norms.extend(["pre_feedforward_layernorm", "post_feedforward_layernorm"]);
        }
        for norm in norms {
            vector(&mut tensors, name(&format!("{norm}.weight")), hidden, norm_centre);
        }
        if architecture == "qwen3" || architecture == "gemma3" {
            vector(&mut tensors, name("self_attn.q_norm.weight"), head_dim, norm_centre);
            vector(&mut tensors, name("self_attn.k_norm.weight"), head_dim, norm_centre);
        }
        let linears = match architecture {
            "phi3" => vec![
                ("self_attn.qkv_proj", q + 2 * kv, hidden),
                ("self_attn.o_proj", hidden, q),
                ("mlp.gate_up_proj", 2 * ffn, hidden),
                ("mlp.down_proj", hidden, ffn),
            ],
            _ => vec![
                ("self_attn.q_proj", q, hidden),
                ("self_attn.k_proj", kv, hidden),
                ("self_attn.v_proj", kv, hidden),
                ("self_attn.o_proj", hidden, q),
                ("mlp.gate_proj", ffn, hidden),
                ("mlp.up_proj", ffn, hidden),
                ("mlp.down_proj", hidden, ffn),
            ],
        };
        for (part, rows, cols) in linears {
            matrix(&mut tensors, name(&format!("{part}.weight")), rows, cols);
            let is_qkv = part.starts_with("self_attn") && !part.ends_with("o_proj");
            let is_biased = config["attention_bias"] == true && part.starts_with("self_attn");
            if is_biased || architecture == "qwen2" && is_qkv {
                vector(&mut tensors, name(&format!("{part}.bias")), rows, 0.0);
            }
        }
    }
    vector(&mut tensors, "model.norm.weight".to_owned(), hidden, norm_centre);
    if config["tie_word_embeddings"] != true && !is_gemma {
        matrix(&mut tensors, "lm_head.weight".to_owned(), VOCAB, hidden);
    }
    tensors
}

fn pieces() -> Vec<String> {
    let special = ["<unk>", "<s>", "</s>"].map(str::to_owned).into_iter();
    let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
    let words = ["▁", "▁a", "an"].into_iter().map(str::to_owned).chain(('a'..='z').map(String::from));
    special.chain(bytes).chain(words).chain(["<|endoftext|>".to_owned()]).collect()
}

/// A SentencePiece vocabulary.
fn vocab() -> Vec<(String, Value)> {
    let pieces = pieces();
    let kinds = (0..pieces.len()).map(|id| match id {
        0 => 2,
        1 | 2 | 288 => 3,
        3..259 => 6,
        _ => 1,
    });
    let kinds = kinds.collect();
    let scores = (0..pieces.len()).map(|id| -(id as f32)).collect();
    let key = |key: &str| format!("tokenizer.ggml.{key}");
    vec![
        (key("model"), text("llama")),
        (key("tokens"), Value::Array(Array::Strings(pieces))),
        (key("scores"), Value::Array(Array::F32(scores))),
        (key("token_type"), Value::Array(Array::I32(kinds))),
        (key("bos_token_id"), Value::U32(1)),
        (key("eos_token_id"), Value::U32(2)),
    ]
}

fn tokenizer_json() -> Json {
    let vocab: serde_json::Map<_, _> =
        pieces().into_iter().enumerate().map(|(id, piece)| (piece, json!(id))).collect();
    json!({
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": true, "unk_token": "<unk>"},
    })
}
