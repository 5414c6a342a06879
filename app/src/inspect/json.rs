//! The form of `inspect --json`.

use paguro_model::{Model, ModelFile};
use serde_json::{Value, json};

use super::{
    memory::Memory,
    shape::{active_parameters, experts, first_layer, skipped},
};

/// Describes a model as JSON.
pub fn as_json(
    file: &ModelFile,
    model: Result<&Model, String>,
    memory: Option<Memory>,
    with_tensors: bool,
) -> Value {
    let description = file.description();
    let metadata = file.metadata().into_iter();
    let mut value = json!({
        "name": file.name(),
        "file": file.format(),
        "files": file.files(),
        "file_bytes": description.file_bytes,
        "architecture": file.architecture(),
        "parameters": description.parameters,
        "format": description.quantization,
        "read_as": file.conversions().iter().map(|it| {
            json!({"from": it.from, "to": it.to.name(), "matrices": it.matrices, "exact": it.exact})
        }).collect::<Vec<_>>(),
        "supported": model.is_ok(),
        "metadata": metadata.map(|entry| (entry.key, json!({"type": entry.kind, "value": entry.value}))).collect::<serde_json::Map<_, _>>(),
        "tensor_count": file.tensors().len(),
    });
    match model {
        Ok(model) => {
            let program = &model.program;
            value["context_length"] = json!(model.context_length);
            value["chat_template"] = json!(model.chat_template.is_some());
            value["chat_template_problem"] = json!(model.chat_problem());
            let (heads, kv_heads, head_dim, ffn) = first_layer(program);
            value["shape"] = json!({
                "layers": program.layers.len(),
                "hidden": program.hidden,
                "heads": heads,
                "kv_heads": kv_heads,
                "head_dim": head_dim,
                "ffn": ffn,
                "vocab": program.vocab,
            });
            if let Some(experts) = experts(program) {
                value["shape"]["experts"] = json!(experts.count);
                value["shape"]["experts_used"] = json!(experts.router.used);
                value["shape"]["expert_ffn"] = json!(experts.width);
            }
            if let Some(skipped) = skipped(file.tensors()) {
                value["not_run"] = json!(skipped);
            }
            if let Some(active) = active_parameters(model) {
                value["active_parameters"] = json!(active);
            }
        }
        Err(problem) => value["problem"] = json!(problem),
    }
    if let Some(memory) = memory {
        value["memory"] = json!({
            "context": memory.context,
            "weight_bytes": memory.weights,
            "buffer_bytes": memory.buffers,
            "state_bytes": memory.states,
            "checkpoint_bytes": memory.checkpoint,
            "checkpoint_interval": memory.checkpoint_interval,
            "converted": memory.converted.iter().map(|((from, to), count)| {
                json!({"from": from, "to": to, "matrices": count})
            }).collect::<Vec<_>>(),
            "kv_bytes": memory.kv(),
            "pages": memory.pages,
            "page_bytes": memory.page_bytes,
            "page_tokens": memory.block_size,
            "kv_dtype": memory.kv_dtype.name(),
        });
    }
    if with_tensors {
        value["tensors"] = file
            .tensors()
            .iter()
            .map(|tensor| {
                json!({
                    "name": tensor.name,
                    "type": tensor.dtype.to_string(),
                    "shape": tensor.shape,
                    "bytes": tensor.bytes.len(),
                    "file": tensor.file,
                    "offset": tensor.offset,
                })
            })
            .collect();
    }
    value
}
