//! Logits of assistants, which read the pages of their model.

use expect_test::expect;
use paguro_backend::{
    Backend, GivenRows, Output, OutputKind, OutputValue, Runner, Step, StepOutput, StepSequence,
};
use paguro_model::{LoadOptions, Model, ModelFile};
use serde_json::json;
use tempfile::TempDir;

use super::{BLOCK_SIZE, limits, tables};

/// Opens a model with its assistant, `(name, file)`. The file exists while the folder does.
pub(super) fn load((name, assistant): (&str, &[u8]), model: &[u8], context: usize) -> (TempDir, Model) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("assistant.gguf");
    std::fs::write(&path, assistant).expect("a file");
    let mut file = ModelFile::from_static(name, model.to_vec().leak()).expect("a model");
    file.set_assistant(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
    let alone = ModelFile::open(&path).expect("an assistant").load(&LoadOptions::default());
    assert!(alone.is_err_and(|error| error.to_string().contains("it drafts for its model")), "{name}");
    let model = file.load(&LoadOptions { max_context: Some(context) });
    (folder, model.unwrap_or_else(|error| panic!("{name}: {error}")))
}

/// Returns the logits of the token at each position, beside the model's row of the token before; and of the token before, beside the
/// row that the assistant has made, at the same position. The model has computed the tokens before the position. `None` on a GPU, which
/// refuses assistants by name.
pub(super) fn logits(
    backend: &dyn Backend,
    model: Model,
    context: usize,
    tokens: &[u32],
    positions: &[usize],
) -> Option<Vec<f32>> {
    let (program, assistant) = (model.program, model.mtp.expect("an assistant"));
    let groups = &program.kv.groups;
    let blocks = tokens.len().div_ceil(BLOCK_SIZE);
    let limits = limits(groups.len(), blocks, context);
    let mut of_model = backend.load(&program, model.weights, limits).expect("a supported model");
    let (weights, shared) = (assistant.weights.clone(), &assistant.shared);
    let mut runner = match of_model.load_head(&assistant.program, weights, shared, limits) {
        Err(error) if backend.name() == "gpu" => {
            assert!(error.to_string().contains("assistants"), "{error}");
            return None;
        }
        loaded => loaded.expect("a supported assistant"),
    };
    let (mut logits, mut done) = (Vec::new(), 0);
    for &at in positions {
        let pages = tables(groups, blocks, done, at);
        let rows = at - done;
        let sequences = [StepSequence { rows: 0..rows, start: done, tables: 0..pages.len(), state: None }];
        let outputs = [Output { row: rows - 1, kind: OutputKind::Embedding }];
        let step = Step {
            tokens: &tokens[done..at],
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
            ..Step::default()
        };
        let Some(OutputValue::Embedding(mut row)) = run(&mut *of_model, &step).pop() else {
            panic!("an embedding was asked for")
        };
        for token in [at, at - 1] {
            let pages = tables(groups, blocks, at, at);
            let sequences = [StepSequence { rows: 0..1, start: at, tables: 0..pages.len(), state: None }];
            let outputs = [OutputKind::Logits, OutputKind::Embedding].map(|kind| Output { row: 0, kind });
            let step = Step {
                tokens: &tokens[token..=token],
                given: &[GivenRows { rows: 0..1, values: &row }],
                sequences: &sequences,
                pages: &pages,
                outputs: &outputs,
                ..Step::default()
            };
            match <[OutputValue; 2]>::try_from(run(&mut *runner, &step)) {
                Ok([OutputValue::Logits(own), OutputValue::Embedding(next)]) => {
                    logits.extend(own);
                    row = next;
                }
                other => panic!("logits and a row were asked for, got {other:?}"),
            }
        }
        done = at;
    }
    Some(logits)
}

fn run(runner: &mut dyn Runner, step: &Step<'_>) -> Vec<OutputValue> {
    let mut out = StepOutput::default();
    let ticket = runner.submit(step).expect("a valid step");
    runner.collect(ticket, &mut out).expect("a submitted step");
    out.outcomes
}

