//! Prompts with images for continuation, in llama.cpp's format.

use paguro_model::chat::PICTURE;
use serde::{Deserialize, Deserializer, Serialize};
use serde_untagged::UntaggedEnumVisitor;
use utoipa::ToSchema;

use super::completions::PromptParam;
use crate::{
    error::ApiError,
    generate::Prompt,
    images::{Image, Parts},
    settings::ServerSettings,
};

/// The place of an image in a prompt.
pub const MARKER: &str = "<__media__>";

/// Prompts without or with images.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum CompletionPrompt {
    /// Texts or tokens.
    Plain(PromptParam),
    /// A text with images.
    Images(MultimodalPrompt),
}

/// A text with images. (From llama.cpp.)
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct MultimodalPrompt {
    /// The text, with `<__media__>` in the place of each image.
    pub prompt_string: String,
    /// The images in base64, in the order of their places.
    pub multimodal_data: Vec<String>,
}

impl<'de> Deserialize<'de> for CompletionPrompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        UntaggedEnumVisitor::new()
            .expecting(
                "a text, a list of texts, a list of tokens, a list of lists of tokens, or an object with \
                 `prompt_string` and `multimodal_data`",
            )
            .string(|text| Ok(Self::Plain(PromptParam::Text(text.to_owned()))))
            .seq(|list| list.deserialize().map(Self::Plain))
            .map(|map| map.deserialize().map(Self::Images))
            .deserialize(deserializer)
    }
}

impl CompletionPrompt {
    /// Returns the prompts, at most `most`.
    ///
    /// # Errors
    /// There are no prompts or too many, or the number of images differs from that of their places.
    pub fn into_prompts(self, most: usize, settings: &ServerSettings) -> Result<Vec<Prompt>, ApiError> {
        let MultimodalPrompt { prompt_string, multimodal_data } = match self {
            Self::Plain(prompt) => return prompt.into_prompts("prompt", most, settings),
            Self::Images(prompt) => prompt,
        };
        let (places, count) = (prompt_string.matches(MARKER).count(), multimodal_data.len());
        if places != count {
            let message = format!(
                "`prompt.prompt_string` has {places} places `{MARKER}`, and `prompt.multimodal_data` has {count} images"
            );
            return Err(ApiError::invalid("prompt.multimodal_data", message));
        }
        if let Some(at) =
            settings.images.per_request.checked_sub(1).filter(|_| count > settings.images.per_request)
        {
            let param = format!("prompt.multimodal_data[{}]", at + 1);
            let message =
                format!("`prompt.multimodal_data` has {count} images; a request can have {}", at + 1);
            return Err(ApiError::invalid(param, message));
        }
        if count == 0 {
            return Ok(vec![Prompt::Text(prompt_string)]);
        }
        let images = multimodal_data.into_iter().enumerate();
        let images = images
            .map(|(i, data)| Image::from_base64(&format!("prompt.multimodal_data[{i}]"), data))
            .collect();
        let clean = Parts::from(prompt_string).text;
        Ok(vec![Prompt::Images { text: clean.replace(MARKER, &PICTURE.to_string()), images }])
    }
}
