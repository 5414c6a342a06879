//! Importance matrices: the mean squares of what each matrix of a model multiplies, over some text.
//!
//! An input that is large on average makes errors of its weights costly, so encoders weigh errors with these means. Files are those
//! of `llama-imatrix`: GGUF with sums and counts for each matrix, or the older `.dat` files.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use paguro_backend::WeightFormat;
use paguro_model::{
    gguf::{Array, Gguf, GgufError, Metadata, TensorInfo, Value, Writer},
    tensor::{DType, Tensor},
};

use crate::write::partial;

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";
const DATASETS: &str = "imatrix.datasets";
const CHUNKS: &str = "imatrix.chunk_count";
const CHUNK_SIZE: &str = "imatrix.chunk_size";

/// An importance matrix.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Importance {
    /// By the name of the matrix.
    entries: BTreeMap<String, Entry>,
    /// Names of the texts.
    pub datasets: Vec<String>,
    /// Number of pieces of text that were read.
    pub chunks: u32,
    /// Tokens of each.
    pub chunk_size: u32,
}

/// Sums of squares of the inputs of one matrix.
#[derive(Clone, Debug, Default, PartialEq)]
struct Entry {
    /// `[parts, cols]`; a stack of experts has a part for each.
    sums: Vec<f32>,
    /// Rows that were added to each part.
    counts: Vec<f32>,
}

/// A file that is no importance matrix, or cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportanceError {
    /// The system's error.
    #[error("`{}`: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// A GGUF file that cannot be read.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Content that is no importance matrix.
    #[error("`{}` is not an importance matrix: {problem}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The contradiction.
        problem: String,
    },
}

impl Importance {
    /// Returns an empty one, for pieces of text of `chunk_size` tokens.
    pub fn new(chunk_size: u32) -> Self {
        Self { chunk_size, ..Self::default() }
    }

    /// Reads a file, in GGUF or in the older format.
    ///
    /// # Errors
    /// [`ImportanceError`], with the file.
    pub fn read(path: &Path) -> Result<Self, ImportanceError> {
        let failed = |source| ImportanceError::Io { path: path.to_owned(), source };
        let content = |problem| ImportanceError::Content { path: path.to_owned(), problem };
        let mut first = [0; 4];
        io::Read::read_exact(&mut fs::File::open(path).map_err(failed)?, &mut first).map_err(failed)?;
        let importance = if &first == b"GGUF" {
            from_gguf(&Gguf::open(path)?).map_err(content)?
        } else {
            from_old(&fs::read(path).map_err(failed)?).map_err(content)?
        };
        for (name, Entry { sums, counts }) in &importance.entries {
            let valid = |x: &f32| x.is_finite() && *x >= 0.0;
            if counts.is_empty() || !sums.len().is_multiple_of(counts.len()) {
                return Err(content(format!("`{name}` has {} sums and {} counts", sums.len(), counts.len())));
            }
            if !sums.iter().chain(counts).all(valid) {
                return Err(content(format!("`{name}` has sums or counts that are negative or not finite")));
            }
        }
        match importance.entries.is_empty() {
            true => Err(content("it has no entries".to_owned())),
            false => Ok(importance),
        }
    }

    /// Writes a GGUF file, which appears under its name when it is complete.
    ///
    /// # Errors
    /// [`ImportanceError::Io`]; nothing is left behind then.
    pub fn save(&self, path: &Path) -> Result<(), ImportanceError> {
        let failed = |source| ImportanceError::Io { path: path.to_owned(), source };
        let mut file = partial(path).map_err(failed)?;
        self.write(BufWriter::new(file.as_file_mut())).map_err(failed)?;
        file.as_file().sync_all().map_err(failed)?;
        file.persist(path).map(drop).map_err(|error| failed(error.error))
    }

    /// Writes the content of a GGUF file.
    ///
    /// # Errors
    /// The system's error.
    pub fn write(&self, out: impl Write) -> io::Result<()> {
        let mut metadata = Metadata::default();
        metadata.set("general.type", Value::String("imatrix".to_owned()));
        metadata.set(DATASETS, Value::Array(Array::Strings(self.datasets.clone())));
        metadata.set(CHUNKS, Value::U32(self.chunks));
        metadata.set(CHUNK_SIZE, Value::U32(self.chunk_size));
        let mut infos = Vec::new();
        for (name, entry) in &self.entries {
            let parts = entry.counts.len();
            for (suffix, values) in [(SUMS, &entry.sums), (COUNTS, &entry.counts)] {
                infos.push(TensorInfo {
                    name: format!("{name}{suffix}"),
                    ggml_type: WeightFormat::F32.ggml_type(),
                    shape: vec![parts, values.len() / parts],
                    bytes: 4 * values.len() as u64,
                });
            }
        }
        let mut writer = Writer::new(out, &metadata, &infos)?;
        for entry in self.entries.values() {
            for values in [&entry.sums, &entry.counts] {
                let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                writer.write(&bytes)?;
            }
        }
        writer.finish().map(drop)
    }

