//! Quantized Hugging Face folders: matrices as the writers of each scheme pack them, against weights that
//! `quantized/make.py` has computed.

use std::{fs, path::Path};

use crate::tiny::{models, run, safetensors};
use half::f16;
use paguro_backend::WeightFormat;
use paguro_model::{LoadOptions, Model, ModelFile, tensor::DType};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().map(|digit| digit.to_digit(16).unwrap() as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn cases() -> Vec<Value> {
    serde_json::from_str(include_str!("quantized/cases.json")).unwrap()
}

/// A folder with this quantization and these tensors: name, type, shape, bytes in hex.
fn open(quantization: &Value, tensors: &[Value]) -> ModelFile {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), quantization, tensors);
    ModelFile::open(folder.path()).unwrap()
}

fn write(folder: &Path, quantization: &Value, tensors: &[Value]) {
    fs::write(folder.join("config.json"), json!({"quantization_config": quantization}).to_string()).unwrap();
    let (mut header, mut data) = (Map::new(), Vec::new());
    for tensor in tensors {
        let start = data.len();
        data.extend(hex(tensor[3].as_str().unwrap()));
        let entry = json!({"dtype": tensor[1], "shape": tensor[2], "data_offsets": [start, data.len()]});
        header.insert(tensor[0].as_str().unwrap().to_owned(), entry);
    }
    fs::write(folder.join("model.safetensors"), safetensors::with_header(&Value::Object(header), &data))
        .unwrap();
}

#[test]
fn every_scheme_gives_the_weights_of_its_definition() {
    for case in cases() {
        let name = case["name"].as_str().unwrap();
        let file = open(&case["config"], case["tensors"].as_array().unwrap());
        let usable = file.usable_tensors().unwrap_or_else(|error| panic!("{name}: {error}"));
        let [matrix] = &usable[..] else { panic!("{name}: {usable:?}") };
        assert_eq!(
            (matrix.name.as_str(), json!(matrix.shape)),
            ("m.weight", case["shape"].clone()),
            "{name}"
        );
        let DType::Weight(format) = matrix.dtype else { panic!("{name}: {:?}", matrix.dtype) };
        // In pieces that begin and end inside of rows.
        let mut bytes = vec![0; matrix.bytes.len()];
        for (index, out) in bytes.chunks_mut(1009).enumerate() {
            matrix.bytes.read_at(index * 1009, out).unwrap();
        }
        let mut weights = vec![0.0; matrix.shape.iter().product()];
        format.dequantize(&bytes, &mut weights);
        weights.iter_mut().for_each(|weight| *weight += 0.0); // no negative zeros
        let digest = Sha256::digest(weights.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
        let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digest, case["sha256"], "{name} as {format}: {:?}, not {}", &weights[..4], case["first"]);
        let [conversion] = &file.conversions()[..] else { panic!("{name}") };
        assert_eq!((conversion.to, conversion.matrices), (format, 1), "{name}");
    }
}

/// Zero points that `sym` excludes are found when they are read.
#[test]
fn zero_points_that_are_not_in_the_middle_are_not_taken_for_it() {
    let case = cases().into_iter().find(|case| case["name"] == "gptq-asym").unwrap();
    let mut config = case["config"].clone();
    config["sym"] = json!(true);
    let file = open(&config, case["tensors"].as_array().unwrap());
    let usable = file.usable_tensors().unwrap();
    let error = usable[0].bytes.read().unwrap_err().to_string();
    assert!(error.starts_with("`m.qweight` has a zero point of "), "{error}");
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    for case in cases() {
        let name = case["name"].as_str().unwrap();
        let tensors = case["tensors"].as_array().unwrap();
        for index in 0..tensors.len() {
            let optional = ["g_idx", "input_scale", "input_global_scale", "weight_shape"];
            if optional.iter().any(|it| tensors[index][0].as_str().unwrap().ends_with(it)) {
                continue;
            }
            for damage in ["missing", "shape", "type"] {
                let mut tensors = tensors.clone();
                match damage {
                    "missing" => drop(tensors.remove(index)),
                    _ => {
                        tensors[index][1] = json!(if damage == "type" { "U16" } else { "U8" });
                        tensors[index][2] = json!([1, 3, 7]);
                        tensors[index][3] = json!("00".repeat(if damage == "type" { 42 } else { 21 }));
                    }
                }
                // Without scales, MLX has left a matrix as it is. Models then refuse its type, or miss it.
                let refused = match open(&case["config"], &tensors).usable_tensors() {
                    Err(_) => true,
                    Ok(usable) => !usable.iter().any(|it| matches!(it.dtype, DType::Weight(format) if format != WeightFormat::F32 && it.name == "m.weight")),
                };
                assert!(refused, "{name}: {damage}, {}", case["tensors"][index][0]);
            }
        }
    }
}

