//! Points of the lattices of IQ1, IQ2 and IQ3, and the nearest points of every other combination of codes.

/// Points of a format by combination of codes.
#[derive(Debug)]
pub(crate) struct PointTable {
    /// Codes of each point, four or eight.
    points: Vec<[u8; 8]>,
    /// By combination: the index of the point, or the range of [`Self::neighbours`].
    map: Vec<Entry>,
    /// Indices of points.
    neighbours: Vec<u16>,
}

#[derive(Clone, Copy, Debug)]
enum Entry {
    Point(u16),
    Neighbours(u32, u32),
}

/// The place of a combination of codes in the lattice.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place<'a> {
    /// The combination is the point of this index.
    Point(u16),
    /// The combination is no point. Indices of the nearest ones, by distance.
    Neighbours(&'a [u16]),
}

impl PointTable {
    /// Creates the table for points of codes below `levels`, of `bits` each. Neighbours are the points of the `distances` smallest
    /// distinct distances.
    pub(crate) fn new(points: &'static [u16], bits: usize, levels: u8, distances: usize) -> Self {
        let len = if bits == 2 { 8 } else { 4 };
        let codes = |combination: usize| -> [u8; 8] {
            std::array::from_fn(|i| (combination >> (bits * i)) as u8 & ((1 << bits) - 1))
        };
        let mut map = vec![Entry::Neighbours(0, 0); 1 << (bits * len)];
        for (index, &point) in (0..).zip(points) {
            map[usize::from(point)] = Entry::Point(index);
        }
        let points: Vec<_> = points.iter().map(|&point| codes(usize::from(point))).collect();
        let mut neighbours = Vec::new();
        let mut squares = vec![0u32; points.len()];
        for (combination, entry) in map.iter_mut().enumerate() {
            let codes = codes(combination);
            if matches!(entry, Entry::Point(_)) || codes.iter().any(|&code| code >= levels) {
                continue;
            }
            for (square, point) in squares.iter_mut().zip(&points) {
                *square = codes.iter().zip(point).map(|(a, b)| u32::from(a.abs_diff(*b)).pow(2)).sum();
            }
            let start = neighbours.len();
            let mut farther = None;
            for _ in 0..distances {
                let next = squares.iter().copied().filter(|&it| farther.is_none_or(|least| it > least)).min();
                let Some(next) = next else { break };
                let at = (0u16..).zip(&squares).filter(|(_, square)| **square == next);
                neighbours.extend(at.map(|(index, _)| index));
                farther = Some(next);
            }
            *entry = Entry::Neighbours(start as u32, neighbours.len() as u32);
        }
        Self { points, map, neighbours }
    }

    /// Returns the place of a combination of codes, the first in the lowest bits.
    pub(crate) fn place(&self, combination: usize) -> Place<'_> {
        match self.map[combination] {
            Entry::Point(index) => Place::Point(index),
            Entry::Neighbours(start, end) => {
                Place::Neighbours(&self.neighbours[start as usize..end as usize])
            }
        }
    }

    /// Returns the codes of the point of this index. Points of four codes have four zeros after them.
    pub(crate) fn codes(&self, index: u16) -> &[u8; 8] {
        &self.points[usize::from(index)]
    }
}
