//! Writing a whole file: one tensor after the other, with bounded memory.

use std::{
    collections::HashMap,
    fs,
    io::{self, BufWriter},
    ops::Range,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use paguro_backend::WeightFormat;
use paguro_model::{
    gguf::{Contents, TensorInfo, Value, Writer},
    tensor::{DType, Tensor},
};

use crate::{
    Encoder, Importance, Mixture,
    mixture::{Chooser, is_quantized, layer_of},
};

/// Version of the quantized formats (`GGML_QNT_VERSION`).
const QUANTIZATION_VERSION: u32 = 2;

/// Elements that a thread encodes between two writes.
const PORTION: usize = 1 << 19;

/// A file to be written.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// Metadata and tensors of the model.
    pub contents: &'a Contents,
    /// The mixture; `None` keeps the formats of the tensors.
    pub mixture: Option<Mixture>,
    /// Weights of errors.
    pub importance: Option<&'a Importance>,
    /// CPU threads.
    pub threads: usize,
    /// Set by another thread to stop.
    pub stop: &'a AtomicBool,
}

/// Progress of a job.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// The tensor that is being written.
    pub tensor: &'a str,
    /// Elements that are done.
    pub done: u64,
    /// Elements of all tensors.
    pub total: u64,
}

/// The result of a job.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Tensors in the file.
    pub tensors: usize,
    /// Bytes of all tensors in the source.
    pub source_bytes: u64,
    /// Bytes of all tensors as they were written.
    pub bytes: u64,
    /// Elements of all tensors.
    pub elements: u64,
    /// Tensors of each format, in the order in which formats first appear.
    pub formats: Vec<(String, usize)>,
    /// Tensors whose rows do not fit the format of the mixture, with the format that they got.
    pub fallbacks: Vec<(String, WeightFormat)>,
    /// Tensors that were quantized before, which adds to their errors.
    pub requantized: usize,
    /// Quantized tensors for which the importance matrix has no entry.
    pub unweighted: Vec<String>,
}

/// A file that cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuantizeError {
    /// The output cannot be written.
    #[error("cannot write `{}`: {source}", path.display())]
    Write {
        /// The output.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A tensor cannot be read.
    #[error("tensor `{tensor}` cannot be read: {source}")]
    Read {
        /// The tensor.
        tensor: String,
        /// The system's error.
        source: io::Error,
    },
    /// A tensor of a type that cannot be copied.
    #[error("tensor `{tensor}` has type {dtype}, which cannot be written")]
    Type {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: DType,
    },
    /// A row that is damaged, or has values that the format cannot hold.
    #[error("tensor `{tensor}`, row {row}: values that are not finite {place}")]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// The first such row.
        row: usize,
        /// In the source, or in the output.
        place: String,
    },
    /// A mixture that makes no sense without an importance matrix.
    #[error("{mixture} needs an importance matrix (for `{tensor}`, among others)")]
    NeedsImportance {
        /// The mixture.
        mixture: Mixture,
        /// The first tensor that needs it.
        tensor: String,
    },
    /// An importance matrix of another model.
    #[error(
        "the importance matrix has {found} values for `{tensor}`, expected {expected}; it is of another model"
    )]
    ImportanceShape {
        /// The tensor.
        tensor: String,
        /// Values of the importance matrix.
        found: usize,
        /// Values that the tensor needs.
        expected: usize,
    },
    /// [`Job::stop`] was set.
    #[error("interrupted")]
    Interrupted,
}

/// A tensor with the format that it gets.
struct Planned<'a> {
    tensor: &'a Tensor,
    format: Option<WeightFormat>,
    needs_importance: bool,
}

