//! Images in requests: their sources, limits and decoding.
//!
//! A dialect puts images into messages as they are in the request ([`Image`]). [`crate::generate`] fetches those at URLs
//! ([`fetch`]), and reads headers, which determine the tokens of the prompt ([`plan`]). Pixels are decoded on a few threads
//! of low priority ([`decode`]), once the prompt is known to fit.
//!
//! One character stands for each image in the text of a message. `paguro_model::chat` finds the places that the template
//! has for them, and the prompt gets the image's tokens there. `paguro_vision` has the rules of sizes and tokens.

mod content;
mod decode;
mod fetch;
mod plan;

use std::{fmt, sync::Arc};

use paguro_vision::{Detail, Limits};

use crate::error::ApiError;

pub use content::Parts;
pub use decode::ImageDecoder;
pub use fetch::{HostPattern, ImageFetcher};
pub use plan::{PlannedImage, Sight, settle, text_only};

/// Limits of images and rules for their URLs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageSettings {
    /// Limits of each image.
    pub limits: Limits,
    /// Maximum images of a request.
    pub per_request: usize,
    /// Maximum bytes that decoding takes at one time.
    pub memory: u64,
    /// Minimum tokens of an image; `None` for the model's.
    pub min_tokens: Option<u32>,
    /// Maximum tokens of an image; `None` for the model's.
    pub max_tokens: Option<u32>,
    /// Maximum tokens of a part of an image, which the engine of a model sets.
    pub part_tokens: Option<usize>,
    /// Hosts from which images at URLs are fetched.
    pub hosts: Vec<HostPattern>,
}

impl ImageSettings {
    /// Returns the settings for an engine that reads parts of images of at most this many tokens.
    #[must_use]
    pub fn within(&self, most: Option<usize>) -> Self {
        Self { part_tokens: most, ..self.clone() }
    }
}

impl Default for ImageSettings {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            per_request: 32,
            memory: 512 << 20,
            min_tokens: None,
            max_tokens: None,
            part_tokens: None,
            hosts: Vec::new(),
        }
    }
}

/// An image of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Image {
    /// Field of the request, for errors.
    pub path: Arc<str>,
    /// Its data, or their place.
    pub source: ImageSource,
    /// Requested level of detail.
    pub detail: Detail,
    /// Sizes and key, once the header was read.
    pub planned: Option<Arc<PlannedImage>>,
}

/// Data of an image, or their place.
#[derive(Clone, PartialEq, Eq)]
pub enum ImageSource {
    /// Base64, alone or as a data URL.
    Base64(Arc<String>),
    /// A URL of HTTP.
    Url(Arc<str>),
    /// The bytes of a file.
    Bytes(Arc<[u8]>),
}

impl fmt::Debug for ImageSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Base64(text) => write!(f, "Base64({} bytes)", text.len()),
            Self::Url(url) => write!(f, "Url({url:?})"),
            Self::Bytes(bytes) => write!(f, "Bytes({} bytes)", bytes.len()),
        }
    }
}

impl Image {
    /// Creates an image from base64 or a data URL.
    pub fn from_base64(path: &str, text: String) -> Self {
        Self::new(path, ImageSource::Base64(Arc::new(text)), Detail::Auto)
    }

    /// Creates an image from a URL of the schemes `data`, `http` and `https`. Base64 alone is accepted, too.
    ///
    /// # Errors
    /// Another scheme.
    pub fn from_url(path: &str, url: String, detail: Detail) -> Result<Self, ApiError> {
        let scheme = url.split_once(':').map(|(scheme, _)| scheme.trim().to_ascii_lowercase());
        let source = match scheme.as_deref() {
            Some("data") | None => ImageSource::Base64(Arc::new(url)),
            Some("http" | "https") => ImageSource::Url(url.into()),
            Some(scheme) => {
                let scheme: String = scheme.chars().take(20).collect();
                let message = format!(
                    "`{path}` is a URL of the scheme `{scheme}`; images come in data URLs \
                     (data:image/png;base64,...), or from http and https if the server permits the host"
                );
                return Err(ApiError::invalid(path, message));
            }
        };
        Ok(Self::new(path, source, detail))
    }

    fn new(path: &str, source: ImageSource, detail: Detail) -> Self {
        Self { path: path.into(), source, detail, planned: None }
    }

    /// Returns the bytes that the image takes in memory, approximately.
    pub fn bytes(&self) -> usize {
        match &self.source {
            ImageSource::Base64(text) => text.len(),
            ImageSource::Url(url) => url.len(),
            ImageSource::Bytes(bytes) => bytes.len(),
        }
    }

    /// Creates the error of this image; `problem` is the end of a sentence.
    pub fn refuse(&self, problem: impl fmt::Display) -> ApiError {
        let path = &*self.path;
        ApiError::invalid(path, format!("`{path}` {problem}"))
    }
}

/// Reads a level of detail.
///
/// # Errors
/// An unknown name.
pub fn detail(name: Option<&str>, path: &str) -> Result<Detail, ApiError> {
    match name {
        None | Some("auto" | "") => Ok(Detail::Auto),
        Some("low") => Ok(Detail::Low),
        Some("high" | "original") => Ok(Detail::High),
        Some(other) => {
            let other: String = other.chars().take(20).collect();
            Err(ApiError::invalid(path, format!("`{path}` is auto, low or high, not `{other}`")))
        }
    }
}

/// Returns the error for a part of another medium than text and images; `None` for parts that are not media.
pub fn refused_medium(kind: &str, path: &str) -> Option<ApiError> {
    let (medium, hint) = match kind {
        "video_url" | "input_video" | "video" => ("video", "send single frames as images"),
        "input_audio" | "audio_url" | "audio" => ("audio", "send a transcript as text"),
        _ => return None,
    };
    let message = format!("`{path}` is `{kind}`, but no model here reads {medium}; {hint}");
    Some(ApiError::invalid(path, message))
}
