//! NEON: four 128-bit registers hold the 16 lanes.

use std::arch::{aarch64::*, asm};

use half::{bf16, f16};

use super::{Bytes, LANES, Simd, dot8_by_dot4};

/// NEON; `PRODUCTS` selects the multiplication of bytes.
#[derive(Clone, Copy, Debug)]
pub struct Neon<const PRODUCTS: u8>(());

/// NEON alone, which every aarch64 machine has: products of bytes are widened to 16 bits, then added.
pub type NeonBase = Neon<WIDENED>;
/// NEON and the dot products of signed bytes of ARMv8.2 (`dotprod`).
pub type NeonDot = Neon<DOT>;
/// NEON and `i8mm` of ARMv8.6: dot products of unsigned with signed bytes, and products of 2 x 8 with 8 x 2 bytes.
pub type NeonI8mm = Neon<I8MM>;

const WIDENED: u8 = 0;
const DOT: u8 = 1;
const I8MM: u8 = 2;

impl<const PRODUCTS: u8> Neon<PRODUCTS> {
    /// The token, if this machine has the instructions.
    pub fn detect() -> Option<Self> {
        let products = match PRODUCTS {
            I8MM => std::arch::is_aarch64_feature_detected!("i8mm"),
            DOT => std::arch::is_aarch64_feature_detected!("dotprod"),
            _ => true,
        };
        (products && std::arch::is_aarch64_feature_detected!("neon")).then_some(Self(()))
    }

    /// The token, without asking.
    ///
    /// # Safety
    /// [`Neon::detect`] has returned a token on this machine.
    #[inline(always)]
    pub unsafe fn assume() -> Self {
        Self(())
    }
}

/// Evaluates intrinsics.
macro_rules! v {
    ($e:expr) => {
        // SAFETY: a token exists only where its features were detected; memory is only touched through references
        // to arrays of the vector's size.
        unsafe { $e }
    };
}

/// Applies one intrinsic to all four registers.
macro_rules! each {
    ($f:ident($($a:expr),*)) => {
        v!([$f($($a[0]),*), $f($($a[1]),*), $f($($a[2]),*), $f($($a[3]),*)])
    };
}

/// Applies one instruction to three registers, the first of which is the accumulator. The intrinsics for these
/// (`vdotq_s32`, `vusdotq_s32`, `vusmmlaq_s32`) are not stable yet.
macro_rules! accumulate {
    ($extension:literal, $instruction:literal, $acc:ident, $w:ident, $a:ident) => {{
        let mut acc = $acc;
        // SAFETY: used where the token proves the instruction; it only reads and writes these registers.
        unsafe {
            asm!(
                concat!(".arch_extension ", $extension),
                concat!($instruction, " {acc:v}.4s, {w:v}.16b, {a:v}.16b"),
                acc = inout(vreg) acc, w = in(vreg) $w, a = in(vreg) $a,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        acc
    }};
}

impl<const PRODUCTS: u8> Neon<PRODUCTS> {
    /// `acc + w[0]*a[0] + ... + w[3]*a[3]` in each lane. `w` are unsigned bytes with `i8mm` and signed ones without it.
    #[inline(always)]
    fn dot4_register(self, acc: int32x4_t, w: uint8x16_t, a: int8x16_t) -> int32x4_t {
        match PRODUCTS {
            I8MM => accumulate!("i8mm", "usdot", acc, w, a),
            DOT => accumulate!("dotprod", "sdot", acc, w, a),
            // Products fit 16 bits, sums of two of them do not always: they are widened before they are added.
            _ => v!({
                let w = vreinterpretq_s8_u8(w);
                let low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(a)));
                let high = vpaddlq_s16(vmull_s8(vget_high_s8(w), vget_high_s8(a)));
                vaddq_s32(acc, vpaddq_s32(low, high))
            }),
        }
    }

    /// Four activations in every lane.
    #[inline(always)]
    fn splat_quad(self, a: &[i8; 4]) -> int8x16_t {
        v!(vreinterpretq_s8_s32(vdupq_n_s32(i32::from_le_bytes(a.map(|x| x as u8)))))
    }
}

impl<const PRODUCTS: u8> Simd for Neon<PRODUCTS> {
    type F32 = [float32x4_t; 4];
    type I32 = [int32x4_t; 4];
    type U8 = [uint8x16_t; 4];

