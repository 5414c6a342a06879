//! Properties of models that embed texts or score pairs of them.

use serde_json::Value;

use super::{ModelFile, Source};
use crate::{
    arch,
    error::ModelError,
    gguf::Contents,
    judge,
    pooling::{self, Pooling, PoolingError},
    prompts::Prompts,
    text_head::TextHead,
    token_heads,
    tokenizer::Tokenizer,
};

impl ModelFile {
    /// Returns the pooling of embeddings, or the reason for which there are none.
    ///
    /// # Errors
    /// [`ModelError`], for files of a folder that cannot be read.
    pub fn pooling(&self) -> Result<Result<Pooling, PoolingError>, ModelError> {
        Ok(match &self.source {
            Source::Gguf(gguf) => pooling::from_gguf(&gguf.metadata, self.architecture().unwrap_or_default()),
            Source::Hf(folder) => {
                let (modules, config) = folder.pooling()?;
                let class = self.architecture().unwrap_or_default();
                pooling::from_hf(&modules, &config, class, &folder.config)
            }
        })
    }

    /// Returns true if the files state how texts are pooled, as those of models do that were trained for embeddings.
    ///
    /// # Errors
    /// A file of a folder cannot be read.
    pub fn states_pooling(&self) -> Result<bool, ModelError> {
        Ok(match &self.source {
            Source::Gguf(gguf) => {
                let key = format!("{}.pooling_type", self.architecture().unwrap_or_default());
                gguf.metadata.u32(&key).is_some_and(|number| number != 0)
            }
            Source::Hf(folder) => !folder.pooling()?.0.is_null(),
        })
    }

    /// Returns the layers after pooling.
    pub(super) fn text_head(&self) -> Result<TextHead, ModelError> {
        let architecture = self.architecture().unwrap_or_default();
        match &self.source {
            Source::Gguf(gguf) => TextHead::from_gguf(&gguf.metadata, architecture, &gguf.tensors),
            Source::Hf(folder) => TextHead::from_hf(folder, architecture, &folder.pooling()?.0),
        }
    }

    /// Returns the files of a folder that a GGUF file has no place for: layers for tokens, without which its embeddings are the
    /// same.
    pub fn lost_in_gguf(&self) -> Vec<&'static str> {
        let Source::Hf(folder) = &self.source else { return Vec::new() };
        [token_heads::SPARSE, token_heads::MULTI_VECTOR]
            .into_iter()
            .filter(|name| folder.path.join(name).exists())
            .collect()
    }

    /// Returns the properties of a folder with which llama.cpp refuses `contents`, its GGUF file, or computes other results, each as a phrase: `it
    /// ignores the sliding window of 4096 tokens`.
    ///
    /// # Errors
    /// [`ModelError`], for a configuration that cannot be read.
    pub fn differences_in_llama_cpp(&self, contents: &Contents) -> Result<Vec<String>, ModelError> {
        let Source::Hf(folder) = &self.source else { return Ok(Vec::new()) };
        let config = arch::config_from_hf(&folder.config, folder.tensors.len(), None)?;
        let mut all = arch::differences(&arch::target(&config));
        all.extend(Tokenizer::differences_in_llama_cpp(&contents.metadata));
        Ok(all)
    }

    /// Returns true if the model scores pairs of texts by a classifier with one label.
    ///
    /// # Errors
    /// [`ModelError`], for a classifier that cannot be read.
    pub fn has_scores(&self) -> Result<bool, ModelError> {
        Ok(self.text_head()?.classifier.is_some_and(|classifier| classifier.labels.len() == 1))
    }

    /// Returns true if the model judges documents by its files or by `name`: see [`Judge`](crate::Judge).
    ///
    /// # Errors
    /// [`ModelError`], for files of a folder that cannot be read.
    pub fn is_judge(&self, name: &str) -> Result<bool, ModelError> {
        let by_name = judge::template_of([name].into_iter(), &[]).is_some();
        Ok(by_name || self.judge_template(&self.chat_templates()?).is_some())
    }

    /// Returns the question about a document, if the model is a judge by its files.
    pub(super) fn judge_template(&self, templates: &[(String, String)]) -> Option<String> {
        let (by_base, by_path) = match &self.source {
            Source::Gguf(gguf) => (gguf.metadata.str("general.basename"), None),
            Source::Hf(folder) => (None, folder.config.get("_name_or_path").and_then(Value::as_str)),
        };
        let names = [Some(self.name.as_str()), by_base, by_path];
        judge::template_of(names.into_iter().flatten(), templates)
    }

    /// Returns the texts that belong before texts to embed, by name. GGUF files have none.
    ///
    /// # Errors
    /// [`ModelError`], for files of a folder that cannot be read.
    pub fn prompts(&self) -> Result<Prompts, ModelError> {
        match &self.source {
            Source::Gguf(_) => Ok(Prompts::default()),
            Source::Hf(folder) => folder.prompts(),
        }
    }
}
