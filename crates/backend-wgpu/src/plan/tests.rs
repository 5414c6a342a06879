use std::collections::BTreeSet;

use paguro_backend::{KvDtype, PageId, StepSequence};

use crate::heads::KvGroup;

use super::*;

const WINDOW: u32 = 700;

fn group(window: Option<u32>) -> KvGroup {
    KvGroup {
        window,
        spans: false,
        layer_slots: 1,
        heads: 8,
        kv_heads: 2,
        head_dim: 64,
        unpadded_dim: 64,
        is_latent: false,
    }
}

fn limits(max_rows: usize, max_sequences: usize) -> Limits {
    Limits {
        block_size: 32,
        pages: 1,
        max_rows,
        max_sequences,
        max_outputs: 1,
        max_context: 16_384,
        states: 0,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
        expert_slots: None,
    }
}

fn tiling(wide: Option<Wide>, partials: usize, busy: usize) -> Tiling {
    Tiling {
        rows: 2,
        heads: 4,
        workgroups: 2,
        emits: true,
        emits_padded: false,
        always_merges: false,
        partials,
        busy,
        wide,
    }
}

/// A plan of a step with these starts and rows of sequences, two groups and two K/V heads.
fn plan(
    wide: Option<Wide>,
    partials: usize,
    busy: usize,
    lengths: &[(usize, usize)],
) -> (Plan, Vec<StepSequence>) {
    let kv = KvLayout { groups: vec![group(None), group(Some(WINDOW))] };
    let rows = lengths.iter().map(|(_, rows)| rows).sum();
    let limits = limits(rows, lengths.len());
    let tiling = tiling(wide, partials, busy);
    let mut plan = Plan::new(&kv, &limits, &[tiling; 2], Tables::default());
    let (mut pages, mut sequences, mut first) = (Vec::new(), Vec::new(), 0);
    for &(start, rows) in lengths {
        let from = pages.len();
        pages.resize(from + 2 * (start + rows).div_ceil(32), PageId(0));
        sequences.push(StepSequence {
            rows: first..first + rows,
            start,
            tables: from..pages.len(),
            state: None,
        });
        first += rows;
    }
    let tokens = vec![1; rows];
    plan.make(&Step {
        tokens: &tokens,
        sequences: &sequences,
        pages: &pages,
        outputs: &[],
        ..Step::default()
    });
    assert!(plan.words.len() <= words(&kv, &limits, &[tiling; 2], &Tables::default()));
    (plan, sequences)
}

/// Every row gets each of its splits once, and each of its partials has its own place, for any division.
fn covers(wide: Option<Wide>, partials: usize, busy: usize, lengths: &[(usize, usize)]) {
    let rows = lengths.iter().map(|(_, rows)| rows).sum();
    let singles = lengths.iter().filter(|(_, rows)| *rows == 1).count();
    let (plan, sequences) = plan(wide, partials, busy, lengths);
    for (group, window) in [(0, usize::MAX), (1, WINDOW as usize)] {
        let split_plan = &plan.split_plans[group];
        let mut seen = vec![Vec::new(); rows];
        for tile in [Tile::Row, Tile::Rows, Tile::WideRow, Tile::WideRows] {
            let is_wide = matches!(tile, Tile::WideRow | Tile::WideRows);
            for item in 0..plan.items(group, tile) {
                let at = (plan.first_item(group, tile) + 8 * item) as usize;
                let [first, rows, _, _, _, split, splits, _] = plan.words[at..at + 8] else { unreachable!() };
                assert!(
                    splits > 0
                        && is_wide == (wide.is_some() && !(tile == Tile::Row && singles >= SINGLES))
                        && (rows == 1) == matches!(tile, Tile::Row | Tile::WideRow)
                );
                for row in first..first + rows {
                    seen[row as usize].extend(split as usize..(split + splits) as usize);
                }
            }
        }
        let mut places = BTreeSet::new();
        for sequence in &sequences {
            for row in sequence.rows.clone() {
                let position = sequence.start + row - sequence.rows.start;
                let wanted = split_of((position + 1).saturating_sub(window))..=split_of(position);
                assert!(wanted.clone().all(|split| seen[row].contains(&split)), "row {row}: {:?}", seen[row]);
                assert_eq!(
                    BTreeSet::from_iter(&seen[row]).len(),
                    seen[row].len(),
                    "row {row} has a split twice"
                );
                let at = split_plan.partials as usize + 4 * row;
                let [place, count, number, length] = [0, 1, 2, 3].map(|i| plan.words[at + i] as usize);
                assert_eq!(number, wanted.start() / length);
                assert_eq!(number + count, wanted.end() / length + 1);
                assert!((place..place + count).all(|place| place < partials && places.insert(place)));
                assert!(!split_plan.whole || count == 1);
            }
        }
    }
}

#[test]
fn attention_is_cut_without_gaps() {
    let wide = Wide { from: 3, groups: 8, rows: 32, heads: 4, workgroups: 2, busy: 128 };
    let many: Vec<_> = (0..20).map(|index| (1 + 200 * index, 1)).chain([(600, 65), (0, 33)]).collect();
    let steps: [&[(usize, usize)]; 8] = [
        &many,
        &[(0, 200), (5000, 1), (300, 1), (1500, 70)],
        &[(7000, 100)],
        &[(0, 512), (0, 512)],
        &[(511, 3), (1535, 2), (2047, 1)],
        &[(0, 4)],
        &[(16_000, 1), (9000, 1), (700, 1), (4000, 1)],
        &[(16_000, 3), (100, 1)],
    ];
    for lengths in steps {
        let rows: usize = lengths.iter().map(|(_, rows)| rows).sum();
        for partials in [rows, rows + 40, 10 * rows] {
            for busy in [8, 32, 512] {
                covers(Some(wide), partials, busy, lengths);
                covers(None, partials, busy, lengths);
            }
        }
    }
}

