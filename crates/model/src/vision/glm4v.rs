//! GLM-4.1V, GLM-4.5V and GLM-4.6V, GLM-OCR: positions by row and column, squares of four patches through a convolution and a gated
//! network.

use paguro_backend::{Activation, NormKind, Patches, QkNormKind, RowOp};
use paguro_vision::{Family, SizeRule, SmallSides};
use serde_json::Value;

use super::{
    Lowered, Places, Resize, TowerFamily,
    adapt::Sections,
    files::{TowerFile, Values},
    lower::{BlockNames, Blocks, Extras, GGUF, rope_of_halves, single},
    qwen2vl::CLIP,
    qwen3vl::{MERGE, check_squares, processor},
};
use crate::{error::ModelError, gguf::Value as Meta};

pub(super) const DEF: TowerFamily = TowerFamily {
    projectors: &["glm4v"],
    classes: &[
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "Glm46VForConditionalGeneration",
        "GlmOcrForConditionalGeneration",
    ],
    prefixes: &[("model.visual.", "v."), ("visual.", "v.")],
    family: Family::Glm4,
    projector: "glm4v",
    marker: "<|image|>",
    image_token: "<|image|>",
    image_token_keys: &["image_token_id"],
    lower,
    names: (
        &NAMES,
        &[
            ("v.patch_embed.proj", "v.patch_embd"),
            ("v.post_conv_layernorm", "v.norm_embd"),
            ("v.embeddings.position_embedding", "v.position_embd"),
            ("v.post_layernorm", "v.post_ln"),
            ("v.downsample", "mm.patch_merger"),
            ("v.merger.proj", "mm.model.fc"),
            ("v.merger.post_projection_norm", "mm.post_norm"),
            ("v.merger.gate_proj", "mm.gate"),
            ("v.merger.up_proj", "mm.up"),
            ("v.merger.down_proj", "mm.down"),
        ],
    ),
    keys: |_, vision, processor, metadata| {
        let eps = vision.get("rms_norm_eps").and_then(Value::as_f64).map_or(EPS, |eps| eps as f32);
        metadata.set("clip.vision.attention.layer_norm_epsilon", Meta::F32(eps));
        let merge = vision.get("spatial_merge_size").and_then(Value::as_u64).unwrap_or(MERGE as u64);
        metadata.set("clip.vision.spatial_merge_size", Meta::U32(u32::try_from(merge).unwrap_or(0)));
        for (edge, own) in [("shortest_edge", "image_min_pixels"), ("longest_edge", "image_max_pixels")] {
            let found = processor.get("size").and_then(|size| size.get(edge)?.as_u64());
            if let Some(pixels) = found.and_then(|pixels| u32::try_from(pixels / FRAMES).ok()) {
                metadata.set(&format!("clip.vision.{own}"), Meta::U32(pixels));
            }
        }
    },
    splits_qkv: false,
    interleaves: false,
    eps: EPS,
    adapt: |text| text.sections(Sections::Blocks, [8, 12, 12]),
};

const NAMES: BlockNames = BlockNames {
    before: "v.blocks.",
    norm1: "norm1",
    norm2: "norm2",
    qkv: "attn.qkv",
    out: "attn.proj",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    q_norm: "attn.q_norm",
    k_norm: "attn.k_norm",
    ..GGUF
};

const EPS: f32 = 1e-5;

/// Equal frames that a still picture is, all of which limits of pixels in folders count.
const FRAMES: u64 = 2;

