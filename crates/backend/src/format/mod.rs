//! Weight formats: how a row of a matrix is encoded, and what its bytes mean.
//!
//! The decoders here are the definition: scalar, clear, one per format. Backends bring their own fast ones and are
//! checked against these.

mod codebook;
mod encode;
mod k_quants;
mod legacy;
mod plain;

use std::{fmt, str::FromStr};

use half::f16;

pub use codebook::{IQ4_VALUES, MXFP4_VALUES, e8m0_half};

/// How the rows of a matrix are encoded. Names and layouts are GGUF's (ggml-common.h of llama.cpp).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(non_camel_case_types)] // the field writes Q4_K
#[allow(missing_docs)] // the names say it all; each layout is documented where it is decoded
pub enum WeightFormat {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
}

impl WeightFormat {
    /// Every format.
    pub const ALL: [WeightFormat; 16] = {
        use WeightFormat::*;
        [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4]
    };

    /// True if elements share scales in blocks; false for floats.
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Elements in a block.
    pub const fn block_len(self) -> usize {
        use WeightFormat::*;
        match self {
            F32 | F16 | BF16 => 1,
            Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | IQ4_NL | MXFP4 => 32,
            Q2_K | Q3_K | Q4_K | Q5_K | Q6_K | IQ4_XS => 256,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        use WeightFormat::*;
        match self {
            F32 => 4,
            F16 | BF16 => 2,
            Q4_0 | IQ4_NL => 18,
            Q4_1 => 20,
            Q5_0 => 22,
            Q5_1 => 24,
            Q8_0 => 34,
            Q2_K => 84,
            Q3_K => 110,
            Q4_K => 144,
            Q5_K => 176,
            Q6_K => 210,
            IQ4_XS => 136,
            MXFP4 => 17,
        }
    }

    /// Bytes of a row of `cols` elements; `cols` is a multiple of [`WeightFormat::block_len`].
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols / self.block_len() * self.block_bytes()
    }

