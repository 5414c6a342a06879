//! A model that is ready to be loaded by a backend.

use std::{path::Path, sync::Arc};

use paguro_backend::{Program, Weights};

use super::{Description, GenerationDefaults, ModelFile};
use crate::{
    arch::{Linears, MtpHead},
    chat::{ChatInput, ChatTemplate, TemplateError},
    error::ModelError,
    judge::Judge,
    pooling::{Pooling, PoolingError},
    prompts::Prompts,
    text_head::TextHead,
    tokenizer::Tokenizer,
    vision::Vision,
};

/// A model that is ready to be loaded by a backend.
#[derive(Clone, Debug)]
pub struct Model {
    /// Name in the metadata, or else the file's name.
    pub name: String,
    /// Architecture as the file names it: `llama`, `LlamaForCausalLM`.
    pub architecture: String,
    /// Its size, for people.
    pub description: Description,
    /// Tokens that it was trained for.
    pub context_length: usize,
    /// Maximum tokens of a sequence, for which `program` was made: [`LoadOptions::max_context`], or `context_length`.
    pub max_context: usize,
    /// The model, lowered.
    pub program: Program,
    /// Its weights, which stay in the file.
    pub weights: Weights,
    /// Its head for multi-token prediction, if the files have one that is supported, or its [assistant](ModelFile::set_assistant).
    pub mtp: Option<Arc<MtpHead>>,
    /// Its linears, which adapters change.
    pub(crate) linears: Linears,
    /// Its vision tower, if it sees.
    pub vision: Option<Arc<Vision>>,
    /// Reason for which a tower that is in the files cannot be used; the model then reads text only.
    pub vision_problem: Option<String>,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Chat template.
    pub chat_template: Option<ChatTemplate>,
    /// Chat template for chats with tools, if it differs.
    pub tool_template: Option<ChatTemplate>,
    /// Problem of the file's chat template, if there is one. All functions besides chats work without a template.
    pub template_problem: Option<TemplateError>,
    /// Recommended sampling parameters.
    pub defaults: GenerationDefaults,
    /// Tokens that end an answer: end of text, of turn, of message. Sorted.
    pub stop_tokens: Vec<u32>,
    /// Pooling of embeddings, or the reason for which there are none.
    pub pooling: Result<Pooling, PoolingError>,
    /// Layers after pooling.
    pub head: TextHead,
    /// Prompts that precede the texts to embed, by name.
    pub prompts: Prompts,
    /// The question about a document, if the files say that the model is a [`Judge`].
    pub judge_template: Option<String>,
    /// The judge, once [`Model::find_judge`] has read it from the weights.
    pub judge: Option<Judge>,
}

/// Choices at opening.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Maximum sequence length; `None` for the trained context. It selects longrope's factors and determines whether a
    /// sliding window has an effect.
    pub max_context: Option<usize>,
}

/// The parts of a model that its memory depends on.
#[derive(Debug)]
pub struct ModelShape {
    /// Tokens that it was trained for.
    pub context_length: usize,
    /// The model, lowered.
    pub program: Program,
    /// Its weights, which stay in the file.
    pub weights: Weights,
    /// Its head for multi-token prediction, if the files have one that is supported, or its [assistant](ModelFile::set_assistant).
    pub mtp: Option<Arc<MtpHead>>,
    /// Its vision tower, if it sees.
    pub vision: Option<Arc<Vision>>,
}

impl Model {
    /// Returns the reason why the model cannot chat although its file has a chat template: the template does not compile, or
    /// it fails on a chat of one message.
    pub fn chat_problem(&self) -> Option<String> {
        let Some(template) = &self.chat_template else {
            return self.template_problem.as_ref().map(ToString::to_string);
        };
        let input = ChatInput::from_turns([("user", "Hello")]);
        template.prompt(&input, &self.tokenizer).err().map(|problem| problem.to_string())
    }

    /// Returns true if the model only reads texts: its rows attend in both directions, so that it cannot go on from a
    /// text.
    pub fn is_encoder(&self) -> bool {
        self.program.bidirectional
    }

    /// Reads the [`Judge`] that the model is, if it is one by its files or by `name`. Needs the weights.
    ///
    /// # Errors
    /// A head that cannot be read, or a vocabulary without the two words.
    pub fn find_judge(&mut self, name: &str) -> Result<(), String> {
        self.judge = Judge::of(self, name)?;
        Ok(())
    }

    /// Returns a pair of texts as the ids of a prompt of at most `limit` tokens, for a model that reads both at once, such as
    /// a reranker. If there are more tokens, the longer text loses its end. `None` if `limit` has no room for a text.
    pub fn encode_pair(&self, first: &str, second: &str, limit: usize) -> Option<Vec<u32>> {
        let types = self.program.embed().and_then(|embed| embed.types).map_or(1, |types| types.count as u32);
        let id = |(token, kind): (u32, u32)| {
            let kind = if kind < types { kind } else { 0 };
            kind * self.program.vocab as u32 + token
        };
        Some(self.tokenizer.encode_pair(first, second, limit)?.into_iter().map(id).collect())
    }

    /// Opens a GGUF file, one of several of a split model, or a Hugging Face folder.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn open(path: &Path, options: &LoadOptions) -> Result<Self, ModelError> {
        ModelFile::open(path)?.load(options)
    }

    /// Opens a GGUF file in memory, such as one that is embedded in the program.
    ///
    /// # Errors
    /// [`ModelError`].
    pub fn from_static(name: &str, bytes: &'static [u8], options: &LoadOptions) -> Result<Self, ModelError> {
        ModelFile::from_static(name, bytes)?.load(options)
    }
}
