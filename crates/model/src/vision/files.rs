//! The files of a tower: numbers and tensors under the names of either kind.

use half::f16;
use paguro_backend::{
    Bounds, Bytes, Linear, LoadError, Matrix, Norm, NormKind, VectorId, WeightFormat, Weights,
};
use paguro_vision::Filter;
use serde_json::{Map, Value};

use super::{TowerFamily, object};
use crate::{arch::Tensors, error::ModelError, gguf::Metadata, rearrange::join, tensor::Tensor};

/// The numbers of a tower.
#[derive(Clone, Copy)]
pub(super) enum Values<'a> {
    /// An mmproj file.
    Gguf(&'a Metadata),
    /// A folder.
    Hf {
        /// `config.json`.
        config: &'a Map<String, Value>,
        /// The image processor's configuration.
        processor: &'a Map<String, Value>,
    },
}

/// A tower's file that is being read.
pub(crate) struct TowerFile<'a, 't> {
    pub(super) values: Values<'a>,
    pub(super) tensors: Tensors<'t>,
    /// Width of the text model's rows.
    pub(super) text_hidden: usize,
}

/// A name in mmproj files, and in folders.
pub(super) type Names = [&'static str; 2];

impl<'a, 't> TowerFile<'a, 't> {
    pub(super) fn new(
        family: &TowerFamily,
        values: Values<'a>,
        tensors: &'t [Tensor],
        text_hidden: usize,
    ) -> Self {
        Self { values, tensors: Tensors::new(family.projector, &WeightFormat::ALL, tensors), text_hidden }
    }

    /// Ends the use of tensors. Those of audio have no effect.
    pub(super) fn finish(self) -> Result<Weights, ModelError> {
        self.tensors.finish(|name| name.starts_with("a.") || name.starts_with("mm.a."))
    }

    pub(super) fn is_hf(&self) -> bool {
        matches!(self.values, Values::Hf { .. })
    }

    /// Returns the name in this kind of file.
    pub(super) fn name(&self, names: Names) -> &'static str {
        names[usize::from(self.is_hf())]
    }

    /// Returns an integer: under `clip.vision.` in mmproj files, of `vision_config` in folders.
    pub(super) fn optional(&self, names: Names) -> Result<Option<usize>, ModelError> {
        let name = self.name(names);
        if name.is_empty() {
            return Ok(None);
        }
        match self.values {
            Values::Gguf(metadata) => {
                Ok(metadata.optional_u32(&format!("clip.vision.{name}"))?.map(|value| value as usize))
            }
            Values::Hf { .. } => match self.vision(name) {
                None | Some(Value::Null) => Ok(None),
                Some(value) => {
                    // Equal numbers for both axes are one.
                    let value = match value.as_array().map(Vec::as_slice) {
                        Some([first, rest @ ..]) if rest.iter().all(|other| other == first) => first,
                        _ => value,
                    };
                    let number = value.as_u64().and_then(|value| u32::try_from(value).ok());
                    let wrong = || {
                        ModelError::Config(format!(
                            "config.json: `vision_config.{name}` is {value}, expected an unsigned 32-bit integer"
                        ))
                    };
                    number.map(|value| Some(value as usize)).ok_or_else(wrong)
                }
            },
        }
    }

    /// Returns an integer with a default of transformers; mmproj files have it.
    pub(super) fn size(&self, names: Names, default: usize) -> Result<usize, ModelError> {
        match (self.optional(names)?, self.is_hf()) {
            (Some(size), _) => Ok(size),
            (None, true) => Ok(default),
            (None, false) => {
                Err(ModelError::Config(format!("the projector's metadata has no `clip.vision.{}`", names[0])))
            }
        }
    }

    /// Returns a value of `vision_config`.
    pub(super) fn vision(&self, key: &str) -> Option<&'a Value> {
        match self.values {
            Values::Gguf(_) => None,
            Values::Hf { config, .. } => object(config, "vision_config")?.get(key),
        }
    }

    /// Returns a value of the image processor's configuration.
    pub(super) fn processor(&self, key: &str) -> Option<&'a Value> {
        match self.values {
            Values::Gguf(_) => None,
            Values::Hf { processor, .. } => processor.get(key).filter(|value| !value.is_null()),
        }
    }

    /// Returns an integer of the image processor's configuration, or of an object there: `size.longest_edge`.
    pub(super) fn processor_size(&self, key: &str, part: &str) -> Option<u64> {
        let value = self.processor(key)?;
        if part.is_empty() { value.as_u64() } else { value.get(part)?.as_u64() }
    }

    /// Returns an integer of mmproj files.
    pub(super) fn key(&self, key: &str) -> Option<u32> {
        match self.values {
            Values::Gguf(metadata) => metadata.u32(&format!("clip.vision.{key}")),
            Values::Hf { .. } => None,
        }
    }

    /// Returns the mean and the standard deviation of each channel.
    pub(super) fn normalization(
        &self,
        default: ([f32; 3], [f32; 3]),
    ) -> Result<([f32; 3], [f32; 3]), ModelError> {
        let three = |key: &str, default: [f32; 3]| -> Result<[f32; 3], ModelError> {
            let found: Option<Vec<f32>> = match self.values {
                Values::Gguf(metadata) => metadata.f32s(&format!("clip.vision.{key}")).map(<[f32]>::to_vec),
                Values::Hf { .. } => self
                    .processor(key)
                    .and_then(Value::as_array)
                    .map(|list| list.iter().filter_map(Value::as_f64).map(|value| value as f32).collect()),
            };
            let Some(found) = found else { return Ok(default) };
            let wrong = || ModelError::Config(format!("the image processor's `{key}` is {found:?}"));
            <[f32; 3]>::try_from(found.as_slice()).map_err(|_| wrong())
        };
        let (mean, std) = (three("image_mean", default.0)?, three("image_std", default.1)?);
        let is_usable = mean.iter().chain(&std).all(|value| value.is_finite()) && !std.contains(&0.0);
        match is_usable {
            true => Ok((mean, std)),
            false => Err(ModelError::Config(format!("the image processor divides by {std:?}"))),
        }
    }

    /// Returns the filter of resampling.
    pub(super) fn filter(&self, default: Filter) -> Result<Filter, ModelError> {
        match self.processor("resample").and_then(Value::as_u64) {
            None => Ok(default),
            Some(1) => Ok(Filter::Lanczos),
            Some(2) => Ok(Filter::Bilinear),
            Some(3) => Ok(Filter::Bicubic),
            Some(other) => Err(ModelError::unsupported(format!("filter {other} of the image processor"))),
        }
    }

    /// Uses a matrix with its bias and its bounds, if it has some.
    pub(super) fn linear(&mut self, name: &str, rows: usize, cols: usize) -> Result<Linear, ModelError> {
        let matrix = self.tensors.require_matrix(&format!("{name}.weight"), rows, cols)?;
        let bias = self.tensors.vector(&format!("{name}.bias"), rows)?;
        let bias = bias.map(|bias| self.tensors.add_vector(bias));
        let bounds = self.bounds(name.strip_suffix(".linear").unwrap_or(name))?;
        Ok(Linear { matrix: self.tensors.add_matrix(matrix), bias, bounds })
    }

    /// Uses a matrix with its bias, both multiplied by a factor for each row.
    pub(super) fn scaled(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
        factors: &str,
    ) -> Result<Linear, ModelError> {
        let named = format!("{factors}.weight");
        let factors = if self.tensors.has(&named) { named.as_str() } else { factors };
        let factors = self.tensors.require_vector(factors, rows)?;
        let weight = format!("{name}.weight");
        let is_f32 = self.tensors.format(&weight) == Some(WeightFormat::F32);
        let mut values = self.dense(&weight, rows, cols)?;
        for (row, factor) in values.chunks_exact_mut(cols).zip(&factors) {
            row.iter_mut().for_each(|value| *value *= factor);
        }
        let bias = self.vector(&format!("{name}.bias"), rows)?.map(|bias| {
            self.map_vector(bias, |bias| {
                bias.iter().zip(&factors).map(|(bias, factor)| bias * factor).collect()
            })
        });
        // Products of numbers of 16 bits or fewer are kept in 16 bits.
        let fits = values.iter().all(|value| f16::from_f32(*value).is_finite());
        if is_f32 || !fits {
            return Ok(self.matrix_of(&weight, rows, cols, &values, bias));
        }
        let bytes: Vec<u8> = values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect();
        let bytes = Bytes::from(bytes);
        let matrix = Matrix { name: weight, format: WeightFormat::F16, parts: 1, rows, cols, bytes };
        Ok(Linear { matrix: self.tensors.add_matrix(matrix), bias, bounds: None })
    }

    /// Uses two matrices without biases as one, the rows of the second one after those of the first.
    pub(super) fn stacked(
        &mut self,
        names: [&str; 2],
        rows: usize,
        cols: usize,
    ) -> Result<Linear, ModelError> {
        let mut whole = |name: &str| self.tensors.require_matrix(&format!("{name}.weight"), rows, cols);
        let (first, second) = (whole(names[0])?, whole(names[1])?);
        if first.format != second.format {
            let what = format!("`{}` and `{}` in different formats", first.name, second.name);
            return Err(ModelError::unsupported(what));
        }
        let bytes = join(vec![first.bytes.clone(), second.bytes]);
        let matrix = self.tensors.add_matrix(Matrix { rows: 2 * rows, bytes, ..first });
        Ok(Linear { matrix, bias: None, bounds: None })
    }

    /// Uses the kernel of a convolution over whole squares of rows, or what is stored as that, as a matrix of joined rows. Its columns are
    /// ordered by element, then by place in the square.
    pub(super) fn squares(
        &mut self,
        name: &str,
        out: usize,
        hidden: usize,
        merge: usize,
    ) -> Result<Linear, ModelError> {
        let (weight, square) = (format!("{name}.weight"), merge * merge);
        let joined = hidden * square;
        let stored = match self.tensors.shape(&weight).map(<[usize]>::len) {
            Some(4) => self.tensors.values(&weight, &[out, hidden, merge, merge])?,
            _ => self.dense(&weight, out, joined)?,
        };
        let mut values = vec![0.0; stored.len()];
        for (to, from) in values.chunks_exact_mut(joined).zip(stored.chunks_exact(joined)) {
            for (at, value) in from.iter().enumerate() {
                to[at % square * hidden + at / square] = *value;
            }
        }
        let bias = self.vector(&format!("{name}.bias"), out)?;
        Ok(self.matrix_of(&weight, out, joined, &values, bias))
    }

    /// Returns the bounds of a matrix: a tensor of one number for each that it has (Gemma 4).
    fn bounds(&mut self, name: &str) -> Result<Option<Bounds>, ModelError> {
        let mut found = false;
        let mut bound = |end: &str, default: f32| -> Result<f32, ModelError> {
            let name = format!("{name}.{end}");
            let Some(shape) = self.tensors.shape(&name).map(<[usize]>::to_vec) else { return Ok(default) };
            found = true;
            match *self.tensors.values(&name, &shape)?.as_slice() {
                [bound] => Ok(bound),
                _ => Err(ModelError::Config(format!("`{name}` is {shape:?}, expected one number"))),
            }
        };
        let bounds = Bounds {
            input_min: bound("input_min", f32::NEG_INFINITY)?,
            input_max: bound("input_max", f32::INFINITY)?,
            output_min: bound("output_min", f32::NEG_INFINITY)?,
            output_max: bound("output_max", f32::INFINITY)?,
        };
        Ok(found.then_some(bounds))
    }

    /// Adds a matrix of these numbers, `[rows, cols]`.
    pub(super) fn matrix_of(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
        values: &[f32],
        bias: Option<VectorId>,
    ) -> Linear {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let matrix = Matrix {
            name: name.to_owned(),
            format: WeightFormat::F32,
            parts: 1,
            rows,
            cols,
            bytes: Bytes::from(bytes),
        };
        Linear { matrix: self.tensors.add_matrix(matrix), bias, bounds: None }
    }

    /// Uses a vector, if it exists.
    pub(super) fn vector(&mut self, name: &str, len: usize) -> Result<Option<VectorId>, ModelError> {
        let vector = self.tensors.vector(name, len)?;
        Ok(vector.map(|vector| self.tensors.add_vector(vector)))
    }

    /// Uses a norm, with its bias if it has one.
    pub(super) fn norm(
        &mut self,
        name: &str,
        width: usize,
        kind: NormKind,
        eps: f32,
    ) -> Result<Norm, ModelError> {
        let weight = self.tensors.require_vector(&format!("{name}.weight"), width)?;
        let weight = self.tensors.add_vector(weight);
        let bias = self.vector(&format!("{name}.bias"), width)?;
        Ok(Norm { kind, weight, bias, eps })
    }

    /// Uses the kernel of a convolution whose windows do not overlap as a matrix: `[out, 3 * patch * patch]`, by channel, row and
    /// column of pixels. Kernels of several frames are added: a still picture is equal frames.
    pub(super) fn patches(&mut self, name: &str, out: usize, patch: usize) -> Result<Linear, ModelError> {
        let (weight, width) = (format!("{name}.weight"), 3 * patch * patch);
        let shape = self.tensors.shape(&weight).map(<[usize]>::to_vec).unwrap_or_default();
        let mut kernel = match *shape.as_slice() {
            [_, _, frames, _, _] => {
                let all = self.tensors.values(&weight, &[out, 3, frames, patch, patch])?;
                let frame = patch * patch;
                let mut sum = vec![0.0; out * width];
                for (plane, frames) in sum.chunks_exact_mut(frame).zip(all.chunks_exact(frames * frame)) {
                    for one in frames.chunks_exact(frame) {
                        plane.iter_mut().zip(one).for_each(|(sum, value)| *sum += value);
                    }
                }
                sum
            }
            [_, _] => self.tensors.values(&weight, &[out, width])?,
            _ => self.tensors.values(&weight, &[out, 3, patch, patch])?,
        };
        let second = format!("{name}.weight.1");
        if self.tensors.has(&second) {
            let values = self.tensors.values(&second, &[out, 3, patch, patch])?;
            kernel.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        let bias = self.vector(&format!("{name}.bias"), out)?;
        Ok(self.matrix_of(&weight, out, width, &kernel, bias))
    }

    /// Uses a matrix in any format as numbers.
    pub(super) fn dense(&mut self, name: &str, rows: usize, cols: usize) -> Result<Vec<f32>, ModelError> {
        let matrix = self.tensors.require_matrix(name, rows, cols)?;
        let unreadable =
            |error: LoadError| ModelError::Unreadable { tensor: name.to_owned(), problem: error.to_string() };
        let bytes = matrix.read().map_err(unreadable)?;
        let mut values = vec![0.0; rows * cols];
        matrix.format.dequantize(&bytes, &mut values);
        match values.iter().position(|value| !value.is_finite()) {
            Some(index) => Err(ModelError::NotFinite { tensor: name.to_owned(), index }),
            None => Ok(values),
        }
    }

    /// Adds a changed copy of a vector.
    pub(super) fn map_vector(&mut self, vector: VectorId, map: impl FnOnce(&[f32]) -> Vec<f32>) -> VectorId {
        let mapped = map(self.tensors.weights.vector(vector));
        self.tensors.add_vector(mapped)
    }

    /// Adds one to each element of a norm that is stored as an offset from one.
    pub(super) fn plus_one(&mut self, vector: VectorId) -> VectorId {
        self.map_vector(vector, |weight| weight.iter().map(|value| value + 1.0).collect())
    }

    /// Returns a norm without weights.
    pub(super) fn plain_norm(&mut self, width: usize, eps: f32) -> Norm {
        let weight = self.tensors.add_vector(vec![1.0; width]);
        Norm { kind: NormKind::Rms, weight, bias: None, eps }
    }

    /// Ignores tensors without effect, by the beginning of their names.
    pub(super) fn ignore(&mut self, beginning: &str) {
        let names: Vec<String> =
            self.tensors.names().filter(|name| name.starts_with(beginning)).map(str::to_owned).collect();
        names.iter().for_each(|name| self.tensors.ignore(name));
    }
}
