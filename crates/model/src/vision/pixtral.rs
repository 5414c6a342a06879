//! Pixtral, and Mistral Small 3.1 and later, Ministral 3: rotations by row and column, rows of patches or of squares of four.

use paguro_backend::{Activation, NormKind, Patches, Rope, RopeStyle, RowOp};
use paguro_vision::{Family, Filter, Processor, SizeRule};
use serde_json::Value;

use super::{
    Lowered, Places, TowerFamily,
    files::{TowerFile, Values},
    lower::{BlockNames, Blocks, Extras, GGUF, single},
    object,
    qwen2vl::CLIP,
    qwen3vl::check_squares,
};
use crate::{error::ModelError, gguf::Value as Meta};

pub(super) const DEF: TowerFamily = TowerFamily {
    projectors: &["pixtral"],
    classes: &["Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration"],
    prefixes: &[
        ("model.vision_tower.", "v."),
        ("vision_tower.", "v."),
        ("model.multi_modal_projector.", "mm."),
        ("multi_modal_projector.", "mm."),
    ],
    family: Family::Pixtral,
    projector: "pixtral",
    marker: "[IMG]",
    image_token: "[IMG]",
    image_token_keys: &["image_token_index", "image_token_id"],
    lower,
    names: (
        &NAMES,
        &[
            ("v.patch_conv", "v.patch_embd"),
            ("v.ln_pre", "v.pre_ln"),
            ("mm.norm", "mm.input_norm"),
            ("mm.patch_merger.merging_layer", "mm.patch_merger"),
            ("mm.linear_1", "mm.1"),
            ("mm.linear_2", "mm.2"),
        ],
    ),
    keys: |config, _, processor, metadata| {
        if let Some(merge) = config.get("spatial_merge_size").and_then(Value::as_u64) {
            metadata.set("clip.vision.spatial_merge_size", Meta::U32(u32::try_from(merge).unwrap_or(0)));
        }
        // The longest side is what programs read as the size.
        let edge = processor.get("size").and_then(|size| size.get("longest_edge")?.as_u64());
        if let Some(edge) = edge.and_then(|edge| u32::try_from(edge).ok()) {
            metadata.set("clip.vision.image_size", Meta::U32(edge));
        }
    },
    splits_qkv: false,
    interleaves: true,
    eps: EPS,
    adapt: |_| Ok(()),
};

const NAMES: BlockNames = BlockNames {
    before: "v.transformer.layers.",
    norm1: "attention_norm",
    norm2: "ffn_norm",
    q: "attention.q_proj",
    k: "attention.k_proj",
    v: "attention.v_proj",
    out: "attention.o_proj",
    gate: "feed_forward.gate_proj",
    up: "feed_forward.up_proj",
    down: "feed_forward.down_proj",
    ..GGUF
};

/// transformers' norms have this, whatever the files say.
const EPS: f32 = 1e-5;

