//! Encoders of IQ1_S and IQ1_M: values are -1, 0 or 1, shifted by 1/8 up or down. Layouts are documented at the decoders of
//! `paguro_backend`.
//!
//! Two boundaries split the sorted values of a part into those that become -1, 0 and 1. All splits are tried with all directions of
//! the shift. Eight codes that are not in the table of points are then replaced by the best of the nearest points, where weights
//! decide.

use half::f16;
use paguro_backend::WeightFormat::{self, *};

use crate::{
    points::{Place, PointTable},
    search::nearest,
};

const SUPER: usize = 256;
/// Elements of a point.
const POINT: usize = 8;
/// Most elements that share a scale.
const PART: usize = 32;
/// Values of the codes 0, 1 and 2, shifted up and down.
const VALUES: [[f32; 3]; 2] = [[-0.875, 0.125, 1.125], [-1.125, -0.125, 0.875]];

/// An encoder of one of the two formats, with its table.
#[derive(Debug)]
pub(crate) struct Iq1Encoder {
    format: WeightFormat,
    table: PointTable,
    /// Elements that share a scale.
    part: usize,
    /// Magnitudes below this are zero.
    zero: f32,
}

/// The codes of a part with its scale.
#[derive(Clone, Copy, Default)]
struct Part {
    scale: f32,
    /// Indices of points.
    points: [u16; PART / POINT],
    directions: Directions,
}

/// Indices into [`VALUES`] of points with an even and with an odd number. IQ1_S has one direction for a part.
type Directions = [usize; 2];

/// The best split of a part so far.
struct Split {
    /// The number of values with code 0, and that of values with codes 0 and 1.
    ends: (usize, usize),
    directions: Directions,
    scale: f32,
    /// Reduction of the error.
    score: f32,
}

impl Split {
    const NONE: Self = Self { ends: (0, 0), directions: [0; 2], scale: 0.0, score: f32::MIN };

    /// Replaces the split if another one has a smaller error. `cross` and `square` are its weighted sums of `x * value` and
    /// `value * value`.
    fn improve(&mut self, cross: f32, square: f32, ends: (usize, usize), directions: Directions) {
        if square > 0.0 && cross * cross > self.score * square {
            let scale = cross / square;
            *self = Self { ends, directions, scale, score: scale * cross };
        }
    }
}

impl Iq1Encoder {
    /// Creates the table; `None` for other formats.
    pub(crate) fn new(format: WeightFormat) -> Option<Self> {
        let (part, zero) = match format {
            IQ1_S => (32, 1e-12),
            IQ1_M => (16, 1e-7),
            _ => return None,
        };
        let table = PointTable::new(format.points()?, 2, 3, 3);
        Some(Self { format, table, part, zero })
    }

    /// Encodes a row. Without importance, each value's weight is its square.
    pub(crate) fn encode(&self, values: &[f32], importance: Option<&[f32]>, out: &mut Vec<u8>) {
        for (index, block) in values.as_chunks::<SUPER>().0.iter().enumerate() {
            let importance = importance.map(|importance| &importance[index * SUPER..][..SUPER]);
            let mean = 2.0 * block.iter().fold(0.0, |sum, x| sum + x * x) / SUPER as f32;
            let weights: [f32; SUPER] = std::array::from_fn(|i| {
                let square = block[i] * block[i];
                importance.map_or(square, |importance| importance[i] * (mean + square).sqrt())
            });
            let parts = block.chunks_exact(self.part).zip(weights.chunks_exact(self.part));
            let parts: Vec<Part> = parts.map(|(values, weights)| self.part(values, weights)).collect();
            let start = out.len();
            out.resize(start + self.format.block_bytes(), 0);
            match self.format {
                IQ1_S => pack_iq1_s(&parts, &mut out[start..]),
                _ => self.pack_iq1_m(&parts, block, &weights, &mut out[start..]),
            }
        }
    }

