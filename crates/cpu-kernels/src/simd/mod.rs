//! Vectors of 16 lanes on every instruction set, so that a kernel is written once.
//!
//! A kernel is a generic `#[inline(always)] fn k<S: Simd>(s: S, ...)`. `simd_kernels!`
//! instantiates it for each instruction set inside a `#[target_feature]` function and collects the pointers in a
//! table that is chosen once at load.
//!
//! All instruction sets compute the same bits: lanes do the same operations in the same order, [`Simd::fma`]
//! rounds once everywhere, reductions follow one fixed tree, and integer results are exact.

/// Implements the narrow sums of [`Simd`] with 32-bit sums, for machines on which sums of pairs are not cheaper than
/// sums of fours.
macro_rules! nothing_narrow {
    () => {
        type Narrow = Self::I32;
        const NARROW: bool = false;

        #[inline(always)]
        fn first_narrow(self, w: Self::U8, a: &[i8; 4]) -> Self::Narrow {
            self.dot4(self.splat_i32(0), w, a)
        }
        #[inline(always)]
        fn dot4_narrow(self, acc: Self::Narrow, w: Self::U8, a: &[i8; 4]) -> Self::Narrow {
            self.dot4(acc, w, a)
        }
        #[inline(always)]
        fn add_narrow(self, acc: Self::I32, pairs: Self::Narrow) -> Self::I32 {
            self.add_i32(acc, pairs)
        }
        fn add_narrow_times(self, _: Self::I32, _: Self::Narrow, _: &[[i16; 2]; LANES]) -> Self::I32 {
            unreachable!("sums are not narrow here")
        }
        fn dot2(self, _: &[i16; 2], _: &[[i16; 2]; LANES]) -> Self::I32 {
            unreachable!("sums are not narrow here")
        }
    };
}

/// Implements methods of [`Simd`] that are one expression without `self`, such as one instruction.
macro_rules! methods {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $value:expr;)*) => {
        $(
            $(#[$doc])*
            #[inline(always)]
            fn $name(self, $($argument: $type),*) -> $result {
                $value
            }
        )*
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod math;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(test)]
mod tests;

use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
pub use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub use avx512::Avx512;
pub use math::{exp, sigmoid, silu, tanh, weight};
#[cfg(target_arch = "aarch64")]
pub use neon::{NeonBase, NeonDot, NeonI8mm};
pub use scalar::Scalar;

/// Lanes of a vector.
pub const LANES: usize = 16;

/// Numbers that bytes of weights stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bytes {
    /// Themselves, at most 127: [`Simd::dot4`].
    Small,
    /// `byte - 128`: [`Simd::dot4_offset`].
    Offset,
    /// Signed bytes; activations are not negative: [`Simd::dot4_i8`].
    Signed,
}