#[test]
fn schemes_that_are_not_read_are_named() {
    for (quantization, expected) in [
        (json!({"quant_method": "hqq", "nbits": 4}), "a quantized Hugging Face model (hqq)"),
        (json!({"quant_method": "aqlm"}), "a quantized Hugging Face model (aqlm)"),
        (json!({}), "a quantized Hugging Face model (unknown method)"),
        (json!({"quant_method": "gptq", "bits": 3}), "quantization to 3 bits"),
        (
            json!({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
            "GPTQ's checkpoint format `marlin`",
        ),
        (json!({"quant_method": "awq", "bits": 4, "version": "gemv"}), "AWQ version `gemv`"),
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), "FP8 in `e5m2`"),
        (json!({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}), "modelopt's `W4A8_AWQ`"),
        (
            json!({"quant_method": "compressed-tensors", "format": "marlin-24"}),
            "compressed-tensors' `marlin-24` without groups",
        ),
        (json!({"group_size": 32, "bits": 4, "mode": "mxfp4"}), "MLX's quantization in mode `mxfp4`"),
    ] {
        let error = open(&quantization, &[]).usable_tensors().unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

/// A model whose matrices MLX has quantized gives the logits of one that has the decoded weights in f32, to the bit; also
/// where the architecture splits fused matrices.
#[test]
fn whole_models_are_those_of_their_decoded_weights() {
    for name in ["llama", "phi3"] {
        let mut decoded = models::all().into_iter().find(|model| model.name == name).unwrap();
        let mut quantized = Vec::new();
        for tensor in &mut decoded.tensors {
            let base = tensor.name.strip_suffix(".weight").unwrap_or(&tensor.name).to_owned();
            if tensor.shape.len() != 2 {
                let bytes = tensor.bytes();
                quantized.push((tensor.name.clone(), "F32", tensor.shape.clone(), bytes));
                continue;
            }
            let (rows, cols) = (tensor.shape[0], tensor.shape[1]);
            let (mut words, mut scales, mut biases) = (Vec::new(), Vec::new(), Vec::new());
            for group in tensor.values.as_chunks_mut::<32>().0 {
                let low = group.iter().copied().fold(f32::INFINITY, f32::min);
                let high = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let (scale, bias) = (f16::from_f32((high - low) / 15.0), f16::from_f32(low));
                let quants =
                    group.map(|x| ((x - bias.to_f32()) / scale.to_f32()).round().clamp(0.0, 15.0) as u32);
                for (x, q) in group.iter_mut().zip(quants) {
                    *x = scale.to_f32() * q as f32 + bias.to_f32();
                }
                for eight in quants.as_chunks::<8>().0 {
                    let word = eight.iter().rev().fold(0, |word, q| word << 4 | q);
                    words.extend(word.to_le_bytes());
                }
                scales.extend(scale.to_le_bytes());
                biases.extend(bias.to_le_bytes());
            }
            quantized.push((format!("{base}.weight"), "U32", vec![rows, cols / 8], words));
            quantized.push((format!("{base}.scales"), "F16", vec![rows, cols / 32], scales));
            quantized.push((format!("{base}.biases"), "F16", vec![rows, cols / 32], biases));
        }
        let folder = tempfile::tempdir().unwrap();
        let tokens = [9, 8, 7, 6, 5, 4, 3, 4, 5];
        let logits = || {
            let model =
                Model::open(folder.path(), &LoadOptions::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
            run::logits(&model, &tokens)
        };
        decoded.write_hf(folder.path());
        let expected = logits();
        let config = folder.path().join("config.json");
        let mut json: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
        json["quantization"] = json!({"group_size": 32, "bits": 4});
        fs::write(&config, json.to_string()).unwrap();
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, dtype, shape, bytes) in quantized {
            let range = [data.len(), data.len() + bytes.len()];
            header.insert(name, json!({"dtype": dtype, "shape": shape, "data_offsets": range}));
            data.extend(bytes);
        }
        let file = safetensors::with_header(&Value::Object(header), &data);
        fs::write(folder.path().join("model.safetensors"), file).unwrap();
        assert_eq!(logits(), expected, "{name}");
    }
}
