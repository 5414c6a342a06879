//! The tokens and the chat template of an adapter's folder.
//!
//! Trainers save a tokenizer beside an adapter, usually that of the base. Only differences matter: a chat template, a token
//! that ends answers, and added tokens in unused rows of the base's embedding.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use serde::Deserialize;

use super::AdapterFile;
use crate::{
    chat::{BYTE_ORDER_MARK, ChatTemplate, TemplateTokens},
    error::ModelError,
    hf,
    load::Model,
    tokenizer::{Tokenizer, TokenizerConfig},
};

/// `tokenizer.json`, as far as it is compared.
#[derive(Default, Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
}

/// `tokenizer_config.json`, as far as [`TokenizerConfig`] does not have it.
#[derive(Default, Deserialize)]
struct ConfigFile {
    #[serde(default)]
    added_tokens_decoder: BTreeMap<u32, Content>,
}

#[derive(Deserialize)]
struct Content {
    content: String,
}

fn parsed<T: for<'a> Deserialize<'a> + Default>(folder: &Path, name: &str) -> Result<T, ModelError> {
    let Some(bytes) = hf::read_small(folder, name)? else { return Ok(T::default()) };
    serde_json::from_slice(&bytes).map_err(|error| ModelError::BadFile {
        path: folder.join(name),
        problem: format!("it is not what {name} should be: {error}"),
    })
}

impl AdapterFile {
    /// Returns the folder, which may have files about tokens and chats; `None` for a GGUF file.
    fn folder(&self) -> Option<&Path> {
        (self.format != super::GGUF).then_some(self.path.as_path())
    }

    /// Returns true if the folder has added tokens that the model does not have.
    ///
    /// # Errors
    /// A token outside of the model's vocabulary, by name.
    pub(super) fn has_own_tokens(&self, model: &Model) -> Result<bool, ModelError> {
        let Some(folder) = self.folder() else { return Ok(false) };
        let file: TokenizerFile = parsed(folder, "tokenizer.json")?;
        let config: ConfigFile = parsed(folder, "tokenizer_config.json")?;
        let older: BTreeMap<String, u32> = parsed(folder, "added_tokens.json")?;
        let added = file.added_tokens.into_iter().map(|token| (token.id, token.content));
        let added =
            added.chain(config.added_tokens_decoder.into_iter().map(|(id, token)| (id, token.content)));
        let mut has_own = false;
        for (id, content) in added.chain(older.into_iter().map(|(content, id)| (id, content))) {
            let vocab = model.program.vocab;
            if id as usize >= vocab {
                let problem = format!(
                    "its token `{content}` has the number {id}, but `{}` has {vocab} tokens: adapters that enlarge the embedding are not \
                     supported",
                    model.name
                );
                return Err(ModelError::BadFile { path: folder.to_owned(), problem });
            }
            let (name, bytes) = (model.tokenizer.token_name(id), model.tokenizer.token_bytes(id));
            has_own |= name != content.as_str() && bytes != content.as_bytes();
        }
        Ok(has_own)
    }

    /// Returns the model as requests with this adapter use it: with the added tokens, the chat template and the end of
    /// answers of the adapter's folder. A `template` replaces the folder's. `None` if the model's own are the same, or the
    /// adapter has none.
    ///
    /// # Errors
    /// A token outside of the model's vocabulary, by name; a file that cannot be read.
    pub fn dialect(&self, model: &Model, template: Option<&str>) -> Result<Option<Model>, ModelError> {
        let read = |name: &str| self.folder().map_or(Ok(None), |folder| hf::read_small(folder, name));
        let config = read("tokenizer_config.json")?;
        let tokenizer = match self.has_own_tokens(model)? {
            false => None,
            true => {
                let bad = |problem: String| ModelError::BadFile { path: self.path.clone(), problem };
                let json = read("tokenizer.json")?
                    .ok_or_else(|| bad("it has tokens of its own, but no tokenizer.json".to_owned()))?;
                let tokenizer = Tokenizer::from_hf(&json, config.as_deref())?;
                let (own, vocab) = (tokenizer.vocab_size(), model.program.vocab);
                if own > vocab {
                    return Err(bad(format!(
                        "its tokenizer has {own} tokens, but `{}` has {vocab}",
                        model.name
                    )));
                }
                Some(Arc::new(tokenizer))
            }
        };
        let config = config.as_deref().map(TokenizerConfig::parse).transpose()?.unwrap_or_default();
        let own = tokenizer.as_ref().unwrap_or(&model.tokenizer);
        let end = config.eos_token.as_deref().and_then(|name| own.token_id(name));
        let end = end.filter(|end| !model.stop_tokens.contains(end));
        let template = match template {
            Some(template) => Some(template.to_owned()),
            None => self.template(&config)?,
        };
        let base_template = model.chat_template.as_ref().map(ChatTemplate::source);
        // A compiled template knows the tokens of the base.
        let template = match template.filter(|source| base_template != Some(source.as_str())) {
            None if tokenizer.is_some() => base_template.map(str::to_owned),
            own => own,
        };
        if tokenizer.is_none() && end.is_none() && template.is_none() {
            return Ok(None);
        }
        let name = |id: Option<u32>| id.map(|id| own.token_name(id).into_owned());
        let tokens = TemplateTokens {
            bos: config.bos_token.clone().or_else(|| name(own.bos())),
            eos: config.eos_token.clone().or_else(|| name(own.eos())),
            pad: config.pad_token.clone(),
            unk: config.unk_token.clone(),
        };
        let mut dialect = model.clone();
        if let Some(source) = template {
            match ChatTemplate::new(&source, tokens.clone()) {
                Ok(template) => (dialect.chat_template, dialect.template_problem) = (Some(template), None),
                Err(problem) => (dialect.chat_template, dialect.template_problem) = (None, Some(problem)),
            }
            let of_tools = config.chat_template("tool_use").map(|source| ChatTemplate::new(source, tokens));
            dialect.tool_template = of_tools.and_then(Result::ok);
        }
        dialect.stop_tokens.extend(end);
        if let Some(tokenizer) = tokenizer {
            let ends = tokenizer.stop_tokens().iter().copied();
            dialect.stop_tokens.extend(ends.filter(|&end| (end as usize) < model.program.vocab));
            dialect.tokenizer = tokenizer;
        }
        dialect.stop_tokens.sort_unstable();
        dialect.stop_tokens.dedup();
        Ok(Some(dialect))
    }

    /// Returns the source of the folder's chat template.
    fn template(&self, config: &TokenizerConfig) -> Result<Option<String>, ModelError> {
        const NAME: &str = "chat_template.jinja";
        let Some(folder) = self.folder() else { return Ok(None) };
        let newer = hf::read_small(folder, NAME)?.map(String::from_utf8).transpose();
        let newer = newer.map_err(|_| ModelError::BadFile {
            path: folder.join(NAME),
            problem: "it is not UTF-8".to_owned(),
        })?;
        let source = newer.or_else(|| config.chat_template("default").map(str::to_owned));
        let source = source.map(|source| match source.strip_prefix(BYTE_ORDER_MARK) {
            Some(rest) => rest.to_owned(),
            None => source,
        });
        Ok(source.filter(|source| !source.trim().is_empty()))
    }
}
