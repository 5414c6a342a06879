//! InternVL 2.5 to 3.5: a class row beside the patches of square tiles, factors of the results of both branches, rows of squares of four
//! patches.

use paguro_backend::{Activation, NormKind, Patches, QkNormKind, RowOp};
use paguro_vision::{Family, Filter, Processor, SizeRule};
use serde_json::Value;

use super::{
    Lowered, Places, Resize, TowerFamily,
    files::{TowerFile, Values},
    lower::{BlockNames, Blocks, Extras, GGUF, single},
    qwen3vl::check_squares,
};
use crate::{error::ModelError, gguf::Value as Meta};

pub(super) const DEF: TowerFamily = TowerFamily {
    projectors: &["internvl"],
    classes: &["InternVLForConditionalGeneration"],
    prefixes: &[
        ("model.vision_tower.", "v."),
        ("vision_tower.", "v."),
        ("model.multi_modal_projector.", "mm."),
        ("multi_modal_projector.", "mm."),
    ],
    family: Family::InternVl,
    projector: "internvl",
    marker: "<IMG_CONTEXT>",
    image_token: "<IMG_CONTEXT>",
    image_token_keys: &["image_token_id"],
    lower,
    names: (
        &NAMES,
        &[
            ("v.embeddings.cls_token", "v.class_embd"),
            ("v.embeddings.patch_embeddings.projection", "v.patch_embd"),
            ("v.embeddings.position_embeddings", "v.position_embd.weight"),
            ("mm.layer_norm", "mm.model.mlp.0"),
            ("mm.linear_1", "mm.model.mlp.1"),
            ("mm.linear_2", "mm.model.mlp.3"),
        ],
    ),
    keys: |config, _, processor, metadata| {
        let ratio = config.get("downsample_ratio").and_then(Value::as_f64).unwrap_or(0.5);
        metadata.set("clip.vision.projector.scale_factor", Meta::U32((1.0 / ratio) as u32));
        for (key, own) in [("min_patches", "preproc_min_tiles"), ("max_patches", "preproc_max_tiles")] {
            let found =
                processor.get(key).and_then(Value::as_u64).and_then(|tiles| u32::try_from(tiles).ok());
            if let Some(tiles) = found {
                metadata.set(&format!("clip.vision.{own}"), Meta::U32(tiles));
            }
        }
    },
    splits_qkv: false,
    interleaves: false,
    eps: 1e-6,
    adapt: |_| Ok(()),
};

const NAMES: BlockNames = BlockNames {
    before: "v.encoder.layer.",
    norm1: "layernorm_before",
    norm2: "layernorm_after",
    q: "attention.q_proj",
    k: "attention.k_proj",
    v: "attention.v_proj",
    out: "attention.projection_layer",
    up: "mlp.fc1",
    down: "mlp.fc2",
    q_norm: "attention.q_norm",
    k_norm: "attention.k_norm",
    scale1: "lambda_1",
    scale2: "lambda_2",
    ..GGUF
};

/// Normalization of ImageNet.
const IMAGENET: ([f32; 3], [f32; 3]) = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]);

/// PyTorch's default for LayerNorm, which the projector has.
const PROJECTOR_EPS: f32 = 1e-5;

