//! Decoding of pictures, within limits that are checked on the header.

use std::{fmt::Display, io::Cursor, num::NonZeroU64};

use gif::{ColorOutput, MemoryLimit};
use image_webp::WebPDecoder;
use png::{BitDepth, ColorType, Transformations};
use zune_jpeg::{
    JpegDecoder,
    zune_core::{bytestream::ZCursor, colorspace::ColorSpace, options::DecoderOptions},
};

use crate::{exif::Orientation, format::Format};

/// Limits of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum bytes of a file.
    pub bytes: usize,
    /// Maximum pixels.
    pub pixels: u64,
    /// Maximum pixels of a side.
    pub side: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: 20 << 20, pixels: 64_000_000, side: 16_384 }
    }
}

/// Properties of a picture, from its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Its format.
    pub format: Format,
    /// Width as it is shown: the orientation is applied.
    pub width: u32,
    /// Height as it is shown.
    pub height: u32,
    /// Upper bound of the bytes that decoding allocates.
    pub memory: u64,
}

/// Decoded pixels as they are shown, without transparency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rgb {
    /// Pixels of a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
    /// `[height, width, 3]`: red, green and blue.
    pub rgb: Vec<u8>,
}

/// Reason for which a picture is refused, as the end of a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PictureError {
    /// No bytes.
    #[error("is empty")]
    Empty,
    /// The bytes are of no known format.
    #[error("is not a picture that this program reads: PNG, JPEG, WebP and GIF are")]
    NotAPicture,
    /// A known format that is not supported.
    #[error("is {0}, which this program does not read; convert it to PNG or JPEG")]
    Unsupported(&'static str),
    /// The file is too large.
    #[error("has {bytes} bytes; the limit is {limit}. Make the picture smaller, or save it as JPEG")]
    TooManyBytes {
        /// Size of the file.
        bytes: usize,
        /// Maximum size.
        limit: usize,
    },
    /// The header declares too many pixels.
    #[error(
        "has {width}×{height} pixels; at most {side} on a side and {pixels} in all are read. Make the picture smaller"
    )]
    TooManyPixels {
        /// Width of the picture.
        width: u32,
        /// Height of the picture.
        height: u32,
        /// Maximum side.
        side: u32,
        /// Maximum pixels.
        pixels: u64,
    },
    /// The file is damaged.
    #[error("cannot be decoded as {format}: {problem}")]
    Damaged {
        /// Format of the file.
        format: &'static str,
        /// Message of the decoder.
        problem: String,
    },
}

/// Bytes beside the pixels that a decoder may allocate: tables, rows, and data that it has not decoded yet.
const EXTRA: u64 = 8 << 20;

/// Maximum passes over the pixels of a progressive JPEG. Encoders write about ten; each may take as long as a whole
/// baseline picture.
const MAX_SCANS: usize = 64;

/// Maximum bytes of a decoder's message.
const MAX_PROBLEM: usize = 200;

/// Reads the header of a picture and checks the limits.
///
/// # Errors
/// [`PictureError`].
pub fn probe(bytes: &[u8], limits: &Limits) -> Result<Header, PictureError> {
    Opened::new(bytes, limits).map(|opened| opened.header)
}

/// Decodes a picture. The orientation of its metadata is applied, and transparent pixels are blended with white. 16-bit
/// values lose their low 8 bits, as in Pillow. Colour profiles are ignored.
///
/// # Errors
/// [`PictureError`].
pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Rgb, PictureError> {
    let Opened { header, width, height, orientation, decoder } = Opened::new(bytes, limits)?;
    let (columns, rows) = (width as usize, height as usize);
    let rgb = decoder.decode(columns, rows).map_err(|problem| header.format.damaged(problem))?;
    if rgb.len() != columns * rows * 3 {
        return Err(header.format.damaged("the number of pixels differs from the header's"));
    }
    let rgb = orientation.apply(rgb, columns, rows);
    Ok(Rgb { width: header.width, height: header.height, rgb })
}

/// A picture whose header was read.
struct Opened<'b> {
    header: Header,
    /// Width as it is stored.
    width: u32,
    /// Height as it is stored.
    height: u32,
    orientation: Orientation,
    decoder: Decoder<'b>,
}

