//! AVX2 with FMA and F16C: two 256-bit registers hold the 16 lanes.

use std::arch::{asm, x86_64::*};

use half::{bf16, f16};

use super::{LANES, Simd};

/// AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

impl Avx2 {
    /// The token, if this machine has the instructions.
    pub fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Self(()))
    }

    /// The token, without asking.
    ///
    /// # Safety
    /// [`Avx2::detect`] has returned a token on this machine.
    #[inline(always)]
    pub unsafe fn assume() -> Self {
        Self(())
    }
}

/// A multiplication, and an addition of the result to `acc`.
///
/// In assembly, to fix the order of the sums: compilers reassociate them, and then keep the weights of many steps on
/// the stack instead of the sums of many rows in registers.
macro_rules! in_order {
    ($(#[$doc:meta])* $name:ident: $multiply:literal, $add:literal) => {
        $(#[$doc])*
        #[inline]
        #[target_feature(enable = "avx2")]
        fn $name(mut acc: __m256i, w: __m256i, a: __m256i) -> __m256i {
            // SAFETY: reads and writes these registers only.
            unsafe {
                asm!(
                    concat!($multiply, " {t}, {w}, {a}"),
                    concat!($add, " {acc}, {acc}, {t}"),
                    acc = inout(ymm_reg) acc, w = in(ymm_reg) w, a = in(ymm_reg) a, t = out(ymm_reg) _,
                    options(nomem, nostack, preserves_flags),
                );
            }
            acc
        }
    };
}

in_order! {
    /// `acc` plus the sums of pairs of `w`, unsigned, times `a`, in 16 bits.
    pairs_in_order: "vpmaddubsw", "vpaddw"
}

in_order! {
    /// `acc` plus the sums of pairs of `w`, 16 bits, times `a`, in 32 bits.
    wide_in_order: "vpmaddwd", "vpaddd"
}

/// Sums of pairs of `w`, unsigned, times `a`, in 16 bits, to which [`pairs_in_order`] adds.
#[inline]
#[target_feature(enable = "avx2")]
fn first_in_order(w: __m256i, a: __m256i) -> __m256i {
    let out;
    // SAFETY: reads and writes these registers only.
    unsafe {
        asm!(
            "vpmaddubsw {out}, {w}, {a}",
            out = lateout(ymm_reg) out, w = in(ymm_reg) w, a = in(ymm_reg) a,
            options(nomem, nostack, preserves_flags),
        );
    }
    out
}

/// `acc` plus the sums of fours of `w`, signed, times `a`, in 32 bits. Like [`pairs_in_order`].
#[inline]
#[target_feature(enable = "avx2")]
fn signed_in_order(mut acc: __m256i, w: __m256i, a: __m256i, one: __m256i) -> __m256i {
    // SAFETY: reads and writes these registers only.
    unsafe {
        asm!(
            "vpsignb {t}, {a}, {w}",
            "vpmaddubsw {t}, {magnitude}, {t}",
            "vpmaddwd {t}, {t}, {one}",
            "vpaddd {acc}, {acc}, {t}",
            acc = inout(ymm_reg) acc, w = in(ymm_reg) w, magnitude = in(ymm_reg) _mm256_abs_epi8(w),
            a = in(ymm_reg) a, one = in(ymm_reg) one, t = out(ymm_reg) _,
            options(nomem, nostack, preserves_flags),
        );
    }
    acc
}

/// Evaluates intrinsics.
macro_rules! v {
    ($e:expr) => {
        // SAFETY: a token exists only where its features were detected; memory is only touched through references
        // to arrays of the vector's size, by unaligned loads and stores.
        unsafe { $e }
    };
}

/// Applies one intrinsic to both halves.
macro_rules! both {
    ($f:ident($($a:expr),*)) => { v!([$f($($a[0]),*), $f($($a[1]),*)]) };
}

impl Simd for Avx2 {
    type F32 = [__m256; 2];
    type I32 = [__m256i; 2];
    type U8 = [__m256i; 2];
    type Narrow = [__m256i; 2];

    const NARROW: bool = true;
    const REGISTERS: usize = 8;

    methods! {
        splat(x: f32) -> Self::F32 = v!([_mm256_set1_ps(x); 2]);
        load(x: &[f32; LANES]) -> Self::F32 =
            v!([_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x[8..].as_ptr())]);
    }
    #[inline(always)]
    fn store(self, v: Self::F32, out: &mut [f32; LANES]) {
        v!({
            _mm256_storeu_ps(out.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(out[8..].as_mut_ptr(), v[1]);
        })
    }
    #[inline(always)]
    fn from_f16(self, x: &[f16; LANES]) -> Self::F32 {
        v!([
            _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(x[8..].as_ptr().cast())),
        ])
    }
    #[inline(always)]
    fn to_f16(self, v: Self::F32, out: &mut [f16; LANES]) {
        v!({
            let halves = v.map(|v| _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v));
            _mm_storeu_si128(out.as_mut_ptr().cast(), halves[0]);
            _mm_storeu_si128(out[8..].as_mut_ptr().cast(), halves[1]);
        })
    }
    #[inline(always)]
    fn from_bf16(self, x: &[bf16; LANES]) -> Self::F32 {
        v!({
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(x[8..].as_ptr().cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        })
    }

    methods! {
        add(a: Self::F32, b: Self::F32) -> Self::F32 = both!(_mm256_add_ps(a, b));
        sub(a: Self::F32, b: Self::F32) -> Self::F32 = both!(_mm256_sub_ps(a, b));
        mul(a: Self::F32, b: Self::F32) -> Self::F32 = both!(_mm256_mul_ps(a, b));
        div(a: Self::F32, b: Self::F32) -> Self::F32 = both!(_mm256_div_ps(a, b));
        fma(a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 = both!(_mm256_fmadd_ps(a, b, c));
        max(a: Self::F32, b: Self::F32) -> Self::F32 = both!(_mm256_max_ps(a, b));
        min(a: Self::F32, b: Self::F32) -> Self::F32 = both!(_mm256_min_ps(a, b));
    }
    #[inline(always)]
    fn abs(self, a: Self::F32) -> Self::F32 {
        v!({
            let sign = _mm256_set1_ps(-0.0);
            [_mm256_andnot_ps(sign, a[0]), _mm256_andnot_ps(sign, a[1])]
        })
    }
    #[inline(always)]
    fn select_lt(self, a: Self::F32, b: Self::F32, x: Self::F32, y: Self::F32) -> Self::F32 {
        v!([
            _mm256_blendv_ps(y[0], x[0], _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0])),
            _mm256_blendv_ps(y[1], x[1], _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])),
        ])
    }
    #[inline(always)]
    fn mul_pow2(self, v: Self::F32, n: Self::F32) -> Self::F32 {
        // In two halves, so that neither factor leaves the range of normal numbers; only the second can round. A loop,
        // because a closure is a separate function without vector features.
        v!({
            let mut out = v;
            for (out, n) in out.iter_mut().zip(n) {
                let n = _mm256_cvtps_epi32(n);
                let half = _mm256_srai_epi32::<1>(n);
                let bias = _mm256_set1_epi32(127);
                let a = _mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias));
                let b = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias));
                *out = _mm256_mul_ps(_mm256_mul_ps(*out, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b));
            }
            out
        })
    }
    #[inline(always)]
    fn mul_pow2_normal(self, v: Self::F32, n: Self::F32) -> Self::F32 {
        v!({
            let mut out = v;
            for (out, n) in out.iter_mut().zip(n) {
                let n = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
                *out = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(*out), n));
            }
            out
        })
    }
    #[inline(always)]
    fn round(self, a: Self::F32) -> Self::F32 {
        v!([
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a[0]),
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a[1]),
        ])
    }
    #[inline(always)]
    fn reduce_sum(self, v: Self::F32) -> f32 {
        v!({
            let v = _mm256_add_ps(v[0], v[1]);
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        })
    }
    #[inline(always)]
    fn reduce_max(self, v: Self::F32) -> f32 {
        v!({
            let v = _mm256_max_ps(v[0], v[1]);
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
        })
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> Self::I32 {
        v!([_mm256_set1_epi32(x); 2])
    }
    #[inline(always)]
    fn store_i32(self, v: Self::I32, out: &mut [i32; LANES]) {
        v!({
            _mm256_storeu_si256(out.as_mut_ptr().cast(), v[0]);
            _mm256_storeu_si256(out[8..].as_mut_ptr().cast(), v[1]);
        })
    }
    #[inline(always)]
    fn from_u8(self, x: &[u8; LANES]) -> Self::I32 {
        v!({
            let x = _mm_loadu_si128(x.as_ptr().cast());
            [_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(x, x))]
        })
    }
    #[inline(always)]
    fn from_i8(self, x: &[i8; LANES]) -> Self::I32 {
        v!({
            let x = _mm_loadu_si128(x.as_ptr().cast());
            [_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(x, x))]
        })
    }
    #[inline(always)]
    fn store_i8(self, v: Self::I32, out: &mut [i8; LANES]) {
        // The low byte of each lane to the front of each 128-bit half, then the four pieces together.
        v!({
            let take = _mm256_setr_epi8(
                0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, //
                0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
            );
            let part = |v: __m256i| {
                let v = _mm256_shuffle_epi8(v, take);
                _mm_unpacklo_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v))
            };
            _mm_storeu_si128(out.as_mut_ptr().cast(), _mm_unpacklo_epi64(part(v[0]), part(v[1])))
        })
    }
    methods! {
        add_i32(a: Self::I32, b: Self::I32) -> Self::I32 = both!(_mm256_add_epi32(a, b));
        max_i32(a: Self::I32, b: Self::I32) -> Self::I32 = both!(_mm256_max_epi32(a, b));
        shl_i32(a: Self::I32, bits: u32) -> Self::I32 =
            v!(a.map(|a| _mm256_sll_epi32(a, _mm_cvtsi32_si128(bits as i32))));
    }
    #[inline(always)]
    fn bits_i32(self, a: Self::I32, shift: u32, mask: i32) -> Self::I32 {
        v!(a.map(|a| {
            let shifted = _mm256_srl_epi32(a, _mm_cvtsi32_si128(shift as i32));
            _mm256_and_si256(shifted, _mm256_set1_epi32(mask))
        }))
    }
    #[inline(always)]
    fn reduce_sum_i32(self, v: Self::I32) -> i32 {
        v!({
            let v = _mm256_add_epi32(v[0], v[1]);
            let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            let v = _mm_add_epi32(v, _mm_unpackhi_epi64(v, v));
            _mm_cvtsi128_si32(v).wrapping_add(_mm_extract_epi32::<1>(v))
        })
    }
    methods! {
        to_i32(a: Self::F32) -> Self::I32 = both!(_mm256_cvtps_epi32(a));
        to_f32(a: Self::I32) -> Self::F32 = both!(_mm256_cvtepi32_ps(a));
        bits_to_f32(a: Self::I32) -> Self::F32 = both!(_mm256_castsi256_ps(a));
        splat_u8(x: u8) -> Self::U8 = v!([_mm256_set1_epi8(x as i8); 2]);
        load_u8(x: &[u8; 64]) -> Self::U8 =
            v!([_mm256_loadu_si256(x.as_ptr().cast()), _mm256_loadu_si256(x[32..].as_ptr().cast())]);
    }
    #[inline(always)]
    fn store_u8(self, v: Self::U8, out: &mut [u8; 64]) {
        v!({
            _mm256_storeu_si256(out.as_mut_ptr().cast(), v[0]);
            _mm256_storeu_si256(out[32..].as_mut_ptr().cast(), v[1]);
        })
    }
    #[inline(always)]
    fn or_u8(self, a: Self::U8, b: Self::U8) -> Self::U8 {
        both!(_mm256_or_si256(a, b))
    }
    #[inline(always)]
    fn bits_u8(self, v: Self::U8, shift: i32, mask: u8) -> Self::U8 {
        // There is no shift of bytes; the mask removes the bits from the other byte of a 16-bit unit.
        v!(v.map(|v| {
            let count = _mm_cvtsi32_si128(shift.abs());
            let v = if shift >= 0 { _mm256_srl_epi16(v, count) } else { _mm256_sll_epi16(v, count) };
            _mm256_and_si256(v, _mm256_set1_epi8(mask as i8))
        }))
    }
    #[inline(always)]
    fn lookup_u8(self, table: &[u8; 16], v: Self::U8) -> Self::U8 {
        v!({
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            v.map(|v| _mm256_shuffle_epi8(table, v))
        })
    }
    #[inline(always)]
    fn dot4(self, acc: Self::I32, w: Self::U8, a: &[i8; 4]) -> Self::I32 {
        // Pairs of products fit 16 bits because weights are at most 127 here.
        v!({
            let a = _mm256_set1_epi32(i32::from_le_bytes(a.map(|x| x as u8)));
            let one = _mm256_set1_epi16(1);
            let part = |acc, w| {
                let pairs = _mm256_maddubs_epi16(w, a);
                _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, one))
            };
            [part(acc[0], w[0]), part(acc[1], w[1])]
        })
    }
    #[inline(always)]
    fn first_narrow(self, w: Self::U8, a: &[i8; 4]) -> Self::Narrow {
        v!({
            let a = _mm256_set1_epi32(i32::from_le_bytes(a.map(|x| x as u8)));
            [first_in_order(w[0], a), first_in_order(w[1], a)]
        })
    }
    #[inline(always)]
    fn dot4_narrow(self, acc: Self::Narrow, w: Self::U8, a: &[i8; 4]) -> Self::Narrow {
        v!({
            let a = _mm256_set1_epi32(i32::from_le_bytes(a.map(|x| x as u8)));
            [pairs_in_order(acc[0], w[0], a), pairs_in_order(acc[1], w[1], a)]
        })
    }
    #[inline(always)]
    fn add_narrow(self, acc: Self::I32, pairs: Self::Narrow) -> Self::I32 {
        v!({
            let one = _mm256_set1_epi16(1);
            [
                _mm256_add_epi32(acc[0], _mm256_madd_epi16(pairs[0], one)),
                _mm256_add_epi32(acc[1], _mm256_madd_epi16(pairs[1], one)),
            ]
        })
    }
    #[inline(always)]
    fn add_narrow_times(self, acc: Self::I32, pairs: Self::Narrow, times: &[[i16; 2]; LANES]) -> Self::I32 {
        v!({
            let times =
                [_mm256_loadu_si256(times.as_ptr().cast()), _mm256_loadu_si256(times[8..].as_ptr().cast())];
            [wide_in_order(acc[0], pairs[0], times[0]), wide_in_order(acc[1], pairs[1], times[1])]
        })
    }
    #[inline(always)]
    fn dot2(self, a: &[i16; 2], w: &[[i16; 2]; LANES]) -> Self::I32 {
        v!({
            let a = _mm256_set1_epi32(i32::from(a[0] as u16) | i32::from(a[1]) << 16);
            [
                _mm256_madd_epi16(a, _mm256_loadu_si256(w.as_ptr().cast())),
                _mm256_madd_epi16(a, _mm256_loadu_si256(w[8..].as_ptr().cast())),
            ]
        })
    }
    #[inline(always)]
    fn dot4_i8(self, acc: Self::I32, v: Self::U8, a: &[i8; 4]) -> Self::I32 {
        // Pairs of products fit 16 bits: 2 * 127 * 128 < 32768.
        v!({
            let a = _mm256_set1_epi32(i32::from_le_bytes(a.map(|x| x as u8)));
            let one = _mm256_set1_epi16(1);
            let part = |acc, v| {
                let pairs = _mm256_maddubs_epi16(a, v);
                _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, one))
            };
            [part(acc[0], v[0]), part(acc[1], v[1])]
        })
    }
    #[inline(always)]
    fn dot4_offset_start(self, _: i32) -> Self::I32 {
        self.splat_i32(0)
    }
    #[inline(always)]
    fn dot4_offset(self, acc: Self::I32, w: Self::U8, a: &[i8; 4]) -> Self::I32 {
        // byte - 128 in [-128, 127], split into its magnitude, at most 128, and its sign, which is moved to the
        // activation: sums of pairs still fit into 16 bits (2 * 128 * 127 < 32768).
        v!({
            let a = _mm256_set1_epi32(i32::from_le_bytes(a.map(|x| x as u8)));
            let one = _mm256_set1_epi16(1);
            let sign = _mm256_set1_epi8(-128);
            let w = [_mm256_xor_si256(w[0], sign), _mm256_xor_si256(w[1], sign)];
            [signed_in_order(acc[0], w[0], a, one), signed_in_order(acc[1], w[1], a, one)]
        })
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        v!(_mm_prefetch::<_MM_HINT_T1>(at.cast()))
    }
}
