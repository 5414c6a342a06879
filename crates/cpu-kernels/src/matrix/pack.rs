//! Conversion of a file's rows to groups of 16 interleaved rows, and back for single rows.

use half::{bf16, f16};
use paguro_backend::{
    WeightFormat,
    format::{e4m3_half, e8m0_half},
};

use super::layout::{BLOCK, Decoded, Format, Layout, Scales};
use crate::simd::LANES;

/// Packs `rows`, up to 16 encoded rows of `row_bytes` bytes, into `out`, one group of zeros. Rows past the last one stay
/// zeros.
pub fn pack_group<F: Format>(rows: &[u8], row_bytes: usize, out: &mut [u8]) {
    let layout = const { &F::LAYOUT };
    let (block_len, block_bytes) = const { (F::FORMAT.block_len(), F::FORMAT.block_bytes()) };
    // A packed block holds several of a file's blocks, or one that is a super-block.
    let parts = const { F::LAYOUT.inputs / F::FORMAT.block_len() };
    let rows: [&[u8]; LANES] = std::array::from_fn(|lane| {
        rows.get(lane * row_bytes..).and_then(|rest| rest.get(..row_bytes)).unwrap_or_default()
    });
    let mut decoded = Decoded::ZERO;
    for (b, packed) in out.chunks_exact_mut(layout.bytes()).enumerate() {
        for (lane, row) in rows.iter().enumerate() {
            for part in 0..parts {
                // Past the row's end, or the last row: zeros, whose scales make nothing of them.
                let Some(block) =
                    row.get((b * parts + part) * block_bytes..).and_then(|rest| rest.get(..block_bytes))
                else {
                    break;
                };
                F::decode(block, &mut decoded);
                put_scales(layout, &decoded, lane, part, block_len / BLOCK, packed);
                for i in 0..block_len / BLOCK {
                    put_quants(layout, &decoded, lane, i * BLOCK, part * (block_len / BLOCK) + i, packed);
                }
            }
        }
    }
}

/// Writes a lane's scales and minimums of the file's block number `part` of a packed block, which has `blocks` blocks of 32.
#[inline(always)]
fn put_scales(layout: &Layout, row: &Decoded, lane: usize, part: usize, blocks: usize, packed: &mut [u8]) {
    fn put_half(packed: &mut [u8], at: usize, half: u16) {
        packed[at..at + 2].copy_from_slice(&half.to_le_bytes());
    }
    match layout.scales {
        Scales::Half => {
            // Blocks of more than 32 inputs have their scale once for each 32.
            for block in part * blocks..(part + 1) * blocks {
                put_half(packed, layout.scales_at() + 32 * block + 2 * lane, row.d);
                if layout.minimums {
                    put_half(packed, layout.minimums_at() + 32 * block + 2 * lane, row.dmin);
                }
            }
        }
        Scales::E4m3 => {
            packed[4 * lane..][..4].copy_from_slice(&row.whole.to_le_bytes());
            let subs = blocks * BLOCK / layout.sub_block;
            for s in 0..subs {
                packed[layout.scales_at() + LANES * (part * subs + s) + lane] = row.scales[s];
            }
        }
        Scales::Exponent => packed[layout.scales_at() + LANES * part + lane] = row.scales[0],
        Scales::Bytes | Scales::SignedBytes | Scales::Nibbles => {
            put_half(packed, 2 * lane, row.d);
            put_half(packed, 32 + 2 * lane, row.dmin);
        }
    }
    if layout.has_super() && layout.whole_scales() {
        for s in 0..layout.sub_blocks() {
            packed[layout.scales_at() + LANES * s + lane] = row.scales[s];
            if layout.scales == Scales::Bytes {
                packed[layout.minimums_at() + LANES * s + lane] = row.minimums[s];
            }
        }
    }
}

/// Writes 32 quants of a lane, from `from` in its row, as block `block` of a packed block.
#[inline(always)]
fn put_quants(layout: &Layout, row: &Decoded, lane: usize, from: usize, block: usize, packed: &mut [u8]) {
    let (low, high) = packed.split_at_mut(layout.high_at());
    let low =
        &mut low[layout.low_at() + block * BLOCK * 2 * layout.low_bits..][..BLOCK * 2 * layout.low_bits];
    let high = &mut high[block * BLOCK * 2 * layout.high_bits..][..BLOCK * 2 * layout.high_bits];
    let low_mask = if layout.low_bits == 8 { u32::MAX } else { ((1 << layout.low_bits) - 1) * 0x0101_0101 };
    let low_steps = 8 / layout.low_bits; // steps that share a byte
    // Four quants at a time; shifts stay inside the bytes because the masks went before.
    let quads: &[[u8; 4]] = row.quants[from..from + BLOCK].as_chunks().0;
    let quads: [u32; 8] = std::array::from_fn(|i| u32::from_le_bytes(quads[i]));
    for (v, steps) in quads.chunks_exact(low_steps).enumerate() {
        let joined = steps.iter().enumerate().map(|(s, q)| (q & low_mask) << (s * layout.low_bits));
        let joined = joined.fold(0, |a, b| a | b);
        low[64 * v + 4 * lane..][..4].copy_from_slice(&joined.to_le_bytes());
    }
    if layout.high_bits > 0 {
        let mask = ((1u32 << layout.high_bits) - 1) * 0x0101_0101;
        for (v, steps) in quads.chunks_exact(8 / layout.high_bits).enumerate() {
            let bits = |q: &u32| q >> layout.low_bits & mask;
            let joined = steps.iter().enumerate().map(|(s, q)| bits(q) << (s * layout.high_bits));
            let joined = joined.fold(0, |a, b| a | b);
            high[64 * v + 4 * lane..][..4].copy_from_slice(&joined.to_le_bytes());
        }
    }
}

