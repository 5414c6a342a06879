//! Pictures in base64, alone or in data URLs.

use base64::{
    Engine, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};

/// Both alphabets occur, with and without padding.
const CONFIG: GeneralPurposeConfig = GeneralPurposeConfig::new()
    .with_decode_padding_mode(DecodePaddingMode::Indifferent)
    .with_decode_allow_trailing_bits(true);
const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, CONFIG);
const URL_SAFE: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, CONFIG);

/// Reason for which a text is no picture in base64.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Base64Error {
    /// The text is not base64.
    #[error("is not valid base64: {0}")]
    Invalid(String),
    /// The URL has no comma, or its data are not base64.
    #[error("is a data URL without base64; `data:image/png;base64,...` is the form")]
    NotBase64,
    /// The bytes exceed the limit.
    #[error("has about {bytes} bytes; the limit is {limit}. Make the picture smaller, or save it as JPEG")]
    TooLarge {
        /// Size of the data.
        bytes: usize,
        /// Maximum size.
        limit: usize,
    },
}

/// Decodes base64 of at most `limit` bytes. Line ends are ignored, as in MIME.
///
/// # Errors
/// [`Base64Error`].
pub fn from_base64(text: &str, limit: usize) -> Result<Vec<u8>, Base64Error> {
    let text = text.trim_ascii();
    // Checked before the data are decoded; padding and line ends may take some bytes more.
    let bytes = text.len() / 4 * 3;
    if bytes > limit.saturating_add(limit / 16).saturating_add(64) {
        return Err(Base64Error::TooLarge { bytes, limit });
    }
    // Most texts have neither line ends nor the other alphabet.
    let bytes = STANDARD.decode(text).or_else(|_| {
        let text = text.split_ascii_whitespace().collect::<String>();
        let engine = if text.contains(['-', '_']) { URL_SAFE } else { STANDARD };
        engine.decode(text).map_err(|error| Base64Error::Invalid(error.to_string()))
    })?;
    if bytes.len() > limit {
        return Err(Base64Error::TooLarge { bytes: bytes.len(), limit });
    }
    Ok(bytes)
}

/// Decodes a data URL of at most `limit` bytes. Its media type is ignored, because clients send wrong ones.
///
/// # Errors
/// [`Base64Error`].
pub fn from_data_url(url: &str, limit: usize) -> Result<Vec<u8>, Base64Error> {
    let rest = url.get(..5).filter(|scheme| scheme.eq_ignore_ascii_case("data:")).map(|_| &url[5..]);
    let (head, data) = rest.and_then(|rest| rest.split_once(',')).ok_or(Base64Error::NotBase64)?;
    let is_base64 = head.rsplit(';').next().is_some_and(|last| last.trim().eq_ignore_ascii_case("base64"));
    if !is_base64 {
        return Err(Base64Error::NotBase64);
    }
    if data.contains('%') {
        // Some clients escape `+`, `/` and `=`.
        let plain = data.replace("%2B", "+").replace("%2b", "+").replace("%2F", "/").replace("%2f", "/");
        return from_base64(&plain.replace("%3D", "=").replace("%3d", "="), limit);
    }
    from_base64(data, limit)
}
