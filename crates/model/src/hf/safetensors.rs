//! Reader of one safetensors file. The crate `safetensors` parses and checks its header; tensors stay in the file.

use std::{borrow::Cow, sync::Arc};

use paguro_backend::{ByteSource, Bytes, WeightFormat};
use safetensors::{Dtype, SafeTensorError, tensor::Metadata};

use crate::tensor::{DType, Tensor};

/// The length of the header, before it.
const PREFIX: u64 = 8;

/// Bytes of a header, at most: as the crate has it.
const MAX_HEADER: u64 = 100_000_000;

/// Returns the tensors of a file in order, or a description of its problem.
pub(crate) fn read(source: &Arc<dyn ByteSource>, file: usize) -> Result<Vec<Tensor>, String> {
    let (header, metadata) = read_metadata(source.as_ref())?;
    let data = PREFIX + header;
    let tensor = |name: String| {
        // The names are the metadata's own, and its offsets have been checked to tile the rest of the file.
        let info = metadata.info(&name)?;
        let (start, end) = info.data_offsets;
        let offset = data + start as u64;
        let bytes = Bytes::new(source.clone(), offset, end - start);
        Some(Tensor { name, dtype: dtype(info.dtype), shape: info.shape.clone(), bytes, offset, file })
    };
    Ok(metadata.offset_keys().into_iter().filter_map(tensor).collect())
}

/// Returns the length and content of the header. The tensors must cover the rest of the file exactly.
fn read_metadata(source: &dyn ByteSource) -> Result<(u64, Metadata), String> {
    let size = source.size();
    let mut start = vec![0; size.min(PREFIX) as usize];
    source.read_at(0, &mut start).map_err(|error| error.to_string())?;
    let explain = |error: SafeTensorError| explain(&error, &start, size);
    let prefix = start.as_slice().try_into().map_err(|_| explain(SafeTensorError::HeaderTooSmall))?;
    let len = u64::from_le_bytes(prefix);
    if len > MAX_HEADER {
        return Err(explain(SafeTensorError::HeaderTooLarge));
    }
    if len > size - PREFIX {
        return Err(explain(SafeTensorError::InvalidHeaderLength));
    }
    let mut header = vec![0; len as usize];
    source.read_at(PREFIX, &mut header).map_err(|error| error.to_string())?;
    let text = str::from_utf8(&header).map_err(|error| explain(SafeTensorError::InvalidHeader(error)))?;
    let parsed: Metadata = serde_json::from_str(text)
        .map_err(|error| explain(SafeTensorError::InvalidHeaderDeserialization(error)))?;
    // The crate checks positions only for newly created metadata, or for a file in memory.
    let tensors: Vec<_> = parsed
        .offset_keys()
        .into_iter()
        .filter_map(|name| parsed.info(&name).cloned().map(|info| (name, info)))
        .collect();
    let end = tensors.last().map_or(0, |(_, info)| info.data_offsets.1 as u64);
    let metadata = Metadata::new(None, tensors).map_err(explain)?;
    if end != size - PREFIX - len {
        return Err(explain(SafeTensorError::MetadataIncompleteBuffer));
    }
    Ok((len, metadata))
}

fn dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::F32 => DType::Weight(WeightFormat::F32),
        Dtype::F16 => DType::Weight(WeightFormat::F16),
        Dtype::BF16 => DType::Weight(WeightFormat::BF16),
        other => DType::Other(Cow::Owned(other.to_string())),
    }
}

fn explain(error: &SafeTensorError, bytes: &[u8], len: u64) -> String {
    use SafeTensorError::*;
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
        // Errors of the crate's own checks are wrapped; errors of JSON have a position.
        InvalidHeaderDeserialization(wrapped) if wrapped.line() == 0 => {
            format!("not a valid safetensors file: {wrapped}")
        }
        _ => format!("not a valid safetensors file: {error}"),
    }
}
