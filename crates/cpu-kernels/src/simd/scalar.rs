//! Arrays of 16: the portable implementation, and the definition of the others.

use half::{bf16, f16};

use super::{LANES, Simd};

/// No vector instructions.
#[derive(Clone, Copy, Debug)]
pub struct Scalar;

/// Returns `f` of each index; a plain loop, of which compilers have less to inline than of `std::array::from_fn`.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // iterators are functions to inline
fn lanes<T: Copy + Default, const N: usize>(f: impl Fn(usize) -> T) -> [T; N] {
    let mut out = [T::default(); N];
    for i in 0..N {
        out[i] = f(i);
    }
    out
}

/// Returns `f` of each element.
#[inline(always)]
fn map<T: Copy, U: Copy + Default, const N: usize>(v: [T; N], f: impl Fn(T) -> U) -> [U; N] {
    lanes(|i| f(v[i]))
}

#[inline(always)]
fn reduce<T: Copy>(mut v: [T; LANES], f: impl Fn(T, T) -> T) -> T {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            v[i] = f(v[i], v[i + half]);
        }
    }
    v[0]
}

impl Simd for Scalar {
    type F32 = [f32; LANES];
    type I32 = [i32; LANES];
    type U8 = [u8; 64];

    nothing_narrow!();

    // Loops over arrays live in memory: larger tiles would only be more code.
    const REGISTERS: usize = 4;

    methods! {
        splat(x: f32) -> Self::F32 = [x; LANES];
        load(x: &[f32; LANES]) -> Self::F32 = *x;
    }
    #[inline(always)]
    fn store(self, v: Self::F32, out: &mut [f32; LANES]) {
        *out = v;
    }
    #[inline(always)]
    fn from_f16(self, x: &[f16; LANES]) -> Self::F32 {
        map(*x, f16::to_f32)
    }
    #[inline(always)]
    fn to_f16(self, v: Self::F32, out: &mut [f16; LANES]) {
        *out = map(v, f16::from_f32);
    }
    methods! {
        from_bf16(x: &[bf16; LANES]) -> Self::F32 = map(*x, |x| f32::from_bits(u32::from(x.to_bits()) << 16));
        add(a: Self::F32, b: Self::F32) -> Self::F32 = lanes(|i| a[i] + b[i]);
        sub(a: Self::F32, b: Self::F32) -> Self::F32 = lanes(|i| a[i] - b[i]);
        mul(a: Self::F32, b: Self::F32) -> Self::F32 = lanes(|i| a[i] * b[i]);
        div(a: Self::F32, b: Self::F32) -> Self::F32 = lanes(|i| a[i] / b[i]);
        fma(a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 = lanes(|i| a[i].mul_add(b[i], c[i]));
        max(a: Self::F32, b: Self::F32) -> Self::F32 = lanes(|i| if a[i] > b[i] { a[i] } else { b[i] });
        min(a: Self::F32, b: Self::F32) -> Self::F32 = lanes(|i| if a[i] < b[i] { a[i] } else { b[i] });
        abs(a: Self::F32) -> Self::F32 = map(a, f32::abs);
        select_lt(a: Self::F32, b: Self::F32, x: Self::F32, y: Self::F32) -> Self::F32 =
            lanes(|i| if a[i] < b[i] { x[i] } else { y[i] });
    }
    #[inline(always)]
    fn mul_pow2(self, v: Self::F32, n: Self::F32) -> Self::F32 {
        // In two halves, so that neither factor leaves the range of normal numbers; only the second can round.
        lanes(|i| {
            let n = n[i] as i32;
            let half = n >> 1;
            v[i] * f32::from_bits(((half + 127) << 23) as u32)
                * f32::from_bits(((n - half + 127) << 23) as u32)
        })
    }
    methods! {
        mul_pow2_normal(v: Self::F32, n: Self::F32) -> Self::F32 =
            lanes(|i| f32::from_bits(v[i].to_bits().wrapping_add_signed((n[i] as i32).wrapping_shl(23))));
        round(a: Self::F32) -> Self::F32 = map(a, f32::round_ties_even);
        reduce_sum(v: Self::F32) -> f32 = reduce(v, |a, b| a + b);
        reduce_max(v: Self::F32) -> f32 = reduce(v, |a, b| if a > b { a } else { b });
        splat_i32(x: i32) -> Self::I32 = [x; LANES];
    }
    #[inline(always)]
    fn store_i32(self, v: Self::I32, out: &mut [i32; LANES]) {
        *out = v;
    }
    methods! {
        from_u8(x: &[u8; LANES]) -> Self::I32 = map(*x, i32::from);
        from_i8(x: &[i8; LANES]) -> Self::I32 = map(*x, i32::from);
    }
    #[inline(always)]
    fn store_i8(self, v: Self::I32, out: &mut [i8; LANES]) {
        *out = map(v, |x| x as i8);
    }
    methods! {
        add_i32(a: Self::I32, b: Self::I32) -> Self::I32 = lanes(|i| a[i].wrapping_add(b[i]));
        max_i32(a: Self::I32, b: Self::I32) -> Self::I32 = lanes(|i| a[i].max(b[i]));
        shl_i32(a: Self::I32, bits: u32) -> Self::I32 = map(a, |x| x << bits);
        bits_i32(a: Self::I32, shift: u32, mask: i32) -> Self::I32 = map(a, |x| (x >> shift) & mask);
        reduce_sum_i32(v: Self::I32) -> i32 = reduce(v, i32::wrapping_add);
        to_i32(a: Self::F32) -> Self::I32 = map(a, |x| x.round_ties_even() as i32);
        to_f32(a: Self::I32) -> Self::F32 = map(a, |x| x as f32);
        bits_to_f32(a: Self::I32) -> Self::F32 = map(a, |x| f32::from_bits(x as u32));
        splat_u8(x: u8) -> Self::U8 = [x; 64];
        load_u8(x: &[u8; 64]) -> Self::U8 = *x;
    }
    #[inline(always)]
    fn store_u8(self, v: Self::U8, out: &mut [u8; 64]) {
        *out = v;
    }
    methods! {
        or_u8(a: Self::U8, b: Self::U8) -> Self::U8 = lanes(|i| a[i] | b[i]);
        bits_u8(v: Self::U8, shift: i32, mask: u8) -> Self::U8 =
            map(v, |b| if shift >= 0 { (b >> shift) & mask } else { (b << -shift) & mask });
        lookup_u8(table: &[u8; 16], v: Self::U8) -> Self::U8 = map(v, |b| table[usize::from(b & 15)]);
    }
    #[inline(always)]
    fn dot4(self, acc: Self::I32, w: Self::U8, a: &[i8; 4]) -> Self::I32 {
        lanes(|i| {
            let mut sum = acc[i];
            for j in 0..4 {
                sum = sum.wrapping_add(i32::from(w[4 * i + j]) * i32::from(a[j]));
            }
            sum
        })
    }
    #[inline(always)]
    fn dot4_i8(self, acc: Self::I32, v: Self::U8, a: &[i8; 4]) -> Self::I32 {
        lanes(|i| {
            let mut sum = acc[i];
            for j in 0..4 {
                sum = sum.wrapping_add(i32::from(v[4 * i + j] as i8) * i32::from(a[j]));
            }
            sum
        })
    }
    #[inline(always)]
    fn dot4_offset_start(self, negative_sum: i32) -> Self::I32 {
        [negative_sum << 7; LANES]
    }
    #[inline(always)]
    fn dot4_offset(self, acc: Self::I32, w: Self::U8, a: &[i8; 4]) -> Self::I32 {
        self.dot4(acc, w, a)
    }

    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
}
