//! The tower of a folder as the contents of an mmproj file, as llama.cpp's converter writes it.

use paguro_backend::{Bytes, WeightFormat};
use paguro_vision::Family;
use serde_json::{Map, Value as Json};

use super::{ALL, TowerFamily, lower::GGUF, object, own_tensors};
use crate::{
    arch::Tensors,
    error::ModelError,
    gguf::{Array, Contents, Metadata, Value},
    hf::HfFolder,
    rearrange::join,
    tensor::{DType, Tensor},
};

/// Names of a family's tensors outside of layers: in folders, and in mmproj files.
pub(super) type Renames = &'static [(&'static str, &'static str)];

/// Integers of `vision_config` under the keys of mmproj files, with transformers' defaults.
const SIZES: [(&str, &[&str]); 7] = [
    ("image_size", &["image_size"]),
    ("patch_size", &["patch_size"]),
    ("embedding_length", &["hidden_size"]),
    ("feed_forward_length", &["intermediate_size"]),
    ("block_count", &["depth", "num_hidden_layers"]),
    ("attention.head_count", &["num_heads", "num_attention_heads"]),
    ("attention.head_dim", &["head_dim"]),
];

/// Returns the contents of the mmproj file of a folder; `None` if it has no tower that runs.
///
/// # Errors
/// Tensors that are unknown, or cannot be read.
pub(crate) fn contents(
    folder: &HfFolder,
    tensors: &[Tensor],
    name: &str,
) -> Result<Option<Contents>, ModelError> {
    let class = folder.config.get("architectures").and_then(|list| list.get(0)).and_then(Json::as_str);
    let family = ALL.iter().find(|family| class.is_some_and(|class| family.classes.contains(&class)));
    let Some(family) = family else { return Ok(None) };
    let own = own_tensors(tensors, family.prefixes);
    let Some(vision) = object(&folder.config, "vision_config").filter(|_| !own.is_empty()) else {
        return Ok(None);
    };
    let processor = folder.image_processor()?;
    let mut metadata = Metadata::default();
    let mut set = |key: &str, value: Value| metadata.set(key, value);
    set("general.architecture", Value::String("clip".to_owned()));
    set("general.type", Value::String("mmproj".to_owned()));
    set("general.name", Value::String(name.to_owned()));
    set("clip.has_vision_encoder", Value::Bool(true));
    set("clip.projector_type", Value::String(family.projector.to_owned()));
    let is_silu = vision.get("hidden_act").and_then(Json::as_str) == Some("silu");
    set(if is_silu { "clip.use_silu" } else { "clip.use_gelu" }, Value::Bool(true));
    for (key, fields) in SIZES {
        // Sides of both axes are equal.
        let number = |value: &Json| value.as_u64().or_else(|| value.get(0)?.as_u64());
        let found = fields.iter().find_map(|field| number(vision.get(*field)?));
        if let Some(size) = found.and_then(|size| u32::try_from(size).ok()) {
            set(&format!("clip.vision.{key}"), Value::U32(size));
        }
    }
    let eps = vision.get("layer_norm_eps").and_then(Json::as_f64);
    let eps = eps.map_or(family.eps, |eps| eps as f32);
    set("clip.vision.attention.layer_norm_epsilon", Value::F32(eps));
    for key in ["image_mean", "image_std"] {
        if let Some(list) = processor.get(key).and_then(Json::as_array) {
            let values = list.iter().filter_map(Json::as_f64).map(|value| value as f32).collect();
            set(&format!("clip.vision.{key}"), Value::Array(Array::F32(values)));
        }
    }
    (family.keys)(&folder.config, vision, &processor, &mut metadata);
    let text = object(&folder.config, "text_config").unwrap_or(&folder.config);
    if let Some(hidden) =
        text.get("hidden_size").and_then(Json::as_u64).and_then(|size| u32::try_from(size).ok())
    {
        metadata.set("clip.vision.projection_dim", Value::U32(hidden));
    }
    let mut out = Vec::new();
    for tensor in &own {
        rename(family, vision, tensor, &mut out)?;
    }
    out.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(Some(Contents { metadata, tensors: out }))
}