    fn part(&self, values: &[f32], weights: &[f32]) -> Part {
        if values.iter().all(|x| x.abs() < self.zero) {
            return Part::default();
        }
        let mut order: [usize; PART] = std::array::from_fn(|i| i);
        let order = &mut order[..self.part];
        // The sum makes both zeros equal, so that the first comes first.
        order.sort_by(|&a, &b| (values[a] + 0.0).total_cmp(&(values[b] + 0.0)));
        let split = match self.format {
            IQ1_S => split_part(order, values, weights),
            _ => split_halves(order, values, weights),
        };
        if split.score == f32::MIN {
            return Part::default(); // all weights are zero
        }
        let Split { ends, mut directions, mut scale, .. } = split;
        let mut codes = [0u8; PART];
        for (position, &i) in order.iter().enumerate() {
            codes[i] = u8::from(position >= ends.0) + u8::from(position >= ends.1);
        }
        if scale < 0.0 {
            codes = codes.map(|code| 2 - code);
            directions = directions.map(|direction| 1 - direction);
            scale = -scale;
        }
        let mut points = [0; PART / POINT];
        let mut all_found = true;
        for (k, point) in points[..self.part / POINT].iter_mut().enumerate() {
            let range = k * POINT..(k + 1) * POINT;
            let combination =
                codes[range.clone()].iter().rev().fold(0, |all, &code| all << 2 | usize::from(code));
            *point = match self.table.place(combination) {
                Place::Point(index) => index,
                Place::Neighbours(neighbours) => {
                    all_found = false;
                    let scaled = VALUES[directions[k % 2]].map(|value| scale * value);
                    self.best(neighbours, &values[range.clone()], &weights[range], scaled)
                }
            };
        }
        if !all_found {
            let (mut cross, mut square) = (0.0, 0.0);
            for (i, (x, weight)) in values.iter().zip(weights).enumerate() {
                let value = self.value(&points, directions, i);
                cross += weight * value * x;
                square += weight * value * value;
            }
            if cross > 0.0 && square > 0.0 {
                scale = cross / square;
            }
        }
        Part { scale, points, directions }
    }

    /// Returns the point with the smallest error. `scaled` has the values of its codes, multiplied by the scale.
    fn best(&self, neighbours: &[u16], values: &[f32], weights: &[f32], scaled: [f32; 3]) -> u16 {
        let (mut best, mut least) = (0, f32::MAX);
        for &neighbour in neighbours {
            let mut error = 0.0;
            for ((x, weight), &code) in values.iter().zip(weights).zip(self.table.codes(neighbour)) {
                let difference = scaled[usize::from(code)] - x;
                error += weight * difference * difference;
            }
            if error < least {
                (best, least) = (neighbour, error);
            }
        }
        best
    }

    /// Returns element `i` of a part with scale 1.
    fn value(&self, points: &[u16], directions: Directions, i: usize) -> f32 {
        let k = i / POINT;
        VALUES[directions[k % 2]][usize::from(self.table.codes(points[k])[i % POINT])]
    }

    /// Packs the parts. The super-block's scale is the best one for the scales of the parts as they are stored.
    fn pack_iq1_m(&self, parts: &[Part], values: &[f32], weights: &[f32], block: &mut [u8]) {
        for (index, part) in parts.iter().enumerate() {
            for (k, point) in part.points[..2].iter().enumerate() {
                block[2 * index + k] = *point as u8;
                block[32 + index] |= ((point >> 8) as u8) << (4 * k);
            }
        }
        let largest = largest_scale(parts);
        if largest == 0.0 {
            return;
        }
        let mut d = largest / 15.0;
        let inverse = 1.0 / d;
        let (mut cross, mut square) = (0.0, 0.0);
        let mut words = [0u16; 4];
        for (index, part) in parts.iter().enumerate() {
            let scale = stored_scale(inverse, part.scale);
            words[index / 4] |= scale << (3 * (index % 4));
            block[32 + index] |= (part.directions[0] << 3 | part.directions[1] << 7) as u8;
            for i in 0..self.part {
                let at = self.part * index + i;
                let value = self.value(&part.points, part.directions, i) * f32::from(2 * scale + 1);
                cross += weights[at] * value * values[at];
                square += weights[at] * value * value;
            }
        }
        if square > 0.0 {
            d = cross / square;
        }
        // The factor was found by experiment.
        let bits = f16::from_f32(d * 1.1125).to_bits();
        for (i, (word, stored)) in words.iter().zip(block[48..].as_chunks_mut::<2>().0).enumerate() {
            *stored = (word | (bits >> (4 * i)) << 12).to_le_bytes();
        }
    }
}

