//! Chat templates of a model's files.

use super::{ModelFile, Source};
use crate::{
    chat::{BYTE_ORDER_MARK, ChatTemplate, TemplateError, TemplateTokens},
    error::ModelError,
    gguf,
    hf::HfFolder,
    tokenizer::{Tokenizer, TokenizerConfig},
};

impl ModelFile {
    /// Compiles the chat templates as in loading, and drops them.
    ///
    /// # Errors
    /// A template that exceeds a bound, [`TemplateError::TooLarge`]. Others that do not compile only disable chats.
    pub fn check_templates(&self) -> Result<(), ModelError> {
        for (_, source) in self.chat_templates()? {
            let compiled = ChatTemplate::new(&source, TemplateTokens::default());
            if let Err(problem @ TemplateError::TooLarge(_)) = compiled {
                return Err(problem.into());
            }
        }
        Ok(())
    }

    /// Returns the sources of all chat templates with their names, `default` for the only one; even models that cannot
    /// run may have them. An empty template is none.
    ///
    /// # Errors
    /// [`ModelError`], for files of a folder that cannot be read.
    pub fn chat_templates(&self) -> Result<Vec<(String, String)>, ModelError> {
        let mut templates = self.stored_templates()?;
        for (_, source) in &mut templates {
            if let Some(rest) = source.strip_prefix(BYTE_ORDER_MARK) {
                *source = rest.to_owned();
            }
        }
        templates.retain(|(_, source)| !source.trim().is_empty());
        Ok(templates)
    }

    fn stored_templates(&self) -> Result<Vec<(String, String)>, ModelError> {
        match &self.source {
            Source::Gguf(gguf) => {
                const KEY: &str = "tokenizer.chat_template";
                let named =
                    gguf.metadata.iter().filter_map(|(key, value)| match (key.strip_prefix(KEY)?, value) {
                        ("", gguf::Value::String(source)) => Some(("default".to_owned(), source.clone())),
                        (name, gguf::Value::String(source)) => {
                            Some((name.strip_prefix('.')?.to_owned(), source.clone()))
                        }
                        _ => None,
                    });
                Ok(named.collect())
            }
            Source::Hf(folder) => {
                let mut named = hf_tokenizer_config(folder)?.chat_templates;
                if let Some(source) = folder.chat_template()?.filter(|source| !source.trim().is_empty()) {
                    // The newer place.
                    named.retain(|template| template.0 != "default");
                    named.push(("default".to_owned(), source));
                }
                Ok(named)
            }
        }
    }

    /// Compiles another chat template for this model.
    ///
    /// # Errors
    /// [`ModelError`], for a template that does not compile, and for files of a folder that cannot be read.
    pub fn chat_template(&self, source: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate, ModelError> {
        Ok(ChatTemplate::new(source, self.template_tokens(tokenizer)?)?)
    }

    /// Returns the tokens that chat templates write.
    pub(super) fn template_tokens(&self, tokenizer: &Tokenizer) -> Result<TemplateTokens, ModelError> {
        match &self.source {
            Source::Gguf(gguf) => {
                let token = |id: Option<u32>| id.map(|id| tokenizer.token_name(id).into_owned());
                let other = |key: &str| token(gguf.metadata.u32(&format!("tokenizer.ggml.{key}_token_id")));
                Ok(TemplateTokens {
                    bos: token(tokenizer.bos()),
                    eos: token(tokenizer.eos()),
                    pad: other("padding"),
                    unk: other("unknown"),
                })
            }
            Source::Hf(folder) => {
                let config = hf_tokenizer_config(folder)?;
                Ok(TemplateTokens {
                    bos: config.bos_token,
                    eos: config.eos_token,
                    pad: config.pad_token,
                    unk: config.unk_token,
                })
            }
        }
    }
}

fn hf_tokenizer_config(folder: &HfFolder) -> Result<TokenizerConfig, ModelError> {
    let config = folder.tokenizer_config()?;
    Ok(config.as_deref().map(TokenizerConfig::parse).transpose()?.unwrap_or_default())
}
