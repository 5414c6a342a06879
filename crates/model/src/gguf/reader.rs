//! Reader of one file.

use std::{collections::HashSet, sync::Arc};

use paguro_backend::{ByteSource, Bytes};

use super::{Array, GgufError, Metadata, Value, cursor::Cursor, types};
use crate::tensor::Tensor;

/// Alignment of tensors in files that do not give one.
pub(super) const DEFAULT_ALIGNMENT: u32 = 32;
const MAX_DIMS: u32 = 4;

// Minimum bytes of each entry in the file: a count that exceeds them is invalid.
const MIN_PAIR_BYTES: u64 = 8 + 4 + 1; // empty key, type, a boolean
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8; // empty name, number of dimensions, type, offset

/// Content of one file.
pub(super) struct Part {
    pub(super) version: u32,
    pub(super) metadata: Metadata,
    pub(super) tensors: Vec<Tensor>,
    pub(super) bytes: u64,
}

/// Reads the header and checks that all tensors are inside of the file.
pub(super) fn read(source: &Arc<dyn ByteSource>) -> Result<Part, GgufError> {
    let size = source.size();
    let mut cursor = Cursor::new(source.as_ref());
    check_magic(source.as_ref())?;
    cursor.take(4, "the magic")?;
    let version = cursor.u32("the version")?;
    match version {
        2 | 3 => {}
        _ if matches!(version.swap_bytes(), 1..=3) => return Err(GgufError::BigEndian),
        _ => return Err(GgufError::Version(version)),
    }
    let tensor_count = cursor.count(MIN_TENSOR_BYTES, "the list of tensors")?;
    let pair_count = cursor.count(MIN_PAIR_BYTES, "the list of metadata")?;

    let metadata = read_metadata(&mut cursor, pair_count)?;
    let alignment = metadata.optional_u32("general.alignment")?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() {
        return Err(GgufError::Alignment(alignment));
    }

    // Metadata has used up some of the file since the count was checked.
    cursor.fits(tensor_count as u64, MIN_TENSOR_BYTES, "the list of tensors")?;
    let (mut infos, mut names) = (Vec::new(), HashSet::new());
    for _ in 0..tensor_count {
        let info = read_tensor_info(&mut cursor)?;
        if !names.insert(info.name.clone()) {
            return Err(GgufError::DuplicateTensor { tensor: info.name });
        }
        infos.push(info);
    }
    let data = cursor.position().next_multiple_of(alignment.into());
    check_places(&infos, data, size, alignment)?;

    let place = |info: Info| {
        let start = data + info.offset;
        Tensor {
            name: info.name,
            dtype: info.dtype,
            shape: info.shape,
            bytes: Bytes::new(source.clone(), start, info.bytes as usize),
            offset: start,
            file: 0,
        }
    };
    let tensors = infos.into_iter().map(place).collect();
    Ok(Part { version, metadata, tensors, bytes: size })
}

/// Checks the magic. The error names the probable format.
fn check_magic(source: &dyn ByteSource) -> Result<(), GgufError> {
    let mut first = [0; 8];
    let first = &mut first[..source.size().min(8) as usize];
    source.read_at(0, first).map_err(GgufError::Read)?;
    let first = &*first;
    if first.starts_with(b"GGUF") {
        return Ok(());
    }
    let hint = match first {
        [] => " (the file is empty)",
        b if b.starts_with(b"FUGG") => " (a GGUF file in the other byte order)",
        b if [&b"lmgg"[..], b"fmgg", b"tjgg", b"algg"].iter().any(|old| b.starts_with(old)) => {
            " (a GGML file from before GGUF; convert the model again)"
        }
        b if b.starts_with(b"PK") => {
            " (a zip archive, perhaps a PyTorch checkpoint; use safetensors or GGUF)"
        }
        b if b.starts_with(b"version ") => " (a Git LFS pointer; run `git lfs pull` to get the file itself)",
        b if b.starts_with(b"<") => " (a web page; the download went wrong)",
        b if b.len() == 8 && b[4..] == [0; 4] => " (perhaps safetensors; open the folder that it lies in)",
        _ => "",
    };
    let mut found = format!("\"{}\"", first.escape_ascii());
    if first.is_empty() {
        found = "nothing".to_owned();
    }
    Err(GgufError::NotGguf { found, hint })
}

