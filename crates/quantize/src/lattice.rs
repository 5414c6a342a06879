//! Encoders of the formats whose codes are points of a lattice: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S. Layouts are documented at
//! the decoders of `paguro_backend`.
//!
//! Four or eight magnitudes are one point of a table. Values are rounded to magnitudes first. A combination that is not in the table
//! is replaced by the best of the nearest points, where weights decide.

use half::f16;
use paguro_backend::WeightFormat::{self, *};

use crate::{
    points::{Place, PointTable},
    search::{nearest, positive},
};

const SUPER: usize = 256;

/// Numbers in which the formats differ.
#[derive(Clone, Copy, Debug)]
struct Scheme {
    /// Elements of a point, and bits of a magnitude.
    point: usize,
    bits: usize,
    /// Magnitudes: the odd numbers `1, 3, ...` of this many.
    levels: i32,
    /// Elements that share a scale.
    part: usize,
    /// True if only seven of eight signs are stored, so that their number must be even.
    even_signs: bool,
    /// Trials on each side of the first inverse scale, and the distance between two.
    trials: i32,
    step: f32,
    /// Distinct distances of the points that replace a combination.
    distances: usize,
    /// Factor of the mean square in weights.
    mean: f32,
    /// Factor of the mean square in weights without importance.
    plain_mean: f32,
    /// Magnitudes below this are zero.
    zero: f32,
    /// Factor of the super-block's scale, found by experiment.
    correction: f32,
    /// True if all points are rounded again with the scale that was found, not only those that are not in the table.
    again: bool,
}

const IQ3: Scheme = Scheme {
    point: 4,
    bits: 3,
    levels: 8,
    part: 32,
    even_signs: true,
    trials: 15,
    step: 0.2,
    distances: 2,
    mean: 2.0,
    plain_mean: 0.0,
    zero: 1e-8,
    correction: 1.0125,
    again: false,
};

const IQ2: Scheme = Scheme {
    point: 8,
    bits: 2,
    levels: 3,
    part: 16,
    even_signs: true,
    trials: 9,
    step: 0.1,
    distances: 2,
    mean: 1.0,
    plain_mean: 0.0,
    zero: 1e-15,
    correction: 1.0,
    again: false,
};

impl Scheme {
    fn of(format: WeightFormat) -> Option<Self> {
        Some(match format {
            IQ3_XXS => IQ3,
            IQ3_S => Self {
                even_signs: false,
                trials: 9,
                distances: 3,
                zero: f32::MIN_POSITIVE,
                correction: 1.033,
                again: true,
                ..IQ3
            },
            IQ2_XXS => Self { part: 32, trials: 6, again: true, ..IQ2 },
            IQ2_XS => IQ2,
            IQ2_S => Self {
                even_signs: false,
                distances: 1,
                mean: 2.0,
                plain_mean: 0.25,
                zero: 1e-8,
                correction: 0.9875,
                ..IQ2
            },
            _ => return None,
        })
    }
}

/// An encoder of one format, with its tables.
#[derive(Debug)]
pub(crate) struct LatticeEncoder {
    format: WeightFormat,
    scheme: Scheme,
    table: PointTable,
}

/// The codes of a part with its scale.
struct Part {
    scale: f32,
    /// Magnitudes, as `(value - 1) / 2`.
    codes: [u8; 32],
    /// Signs of eight elements each.
    signs: [u8; 4],
}

impl LatticeEncoder {
    /// Makes the tables; `None` for other formats.
    pub(crate) fn new(format: WeightFormat) -> Option<Self> {
        let scheme = Scheme::of(format)?;
        let table = PointTable::new(format.points()?, scheme.bits, scheme.levels as u8, scheme.distances);
        Some(Self { format, scheme, table })
    }

    /// Encodes a row.
    pub(crate) fn encode(&self, values: &[f32], importance: Option<&[f32]>, out: &mut Vec<u8>) {
        let scheme = &self.scheme;
        for (index, block) in values.as_chunks::<SUPER>().0.iter().enumerate() {
            let importance = importance.map(|importance| &importance[index * SUPER..][..SUPER]);
            let mean = scheme.mean * block.iter().fold(0.0, |sum, x| sum + x * x) / SUPER as f32;
            let parts: Vec<Part> = (0..SUPER / scheme.part)
                .map(|part| {
                    let range = part * scheme.part..(part + 1) * scheme.part;
                    self.part(&block[range.clone()], importance.map(|importance| &importance[range]), mean)
                })
                .collect();
            self.pack(&parts, out);
        }
    }

