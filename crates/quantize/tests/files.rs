//! Whole files: what they contain, and what is left behind when they cannot be written.

use std::{fs, path::Path, sync::atomic::AtomicBool};

use paguro_backend::{Bytes, WeightFormat};
use paguro_model::{
    gguf::{Contents, Gguf, Metadata, Value},
    tensor::{DType, Tensor},
};
use paguro_quantize::{Importance, Job, Mixture, QuantizeError, Report, quantize};

/// A tensor with values that depend on its name.
fn tensor(name: &str, format: WeightFormat, shape: &[usize]) -> Tensor {
    let count: usize = shape.iter().product();
    let seed = name.bytes().map(f32::from).sum::<f32>();
    let values: Vec<f32> = (0..count).map(|i| (seed + i as f32 * 0.37).sin()).collect();
    let bytes = Bytes::from(format.quantize(&values).unwrap());
    let (name, dtype, shape) = (name.to_owned(), DType::Weight(format), shape.to_vec());
    Tensor { name, dtype, shape, bytes, offset: 0, file: 0 }
}

fn contents() -> Contents {
    let mut metadata = Metadata::default();
    metadata.set("general.architecture", Value::String("llama".into()));
    metadata.set("general.alignment", Value::U32(64));
    metadata.set("llama.block_count", Value::U32(1));
    let tensors = vec![
        tensor("token_embd.weight", WeightFormat::F16, &[5, 256]),
        tensor("blk.0.ffn_down.weight", WeightFormat::BF16, &[3, 512]),
        tensor("blk.0.attn_norm.weight", WeightFormat::F32, &[7]),
        tensor("blk.0.attn_q.weight", WeightFormat::F32, &[9, 96]),
        tensor("blk.0.ffn_up_exps.weight", WeightFormat::F16, &[2, 3, 256]),
        tensor("blk.0.attn_k.weight", WeightFormat::Q8_0, &[2, 256]),
    ];
    Contents { metadata, tensors }
}

fn write(
    contents: &Contents,
    mixture: Option<Mixture>,
    threads: usize,
    path: &Path,
) -> Result<Report, QuantizeError> {
    let stop = AtomicBool::new(false);
    quantize(Job { contents, mixture, importance: None, threads, stop: &stop }, path, |_| ())
}

#[test]
fn a_file_has_the_formats_of_its_mixture() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.gguf");
    let contents = contents();
    let report = write(&contents, Some(Mixture::Q4_K_M), 2, &path).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(gguf.file_type(), Some("Q4_K_M"));
    assert_eq!(gguf.metadata.u32("general.quantization_version"), Some(2));
    assert_eq!(gguf.metadata.u32("llama.block_count"), Some(1));
    let found: Vec<_> = gguf.tensors.iter().map(|it| (it.name.as_str(), it.dtype.to_string())).collect();
    let expected = [
        ("token_embd.weight", "Q6_K"), // also the head
        ("blk.0.attn_k.weight", "Q4_K"),
        ("blk.0.attn_norm.weight", "F32"),
        ("blk.0.attn_q.weight", "Q5_0"), // rows of 96
        ("blk.0.ffn_down.weight", "Q6_K"),
        ("blk.0.ffn_up_exps.weight", "Q4_K"),
    ];
    assert_eq!(found, expected.map(|(name, format)| (name, format.to_owned())));
    assert_eq!(report.fallbacks, [("blk.0.attn_q.weight".to_owned(), WeightFormat::Q5_0)]);
    assert_eq!((report.tensors, report.requantized), (6, 1));
    for written in &gguf.tensors {
        assert!(written.offset.is_multiple_of(64));
        let source = contents.tensors.iter().find(|it| it.name == written.name).unwrap();
        assert_eq!(source.shape, written.shape);
        let (before, after) = (decoded(source), decoded(written));
        let error =
            before.iter().zip(&after).map(|(x, y)| (x - y) * (x - y)).sum::<f32>() / before.len() as f32;
        assert!(error < 0.005, "{}: {error}", written.name);
    }
    // The number of threads changes nothing.
    let other = folder.path().join("other.gguf");
    write(&contents, Some(Mixture::Q4_K_M), 7, &other).unwrap();
    assert_eq!(fs::read(&path).unwrap(), fs::read(&other).unwrap());
}

