//! Writes GGUF files, valid ones and others.

use paguro_model::gguf::{Array, Value};

use super::Tensor;

/// Content of a file. Tests change one part and check the reader's result.
#[derive(Clone)]
pub struct Writer {
    pub version: u32,
    pub alignment: usize,
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<RawTensor>,
}

/// A tensor as bytes.
#[derive(Clone)]
pub struct RawTensor {
    pub name: String,
    /// Innermost dimension first, as the file has it.
    pub dims: Vec<u64>,
    /// `enum ggml_type`.
    pub kind: u32,
    pub bytes: Vec<u8>,
}

impl Writer {
    pub fn new(metadata: Vec<(String, Value)>, tensors: &[Tensor]) -> Self {
        let raw = |tensor: &Tensor| RawTensor {
            name: tensor.name.clone(),
            dims: tensor.shape.iter().rev().map(|&dim| dim as u64).collect(),
            kind: 0,
            bytes: tensor.bytes(),
        };
        Self { version: 3, alignment: 32, metadata, tensors: tensors.iter().map(raw).collect() }
    }

    pub fn write(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(&mut out, key.as_bytes());
            write_value(&mut out, value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            string(&mut out, tensor.name.as_bytes());
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = (offset + tensor.bytes.len()).next_multiple_of(self.alignment);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(&tensor.bytes);
        }
        out
    }
}

fn string(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    let mut scalar = |kind: u32, bytes: &[u8]| {
        out.extend(kind.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Value::U8(v) => scalar(0, &v.to_le_bytes()),
        Value::I8(v) => scalar(1, &v.to_le_bytes()),
        Value::U16(v) => scalar(2, &v.to_le_bytes()),
        Value::I16(v) => scalar(3, &v.to_le_bytes()),
        Value::U32(v) => scalar(4, &v.to_le_bytes()),
        Value::I32(v) => scalar(5, &v.to_le_bytes()),
        Value::F32(v) => scalar(6, &v.to_le_bytes()),
        Value::Bool(v) => scalar(7, &[u8::from(*v)]),
        Value::U64(v) => scalar(10, &v.to_le_bytes()),
        Value::I64(v) => scalar(11, &v.to_le_bytes()),
        Value::F64(v) => scalar(12, &v.to_le_bytes()),
        Value::String(text) => {
            scalar(8, &[]);
            string(out, text.as_bytes());
        }
        Value::Bytes(bytes) => {
            scalar(8, &[]);
            string(out, bytes);
        }
        Value::Array(array) => {
            scalar(9, &[]);
            write_array(out, array);
        }
    }
}

fn write_array(out: &mut Vec<u8>, array: &Array) {
    fn numbers<T, const N: usize>(out: &mut Vec<u8>, kind: u32, values: &[T], bytes: impl Fn(&T) -> [u8; N]) {
        out.extend(kind.to_le_bytes());
        out.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| out.extend(bytes(value)));
    }
    match array {
        Array::U8(v) => numbers(out, 0, v, |v| v.to_le_bytes()),
        Array::I8(v) => numbers(out, 1, v, |v| v.to_le_bytes()),
        Array::U16(v) => numbers(out, 2, v, |v| v.to_le_bytes()),
        Array::I16(v) => numbers(out, 3, v, |v| v.to_le_bytes()),
        Array::U32(v) => numbers(out, 4, v, |v| v.to_le_bytes()),
        Array::I32(v) => numbers(out, 5, v, |v| v.to_le_bytes()),
        Array::F32(v) => numbers(out, 6, v, |v| v.to_le_bytes()),
        Array::Bool(v) => numbers(out, 7, v, |v| [u8::from(*v)]),
        Array::U64(v) => numbers(out, 10, v, |v| v.to_le_bytes()),
        Array::I64(v) => numbers(out, 11, v, |v| v.to_le_bytes()),
        Array::F64(v) => numbers(out, 12, v, |v| v.to_le_bytes()),
        Array::Strings(v) => {
            numbers(out, 8, &[] as &[u8], |_| [0; 0]);
            set_count(out, v.len());
            v.iter().for_each(|text| string(out, text.as_bytes()));
        }
        Array::ByteStrings(v) => {
            numbers(out, 8, &[] as &[u8], |_| [0; 0]);
            set_count(out, v.len());
            v.iter().for_each(|bytes| string(out, bytes));
        }
    }
}

/// Replaces the count that was just written.
fn set_count(out: &mut [u8], count: usize) {
    let at = out.len() - 8;
    out[at..].copy_from_slice(&(count as u64).to_le_bytes());
}
