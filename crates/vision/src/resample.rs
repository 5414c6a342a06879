//! Pillow's resampling of 8-bit pixels, equal bit for bit (`src/libImaging/Resample.c`).
//!
//! Coefficients are computed in f64, normalized and rounded to 22 bits. The first pass, along one axis, writes 8-bit
//! pixels, from which the second one computes the result.

use std::f64::consts::PI;

use crate::Rgb;

/// Bits of a coefficient after the point.
const PRECISION: u32 = 32 - 8 - 2;

/// A filter of resampling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Filter {
    /// Linear interpolation.
    Bilinear,
    /// Cubic interpolation with `a` = -0.5.
    Bicubic,
    /// Lanczos with three lobes.
    Lanczos,
}

impl Filter {
    fn support(self) -> f64 {
        match self {
            Self::Bilinear => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }

    fn weight(self, x: f64) -> f64 {
        match self {
            Self::Bilinear => {
                let x = x.abs();
                if x < 1.0 { 1.0 - x } else { 0.0 }
            }
            Self::Bicubic => {
                const A: f64 = -0.5;
                let x = x.abs();
                if x < 1.0 {
                    ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
                } else if x < 2.0 {
                    (((x - 5.0) * x + 8.0) * x - 4.0) * A
                } else {
                    0.0
                }
            }
            Self::Lanczos => {
                if (-3.0..3.0).contains(&x) {
                    sinc(x) * sinc(x / 3.0)
                } else {
                    0.0
                }
            }
        }
    }
}

fn sinc(x: f64) -> f64 {
    if x == 0.0 {
        return 1.0;
    }
    let x = x * PI;
    x.sin() / x
}

/// Coefficients of one axis.
struct Taps {
    /// First input and number of inputs of each output.
    ranges: Vec<(usize, usize)>,
    /// Coefficients, `stride` for each output.
    weights: Vec<i32>,
    stride: usize,
}

impl Taps {
    /// Computes the coefficients for the outputs of a side of `from` pixels that becomes `to` pixels long.
    fn new(from: usize, to: usize, filter: Filter) -> Self {
        let scale = from as f64 / to as f64;
        let filter_scale = scale.max(1.0);
        let support = filter.support() * filter_scale;
        let stride = support.ceil() as usize * 2 + 1;
        let mut taps = Self { ranges: Vec::with_capacity(to), weights: vec![0; stride * to], stride };
        let mut exact = vec![0.0; stride];
        for output in 0..to {
            let center = (output as f64 + 0.5) * scale;
            // A cast truncates towards 0, as in C.
            let first = ((center - support + 0.5) as i64).max(0) as usize;
            let end = ((center + support + 0.5) as i64).clamp(0, from as i64) as usize;
            let count = end.saturating_sub(first).min(stride);
            let mut sum = 0.0;
            for (tap, weight) in exact[..count].iter_mut().enumerate() {
                *weight = filter.weight(((tap + first) as f64 - center + 0.5) * (1.0 / filter_scale));
                sum += *weight;
            }
            let rounded = &mut taps.weights[output * stride..][..count];
            for (rounded, weight) in rounded.iter_mut().zip(&exact) {
                let weight = if sum == 0.0 { *weight } else { weight / sum };
                let scaled = weight * f64::from(1 << PRECISION);
                *rounded = if weight < 0.0 { scaled - 0.5 } else { scaled + 0.5 } as i32;
            }
            taps.ranges.push((first, count));
        }
        taps
    }

    fn of(&self, output: usize) -> (usize, &[i32]) {
        let (first, count) = self.ranges[output];
        (first, &self.weights[output * self.stride..][..count])
    }
}

/// Returns the picture with this size, as Pillow's `Image.resize` does for pictures in RGB.
pub fn resample(picture: &Rgb, width: u32, height: u32, filter: Filter) -> Rgb {
    let (from_width, from_height) = (picture.width as usize, picture.height as usize);
    let (to_width, to_height) = (width as usize, height as usize);
    if from_width * from_height * to_width * to_height == 0 {
        return Rgb { width, height, rgb: vec![0; to_width * to_height * 3] };
    }
    let (narrow, low) = (to_width != from_width, to_height != from_height);
    let rgb = match (narrow, low) {
        (false, false) => picture.rgb.clone(),
        (true, false) => across(&picture.rgb, from_width, to_width, filter),
        (false, true) => down(&picture.rgb, from_width * 3, from_height, to_height, filter),
        (true, true) if is_vertical_first([from_width, from_height], [to_width, to_height]) => {
            let rows = down(&picture.rgb, from_width * 3, from_height, to_height, filter);
            across(&rows, from_width, to_width, filter)
        }
        (true, true) => {
            let rows = across(&picture.rgb, from_width, to_width, filter);
            down(&rows, to_width * 3, from_height, to_height, filter)
        }
    };
    Rgb { width, height, rgb }
}

/// Returns true if the vertical pass is the first one: the rows that the picture loses are more than twice the columns.
/// Pillow 13 orders the passes so; before, the horizontal pass was always the first. Found by comparison with it.
fn is_vertical_first([from_width, from_height]: [usize; 2], [to_width, to_height]: [usize; 2]) -> bool {
    to_height < from_height && from_width * 2 + to_height < from_height + to_width * 2
}

/// Resamples each row.
fn across(rgb: &[u8], from: usize, to: usize, filter: Filter) -> Vec<u8> {
    let taps = Taps::new(from, to, filter);
    let mut output = Vec::with_capacity(rgb.len() / from * to);
    for row in rgb.chunks_exact(from * 3) {
        for x in 0..to {
            let (first, weights) = taps.of(x);
            let mut sums = [1 << (PRECISION - 1); 3];
            let pixels = row[first * 3..].chunks_exact(3);
            for (pixel, &weight) in pixels.zip(weights) {
                for (sum, &value) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(value) * weight;
                }
            }
            output.extend(sums.map(clip));
        }
    }
    output
}

/// Resamples each column of `stride` bytes in a row.
fn down(rgb: &[u8], stride: usize, from: usize, to: usize, filter: Filter) -> Vec<u8> {
    let taps = Taps::new(from, to, filter);
    let mut output = Vec::with_capacity(stride * to);
    let mut sums = vec![0; stride];
    for y in 0..to {
        let (first, weights) = taps.of(y);
        sums.fill(1 << (PRECISION - 1));
        for (row, &weight) in rgb[first * stride..].chunks_exact(stride).zip(weights) {
            for (sum, &value) in sums.iter_mut().zip(row) {
                *sum += i32::from(value) * weight;
            }
        }
        output.extend(sums.iter().map(|&sum| clip(sum)));
    }
    output
}

/// Rounds a sum to 8 bits.
fn clip(sum: i32) -> u8 {
    (sum >> PRECISION).clamp(0, 255) as u8
}