/// Writes a model to `path`. The file appears there when it is complete; until then it is a temporary one beside it.
///
/// # Errors
/// [`QuantizeError`]; nothing is left behind then.
pub fn quantize(
    job: Job<'_>,
    path: &Path,
    mut progress: impl FnMut(Progress<'_>),
) -> Result<Report, QuantizeError> {
    let mut report = Report::default();
    let plan = plan(job, &mut report)?;
    let written = |source| QuantizeError::Write { path: path.to_owned(), source };
    let mut file = partial(path).map_err(written)?;

    let mut metadata = job.contents.metadata.clone();
    if let Some(mixture) = job.mixture {
        metadata.set("general.file_type", Value::U32(mixture.file_type()));
        metadata.set("general.quantization_version", Value::U32(QUANTIZATION_VERSION));
    }
    if let Some(importance) = job.importance {
        metadata.set("quantize.imatrix.entries_count", Value::U32(importance.len() as u32));
        metadata.set("quantize.imatrix.chunks_count", Value::U32(importance.chunks));
        if let Some(dataset) = importance.datasets.last() {
            metadata.set("quantize.imatrix.dataset", Value::String(dataset.clone()));
        }
    }
    let infos: Vec<TensorInfo> = plan.iter().map(Planned::info).collect::<Result<_, _>>()?;
    for info in &infos {
        report.bytes += info.bytes;
    }
    let out = BufWriter::with_capacity(1 << 20, file.as_file_mut());
    let mut writer = Writer::new(out, &metadata, &infos).map_err(written)?;
    let mut done = 0;
    // Some have large tables.
    let mut encoders = HashMap::new();
    for planned in &plan {
        let importance = planned.importance(job, &mut report)?;
        let mut step = |elements: u64, bytes: &[u8]| {
            done += elements;
            progress(Progress { tensor: &planned.tensor.name, done, total: report.elements });
            writer.write(bytes).map_err(written)
        };
        let encoder = planned.target().map(|format| {
            let new = || Encoder::new(format).expect("mixtures consist of formats that have encoders");
            &*encoders.entry(format).or_insert_with(new)
        });
        planned.write(job, encoder, importance.as_deref(), &mut step)?;
        planned.tensor.bytes.check_unchanged().map_err(|source| planned.unreadable(source))?;
    }
    let out = writer.finish().map_err(written)?;
    drop(out);
    file.as_file().sync_all().map_err(written)?;
    file.persist(path).map_err(|error| written(error.error))?;
    Ok(report)
}

/// Creates the temporary file that becomes `path`, in the same folder.
pub(crate) fn partial(path: &Path) -> io::Result<tempfile::NamedTempFile> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    builder.prefix(".paguro-").suffix(".partial");
    #[cfg(unix)]
    {
        // As any new file, and not for the owner alone.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder.tempfile_in(folder)
}

/// Takes portions of a tensor: the number of elements, and their bytes.
type Sink<'a> = dyn FnMut(u64, &[u8]) -> Result<(), QuantizeError> + 'a;

/// Chooses the formats, in the order in which tensors are written: by layer, then by name.
fn plan<'a>(job: Job<'a>, report: &mut Report) -> Result<Vec<Planned<'a>>, QuantizeError> {
    let Contents { metadata, tensors } = job.contents;
    let mut sorted: Vec<&Tensor> = tensors.iter().collect();
    if job.mixture.is_some() {
        sorted.sort_by(|a, b| (layer_of(&a.name), &a.name).cmp(&(layer_of(&b.name), &b.name)));
    }
    let names = || sorted.iter().map(|tensor| tensor.name.as_str());
    let mut chooser = job
        .mixture
        .map(|mixture| (mixture, Chooser::new(mixture, metadata, names(), job.importance.is_some())));
    let mut plan = Vec::with_capacity(sorted.len());
    for tensor in sorted {
        let own = tensor.dtype.weight_format();
        let mut planned = Planned { tensor, format: own, needs_importance: false };
        if let Some((mixture, chooser)) = &mut chooser
            && let Some(own) = own
            && is_quantized(&tensor.name, &tensor.shape)
        {
            let choice = chooser.choose(&tensor.name, &tensor.shape);
            planned.format = Some(choice.format);
            planned.needs_importance = choice.needs_importance;
            if choice.needs_importance && job.importance.is_none() {
                return Err(QuantizeError::NeedsImportance {
                    mixture: *mixture,
                    tensor: tensor.name.clone(),
                });
            }
            if choice.fallback {
                report.fallbacks.push((tensor.name.clone(), choice.format));
            }
            report.requantized += usize::from(own.is_quantized() && own != choice.format);
        } else if own.is_some_and(|own| WeightFormat::from_ggml_type(own.ggml_type()).is_none()) {
            // A format of ours alone.
            planned.format = Some(WeightFormat::F32);
        }
        report.tensors += 1;
        report.elements += tensor.elements();
        report.source_bytes += tensor.bytes.len() as u64;
        let name = planned.format.map_or_else(|| tensor.dtype.to_string(), |format| format.to_string());
        match report.formats.iter_mut().find(|known| known.0 == name) {
            Some(known) => known.1 += 1,
            None => report.formats.push((name, 1)),
        }
        plan.push(planned);
    }
    Ok(plan)
}

