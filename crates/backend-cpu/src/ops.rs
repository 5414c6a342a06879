//! What happens to one row between the products: norms, rotation, activations. Vectors throughout; sums run in one
//! fixed order, so that a row gives the same bits wherever it stands.

use std::ops::Range;

use half::f16;
use paguro_backend::{Activation, Rope, RopeStyle};

use crate::{
    isa::simd_kernels,
    simd::{self, LANES, Simd},
};

simd_kernels! {
    /// Operations on rows, for one instruction set.
    pub struct RowKernels {
        /// `out = x / sqrt(mean(x²) + eps) * weight`
        fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = rms_norm;
        /// `x += y`
        fn add(x: &mut [f32], y: &[f32]) = add;
        /// `x = x * factor`
        fn scale(x: &mut [f32], factor: f32) = scale;
        /// `gate = activation(gate) * up`
        fn activate(gate: &mut [f32], up: &[f32], activation: Activation) = activate;
        /// `x = cap * tanh(x / cap)`
        fn soft_cap(x: &mut [f32], cap: f32) = soft_cap;
        /// To half precision, to nearest even; what is too large becomes the largest finite number of its sign, and
        /// what is not a number becomes some number.
        fn round_f16(x: &[f32], out: &mut [f16]) = round_f16;
        /// Rotates one head in place; `turns` are cosines, then sines, of each pair.
        fn rotate(head: &mut [f32], turns: &[f32], style: RopeStyle) = rotate;
    }
}

/// Replaces every vector of `$x` by an expression of it; the last one is padded with zeros. A macro, because a
/// closure that holds vector operations is a function without their target features, and they are calls there
/// unless the compiler happens to inline it.
macro_rules! map {
    ($s:ident, $x:expr, |$a:ident| $result:expr) => {{
        let (vectors, rest) = $x.as_chunks_mut::<LANES>();
        for x in vectors {
            let $a = $s.load(x);
            $s.store($result, x);
        }
        if !rest.is_empty() {
            let $a = $s.load_part(rest);
            $s.store_part($result, rest);
        }
    }};
}

/// As [`map`], with a second operand of the same length.
macro_rules! zip {
    ($s:ident, $x:expr, $y:expr, |$a:ident, $b:ident| $result:expr) => {{
        assert_eq!($x.len(), $y.len());
        let (vectors, rest) = $x.as_chunks_mut::<LANES>();
        let (others, other_rest) = $y.as_chunks::<LANES>();
        for (x, y) in vectors.iter_mut().zip(others) {
            let ($a, $b) = ($s.load(x), $s.load(y));
            $s.store($result, x);
        }
        if !rest.is_empty() {
            let ($a, $b) = ($s.load_part(rest), $s.load_part(other_rest));
            $s.store_part($result, rest);
        }
    }};
}

/// See [`RowKernels::rms_norm`]. The mean is of squares summed in 16 lanes, then across.
#[inline(always)]
fn rms_norm<S: Simd>(s: S, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let (vectors, rest) = x.as_chunks::<LANES>();
    let mut squares = s.zero();
    for x in vectors {
        let x = s.load(x);
        squares = s.fma(x, x, squares);
    }
    let x_rest = s.load_part(rest);
    squares = s.fma(x_rest, x_rest, squares);
    let mean = s.reduce_sum(squares) / x.len() as f32;
    let factor = s.splat(1.0 / (mean + eps).sqrt());
    out.copy_from_slice(x);
    zip!(s, out, weight, |x, weight| s.mul(s.mul(x, factor), weight));
}

#[inline(always)]
fn add<S: Simd>(s: S, x: &mut [f32], y: &[f32]) {
    zip!(s, x, y, |a, b| s.add(a, b));
}

#[inline(always)]
fn scale<S: Simd>(s: S, x: &mut [f32], factor: f32) {
    let factor = s.splat(factor);
    map!(s, x, |a| s.mul(a, factor));
}

#[inline(always)]
fn activate<S: Simd>(s: S, gate: &mut [f32], up: &[f32], activation: Activation) {
    match activation {
        Activation::Silu => zip!(s, gate, up, |a, b| s.mul(simd::silu(s, a), b)),
        Activation::GeluTanh => zip!(s, gate, up, |a, b| s.mul(gelu_tanh(s, a), b)),
    }
}

/// `0.5 x (1 + tanh(u))` with `u = sqrt(2/π) (x + 0.044715 x³)`, which is `x * sigmoid(2u)`.
#[inline(always)]
fn gelu_tanh<S: Simd>(s: S, x: S::F32) -> S::F32 {
    const TWICE: f32 = 1.595_769_2; // 2 sqrt(2/π)
    let cubic = s.fma(s.mul(s.splat(0.044_715), s.mul(x, x)), x, x);
    s.mul(x, simd::sigmoid(s, s.mul(cubic, s.splat(TWICE))))
}

#[inline(always)]
fn soft_cap<S: Simd>(s: S, x: &mut [f32], cap: f32) {
    let cap = s.splat(cap);
    map!(s, x, |a| s.mul(simd::tanh(s, s.div(a, cap)), cap));
}

/// See [`RowKernels::round_f16`].
#[inline(always)]
fn round_f16<S: Simd>(s: S, x: &[f32], out: &mut [f16]) {
    let (vectors, rest) = x.as_chunks::<LANES>();
    let (outs, out_rest) = out.as_chunks_mut::<LANES>();
    assert!(vectors.len() == outs.len() && rest.is_empty() && out_rest.is_empty());
    let largest = f16::MAX.to_f32();
    for (x, out) in vectors.iter().zip(outs) {
        let x = s.min(s.max(s.load(x), s.splat(-largest)), s.splat(largest));
        s.to_f16(x, out);
    }
}

#[inline(always)]
fn rotate<S: Simd>(_: S, head: &mut [f32], turns: &[f32], style: RopeStyle) {
    let (cos, sin) = turns.split_at(turns.len() / 2);
    let pairs = cos.len();
    match style {
        RopeStyle::Interleaved => {
            for ((pair, &cos), &sin) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                let [x, y] = *pair;
                *pair = [x * cos - y * sin, y * cos + x * sin];
            }
        }
        RopeStyle::HalfSplit => {
            let (low, rest) = head.split_at_mut(pairs);
            for (((x, y), &cos), &sin) in low.iter_mut().zip(rest).zip(cos).zip(sin) {
                (*x, *y) = (*x * cos - *y * sin, *y * cos + *x * sin);
            }
        }
    }
}

/// Cosines, then sines, of every pair at one position, `[2 * pairs]`: computed in f64 once per row, used by all
/// layers.
pub fn turns(rope: &Rope, position: usize, out: &mut [f32]) {
    let (cosines, sines) = out.split_at_mut(rope.frequencies.len());
    for ((&frequency, cos), sin) in rope.frequencies.iter().zip(cosines).zip(sines) {
        let (s, c) = (position as f64 * f64::from(frequency)).sin_cos();
        *cos = (c * f64::from(rope.magnitude)) as f32;
        *sin = (s * f64::from(rope.magnitude)) as f32;
    }
}

/// The part of `range` that falls into a list of `len` that begins at `offset`, relative to it. Threads share the
/// groups of several matrices as one range.
pub fn part(range: &Range<usize>, offset: usize, len: usize) -> Range<usize> {
    let clamp = |at: usize| at.saturating_sub(offset).min(len);
    clamp(range.start)..clamp(range.end)
}