    /// Combination of the magnitudes to which values are rounded, and these magnitudes.
    fn round(&self, values: &[f32], inverse: f32, codes: &mut [u8]) -> usize {
        let mut combination = 0;
        for (i, (code, x)) in codes.iter_mut().zip(values).enumerate() {
            *code = nearest(0.5 * (inverse * x - 1.0)).clamp(0, self.scheme.levels - 1) as u8;
            combination |= usize::from(*code) << (self.scheme.bits * i);
        }
        combination
    }

    /// Rounds values to a point of the table. Returns true if the nearest magnitudes are one.
    fn to_point(&self, values: &[f32], roots: &[f32], inverse: f32, scale: f32, codes: &mut [u8]) -> bool {
        let combination = self.round(values, inverse, codes);
        let Place::Neighbours(neighbours) = self.table.place(combination) else { return true };
        let (mut best, mut least) = (0, f32::MAX);
        for &neighbour in neighbours {
            let mut error = 0.0;
            for ((x, root), code) in values.iter().zip(roots).zip(self.table.codes(neighbour)) {
                let difference = scale * f32::from(2 * code + 1) - x;
                error += root * difference * difference;
            }
            if error < least {
                (best, least) = (neighbour, error);
            }
        }
        codes.copy_from_slice(&self.table.codes(best)[..codes.len()]);
        false
    }

    fn part(&self, block: &[f32], importance: Option<&[f32]>, mean: f32) -> Part {
        let Scheme { point, levels, part: len, trials, step, .. } = self.scheme;
        let mut weights = [0.0; 32];
        for (i, x) in block.iter().enumerate() {
            weights[i] = match importance {
                Some(importance) => importance[i] * (mean + x * x).sqrt(),
                None if self.scheme.plain_mean > 0.0 => self.scheme.plain_mean * mean + x * x,
                None => x * x,
            };
        }
        let roots = weights.map(f32::sqrt);
        let (magnitudes, mut signs) = self.signs(block, &weights);
        let mut codes = [0; 32];
        let largest = magnitudes[..len].iter().fold(magnitudes[0], |most, &x| most.max(x));
        let none = Part { scale: 0.0, codes, signs: [0; 4] };
        if largest < self.scheme.zero {
            return none;
        }
        let highest = (2 * levels - 1) as f32;
        let (mut scale, mut range) = (largest / highest, largest);
        if self.format == IQ2_XXS {
            // The range of a search for three magnitudes and zero.
            scale = positive(&magnitudes, &weights, levels + 1, &mut codes);
            range = scale * levels as f32;
            if range <= 0.0 {
                return none;
            }
        }
        let fit = |codes: &[u8; 32]| {
            let (mut cross, mut square) = (0.0, 0.0);
            for i in 0..len {
                let value = f32::from(2 * codes[i] + 1);
                cross += weights[i] * magnitudes[i] * value;
                square += weights[i] * value * value;
            }
            (cross, square)
        };
        let groups = (0..len).step_by(point).map(|start| start..start + point);
        let mut on_grid = [!self.scheme.again; 8];
        let (mut best, mut tried, mut tried_on_grid) = (0.0, [0; 32], [true; 8]);
        for trial in -trials..=trials {
            let inverse = (highest + trial as f32 * step) / range;
            for (index, group) in groups.clone().enumerate() {
                tried_on_grid[index] = self.to_point(
                    &magnitudes[group.clone()],
                    &roots[group.clone()],
                    inverse,
                    1.0 / inverse,
                    &mut tried[group],
                );
            }
            let (cross, square) = fit(&tried);
            if square > 0.0 && cross * cross > best * square {
                scale = cross / square;
                best = scale * cross;
                (codes, on_grid) = (tried, tried_on_grid);
            }
        }
        let some_off = on_grid[..len / point].contains(&false);
        if scale > 0.0 && (some_off || self.format == IQ2_XXS) {
            for (index, group) in groups.enumerate() {
                if self.scheme.again || !on_grid[index] {
                    self.to_point(
                        &magnitudes[group.clone()],
                        &roots[group.clone()],
                        1.0 / scale,
                        scale,
                        &mut codes[group],
                    );
                }
            }
            let (cross, square) = fit(&codes);
            if square > 0.0 {
                scale = cross / square;
            }
        }
        if scale < 0.0 {
            scale = -scale;
            signs = signs.map(|signs| !signs);
        }
        Part { scale, codes, signs }
    }

