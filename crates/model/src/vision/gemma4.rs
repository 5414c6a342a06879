//! Gemma 4: places by column and row, rotations by both, rows that are means of squares of patches; and the unified model, whose tower
//! consists of its ends.

use paguro_backend::{
    Activation, KvGroup, KvLayout, Layer, Linear, Matrix, Mixer, NormKind, Patches, RopeStyle, RowOp,
    VectorId,
};
use paguro_vision::{Family, Filter, Processor, SizeRule};
use serde_json::{Map, Value};

use super::{
    Lowered, Places, TowerFamily,
    adapt::Text,
    files::{TowerFile, Values},
    lower::{BlockNames, Blocks, Extras, GGUF, rope_of_halves, single},
    qwen3vl::check_squares,
};
use crate::{
    error::ModelError,
    gguf::{Metadata, Value as Meta},
    rearrange::join,
};

pub(super) const DEF: TowerFamily = TowerFamily {
    projectors: &["gemma4v"],
    classes: &["Gemma4ForConditionalGeneration"],
    prefixes: &[("model.vision_tower.", "v."), ("vision_tower.", "v."), ("model.embed_vision.", "mm.")],
    family: Family::Gemma4,
    projector: "gemma4v",
    marker: "<|image|>",
    image_token: "<|image|>",
    image_token_keys: &["image_token_id"],
    lower,
    names: (
        &NAMES,
        &[
            ("v.patch_embedder.input_proj", "v.patch_embd"),
            ("v.patch_embedder.position_embedding_table", "v.position_embd.weight"),
            ("v.std_bias", "v.std_bias"),
            ("v.std_scale", "v.std_scale"),
            ("mm.embedding_projection", "mm.input_projection"),
        ],
    ),
    keys: |_, vision, _, metadata| {
        set(metadata, "projector.scale_factor", number(vision, "pooling_kernel_size", 3));
        // llama.cpp requires it.
        set(metadata, "image_size", 224);
    },
    splits_qkv: false,
    interleaves: false,
    eps: EPS,
    adapt,
};

pub(super) const UNIFIED: TowerFamily = TowerFamily {
    projectors: &["gemma4uv"],
    classes: &["Gemma4UnifiedForConditionalGeneration"],
    prefixes: &[("model.vision_embedder.", "v."), ("vision_embedder.", "v."), ("model.embed_vision.", "mm.")],
    projector: "gemma4uv",
    lower: unified,
    names: (
        &NAMES,
        &[
            ("v.patch_dense", "v.patch_embd"),
            ("v.patch_ln1", "v.patch_norm.1"),
            ("v.patch_ln2", "v.patch_norm.2"),
            ("v.pos_norm", "v.patch_norm.3"),
            ("v.pos_embedding", "v.position_embd.weight"),
            ("v.multimodal_embedder.embedding_projection", "mm.input_projection"),
            ("mm.embedding_projection", "mm.input_projection"),
        ],
    ),
    keys: |_, vision, _, metadata| {
        set(metadata, "projector.scale_factor", number(vision, "pooling_kernel_size", 3));
        set(metadata, "embedding_length", number(vision, "mm_embed_dim", 3840));
        // llama.cpp requires them.
        set(metadata, "image_size", 224);
        ["block_count", "feed_forward_length", "attention.head_count"]
            .iter()
            .for_each(|key| set(metadata, key, 0));
    },
    ..DEF
};

fn number(vision: &Map<String, Value>, key: &str, default: u64) -> u64 {
    vision.get(key).and_then(Value::as_u64).unwrap_or(default)
}

fn set(metadata: &mut Metadata, key: &str, value: u64) {
    metadata.set(&format!("clip.vision.{key}"), Meta::U32(u32::try_from(value).unwrap_or(0)));
}

const NAMES: BlockNames = BlockNames {
    before: "v.encoder.layers.",
    norm1: "input_layernorm",
    norm2: "pre_feedforward_layernorm",
    q: "self_attn.q_proj.linear",
    k: "self_attn.k_proj.linear",
    v: "self_attn.v_proj.linear",
    out: "self_attn.o_proj.linear",
    gate: "mlp.gate_proj.linear",
    up: "mlp.up_proj.linear",
    down: "mlp.down_proj.linear",
    q_norm: "self_attn.q_norm",
    k_norm: "self_attn.k_norm",
    post1: "post_attention_layernorm",
    post2: "post_feedforward_layernorm",
    ..GGUF
};

