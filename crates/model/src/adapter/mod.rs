//! Adapters (LoRA): folders of PEFT and mlx-lm, GGUF files of llama.cpp.
//!
//! An adapter has two matrices for each linear that it changes. [`AdapterFile::fit`] finds the linear in a model, whatever
//! the format of the model's own files, and checks the shapes.

mod dialect;
mod merge;
mod peft;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use paguro_backend::{Bytes, LowRank, Matrix};

use self::peft::Scales;
use crate::{
    arch::{FLOATS, Linears, Naming, Piece},
    error::ModelError,
    gguf::Gguf,
    hf,
    load::Model,
    rearrange::Transpose,
    tensor::Tensor,
};

/// Format of llama.cpp's files.
const GGUF: &str = "GGUF";

/// Weights of PEFT and of mlx-lm.
const WEIGHTS: [&str; 2] = ["adapter_model.safetensors", "adapters.safetensors"];

/// An adapter that was opened and checked, but not fitted to a model.
#[derive(Debug)]
pub struct AdapterFile {
    name: String,
    path: PathBuf,
    format: &'static str,
    files: Vec<PathBuf>,
    naming: Naming,
    base: Option<String>,
    pairs: Vec<Pair>,
}

/// Change of one tensor of the base.
#[derive(Debug)]
struct Pair {
    /// Name of the base's tensor without `.weight`.
    target: String,
    /// `[rank, in]`
    a: Matrix,
    /// `[out, rank]`
    b: Matrix,
    scale: f32,
}

/// The tensors of one target, by name.
#[derive(Default)]
struct Sides<'a> {
    a: Option<&'a Tensor>,
    b: Option<&'a Tensor>,
}

impl AdapterFile {
    /// Returns true if the path looks like an adapter: a folder with an `adapter_config.json` or a file of one, or a GGUF
    /// file whose type is `adapter`.
    pub fn is_at(path: &Path) -> bool {
        if path.is_dir() {
            return path.join("adapter_config.json").is_file();
        }
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name == "adapter_config.json"
            || WEIGHTS.contains(&name)
            || Gguf::open(path).is_ok_and(|gguf| gguf.metadata.str("general.type") == Some("adapter"))
    }

