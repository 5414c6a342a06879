//! Memory layout of packed quantized formats.
//!
//! 16 output rows form a group; a group is a sequence of *packed blocks*, one for every 64, 128 or 256 inputs,
//! read from front to back. In a packed block, each of the 64 bytes that are read together belongs to row `byte / 4` and to
//! input `4 * step + byte % 4`, so a vector holds a *step* of four inputs of all 16 rows, and each of 16 lanes
//! accumulates another output.
//!
//! ```text
//! block:  d, dmin   [16] f16 each           formats with super-blocks; NVFP4: d [16] in f32
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
//! Quants are unsigned; the value is `scale * (quant - zero) + minimum`. The zero point is applied through the sums of
//! the activations, which costs neither weight bytes nor instructions per weight.

use paguro_backend::WeightFormat;
use paguro_backend::format::{Alphabet, IQ4_VALUES, MXFP4_VALUES};

use crate::simd::Bytes;

/// Inputs of a block of activations, and of a block of the formats without super-blocks.
pub const BLOCK: usize = 32;

/// Encoding of a format's scales.
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
    /// An E4M3 number for each sub-block, times d in f32: `e4m3_half`.
    E4m3,
}

/// Layout of a packed format, which determines all sizes.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Inputs in a packed block.
    pub inputs: usize,
    /// Bits of a quant in the low plane.
    pub low_bits: usize,
    /// Bits in the high plane.
    pub high_bits: usize,
    /// Values of the quants, with the zero point added; `None` if quants are their values.
    pub codebook: Option<[u8; 16]>,
    /// Inputs that share a scale.
    pub sub_block: usize,
    /// Scales.
    pub scales: Scales,
    /// True if there are minimums.
    pub minimums: bool,
    /// The zero point, subtracted from each quant; none if there are minimums.
    pub zero: i32,
    /// Factor of d, a power of two.
    pub unit: f32,
    /// True if quants are signed bytes that multiply [ranged](crate::quantize) activations. The minimums are then the sums of the
    /// quants, see [`Q8_0Ranged`].
    pub ranged: bool,
}

impl Layout {
    /// Quants use all eight bits around a zero point of 128.
    pub const fn offset(&self) -> bool {
        self.zero == 128
    }

    /// Numbers that the bytes of unpacked quants stand for.
    pub const fn bytes_are(&self) -> Bytes {
        if self.ranged {
            Bytes::Signed
        } else if self.offset() {
            Bytes::Offset
        } else {
            Bytes::Small
        }
    }

    /// The largest value of a quant.
    const fn most(&self) -> usize {
        let Some(values) = self.codebook else { return (1 << (self.low_bits + self.high_bits)) - 1 };
        let (mut most, mut i) = (0, 0);
        while i < values.len() {
            most = if values[i] > most { values[i] } else { most };
            i += 1;
        }
        most as usize
    }

    /// Steps whose products with activations, at most 127, fit 16 bits in sums of pairs: a power of two, at most those
    /// of a sub-block; 1 where quants use all eight bits.
    pub const fn narrow_steps(&self) -> usize {
        let mut steps = self.sub_block / 4;
        while steps > 1 && steps * 2 * self.most() * 127 > i16::MAX as usize {
            steps /= 2;
        }
        steps
    }

    /// Returns true if scales are integers that are multiplied by d.
    pub const fn whole_scales(&self) -> bool {
        !matches!(self.scales, Scales::E4m3)
    }

    /// Blocks of 32 inputs.
    pub const fn blocks(&self) -> usize {
        self.inputs / BLOCK
    }

    /// Sub-blocks.
    pub const fn sub_blocks(&self) -> usize {
        self.inputs / self.sub_block
    }

    /// Returns true if there is a d (and a place for dmin) in front.
    pub const fn has_super(&self) -> bool {
        matches!(self.scales, Scales::Bytes | Scales::SignedBytes | Scales::Nibbles | Scales::E4m3)
    }

    /// Bytes of one sub-block's scales.
    pub const fn scale_bytes(&self) -> usize {
        if matches!(self.scales, Scales::Half) { 32 } else { 16 }
    }

    /// Returns the offset of the scales.
    pub const fn scales_at(&self) -> usize {
        if self.has_super() { 64 } else { 0 }
    }

    /// Returns the offset of the minimums.
    pub const fn minimums_at(&self) -> usize {
        self.scales_at() + self.sub_blocks() * self.scale_bytes()
    }

