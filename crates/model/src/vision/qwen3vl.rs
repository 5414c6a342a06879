//! Qwen3-VL, and Qwen 3.5 and 3.6: positions by row and column, rows of squares of four patches, and of some layers in between
//! (deepstack).

use paguro_backend::{Activation, Merged, NormKind, Patches, RowOp, Tap};
use paguro_vision::{Family, Filter, Processor, SizeRule, SmallSides};
use serde_json::{Map, Value};

use super::{
    Lowered, Places, Resize, TowerFamily,
    adapt::Sections,
    files::TowerFile,
    lower::{BlockNames, Blocks, Extras, GGUF, rope_of_halves},
};
use crate::{
    error::ModelError,
    gguf::{Array, Metadata, Value as Meta},
};

pub(super) const QWEN3_VL: TowerFamily = TowerFamily {
    projectors: &["qwen3vl_merger"],
    classes: &[
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    ],
    prefixes: &[("model.visual.", "v."), ("visual.", "v.")],
    family: Family::Qwen,
    projector: "qwen3vl_merger",
    marker: "<|image_pad|>",
    image_token: "<|image_pad|>",
    image_token_keys: &["image_token_id"],
    lower,
    names: (
        &NAMES,
        &[
            ("v.patch_embed.proj", "v.patch_embd"),
            ("v.pos_embed", "v.position_embd"),
            ("v.merger.norm", "v.post_ln"),
            ("v.merger.linear_fc1", "mm.0"),
            ("v.merger.linear_fc2", "mm.2"),
        ],
    ),
    keys: |_, vision, processor, metadata| {
        let number = |key: &str| vision.get(key).and_then(Value::as_u64);
        let layers = number("depth").unwrap_or(27);
        let listed: Vec<u64> = match vision.get("deepstack_visual_indexes").and_then(Value::as_array) {
            Some(list) => list.iter().filter_map(Value::as_u64).collect(),
            None => Vec::new(),
        };
        let flags = (0..layers).map(|layer| listed.contains(&layer)).collect();
        metadata.set("clip.vision.is_deepstack_layers", Meta::Array(Array::Bool(flags)));
        let side = number("num_position_embeddings").unwrap_or(2304).isqrt();
        let image = side * number("patch_size").unwrap_or(16);
        metadata.set("clip.vision.image_size", Meta::U32(u32::try_from(image).unwrap_or(0)));
        squares(vision, processor, metadata);
    },
    splits_qkv: false,
    interleaves: false,
    eps: EPS,
    adapt: |text| {
        let pairs = text.program.ropes.first().map_or(0, |rope| rope.frequencies.len());
        let default = if pairs == 32 { [11, 11, 10] } else { [24, 20, 20] };
        text.sections(Sections::Interleaved, default)
    },
};

pub(super) const NAMES: BlockNames = BlockNames {
    before: "v.blocks.",
    norm1: "norm1",
    norm2: "norm2",
    qkv: "attn.qkv",
    out: "attn.proj",
    up: "mlp.linear_fc1",
    down: "mlp.linear_fc2",
    ..GGUF
};

/// Patches per side of a square.
pub(super) const MERGE: usize = 2;

/// transformers' LayerNorms have this, whatever the files say.
const EPS: f32 = 1e-6;

fn lower(file: &mut TowerFile<'_, '_>) -> Result<Lowered, ModelError> {
    let hidden = file.size(["embedding_length", "hidden_size"], 1152)?;
    let heads = file.size(["attention.head_count", "num_heads"], 16)?;
    let blocks = Blocks {
        layers: file.size(["block_count", "depth"], 27)?,
        hidden,
        heads,
        head_dim: hidden.checked_div(heads).unwrap_or(0),
        ffn: file.size(["feed_forward_length", "intermediate_size"], 4304)?,
        norms: NormKind::Layer,
        eps: EPS,
        activation: Activation::GeluTanh,
        gated: false,
        scale: 1.0,
        gemma4: false,
        extras: Extras::default(),
        names: &NAMES,
    };
    blocks.check(file)?;
    let blocks = Blocks { scale: (blocks.head_dim as f32).powf(-0.5), ..blocks };
    let patch = file.size(["patch_size", "patch_size"], 16)?;
    let merge = file.optional(["spatial_merge_size", "spatial_merge_size"])?.unwrap_or(MERGE);
    check_squares(patch, merge)?;
    let embedding = file.name(["v.patch_embd", "v.patch_embed.proj"]);
    let linear = file.patches(embedding, hidden, patch)?;
    let patches = Patches {
        width: 3 * patch * patch,
        ops: vec![RowOp::Linear { linear, width: hidden, activation: None }, RowOp::Add],
    };
    let places = format!("{}.weight", file.name(["v.position_embd", "v.pos_embed"]));
    let count = file.tensors.rows(&places).unwrap_or(0);
    let side = count.isqrt();
    if side * side != count || count == 0 {
        return Err(ModelError::Config(format!("{count} embeddings of places are not a square")));
    }
    let table = file.tensors.values(&places, &[count, hidden])?;
    let layers = blocks.all_layers(file, Some(0))?;

    let text = file.text_hidden;
    let joined = hidden * merge * merge;
    let [norm, up, down] = match file.is_hf() {
        true => ["v.merger.norm", "v.merger.linear_fc1", "v.merger.linear_fc2"],
        false => ["v.post_ln", "mm.0", "mm.2"],
    };
    let mut main =
        vec![RowOp::Norm(file.norm(norm, hidden, NormKind::Layer, EPS)?), RowOp::Join(merge * merge)];
    main.extend(projection(file, up, down, joined)?);
    let mut taps = vec![Tap { layers: blocks.layers, ops: main }];
    for (index, layer) in deepstack(file, blocks.layers)?.into_iter().enumerate() {
        let name = |part: [&str; 2]| match file.is_hf() {
            true => format!("v.deepstack_merger_list.{index}.{}", part[1]),
            false => format!("v.deepstack.{layer}.{}", part[0]),
        };
        let names = [["norm", "norm"], ["fc1", "linear_fc1"], ["fc2", "linear_fc2"]].map(name);
        let norm = file.norm(&names[0], joined, NormKind::Layer, EPS)?;
        let mut ops = vec![RowOp::Join(merge * merge), RowOp::Norm(norm)];
        ops.extend(projection(file, &names[1], &names[2], joined)?);
        taps.push(Tap { layers: layer + 1, ops });
    }
    let merged = Merged { rows: merge * merge, width: text, taps };
    let ropes = vec![rope_of_halves(blocks.head_dim, 10_000.0)];
    let program = blocks.program(&[false], layers, ropes, patches, merged);
    // mmproj files lack the limits of the published models, whose least picture is a ninth of the one that their embeddings of places are
    // for.
    let least = ((side * patch).pow(2) as u64 / 9).min(65_536);
    let processor =
        processor(file, patch, merge, [least, 16_777_216], ([0.5; 3], [0.5; 3]), SmallSides::Rounded)?;
    let places = Places::Grid { table, side, resize: Resize::Corners };
    Ok(Lowered::new(program, places, processor))
}

