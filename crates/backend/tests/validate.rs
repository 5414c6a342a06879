//! Invalid steps, each with the message that names the problem.

#![allow(clippy::single_range_in_vec_init)] // lists of one span

use std::{ops::Range, sync::LazyLock};

use expect_test::{Expect, expect};
use paguro_backend::{
    AdapterId, AdapterUse, AttentionMode, Carried, Embed, Exit, GivenRows, Head, Input, KvDtype, KvGroup,
    KvLayout, Limits, Linear, MatrixId, Norm, NormKind, Output, OutputKind, PageId, Program, Rope, RopeStyle,
    SampleRequest, SamplingParams, StateId, StateLayout, StateShape, StateUse, Step, StepSequence, TokenMask,
    TokenTypes, VectorId,
};

/// A step that can be broken. Block size 4; group 0 sees everything, group 1 five tokens.
#[derive(Clone, Default)]
struct Owned {
    tokens: Vec<u32>,
    sequences: Vec<StepSequence>,
    pages: Vec<u32>,
    outputs: Vec<Output<'static>>,
    carried: Vec<Carried>,
    /// Rows, and number of their values.
    given: Vec<(Range<usize>, usize)>,
    /// Number of rows with coordinates.
    coordinates: usize,
    spans: Vec<Range<usize>>,
    adapters: Vec<AdapterUse>,
}

static GREEDY: LazyLock<SamplingParams> = LazyLock::new(SamplingParams::default);
static BROKEN: LazyLock<SamplingParams> =
    LazyLock::new(|| SamplingParams { temperature: f32::NAN, ..SamplingParams::default() });

fn request() -> SampleRequest<'static> {
    SampleRequest { params: &GREEDY, draw: 0, history: &[], prompt_tokens: 0, mask: None, logprobs: None }
}

fn mask<const N: usize>(bits: [u32; N]) -> Option<&'static TokenMask> {
    Some(Box::leak(Box::new(TokenMask::new(bits))))
}

fn valid() -> Owned {
    Owned {
        tokens: vec![1, 2, 3, 4, 5, 69],
        sequences: vec![
            // Five tokens of a new sequence, and one at position 8, whose window has left block 0.
            StepSequence { rows: 0..5, start: 0, tables: 0..4, state: None },
            StepSequence { rows: 5..6, start: 8, tables: 4..10, state: None },
        ],
        pages: vec![1, 2, 3, 4, /**/ 5, 6, 7, 0, 8, 9],
        outputs: vec![
            Output { row: 4, kind: OutputKind::Sample(request()) },
            Output { row: 4, kind: OutputKind::Sample(SampleRequest { mask: mask([0, 1, 0]), ..request() }) },
            Output { row: 5, kind: OutputKind::Logits },
            Output { row: 0, kind: OutputKind::Score { token: 69, top: 0 } },
        ],
        ..Owned::default()
    }
}

fn validate(step: &Owned) -> String {
    validate_with(step, 0)
}

/// Validates the step against a model with `states` slots for states.
fn validate_with(step: &Owned, states: usize) -> String {
    validate_for(step, states, |_| ())
}