impl Planned<'_> {
    fn cols(&self) -> usize {
        self.tensor.shape.last().copied().unwrap_or(1)
    }

    fn rows(&self) -> usize {
        (self.tensor.elements() as usize).checked_div(self.cols()).unwrap_or(0)
    }

    fn info(&self) -> Result<TensorInfo, QuantizeError> {
        let tensor = self.tensor;
        let wrong_type = || QuantizeError::Type { tensor: tensor.name.clone(), dtype: tensor.dtype.clone() };
        let (ggml_type, bytes) = match self.format {
            Some(format) => (format.ggml_type(), (self.rows() * format.row_bytes(self.cols())) as u64),
            None => (tensor.dtype.ggml_type().ok_or_else(wrong_type)?, tensor.bytes.len() as u64),
        };
        Ok(TensorInfo { name: tensor.name.clone(), ggml_type, shape: tensor.shape.clone(), bytes })
    }

    /// Returns the format to encode in; `None` for tensors that are copied.
    fn target(&self) -> Option<WeightFormat> {
        self.format.filter(|&format| self.tensor.dtype.weight_format() != Some(format))
    }

    fn unreadable(&self, source: io::Error) -> QuantizeError {
        QuantizeError::Read { tensor: self.tensor.name.clone(), source }
    }

    /// Weights of the columns, part after part, if the tensor is quantized and there are some.
    fn importance(&self, job: Job<'_>, report: &mut Report) -> Result<Option<Vec<f32>>, QuantizeError> {
        let Some(importance) = job.importance else { return Ok(None) };
        let name = &self.tensor.name;
        if !self.target().is_some_and(WeightFormat::is_quantized) {
            return Ok(None);
        }
        let parts = self.tensor.shape.iter().rev().skip(2).product::<usize>();
        let expected = parts * self.cols();
        match importance.means(name) {
            Some(means) if means.len() == expected => Ok(Some(means)),
            // Embeddings are not multiplied with anything.
            _ if name == "token_embd.weight" => Ok(None),
            Some(means) => {
                Err(QuantizeError::ImportanceShape { tensor: name.clone(), found: means.len(), expected })
            }
            None if self.needs_importance => {
                Err(QuantizeError::ImportanceShape { tensor: name.clone(), found: 0, expected })
            }
            None => {
                report.unweighted.push(name.clone());
                Ok(None)
            }
        }
    }

    /// Writes the tensor in portions, each with the number of its elements.
    fn write(
        &self,
        job: Job<'_>,
        encoder: Option<&Encoder>,
        importance: Option<&[f32]>,
        step: &mut Sink<'_>,
    ) -> Result<(), QuantizeError> {
        let (tensor, cols, rows) = (self.tensor, self.cols(), self.rows());
        let threads = job.threads.max(1);
        let Some(source) = tensor.dtype.weight_format() else {
            // Bytes of a type that only has to be copied.
            let mut buffer = Vec::new();
            let size = tensor.bytes.len();
            for start in (0..size).step_by(4 * PORTION) {
                let part = start..size.min(start + 4 * PORTION);
                let bytes = tensor.bytes.read_part(part, &mut buffer);
                step(0, bytes.map_err(|source| self.unreadable(source))?)?;
            }
            return step(tensor.elements(), &[]);
        };
        let portion = (PORTION / cols.max(1)).max(1);
        let stride = source.row_bytes(cols);
        let (mut buffer, mut outputs) = (Vec::new(), vec![Vec::new(); threads]);
        for first in (0..rows).step_by(portion * threads) {
            if job.stop.load(Ordering::Relaxed) {
                return Err(QuantizeError::Interrupted);
            }
            let last = rows.min(first + portion * threads);
            let bytes = tensor.bytes.read_part(first * stride..last * stride, &mut buffer);
            let bytes = bytes.map_err(|source| self.unreadable(source))?;
            let share = (last - first).div_ceil(threads);
            let ranges = (0..threads).map(|thread| {
                let start = (first + thread * share).min(last);
                start..(start + share).min(last)
            });
            let encode = |rows: Range<usize>, out: &mut Vec<u8>| {
                out.clear();
                let bytes = &bytes[(rows.start - first) * stride..(rows.end - first) * stride];
                self.encode(source, encoder, bytes, rows, importance, out)
            };
            thread::scope(|scope| {
                let encode = &encode;
                let threads: Vec<_> = ranges
                    .zip(&mut outputs)
                    .map(|(rows, out)| scope.spawn(move || encode(rows, out)))
                    .collect();
                threads.into_iter().try_for_each(|thread| thread.join().expect("encoders do not panic"))
            })?;
            for (index, out) in outputs.iter().enumerate() {
                let elements = if index == 0 { (last - first) * cols } else { 0 };
                step(elements as u64, out)?;
            }
        }
        Ok(())
    }

    /// Encodes rows, whose bytes are in the format of the source; without an encoder they are copied.
    fn encode(
        &self,
        source: WeightFormat,
        encoder: Option<&Encoder>,
        bytes: &[u8],
        rows: Range<usize>,
        importance: Option<&[f32]>,
        out: &mut Vec<u8>,
    ) -> Result<(), QuantizeError> {
        let cols = self.cols();
        let not_finite = |row: usize, place: String| {
            Err(QuantizeError::NotFinite { tensor: self.tensor.name.clone(), row, place })
        };
        let rows_of_part = self.tensor.shape.iter().rev().nth(1).copied().unwrap_or(1);
        let mut values = vec![0.0; cols];
        for (row, bytes) in rows.zip(bytes.chunks_exact(source.row_bytes(cols).max(1))) {
            if !source.is_finite(bytes) {
                return not_finite(row, "in the source; the file is damaged".to_owned());
            }
            let Some(encoder) = encoder else {
                out.extend(bytes);
                continue;
            };
            source.dequantize(bytes, &mut values);
            let importance = importance.map(|importance| &importance[row / rows_of_part * cols..][..cols]);
            let start = out.len();
            encoder.encode(&values, importance, out);
            if !encoder.format().is_finite(&out[start..]) {
                let target = encoder.format();
                return not_finite(row, format!("in {target}; take BF16 or F32 for this model"));
            }
        }
        Ok(())
    }
}
