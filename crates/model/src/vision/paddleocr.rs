//! PaddleOCR-VL: SigLIP with positions by row and column, over pictures of any ratio; rows of squares of four patches.

use paguro_backend::{NormKind, RowOp};
use paguro_vision::{Family, SmallSides};

use super::{
    Lowered, Places, Resize, TowerFamily,
    adapt::Sections,
    files::TowerFile,
    gemma3::{siglip, siglip_patches, siglip_places},
    lower::{SIGLIP, rope_of_halves, single},
    qwen2vl::CLIP,
    qwen3vl::{MERGE, check_squares, processor, projection, squares},
};
use crate::error::ModelError;

pub(super) const DEF: TowerFamily = TowerFamily {
    projectors: &["paddleocr"],
    classes: &["PaddleOCRVLForConditionalGeneration"],
    prefixes: &[
        ("model.visual.vision_model.", "v."),
        ("visual.vision_model.", "v."),
        ("model.projector.", "mm."),
        ("mlp_AR.", "mm."),
    ],
    family: Family::PaddleOcr,
    projector: "paddleocr",
    marker: "<|IMAGE_PLACEHOLDER|>",
    image_token: "<|IMAGE_PLACEHOLDER|>",
    image_token_keys: &["image_token_id"],
    lower,
    names: (
        &SIGLIP,
        &[
            ("v.embeddings.patch_embedding", "v.patch_embd"),
            ("v.embeddings.position_embedding", "v.position_embd"),
            ("v.post_layernorm", "v.post_ln"),
            ("mm.pre_norm", "mm.input_norm"),
            ("mm.linear_1", "mm.1"),
            ("mm.linear_2", "mm.2"),
        ],
    ),
    keys: |_, vision, processor, metadata| squares(vision, processor, metadata),
    splits_qkv: false,
    interleaves: false,
    eps: 1e-6,
    adapt: |text| text.sections(Sections::Blocks, [16, 24, 24]),
};

fn lower(file: &mut TowerFile<'_, '_>) -> Result<Lowered, ModelError> {
    let blocks = siglip(file, 1152, 16)?;
    let hidden = blocks.hidden;
    let patch = file.size(["patch_size", "patch_size"], 14)?;
    let merge = file.optional(["spatial_merge_size", "spatial_merge_size"])?.unwrap_or(MERGE);
    check_squares(patch, merge)?;
    let patches = siglip_patches(file, hidden, patch)?;
    let (table, side) = siglip_places(file, hidden, None)?;
    let layers = blocks.all_layers(file, Some(0))?;
    // Parts of SigLIP's own training.
    file.ignore("v.head.");
    file.ignore("v.embeddings.packing_position_embedding.");

    let (text, square) = (file.text_hidden, merge * merge);
    let names = match file.is_hf() {
        true => ["mm.pre_norm", "mm.linear_1", "mm.linear_2", "v.post_layernorm"],
        false => ["mm.input_norm", "mm.1", "mm.2", "v.post_ln"],
    };
    let post = file.norm(names[3], hidden, NormKind::Layer, blocks.eps)?;
    // PyTorch's default for LayerNorm.
    let norm = file.norm(names[0], hidden, NormKind::Layer, 1e-5)?;
    let mut ops = vec![RowOp::Norm(post), RowOp::Norm(norm), RowOp::Join(square)];
    ops.extend(projection(file, names[1], names[2], hidden * square)?);
    let merged = single(square, text, blocks.layers, ops);
    let ropes = vec![rope_of_halves(blocks.head_dim, 10_000.0)];
    let program = blocks.program(&[false], layers, ropes, patches, merged);
    let processor = processor(file, patch, merge, [147_456, 2_359_296], CLIP, SmallSides::InTurn)?;
    let places = Places::Grid { table, side, resize: Resize::Centers };
    Ok(Lowered::new(program, places, processor))
}