/// Returns the name in a Hugging Face folder of a tensor of a GGUF file.
fn hf_name(name: &str) -> String {
    const NAMES: [(&str, &str); 14] = [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("nextn.pre_projection", "pre_projection"),
        ("nextn.post_projection", "post_projection"),
        ("blk.", "model.layers."),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_norm", "input_layernorm"),
        ("attn_q.", "self_attn.q_proj."),
        ("attn_output", "self_attn.o_proj"),
        ("post_attention_norm", "post_attention_layernorm"),
        ("post_ffw_norm", "post_feedforward_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("layer_output_scale.weight", "layer_scalar"),
        ("ffn_", "mlp."),
    ];
    let renamed = NAMES.iter().fold(name.to_owned(), |name, (gguf, hf)| name.replace(gguf, hf));
    ["gate", "up", "down"]
        .iter()
        .fold(renamed, |name, part| name.replace(&format!("mlp.{part}."), &format!("mlp.{part}_proj.")))
}

/// A Hugging Face folder of an assistant is lowered to the program of its GGUF file, except for rotations, which the file has as
/// numbers. The folder also has the centroids of E2B and E4B.
pub(super) fn compare_folder() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("assistant.gguf");
    std::fs::write(&path, super::gguf("gemma4-31b-assistant")).expect("a file");
    let mut file = ModelFile::from_static("a model", super::gguf("gemma4-31b").leak()).expect("a model");
    file.set_assistant(&path).expect("its assistant");
    let shape =
        |file: &ModelFile| file.shape(&LoadOptions::default()).expect("a model").mtp.expect("an assistant");
    let from_gguf = shape(&file);

    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    let mut add = |name: String, kind: &str, shape: &[usize], bytes: &[u8]| {
        let end = data.len() + bytes.len();
        header.insert(name, json!({"dtype": kind, "shape": shape, "data_offsets": [data.len(), end]}));
        data.extend_from_slice(bytes);
    };
    for tensor in ModelFile::open(&path).expect("an assistant").tensors() {
        if tensor.name != "rope_freqs.weight" {
            add(hf_name(&tensor.name), "F32", &tensor.shape, &tensor.bytes.read().expect("numbers"));
        }
    }
    add("masked_embedding.centroids.weight".into(), "F32", &[2, 48], &[0; 4 * 2 * 48]);
    add("masked_embedding.token_ordering".into(), "I64", &[301], &[0; 8 * 301]);
    let header = serde_json::to_vec(&header).expect("JSON");
    let weights = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    let folder = folder.path().join("assistant");
    std::fs::create_dir(&folder).expect("a folder");
    std::fs::write(folder.join("model.safetensors"), weights).expect("a file");
    let config = json!({
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": 64,
        "use_ordered_embeddings": true,
        "tie_word_embeddings": true,
        "text_config": {
            "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
            "num_global_key_value_heads": 2, "attention_k_eq_v": true, "head_dim": 32, "global_head_dim": 48,
            "intermediate_size": 96, "sliding_window": 32, "num_kv_shared_layers": 3, "vocab_size": 301,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        },
    });
    std::fs::write(folder.join("config.json"), config.to_string()).expect("a file");
    file.set_assistant(&folder).expect("its assistant");
    let from_hf = shape(&file);

    let mut program = from_gguf.program.clone();
    program.ropes.clone_from(&from_hf.program.ropes);
    assert_eq!(program.digest(), from_hf.program.digest(), "{program:#?} and {:#?}", from_hf.program);
    assert_eq!(from_gguf.weights.vectors, from_hf.weights.vectors);
    for (one, other) in from_gguf.weights.matrices.iter().zip(&from_hf.weights.matrices) {
        assert_eq!(
            one.read().expect("numbers"),
            other.read().expect("numbers"),
            "{} and {}",
            one.name,
            other.name
        );
    }

    // One with other tokens.
    let mut others = super::gguf("gemma4-31b-assistant");
    let token = [&2_u64.to_le_bytes()[..], b"st"].concat();
    let at = others.windows(token.len()).rposition(|bytes| bytes == token).expect("the last token");
    others[at + token.len() - 1] = b'x';
    let other_tokens = path.with_file_name("others.gguf");
    std::fs::write(&other_tokens, others).expect("a file");
    let error = file.set_assistant(&other_tokens).expect_err("other tokens").to_string();
    expect![[r#"
        the assistant `random weights` does not fit the model `random weights`: its token 300 is `sx`, and that of the model is `st`"#]]
    .assert_eq(&error);
    assert!(file.assistant().is_none());

    // One of another model.
    let mut other = ModelFile::from_static("E2B", super::gguf("gemma4-e2b").leak()).expect("a model");
    let error = other.set_assistant(&path).expect_err("an assistant of another model").to_string();
    expect![[r#"
        the assistant `random weights` does not fit the model `random weights`: its layers with a window read 4 K/V heads of 32 elements in a window of 32, and those of the model have 1 K/V heads of 32 elements in a window of 32"#]]
    .assert_eq(&error);
    let mut llama = ModelFile::from_static("a Llama", super::gguf("f16").leak()).expect("a model");
    let error = llama.set_assistant(&path).expect_err("an assistant of another model").to_string();
    expect![[r#"
        the assistant `random weights` does not fit the model `random weights`: it drafts for models of architecture `gemma4`, and this one is of `llama`"#]]
    .assert_eq(&error);
}
