//! Formats whose elements are `d * unit * scale * value[code]`, with a small table of values: the IQ formats below
//! four bits, whose codes come from a table of lattice points, and the ternary formats.
//!
//! [`Lattice`] is one block in this form. The decoders here use it, and backends pack it.

use super::{grids, half_at};

/// One super-block of 256 elements: element `i` is `d * unit * scales[i / 16] * values[codes[i]]`. All products are
/// exact in f32 unless `d` is subnormal there.
#[derive(Clone, Debug)]
pub struct Lattice {
    /// Indices into [`Alphabet::values`].
    pub codes: [u8; 256],
    /// A scale for each 16 elements, at most 31.
    pub scales: [u8; 16],
    /// The super-block's scale, bits of an f16.
    pub d: u16,
}

/// Values of a format's codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alphabet {
    /// Values by code; zero for unused codes.
    pub values: [i8; 16],
    /// Factor of all values, a power of two.
    pub unit: f32,
}

/// Values of IQ1_S and IQ1_M, times eight: -1, 0, 1, shifted by 1/8 up or (codes from 4) down.
pub const IQ1: Alphabet = alphabet([-7, 1, 9, 0, -9, -1, 7, 0], 0.125);
/// Values of IQ2_XXS, IQ2_XS and IQ2_S; codes from 4 on are negative.
pub const IQ2: Alphabet = alphabet([8, 25, 43, 0, -8, -25, -43, 0], 0.125);
/// Values of IQ3_XXS; codes from 8 on are negative.
pub const IQ3_XXS: Alphabet =
    Alphabet { values: [4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62], unit: 0.25 };
/// Values of IQ3_S; codes from 8 on are negative.
pub const IQ3_S: Alphabet =
    Alphabet { values: [1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15], unit: 1.0 };
/// Values of TQ1_0 and TQ2_0.
pub const TERNARY: Alphabet = alphabet([-1, 0, 1, 2, 0, 0, 0, 0], 1.0);

const fn alphabet(first: [i8; 8], unit: f32) -> Alphabet {
    let mut values = [0; 16];
    let mut i = 0;
    while i < 8 {
        values[i] = first[i];
        i += 1;
    }
    Alphabet { values, unit }
}

impl Lattice {
    /// A block of zeros.
    pub const ZERO: Self = Self { codes: [0; 256], scales: [0; 16], d: 0 };

    pub(super) fn decode(&self, alphabet: &Alphabet, out: &mut [f32; 256]) {
        let d = half::f16::from_bits(self.d).to_f32() * alphabet.unit;
        for (i, out) in out.iter_mut().enumerate() {
            let value = alphabet.values[usize::from(self.codes[i])];
            *out = d * f32::from(self.scales[i / 16]) * f32::from(value);
        }
    }

    /// Sets eight codes of a lattice point of two bits each, with a sign bit each (1: negative).
    fn put_eight(&mut self, at: usize, point: u16, signs: u8) {
        for (i, code) in self.codes[at..at + 8].iter_mut().enumerate() {
            *code = (point >> (2 * i) & 3) as u8 | (signs >> i & 1) << 2;
        }
    }

    /// Sets four codes of a lattice point of three bits each, with a sign bit each.
    fn put_four(&mut self, at: usize, point: u16, signs: u8) {
        for (i, code) in self.codes[at..at + 4].iter_mut().enumerate() {
            *code = (point >> (3 * i) & 7) as u8 | (signs >> i & 1) << 3;
        }
    }

    /// Sets the same four-bit scale for each 16 elements, `2 s + 1`, from the low and the high halves of bytes.
    fn put_scales(&mut self, bytes: &[u8]) {
        let per_nibble = 16 / (2 * bytes.len());
        for (s, scale) in self.scales.iter_mut().enumerate() {
            let nibble = s / per_nibble;
            *scale = 2 * (bytes[nibble / 2] >> (nibble % 2 * 4) & 15) + 1;
        }
    }
}

