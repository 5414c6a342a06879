//! How each quantized format lies in memory once packed.
//!
//! 16 output rows form a group; a group is a sequence of *bricks*, one for every 64, 128 or 256 inputs, read from
//! front to back. In a brick, one byte of the 64 that are read together belongs to row `byte / 4` and to input
//! `4 * step + byte % 4`, so a vector holds a *step* of four inputs of all 16 rows, and each of 16 lanes
//! accumulates another output.
//!
//! ```text
//! brick:  d, dmin   [16] f16 each           formats with super-blocks
//!         scales    [blocks][16]            one for each row and block (32 inputs) or sub-block (16 or 32)
//!         minimums  [blocks][16]            where the format has them
//!         low       bits 0.. of the quants: 2, 4 or 8 bits, see below
//!         high      the bits above: none, 1 or 2
//!
//! low, 8 bits: one vector a step        4 bits: steps 2v, 2v+1 in the low and high half of each byte
//!      2 bits: steps 4v .. 4v+3, two bits each
//! high, 2 bits: steps 4v .. 4v+3        1 bit: steps 8v .. 8v+7
//! ```
//!
//! Quants are unsigned; the value is `scale * (quant - zero) + minimum`. The zero point is paid for by the
//! activations, which know their sums, and costs neither weight bytes nor instructions per weight.

use paguro_backend::WeightFormat;
use paguro_backend::format::{IQ4_VALUES, MXFP4_VALUES};

/// Inputs of a block of activations, and of a block of the formats without super-blocks.
pub const BLOCK: usize = 32;

/// Where the scales of a format are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    /// f16 for each block of 32 (and f16 minimums).
    Half,
    /// An exponent for each block of 32: `e8m0_half`.
    Exponent,
    /// An unsigned byte for each sub-block times the super-block's d (and bytes times dmin).
    Bytes,
    /// A signed byte for each sub-block times the super-block's d.
    SignedBytes,
    /// Scale in the low, minimum in the high half of one byte for each sub-block, times d and dmin.
    Nibbles,
}

/// What a packed format looks like; all sizes follow from it.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Inputs in a brick.
    pub inputs: usize,
    /// Bits of a quant in the low plane.
    pub low_bits: usize,
    /// Bits in the high plane.
    pub high_bits: usize,
    /// What the quants stand for, with 128 added; `None` if for themselves.
    pub codebook: Option<[u8; 16]>,
    /// Inputs that share a scale.
    pub sub_block: usize,
    /// Scales.
    pub scales: Scales,
    /// Whether there are minimums.
    pub minimums: bool,
    /// The zero point is `1 << zero_bits`; none if there are minimums.
    pub zero_bits: u32,
}

impl Layout {
    /// Quants use all eight bits around a zero point of 128.
    pub const fn offset(&self) -> bool {
        self.zero_bits == 7
    }

    /// The zero point, subtracted from each quant.
    pub const fn zero(&self) -> i32 {
        if self.minimums { 0 } else { 1 << self.zero_bits }
    }

    /// Steps whose products with activations, at most 127, fit 16 bits in sums of pairs: a power of two, at most those
    /// of a sub-block; 1 where nothing is known of the quants.
    pub const fn narrow_steps(&self) -> usize {
        if self.codebook.is_some() || self.low_bits == 8 {
            return 1;
        }
        let most = (1 << (self.low_bits + self.high_bits)) - 1;
        let mut steps = self.sub_block / 4;
        while steps * 2 * most * 127 > i16::MAX as usize {
            steps /= 2;
        }
        steps
    }

    /// Blocks of 32 inputs.
    pub const fn blocks(&self) -> usize {
        self.inputs / BLOCK
    }

    /// Sub-blocks.
    pub const fn sub_blocks(&self) -> usize {
        self.inputs / self.sub_block
    }

    /// Whether there is a d (and a place for dmin) in front.
    pub const fn has_super(&self) -> bool {
        matches!(self.scales, Scales::Bytes | Scales::SignedBytes | Scales::Nibbles)
    }

    /// Bytes of one sub-block's scales.
    pub const fn scale_bytes(&self) -> usize {
        if matches!(self.scales, Scales::Half) { 32 } else { 16 }
    }

    /// Where the scales start.
    pub const fn scales_at(&self) -> usize {
        if self.has_super() { 64 } else { 0 }
    }

    /// Where the minimums start.
    pub const fn minimums_at(&self) -> usize {
        self.scales_at() + self.sub_blocks() * self.scale_bytes()
    }

    /// Where the low plane starts.
    pub const fn low_at(&self) -> usize {
        let own_minimums = self.minimums && !matches!(self.scales, Scales::Nibbles);
        self.minimums_at() + if own_minimums { self.sub_blocks() * self.scale_bytes() } else { 0 }
    }

    /// Where the high plane starts.
    pub const fn high_at(&self) -> usize {
        self.low_at() + self.inputs * 2 * self.low_bits
    }

    /// Bytes of a brick.
    pub const fn bytes(&self) -> usize {
        self.high_at() + self.inputs * 2 * self.high_bits
    }
}

