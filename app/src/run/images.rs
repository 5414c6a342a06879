//! Images of a conversation.

use std::{fs, path::Path, sync::Arc};

use paguro_engine::Picture;
use paguro_model::{
    Model,
    chat::{ChatInput, ChatPrompt, PICTURE, PictureLayout, content_parts},
};
use paguro_server::Sight;
use paguro_vision::{Budget, Limits, Plan, decode, probe};
use serde_json::{Value, json};

use crate::failure::{Failure, Outcome};

/// Maximum tokens of a part of an image. On processors, larger ones take minutes.
pub const MOST_TOKENS: usize = 1024;

/// An image that belongs to a message of the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// Its file, as it was named.
    pub path: String,
    bytes: Arc<[u8]>,
    /// Width and height as it is shown.
    size: [u32; 2],
}

impl Attachment {
    /// Reads a file and its header.
    ///
    /// # Errors
    /// The file cannot be read, or is not an image that is supported.
    pub fn read(path: &str) -> Outcome<Self> {
        let limits = Limits::default();
        let unreadable = |error: std::io::Error| Failure::usage(format!("cannot read `{path}`: {error}"));
        let size = fs::metadata(Path::new(path)).map_err(unreadable)?.len();
        if size > limits.bytes as u64 {
            let most = limits.bytes;
            return Err(Failure::usage(format!("`{path}` has {size} bytes; an image can have {most}"))
                .hint("make the picture smaller, or save it as JPEG"));
        }
        let bytes: Arc<[u8]> = fs::read(Path::new(path)).map_err(unreadable)?.into();
        let header = probe(&bytes, &limits).map_err(|error| Failure::usage(format!("`{path}` {error}")))?;
        Ok(Self { path: path.to_owned(), bytes, size: [header.width, header.height] })
    }

    fn plan(&self, sight: &Sight) -> Outcome<Plan> {
        let [width, height] = self.size;
        let budget = sight.within(Budget::default(), Some(MOST_TOKENS));
        let plan = sight.processor.plan(width, height, budget);
        plan.map_err(|error| Failure::usage(format!("`{}` cannot be used: {error}", self.path)))
    }
}

/// Refuses images for a model that reads text only.
///
/// # Errors
/// The model has no vision tower.
pub fn check(model: &Model, name: &str) -> Outcome<()> {
    if model.vision.is_some() {
        return Ok(());
    }
    if let Some(problem) = &model.vision_problem {
        let message = format!("the model `{name}` cannot be asked about images: {problem}");
        return Err(Failure::usage(message).hint("use another model that sees"));
    }
    let message = format!("the model `{name}` reads text only, and cannot be asked about images");
    Err(Failure::usage(message).hint(
        "use a model that sees; its projector (mmproj) belongs beside its file, or is named by --mmproj FILE",
    ))
}

/// Returns the content of a message: its images, then its text.
pub fn content(text: &str, images: &[Attachment]) -> Value {
    match images {
        [] => json!(text),
        images => content_parts(&(PICTURE.to_string().repeat(images.len()) + &text.replace(PICTURE, ""))),
    }
}

/// Images of a prompt, with the sight of the model.
pub struct Images<'c> {
    sight: Sight,
    layout: PictureLayout,
    images: Vec<(&'c Attachment, Plan)>,
}

impl<'c> Images<'c> {
    /// Plans the images of a conversation; `None` if there are none.
    ///
    /// # Errors
    /// The model reads text only, or does not support an image.
    pub fn new(model: &Model, images: impl Iterator<Item = &'c Attachment>) -> Outcome<Option<Self>> {
        let images: Vec<_> = images.collect();
        if images.is_empty() {
            return Ok(None);
        }
        check(model, &model.name)?;
        let Some(sight) = Sight::of(model) else { return Ok(None) };
        let images = images.into_iter().map(|image| Ok((image, image.plan(&sight)?)));
        let images = images.collect::<Outcome<Vec<_>>>()?;
        let plans = images.iter().map(|(_, plan)| plan);
        let layout =
            PictureLayout::new(sight.family, &sight.marker, sight.image_token, plans, &model.tokenizer);
        Ok(Some(Self { sight, layout, images }))
    }

    /// Renders a conversation in the form in which the template has a place for each image.
    ///
    /// # Errors
    /// Those of `render`, or the template leaves out images.
    pub fn render(
        &self,
        input: &ChatInput,
        render: impl Fn(&ChatInput) -> Outcome<ChatPrompt>,
    ) -> Outcome<(ChatInput, ChatPrompt)> {
        self.layout.render(input, render)?.map_err(|places| {
            let count = self.images.len();
            Failure::new(format!("the model's chat template has places for {places} of {count} images"))
        })
    }

    /// Decodes the images for a prompt of these tokens.
    ///
    /// # Errors
    /// An image is damaged, or the prompt has other image tokens.
    pub fn pictures(&self, tokens: &[u32]) -> Outcome<Vec<Picture>> {
        let rows = self.layout.find(tokens).map_err(|error| Failure::from_error(&error))?;
        let picture = |((image, plan), rows): (&(&Attachment, Plan), _)| {
            let picture = decode(&image.bytes, &Limits::default());
            let picture = picture.map_err(|error| Failure::usage(format!("`{}` {error}", image.path)))?;
            let pixels = Arc::new(self.sight.processor.prepare(&picture, plan));
            let key = self.sight.key(&image.bytes, plan);
            let grid = plan.parts.first().map_or([0; 2], |part| [part.rows, part.columns]);
            Ok(Picture { key, rows, grid, pixels: Arc::new(pixels) })
        };
        self.images.iter().zip(rows).map(picture).collect()
    }

    /// Returns the prompt with the image tokens.
    pub fn expand(&self, prompt: &ChatPrompt) -> ChatPrompt {
        self.layout.expand(prompt)
    }
}
