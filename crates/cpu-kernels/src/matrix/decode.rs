//! Takes the blocks of GGUF's formats apart into quants, scales and minimums. The layouts are documented at the
//! reference decoders in `paguro_backend::format`; tests hold the two together.

use half::f16;

use paguro_backend::format::Lattice;

use super::layout::{Decoded, Format};

fn bits_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// Files subtract the K formats' minimums; packed formats add them.
fn negated(half: u16) -> u16 {
    (-f16::from_bits(half)).to_bits()
}

/// Low halves, then high halves.
fn nibbles(bytes: &[u8], quants: &mut [u8; 256]) {
    for (i, &byte) in bytes[..16].iter().enumerate() {
        quants[i] = byte & 15;
        quants[i + 16] = byte >> 4;
    }
}

/// Bit `i` of `high` is the fifth bit of quant `i`.
fn fifth_bits(high: &[u8], quants: &mut [u8; 256]) {
    let high = u32::from_le_bytes([high[0], high[1], high[2], high[3]]);
    for (i, quant) in quants[..32].iter_mut().enumerate() {
        *quant |= ((high >> i & 1) as u8) << 4;
    }
}

pub fn q4_0(block: &[u8], out: &mut Decoded) {
    out.d = bits_at(block, 0);
    nibbles(&block[2..], &mut out.quants);
}

pub fn q4_1(block: &[u8], out: &mut Decoded) {
    (out.d, out.dmin) = (bits_at(block, 0), bits_at(block, 2));
    nibbles(&block[4..], &mut out.quants);
}

pub fn q5_0(block: &[u8], out: &mut Decoded) {
    out.d = bits_at(block, 0);
    nibbles(&block[6..], &mut out.quants);
    fifth_bits(&block[2..], &mut out.quants);
}

pub fn q5_1(block: &[u8], out: &mut Decoded) {
    (out.d, out.dmin) = (bits_at(block, 0), bits_at(block, 2));
    nibbles(&block[8..], &mut out.quants);
    fifth_bits(&block[4..], &mut out.quants);
}

pub fn q8_0(block: &[u8], out: &mut Decoded) {
    out.d = bits_at(block, 0);
    for (quant, &byte) in out.quants[..32].iter_mut().zip(&block[2..]) {
        *quant = byte ^ 0x80;
    }
}

/// Signed quants, and their sum instead of a minimum.
pub fn q8_0_ranged(block: &[u8], out: &mut Decoded) {
    out.d = bits_at(block, 0);
    out.quants[..32].copy_from_slice(&block[2..34]);
    let sum: i32 = block[2..34].iter().map(|&byte| i32::from(byte as i8)).sum();
    out.dmin = f16::from_f32(sum as f32).to_bits();
}

pub fn iq4_nl(block: &[u8], out: &mut Decoded) {
    q4_0(block, out);
}

pub fn mxfp4(block: &[u8], out: &mut Decoded) {
    out.scales[0] = block[0];
    nibbles(&block[1..], &mut out.quants);
}

pub fn q2_k(block: &[u8], out: &mut Decoded) {
    (out.d, out.dmin) = (bits_at(block, 80), negated(bits_at(block, 82)));
    out.scales.copy_from_slice(&block[..16]); // minimums are in the high halves, as when packed
    let bits = &block[16..80];
    for (part, quants) in out.quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (quant, byte) in quants.iter_mut().zip(&bits[part / 4 * 32..]) {
            *quant = byte >> (part % 4 * 2) & 3;
        }
    }
}

pub fn q3_k(block: &[u8], out: &mut Decoded) {
    let (high, bits, scales) = (&block[..32], &block[32..96], &block[96..108]);
    out.d = bits_at(block, 108);
    for (s, scale) in out.scales.iter_mut().enumerate() {
        let low = scales[s % 8] >> (s / 8 * 4) & 15;
        let high = scales[8 + s % 4] >> (s / 4 * 2) & 3;
        *scale = (low | high << 4).wrapping_sub(32);
    }
    for (part, quants) in out.quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for ((quant, byte), high) in quants.iter_mut().zip(&bits[part / 4 * 32..]).zip(high) {
            *quant = byte >> (part % 4 * 2) & 3 | (high >> part & 1) << 2;
        }
    }
}