/// Decodes one lane of a packed group to the same bits as the file's own decoder. `group` is one group's packed blocks, `out`
/// is `[cols]`.
pub fn unpack_lane(layout: &Layout, group: &[u8], lane: usize, out: &mut [f32]) {
    for (sub, out) in out.chunks_mut(layout.sub_block).enumerate() {
        let (packed, sub) = (sub / layout.sub_blocks(), sub % layout.sub_blocks());
        let packed = &group[packed * layout.bytes()..][..layout.bytes()];
        let (scale, minimum) = scale_of(layout, packed, lane, sub);
        for (i, out) in out.iter_mut().enumerate() {
            let quant = quant_of(layout, packed, lane, sub * layout.sub_block + i);
            let number = if layout.ranged { i32::from(quant as i8) } else { i32::from(quant) - layout.zero };
            *out = scale * number as f32;
            if layout.minimums && !layout.ranged {
                *out += minimum;
            }
        }
    }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Scale and minimum of sub-block `sub`.
fn scale_of(layout: &Layout, packed: &[u8], lane: usize, sub: usize) -> (f32, f32) {
    let scale_at = layout.scales_at() + sub * layout.scale_bytes();
    let minimum_at = layout.minimums_at() + sub * layout.scale_bytes();
    let (d, dmin) = (half_at(packed, 2 * lane) * layout.unit, half_at(packed, 32 + 2 * lane));
    match layout.scales {
        Scales::Half if layout.minimums => {
            (half_at(packed, scale_at + 2 * lane), half_at(packed, minimum_at + 2 * lane))
        }
        Scales::Half => (half_at(packed, scale_at + 2 * lane), 0.0),
        Scales::Exponent => (e8m0_half(packed[scale_at + lane]), 0.0),
        Scales::Bytes => {
            (d * f32::from(packed[scale_at + lane]), dmin * f32::from(packed[minimum_at + lane]))
        }
        Scales::SignedBytes => (d * f32::from(packed[scale_at + lane] as i8), 0.0),
        Scales::E4m3 => {
            let d = f32::from_le_bytes(std::array::from_fn(|i| packed[4 * lane + i]));
            (d * e4m3_half(packed[scale_at + lane]), 0.0)
        }
        Scales::Nibbles => {
            let both = packed[scale_at + lane];
            (d * f32::from(both & 15), dmin * f32::from(both >> 4))
        }
    }
}

/// Returns the quant of input `i` of a packed block, through the codebook if there is one.
fn quant_of(layout: &Layout, packed: &[u8], lane: usize, i: usize) -> u8 {
    let (step, byte) = (i / 4, 4 * lane + i % 4);
    let plane = |at: usize, bits: usize| {
        let steps = 8 / bits;
        (u32::from(packed[at + step / steps * 64 + byte]) >> (step % steps * bits)) & ((1 << bits) - 1)
    };
    let mut quant = plane(layout.low_at(), layout.low_bits);
    if layout.high_bits > 0 {
        quant |= plane(layout.high_at(), layout.high_bits) << layout.low_bits;
    }
    layout.codebook.map_or(quant as u8, |values| values[quant as usize])
}

/// Bytes of an element of a format that is not quantized.
pub const fn float_bytes(format: WeightFormat) -> usize {
    if matches!(format, WeightFormat::F32) { 4 } else { 2 }
}

/// Like [`pack_group`] for formats that are not quantized: `[cols][16]` unchanged elements.
pub fn pack_float_group(format: WeightFormat, rows: &[u8], row_bytes: usize, out: &mut [u8]) {
    fn interleave<const N: usize>(rows: &[u8], row_bytes: usize, out: &mut [u8]) {
        let out = out.as_chunks_mut::<N>().0;
        for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
            let row = row.as_chunks::<N>().0;
            for (element, out) in row.iter().zip(out[lane..].iter_mut().step_by(LANES)) {
                *out = *element;
            }
        }
    }
    match float_bytes(format) {
        4 => interleave::<4>(rows, row_bytes, out),
        _ => interleave::<2>(rows, row_bytes, out),
    }
}

/// Like [`unpack_lane`] for formats that are not quantized.
pub fn unpack_float_lane(format: WeightFormat, group: &[u8], lane: usize, out: &mut [f32]) {
    let size = float_bytes(format);
    for (out, elements) in out.iter_mut().zip(group.chunks_exact(LANES * size)) {
        let bytes = &elements[lane * size..];
        *out = match format {
            WeightFormat::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            WeightFormat::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
            _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        };
    }
}
