//! Operations on rows between matmuls: norms, RoPE, activations. They are vectorized; sums have one fixed order, so
//! that results are independent of a row's position.

#[cfg(test)]
mod tests;

use std::ops::Range;

use half::f16;
use paguro_backend::{AXES, Activation, HADAMARD, KV_BLOCK, KvDtype, Rope, RopeStyle, hadamard_parts};

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
        /// `x = x * y`
        fn multiply(x: &mut [f32], y: &[f32]) = multiply;
        /// `out = (x - mean(x)) / sqrt(variance(x) + eps) * weight`
        fn layer_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = layer_norm;
        /// `x += y * factor`
        fn add_scaled(x: &mut [f32], y: &[f32], factor: f32) = add_scaled;
        /// `x = x * factor`
        fn scale(x: &mut [f32], factor: f32) = scale;
        /// `gate = activation(gate) * up`
        fn activate_gate(gate: &mut [f32], up: &[f32], activation: Activation) = activate_gate;
        /// `x = activation(x)`
        fn activate(x: &mut [f32], activation: Activation) = activate;
        /// `x = cap * tanh(x / cap)`
        fn soft_cap(x: &mut [f32], cap: f32) = soft_cap;
        /// Converts to half precision, to nearest even. Values out of range become the largest finite number of their
        /// sign, and NaN becomes an arbitrary number.
        fn round_f16(x: &[f32], out: &mut [f16]) = round_f16;
        /// Quantizes block by block, as [`paguro_backend::quantize_kv`] defines it; NaN becomes an
        /// arbitrary number.
        fn quantize_kv(dtype: KvDtype, x: &[f32], scales: &mut [f16], quants: &mut [i8]) = quantize_kv;
        /// Transforms a head, as [`paguro_backend::hadamard`] does, to the bit.
        fn hadamard(head: &mut [f32]) = hadamard;
        /// Applies RoPE to one head in place; `rope_row` has the cosines, then the sines, of each pair.
        fn rotate(head: &mut [f32], rope_row: &[f32], style: RopeStyle) = rotate;
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

/// Like [`map`], with a second operand of the same length.
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
fn multiply<S: Simd>(s: S, x: &mut [f32], y: &[f32]) {
    zip!(s, x, y, |a, b| s.mul(a, b));
}

#[inline(always)]
fn scale<S: Simd>(s: S, x: &mut [f32], factor: f32) {
    let factor = s.splat(factor);
    map!(s, x, |a| s.mul(a, factor));
}

#[inline(always)]
fn add_scaled<S: Simd>(s: S, x: &mut [f32], y: &[f32], factor: f32) {
    let factor = s.splat(factor);
    zip!(s, x, y, |a, b| s.fma(b, factor, a));
}

/// See [`RowKernels::layer_norm`]. The mean is summed as the squares of [`rms_norm`] are.
#[inline(always)]
fn layer_norm<S: Simd>(s: S, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let (vectors, rest) = x.as_chunks::<LANES>();
    let mut sum = s.load_part(rest);
    for x in vectors {
        sum = s.add(sum, s.load(x));
    }
    let mean = s.splat(s.reduce_sum(sum) / x.len() as f32);
    out.copy_from_slice(x);
    map!(s, out, |x| s.sub(x, mean));
    let mut squares = s.zero();
    let (vectors, rest) = out.as_chunks::<LANES>();
    for x in vectors {
        let x = s.load(x);
        squares = s.fma(x, x, squares);
    }
    let x_rest = s.load_part(rest);
    squares = s.fma(x_rest, x_rest, squares);
    let factor = s.splat(1.0 / (s.reduce_sum(squares) / x.len() as f32 + eps).sqrt());
    zip!(s, out, weight, |x, weight| s.mul(s.mul(x, factor), weight));
}

#[inline(always)]
fn activate_gate<S: Simd>(s: S, gate: &mut [f32], up: &[f32], activation: Activation) {
    match activation {
        Activation::Silu => zip!(s, gate, up, |a, b| s.mul(simd::silu(s, a), b)),
        Activation::GeluTanh => zip!(s, gate, up, |a, b| s.mul(gelu_tanh(s, a), b)),
        Activation::Gelu => zip!(s, gate, up, |a, b| s.mul(gelu(s, a), b)),
        Activation::Relu2 => zip!(s, gate, up, |a, b| s.mul(relu2(s, a), b)),
        Activation::ClampedSwiglu { alpha, limit } => {
            let (alpha, high, low, one) = (s.splat(alpha), s.splat(limit), s.splat(-limit), s.splat(1.0));
            zip!(s, gate, up, |a, b| {
                // The limits are the first operands so that NaN is preserved.
                let a = s.min(high, a);
                let b = s.min(high, s.max(low, b));
                s.mul(s.mul(a, simd::sigmoid(s, s.mul(alpha, a))), s.add(b, one))
            });
        }
    }
}

