//! Models that score a document for a query.

use crate::{
    judge::Judge,
    load::Model,
    pooling::{Pooling, PoolingError},
};

/// The way in which a model scores pairs of a query and a document.
#[derive(Clone, Copy, Debug)]
pub enum Ranker<'m> {
    /// A chat model that answers with yes or no.
    Judge(&'m Judge),
    /// A model that reads both texts, and has a classifier with one label.
    Classifier(&'m Model, Pooling),
}

impl<'m> Ranker<'m> {
    /// Returns the ranker of a model; `None` if the model is not a reranker. A classifier with several labels does not define
    /// which of them is the score.
    /// [`Model::find_judge`] comes first.
    ///
    /// # Errors
    /// Pooling that is not supported.
    pub fn of(model: &'m Model) -> Result<Option<Self>, PoolingError> {
        if let Some(judge) = &model.judge {
            return Ok(Some(Self::Judge(judge)));
        }
        match &model.head.classifier {
            Some(classifier) if classifier.labels.len() == 1 => {
                Ok(Some(Self::Classifier(model, model.pooling.clone()?)))
            }
            _ => Ok(None),
        }
    }

    /// The tokens whose hidden states are the score's input.
    pub fn pooling(&self) -> Pooling {
        match self {
            Self::Judge(_) => Pooling::Last,
            Self::Classifier(_, pooling) => *pooling,
        }
    }

    /// The score of a pair, from its pooled vector: between 0 and 1, or the logit if `raw`.
    pub fn score(&self, pooled: &[f32], raw: bool) -> f32 {
        match self {
            Self::Judge(judge) if raw => judge.logit(pooled),
            Self::Judge(judge) => judge.score(pooled),
            Self::Classifier(model, _) => {
                let scores = model.head.classifier.as_ref().map(|classifier| match raw {
                    true => classifier.logits(pooled),
                    false => classifier.scores(pooled),
                });
                scores.map_or(f32::NAN, |scores| scores[0])
            }
        }
    }
}