    /// Adds sums of squares of the inputs of a matrix: `sums` is `[parts, cols]`, `counts` has the rows of each part.
    ///
    /// # Errors
    /// The reason, if the matrix had another shape before.
    pub fn add(&mut self, name: &str, sums: &[f32], counts: &[f32]) -> Result<(), String> {
        let empty = || Entry { sums: vec![0.0; sums.len()], counts: vec![0.0; counts.len()] };
        let entry = self.entries.entry(name.to_owned()).or_insert_with(empty);
        let shape = |sums: &[f32], counts: &[f32]| format!("{} sums and {} counts", sums.len(), counts.len());
        if (entry.sums.len(), entry.counts.len()) != (sums.len(), counts.len()) {
            let (one, other) = (shape(&entry.sums, &entry.counts), shape(sums, counts));
            return Err(format!("`{name}` has {one} in one and {other} in another"));
        }
        for (totals, added) in [(&mut entry.sums, sums), (&mut entry.counts, counts)] {
            totals.iter_mut().zip(added).for_each(|(total, added)| *total += added);
        }
        Ok(())
    }

    /// Adds another importance matrix of the same model. One in the older format counts pieces of text, which have as many tokens
    /// as those of `self`.
    ///
    /// # Errors
    /// The reason, if it is of another model.
    pub fn merge(&mut self, other: &Self) -> Result<(), String> {
        let scale = if other.chunk_size == 0 { self.chunk_size as f32 } else { 1.0 };
        let scaled = |values: &[f32]| values.iter().map(|value| value * scale).collect::<Vec<_>>();
        for (name, Entry { sums, counts }) in &other.entries {
            self.add(name, &scaled(sums), &scaled(counts))?;
        }
        self.datasets.extend(other.datasets.iter().cloned());
        Ok(())
    }

    /// Matrices of which some parts have no inputs, with the share that has some.
    pub fn partial(&self) -> impl Iterator<Item = (&str, f32)> {
        self.entries.iter().filter_map(|(name, Entry { counts, .. })| {
            let known = counts.iter().filter(|&&count| count > 0.0).count();
            (known < counts.len()).then(|| (name.as_str(), known as f32 / counts.len() as f32))
        })
    }

    /// Returns the largest number of rows of a part.
    pub fn most_rows(&self) -> f32 {
        self.entries.values().flat_map(|entry| &entry.counts).copied().fold(0.0, f32::max)
    }

    /// Returns the number of matrices.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True without matrices.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Mean squares of the inputs of a matrix, part after part. Parts without any input have ones.
    pub fn means(&self, name: &str) -> Option<Vec<f32>> {
        let Entry { sums, counts } = self.entries.get(name)?;
        let mean = |(sums, &count): (&[f32], &f32)| {
            sums.iter().map(move |sum| if count > 0.0 { sum / count } else { 1.0 }).collect::<Vec<_>>()
        };
        Some(sums.chunks((sums.len() / counts.len()).max(1)).zip(counts).flat_map(mean).collect())
    }
}

fn from_gguf(gguf: &Gguf) -> Result<Importance, String> {
    let mut importance = Importance {
        datasets: gguf.metadata.strings(DATASETS).unwrap_or_default().to_vec(),
        chunks: gguf.metadata.u32(CHUNKS).unwrap_or(0),
        chunk_size: gguf.metadata.u32(CHUNK_SIZE).unwrap_or(0),
        ..Importance::default()
    };
    for tensor in &gguf.tensors {
        if let Some(name) = tensor.name.strip_suffix(SUMS) {
            importance.entries.entry(name.to_owned()).or_default().sums = floats(tensor)?;
        } else if let Some(name) = tensor.name.strip_suffix(COUNTS) {
            importance.entries.entry(name.to_owned()).or_default().counts = floats(tensor)?;
        }
    }
    Ok(importance)
}

fn floats(tensor: &Tensor) -> Result<Vec<f32>, String> {
    if tensor.dtype != DType::Weight(WeightFormat::F32) {
        return Err(format!("`{}` is {}, expected F32", tensor.name, tensor.dtype));
    }
    let bytes = tensor.bytes.read().map_err(|error| format!("`{}`: {error}", tensor.name))?;
    Ok(bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect())
}

