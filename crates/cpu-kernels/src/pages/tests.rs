//! Tests of the arrangement of pages.

use std::collections::HashSet;

use paguro_backend::{KvGroup, KvLayout, hadamard};

use super::*;
use crate::{isa::Isa, ops::RowKernels};

const DTYPES: [KvDtype; 3] = KvDtype::ALL;

fn shape(block_size: usize, head_dim: usize, dtype: KvDtype) -> PageShape {
    let kv = KvLayout {
        groups: vec![KvGroup { window: None, spans: false, layer_slots: 3, kv_heads: 2, head_dim }],
    };
    PageShape::of_groups(&kv, block_size, dtype).unwrap()[0]
}

#[test]
fn every_element_has_a_place_of_its_own() {
    for (block_size, head_dim) in [(16, 16), (32, 80), (64, 48), (32, 72), (16, 8)] {
        for dtype in DTYPES {
            let shape = shape(block_size, head_dim, dtype);
            // In half bytes.
            let width = [4, 2, 1][DTYPES.iter().position(|&other| other == dtype).unwrap()];
            for half in [Half::K, Half::V] {
                let mut free = vec![true; 2 * shape.half_bytes()];
                let mut take = |at: usize, width: usize| {
                    assert!(
                        free[at..at + width].iter().all(|&free| free),
                        "{shape:?}, {half:?}, half byte {at}"
                    );
                    free[at..at + width].fill(false);
                };
                for token in 0..block_size {
                    for dim in 0..head_dim {
                        let is_high = dtype == KvDtype::Q4 && PageShape::is_high(half, dim);
                        take(2 * shape.element_at(half, token, dim) + usize::from(is_high), width);
                    }
                    if dtype.is_quantized() {
                        (0..shape.blocks()).for_each(|block| take(2 * shape.scale_at(token, block), 4));
                    }
                }
            }
        }
    }
}

#[test]
fn written_heads_are_read_and_nothing_else_changes() {
    let kernels = RowKernels::new(Isa::detect());
    for dtype in DTYPES {
        let shape = shape(32, 48, dtype);
        let mut arena = Arena::new(4, vec![shape]).unwrap();
        arena.poison();
        let all = |arena: &Arena| {
            let mut numbers = Vec::new();
            for (page, layer_slot, kv_head) in
                (0..4).flat_map(|page| (0..6).map(move |head| (PageId(page), head / 2, head % 2)))
            {
                for token in 0..32 {
                    let (mut k, mut v) = ([0.0; 48], [0.0; 48]);
                    // SAFETY: nobody writes.
                    unsafe { arena.pages(0) }.token(
                        Place { group: 0, page, layer_slot, kv_head, token },
                        &mut k,
                        &mut v,
                    );
                    numbers.extend(k.into_iter().chain(v));
                }
            }
            numbers
        };
        let before = all(&arena);
        assert!(before.iter().all(|x| x.is_finite()), "noise is finite");

        let k: Vec<f32> = (0..48).map(|i| 127.0 - i as f32).collect();
        let v: Vec<f32> = (0..48).map(|i| 120.0 - i as f32).collect();
        let place = Place { group: 0, page: PageId(2), layer_slot: 1, kv_head: 1, token: 19 };
        for (half, x) in [(Half::K, &k), (Half::V, &v)] {
            let mut stored = StoredHead::new(shape.dtype, shape.head_dim);
            stored.set(&kernels, &mut x.clone());
            // SAFETY: nobody else is here.
            unsafe { arena.write(place, half, &stored) };
        }
        let (mut read_k, mut read_v) = (vec![0.0; 48], vec![0.0; 48]);
        // SAFETY: nobody writes.
        unsafe { arena.pages(0) }.token(place, &mut read_k, &mut read_v);
        if dtype.is_quantized() {
            hadamard(&mut read_k);
            hadamard(&mut read_v);
        }
        // The first element of a transformed part is its sum, which is far larger than the others.
        let most = [0.0, 5.0, 50.0][DTYPES.iter().position(|&other| other == dtype).unwrap()];
        for (read, x) in read_k.iter().chain(&read_v).zip(k.iter().chain(&v)) {
            assert!((read - x).abs() <= most, "{dtype:?}: {read} is not {x}");
        }
        let changed = all(&arena).iter().zip(&before).filter(|(a, b)| a != b).count();
        // Quants that are zeros in the noise may stay zeros.
        let least = if dtype == KvDtype::F16 { 96 } else { 70 };
        assert!((least..=96).contains(&changed), "{dtype:?}: {changed}");

        arena.copy(PageId(2), PageId(1));
        let numbers = all(&arena);
        let page = numbers.len() / 4;
        assert!(numbers[page..2 * page] == numbers[2 * page..3 * page]);
        assert!(numbers[..page] == before[..page] && numbers[3 * page..] == before[3 * page..]);
    }
}

#[test]
fn pages_do_not_share_cache_sets() {
    // TinyLlama: 22 layers of 4 heads of 64 would make pages of f16 a multiple of 64 KiB.
    let kv = KvLayout {
        groups: vec![KvGroup { window: None, spans: false, layer_slots: 22, kv_heads: 4, head_dim: 64 }],
    };
    for dtype in DTYPES {
        let bytes = PageShape::page_bytes(&PageShape::of_groups(&kv, 32, dtype).unwrap());
        assert!(bytes >= kv.page_bytes(32, dtype));
        let sets: HashSet<usize> = (0..16).map(|page| page * bytes % (1 << 16)).collect();
        assert_eq!(sets.len(), 16);
    }
}

#[test]
fn eight_bits_take_about_half_the_bytes_and_four_a_quarter() {
    for (head_dim, most_q8, most_q4) in [(64, 0.54, 0.29), (128, 0.54, 0.29), (80, 0.58, 0.38)] {
        let [f16, q8, q4] = DTYPES.map(|dtype| PageShape::page_bytes(&[shape(32, head_dim, dtype)]) as f64);
        assert!(q8 <= most_q8 * f16, "{head_dim}: {q8} of {f16}");
        assert!(q4 <= most_q4 * f16, "{head_dim}: {q4} of {f16}");
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused_by_name() {
    let kv = |head_dim| KvLayout {
        groups: vec![KvGroup { window: None, spans: false, layer_slots: 1, kv_heads: 1, head_dim }],
    };
    let error = |kv: &KvLayout, block_size| {
        PageShape::of_groups(kv, block_size, KvDtype::F16).unwrap_err().to_string()
    };
    assert!(error(&kv(63), 16).contains("heads of 63 elements"));
    assert!(error(&kv(64), 24).contains("pages of 24 tokens"));
    assert!(error(&kv(64), 0).contains("pages of 0 tokens"));
}