/// Validates the step against a model that `change` has changed.
fn validate_for(step: &Owned, states: usize, change: impl FnOnce(&mut Program)) -> String {
    let mut program = Program {
        hidden: 8,
        vocab: 70,
        bidirectional: false,
        shares_pages: false,
        kv: KvLayout {
            groups: [None, Some(5)]
                .map(|window| KvGroup { window, spans: false, layer_slots: 1, kv_heads: 1, head_dim: 8 })
                .to_vec(),
        },
        state: StateLayout {
            layers: vec![StateShape { rows: 2, channels: 8, delta: None }; usize::from(states > 0)],
        },
        ropes: Vec::new(),
        input: Input::Tokens(Embed {
            table: MatrixId(0),
            scale: 1.0,
            positions: None,
            types: None,
            norm: None,
            layers: None,
            joined: None,
        }),
        given_parts: 0,
        layers: Vec::new(),
        exit: Exit::Logits(Head {
            norm: Norm { kind: NormKind::Rms, weight: VectorId(0), bias: None, eps: 1e-5 },
            linear: Linear { matrix: MatrixId(0), bias: None, bounds: None },
            scale: 1.0,
            soft_cap: None,
            projection: None,
        }),
    };
    change(&mut program);
    let limits = Limits {
        block_size: 4,
        pages: 12,
        max_rows: 8,
        max_sequences: 2,
        max_outputs: 4,
        max_context: 12,
        states,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
        expert_slots: None,
    };
    let pages: Vec<PageId> = step.pages.iter().map(|&page| PageId(page)).collect();
    let values = [0.0; 64];
    let given =
        step.given.iter().map(|(rows, count)| GivenRows { rows: rows.clone(), values: &values[..*count] });
    let step = Step {
        tokens: &step.tokens,
        carried: &step.carried,
        given: &given.collect::<Vec<_>>(),
        coordinates: &vec![[1, 2, 3]; step.coordinates],
        spans: &step.spans,
        adapters: &step.adapters,
        sequences: &step.sequences,
        pages: &pages,
        outputs: &step.outputs,
    };
    step.validate(&program, &limits).map_or_else(|error| error.to_string(), |()| "valid".to_owned())
}

fn check(change: impl FnOnce(&mut Owned), expected: Expect) {
    let mut step = valid();
    change(&mut step);
    expected.assert_eq(&validate(&step));
}

#[test]
fn valid_steps_pass() {
    check(|_| (), expect!["valid"]);
    check(|step| step.outputs.clear(), expect!["valid"]);
    // Two sequences may read the same page.
    let shared = Owned {
        tokens: vec![1, 2],
        sequences: vec![
            StepSequence { rows: 0..1, start: 4, tables: 0..4, state: None },
            StepSequence { rows: 1..2, start: 4, tables: 4..8, state: None },
        ],
        pages: vec![1, 2, 3, 4, 1, 5, 3, 6],
        ..Owned::default()
    };
    expect!["valid"].assert_eq(&validate(&shared));
}

/// Rows of a program that reads the pages of another one see the tokens before them, and write nothing.
#[test]
fn shared_pages() {
    let check = |change: fn(&mut Owned), expected: Expect| {
        let mut step = Owned {
            tokens: vec![1, 2],
            sequences: vec![
                StepSequence { rows: 0..1, start: 4, tables: 0..2, state: None },
                StepSequence { rows: 1..2, start: 5, tables: 2..6, state: None },
            ],
            pages: vec![1, 2, 1, 3, 2, 4],
            ..Owned::default()
        };
        change(&mut step);
        expected.assert_eq(&validate_for(&step, 0, |program| program.shares_pages = true));
    };
    check(|_| (), expect!["valid"]);
    check(
        |step| step.sequences[1].start = 0,
        expect![
            "invalid step: sequence 1: 1 rows at position 0, not one row after the tokens of another program"
        ],
    );
    check(
        |step| {
            step.tokens.push(3);
            step.sequences[1].rows = 1..3;
        },
        expect![
            "invalid step: sequence 1: 2 rows at position 5, not one row after the tokens of another program"
        ],
    );
    check(
        |step| step.sequences[0].start = 5,
        expect!["invalid step: sequence 0: 2 pages, not 2 groups of 2 for 5 tokens"],
    );
    check(
        |step| step.pages[3] = 0,
        expect!["invalid step: sequence 1, group 0, block 1: scratch, but its tokens are still seen"],
    );
}

#[test]
fn adapters() {
    let of = |sequence: usize, scale: f32| AdapterUse { sequence, adapter: AdapterId(7), scale };
    check(|step| step.adapters = vec![of(0, 1.0), of(0, -0.5), of(1, 0.0)], expect!["valid"]);
    check(
        |step| step.adapters = vec![of(1, 1.0), of(0, 1.0)],
        expect!["invalid step: adapters are not in order of their sequences"],
    );
    check(
        |step| step.adapters = vec![of(2, 1.0)],
        expect!["invalid step: adapter 7: sequence 2 of 2 does not exist"],
    );
    check(|step| step.adapters = vec![of(1, f32::NAN)], expect!["invalid step: adapter 7: its scale is NaN"]);
}

