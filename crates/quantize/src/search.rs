//! Searches for the scale of a block: the integer codes and the scale that together have the least weighted squared error.
//!
//! A search tries several scales, rounds the values with each, and solves the least-squares problem for the rounded codes. The
//! number of trials and their order are those of ggml-quants.c, so that files are as good as those of llama.cpp.

/// Largest magnitude of a block that counts as zero.
const ZERO: f32 = 1e-15;

/// Rounds to the nearest integer, ties to even. Values beyond four million saturate.
pub(crate) fn nearest(x: f32) -> i32 {
    // In this range, the last bit of an f32 is worth one.
    const SHIFT: f32 = 12_582_912.0;
    let shifted = x.clamp(-4_000_000.0, 4_000_000.0) + SHIFT;
    (shifted.to_bits() as i32 & 0x007f_ffff) - 0x0040_0000
}

/// Returns the value of largest magnitude, the first of several.
pub(crate) fn extreme(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |extreme: f32, &x| if x.abs() > extreme.abs() { x } else { extreme })
}

/// Weighted sums of products of values and codes, from which the best scale for the codes follows.
#[derive(Clone, Copy, Default)]
struct Fit {
    /// Sum of `weight * value * code`.
    cross: f32,
    /// Sum of `weight * code * code`.
    square: f32,
}

impl Fit {
    fn add(&mut self, weight: f32, value: f32, code: f32) {
        self.cross += weight * value * code;
        self.square += weight * code * code;
    }

    fn scale(self) -> f32 {
        if self.square > 0.0 { self.cross / self.square } else { 0.0 }
    }
}

/// Finds a scale for codes from `-half` to `half - 1`, and stores `code + half`. Without `weights`, each value's weight is its
/// square.
pub(crate) fn symmetric(values: &[f32], weights: Option<&[f32]>, half: i32, codes: &mut [u8]) -> f32 {
    let largest = extreme(values);
    if largest.abs() < ZERO {
        codes.fill(0);
        return 0.0;
    }
    let code = |inverse: f32, x: f32| nearest(inverse * x).clamp(-half, half - 1);
    let fit = |inverse: f32| {
        let mut fit = Fit::default();
        for (i, &x) in values.iter().enumerate() {
            fit.add(weights.map_or(x * x, |weights| weights[i]), x, code(inverse, x) as f32);
        }
        fit
    };
    let mut best_inverse = -half as f32 / largest;
    let first = fit(best_inverse);
    let mut scale = first.scale();
    let mut best = scale * first.cross;
    for step in (-9..=9).filter(|&step| step != 0) {
        let inverse = -(half as f32 + 0.1 * step as f32) / largest;
        let tried = fit(inverse);
        if tried.square > 0.0 && tried.cross * tried.cross > best * tried.square {
            scale = tried.scale();
            best = scale * tried.cross;
            best_inverse = inverse;
        }
    }
    for (stored, &x) in codes.iter_mut().zip(values) {
        *stored = (code(best_inverse, x) + half) as u8;
    }
    scale
}

/// As [`symmetric`] with the squares of values as weights, but improves one code after the other instead of trying scales.
pub(crate) fn symmetric_by_descent(values: &[f32; 16], half: i32, codes: &mut [u8; 16]) -> f32 {
    let largest = extreme(values);
    if largest.abs() < ZERO {
        codes.fill(0);
        return 0.0;
    }
    let inverse = -half as f32 / largest;
    let mut signed = values.map(|x| nearest(inverse * x).clamp(-half, half - 1));
    let mut fit = Fit::default();
    for (&x, &code) in values.iter().zip(&signed) {
        fit.add(x * x, x, code as f32);
    }
    improve(values, &values.map(|x| x * x), &mut signed, -half..=half - 1, &mut fit, |without| {
        without.cross > 0.0
    });
    for (stored, code) in codes.iter_mut().zip(signed) {
        *stored = (code + half) as u8;
    }
    fit.scale()
}

