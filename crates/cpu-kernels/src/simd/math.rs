//! Functions built from the basic operations, hence the same bits on every instruction set.

use super::Simd;

/// `e^x` within 1 unit in the last place; 0 below about -104, infinity above about 88.7.
///
/// Cody-Waite reduction to `|r| <= ln 2 / 2`, then the minimax polynomial of the Cephes library (`expf`).
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::F32) -> S::F32 {
    // Beyond these limits the result is 0 or infinity, and within them the power of two is in range. The limits are the
    // first operands so that NaN is preserved.
    let x = s.min(s.splat(89.5), s.max(s.splat(-104.5), x));
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.fma(n, s.splat(-0.693_359_4), x);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let mut p = s.splat(1.987_569_2e-4);
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = s.fma(p, r, s.splat(c));
    }
    let p = s.fma(p, s.mul(r, r), s.add(r, s.splat(1.0)));
    s.mul_pow2(p, n)
}

/// `2^x` within 2 units in the last place for `x <= 1`: a weight of a softmax. Zero below -125: smaller weights would not be
/// normal numbers, which some processors multiply slowly, and cannot matter next to the largest one, which is about 1.
///
/// `x` is cut into an integer and `|r| <= 1/2`; the polynomial has the least relative error there (`1.6e-7`) of those of
/// degree 5 with the value and the slope of `2^r` at zero.
#[inline(always)]
pub fn weight<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let n = s.round(x);
    let r = s.sub(x, n);
    let mut p = s.splat(1.330_060_5e-3);
    for c in [9.669_691e-3, 5.550_558_5e-2, 2.402_228_3e-1, std::f32::consts::LN_2, 1.0] {
        p = s.fma(p, r, s.splat(c));
    }
    s.select_lt(x, s.splat(-125.0), s.zero(), s.mul_pow2_normal(p, n))
}

/// `1 / (1 + e^-x)`
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::F32) -> S::F32 {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.zero(), x))))
}

/// `x * sigmoid(x)`
#[inline(always)]
pub fn silu<S: Simd>(s: S, x: S::F32) -> S::F32 {
    s.div(x, s.add(s.splat(1.0), exp(s, s.sub(s.zero(), x))))
}

/// Hyperbolic tangent, within about 3e-7 absolutely.
#[inline(always)]
pub fn tanh<S: Simd>(s: S, x: S::F32) -> S::F32 {
    // 1 - 2 / (e^2x + 1): e^2x may be infinite, then this is 1.
    let one = s.splat(1.0);
    let e = exp(s, s.add(x, x));
    s.sub(one, s.div(s.splat(2.0), s.add(e, one)))
}
