//! Cases of mixers that keep a state, and of gates on the output of attention.

use paguro_backend::{DeltaShape, KeySharing, STATE_CHUNK, WeightFormat};

use super::{
    Biases, DriveOptions, Driver, ModelShape, RandomModel, RecurrentShape, Rng, Subject, Verdict,
    compare::{Logits, Schedule, agrees_on, same},
    exactness::{alone, drawn, supported},
};

/// Tokens of the longest sequence of a schedule: more than three chunks.
const LONG: usize = 106;

/// Sequences that begin, decode and end everywhere in a chunk, in steps that end everywhere in one.
pub(super) fn schedule(vocab: usize) -> Schedule {
    let mut rng = Rng::new(31);
    let [long, two, short] = [0, 1, 2];
    Schedule {
        sequences: [LONG, 67, 3].map(|length| rng.tokens(length, vocab)).to_vec(),
        steps: vec![
            vec![(long, 31), (short, 1)],
            vec![(two, 32), (long, 1), (short, 1)],
            vec![(long, 1), (two, 1)],
            vec![(two, 30), (long, 40), (short, 1)],
            vec![(long, 23)],
            vec![(two, 1), (long, 1)],
            vec![(long, 1), (two, 1)],
            vec![(two, 1), (long, 4)],
            vec![(long, 4), (two, 1)],
        ],
    }
}

pub(super) fn options(subject: &Subject) -> DriveOptions {
    DriveOptions { pages: 40, max_context: 160, ..subject.options() }
}

/// Returns a model with layers of these kinds and full attention.
pub(super) fn of_mixers(format: WeightFormat, mixers: &'static str) -> ModelShape {
    ModelShape { mixers, windows: vec![None; mixers.len()], ..ModelShape::of_format(format) }
}

fn agrees(subject: &Subject, shape: &ModelShape) -> Verdict {
    agrees_on(subject, &schedule(shape.vocab), shape, &options(subject))
}

/// Short convolutions of all lengths.
pub(super) fn short_convolutions(subject: &Subject) -> Verdict {
    let shapes = [(3, 64, false), (2, 40, true), (4, 96, true), (7, 33, false)];
    for (taps, width, bias) in subject.draw.some("short_convolutions", &shapes, 2) {
        let recurrent = RecurrentShape { taps, width, bias, ..RecurrentShape::default() };
        agrees(subject, &ModelShape { recurrent, ..of_mixers(WeightFormat::F32, "cac") })?;
    }
    Ok(())
}

/// Delta rules of all shapes.
pub(super) fn delta_rules(subject: &Subject) -> Verdict {
    let shapes = [
        (1, 1, 16, 16, 4),
        (2, 4, 32, 32, 4),
        (2, 2, 64, 128, 4),
        (1, 3, 128, 64, 2),
        (3, 6, 24, 40, 3),
        (2, 4, 20, 7, 4),
    ];
    for (key_heads, value_heads, key_dim, value_dim, taps) in subject.draw.some("delta_rules", &shapes, 3) {
        for sharing in [KeySharing::Consecutive, KeySharing::Alternating] {
            if sharing == KeySharing::Alternating && (key_heads == 1 || key_heads == value_heads) {
                continue;
            }
            let delta = DeltaShape { key_heads, value_heads, key_dim, value_dim };
            let recurrent = RecurrentShape { delta, sharing, taps, ..RecurrentShape::default() };
            agrees(subject, &ModelShape { recurrent, ..of_mixers(WeightFormat::F32, "dad") })?;
        }
    }
    Ok(())
}

/// All features that can be combined with a state: other formats, biases, norms of outputs, experts.
pub(super) fn hybrids(subject: &Subject) -> Verdict {
    for format in supported(subject, &[WeightFormat::Q8_0, WeightFormat::Q4_K]) {
        let key_dim = if format.block_len() > 32 { 64 } else { 32 };
        let delta = DeltaShape { key_heads: 2, value_heads: 4, key_dim, value_dim: 64 };
        let recurrent = RecurrentShape { width: 256, bias: true, delta, ..RecurrentShape::default() };
        let shape = of_mixers(format, "dcad");
        agrees(
            subject,
            &ModelShape {
                recurrent,
                biases: Biases::All,
                post_norms: true,
                attention_gate: true,
                branch_scale: 0.7,
                experts: Some(super::ExpertsShape { width: 256, ..super::ExpertsShape::default() }),
                ..shape
            },
        )?;
    }
    Ok(())
}

