//! Weights with a defect.

use paguro_backend::{Bytes, Matrix, Weights};

/// Changes the bytes of each matrix.
fn each_matrix(weights: &mut Weights, change: impl Fn(&Matrix, &mut [u8])) {
    for matrix in &mut weights.matrices {
        let mut bytes = matrix.bytes.read().expect("in memory").into_owned();
        change(matrix, &mut bytes);
        matrix.bytes = Bytes::from(bytes);
    }
}

/// Zeros rows past a multiple of 16.
pub(super) fn whole_tiles(weights: &mut Weights) {
    each_matrix(weights, |matrix, bytes| {
        bytes[matrix.rows / 16 * 16 * matrix.format.row_bytes(matrix.cols)..].fill(0);
    });
}

/// Zeros the last block of each row.
pub(super) fn short_rows(weights: &mut Weights) {
    each_matrix(weights, |matrix, bytes| {
        let stride = matrix.format.row_bytes(matrix.cols);
        for row in bytes.chunks_exact_mut(stride) {
            row[stride - matrix.format.block_bytes()..].fill(0);
        }
    });
}

/// For Q4_K and Q5_K, whose scales are in bytes 4 to 16 of a block.
pub(super) fn low_scales(weights: &mut Weights) {
    each_matrix(weights, |matrix, bytes| {
        for block in bytes.chunks_exact_mut(matrix.format.block_bytes()) {
            block[4..12].iter_mut().for_each(|byte| *byte &= 63);
        }
    });
}

/// For Q8_0, the last element of each block.
pub(super) fn one_column(weights: &mut Weights) {
    each_matrix(weights, |matrix, bytes| {
        for block in bytes.chunks_exact_mut(matrix.format.block_bytes()) {
            block[33] = (block[33] as i8 / 2) as u8;
        }
    });
}
