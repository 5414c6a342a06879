//! Idefics3, SmolVLM, Granite-Docling: SigLIP over tiles, whose rows are squares of patches.

use paguro_backend::{NormKind, RowOp};
use paguro_vision::{Family, Filter, Processor, SizeRule};
use serde_json::Value;

use super::{
    Lowered, Places, Resize, TowerFamily,
    files::{TowerFile, Values},
    gemma3::{siglip, siglip_patches, siglip_places},
    lower::{SIGLIP, single},
    qwen3vl::check_squares,
};
use crate::{error::ModelError, gguf::Value as Meta};

pub(super) const DEF: TowerFamily = TowerFamily {
    projectors: &["idefics3"],
    classes: &["Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"],
    prefixes: &[
        ("model.vision_model.", "v."),
        ("vision_model.", "v."),
        ("model.connector.", "mm."),
        ("connector.", "mm."),
    ],
    family: Family::Idefics3,
    projector: "idefics3",
    marker: "<image>",
    image_token: "<image>",
    image_token_keys: &["image_token_id"],
    lower,
    names: (
        &SIGLIP,
        &[
            ("v.embeddings.patch_embedding", "v.patch_embd"),
            ("v.embeddings.position_embedding", "v.position_embd"),
            ("v.post_layernorm", "v.post_ln"),
            ("mm.modality_projection.proj", "mm.model.fc"),
        ],
    ),
    keys: |config, _, processor, metadata| {
        let scale = config.get("scale_factor").and_then(Value::as_u64).unwrap_or(2);
        metadata.set("clip.vision.projector.scale_factor", Meta::U32(u32::try_from(scale).unwrap_or(0)));
        let edge = processor.get("size").and_then(|size| size.get("longest_edge")?.as_u64());
        if let Some(edge) = edge.and_then(|edge| u32::try_from(edge).ok()) {
            metadata.set("clip.vision.preproc_image_size", Meta::U32(edge));
        }
    },
    splits_qkv: false,
    interleaves: false,
    eps: 1e-6,
    adapt: |_| Ok(()),
};

fn lower(file: &mut TowerFile<'_, '_>) -> Result<Lowered, ModelError> {
    let blocks = siglip(file, 1152, if is_smolvlm(file) { 16 } else { 12 })?;
    let hidden = blocks.hidden;
    let patch = file.size(["patch_size", "patch_size"], 32)?;
    let image = file.size(["image_size", "image_size"], 224)?;
    let merge = match file.values {
        Values::Gguf(_) => file.key("projector.scale_factor").map_or(2, |merge| merge as usize),
        Values::Hf { config, .. } => config.get("scale_factor").and_then(Value::as_u64).unwrap_or(2) as usize,
    };
    check_squares(patch, merge)?;
    let side = image / patch;
    if side == 0 || side > 1024 {
        return Err(ModelError::Config(format!("pictures of {image} pixels in patches of {patch}")));
    }
    let patches = siglip_patches(file, hidden, patch)?;
    let (table, _) = siglip_places(file, hidden, Some(side))?;
    let layers = blocks.all_layers(file, None)?;

    let (text, joined) = (file.text_hidden, hidden * merge * merge);
    let projection = file.linear(file.name(["mm.model.fc", "mm.modality_projection.proj"]), text, joined)?;
    let ops = vec![
        RowOp::Norm(file.norm(
            file.name(["v.post_ln", "v.post_layernorm"]),
            hidden,
            NormKind::Layer,
            blocks.eps,
        )?),
        RowOp::Join(merge * merge),
        RowOp::Linear { linear: projection, width: text, activation: None },
    ];
    let merged = single(merge * merge, text, blocks.layers, ops);
    let program = blocks.program(&[false], layers, Vec::new(), patches, merged);
    let (mean, std) = file.normalization(([0.5; 3], [0.5; 3]))?;
    let edge = |key: &str| file.processor_size(key, "longest_edge").and_then(|edge| u32::try_from(edge).ok());
    let tile = edge("max_image_size").unwrap_or(image as u32);
    let longest = edge("size").or_else(|| file.key("preproc_image_size")).unwrap_or(4 * tile);
    let split = file.processor("do_image_splitting").and_then(Value::as_bool).unwrap_or(true);
    let processor = Processor {
        rule: SizeRule::Tiles { longest_edge: longest, tile, split },
        filter: file.filter(Filter::Lanczos)?,
        mean,
        std,
        patch: patch as u32,
        merge: merge as u32,
    };
    Ok(Lowered::new(program, Places::Grid { table, side, resize: Resize::Fraction }, processor))
}

fn is_smolvlm(file: &TowerFile<'_, '_>) -> bool {
    file.vision("model_type").and_then(Value::as_str) == Some("smolvlm_vision")
}
