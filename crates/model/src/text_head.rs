//! Layers after pooling: dense layers of embedding models, and classifiers of rerankers.

use std::fs;

use paguro_backend::{WeightFormat, reference::ops};
use serde_json::{Map, Value};

use crate::{
    error::ModelError,
    gguf::{self, Contents, Metadata},
    hf::HfFolder,
    tensor::{DType, Tensor},
    token_heads::{MultiVectorHead, SparseHead},
};

/// The vector that dense layers of sentence-transformers read and write.
const SENTENCE: &str = "sentence_embedding";

/// Names of dense layers in GGUF files.
const DENSE: [&str; 2] = ["dense_2", "dense_3"];

/// Layers that a model applies to a pooled vector.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TextHead {
    /// Applied in order (sentence-transformers' `Dense`, EmbeddingGemma).
    pub dense: Vec<DenseLayer>,
    /// True if embeddings have length one.
    pub normalize: bool,
    /// Scores of labels, or of a pair of texts.
    pub classifier: Option<Classifier>,
    /// Weights of a sparse vector.
    pub sparse: Option<SparseHead>,
    /// A vector for each token.
    pub multi_vector: Option<MultiVectorHead>,
}

/// `y = norm(activation(x·Wᵀ + b))`
#[derive(Clone, Debug, PartialEq)]
pub struct DenseLayer {
    /// Elements of `x`.
    inputs: usize,
    /// `[outputs, inputs]`
    weight: Vec<f32>,
    /// `[outputs]`
    bias: Option<Vec<f32>>,
    activation: DenseActivation,
    norm: Option<DenseNorm>,
}

#[derive(Clone, Debug, PartialEq)]
struct DenseNorm {
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    eps: f32,
}

/// The activation of a [`DenseLayer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DenseActivation {
    Identity,
    Tanh,
    Gelu,
    Relu,
}

/// A classifier on the pooled vector.
#[derive(Clone, Debug, PartialEq)]
pub struct Classifier {
    /// Names of the scores, in order. A reranker has one.
    pub labels: Vec<String>,
    /// True if a text may have several labels at once.
    is_multi_label: bool,
    layers: Vec<DenseLayer>,
}

impl TextHead {
    /// Returns the embedding of a pooled vector. Its length is not made one.
    pub fn embedding(&self, pooled: Vec<f32>) -> Vec<f32> {
        self.dense.iter().fold(pooled, |x, layer| layer.apply(&x))
    }

    /// Returns the number of elements of an embedding of a model whose rows have `hidden` elements.
    pub fn width(&self, hidden: usize) -> usize {
        self.dense.last().map_or(hidden, DenseLayer::outputs)
    }

    /// Checks that the layers fit each other and a model of `hidden` elements.
    pub(crate) fn check(&self, hidden: usize) -> Result<(), ModelError> {
        let chain = |layers: &[DenseLayer]| {
            let fits = |inputs: usize, layer: &DenseLayer| {
                (layer.inputs == inputs).then(|| layer.outputs()).ok_or_else(|| {
                    let problem = format!("a dense layer reads {} elements of {inputs}", layer.inputs);
                    ModelError::Config(problem)
                })
            };
            layers.iter().try_fold(hidden, fits)
        };
        chain(&self.dense)?;
        for inputs in [
            self.sparse.as_ref().map(SparseHead::inputs),
            self.multi_vector.as_ref().map(MultiVectorHead::inputs),
        ] {
            if let Some(inputs) = inputs.filter(|&inputs| inputs != hidden) {
                return Err(ModelError::Config(format!(
                    "a layer for tokens reads {inputs} elements of {hidden}"
                )));
            }
        }
        self.classifier.iter().try_for_each(|classifier| chain(&classifier.layers).map(|_| ()))
    }

