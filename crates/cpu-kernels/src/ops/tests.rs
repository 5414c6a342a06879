//! Tests of operations on rows.

use paguro_backend::{NormKind, quantize_kv, reference::ops};
use paguro_backend_conformance::Rng;

use super::*;
use crate::isa::Isa;

/// Widths with and without a rest.
const WIDTHS: [usize; 7] = [1, 15, 16, 17, 64, 219, 2048];

fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| 3.0 * rng.normal()).collect()
}

/// Checks that all instruction sets give the same bits, and `expected` within `tolerance` of its largest number.
fn check(what: &str, tolerance: f32, expected: &[f32], run: impl Fn(RowKernels) -> Vec<f32>) {
    let largest = expected.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
    let first = run(RowKernels::new(Isa::detect()));
    for (i, (a, b)) in first.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= tolerance * largest, "{what}, element {i} of {}: {a}, not {b}", first.len());
    }
    for isa in Isa::supported() {
        let ours = run(RowKernels::new(isa));
        assert!(ours.iter().zip(&first).all(|(a, b)| a.to_bits() == b.to_bits()), "{what} on {isa}");
    }
}

#[test]
fn rows_are_as_the_reference_has_them() {
    for width in WIDTHS {
        let (x, y) = (numbers(width, 1), numbers(width, 2));
        let mut normed = x.clone();
        ops::norm(&mut normed, NormKind::Rms, &y, None, 1e-5);
        check("rms_norm", 1e-6, &normed, |kernels| {
            let mut out = vec![f32::NAN; width];
            kernels.rms_norm(&x, &y, 1e-5, &mut out);
            out
        });
        let mut normed = x.clone();
        ops::norm(&mut normed, NormKind::Layer, &y, None, 1e-5);
        check("layer_norm", 2e-6, &normed, |kernels| {
            let mut out = vec![f32::NAN; width];
            kernels.layer_norm(&x, &y, 1e-5, &mut out);
            out
        });
        let in_place = |kernels: RowKernels, f: &dyn Fn(RowKernels, &mut [f32])| {
            let mut x = x.clone();
            f(kernels, &mut x);
            x
        };
        let sums: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        check("add", 0.0, &sums, |kernels| in_place(kernels, &|kernels, x| kernels.add(x, &y)));
        let products: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x * y).collect();
        check("multiply", 0.0, &products, |kernels| in_place(kernels, &|kernels, x| kernels.multiply(x, &y)));
        let scaled: Vec<f32> = x.iter().map(|x| x * 1.7).collect();
        check("scale", 0.0, &scaled, |kernels| in_place(kernels, &|kernels, x| kernels.scale(x, 1.7)));
        let capped: Vec<f32> = x.iter().map(|&x| ops::soft_cap(x, 2.5)).collect();
        check("soft_cap", 1e-6, &capped, |kernels| in_place(kernels, &|kernels, x| kernels.soft_cap(x, 2.5)));
        let added: Vec<f32> = x.iter().zip(&y).map(|(x, y)| y.mul_add(1.7, *x)).collect();
        check("add_scaled", 0.0, &added, |kernels| {
            in_place(kernels, &|kernels, x| kernels.add_scaled(x, &y, 1.7))
        });
        for activation in [
            Activation::Silu,
            Activation::GeluTanh,
            Activation::Gelu,
            Activation::Relu2,
            Activation::ClampedSwiglu { alpha: 1.7, limit: 2.0 },
        ] {
            let gated = x.iter().zip(&y).map(|(&x, &y)| ops::activate(Some(x), y, activation));
            check("activate_gate", 1e-6, &gated.collect::<Vec<_>>(), |kernels| {
                in_place(kernels, &|kernels, x| kernels.activate_gate(x, &y, activation))
            });
            if matches!(activation, Activation::ClampedSwiglu { .. }) {
                continue;
            }
            let alone: Vec<f32> = x.iter().map(|&x| ops::activate(None, x, activation)).collect();
            check("activate", 1e-6, &alone, |kernels| {
                in_place(kernels, &|kernels, x| kernels.activate(x, activation))
            });
        }
    }
}

