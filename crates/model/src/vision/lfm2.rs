//! LFM2-VL: SigLIP 2 over pictures of any ratio or over tiles, whose rows are squares of patches.

use paguro_backend::{Activation, NormKind, Patches, RowOp};
use paguro_vision::{Family, Filter, Processor, SizeRule};
use serde_json::Value;

use super::{
    Lowered, Places, Resize, TowerFamily,
    files::{TowerFile, Values},
    gemma3::{siglip, siglip_places},
    gemma4::by_channel,
    lower::{SIGLIP, single},
    qwen3vl::check_squares,
};
use crate::{error::ModelError, gguf::Value as Meta};

pub(super) const DEF: TowerFamily = TowerFamily {
    projectors: &["lfm2"],
    classes: &["Lfm2VlForConditionalGeneration"],
    prefixes: &[
        ("model.vision_tower.vision_model.", "v."),
        ("model.vision_tower.", "v."),
        ("model.multi_modal_projector.", "mm."),
    ],
    family: Family::Lfm2,
    projector: "lfm2",
    marker: "<image>",
    image_token: "<image>",
    image_token_keys: &["image_token_id", "image_token_index"],
    lower,
    names: (
        &SIGLIP,
        &[
            ("v.embeddings.patch_embedding", "v.patch_embd"),
            ("v.embeddings.position_embedding", "v.position_embd"),
            ("v.post_layernorm", "v.post_ln"),
            ("mm.layer_norm", "mm.input_norm"),
            ("mm.linear_1", "mm.1"),
            ("mm.linear_2", "mm.2"),
        ],
    ),
    keys: |config, _, _, metadata| {
        let merge = config.get("downsample_factor").and_then(Value::as_u64).unwrap_or(2);
        metadata.set("clip.vision.projector.scale_factor", Meta::U32(u32::try_from(merge).unwrap_or(0)));
        // As llama.cpp's converter has it: pictures have any size.
        metadata.set("clip.vision.image_size", Meta::U32(256));
    },
    splits_qkv: false,
    interleaves: false,
    eps: 1e-6,
    adapt: |_| Ok(()),
};

/// PyTorch's default for LayerNorm, which the projector has.
const PROJECTOR_EPS: f32 = 1e-5;

fn lower(file: &mut TowerFile<'_, '_>) -> Result<Lowered, ModelError> {
    let blocks = siglip(file, 768, 12)?;
    let hidden = blocks.hidden;
    let patch = file.size(["patch_size", "patch_size"], 16)?;
    let merge = match file.values {
        Values::Gguf(_) => file.key("projector.scale_factor").map_or(2, |merge| merge as usize),
        Values::Hf { config, .. } => {
            let activation = config.get("projector_hidden_act").and_then(Value::as_str);
            if let Some(other) = activation.filter(|activation| *activation != "gelu") {
                return Err(ModelError::unsupported_but(format!("activation `{other}`"), "gelu"));
            }
            config.get("downsample_factor").and_then(Value::as_u64).unwrap_or(2) as usize
        }
    };
    check_squares(patch, merge)?;
    let name = file.name(["v.patch_embd", "v.embeddings.patch_embedding"]);
    let linear = match file.is_hf() {
        // Its columns are ordered by pixel, then by channel.
        true => {
            let (weight, width) = (format!("{name}.weight"), 3 * patch * patch);
            let stored = file.dense(&weight, hidden, width)?;
            let bias = file.vector(&format!("{name}.bias"), hidden)?;
            file.matrix_of(&weight, hidden, width, &by_channel(&stored, patch), bias)
        }
        false => file.patches(name, hidden, patch)?,
    };
    let patches = Patches {
        width: 3 * patch * patch,
        ops: vec![RowOp::Linear { linear, width: hidden, activation: None }, RowOp::Add],
    };
    let (table, side) = siglip_places(file, hidden, None)?;
    let layers = blocks.all_layers(file, None)?;
    // The head of SigLIP's own training.
    file.ignore("v.head.");

    let (text, square) = (file.text_hidden, merge * merge);
    let joined = hidden * square;
    let norm =
        file.norm(file.name(["v.post_ln", "v.post_layernorm"]), hidden, NormKind::Layer, blocks.eps)?;
    let mut ops = vec![RowOp::Norm(norm), RowOp::Join(square)];
    let norm = file.name(["mm.input_norm", "mm.layer_norm"]);
    if file.tensors.has(&format!("{norm}.weight")) {
        ops.push(RowOp::Norm(file.norm(norm, joined, NormKind::Layer, PROJECTOR_EPS)?));
    }
    let [up, down] = [file.name(["mm.1", "mm.linear_1"]), file.name(["mm.2", "mm.linear_2"])];
    let width = file.tensors.rows(&format!("{up}.weight")).unwrap_or(0);
    let linear = file.linear(up, width, joined)?;
    ops.push(RowOp::Linear { linear, width, activation: Some(Activation::Gelu) });
    ops.push(RowOp::Linear { linear: file.linear(down, text, width)?, width: text, activation: None });
    let merged = single(square, text, blocks.layers, ops);
    let program = blocks.program(&[false], layers, Vec::new(), patches, merged);
    let (mean, std) = file.normalization(([0.5; 3], [0.5; 3]))?;
    let processor = Processor {
        rule: rule(file)?,
        filter: file.filter(Filter::Bilinear)?,
        mean,
        std,
        patch: patch as u32,
        merge: merge as u32,
    };
    let places = Places::Grid { table, side, resize: Resize::Antialiased };
    Ok(Lowered::new(program, places, processor))
}

/// Returns the limits of the published models, or those of the file.
fn rule(file: &TowerFile<'_, '_>) -> Result<SizeRule, ModelError> {
    let number = |key: &str, default: u32| {
        file.processor_size(key, "").and_then(|number| u32::try_from(number).ok()).unwrap_or(default)
    };
    let flag = |key: &str| file.processor(key).and_then(Value::as_bool).unwrap_or(true);
    let (mut min_tiles, mut max_tiles) = (number("min_tiles", 2), number("max_tiles", 10));
    if !flag("do_image_splitting") {
        (min_tiles, max_tiles) = (1, 1);
    }
    if max_tiles > 1 && !flag("use_thumbnail") {
        return Err(ModelError::unsupported("tiles without the whole picture"));
    }
    Ok(SizeRule::Flexible {
        min_tokens: number("min_image_tokens", 64),
        max_tokens: number("max_image_tokens", 256),
        tolerance: file.processor("max_pixels_tolerance").and_then(Value::as_f64).unwrap_or(2.0),
        tile: number("tile_size", 512),
        min_tiles,
        max_tiles,
    })
}
