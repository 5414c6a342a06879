//! Types of stored K and V, and the definition of eight-bit quantization.

use half::f16;

/// Type of stored K and V, chosen at load independent of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvDtype {
    /// Half precision.
    #[default]
    F16,
    /// Eight bits and a scale per [`KV_BLOCK`] elements of a head, see [`quantize_kv`]: about half the bytes.
    Q8,
}

/// Elements of a head that share a scale in [`KvDtype::Q8`]; a head's last block may have fewer.
pub const KV_BLOCK: usize = 32;

impl KvDtype {
    /// The name, as options and errors use it.
    pub fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Q8 => "q8",
        }
    }

    /// Bytes of one head of a token's K, or V, before any padding of the backend's.
    pub fn head_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F16 => head_dim * size_of::<f16>(),
            Self::Q8 => head_dim + head_dim.div_ceil(KV_BLOCK) * size_of::<f16>(),
        }
    }
}

/// Quantizes one block of a head, up to [`KV_BLOCK`] elements, and returns its scale: `x[i] ≈ scale * quants[i]`.
///
/// The scale is `max |x| / 127`, rounded to f16, ties to even; quants are `x * (1 / scale)`, in f32, rounded to the
/// nearest integer, ties to even, and clamped to `-127..=127`. A block whose scale rounds to zero is all zeros, and a
/// scale is never infinite. So the stored data depends only on the head of the one token.
///
/// This is llama.cpp's `q8_0`, except that quants are rounded relative to the stored scale.
///
/// # Panics
/// If the slices differ in length.
pub fn quantize_kv(x: &[f32], quants: &mut [i8]) -> f16 {
    assert_eq!(x.len(), quants.len());
    let largest = x.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
    let scale = f16::from_f32((largest / 127.0).min(f16::MAX.to_f32()));
    let inverse = if scale == f16::ZERO { 0.0 } else { 1.0 / scale.to_f32() };
    for (quant, x) in quants.iter_mut().zip(x) {
        *quant = (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_rounded_to_the_nearest_step() {
        let x: Vec<f32> = (0..32).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        let mut quants = [0; 32];
        let scale = quantize_kv(&x, &mut quants).to_f32();
        for (x, quant) in x.iter().zip(quants) {
            // Half a step, and the loss of the largest value when the scale is rounded down.
            assert!((x - scale * f32::from(quant)).abs() <= 0.57 * scale, "{x} is not {quant} times {scale}");
        }
        assert!(quants.iter().any(|quant| quant.abs() == 127));
    }

    #[test]
    fn extremes_stay_finite() {
        let quantized = |x: [f32; 2]| {
            let mut quants = [99; 2];
            (quantize_kv(&x, &mut quants), quants)
        };
        assert_eq!(quantized([0.0, -0.0]), (f16::ZERO, [0, 0]));
        assert_eq!(quantized([1e-8, 0.0]), (f16::ZERO, [0, 0]));
        assert_eq!(quantized([1e9, -3e38]), (f16::MAX, [127, -127]));
        assert_eq!(quantized([f32::INFINITY, 1.0]), (f16::MAX, [127, 0]));
        assert_eq!(quantized([f32::NAN, -127.0]), (f16::ONE, [0, -127]));
    }

    #[test]
    fn half_the_bytes_and_scales() {
        assert_eq!([KvDtype::F16, KvDtype::Q8].map(|dtype| dtype.head_bytes(64)), [128, 68]);
        assert_eq!(KvDtype::Q8.head_bytes(80), 86);
    }
}