    nothing_narrow!();

    const REGISTERS: usize = 8;
    const PAIRS: bool = PRODUCTS == I8MM;

    methods! {
        splat(x: f32) -> Self::F32 = v!([vdupq_n_f32(x); 4]);
        load(x: &[f32; LANES]) -> Self::F32 = v!(std::array::from_fn(|i| vld1q_f32(x.as_ptr().add(4 * i))));
    }
    #[inline(always)]
    fn store(self, v: Self::F32, out: &mut [f32; LANES]) {
        v!({
            for (i, v) in v.into_iter().enumerate() {
                vst1q_f32(out.as_mut_ptr().add(4 * i), v);
            }
        })
    }
    #[inline(always)]
    fn from_f16(self, x: &[f16; LANES]) -> Self::F32 {
        v!(std::array::from_fn(|i| {
            vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x.as_ptr().add(4 * i).cast())))
        }))
    }
    #[inline(always)]
    fn to_f16(self, v: Self::F32, out: &mut [f16; LANES]) {
        v!({
            for (i, v) in v.into_iter().enumerate() {
                vst1_u16(out.as_mut_ptr().add(4 * i).cast(), vreinterpret_u16_f16(vcvt_f16_f32(v)));
            }
        })
    }
    #[inline(always)]
    fn from_bf16(self, x: &[bf16; LANES]) -> Self::F32 {
        v!(std::array::from_fn(|i| {
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(x.as_ptr().add(4 * i).cast())))
        }))
    }

    methods! {
        add(a: Self::F32, b: Self::F32) -> Self::F32 = each!(vaddq_f32(a, b));
        sub(a: Self::F32, b: Self::F32) -> Self::F32 = each!(vsubq_f32(a, b));
        mul(a: Self::F32, b: Self::F32) -> Self::F32 = each!(vmulq_f32(a, b));
        div(a: Self::F32, b: Self::F32) -> Self::F32 = each!(vdivq_f32(a, b));
        fma(a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 = each!(vfmaq_f32(c, a, b));
    }
    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        // Not vmaxq, which preserves a NaN on either side.
        self.select_lt(b, a, a, b)
    }
    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        self.select_lt(a, b, a, b)
    }
    #[inline(always)]
    fn abs(self, a: Self::F32) -> Self::F32 {
        each!(vabsq_f32(a))
    }
    #[inline(always)]
    fn select_lt(self, a: Self::F32, b: Self::F32, x: Self::F32, y: Self::F32) -> Self::F32 {
        let less = each!(vcltq_f32(a, b));
        each!(vbslq_f32(less, x, y))
    }
    #[inline(always)]
    fn mul_pow2(self, v: Self::F32, n: Self::F32) -> Self::F32 {
        // In two halves, so that neither factor leaves the range of normal numbers; only the second can round.
        v!(std::array::from_fn(|i| {
            let n = vcvtnq_s32_f32(n[i]);
            let half = vshrq_n_s32::<1>(n);
            let bias = vdupq_n_s32(127);
            let a = vshlq_n_s32::<23>(vaddq_s32(half, bias));
            let b = vshlq_n_s32::<23>(vaddq_s32(vsubq_s32(n, half), bias));
            vmulq_f32(vmulq_f32(v[i], vreinterpretq_f32_s32(a)), vreinterpretq_f32_s32(b))
        }))
    }
    #[inline(always)]
    fn mul_pow2_normal(self, v: Self::F32, n: Self::F32) -> Self::F32 {
        v!(std::array::from_fn(|i| {
            let n = vshlq_n_s32::<23>(vcvtnq_s32_f32(n[i]));
            vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(v[i]), n))
        }))
    }
    #[inline(always)]
    fn round(self, a: Self::F32) -> Self::F32 {
        each!(vrndnq_f32(a))
    }
    #[inline(always)]
    fn reduce_sum(self, v: Self::F32) -> f32 {
        v!({
            let v = vaddq_f32(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
            let v = vadd_f32(vget_low_f32(v), vget_high_f32(v));
            vget_lane_f32::<0>(v) + vget_lane_f32::<1>(v)
        })
    }
    #[inline(always)]
    fn reduce_max(self, v: Self::F32) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        super::Scalar.reduce_max(lanes)
    }

    #[inline(always)]
    fn splat_i32(self, x: i32) -> Self::I32 {
        v!([vdupq_n_s32(x); 4])
    }
    #[inline(always)]
    fn store_i32(self, v: Self::I32, out: &mut [i32; LANES]) {
        v!({
            for (i, v) in v.into_iter().enumerate() {
                vst1q_s32(out.as_mut_ptr().add(4 * i), v);
            }
        })
    }
    #[inline(always)]
    fn from_u8(self, x: &[u8; LANES]) -> Self::I32 {
        v!({
            let x = vld1q_u8(x.as_ptr());
            let (low, high) = (vmovl_u8(vget_low_u8(x)), vmovl_u8(vget_high_u8(x)));
            [
                vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))),
                vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
                vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))),
                vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high))),
            ]
        })
    }
    #[inline(always)]
    fn from_i8(self, x: &[i8; LANES]) -> Self::I32 {
        v!({
            let x = vld1q_s8(x.as_ptr());
            let (low, high) = (vmovl_s8(vget_low_s8(x)), vmovl_s8(vget_high_s8(x)));
            [
                vmovl_s16(vget_low_s16(low)),
                vmovl_s16(vget_high_s16(low)),
                vmovl_s16(vget_low_s16(high)),
                vmovl_s16(vget_high_s16(high)),
            ]
        })
    }
    #[inline(always)]
    fn store_i8(self, v: Self::I32, out: &mut [i8; LANES]) {
        v!({
            let low = vcombine_s16(vmovn_s32(v[0]), vmovn_s32(v[1]));
            let high = vcombine_s16(vmovn_s32(v[2]), vmovn_s32(v[3]));
            vst1q_s8(out.as_mut_ptr(), vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
        })
    }
    methods! {
        add_i32(a: Self::I32, b: Self::I32) -> Self::I32 = each!(vaddq_s32(a, b));
        max_i32(a: Self::I32, b: Self::I32) -> Self::I32 = each!(vmaxq_s32(a, b));
        shl_i32(a: Self::I32, bits: u32) -> Self::I32 = v!(a.map(|a| vshlq_s32(a, vdupq_n_s32(bits as i32))));
        bits_i32(a: Self::I32, shift: u32, mask: i32) -> Self::I32 =
            v!(a.map(|a| vandq_s32(vshlq_s32(a, vdupq_n_s32(-(shift as i32))), vdupq_n_s32(mask))));
        reduce_sum_i32(v: Self::I32) -> i32 =
            v!(vaddvq_s32(vaddq_s32(vaddq_s32(v[0], v[1]), vaddq_s32(v[2], v[3]))));
        to_i32(a: Self::F32) -> Self::I32 = each!(vcvtnq_s32_f32(a));
        to_f32(a: Self::I32) -> Self::F32 = each!(vcvtq_f32_s32(a));
        bits_to_f32(a: Self::I32) -> Self::F32 = each!(vreinterpretq_f32_s32(a));
        splat_u8(x: u8) -> Self::U8 = v!([vdupq_n_u8(x); 4]);
        load_u8(x: &[u8; 64]) -> Self::U8 = v!(std::array::from_fn(|i| vld1q_u8(x.as_ptr().add(16 * i))));
    }
    #[inline(always)]
    fn store_u8(self, v: Self::U8, out: &mut [u8; 64]) {
        v!({
            for (i, v) in v.into_iter().enumerate() {
                vst1q_u8(out.as_mut_ptr().add(16 * i), v);
            }
        })
    }
    methods! {
        or_u8(a: Self::U8, b: Self::U8) -> Self::U8 = each!(vorrq_u8(a, b));
        bits_u8(v: Self::U8, shift: i32, mask: u8) -> Self::U8 =
            v!(v.map(|v| vandq_u8(vshlq_u8(v, vdupq_n_s8(-shift as i8)), vdupq_n_u8(mask))));
    }
    #[inline(always)]
    fn lookup_u8(self, table: &[u8; 16], v: Self::U8) -> Self::U8 {
        v!({
            let table = vld1q_u8(table.as_ptr());
            v.map(|v| vqtbl1q_u8(table, v))
        })
    }
    #[inline(always)]
    fn dot4(self, acc: Self::I32, w: Self::U8, a: &[i8; 4]) -> Self::I32 {
        // Weights are at most 127, so they are the same read as signed bytes.
        let a = self.splat_quad(a);
        std::array::from_fn(|i| self.dot4_register(acc[i], w[i], a))
    }
    #[inline(always)]
    fn dot4_i8(self, acc: Self::I32, v: Self::U8, a: &[i8; 4]) -> Self::I32 {
        // The unsigned factor is the first operand.
        let a = v!(vreinterpretq_u8_s8(self.splat_quad(a)));
        std::array::from_fn(|i| self.dot4_register(acc[i], a, v!(vreinterpretq_s8_u8(v[i]))))
    }
    #[inline(always)]
    fn dot4_offset_start(self, negative_sum: i32) -> Self::I32 {
        self.splat_i32(if PRODUCTS == I8MM { negative_sum << 7 } else { 0 })
    }
    #[inline(always)]
    fn dot4_offset(self, acc: Self::I32, w: Self::U8, a: &[i8; 4]) -> Self::I32 {
        if PRODUCTS == I8MM {
            return self.dot4(acc, w, a);
        }
        // byte - 128 is the byte with its top bit turned over, read as a signed one.
        let a = self.splat_quad(a);
        std::array::from_fn(|i| self.dot4_register(acc[i], v!(veorq_u8(w[i], vdupq_n_u8(0x80))), a))
    }

    // With i8mm, a register of paired steps holds eight inputs of two lanes, a register of paired sums these two lanes
    // of both rows: [lane 0 of row 0, lane 0 of row 1, lane 1 of row 0, lane 1 of row 1].

    #[inline(always)]
    fn pair_steps(self, steps: [Self::U8; 2]) -> [Self::U8; 2] {
        if PRODUCTS != I8MM {
            return steps;
        }
        v!({
            let [a, b] = steps.map(|step| step.map(|v| vreinterpretq_u32_u8(v)));
            let first = |i: usize| vreinterpretq_u8_u32(vzip1q_u32(a[i], b[i]));
            let second = |i: usize| vreinterpretq_u8_u32(vzip2q_u32(a[i], b[i]));
            [[first(0), second(0), first(1), second(1)], [first(2), second(2), first(3), second(3)]]
        })
    }
    #[inline(always)]
    fn pair_rows(self, rows: [Self::I32; 2]) -> [Self::I32; 2] {
        if PRODUCTS != I8MM {
            return rows;
        }
        v!({
            let [a, b] = rows;
            let first = |i: usize| vzip1q_s32(a[i], b[i]);
            let second = |i: usize| vzip2q_s32(a[i], b[i]);
            [[first(0), second(0), first(1), second(1)], [first(2), second(2), first(3), second(3)]]
        })
    }
    #[inline(always)]
    fn unpair_rows(self, pair: [Self::I32; 2]) -> [Self::I32; 2] {
        if PRODUCTS != I8MM {
            return pair;
        }
        v!({
            let [a, b] = pair;
            [
                [
                    vuzp1q_s32(a[0], a[1]),
                    vuzp1q_s32(a[2], a[3]),
                    vuzp1q_s32(b[0], b[1]),
                    vuzp1q_s32(b[2], b[3]),
                ],
                [
                    vuzp2q_s32(a[0], a[1]),
                    vuzp2q_s32(a[2], a[3]),
                    vuzp2q_s32(b[0], b[1]),
                    vuzp2q_s32(b[2], b[3]),
                ],
            ]
        })
    }
    #[inline(always)]
    fn dot8(self, acc: [Self::I32; 2], w: [Self::U8; 2], a: [&[i8; 8]; 2], bytes: Bytes) -> [Self::I32; 2] {
        if PRODUCTS != I8MM {
            return dot8_by_dot4(self, acc, w, a, bytes);
        }
        let a = v!(vcombine_s8(vld1_s8(a[0].as_ptr()), vld1_s8(a[1].as_ptr())));
        std::array::from_fn(|half| {
            std::array::from_fn(|i| {
                let (acc, w) = (acc[half][i], w[half][i]);
                // Activations beside signed weights are below 128, so they are the same read as signed bytes.
                match bytes {
                    Bytes::Small | Bytes::Offset => accumulate!("i8mm", "usmmla", acc, w, a),
                    Bytes::Signed => accumulate!("i8mm", "smmla", acc, w, a),
                }
            })
        })
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a hint; any address is allowed.
        unsafe {
            asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags))
        }
    }
}
