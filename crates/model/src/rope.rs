//! Rotary position embeddings: every kind of scaling becomes one frequency per rotated pair, and one magnitude.

use std::f64::consts::TAU;

use paguro_backend::{Rope, RopeStyle};

use crate::error::ModelError;

/// Rotary embeddings of a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RopeConfig {
    pub(crate) style: RopeStyle,
    /// Number of rotated elements of a head; even.
    pub(crate) dims: usize,
    /// `theta`, the base of the wavelengths.
    pub(crate) base: f64,
    /// Divisor of positions: the ratio of the context to the trained one. 1 without scaling, or if `factors` has all of
    /// it.
    pub(crate) factor: f64,
    /// YaRN's choice of which pairs `factor` holds for; without it, all.
    pub(crate) yarn: Option<Yarn>,
    /// Divides the frequency of each pair.
    pub(crate) factors: Factors,
    /// Multiplies sine and cosine.
    pub(crate) magnitude: f64,
}

/// Divisors of the frequencies.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Factors {
    /// All one.
    None,
    /// Factors listed in the file, `[dims / 2]`: longrope's, and those that llama.cpp precomputes for Llama 3.
    Listed(Vec<f32>),
    /// Llama 3's rule, with the parameters of Hugging Face's configuration.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        /// Context of the first training.
        original: f64,
    },
}

/// YaRN (arXiv:2309.00071): pairs with more than `beta_fast` rotations within the original context keep their
/// frequency, those with fewer than `beta_slow` are interpolated, with a ramp between them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Yarn {
    pub(crate) beta_fast: f64,
    pub(crate) beta_slow: f64,
    /// Context of the first training.
    pub(crate) original: f64,
    /// True if the ends of the ramp are rounded to whole pairs, as in llama.cpp and nearly always in transformers.
    pub(crate) truncate: bool,
}

/// Range of the factors of a scaling. Real ones are between 1 and 100.
const FACTORS: (f64, f64) = (1e-6, 1e6);

/// Range of a context in tokens.
const CONTEXTS: (f64, f64) = (1.0, 1e12);

impl RopeConfig {
    /// Plain RoPE.
    pub(crate) fn plain(style: RopeStyle, dims: usize, base: f64) -> Self {
        Self { style, dims, base, factor: 1.0, yarn: None, factors: Factors::None, magnitude: 1.0 }
    }

    /// Checks that every number has a meaning for heads of `head_dim` elements.
    ///
    /// # Errors
    /// The first problem.
    pub(crate) fn check(&self, head_dim: usize) -> Result<(), String> {
        if !self.dims.is_multiple_of(2) || self.dims == 0 || self.dims > head_dim {
            return Err(format!(
                "RoPE rotates {} of a head's {head_dim} elements, which has to be an even number of them",
                self.dims
            ));
        }
        let numbers = [self.base, self.factor, self.magnitude];
        if numbers.iter().any(|number| !number.is_finite() || *number <= 0.0) || self.base <= 1.0 {
            let [base, factor, magnitude] = numbers;
            return Err(format!("RoPE has base {base}, scaling factor {factor} and magnitude {magnitude}"));
        }
        let mut scaling = vec![("factor", self.factor, FACTORS)];
        if let Some(yarn) = self.yarn {
            scaling.extend([
                ("original context", yarn.original, CONTEXTS),
                ("beta_fast", yarn.beta_fast, FACTORS),
                ("beta_slow", yarn.beta_slow, FACTORS),
            ]);
        }
        if let Factors::Llama3 { factor, low_freq_factor, high_freq_factor, original } = self.factors {
            scaling.extend([
                ("factor", factor, FACTORS),
                ("original context", original, CONTEXTS),
                ("low_freq_factor", low_freq_factor, FACTORS),
                ("high_freq_factor", high_freq_factor, (low_freq_factor, FACTORS.1)),
            ]);
        }
        for (name, value, (least, most)) in scaling {
            // A NaN is in no range.
            if !(least..=most).contains(&value) {
                return Err(format!("RoPE scaling has {name} {value}, expected {least} to {most}"));
            }
        }
        let frequencies = (0..self.dims / 2).map(|pair| self.frequency(pair) as f32);
        match frequencies.into_iter().find(|frequency| !(f32::MIN_POSITIVE..=1e6).contains(frequency)) {
            Some(frequency) => Err(format!("RoPE has a frequency of {frequency}")),
            None => Ok(()),
        }
    }

