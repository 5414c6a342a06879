//! Reads packed blocks into registers.

use super::layout::{Format, Scales};
use crate::simd::Simd;

/// # Safety
/// `N` values are readable at `at`.
#[inline(always)]
pub unsafe fn array<'a, T, const N: usize>(at: *const T) -> &'a [T; N] {
    // SAFETY: passed on to the caller; arrays have the alignment of their elements.
    unsafe { &*at.cast() }
}

/// A packed block's scales. Reading is unsafe in all methods: `start` points at a whole packed block of format `F`, sub-blocks
/// and halves are inside.
pub struct PackedBlock<S: Simd> {
    start: *const u8,
    d: S::F32,
    dmin: S::F32,
}

/// Returns true if a format has these scales. Choices between formats are constants of a `const` block, so that a
/// kernel contains only its own format's code.
const fn scales_are<F: Format>(scales: Scales) -> bool {
    F::LAYOUT.scales as u8 == scales as u8
}

impl<S: Simd> PackedBlock<S> {
    /// # Safety
    /// See [`PackedBlock`].
    #[inline(always)]
    pub unsafe fn at<F: Format>(s: S, start: *const u8) -> Self {
        let (mut d, mut dmin) = (s.zero(), s.zero());
        // SAFETY: with super-blocks, a packed block starts with 16 f16 of d and 16 of dmin, or with 16 f32 of d. Packed blocks are
        // aligned to cache lines.
        unsafe {
            if const { !F::LAYOUT.whole_scales() } {
                d = s.load(array(start.cast()));
            } else if const { F::LAYOUT.has_super() } {
                d = s.from_f16(array(start.cast()));
                if const { F::LAYOUT.unit != 1.0 } {
                    d = s.mul(d, s.splat(const { F::LAYOUT.unit }));
                }
                if const { F::LAYOUT.minimums } {
                    dmin = s.from_f16(array(start.add(32).cast()));
                }
            }
        }
        Self { start, d, dmin }
    }

    /// Scales and minimums (zero if there are none) of sub-block `sub` of the 16 rows.
    ///
    /// # Safety
    /// See [`PackedBlock`].
    #[inline(always)]
    pub unsafe fn scales<F: Format>(&self, s: S, sub: usize) -> (S::F32, S::F32) {
        // SAFETY: passed on to the caller.
        let (scales, minimums) = unsafe { self.own_scales::<F>(s, sub) };
        (if const { F::LAYOUT.has_super() } { s.mul(self.d, scales) } else { scales }, minimums)
    }

    /// Like [`PackedBlock::scales`], without the factor [`PackedBlock::d`] of formats with super-blocks. Such scales are integers, except
    /// with [`Scales::E4m3`].
    ///
    /// # Safety
    /// See [`PackedBlock`].
    #[inline(always)]
    pub unsafe fn own_scales<F: Format>(&self, s: S, sub: usize) -> (S::F32, S::F32) {
        let layout = const { &F::LAYOUT };
        let step = layout.scale_bytes();
        // SAFETY: the layout says that these arrays are in the packed block.
        unsafe {
            let scales = self.start.add(layout.scales_at() + sub * step);
            let minimums = self.start.add(layout.minimums_at() + sub * step);
            if const { scales_are::<F>(Scales::Half) } {
                let scales = s.from_f16(array(scales.cast()));
                if const { !F::LAYOUT.minimums } {
                    return (scales, s.zero());
                }
                let minimums = s.from_f16(array(minimums.cast()));
                (scales, if const { F::LAYOUT.ranged } { s.mul(scales, minimums) } else { minimums })
            } else if const { scales_are::<F>(Scales::Exponent) } {
                // The larger of `e8m0_half`'s two cases is correct: 2^(e - 128), or for e < 2 the subnormals with the
                // bits (e + 1) << 21.
                let e = s.from_u8(array(scales));
                let subnormal = s.shl_i32(s.add_i32(e, s.splat_i32(1)), 21);
                let normal = s.shl_i32(s.add_i32(e, s.splat_i32(-1)), 23);
                (s.bits_to_f32(s.max_i32(subnormal, normal)), s.zero())
            } else if const { scales_are::<F>(Scales::Bytes) } {
                let scale = s.to_f32(s.from_u8(array(scales)));
                let minimum = s.to_f32(s.from_u8(array(minimums)));
                (scale, s.mul(self.dmin, minimum))
            } else if const { scales_are::<F>(Scales::E4m3) } {
                // The bits of a number that is too small by 2^120; half of it is the scale.
                let small = s.bits_to_f32(s.shl_i32(s.from_u8(array(scales)), 20));
                (s.mul(small, s.splat(f32::from_bits((127 + 119) << 23))), s.zero())
            } else if const { scales_are::<F>(Scales::SignedBytes) } {
                (s.to_f32(s.from_i8(array(scales.cast()))), s.zero())
            } else {
                let both = s.from_u8(array(scales));
                let scale = s.to_f32(s.bits_i32(both, 0, 15));
                let minimum = s.to_f32(s.bits_i32(both, 4, 15));
                (scale, s.mul(self.dmin, minimum))
            }
        }
    }

