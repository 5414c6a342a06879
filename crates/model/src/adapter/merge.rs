//! Adapters merged into the weights of a GGUF file, row by row while it is written.

use std::{collections::BTreeMap, io, sync::Arc};

use paguro_backend::{ByteSource, Bytes, LowRank, Matrix, WeightFormat};

use super::AdapterFile;
use crate::{
    arch::{self, Definition, FLOATS, Linears, Names, Naming, Tensors},
    error::ModelError,
    gguf::Contents,
    rearrange::read_parts,
    tensor::{DType, Tensor},
};

/// Change of some rows of a tensor.
struct Change {
    /// The first of these rows.
    first: usize,
    rank: usize,
    /// `[rank, in]`
    a: Vec<f32>,
    /// `[rows, rank]`, scaled.
    b: Vec<f32>,
}

impl AdapterFile {
    /// Merges the adapter into the weights of a GGUF file. Quantized matrices that it changes become F16.
    ///
    /// # Errors
    /// As [`AdapterFile::fit`]; a matrix that the file has in another arrangement.
    pub fn merge(&self, contents: &mut Contents, scale: f32) -> Result<(), ModelError> {
        let architecture = contents.metadata.require_str("general.architecture")?;
        let definition = Definition::from_gguf(architecture)?;
        let mut tensors = Tensors::new(definition.gguf, &WeightFormat::ALL, &contents.tensors);
        let config = arch::config_from_gguf(&contents.metadata, &mut tensors, None)?;
        let names = Names::gguf(definition);
        let arch::Lowered { program, weights, mtp: _ } =
            arch::lower(&config, &names, tensors, config.context_length)?;
        let linears = Linears::new(&config, Naming::Gguf, &program, &weights);
        let model = contents.metadata.str("general.name").unwrap_or(architecture).to_owned();
        let tied = program
            .head()
            .map(|head| head.linear.matrix)
            .filter(|&matrix| program.embed().is_some_and(|embed| embed.table == matrix));

        let mut changes: BTreeMap<(String, bool), Vec<Change>> = BTreeMap::new();
        for pair in self.fit_linears(&linears, &model)? {
            let name = &weights.matrix(pair.matrix).name;
            let (tensor, first) = place(name).ok_or_else(|| {
                ModelError::unsupported(format!(
                    "merging an adapter into `{name}`, whose rows are rearranged"
                ))
            })?;
            let LowRank { a, b, scale: own, .. } = &pair;
            let mut b = decoded(b)?;
            b.iter_mut().for_each(|value| *value *= scale * own);
            let change = Change { first, rank: pair.rank(), a: decoded(a)?, b };
            let is_head = tied == Some(pair.matrix);
            changes.entry((tensor.to_owned(), is_head)).or_default().push(change);
        }
        for ((name, is_head), changes) in changes {
            let found = contents.tensors.iter_mut().find(|tensor| tensor.name == name);
            let Some(tensor) = found else { continue }; // the matrices are those of the tensors
            let merged = merged(tensor, changes)?;
            match is_head {
                // The head is no longer the embedding table.
                true => contents.tensors.push(Tensor { name: "output.weight".to_owned(), ..merged }),
                false => *tensor = merged,
            }
        }
        Ok(())
    }
}

/// Splits the name of a matrix, `tensor` or `tensor[first..end]`, into the tensor and its first row.
fn place(name: &str) -> Option<(&str, usize)> {
    match name.strip_suffix(']').and_then(|name| name.split_once('[')) {
        None => Some((name, 0)),
        Some((tensor, rows)) => Some((tensor, rows.split_once("..")?.0.parse().ok()?)),
    }
}

fn decoded(matrix: &Matrix) -> Result<Vec<f32>, ModelError> {
    let unreadable = |problem: String| ModelError::Unreadable { tensor: matrix.name.clone(), problem };
    let bytes = matrix.bytes.read().map_err(|error| unreadable(error.to_string()))?;
    let mut values = vec![0.0; matrix.rows * matrix.cols];
    matrix.format.dequantize(&bytes, &mut values);
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(values),
        Some(index) => Err(ModelError::NotFinite { tensor: matrix.name.clone(), index }),
    }
}

fn merged(tensor: &Tensor, changes: Vec<Change>) -> Result<Tensor, ModelError> {
    let (Some(from), &[rows, cols]) = (tensor.dtype.weight_format(), tensor.shape.as_slice()) else {
        return Err(ModelError::unsupported(format!("merging an adapter into `{}`", tensor.name)));
    };
    let to = if FLOATS.contains(&from) { from } else { WeightFormat::F16 };
    let len = rows * to.row_bytes(cols);
    let name = tensor.name.clone();
    let source = Merged { name, source: tensor.bytes.clone(), from, to, rows, cols, changes };
    let (bytes, dtype) = (Bytes::new(Arc::new(source), 0, len), DType::Weight(to));
    Ok(Tensor { name: tensor.name.clone(), dtype, shape: tensor.shape.clone(), bytes, offset: 0, file: 0 })
}

/// A matrix with its changes.
struct Merged {
    name: String,
    source: Bytes,
    from: WeightFormat,
    to: WeightFormat,
    rows: usize,
    cols: usize,
    changes: Vec<Change>,
}

impl Merged {
    fn row(&self, row: usize, encoded: &mut Vec<u8>) -> io::Result<Vec<u8>> {
        let bytes = self.from.row_bytes(self.cols);
        let mut values = vec![0.0; self.cols];
        let part = row * bytes..(row + 1) * bytes;
        self.from.dequantize(self.source.read_part(part, encoded)?, &mut values);
        for change in &self.changes {
            let Some(own) = row.checked_sub(change.first) else { continue };
            let Some(b) = change.b.get(own * change.rank..(own + 1) * change.rank) else { continue };
            for (b, a) in b.iter().zip(change.a.chunks_exact(self.cols)) {
                values.iter_mut().zip(a).for_each(|(value, a)| *value += b * a);
            }
        }
        let bytes = self.to.quantize(&values).ok_or(io::ErrorKind::Unsupported)?;
        match self.to.is_finite(&bytes) {
            true => Ok(bytes),
            false => {
                let (name, format) = (&self.name, self.to.name());
                let problem = format!("row {row} of `{name}` with the adapter exceeds the range of {format}");
                Err(io::Error::new(io::ErrorKind::InvalidData, problem))
            }
        }
    }
}

impl ByteSource for Merged {
    fn size(&self) -> u64 {
        (self.rows * self.to.row_bytes(self.cols)) as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let mut encoded = Vec::new();
        read_parts(self.to.row_bytes(self.cols), offset as usize, out, |row| self.row(row, &mut encoded))
    }

    fn check_unchanged(&self) -> io::Result<()> {
        self.source.check_unchanged()
    }
}
