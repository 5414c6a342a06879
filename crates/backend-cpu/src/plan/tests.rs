//! Tests of plans.

use paguro_backend::{AttentionMode, KvDtype, Output, OutputKind};

use super::*;

const LIMITS: Limits = Limits {
    block_size: 32,
    pages: 8,
    max_rows: 512,
    max_sequences: 64,
    max_outputs: 64,
    max_context: 1 << 17,
    states: 0,
    kv_dtype: KvDtype::F16,
    attention: AttentionMode::Paged,
    expert_slots: None,
};

fn plan(windows: &[Option<u32>], threads: usize, partials: usize) -> StepPlan {
    let heads = Heads { queries: 8, kv: 2, dim: 64 };
    let group = |window| KvGroup { window, spans: false, layer_slots: 1, kv_heads: 2, head_dim: 64 };
    let groups: Vec<_> = windows.iter().map(|&window| (group(window), heads)).collect();
    StepPlan::new(&groups, &LIMITS, threads, partials)
}

/// Sequences by start and rows. Block tables do not matter here.
fn make(plan: &mut StepPlan, sequences: &[(usize, usize)], outputs: &[Output<'_>]) {
    let mut row = 0;
    let sequences: Vec<StepSequence> = sequences
        .iter()
        .map(|&(start, rows)| {
            row += rows;
            StepSequence { rows: row - rows..row, start, tables: 0..0, state: None }
        })
        .collect();
    plan.make(&Step { tokens: &vec![0; row], sequences: &sequences, outputs, ..Step::default() }, |_| None);
}

/// Checks that every row and head has each of its splits once, and that partial results do not overlap.
fn check(plan: &StepPlan, group: usize, window: Option<u32>, partials: usize) {
    let work = plan.attention(group);
    let mut places = vec![false; partials];
    for (index, tile) in work.tiles.iter().enumerate() {
        let items = || work.items.iter().filter(|item| item.tile == index);
        let mut splits: Vec<usize> = items().flat_map(|item| item.splits.clone()).collect();
        splits.sort();
        assert_eq!(splits, tile.splits.clone().collect::<Vec<_>>());
        match tile.first_partial {
            None => assert_eq!(items().count(), 1),
            Some(first) => {
                for place in &mut places[first..first + tile.splits.len() * tile.queries] {
                    assert!(!std::mem::replace(place, true));
                }
            }
        }
        assert_eq!(work.shared.contains(&index), tile.first_partial.is_some());
        for (row, position) in tile.rows.clone().zip(tile.position..) {
            assert_eq!(plan.positions[row], position);
            let first = window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
            assert!(tile.splits.contains(&(first / SPLIT)) && tile.splits.contains(&(position / SPLIT)));
        }
    }
    let mut rows: Vec<(usize, usize)> =
        work.tiles.iter().flat_map(|tile| tile.rows.clone().map(|row| (row, tile.kv_head))).collect();
    rows.sort();
    let all: Vec<_> = (0..plan.positions.len()).flat_map(|row| [(row, 0), (row, 1)]).collect();
    assert_eq!(rows, all);
}

#[test]
fn tiles_and_splits_cover_everything_once() {
    let windows = [None, Some(700), None, Some(1)];
    for threads in [1, 2, 16] {
        for partials in [0, 100, 100_000] {
            let mut plan = plan(&windows, threads, partials);
            assert_eq!(plan.attention.len(), 3, "groups of one window share their work");
            for sequences in [
                &[(0, 1)][..],
                &[(8191, 1)],
                &[(8191, 1), (3, 1), (511, 1), (512, 1), (100_000, 1)],
                &[(0, 300), (1000, 17), (2000, 1)],
            ] {
                make(&mut plan, sequences, &[]);
                for (group, &window) in windows.iter().enumerate() {
                    check(&plan, group, window, partials);
                }
            }
        }
    }
}

#[test]
fn rows_with_outputs_are_cut_alone() {
    let mut all = plan(&[None, Some(700)], 2, 1000);
    let mut some = plan(&[None, Some(700)], 2, 1000);
    let outputs = [310, 7, 9, 8, 7, 299].map(|row| Output { row, kind: OutputKind::Logits });
    let sequences: Vec<StepSequence> = [(0, 300, 100), (300, 311, 2000)]
        .map(|(first, end, start)| StepSequence { rows: first..end, start, tables: 0..0, state: None })
        .to_vec();
    let step = Step { tokens: &[0; 311], sequences: &sequences, outputs: &outputs, ..Step::default() };
    all.make(&step);
    some.make_outputs(&step, &all);
    assert_eq!(some.rows, [7, 8, 9, 299, 310]);
    assert_eq!(some.positions, [107, 108, 109, 399, 2010]);
    assert_eq!((0..5).map(|row| some.sequence(row)).collect::<Vec<_>>(), [0, 0, 0, 0, 1]);
    assert_eq!(some.outputs.rows, [0, 1, 2, 3, 4]);
    let found: Vec<&[usize]> = (0..5).map(|row| some.outputs.outputs_of(row)).collect();
    assert_eq!(found, [&[1, 4][..], &[3], &[2], &[5], &[0]]);
    check(&some, 0, None, 1000);
    check(&some, 1, Some(700), 1000);
}

#[test]
fn only_what_would_end_last_is_shared() {
    let shared = |threads, partials, sequences: &[(usize, usize)]| {
        let mut plan = plan(&[None], threads, partials);
        make(&mut plan, sequences, &[]);
        let work = plan.attention(0);
        let lengths = work.shared.iter().map(|&tile| work.tiles[tile].position + 1);
        lengths.collect::<Vec<_>>()
    };
    // One long sequence alone, or beside short ones.
    assert_eq!(shared(2, 10_000, &[(8191, 1)]), [8192, 8192]);
    assert_eq!(shared(2, 10_000, &[(99, 1), (8191, 1), (99, 1)]), [8192, 8192]);
    // Many of one length are enough items as they are, and so is one thread's work, or one split.
    assert_eq!(shared(2, 10_000, &[(2047, 1); 16]), []);
    assert_eq!(shared(1, 10_000, &[(8191, 1)]), []);
    assert_eq!(shared(2, 10_000, &[(511, 1)]), []);
    // Room for one of the two heads: 16 splits of 4 queries.
    assert_eq!(shared(2, 100, &[(8191, 1)]), [8192]);
}

#[test]
fn long_items_come_first() {
    let mut plan = plan(&[None], 2, 10_000);
    make(&mut plan, &[(99, 1), (8191, 1), (299, 1)], &[]);
    let tokens: Vec<usize> = plan.attention(0).items.iter().map(|item| item.tokens).collect();
    assert!(tokens.is_sorted_by(|a, b| a >= b));
    assert_eq!(tokens.iter().sum::<usize>(), 2 * (100 + 8192 + 300));
    // Two heads of 16 splits for two threads: a quarter of the rest, down to one split.
    make(&mut plan, &[(8191, 1)], &[]);
    let runs: Vec<usize> = plan.attention(0).items.iter().map(|item| item.splits.len()).collect();
    assert_eq!(runs, [8, 6, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1]);
}