#[inline(always)]
fn activate<S: Simd>(s: S, x: &mut [f32], activation: Activation) {
    match activation {
        Activation::Silu => map!(s, x, |a| simd::silu(s, a)),
        Activation::GeluTanh => map!(s, x, |a| gelu_tanh(s, a)),
        Activation::Gelu => map!(s, x, |a| gelu(s, a)),
        Activation::Relu2 => map!(s, x, |a| relu2(s, a)),
        Activation::ClampedSwiglu { alpha: _, limit: _ } => {
            unreachable!("a checked program has gates for it")
        }
    }
}

/// `0.5 x (1 + tanh(u))` with `u = sqrt(2/π) (x + 0.044715 x³)`, which is `x * sigmoid(2u)`.
#[inline(always)]
fn gelu_tanh<S: Simd>(s: S, x: S::F32) -> S::F32 {
    const TWICE: f32 = 1.595_769_2; // 2 sqrt(2/π)
    let cubic = s.fma(s.mul(s.splat(0.044_715), s.mul(x, x)), x, x);
    s.mul(x, simd::sigmoid(s, s.mul(cubic, s.splat(TWICE))))
}

/// `0.5 x (1 + erf(x / sqrt(2)))`, with erf as Abramowitz and Stegun approximate it in 7.1.26: off by at most 1.5e-7.
#[inline(always)]
fn gelu<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let z = s.mul(s.abs(x), s.splat(std::f32::consts::FRAC_1_SQRT_2));
    let one = s.splat(1.0);
    let t = s.div(one, s.fma(s.splat(0.327_591_1), z, one));
    let mut p = s.splat(1.061_405_4);
    for c in [-1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6] {
        p = s.fma(p, t, s.splat(c));
    }
    // erfc(z) = p t exp(-z²), and half of it times x.
    let erfc = s.mul(s.mul(p, t), simd::exp(s, s.mul(s.sub(s.zero(), z), z)));
    let tail = s.mul(s.mul(x, s.splat(0.5)), erfc);
    s.select_lt(x, s.zero(), tail, s.sub(x, tail))
}

