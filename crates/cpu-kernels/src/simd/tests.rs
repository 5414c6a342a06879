//! Every instruction set of this machine against [`Scalar`], bit for bit, and the functions against `f64`.

use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::isa::{Isa, simd_kernels};

/// Inputs of all operations.
#[derive(Clone, Debug)]
struct Input {
    a: [f32; 16],
    b: [f32; 16],
    c: [f32; 16],
    halves: [u16; 16],
    bytes: [u8; 64],
    other: [u8; 64],
    quad: [i8; 4],
    octs: [[i8; 8]; 2],
}

simd_kernels! {
    struct TestKernels {
        fn operations(input: &Input) -> Vec<u32> = operations;
        fn exps(x: &[f32], out: &mut [f32]) = exps;
        fn weights(x: &[f32], out: &mut [f32]) = weights;
        fn tanhs(x: &[f32], out: &mut [f32]) = tanhs;
    }
}

#[inline(always)]
fn operations<S: Simd>(s: S, input: &Input) -> Vec<u32> {
    let mut bits = Vec::new();
    let mut float = |v: S::F32| {
        let mut lanes = [0.0; 16];
        s.store(v, &mut lanes);
        bits.extend(lanes.map(f32::to_bits));
    };
    let (a, b, c) = (s.load(&input.a), s.load(&input.b), s.load(&input.c));
    for v in [s.add(a, b), s.sub(a, b), s.mul(a, b), s.div(a, b), s.fma(a, b, c), s.max(a, b), s.min(a, b)] {
        float(v);
    }
    for v in [s.abs(a), s.round(a), s.select_lt(a, b, c, a), s.splat(input.a[3]), s.load_part(&input.a[..5])]
    {
        float(v);
    }
    for v in [exp(s, a), sigmoid(s, a), silu(s, a), tanh(s, a), weight(s, s.min(a, s.splat(1.0)))] {
        float(v);
    }
    float(s.mul_pow2(b, s.round(s.min(s.max(a, s.splat(-250.0)), s.splat(250.0)))));
    float(s.from_f16(&input.halves.map(|h| f16::from_bits(h & 0xfbff)))); // finite
    float(s.from_bf16(&input.halves.map(bf16::from_bits)));
    float(s.to_f32(s.to_i32(a)));
    float(s.splat(s.reduce_sum(a)));
    float(s.splat(s.reduce_max(b)));
    let mut halves = [f16::ZERO; 16];
    s.to_f16(a, &mut halves);
    bits.extend(halves.map(|h| u32::from(h.to_bits())));

    let mut int = |v: S::I32| {
        let mut lanes = [0; 16];
        s.store_i32(v, &mut lanes);
        bits.extend(lanes.map(|x| x as u32));
    };
    let bytes = input.bytes.first_chunk::<16>().unwrap();
    let (x, y) = (s.to_i32(a), s.from_i8(&bytes.map(|b| b as i8)));
    for v in [
        x,
        y,
        s.from_u8(bytes),
        s.add_i32(x, y),
        s.max_i32(x, y),
        s.shl_i32(x, 7),
        s.shl_i32(y, 23),
        s.bits_i32(s.from_u8(bytes), 4, 15),
    ] {
        int(v);
    }
    int(s.splat_i32(s.reduce_sum_i32(x)));
    let (w, small) = (s.load_u8(&input.bytes), s.bits_u8(s.load_u8(&input.bytes), 0, 0x7f));
    let sum: i32 = input.quad.iter().map(|&x| i32::from(x)).sum();
    int(s.dot4(x, small, &input.quad));
    int(s.dot4(s.splat_i32(0), s.splat_u8(127), &[-127; 4]));
    int(s.dot4_i8(x, w, &input.quad.map(i8::abs)));
    for extreme in [0x80, 0x7f] {
        int(s.dot4_i8(s.splat_i32(0), s.splat_u8(extreme), &[127; 4]));
    }
    int(s.dot4_offset(s.dot4_offset_start(-sum), w, &input.quad));
    for extreme in [0, 255] {
        int(s.dot4_offset(s.dot4_offset_start(4 * 127), s.splat_u8(extreme), &[-127; 4]));
    }
    let octs: [&[i8; 8]; 2] = [&input.octs[0], &input.octs[1]];
    let sums = octs.map(|oct| -oct.iter().map(|&x| i32::from(x)).sum::<i32>());
    let other = s.load_u8(&input.other);
    let pair =
        s.dot8(s.pair_rows([x, y]), s.pair_steps([small, s.bits_u8(other, 0, 0x7f)]), octs, Bytes::Small);
    let offset_pair = s.dot8(
        s.pair_rows([s.dot4_offset_start(sums[0]), s.dot4_offset_start(sums[1])]),
        s.pair_steps([w, other]),
        octs,
        Bytes::Offset,
    );
    let positive = input.octs.map(|oct| oct.map(|x| x.max(-127).abs()));
    let signed_pair =
        s.dot8(s.pair_rows([x, y]), s.pair_steps([w, other]), [&positive[0], &positive[1]], Bytes::Signed);
    for pair in [pair, offset_pair, signed_pair] {
        for row in s.unpair_rows(pair) {
            int(row);
        }
    }
    let mut low = [0; 16];
    s.store_i8(x, &mut low);
    bits.extend(low.map(|x| u32::from(x as u8)));

    let mut byte = |v: S::U8| {
        let mut out = [0; 64];
        s.store_u8(v, &mut out);
        bits.extend(out.map(u32::from));
    };
    byte(s.or_u8(w, s.load_u8(&input.other)));
    for v in [s.bits_u8(w, 4, 15), s.bits_u8(w, -4, 0xf0), s.bits_u8(w, 6, 3), s.bits_u8(w, -2, 0x30)] {
        byte(v);
    }
    byte(s.lookup_u8(bytes, s.bits_u8(w, 0, 15)));
    bits
}