fn read_metadata(cursor: &mut Cursor<'_>, count: usize) -> Result<Metadata, GgufError> {
    let mut metadata = Metadata::default();
    for _ in 0..count {
        let key = text(cursor, "a metadata key")?;
        let number = cursor.u32("the type of a metadata value")?;
        let value = read_value(cursor, &key, number)?;
        if metadata.get(&key).is_some() {
            return Err(GgufError::DuplicateKey { key });
        }
        metadata.insert(key, value);
    }
    Ok(metadata)
}

const VALUE: &str = "a metadata value";
const ARRAY: &str = "a metadata array";

fn read_value(cursor: &mut Cursor<'_>, key: &str, number: u32) -> Result<Value, GgufError> {
    Ok(match number {
        0 => Value::U8(u8::from_le_bytes(cursor.array(VALUE)?)),
        1 => Value::I8(i8::from_le_bytes(cursor.array(VALUE)?)),
        2 => Value::U16(u16::from_le_bytes(cursor.array(VALUE)?)),
        3 => Value::I16(i16::from_le_bytes(cursor.array(VALUE)?)),
        4 => Value::U32(u32::from_le_bytes(cursor.array(VALUE)?)),
        5 => Value::I32(i32::from_le_bytes(cursor.array(VALUE)?)),
        6 => Value::F32(f32::from_le_bytes(cursor.array(VALUE)?)),
        7 => Value::Bool(cursor.array::<1>(VALUE)? != [0]),
        8 => {
            let bytes = cursor.string("a metadata string")?;
            match str::from_utf8(bytes) {
                Ok(text) => Value::String(text.to_owned()),
                Err(_) => Value::Bytes(bytes.to_vec()),
            }
        }
        9 => Value::Array(read_array(cursor, key)?),
        10 => Value::U64(u64::from_le_bytes(cursor.array(VALUE)?)),
        11 => Value::I64(i64::from_le_bytes(cursor.array(VALUE)?)),
        12 => Value::F64(f64::from_le_bytes(cursor.array(VALUE)?)),
        _ => return Err(GgufError::ValueType { key: key.to_owned(), number }),
    })
}

fn read_array(cursor: &mut Cursor<'_>, key: &str) -> Result<Array, GgufError> {
    fn numbers<T, const N: usize>(
        cursor: &mut Cursor<'_>,
        convert: impl Fn([u8; N]) -> T,
    ) -> Result<Vec<T>, GgufError> {
        let count = cursor.count(N as u64, ARRAY)?;
        let bytes = cursor.take((count * N) as u64, ARRAY)?;
        Ok(bytes.as_chunks().0.iter().map(|&chunk| convert(chunk)).collect())
    }
    let number = cursor.u32("the type of a metadata array")?;
    Ok(match number {
        0 => Array::U8(numbers(cursor, u8::from_le_bytes)?),
        1 => Array::I8(numbers(cursor, i8::from_le_bytes)?),
        2 => Array::U16(numbers(cursor, u16::from_le_bytes)?),
        3 => Array::I16(numbers(cursor, i16::from_le_bytes)?),
        4 => Array::U32(numbers(cursor, u32::from_le_bytes)?),
        5 => Array::I32(numbers(cursor, i32::from_le_bytes)?),
        6 => Array::F32(numbers(cursor, f32::from_le_bytes)?),
        7 => Array::Bool(numbers(cursor, |[byte]: [u8; 1]| byte != 0)?),
        8 => read_strings(cursor)?,
        10 => Array::U64(numbers(cursor, u64::from_le_bytes)?),
        11 => Array::I64(numbers(cursor, i64::from_le_bytes)?),
        12 => Array::F64(numbers(cursor, f64::from_le_bytes)?),
        _ => return Err(GgufError::ValueType { key: key.to_owned(), number }),
    })
}