    /// Returns the offset of the low plane.
    pub const fn low_at(&self) -> usize {
        let own_minimums = self.minimums && !matches!(self.scales, Scales::Nibbles);
        self.minimums_at() + if own_minimums { self.sub_blocks() * self.scale_bytes() } else { 0 }
    }

    /// Returns the offset of the high plane.
    pub const fn high_at(&self) -> usize {
        self.low_at() + self.inputs * 2 * self.low_bits
    }

    /// Bytes of a packed block.
    pub const fn bytes(&self) -> usize {
        self.high_at() + self.inputs * 2 * self.high_bits
    }
}

/// One unpacked block of one row, which packing reads from a file.
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
    /// The super-block's scale with [`Scales::E4m3`].
    pub whole: f32,
}

impl Decoded {
    /// Decodes to zeros.
    pub const ZERO: Self =
        Self { quants: [0; 256], scales: [0; 16], minimums: [0; 16], d: 0, dmin: 0, whole: 0.0 };
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
const fn blocks(low_bits: usize, high_bits: usize, zero: i32, minimums: bool) -> Layout {
    Layout {
        inputs: 64,
        low_bits,
        high_bits,
        codebook: None,
        sub_block: 32,
        scales: Scales::Half,
        minimums,
        zero,
        unit: 1.0,
        ranged: false,
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
        minimums: !matches!(scales, Scales::SignedBytes | Scales::E4m3),
        zero: 0,
        unit: 1.0,
        ranged: false,
    }
}

/// Layout of a format whose quants are codes of an alphabet, with a scale for each `sub_block` inputs.
const fn lattice(low_bits: usize, high_bits: usize, sub_block: usize, format: WeightFormat) -> Layout {
    let Some(Alphabet { values, unit }) = format.alphabet() else { panic!("not a lattice format") };
    let codes = 1 << (low_bits + high_bits);
    let (mut bytes, mut zero, mut i) = ([0; 16], 0, 0);
    while i < codes {
        zero = if -(values[i] as i32) > zero { -(values[i] as i32) } else { zero };
        i += 1;
    }
    let mut is_linear = true;
    i = 0;
    while i < codes {
        bytes[i] = (values[i] as i32 + zero) as u8;
        is_linear &= bytes[i] as usize == i;
        i += 1;
    }
    let codebook = if is_linear { None } else { Some(bytes) };
    Layout { codebook, zero, unit, ..super_blocks(low_bits, high_bits, sub_block, Scales::SignedBytes) }
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

/// Layout of NVFP4, with or without a scale of the whole matrix.
const NVFP4_LAYOUT: Layout =
    Layout { codebook: codebook(MXFP4_VALUES), zero: 128, ..super_blocks(4, 0, 16, Scales::E4m3) };

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
        pub const fn layout_of(format: WeightFormat, activations: Activations) -> Option<Layout> {
            match format {
                WeightFormat::Q8_0 if matches!(activations, Activations::Ranged) => Some(Q8_0Ranged::LAYOUT),
                $(WeightFormat::$name => Some($name::LAYOUT),)*
                WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => None,
            }
        }

        /// `pack_group` for a format, or `None` for the formats that are not quantized.
        pub const fn packer(format: WeightFormat, activations: Activations) -> Option<fn(&[u8], usize, &mut [u8])> {
            match format {
                WeightFormat::Q8_0 if matches!(activations, Activations::Ranged) => Some(pack_group::<Q8_0Ranged>),
                $(WeightFormat::$name => Some(pack_group::<$name>),)*
                WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => None,
            }
        }
    };
}

use super::{Activations, decode, pack::pack_group};