/// Signs of eight elements from seven bits: the eighth makes their number even.
fn even_signs(seven: u32) -> u8 {
    let seven = (seven & 127) as u8;
    seven | (seven.count_ones() as u8 & 1) << 7
}

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// ```text
/// block_iq2_xxs, 66 bytes: d: f16 | qs: [[u32; 2]; 8]
/// for each 32 elements: bytes of the first word are four points; the second has seven sign bits for each and, in
/// its top four bits, the scale
/// w = d / 8 * (2 s + 1) * value
/// ```
pub(super) fn iq2_xxs(block: &[u8], out: &mut Lattice) {
    out.d = u16_at(block, 0);
    for s in 0..8 {
        let at = 2 + 8 * s;
        let word = u32_at(block, at + 4);
        for i in 0..4 {
            let point = grids::IQ2_XXS[usize::from(block[at + i])];
            out.put_eight(32 * s + 8 * i, point, even_signs(word >> (7 * i)));
        }
        out.scales[2 * s..][..2].fill(2 * (word >> 28) as u8 + 1);
    }
}

/// ```text
/// block_iq2_xs, 74 bytes: d: f16 | qs: [u16; 32] | scales: [u8; 8]
/// qs[i], elements 8i..: nine bits of point, seven of signs; a scale of four bits for each 16 elements
/// w = d / 8 * (2 s + 1) * value
/// ```
pub(super) fn iq2_xs(block: &[u8], out: &mut Lattice) {
    out.d = u16_at(block, 0);
    for i in 0..32 {
        let q = u16_at(block, 2 + 2 * i);
        out.put_eight(8 * i, grids::IQ2_XS[usize::from(q & 511)], even_signs(u32::from(q >> 9)));
    }
    out.put_scales(&block[66..74]);
}

/// ```text
/// block_iq2_s, 82 bytes: d: f16 | qs: [u8; 32] | signs: [u8; 32] | qh: [u8; 8] | scales: [u8; 8]
/// point of elements 8i..: qs[i], and two bits above from qh[i / 4] at bit 2 (i % 4)
/// w = d / 8 * (2 s + 1) * value
/// ```
pub(super) fn iq2_s(block: &[u8], out: &mut Lattice) {
    out.d = u16_at(block, 0);
    for i in 0..32 {
        let high = usize::from(block[66 + i / 4] >> (i % 4 * 2) & 3);
        let point = grids::IQ2_S[usize::from(block[2 + i]) | high << 8];
        out.put_eight(8 * i, point, block[34 + i]);
    }
    out.put_scales(&block[74..82]);
}

/// ```text
/// block_iq3_xxs, 98 bytes: d: f16 | qs: [u8; 64] | signs and scales: [u32; 8]
/// qs[i]: point of elements 4i..; each word as the second one of IQ2_XXS
/// w = d / 4 * (2 s + 1) * value
/// ```
pub(super) fn iq3_xxs(block: &[u8], out: &mut Lattice) {
    out.d = u16_at(block, 0);
    for s in 0..8 {
        let word = u32_at(block, 66 + 4 * s);
        for i in 0..8 {
            let signs = even_signs(word >> (i / 2 * 7)) >> (i % 2 * 4);
            let point = grids::IQ3_XXS[usize::from(block[2 + 8 * s + i])];
            out.put_four(32 * s + 4 * i, point, signs);
        }
        out.scales[2 * s..][..2].fill(2 * (word >> 28) as u8 + 1);
    }
}

/// ```text
/// block_iq3_s, 110 bytes: d: f16 | qs: [u8; 64] | qh: [u8; 8] | signs: [u8; 32] | scales: [u8; 4]
/// point of elements 4i..: qs[i], and the ninth bit from qh[i / 8] at bit i % 8; a scale of four bits for each 32
/// w = d * (2 s + 1) * value
/// ```
pub(super) fn iq3_s(block: &[u8], out: &mut Lattice) {
    out.d = u16_at(block, 0);
    for i in 0..64 {
        let high = usize::from(block[66 + i / 8] >> (i % 8) & 1);
        let point = grids::IQ3_S[usize::from(block[2 + i]) | high << 8];
        out.put_four(4 * i, point, block[74 + i / 2] >> (i % 2 * 4));
    }
    out.put_scales(&block[106..110]);
}