fn read_strings(cursor: &mut Cursor<'_>) -> Result<Array, GgufError> {
    const WHAT: &str = "a string of a metadata array";
    let count = cursor.count(8, ARRAY)?; // each has at least its length
    let mut strings = Vec::new();
    for read in 0..count {
        match String::from_utf8(cursor.string(WHAT)?.to_vec()) {
            Ok(text) => strings.push(text),
            Err(error) => {
                let mut bytes: Vec<Vec<u8>> = strings.into_iter().map(String::into_bytes).collect();
                bytes.push(error.into_bytes());
                for _ in read + 1..count {
                    bytes.push(cursor.string(WHAT)?.to_vec());
                }
                return Ok(Array::ByteStrings(bytes));
            }
        }
    }
    Ok(Array::Strings(strings))
}

/// Returns a name or key, which has to be UTF-8.
fn text(cursor: &mut Cursor<'_>, what: &'static str) -> Result<String, GgufError> {
    let at = cursor.position();
    let bytes = cursor.string(what)?.to_vec();
    String::from_utf8(bytes).map_err(|_| GgufError::NotText { what, at })
}

/// A tensor whose position is not checked yet.
struct Info {
    name: String,
    dtype: crate::tensor::DType,
    shape: Vec<usize>,
    bytes: u64,
    offset: u64,
}

fn read_tensor_info(cursor: &mut Cursor<'_>) -> Result<Info, GgufError> {
    const WHAT: &str = "a tensor's description";
    let name = text(cursor, "a tensor's name")?;
    let corrupt = |problem: String| GgufError::Tensor { tensor: name.clone(), problem };

    let dims = cursor.u32(WHAT)?;
    if dims > MAX_DIMS {
        return Err(corrupt(format!("it has {dims} dimensions, at most {MAX_DIMS} are possible")));
    }
    let mut shape = Vec::with_capacity(dims as usize);
    let mut elements = 1u64;
    for _ in 0..dims {
        let dim = cursor.u64(WHAT)?;
        let product = elements.checked_mul(dim).filter(|&product| product <= i64::MAX as u64);
        elements = product.ok_or_else(|| corrupt("its dimensions overflow".to_owned()))?;
        shape.push(usize::try_from(dim).map_err(|_| corrupt("its dimensions overflow".to_owned()))?);
    }
    let cols = shape.first().copied().unwrap_or(1) as u64;
    shape.reverse(); // the file has the innermost dimension first

    let (dtype, block) = types::tensor_type(cursor.u32(WHAT)?);
    let bytes = match block {
        Some(block) if !cols.is_multiple_of(block.len) => {
            return Err(corrupt(format!(
                "rows of {cols} elements are no whole blocks of {dtype} ({})",
                block.len
            )));
        }
        Some(block) => (elements / block.len)
            .checked_mul(block.bytes)
            .ok_or_else(|| corrupt("its size in bytes overflows".to_owned()))?,
        None => 0,
    };
    let offset = cursor.u64(WHAT)?;
    Ok(Info { name, dtype, shape, bytes, offset })
}

/// Checks that every tensor is inside of the file, aligned, and does not overlap others.
fn check_places(infos: &[Info], data: u64, file: u64, alignment: u32) -> Result<(), GgufError> {
    let corrupt = |info: &Info, problem| GgufError::Tensor { tensor: info.name.to_owned(), problem };
    let mut places = Vec::with_capacity(infos.len());
    for info in infos {
        if !info.offset.is_multiple_of(alignment.into()) {
            let problem =
                format!("its offset {} is not a multiple of the alignment {alignment}", info.offset);
            return Err(corrupt(info, problem));
        }
        let end = info.offset.checked_add(info.bytes).and_then(|end| data.checked_add(end));
        let end = end.ok_or_else(|| corrupt(info, format!("its offset {} overflows", info.offset)))?;
        places.push((info.offset, end, info));
    }
    if let Some(&(_, end, info)) = places.iter().max_by_key(|place| place.1)
        && end > file
    {
        return Err(GgufError::MissingData { tensor: info.name.to_owned(), expected: end, actual: file });
    }
    // Overlapping tensors would let a small file describe a huge model.
    places.sort_unstable_by_key(|&(start, end, _)| (start, end));
    for pair in places.windows(2) {
        let [(_, end, first), (start, _, second)] = [pair[0], pair[1]];
        if data + start < end {
            return Err(corrupt(second, format!("it overlaps tensor `{}`", first.name)));
        }
    }
    Ok(())
}
