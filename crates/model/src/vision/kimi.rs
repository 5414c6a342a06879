//! Kimi-VL and Kimi K2.5: rotations by column and row in turns, rows of squares of four patches.

use paguro_backend::{Activation, NormKind, Patches, Rope, RopeStyle, RowOp};
use paguro_vision::{Family, Filter, Processor, SizeRule};
use serde_json::{Map, Value};

use super::{
    Lowered, Places, Resize, TowerFamily,
    files::{TowerFile, Values},
    lower::{BlockNames, Blocks, Extras, GGUF, single},
    qwen3vl::{MERGE, check_squares, projection},
};
use crate::{
    error::ModelError,
    gguf::{Metadata, Value as Meta},
};

pub(super) const VL: TowerFamily = TowerFamily {
    projectors: &["kimivl"],
    classes: &["KimiVLForConditionalGeneration"],
    prefixes: &[("vision_tower.", "v."), ("multi_modal_projector.", "mm.")],
    family: Family::Kimi,
    projector: "kimivl",
    marker: "<|media_pad|>",
    image_token: "<|media_pad|>",
    image_token_keys: &["media_placeholder_token_id", "image_token_id"],
    lower,
    names: (&NAMES, RENAMES),
    keys,
    splits_qkv: true,
    interleaves: false,
    eps: EPS,
    adapt: |_| Ok(()),
};

pub(super) const K25: TowerFamily = TowerFamily {
    projectors: &["kimik25"],
    classes: &["KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"],
    prefixes: &[("vision_tower.", "v."), ("mm_projector.", "mm.")],
    family: Family::KimiK25,
    projector: "kimik25",
    splits_qkv: false,
    ..VL
};

const NAMES: BlockNames = BlockNames {
    before: "v.encoder.blocks.",
    norm1: "norm0",
    norm2: "norm1",
    qkv: "wqkv",
    out: "wo",
    up: "mlp.fc0",
    down: "mlp.fc1",
    ..GGUF
};

const RENAMES: super::export::Renames = &[
    ("v.patch_embed.proj", "v.patch_embd"),
    ("v.patch_embed.pos_emb", "v.position_embd"),
    ("v.encoder.final_layernorm", "v.post_ln"),
    ("mm.pre_norm", "mm.input_norm"),
    ("mm.linear_1", "mm.1"),
    ("mm.linear_2", "mm.2"),
    ("mm.proj.0", "mm.1"),
    ("mm.proj.2", "mm.2"),
];

/// PyTorch's default for LayerNorm.
const EPS: f32 = 1e-5;

/// Names of a configuration's numbers: those of Kimi K2.5's own files have a prefix.
const SIZES: [(&str, [&str; 2], usize); 5] = [
    ("embedding_length", ["hidden_size", "vt_hidden_size"], 1152),
    ("attention.head_count", ["num_attention_heads", "vt_num_attention_heads"], 16),
    ("block_count", ["num_hidden_layers", "vt_num_hidden_layers"], 27),
    ("feed_forward_length", ["intermediate_size", "vt_intermediate_size"], 4304),
    ("patch_size", ["patch_size", "vt_patch_size"], 14),
];

fn keys(
    _: &Map<String, Value>,
    vision: &Map<String, Value>,
    processor: &Map<String, Value>,
    metadata: &mut Metadata,
) {
    for (key, names, default) in SIZES {
        let found = names.iter().find_map(|name| vision.get(*name)?.as_u64());
        let size = found.map_or(Ok(default as u32), u32::try_from).unwrap_or(0);
        metadata.set(&format!("clip.vision.{key}"), Meta::U32(size));
    }
    metadata.set("clip.vision.projector.scale_factor", Meta::U32(MERGE as u32));
    metadata.set("clip.vision.attention.layer_norm_epsilon", Meta::F32(EPS));
    if let Some(patches) = most_patches(processor) {
        let patch = metadata.u32("clip.vision.patch_size").unwrap_or(14);
        let pixels = patches.saturating_mul(patch.saturating_pow(2));
        metadata.set("clip.vision.image_max_pixels", Meta::U32(pixels));
    }
}

/// Returns the most patches of a picture, under the names of transformers and of both models' own files.
fn most_patches(processor: &Map<String, Value>) -> Option<u32> {
    let own = processor.get("media_proc_cfg").and_then(|own| own.get("in_patch_limit"));
    let found = own.or_else(|| processor.get("max_patches")).or_else(|| processor.get("in_token_limit"));
    found.and_then(Value::as_u64).and_then(|patches| u32::try_from(patches).ok())
}