/// Changes single codes while that lowers the error, in at most five passes. `may` gets the sums without the code in question.
fn improve(
    values: &[f32],
    weights: &[f32],
    codes: &mut [i32],
    range: std::ops::RangeInclusive<i32>,
    fit: &mut Fit,
    may: impl Fn(Fit) -> bool,
) {
    for _ in 0..5 {
        let mut changed = false;
        for ((&x, &weight), code) in values.iter().zip(weights).zip(codes.iter_mut()) {
            let old = *code as f32;
            let mut other =
                Fit { cross: fit.cross - weight * x * old, square: fit.square - weight * old * old };
            if !may(other) {
                continue;
            }
            let new = nearest(x * other.square / other.cross).clamp(*range.start(), *range.end());
            if new == *code {
                continue;
            }
            other.add(weight, x, new as f32);
            let better = other.cross * other.cross * fit.square > fit.cross * fit.cross * other.square;
            if other.square > 0.0 && better {
                (*code, *fit) = (new, other);
                changed = true;
            }
        }
        if !changed {
            break;
        }
    }
}

/// Inverse scales that [`affine`] tries: `levels + from + step * n`, divided by the range of the values, for `n` from 0 to `steps`.
#[derive(Clone, Copy)]
pub(crate) struct Trials {
    pub(crate) from: f32,
    pub(crate) step: f32,
    pub(crate) steps: i32,
    /// True if the sum of absolute errors decides, and not that of squares.
    pub(crate) absolute: bool,
}

/// The trials of all formats where an importance matrix gives the weights.
pub(crate) const WEIGHTED: Trials = Trials { from: -0.9, step: 0.05, steps: 36, absolute: false };

/// Finds a scale and a minimum for codes from 0 to `levels`: `value = scale * code - minimum`. The minimum is never negative.
pub(crate) fn affine<const N: usize>(
    values: &[f32; N],
    weights: &[f32; N],
    levels: i32,
    trials: Trials,
    codes: &mut [u8; N],
) -> (f32, f32) {
    let (mut low, mut high) = (values[0], values[0]);
    let (mut sum_weights, mut sum_values) = (weights[0], weights[0] * values[0]);
    for (&x, &weight) in values.iter().zip(weights).skip(1) {
        low = low.min(x);
        high = high.max(x);
        sum_weights += weight;
        sum_values += weight * x;
    }
    low = low.min(0.0);
    if high <= low {
        codes.fill(0);
        return (0.0, -low);
    }
    let encode = |inverse: f32, low: f32, codes: &mut [u8; N]| {
        for (code, &x) in codes.iter_mut().zip(values) {
            *code = nearest(inverse * (x - low)).clamp(0, levels) as u8;
        }
    };
    let error = |codes: &[u8; N], scale: f32, minimum: f32| {
        let mut error = 0.0;
        for ((&code, &x), &weight) in codes.iter().zip(values).zip(weights) {
            let difference = scale * f32::from(code) + minimum - x;
            error += weight * if trials.absolute { difference.abs() } else { difference * difference };
        }
        error
    };
    let inverse = levels as f32 / (high - low);
    let mut scale = 1.0 / inverse;
    encode(inverse, low, codes);
    let mut best = error(codes, scale, low);
    let mut tried = [0; N];
    for step in 0..=trials.steps {
        // Codes count from the best minimum so far.
        let inverse = (trials.from + trials.step * step as f32 + levels as f32) / (high - low);
        encode(inverse, low, &mut tried);
        let (mut sum_codes, mut sum_squares, mut cross) = (0.0, 0.0, 0.0);
        for ((&code, &x), &weight) in tried.iter().zip(values).zip(weights) {
            let code = f32::from(code);
            sum_codes += weight * code;
            sum_squares += weight * code * code;
            cross += weight * code * x;
        }
        let determinant = sum_weights * sum_squares - sum_codes * sum_codes;
        if determinant <= 0.0 || determinant.is_nan() {
            continue;
        }
        let mut tried_scale = (sum_weights * cross - sum_values * sum_codes) / determinant;
        let mut tried_low = (sum_squares * sum_values - sum_codes * cross) / determinant;
        if tried_low > 0.0 {
            (tried_scale, tried_low) = (cross / sum_squares, 0.0);
        }
        let tried_error = error(&tried, tried_scale, tried_low);
        if tried_error < best {
            *codes = tried;
            (best, scale, low) = (tried_error, tried_scale, tried_low);
        }
    }
    (scale, -low)
}

