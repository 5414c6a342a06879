//! The suite's own test: backends with a defect each, made from the reference, must be caught.

mod attention;
mod backend;
mod defects;
mod layers;
mod pages;
mod programs;
mod weights;

use std::{collections::BTreeSet, ops::Range};

use paguro_backend::{
    Carried, Coordinates, KernelCount, KvDtype, Limits, OutputValue, PageId, PageMove, Program,
    SamplingParams, Step, StepSequence, WeightFormat, Weights,
    reference::{AttentionFn, KvRounding, RoundFn, attention, round_f16, round_q4, round_q8},
};

use self::{backend::Defective, defects::defects};
use super::{CASES, Case, Draw, Subject, Tolerance};

/// A defect. The default has none.
#[derive(Clone, Copy)]
struct Defect {
    attention: AttentionFn,
    kv_dtype: KvDtype,
    round: RoundFn,
    program: fn(&mut Program),
    weights: fn(&mut Weights),
    limits: fn(&mut Limits),
    /// Changes logits, knowing the step.
    logits: fn(&mut [f32], &Circumstances),
    /// Changes hidden states, knowing the step.
    embeddings: fn(&mut [f32], &Circumstances),
    outcomes: fn(&mut Vec<OutputValue>),
    block_tables: fn(&mut [PageId], &[StepSequence]),
    sequences: fn(&mut [StepSequence]),
    carried: fn(&mut [Carried]),
    given: fn(&mut [f32], &Program),
    coordinates: fn(&mut [Coordinates]),
    spans: fn(&mut Vec<Range<usize>>),
    step: for<'a> fn(Step<'a>) -> Step<'a>,
    moves: fn(&mut PageMove),
    moves_pages: bool,
    checks_weights: bool,
    checks_steps: bool,
    params: fn(&mut SamplingParams),
    counts: fn(&mut Vec<KernelCount>),
}

/// Properties that logits must not depend on.
#[derive(Clone, Copy, Default)]
struct Circumstances {
    rows: usize,
    first_page: u32,
    threads: usize,
    steps: u64,
    expert_slots: Option<usize>,
}

const NONE: Defect = Defect {
    attention,
    kv_dtype: KvDtype::F16,
    round: round_f16,
    program: |_| (),
    weights: |_| (),
    limits: |_| (),
    logits: |_, _| (),
    embeddings: |_, _| (),
    outcomes: |_| (),
    block_tables: |_, _| (),
    sequences: |_| (),
    carried: |_| (),
    given: |_, _| (),
    coordinates: |_| (),
    spans: |_| (),
    step: |step| step,
    moves: |_| (),
    moves_pages: true,
    checks_weights: true,
    checks_steps: true,
    params: |_| (),
    counts: |_| (),
};

/// No defect, with eight-bit pages.
const Q8: Defect = Defect { kv_dtype: KvDtype::Q8, round: round_q8, ..NONE };

/// None, in four bits.
const Q4: Defect = Defect { kv_dtype: KvDtype::Q4, round: round_q4, ..NONE };

fn subject(defect: Defect) -> Subject {
    Subject {
        backend: Box::new(move |threads| Box::new(Defective { defect, threads })),
        exact_rows: 1,
        has_threads: true,
        // Tolerances of a backend that computes in f16 and quantizes activations: defects must exceed them.
        tolerance: |format| match format {
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16 => {
                Tolerance { error: 2e-3, reason: "f16" }
            }
            _ => Tolerance { error: 0.15, reason: "quantized activations" },
        },
        kv_dtype: defect.kv_dtype,
        kv: KvRounding::F16,
        unsupported: &[],
        refused: &[],
        kernel_formats: &WeightFormat::ALL,
        draw: Draw::All,
    }
}

fn case(name: &str) -> &'static Case {
    CASES.iter().find(|case| case.name == name).expect("a case of this name")
}

#[test]
fn every_defect_is_caught() {
    let mut missed = Vec::new();
    for (name, defect, cases) in defects().into_iter().chain(layers::defects()) {
        for case in cases.iter().map(|name| case(name)) {
            if (case.run)(&subject(defect)).is_ok() {
                missed.push(format!("{} does not notice a backend that {name}", case.name));
            }
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

/// All cases pass without a defect, bit for bit: the wrapper itself changes nothing.
mod without_a_defect {
    use super::{Draw, NONE, Subject, Tolerance, subject};

    crate::conformance!(Subject {
        draw: Draw::from_env(),
        tolerance: |_| Tolerance { error: 0.0, reason: "the reference is compared with itself" },
        ..subject(NONE)
    });
}

/// The cases that catch defects of quantized pages pass without one.
#[test]
fn quantized_pages_without_a_defect_pass() {
    for sound in [Q8, Q4] {
        let of_type = defects().into_iter().filter(|(_, defect, _)| defect.kv_dtype == sound.kv_dtype);
        let cases: BTreeSet<&str> = of_type.flat_map(|(_, _, cases)| cases.iter().copied()).collect();
        for name in cases {
            let subject = Subject { draw: Draw::from_env(), ..subject(sound) };
            assert_eq!((case(name).run)(&subject), Ok(()), "{name}");
        }
    }
}
