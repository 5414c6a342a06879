//! Sizes, tokens and keys of images, from their headers.

use std::sync::Arc;

use paguro_model::{Model, chat::PICTURE};
use paguro_vision::{Budget, Family, Header, Plan, Processor, SizeRule, from_base64, from_data_url, probe};
use sha2::{Digest, Sha256};

use super::{Image, ImageSettings, ImageSource};
use crate::{
    error::ApiError,
    generate::{Message, Role},
    wire::Tolerance,
};

/// Properties of a model that sees.
#[derive(Clone, Debug)]
pub struct Sight {
    /// Form of the prompt around an image.
    pub family: Family,
    /// Conversion of pixels.
    pub processor: Processor,
    /// Token in whose place the rows of an image are.
    pub image_token: u32,
    /// Text that chat templates write for an image.
    pub marker: String,
    /// Digest of the vision tower.
    pub digest: [u8; 32],
}

/// An image whose header was read.
#[derive(Debug, PartialEq)]
pub struct PlannedImage {
    /// Field of the request, for errors.
    pub path: Arc<str>,
    /// The file.
    pub bytes: Arc<[u8]>,
    /// Properties of the file.
    pub header: Header,
    /// Sizes of the parts.
    pub plan: Plan,
    /// Hash of everything that determines the rows of the image.
    pub key: [u8; 32],
}

impl Sight {
    /// Returns the properties of a model; `None` if it reads text only.
    pub fn of(model: &Model) -> Option<Self> {
        let vision = model.vision.as_deref()?;
        Some(Self {
            family: vision.family,
            processor: vision.processor.clone(),
            image_token: vision.image_token,
            marker: vision.marker.clone(),
            digest: vision.digest,
        })
    }
}

impl Sight {
    /// Returns the budget for an engine that reads parts of at most `most` tokens. Tiles have a fixed number.
    #[must_use]
    pub fn within(&self, budget: Budget, most: Option<usize>) -> Budget {
        let most = most.and_then(|most| u32::try_from(most).ok());
        match self.processor.rule {
            SizeRule::Tiles { .. } | SizeRule::Grid { .. } | SizeRule::Flexible { .. } => budget,
            _ => Budget { max_tokens: budget.max_tokens.into_iter().chain(most).min(), ..budget },
        }
    }

    /// Returns the hash of everything that determines the rows of an image.
    pub fn key(&self, file: &[u8], plan: &Plan) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update((file.len() as u64).to_le_bytes());
        hash.update(file);
        hash.update(plan.fingerprint());
        hash.update(self.digest);
        hash.finalize().into()
    }
}

impl Image {
    /// Returns the bytes of the file.
    fn file(&self, limit: usize) -> Result<Arc<[u8]>, ApiError> {
        match &self.source {
            ImageSource::Bytes(bytes) => Ok(bytes.clone()),
            ImageSource::Base64(text) => {
                let is_url = text.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"));
                let bytes = if is_url { from_data_url(text, limit) } else { from_base64(text, limit) };
                bytes.map(Into::into).map_err(|error| self.refuse(error))
            }
            ImageSource::Url(_) => Err(ApiError::Internal("an image was not fetched".into())),
        }
    }

    /// Reads the header and computes sizes and key.
    ///
    /// # Errors
    /// The image is not supported, or exceeds a limit.
    pub fn plan(&mut self, sight: &Sight, settings: &ImageSettings) -> Result<(), ApiError> {
        if self.planned.is_some() {
            return Ok(());
        }
        let bytes = self.file(settings.limits.bytes)?;
        let header = probe(&bytes, &settings.limits).map_err(|error| self.refuse(error))?;
        if header.memory > settings.memory {
            let problem = format!(
                "has {}×{} pixels, which take {} MB to decode; at most {} MB are used. Make the picture smaller",
                header.width,
                header.height,
                header.memory >> 20,
                settings.memory >> 20
            );
            return Err(self.refuse(problem));
        }
        let budget =
            Budget { detail: self.detail, min_tokens: settings.min_tokens, max_tokens: settings.max_tokens };
        let budget = sight.within(budget, settings.part_tokens);
        let plan = sight.processor.plan(header.width, header.height, budget);
        let plan = plan.map_err(|error| self.refuse(format_args!("cannot be used: {error}")))?;
        let key = sight.key(&bytes, &plan);
        self.planned = Some(Arc::new(PlannedImage { path: self.path.clone(), bytes, header, plan, key }));
        Ok(())
    }
}

/// Checks the number of images. For a model that reads text only, images are replaced by a note in earlier messages, which a
/// client cannot change, and refused in the last one of the user.
///
/// # Errors
/// Too many images, or images for a model without a vision tower.
pub fn settle(
    messages: &mut [Message],
    name: &str,
    model: &Model,
    settings: &ImageSettings,
    tolerance: &Tolerance,
) -> Result<(), ApiError> {
    let images = messages.iter().flat_map(|message| &message.images);
    if let Some(image) = images.clone().nth(settings.per_request) {
        let problem = format!(
            "is image {} of {}; a request can have {}",
            settings.per_request + 1,
            images.count(),
            settings.per_request
        );
        return Err(image.refuse(problem));
    }
    if model.vision.is_some() {
        return Ok(());
    }
    let text_only = || text_only(name, model);
    let last_user = messages.iter().rposition(|message| message.role == Role::User);
    for (at, message) in messages.iter_mut().enumerate() {
        let Some(image) = message.images.first() else { continue };
        if Some(at) == last_user || tolerance.is_strict() {
            return Err(image.refuse(text_only()));
        }
        tolerance.note(&image.path, text_only());
        message.content = message.content.replace(PICTURE, "[image left out: this model reads text]");
        message.images.clear();
    }
    Ok(())
}

/// Returns the end of an error about an image for a model that reads text only.
pub fn text_only(name: &str, model: &Model) -> String {
    match &model.vision_problem {
        Some(problem) => format!(
            "is an image, but the model `{name}` reads text only: its vision tower cannot be used, because {problem}. \
             Use another model that sees"
        ),
        None => format!(
            "is an image, but the model `{name}` reads text only: it has no vision tower, and no projector (mmproj) was \
             loaded with it. Use a model that sees, or add the projector of this one: put its mmproj file beside the \
             model's file, or start the server with --mmproj FILE"
        ),
    }
}
