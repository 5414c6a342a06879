//! Taking tensors out of a file by name, with the shapes that the architecture expects.

use std::collections::HashMap;

use paguro_backend::{Bytes, Matrix, MatrixId, TableId, VectorId, WeightFormat, Weights};

use crate::{error::ModelError, rearrange::scale_nvfp4, tensor::Tensor};

/// The formats of vectors; and of matrices, where the file is safetensors.
pub(crate) const FLOATS: [WeightFormat; 3] = [WeightFormat::F32, WeightFormat::F16, WeightFormat::BF16];

/// The tensors of a file that have not been used yet, and the weights that the others became.
pub(crate) struct Tensors<'a> {
    architecture: &'static str,
    /// Supported formats of matrices.
    formats: &'static [WeightFormat],
    rest: HashMap<&'a str, &'a Tensor>,
    pub(crate) weights: Weights,
}

impl<'a> Tensors<'a> {
    pub(crate) fn new(
        architecture: &'static str,
        formats: &'static [WeightFormat],
        tensors: &'a [Tensor],
    ) -> Self {
        let rest = tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        Self { architecture, formats, rest, weights: Weights::default() }
    }

    /// Returns the number of tensors not used yet.
    pub(crate) fn len(&self) -> usize {
        self.rest.len()
    }