fn lower(file: &mut TowerFile<'_, '_>) -> Result<Lowered, ModelError> {
    let blocks = blocks(file)?;
    let hidden = blocks.hidden;
    let patch = file.size(["patch_size", "patch_size"], 14)?;
    let image = file.size(["image_size", "image_size"], 448)?;
    let merge = match file.values {
        Values::Gguf(_) => file.key("projector.scale_factor").map_or(2, |merge| merge as usize),
        Values::Hf { config, .. } => {
            check_features(file, config.get("vision_feature_layer"), config.get("projector_hidden_act"))?;
            let ratio = config.get("downsample_ratio").and_then(Value::as_f64).unwrap_or(0.5);
            (1.0 / ratio) as usize
        }
    };
    check_squares(patch, merge)?;
    let side = image / patch;
    if side == 0 || side > 1024 || !image.is_multiple_of(patch) || !side.is_multiple_of(merge) {
        return Err(ModelError::Config(format!(
            "pictures of {image} pixels, patches of {patch} in squares of {merge}"
        )));
    }
    let name = file.name(["v.patch_embd", "v.embeddings.patch_embeddings.projection"]);
    let mut linear = file.patches(name, hidden, patch)?;
    // The class row has no pixels and no bias, so embeddings of places contain the bias.
    let bias =
        linear.bias.take().map_or(vec![0.0; hidden], |bias| file.tensors.weights.vector(bias).to_vec());
    let patches = Patches {
        width: 3 * patch * patch,
        ops: vec![RowOp::Linear { linear, width: hidden, activation: None }, RowOp::Add],
    };
    let places = file.name(["v.position_embd.weight", "v.embeddings.position_embeddings"]);
    let mut class = file.tensors.values(places, &[side * side + 1, hidden])?;
    let mut table = class.split_off(hidden);
    for row in table.chunks_exact_mut(hidden) {
        row.iter_mut().zip(&bias).for_each(|(place, bias)| *place += bias);
    }
    let name = file.name(["v.class_embd", "v.embeddings.cls_token"]);
    let own = file.tensors.require_vector(name, hidden)?;
    class.iter_mut().zip(&own).for_each(|(place, own)| *place += own);
    let layers = blocks.all_layers(file, None)?;

    let (text, square) = (file.text_hidden, merge * merge);
    let [norm, up, down] = match file.is_hf() {
        true => ["mm.layer_norm", "mm.linear_1", "mm.linear_2"],
        false => ["mm.model.mlp.0", "mm.model.mlp.1", "mm.model.mlp.3"],
    };
    let joined = hidden * square;
    let norm = file.norm(norm, joined, NormKind::Layer, PROJECTOR_EPS)?;
    let up = file.linear(up, text, joined)?;
    let down = file.linear(down, text, text)?;
    let ops = vec![
        RowOp::Join(square),
        RowOp::Norm(norm),
        RowOp::Linear { linear: up, width: text, activation: Some(Activation::Gelu) },
        RowOp::Linear { linear: down, width: text, activation: None },
    ];
    let merged = single(square, text, blocks.layers, ops);
    let program = blocks.program(&[true], layers, Vec::new(), patches, merged);
    let (mean, std) = file.normalization(IMAGENET)?;
    let tiles = |key: &str, own: &str, default: u32| {
        let found = file.processor_size(key, "").and_then(|tiles| u32::try_from(tiles).ok());
        found.or_else(|| file.key(own)).unwrap_or(default)
    };
    let rule = SizeRule::Grid {
        tile: image as u32,
        min_tiles: tiles("min_patches", "preproc_min_tiles", 1),
        max_tiles: tiles("max_patches", "preproc_max_tiles", 12),
    };
    let filter = file.filter(Filter::Bicubic)?;
    let processor = Processor { rule, filter, mean, std, patch: patch as u32, merge: merge as u32 };
    let places = Places::Grid { table, side, resize: Resize::Fraction };
    let mut lowered = Lowered::new(program, places, processor);
    lowered.arrangement.class = Some(class);
    Ok(lowered)
}

fn blocks(file: &mut TowerFile<'_, '_>) -> Result<Blocks, ModelError> {
    let hidden = file.size(["embedding_length", "hidden_size"], 1024)?;
    let heads = file.size(["attention.head_count", "num_attention_heads"], 16)?;
    let head_dim = hidden.checked_div(heads).unwrap_or(0);
    let eps = match file.values {
        Values::Gguf(metadata) => metadata.optional_f32("clip.vision.attention.layer_norm_epsilon")?,
        Values::Hf { .. } => file.vision("layer_norm_eps").and_then(Value::as_f64).map(|eps| eps as f32),
    };
    let names = if file.is_hf() { &NAMES } else { &GGUF };
    let first = |part: &str| format!("{}0.{part}", names.before);
    let has_norms = file.tensors.has(&first(&format!("{}.weight", names.q_norm)));
    let blocks = Blocks {
        layers: file.size(["block_count", "num_hidden_layers"], 24)?,
        hidden,
        heads,
        head_dim,
        ffn: file.size(["feed_forward_length", "intermediate_size"], 4096)?,
        // The largest tower has RMS norms, which GGUF files do not name.
        norms: match file.tensors.has(&first(&format!("{}.bias", names.norm1))) {
            true => NormKind::Layer,
            false => NormKind::Rms,
        },
        eps: eps.unwrap_or(1e-6),
        activation: Activation::Gelu,
        gated: false,
        scale: (head_dim as f32).powf(-0.5),
        gemma4: false,
        extras: Extras { qk_norms: has_norms.then_some(QkNormKind::Row), scales: true },
        names: &NAMES,
    };
    blocks.check(file)?;
    match file.vision("hidden_act").and_then(Value::as_str) {
        None | Some("gelu") => Ok(blocks),
        Some(other) => Err(ModelError::unsupported_but(format!("activation `{other}`"), "gelu")),
    }
}

/// Checks that rows are those after the last layer.
fn check_features(
    file: &TowerFile<'_, '_>,
    layer: Option<&Value>,
    activation: Option<&Value>,
) -> Result<(), ModelError> {
    if layer.is_some_and(|layer| layer.as_i64() != Some(-1)) {
        return Err(ModelError::unsupported_but("rows of layers before the last one", "the last layer"));
    }
    if file.vision("use_mean_pooling").and_then(Value::as_bool) == Some(false) {
        return Err(ModelError::unsupported("a vision tower with a norm after its last layer"));
    }
    match activation.and_then(Value::as_str) {
        None | Some("gelu") => Ok(()),
        Some(other) => Err(ModelError::unsupported_but(format!("activation `{other}`"), "gelu")),
    }
}