formats! {
    Q4_0: blocks(4, 0, 8, false), decode::q4_0;
    Q4_1: blocks(4, 0, 0, true), decode::q4_1;
    Q5_0: blocks(4, 1, 16, false), decode::q5_0;
    Q5_1: blocks(4, 1, 0, true), decode::q5_1;
    Q8_0: blocks(8, 0, 128, false), decode::q8_0;
    Q2_K: super_blocks(2, 0, 16, Scales::Nibbles), decode::q2_k;
    Q3_K: Layout { zero: 4, ..super_blocks(2, 1, 16, Scales::SignedBytes) }, decode::q3_k;
    Q4_K: super_blocks(4, 0, 32, Scales::Bytes), decode::q4_k;
    Q5_K: super_blocks(4, 1, 32, Scales::Bytes), decode::q5_k;
    Q6_K: Layout { zero: 32, ..super_blocks(4, 2, 16, Scales::SignedBytes) }, decode::q6_k;
    IQ1_S: lattice(2, 1, 32, WeightFormat::IQ1_S), decode::lattice::<IQ1_S>;
    IQ1_M: lattice(2, 1, 16, WeightFormat::IQ1_M), decode::lattice::<IQ1_M>;
    IQ2_XXS: lattice(2, 1, 32, WeightFormat::IQ2_XXS), decode::lattice::<IQ2_XXS>;
    IQ2_XS: lattice(2, 1, 16, WeightFormat::IQ2_XS), decode::lattice::<IQ2_XS>;
    IQ2_S: lattice(2, 1, 16, WeightFormat::IQ2_S), decode::lattice::<IQ2_S>;
    IQ3_XXS: lattice(4, 0, 32, WeightFormat::IQ3_XXS), decode::lattice::<IQ3_XXS>;
    IQ3_S: lattice(4, 0, 32, WeightFormat::IQ3_S), decode::lattice::<IQ3_S>;
    IQ4_NL: Layout { codebook: codebook(IQ4_VALUES), ..blocks(4, 0, 128, false) }, decode::iq4_nl;
    IQ4_XS: Layout {
        codebook: codebook(IQ4_VALUES),
        zero: 128,
        ..super_blocks(4, 0, 32, Scales::SignedBytes)
    }, decode::iq4_xs;
    TQ1_0: lattice(2, 0, 32, WeightFormat::TQ1_0), decode::lattice::<TQ1_0>;
    TQ2_0: lattice(2, 0, 32, WeightFormat::TQ2_0), decode::lattice::<TQ2_0>;
    // Q1_0: two bits that are 0 or 2.
    Q1_0: Layout { inputs: 128, ..blocks(2, 0, 1, false) }, decode::q1_0;
    Q2_0: Layout { inputs: 128, ..blocks(2, 0, 1, false) }, decode::q2_0;
    MXFP4: Layout {
        // 128, so that a whole number of cache lines holds the one-byte scales.
        inputs: 128,
        codebook: codebook(MXFP4_VALUES),
        scales: Scales::Exponent,
        ..blocks(4, 0, 128, false)
    }, decode::mxfp4;
    NVFP4: NVFP4_LAYOUT, decode::nvfp4;
    NVFP4_SCALED: NVFP4_LAYOUT, decode::nvfp4_scaled;
}

/// Q8_0 for [ranged](crate::quantize) activations, `x = least + step * q` with unsigned `q`: the dot product of a block is
/// `d * (step * Σ w q + least * Σ w)`. `Σ w` is in the place of a minimum, in f16, so it is rounded if its magnitude exceeds
/// 2,048.
pub struct Q8_0Ranged;

impl Format for Q8_0Ranged {
    const FORMAT: WeightFormat = WeightFormat::Q8_0;
    const LAYOUT: Layout = Layout { ranged: true, ..blocks(8, 0, 0, true) };
    #[inline]
    fn decode(block: &[u8], out: &mut Decoded) {
        decode::q8_0_ranged(block, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_blocks_are_whole_cache_lines_of_about_the_size_of_the_file() {
        for format in WeightFormat::ALL {
            let Some(layout) = layout_of(format, Activations::Signed) else { continue };
            for at in [layout.low_at(), layout.high_at(), layout.bytes()] {
                assert_eq!(at % 64, 0, "{format}");
            }
            let file = 16 * format.row_bytes(layout.inputs.max(format.block_len()));
            let growth = layout.bytes() as f64 / file as f64;
            // Codes of lattice points have more bits than their numbers.
            let most = match format {
                WeightFormat::Q1_0 => 2.3,
                WeightFormat::IQ1_S | WeightFormat::IQ1_M => 2.2,
                WeightFormat::IQ2_XXS | WeightFormat::IQ2_XS | WeightFormat::TQ1_0 => 1.7,
                WeightFormat::IQ2_S | WeightFormat::IQ3_XXS | WeightFormat::IQ3_S => 1.45,
                WeightFormat::TQ2_0 | WeightFormat::Q2_0 => 1.2,
                _ => 1.06,
            };
            // NVFP4_SCALED is never in a file; each block has the scale of the matrix there.
            let least = if format == WeightFormat::NVFP4_SCALED { 0.9 } else { 1.0 };
            assert!((least..most).contains(&growth), "{format}: {growth}");
        }
    }
}