    /// The name, as GGUF writes it.
    pub const fn name(self) -> &'static str {
        use WeightFormat::*;
        match self {
            F32 => "F32",
            F16 => "F16",
            BF16 => "BF16",
            Q4_0 => "Q4_0",
            Q4_1 => "Q4_1",
            Q5_0 => "Q5_0",
            Q5_1 => "Q5_1",
            Q8_0 => "Q8_0",
            Q2_K => "Q2_K",
            Q3_K => "Q3_K",
            Q4_K => "Q4_K",
            Q5_K => "Q5_K",
            Q6_K => "Q6_K",
            IQ4_NL => "IQ4_NL",
            IQ4_XS => "IQ4_XS",
            MXFP4 => "MXFP4",
        }
    }

    /// The number that GGUF files give this format (`enum ggml_type`).
    pub const fn ggml_type(self) -> u32 {
        use WeightFormat::*;
        match self {
            F32 => 0,
            F16 => 1,
            Q4_0 => 2,
            Q4_1 => 3,
            Q5_0 => 6,
            Q5_1 => 7,
            Q8_0 => 8,
            Q2_K => 10,
            Q3_K => 11,
            Q4_K => 12,
            Q5_K => 13,
            Q6_K => 14,
            IQ4_NL => 20,
            IQ4_XS => 23,
            BF16 => 30,
            MXFP4 => 39,
        }
    }

    /// The format with this `enum ggml_type` number, if it is one of ours.
    pub fn from_ggml_type(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.ggml_type() == number)
    }

    /// Decodes one row or a part of it that starts at a block.
    ///
    /// # Panics
    /// If `out` is not a whole number of blocks or `bytes` not as long as they are; parsers check tensors first.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        assert!(
            out.len().is_multiple_of(self.block_len()) && bytes.len() == self.row_bytes(out.len()),
            "{self}: {} elements do not lie in {} bytes ({} elements take {})",
            out.len(),
            bytes.len(),
            self.block_len(),
            self.block_bytes(),
        );
        match self {
            Self::F32 => plain::f32(bytes, out),
            Self::F16 => plain::f16(bytes, out),
            Self::BF16 => plain::bf16(bytes, out),
            Self::Q4_0 => each_block(bytes, out, legacy::q4_0),
            Self::Q4_1 => each_block(bytes, out, legacy::q4_1),
            Self::Q5_0 => each_block(bytes, out, legacy::q5_0),
            Self::Q5_1 => each_block(bytes, out, legacy::q5_1),
            Self::Q8_0 => each_block(bytes, out, legacy::q8_0),
            Self::Q2_K => each_block(bytes, out, k_quants::q2_k),
            Self::Q3_K => each_block(bytes, out, k_quants::q3_k),
            Self::Q4_K => each_block(bytes, out, k_quants::q4_k),
            Self::Q5_K => each_block(bytes, out, k_quants::q5_k),
            Self::Q6_K => each_block(bytes, out, k_quants::q6_k),
            Self::IQ4_NL => each_block(bytes, out, codebook::iq4_nl),
            Self::IQ4_XS => each_block(bytes, out, codebook::iq4_xs),
            Self::MXFP4 => each_block(bytes, out, codebook::mxfp4),
        }
    }

    /// True if no element of encoded rows is infinite or NaN. Quantized formats are looked at by their scales only.
    pub fn is_finite(self, bytes: &[u8]) -> bool {
        use WeightFormat::*;
        let halves = |at: &[usize]| {
            bytes.chunks_exact(self.block_bytes()).all(|block| {
                at.iter().all(|&at| u16::from_le_bytes([block[at], block[at + 1]]) & 0x7C00 != 0x7C00)
            })
        };
        // Without branches, so that it runs at the speed of memory.
        match self {
            F32 => !bytes
                .as_chunks()
                .0
                .iter()
                .fold(false, |bad, b| bad | (u32::from_le_bytes(*b) & 0x7F80_0000 == 0x7F80_0000)),
            F16 => !bytes
                .as_chunks()
                .0
                .iter()
                .fold(false, |bad, b| bad | (u16::from_le_bytes(*b) & 0x7C00 == 0x7C00)),
            BF16 => !bytes
                .as_chunks()
                .0
                .iter()
                .fold(false, |bad, b| bad | (u16::from_le_bytes(*b) & 0x7F80 == 0x7F80)),
            Q4_0 | Q5_0 | Q8_0 | IQ4_NL | IQ4_XS => halves(&[0]),
            Q4_1 | Q5_1 | Q4_K | Q5_K => halves(&[0, 2]),
            Q2_K => halves(&[80, 82]),
            Q3_K => halves(&[108]),
            Q6_K => halves(&[208]),
            // The exponent 255 is NaN.
            MXFP4 => bytes.chunks_exact(self.block_bytes()).all(|block| block[0] != 255),
        }
    }

    /// Overwrites an encoded block such that its elements are not finite. For tests.
    pub fn spoil(self, block: &mut [u8]) {
        use WeightFormat::*;
        let at = match self {
            F32 => 2,
            Q2_K => 80,
            Q3_K => 108,
            Q6_K => 208,
            MXFP4 => return block[0] = 255,
            _ => 0,
        };
        // Infinity in f16, and NaN in the upper half of an f32 and in bf16.
        let bits: u16 = if matches!(self, F32 | BF16) { 0x7FC0 } else { 0x7C00 };
        block[at..at + 2].copy_from_slice(&bits.to_le_bytes());
    }

    /// Encodes values, or returns `None` for the formats that Paguro only reads.
    ///
    /// # Panics
    /// If `values` is not a whole number of blocks.
    pub fn quantize(self, values: &[f32]) -> Option<Vec<u8>> {
        assert!(
            values.len().is_multiple_of(self.block_len()),
            "{self}: {} elements are no blocks",
            values.len()
        );
        match self {
            Self::F32 => Some(encode::f32(values)),
            Self::F16 => Some(encode::f16(values)),
            Self::BF16 => Some(encode::bf16(values)),
            Self::Q4_0 => Some(encode::q4_0(values)),
            Self::Q8_0 => Some(encode::q8_0(values)),
            _ => None,
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for WeightFormat {
    type Err = UnknownFormat;

    /// By name, in any case.
    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        let known = Self::ALL.into_iter().find(|format| format.name().eq_ignore_ascii_case(name));
        known.ok_or_else(|| UnknownFormat { name: name.to_owned() })
    }
}

/// Not the name of a weight format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown weight format `{name}`; known are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4"
)]
pub struct UnknownFormat {
    /// What was given.
    pub name: String,
}

/// Decodes block after block; the lengths have been checked.
fn each_block<const BYTES: usize, const LEN: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    for (block, out) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        decode(block, out);
    }
}

/// The f16 at byte `at` of a block.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}
