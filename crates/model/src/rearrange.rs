//! Matrices that a file stores in another arrangement than a [`Matrix`] has: sources that
//! rearrange bytes while they are read, so that nothing is held twice.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
};

use paguro_backend::{ByteSource, Bytes, Matrix, WeightFormat};

/// Pieces, one after the other: experts with a tensor each, heads of a fused matrix.
pub(crate) fn join(pieces: Vec<Bytes>) -> Bytes {
    let mut starts = Vec::with_capacity(pieces.len());
    let mut len = 0;
    for piece in &pieces {
        starts.push(len);
        len += piece.len();
    }
    Bytes::new(Arc::new(Joined { pieces, starts, len }), 0, len)
}

struct Joined {
    pieces: Vec<Bytes>,
    /// Start of each piece.
    starts: Vec<usize>,
    len: usize,
}

impl ByteSource for Joined {
    fn size(&self) -> u64 {
        self.len as u64
    }

    fn read_at(&self, offset: u64, mut out: &mut [u8]) -> io::Result<()> {
        let mut at = offset as usize;
        let mut index = self.starts.partition_point(|&start| start <= at).saturating_sub(1);
        while !out.is_empty() {
            let piece = self.pieces.get(index).ok_or(io::ErrorKind::UnexpectedEof)?;
            let first = at - self.starts[index];
            let count = out.len().min(piece.len() - first);
            let (now, rest) = out.split_at_mut(count);
            piece.read_at(first, now)?;
            (out, at, index) = (rest, at + count, index + 1);
        }
        Ok(())
    }

    fn check_unchanged(&self) -> io::Result<()> {
        self.pieces.iter().try_for_each(Bytes::check_unchanged)
    }
}

/// Reads bytes from `at` on of parts of `size` bytes each, which `part` returns by number.
pub(crate) fn read_parts<P: AsRef<[u8]>>(
    size: usize,
    mut at: usize,
    mut out: &mut [u8],
    mut part: impl FnMut(usize) -> io::Result<P>,
) -> io::Result<()> {
    while !out.is_empty() {
        let bytes = part(at / size)?;
        let first = at % size;
        let count = out.len().min(size - first);
        let (now, rest) = out.split_at_mut(count);
        now.copy_from_slice(&bytes.as_ref()[first..first + count]);
        (out, at) = (rest, at + count);
    }
    Ok(())
}

/// Returns a stack in NVFP4 with the scale of each part in all of its blocks: NVFP4_SCALED.
pub(crate) fn scale_nvfp4(stack: &Matrix, scales: Vec<f32>) -> Bytes {
    let blocks = stack.rows * stack.cols / WeightFormat::NVFP4.block_len();
    let len = scales.len() * blocks * WeightFormat::NVFP4_SCALED.block_bytes();
    Bytes::new(Arc::new(ScaledNvfp4 { source: stack.bytes.clone(), scales, blocks }), 0, len)
}

struct ScaledNvfp4 {
    source: Bytes,
    scales: Vec<f32>,
    /// Blocks of a part.
    blocks: usize,
}

impl ByteSource for ScaledNvfp4 {
    fn size(&self) -> u64 {
        (self.scales.len() * self.blocks * WeightFormat::NVFP4_SCALED.block_bytes()) as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let (from, to) = (WeightFormat::NVFP4.block_bytes(), WeightFormat::NVFP4_SCALED.block_bytes());
        let start = offset as usize;
        let blocks = start / to..(start + out.len()).div_ceil(to);
        let mut source = vec![0; blocks.len() * from];
        self.source.read_at(blocks.start * from, &mut source)?;
        let mut scaled = Vec::with_capacity(blocks.len() * to);
        for (block, bytes) in blocks.clone().zip(source.chunks_exact(from)) {
            scaled.extend(self.scales[block / self.blocks].to_le_bytes());
            scaled.extend(bytes);
        }
        out.copy_from_slice(&scaled[start - blocks.start * to..][..out.len()]);
        Ok(())
    }

    fn check_unchanged(&self) -> io::Result<()> {
        self.source.check_unchanged()
    }
}