/// One block of one row, taken apart: what packing reads from a file.
#[derive(Clone, Copy)]
pub struct Decoded {
    /// Unsigned quants; a file's block fills 32 or all of them.
    pub quants: [u8; 256],
    /// Scales of the sub-blocks as [`Scales`] has them; unused for [`Scales::Half`].
    pub scales: [u8; 16],
    /// Minimums of the sub-blocks; unused for [`Scales::Half`].
    pub minimums: [u8; 16],
    /// The (super-)block's scale, bits of an f16.
    pub d: u16,
    /// The (super-)block's minimum, which is *added*: bits of an f16.
    pub dmin: u16,
}

impl Decoded {
    /// Decodes to zeros.
    pub const ZERO: Self = Self { quants: [0; 256], scales: [0; 16], minimums: [0; 16], d: 0, dmin: 0 };
}

/// A quantized format.
pub trait Format {
    /// Its name in files.
    const FORMAT: WeightFormat;
    /// Its packed form.
    const LAYOUT: Layout;
    /// Takes one block of a file's row apart.
    fn decode(block: &[u8], out: &mut Decoded);
}

/// Layout of a format with blocks of 32.
const fn blocks(low_bits: usize, high_bits: usize, zero_bits: u32, minimums: bool) -> Layout {
    Layout {
        inputs: 64,
        low_bits,
        high_bits,
        codebook: None,
        sub_block: 32,
        scales: Scales::Half,
        minimums,
        zero_bits,
    }
}

/// Layout of a format with super-blocks of 256.
const fn super_blocks(low_bits: usize, high_bits: usize, sub_block: usize, scales: Scales) -> Layout {
    Layout {
        inputs: 256,
        low_bits,
        high_bits,
        codebook: None,
        sub_block,
        scales,
        minimums: !matches!(scales, Scales::SignedBytes),
        zero_bits: 0,
    }
}

/// A codebook's values as unsigned bytes.
const fn codebook(values: [i8; 16]) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    let mut i = 0;
    while i < 16 {
        bytes[i] = (values[i] as u8) ^ 0x80;
        i += 1;
    }
    Some(bytes)
}

macro_rules! formats {
    ($($name:ident: $layout:expr, $decode:path;)*) => {
        $(
            #[doc = concat!("The format ", stringify!($name), ".")]
            #[allow(non_camel_case_types)] // the field writes Q4_K
            pub struct $name;

            impl Format for $name {
                const FORMAT: WeightFormat = WeightFormat::$name;
                const LAYOUT: Layout = $layout;
                #[inline]
                fn decode(block: &[u8], out: &mut Decoded) {
                    $decode(block, out);
                }
            }
        )*

        /// The packed form of a format, or `None` for the formats that are not quantized.
        pub const fn layout_of(format: WeightFormat) -> Option<Layout> {
            match format {
                $(WeightFormat::$name => Some($name::LAYOUT),)*
                WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => None,
            }
        }
    };
}

use super::decode;

formats! {
    Q4_0: blocks(4, 0, 3, false), decode::q4_0;
    Q4_1: blocks(4, 0, 0, true), decode::q4_1;
    Q5_0: blocks(4, 1, 4, false), decode::q5_0;
    Q5_1: blocks(4, 1, 0, true), decode::q5_1;
    Q8_0: blocks(8, 0, 7, false), decode::q8_0;
    Q2_K: super_blocks(2, 0, 16, Scales::Nibbles), decode::q2_k;
    Q3_K: Layout { zero_bits: 2, ..super_blocks(2, 1, 16, Scales::SignedBytes) }, decode::q3_k;
    Q4_K: super_blocks(4, 0, 32, Scales::Bytes), decode::q4_k;
    Q5_K: super_blocks(4, 1, 32, Scales::Bytes), decode::q5_k;
    Q6_K: Layout { zero_bits: 5, ..super_blocks(4, 2, 16, Scales::SignedBytes) }, decode::q6_k;
    IQ4_NL: Layout { codebook: codebook(IQ4_VALUES), ..blocks(4, 0, 7, false) }, decode::iq4_nl;
    IQ4_XS: Layout {
        codebook: codebook(IQ4_VALUES),
        zero_bits: 7,
        ..super_blocks(4, 0, 32, Scales::SignedBytes)
    }, decode::iq4_xs;
    MXFP4: Layout {
        // 128, so that a whole number of cache lines holds the one-byte scales.
        inputs: 128,
        codebook: codebook(MXFP4_VALUES),
        scales: Scales::Exponent,
        ..blocks(4, 0, 7, false)
    }, decode::mxfp4;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bricks_are_whole_cache_lines_of_about_the_size_of_the_file() {
        for format in WeightFormat::ALL {
            let Some(layout) = layout_of(format) else { continue };
            for at in [layout.low_at(), layout.high_at(), layout.bytes()] {
                assert_eq!(at % 64, 0, "{format}");
            }
            let file = 16 * format.row_bytes(layout.inputs.max(format.block_len()));
            let growth = layout.bytes() as f64 / file as f64;
            assert!((1.0..1.06).contains(&growth), "{format}: {growth}");
        }
    }
}
