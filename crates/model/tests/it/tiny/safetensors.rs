//! Writes safetensors files.

use serde_json::{Map, Value, json};

use super::Tensor;

/// A file of f32 tensors.
pub fn write(tensors: &[Tensor]) -> Vec<u8> {
    let mut header = Map::new();
    let mut at = 0;
    for tensor in tensors {
        let end = at + 4 * tensor.values.len();
        let entry = json!({"dtype": "F32", "shape": tensor.shape, "data_offsets": [at, end]});
        header.insert(tensor.name.clone(), entry);
        at = end;
    }
    with_header(&Value::Object(header), &tensors.iter().flat_map(Tensor::bytes).collect::<Vec<_>>())
}

/// A file with this header, valid or not.
pub fn with_header(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}