fn decoded(tensor: &Tensor) -> Vec<f32> {
    let mut values = vec![0.0; tensor.elements() as usize];
    tensor.dtype.weight_format().unwrap().dequantize(&tensor.bytes.read().unwrap(), &mut values);
    values
}

#[test]
fn a_file_without_a_mixture_is_a_copy() {
    let folder = tempfile::tempdir().unwrap();
    let (path, contents) = (folder.path().join("out.gguf"), contents());
    write(&contents, None, 1, &path).unwrap();
    let gguf = Gguf::open(&path).unwrap();
    assert_eq!(gguf.metadata, contents.metadata);
    for (written, source) in gguf.tensors.iter().zip(&contents.tensors) {
        assert_eq!(
            (&written.name, &written.dtype, &written.shape),
            (&source.name, &source.dtype, &source.shape)
        );
        assert_eq!(written.bytes.read().unwrap(), source.bytes.read().unwrap());
    }
}

#[test]
fn importance_is_for_one_model() {
    let folder = tempfile::tempdir().unwrap();
    let (path, contents) = (folder.path().join("out.gguf"), contents());
    let stop = AtomicBool::new(false);
    let mut importance = Importance::default();
    importance.add("blk.0.ffn_up_exps.weight", &[[0.0; 256], [4.0; 256]].concat(), &[0.0, 2.0]).unwrap();
    importance.add("blk.0.ffn_down.weight", &[1.0; 512], &[2.0]).unwrap();
    let write = |importance: &Importance| {
        let importance = Some(importance);
        let job =
            Job { contents: &contents, mixture: Some(Mixture::Q4_0), importance, threads: 1, stop: &stop };
        quantize(job, &path, |_| ())
    };
    let report = write(&importance).unwrap();
    // Also in the file.
    assert_eq!(Gguf::open(&path).unwrap().metadata.u32("quantize.imatrix.entries_count"), Some(2));
    assert_eq!(report.unweighted, ["blk.0.attn_k.weight", "blk.0.attn_q.weight"]);
    importance.add("blk.0.attn_k.weight", &[1.0; 128], &[2.0]).unwrap();
    let error = write(&importance).unwrap_err().to_string();
    assert!(error.contains("128 values for `blk.0.attn_k.weight`, expected 256"), "{error}");
}

#[test]
fn nothing_is_left_of_a_file_that_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.gguf");
    let refused = |contents: &Contents, mixture, stop: bool, expected: &str| {
        let stop = AtomicBool::new(stop);
        let job = Job { contents, mixture: Some(mixture), importance: None, threads: 2, stop: &stop };
        let error = quantize(job, &path, |_| ()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    };
    refused(&contents(), Mixture::Q4_0, true, "interrupted");
    refused(&contents(), Mixture::Q2_K_S, false, "Q2_K_S needs an importance matrix");
    refused(&contents(), Mixture::IQ1_S, false, "IQ1_S needs an importance matrix");
    let with = |values: &[f32]| {
        let mut contents = contents();
        let mut all = vec![0.5; 512];
        all[256..256 + values.len()].copy_from_slice(values);
        let bytes = Bytes::from(WeightFormat::F32.quantize(&all).unwrap());
        let large = tensor("blk.0.large.weight", WeightFormat::F32, &[2, 256]);
        contents.tensors.push(Tensor { bytes, ..large });
        contents
    };
    let row = "tensor `blk.0.large.weight`, row 1: values that are not finite in ";
    refused(&with(&[f32::INFINITY]), Mixture::Q8_0, false, &format!("{row}the source"));
    refused(&with(&[1e6]), Mixture::F16, false, &format!("{row}F16"));
}
