//! Qwen2.5-VL: most layers see windows of patches only.

use paguro_backend::{Activation, NormKind, Patches, RowOp};
use paguro_vision::{Family, SmallSides};
use serde_json::Value;

use super::{
    Lowered, Places, TowerFamily,
    adapt::Sections,
    files::{TowerFile, Values},
    lower::{BlockNames, Blocks, Extras, rope_of_halves, single},
    qwen3vl::{self, MERGE, check_squares, processor, projection, squares},
};
use crate::{error::ModelError, gguf::Value as Meta};

pub(super) const QWEN2_5_VL: TowerFamily = TowerFamily {
    projectors: &["qwen2.5vl_merger"],
    classes: &["Qwen2_5_VLForConditionalGeneration"],
    prefixes: &[("model.visual.", "v."), ("visual.", "v.")],
    family: Family::Qwen,
    projector: "qwen2.5vl_merger",
    marker: "<|image_pad|>",
    image_token: "<|image_pad|>",
    image_token_keys: &["image_token_id"],
    lower,
    names: (
        &NAMES,
        &[
            ("v.patch_embed.proj", "v.patch_embd"),
            ("v.merger.ln_q", "v.post_ln"),
            ("v.merger.mlp.0", "mm.0"),
            ("v.merger.mlp.2", "mm.2"),
        ],
    ),
    keys: |_, vision, processor, metadata| {
        let whole = vision.get("fullatt_block_indexes").and_then(|list| list.get(0)?.as_u64()).unwrap_or(7);
        metadata.set("clip.vision.n_wa_pattern", Meta::U32(u32::try_from(whole + 1).unwrap_or(0)));
        let window = vision.get("window_size").and_then(Value::as_u64).unwrap_or(112);
        metadata.set("clip.vision.window_size", Meta::U32(u32::try_from(window).unwrap_or(0)));
        metadata.set("clip.vision.image_size", Meta::U32(560));
        squares(vision, processor, metadata);
    },
    splits_qkv: true,
    interleaves: false,
    eps: EPS,
    adapt: |text| text.sections(Sections::Blocks, [16, 24, 24]),
};

const NAMES: BlockNames =
    BlockNames { gate: "mlp.gate_proj", up: "mlp.up_proj", down: "mlp.down_proj", ..qwen3vl::NAMES };

/// CLIP's normalization.
pub(super) const CLIP: ([f32; 3], [f32; 3]) =
    ([0.481_454_66, 0.457_827_5, 0.408_210_73], [0.268_629_55, 0.261_302_6, 0.275_777_1]);

const EPS: f32 = 1e-6;

fn lower(file: &mut TowerFile<'_, '_>) -> Result<Lowered, ModelError> {
    let hidden = file.size(["embedding_length", "hidden_size"], 3584)?;
    let heads = file.size(["attention.head_count", "num_heads"], 16)?;
    let head_dim = hidden.checked_div(heads).unwrap_or(0);
    let blocks = Blocks {
        layers: file.size(["block_count", "depth"], 32)?,
        hidden,
        heads,
        head_dim,
        ffn: file.size(["feed_forward_length", "intermediate_size"], 3420)?,
        norms: NormKind::Rms,
        eps: EPS,
        activation: Activation::Silu,
        gated: true,
        scale: (head_dim as f32).powf(-0.5),
        gemma4: false,
        extras: Extras::default(),
        names: &NAMES,
    };
    blocks.check(file)?;
    let patch = file.size(["patch_size", "patch_size"], 14)?;
    let merge = file.optional(["spatial_merge_size", "spatial_merge_size"])?.unwrap_or(MERGE);
    check_squares(patch, merge)?;
    let window = file.optional(["window_size", "window_size"])?.unwrap_or(112);
    let side = window / (merge * patch);
    if side == 0 {
        return Err(ModelError::Config(format!("windows of {window} pixels, squares of {}", merge * patch)));
    }
    let embedding = file.name(["v.patch_embd", "v.patch_embed.proj"]);
    let linear = file.patches(embedding, hidden, patch)?;
    let patches = Patches {
        width: 3 * patch * patch,
        ops: vec![RowOp::Linear { linear, width: hidden, activation: None }],
    };
    let sees_all = whole_layers(file, blocks.layers)?;
    let layer = |layer: usize| blocks.layer(file, layer, usize::from(sees_all[layer]), Some(0));
    let layers = (0..blocks.layers).map(layer).collect::<Result<Vec<_>, _>>()?;

    let (text, joined) = (file.text_hidden, hidden * merge * merge);
    let [norm, up, down] = match file.is_hf() {
        true => ["v.merger.ln_q", "v.merger.mlp.0", "v.merger.mlp.2"],
        false => ["v.post_ln", "mm.0", "mm.2"],
    };
    let mut ops = vec![RowOp::Norm(file.norm(norm, hidden, NormKind::Rms, EPS)?), RowOp::Join(merge * merge)];
    ops.extend(projection(file, up, down, joined)?);
    let merged = single(merge * merge, text, blocks.layers, ops);
    let ropes = vec![rope_of_halves(blocks.head_dim, 10_000.0)];
    let program = blocks.program(&[true, false], layers, ropes, patches, merged);
    let processor = processor(file, patch, merge, [3136, 12_845_056], CLIP, SmallSides::Rounded)?;
    let mut lowered = Lowered::new(program, Places::None, processor);
    lowered.arrangement.window = Some(side);
    Ok(lowered)
}

/// Returns for each layer whether its rows see all others.
fn whole_layers(file: &TowerFile<'_, '_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    if let Values::Gguf(metadata) = file.values {
        // The layers without windows, as llama.cpp reads this key.
        if let Some(whole) = metadata.u32s("clip.vision.wa_layer_indexes") {
            return Ok((0..layers).map(|layer| whole.contains(&(layer as u32))).collect());
        }
        let period = file.size(["n_wa_pattern", ""], 8)?;
        return match period {
            0 => Err(ModelError::Config("windows in every layer of zero".to_owned())),
            _ => Ok((1..=layers).map(|layer| layer.is_multiple_of(period)).collect()),
        };
    }
    let list = file.vision("fullatt_block_indexes").and_then(Value::as_array);
    let list = list.map(|list| list.iter().filter_map(Value::as_u64).collect::<Vec<_>>());
    let list = list.unwrap_or_else(|| vec![7, 15, 23, 31]);
    Ok((0..layers).map(|layer| list.contains(&(layer as u64))).collect())
}
