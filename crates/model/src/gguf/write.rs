//! Writing a GGUF file: the header at once, then the bytes of one tensor after the other.

use std::io::{self, Write};

use super::{Array, Contents, Metadata, Value, metadata::match_numbers, reader::DEFAULT_ALIGNMENT};
use crate::tensor::Tensor;

/// The version of the format that is written.
const VERSION: u32 = 3;

/// A tensor of a file that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Number of its type (`enum ggml_type`).
    pub ggml_type: u32,
    /// Outermost dimension first, as in [`Tensor`].
    pub shape: Vec<usize>,
    /// Bytes of its elements.
    pub bytes: u64,
}

impl Contents {
    /// Writes a file with these tensors as they are. Returns the output.
    ///
    /// # Errors
    /// The error of the output or of a tensor's source; a tensor of a type that GGUF does not have.
    pub fn write<W: Write>(&self, out: W) -> io::Result<W> {
        let info = |tensor: &Tensor| {
            let no_type = || io::Error::other(format!("GGUF has no type for `{}`", tensor.name));
            Ok(TensorInfo {
                name: tensor.name.clone(),
                ggml_type: tensor.dtype.ggml_type().ok_or_else(no_type)?,
                shape: tensor.shape.clone(),
                bytes: tensor.bytes.len() as u64,
            })
        };
        let infos = self.tensors.iter().map(info).collect::<io::Result<Vec<_>>>()?;
        let mut writer = Writer::new(out, &self.metadata, &infos)?;
        for tensor in &self.tensors {
            writer.write(&tensor.bytes.read()?)?;
        }
        writer.finish()
    }
}

/// Writes a file front to back. The caller writes the bytes of each tensor, in the order of the header.
#[derive(Debug)]
pub struct Writer<W> {
    out: W,
    alignment: u64,
    /// Bytes that each tensor still to be written has, last one first.
    pending: Vec<u64>,
    /// Bytes of the current tensor that are missing.
    missing: u64,
    /// Padding after the current tensor.
    padding: usize,
}

impl<W: Write> Writer<W> {
    /// Writes the header. Tensors begin at multiples of `general.alignment`, or 32.
    ///
    /// # Errors
    /// The system's error; an alignment that is no power of two.
    pub fn new(mut out: W, metadata: &Metadata, tensors: &[TensorInfo]) -> io::Result<Self> {
        let alignment = u64::from(metadata.u32("general.alignment").unwrap_or(DEFAULT_ALIGNMENT));
        if !alignment.is_power_of_two() {
            return Err(io::Error::other(format!("`general.alignment` is {alignment}, no power of two")));
        }
        let mut header = Vec::new();
        header.extend(b"GGUF");
        header.extend(VERSION.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((metadata.iter().len() as u64).to_le_bytes());
        for (key, value) in metadata.iter() {
            string(&mut header, key.as_bytes());
            header.extend(value_type(value).to_le_bytes());
            write_value(&mut header, value);
        }
        let mut offset = 0u64;
        for tensor in tensors {
            string(&mut header, tensor.name.as_bytes());
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            for &dim in tensor.shape.iter().rev() {
                header.extend((dim as u64).to_le_bytes());
            }
            header.extend(tensor.ggml_type.to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset += tensor.bytes.next_multiple_of(alignment);
        }
        header.resize(header.len().next_multiple_of(alignment as usize), 0);
        out.write_all(&header)?;
        let pending = tensors.iter().rev().map(|tensor| tensor.bytes).collect();
        let mut writer = Self { out, alignment, pending, missing: 0, padding: 0 };
        writer.next_tensor()?;
        Ok(writer)
    }

    /// Appends bytes of the current tensor. The next one follows when it is complete.
    ///
    /// # Errors
    /// The system's error.
    ///
    /// # Panics
    /// If the tensor has fewer bytes.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.missing = self.missing.checked_sub(bytes.len() as u64).expect("more bytes than the tensor has");
        self.out.write_all(bytes)?;
        if self.missing == 0 {
            self.next_tensor()?;
        }
        Ok(())
    }

    /// Returns the output, with everything written to it.
    ///
    /// # Errors
    /// The system's error.
    ///
    /// # Panics
    /// If bytes of a tensor are missing.
    pub fn finish(mut self) -> io::Result<W> {
        assert!(self.missing == 0 && self.pending.is_empty(), "a tensor is incomplete");
        self.out.flush()?;
        Ok(self.out)
    }

    /// Pads the tensor that is complete and begins the next one that has bytes.
    fn next_tensor(&mut self) -> io::Result<()> {
        while self.missing == 0 {
            self.out.write_all(&vec![0; self.padding])?;
            self.padding = 0;
            let Some(bytes) = self.pending.pop() else { return Ok(()) };
            self.missing = bytes;
            self.padding = (bytes.next_multiple_of(self.alignment) - bytes) as usize;
        }
        Ok(())
    }
}

fn string(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}

fn value_type(value: &Value) -> u32 {
    match value {
        Value::U8(_) => 0,
        Value::I8(_) => 1,
        Value::U16(_) => 2,
        Value::I16(_) => 3,
        Value::U32(_) => 4,
        Value::I32(_) => 5,
        Value::F32(_) => 6,
        Value::Bool(_) => 7,
        Value::String(_) | Value::Bytes(_) => 8,
        Value::Array(_) => 9,
        Value::U64(_) => 10,
        Value::I64(_) => 11,
        Value::F64(_) => 12,
    }
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    match_numbers!(Value, value, value => out.extend(value.to_le_bytes()), {
        Value::Bool(value) => out.push((*value).into()),
        Value::String(text) => string(out, text.as_bytes()),
        Value::Bytes(bytes) => string(out, bytes),
        Value::Array(array) => write_array(out, array),
    })
}

fn write_array(out: &mut Vec<u8>, array: &Array) {
    fn numbers<T: Copy, const N: usize>(
        out: &mut Vec<u8>,
        number: u32,
        values: &[T],
        bytes: fn(T) -> [u8; N],
    ) {
        out.extend(number.to_le_bytes());
        out.extend((values.len() as u64).to_le_bytes());
        out.extend(values.iter().flat_map(|&value| bytes(value)));
    }
    fn strings(out: &mut Vec<u8>, count: usize, values: impl Iterator<Item = impl AsRef<[u8]>>) {
        out.extend(8u32.to_le_bytes());
        out.extend((count as u64).to_le_bytes());
        values.for_each(|value| string(out, value.as_ref()));
    }
    match array {
        Array::U8(values) => numbers(out, 0, values, u8::to_le_bytes),
        Array::I8(values) => numbers(out, 1, values, i8::to_le_bytes),
        Array::U16(values) => numbers(out, 2, values, u16::to_le_bytes),
        Array::I16(values) => numbers(out, 3, values, i16::to_le_bytes),
        Array::U32(values) => numbers(out, 4, values, u32::to_le_bytes),
        Array::I32(values) => numbers(out, 5, values, i32::to_le_bytes),
        Array::F32(values) => numbers(out, 6, values, f32::to_le_bytes),
        Array::Bool(values) => numbers(out, 7, values, |value| [value.into()]),
        Array::Strings(values) => strings(out, values.len(), values.iter().map(String::as_bytes)),
        Array::ByteStrings(values) => strings(out, values.len(), values.iter()),
        Array::U64(values) => numbers(out, 10, values, u64::to_le_bytes),
        Array::I64(values) => numbers(out, 11, values, i64::to_le_bytes),
        Array::F64(values) => numbers(out, 12, values, f64::to_le_bytes),
    }
}