/// An instruction set. A value of an implementing type proves that the machine supports it: the methods are safe
/// because such values are created only after detection.
///
/// Methods must be inlined into a function with the right target features to be fast, see `simd_kernels!`.
#[allow(clippy::wrong_self_convention)] // `from_f16(self, x)` loads x: self only proves the instructions
pub trait Simd: Copy + Send + Sync + 'static {
    /// 16 single-precision floats.
    type F32: Copy;
    /// 16 32-bit integers.
    type I32: Copy;
    /// 64 bytes.
    type U8: Copy;
    /// Sums of [`Simd::dot4`] on the way: 32 sums of pairs in 16 bits, or [`Simd::I32`].
    type Narrow: Copy;

    /// True if [`Simd::dot4_narrow`] is cheaper than [`Simd::dot4`].
    const NARROW: bool;
    /// Number of vectors of 16 lanes in registers, which determines the tiles of kernels.
    const REGISTERS: usize;
    /// True if [`Simd::dot8`] is faster than two [`Simd::dot4`].
    const PAIRS: bool = false;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::F32;
    /// Lanes from an array.
    fn load(self, x: &[f32; LANES]) -> Self::F32;
    /// Lanes to an array.
    fn store(self, v: Self::F32, out: &mut [f32; LANES]);
    /// Lanes from 16 half-precision floats, exactly.
    fn from_f16(self, x: &[f16; LANES]) -> Self::F32;
    /// Lanes to half precision, to nearest even.
    fn to_f16(self, v: Self::F32, out: &mut [f16; LANES]);
    /// Lanes from 16 `bf16`, exactly.
    fn from_bf16(self, x: &[bf16; LANES]) -> Self::F32;

    /// `a + b`
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a - b`
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b`
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a / b`
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// `if a > b { a } else { b }` (so `b` where one is not a number).
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `if a < b { a } else { b }` (so `b` where one is not a number).
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `|a|`
    fn abs(self, a: Self::F32) -> Self::F32;
    /// `if a < b { x } else { y }`, lane by lane.
    fn select_lt(self, a: Self::F32, b: Self::F32, x: Self::F32, y: Self::F32) -> Self::F32;
    /// `v * 2^n`, rounded once; `n` is integral and `|n| <= 252`, `v` is normal.
    fn mul_pow2(self, v: Self::F32, n: Self::F32) -> Self::F32;
    /// `v * 2^n`, exactly, for integral `n` where both `v` and the result are normal; something elsewhere.
    fn mul_pow2_normal(self, v: Self::F32, n: Self::F32) -> Self::F32;
    /// To the nearest integral value, ties to even; `|a| < 2^31`.
    fn round(self, a: Self::F32) -> Self::F32;
    /// Sum of the lanes: lane `i` is added to `i + 8`, then `i + 4`, `i + 2`, `i + 1`.
    fn reduce_sum(self, v: Self::F32) -> f32;
    /// Largest lane.
    fn reduce_max(self, v: Self::F32) -> f32;

    /// All lanes `x`.
    fn splat_i32(self, x: i32) -> Self::I32;
    /// Lanes to an array.
    fn store_i32(self, v: Self::I32, out: &mut [i32; LANES]);
    /// Lanes from unsigned bytes.
    fn from_u8(self, x: &[u8; LANES]) -> Self::I32;
    /// Lanes from signed bytes.
    fn from_i8(self, x: &[i8; LANES]) -> Self::I32;
    /// Low byte of each lane.
    fn store_i8(self, v: Self::I32, out: &mut [i8; LANES]);
    /// `a + b`, wrapping.
    fn add_i32(self, a: Self::I32, b: Self::I32) -> Self::I32;
    /// `if a > b { a } else { b }`
    fn max_i32(self, a: Self::I32, b: Self::I32) -> Self::I32;
    /// `a << bits`
    fn shl_i32(self, a: Self::I32, bits: u32) -> Self::I32;
    /// `(a >> shift) & mask`, for lanes that are not negative.
    fn bits_i32(self, a: Self::I32, shift: u32, mask: i32) -> Self::I32;
    /// Sum of the lanes, wrapping.
    fn reduce_sum_i32(self, v: Self::I32) -> i32;
    /// To the nearest integer, ties to even; `|a| < 2^31`.
    fn to_i32(self, a: Self::F32) -> Self::I32;
    /// To single precision, to nearest even.
    fn to_f32(self, a: Self::I32) -> Self::F32;
    /// Reinterprets the bits as floats.
    fn bits_to_f32(self, a: Self::I32) -> Self::F32;

    /// All bytes `x`.
    fn splat_u8(self, x: u8) -> Self::U8;
    /// 64 bytes.
    fn load_u8(self, x: &[u8; 64]) -> Self::U8;
    /// 64 bytes.
    fn store_u8(self, v: Self::U8, out: &mut [u8; 64]);
    /// `a | b`
    fn or_u8(self, a: Self::U8, b: Self::U8) -> Self::U8;
    /// `(byte >> shift) & mask` for each byte, `(byte << -shift) & mask` where `shift` is negative. `mask` has no
    /// bits where the shift brings none in. Both are constants at every call, so this is a shift and an and.
    fn bits_u8(self, v: Self::U8, shift: i32, mask: u8) -> Self::U8;
    /// `table[byte]` for each byte; bytes are below 16.
    fn lookup_u8(self, table: &[u8; 16], v: Self::U8) -> Self::U8;
    /// For each lane: `acc + w[0]*a[0] + w[1]*a[1] + w[2]*a[2] + w[3]*a[3]`, where `w` are the lane's four bytes,
    /// unsigned and **at most 127**, and `a` four signed bytes from `-127` on.
    fn dot4(self, acc: Self::I32, w: Self::U8, a: &[i8; 4]) -> Self::I32;
    /// Like [`Simd::dot4`] without an accumulator.
    fn first_narrow(self, w: Self::U8, a: &[i8; 4]) -> Self::Narrow;
    /// Like [`Simd::dot4`]. The sums of the products of a pair, and of all pairs added to it since
    /// [`Simd::first_narrow`], must fit into 16 bits.
    fn dot4_narrow(self, acc: Self::Narrow, w: Self::U8, a: &[i8; 4]) -> Self::Narrow;
    /// `acc` and the sums of each lane's pairs.
    fn add_narrow(self, acc: Self::I32, pairs: Self::Narrow) -> Self::I32;
    /// Like [`Simd::add_narrow`], with each lane's pairs multiplied by that lane's number, which `times` has twice.
    /// Only with [`Simd::NARROW`].
    fn add_narrow_times(self, acc: Self::I32, pairs: Self::Narrow, times: &[[i16; 2]; LANES]) -> Self::I32;
    /// For each lane: `w[0]*a[0] + w[1]*a[1]`, where `w` are the lane's two numbers. Only with [`Simd::NARROW`].
    fn dot2(self, a: &[i16; 2], w: &[[i16; 2]; LANES]) -> Self::I32;
    /// For each lane: `acc + v[0]*a[0] + v[1]*a[1] + v[2]*a[2] + v[3]*a[3]`, where `v` are the lane's four bytes, signed,
    /// any, and `a` four bytes that are not negative.
    fn dot4_i8(self, acc: Self::I32, v: Self::U8, a: &[i8; 4]) -> Self::I32;
    /// Returns the initial value for [`Simd::dot4_offset`], given minus the sum of all `a`.
    fn dot4_offset_start(self, negative_sum: i32) -> Self::I32;
    /// Like [`Simd::dot4`] for bytes that represent `byte - 128`, starting from [`Simd::dot4_offset_start`].
    fn dot4_offset(self, acc: Self::I32, w: Self::U8, a: &[i8; 4]) -> Self::I32;

    /// Arranges two steps of weights for [`Simd::dot8`]: machines that multiply small matrices of bytes need eight
    /// inputs of a lane together.
    #[inline(always)]
    fn pair_steps(self, steps: [Self::U8; 2]) -> [Self::U8; 2] {
        steps
    }
    /// Arranges the sums of two rows for [`Simd::dot8`].
    #[inline(always)]
    fn pair_rows(self, rows: [Self::I32; 2]) -> [Self::I32; 2] {
        rows
    }
    /// Undoes [`Simd::pair_rows`].
    #[inline(always)]
    fn unpair_rows(self, pair: [Self::I32; 2]) -> [Self::I32; 2] {
        pair
    }
    /// For two rows at two steps: adds products of the first step's weights with `a[row][..4]` and of the second
    /// step's with `a[row][4..]`. Steps and sums are paired. `bytes` is a constant at every call.
    #[inline(always)]
    fn dot8(self, acc: [Self::I32; 2], w: [Self::U8; 2], a: [&[i8; 8]; 2], bytes: Bytes) -> [Self::I32; 2] {
        dot8_by_dot4(self, acc, w, a, bytes)
    }

    /// Calls the function for bytes of this kind, which is a constant at every call.
    #[inline(always)]
    fn dot4_of(self, bytes: Bytes, acc: Self::I32, w: Self::U8, a: &[i8; 4]) -> Self::I32 {
        match bytes {
            Bytes::Small => self.dot4(acc, w, a),
            Bytes::Offset => self.dot4_offset(acc, w, a),
            Bytes::Signed => self.dot4_i8(acc, w, a),
        }
    }

    /// Prefetches the cache line at `at`, which need not be a valid address, into the second-level cache. More lines
    /// can be in flight to it than to the first level, where they would evict lines in use.
    fn prefetch(self, at: *const u8);

    /// All lanes zero.
    #[inline(always)]
    fn zero(self) -> Self::F32 {
        self.splat(0.0)
    }

    /// The first lanes from a short slice, the others zero.
    #[inline(always)]
    fn load_part(self, x: &[f32]) -> Self::F32 {
        let mut lanes = [0.0; LANES];
        let n = x.len().min(LANES);
        lanes[..n].copy_from_slice(&x[..n]);
        self.load(&lanes)
    }

    /// The first lanes to a short slice.
    #[inline(always)]
    fn store_part(self, v: Self::F32, out: &mut [f32]) {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        let n = out.len().min(LANES);
        out[..n].copy_from_slice(&lanes[..n]);
    }
}

/// [`Simd::dot8`] on machines that have nothing for it: sums and steps are paired as they are.
#[inline(always)]
fn dot8_by_dot4<S: Simd>(
    s: S,
    mut acc: [S::I32; 2],
    w: [S::U8; 2],
    a: [&[i8; 8]; 2],
    bytes: Bytes,
) -> [S::I32; 2] {
    for (step, w) in w.into_iter().enumerate() {
        for (acc, a) in acc.iter_mut().zip(a) {
            *acc = s.dot4_of(bytes, *acc, w, &a.as_chunks().0[step]);
        }
    }
    acc
}