#[test]
fn rows_and_sequences() {
    check(
        |step| *step = Owned { tokens: vec![], sequences: vec![], outputs: vec![], ..step.clone() },
        expect!["invalid step: no rows"],
    );
    check(
        |step| step.tokens.extend([1; 3]),
        expect!["invalid step: 9 rows, more than the 8 that were loaded for"],
    );
    check(|step| step.tokens.push(1), expect!["invalid step: rows 6..7 belong to no sequence"]);
    check(|step| step.tokens[3] = 70, expect!["invalid step: row 3: token 70 of 70 does not exist"]);
    check(
        |step| step.sequences[1].rows = 4..6,
        expect!["invalid step: sequence 1: rows 4..6 do not follow row 5"],
    );
    check(
        |step| step.sequences[0].rows = 0..4,
        expect!["invalid step: sequence 0: 4 pages, not 2 groups of 1 for 4 tokens"],
    );
    check(
        |step| step.sequences[0].rows = 1..5,
        expect!["invalid step: sequence 0: rows 1..5 do not follow row 0"],
    );
    check(
        |step| step.sequences[1].rows = 5..5,
        expect!["invalid step: sequence 1: rows 5..5 do not follow row 5"],
    );
    check(
        |step| step.sequences.swap(0, 1),
        expect!["invalid step: sequence 0: rows 5..6 do not follow row 0"],
    );
    check(|step| step.sequences[1].rows = 5..7, expect!["invalid step: rows 7..6 belong to no sequence"]);
    check(|step| step.sequences.truncate(1), expect!["invalid step: rows 5..6 belong to no sequence"]);
    check(
        |step| step.sequences.push(StepSequence { rows: 6..7, start: 0, tables: 0..2, state: None }),
        expect!["invalid step: 3 sequences, more than the 2 that were loaded for"],
    );
    check(
        |step| step.sequences[1].start = 12,
        expect!["invalid step: sequence 1: longer than the 12 tokens that were loaded for"],
    );
    check(
        |step| step.sequences[1].start = usize::MAX,
        expect!["invalid step: sequence 1: longer than the 12 tokens that were loaded for"],
    );
}

/// Checks a change of the valid step against a model with these parts of given rows, that sees spans and rotates by axes.
fn check_rows(parts: usize, change: impl FnOnce(&mut Owned), expected: Expect) {
    let mut step = valid();
    change(&mut step);
    expected.assert_eq(&validate_for(&step, 0, |program| {
        program.given_parts = parts;
        program.kv.groups[1].spans = parts > 0;
        let axes = vec![0; parts.min(1)];
        program.ropes =
            vec![Rope { style: RopeStyle::HalfSplit, frequencies: vec![1.0], axes, magnitude: 1.0 }];
    }));
}

#[test]
fn given_rows() {
    check_rows(2, |step| step.given = vec![(1..3, 32), (5..6, 16)], expect!["valid"]);
    check_rows(
        2,
        |step| step.given = vec![(1..3, 31)],
        expect!["invalid step: given rows 0: 31 numbers for 2 rows of 16"],
    );
    check_rows(
        2,
        |step| step.given = vec![(1..1, 0)],
        expect!["invalid step: given rows 0: 1..1 of 6 rows, after row 0"],
    );
    check_rows(
        2,
        |step| step.given = vec![(5..7, 32)],
        expect!["invalid step: given rows 0: 5..7 of 6 rows, after row 0"],
    );
    check_rows(
        2,
        |step| step.given = vec![(1..3, 32), (2..4, 32)],
        expect!["invalid step: given rows 1: 2..4 of 6 rows, after row 3"],
    );
    check_rows(
        1,
        |step| step.given = vec![(4..5, 8), (1..2, 8)],
        expect!["invalid step: given rows 1: 1..2 of 6 rows, after row 5"],
    );
    check_rows(
        0,
        |step| step.given = vec![(1..2, 8)],
        expect!["invalid step: given rows, but all rows of the model are tokens"],
    );
    // Ids of given rows exist as those of others do.
    check_rows(
        1,
        |step| (step.given, step.tokens[1]) = (vec![(1..2, 8)], 70),
        expect!["invalid step: row 1: token 70 of 70 does not exist"],
    );
    let carried = |row| Carried { row, output: 0, given: None };
    check_rows(
        1,
        |step| (step.given, step.carried) = (vec![(1..3, 16)], vec![carried(0), carried(3)]),
        expect!["valid"],
    );
    check_rows(
        1,
        |step| (step.given, step.carried) = (vec![(1..3, 16)], vec![carried(2)]),
        expect!["invalid step: given rows 0: 1..3 have a carried token"],
    );
}

