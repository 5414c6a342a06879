//! Weight formats: the encoding of a matrix row.
//!
//! The decoders here are the definition: scalar, simple, one per format. Backends have their own fast ones, which are
//! compared with these.

mod codebook;
mod encode;
mod grids;
mod k_quants;
mod lattice;
mod legacy;
mod plain;

use std::{fmt, str::FromStr};

use half::f16;

pub use codebook::{IQ4_VALUES, MXFP4_VALUES, e4m3_half, e8m0_half};
pub use lattice::{Alphabet, Lattice};

/// Declares the formats: name, number in GGUF files (`enum ggml_type`), elements and bytes of a block, bytes at which a
/// block has an f16 that must be finite, and the decoder.
macro_rules! formats {
    ($($name:ident: $number:expr, $len:literal, $bytes:literal, $halves:expr, $decode:expr;)*) => {
        /// Encoding of the rows of a matrix. Names and layouts are GGUF's (ggml-common.h of llama.cpp).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(non_camel_case_types)] // the field writes Q4_K
        #[allow(missing_docs)] // the names say it all; each layout is documented where it is decoded
        pub enum WeightFormat {
            $($name,)*
        }

        impl WeightFormat {
            /// Every format.
            pub const ALL: [WeightFormat; [$($len),*].len()] = [$(Self::$name),*];

            /// Returns the number of elements in a block.
            pub const fn block_len(self) -> usize {
                match self {
                    $(Self::$name => $len,)*
                }
            }

            /// Returns the number of bytes of a block.
            pub const fn block_bytes(self) -> usize {
                match self {
                    $(Self::$name => $bytes,)*
                }
            }

            /// Returns the name, as GGUF writes it.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }

            /// Returns the number of this format in GGUF files (`enum ggml_type`); [`u32::MAX`] for formats that no
            /// file has.
            pub const fn ggml_type(self) -> u32 {
                match self {
                    $(Self::$name => $number,)*
                }
            }

            /// Returns the bytes of a block that hold an f16 scale or minimum.
            pub const fn halves(self) -> &'static [usize] {
                match self {
                    $(Self::$name => &$halves,)*
                }
            }

            /// Decodes checked bytes.
            fn decode(self, bytes: &[u8], out: &mut [f32]) {
                match self {
                    $(Self::$name => $decode(bytes, out),)*
                }
            }
        }

        const NAMES: &str = formats!(@names $($name)*);
    };
    (@names $first:ident $($name:ident)*) => {
        concat!(stringify!($first) $(, ", ", stringify!($name))*)
    };
}

/// Number of the formats that no file has: models are converted to them while they are read.
const NOT_IN_FILES: u32 = u32::MAX;

formats! {
    F32: 0, 1, 4, [], plain::f32;
    F16: 1, 1, 2, [0], plain::f16;
    BF16: 30, 1, 2, [], plain::bf16;
    Q4_0: 2, 32, 18, [0], blocks(legacy::q4_0);
    Q4_1: 3, 32, 20, [0, 2], blocks(legacy::q4_1);
    Q5_0: 6, 32, 22, [0], blocks(legacy::q5_0);
    Q5_1: 7, 32, 24, [0, 2], blocks(legacy::q5_1);
    Q8_0: 8, 32, 34, [0], blocks(legacy::q8_0);
    Q2_K: 10, 256, 84, [80, 82], blocks(k_quants::q2_k);
    Q3_K: 11, 256, 110, [108], blocks(k_quants::q3_k);
    Q4_K: 12, 256, 144, [0, 2], blocks(k_quants::q4_k);
    Q5_K: 13, 256, 176, [0, 2], blocks(k_quants::q5_k);
    Q6_K: 14, 256, 210, [208], blocks(k_quants::q6_k);
    IQ1_S: 19, 256, 50, [0], lattice_blocks(Self::IQ1_S);
    IQ1_M: 29, 256, 56, [], lattice_blocks(Self::IQ1_M);
    IQ2_XXS: 16, 256, 66, [0], lattice_blocks(Self::IQ2_XXS);
    IQ2_XS: 17, 256, 74, [0], lattice_blocks(Self::IQ2_XS);
    IQ2_S: 22, 256, 82, [0], lattice_blocks(Self::IQ2_S);
    IQ3_XXS: 18, 256, 98, [0], lattice_blocks(Self::IQ3_XXS);
    IQ3_S: 21, 256, 110, [0], lattice_blocks(Self::IQ3_S);
    IQ4_NL: 20, 32, 18, [0], blocks(codebook::iq4_nl);
    IQ4_XS: 23, 256, 136, [0], blocks(codebook::iq4_xs);
    TQ1_0: 34, 256, 54, [52], lattice_blocks(Self::TQ1_0);
    TQ2_0: 35, 256, 66, [64], lattice_blocks(Self::TQ2_0);
    Q1_0: 41, 128, 18, [0], blocks(lattice::q1_0);
    Q2_0: 42, 64, 18, [0], blocks(lattice::q2_0);
    MXFP4: 39, 32, 17, [], blocks(codebook::mxfp4);
    NVFP4: 40, 64, 36, [], blocks(codebook::nvfp4);
    NVFP4_SCALED: NOT_IN_FILES, 64, 40, [], blocks(codebook::nvfp4_scaled);
}

