//! Folders of Hugging Face's classes: `config.json` and names as transformers writes them, logits as it computes them.

use std::{fs, path::Path};

use paguro_backend_conformance::Draw;
use paguro_model::{AdapterFile, LoadOptions, Model, ModelFile, Pooling};
use serde_json::{Map, Value, json};

use super::{Backend, CHUNKS, OutputKind, ROUNDING, Text, distance, half_pages, run, run_program, weights};

/// Where the second text of a pair begins.
const SECOND: usize = 40;

/// Runs all folders, or some that are drawn, on these backends; those that are not exact round like the CPU's.
pub fn compare(backends: &[(&dyn Backend, bool)], draw: Draw) {
    const CONTEXT: usize = 256;

    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/architectures/hf");
    let all: Value = serde_json::from_slice(&fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let positions: Vec<usize> =
        all["positions"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap() as usize).collect();
    let tokens = weights::tokens(positions[positions.len() - 1] + 1, all["vocab"].as_u64().unwrap());
    let mut failures = Vec::new();
    for case in &draw.some("folders", all["cases"].as_array().unwrap(), 10) {
        let name = case["name"].as_str().unwrap();
        let expected = read(&folder.join(format!("{name}.logits")));
        let path = write(name, case, &all["tokenizer"]);
        for &(backend, rounds) in backends {
            let tolerance = ROUNDING + if rounds { half_pages(name) } else { 0.0 };
            let options = LoadOptions { max_context: Some(CONTEXT) };
            let model = match Model::open(&path, &options) {
                Ok(model) => model,
                Err(error) => {
                    failures.push(format!("{name}: {error}"));
                    continue;
                }
            };
            let own = match model.is_encoder() {
                true => encode(backend, model, &tokens, &positions, CONTEXT),
                false => run(backend, model, CONTEXT, &tokens, &CHUNKS, &positions, OutputKind::Logits),
            };
            let Some(own) = own else { continue };
            let mut check = |what: &str, own: &[f32], expected: &[f32]| {
                let error = far(own, expected);
                println!("{name}{what:10} {:10} error {error:.1e} of {tolerance:.1e}", backend.name());
                if error.is_nan() || error > tolerance {
                    let name = format!("{name}{what} on {}", backend.name());
                    failures.push(format!("{name}: {error:.1e}, more than {tolerance:.1e}"));
                }
            };
            check("", &own, &expected);
            // An adapter that PEFT has saved, with the logits that it computes.
            let adapter = folder.join("peft").join(name);
            if adapter.exists() {
                let model = Model::open(&path, &options).unwrap();
                let pairs = AdapterFile::open(&adapter).unwrap().fit(&model).unwrap();
                let text = Text { tokens: &tokens, given: &[], pairs: &pairs };
                let program = (&model.program, model.weights.clone());
                let own =
                    run_program(backend, program, CONTEXT, text, &CHUNKS, &positions, OutputKind::Logits);
                check(" with PEFT", &own.unwrap(), &read(&adapter.join("logits")));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

fn read(logits: &Path) -> Vec<f32> {
    fs::read(logits).unwrap().as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

/// Cases that a GGUF file has no keys for, with a part of the message; and a field of the configuration without which it has.
const NOT_CONVERTED: [(&str, &str, Option<&str>); 4] = [
    ("mamba2-bounds", "no key for its mixers with a state", Some("time_step_limit")),
    ("falcon_h1-multipliers", "no key for its mixers with a state", Some("mamba_rms_norm")),
    ("modernbert-rank", "a classifier of the mean", Some("classifier_pooling")),
    ("mpnet", "folders of `mpnet` models", None),
];

/// Cases whose files llama.cpp refuses or computes otherwise, with a part of the note. `convert_llama.py` verifies that these are all.
const NOTED: [(&str, &str); 10] = [
    ("mistral", "sliding window of 32"),
    ("qwen3_moe-plain", "divides the weights"),
    ("gpt_oss", "YaRN's ramp"),
    ("exaone4", "sliding window of 32"),
    ("gpt_neox", "GELU"),
    ("lfm2_moe", "factor of the experts' weights (1.5)"),
    ("qwen3_5", "16 elements for keys and 24 for values"),
    ("qwen3_5_moe", "16 elements for keys and 24 for values"),
    ("qwen3_next", "16 elements for keys and 24 for values"),
    ("deepseek_v2", "queries without a latent vector"),
];

/// Writes each folder as a GGUF file in memory, and compares its logits, rows or scores with those of transformers; or of the folder,
/// where its configuration had to be changed.
pub fn convert_all(backend: &dyn Backend) {
    const CONTEXT: usize = 256;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/architectures/hf");
    let all: Value = serde_json::from_slice(&fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let positions: Vec<usize> =
        all["positions"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap() as usize).collect();
    let tokens = weights::tokens(positions[positions.len() - 1] + 1, all["vocab"].as_u64().unwrap());
    let options = LoadOptions { max_context: Some(CONTEXT) };
    let run = |model: Model| match model.is_encoder() {
        true => encode(backend, model, &tokens, &positions, CONTEXT).unwrap(),
        false => run(backend, model, CONTEXT, &tokens, &CHUNKS, &positions, OutputKind::Logits).unwrap(),
    };
    let mut failures = Vec::new();
    for case in all["cases"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let mut path = write(name, case, &all["tokenizer"]);
        let mut expected = read(&folder.join(format!("{name}.logits")));
        if let Some((_, message, field)) = NOT_CONVERTED.iter().find(|refused| refused.0 == name) {
            let error = ModelFile::open(&path).unwrap().contents().map(drop).unwrap_err().to_string();
            assert!(error.contains(message), "{name}: {error}");
            let Some(field) = *field else { continue };
            let mut case = case.clone();
            case["config"].as_object_mut().unwrap().remove(field);
            if field == "mamba_rms_norm" {
                let has_norm = |tensor: &Value| tensor[0].as_str().unwrap().ends_with("mamba.norm.weight");
                case["tensors"].as_array_mut().unwrap().retain(|tensor| !has_norm(tensor));
            }
            path = write(name, &case, &all["tokenizer"]);
            expected = run(Model::open(&path, &options).unwrap());
        }
        let file = ModelFile::open(&path).unwrap();
        let contents = match file.contents() {
            Ok(contents) => contents,
            Err(error) => {
                failures.push(format!("{name}: {error}"));
                continue;
            }
        };
        let notes = file.differences_in_llama_cpp(&contents).unwrap();
        let noted = NOTED.iter().find(|noted| noted.0 == name).map(|noted| noted.1);
        let is_noted = |part: &str| notes.len() == 1 && notes[0].contains(part);
        assert!(noted.map_or(notes.is_empty(), is_noted), "{name}: {notes:?}");
        let bytes = contents.write(Vec::new()).unwrap();
        let error = far(&run(super::load(name, bytes, CONTEXT)), &expected);
        println!("{name:16} error {error:.1e} of {ROUNDING:.1e}");
        if error.is_nan() || error > ROUNDING {
            failures.push(format!("{name}: {error:.1e}, more than {ROUNDING:.1e}"));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// The distance of two rows of numbers. A single number has no spread.
pub fn far(own: &[f32], expected: &[f32]) -> f32 {
    if own.len() == 1 { (own[0] - expected[0]).abs() } else { distance(own, expected) }
}

/// The rows of an encoder at `positions`; or the numbers of a classifier, of a pair of texts.
fn encode(
    backend: &dyn Backend,
    model: Model,
    tokens: &[u32],
    positions: &[usize],
    context: usize,
) -> Option<Vec<f32>> {
    let (pooling, head, hidden) = (model.pooling.clone().ok()?, model.head.clone(), model.program.hidden);
    let run = |model: Model, tokens: &[u32], positions: &[usize]| {
        run(backend, model, context, tokens, &[tokens.len()], positions, OutputKind::Embedding)
    };
    let Some(classifier) = head.classifier else { return run(model, tokens, positions) };
    let kinds = model.program.embed().and_then(|embed| embed.types).map_or(1, |types| types.count);
    let second = if kinds > 1 { model.program.vocab as u32 } else { 0 };
    let of_pair = |(at, token): (usize, &u32)| token + if at >= SECOND { second } else { 0 };
    let tokens: Vec<u32> = tokens.iter().enumerate().map(of_pair).collect();
    let count = if pooling == Pooling::Mean { tokens.len() } else { 1 };
    let mut pooled = vec![0.0; hidden];
    let rows = run(model, &tokens, &(0..count).collect::<Vec<_>>())?;
    for row in rows.chunks_exact(hidden) {
        pooled.iter_mut().zip(row).for_each(|(sum, x)| *sum += x / count as f32);
    }
    Some(classifier.logits(&pooled))
}

/// A tensor of a folder: name, shape and numbers.
pub struct Numbers {
    pub name: String,
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// Returns the tensors of a case.
pub fn tensors(case: &Value) -> Vec<Numbers> {
    let tensor = |tensor: &Value| {
        let (name, center, spread) =
            (tensor[0].as_str().unwrap(), weights::number(&tensor[1]), weights::number(&tensor[2]));
        let shape: Vec<usize> =
            tensor[3].as_array().unwrap().iter().map(|dim| dim.as_u64().unwrap() as usize).collect();
        let values = weights::uniform(name, shape.iter().product()).map(|noise| noise * spread + center);
        Numbers { name: name.to_owned(), shape, values: values.collect() }
    };
    case["tensors"].as_array().unwrap().iter().map(tensor).collect()
}

/// Writes the folder of a case as the folder `to`.
pub fn write_case(name: &str, to: &Path) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/architectures/hf");
    let all: Value = serde_json::from_slice(&fs::read(folder.join("cases.json")).unwrap()).unwrap();
    let case = all["cases"].as_array().unwrap().iter().find(|case| case["name"] == name).unwrap();
    let from = write(&format!("{name}-import"), case, &all["tokenizer"]);
    fs::create_dir_all(to).unwrap();
    for file in fs::read_dir(&from).unwrap().map(Result::unwrap) {
        fs::rename(file.path(), to.join(file.file_name())).unwrap();
    }
    fs::remove_dir(from).unwrap();
}

/// Writes the folder of a case.
pub fn write(name: &str, case: &Value, tokenizer: &Value) -> std::path::PathBuf {
    let all = tensors(case).into_iter().map(|tensor| {
        let bytes = tensor.values.iter().flat_map(|value| value.to_le_bytes()).collect();
        (tensor.name, "F32", tensor.shape, bytes)
    });
    write_folder(name, &case["config"], tokenizer, all)
}

/// Writes a folder with these tensors: name, type, shape and bytes.
pub fn write_folder(
    name: &str,
    config: &Value,
    tokenizer: &Value,
    tensors: impl Iterator<Item = (String, &'static str, Vec<usize>, Vec<u8>)>,
) -> std::path::PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("hf-{}-{name}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let start = data.len();
        data.extend(bytes);
        let offsets = [start, data.len()];
        header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
    }
    let header = Value::Object(header).to_string();
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    fs::write(folder.join("model.safetensors"), file).unwrap();
    folder
}