    /// Returns the names of tensors not used yet.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.rest.keys().copied()
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.rest.contains_key(name)
    }

    /// Returns the number of rows of the matrix `name`, without using it.
    pub(crate) fn rows(&self, name: &str) -> Option<usize> {
        self.rest.get(name).and_then(|tensor| tensor.shape.first().copied())
    }

    /// Returns the format of the matrix `name`, without using it.
    pub(crate) fn format(&self, name: &str) -> Option<WeightFormat> {
        self.rest.get(name).and_then(|tensor| tensor.dtype.weight_format())
    }

    /// Uses the matrix `name`, `[rows, cols]`, if it exists.
    pub(crate) fn matrix(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Option<Matrix>, ModelError> {
        self.stack_of(name, &[rows, cols], 1, rows, cols)
    }

    /// Uses the stack of matrices `name`, `[parts, rows, cols]`, if it exists.
    pub(crate) fn stack(
        &mut self,
        name: &str,
        parts: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Option<Matrix>, ModelError> {
        self.stack_of(name, &[parts, rows, cols], parts, rows, cols)
    }

    fn stack_of(
        &mut self,
        name: &str,
        shape: &[usize],
        parts: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Option<Matrix>, ModelError> {
        let Some(tensor) = self.take(name, shape)? else { return Ok(None) };
        let format = match tensor.dtype.weight_format() {
            Some(format) if self.formats.contains(&format) => format,
            _ => return Err(wrong_type(tensor, self.formats)),
        };
        let matrix = Matrix { name: name.to_owned(), format, parts, rows, cols, bytes: tensor.bytes.clone() };
        if format != WeightFormat::NVFP4 {
            return Ok(Some(matrix));
        }
        // Scales of whole matrices, and scales of activations, which are not quantized that way here.
        let base = name.strip_suffix("weight").unwrap_or(name);
        self.ignore(&format!("{base}input_scale"));
        let Some(scales) = self.vector(&format!("{base}scale"), parts)? else { return Ok(Some(matrix)) };
        let bytes = scale_nvfp4(&matrix, scales);
        Ok(Some(Matrix { format: WeightFormat::NVFP4_SCALED, bytes, ..matrix }))
    }

    /// Returns the shape of the tensor `name`, if it exists, without using it.
    pub(crate) fn shape(&self, name: &str) -> Option<&'a [usize]> {
        self.rest.get(name).map(|tensor| tensor.shape.as_slice())
    }

    /// Uses the bytes `name`, of this shape.
    pub(crate) fn raw(&mut self, name: &str, shape: &[usize]) -> Result<Bytes, ModelError> {
        let tensor = self.take(name, shape)?.ok_or_else(|| self.missing(name, shape))?;
        let elements: usize = shape.iter().product();
        match tensor.bytes.len() == elements {
            true => Ok(tensor.bytes.clone()),
            false => Err(wrong_type(tensor, &[])),
        }
    }

    /// Uses the vectors `name`, `[parts, len]`, if they exist, and reads them one after the other.
    pub(crate) fn vectors(
        &mut self,
        name: &str,
        parts: usize,
        len: usize,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(tensor) = self.take(name, &[parts, len])? else { return Ok(None) };
        read_vector(tensor).map(Some)
    }

    /// Uses the numbers `name`, of this shape, which have to be there, and reads them.
    pub(crate) fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let tensor = self.take(name, shape)?.ok_or_else(|| self.missing(name, shape))?;
        read_vector(tensor)
    }

    /// Uses the vector `name`, `[len]`, if it exists, and reads it.
    pub(crate) fn vector(&mut self, name: &str, len: usize) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(tensor) = self.take(name, &[len])? else { return Ok(None) };
        read_vector(tensor).map(Some)
    }

    /// Uses a required matrix, as [`Tensors::matrix`].
    pub(crate) fn require_matrix(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix, ModelError> {
        self.matrix(name, rows, cols)?.ok_or_else(|| self.missing(name, &[rows, cols]))
    }

    /// Uses a required vector, as [`Tensors::vector`].
    pub(crate) fn require_vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        self.vector(name, len)?.ok_or_else(|| self.missing(name, &[len]))
    }

    /// Adds a matrix to the weights.
    pub(crate) fn add_matrix(&mut self, matrix: Matrix) -> MatrixId {
        self.weights.matrices.push(matrix);
        MatrixId(self.weights.matrices.len() as u32 - 1)
    }

    /// Adds a table to the weights.
    pub(crate) fn add_table(&mut self, table: Matrix) -> TableId {
        self.weights.tables.push(table);
        TableId(self.weights.tables.len() as u32 - 1)
    }

    /// Ignores a tensor without effect, if it exists.
    pub(crate) fn ignore(&mut self, name: &str) {
        self.rest.remove(name);
    }

    /// Adds a vector to the weights.
    pub(crate) fn add_vector(&mut self, vector: Vec<f32>) -> VectorId {
        self.weights.vectors.push(vector);
        VectorId(self.weights.vectors.len() as u32 - 1)
    }

    /// Ends the use of tensors. Unused ones must be `harmless`.
    pub(crate) fn finish(self, harmless: impl Fn(&str) -> bool) -> Result<Weights, ModelError> {
        let mut unknown: Vec<&str> = self.rest.into_keys().filter(|name| !harmless(name)).collect();
        if unknown.is_empty() {
            return Ok(self.weights);
        }
        const SHOWN: usize = 4;
        unknown.sort_unstable();
        let mut names = unknown[..unknown.len().min(SHOWN)].join("`, `");
        names = format!("`{names}`{}", if unknown.len() > SHOWN { ", ..." } else { "" });
        Err(ModelError::UnknownTensors { count: unknown.len(), architecture: self.architecture, names })
    }

    pub(crate) fn missing(&self, name: &str, shape: &[usize]) -> ModelError {
        let (tensor, architecture) = (name.to_owned(), self.architecture);
        ModelError::MissingTensor { tensor, architecture, shape: shape.to_vec() }
    }

    fn take(&mut self, name: &str, shape: &[usize]) -> Result<Option<&'a Tensor>, ModelError> {
        let Some(tensor) = self.rest.remove(name) else { return Ok(None) };
        // Outer dimensions of one change nothing: some writers store vectors as matrices of one row.
        let outer = tensor.shape.len().saturating_sub(shape.len());
        let same = tensor.shape[outer..] == *shape && tensor.shape[..outer].iter().all(|&dim| dim == 1);
        if !same {
            let (found, expected) = (tensor.shape.clone(), shape.to_vec());
            return Err(ModelError::Shape { tensor: name.to_owned(), found, expected });
        }
        Ok(Some(tensor))
    }
}

fn read_vector(tensor: &Tensor) -> Result<Vec<f32>, ModelError> {
    match tensor.dtype.weight_format() {
        Some(format) if FLOATS.contains(&format) => {
            let bytes = tensor.bytes.read().map_err(|error| unreadable(tensor, &error))?;
            let mut values = vec![0.0; bytes.len() / format.block_bytes()];
            format.dequantize(&bytes, &mut values);
            match values.iter().position(|value| !value.is_finite()) {
                Some(index) => Err(ModelError::NotFinite { tensor: tensor.name.clone(), index }),
                None => Ok(values),
            }
        }
        _ => Err(wrong_type(tensor, &FLOATS)),
    }
}

fn unreadable(tensor: &Tensor, error: &std::io::Error) -> ModelError {
    ModelError::Unreadable { tensor: tensor.name.clone(), problem: error.to_string() }
}

fn wrong_type(tensor: &Tensor, supported: &[WeightFormat]) -> ModelError {
    let supported: Vec<_> = supported.iter().map(|format| format.name()).collect();
    ModelError::TensorType {
        tensor: tensor.name.clone(),
        dtype: tensor.dtype.to_string(),
        supported: supported.join(", "),
    }
}