/// Reads the older format: a count of entries; for each the name, a number of calls and mean squares times that number.
fn from_old(bytes: &[u8]) -> Result<Importance, String> {
    let mut rest = bytes;
    let mut take = |count: usize| {
        let (first, others) = rest.split_at_checked(count).ok_or("it ends early")?;
        rest = others;
        Ok::<_, String>(first)
    };
    fn length(bytes: &[u8]) -> Result<usize, String> {
        let number = i32::from_le_bytes(bytes.try_into().map_err(|_| "it ends early")?);
        usize::try_from(number).map_err(|_| format!("a length of {number}"))
    }
    let mut importance = Importance::default();
    for _ in 0..length(take(4)?)? {
        let size = length(take(4)?)?;
        let name = String::from_utf8(take(size)?.to_vec()).map_err(|_| "a name that is not UTF-8")?;
        let calls = length(take(4)?)?;
        let count = length(take(4)?)?;
        let values = take(count.saturating_mul(4))?.as_chunks().0;
        let sums = values.iter().map(|&value| f32::from_le_bytes(value)).collect();
        importance.entries.insert(name, Entry { sums, counts: vec![calls as f32] });
    }
    // The rest may be missing.
    if let Ok(chunks) = take(4).and_then(length) {
        importance.chunks = chunks as u32;
        let name = take(4).and_then(length).and_then(&mut take);
        importance.datasets.extend(name.ok().map(|name| String::from_utf8_lossy(name).into_owned()));
    }
    Ok(importance)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut importance = Importance { chunks: 3, chunk_size: 512, ..Importance::default() };
        importance.datasets.push("text.txt".into());
        importance.add("blk.0.attn_q.weight", &[1.0, 4.0], &[2.0]).unwrap();
        importance.add("blk.0.ffn_up_exps.weight", &[0.0, 0.0, 9.0, 3.0], &[0.0, 3.0]).unwrap();
        assert!(importance.add("blk.0.attn_q.weight", &[1.0, 4.0, 9.0], &[2.0]).is_err());
        let path = folder.path().join("importance.gguf");
        importance.save(&path).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        let read = Importance::read(&path).unwrap();
        assert_eq!(read, importance);
        assert_eq!(read.means("blk.0.attn_q.weight"), Some(vec![0.5, 2.0]));
        // The first expert was never chosen.
        assert_eq!(read.means("blk.0.ffn_up_exps.weight"), Some(vec![1.0, 1.0, 3.0, 1.0]));
        assert_eq!(read.means("blk.1.attn_q.weight"), None);
        assert_eq!(read.partial().collect::<Vec<_>>(), [("blk.0.ffn_up_exps.weight", 0.5)]);
        // Twice the rows have the same means.
        let mut twice = read.clone();
        twice.merge(&read).unwrap();
        assert_eq!((twice.means("blk.0.attn_q.weight"), twice.most_rows()), (Some(vec![0.5, 2.0]), 6.0));
        assert_eq!(twice.datasets, ["text.txt", "text.txt"]);
        // A file of the older format counts pieces of text.
        let mut old = Importance::default();
        old.add("blk.0.attn_q.weight", &[1.0, 1.0], &[2.0]).unwrap();
        twice.merge(&old).unwrap();
        assert_eq!(twice.most_rows(), 4.0 + 2.0 * 512.0);
    }

    #[test]
    fn the_older_format_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("importance.dat");
        let mut bytes = Vec::new();
        let numbers =
            |bytes: &mut Vec<u8>, numbers: &[i32]| bytes.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
        numbers(&mut bytes, &[1, 2]);
        bytes.extend(b"ab");
        numbers(&mut bytes, &[4, 2]);
        bytes.extend([8.0f32, 2.0].iter().flat_map(|x| x.to_le_bytes()));
        numbers(&mut bytes, &[4, 1]);
        bytes.extend(b"t");
        fs::write(&path, &bytes).unwrap();
        let read = Importance::read(&path).unwrap();
        assert_eq!((read.means("ab"), read.chunks), (Some(vec![2.0, 0.5]), 4));
        assert_eq!(read.datasets, ["t"]);
        // Anything shorter is refused or lacks only the end.
        for length in 4..bytes.len() - 9 {
            fs::write(&path, &bytes[..length]).unwrap();
            assert!(Importance::read(&path).is_err(), "{length}");
        }
    }
}