/// Decoder of one format, after the header.
enum Decoder<'b> {
    Png(Box<png::Reader<Cursor<&'b [u8]>>>),
    Jpeg(Box<JpegDecoder<ZCursor<&'b [u8]>>>),
    Webp(Box<WebPDecoder<Cursor<&'b [u8]>>>),
    Gif(Box<gif::Decoder<&'b [u8]>>),
}

impl Format {
    fn damaged(self, problem: impl Display) -> PictureError {
        let mut problem = problem.to_string();
        if problem.len() > MAX_PROBLEM {
            problem.truncate(problem.floor_char_boundary(MAX_PROBLEM));
            problem.push('…');
        }
        PictureError::Damaged { format: self.name(), problem }
    }
}

impl Limits {
    /// Checks the size that a header declares.
    fn check(&self, format: Format, width: u32, height: u32) -> Result<(), PictureError> {
        if width == 0 || height == 0 {
            return Err(format.damaged(format_args!("it has {width}×{height} pixels")));
        }
        let Self { side, pixels, .. } = *self;
        if width > side || height > side || u64::from(width) * u64::from(height) > pixels {
            return Err(PictureError::TooManyPixels { width, height, side, pixels });
        }
        Ok(())
    }
}

impl<'b> Opened<'b> {
    fn new(bytes: &'b [u8], limits: &Limits) -> Result<Self, PictureError> {
        let format = Format::of(bytes)?;
        if bytes.len() > limits.bytes {
            return Err(PictureError::TooManyBytes { bytes: bytes.len(), limit: limits.bytes });
        }
        // Enough for 8 bytes for each pixel.
        let memory = limits.pixels.saturating_mul(8).saturating_add(EXTRA);
        match format {
            Format::Png => {
                let bound = png::Limits { bytes: usize::try_from(memory).unwrap_or(usize::MAX) };
                let mut decoder = png::Decoder::new_with_limits(Cursor::new(bytes), bound);
                decoder.set_ignore_text_chunk(true);
                decoder.set_ignore_iccp_chunk(true);
                decoder.set_transformations(Transformations::EXPAND);
                let info = decoder.read_header_info().map_err(|error| format.damaged(error))?;
                limits.check(format, info.width, info.height)?;
                let reader = decoder.read_info().map_err(|error| format.damaged(error))?;
                let info = reader.info();
                let (width, height) = (info.width, info.height);
                // The decoder of rows relies on whole colours.
                if info.palette.as_ref().is_some_and(|palette| palette.len() % 3 != 0) {
                    return Err(format.damaged("its palette ends within a colour"));
                }
                let orientation = info.exif_metadata.as_deref().map(Orientation::of).unwrap_or_default();
                let (color, depth) = reader.output_color_type();
                let stored = color.samples() as u64 * if depth == BitDepth::Sixteen { 2 } else { 1 };
                Ok(Self::of(format, width, height, orientation, stored, Decoder::Png(Box::new(reader))))
            }
            Format::Jpeg => {
                let side = usize::try_from(u32::MAX).unwrap_or(usize::MAX);
                let options = DecoderOptions::default()
                    .set_max_width(side)
                    .set_max_height(side)
                    .jpeg_set_max_scans(MAX_SCANS)
                    .jpeg_set_out_colorspace(ColorSpace::RGB);
                let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
                decoder.decode_headers().map_err(|error| format.damaged(error))?;
                let info = decoder.info().ok_or_else(|| format.damaged("it has no frame"))?;
                let (width, height) = (u32::from(info.width), u32::from(info.height));
                limits.check(format, width, height)?;
                let orientation = decoder.exif().map(|exif| Orientation::of(exif)).unwrap_or_default();
                // Coefficients of a progressive picture have two bytes for each sample of up to four.
                Ok(Self::of(format, width, height, orientation, 3 + 8, Decoder::Jpeg(Box::new(decoder))))
            }
            Format::Webp => {
                let mut decoder =
                    WebPDecoder::new(Cursor::new(bytes)).map_err(|error| format.damaged(error))?;
                let (width, height) = decoder.dimensions();
                limits.check(format, width, height)?;
                decoder.set_memory_limit(usize::try_from(memory).unwrap_or(usize::MAX));
                let exif = decoder.exif_metadata().ok().flatten();
                let orientation = exif.as_deref().map(Orientation::of).unwrap_or_default();
                // An animation has a canvas beside the frame.
                let stored = if decoder.is_animated() { 12 } else { 8 };
                Ok(Self::of(format, width, height, orientation, stored, Decoder::Webp(Box::new(decoder))))
            }
            Format::Gif => {
                let mut options = gif::DecodeOptions::new();
                options.set_color_output(ColorOutput::RGBA);
                options.set_memory_limit(
                    NonZeroU64::new(memory).map_or(MemoryLimit::Unlimited, MemoryLimit::Bytes),
                );
                options.check_frame_consistency(true);
                let decoder = options.read_info(bytes).map_err(|error| format.damaged(error))?;
                let (width, height) = (u32::from(decoder.width()), u32::from(decoder.height()));
                limits.check(format, width, height)?;
                let decoder = Decoder::Gif(Box::new(decoder));
                Ok(Self::of(format, width, height, Orientation::default(), 4, decoder))
            }
        }
    }

    /// Creates it. The decoder stores `stored` bytes for each pixel.
    fn of(
        format: Format,
        width: u32,
        height: u32,
        orientation: Orientation,
        stored: u64,
        decoder: Decoder<'b>,
    ) -> Self {
        let copies = if orientation == Orientation::default() { 1 } else { 2 };
        let memory = u64::from(width) * u64::from(height) * (stored + 3 * copies) + EXTRA;
        let (shown_width, shown_height) = orientation.size(width, height);
        let header = Header { format, width: shown_width, height: shown_height, memory };
        Self { header, width, height, orientation, decoder }
    }
}

impl Decoder<'_> {
    /// Returns the pixels in RGB over white.
    fn decode(self, width: usize, height: usize) -> Result<Vec<u8>, String> {
        match self {
            Self::Png(mut reader) => {
                let size = reader.output_buffer_size().ok_or("it is too large")?;
                let (color, depth) = reader.output_color_type();
                let mut samples = vec![0; size];
                reader.next_frame(&mut samples).map_err(|error| error.to_string())?;
                if depth == BitDepth::Sixteen {
                    let high = samples.as_chunks::<2>().0.iter().map(|&[high, _]| high);
                    samples = high.collect();
                }
                match color {
                    ColorType::Rgb => Ok(samples),
                    ColorType::Rgba => Ok(opaque(&samples)),
                    ColorType::Grayscale => Ok(samples.iter().flat_map(|&value| [value; 3]).collect()),
                    ColorType::GrayscaleAlpha => {
                        let pixels = samples.as_chunks::<2>().0.iter();
                        Ok(pixels.flat_map(|&[value, alpha]| [over_white(value, alpha); 3]).collect())
                    }
                    ColorType::Indexed => Err("its palette was not applied".to_owned()),
                }
            }
            Self::Jpeg(mut decoder) => decoder.decode().map_err(|error| error.to_string()),
            Self::Webp(mut decoder) => {
                let size = decoder.output_buffer_size().ok_or("it is too large")?;
                let mut samples = vec![0; size];
                let has_alpha = decoder.has_alpha();
                decoder.read_image(&mut samples).map_err(|error| error.to_string())?;
                Ok(if has_alpha { opaque(&samples) } else { samples })
            }
            Self::Gif(mut decoder) => {
                let frame = decoder.read_next_frame().map_err(|error| error.to_string())?;
                let frame = frame.ok_or("it has no picture")?;
                let (left, top) = (usize::from(frame.left), usize::from(frame.top));
                let (columns, rows) = (usize::from(frame.width), usize::from(frame.height));
                let is_inside = left + columns <= width && top + rows <= height;
                if !is_inside || frame.buffer.len() != columns * rows * 4 {
                    return Err("its first picture exceeds the canvas".to_owned());
                }
                let mut rgb = vec![255; width * height * 3];
                for (row, pixels) in frame.buffer.chunks_exact((columns * 4).max(1)).enumerate() {
                    let start = ((top + row) * width + left) * 3;
                    rgb[start..start + columns * 3].copy_from_slice(&opaque(pixels));
                }
                Ok(rgb)
            }
        }
    }
}

/// Blends RGBA with white.
fn opaque(rgba: &[u8]) -> Vec<u8> {
    let mut rgb = Vec::with_capacity(rgba.len() / 4 * 3);
    for &[r, g, b, alpha] in rgba.as_chunks().0 {
        rgb.extend([over_white(r, alpha), over_white(g, alpha), over_white(b, alpha)]);
    }
    rgb
}

fn over_white(value: u8, alpha: u8) -> u8 {
    let (value, alpha) = (u32::from(value), u32::from(alpha));
    ((value * alpha + 255 * (255 - alpha) + 127) / 255) as u8
}
