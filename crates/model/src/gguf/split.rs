//! Models in several files, as llama.cpp's `gguf-split` writes them: `NAME-00001-of-00003.gguf` and so on, each
//! with `split.no` (from 0) and `split.count`; the first has the metadata.

use std::{collections::HashSet, io, path::Path};

use super::{Gguf, GgufError, Metadata, read_file, reader::Part};

/// Maximum number of files of a model, each of which stays open.
const MAX_FILES: u32 = 512;

/// Returns the number of files of the model: one, unless the metadata states more.
pub(super) fn count(metadata: &Metadata) -> Result<u32, GgufError> {
    match metadata.optional_u32("split.count")?.unwrap_or(1) {
        count if count > MAX_FILES => Err(GgufError::SplitCount { count, limit: MAX_FILES }),
        count => Ok(count),
    }
}

/// Opens all files of the model that the file at `path`, already read as `given`, is one of.
pub(super) fn open(path: &Path, given: Part, count: u32) -> Result<Gguf, GgufError> {
    let number = number(&given.metadata, count).map_err(|error| error.of(path))?;
    let prefix =
        prefix(path, number, count).ok_or_else(|| GgufError::SplitName { path: path.to_owned(), count })?;
    // Only as many as exist are opened: a false count ends at the first missing file.
    let sibling = |i: u32| path.with_file_name(format!("{prefix}{}", suffix(i, count)));

    let first_path = if number == 0 { path.to_owned() } else { sibling(0) };
    let mut given = Some(given);
    let mut part = |i: u32, path: &Path| match given.take_if(|_| i == number) {
        Some(part) => Ok(part),
        None => read_sibling(path, i, count),
    };
    let mut whole = Gguf::single(part(0, &first_path)?, vec![first_path]);
    for i in 1..count {
        let path = sibling(i);
        let part = part(i, &path)?;
        whole.bytes += part.bytes;
        whole.tensors.extend(part.tensors.into_iter().map(|mut tensor| {
            tensor.file = i as usize;
            tensor
        }));
        whole.files.push(path);
    }
    check_tensors(&whole)?;
    Ok(whole)
}

fn read_sibling(path: &Path, number: u32, count: u32) -> Result<Part, GgufError> {
    let part = read_file(path).map_err(|error| match error {
        GgufError::Io { path, source } if source.kind() == io::ErrorKind::NotFound => {
            GgufError::SplitMissing { path, count }
        }
        other => other,
    })?;
    let found =
        (self::number(&part.metadata, count).map_err(|error| error.of(path))?, self::count(&part.metadata)?);
    if found != (number, count) {
        let problem = format!("it says that it is number {} of {}", found.0 + 1, found.1);
        return Err(GgufError::SplitMismatch { problem }.of(path));
    }
    Ok(part)
}

/// Returns the file's number, from 0.
fn number(metadata: &Metadata, count: u32) -> Result<u32, GgufError> {
    let number = metadata.require_u32("split.no")?;
    if number >= count {
        let problem = format!("`split.no` is {number} (from 0), `split.count` is {count}");
        return Err(GgufError::SplitMismatch { problem });
    }
    Ok(number)
}

fn suffix(number: u32, count: u32) -> String {
    format!("-{:05}-of-{count:05}.gguf", number + 1)
}

/// Returns the text before the number in the file's name.
fn prefix(path: &Path, number: u32, count: u32) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    name.strip_suffix(&suffix(number, count)).map(str::to_owned)
}

fn check_tensors(whole: &Gguf) -> Result<(), GgufError> {
    let mut names = HashSet::with_capacity(whole.tensors.len());
    for tensor in &whole.tensors {
        if !names.insert(tensor.name.as_str()) {
            return Err(GgufError::DuplicateTensor { tensor: tensor.name.clone() });
        }
    }
    match whole.metadata.optional_u32("split.tensors.count")? {
        Some(expected) if expected as usize != whole.tensors.len() => {
            let problem = format!("they have {} tensors, expected {expected}", whole.tensors.len());
            Err(GgufError::SplitMismatch { problem })
        }
        _ => Ok(()),
    }
}