#[test]
fn heads_are_rotated_as_the_reference_rotates_them() {
    for style in [RopeStyle::Interleaved, RopeStyle::HalfSplit] {
        for (head_dim, pairs) in [(64, 32), (64, 12), (80, 40), (80, 0), (16, 1), (128, 48)] {
            let frequencies = (0..pairs).map(|pair| 1e4_f32.powf(-(pair as f32) / 50.0)).collect();
            let rope = Rope { style, frequencies, axes: Vec::new(), magnitude: 1.3 };
            // Large positions, for which f32 angles would be inaccurate.
            for position in [0, 1, 77, 130_000] {
                let head = numbers(head_dim, 3);
                let mut expected = head.clone();
                ops::rotate(&mut expected, position, [3; 3], &rope);
                check("rotate", 1e-6, &expected, |kernels| {
                    let (mut head, mut at) = (head.clone(), vec![0.0; 2 * pairs]);
                    rope_row(&rope, position, [7; 3], &mut at);
                    kernels.rotate(&mut head, &at, style);
                    head
                });
            }
        }
    }
}

#[test]
fn what_is_stored_is_finite() {
    let mut x = numbers(16, 4);
    x[..6].copy_from_slice(&[1e9, -1e9, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 65519.9]);
    for isa in Isa::supported() {
        let mut out = [f16::ZERO; 16];
        RowKernels::new(isa).round_f16(&x, &mut out);
        let floats = out.map(f16::to_f32);
        assert_eq!(floats[..4], [65504.0, -65504.0, 65504.0, -65504.0]);
        assert!(floats[4].is_finite() && floats[5] == 65504.0);
        assert!(out[6..].iter().zip(&x[6..]).all(|(&half, &x)| half == f16::from_f32(x)));
    }
}

#[test]
fn quants_are_as_the_contract_defines_them() {
    for dtype in [KvDtype::Q8, KvDtype::Q4] {
        for (seed, width) in (5..).zip([2, 8, 16, 18, 32, 48, 64, 72, 80, 256]) {
            for size in [1e-8, 1e-4, 1.0, 1e7] {
                let x: Vec<f32> = numbers(width, seed).iter().map(|x| x * size).collect();
                let mut expected = (Vec::new(), vec![0; width]);
                let blocks = x.chunks(KV_BLOCK).zip(expected.1.chunks_mut(KV_BLOCK));
                expected.0 = blocks.map(|(x, quants)| quantize_kv(dtype, x, quants)).collect();
                for isa in Isa::supported() {
                    let mut ours = (vec![f16::NAN; width.div_ceil(KV_BLOCK)], vec![99; width]);
                    RowKernels::new(isa).quantize_kv(dtype, &x, &mut ours.0, &mut ours.1);
                    assert_eq!(ours, expected, "{isa}, {dtype:?}, {width} elements of size {size}");
                }
            }
        }
        for isa in Isa::supported() {
            let (mut scales, mut quants) = ([f16::NAN; 2], [0; 34]);
            let mut x = [1.0; 34];
            (x[3], x[5], x[33]) = (f32::NAN, f32::NEG_INFINITY, f32::NAN);
            RowKernels::new(isa).quantize_kv(dtype, &x, &mut scales, &mut quants);
            assert!(scales.iter().all(|scale| scale.is_finite()), "{isa}, {dtype:?}: {scales:?}");
        }
    }
}

#[test]
fn transforms_are_as_the_contract_defines_them() {
    for (seed, width) in (5..).zip([1, 2, 8, 16, 18, 32, 40, 48, 64, 72, 80, 128, 576]) {
        let x = numbers(width, seed);
        let mut expected = x.clone();
        paguro_backend::hadamard(&mut expected);
        check("hadamard", 0.0, &expected, |kernels| {
            let mut x = x.clone();
            kernels.hadamard(&mut x);
            x
        });
    }
}

#[test]
fn a_range_of_several_lists_is_cut_into_parts() {
    // Lists of 5, 3 and 4.
    let parts = |range: Range<usize>| [(0, 5), (5, 3), (8, 4)].map(|(offset, len)| part(&range, offset, len));
    assert_eq!(parts(0..12), [0..5, 0..3, 0..4]);
    assert_eq!(parts(4..9), [4..5, 0..3, 0..1]);
    assert_eq!(parts(6..7), [5..5, 1..2, 0..0]);
}