    /// From a GGUF file: `dense_2`, `dense_3` and `cls`, as llama.cpp names them.
    pub(crate) fn from_gguf(
        metadata: &Metadata,
        architecture: &str,
        tensors: &[Tensor],
    ) -> Result<Self, ModelError> {
        let file = Layers(tensors);
        let dense = DENSE.map(|name| file.layer(name, DenseActivation::Identity));
        let [first, second] = dense;
        let dense = first?.into_iter().chain(second?).collect();
        let activation = match architecture {
            "modern-bert" => DenseActivation::Gelu,
            _ => DenseActivation::Tanh,
        };
        let mut layers: Vec<DenseLayer> = file.layer("cls", activation)?.into_iter().collect();
        if let Some(layer) = layers.last_mut() {
            let eps = metadata.f32(&format!("{architecture}.attention.layer_norm_epsilon")).unwrap_or(1e-5);
            layer.norm = file.norm("cls.norm", eps)?;
        }
        layers.extend(file.layer("cls.output", DenseActivation::Identity)?);
        let labels = metadata.strings(&format!("{architecture}.classifier.output_labels"));
        let classifier = Classifier::new(layers, labels.unwrap_or_default().to_vec(), false);
        Ok(Self { dense, normalize: true, classifier, ..Self::default() })
    }

    /// From a folder: the modules of sentence-transformers, and the classifier of the model's class.
    pub(crate) fn from_hf(folder: &HfFolder, class: &str, modules: &Value) -> Result<Self, ModelError> {
        let mut head = Self {
            sparse: SparseHead::from_hf(folder)?,
            multi_vector: MultiVectorHead::from_hf(folder)?,
            ..Self::default()
        };
        for module in modules.as_array().into_iter().flatten() {
            match kind_of(module) {
                "Normalize" => head.normalize = true,
                "Dense" => head.dense.push(dense_module(folder, module)?),
                _ => {}
            }
        }
        let Some(family) = class.strip_suffix("ForSequenceClassification") else { return Ok(head) };
        let file = Layers(&folder.tensors);
        let layers = match family {
            "Bert" => [
                file.layer("bert.pooler.dense", DenseActivation::Tanh)?,
                file.layer("classifier", DenseActivation::Identity)?,
            ],
            "ModernBert" => {
                let eps = folder.config.get("norm_eps").and_then(Value::as_f64).unwrap_or(1e-5);
                let dense = file.layer("head.dense", DenseActivation::Gelu)?;
                let norm = file.norm("head.norm", eps as f32)?;
                let dense = dense.map(|dense| DenseLayer { norm, ..dense });
                [dense, file.layer("classifier", DenseActivation::Identity)?]
            }
            _ => [
                file.layer("classifier.dense", DenseActivation::Tanh)?,
                file.layer("classifier.out_proj", DenseActivation::Identity)?,
            ],
        };
        let layers: Vec<DenseLayer> = layers.into_iter().flatten().collect();
        if layers.len() < 2 {
            return Err(ModelError::Config(format!("{class} without the tensors of its classifier")));
        }
        let problem = folder.config.get("problem_type").and_then(Value::as_str);
        let is_multi_label = problem == Some("multi_label_classification");
        head.classifier = Classifier::new(layers, labels(&folder.config), is_multi_label);
        Ok(head)
    }
}

impl TextHead {
    /// Adds the layers to a GGUF file, as [`TextHead::from_gguf`] reads them.
    pub(crate) fn write_gguf(&self, architecture: &str, contents: &mut Contents) {
        let classifier =
            self.classifier.iter().flat_map(|classifier| &classifier.layers).zip(["cls", "cls.output"]);
        for (layer, name) in self.dense.iter().zip(DENSE).chain(classifier) {
            layer.write_gguf(name, &mut contents.tensors);
            if name.starts_with("dense") {
                for (key, size) in [("feat_in", layer.inputs), ("feat_out", layer.outputs())] {
                    let key = format!("{architecture}.{name}_{key}");
                    contents.metadata.set(&key, gguf::Value::U32(size as u32));
                }
            }
        }
        if let Some(classifier) = &self.classifier {
            let labels = gguf::Array::Strings(classifier.labels.clone());
            let key = format!("{architecture}.classifier.output_labels");
            contents.metadata.set(&key, gguf::Value::Array(labels));
        }
    }