/// Finds a scale for values that are not negative and codes from 0 to `levels`: the scales or minima of a super-block.
pub(crate) fn positive<const N: usize>(
    values: &[f32; N],
    weights: &[f32; N],
    levels: i32,
    codes: &mut [u8; N],
) -> f32 {
    let largest = values.iter().fold(0.0f32, |largest, &x| largest.max(x));
    if largest < ZERO {
        codes.fill(0);
        return 0.0;
    }
    let encode = |inverse: f32| values.map(|x| nearest(inverse * x).clamp(0, levels));
    let error = |inverse: f32| {
        let (codes, scale) = (encode(inverse), 1.0 / inverse);
        let mut error = 0.0;
        for ((&x, &weight), code) in values.iter().zip(weights).zip(codes) {
            let difference = x - scale * code as f32;
            error += weight * difference * difference;
        }
        error
    };
    let mut inverse = levels as f32 / largest;
    let mut best = error(inverse);
    for step in (-4..=4).filter(|&step| step != 0) {
        let tried = (0.1 * step as f32 + levels as f32) / largest;
        let tried_error = error(tried);
        if tried_error < best {
            (best, inverse) = (tried_error, tried);
        }
    }
    let mut found = encode(inverse);
    let mut fit = Fit::default();
    for ((&x, &weight), &code) in values.iter().zip(weights).zip(&found) {
        fit.add(weight, x, code as f32);
    }
    improve(values, weights, &mut found, 0..=levels, &mut fit, |without| {
        without.cross > 0.0 && without.square > 0.0
    });
    *codes = found.map(|code| code as u8);
    fit.scale()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_goes_to_even_and_saturates() {
        let cases =
            [(0.5, 0), (1.5, 2), (-0.5, 0), (-2.5, -2), (2.6, 3), (1e30, 4_000_000), (-1e30, -4_000_000)];
        for (x, expected) in cases {
            assert_eq!(nearest(x), expected, "{x}");
        }
    }

    #[test]
    fn exact_codes_are_found() {
        let values: [f32; 16] = std::array::from_fn(|i| 0.25 * (i as f32 - 8.0));
        let mut codes = [0; 16];
        assert_eq!(symmetric(&values, None, 8, &mut codes), 0.25);
        assert_eq!(codes, std::array::from_fn(|i| i as u8));
        let weights = [1.0; 16];
        let trials = Trials { absolute: false, ..WEIGHTED };
        let (scale, minimum) = affine(&values, &weights, 15, trials, &mut codes);
        assert!((scale - 0.25).abs() < 1e-6 && (minimum - 2.0).abs() < 1e-6, "{scale} {minimum}");
        let values: [f32; 16] = std::array::from_fn(|i| 0.5 * i as f32);
        assert!((positive(&values, &weights, 15, &mut codes) - 0.5).abs() < 1e-6);
    }

    #[test]
    fn blocks_of_zeros_have_no_scale() {
        let mut codes = [1; 16];
        assert_eq!(symmetric(&[0.0; 16], None, 4, &mut codes), 0.0);
        assert_eq!(symmetric_by_descent(&[0.0; 16], 4, &mut codes), 0.0);
        assert_eq!(affine(&[0.0; 16], &[1.0; 16], 3, WEIGHTED, &mut codes), (0.0, 0.0));
        assert_eq!(positive(&[0.0; 16], &[1.0; 16], 15, &mut codes), 0.0);
    }
}
