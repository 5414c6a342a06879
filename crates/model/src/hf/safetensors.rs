//! One safetensors file. The crate of that name parses and checks its header; tensors stay where they are mapped.

use std::{borrow::Cow, path::Path, sync::Arc};

use paguro_backend::{ByteOwner, Bytes, WeightFormat};
use safetensors::{Dtype, SafeTensors};

use crate::{
    error::ModelError,
    mapped::MappedFile,
    tensor::{DType, Tensor},
};

/// The length of the header, before it.
const PREFIX: usize = 8;

/// Maps the file, adds its tensors to `tensors` as those of file number `file`, and returns how many bytes it has.
pub(super) fn open(path: &Path, file: usize, tensors: &mut Vec<Tensor>) -> Result<u64, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let owner = MappedFile::open(path).map_err(io)?;
    let found =
        read(&owner, file).map_err(|problem| ModelError::BadFile { path: path.to_owned(), problem })?;
    tensors.extend(found);
    Ok(owner.bytes().len() as u64)
}

/// The tensors of a file, in their order in it; or what is wrong with it, in words.
pub(crate) fn read(owner: &Arc<dyn ByteOwner>, file: usize) -> Result<Vec<Tensor>, String> {
    let bytes = owner.bytes();
    let (header, metadata) = SafeTensors::read_metadata(bytes).map_err(|error| explain(&error, bytes))?;
    let data = PREFIX + header;
    let tensor = |name: String| {
        // The names are the metadata's own, and its offsets have been checked to tile the rest of the file.
        let info = metadata.info(&name)?;
        let (start, end) = info.data_offsets;
        let bytes = Bytes::new(owner.clone(), data + start..data + end);
        let (dtype, shape, offset) = (dtype(info.dtype), info.shape.clone(), (data + start) as u64);
        Some(Tensor { name, dtype, shape, bytes, offset, file })
    };
    Ok(metadata.offset_keys().into_iter().filter_map(tensor).collect())
}

fn dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F32 => DType::Weight(WeightFormat::F32),
        Dtype::F16 => DType::Weight(WeightFormat::F16),
        Dtype::BF16 => DType::Weight(WeightFormat::BF16),
        other => DType::Other(Cow::Owned(other.to_string())),
    }
}

fn explain(error: &safetensors::SafeTensorError, bytes: &[u8]) -> String {
    use safetensors::SafeTensorError::*;
    let len = bytes.len();
    match error {
        HeaderTooSmall | InvalidHeaderLength | MetadataIncompleteBuffer => {
            format!(
                "truncated or corrupt safetensors file of {len} bytes ({error}); is the download complete?"
            )
        }
        HeaderTooLarge | InvalidHeader(_) if bytes.starts_with(b"GGUF") => {
            "this is a GGUF file, not safetensors".to_owned()
        }
        _ if bytes.starts_with(b"version ") => {
            "this is a Git LFS pointer; run `git lfs pull` to get the file itself".to_owned()
        }
        _ => format!("not a valid safetensors file: {error}"),
    }
}
