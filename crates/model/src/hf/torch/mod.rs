//! Reader of PyTorch's files (`*.pt`, `pytorch_model.bin`): zip archives of `torch.save` with a dictionary of tensors. No code
//! of the file is run: only the pickle of such a dictionary is understood. Tensors stay in the file.

mod pickle;
mod zip;

use std::{borrow::Cow, sync::Arc};

use paguro_backend::{ByteSource, Bytes, WeightFormat};

use crate::tensor::{DType, Tensor};
use pickle::{Element, SavedTensor};
use zip::Archive;

/// Maximum bytes of a pickle. That of a model with 1000 tensors has 200 KB.
const MAX_PICKLE: u64 = 1 << 20;

/// Returns the tensors of a file in order, or a description of its problem.
pub(super) fn read(source: &Arc<dyn ByteSource>, file: usize) -> Result<Vec<Tensor>, String> {
    let archive = Archive::open(source.as_ref())?;
    // All entries are in one folder, which has the name of the original file or `archive`.
    let suffix = "/data.pkl";
    let pickles: Vec<&str> = archive.names().filter(|name| name.ends_with(suffix)).collect();
    let [pickle] = pickles[..] else {
        return Err(format!(
            "it has {} entries `*/data.pkl`, but a file of `torch.save` has one",
            pickles.len()
        ));
    };
    let folder = pickle.strip_suffix(suffix).unwrap_or_default().to_owned();
    let order = format!("{folder}/byteorder");
    if archive.has(&order) {
        let order = archive.read(&order, 16)?;
        if order != b"little" {
            let order = String::from_utf8_lossy(&order).into_owned();
            return Err(format!("its byte order is {order:?}, which is not supported (supported: little)"));
        }
    }
    let bytes = archive.read(pickle, MAX_PICKLE)?;
    let saved = pickle::read(&bytes)?;
    saved.iter().map(|saved| tensor(source, &archive, &folder, saved, file)).collect()
}

/// The tensor with the bytes of its storage.
fn tensor(
    source: &Arc<dyn ByteSource>,
    archive: &Archive<'_>,
    folder: &str,
    saved: &SavedTensor<'_>,
    file: usize,
) -> Result<Tensor, String> {
    let SavedTensor { name, storage, offset, shape } = saved;
    let bad = |problem: &str| format!("tensor `{name}`: {problem}");
    let data = archive.data(&format!("{folder}/data/{}", storage.key)).map_err(|problem| bad(&problem))?;
    let (dtype, size) = dtype(storage.element);
    if storage.elements.checked_mul(size) != Some(data.len) {
        let (elements, len) = (storage.elements, data.len);
        return Err(bad(&format!("its storage has {len} bytes, not {elements} elements of {size} bytes")));
    }
    let count = shape.iter().try_fold(1u64, |count, &dim| count.checked_mul(dim as u64));
    let end = count.and_then(|count| offset.checked_add(count));
    let (Some(count), Some(_)) = (count, end.filter(|&end| end <= storage.elements)) else {
        return Err(bad(&format!(
            "its shape {shape:?} at element {offset} exceeds its storage of {} elements",
            storage.elements
        )));
    };
    // Both products are at most the length of the entry.
    let (start, len) = (data.offset + offset * size, count * size);
    let len = usize::try_from(len).map_err(|_| bad("it is too large for this system"))?;
    let bytes = Bytes::new(source.clone(), start, len);
    Ok(Tensor { name: (*name).to_owned(), dtype, shape: shape.clone(), bytes, offset: start, file })
}

/// Returns the type of elements, and their bytes.
fn dtype(element: Element) -> (DType, u64) {
    let other = |name| DType::Other(Cow::Borrowed(name));
    match element {
        Element::Float => (DType::Weight(WeightFormat::F32), 4),
        Element::Half => (DType::Weight(WeightFormat::F16), 2),
        Element::BFloat16 => (DType::Weight(WeightFormat::BF16), 2),
        Element::Double => (other("F64"), 8),
        Element::Long => (other("I64"), 8),
        Element::Int => (other("I32"), 4),
        Element::Short => (other("I16"), 2),
        Element::Char => (other("I8"), 1),
        Element::Byte => (other("U8"), 1),
        Element::Bool => (other("BOOL"), 1),
    }
}

#[cfg(test)]
mod tests;