    /// True if `other` makes the same vectors of length one, and the same scores.
    pub(crate) fn computes_the_same(&self, other: &Self) -> bool {
        let scores = |head: &Self| {
            let classifier = head.classifier.clone()?;
            // The scores of one label are the same with and without others.
            let is_multi_label = classifier.is_multi_label && classifier.labels.len() > 1;
            Some(Classifier { is_multi_label, ..classifier })
        };
        self.dense == other.dense && scores(self) == scores(other)
    }
}

impl Classifier {
    fn new(layers: Vec<DenseLayer>, mut labels: Vec<String>, is_multi_label: bool) -> Option<Self> {
        let outputs = layers.last()?.outputs();
        labels.truncate(outputs);
        let unnamed = labels.len()..outputs;
        labels.extend(unnamed.map(|label| format!("LABEL_{label}")));
        Some(Self { labels, is_multi_label, layers })
    }

    /// Returns the numbers of the labels as the last layer computes them.
    pub fn logits(&self, pooled: &[f32]) -> Vec<f32> {
        self.layers.iter().fold(pooled.to_vec(), |x, layer| layer.apply(&x))
    }

    /// Returns the scores of the labels, between 0 and 1: the sigmoid of each if there is one or a text may have several,
    /// otherwise a softmax.
    pub fn scores(&self, pooled: &[f32]) -> Vec<f32> {
        let logits: Vec<f64> = self.logits(pooled).into_iter().map(f64::from).collect();
        if self.is_multi_label || logits.len() == 1 {
            return logits.into_iter().map(|logit| (1.0 / (1.0 + (-logit).exp())) as f32).collect();
        }
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = logits.iter().map(|logit| (logit - largest).exp()).sum();
        logits.into_iter().map(|logit| ((logit - largest).exp() / total) as f32).collect()
    }
}

impl DenseLayer {
    pub(crate) fn inputs(&self) -> usize {
        self.inputs
    }

    pub(crate) fn outputs(&self) -> usize {
        self.weight.len() / self.inputs
    }

    /// Returns the weights of each output, with its bias.
    pub(crate) fn rows(&self) -> impl Iterator<Item = (&[f32], f32)> {
        let bias = |row: usize| self.bias.as_ref().map_or(0.0, |bias| bias[row]);
        self.weight.chunks_exact(self.inputs).enumerate().map(move |(row, weights)| (weights, bias(row)))
    }

    pub(crate) fn apply(&self, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0.0; self.outputs()];
        ops::linear(x, &self.weight, self.bias.as_deref(), &mut y);
        for y in &mut y {
            *y = match self.activation {
                DenseActivation::Identity => *y,
                DenseActivation::Tanh => y.tanh(),
                DenseActivation::Gelu => ops::activate(None, *y, paguro_backend::Activation::Gelu),
                DenseActivation::Relu => y.max(0.0),
            };
        }
        if let Some(DenseNorm { weight, bias, eps }) = &self.norm {
            ops::norm(&mut y, paguro_backend::NormKind::Layer, weight, bias.as_deref(), *eps);
        }
        y
    }
}

impl DenseLayer {
    fn write_gguf(&self, name: &str, tensors: &mut Vec<Tensor>) {
        let mut add = |name: String, shape: Vec<usize>, values: &[f32]| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let dtype = DType::Weight(WeightFormat::F32);
            tensors.push(Tensor { name, dtype, shape, bytes: bytes.into(), offset: 0, file: 0 });
        };
        let outputs = self.outputs();
        add(format!("{name}.weight"), vec![outputs, self.inputs], &self.weight);
        if let Some(bias) = &self.bias {
            add(format!("{name}.bias"), vec![outputs], bias);
        }
        if let Some(norm) = &self.norm {
            add(format!("{name}.norm.weight"), vec![outputs], &norm.weight);
            if let Some(bias) = &norm.bias {
                add(format!("{name}.norm.bias"), vec![outputs], bias);
            }
        }
    }
}

