//! Gemma 3: SigLIP, whose rows are means of squares of patches. Rows of a picture see each other in all layers of the text model.

use paguro_backend::{Activation, NormKind, Patches, RowOp};
use paguro_vision::{Family, Filter, Processor, SizeRule};
use serde_json::Value;

use super::{
    Lowered, Places, Resize, TowerFamily,
    files::TowerFile,
    lower::{Blocks, Extras, SIGLIP, single},
    qwen3vl::check_squares,
};
use crate::{error::ModelError, gguf::Value as Meta};

pub(super) const DEF: TowerFamily = TowerFamily {
    projectors: &["gemma3"],
    classes: &["Gemma3ForConditionalGeneration"],
    prefixes: &[
        ("model.vision_tower.vision_model.", "v."),
        ("vision_tower.vision_model.", "v."),
        ("model.vision_tower.", "v."),
        ("vision_tower.", "v."),
        ("model.multi_modal_projector.", "mm."),
        ("multi_modal_projector.", "mm."),
    ],
    family: Family::Gemma3,
    projector: "gemma3",
    marker: "<start_of_image>",
    image_token: "<image_soft_token>",
    image_token_keys: &["image_token_index", "image_token_id"],
    lower,
    names: (
        &SIGLIP,
        &[
            ("v.embeddings.patch_embedding", "v.patch_embd"),
            ("v.embeddings.position_embedding", "v.position_embd"),
            ("v.post_layernorm", "v.post_ln"),
            ("mm.mm_input_projection_weight", "mm.input_projection.weight"),
            ("mm.mm_soft_emb_norm", "mm.soft_emb_norm"),
        ],
    ),
    keys: |config, vision, _, metadata| {
        let number = |key: &str, default: u64| vision.get(key).and_then(Value::as_u64).unwrap_or(default);
        let tokens = config.get("mm_tokens_per_image").and_then(Value::as_u64).unwrap_or(256);
        let side = number("image_size", 224) / number("patch_size", 16).max(1);
        let merge = side.checked_div(tokens.isqrt()).unwrap_or(0);
        metadata.set("clip.vision.projector.scale_factor", Meta::U32(u32::try_from(merge).unwrap_or(0)));
    },
    splits_qkv: false,
    interleaves: false,
    eps: 1e-6,
    adapt: |text| {
        text.spans(false);
        Ok(())
    },
};

/// Numbers of SigLIP's layers, with these defaults of transformers.
pub(super) fn siglip(file: &TowerFile<'_, '_>, hidden: usize, heads: usize) -> Result<Blocks, ModelError> {
    let hidden = file.size(["embedding_length", "hidden_size"], hidden)?;
    let heads = file.size(["attention.head_count", "num_attention_heads"], heads)?;
    let head_dim = hidden.checked_div(heads).unwrap_or(0);
    let eps = match file.values {
        super::files::Values::Gguf(metadata) => {
            metadata.optional_f32("clip.vision.attention.layer_norm_epsilon")?
        }
        super::files::Values::Hf { .. } => {
            file.vision("layer_norm_eps").and_then(Value::as_f64).map(|eps| eps as f32)
        }
    };
    let blocks = Blocks {
        layers: file.size(["block_count", "num_hidden_layers"], 12)?,
        hidden,
        heads,
        head_dim,
        ffn: file.size(["feed_forward_length", "intermediate_size"], 3072)?,
        norms: NormKind::Layer,
        eps: eps.unwrap_or(1e-6),
        activation: Activation::GeluTanh,
        gated: false,
        scale: (head_dim as f32).powf(-0.5),
        gemma4: false,
        extras: Extras::default(),
        names: &SIGLIP,
    };
    blocks.check(file)?;
    if let Some(activation) = file.vision("hidden_act").and_then(Value::as_str)
        && activation != "gelu_pytorch_tanh"
    {
        return Err(ModelError::unsupported_but(format!("activation `{activation}`"), "gelu_pytorch_tanh"));
    }
    Ok(blocks)
}

