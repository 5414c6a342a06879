//! Formats of pictures, recognised by their first bytes.

use crate::PictureError;

/// A format that this crate decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// PNG; of an animation the first frame.
    Png,
    /// JPEG.
    Jpeg,
    /// WebP; of an animation the first frame.
    Webp,
    /// GIF; of an animation the first frame.
    Gif,
}

impl Format {
    /// Recognises the format of a file.
    ///
    /// # Errors
    /// The format is unknown, or known and not supported.
    pub fn of(bytes: &[u8]) -> Result<Self, PictureError> {
        if bytes.is_empty() {
            return Err(PictureError::Empty);
        }
        if bytes.starts_with(b"\x89PNG\r\n\x1a\n") {
            return Ok(Self::Png);
        }
        if bytes.starts_with(b"\xff\xd8\xff") {
            return Ok(Self::Jpeg);
        }
        if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP") {
            return Ok(Self::Webp);
        }
        if bytes.starts_with(b"GIF87a") || bytes.starts_with(b"GIF89a") {
            return Ok(Self::Gif);
        }
        Err(foreign(bytes).map_or(PictureError::NotAPicture, PictureError::Unsupported))
    }

    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Png => "PNG",
            Self::Jpeg => "JPEG",
            Self::Webp => "WebP",
            Self::Gif => "GIF",
        }
    }
}

/// Returns the name of a format that is not supported.
fn foreign(bytes: &[u8]) -> Option<&'static str> {
    let brand = bytes.get(8..12).filter(|_| bytes.get(4..8) == Some(b"ftyp"));
    if let Some(brand) = brand {
        return Some(match brand {
            b"avif" | b"avis" => "AVIF",
            b"heic" | b"heix" | b"heim" | b"heis" | b"hevc" | b"hevx" | b"mif1" | b"msf1" => "HEIC",
            b"crx " => "CR3",
            _ => "MP4 video",
        });
    }
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes).trim_ascii_start();
    let begins =
        |prefix: &[u8]| text.len() >= prefix.len() && text[..prefix.len()].eq_ignore_ascii_case(prefix);
    let is_svg = begins(b"<svg")
        || (begins(b"<?xml") || begins(b"<!doctype svg"))
            && text[..text.len().min(1024)].windows(4).any(|part| part.eq_ignore_ascii_case(b"<svg"));
    if is_svg {
        return Some("SVG");
    }
    const NAMES: [(&[u8], &str); 13] = [
        (b"BM", "BMP"),
        (b"II*\0", "TIFF"),
        (b"MM\0*", "TIFF"),
        (b"%PDF", "PDF"),
        (b"\xff\x0a", "JPEG XL"),
        (b"\0\0\0\x0cJXL ", "JPEG XL"),
        (b"\0\0\0\x0cjP  ", "JPEG 2000"),
        (b"\xff\x4f\xff\x51", "JPEG 2000"),
        (b"\0\0\x01\0", "ICO"),
        (b"8BPS", "PSD"),
        (b"#?RADIANCE", "HDR"),
        (b"v/1\x01", "OpenEXR"),
        (b"qoif", "QOI"),
    ];
    NAMES.iter().find(|(start, _)| bytes.starts_with(start)).map(|&(_, name)| name)
}