fn lower(file: &mut TowerFile<'_, '_>) -> Result<Lowered, ModelError> {
    let mut sizes = [0; 5];
    for (size, (key, [name, other], default)) in sizes.iter_mut().zip(SIZES) {
        let found = file.optional([key, name])?;
        let found = if found.is_none() && file.is_hf() { file.optional([key, other])? } else { found };
        *size = match found {
            Some(found) => found,
            None => file.size([key, name], default)?,
        };
    }
    let [hidden, heads, layers, ffn, patch] = sizes;
    let head_dim = hidden.checked_div(heads).unwrap_or(0);
    let blocks = Blocks {
        layers,
        hidden,
        heads,
        head_dim,
        ffn,
        norms: NormKind::Layer,
        eps: EPS,
        activation: Activation::GeluTanh,
        gated: false,
        scale: (head_dim as f32).powf(-0.5),
        gemma4: false,
        extras: Extras::default(),
        names: &NAMES,
    };
    blocks.check(file)?;
    let merge = file.optional(["projector.scale_factor", "merge_kernel_size"])?.unwrap_or(MERGE);
    check_squares(patch, merge)?;
    let linear = file.patches(file.name(["v.patch_embd", "v.patch_embed.proj"]), hidden, patch)?;
    let patches = Patches {
        width: 3 * patch * patch,
        ops: vec![RowOp::Linear { linear, width: hidden, activation: None }, RowOp::Add],
    };
    let places = file.name(["v.position_embd.weight", "v.patch_embed.pos_emb.weight"]);
    let shape = file.tensors.shape(places).map(<[usize]>::to_vec).unwrap_or_default();
    let side = match shape[..] {
        [rows, columns, _] if rows == columns => rows,
        [count, _] if count.isqrt().pow(2) == count => count.isqrt(),
        _ => 0,
    };
    if side == 0 {
        return Err(ModelError::Config(format!(
            "embeddings of places `{places}` are {shape:?}, not a square"
        )));
    }
    let table = file.tensors.values(places, &shape)?;
    // Embeddings of frames, of which a still picture has one that adds nothing.
    file.ignore("v.patch_embed.pos_emb.time_weight");
    let has_fused = !file.is_hf() && file.tensors.has("v.blk.0.attn_qkv.weight");
    let layers = blocks.all_layers(file, Some(0))?;

    let (text, square) = (file.text_hidden, merge * merge);
    let names = match file.is_hf() {
        true if file.tensors.has("mm.proj.0.weight") => {
            ["v.encoder.final_layernorm", "mm.pre_norm", "mm.proj.0", "mm.proj.2"]
        }
        true => ["v.encoder.final_layernorm", "mm.pre_norm", "mm.linear_1", "mm.linear_2"],
        false => ["v.post_ln", "mm.input_norm", "mm.1", "mm.2"],
    };
    let post = file.norm(names[0], hidden, NormKind::Layer, EPS)?;
    let norm = file.norm(names[1], hidden, NormKind::Layer, EPS)?;
    let mut ops = vec![RowOp::Norm(post), RowOp::Norm(norm), RowOp::Join(square)];
    ops.extend(projection(file, names[2], names[3], hidden * square)?);
    let merged = single(square, text, blocks.layers, ops);
    let program = blocks.program(&[false], layers, vec![rope(head_dim, has_fused)], patches, merged);
    let (mean, std) = file.normalization(([0.5; 3], [0.5; 3]))?;
    let (max_patches, max_side) = match file.values {
        Values::Gguf(_) => (file.key("image_max_pixels").map(|pixels| pixels / (patch * patch) as u32), None),
        Values::Hf { processor, .. } => {
            let side = file.processor_size("size", "max_height").and_then(|side| u32::try_from(side).ok());
            (most_patches(processor), side)
        }
    };
    let processor = Processor {
        rule: SizeRule::Padded {
            max_patches: max_patches.unwrap_or(4096),
            max_side: max_side.unwrap_or(512),
        },
        filter: file.filter(Filter::Bicubic)?,
        mean,
        std,
        patch: patch as u32,
        merge: merge as u32,
    };
    let places = Places::Grid { table, side, resize: Resize::Cubic };
    Ok(Lowered::new(program, places, processor))
}

/// Neighbours are pairs, which are rotated by column and row in turns. GGUF files of Kimi K2.5 have pairs of columns first.
fn rope(head_dim: usize, is_split: bool) -> Rope {
    let quarter = head_dim / 4;
    let place = |pair: usize| match is_split {
        true => (pair % quarter.max(1), pair < quarter),
        false => (pair / 2, pair.is_multiple_of(2)),
    };
    let frequency = |pair: usize| 10_000_f64.powf(-((place(pair).0) as f64) / quarter as f64) as f32;
    Rope {
        style: RopeStyle::Interleaved,
        frequencies: (0..2 * quarter).map(frequency).collect(),
        axes: (0..2 * quarter).map(|pair| if place(pair).1 { 2 } else { 1 }).collect(),
        magnitude: 1.0,
    }
}