fn lower(file: &mut TowerFile<'_, '_>) -> Result<Lowered, ModelError> {
    if file.vision("model_type").and_then(Value::as_str).is_some_and(|kind| kind != "pixtral") {
        return Err(ModelError::unsupported_but("the vision tower of LLaVA", "pixtral"));
    }
    let hidden = file.size(["embedding_length", "hidden_size"], 1024)?;
    let heads = file.size(["attention.head_count", "num_attention_heads"], 16)?;
    let head_dim = hidden.checked_div(heads).unwrap_or(0);
    let (activation, merge) = match file.values {
        Values::Gguf(metadata) => {
            let is_gelu = metadata.bool("clip.use_gelu") == Some(true);
            let merge = file.optional(["spatial_merge_size", ""])?.unwrap_or(1);
            (if is_gelu { Activation::Gelu } else { Activation::Silu }, merge)
        }
        Values::Hf { config, .. } => {
            let activation = match file.vision("hidden_act").and_then(Value::as_str) {
                None | Some("gelu") => Activation::Gelu,
                Some("silu") => Activation::Silu,
                Some(other) => {
                    return Err(ModelError::unsupported_but(format!("activation `{other}`"), "gelu, silu"));
                }
            };
            let is_merged = file.tensors.has("mm.patch_merger.merging_layer.weight");
            let merge = config.get("spatial_merge_size").and_then(Value::as_u64);
            (activation, merge.unwrap_or(if is_merged { 2 } else { 1 }) as usize)
        }
    };
    let blocks = Blocks {
        layers: file.size(["block_count", "num_hidden_layers"], 24)?,
        hidden,
        heads,
        head_dim,
        ffn: file.size(["feed_forward_length", "intermediate_size"], 4096)?,
        norms: NormKind::Rms,
        eps: EPS,
        activation,
        gated: true,
        scale: (head_dim as f32).powf(-0.5),
        gemma4: false,
        extras: Extras::default(),
        names: &NAMES,
    };
    blocks.check(file)?;
    let patch = file.size(["patch_size", "patch_size"], 16)?;
    let image = file.size(["image_size", "image_size"], 1024)?;
    check_squares(patch, merge)?;
    let linear = file.patches(file.name(["v.patch_embd", "v.patch_conv"]), hidden, patch)?;
    let norm = file.norm(file.name(["v.pre_ln", "v.ln_pre"]), hidden, NormKind::Rms, EPS)?;
    let patches = Patches {
        width: 3 * patch * patch,
        ops: vec![RowOp::Linear { linear, width: hidden, activation: None }, RowOp::Norm(norm)],
    };
    let layers = blocks.all_layers(file, Some(0))?;

    let text = file.text_hidden;
    // A copy of a row of the text model's embeddings.
    file.ignore("v.token_embd.img_break");
    let mut ops = Vec::new();
    let norm = file.name(["mm.input_norm", "mm.norm"]);
    if file.tensors.has(&format!("{norm}.weight")) {
        ops.push(RowOp::Norm(file.norm(norm, hidden, NormKind::Rms, text_eps(file))?));
    }
    let merger = file.name(["mm.patch_merger", "mm.patch_merger.merging_layer"]);
    if file.tensors.has(&format!("{merger}.weight")) {
        ops.push(RowOp::Join(merge * merge));
        let linear = file.squares(merger, hidden, hidden, merge)?;
        ops.push(RowOp::Linear { linear, width: hidden, activation: None });
    } else if merge != 1 {
        return Err(ModelError::Config(format!(
            "squares of {merge} patches, but no matrix that merges them"
        )));
    }
    let [up, down] = [file.name(["mm.1", "mm.linear_1"]), file.name(["mm.2", "mm.linear_2"])];
    ops.push(RowOp::Linear {
        linear: file.linear(up, text, hidden)?,
        width: text,
        activation: Some(Activation::Gelu),
    });
    ops.push(RowOp::Linear { linear: file.linear(down, text, text)?, width: text, activation: None });
    let merged = single(merge * merge, text, blocks.layers, ops);
    let ropes = vec![rope(head_dim, file.is_hf())];
    let program = blocks.program(&[false], layers, ropes, patches, merged);
    let (mean, std) = file.normalization(CLIP)?;
    let edge = file.processor_size("size", "longest_edge").and_then(|edge| u32::try_from(edge).ok());
    let processor = Processor {
        rule: SizeRule::LongestEdge { pixels: edge.unwrap_or(image as u32) },
        filter: file.filter(Filter::Bicubic)?,
        mean,
        std,
        patch: patch as u32,
        merge: merge as u32,
    };
    Ok(Lowered::new(program, Places::None, processor))
}

/// Returns what the projector's norm adds: as the norms of the text model.
fn text_eps(file: &TowerFile<'_, '_>) -> f32 {
    match file.values {
        Values::Gguf(_) => EPS,
        Values::Hf { config, .. } => {
            let eps = object(config, "text_config").and_then(|text| text.get("rms_norm_eps")?.as_f64());
            eps.map_or(EPS, |eps| eps as f32)
        }
    }
}

/// The first half of the pairs is rotated by the row with the even frequencies of a head, the second by the column with the odd ones.
/// The converter to GGUF reorders rows of Q and K so that neighbours are pairs.
fn rope(head_dim: usize, is_hf: bool) -> Rope {
    let half = head_dim / 4;
    let frequency = |pair: usize| {
        let index = if pair < half { 2 * pair } else { 2 * (pair - half) + 1 };
        10_000_f64.powf(-2.0 * index as f64 / head_dim as f64) as f32
    };
    Rope {
        style: if is_hf { RopeStyle::HalfSplit } else { RopeStyle::Interleaved },
        frequencies: (0..2 * half).map(frequency).collect(),
        axes: (0..2 * half).map(|pair| if pair < half { 1 } else { 2 }).collect(),
        magnitude: 1.0,
    }
}