fn lower(file: &mut TowerFile<'_, '_>) -> Result<Lowered, ModelError> {
    let blocks = blocks(file)?;
    let (hidden, eps) = (blocks.hidden, blocks.eps);
    let patch = file.size(["patch_size", "patch_size"], 14)?;
    let merge = file.optional(["spatial_merge_size", "spatial_merge_size"])?.unwrap_or(MERGE);
    check_squares(patch, merge)?;
    let linear = file.patches(file.name(["v.patch_embd", "v.patch_embed.proj"]), hidden, patch)?;
    let mut ops = vec![RowOp::Linear { linear, width: hidden, activation: None }];
    // GLM-OCR has neither this norm nor embeddings of places.
    let norm = file.name(["v.norm_embd", "v.post_conv_layernorm"]);
    if file.tensors.has(&format!("{norm}.weight")) {
        ops.push(RowOp::Norm(file.norm(norm, hidden, NormKind::Rms, eps)?));
    }
    let name = file.name(["v.position_embd.weight", "v.embeddings.position_embedding.weight"]);
    let places = match file.tensors.rows(name) {
        None => Places::None,
        Some(count) => {
            let side = count.isqrt();
            if side * side != count || count == 0 {
                return Err(ModelError::Config(format!("{count} embeddings of places are not a square")));
            }
            ops.push(RowOp::Add);
            let table = file.tensors.values(name, &[count, hidden])?;
            Places::Grid { table, side, resize: Resize::Cubic }
        }
    };
    let patches = Patches { width: 3 * patch * patch, ops };
    let layers = blocks.all_layers(file, Some(0))?;

    let text = file.text_hidden;
    let post = file.norm(file.name(["v.post_ln", "v.post_layernorm"]), hidden, NormKind::Rms, eps)?;
    let merger = file.squares(file.name(["mm.patch_merger", "v.downsample"]), text, hidden, merge)?;
    let projection = file.linear(file.name(["mm.model.fc", "v.merger.proj"]), text, text)?;
    // PyTorch's default for LayerNorm.
    let norm = file.name(["mm.post_norm", "v.merger.post_projection_norm"]);
    let norm = file.norm(norm, text, NormKind::Layer, 1e-5)?;
    let [gate, up, down] = match file.is_hf() {
        true => ["v.merger.gate_proj", "v.merger.up_proj", "v.merger.down_proj"],
        false => ["mm.gate", "mm.up", "mm.down"],
    };
    let width = file.tensors.rows(&format!("{up}.weight")).unwrap_or(0);
    let both = file.stacked([gate, up], width, text)?;
    let down = file.linear(down, text, width)?;
    let linear = |linear, width| RowOp::Linear { linear, width, activation: None };
    let ops = vec![
        RowOp::Norm(post),
        RowOp::Join(merge * merge),
        linear(merger, text),
        linear(projection, text),
        RowOp::Norm(norm),
        RowOp::Activate { activation: Activation::Gelu, gated: false },
        linear(both, 2 * width),
        RowOp::Activate { activation: Activation::Silu, gated: true },
        linear(down, text),
    ];
    let merged = single(merge * merge, text, blocks.layers, ops);
    let ropes = vec![rope_of_halves(blocks.head_dim, 10_000.0)];
    let program = blocks.program(&[false], layers, ropes, patches, merged);
    let frames = if file.is_hf() { FRAMES } else { 1 };
    let limits = [12_544, 9_633_792].map(|pixels| pixels / FRAMES * frames);
    let mut processor = processor(file, patch, merge, limits, CLIP, SmallSides::Truncated)?;
    if let SizeRule::Smart { min_pixels, max_pixels, small: _ } = &mut processor.rule {
        (*min_pixels, *max_pixels) = (*min_pixels / frames, *max_pixels / frames);
    }
    Ok(Lowered::new(program, places, processor))
}

fn blocks(file: &mut TowerFile<'_, '_>) -> Result<Blocks, ModelError> {
    let hidden = file.size(["embedding_length", "hidden_size"], 1536)?;
    let heads = file.size(["attention.head_count", "num_heads"], 12)?;
    let head_dim = hidden.checked_div(heads).unwrap_or(0);
    let eps = match file.values {
        Values::Gguf(metadata) => metadata.optional_f32("clip.vision.attention.layer_norm_epsilon")?,
        Values::Hf { .. } => file.vision("rms_norm_eps").and_then(Value::as_f64).map(|eps| eps as f32),
    };
    let names = if file.is_hf() { &NAMES } else { &GGUF };
    let first = |part: &str| format!("{}0.{part}.weight", names.before);
    let has_norms = file.tensors.has(&first(names.q_norm));
    let blocks = Blocks {
        layers: file.size(["block_count", "depth"], 24)?,
        hidden,
        heads,
        head_dim,
        // Keys have the width of another network.
        ffn: file.tensors.rows(&first(names.gate)).unwrap_or(0),
        norms: NormKind::Rms,
        eps: eps.unwrap_or(EPS),
        activation: Activation::Silu,
        gated: true,
        scale: (head_dim as f32).powf(-0.5),
        gemma4: false,
        extras: Extras { qk_norms: has_norms.then_some(QkNormKind::Head), scales: false },
        names: &NAMES,
    };
    blocks.check(file)?;
    match file.vision("hidden_act").and_then(Value::as_str) {
        None | Some("silu") => Ok(blocks),
        Some(other) => Err(ModelError::unsupported_but(format!("activation `{other}`"), "silu")),
    }
}
