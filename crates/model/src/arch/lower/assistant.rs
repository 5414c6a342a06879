//! Assistants (Gemma 4): small models that draft for a certain model. Their layers have no K and V: those with a window read
//! the K and V of the model's last layer with one, the others those of its last layer without. Each row joins the model's embedding
//! of a token with a row of the model, and all rows of a draft are at the position of the last token (Hugging Face's
//! `modeling_gemma4_assistant.py`, llama.cpp's `gemma4-assistant.cpp`).
//!
//! Files of E2B and E4B have centroids of tokens, with which Hugging Face's code leaves out the logits of most tokens. All logits are
//! computed here, as in llama.cpp.

use paguro_backend::{
    Embed, Exit, Head, Input, Joined, KvLayout, KvSlot, Linear, Mixer, Program, Projection, StateLayout,
};

use super::{
    super::{Names, Part, Tensors},
    Config, Lowered, Lowering, MtpHead,
};
use crate::error::ModelError;

/// Tensors of the centroids in GGUF files.
const CENTROIDS: [&str; 2] = ["masked_embd_centroids.weight", "masked_embd_ordering"];

/// Lowers an assistant for a model.
///
/// # Errors
/// Tensors that are missing or have another shape; an assistant of another model, as [`ModelError::Config`] with both shapes.
pub(crate) fn lower(
    config: &Config,
    names: &Names,
    tensors: Tensors<'_>,
    (of_model, model): (&Config, &Lowered),
) -> Result<MtpHead, ModelError> {
    let definition = config.definition;
    require(definition.drafts_for == Some(of_model.definition.gguf), || {
        let (wanted, found) = (definition.drafts_for.unwrap_or_default(), of_model.definition.gguf);
        format!("it drafts for models of architecture `{wanted}`, and this one is of `{found}`")
    })?;
    if config.layer_embed > 0 {
        return Err(ModelError::unsupported("an assistant with embeddings for layers"));
    }
    let mut lowering = Lowering { config, names, tensors, distance_bias: None };
    let [embedding, first, last] = [Part::Embedding, Part::AssistantIn, Part::AssistantOut]
        .map(|part| format!("{}.weight", names.model(part)));
    let (hidden, width, vocab) = (config.hidden, model.program.hidden, model.program.vocab);
    let shape = |name: &str| lowering.tensors.shape(name).unwrap_or_default().to_vec();
    let (own_vocab, joined) = (shape(&embedding), shape(&first));
    require(own_vocab.first() == Some(&vocab), || {
        format!("it has embeddings of shape {own_vocab:?}, and the model {vocab} tokens")
    })?;
    require(joined.last() == Some(&(2 * width)), || {
        format!("it joins rows in shape {joined:?}, and the model has rows of {width} elements")
    })?;

    let layers = (0..config.layers.len()).map(|layer| {
        let kv = slot(config, layer, (of_model, model))?;
        let mixer = Mixer::Attention(lowering.attention(layer, kv)?);
        lowering.layer(layer, mixer)
    });
    let layers = layers.collect::<Result<Vec<_>, _>>()?;
    let table = lowering.tensors.require_matrix(&embedding, vocab, hidden)?;
    let table = lowering.tensors.add_matrix(table);
    let plain = |table, scale, joined| Embed {
        table,
        scale,
        positions: None,
        types: None,
        norm: None,
        layers: None,
        joined,
    };
    let head = lowering.head(&plain(table, 1.0, None), vocab, None)?;
    let mut linear = |name: &str, rows: usize, cols: usize| -> Result<Linear, ModelError> {
        let matrix = lowering.tensors.require_matrix(name, rows, cols)?;
        Ok(Linear { matrix: lowering.tensors.add_matrix(matrix), bias: None, bounds: None })
    };
    let joined =
        Joined { width, token_norm: None, given_norm: None, linear: linear(&first, hidden, 2 * width)? };
    let projection = Projection { width, linear: linear(&last, width, hidden)? };
    let embed =
        model.program.embed().ok_or_else(|| ModelError::unsupported("an assistant of no text model"))?;
    let shared = lowering.tensors.add_matrix(model.weights.matrix(embed.table).clone());
    let mut tensors = lowering.tensors;
    CENTROIDS.iter().for_each(|name| tensors.ignore(name));
    let weights = tensors.finish(|name| names.is_harmless(name, head.linear.matrix == table, &(0..0)))?;

    let mut groups = model.program.kv.groups.clone();
    groups.iter_mut().for_each(|group| group.spans = false);
    let program = Program {
        hidden,
        vocab,
        bidirectional: false,
        shares_pages: true,
        kv: KvLayout { groups },
        state: StateLayout::default(),
        ropes: config.ropes.iter().map(|rope| rope.lower()).collect(),
        input: Input::Tokens(plain(shared, embed.scale, Some(joined))),
        given_parts: 1,
        layers,
        // No file has a soft cap for it, and the most probable token is the same.
        exit: Exit::Logits(Head { projection: Some(projection), soft_cap: None, ..head }),
    };
    Ok(MtpHead { program, weights, shared: vec![(shared, embed.table)] })
}

/// Returns the slot of K and V that a layer of an assistant reads.
fn slot(config: &Config, layer: usize, (of_model, model): (&Config, &Lowered)) -> Result<KvSlot, ModelError> {
    let window = config.layers[layer].window;
    let is_like = |other: &usize| {
        of_model.attends(*other) && of_model.layers[*other].window.is_some() == window.is_some()
    };
    let kind = if window.is_some() { "a window" } else { "full attention" };
    let other = (0..of_model.layers.len()).rev().find(is_like);
    let other = other
        .ok_or_else(|| ModelError::Config(format!("no layer of the model has {kind}, as its own have")))?;
    let own = (window, config.kv_heads_of(layer), config.head_dim_of(layer));
    let found = (of_model.layers[other].window, of_model.kv_heads_of(other), of_model.head_dim_of(other));
    let text = |(window, heads, dim): (Option<u32>, usize, usize)| {
        let window = window.map_or(String::new(), |window| format!(" in a window of {window}"));
        format!("{heads} K/V heads of {dim} elements{window}")
    };
    require(own == found, || {
        format!("its layers with {kind} read {}, and those of the model have {}", text(own), text(found))
    })?;
    let place = model.program.layers[other].mixer.parts().find_map(Mixer::attends);
    place
        .map(|place| place.0)
        .ok_or_else(|| ModelError::unsupported("an assistant of a model without attention"))
}

fn require(holds: bool, problem: impl FnOnce() -> String) -> Result<(), ModelError> {
    if holds { Ok(()) } else { Err(ModelError::Config(problem())) }
}