/// Gates on the output of attention.
pub(super) fn attention_gates(subject: &Subject) -> Verdict {
    for (format, biases) in [(WeightFormat::F32, Biases::None), (WeightFormat::Q8_0, Biases::Qkv)] {
        let shape = ModelShape { attention_gate: true, biases, ..ModelShape::of_format(format) };
        agrees(subject, &shape)?;
    }
    Ok(())
}

pub(super) fn hybrid(format: WeightFormat) -> ModelShape {
    let delta = DeltaShape { key_heads: 2, value_heads: 4, key_dim: 64, value_dim: 64 };
    let recurrent = RecurrentShape { width: 256, delta, droppable: 5, ..RecurrentShape::default() };
    ModelShape { recurrent, attention_gate: true, ..of_mixers(format, "dcad") }
}

/// A row is the same, bit for bit, in any batch, in any chunks, in any slots, on any number of threads, after a fork and
/// after a preemption.
pub(super) fn exact(subject: &Subject) -> Verdict {
    for format in drawn(subject, "formats of states", &[WeightFormat::F16, WeightFormat::Q8_0], 1) {
        exact_of(subject, &hybrid(format))?;
    }
    Ok(())
}

/// Checks exactness for models of one shape.
pub(super) fn exact_of(subject: &Subject, shape: &ModelShape) -> Verdict {
    let format = shape.format;
    let model = shape.build(12);
    let schedule = schedule(shape.vocab);
    let expected = alone(subject, &model, &schedule.sequences)?;
    let exact = DriveOptions { least_rows: subject.exact_rows, ..options(subject) };
    let ways = [
        (1, None, false, false),
        (2, Some(3), true, false),
        (3, Some(4), false, true),
        (5, None, true, true),
    ];
    for (threads, scatter, stale, moves_states) in subject.draw.some("ways of states", &ways, 1) {
        let threads = if subject.has_threads { threads } else { 2 };
        let options = DriveOptions { scatter, stale, moves_states, ..exact };
        let mut driver = Driver::new(&*(subject.backend)(threads), &model, &options)?;
        for round in 0..2 {
            let what = format!("{options:?}, {threads} threads, round {round} ({format})");
            same(&what, &schedule.run(&mut driver)?, &expected)?;
        }
    }
    let mut driver = Driver::new(&*(subject.backend)(2), &model, &exact)?;
    for chunk in subject.draw.some("chunks of states", &[1, 2, 5, 16, 31, 32, 33, 64, 65], 2) {
        let id = driver.start(&schedule.sequences[0]);
        driver.run(id, chunk)?;
        let chunked: Logits = vec![driver.logits(id).1.to_vec()];
        driver.preempt(id);
        same(&format!("chunks of {chunk} ({format})"), &chunked, &expected[..1].to_vec())?;
    }
    for stem in subject.draw.some("stems of states", &[1, 31, 32, 33, 50], 1) {
        forks(subject, &model, shape.vocab, stem)?;
    }
    drops(subject, &model, shape.vocab)?;
    for stem in subject.draw.some("stems of checkpoints", &[32, 50], 1) {
        checkpoints(subject, &model, shape.vocab, stem)?;
    }
    Ok(())
}

