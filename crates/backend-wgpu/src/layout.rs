//! Layouts of weights on the device: planes that are read 16 bytes at a time, with blocks of 32 elements in all
//! formats.
//!
//! | layout | a block | formats |
//! |-|-|-|
//! | `q2` | 8 bytes, `d` and `m` in f16 for each half: `w = d q - m` | Q2_K, IQ1_S, TQ1_0, TQ2_0, Q1_0, Q2_0 |
//! | `q3` | 8 bytes of magnitudes, 4 of signs, a scale in f16 for each half: `w = s v`, `v` = ±8, ±25, ±43 | IQ2_XXS, IQ2_XS, IQ2_S |
//! | `q4` | 16 bytes, `d` and `m` in f16: `w = d q - m` | Q4_0, Q4_1, Q4_K, IQ3_S |
//! | `q5` | the same and 4 bytes of fifth bits | Q5_0, Q5_1, Q5_K, MXFP4 |
//! | `q6` | 16 bytes, 8 of high bits, a scale in f16 for each half: `w = s (q - 32)` | Q6_K, Q3_K, IQ3_XXS, IQ1_M, NVFP4 |
//! | `q8` | 32 bytes, `d` in f16: `w = d q` | Q8_0, IQ4_NL, IQ4_XS |
//! | `f16`, `bf16`, `f32` | as they are | F16, BF16, F32 |
//!
//! The quants are those of the file. The scales of the K formats are products of two numbers, which are rounded to f16,
//! with an error of one part in 2,000. MXFP4 has sixteen values between -12 and 12, which five bits represent exactly,
//! so no kernel needs a table. The values of NVFP4 and IQ1_M are integers from -12 to 12, those of IQ3_XXS, halved,
//! from -31 to 31, and those of IQ3_S every second integer from -15 to 15.

use half::f16;
use paguro_backend::{
    WeightFormat,
    format::{IQ4_VALUES, Lattice, MXFP4_VALUES, e4m3_half, e8m0_half},
};

/// Elements of a block, in every layout.
pub const BLOCK: usize = 32;

/// Layout of a matrix on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// See the [module](self).
    F32,
    /// See the [module](self).
    F16,
    /// See the [module](self).
    Bf16,
    /// See the [module](self).
    Q2,
    /// See the [module](self).
    Q3,
    /// See the [module](self).
    Q4,
    /// See the [module](self).
    Q5,
    /// See the [module](self).
    Q6,
    /// See the [module](self).
    Q8,
}

impl Layout {
    /// The layout that holds a format without loss.
    pub fn of(format: WeightFormat) -> Self {
        use WeightFormat::*;
        match format {
            F32 => Self::F32,
            F16 => Self::F16,
            BF16 => Self::Bf16,
            Q2_K | IQ1_S | TQ1_0 | TQ2_0 | Q1_0 | Q2_0 => Self::Q2,
            IQ2_XXS | IQ2_XS | IQ2_S => Self::Q3,
            Q4_0 | Q4_1 | Q4_K | IQ3_S => Self::Q4,
            Q5_0 | Q5_1 | Q5_K | MXFP4 => Self::Q5,
            Q6_K | Q3_K | IQ3_XXS | IQ1_M | NVFP4 | NVFP4_SCALED => Self::Q6,
            Q8_0 | IQ4_NL | IQ4_XS => Self::Q8,
        }
    }

    /// The format of files that it is made for, if this is another one.
    pub fn converts(format: WeightFormat) -> Option<WeightFormat> {
        use WeightFormat::*;
        match format {
            F32 | F16 | BF16 | Q2_K | Q4_0 | Q4_K | Q5_K | Q6_K | Q8_0 | IQ2_XXS | IQ2_XS | IQ2_S => None,
            IQ1_S | TQ1_0 | TQ2_0 | Q1_0 | Q2_0 => Some(Q2_K),
            Q4_1 | IQ3_S => Some(Q4_K),
            Q5_0 | Q5_1 | MXFP4 => Some(Q5_K),
            Q3_K | IQ3_XXS | IQ1_M | NVFP4 | NVFP4_SCALED => Some(Q6_K),
            IQ4_NL | IQ4_XS => Some(Q8_0),
        }
    }