/// Adds a tensor under its name in mmproj files, in the arrangement that it has there.
fn rename(
    family: &TowerFamily,
    vision: &Map<String, Json>,
    tensor: &Tensor,
    out: &mut Vec<Tensor>,
) -> Result<(), ModelError> {
    let (blocks, renames) = family.names;
    let name = tensor.name.as_str();
    if name.starts_with("v.head.") {
        return Ok(());
    }
    let heads = ["num_heads", "num_attention_heads"].iter().find_map(|key| vision.get(*key)?.as_u64());
    if let Some((layer, part)) = name.strip_prefix(blocks.before).and_then(|rest| rest.split_once('.')) {
        let (base, kind) = part.rsplit_once('.').unwrap_or((part, "weight"));
        let pairs = [
            (blocks.norm1, GGUF.norm1),
            (blocks.norm2, GGUF.norm2),
            (blocks.qkv, GGUF.qkv),
            (blocks.q, GGUF.q),
            (blocks.k, GGUF.k),
            (blocks.v, GGUF.v),
            (blocks.out, GGUF.out),
            (blocks.gate, GGUF.gate),
            (blocks.up, GGUF.up),
            (blocks.down, GGUF.down),
            (blocks.q_norm, GGUF.q_norm),
            (blocks.k_norm, GGUF.k_norm),
            (blocks.post1, GGUF.post1),
            (blocks.post2, GGUF.post2),
            (blocks.scale1, GGUF.scale1),
            (blocks.scale2, GGUF.scale2),
        ];
        // Bounds have the name of what has the matrix (Gemma 4).
        let is_it = |own: &str| own == base || kind != "weight" && own.strip_suffix(".linear") == Some(base);
        let found = pairs.iter().find(|(own, _)| is_it(own)).ok_or_else(|| unknown(family, name))?;
        let full = |part: &str| format!("{}{layer}.{part}.{kind}", GGUF.before);
        if found.1 == GGUF.qkv && family.family == Family::KimiK25 {
            let heads = heads.or_else(|| vision.get("vt_num_attention_heads")?.as_u64());
            out.push(plain(Tensor {
                name: full(found.1),
                ..columns_first(tensor, heads.unwrap_or(16) as usize)
            })?);
            return Ok(());
        }
        if found.1 == GGUF.qkv && family.splits_qkv {
            for (index, part) in [GGUF.q, GGUF.k, GGUF.v].into_iter().enumerate() {
                out.push(plain(Tensor { name: full(part), ..third(tensor, index) })?);
            }
            return Ok(());
        }
        let is_rotated = [GGUF.q, GGUF.k].contains(&found.1) && family.interleaves;
        let tensor = match (is_rotated, heads) {
            (true, Some(heads)) => interleaved(tensor, heads as usize),
            _ => tensor.clone(),
        };
        out.push(plain(Tensor { name: full(found.1), ..tensor })?);
        return Ok(());
    }
    if let Some((index, rest)) =
        name.strip_prefix("v.deepstack_merger_list.").and_then(|rest| rest.split_once('.'))
    {
        let listed = vision.get("deepstack_visual_indexes").and_then(Json::as_array);
        let layer = listed.and_then(|list| list.get(index.parse::<usize>().ok()?)?.as_u64());
        let layer = layer.ok_or_else(|| unknown(family, name))?;
        let rest = rest.replace("linear_", "");
        out.push(plain(Tensor { name: format!("v.deepstack.{layer}.{rest}"), ..tensor.clone() })?);
        return Ok(());
    }
    let found = renames.iter().find_map(|(own, new)| Some((name.strip_prefix(own)?, *own, *new)));
    let (rest, own, new) = found
        .filter(|(rest, ..)| rest.is_empty() || rest.starts_with('.'))
        .ok_or_else(|| unknown(family, name))?;
    let full = if rest.is_empty() { new.to_owned() } else { format!("{new}{rest}") };
    let is_kernel = new == "v.patch_embd" && rest == ".weight";
    let is_by_pixel = match family.family {
        Family::Gemma4 => is_kernel || new == "v.patch_norm.1",
        Family::Lfm2 => is_kernel,
        _ => false,
    };
    if is_by_pixel {
        out.push(Tensor { name: full, ..planes(tensor)? });
    } else if own == "v.pos_embedding" {
        out.push(Tensor { name: full, ..of_axes(tensor)? });
    } else if is_kernel && tensor.shape.len() == 5 {
        for (frame, end) in [(0, ""), (1, ".1")] {
            out.push(Tensor { name: format!("{full}{end}"), ..of_frame(tensor, frame)? });
        }
    } else if own == "mm.mm_soft_emb_norm" {
        let values = values(tensor)?.iter().map(|value| value + 1.0).collect::<Vec<_>>();
        out.push(Tensor { name: full, ..floats(tensor.shape.clone(), &values, tensor) });
    } else if new.starts_with("v.position_embd") || new == "v.class_embd" {
        let shape = tensor.shape.iter().copied().skip_while(|&outer| outer == 1).collect();
        out.push(Tensor { name: full, ..floats(shape, &values(tensor)?, tensor) });
    } else {
        out.push(plain(Tensor { name: full, ..tensor.clone() })?);
    }
    Ok(())
}

