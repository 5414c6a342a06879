//! Outputs of an encoder for each token of a text, beside its embedding: weights of a sparse vector, and vectors to compare
//! token by token (bge-m3).

use std::collections::BTreeMap;

use crate::{
    error::ModelError,
    hf::HfFolder,
    text_head::{DenseActivation, DenseLayer, Layers},
    tokenizer::{Tokenizer, TokenizerConfig},
};

/// Files of the layers, beside a model's weights.
pub(crate) const SPARSE: &str = "sparse_linear.pt";
pub(crate) const MULTI_VECTOR: &str = "colbert_linear.pt";

/// Weighs the tokens of a text, for search by words.
#[derive(Clone, Debug, PartialEq)]
pub struct SparseHead {
    /// To one output.
    layer: DenseLayer,
    /// Names of tokens without a weight: beginning, end, padding, unknown.
    unused_names: [String; 4],
    /// Their ids, sorted, once [`SparseHead::find_unused`] has found them.
    unused: Vec<u32>,
}

/// Computes a vector for each token of a text, for search by late interaction.
#[derive(Clone, Debug, PartialEq)]
pub struct MultiVectorHead {
    layer: DenseLayer,
}

impl SparseHead {
    /// Returns the tokens of a text with weights above 0, sorted. A token that occurs several times has its largest weight.
    ///
    /// - `tokens`: ids of the text
    /// - `rows`: `[tokens, hidden]`, the hidden states before the head
    pub fn weights(&self, tokens: &[u32], rows: &[f32]) -> Vec<(u32, f32)> {
        let mut weights = BTreeMap::new();
        for (&token, row) in tokens.iter().zip(rows.chunks_exact(self.layer.inputs())) {
            let weight = self.layer.apply(row)[0];
            if weight > 0.0 && self.unused.binary_search(&token).is_err() {
                let largest = weights.entry(token).or_insert(weight);
                *largest = weight.max(*largest);
            }
        }
        weights.into_iter().collect()
    }

    /// Reads the layer of a folder; `None` if it has none.
    pub(crate) fn from_hf(folder: &HfFolder) -> Result<Option<Self>, ModelError> {
        let Some(layer) = layer(folder, SPARSE, DenseActivation::Relu)? else { return Ok(None) };
        if layer.outputs() != 1 {
            let problem = format!("{SPARSE}: a token has {} weights, not one", layer.outputs());
            return Err(ModelError::Config(problem));
        }
        let config = folder.tokenizer_config()?;
        let config = config.as_deref().map(TokenizerConfig::parse).transpose()?.unwrap_or_default();
        // Defaults of the tokenizers of XLM-RoBERTa.
        let unused_names = [
            (config.cls_token, "<s>"),
            (config.eos_token, "</s>"),
            (config.pad_token, "<pad>"),
            (config.unk_token, "<unk>"),
        ]
        .map(|(name, default)| name.unwrap_or_else(|| default.to_owned()));
        Ok(Some(Self { layer, unused_names, unused: Vec::new() }))
    }

    /// Finds the ids of tokens without a weight.
    pub(crate) fn find_unused(&mut self, tokenizer: &Tokenizer) {
        self.unused = self.unused_names.iter().filter_map(|name| tokenizer.token_id(name)).collect();
        self.unused.sort_unstable();
    }

    /// Elements of a row.
    pub(crate) fn inputs(&self) -> usize {
        self.layer.inputs()
    }
}

impl MultiVectorHead {
    /// Returns a vector for each token except the first, which stands for the whole text. Their lengths are not made one.
    ///
    /// - `rows`: `[tokens, hidden]`, the hidden states before the head
    pub fn vectors(&self, rows: &[f32]) -> Vec<Vec<f32>> {
        let vector =
            |row: &[f32]| self.layer.rows().map(|(weights, bias)| dot(row, weights) + bias).collect();
        rows.chunks_exact(self.layer.inputs()).skip(1).map(vector).collect()
    }

    /// Returns the number of elements of a vector.
    pub fn width(&self) -> usize {
        self.layer.outputs()
    }

    /// Reads the layer of a folder; `None` if it has none.
    pub(crate) fn from_hf(folder: &HfFolder) -> Result<Option<Self>, ModelError> {
        Ok(layer(folder, MULTI_VECTOR, DenseActivation::Identity)?.map(|layer| Self { layer }))
    }

    /// Elements of a row.
    pub(crate) fn inputs(&self) -> usize {
        self.layer.inputs()
    }
}

/// Returns `a · b`, in sums that vectorize: a text of 8192 tokens has 8 billion products in bge-m3.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    let mut sums = [0f32; 16];
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// The layer in the file `name`, which has the tensors `weight` and `bias`.
fn layer(
    folder: &HfFolder,
    name: &str,
    activation: DenseActivation,
) -> Result<Option<DenseLayer>, ModelError> {
    let Some(tensors) = folder.torch_tensors(name)? else { return Ok(None) };
    let bad = |problem: String| ModelError::BadFile { path: folder.path.join(name), problem };
    if let Some(other) = tensors.iter().find(|tensor| !["weight", "bias"].contains(&tensor.name.as_str())) {
        return Err(bad(format!("tensor `{}` is not part of a linear layer", other.name)));
    }
    if let Some(tensor) = tensors.iter().find(|tensor| tensor.name == "weight" && tensor.shape.len() != 2) {
        return Err(bad(format!("tensor `weight` has the shape {:?}, which is not a matrix", tensor.shape)));
    }
    let layer = Layers(&tensors).layer("", activation).map_err(|error| bad(error.to_string()))?;
    layer.map(Some).ok_or_else(|| bad("it has no tensor `weight`".to_owned()))
}
