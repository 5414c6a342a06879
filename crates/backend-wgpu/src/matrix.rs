//! Matrices on the device.
//!
//! Weights are packed at load into the planes of [`layout`](crate::layout). A matrix that is larger than a binding is
//! split by rows.

use std::ops::Range;

use paguro_backend::{LoadError, Matrix};

use crate::{
    device::Device,
    host::HostBuffer,
    layout::{BLOCK, Layout, RowPlanes, pack_row},
};

/// Words that are packed on the host at a time: 64 MiB.
const CHUNK_WORDS: usize = 16 << 20;

/// Planes of a part of a joined matrix: quants, high bits and scales. Planes that the layout does not have are `None`.
pub type Planes = [Option<wgpu::Buffer>; 3];

/// One or more matrices of one layout, joined, in as many parts as bindings require.
#[derive(Clone)]
pub struct DeviceMatrix {
    /// Parts on the device: all, or those of the slots.
    pub parts: Vec<Planes>,
    /// Parts in the host's memory, of a stack that has slots.
    pub host: Vec<Planes>,
}

/// Order in which the rows of several matrices are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// One matrix after the other.
    Joined,
    /// Interleaved: one row of each.
    InTurn,
    /// For stacks of this many matrices: the first matrix of every stack, then the second ones.
    Stacked(usize),
    /// For such stacks: interleaved in each stack.
    StackedInTurn(usize),
    /// One after the other. The first ones consist of heads whose RoPE pairs are half a head apart; two pairs are
    /// placed together, as in `rotate.wgsl`.
    Together {
        /// Matrices of such heads.
        matrices: usize,
        /// Rows of a head.
        head_dim: usize,
        /// Pairs of a head.
        pairs: usize,
    },
}

impl Order {
    /// Returns the number of stacked matrices.
    pub fn stacks(self) -> usize {
        match self {
            Self::Stacked(count) | Self::StackedInTurn(count) => count,
            Self::Joined | Self::InTurn | Self::Together { .. } => 1,
        }
    }

    /// Matrix and row of every row of the joined one.
    pub fn rows(self, rows: &[usize]) -> Vec<(usize, usize)> {
        let all = |matrix: usize| (0..rows[matrix]).map(move |row| (matrix, row));
        match self {
            Self::Joined => (0..rows.len()).flat_map(all).collect(),
            Self::Stacked(parts) => {
                let of = |part: usize, matrix: usize| part * rows[matrix]..(part + 1) * rows[matrix];
                let of = |part: usize| {
                    (0..rows.len()).flat_map(move |matrix| of(part, matrix).map(move |row| (matrix, row)))
                };
                (0..parts).flat_map(of).collect()
            }
            Self::StackedInTurn(parts) => {
                let row = |row: usize| (0..rows.len()).map(move |matrix| (matrix, row));
                (0..parts * rows[0]).flat_map(row).collect()
            }
            Self::InTurn => (0..rows[0]).flat_map(|row| (0..rows.len()).map(move |m| (m, row))).collect(),
            Self::Together { matrices, head_dim, pairs } => {
                let in_head = |at: usize| match at < 2 * pairs {
                    true => at / 4 * 2 + at % 4 / 2 + at % 2 * pairs,
                    false => at,
                };
                let row = |(matrix, row): (usize, usize)| match matrix < matrices {
                    true => (matrix, row / head_dim * head_dim + in_head(row % head_dim)),
                    false => (matrix, row),
                };
                (0..rows.len()).flat_map(all).map(row).collect()
            }
        }
    }
}

/// Returns the most rows of a part of joined matrices with these rows, whose rows have these words. A part has whole
/// matrices of stacks.
pub fn part_rows(binding_limit: u64, words: [usize; 3], counts: &[usize], order: Order) -> usize {
    let whole = if order.stacks() > 1 { counts.iter().sum() } else { 1 };
    binding_limit as usize / 4 / words.iter().max().unwrap_or(&1) / whole * whole
}

/// Returns the rows of each part of joined matrices with these rows, of `stacks` of their stacks.
pub fn part_ranges(
    binding_limit: u64,
    words: [usize; 3],
    counts: &[usize],
    order: Order,
    stacks: Range<usize>,
) -> Vec<Range<usize>> {
    let most = part_rows(binding_limit, words, counts, order);
    let of_stack: usize = counts.iter().sum();
    let (start, end) = (stacks.start * of_stack, stacks.end * of_stack);
    // Where no binding holds a row, the upload fails.
    (start..end).step_by(most.max(1)).map(|first| first..end.min(first + most)).collect()
}

