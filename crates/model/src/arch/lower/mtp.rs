//! Heads for multi-token prediction: a layer after the last one, which joins the embedding of a token with the row that the
//! model has computed for the token before (DeepSeek V3, section 2.2). Embeddings and the last matrix are the model's unless
//! the head has its own.
//!
//! The row is that after the model's last norm, as vLLM, SGLang and llama.cpp have it. The row after the head's own last norm
//! takes its place where the model has computed none yet.

use paguro_backend::{
    Embed, Exit, Head, Input, Joined, Linear, Matrix, MatrixId, Mixer, Norm, Program, StateLayout, Weights,
};

use super::{
    super::{
        Names, Part, Tensors,
        config::{Geometry, Layer},
    },
    Config, KvKind, Lowering, kv,
};
use crate::error::ModelError;

/// A head for multi-token prediction, or an assistant.
#[derive(Clone, Debug)]
pub struct MtpHead {
    /// The head as a program whose rows are all [joined](Joined). That of an assistant [shares pages](Program::shares_pages).
    pub program: Program,
    /// Its weights.
    pub weights: Weights,
    /// Matrices that it has in common with the model: their numbers in the head and in the model.
    pub shared: Vec<(MatrixId, MatrixId)>,
}

impl MtpHead {
    /// Returns the head with the rotations of the model.
    pub(super) fn with_ropes(mut self, model: &Program) -> Self {
        self.program.ropes.clone_from(&model.ropes);
        self
    }
}

/// Matrices of the model that the head uses.
struct Shared<'a> {
    model: &'a Weights,
    ids: Vec<(MatrixId, MatrixId)>,
}

impl Shared<'_> {
    /// Returns the matrix `own`, or else the model's matrix `id`.
    fn or_own(&mut self, own: Option<Matrix>, id: MatrixId, tensors: &mut Tensors<'_>) -> MatrixId {
        let shared = self.ids.iter().find(|(_, of_model)| *of_model == id);
        match (own, shared) {
            (Some(own), _) => tensors.add_matrix(own),
            (None, Some(&(known, _))) => known,
            (None, None) => {
                let own = tensors.add_matrix(self.model.matrix(id).clone());
                self.ids.push((own, id));
                own
            }
        }
    }
}

/// Returns the configuration of a model with the layer of its head after the last one.
pub(crate) fn with_layer(config: &Config) -> Config {
    let mut own = config.clone();
    let layer = config.layers.len();
    own.layers.push(Layer {
        window: None,
        rope: config.layers.iter().find_map(|layer| layer.rope),
        experts: config.experts.is_some_and(|experts| layer >= experts.dense_layers),
        recurrent: false,
        mixer: true,
        network: true,
        geometry: Geometry::default(),
    });
    own
}

/// Lowers the first head of a model with these ends, if the files have one that is supported.
///
/// # Errors
/// Tensors of the head that are missing or have another shape.
pub(super) fn lower<'t>(
    config: &Config,
    names: &Names,
    tensors: Tensors<'t>,
    (embed, head, weights): (&Embed, &Head, &Weights),
    vocab: usize,
    max_context: usize,
) -> Result<(Tensors<'t>, Option<MtpHead>), ModelError> {
    let layer = config.layers.len();
    let weight = |part: Part| format!("{}.weight", names.layer(layer, part));
    if !config.definition.mtp || !tensors.has(&weight(Part::MtpJoin)) {
        return Ok((tensors, None));
    }
    let own = with_layer(config);
    let kind = KvKind { window: None, kv_heads: own.kv_heads_of(layer), head_dim: own.head_dim_of(layer) };
    let (kv, places) = kv::arrange(&[kind], max_context);
    let mut lowering = Lowering { config: &own, names, tensors, distance_bias: None };
    let mut shared = Shared { model: weights, ids: Vec::new() };
    let hidden = config.hidden;

    let table = lowering.tensors.matrix(&weight(Part::MtpEmbedding), vocab, hidden)?;
    let table = shared.or_own(table, embed.table, &mut lowering.tensors);
    let joined = Joined {
        width: hidden,
        token_norm: Some(lowering.norm(&names.layer(layer, Part::MtpTokenNorm), hidden)?),
        given_norm: Some(lowering.norm(&names.layer(layer, Part::MtpRowNorm), hidden)?),
        linear: lowering.linear(layer, Part::MtpJoin, hidden, 2 * hidden)?,
    };
    let mixer = match own.latent {
        Some((shape, rank)) => Mixer::Latent(Box::new(lowering.latent(layer, shape, rank, places[0])?)),
        None => Mixer::Attention(lowering.attention(layer, places[0])?),
    };
    let block = lowering.layer(layer, mixer)?;
    let output_norm = names.layer(layer, Part::MtpOutputNorm);
    let norm = match lowering.tensors.has(&format!("{output_norm}.weight")) {
        true => lowering.norm(&output_norm, hidden)?,
        false => {
            let Norm { weight, bias, .. } = head.norm;
            let mut copy = |id| lowering.tensors.add_vector(weights.vector(id).to_vec());
            Norm { weight: copy(weight), bias: bias.map(copy), ..head.norm }
        }
    };
    let matrix = lowering.tensors.matrix(&weight(Part::MtpOutput), vocab, hidden)?;
    let matrix = shared.or_own(matrix, head.linear.matrix, &mut lowering.tensors);
    let program = Program {
        hidden,
        vocab,
        bidirectional: false,
        shares_pages: false,
        kv,
        state: StateLayout::default(),
        ropes: Vec::new(),
        input: Input::Tokens(Embed {
            table,
            scale: embed.scale,
            positions: None,
            types: None,
            norm: None,
            layers: None,
            joined: Some(joined),
        }),
        given_parts: 1,
        layers: vec![block],
        exit: Exit::Logits(Head {
            norm,
            linear: Linear { matrix, bias: None, bounds: None },
            scale: head.scale,
            soft_cap: head.soft_cap,
            projection: None,
        }),
    };
    let mut tensors = lowering.tensors;
    let weights = std::mem::take(&mut tensors.weights);
    Ok((tensors, Some(MtpHead { program, weights, shared: shared.ids })))
}