/// Transposition of a stack of matrices `[parts, inputs, columns]` of elements of `element` bytes to `[parts, outputs,
/// inputs]`: output `o` is column `first + o * step`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transpose {
    pub(crate) parts: usize,
    pub(crate) inputs: usize,
    pub(crate) columns: usize,
    pub(crate) element: usize,
    pub(crate) first: usize,
    pub(crate) step: usize,
    pub(crate) outputs: usize,
}

impl Transpose {
    /// Returns the transposed stack.
    pub(crate) fn of(self, source: &Bytes) -> Bytes {
        debug_assert_eq!(source.len(), self.parts * self.part_bytes(self.columns));
        let len = self.parts * self.part_bytes(self.outputs);
        let source = Transposed { shape: self, source: source.clone(), last: Mutex::new(None) };
        Bytes::new(Arc::new(source), 0, len)
    }

    fn part_bytes(&self, columns: usize) -> usize {
        self.inputs * columns * self.element
    }

    /// Transposes one part.
    fn part(&self, source: &[u8]) -> Vec<u8> {
        let mut out = vec![0; self.part_bytes(self.outputs)];
        for (input, row) in source.chunks_exact(self.columns * self.element).enumerate() {
            for output in 0..self.outputs {
                let from = (self.first + output * self.step) * self.element;
                let to = (output * self.inputs + input) * self.element;
                out[to..to + self.element].copy_from_slice(&row[from..from + self.element]);
            }
        }
        out
    }
}

/// Reads whole parts and caches the last one, because rows of the result are columns of the file.
struct Transposed {
    shape: Transpose,
    source: Bytes,
    last: Mutex<Option<(usize, Arc<[u8]>)>>,
}

impl Transposed {
    fn part(&self, part: usize) -> io::Result<Arc<[u8]>> {
        // The lock is held during the read, because threads need the same part at the same time.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, bytes)) = &*last
            && *known == part
        {
            return Ok(bytes.clone());
        }
        let size = self.shape.part_bytes(self.shape.columns);
        let mut bytes = vec![0; size];
        self.source.read_at(part * size, &mut bytes)?;
        let bytes: Arc<[u8]> = self.shape.part(&bytes).into();
        *last = Some((part, bytes.clone()));
        Ok(bytes)
    }
}

impl ByteSource for Transposed {
    fn size(&self) -> u64 {
        (self.shape.parts * self.shape.part_bytes(self.shape.outputs)) as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let size = self.shape.part_bytes(self.shape.outputs);
        read_parts(size, offset as usize, out, |part| self.part(part))
    }

    fn check_unchanged(&self) -> io::Result<()> {
        self.source.check_unchanged()
    }
}

/// MXFP4 as Hugging Face's files have it: rows of blocks of 16 bytes, whose byte `i` has elements `2i` and `2i + 1`, and
/// the exponents of the blocks in another tensor. Row `r` of part `p` is row `first + r * step` of the file's part.
#[derive(Clone, Debug)]
pub(crate) struct SplitMxfp4 {
    pub(crate) blocks: Bytes,
    pub(crate) scales: Bytes,
    /// Rows of each part in the file.
    pub(crate) file_rows: usize,
    /// Blocks of a row.
    pub(crate) row_blocks: usize,
    pub(crate) parts: usize,
    pub(crate) first: usize,
    pub(crate) step: usize,
    pub(crate) rows: usize,
}

/// Bytes of a block in a [`Matrix`]: the exponent, then elements `i` and `i + 16` in byte `i`.
const BLOCK: usize = 17;

impl SplitMxfp4 {
    /// Returns the rows, as a matrix has them.
    pub(crate) fn join(self) -> Bytes {
        let len = self.parts * self.rows * self.row_blocks * BLOCK;
        Bytes::new(Arc::new(self), 0, len)
    }