    /// Opens a folder of PEFT or mlx-lm, a file of one, or a GGUF file.
    ///
    /// # Errors
    /// [`ModelError`], with the damaged or unsupported part.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let is_part = name == "adapter_config.json" || name.ends_with(".safetensors");
        match path.parent() {
            _ if path.is_dir() => Self::open_folder(path),
            Some(folder) if is_part => Self::open_folder(folder),
            _ => Self::open_gguf(path),
        }
    }

    fn open_folder(folder: &Path) -> Result<Self, ModelError> {
        let Some(weights) = WEIGHTS.into_iter().find(|file| folder.join(file).is_file()) else {
            let problem = match folder.join("adapter_model.bin").is_file() {
                true => "weights in `adapter_model.bin` are not supported; save the adapter as safetensors",
                false => "the folder has no `adapter_model.safetensors`",
            };
            return Err(ModelError::NotAModel { path: folder.to_owned(), problem: problem.to_owned() });
        };
        let (config, tensors) = hf::open_adapter(folder, weights)?;
        let bad = |problem: String| ModelError::BadFile { path: folder.join(weights), problem };
        let is_mlx = peft::is_mlx(&config);
        let scales = Scales::read(&config)
            .map_err(|problem| ModelError::BadFile { path: folder.join("adapter_config.json"), problem })?;
        let ends = if is_mlx { [".lora_a", ".lora_b"] } else { [".lora_A.weight", ".lora_B.weight"] };
        let target = |name: &str| name.strip_prefix("base_model.model.").unwrap_or(name).to_owned();
        let sides = sides(&tensors, ends, target).map_err(bad)?;
        let mut pairs = Vec::with_capacity(sides.len());
        for (target, [a, b]) in sides {
            let [a, b] = match is_mlx {
                true => [transposed(a).map_err(bad)?, transposed(b).map_err(bad)?],
                false => [matrix(a).map_err(bad)?, matrix(b).map_err(bad)?],
            };
            let scale = scales.of(&target, a.rows).map_err(bad)?;
            pairs.push(Pair { target, a, b, scale });
        }
        let base = config.get("base_model_name_or_path").or_else(|| config.get("model"));
        Ok(Self {
            name: name_of(folder),
            path: folder.to_owned(),
            format: if is_mlx { "mlx-lm" } else { "PEFT" },
            files: vec![folder.join("adapter_config.json"), folder.join(weights)],
            naming: Naming::Hf,
            base: base.and_then(|base| base.as_str()).map(str::to_owned),
            pairs: non_empty(pairs).map_err(bad)?,
        })
    }

    fn open_gguf(path: &Path) -> Result<Self, ModelError> {
        let gguf = Gguf::open(path)?;
        let bad = |problem: String| ModelError::BadFile { path: path.to_owned(), problem };
        let metadata = &gguf.metadata;
        if metadata.str("general.type") != Some("adapter") {
            let problem = "it is no adapter: its `general.type` is not `adapter`".to_owned();
            return Err(ModelError::NotAModel { path: path.to_owned(), problem });
        }
        match metadata.str("adapter.type") {
            Some("lora") => {}
            other => {
                let what = format!("an adapter of type `{}`", other.unwrap_or_default());
                return Err(ModelError::unsupported_but(what, "lora"));
            }
        }
        if metadata.get("adapter.alora.invocation_tokens").is_some() {
            return Err(ModelError::unsupported("an adapter with invocation tokens (aLoRA)"));
        }
        let alpha = metadata.optional_f32("adapter.lora.alpha")?.unwrap_or(0.0);
        if !alpha.is_finite() {
            return Err(bad(format!("`adapter.lora.alpha` is {alpha}")));
        }
        let target = |name: &str| name.strip_suffix(".weight").unwrap_or(name).to_owned();
        let sides = sides(&gguf.tensors, [".lora_a", ".lora_b"], target).map_err(bad)?;
        let mut pairs = Vec::with_capacity(sides.len());
        for (target, [a, b]) in sides {
            let [a, b] = [matrix(a).map_err(bad)?, matrix(b).map_err(bad)?];
            // Without alpha, llama.cpp does not scale.
            let scale = if alpha == 0.0 { 1.0 } else { alpha / a.rows as f32 };
            pairs.push(Pair { target, a, b, scale });
        }
        let repository = metadata.str("general.base_model.0.repo_url");
        let repository = repository.and_then(|url| url.strip_prefix("https://huggingface.co/"));
        let base = repository.or_else(|| metadata.str("general.base_model.0.name"));
        Ok(Self {
            name: metadata.str("general.name").map_or_else(|| name_of(path), str::to_owned),
            path: path.to_owned(),
            format: GGUF,
            files: gguf.files.clone(),
            naming: Naming::Gguf,
            base: base.map(str::to_owned),
            pairs: non_empty(pairs).map_err(bad)?,
        })
    }

    /// Returns the name in the metadata, or else that of the file or folder.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the kind of files: `PEFT`, `mlx-lm` or `GGUF`.
    pub fn format(&self) -> &'static str {
        self.format
    }

    /// Returns the model that it was trained for, as its files name it.
    pub fn base(&self) -> Option<&str> {
        self.base.as_deref()
    }

    /// Returns its files.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Returns the largest rank.
    pub fn rank(&self) -> usize {
        self.pairs.iter().map(|pair| pair.a.rows).max().unwrap_or(0)
    }

    /// Returns the bytes of its matrices.
    pub fn bytes(&self) -> u64 {
        self.pairs.iter().map(|pair| (pair.a.bytes.len() + pair.b.bytes.len()) as u64).sum()
    }

    /// Returns the number of its weights.
    pub fn parameters(&self) -> u64 {
        let size = |matrix: &Matrix| (matrix.rows * matrix.cols) as u64;
        self.pairs.iter().map(|pair| size(&pair.a) + size(&pair.b)).sum()
    }

    /// Returns the format of most of its weights.
    pub fn weight_format(&self) -> &'static str {
        let mut bytes: BTreeMap<&str, usize> = BTreeMap::new();
        for matrix in self.pairs.iter().flat_map(|pair| [&pair.a, &pair.b]) {
            *bytes.entry(matrix.format.name()).or_default() += matrix.bytes.len();
        }
        bytes.into_iter().max_by_key(|(_, bytes)| *bytes).map_or("F32", |(name, _)| name)
    }

    /// Returns the names of the tensors that it changes, each with the shapes of A and B.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, [[usize; 2]; 2])> {
        let shape = |matrix: &Matrix| [matrix.rows, matrix.cols];
        self.pairs.iter().map(move |pair| (pair.target.as_str(), [shape(&pair.a), shape(&pair.b)]))
    }

    /// Returns the names of the tensors that it changes.
    pub fn targets(&self) -> impl Iterator<Item = &str> {
        self.pairs.iter().map(|pair| pair.target.as_str())
    }

    /// Returns the changes of a model's matrices, in memory.
    ///
    /// # Errors
    /// [`ModelError`], if a tensor is none of the model's linears, or has another shape; if the folder has tokens that the
    /// model does not have room for.
    pub fn fit(&self, model: &Model) -> Result<Vec<LowRank>, ModelError> {
        self.has_own_tokens(model)?;
        self.fit_linears(&model.linears, &model.name)
    }

    fn fit_linears(&self, linears: &Linears, model: &str) -> Result<Vec<LowRank>, ModelError> {
        let bad = |problem: String| ModelError::BadFile { path: self.path.clone(), problem };
        let mut found: BTreeMap<u32, &str> = BTreeMap::new();
        let mut changes = Vec::new();
        for Pair { target, a, b, scale } in &self.pairs {
            let pieces = linears
                .find(self.naming, target, b.rows)
                .map_err(|problem| bad(format!("`{}` changes `{target}`: {problem}", a.name)))?;
            self.check_shapes((linears, model), target, (a, b), &pieces)?;
            let a = Matrix { bytes: in_memory(a)?.into(), ..a.clone() };
            let element = a.format.block_bytes();
            let rows_of_b = in_memory(b)?;
            let row = b.format.row_bytes(b.cols);
            for Piece { matrix, rows, columns } in pieces {
                if let Some(other) = found.insert(matrix.0, target) {
                    return Err(bad(format!("`{other}` and `{target}` change one matrix of the model")));
                }
                let mut bytes = Vec::with_capacity(rows.len() * row);
                rows.iter().for_each(|&at| bytes.extend_from_slice(&rows_of_b[at * row..(at + 1) * row]));
                let b = Matrix { rows: rows.len(), bytes: bytes.into(), ..b.clone() };
                let a = columns.map_or_else(|| Ok(a.clone()), |order| in_order(&a, &order, element))?;
                changes.push(LowRank { matrix, a, b, scale: *scale });
            }
        }
        Ok(changes)
    }

    fn check_shapes(
        &self,
        (linears, model): (&Linears, &str),
        target: &str,
        (a, b): (&Matrix, &Matrix),
        pieces: &[Piece],
    ) -> Result<(), ModelError> {
        let out: usize = pieces.iter().map(|piece| piece.rows.len()).sum();
        let inputs = pieces.first().and_then(|piece| linears.shape(piece.matrix)).map_or(0, |shape| shape[1]);
        let fits = [b.rows, b.cols, a.cols] == [out, a.rows, inputs]
            && pieces.iter().flat_map(|piece| &piece.rows).all(|&row| row < out);
        if fits {
            return Ok(());
        }
        let base = self.base().map_or_else(String::new, |base| format!("; it was trained for `{base}`"));
        let problem = format!(
            "`{}` [{}, {}] and `{}` [{}, {}] do not fit `{target}` [{out}, {inputs}] of `{}`{base}",
            a.name, a.rows, a.cols, b.name, b.rows, b.cols, model
        );
        Err(ModelError::BadFile { path: self.path.clone(), problem })
    }
}