    /// Its name, as kernels are called.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q2 => "q2",
            Self::Q3 => "q3",
            Self::Q4 => "q4",
            Self::Q5 => "q5",
            Self::Q6 => "q6",
            Self::Q8 => "q8",
        }
    }

    /// Returns true if matmuls with it use activations of eight bits.
    pub fn is_quantized(self) -> bool {
        !matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    /// Words of a row of `blocks` blocks in each of the three planes: quants, high bits, scales.
    pub fn row_words(self, blocks: usize) -> [usize; 3] {
        match self {
            Self::F32 => [32 * blocks, 0, 0],
            Self::F16 | Self::Bf16 => [16 * blocks, 0, 0],
            Self::Q2 => [2 * blocks, 0, 2 * blocks],
            Self::Q3 => [2 * blocks, blocks, blocks],
            Self::Q4 => [4 * blocks, 0, blocks],
            Self::Q5 => [4 * blocks, blocks, blocks],
            Self::Q6 => [4 * blocks, 2 * blocks, blocks],
            Self::Q8 => [8 * blocks, 0, blocks.div_ceil(2)],
        }
    }
}

/// A row of a matrix in its three planes.
pub struct RowPlanes<'a> {
    /// `[Layout::row_words]` each.
    pub quants: &'a mut [u32],
    /// Upper bits.
    pub high: &'a mut [u32],
    /// Scales.
    pub scales: &'a mut [u32],
}

/// Packs an encoded row of `cols` elements; `floats` is scratch. The planes are zero before.
pub fn pack_row(
    format: WeightFormat,
    cols: usize,
    bytes: &[u8],
    out: &mut RowPlanes<'_>,
    floats: &mut Vec<f32>,
) {
    let layout = Layout::of(format);
    let blocks = cols.div_ceil(BLOCK);
    if !layout.is_quantized() {
        floats.resize(cols, 0.0);
        format.dequantize(bytes, floats);
        return pack_floats(layout, floats, blocks, out.quants);
    }
    let stride = format.block_bytes();
    let per_block = format.block_len() / BLOCK;
    for index in 0..blocks {
        let source = &bytes[index / per_block * stride..][..stride];
        let block = unpack(format, source, index % per_block);
        block.store(layout, index, blocks, out);
    }
}

fn pack_floats(layout: Layout, floats: &[f32], blocks: usize, out: &mut [u32]) {
    for (index, block) in floats.chunks(BLOCK).enumerate() {
        for (i, &x) in block.iter().enumerate() {
            match layout {
                Layout::F32 => out[(i / 4 * blocks + index) * 4 + i % 4] = x.to_bits(),
                _ => {
                    let bits = match layout {
                        Layout::F16 => f16::from_f32(x).to_bits(),
                        _ => (x.to_bits() >> 16) as u16,
                    };
                    out[(i / 8 * blocks + index) * 4 + i % 8 / 2] |= u32::from(bits) << (i % 2 * 16);
                }
            }
        }
    }
}

/// A block of quants with its numbers: scale and minimum, the scales of both halves, or scale and minimum of both.
struct Block {
    quants: [i8; BLOCK],
    numbers: [f32; 4],
}

