//! The conformance suite on stages of the reference, whose bits are those of the reference as a whole.

use paguro_backend::{
    Backend, KvDtype, Program, WeightFormat, legal_cuts,
    reference::{KvRounding, Reference},
};
use paguro_backend_conformance::{Draw, Subject, Tolerance};
use paguro_backend_stages::Stages;

/// Returns up to two cuts at places that depend on the program.
fn cuts(program: &Program) -> Vec<usize> {
    let mut legal = legal_cuts(program);
    let seed = usize::from(program.digest()[0]);
    while legal.len() > 2 {
        legal.remove(seed % legal.len());
    }
    legal
}

fn subject(stages: usize) -> Subject {
    let device = || -> Box<dyn Backend> { Box::new(Reference { kv: KvRounding::F16, poison: Some(1) }) };
    Subject {
        backend: Box::new(move |_| {
            let devices = (0..stages).map(|_| device()).collect();
            let most = stages - 1;
            Box::new(Stages::new(
                devices,
                Box::new(move |program| {
                    let mut cuts = cuts(program);
                    cuts.truncate(most);
                    cuts
                }),
            ))
        }),
        has_threads: false,
        exact_rows: 1,
        tolerance: |_| Tolerance { error: 0.0, reason: "stages compute the bits of the whole" },
        kv_dtype: KvDtype::F16,
        kv: KvRounding::F16,
        unsupported: &[],
        refused: &[],
        kernel_formats: &WeightFormat::ALL,
        draw: Draw::from_env(),
    }
}

mod two {
    paguro_backend_conformance::conformance!(super::subject(2));
}

mod three {
    paguro_backend_conformance::conformance!(super::subject(3));
}