/// Older mmproj files have another number.
const EPS: f32 = 1e-6;

/// Rows of a picture see each other in layers with a window, in the models that were trained so: all without embeddings for layers.
fn adapt(text: &mut Text<'_>) -> Result<(), ModelError> {
    let sees = match text.text_config("use_bidirectional_attention") {
        Some(value) => value.as_str() == Some("vision"),
        None => text.program.layer_embeds().is_none() && !text.is_hf(),
    };
    if sees {
        text.spans(true);
    }
    Ok(())
}

fn lower(file: &mut TowerFile<'_, '_>) -> Result<Lowered, ModelError> {
    let hidden = file.size(["embedding_length", "hidden_size"], 768)?;
    let heads = file.size(["attention.head_count", "num_attention_heads"], 12)?;
    let head_dim = match file.optional(["attention.head_dim", "head_dim"])? {
        Some(size) => size,
        None if file.is_hf() => 64,
        None => hidden.checked_div(heads).unwrap_or(0),
    };
    let blocks = Blocks {
        layers: file.size(["block_count", "num_hidden_layers"], 16)?,
        hidden,
        heads,
        head_dim,
        ffn: file.size(["feed_forward_length", "intermediate_size"], 3072)?,
        norms: NormKind::Rms,
        eps: EPS,
        activation: Activation::GeluTanh,
        gated: true,
        scale: 1.0,
        gemma4: true,
        extras: Extras::default(),
        names: &NAMES,
    };
    blocks.check(file)?;
    let kv_heads = file.optional(["attention.head_count_kv", "num_key_value_heads"])?.unwrap_or(heads);
    if kv_heads != heads || !head_dim.is_multiple_of(4) {
        return Err(ModelError::unsupported(format!(
            "a tower with {heads} heads of {head_dim} over {kv_heads}"
        )));
    }
    let patch = file.size(["patch_size", "patch_size"], 16)?;
    let merge = match file.values {
        Values::Gguf(_) => file.key("projector.scale_factor").map_or(3, |merge| merge as usize),
        Values::Hf { .. } => file.size(["", "pooling_kernel_size"], 3)?,
    };
    check_squares(patch, merge)?;
    let width = 3 * patch * patch;
    let linear = match file.is_hf() {
        false => file.patches("v.patch_embd", hidden, patch)?,
        true => {
            // By row, column and channel of pixels.
            let name = "v.patch_embedder.input_proj.weight";
            let stored = file.dense(name, hidden, width)?;
            file.matrix_of(name, hidden, width, &by_channel(&stored, patch), None)
        }
    };
    let patches =
        Patches { width, ops: vec![RowOp::Linear { linear, width: hidden, activation: None }, RowOp::Add] };
    let places = file.name(["v.position_embd.weight", "v.patch_embedder.position_embedding_table"]);
    let count = file.tensors.shape(places).and_then(|shape| shape.get(1).copied()).unwrap_or(0);
    let table = file.tensors.values(places, &[2, count, hidden])?;
    if count == 0 {
        return Err(ModelError::Config("there are no embeddings of places".to_owned()));
    }
    let layers = (0..blocks.layers).map(|layer| {
        let layer = blocks.layer(file, layer, 0, Some(0))?;
        Ok(halves_as_one(file, layer, heads, head_dim))
    });
    let layers = layers.collect::<Result<Vec<_>, ModelError>>()?;

    let text = file.text_hidden;
    let mut ops = vec![RowOp::Mean { rows: merge * merge, scale: (hidden as f32).sqrt() }];
    if let Some(bias) = file.tensors.vector("v.std_bias", hidden)? {
        let scale = file.tensors.require_vector("v.std_scale", hidden)?;
        // `(x - bias) * scale`
        let bias = bias.iter().zip(&scale).map(|(bias, scale)| -bias * scale).collect();
        ops.push(RowOp::Affine {
            scale: file.tensors.add_vector(scale),
            bias: file.tensors.add_vector(bias),
        });
    }
    ops.push(RowOp::Norm(file.plain_norm(hidden, EPS)));
    let projection =
        file.linear(file.name(["mm.input_projection", "mm.embedding_projection"]), text, hidden)?;
    ops.push(RowOp::Linear { linear: projection, width: text, activation: None });
    let merged = single(merge * merge, text, blocks.layers, ops);
    // The first half of a head is rotated by the column.
    let mut rope = rope_of_halves(head_dim, 100.0);
    rope.axes.iter_mut().for_each(|axis| *axis = 3 - *axis);
    debug_assert_eq!(rope.style, RopeStyle::HalfSplit);
    let program = blocks.program(&[false], layers, vec![rope], patches, merged);
    let processor = processor(file, patch, merge, ([0.5; 3], [0.5; 3]))?;
    Ok(Lowered::new(program, Places::Axes { table, count }, processor))
}