impl DeviceMatrix {
    /// Reads, packs and uploads matrices that have the same layout and width. With `slots`, they are stacks: the device gets the
    /// first `slots` matrices of a stack, and the host's memory all of them.
    ///
    /// # Errors
    /// [`LoadError::OutOfMemory`], [`LoadError::Unreadable`], and [`LoadError::BadWeights`] for values that are not finite.
    pub fn upload(
        device: &Device,
        sources: &[&Matrix],
        order: Order,
        slots: Option<usize>,
    ) -> Result<Self, LoadError> {
        let layout = Layout::of(sources[0].format);
        let blocks = sources[0].cols.div_ceil(BLOCK);
        let counts: Vec<usize> = sources.iter().map(|source| source.rows).collect();
        let rows: Vec<(&Matrix, usize)> =
            order.rows(&counts).into_iter().map(|(matrix, row)| (sources[matrix], row)).collect();
        let words = layout.row_words(blocks);
        let most = part_rows(device.target.binding_limit, words, &counts, order);
        if most == 0 {
            let what = if order.stacks() == 1 { "a row" } else { "an expert" };
            return Err(LoadError::OutOfMemory {
                device: device.target.name.clone(),
                what: format!("{what} of `{}`", sources[0].name),
                needed: (counts.iter().sum::<usize>() * words[0]) as u64 * 4,
            });
        }
        let what = &sources[0].name;
        let on_device = slots.map_or(rows.len(), |slots| slots * counts.iter().sum::<usize>());
        let planes = |rows: usize| -> Result<Planes, LoadError> {
            let plane = |words: usize| (words > 0).then(|| device.buffer(rows * words, what)).transpose();
            let [a, b, c] = words.map(plane);
            Ok([a?, b?, c?])
        };
        let parts: Vec<Planes> = (0..on_device)
            .step_by(most)
            .map(|first| planes(most.min(on_device - first)))
            .collect::<Result<_, _>>()?;
        let mut host = Vec::new();
        for (part, rows) in rows.chunks(most).enumerate() {
            let mut own = [None, None, None];
            for (plane, words) in own.iter_mut().zip(words).filter(|(_, words)| slots.is_some() && *words > 0)
            {
                *plane = Some(host_plane(device, rows.len() * words, what)?);
            }
            let per_chunk = (CHUNK_WORDS / words[0]).max(1);
            for (chunk, rows) in rows.chunks(per_chunk).enumerate() {
                let packed = pack(rows, words)?;
                let first = chunk * per_chunk;
                let count = rows.len().min(on_device.saturating_sub(part * most + first));
                for (plane, (packed, words)) in packed.iter().zip(words).enumerate() {
                    if let Some(own) = &mut own[plane] {
                        own.write(first * words, packed);
                    }
                    if let Some(plane) =
                        parts.get(part).and_then(|planes| planes[plane].as_ref()).filter(|_| count > 0)
                    {
                        let bytes = bytemuck::cast_slice(&packed[..count * words]);
                        device.queue.write_buffer(plane, (first * words * 4) as u64, bytes);
                    }
                }
                // Sends it off, so that copies of a whole model do not pile up in host memory.
                device.queue.submit([]);
                device.wait().map_err(|error| LoadError::Device(error.to_string()))?;
            }
            host.push(own.map(|plane| plane.map(|plane| plane.buffer)));
        }
        Ok(Self { parts, host })
    }
}

/// Allocates a plane in the host's memory.
///
/// # Errors
/// [`LoadError::OutOfMemory`]
pub fn host_plane(device: &Device, words: usize, what: &str) -> Result<HostBuffer, LoadError> {
    HostBuffer::new(&device.inner, words, what).map_err(|error| LoadError::OutOfMemory {
        device: device.target.name.clone(),
        what: format!("`{what}` in the host's memory ({error})"),
        needed: 4 * words as u64,
    })
}

/// Reads and packs rows on all processors.
fn pack(rows: &[(&Matrix, usize)], words: [usize; 3]) -> Result<[Vec<u32>; 3], LoadError> {
    let mut planes = words.map(|words| vec![0; rows.len() * words]);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = rows.len().div_ceil(threads).max(64);
    std::thread::scope(|scope| {
        let mut rest = planes.each_mut().map(|plane| &mut plane[..]);
        let mut threads = Vec::new();
        for rows in rows.chunks(share) {
            let mut own = rest
                .each_mut()
                .map(std::mem::take)
                .into_iter()
                .zip(words)
                .map(|(rest, words)| rest.split_at_mut(rows.len() * words));
            let mut take = || own.next().expect("three planes");
            let ((quants, a), (high, b), (scales, c)) = (take(), take(), take());
            rest = [a, b, c];
            threads.push(scope.spawn(move || {
                let (mut encoded, mut floats) = (Vec::new(), Vec::new());
                for (index, (matrix, row)) in rows.iter().enumerate() {
                    let mut out = RowPlanes {
                        quants: &mut quants[index * words[0]..][..words[0]],
                        high: &mut high[index * words[1]..][..words[1]],
                        scales: &mut scales[index * words[2]..][..words[2]],
                    };
                    let bytes = matrix.read_rows(*row..row + 1, &mut encoded)?;
                    matrix.check_finite(bytes, *row)?;
                    pack_row(matrix.format, matrix.cols, bytes, &mut out, &mut floats);
                }
                Ok(())
            }));
        }
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    Ok(planes)
}

#[cfg(test)]
mod tests {
    use super::Order;

    #[test]
    fn pairs_lie_together() {
        let order = Order::Together { matrices: 1, head_dim: 10, pairs: 4 };
        let rows: Vec<usize> = order.rows(&[20]).iter().map(|(_, row)| *row).collect();
        assert_eq!(rows[..10], [0, 4, 1, 5, 2, 6, 3, 7, 8, 9]);
        assert_eq!(rows[10..], [10, 14, 11, 15, 12, 16, 13, 17, 18, 19]);
        assert_eq!(order.rows(&[10, 2])[9..], [(0, 9), (1, 0), (1, 1)]);
        assert_eq!(Order::InTurn.rows(&[2, 2]), [(0, 0), (1, 0), (0, 1), (1, 1)]);
        assert_eq!(Order::StackedInTurn(2).rows(&[1, 1]), [(0, 0), (1, 0), (0, 1), (1, 1)]);
        assert_eq!(Order::Stacked(2).rows(&[1, 2]), [(0, 0), (1, 0), (1, 1), (0, 1), (1, 2), (1, 3)]);
    }
}