/// A saved state is the same in another slot, after its own slot and many pages have been used by others. Its pages can
/// hold K and V again.
fn checkpoints(subject: &Subject, model: &RandomModel, vocab: usize, stem: usize) -> Verdict {
    let options = DriveOptions { pages: 200, least_rows: subject.exact_rows, ..options(subject) };
    let mut driver = Driver::new(&*(subject.backend)(2), model, &options)?;
    if !driver.saves_states() {
        println!("skipped: the device does not copy states into pages");
        return Ok(());
    }
    let mut rng = Rng::new(100 + stem as u64);
    let prompt = rng.tokens(stem, vocab);
    let sequences: Vec<Vec<u32>> =
        [40, 37].into_iter().map(|more| [&prompt[..], &rng.tokens(more, vocab)].concat()).collect();
    let expected = alone(subject, model, &sequences)?;
    let trunk = driver.start(&sequences[0]);
    driver.step(&[(trunk, stem)])?;
    let saved = driver.fork(trunk, stem, &sequences[1])?;
    driver.save_state(saved)?;
    driver.run(trunk, 9)?;
    let trunk_logits: Logits = vec![driver.logits(trunk).1.to_vec()];
    same(&format!("the rest after a checkpoint at {stem}"), &trunk_logits, &expected[..1].to_vec())?;
    driver.preempt(trunk);
    driver.restore_state(saved)?;
    driver.run(saved, 11)?;
    let (from, logits) = driver.logits(saved);
    let rest: Logits = vec![expected[1][from..].to_vec()];
    same(&format!("a checkpoint at {stem}"), &vec![logits.to_vec()], &rest)?;
    // The pages that were freed last are allocated first.
    let again = driver.start(&sequences[0]);
    driver.run(again, 13)?;
    let again: Logits = vec![driver.logits(again).1.to_vec()];
    same(&format!("pages of a checkpoint at {stem}"), &again, &expected[..1].to_vec())
}

/// Rows that are dropped and computed again with other tokens leave nothing behind: at all places of a chunk, as many as can be
/// dropped, in slots that are written in their place and in others.
fn drops(subject: &Subject, model: &RandomModel, vocab: usize) -> Verdict {
    let mut rng = Rng::new(55);
    let tokens = rng.tokens(80, vocab);
    let expected = alone(subject, model, std::slice::from_ref(&tokens))?;
    let most = model.program.droppable_rows().unwrap_or(0);
    for moves_states in [false, true] {
        let options = DriveOptions { moves_states, least_rows: subject.exact_rows, ..options(subject) };
        let mut driver = Driver::new(&*(subject.backend)(2), model, &options)?;
        let id = driver.start(&tokens[..6]);
        driver.run(id, 6)?;
        let mut done = 6;
        while done < tokens.len() {
            // A row of the text, and others that are dropped: they never begin a chunk.
            let rows = most.min(STATE_CHUNK - 1 - done % STATE_CHUNK);
            let wrong = rng.tokens(rows, vocab);
            driver.push(id, &[&tokens[done..=done], &wrong].concat());
            driver.step(&[(id, rows + 1)])?;
            driver.drop_rows(id, rows, &[]);
            done += 1;
        }
        let dropped: Logits = vec![driver.logits(id).1.to_vec()];
        same(&format!("rows that are dropped, states move: {moves_states}"), &dropped, &expected)?;
        driver.preempt(id);
    }
    Ok(())
}

/// Branches continue from one state, some of them later than others.
fn forks(subject: &Subject, model: &RandomModel, vocab: usize, stem: usize) -> Verdict {
    let mut rng = Rng::new(stem as u64);
    let prompt = rng.tokens(stem, vocab);
    let branches: Vec<Vec<u32>> =
        [5, 40, 9].into_iter().map(|more| [&prompt[..], &rng.tokens(more, vocab)].concat()).collect();
    let expected = alone(subject, model, &branches)?;
    let options = DriveOptions { least_rows: subject.exact_rows, ..options(subject) };
    let mut driver = Driver::new(&*(subject.backend)(2), model, &options)?;
    let trunk = driver.start(&branches[0]);
    driver.step(&[(trunk, stem)])?;
    let left = driver.fork(trunk, stem, &branches[1])?;
    let right = driver.fork(trunk, stem, &branches[2])?;
    driver.step(&[(left, 1), (trunk, 2)])?;
    driver.step(&[(trunk, 1), (right, 3), (left, 2)])?;
    for (index, id) in [trunk, left, right].into_iter().enumerate() {
        driver.run(id, 7)?;
        let (from, logits) = driver.logits(id);
        let expected: Logits = vec![expected[index][from..].to_vec()];
        same(&format!("a fork after {stem} tokens (branch {index})"), &vec![logits.to_vec()], &expected)?;
    }
    // A branch that lost its state recomputes everything in another slot.
    driver.preempt(left);
    let other = driver.start(&branches[2]);
    driver.step(&[(other, 3)])?;
    driver.run(left, 13)?;
    same("a preemption", &vec![driver.logits(left).1.to_vec()], &vec![expected[1].clone()])
}
