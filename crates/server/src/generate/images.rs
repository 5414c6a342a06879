//! Places of images in a prompt.

use std::{ops::Range, sync::Arc};

use paguro_model::{
    Model,
    chat::{ChatInput, ChatPrompt, PictureLayout},
};

use crate::{
    error::ApiError,
    images::{Image, ImageSettings, PlannedImage, Sight},
};

/// An image, and the tokens of the prompt in whose place its rows are.
#[derive(Clone, Debug)]
pub(super) struct PlacedImage {
    pub image: Arc<PlannedImage>,
    /// Ranges of tokens, ascending.
    pub rows: Vec<Range<usize>>,
}

/// The images of a prompt.
pub(super) struct Placing {
    pub layout: PictureLayout,
    images: Vec<Arc<PlannedImage>>,
}

/// Reads the headers of images.
///
/// # Errors
/// An image is not supported.
pub(super) fn plan_images<'i>(
    images: impl Iterator<Item = &'i mut Image>,
    model: &Model,
    settings: &ImageSettings,
) -> Result<(), ApiError> {
    let mut images = images.peekable();
    let Some(first) = images.peek() else { return Ok(()) };
    let sight = Sight::of(model).ok_or_else(|| first.refuse("is an image, but the model reads text only"))?;
    images.try_for_each(|image| image.plan(&sight, settings))
}

impl Placing {
    /// Creates it. Headers of all images must have been read.
    ///
    /// # Errors
    /// The model reads text only.
    pub fn new<'i>(model: &Model, images: impl Iterator<Item = &'i Image>) -> Result<Self, ApiError> {
        let Sight { family, marker, image_token, .. } =
            Sight::of(model).ok_or_else(|| ApiError::Internal("the model has no vision tower".into()))?;
        let images = images.map(|image| image.planned.clone()).collect::<Option<Vec<_>>>();
        let images =
            images.ok_or_else(|| ApiError::Internal("the header of an image was not read".into()))?;
        let plans = images.iter().map(|image| &image.plan);
        let layout = PictureLayout::new(family, &marker, image_token, plans, &model.tokenizer);
        Ok(Self { layout, images })
    }

    /// Renders a chat in the form in which the template has a place for each image, and returns both.
    ///
    /// # Errors
    /// The template leaves out images, or fails.
    pub fn render(
        &self,
        input: &ChatInput,
        render: impl Fn(&ChatInput) -> Result<ChatPrompt, ApiError>,
    ) -> Result<(ChatInput, ChatPrompt), ApiError> {
        self.layout.render(input, render)?.map_err(|places| {
            let message = format!(
                "the model's chat template has places for {places} of {} images; put images into messages of the user",
                self.images.len()
            );
            ApiError::invalid("messages", message)
        })
    }

    /// Finds the tokens of the images.
    ///
    /// # Errors
    /// The prompt has other image tokens.
    pub fn find(self, tokens: &[u32]) -> Result<Vec<PlacedImage>, ApiError> {
        let rows = self.layout.find(tokens).map_err(|error| {
            ApiError::invalid("prompt", format!("{error}; leave names of image tokens out of the text"))
        })?;
        Ok(self.images.into_iter().zip(rows).map(|(image, rows)| PlacedImage { image, rows }).collect())
    }
}