#[test]
fn rows_without_tokens() {
    let of_rows = |change: fn(&mut Owned)| {
        let mut step = valid();
        step.tokens.fill(0);
        step.given = vec![(0..6, 48)];
        change(&mut step);
        validate_for(&step, 0, |program| (program.input, program.given_parts) = (Input::Rows, 1))
    };
    expect!["valid"].assert_eq(&of_rows(|_| ()));
    expect!["invalid step: 5 of 6 rows are given, but the model needs all of them"]
        .assert_eq(&of_rows(|step| step.given = vec![(0..2, 16), (3..6, 24)]));
    expect!["invalid step: row 2: token 1 of 1 does not exist"]
        .assert_eq(&of_rows(|step| step.tokens[2] = 1));
    // A program that ends with rows has no logits.
    let ends = |step: &Owned| validate_for(step, 0, |program| program.exit = Exit::Rows);
    let mut step = valid();
    expect!["invalid step: output 0: it needs a head, but the model ends with rows"].assert_eq(&ends(&step));
    step.outputs.iter_mut().for_each(|output| output.kind = OutputKind::Embedding);
    expect!["invalid step: output 0: it needs a head, but the model ends with rows"].assert_eq(&ends(&step));
    step.outputs.iter_mut().for_each(|output| output.kind = OutputKind::Residual);
    expect!["valid"].assert_eq(&ends(&step));
    expect!["valid"].assert_eq(&validate(&step));
}

#[test]
fn coordinates_and_spans() {
    check_rows(1, |step| step.coordinates = 6, expect!["valid"]);
    check_rows(1, |step| step.coordinates = 5, expect!["invalid step: 5 coordinates for 6 rows"]);
    check_rows(
        0,
        |step| step.coordinates = 6,
        expect!["invalid step: coordinates, but the model rotates rows by positions"],
    );
    check_rows(1, |step| step.spans = vec![0..2, 2..5, 5..6], expect!["valid"]);
    check_rows(
        0,
        |step| step.spans = vec![0..2],
        expect!["invalid step: spans, but no layer of the model sees them"],
    );
    check_rows(
        1,
        |step| step.spans = vec![0..2, 1..3],
        expect!["invalid step: span 1: rows 1..3 after row 2"],
    );
    check_rows(1, |step| step.spans = vec![2..2], expect!["invalid step: span 0: rows 2..2 after row 0"]);
    check_rows(
        1,
        |step| step.spans = vec![3..6],
        expect!["invalid step: span 0: rows 3..6 of a sequence with rows 0..5"],
    );
    check_rows(
        1,
        |step| step.spans = vec![5..7],
        expect!["invalid step: span 0: rows 5..7 of a sequence with rows 5..6"],
    );
    check_rows(1, |step| step.spans = vec![6..7], expect!["invalid step: span 0: rows 6..7 do not exist"]);
}