fn unified(file: &mut TowerFile<'_, '_>) -> Result<Lowered, ModelError> {
    let small = file.size(["patch_size", "patch_size"], 16)?;
    let pool = match file.values {
        Values::Gguf(_) => file.key("projector.scale_factor").map_or(3, |pool| pool as usize),
        Values::Hf { .. } => file.size(["", "pooling_kernel_size"], 3)?,
    };
    check_squares(small, pool)?;
    let patch = small * pool;
    let hidden = file.size(["embedding_length", "mm_embed_dim"], 3840)?;
    let (width, eps) = (3 * patch * patch, 1e-5);
    let mut first = file.norm(file.name(["v.patch_norm.1", "v.patch_ln1"]), width, NormKind::Layer, eps)?;
    let linear = match file.is_hf() {
        false => file.patches("v.patch_embd", hidden, patch)?,
        true => {
            let name = "v.patch_dense.weight";
            let stored = file.dense(name, hidden, width)?;
            let bias = file.vector("v.patch_dense.bias", hidden)?;
            first.weight = file.map_vector(first.weight, |values| by_channel(values, patch));
            first.bias = first.bias.map(|bias| file.map_vector(bias, |values| by_channel(values, patch)));
            file.matrix_of(name, hidden, width, &by_channel(&stored, patch), bias)
        }
    };
    let second = file.norm(file.name(["v.patch_norm.2", "v.patch_ln2"]), hidden, NormKind::Layer, eps)?;
    let third = file.norm(file.name(["v.patch_norm.3", "v.pos_norm"]), hidden, NormKind::Layer, eps)?;
    let (table, count) = match file.is_hf() {
        false => {
            let name = "v.position_embd.weight";
            let count = file.tensors.shape(name).and_then(|shape| shape.get(1).copied()).unwrap_or(0);
            (file.tensors.values(name, &[2, count, hidden])?, count)
        }
        true => {
            let name = "v.pos_embedding";
            let count = file.tensors.shape(name).and_then(|shape| shape.first().copied()).unwrap_or(0);
            let stored = file.tensors.values(name, &[count, 2, hidden])?;
            let axis = |axis: usize| stored.chunks_exact(hidden).skip(axis).step_by(2).flatten().copied();
            (axis(0).chain(axis(1)).collect(), count)
        }
    };
    if count == 0 {
        return Err(ModelError::Config("there are no embeddings of places".to_owned()));
    }
    let patches = Patches {
        width,
        ops: vec![
            RowOp::Norm(first),
            RowOp::Linear { linear, width: hidden, activation: None },
            RowOp::Norm(second),
            RowOp::Add,
            RowOp::Norm(third),
        ],
    };
    let text = file.text_hidden;
    let name = file.name(["mm.input_projection", "v.multimodal_embedder.embedding_projection"]);
    let name = if file.tensors.has(&format!("{name}.weight")) { name } else { "mm.embedding_projection" };
    let projection = file.linear(name, text, hidden)?;
    let ops = vec![
        RowOp::Norm(file.plain_norm(hidden, EPS)),
        RowOp::Linear { linear: projection, width: text, activation: None },
    ];
    let group = KvGroup { window: None, spans: false, layer_slots: 1, kv_heads: 1, head_dim: 16 };
    let blocks = Blocks {
        layers: 0,
        hidden,
        heads: 1,
        head_dim: 16,
        ffn: 1,
        norms: NormKind::Rms,
        eps: EPS,
        activation: Activation::GeluTanh,
        gated: true,
        scale: 1.0,
        gemma4: true,
        extras: Extras::default(),
        names: &NAMES,
    };
    let mut program = blocks.program(&[false], Vec::new(), Vec::new(), patches, single(1, text, 0, ops));
    program.kv = KvLayout { groups: vec![group] };
    let processor = processor(file, patch, 1, ([0.0; 3], [1.0; 3]))?;
    Ok(Lowered::new(program, Places::Axes { table, count }, processor))
}