/// ```text
/// block_iq1_s, 50 bytes: d: f16 | qs: [u8; 32] | qh: [u16; 8]
/// for each 32 elements: qs has the low bits of four points, qh their three upper bits, the scale in bits 12..15,
/// and in bit 15 the direction of the shift
/// w = d * (2 s + 1) * (point ± 1/8)
/// ```
pub(super) fn iq1_s(block: &[u8], out: &mut Lattice) {
    out.d = u16_at(block, 0);
    for s in 0..8 {
        let word = u16_at(block, 34 + 2 * s);
        let shift = if word >> 15 == 1 { 0xff } else { 0 };
        for i in 0..4 {
            let high = usize::from(word >> (3 * i) & 7);
            let point = grids::IQ1[usize::from(block[2 + 4 * s + i]) | high << 8];
            out.put_eight(32 * s + 8 * i, point, shift);
        }
        out.scales[2 * s..][..2].fill(2 * (word >> 12 & 7) as u8 + 1);
    }
}

/// ```text
/// block_iq1_m, 56 bytes: qs: [u8; 32] | qh: [u8; 16] | scales: [u16; 4]
/// point of elements 8i..: qs[i], and three bits above from half i % 2 of qh[i / 2], whose fourth bit is the direction
/// of the shift; a scale of three bits for each 16; the top four bits of the scales are the f16 d, lowest first
/// w = d * (2 s + 1) * (point ± 1/8)
/// ```
pub(super) fn iq1_m(block: &[u8], out: &mut Lattice) {
    out.d = iq1_m_d(block);
    for i in 0..32 {
        let high = block[32 + i / 2] >> (i % 2 * 4);
        let point = grids::IQ1[usize::from(block[i]) | usize::from(high & 7) << 8];
        out.put_eight(8 * i, point, if high & 8 == 0 { 0 } else { 0xff });
    }
    for (s, scale) in out.scales.iter_mut().enumerate() {
        *scale = 2 * (u16_at(block, 48 + s / 4 * 2) >> (s % 4 * 3) & 7) as u8 + 1;
    }
}

/// Returns the scale of an IQ1_M block, bits of an f16.
pub(super) fn iq1_m_d(block: &[u8]) -> u16 {
    (0..4).fold(0, |d, i| d | u16_at(block, 48 + 2 * i) >> 12 << (4 * i))
}

/// ```text
/// block_tq1_0, 54 bytes: qs: [u8; 48] | qh: [u8; 4] | d: f16
/// five digits in base 3 (in qh four), as a fraction of 256: digit n of byte b is the upper part of 3 * (b * 3^n mod 256)
/// element 32n + l is digit n of qs[l], element 160 + 16n + l of qs[32 + l], element 240 + 4n + l of qh[l]
/// w = d * (digit - 1)
/// ```
pub(super) fn tq1_0(block: &[u8], out: &mut Lattice) {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    out.d = u16_at(block, 52);
    for (i, code) in out.codes.iter_mut().enumerate() {
        let (byte, digit) = match i {
            0..160 => (i % 32, i / 32),
            160..240 => (32 + i % 16, (i - 160) / 16),
            _ => (48 + i % 4, (i - 240) / 4),
        };
        *code = ((u16::from(block[byte].wrapping_mul(POWERS[digit])) * 3) >> 8) as u8;
    }
    out.scales.fill(1);
}

/// ```text
/// block_tq2_0, 66 bytes: qs: [u8; 64] | d: f16
/// element 128h + 32j + l is bits 2j, 2j+1 of qs[32h + l]
/// w = d * (q - 1)
/// ```
pub(super) fn tq2_0(block: &[u8], out: &mut Lattice) {
    out.d = u16_at(block, 64);
    for (i, code) in out.codes.iter_mut().enumerate() {
        *code = block[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    }
    out.scales.fill(1);
}

/// ```text
/// block_q1_0, 18 bytes: d: f16 | qs: [u8; 16]
/// element i is bit i % 8 of qs[i / 8]
/// w = d or -d
/// ```
pub(super) fn q1_0(block: &[u8; 18], out: &mut [f32; 128]) {
    let d = half_at(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        *out = if block[2 + i / 8] >> (i % 8) & 1 == 1 { d } else { -d };
    }
}

/// ```text
/// block_q2_0, 18 bytes: d: f16 | qs: [u8; 16]
/// element i is bits 2 (i % 4) and the next of qs[i / 4]
/// w = d * (q - 1)
/// ```
pub(super) fn q2_0(block: &[u8; 18], out: &mut [f32; 64]) {
    let d = half_at(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        let q = block[2 + i / 4] >> (i % 4 * 2) & 3;
        *out = d * (i32::from(q) - 1) as f32;
    }
}