    /// Returns the numbers that a backend needs.
    pub(crate) fn lower(&self) -> Rope {
        let frequencies = (0..self.dims / 2).map(|pair| self.frequency(pair) as f32).collect();
        Rope { style: self.style, frequencies, axes: Vec::new(), magnitude: self.magnitude as f32 }
    }

    pub(crate) fn frequency(&self, pair: usize) -> f64 {
        let plain = self.base.powf(-2.0 * pair as f64 / self.dims as f64) / self.divisor(pair);
        let interpolated = plain / self.factor;
        match self.yarn {
            None => interpolated,
            Some(yarn) => {
                let kept = yarn.kept(pair, self.dims, self.base);
                interpolated * (1.0 - kept) + plain * kept
            }
        }
    }

    fn divisor(&self, pair: usize) -> f64 {
        match &self.factors {
            Factors::None => 1.0,
            Factors::Listed(factors) => factors[pair].into(),
            &Factors::Llama3 { factor, low_freq_factor, high_freq_factor, original } => {
                let wavelength = TAU * self.base.powf(2.0 * pair as f64 / self.dims as f64);
                if wavelength < original / high_freq_factor {
                    1.0
                } else if wavelength > original / low_freq_factor {
                    factor
                } else {
                    let smooth =
                        (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    1.0 / ((1.0 - smooth) / factor + smooth)
                }
            }
        }
    }
}

impl Yarn {
    /// Returns the weight of the pair's own frequency: 1 for fast pairs, 0 for slow ones.
    fn kept(&self, pair: usize, dims: usize, base: f64) -> f64 {
        // The pair with `rotations` rotations within the original context.
        let pair_at =
            |rotations: f64| dims as f64 * (self.original / (rotations * TAU)).ln() / (2.0 * base.ln());
        let (mut low, mut high) = (pair_at(self.beta_fast), pair_at(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(dims as f64 - 1.0));
        1.0 - ((pair as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0)
    }

    /// YaRN's own magnitude for a context that is `factor` times longer.
    pub(crate) fn magnitude(factor: f64, scale: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
    }
}

/// Checks the context of the first training, by which longrope chooses between its factors.
///
/// # Errors
/// A number that is no context.
pub(crate) fn check_original(original: f64) -> Result<(), ModelError> {
    let (least, most) = CONTEXTS;
    if (least..=most).contains(&original) {
        return Ok(());
    }
    Err(ModelError::Config(format!(
        "RoPE scaling has original context {original}, expected {least} to {most}"
    )))
}

/// Longrope's magnitude (arXiv:2402.13753) for a context that is `factor` times longer than the original one.
pub(crate) fn longrope_magnitude(factor: f64, original: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;

    /// Prints frequencies relative to unscaled ones.
    #[track_caller]
    fn check(rope: RopeConfig, expected: Expect) {
        let plain = RopeConfig::plain(rope.style, rope.dims, rope.base).lower();
        let scaled = rope.lower();
        let ratios = scaled.frequencies.iter().zip(&plain.frequencies).map(|(s, p)| format!("{:.4}", s / p));
        let ratios: Vec<_> = ratios.collect();
        expected.assert_eq(&format!("{} magnitude {:.4}", ratios.join(" "), scaled.magnitude));
    }

    fn plain(dims: usize, base: f64) -> RopeConfig {
        RopeConfig::plain(RopeStyle::HalfSplit, dims, base)
    }

    #[test]
    fn plain_frequencies_fall_from_one_by_powers_of_the_base() {
        let rope = plain(8, 10000.0).lower();
        assert_eq!(rope.frequencies, [1.0, 0.1, 0.01, 0.001]);
    }

    #[test]
    fn linear_scaling_slows_all_pairs() {
        check(
            RopeConfig { factor: 4.0, ..plain(8, 10000.0) },
            expect!["0.2500 0.2500 0.2500 0.2500 magnitude 1.0000"],
        );
    }

    // The settings of Llama 3.2 1B. Expected values here and below: the formulas of transformers'
    // modeling_rope_utils.py, evaluated in Python.
    #[test]
    fn llama3_scaling_slows_long_wavelengths() {
        let factors =
            Factors::Llama3 { factor: 32.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original: 8192.0 };
        check(
            RopeConfig { factors, ..plain(64, 500000.0) },
            expect![
                "1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 0.6056 0.3037 0.1034 0.0312 0.0312 0.0312 0.0312 0.0312 0.0312 0.0312 0.0312 0.0312 0.0312 0.0312 0.0312 0.0312 0.0312 magnitude 1.0000"
            ],
        );
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_interpolates_slow_ones() {
        let yarn = Yarn { beta_fast: 32.0, beta_slow: 1.0, original: 32768.0, truncate: true };
        let magnitude = Yarn::magnitude(4.0, 1.0);
        check(
            RopeConfig { factor: 4.0, yarn: Some(yarn), magnitude, ..plain(64, 1e6) },
            expect![
                "1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 1.0000 0.9167 0.8333 0.7500 0.6667 0.5833 0.5000 0.4167 0.3333 0.2500 0.2500 0.2500 0.2500 0.2500 0.2500 0.2500 0.2500 0.2500 0.2500 0.2500 0.2500 magnitude 1.1386"
            ],
        );
    }

    #[test]
    fn numbers_without_a_meaning_are_refused() {
        let llama3 = |factor, low_freq_factor, high_freq_factor, original| RopeConfig {
            factors: Factors::Llama3 { factor, low_freq_factor, high_freq_factor, original },
            ..plain(8, 10000.0)
        };
        let yarn = |beta_fast, original| RopeConfig {
            factor: 4.0,
            yarn: Some(Yarn { beta_fast, beta_slow: 1.0, original, truncate: true }),
            ..plain(8, 10000.0)
        };
        assert_eq!(llama3(32.0, 1.0, 4.0, 8192.0).check(8), Ok(()));
        assert_eq!(yarn(32.0, 32768.0).check(8), Ok(()));
        for wrong in [
            llama3(1e300, 1.0, 4.0, 8192.0),
            llama3(32.0, 1.0, 4.0, 0.0),
            llama3(32.0, 4.0, 1.0, 8192.0),
            llama3(f64::NAN, 1.0, 4.0, 8192.0),
            yarn(32.0, 0.0),
            yarn(f64::INFINITY, 32768.0),
            yarn(32.0, -1.0),
            RopeConfig { factor: 1e300, ..plain(8, 10000.0) },
            RopeConfig { magnitude: f64::NAN, ..plain(8, 10000.0) },
            RopeConfig { factors: Factors::Listed(vec![1e-38; 4]), ..plain(8, 10000.0) },
            plain(8, 1e300),
            plain(8, 0.5),
            plain(7, 10000.0),
            plain(16, 10000.0),
        ] {
            assert!(wrong.check(8).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn longrope_divides_by_the_listed_factors() {
        let factors = Factors::Listed(vec![1.0, 2.0, 4.0, 8.0]);
        let magnitude = longrope_magnitude(32.0, 4096.0);
        check(
            RopeConfig { factors, magnitude, ..plain(8, 10000.0) },
            expect!["1.0000 0.5000 0.2500 0.1250 magnitude 1.1902"],
        );
    }
}
