//! Scores of documents for queries.

use std::{sync::Arc, time::Instant};

use paguro_engine::Request;
use paguro_model::{
    Model, Ranker, map_texts,
    tokenizer::{Cut, SpecialTokens},
};

use super::{
    Caller, Prompt,
    embed::{self, EmbedRequest, Field, MAX_INPUTS, MAX_TOKENS, Truncation},
    off_thread,
    request::check_text,
};
use crate::{AppState, count::check_length, error::ApiError, models::Lease};

/// Pairs of texts whose scores a request asks for.
#[derive(Clone, Debug)]
pub struct RankRequest {
    /// Queries with documents.
    pub pairs: Vec<(Arc<str>, String)>,
    /// The field that the documents were in.
    pub field: Field,
    /// The task, for rerankers that read one; `None` is the model's own.
    pub instruction: Option<String>,
    /// Treatment of documents that are too long.
    pub truncation: Truncation,
    /// True for logits. Otherwise scores are between 0 and 1.
    pub raw: bool,
}

/// Scores.
#[derive(Debug)]
pub struct Ranked {
    /// Canonical name of the model.
    pub model: String,
    /// Scores in the order of the pairs.
    pub scores: Vec<f32>,
    /// Tokens of all pairs.
    pub tokens: usize,
}

/// Scores pairs with a reranker.
///
/// # Errors
/// The model does not exist or is no reranker, or a pair does not fit.
pub async fn rank(
    state: &AppState,
    caller: Caller,
    model: &str,
    request: RankRequest,
) -> Result<Ranked, ApiError> {
    let (received, lease) = (Instant::now(), super::lease(state, &caller, model, None, None, None).await?);
    if ranker(&lease.model)?.is_none() {
        let message = format!(
            "the model `{}` is not a reranker, so it cannot score documents for a query; name a reranker, such as \
             Qwen3-Reranker (embedding models compare texts with /v1/score)",
            lease.entry.name
        );
        return Err(ApiError::invalid("model", message));
    }
    rank_with(state, &caller, lease, request, received).await
}

/// Scores pairs: with a reranker, or else by the cosine of the embeddings of both texts.
///
/// # Errors
/// The model does not exist or is neither, or a text does not fit.
pub async fn score(
    state: &AppState,
    caller: Caller,
    model: &str,
    first: Field,
    request: RankRequest,
) -> Result<Ranked, ApiError> {
    let (received, lease) = (Instant::now(), super::lease(state, &caller, model, None, None, None).await?);
    if ranker(&lease.model)?.is_some() {
        return rank_with(state, &caller, lease, request, received).await;
    }
    if request.instruction.is_some() {
        caller
            .tolerance
            .leave_out("instruction", "the model is no reranker; texts are embedded as they are")?;
    }
    let (queries, documents): (Vec<_>, Vec<_>) = request.pairs.into_iter().unzip();
    // One query of many documents is embedded once.
    let mut distinct: Vec<Arc<str>> = queries.clone();
    distinct.dedup_by(|a, b| Arc::ptr_eq(a, b));
    let count = distinct.len();
    let of = |texts: Vec<Prompt>, field: Field| EmbedRequest {
        truncation: request.truncation,
        ..EmbedRequest::new(texts, field)
    };
    let texts = distinct.iter().map(|text| Prompt::Text(text.to_string())).collect();
    let left = embed::embed_with(state, &caller, lease, of(texts, first), received).await?;
    let texts = documents.into_iter().map(Prompt::Text).collect();
    let right = embed::embed_with(state, &caller, left.lease, of(texts, request.field), received).await?;
    let mut at = 0;
    let scores = queries.iter().zip(&right.vectors).map(|(query, vector)| {
        while at + 1 < count && !Arc::ptr_eq(query, &distinct[at]) {
            at += 1;
        }
        left.vectors[at].iter().zip(vector).map(|(a, b)| a * b).sum()
    });
    let scores = scores.collect();
    Ok(Ranked { model: left.model, scores, tokens: left.tokens + right.tokens })
}

/// The way in which a model scores pairs; `None` if it is no reranker.
fn ranker(model: &Model) -> Result<Option<Ranker<'_>>, ApiError> {
    Ranker::of(model).map_err(|error| ApiError::invalid("model", error.to_string()))
}

/// Most tokens of a pair of texts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limit {
    most: usize,
    /// The end of the document that loses tokens; `None` if pairs with more are refused.
    cut: Option<Cut>,
}

impl Limit {
    /// The limit of a model that reads `most` tokens.
    fn new(truncation: Truncation, most: usize) -> Result<Self, ApiError> {
        Ok(match truncation {
            Truncation::Refuse => Self { most, cut: None },
            Truncation::Cut { at, tokens: None } => Self { most, cut: Some(at) },
            Truncation::Cut { at, tokens: Some((count, param)) } => {
                Self { most: count.within(1..=most, param)?, cut: Some(at) }
            }
        })
    }

