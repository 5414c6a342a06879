//! Scores of a classifier's labels for texts.

use std::time::Instant;

use paguro_engine::Request;
use paguro_model::map_texts;

use super::{
    Caller, Prompt,
    embed::{self, Field, MAX_INPUTS, TextReader, Truncation},
    off_thread,
    rank::{Limit, encode_pair},
};
use crate::{AppState, count::check_length, error::ApiError, models::Lease};

/// Texts whose labels a request asks for.
#[derive(Clone, Debug)]
pub struct ClassifyRequest {
    /// The texts.
    pub inputs: Vec<ClassifyInput>,
    /// The field that they were in.
    pub field: Field,
    /// Treatment of texts that are too long.
    pub truncation: Truncation,
    /// True for logits. Otherwise scores are between 0 and 1.
    pub raw: bool,
}

/// An input of a classifier.
#[derive(Clone, Debug)]
pub enum ClassifyInput {
    /// One text.
    One(Prompt),
    /// Two texts that the model reads together.
    Pair(String, String),
}

/// Scores of labels.
#[derive(Debug)]
pub struct Classified {
    /// Canonical name of the model.
    pub model: String,
    /// Scores of each input, in the order of the model's labels.
    pub scores: Vec<Vec<f32>>,
    /// Number of tokens of all inputs.
    pub tokens: usize,
    /// The resident model.
    lease: Lease,
}

impl Classified {
    /// Names of the labels, in order.
    pub fn labels(&self) -> &[String] {
        self.lease.model.head.classifier.as_ref().map_or(&[], |classifier| &classifier.labels)
    }
}

/// Scores the labels of texts.
///
/// # Errors
/// The model does not exist or has no classifier, or a text does not fit.
pub async fn classify(
    state: &AppState,
    caller: Caller,
    model: &str,
    request: ClassifyRequest,
) -> Result<Classified, ApiError> {
    let received = Instant::now();
    let ClassifyRequest { inputs, field, truncation, raw } = request;
    check_length(inputs.len(), MAX_INPUTS, field.name)?;
    let lease = super::lease(state, &caller, model, None, None, None).await?;
    let Some(classifier) = &lease.model.head.classifier else {
        let message = format!(
            "the model `{}` has no classifier; name a model of a class ...ForSequenceClassification",
            lease.entry.name
        );
        return Err(ApiError::invalid("model", message));
    };
    let pooling = lease.model.pooling.clone();
    let pooling = pooling.map_err(|error| ApiError::invalid("model", error.to_string()))?;
    let most = lease.handle.max_context();
    let has_pairs = inputs.iter().any(|input| matches!(input, ClassifyInput::Pair(..)));
    let limit = Limit::of_classifier(truncation, most, has_pairs)?;
    let bytes = caller.body.length();
    let work = off_thread(state, &caller, &lease, move |model, is_wanted| {
        let reader = TextReader { model, most, truncation, field };
        let read = |(index, input)| match input {
            ClassifyInput::One(prompt) => reader.tokens("", prompt, index),
            ClassifyInput::Pair(first, second) => encode_pair(model, (&first, &second), limit, field, index),
        };
        map_texts(inputs.into_iter().enumerate().collect(), bytes, is_wanted, read)
    });
    let prompts = caller.in_time(work).await?;
    let tokens = embed::count_tokens(&prompts, field)?;
    let labels = classifier.labels.len().max(1);
    let bytes = prompts.len().saturating_mul(4 * labels);
    caller.body.grow(&state.body_memory, caller.body.length().saturating_add(bytes), 0).await?;
    let template = Request { embedding: Some(pooling), ..embed::template(state, &caller, &lease) };
    let scores = embed::run(state, &lease, template, prompts, field, received, |pooled| {
        if raw { classifier.logits(&pooled) } else { classifier.scores(&pooled) }
    })
    .await?;
    Ok(Classified { model: lease.entry.name.clone(), scores, tokens, lease })
}