/// `max(x, 0)²`; NaN is preserved.
#[inline(always)]
fn relu2<S: Simd>(s: S, x: S::F32) -> S::F32 {
    s.mul(x, s.max(x, s.zero()))
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
    assert!(vectors.len() == outs.len() && rest.len() == out_rest.len());
    let (least, largest) = (s.splat(-65504.0), s.splat(65504.0));
    for (x, out) in vectors.iter().zip(outs) {
        s.to_f16(s.min(s.max(s.load(x), least), largest), out);
    }
    if !rest.is_empty() {
        let mut last = [f16::ZERO; LANES];
        s.to_f16(s.min(s.max(s.load_part(rest), least), largest), &mut last);
        out_rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// See [`RowKernels::quantize_kv`].
#[inline(always)]
fn quantize_kv<S: Simd>(s: S, dtype: KvDtype, x: &[f32], scales: &mut [f16], quants: &mut [i8]) {
    assert!(scales.len() == x.len().div_ceil(KV_BLOCK) && quants.len() == x.len());
    let is_q4 = dtype == KvDtype::Q4;
    let (least, most) = if is_q4 { (-8.0, 7.0) } else { (-127.0, 127.0) };
    let (least, most) = (s.splat(least), s.splat(most));
    let largest_scale = f16::MAX.to_f32();
    for ((x, scale), quants) in x.chunks(KV_BLOCK).zip(scales).zip(quants.chunks_mut(KV_BLOCK)) {
        let (low, high) = x.split_at(x.len().min(LANES));
        let (low, high) = (s.load_part(low), s.load_part(high));
        let magnitude = s.reduce_max(s.max(s.abs(low), s.abs(high)));
        let exact = if is_q4 {
            // The sign of the first element of that magnitude decides.
            let is_positive = x.iter().find(|x| x.abs() == magnitude).is_some_and(|&x| x > 0.0);
            if is_positive { magnitude / -8.0 } else { magnitude / 8.0 }
        } else {
            magnitude / 127.0
        };
        *scale = f16::from_f32(exact.clamp(-largest_scale, largest_scale));
        let stored = scale.to_f32();
        let inverse = s.splat(if stored == 0.0 { 0.0 } else { 1.0 / stored });
        for (x, quants) in [low, high].into_iter().zip(quants.chunks_mut(LANES)) {
            let mut lanes = [0; LANES];
            s.store_i8(s.to_i32(s.min(s.max(s.mul(x, inverse), least), most)), &mut lanes);
            quants.copy_from_slice(&lanes[..quants.len()]);
        }
    }
}

/// See [`RowKernels::hadamard`].
#[inline(always)]
fn hadamard<S: Simd>(s: S, head: &mut [f32]) {
    for part in hadamard_parts(head.len()) {
        let part = &mut head[part];
        let (len, count) = (part.len(), part.len().div_ceil(LANES));
        let mut x = [s.zero(); HADAMARD / LANES];
        for (x, part) in x.iter_mut().zip(part.chunks(LANES)) {
            *x = s.load_part(part);
        }
        for x in &mut x[..count] {
            if len > 1 {
                *x = sums_and_differences::<S, 1>(s, *x);
            }
            if len > 2 {
                *x = sums_and_differences::<S, 2>(s, *x);
            }
            if len > 4 {
                *x = sums_and_differences::<S, 4>(s, *x);
            }
            if len > 8 {
                *x = sums_and_differences::<S, 8>(s, *x);
            }
        }
        let mut distance = 1;
        while distance < count {
            for low in (0..count).filter(|low| low & distance == 0) {
                let (a, b) = (x[low], x[low + distance]);
                (x[low], x[low + distance]) = (s.add(a, b), s.sub(a, b));
            }
            distance *= 2;
        }
        let norm = s.splat(1.0 / (len as f32).sqrt());
        for (x, part) in x.iter().zip(part.chunks_mut(LANES)) {
            s.store_part(s.mul(*x, norm), part);
        }
    }
}

/// Replaces lanes `a` and `b` that are `DISTANCE` apart by `a + b` and `a - b`.
#[inline(always)]
fn sums_and_differences<S: Simd, const DISTANCE: usize>(s: S, x: S::F32) -> S::F32 {
    let mut lanes = [0.0; LANES];
    s.store(x, &mut lanes);
    let (mut others, mut signs) = ([0.0; LANES], [1.0; LANES]);
    for lane in 0..LANES {
        others[lane] = lanes[lane ^ DISTANCE];
        if lane & DISTANCE != 0 {
            signs[lane] = -1.0;
        }
    }
    // The product is exact.
    s.fma(x, s.load(&signs), s.load(&others))
}

#[inline(always)]
fn rotate<S: Simd>(_: S, head: &mut [f32], rope_row: &[f32], style: RopeStyle) {
    let (cos, sin) = rope_row.split_at(rope_row.len() / 2);
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

/// Cosines, then sines, of every pair at one position and its coordinates, `[2 * pairs]`: computed in f64 once per row, used by all
/// layers.
pub fn rope_row(rope: &Rope, position: usize, coordinates: [usize; AXES], out: &mut [f32]) {
    let (cosines, sines) = out.split_at_mut(rope.frequencies.len());
    for (pair, ((&frequency, cos), sin)) in rope.frequencies.iter().zip(cosines).zip(sines).enumerate() {
        let position = rope.axes.get(pair).map_or(position, |&axis| coordinates[usize::from(axis)]);
        let (s, c) = (position as f64 * f64::from(frequency)).sin_cos();
        *cos = (c * f64::from(rope.magnitude)) as f32;
        *sin = (s * f64::from(rope.magnitude)) as f32;
    }
}

/// Returns the part of `range` that falls into a list of `len` that begins at `offset`, relative to it. Threads share
/// the groups of several matrices as one range.
pub fn part(range: &Range<usize>, offset: usize, len: usize) -> Range<usize> {
    let clamp = |at: usize| at.saturating_sub(offset).min(len);
    clamp(range.start)..clamp(range.end)
}

/// Returns the number of the next rows or queries, of `left` remaining ones: at most `most`, and in nearly equal
/// chunks, because a single one takes longer than its share.
pub fn even_share(left: usize, most: usize) -> usize {
    left.div_ceil(left.div_ceil(most))
}