/// Tensors of a file, by name.
pub(crate) struct Layers<'a>(pub(crate) &'a [Tensor]);

/// A tensor's shape and values.
type Values<'a> = (&'a [usize], Vec<f32>);

impl Layers<'_> {
    fn values(&self, name: &str) -> Result<Option<Values<'_>>, ModelError> {
        let Some(tensor) = self.0.iter().find(|tensor| tensor.name == name) else { return Ok(None) };
        let format = tensor.dtype.weight_format().ok_or_else(|| ModelError::TensorType {
            tensor: tensor.name.clone(),
            dtype: tensor.dtype.to_string(),
            supported: "all formats of weights".to_owned(),
        })?;
        let unreadable = |error: std::io::Error| ModelError::Unreadable {
            tensor: tensor.name.clone(),
            problem: error.to_string(),
        };
        let bytes = tensor.bytes.read().map_err(unreadable)?;
        let mut values = vec![0.0; bytes.len() / format.block_bytes() * format.block_len()];
        format.dequantize(&bytes, &mut values);
        match values.iter().position(|value| !value.is_finite()) {
            Some(index) => Err(ModelError::NotFinite { tensor: tensor.name.clone(), index }),
            None => Ok(Some((&tensor.shape, values))),
        }
    }

    /// The layer `name`, if the file has it. The tensors of a layer without a name are `weight` and `bias`.
    pub(crate) fn layer(
        &self,
        name: &str,
        activation: DenseActivation,
    ) -> Result<Option<DenseLayer>, ModelError> {
        let part = |part: &str| if name.is_empty() { part.to_owned() } else { format!("{name}.{part}") };
        let Some((shape, weight)) = self.values(&part("weight"))? else { return Ok(None) };
        let inputs = shape.last().copied().unwrap_or(0);
        let outputs = weight.len().checked_div(inputs).unwrap_or(0);
        if outputs == 0 {
            return Err(ModelError::Config(format!("tensor `{}` has the shape {shape:?}", part("weight"))));
        }
        let bias = self.vector(&part("bias"), outputs)?;
        Ok(Some(DenseLayer { inputs, weight, bias, activation, norm: None }))
    }

    fn norm(&self, name: &str, eps: f32) -> Result<Option<DenseNorm>, ModelError> {
        let Some((shape, weight)) = self.values(&format!("{name}.weight"))? else { return Ok(None) };
        if shape.len() != 1 {
            return Err(ModelError::Config(format!("tensor `{name}.weight` has the shape {shape:?}")));
        }
        let bias = self.vector(&format!("{name}.bias"), weight.len())?;
        Ok(Some(DenseNorm { weight, bias, eps }))
    }

    fn vector(&self, name: &str, len: usize) -> Result<Option<Vec<f32>>, ModelError> {
        match self.values(name)? {
            Some((shape, values)) if values.len() != len => {
                Err(ModelError::Config(format!("tensor `{name}` has the shape {shape:?}, not [{len}]")))
            }
            found => Ok(found.map(|(_, values)| values)),
        }
    }
}

/// The last part of a module's type: `Dense` of `sentence_transformers.models.Dense`.
pub(crate) fn kind_of(module: &Value) -> &str {
    let name = module.get("type").and_then(Value::as_str).unwrap_or_default();
    name.rsplit('.').next().unwrap_or(name)
}

