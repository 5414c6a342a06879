//! Matrices of random valid blocks.

use half::f16;
use paguro_backend::{Bytes, Matrix, WeightFormat, format::e4m3_half};

use super::Rng;

/// A matrix of random valid blocks: every quant, scale and high bit random, the f16 scales such that elements have
/// this root mean square. Scales of either sign occur.
pub fn random_matrix(
    name: &str,
    format: WeightFormat,
    rows: usize,
    cols: usize,
    rms: f32,
    rng: &mut Rng,
) -> Matrix {
    assert!(
        cols.is_multiple_of(format.block_len()),
        "{format} needs columns in blocks of {}",
        format.block_len()
    );
    let blocks = rows * cols / format.block_len();
    let bytes: Vec<u8> = (0..blocks).flat_map(|_| random_block(format, rms, rng)).collect();
    Matrix { name: name.to_owned(), format, parts: 1, rows, cols, bytes: Bytes::from(bytes) }
}

fn random_block(format: WeightFormat, rms: f32, rng: &mut Rng) -> Vec<u8> {
    use WeightFormat::*;
    // The multiple of the scale that centres a block with minimums.
    let minimum = match format {
        F32 | F16 | BF16 => {
            let value = rms * rng.normal();
            return format.quantize(&[value]).expect("plain formats have encoders");
        }
        MXFP4 => return random_mxfp4(rms, rng),
        NVFP4 => return random_nvfp4(rms, rng),
        // The scale of the matrix has to be the same in all blocks.
        NVFP4_SCALED => return [&0.25f32.to_le_bytes()[..], &random_nvfp4(4.0 * rms, rng)].concat(),
        Q4_1 => -7.5,
        Q5_1 => -15.5,
        Q2_K => 1.5,
        Q4_K => 7.5,
        Q5_K => 15.5,
        _ => 0.0,
    };
    let mut block: Vec<u8> = (0..format.block_bytes()).map(|_| rng.bits() as u8).collect();
    let set_scale = |block: &mut [u8], d: f32| {
        let numbers = [d, d * minimum].map(|x| f16::from_f32(x).to_bits());
        for (&at, number) in format.halves().iter().zip(numbers) {
            block[at..at + 2].copy_from_slice(&number.to_le_bytes());
        }
        if format == IQ1_M {
            // The scale's four bits are the upper ones of four words.
            for i in 0..4 {
                block[49 + 2 * i] = block[49 + 2 * i] & 15 | ((numbers[0] >> (4 * i) & 15) as u8) << 4;
            }
        }
    };
    // Decoding the block with a scale of one determines its scale.
    set_scale(&mut block, 1.0);
    let mut decoded = vec![0.0; format.block_len()];
    format.dequantize(&block, &mut decoded);
    let raw = (decoded.iter().map(|x| x * x).sum::<f32>() / decoded.len() as f32).sqrt();
    let sign = if rng.bits() & 1 == 0 { 1.0 } else { -1.0 };
    set_scale(&mut block, sign * rms * (0.5 + rng.unit()) / raw.max(1e-3));
    block
}

/// MXFP4's scale is a power of two.
fn random_mxfp4(rms: f32, rng: &mut Rng) -> Vec<u8> {
    // The sixteen values have a root mean square of 2.9; half of the blocks are one power smaller.
    let exponent = (rms / 2.9).log2().round() as i32 - (rng.bits() & 1) as i32;
    let mut block = vec![(127 + exponent) as u8];
    block.extend((0..16).map(|_| rng.bits() as u8));
    block
}

/// NVFP4's scales are E4M3 numbers, one for each 16 elements.
fn random_nvfp4(rms: f32, rng: &mut Rng) -> Vec<u8> {
    // The sixteen values, doubled, have a root mean square of 5.8.
    let scale = |wanted: f32| (1..0x7f).find(|&e| e4m3_half(e) >= wanted).unwrap_or(0x7e);
    let mut block: Vec<u8> = (0..4).map(|_| scale(rms / 5.8 * (0.5 + rng.unit()))).collect();
    block.extend((0..32).map(|_| rng.bits() as u8));
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_weights_are_of_the_size_that_was_asked_for() {
        for format in WeightFormat::ALL {
            let matrix = random_matrix("m", format, 64, 512, 0.05, &mut Rng::new(1));
            let mut row = vec![0.0; 512];
            let mut sum = 0.0;
            let bytes = matrix.read().unwrap();
            for encoded in bytes.chunks_exact(format.row_bytes(512)) {
                format.dequantize(encoded, &mut row);
                sum += row.iter().map(|x| x * x).sum::<f32>();
            }
            let rms = (sum / (64.0 * 512.0)).sqrt();
            assert!((0.03..0.08).contains(&rms), "{format}: {rms}");
        }
    }
}