    /// Returns the factor of all scales of the packed block; zero in formats without super-blocks.
    #[inline(always)]
    pub fn d(&self) -> S::F32 {
        self.d
    }

    /// The quants of 16 inputs, four steps: the first or second half (`HALF`) of block `block`.
    ///
    /// # Safety
    /// See [`PackedBlock`].
    #[inline(always)]
    pub unsafe fn quants<F: Format, const HALF: usize>(&self, s: S, block: usize) -> [S::U8; 4] {
        let layout = const { &F::LAYOUT };
        let half = 2 * block + HALF;
        // SAFETY: the planes hold `2 * bits` bytes an input, and this half's vectors start at these places. The one-bit
        // plane has one vector for both halves.
        unsafe {
            let low = self.start.add(layout.low_at() + half * 32 * layout.low_bits);
            let mut quants = match const { F::LAYOUT.low_bits } {
                2 => {
                    let v = s.load_u8(array(low));
                    [s.bits_u8(v, 0, 3), s.bits_u8(v, 2, 3), s.bits_u8(v, 4, 3), s.bits_u8(v, 6, 3)]
                }
                4 => {
                    let (v, w) = (s.load_u8(array(low)), s.load_u8(array(low.add(64))));
                    [s.bits_u8(v, 0, 15), s.bits_u8(v, 4, 15), s.bits_u8(w, 0, 15), s.bits_u8(w, 4, 15)]
                }
                _ => [
                    s.load_u8(array(low)),
                    s.load_u8(array(low.add(64))),
                    s.load_u8(array(low.add(128))),
                    s.load_u8(array(low.add(192))),
                ],
            };
            if const { F::LAYOUT.high_bits > 0 } {
                let bits = layout.high_bits as i32;
                let high_at = if bits == 1 { block * 64 } else { half * 64 };
                let v = s.load_u8(array(self.start.add(layout.high_at() + high_at)));
                // Shift from the position in the plane to above the low bits.
                let first = if bits == 1 { 4 * HALF as i32 } else { 0 } - layout.low_bits as i32;
                let mask = ((1 << bits) - 1) << layout.low_bits;
                quants = [
                    s.or_u8(quants[0], s.bits_u8(v, first, mask)),
                    s.or_u8(quants[1], s.bits_u8(v, first + bits, mask)),
                    s.or_u8(quants[2], s.bits_u8(v, first + 2 * bits, mask)),
                    s.or_u8(quants[3], s.bits_u8(v, first + 3 * bits, mask)),
                ];
            }
            if const { F::LAYOUT.codebook.is_some() }
                && let Some(values) = &layout.codebook
            {
                quants = [
                    s.lookup_u8(values, quants[0]),
                    s.lookup_u8(values, quants[1]),
                    s.lookup_u8(values, quants[2]),
                    s.lookup_u8(values, quants[3]),
                ];
            }
            quants
        }
    }
}
