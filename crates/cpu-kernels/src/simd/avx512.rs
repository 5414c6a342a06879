//! AVX-512 with VNNI: one 512-bit register holds all 16 lanes.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{LANES, Simd};

/// AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

impl Avx512 {
    /// The token, if this machine has the instructions.
    pub fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni"))
        .then_some(Self(()))
    }

    /// The token, without asking.
    ///
    /// # Safety
    /// [`Avx512::detect`] has returned a token on this machine.
    #[inline(always)]
    pub unsafe fn assume() -> Self {
        Self(())
    }
}

/// Evaluates intrinsics.
macro_rules! v {
    ($e:expr) => {
        // SAFETY: a token exists only where its features were detected; memory is only touched through references
        // to arrays of the vector's size, by unaligned loads and stores.
        unsafe { $e }
    };
}

impl Simd for Avx512 {
    type F32 = __m512;
    type I32 = __m512i;
    type U8 = __m512i;

    nothing_narrow!();

    const REGISTERS: usize = 32;

    methods! {
        splat(x: f32) -> __m512 = v!(_mm512_set1_ps(x));
        load(x: &[f32; LANES]) -> __m512 = v!(_mm512_loadu_ps(x.as_ptr()));
    }
    #[inline(always)]
    fn store(self, v: __m512, out: &mut [f32; LANES]) {
        v!(_mm512_storeu_ps(out.as_mut_ptr(), v))
    }
    #[inline(always)]
    fn from_f16(self, x: &[f16; LANES]) -> __m512 {
        v!(_mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())))
    }
    #[inline(always)]
    fn to_f16(self, v: __m512, out: &mut [f16; LANES]) {
        v!(_mm256_storeu_si256(out.as_mut_ptr().cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)))
    }
    #[inline(always)]
    fn from_bf16(self, x: &[bf16; LANES]) -> __m512 {
        v!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(
            x.as_ptr().cast()
        )))))
    }

    methods! {
        add(a: __m512, b: __m512) -> __m512 = v!(_mm512_add_ps(a, b));
        sub(a: __m512, b: __m512) -> __m512 = v!(_mm512_sub_ps(a, b));
        mul(a: __m512, b: __m512) -> __m512 = v!(_mm512_mul_ps(a, b));
        div(a: __m512, b: __m512) -> __m512 = v!(_mm512_div_ps(a, b));
        fma(a: __m512, b: __m512, c: __m512) -> __m512 = v!(_mm512_fmadd_ps(a, b, c));
        max(a: __m512, b: __m512) -> __m512 = v!(_mm512_max_ps(a, b));
        min(a: __m512, b: __m512) -> __m512 = v!(_mm512_min_ps(a, b));
        abs(a: __m512) -> __m512 = v!(_mm512_abs_ps(a));
        select_lt(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 =
            v!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x));
        mul_pow2(v: __m512, n: __m512) -> __m512 = v!(_mm512_scalef_ps(v, n));
    }
    #[inline(always)]
    fn mul_pow2_normal(self, v: __m512, n: __m512) -> __m512 {
        self.mul_pow2(v, n)
    }
    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        v!(_mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(a))
    }
    #[inline(always)]
    fn reduce_sum(self, v: __m512) -> f32 {
        v!({
            let v = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        })
    }
    #[inline(always)]
    fn reduce_max(self, v: __m512) -> f32 {
        v!({
            let v = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
        })
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> __m512i {
        v!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn store_i32(self, v: __m512i, out: &mut [i32; LANES]) {
        v!(_mm512_storeu_si512(out.as_mut_ptr().cast(), v))
    }
    methods! {
        from_u8(x: &[u8; LANES]) -> __m512i = v!(_mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast())));
        from_i8(x: &[i8; LANES]) -> __m512i = v!(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast())));
    }
    #[inline(always)]
    fn store_i8(self, v: __m512i, out: &mut [i8; LANES]) {
        v!(_mm_storeu_si128(out.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(v)))
    }
    methods! {
        add_i32(a: __m512i, b: __m512i) -> __m512i = v!(_mm512_add_epi32(a, b));
        max_i32(a: __m512i, b: __m512i) -> __m512i = v!(_mm512_max_epi32(a, b));
        shl_i32(a: __m512i, bits: u32) -> __m512i = v!(_mm512_sll_epi32(a, _mm_cvtsi32_si128(bits as i32)));
        bits_i32(a: __m512i, shift: u32, mask: i32) -> __m512i =
            v!(_mm512_and_si512(_mm512_srl_epi32(a, _mm_cvtsi32_si128(shift as i32)), _mm512_set1_epi32(mask)));
        reduce_sum_i32(v: __m512i) -> i32 = v!(_mm512_reduce_add_epi32(v));
        to_i32(a: __m512) -> __m512i = v!(_mm512_cvtps_epi32(a));
        to_f32(a: __m512i) -> __m512 = v!(_mm512_cvtepi32_ps(a));
        bits_to_f32(a: __m512i) -> __m512 = v!(_mm512_castsi512_ps(a));
        splat_u8(x: u8) -> __m512i = v!(_mm512_set1_epi8(x as i8));
        load_u8(x: &[u8; 64]) -> __m512i = v!(_mm512_loadu_si512(x.as_ptr().cast()));
    }
    #[inline(always)]
    fn store_u8(self, v: __m512i, out: &mut [u8; 64]) {
        v!(_mm512_storeu_si512(out.as_mut_ptr().cast(), v))
    }
    #[inline(always)]
    fn or_u8(self, a: __m512i, b: __m512i) -> __m512i {
        v!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn bits_u8(self, v: __m512i, shift: i32, mask: u8) -> __m512i {
        // There is no shift of bytes; the mask removes the bits from the other byte of a 16-bit unit.
        v!({
            let count = _mm_cvtsi32_si128(shift.abs());
            let v = if shift >= 0 { _mm512_srl_epi16(v, count) } else { _mm512_sll_epi16(v, count) };
            _mm512_and_si512(v, _mm512_set1_epi8(mask as i8))
        })
    }
    methods! {
        lookup_u8(table: &[u8; 16], v: __m512i) -> __m512i =
            v!(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), v));
        dot4(acc: __m512i, w: __m512i, a: &[i8; 4]) -> __m512i =
            v!(_mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(i32::from_le_bytes(a.map(|x| x as u8)))));
        dot4_i8(acc: __m512i, v: __m512i, a: &[i8; 4]) -> __m512i =
            v!(_mm512_dpbusd_epi32(acc, _mm512_set1_epi32(i32::from_le_bytes(a.map(|x| x as u8))), v));
        dot4_offset_start(negative_sum: i32) -> __m512i =
            v!(_mm512_slli_epi32::<7>(_mm512_set1_epi32(negative_sum)));
    }
    #[inline(always)]
    fn dot4_offset(self, acc: __m512i, w: __m512i, a: &[i8; 4]) -> __m512i {
        self.dot4(acc, w, a)
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        v!(_mm_prefetch::<_MM_HINT_T1>(at.cast()))
    }
}