    /// The same for an encoder, which cuts the ends of pairs only.
    pub fn of_classifier(truncation: Truncation, most: usize, has_pairs: bool) -> Result<Self, ApiError> {
        let limit = Self::new(truncation, most)?;
        if has_pairs && limit.cut == Some(Cut::Start) {
            let message = "this model cuts the ends of pairs of texts only; `truncate: true` does so";
            return Err(ApiError::invalid("truncate", message));
        }
        Ok(limit)
    }

    /// The error of the pair at `index`, which has `tokens`, or at least as many.
    fn exceeded(self, tokens: usize, is_exact: bool, field: Field, index: usize) -> ApiError {
        ApiError::InputTooLong { param: field.at(index), tokens, is_exact, limit: self.most }
    }

    /// Refuses a pair that is certainly too long, without tokenizing it. A second text that may be cut is not checked.
    fn check(self, model: &Model, pair: (&str, &str), field: Field, index: usize) -> Result<(), ApiError> {
        let second = Some(pair.1).filter(|_| self.cut.is_none());
        for text in [Some(pair.0), second].into_iter().flatten() {
            if let Err(ApiError::ContextTooLong { tokens, .. }) =
                check_text(text, model, self.most.saturating_mul(2))
            {
                return Err(self.exceeded(tokens, false, field, index));
            }
        }
        Ok(())
    }
}

/// Returns the tokens of the pair at `index`, as an encoder reads them.
///
/// # Errors
/// There are too many.
pub(super) fn encode_pair(
    model: &Model,
    pair: (&str, &str),
    limit: Limit,
    field: Field,
    index: usize,
) -> Result<Vec<u32>, ApiError> {
    limit.check(model, pair, field, index)?;
    let most = if limit.cut.is_some() { limit.most } else { usize::MAX };
    let ids = model.encode_pair(pair.0, pair.1, most).unwrap_or_default();
    if ids.is_empty() || ids.len() > limit.most {
        return Err(limit.exceeded(ids.len(), true, field, index));
    }
    Ok(ids)
}

/// Refuses pairs of one query and many documents if the copies of the query have more than [`MAX_TOKENS`] tokens.
fn check_repeats(
    model: &Model,
    pairs: &[(Arc<str>, String)],
    limit: Limit,
    field: Field,
) -> Result<(), ApiError> {
    let (Some((query, document)), Some((last, _))) = (pairs.first(), pairs.last()) else { return Ok(()) };
    if !Arc::ptr_eq(query, last) {
        return Ok(());
    }
    limit.check(model, (query, document), field, 0)?;
    let tokens = model.tokenizer.encode(query, SpecialTokens::AsText).len().min(limit.most);
    if tokens.saturating_mul(pairs.len()) <= MAX_TOKENS {
        return Ok(());
    }
    let message = format!(
        "`{}` has {} elements for a query of {tokens} tokens; one request can have {}; send fewer at once",
        field.name,
        pairs.len(),
        MAX_TOKENS / tokens.max(1)
    );
    Err(ApiError::invalid(field.name, message))
}

async fn rank_with(
    state: &AppState,
    caller: &Caller,
    lease: Lease,
    request: RankRequest,
    received: Instant,
) -> Result<Ranked, ApiError> {
    let RankRequest { pairs, field, instruction, truncation, raw } = request;
    check_length(pairs.len(), MAX_INPUTS, field.name)?;
    let most = lease.handle.max_context();
    let limit = match lease.model.judge {
        Some(_) => Limit::new(truncation, most)?,
        None => Limit::of_classifier(truncation, most, true)?,
    };
    if lease.model.judge.is_none() && instruction.is_some() {
        caller.tolerance.leave_out("instruction", "this reranker reads only the query and the document")?;
    }
    let bytes = caller.body.length();
    let work = off_thread(state, caller, &lease, move |model, is_wanted| {
        check_repeats(model, &pairs, limit, field)?;
        let question = |(index, (query, document)): (usize, (Arc<str>, String))| match &model.judge {
            None => encode_pair(model, (&query, &document), limit, field, index),
            Some(judge) => {
                limit.check(model, (&query, &document), field, index)?;
                let (pair, task) = ((&*query, document.as_str()), instruction.as_deref());
                let prompt = judge.prompt(&model.tokenizer, pair, task, limit.most, limit.cut);
                prompt.map_err(|tokens| limit.exceeded(tokens, true, field, index))
            }
        };
        map_texts(pairs.into_iter().enumerate().collect(), bytes, is_wanted, question)
    });
    let prompts = caller.in_time(work).await?;
    let tokens = embed::count_tokens(&prompts, field)?;
    let missing = || ApiError::invalid("model", "the model is no reranker");
    let ranker = ranker(&lease.model)?.ok_or_else(missing)?;
    let template = Request { embedding: Some(ranker.pooling()), ..embed::template(state, caller, &lease) };
    let finish = |hidden: Vec<f32>| ranker.score(&hidden, raw);
    let scores = embed::run(state, &lease, template, prompts, field, received, finish).await?;
    Ok(Ranked { model: lease.entry.name.clone(), scores, tokens })
}