fn unknown(family: &TowerFamily, name: &str) -> ModelError {
    ModelError::UnknownTensors { count: 1, architecture: family.projector, names: format!("`{name}`") }
}

/// Vectors are in single precision, and a number is a vector.
fn plain(tensor: Tensor) -> Result<Tensor, ModelError> {
    match tensor.shape.len() {
        0 | 1 => {
            let values = values(&tensor)?;
            Ok(Tensor { name: tensor.name.clone(), ..floats(vec![values.len()], &values, &tensor) })
        }
        _ => Ok(tensor),
    }
}

/// Reorders the numbers of pixels, by row, column and channel in each patch, to those by channel, row and column.
fn planes(tensor: &Tensor) -> Result<Tensor, ModelError> {
    let patch = (tensor.shape.last().copied().unwrap_or(0) / 3).isqrt();
    let values = super::gemma4::by_channel(&values(tensor)?, patch.max(1));
    let shape = match tensor.shape[..] {
        [out, _] => vec![out, 3, patch, patch],
        _ => tensor.shape.clone(),
    };
    Ok(floats(shape, &values, tensor))
}

/// Reorders embeddings of places, `[count, axes, width]`, by axis.
fn of_axes(tensor: &Tensor) -> Result<Tensor, ModelError> {
    let [count, axes, width] = tensor.shape[..] else { return Ok(tensor.clone()) };
    let all = values(tensor)?;
    let rows = (0..axes).flat_map(|axis| (0..count).map(move |place| (place * axes + axis) * width));
    let values: Vec<f32> = rows.flat_map(|at| all[at..at + width].to_vec()).collect();
    Ok(floats(vec![axes, count, width], &values, tensor))
}

fn values(tensor: &Tensor) -> Result<Vec<f32>, ModelError> {
    let list = [tensor.clone()];
    Tensors::new("clip", &[], &list).values(&tensor.name, &tensor.shape)
}

fn floats(shape: Vec<usize>, values: &[f32], like: &Tensor) -> Tensor {
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Tensor { shape, dtype: DType::Weight(WeightFormat::F32), bytes: Bytes::from(bytes), ..like.clone() }
}

/// Returns a third of the rows.
fn third(tensor: &Tensor, index: usize) -> Tensor {
    let (mut shape, bytes) = (tensor.shape.clone(), tensor.bytes.len() / 3);
    shape[0] /= 3;
    Tensor { shape, bytes: tensor.bytes.slice(index * bytes..(index + 1) * bytes), ..tensor.clone() }
}

/// Returns the kernel of one of two frames.
fn of_frame(tensor: &Tensor, frame: usize) -> Result<Tensor, ModelError> {
    let all = values(tensor)?;
    let [out, channels, frames, rows, columns] = tensor.shape[..] else { return Ok(tensor.clone()) };
    let plane = rows * columns;
    let kernel: Vec<f32> = all
        .chunks_exact(frames * plane)
        .flat_map(|frames| frames[frame * plane..][..plane].to_vec())
        .collect();
    Ok(floats(vec![out, channels, rows, columns], &kernel, tensor))
}

/// Reorders rows of queries and keys, which values follow, so that all pairs of a head that are rotated by columns come first.
fn columns_first(tensor: &Tensor, heads: usize) -> Tensor {
    let rows = tensor.shape.first().copied().unwrap_or(0);
    let head = rows.checked_div(3 * heads).unwrap_or(0);
    if head == 0 || !head.is_multiple_of(4) || rows != 3 * heads * head {
        return tensor.clone();
    }
    let source = |at: usize| match at < 2 * heads * head {
        false => at,
        true => {
            let (pair, element) = (at % head / 2, at % 2);
            at / head * head + pair % (head / 4) * 4 + pair / (head / 4) * 2 + element
        }
    };
    let row = tensor.bytes.len() / rows;
    let pieces = (0..rows).map(|at| tensor.bytes.slice(source(at) * row..(source(at) + 1) * row)).collect();
    Tensor { bytes: join(pieces), ..tensor.clone() }
}

/// Reorders rows of queries or keys so that neighbours are pairs.
fn interleaved(tensor: &Tensor, heads: usize) -> Tensor {
    let rows = tensor.shape.first().copied().unwrap_or(0);
    if heads == 0 || rows % (2 * heads) != 0 {
        return tensor.clone();
    }
    let (head, row) = (rows / heads, tensor.bytes.len() / rows);
    let order = (0..rows).map(|at| {
        let (first, within) = (at / head * head, at % head);
        first + within / 2 + within % 2 * (head / 2)
    });
    let pieces = order.map(|from| tensor.bytes.slice(from * row..(from + 1) * row)).collect();
    Tensor { bytes: join(pieces), ..tensor.clone() }
}
