//! GGUF, the file format of llama.cpp, versions 2 and 3, in one file or split into several.
//!
//! The format (docs/gguf.md of the ggml project): magic, version, counts, key/values, tensor infos, padding, data.
//! Files are untrusted: every length is checked against the remaining bytes before memory is allocated for it, so
//! memory use is bounded by a small multiple of the file's header.

mod cursor;
mod metadata;
mod reader;
mod split;
mod types;
mod write;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use paguro_backend::ByteSource;

pub use metadata::{Array, Metadata, MetadataError, Value};
pub(crate) use types::number_of_type;
pub use write::{TensorInfo, Writer};

use crate::{file::WeightFile, tensor::Tensor};

/// Metadata and tensors of a model as a GGUF file has them, wherever they come from.
#[derive(Clone, Debug, Default)]
pub struct Contents {
    /// The key/values.
    pub metadata: Metadata,
    /// All tensors.
    pub tensors: Vec<Tensor>,
}

/// A GGUF model: one file, or all files of a split one.
#[derive(Debug)]
pub struct Gguf {
    /// Version of the format: 2 or 3.
    pub version: u32,
    /// The key/values, of the first file where there are several.
    pub metadata: Metadata,
    /// All tensors, in the order of the files.
    pub tensors: Vec<Tensor>,
    /// The files; empty for bytes in memory.
    pub files: Vec<PathBuf>,
    /// Bytes of all files together.
    pub bytes: u64,
}

impl Gguf {
    /// Opens the file at `path`, and if it is one of a split model (`-00001-of-0000N.gguf`), all others: any of
    /// them names the model.
    ///
    /// # Errors
    /// [`GgufError`], naming the file it is about.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let part = read_file(path)?;
        match split::count(&part.metadata).map_err(|error| error.of(path))? {
            count if count > 1 => split::open(path, part, count),
            _ => Ok(Self::single(part, vec![path.to_owned()])),
        }
    }

    /// Reads a complete model from memory. A single file of a split model is refused.
    ///
    /// # Errors
    /// [`GgufError`].
    pub fn from_bytes(source: Arc<dyn ByteSource>) -> Result<Self, GgufError> {
        let part = reader::read(&source)?;
        match split::count(&part.metadata)? {
            count if count > 1 => Err(GgufError::SplitInMemory { count }),
            _ => Ok(Self::single(part, Vec::new())),
        }
    }

    /// Returns the common name of the file's mix of formats, if the file has one: `Q4_K_M`.
    pub fn file_type(&self) -> Option<&'static str> {
        types::file_type(self.metadata.u32("general.file_type")?)
    }

    fn single(part: reader::Part, files: Vec<PathBuf>) -> Self {
        let reader::Part { version, metadata, tensors, bytes } = part;
        Self { version, metadata, tensors, files, bytes }
    }
}

/// Returns the `general.file_type` of files that people call `name`, such as `Q4_K_M`.
pub fn file_type_number(name: &str) -> Option<u32> {
    (0..=types::LAST_FILE_TYPE).find(|&number| types::file_type(number) == Some(name))
}

fn read_file(path: &Path) -> Result<reader::Part, GgufError> {
    let source = WeightFile::open(path).map_err(|source| GgufError::Io { path: path.to_owned(), source })?;
    reader::read(&source).map_err(|error| error.of(path))
}

