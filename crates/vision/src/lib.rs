//! Pictures for models that see: decoding, resampling, and the rules that map a picture's size to the sizes and tokens of
//! its parts.
//!
//! The crate knows neither models nor devices. [`probe()`] reads a header, [`Processor::plan`] computes sizes and tokens from
//! it without pixels, [`decode()`] returns pixels, and [`Processor::prepare`] resamples them as Pillow does. Bytes are
//! untrusted: all limits are checked on the header, before pixels are allocated.

mod base64_image;
mod decode;
mod exif;
mod format;
mod grids;
mod layout;
mod plan;
mod resample;

pub use base64_image::{Base64Error, from_base64, from_data_url};
pub use decode::{Header, Limits, PictureError, Rgb, decode, probe};
pub use format::Format;
pub use layout::{Family, Piece};
pub use plan::{Budget, Detail, Grid, Part, Pixels, Plan, Processor, SizeError, SizeRule, SmallSides};
pub use resample::{Filter, resample};
