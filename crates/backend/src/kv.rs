//! Encodings of K and V in pages.

use std::ops::Range;

use half::f16;

/// The encoding of K and V in pages. The application chooses it at load; a model does not name one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvDtype {
    /// Half precision.
    #[default]
    F16,
    /// Eight bits and a scale for each [`KV_BLOCK`] elements of a rotated head, see [`quantize_kv`]: about half the bytes
    /// of [`KvDtype::F16`].
    Q8,
    /// Four bits and a scale for each [`KV_BLOCK`] elements of a rotated head, see [`quantize_kv`]: about a quarter of the
    /// bytes of [`KvDtype::F16`].
    Q4,
}

/// Elements of a head that share a scale in quantized pages; a head's last block may have fewer.
pub const KV_BLOCK: usize = 32;

/// Elements of the transforms of [`hadamard`]; the last ones of a head may be shorter.
pub const HADAMARD: usize = 64;

impl KvDtype {
    /// All encodings, the largest first.
    pub const ALL: [Self; 3] = [Self::F16, Self::Q8, Self::Q4];

    /// Returns the name in options and errors.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Q8 => "q8",
            Self::Q4 => "q4",
        }
    }

    /// Returns the bytes of one head of a token's K, or V, without the padding of a backend.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        let scales = head_dim.div_ceil(KV_BLOCK) * size_of::<f16>();
        match self {
            Self::F16 => head_dim * size_of::<f16>(),
            Self::Q8 => head_dim + scales,
            Self::Q4 => head_dim.div_ceil(2) + scales,
        }
    }

    /// Returns true if heads are rotated and then stored as integers with scales.
    pub fn is_quantized(self) -> bool {
        self != Self::F16
    }
}

/// Yields the parts of a head that [`hadamard`] transforms, each of a power of two of elements: as many of
/// [`HADAMARD`] as fit, then smaller ones.
pub fn hadamard_parts(head_dim: usize) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = (head_dim - at).min(HADAMARD);
        let len = 1 << rest.checked_ilog2()?;
        at += len;
        Some(at - len..at)
    })
}