impl Block {
    fn store(&self, layout: Layout, index: usize, blocks: usize, out: &mut RowPlanes<'_>) {
        let halves = self.numbers.map(|x| u32::from(f16::from_f32(x).to_bits()));
        if layout == Layout::Q8 {
            for (i, &q) in self.quants.iter().enumerate() {
                out.quants[(i / 16 * blocks + index) * 4 + i % 16 / 4] |= u32::from(q as u8) << (i % 4 * 8);
            }
            out.scales[index / 2] |= halves[0] << (index % 2 * 16);
            return;
        }
        if layout == Layout::Q2 || layout == Layout::Q3 {
            for (i, &q) in self.quants.iter().enumerate() {
                out.quants[index * 2 + i / 16] |= u32::from(q as u8 & 3) << (i % 4 * 8 + i % 16 / 4 * 2);
                if layout == Layout::Q3 {
                    out.high[index] |= u32::from(q as u8 >> 2) << (8 * (i % 4) + i / 4);
                }
            }
        }
        if layout == Layout::Q3 {
            out.scales[index] = halves[0] | halves[1] << 16;
            return;
        }
        if layout == Layout::Q2 {
            out.scales[index * 2] = halves[0] | halves[1] << 16;
            out.scales[index * 2 + 1] = halves[2] | halves[3] << 16;
            return;
        }
        for (i, &q) in self.quants.iter().enumerate() {
            let (q, quad, byte) = (u32::from(q as u8), i / 4, i % 4);
            out.quants[index * 4 + quad % 4] |= (q & 15) << (8 * byte + 4 * (quad / 4));
            match layout {
                Layout::Q5 => out.high[index] |= (q >> 4 & 1) << (8 * byte + quad),
                Layout::Q6 => out.high[index * 2 + quad / 4] |= (q >> 4 & 3) << (8 * byte + 2 * (quad % 4)),
                _ => {}
            }
        }
        out.scales[index] = halves[0] | halves[1] << 16;
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Sub-block `s` of 32 elements; the formats are documented in `paguro_backend::format`.
fn unpack(format: WeightFormat, b: &[u8], s: usize) -> Block {
    use WeightFormat::*;
    let nibble = |bytes: &[u8], i: usize| bytes[i % 16] >> (i / 16 * 4) & 15;
    let quants = |f: &dyn Fn(usize) -> i8| std::array::from_fn(f);
    match format {
        Q4_0 => {
            let d = half_at(b, 0);
            Block { quants: quants(&|i| nibble(&b[2..], i) as i8), numbers: two(d, 8.0 * d) }
        }
        Q4_1 => Block {
            quants: quants(&|i| nibble(&b[4..], i) as i8),
            numbers: two(half_at(b, 0), -half_at(b, 2)),
        },
        Q5_0 | Q5_1 => {
            let at = if format == Q5_0 { 2 } else { 4 };
            let high = u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
            let d = half_at(b, 0);
            let m = if format == Q5_0 { 16.0 * d } else { -half_at(b, 2) };
            let q = |i: usize| nibble(&b[at + 4..], i) | ((high >> i & 1) as u8) << 4;
            Block { quants: quants(&|i| q(i) as i8), numbers: two(d, m) }
        }
        Q8_0 => Block { quants: quants(&|i| b[2 + i] as i8), numbers: two(half_at(b, 0), 0.0) },
        Q4_K | Q5_K => {
            let (scale, minimum) = scale_and_minimum(&b[4..16], s);
            let at = if format == Q4_K { 16 } else { 48 };
            let q = |i: usize| {
                let low = b[at + s / 2 * 32 + i] >> (s % 2 * 4) & 15;
                let high = if format == Q5_K { b[16 + i] >> s & 1 } else { 0 };
                (low | high << 4) as i8
            };
            let numbers = two(half_at(b, 0) * f32::from(scale), half_at(b, 2) * f32::from(minimum));
            Block { quants: quants(&q), numbers }
        }
        Q6_K => {
            let (h, j) = (s / 4, s % 4);
            let q = |i: usize| {
                let low = b[64 * h + 32 * (j % 2) + i] >> (j / 2 * 4) & 15;
                (low | (b[128 + 32 * h + i] >> (2 * j) & 3) << 4) as i8
            };
            let scale = |half: usize| half_at(b, 208) * f32::from(b[192 + 2 * s + half] as i8);
            Block { quants: quants(&q), numbers: two(scale(0), scale(1)) }
        }
        Q3_K => {
            let q = |i: usize| {
                let low = b[32 + s / 4 * 32 + i] >> (s % 4 * 2) & 3;
                // Zero at 4 there, at 32 here.
                (low | (b[i] >> s & 1) << 2) as i8 + 28
            };
            let scale = |half: usize| {
                let index = 2 * s + half;
                let low = b[96 + index % 8] >> (index / 8 * 4) & 15;
                let high = b[104 + index % 4] >> (index / 4 * 2) & 3;
                half_at(b, 108) * f32::from((low | high << 4) as i8 - 32)
            };
            Block { quants: quants(&q), numbers: two(scale(0), scale(1)) }
        }
        IQ4_NL => Block {
            quants: quants(&|i| IQ4_VALUES[usize::from(nibble(&b[2..], i))]),
            numbers: two(half_at(b, 0), 0.0),
        },
        IQ4_XS => {
            let high = u16::from_le_bytes([b[2], b[3]]) >> (2 * s) & 3;
            let scale = (b[4 + s / 2] >> (s % 2 * 4) & 15 | (high as u8) << 4) as i8 - 32;
            Block {
                quants: quants(&|i| IQ4_VALUES[usize::from(nibble(&b[8 + 16 * s..], i))]),
                numbers: two(half_at(b, 0) * f32::from(scale), 0.0),
            }
        }
        MXFP4 => {
            let d = e8m0_half(b[0]);
            Block {
                quants: quants(&|i| 12 + MXFP4_VALUES[usize::from(nibble(&b[1..], i))]),
                numbers: two(d, 12.0 * d),
            }
        }
        Q2_K => {
            let number = |half: usize| {
                let scales = b[2 * s + half];
                [half_at(b, 80) * f32::from(scales & 15), half_at(b, 82) * f32::from(scales >> 4)]
            };
            let ([d0, m0], [d1, m1]) = (number(0), number(1));
            Block {
                quants: quants(&|i| (b[16 + s / 4 * 32 + i] >> (s % 4 * 2) & 3) as i8),
                numbers: [d0, m0, d1, m1],
            }
        }
        IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ1_S | IQ1_M | TQ1_0 | TQ2_0 => {
            unpack_lattice(format, b, s)
        }
        Q1_0 => {
            let d = half_at(b, 0);
            let bit = |i: usize| (b[2 + 4 * s + i / 8] >> (i % 8) & 1) as i8;
            Block { quants: quants(&bit), numbers: [2.0 * d, d, 2.0 * d, d] }
        }
        Q2_0 => {
            let d = half_at(b, 0);
            let q = |i: usize| (b[2 + 8 * s + i / 4] >> (i % 4 * 2) & 3) as i8;
            Block { quants: quants(&q), numbers: [d; 4] }
        }
        NVFP4 | NVFP4_SCALED => {
            let (whole, b) = match format {
                NVFP4 => (1.0, b),
                _ => (f32::from_le_bytes([b[0], b[1], b[2], b[3]]), &b[4..]),
            };
            let q = |i: usize| {
                let half = &b[4 + 16 * s + 8 * (i / 16)..];
                32 + MXFP4_VALUES[usize::from(half[i % 8] >> (i % 16 / 8 * 4) & 15)]
            };
            let numbers = two(whole * e4m3_half(b[2 * s]), whole * e4m3_half(b[2 * s + 1]));
            Block { quants: quants(&q), numbers }
        }
        F32 | F16 | BF16 => unreachable!("packed from floats"),
    }
}

/// Sub-block `s` of a format whose elements are codes.
fn unpack_lattice(format: WeightFormat, b: &[u8], s: usize) -> Block {
    use WeightFormat::*;
    let mut lattice = Lattice::ZERO;
    format.lattice(b, &mut lattice);
    let alphabet = format.alphabet().unwrap_or_else(|| unreachable!("{format} has an alphabet"));
    let codes = &lattice.codes[32 * s..][..32];
    let value = |i: usize| alphabet.values[usize::from(codes[i])];
    let d = f16::from_bits(lattice.d).to_f32() * alphabet.unit;
    let [lo, hi] = [0, 1].map(|half| d * f32::from(lattice.scales[2 * s + half]));
    let quants = |f: &dyn Fn(usize) -> i8| std::array::from_fn(f);
    match format {
        IQ3_XXS => Block { quants: quants(&|i| 32 + value(i) / 2), numbers: two(2.0 * lo, 2.0 * hi) },
        IQ3_S => Block { quants: quants(&|i| (value(i) + 15) / 2), numbers: two(2.0 * lo, 15.0 * lo) },
        IQ1_M => Block { quants: quants(&|i| 32 + value(i)), numbers: two(lo, hi) },
        // All 32 values are shifted in one direction: 8 q - 7 or 8 q - 9.
        IQ1_S => {
            let shift = if codes[0] < 4 { 7.0 } else { 9.0 };
            let q = |i: usize| (value(i) + shift as i8) / 8;
            Block { quants: quants(&q), numbers: [8.0 * lo, shift * lo, 8.0 * hi, shift * hi] }
        }
        TQ1_0 | TQ2_0 => Block { quants: quants(&|i| codes[i] as i8), numbers: [lo, lo, hi, hi] },
        // Magnitude and sign.
        _ => Block { quants: quants(&|i| codes[i] as i8), numbers: two(lo, hi) },
    }
}

/// See `paguro_backend::format`: six bits each, the upper two of the last four in the first eight bytes.
fn scale_and_minimum(b: &[u8], s: usize) -> (u8, u8) {
    if s < 4 {
        (b[s] & 63, b[s + 4] & 63)
    } else {
        (b[s + 4] & 15 | b[s - 4] >> 6 << 4, b[s + 4] >> 4 | b[s] >> 6 << 4)
    }
}

fn two(a: f32, b: f32) -> [f32; 4] {
    [a, b, 0.0, 0.0]
}