/// Returns a matrix whose column `i` is column `order[i]`, of elements of `element` bytes.
fn in_order(matrix: &Matrix, order: &[usize], element: usize) -> Result<Matrix, ModelError> {
    let bytes = in_memory(matrix)?;
    let mut ordered = Vec::with_capacity(bytes.len());
    for row in bytes.chunks_exact(matrix.cols * element) {
        order.iter().for_each(|&at| ordered.extend_from_slice(&row[at * element..(at + 1) * element]));
    }
    Ok(Matrix { bytes: ordered.into(), ..matrix.clone() })
}

fn non_empty(pairs: Vec<Pair>) -> Result<Vec<Pair>, String> {
    if pairs.is_empty() { Err("it changes no tensor".to_owned()) } else { Ok(pairs) }
}

fn in_memory(matrix: &Matrix) -> Result<Vec<u8>, ModelError> {
    let bytes = matrix.bytes.read().map_err(|error| ModelError::Unreadable {
        tensor: matrix.name.clone(),
        problem: error.to_string(),
    })?;
    Ok(bytes.into_owned())
}

/// Returns the two tensors of each target, in the order of names. `ends` are the ends of their names.
fn sides<'a>(
    tensors: &'a [Tensor],
    ends: [&str; 2],
    target: impl Fn(&str) -> String,
) -> Result<BTreeMap<String, [&'a Tensor; 2]>, String> {
    let mut sides: BTreeMap<String, Sides<'a>> = BTreeMap::new();
    for tensor in tensors {
        let name = tensor.name.as_str();
        if name.ends_with(".base_layer.weight") {
            // A copy of the base's head, which PEFT stores and does not train. A resized one does not fit the base.
            continue;
        }
        let of = |end: &str| name.strip_suffix(end).map(&target);
        let (target, is_a) = match (of(ends[0]), of(ends[1])) {
            (Some(target), _) => (target, true),
            (None, Some(target)) => (target, false),
            (None, None) => return Err(foreign(name)),
        };
        let own = sides.entry(target).or_default();
        let side = if is_a { &mut own.a } else { &mut own.b };
        if let Some(other) = side.replace(tensor) {
            return Err(format!("`{}` and `{name}` change one tensor", other.name));
        }
    }
    let both = |(target, own): (String, Sides<'a>)| match (own.a, own.b) {
        (Some(a), Some(b)) => Ok((target, [a, b])),
        (a, b) => {
            let only = a.or(b).map_or("", |tensor| &tensor.name);
            Err(format!("`{only}` has no counterpart: A and B belong together"))
        }
    };
    sides.into_iter().map(both).collect()
}