impl WeightFormat {
    /// Returns true if elements share scales in blocks; false for floats.
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Returns the number of bytes of a row of `cols` elements; `cols` is a multiple of [`WeightFormat::block_len`].
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols / self.block_len() * self.block_bytes()
    }

    /// Returns the format with this `enum ggml_type` number, if it is one of ours.
    pub fn from_ggml_type(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.ggml_type() == number && number != NOT_IN_FILES)
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
        self.decode(bytes, out);
    }

    /// Returns the values of the codes of a [`Lattice`]; `None` for formats of another kind.
    pub const fn alphabet(self) -> Option<Alphabet> {
        use WeightFormat::*;
        match self {
            IQ1_S | IQ1_M => Some(lattice::IQ1),
            IQ2_XXS | IQ2_XS | IQ2_S => Some(lattice::IQ2),
            IQ3_XXS => Some(lattice::IQ3_XXS),
            IQ3_S => Some(lattice::IQ3_S),
            TQ1_0 | TQ2_0 => Some(lattice::TERNARY),
            _ => None,
        }
    }

    /// Points of the lattice of a format: magnitudes of two bits (eight elements) or three (four), the first in the lowest
    /// bits. `None` for formats without a lattice.
    pub const fn points(self) -> Option<&'static [u16]> {
        match self {
            Self::IQ1_S | Self::IQ1_M => Some(&grids::IQ1),
            Self::IQ2_XXS => Some(&grids::IQ2_XXS),
            Self::IQ2_XS => Some(&grids::IQ2_XS),
            Self::IQ2_S => Some(&grids::IQ2_S),
            Self::IQ3_XXS => Some(&grids::IQ3_XXS),
            Self::IQ3_S => Some(&grids::IQ3_S),
            _ => None,
        }
    }

    /// Reads a block of a format that has an [`alphabet`](Self::alphabet).
    ///
    /// # Panics
    /// If the format has none, or `block` is shorter than a block.
    pub fn lattice(self, block: &[u8], out: &mut Lattice) {
        use WeightFormat::*;
        match self {
            IQ1_S => lattice::iq1_s(block, out),
            IQ1_M => lattice::iq1_m(block, out),
            IQ2_XXS => lattice::iq2_xxs(block, out),
            IQ2_XS => lattice::iq2_xs(block, out),
            IQ2_S => lattice::iq2_s(block, out),
            IQ3_XXS => lattice::iq3_xxs(block, out),
            IQ3_S => lattice::iq3_s(block, out),
            TQ1_0 => lattice::tq1_0(block, out),
            TQ2_0 => lattice::tq2_0(block, out),
            _ => panic!("{self} has no lattice"),
        }
    }

    /// Returns true if no element of encoded rows is infinite or NaN. Quantized formats are looked at by their scales
    /// only.
    pub fn is_finite(self, bytes: &[u8]) -> bool {
        let blocks = || bytes.chunks_exact(self.block_bytes());
        // Without branches, so that it runs at memory speed.
        match self {
            Self::F32 => !bytes
                .as_chunks()
                .0
                .iter()
                .fold(false, |bad, b| bad | (u32::from_le_bytes(*b) & 0x7F80_0000 == 0x7F80_0000)),
            Self::F16 => !bytes
                .as_chunks()
                .0
                .iter()
                .fold(false, |bad, b| bad | (u16::from_le_bytes(*b) & 0x7C00 == 0x7C00)),
            Self::BF16 => !bytes
                .as_chunks()
                .0
                .iter()
                .fold(false, |bad, b| bad | (u16::from_le_bytes(*b) & 0x7F80 == 0x7F80)),
            Self::IQ1_M => blocks().all(|block| lattice::iq1_m_d(block) & 0x7C00 != 0x7C00),
            // The exponent 255 is NaN, and so is E4M3's 0x7F.
            Self::MXFP4 => blocks().all(|block| block[0] != 255),
            Self::NVFP4 => blocks().all(|block| block[..4].iter().all(|scale| scale & 0x7f != 0x7f)),
            Self::NVFP4_SCALED => blocks().all(|block| {
                // Products with the largest scale and value, 240 * 12, are finite as well.
                let whole = u32::from_le_bytes([block[0], block[1], block[2], block[3]]);
                block[4..8].iter().all(|scale| scale & 0x7f != 0x7f) && whole & 0x7F80_0000 <= 240 << 23
            }),
            _ => blocks().all(|block| {
                let finite = |&at: &usize| u16::from_le_bytes([block[at], block[at + 1]]) & 0x7C00 != 0x7C00;
                self.halves().iter().all(finite)
            }),
        }
    }

    /// Overwrites an encoded block such that its elements are not finite. For tests.
    pub fn spoil(self, block: &mut [u8]) {
        use WeightFormat::*;
        match self {
            MXFP4 => block[0] = 255,
            NVFP4 => block[0] = 0x7f,
            NVFP4_SCALED => block[4] = 0x7f,
            IQ1_M => {
                block[55] |= 0xf0;
                block[53] |= 0xf0;
            }
            // NaN in the upper half of an f32 and in bf16.
            F32 => block[2..4].copy_from_slice(&0x7FC0u16.to_le_bytes()),
            BF16 => block[..2].copy_from_slice(&0x7FC0u16.to_le_bytes()),
            _ => {
                let at = self.halves()[0];
                block[at..at + 2].copy_from_slice(&0x7C00u16.to_le_bytes());
            }
        }
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

    /// Parses a name in any case.
    fn from_str(name: &str) -> Result<Self, UnknownFormat> {
        let known = Self::ALL.into_iter().find(|format| format.name().eq_ignore_ascii_case(name));
        known.ok_or_else(|| UnknownFormat { name: name.to_owned() })
    }
}

/// Not the name of a weight format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown weight format `{name}`; known are {NAMES}")]
pub struct UnknownFormat {
    /// The given name.
    pub name: String,
}

/// Returns a decoder of rows from one of blocks; lengths have been checked.
fn blocks<const BYTES: usize, const LEN: usize>(
    decode: fn(&[u8; BYTES], &mut [f32; LEN]),
) -> impl Fn(&[u8], &mut [f32]) {
    move |bytes, out| {
        for (block, out) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
            decode(block, out);
        }
    }
}

/// Returns a decoder of rows of a format that has an [`Alphabet`].
fn lattice_blocks(format: WeightFormat) -> impl Fn(&[u8], &mut [f32]) {
    move |bytes, out| {
        let alphabet = format.alphabet().unwrap_or(lattice::TERNARY);
        let mut block = Lattice::ZERO;
        for (bytes, out) in bytes.chunks_exact(format.block_bytes()).zip(out.as_chunks_mut().0) {
            format.lattice(bytes, &mut block);
            block.decode(&alphabet, out);
        }
    }
}

/// Returns the f16 at byte `at` of a block.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}