/// Returns the patches of SigLIP, to whose rows embeddings of places are added.
pub(super) fn siglip_patches(
    file: &mut TowerFile<'_, '_>,
    hidden: usize,
    patch: usize,
) -> Result<Patches, ModelError> {
    let linear = file.patches(file.name(["v.patch_embd", "v.embeddings.patch_embedding"]), hidden, patch)?;
    let ops = vec![RowOp::Linear { linear, width: hidden, activation: None }, RowOp::Add];
    Ok(Patches { width: 3 * patch * patch, ops })
}

/// Returns the embeddings of a square of places, and its side, which is that of the file if it is not given.
pub(super) fn siglip_places(
    file: &mut TowerFile<'_, '_>,
    hidden: usize,
    side: Option<usize>,
) -> Result<(Vec<f32>, usize), ModelError> {
    let places = file.name(["v.position_embd.weight", "v.embeddings.position_embedding.weight"]);
    let count = side.map_or_else(|| file.tensors.rows(places).unwrap_or(0), |side| side * side);
    let side = count.isqrt();
    if side * side != count || count == 0 {
        return Err(ModelError::Config(format!("{count} embeddings of places are not a square")));
    }
    Ok((file.tensors.values(places, &[count, hidden])?, side))
}

fn lower(file: &mut TowerFile<'_, '_>) -> Result<Lowered, ModelError> {
    let blocks = siglip(file, 768, 12)?;
    let hidden = blocks.hidden;
    let patch = file.size(["patch_size", "patch_size"], 16)?;
    let image = file.size(["image_size", "image_size"], 224)?;
    let side = image.checked_div(patch).unwrap_or(0);
    let merge = match file.values {
        super::files::Values::Gguf(_) => file.key("projector.scale_factor").map_or(4, |merge| merge as usize),
        super::files::Values::Hf { config, .. } => {
            let tokens = config.get("mm_tokens_per_image").and_then(Value::as_u64).unwrap_or(256);
            side.checked_div((tokens as usize).isqrt()).unwrap_or(0)
        }
    };
    check_squares(patch, merge)?;
    if side == 0 || side > 1024 || !side.is_multiple_of(merge) || !image.is_multiple_of(patch) {
        return Err(ModelError::Config(format!(
            "pictures of {image} pixels, patches of {patch} in squares of {merge}"
        )));
    }
    let patches = siglip_patches(file, hidden, patch)?;
    let (table, _) = siglip_places(file, hidden, Some(side))?;
    let layers = blocks.all_layers(file, None)?;
    // The head of SigLIP's own training.
    file.ignore("v.head.");

    let text = file.text_hidden;
    let mut soft =
        file.norm(file.name(["mm.soft_emb_norm", "mm.mm_soft_emb_norm"]), hidden, NormKind::Rms, blocks.eps)?;
    if file.is_hf() {
        soft.weight = file.plus_one(soft.weight);
    }
    // Stored `[in, out]` in both kinds of files.
    let name = file.name(["mm.input_projection.weight", "mm.mm_input_projection_weight"]);
    let stored = file.dense(name, hidden, text)?;
    let values: Vec<f32> = (0..text)
        .flat_map(|out| (0..hidden).map(move |at| (at, out)))
        .map(|(at, out)| stored[at * text + out])
        .collect();
    let projection = file.matrix_of(name, text, hidden, &values, None);
    let ops = vec![
        RowOp::Norm(file.norm(
            file.name(["v.post_ln", "v.post_layernorm"]),
            hidden,
            NormKind::Layer,
            blocks.eps,
        )?),
        RowOp::Mean { rows: merge * merge, scale: 1.0 },
        RowOp::Norm(soft),
        RowOp::Linear { linear: projection, width: text, activation: None },
    ];
    let merged = single(merge * merge, text, blocks.layers, ops);
    let program = blocks.program(&[false], layers, Vec::new(), patches, merged);
    let (mean, std) = file.normalization(([0.5; 3], [0.5; 3]))?;
    let processor = Processor {
        rule: SizeRule::Square { side: image as u32 },
        filter: file.filter(Filter::Bilinear)?,
        mean,
        std,
        patch: patch as u32,
        merge: merge as u32,
    };
    Ok(Lowered::new(program, Places::Grid { table, side, resize: Resize::Fraction }, processor))
}