    fn row(&self, row: usize) -> io::Result<Vec<u8>> {
        let file_row = row / self.rows * self.file_rows + self.first + row % self.rows * self.step;
        let mut blocks = vec![0; self.row_blocks * 16];
        let mut scales = vec![0; self.row_blocks];
        self.blocks.read_at(file_row * blocks.len(), &mut blocks)?;
        self.scales.read_at(file_row * scales.len(), &mut scales)?;
        let mut out = Vec::with_capacity(self.row_blocks * BLOCK);
        for (block, scale) in blocks.as_chunks::<16>().0.iter().zip(scales) {
            let element = |i: usize| block[i / 2] >> (i % 2 * 4) & 0x0f;
            out.push(scale);
            out.extend((0..16).map(|i| element(i) | element(i + 16) << 4));
        }
        Ok(out)
    }
}

impl ByteSource for SplitMxfp4 {
    fn size(&self) -> u64 {
        (self.parts * self.rows * self.row_blocks * BLOCK) as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        read_parts(self.row_blocks * BLOCK, offset as usize, out, |row| self.row(row))
    }

    fn check_unchanged(&self) -> io::Result<()> {
        self.blocks.check_unchanged()?;
        self.scales.check_unchanged()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Reads the whole input in small pieces.
    pub(crate) fn read(bytes: &Bytes, piece: usize) -> Vec<u8> {
        let mut all = vec![0; bytes.len()];
        for (index, out) in all.chunks_mut(piece).enumerate() {
            bytes.read_at(index * piece, out).unwrap();
        }
        all
    }

    #[test]
    fn pieces_are_joined() {
        let file = Bytes::from((0..10).collect::<Vec<u8>>());
        let joined = join(vec![file.slice(6..9), file.slice(0..0), file.slice(1..3), file.slice(9..10)]);
        for piece in 1..=6 {
            assert_eq!(read(&joined, piece), [6, 7, 8, 1, 2, 9]);
        }
        assert!(joined.read_at(0, &mut [0; 6]).is_ok());
    }

    #[test]
    fn scales_of_parts_are_in_each_block() {
        let blocks: Vec<u8> = (0..4 * 36).map(|i| i as u8).collect();
        let stack = Matrix {
            name: "stack".into(),
            format: WeightFormat::NVFP4,
            parts: 2,
            rows: 1,
            cols: 128,
            bytes: Bytes::from(blocks.clone()),
        };
        let mut expected = Vec::new();
        for (scale, block) in [0.5f32, 0.5, 3.0, 3.0].into_iter().zip(blocks.chunks(36)) {
            expected.extend(scale.to_le_bytes());
            expected.extend(block);
        }
        for piece in [7, 160] {
            assert_eq!(read(&scale_nvfp4(&stack, vec![0.5, 3.0]), piece), expected);
        }
    }

    #[test]
    fn columns_become_rows() {
        // Two parts of 3 inputs and 4 columns of two bytes; every second column from 1 on.
        let file: Vec<u8> = (0..24).flat_map(|i| [i, 100 + i]).collect();
        let shape = Transpose { parts: 2, inputs: 3, columns: 4, element: 2, first: 1, step: 2, outputs: 2 };
        let transposed = shape.of(&Bytes::from(file));
        let expected: Vec<u8> =
            [1, 5, 9, 3, 7, 11, 13, 17, 21, 15, 19, 23].into_iter().flat_map(|i| [i, 100 + i]).collect();
        for piece in [1, 5, 24] {
            assert_eq!(read(&transposed, piece), expected);
        }
    }

    #[test]
    fn blocks_and_exponents_are_joined() {
        // Two rows of one block; the second one is read. Element i is i % 16.
        let nibbles: Vec<u8> = (0..16).map(|i| (2 * i % 16) | (((2 * i + 1) % 16) << 4)).collect();
        let blocks = Bytes::from([vec![0; 16], nibbles].concat());
        let scales = Bytes::from(vec![1, 2]);
        let split =
            SplitMxfp4 { blocks, scales, file_rows: 2, row_blocks: 1, parts: 1, first: 1, step: 2, rows: 1 };
        let mut expected = vec![2];
        expected.extend((0..16).map(|i| i | i << 4));
        for piece in [1, 17] {
            assert_eq!(read(&split.clone().join(), piece), expected);
        }
    }
}