/// Returns the problem of a tensor that is neither A nor B.
fn foreign(name: &str) -> String {
    let what = if name.contains("lora_magnitude_vector") || name.ends_with(".m") {
        "DoRA, which is not supported"
    } else if name.contains("lora_embedding") {
        "an adapter of embeddings, which is not supported"
    } else if name.contains("modules_to_save") {
        "a whole tensor (`modules_to_save`), which is not supported"
    } else if name.ends_with(".bias") {
        "a bias, which is not supported"
    } else {
        "neither A nor B of a low-rank adapter"
    };
    format!("`{name}` is {what}")
}

/// Returns a tensor as a matrix.
fn matrix(tensor: &Tensor) -> Result<Matrix, String> {
    let &[rows, cols] = tensor.shape.as_slice() else {
        return Err(format!("`{}` has shape {:?}, but A and B are matrices", tensor.name, tensor.shape));
    };
    let format = tensor.dtype.weight_format().filter(|format| FLOATS.contains(format));
    let format = format.ok_or_else(|| {
        format!("`{}` is in {}; adapters are in F32, F16 or BF16", tensor.name, tensor.dtype)
    })?;
    let size = rows.checked_mul(cols).and_then(|size| size.checked_mul(format.block_bytes()));
    if rows == 0 || cols == 0 || size != Some(tensor.bytes.len()) {
        return Err(format!(
            "`{}` has shape {:?} and {} bytes",
            tensor.name,
            tensor.shape,
            tensor.bytes.len()
        ));
    }
    Ok(Matrix { name: tensor.name.clone(), format, parts: 1, rows, cols, bytes: tensor.bytes.clone() })
}

/// Returns the transpose of a tensor: mlx-lm has `[in, rank]` and `[rank, out]`.
fn transposed(tensor: &Tensor) -> Result<Matrix, String> {
    let matrix = matrix(tensor)?;
    let (inputs, outputs) = (matrix.rows, matrix.cols);
    let element = matrix.format.block_bytes();
    let shape = Transpose { parts: 1, inputs, columns: outputs, element, first: 0, step: 1, outputs };
    let bytes: Bytes = shape.of(&matrix.bytes);
    Ok(Matrix { rows: outputs, cols: inputs, bytes, ..matrix })
}

fn name_of(path: &Path) -> String {
    let full = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let stem = if full.is_dir() { full.file_name() } else { full.file_stem() };
    stem.map_or_else(|| path.display().to_string(), |stem| stem.to_string_lossy().into_owned())
}
