//! Matrices in the arrangement of a GGUF file, rearranged while they are written.

use std::{io, ops::Range, sync::Arc};

use paguro_backend::{ByteSource, Bytes, WeightFormat};

/// Returns the rows whose pieces of `unit` bytes are in another order: piece `i` is piece `order[i]` of the source.
pub(super) fn reordered_columns(source: &Bytes, unit: usize, order: Vec<usize>) -> Bytes {
    let len = source.len();
    Bytes::new(Arc::new(Columns { source: source.clone(), unit, order }), 0, len)
}

struct Columns {
    source: Bytes,
    unit: usize,
    order: Vec<usize>,
}

/// Multiplies rows of `row_bytes` bytes in floats. `factors` has numbers of rows with their factors.
pub(super) fn multiplied(
    source: &Bytes,
    format: WeightFormat,
    row_bytes: usize,
    factors: &[(usize, f32)],
) -> Bytes {
    let len = source.len();
    let factors = factors.to_vec();
    Bytes::new(Arc::new(Multiplied { source: source.clone(), format, row_bytes, factors }), 0, len)
}

struct Multiplied {
    source: Bytes,
    format: WeightFormat,
    row_bytes: usize,
    factors: Vec<(usize, f32)>,
}

impl Multiplied {
    fn factor(&self, row: usize) -> f32 {
        let mut first = 0_usize;
        for &(rows, factor) in &self.factors {
            first = first.saturating_add(rows);
            if row < first {
                return factor;
            }
        }
        1.0
    }
}

/// Reads the whole rows of `row_bytes` bytes that contain a range: the number of the first, and their bytes.
fn whole_rows(source: &Bytes, row_bytes: usize, range: Range<usize>) -> io::Result<(usize, Vec<u8>)> {
    let rows = range.start / row_bytes..range.end.div_ceil(row_bytes);
    let mut bytes = vec![0; rows.len() * row_bytes];
    source.read_at(rows.start * row_bytes, &mut bytes)?;
    Ok((rows.start, bytes))
}

impl ByteSource for Columns {
    fn size(&self) -> u64 {
        self.source.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let row_bytes = self.unit * self.order.len();
        let start = offset as usize;
        let (first, bytes) = whole_rows(&self.source, row_bytes, start..start + out.len())?;
        let mut ordered = Vec::with_capacity(bytes.len());
        for row in bytes.chunks_exact(row_bytes) {
            self.order.iter().for_each(|&unit| ordered.extend(&row[unit * self.unit..][..self.unit]));
        }
        out.copy_from_slice(&ordered[start - first * row_bytes..][..out.len()]);
        Ok(())
    }

    fn check_unchanged(&self) -> io::Result<()> {
        self.source.check_unchanged()
    }
}

impl ByteSource for Multiplied {
    fn size(&self) -> u64 {
        self.source.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let start = offset as usize;
        let (first, bytes) = whole_rows(&self.source, self.row_bytes, start..start + out.len())?;
        let mut values = vec![0.0; self.row_bytes / self.format.block_bytes()];
        let mut multiplied = Vec::with_capacity(bytes.len());
        for (index, row) in bytes.chunks_exact(self.row_bytes).enumerate() {
            self.format.dequantize(row, &mut values);
            let factor = self.factor(first + index);
            values.iter_mut().for_each(|value| *value *= factor);
            multiplied.extend(self.format.quantize(&values).ok_or(io::ErrorKind::Unsupported)?);
        }
        out.copy_from_slice(&multiplied[start - first * self.row_bytes..][..out.len()]);
        Ok(())
    }

    fn check_unchanged(&self) -> io::Result<()> {
        self.source.check_unchanged()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rearrange::tests::read;

    #[test]
    fn pieces_of_rows_are_reordered() {
        let source = Bytes::from((0..12).collect::<Vec<u8>>());
        let reordered = reordered_columns(&source, 2, vec![2, 0, 1]);
        for piece in [1, 5, 12] {
            assert_eq!(read(&reordered, piece), [4, 5, 0, 1, 2, 3, 10, 11, 6, 7, 8, 9]);
        }
    }

    #[test]
    fn rows_are_multiplied() {
        let floats = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let source = Bytes::from(floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]));
        let scaled = multiplied(&source, WeightFormat::F32, 8, &[(1, 2.0), (usize::MAX, 0.5)]);
        for piece in [3, 8, 24] {
            assert_eq!(read(&scaled, piece), floats(&[2.0, 4.0, 1.5, 2.0, 2.5, 3.0]));
        }
    }
}