/// Rotates a head: applies the normalized Walsh-Hadamard transform to each of its [`hadamard_parts`]. A second call undoes the
/// first one.
///
/// Quantized pages store rotated heads. A few elements of K are much larger than others and would make their block coarse;
/// the transform distributes them evenly. Rotated queries have the same scores with rotated keys, and rotating a sum of
/// rotated values gives the sum of the values.
///
/// The source is llama.cpp, which transforms K by the largest power of two that divides the head, and V by 64.
pub fn hadamard(head: &mut [f32]) {
    for part in hadamard_parts(head.len()) {
        let part = &mut head[part];
        let mut distance = 1;
        while distance < part.len() {
            for pairs in part.chunks_exact_mut(2 * distance) {
                let (low, high) = pairs.split_at_mut(distance);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            distance *= 2;
        }
        let norm = 1.0 / (part.len() as f32).sqrt();
        part.iter_mut().for_each(|x| *x *= norm);
    }
}

/// Quantizes one block of a rotated head, up to [`KV_BLOCK`] elements, and returns its scale: `x[i] ≈ scale * quants[i]`.
///
/// - [`KvDtype::Q8`]: the scale is `max |x| / 127`, and quants are in `-127..=127`. This is llama.cpp's `q8_0`.
/// - [`KvDtype::Q4`]: the scale is the element of the largest magnitude, the first one of several, divided by -8, and quants are
///   in `-8..=7`. This is llama.cpp's `q4_0`.
///
/// The scale is rounded to f16, to the nearest even one, and is never infinite. Quants are `x * (1 / scale)`, in f32, rounded to
/// the nearest integer, ties to even; llama.cpp rounds against the scale before it is stored. A block whose scale rounds to
/// zero is all zeros. The stored numbers depend on the head of the one token alone.
///
/// # Panics
/// If the slices differ in length, or `dtype` is [`KvDtype::F16`].
pub fn quantize_kv(dtype: KvDtype, x: &[f32], quants: &mut [i8]) -> f16 {
    assert_eq!(x.len(), quants.len());
    let extreme = x.iter().fold(0.0, |extreme: f32, &x| if x.abs() > extreme.abs() { x } else { extreme });
    let (scale, least, most) = match dtype {
        KvDtype::F16 => panic!("half precision has no quants"),
        KvDtype::Q8 => (extreme.abs() / 127.0, -127.0, 127.0),
        KvDtype::Q4 => (extreme / -8.0, -8.0, 7.0),
    };
    let largest = f16::MAX.to_f32();
    let scale = f16::from_f32(scale.clamp(-largest, largest));
    let inverse = if scale.to_f32() == 0.0 { 0.0 } else { 1.0 / scale.to_f32() };
    for (quant, x) in quants.iter_mut().zip(x) {
        *quant = (x * inverse).round_ties_even().clamp(least, most) as i8;
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_rounded_to_the_nearest_step() {
        let x: Vec<f32> = (0..32).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        for (dtype, extreme) in [(KvDtype::Q8, 127), (KvDtype::Q4, 8)] {
            let mut quants = [0; 32];
            let scale = quantize_kv(dtype, &x, &mut quants).to_f32();
            for (&x, quant) in x.iter().zip(quants) {
                // Half a step, and the loss of the largest when the scale is rounded down. With four bits, there is no +8.
                let most = if quant == 7 { 1.01 } else { 0.57 };
                let error = (x - scale * f32::from(quant)).abs();
                assert!(error <= most * scale.abs(), "{dtype:?}: {x} is not {quant} times {scale}");
            }
            assert!(quants.iter().any(|quant| i32::from(quant.unsigned_abs()) == extreme));
        }
    }

    #[test]
    fn rotations_are_orthonormal_and_undo_themselves() {
        let parts = |dim| hadamard_parts(dim).map(|part| part.len()).collect::<Vec<_>>();
        assert_eq!(
            [64, 128, 80, 72, 40, 18].map(parts),
            [vec![64], vec![64, 64], vec![64, 16], vec![64, 8], vec![32, 8], vec![16, 2]]
        );
        for dim in [1, 2, 18, 40, 64, 80, 128, 576] {
            let mut rows: Vec<Vec<f32>> =
                (0..dim).map(|row| (0..dim).map(|i| f32::from(u8::from(i == row))).collect()).collect();
            let unit = rows.clone();
            rows.iter_mut().for_each(|row| hadamard(row));
            for (i, a) in rows.iter().enumerate() {
                for (j, b) in rows.iter().enumerate() {
                    let dot: f32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                    assert!((dot - f32::from(u8::from(i == j))).abs() < 1e-5, "{dim}: rows {i} and {j}");
                }
            }
            rows.iter_mut().for_each(|row| hadamard(row));
            let back = rows.iter().flatten().zip(unit.iter().flatten());
            assert!(back.into_iter().all(|(a, b)| (a - b).abs() < 1e-6), "{dim}");
        }
        let mut head: Vec<f32> = (0..64).map(|i| (i == 3) as u8 as f32).collect();
        hadamard(&mut head);
        assert!(head.iter().all(|x| x.abs() == 0.125), "one large element becomes 64 of one size");
    }

    #[test]
    fn extremes_stay_finite() {
        let quantized = |x: [f32; 2]| {
            let mut quants = [99; 2];
            (quantize_kv(KvDtype::Q8, &x, &mut quants), quants)
        };
        assert_eq!(quantized([0.0, -0.0]), (f16::ZERO, [0, 0]));
        assert_eq!(quantized([1e-8, 0.0]), (f16::ZERO, [0, 0]));
        assert_eq!(quantized([1e9, -3e38]), (f16::MAX, [127, -127]));
        assert_eq!(quantized([f32::INFINITY, 1.0]), (f16::MAX, [127, 0]));
        assert_eq!(quantized([f32::NAN, -127.0]), (f16::ONE, [0, -127]));
        let quantized = |x: [f32; 2]| {
            let mut quants = [99; 2];
            (quantize_kv(KvDtype::Q4, &x, &mut quants), quants)
        };
        assert_eq!(quantized([0.0, -0.0]).1, [0, 0]);
        assert_eq!(quantized([8.0, -8.0]), (-f16::ONE, [-8, 7]));
        assert_eq!(quantized([1e9, -3e38]), (f16::MAX, [7, -8]));
        assert_eq!(quantized([f32::NAN, -8.0]), (f16::ONE, [0, -8]));
    }

    #[test]
    fn half_or_a_quarter_of_the_bytes_and_scales() {
        assert_eq!(KvDtype::ALL.map(|dtype| dtype.head_bytes(64)), [128, 68, 36]);
        assert_eq!(KvDtype::Q8.head_bytes(80), 86);
    }
}