fn dense_module(folder: &HfFolder, module: &Value) -> Result<DenseLayer, ModelError> {
    let path = folder.module_folder(module)?;
    let config = folder.module_config(path)?;
    let input = config.get("module_input_name").and_then(Value::as_str).unwrap_or(SENTENCE);
    let output = config.get("module_output_name").and_then(Value::as_str).unwrap_or(input);
    if [input, output] != [SENTENCE; 2] {
        let what = format!("{path}: a dense layer from `{input}` to `{output}`");
        return Err(ModelError::unsupported_but(what, SENTENCE));
    }
    let name = config.get("activation_function").and_then(Value::as_str).unwrap_or("torch.nn.Tanh");
    let activation = match name.rsplit('.').next() {
        Some("Identity") => DenseActivation::Identity,
        Some("Tanh") => DenseActivation::Tanh,
        Some("GELU") => DenseActivation::Gelu,
        Some("ReLU") => DenseActivation::Relu,
        _ => {
            let what = format!("{path}: the activation `{name}`");
            return Err(ModelError::unsupported_but(what, "Identity, Tanh, GELU, ReLU"));
        }
    };
    let tensors = folder.module_tensors(path)?;
    let layer = Layers(&tensors).layer("linear", activation)?;
    if layer.as_ref().is_some_and(|layer| layer.bias.is_none())
        && config.get("bias") != Some(&Value::Bool(false))
    {
        return Err(ModelError::Config(format!(
            "{path} has no `linear.bias`, which its config.json announces"
        )));
    }
    layer.ok_or_else(|| {
        let file = folder.path.join(path).join("model.safetensors");
        let exists = fs::exists(&file).unwrap_or(false);
        let problem = if exists { "it has no `linear.weight`" } else { "it is missing" };
        ModelError::BadFile { path: file, problem: problem.to_owned() }
    })
}

/// `id2label` of a configuration, in the order of the ids.
fn labels(config: &Map<String, Value>) -> Vec<String> {
    let entries = config.get("id2label").and_then(Value::as_object).into_iter().flatten();
    let mut labels: Vec<(usize, String)> =
        entries.filter_map(|(id, label)| Some((id.parse().ok()?, label.as_str()?.to_owned()))).collect();
    labels.sort();
    let in_order = labels.iter().enumerate().all(|(index, (id, _))| index == *id);
    if in_order { labels.into_iter().map(|(_, label)| label).collect() } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(weight: &[f32], inputs: usize, activation: DenseActivation) -> DenseLayer {
        DenseLayer { inputs, weight: weight.to_vec(), bias: None, activation, norm: None }
    }

    #[test]
    fn scores_are_a_sigmoid_or_a_softmax() {
        let layers = vec![layer(&[1.0, 1.0], 2, DenseActivation::Identity)];
        let one = Classifier::new(layers, Vec::new(), false).unwrap();
        assert_eq!(one.labels, ["LABEL_0"]);
        assert_eq!((one.logits(&[1.0, -1.0]), one.scores(&[1.0, -1.0])), (vec![0.0], vec![0.5]));
        let layers = vec![layer(&[1.0, 0.0, 0.0, 1.0], 2, DenseActivation::Tanh)];
        let names = vec!["no".into(), "yes".into(), "more".into()];
        let two = Classifier::new(layers.clone(), names, false).unwrap();
        assert_eq!(two.labels, ["no", "yes"]);
        assert_eq!(two.scores(&[3.0, 3.0]), [0.5, 0.5]);
        let each = Classifier::new(layers, Vec::new(), true).unwrap();
        assert_eq!(each.scores(&[0.0, 0.0]), [0.5, 0.5]);
        assert!(each.scores(&[3.0, -3.0]).iter().sum::<f32>() > 0.99 && each.scores(&[3.0, 3.0])[0] > 0.7);
    }

    #[test]
    fn layers_that_do_not_fit_are_refused() {
        let dense = vec![
            layer(&[1.0; 6], 2, DenseActivation::Identity),
            layer(&[1.0; 8], 4, DenseActivation::Identity),
        ];
        let head = TextHead { dense, ..TextHead::default() };
        let problem = head.check(2).unwrap_err().to_string();
        assert!(problem.contains("a dense layer reads 4 elements of 3"), "{problem}");
        assert_eq!(head.width(2), 2);
    }
}