/// Reason for which a GGUF file cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file cannot be opened.
    #[error("cannot read `{}`: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Error of the system.
        source: std::io::Error,
    },
    /// The header cannot be read.
    #[error("the header cannot be read: {0}")]
    Read(std::io::Error),
    /// A header that no model has.
    #[error(
        "{what} at byte {at} needs {needed} bytes, but the headers of models end before byte {limit}; \
         the file is corrupt"
    )]
    LargeHeader {
        /// The part of the file that was being read.
        what: &'static str,
        /// Offset.
        at: u64,
        /// Bytes of the element.
        needed: u64,
        /// Maximum size of a header.
        limit: u64,
    },
    /// Some other error, with the file it is about.
    #[error("`{}`: {error}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// Error of the file.
        error: Box<GgufError>,
    },
    /// Another kind of file.
    #[error("not a GGUF file: it begins with {found}{hint}")]
    NotGguf {
        /// The first bytes, readable.
        found: String,
        /// Detected format, if recognised.
        hint: &'static str,
    },
    /// Written for machines of the other byte order.
    #[error("big-endian GGUF files are not supported; convert the model again without `--bigendian`")]
    BigEndian,
    /// A version of the format that is not read.
    #[error(
        "GGUF version {0} is not supported (supported: 2 and 3); convert the model again with a current tool"
    )]
    Version(u32),
    /// The header ends early, or a length in it is larger than the file.
    #[error(
        "truncated or corrupt GGUF file: {what} at byte {at} needs {needed} bytes, but only {left} are left; \
         is the download complete?"
    )]
    Truncated {
        /// Name of the element.
        what: &'static str,
        /// Offset.
        at: u64,
        /// Bytes of the element.
        needed: u64,
        /// Remaining bytes of the file.
        left: u64,
    },
    /// The data ends early.
    #[error(
        "truncated GGUF file: it has {actual} bytes, but tensor `{tensor}` ends at byte {expected}; \
         is the download complete?"
    )]
    MissingData {
        /// The tensor that reaches farthest.
        tensor: String,
        /// Bytes that the file should have at least.
        expected: u64,
        /// Bytes it has.
        actual: u64,
    },
    /// A key/value of a type that does not exist, or an array of arrays.
    #[error("metadata `{key}` has value type {number}, which is not supported")]
    ValueType {
        /// The key.
        key: String,
        /// The type's number.
        number: u32,
    },
    /// A name that is not text.
    #[error("{what} at byte {at} is not UTF-8")]
    NotText {
        /// Kind of the named object.
        what: &'static str,
        /// Offset.
        at: u64,
    },
    /// Two values under one key.
    #[error("metadata `{key}` occurs twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// Two tensors with one name.
    #[error("tensor `{tensor}` occurs twice")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// The data alignment is not a power of two.
    #[error("`general.alignment` is {0}, but has to be a power of two")]
    Alignment(u32),
    /// A tensor with an impossible description.
    #[error("tensor `{tensor}` is corrupt: {problem}")]
    Tensor {
        /// The tensor.
        tensor: String,
        /// The problem.
        problem: String,
    },
    /// A key/value that is needed to read the file.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// One file of a split model without the others.
    #[error("this is one of {count} files of a split model; open it by path, beside the others")]
    SplitInMemory {
        /// Number of files.
        count: u32,
    },
    /// A file of a split model without the name of one.
    #[error(
        "`{}` is one of {count} files of a split model, so its name has to end in `-00001-of-{count:05}.gguf` \
         (with its own number)", path.display()
    )]
    SplitName {
        /// The file.
        path: PathBuf,
        /// Number of files.
        count: u32,
    },
    /// More files than any split model has.
    #[error("`split.count` is {count}, but a split model has at most {limit} files")]
    SplitCount {
        /// Number of files that the model claims.
        count: u32,
        /// Largest number of files that are opened.
        limit: u32,
    },
    /// A file of a split model is missing.
    #[error("the model is split into {count} files, and `{}` is missing", path.display())]
    SplitMissing {
        /// The missing file.
        path: PathBuf,
        /// Number of files.
        count: u32,
    },
    /// A file of a split model that does not match the others.
    #[error("the files of a split model do not belong together: {problem}")]
    SplitMismatch {
        /// The difference.
        problem: String,
    },
}

impl GgufError {
    /// Adds the path to an error that does not name its file.
    fn of(self, path: &Path) -> Self {
        match self {
            Self::Io { .. } | Self::InFile { .. } | Self::SplitName { .. } | Self::SplitMissing { .. } => {
                self
            }
            error => Self::InFile { path: path.to_owned(), error: Box::new(error) },
        }
    }
}