#[inline(always)]
fn exps<S: Simd>(s: S, x: &[f32], out: &mut [f32]) {
    for (x, out) in x.chunks(16).zip(out.chunks_mut(16)) {
        s.store_part(exp(s, s.load_part(x)), out);
    }
}

#[inline(always)]
fn weights<S: Simd>(s: S, x: &[f32], out: &mut [f32]) {
    for (x, out) in x.chunks(16).zip(out.chunks_mut(16)) {
        s.store_part(weight(s, s.load_part(x)), out);
    }
}

#[inline(always)]
fn tanhs<S: Simd>(s: S, x: &[f32], out: &mut [f32]) {
    for (x, out) in x.chunks(16).zip(out.chunks_mut(16)) {
        s.store_part(tanh(s, s.load_part(x)), out);
    }
}

fn scalar() -> TestKernels {
    TestKernels::new(*Isa::supported().last().unwrap())
}

fn floats() -> impl Strategy<Value = [f32; 16]> {
    // Normal numbers of moderate size, exact ties for rounding, and zeros.
    prop::array::uniform16(prop_oneof![
        6 => -100.0f32..100.0,
        2 => (-400i32..400).prop_map(|x| x as f32 / 2.0),
        1 => -1e-5f32..1e-5,
        1 => Just(0.0),
    ])
}

proptest! {
    #[test]
    fn all_instruction_sets_compute_the_same_bits(
        (a, b, c) in (floats(), floats(), floats()),
        halves in prop::array::uniform16(any::<u16>().prop_filter("signals", |h| h & 0x7f80 != 0x7f80)),
        bytes in prop::collection::vec(any::<u8>(), 64),
        other in prop::collection::vec(any::<u8>(), 64),
        quad in prop::array::uniform4(-127i8..=127),
        octs in prop::array::uniform2(prop::array::uniform8(-127i8..=127)),
    ) {
        let input = Input {
            a, b, c, halves,
            bytes: bytes.try_into().unwrap(),
            other: other.try_into().unwrap(),
            quad,
            octs,
        };
        let expected = scalar().operations(&input);
        for isa in Isa::supported() {
            // Quotients by zero differ only in how "not a number" is spelled.
            for (at, (got, want)) in TestKernels::new(isa).operations(&input).iter().zip(&expected).enumerate() {
                let both_nan = f32::from_bits(*got).is_nan() && f32::from_bits(*want).is_nan();
                prop_assert!(got == want || both_nan, "{isa}: value {at} is {got:#x}, not {want:#x}");
            }
        }
    }
}

#[test]
fn exp_and_tanh_are_precise() {
    let x: Vec<f32> = (-87_300..88_700).map(|i| i as f32 * 1e-3 + 0.000_37).collect();
    let (mut e, mut t) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    scalar().exps(&x, &mut e);
    scalar().tanhs(&x, &mut t);
    for ((x, e), t) in x.iter().zip(&e).zip(&t) {
        let (exact, exact_tanh) = (f64::from(*x).exp(), f64::from(*x).tanh());
        assert!((f64::from(*e) / exact - 1.0).abs() < 1.5e-7, "exp({x}) = {e}");
        assert!((f64::from(*t) - exact_tanh).abs() < 4e-7, "tanh({x}) = {t}");
    }
}

#[test]
fn weights_are_precise() {
    let x: Vec<f32> = (-125_000..=1000).map(|i| i as f32 / 1e3).collect();
    for isa in Isa::supported() {
        let mut y = vec![0.0; x.len()];
        TestKernels::new(isa).weights(&x, &mut y);
        for (x, y) in x.iter().zip(&y) {
            assert!((f64::from(*y) / f64::from(*x).exp2() - 1.0).abs() < 2e-7, "{isa}: weight({x}) = {y}");
        }
        let mut ends = [1.0; 5];
        TestKernels::new(isa).weights(&[f32::NEG_INFINITY, -1e30, -125.1, 0.0, f32::NAN], &mut ends);
        assert_eq!(ends[..4], [0.0, 0.0, 0.0, 1.0], "{isa}");
        assert!(ends[4].is_nan(), "{isa}");
    }
}

#[test]
fn exp_at_its_ends() {
    let x = [f32::NEG_INFINITY, -1e30, -104.4, -88.0, 0.0, 88.72, 88.73, 1e30, f32::INFINITY, f32::NAN];
    for isa in Isa::supported() {
        let mut y = [1.0; 10];
        TestKernels::new(isa).exps(&x, &mut y);
        assert_eq!(y[0], 0.0, "{isa}");
        assert_eq!(y[1], 0.0, "{isa}");
        assert!(y[2] < 1e-44, "{isa}");
        assert!((y[3] / 6.054_601e-39 - 1.0).abs() < 1e-6, "{isa}: subnormal {:e}", y[3]);
        assert_eq!(y[4], 1.0, "{isa}");
        assert!(y[5] > 3.38e38 && y[5].is_finite(), "{isa}: {:e}", y[5]);
        assert!(y[6] == f32::INFINITY && y[7] == f32::INFINITY && y[8] == f32::INFINITY, "{isa}");
        assert!(y[9].is_nan(), "{isa}");
    }
}