/// Finds the best split of a part that has one direction.
fn split_part(order: &[usize], values: &[f32], weights: &[f32]) -> Split {
    let len = order.len();
    // Sums of the first weighted values and weights.
    let (mut x, mut w) = ([0.0; PART + 1], [0.0; PART + 1]);
    for (j, &i) in order.iter().enumerate() {
        x[j + 1] = x[j] + weights[i] * values[i];
        w[j + 1] = w[j] + weights[i];
    }
    let mut best = Split::NONE;
    for low in 0..=len {
        for high in low..=len {
            for (direction, [a, b, c]) in VALUES.into_iter().enumerate() {
                let cross = x[low] * a + (x[high] - x[low]) * b + (x[len] - x[high]) * c;
                let square = w[low] * a * a + (w[high] - w[low]) * b * b + (w[len] - w[high]) * c * c;
                best.improve(cross, square, (low, high), [direction; 2]);
            }
        }
    }
    best
}

/// Finds the best split of a part whose halves have directions of their own.
fn split_halves(order: &[usize], values: &[f32], weights: &[f32]) -> Split {
    let len = order.len();
    // Sums of the first weighted values and weights that are in each half.
    let (mut x, mut w) = ([[0.0; 2]; PART + 1], [[0.0; 2]; PART + 1]);
    for (j, &i) in order.iter().enumerate() {
        let half = i / POINT;
        (x[j + 1], w[j + 1]) = (x[j], w[j]);
        x[j + 1][half] += weights[i] * values[i];
        w[j + 1][half] += weights[i];
    }
    let mut best = Split::NONE;
    for low in 0..=len {
        for high in low..=len {
            // Values are 1 apart, so two differences give the sum of three products.
            let sums = |half: usize, direction: usize| {
                let [a, b, c] = VALUES[direction];
                let cross = x[len][half] * c - (x[low][half] + x[high][half]);
                let square =
                    w[len][half] * c * c + w[low][half] * (a * a - b * b) + w[high][half] * (b * b - c * c);
                (cross, square)
            };
            let sums = [[sums(0, 0), sums(0, 1)], [sums(1, 0), sums(1, 1)]];
            for directions in [[0, 0], [0, 1], [1, 0], [1, 1]] {
                let (first, second) = (sums[0][directions[0]], sums[1][directions[1]]);
                best.improve(first.0 + second.0, first.1 + second.1, (low, high), directions);
            }
        }
    }
    best
}

fn pack_iq1_s(parts: &[Part], block: &mut [u8]) {
    let largest = largest_scale(parts);
    let d = largest / 15.0;
    // The factor was found by experiment.
    block[..2].copy_from_slice(&f16::from_f32(d * 1.125).to_le_bytes());
    for (index, part) in parts.iter().enumerate() {
        let mut word = 0;
        for (k, point) in part.points.iter().enumerate() {
            block[2 + 4 * index + k] = *point as u8;
            word |= (point >> 8) << (3 * k);
        }
        if largest > 0.0 {
            word |= stored_scale(1.0 / d, part.scale) << 12 | (part.directions[0] as u16) << 15;
        }
        block[34 + 2 * index..][..2].copy_from_slice(&word.to_le_bytes());
    }
}

fn largest_scale(parts: &[Part]) -> f32 {
    parts.iter().fold(0.0, |largest, part| largest.max(part.scale))
}

/// Returns the three bits of a part's scale, `s` of `2 s + 1`.
fn stored_scale(inverse: f32, scale: f32) -> u16 {
    nearest(0.5 * (inverse * scale - 1.0)).clamp(0, 7) as u16
}