#[test]
fn means() {
    let encoder = |step: &Owned| validate_for(step, 0, |program| program.bidirectional = true);
    let with = |outputs: &[(usize, OutputKind<'static>)]| {
        let sequence = |rows, tables| StepSequence { rows, start: 0, tables, state: None };
        let mut step = valid();
        step.tokens.truncate(3);
        step.sequences = vec![sequence(0..2, 0..2), sequence(2..3, 2..4)];
        step.outputs = outputs.iter().map(|&(row, kind)| Output { row, kind }).collect();
        step
    };
    let (mean, rows) = (OutputKind::Mean, OutputKind::Residual);
    expect!["valid"].assert_eq(&encoder(&with(&[(2, mean), (0, mean), (0, rows)])));
    expect!["invalid step: 5 rows with outputs, more than the 4 that were loaded for"]
        .assert_eq(&encoder(&with(&[(2, mean), (0, mean), (0, rows), (1, rows)])));
    expect!["invalid step: output 1: a mean from row 1, but its sequence has rows 0..2"]
        .assert_eq(&encoder(&with(&[(2, mean), (1, mean)])));
    expect!["invalid step: output 1: a second mean of rows 2..3"]
        .assert_eq(&encoder(&with(&[(2, mean), (2, mean)])));
    expect!["invalid step: output 0: logits of row 1, of whose sequence output 1 is the mean"]
        .assert_eq(&encoder(&with(&[(1, OutputKind::Logits), (0, mean)])));
    expect!["invalid step: output 0: row 3 of 3 does not exist"].assert_eq(&encoder(&with(&[(3, mean)])));
    expect!["invalid step: output 0: a mean of rows, but the model has none"]
        .assert_eq(&validate(&with(&[(0, mean)])));
}

#[test]
fn encoders() {
    let mut step = valid();
    let encoder = |step: &Owned| {
        validate_for(step, 0, |program| {
            program.bidirectional = true;
            program.embed_mut().unwrap().types = Some(TokenTypes { table: VectorId(0), count: 2 });
        })
    };
    expect!["invalid step: sequence 1: begins at position 8, but its rows attend to later ones"]
        .assert_eq(&encoder(&step));
    step.sequences.truncate(1);
    step.tokens.truncate(5);
    step.outputs.clear();
    step.tokens[1] = 139;
    expect!["valid"].assert_eq(&encoder(&step));
    step.tokens[1] = 140;
    expect!["invalid step: row 1: token 140 of 140 does not exist"].assert_eq(&encoder(&step));
}

#[test]
fn tables() {
    check(
        |step| step.sequences[0].tables = 0..5,
        expect!["invalid step: sequence 0: 5 pages, not 2 groups of 2 for 5 tokens"],
    );
    check(
        |step| step.sequences[0].tables = 0..2,
        expect!["invalid step: sequence 0: 2 pages, not 2 groups of 2 for 5 tokens"],
    );
    check(
        |step| step.sequences[1].tables = 4..11,
        expect!["invalid step: sequence 1: tables 4..11 are not in the 10 given"],
    );
    #[allow(clippy::reversed_empty_ranges)]
    check(
        |step| step.sequences[1].tables = 6..4,
        expect!["invalid step: sequence 1: tables 6..4 are not in the 10 given"],
    );
    check(
        |step| step.pages[9] = 12,
        expect!["invalid step: sequence 1, group 1, block 2: page 12 of 12 does not exist"],
    );
    // Scratch is for blocks that the window has passed.
    check(
        |step| step.pages[0] = 0,
        expect!["invalid step: sequence 0, group 0, block 0: scratch, but its tokens are still seen"],
    );
    check(
        |step| step.pages[8] = 0,
        expect!["invalid step: sequence 1, group 1, block 1: scratch, but its tokens are still seen"],
    );
    // Position 7 sees positions 3 to 7, and so the last token of block 0.
    check(
        |step| step.sequences[1] = StepSequence { rows: 5..6, start: 7, tables: 4..8, state: None },
        expect!["invalid step: sequence 1, group 1, block 1: scratch, but its tokens are still seen"],
    );
    check(
        |step| {
            step.sequences[1] = StepSequence { rows: 5..6, start: 7, tables: 4..8, state: None };
            step.pages.splice(4.., [5, 6, 0, 8]);
        },
        expect!["invalid step: sequence 1, group 1, block 0: scratch, but its tokens are still seen"],
    );
}

#[test]
fn pages_are_written_by_one() {
    // By the other sequence, by the same one in another group and in another block.
    check(|step| step.pages[9] = 1, expect!["invalid step: sequence 1, group 1: page 1 is written twice"]);
    check(|step| step.pages[2] = 1, expect!["invalid step: sequence 0, group 1: page 1 is written twice"]);
    check(|step| step.pages[1] = 1, expect!["invalid step: sequence 0, group 0: page 1 is written twice"]);
    // Read while it is written, whichever comes first.
    check(
        |step| step.pages[4] = 2,
        expect!["invalid step: sequence 1, group 0: page 2 is read here and written in the same step"],
    );
    check(
        |step| step.pages[5] = 9,
        expect!["invalid step: sequence 1, group 0: page 9 is read here and written in the same step"],
    );
}

#[test]
fn outputs() {
    let sample = |request| Output { row: 4, kind: OutputKind::Sample(request) };
    check(|step| step.outputs[0].row = 6, expect!["invalid step: output 0: row 6 of 6 does not exist"]);
    check(
        |step| step.outputs.push(step.outputs[0]),
        expect!["invalid step: 5 outputs, more than the 4 that were loaded for"],
    );
    check(
        |step| step.outputs[3].kind = OutputKind::Score { token: 70, top: 0 },
        expect!["invalid step: output 3: token 70 of 70 does not exist"],
    );
    check(
        |step| step.outputs[1] = sample(SampleRequest { mask: mask([1, 1]), ..request() }),
        expect!["invalid step: output 1: a mask of 2 words, not 3 for 70 tokens"],
    );
    check(
        |step| step.outputs[1] = sample(SampleRequest { mask: mask([0, 0, 0]), ..request() }),
        expect!["invalid step: output 1: a mask that allows nothing"],
    );
    // Token 70 does not exist.
    check(
        |step| step.outputs[1] = sample(SampleRequest { mask: mask([0, 0, 64]), ..request() }),
        expect!["invalid step: output 1: a mask that allows nothing"],
    );
    check(
        |step| step.outputs[1] = sample(SampleRequest { mask: mask([0, 0, 32]), ..request() }),
        expect!["valid"],
    );
    check(
        |step| step.outputs[0] = sample(SampleRequest { params: &BROKEN, ..request() }),
        expect!["invalid step: output 0: temperature must be finite, 0 or more, not NaN"],
    );
}

#[test]
fn states() {
    let check = |[first, second]: [Option<[u32; 2]>; 2], states: usize, expected: Expect| {
        let mut step = valid();
        for (sequence, state) in step.sequences.iter_mut().zip([first, second]) {
            sequence.state =
                state.map(|[read, write]| StateUse { read: StateId(read), write: StateId(write) });
        }
        expected.assert_eq(&validate_with(&step, states));
    };
    // In place, to another slot, and over what only the first rows of a sequence would have read.
    check([Some([0, 0]), Some([1, 1])], 2, expect!["valid"]);
    check([Some([0, 0]), Some([2, 1])], 3, expect!["valid"]);
    check([Some([1, 0]), Some([1, 1])], 2, expect!["valid"]);
    check([None, None], 1, expect!["invalid step: sequence 0: no state, but the model needs one"]);
    check([Some([0, 0]), None], 1, expect!["invalid step: sequence 1: no state, but the model needs one"]);
    check([Some([0, 0]), None], 0, expect!["invalid step: sequence 0: a state, but the model has none"]);
    check([Some([0, 0]), Some([2, 1])], 2, expect!["invalid step: sequence 1: state 2 of 2 does not exist"]);
    check([Some([0, 2]), Some([1, 1])], 2, expect!["invalid step: sequence 0: state 2 of 2 does not exist"]);
    check([Some([0, 1]), Some([1, 1])], 2, expect!["invalid step: sequence 1: state 1 is written twice"]);
    check(
        [Some([0, 0]), Some([0, 1])],
        2,
        expect!["invalid step: sequence 1: state 0 is read here and written in the same step"],
    );
}
