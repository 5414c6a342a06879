//! Settings of a request for embeddings.

use paguro_model::{Prompts, TextRole, tokenizer::Cut};

use super::super::Prompt;
use crate::{count::ClientCount, error::ApiError, models::Lease, wire::Tolerance};

/// A request for embeddings.
#[derive(Clone, Debug)]
pub struct EmbedRequest {
    /// The texts.
    pub inputs: Vec<Prompt>,
    /// The field that they were in.
    pub field: Field,
    /// Text of the model that is put before each input.
    pub prompt: PromptChoice,
    /// Number of leading values to keep.
    pub dimensions: Option<ClientCount>,
    /// Treatment of texts that are too long.
    pub truncation: Truncation,
    /// Most tokens of a text, at most the model's own bound.
    pub context: Option<ClientCount>,
    /// True if vectors are not normalized.
    pub raw: bool,
    /// Kinds of vectors.
    pub kinds: VectorKinds,
}

impl EmbedRequest {
    /// Creates a request for vectors of length one. Texts that are too long are refused.
    pub fn new(inputs: Vec<Prompt>, field: Field) -> Self {
        Self {
            inputs,
            field,
            prompt: PromptChoice::None,
            dimensions: None,
            truncation: Truncation::Refuse,
            context: None,
            raw: false,
            kinds: VectorKinds::default(),
        }
    }
}

/// Kinds of vectors of a text. A kind beside the first has the field that requests it, for errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VectorKinds {
    /// One vector of the whole text.
    pub dense: bool,
    /// Weights of its tokens.
    pub sparse: Option<&'static str>,
    /// A vector for each token.
    pub multi_vector: Option<&'static str>,
}

impl Default for VectorKinds {
    fn default() -> Self {
        Self { dense: true, sparse: None, multi_vector: None }
    }
}

impl VectorKinds {
    /// Checks that the model computes these kinds.
    pub(super) fn check(self, lease: &Lease) -> Result<(), ApiError> {
        let (head, name) = (&lease.model.head, &lease.entry.name);
        let missing = |param: &str, what: &str, file: &str| {
            let message = format!(
                "the model `{name}` has no {what}; name one like bge-m3, with a `{file}` in its folder"
            );
            Err(ApiError::invalid(param, message))
        };
        match self {
            Self { sparse: Some(param), .. } if head.sparse.is_none() => {
                missing(param, "sparse vectors", "sparse_linear.pt")
            }
            Self { multi_vector: Some(param), .. } if head.multi_vector.is_none() => {
                missing(param, "vectors of tokens", "colbert_linear.pt")
            }
            _ => Ok(()),
        }
    }
}

/// Field of a request that contains texts. Errors name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// True if it is a list.
    pub is_list: bool,
}

impl Field {
    /// Returns a field that is a list of texts.
    pub fn list(name: &'static str) -> Self {
        Self { name, is_list: true }
    }

    /// Returns a field that is one text.
    pub fn one(name: &'static str) -> Self {
        Self { name, is_list: false }
    }

    /// Returns the name of an element: `input[3]`, or `input` if the field is a single text.
    pub fn at(self, index: usize) -> String {
        if self.is_list { format!("{}[{index}]", self.name) } else { self.name.to_owned() }
    }
}

/// Treatment of texts that are too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Truncation {
    /// The request is refused.
    #[default]
    Refuse,
    /// Texts are cut.
    Cut {
        /// End that loses tokens.
        at: Cut,
        /// Most tokens of a text, and the field with this number; `None` for the model's context.
        tokens: Option<(ClientCount, &'static str)>,
    },
}

impl Truncation {
    /// Cuts texts to the model's context.
    pub fn to_context(at: Cut) -> Self {
        Self::Cut { at, tokens: None }
    }
}

/// A text of the model that is put before each text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PromptChoice {
    /// None: texts are embedded as they are.
    #[default]
    None,
    /// The prompt of this name.
    Named {
        /// The name.
        name: String,
        /// The field that it was in.
        param: &'static str,
    },
    /// The prompt of texts of this type, if the model has one.
    InputType {
        /// The type as the request names it: `query`, `search_document`, `clustering`.
        name: String,
        /// The field that it was in.
        param: &'static str,
    },
}

impl PromptChoice {
    /// Returns the text. A type for which the model has no prompt is left out.
    ///
    /// # Errors
    /// The model has no prompt of this name, or the request is strict.
    pub(super) fn text(&self, prompts: &Prompts, tolerance: &Tolerance) -> Result<String, ApiError> {
        let has_none =
            "the files of this model define no prompts; put the prompt of its card before each text";
        match self {
            Self::None => Ok(String::new()),
            Self::Named { name, param } => prompts.get(name).map(str::to_owned).ok_or_else(|| {
                let name: String = name.chars().take(40).collect();
                let message = match prompts.named.is_empty() {
                    true => format!("`{param}` is `{name}`, but {has_none}"),
                    false => format!("`{param}` is `{name}`; this model has {}", prompts.names()),
                };
                ApiError::invalid(*param, message)
            }),
            Self::InputType { name, param } => {
                let role = TextRole::of_input_type(name);
                let found = prompts.get(name).or_else(|| prompts.of_role(role?));
                if let Some(text) = found {
                    return Ok(text.to_owned());
                }
                if prompts.named.is_empty() {
                    tolerance.leave_out(param, has_none)?;
                } else if role != Some(TextRole::Document) {
                    // Documents without a prompt of their own are embedded as they are.
                    tolerance.leave_out(param, format!("this model has {}", prompts.names()))?;
                }
                Ok(String::new())
            }
        }
    }
}