/// Rows of spans and of encoders get the splits that they see, in one piece.
#[test]
fn rows_see_spans() {
    let kv = KvLayout { groups: vec![KvGroup { spans: true, ..group(Some(WINDOW)) }, group(None)] };
    let limits = limits(1400, 2);
    let spans = [10..300, 300..1300];
    let pages = vec![PageId(0); 100];
    let sequences = [
        StepSequence { rows: 0..1300, start: 0, tables: 0..82, state: None },
        StepSequence { rows: 1300..1400, start: 0, tables: 82..90, state: None },
    ];
    let step =
        Step { tokens: &[1; 1400], sequences: &sequences, pages: &pages, spans: &spans, ..Step::default() };
    for bidirectional in [false, true] {
        let extra = Tables { bidirectional, ..Tables::default() };
        let tiling = tiling(None, 5000, 64);
        let mut plan = Plan::new(&kv, &limits, &[tiling; 2], extra.clone());
        plan.make(&step);
        assert!(plan.words.len() <= words(&kv, &limits, &[tiling; 2], &extra));
        let seen = |group: usize, row: usize| {
            let at = plan.split_plans[group].partials as usize + 4 * 1400 + 2 * row;
            (plan.words[at], plan.words[at + 1])
        };
        // The window before a row of the second span, and the ends of both.
        assert_eq!((seen(0, 1200), seen(0, 10).1), ((1200 + 1 - WINDOW, 1300), 300));
        let first = if bidirectional { 300 } else { 0 };
        assert_eq!(seen(0, 310), (first, if bidirectional { 310 + WINDOW } else { 1300 }));
        let alone = if bidirectional { (9, 10) } else { (0, 10) };
        assert_eq!(seen(0, 9), alone);
        if bidirectional {
            assert_eq!((seen(1, 1200), seen(1, 1300)), ((0, 1300), (0, 100)));
        }
        for item in 0..plan.items(0, Tile::Rows) {
            let at = (plan.first_item(0, Tile::Rows) + 8 * item) as usize;
            let [first, rows, _, _, _, split, splits, _] = plan.words[at..at + 8] else { unreachable!() };
            let (from, to) = (seen(0, first as usize).0, seen(0, (first + rows - 1) as usize).1);
            let all = split_of(from as usize)..split_of(to as usize - 1) + 1;
            assert!(all.start <= split as usize && (split + splits) as usize <= all.end, "{all:?}");
        }
    }
}

/// Items of a step of one row follow from its arguments, as `splits.wgsl` makes them.
#[test]
fn arguments_say_what_one_row_has_to_do() {
    for start in [0, 255, 600, 1000, 5000, 16_383] {
        for (partials, busy) in [(1, 512), (100, 512), (100, 4)] {
            let (plan, _) = plan(None, partials, busy, &[(start, 1)]);
            for group in [0, 1] {
                let args = plan.args(group as usize);
                let at = plan.first_item(group as usize, Tile::Row);
                for i in 0..plan.items(group as usize, Tile::Row) {
                    let item = &plan.words[(at + 8 * i) as usize..][..8];
                    let part = args.row_from / args.row_length + i;
                    let first = args.row_from.max(part * args.row_length);
                    let end = args.row_to.min((part + 1) * args.row_length);
                    let table = args.row_table - group * item[4];
                    let made = [0, 1, args.row_position, table, item[4], first, end - first, args.row_length];
                    assert_eq!(item, made);
                }
            }
        }
    }
    let (plan, _) = plan(None, 100, 4, &[(600, 1), (700, 1)]);
    assert_eq!(plan.args(0).row_length, 0);
}

#[test]
fn workgroups_are_shared_out_evenly() {
    // Splits of each item, splits of partials, and true without partials, for sequences at the same position.
    let items = |sequences: usize, start: usize, busy: usize| {
        let (plan, _) = plan(None, 4096, busy, &vec![(start, 1); sequences]);
        let at = plan.first_item(0, Tile::Row) as usize;
        let count = plan.items(0, Tile::Row) as usize;
        let items: Vec<&[u32]> = plan.words[at..at + 8 * count].chunks(8).collect();
        let splits: Vec<u32> = items.iter().map(|item| item[6]).collect();
        (splits, items[0][7] as usize, plan.split_plans[0].whole)
    };
    // 33 splits of 8 sequences for 64 workgroups: runs, nine per K/V head. Short ones are last.
    assert_eq!(items(8, 16_383, 64), ([vec![4; 64], vec![1; 8]].concat(), RUN, false));
    // As many sequences as workgroups, with two workgroups per sequence.
    assert_eq!(items(32, 4095, 64), (vec![9; 32], WHOLE, true));
    // With whole results, a quarter more sequences would leave three quarters of the workgroups idle.
    assert_eq!(items(40, 4095, 64), ([vec![4; 80], vec![1; 40]].concat(), RUN, false));
    assert_eq!(items(1, 16_383, 64), (vec![1; 33], 1, false));
    assert_eq!(items(1, 255, 64), (vec![1], WHOLE, true));
}