    /// Magnitudes and signs. Where the number of signs must be even, the value that matters least changes its sign if need be.
    fn signs(&self, block: &[f32], weights: &[f32; 32]) -> ([f32; 32], [u8; 4]) {
        let (mut magnitudes, mut signs) = ([0.0; 32], [0u8; 4]);
        for (group, eight) in block.as_chunks::<8>().0.iter().enumerate() {
            for (i, &x) in eight.iter().enumerate() {
                magnitudes[8 * group + i] = if x >= 0.0 { x } else { -x };
                signs[group] |= u8::from(x.is_nan() || x < 0.0) << i;
            }
            if self.scheme.even_signs && signs[group].count_ones() % 2 == 1 {
                let cost = |i: usize| weights[8 * group + i] * eight[i] * eight[i];
                let least = (1..8).fold(0, |least, i| if cost(i) < cost(least) { i } else { least });
                magnitudes[8 * group + least] *= -1.0;
                signs[group] ^= 1 << least;
            }
        }
        (magnitudes, signs)
    }

    fn pack(&self, parts: &[Part], out: &mut Vec<u8>) {
        let Scheme { point, bits, part: len, correction, .. } = self.scheme;
        let start = out.len();
        out.resize(start + self.format.block_bytes(), 0);
        let block = &mut out[start..];
        let largest = parts.iter().fold(0.0f32, |largest, part| largest.max(part.scale));
        if largest == 0.0 {
            return;
        }
        let d = largest / 31.0;
        block[..2].copy_from_slice(&f16::from_f32(d * correction).to_le_bytes());
        let per_part = len / point;
        for (index, part) in parts.iter().enumerate() {
            let scale = nearest(0.5 * (1.0 / d * part.scale - 1.0)).clamp(0, 15) as u8;
            let nibble = scale << (index % 2 * 4);
            match self.format {
                IQ2_XXS | IQ3_XXS => {}
                IQ2_XS => block[66 + index / 2] |= nibble,
                IQ2_S => block[74 + index / 2] |= nibble,
                _ => block[106 + index / 2] |= nibble,
            }
            // A part without a scale has no signs, and its points are the first of the table.
            let seven = part.signs.iter().rev().fold(0u32, |word, &signs| word << 7 | u32::from(signs & 127));
            let word = (seven | u32::from(scale) << 28).to_le_bytes();
            match self.format {
                IQ2_XXS => block[2 + 8 * index + 4..][..4].copy_from_slice(&word),
                IQ3_XXS => block[66 + 4 * index..][..4].copy_from_slice(&word),
                IQ2_S => block[34 + 2 * index..][..2].copy_from_slice(&part.signs[..2]),
                IQ3_S => block[74 + 4 * index..][..4].copy_from_slice(&part.signs),
                _ => {}
            }
            if part.scale == 0.0 {
                continue;
            }
            for (group, codes) in part.codes[..len].chunks_exact(point).enumerate() {
                let combination = codes.iter().rev().fold(0, |all, &code| all << bits | usize::from(code));
                let Place::Point(found) = self.table.place(combination) else { continue };
                let at = per_part * index + group;
                let (low, high) = (found as u8, (found >> 8) as u8);
                match self.format {
                    IQ2_XXS => block[2 + 8 * index + group] = low,
                    IQ2_XS => {
                        let word = found | u16::from(part.signs[group] & 127) << 9;
                        block[2 + 2 * at..][..2].copy_from_slice(&word.to_le_bytes());
                    }
                    IQ2_S => {
                        block[2 + at] = low;
                        block[66 + at / 4] |= high << (2 * (at % 4));
                    }
                    IQ3_XXS => block[2 + at] = low,
                    _ => {
                        block[2 + at] = low;
                        block[66 + at / 8] |= high << (at % 8);
                    }
                }
            }
        }
    }
}
