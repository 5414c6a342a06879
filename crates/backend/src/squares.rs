//! Sums of squares of the inputs of matrices, from which importance matrices are made.
//!
//! For `paguro imatrix`, the CPU backend adds the squares of each row that it multiplies, before the row is quantized.

use std::sync::{Mutex, PoisonError};

use crate::{MatrixId, Weights};

/// Sums of squares of the inputs of each matrix, over all rows of all steps. A device that collects them adds every row that it
/// multiplies, before the row is quantized, and computes layers of all rows, also of those without outputs.
#[derive(Debug, Default)]
pub struct InputSquares {
    matrices: Mutex<Vec<MatrixSquares>>,
}

/// Sums of one matrix.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MatrixSquares {
    /// The tensor's name in its file. Matrices that are parts of one tensor have the same name.
    pub name: String,
    /// Inputs of a row.
    pub cols: usize,
    /// Sums, `[parts, cols]`: a stack of experts has a part for each.
    pub sums: Vec<f64>,
    /// Rows that were added to each part.
    pub rows: Vec<u64>,
}

impl InputSquares {
    /// Sets all sums to zero, for these weights.
    pub fn begin(&self, weights: &Weights) {
        let matrices = weights.matrices.iter().map(|matrix| MatrixSquares {
            name: matrix.name.clone(),
            cols: matrix.cols,
            sums: vec![0.0; matrix.parts * matrix.cols],
            rows: vec![0; matrix.parts],
        });
        *self.lock() = matrices.collect();
    }

    /// Sets all sums to zero again, such as after the steps by which an engine warms up.
    pub fn clear(&self) {
        for matrix in self.lock().iter_mut() {
            matrix.sums.fill(0.0);
            matrix.rows.fill(0);
        }
    }

    /// Adds rows that part `part` of a matrix multiplies. They begin `stride` floats apart; padding is not added.
    ///
    /// # Panics
    /// If the matrix does not exist, or a row is shorter than its inputs.
    pub fn add(&self, id: MatrixId, part: usize, rows: &[f32], stride: usize) {
        let mut matrices = self.lock();
        let MatrixSquares { cols, sums, rows: count, .. } = &mut matrices[id.0 as usize];
        let sums = &mut sums[part * *cols..][..*cols];
        for row in rows.chunks_exact(stride) {
            sums.iter_mut().zip(&row[..*cols]).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x));
            count[part] += 1;
        }
    }

    /// Returns a copy of the sums, by [`MatrixId`].
    pub fn get(&self) -> Vec<MatrixSquares> {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<MatrixSquares>> {
        self.matrices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