fn processor(
    file: &TowerFile<'_, '_>,
    patch: usize,
    merge: usize,
    (mean, std): ([f32; 3], [f32; 3]),
) -> Result<Processor, ModelError> {
    let tokens = file.processor("max_soft_tokens").and_then(Value::as_u64).unwrap_or(280);
    Ok(Processor {
        rule: SizeRule::Budget { tokens: u32::try_from(tokens).unwrap_or(280) },
        filter: file.filter(Filter::Bicubic)?,
        mean,
        std,
        patch: patch as u32,
        merge: merge as u32,
    })
}

/// Reorders numbers of pixels, by row, column and channel in each patch, to those by channel, row and column.
pub(super) fn by_channel(values: &[f32], patch: usize) -> Vec<f32> {
    let pixels = patch * patch;
    let of_patch = |patch: &[f32]| -> Vec<f32> {
        (0..3)
            .flat_map(|channel| (0..pixels).map(move |pixel| (pixel, channel)))
            .map(|(pixel, channel)| patch[pixel * 3 + channel])
            .collect()
    };
    values.chunks_exact(3 * pixels).flat_map(of_patch).collect()
}

/// Reorders the elements of queries and keys, whose halves are rotated apart: first the first elements of all pairs, then the second
/// ones. Scores do not change.
fn halves_as_one(file: &mut TowerFile<'_, '_>, mut layer: Layer, heads: usize, head_dim: usize) -> Layer {
    let Mixer::Attention(attention) = &mut layer.mixer else { return layer };
    for linear in [Some(&mut attention.q), attention.k.as_mut()].into_iter().flatten() {
        reorder(file, linear, heads, head_dim);
    }
    if let Some(norm) = &mut attention.qk_norm {
        for norm in [&mut norm.q, &mut norm.k] {
            norm.weight = file.map_vector(norm.weight, |weight| {
                quarters(head_dim).flat_map(|quarter| weight[quarter].to_vec()).collect()
            });
        }
    }
    layer
}

/// Returns the quarters of a head in their new order.
fn quarters(head_dim: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let quarter = head_dim / 4;
    [0, 2, 1, 3].into_iter().map(move |index| index * quarter..(index + 1) * quarter)
}

fn reorder(file: &mut TowerFile<'_, '_>, linear: &mut Linear, heads: usize, head_dim: usize) {
    let matrix = &mut file.tensors.weights.matrices[linear.matrix.0 as usize];
    let row = matrix.format.row_bytes(matrix.cols);
    let pieces = (0..heads).flat_map(|head| {
        quarters(head_dim).map(move |quarter| head * head_dim + quarter.start..head * head_dim + quarter.end)
    });
    let pieces: Vec<_> = pieces.map(|rows| matrix.bytes.slice(rows.start * row..rows.end * row)).collect();
    *matrix = Matrix { bytes: join(pieces), ..matrix.clone() };
    if let Some(bias) = linear.bias {
        let of_head =
            |head: &[f32]| quarters(head_dim).flat_map(|quarter| head[quarter].to_vec()).collect::<Vec<_>>();
        let bias: VectorId =
            file.map_vector(bias, |values| values.chunks_exact(head_dim).flat_map(of_head).collect());
        linear.bias = Some(bias);
    }
}