/// The six-bit scales and minimums that Q4_K and Q5_K share.
fn six_bit_scales(bytes: &[u8], out: &mut Decoded) {
    for s in 0..4 {
        out.scales[s] = bytes[s] & 63;
        out.minimums[s] = bytes[s + 4] & 63;
        out.scales[s + 4] = bytes[s + 8] & 15 | bytes[s] >> 6 << 4;
        out.minimums[s + 4] = bytes[s + 8] >> 4 | bytes[s + 4] >> 6 << 4;
    }
}

/// Low halves of 32 bytes, then their high halves, four times.
fn nibbles_by_32(bytes: &[u8], quants: &mut [u8; 256]) {
    for (part, quants) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (quant, byte) in quants.iter_mut().zip(&bytes[part / 2 * 32..]) {
            *quant = byte >> (part % 2 * 4) & 15;
        }
    }
}

pub fn q4_k(block: &[u8], out: &mut Decoded) {
    (out.d, out.dmin) = (bits_at(block, 0), negated(bits_at(block, 2)));
    six_bit_scales(&block[4..16], out);
    nibbles_by_32(&block[16..144], &mut out.quants);
}

pub fn q5_k(block: &[u8], out: &mut Decoded) {
    (out.d, out.dmin) = (bits_at(block, 0), negated(bits_at(block, 2)));
    six_bit_scales(&block[4..16], out);
    nibbles_by_32(&block[48..176], &mut out.quants);
    for (part, quants) in out.quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (quant, byte) in quants.iter_mut().zip(&block[16..48]) {
            *quant |= (byte >> part & 1) << 4;
        }
    }
}

pub fn q6_k(block: &[u8], out: &mut Decoded) {
    let (low, high) = (&block[..128], &block[128..192]);
    out.d = bits_at(block, 208);
    out.scales.copy_from_slice(&block[192..208]);
    for (part, quants) in out.quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, j) = (part / 4, part % 4);
        let low = &low[64 * half + 32 * (j % 2)..];
        for ((quant, low), high) in quants.iter_mut().zip(low).zip(&high[32 * half..]) {
            *quant = low >> (j / 2 * 4) & 15 | (high >> (2 * j) & 3) << 4;
        }
    }
}

pub fn iq4_xs(block: &[u8], out: &mut Decoded) {
    out.d = bits_at(block, 0);
    let high = bits_at(block, 2);
    for (s, scale) in out.scales[..8].iter_mut().enumerate() {
        let low = block[4 + s / 2] >> (s % 2 * 4) & 15;
        *scale = (low | ((high >> (2 * s) & 3) as u8) << 4).wrapping_sub(32);
    }
    for (bytes, quants) in block[8..136].chunks_exact(16).zip(out.quants.as_chunks_mut::<32>().0) {
        for (i, byte) in bytes.iter().enumerate() {
            quants[i] = byte & 15;
            quants[i + 16] = byte >> 4;
        }
    }
}

/// Decodes formats whose elements are codes, see [`Lattice`].
pub fn lattice<F: Format>(block: &[u8], out: &mut Decoded) {
    let mut lattice = Lattice::ZERO;
    F::FORMAT.lattice(block, &mut lattice);
    out.quants = lattice.codes;
    out.d = lattice.d;
    let per_scale = const { F::LAYOUT.sub_block / 16 };
    for (to, from) in out.scales.iter_mut().zip(lattice.scales.into_iter().step_by(per_scale)) {
        *to = from;
    }
}

pub fn q1_0(block: &[u8], out: &mut Decoded) {
    out.d = bits_at(block, 0);
    for (i, quant) in out.quants[..128].iter_mut().enumerate() {
        *quant = (block[2 + i / 8] >> (i % 8) & 1) * 2;
    }
}

pub fn q2_0(block: &[u8], out: &mut Decoded) {
    out.d = bits_at(block, 0);
    for (i, quant) in out.quants[..64].iter_mut().enumerate() {
        *quant = block[2 + i / 4] >> (i % 4 * 2) & 3;
    }
}

pub fn nvfp4_scaled(block: &[u8], out: &mut Decoded) {
    nvfp4(&block[4..], out);
    out.whole = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
}

pub fn nvfp4(block: &[u8], out: &mut Decoded) {
    out.whole = 1.0;
    for (s, quants) in out.quants[..64].as_chunks_mut::<16>().0.iter_mut().enumerate() {
        // The sign bit has no meaning; 0x7F would be NaN, and files that have it are refused.
        out.scales[s] = block[s] & 0x7f;
        for (i, byte) in block[4 + 8 * s..][..8].iter().enumerate() {
            quants[i] = byte & 15;
            quants[i + 8] = byte >> 4;
        }
    }
}