/// Writes the squares and limits of pixels of Qwen's models.
pub(super) fn squares(vision: &Map<String, Value>, processor: &Map<String, Value>, metadata: &mut Metadata) {
    let merge = vision.get("spatial_merge_size").and_then(Value::as_u64).unwrap_or(MERGE as u64);
    metadata.set("clip.vision.spatial_merge_size", Meta::U32(u32::try_from(merge).unwrap_or(0)));
    for (key, edge, own) in [
        ("min_pixels", "shortest_edge", "image_min_pixels"),
        ("max_pixels", "longest_edge", "image_max_pixels"),
    ] {
        let found = processor.get("size").and_then(|size| size.get(edge)).or_else(|| processor.get(key));
        if let Some(pixels) = found.and_then(Value::as_u64).and_then(|pixels| u32::try_from(pixels).ok()) {
            metadata.set(&format!("clip.vision.{own}"), Meta::U32(pixels));
        }
    }
}

/// Checks the sizes of patches and squares.
pub(super) fn check_squares(patch: usize, merge: usize) -> Result<(), ModelError> {
    match (1..=256).contains(&patch) && (1..=16).contains(&merge) {
        true => Ok(()),
        false => Err(ModelError::Config(format!("patches of {patch} pixels in squares of {merge} patches"))),
    }
}

/// Returns the layers whose rows are parts of the result.
fn deepstack(file: &TowerFile<'_, '_>, layers: usize) -> Result<Vec<usize>, ModelError> {
    let listed: Vec<usize> = match file.values {
        super::files::Values::Gguf(metadata) => {
            let flags = metadata.u32s("clip.vision.is_deepstack_layers").unwrap_or_default();
            flags.iter().enumerate().filter(|(_, flag)| **flag != 0).map(|(layer, _)| layer).collect()
        }
        super::files::Values::Hf { .. } => {
            let list = file.vision("deepstack_visual_indexes").and_then(Value::as_array);
            // Qwen 3.5 has no such list, nor such tensors.
            let default: &[u64] =
                if file.tensors.has("v.deepstack_merger_list.0.norm.weight") { &[8, 16, 24] } else { &[] };
            let list = list.map(|list| list.iter().filter_map(Value::as_u64).collect::<Vec<_>>());
            list.unwrap_or_else(|| default.to_vec()).into_iter().map(|layer| layer as usize).collect()
        }
    };
    match listed.iter().all(|layer| *layer < layers) && listed.is_sorted() {
        true => Ok(listed),
        false => Err(ModelError::Config(format!("rows of the layers {listed:?} of {layers}"))),
    }
}

/// Returns the matmuls that project merged rows, as wide as `joined`, to rows of the text model.
pub(super) fn projection(
    file: &mut TowerFile<'_, '_>,
    up: &str,
    down: &str,
    joined: usize,
) -> Result<[RowOp; 2], ModelError> {
    let (width, activation) = (file.text_hidden, Some(Activation::Gelu));
    let up = RowOp::Linear { linear: file.linear(up, joined, joined)?, width: joined, activation };
    Ok([up, RowOp::Linear { linear: file.linear(down, width, joined)?, width, activation: None }])
}

/// Returns the processor of Qwen's models, whose files have these limits of pixels unless they say otherwise.
pub(super) fn processor(
    file: &TowerFile<'_, '_>,
    patch: usize,
    merge: usize,
    limits: [u64; 2],
    normalization: ([f32; 3], [f32; 3]),
    small: SmallSides,
) -> Result<Processor, ModelError> {
    let (mean, std) = file.normalization(normalization)?;
    let limit = |key: &str, edge: &str, own: &str, default: u64| {
        let found = file.processor_size("size", edge).or_else(|| file.processor_size(key, ""));
        found.or_else(|| file.key(own).map(u64::from)).unwrap_or(default)
    };
    let min_pixels = limit("min_pixels", "shortest_edge", "image_min_pixels", limits[0]);
    let max_pixels = limit("max_pixels", "longest_edge", "image_max_pixels", limits[1]);
    Ok(Processor {
        rule: SizeRule::Smart { min_pixels, max_pixels, small },
        filter: file.filter(Filter::Bicubic)?,
        mean,
        std,
        patch: patch as u32,
        merge: merge as u32,
    })
}
