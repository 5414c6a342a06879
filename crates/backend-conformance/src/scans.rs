//! Cases of the scan of Mamba-2, of sums of mixers, and of layers without a mixer or a feed-forward network.

use paguro_backend::{Activation, DeltaShape, KvDtype, WeightFormat};

use super::{
    Biases, ExpertsShape, ModelShape, RecurrentShape, Subject, Verdict,
    compare::{self, agrees_on},
    exactness::{drawn, supported},
    recurrent,
};

/// Over sequences that begin and end everywhere in a chunk.
fn agrees(subject: &Subject, shape: &ModelShape) -> Verdict {
    agrees_on(subject, &recurrent::schedule(shape.vocab), shape, &recurrent::options(subject))
}

fn of_mixers(format: WeightFormat, mixers: &'static str) -> ModelShape {
    recurrent::of_mixers(format, mixers)
}

fn scan(key_heads: usize, value_heads: usize, key_dim: usize, value_dim: usize) -> RecurrentShape {
    let delta = DeltaShape { key_heads, value_heads, key_dim, value_dim };
    RecurrentShape { delta, bias: true, ..RecurrentShape::default() }
}

/// Scans of all shapes, with all norms.
pub(super) fn scans(subject: &Subject) -> Verdict {
    let shapes = [
        (scan(1, 4, 16, 16), 1, false, "sas"),
        (scan(2, 4, 32, 32), 2, false, "sas"),
        (scan(1, 6, 128, 64), 1, true, "sas"),
        (scan(3, 6, 24, 40), 3, true, "ss"),
        (scan(4, 4, 20, 7), 2, false, "sas"),
        (scan(2, 8, 64, 32), 0, false, "ss"),
        (scan(1, 2, 256, 32), 1, false, "sas"),
        (scan(2, 2, 150, 40), 2, false, "ss"),
    ];
    for (recurrent, norm_groups, norm_before_gate, mixers) in subject.draw.some("scans", &shapes, 3) {
        let taps = 2 + recurrent.delta.key_heads;
        let recurrent = RecurrentShape { norm_groups, norm_before_gate, taps, ..recurrent };
        agrees(subject, &ModelShape { recurrent, ..of_mixers(WeightFormat::F32, mixers) })?;
    }
    for format in supported(subject, &[WeightFormat::Q8_0, WeightFormat::Q4_K]) {
        let recurrent = RecurrentShape { norm_groups: 2, ..scan(2, 4, 64, 64) };
        let biases = Biases::All;
        agrees(subject, &ModelShape { recurrent, biases, post_norms: true, ..of_mixers(format, "sas") })?;
    }
    Ok(())
}

/// Attention and scans side by side, with scales.
pub(super) fn mixer_sums(subject: &Subject) -> Verdict {
    let recurrent = RecurrentShape { norm_groups: 2, ..scan(2, 4, 32, 32) };
    let scaled = RecurrentShape { scales: true, ..recurrent };
    let shape = |format| of_mixers(format, "hsh");
    agrees(subject, &ModelShape { recurrent: scaled, branch_scale: 0.7, ..shape(WeightFormat::F32) })?;
    agrees(
        subject,
        &ModelShape { recurrent, biases: Biases::All, post_norms: true, ..shape(WeightFormat::Q8_0) },
    )
}

/// Layers of one part each.
pub(super) fn bare_layers(subject: &Subject) -> Verdict {
    for (mixers, networks) in [("s-a-s-", "-x-x-x"), ("-ss-a", "x--x-"), ("a-sh", "-x--")] {
        let recurrent = scan(2, 4, 32, 32);
        let shape = ModelShape { recurrent, networks, ..of_mixers(WeightFormat::F32, mixers) };
        agrees(subject, &ModelShape { gated: false, activation: Activation::Relu2, ..shape.clone() })?;
        agrees(subject, &ModelShape { output_scale: 0.9, branch_scale: 0.6, ..shape })?;
    }
    Ok(())
}

/// Experts without a gate, some of them of a width of their own.
pub(super) fn ungated_experts(subject: &Subject) -> Verdict {
    let plain = ExpertsShape::default();
    for format in drawn(subject, "ungated experts", &[WeightFormat::F32, WeightFormat::Q8_0], 2) {
        let wide = subject.draw.some("wide experts", &[(None, None), (Some(96), None)], 1);
        let narrow = subject.draw.some("narrow experts", &[(Some(96), Some(32)), (None, Some(64))], 1);
        for (shared, latent) in wide.into_iter().chain(narrow) {
            let experts = Some(ExpertsShape { shared, latent, ..plain });
            // Beside a bias of a router, a rounding difference may flip its choice.
            let exact = format == WeightFormat::F32 && subject.kv_dtype == KvDtype::F16;
            for biases in if exact { &[Biases::None, Biases::All][..] } else { &[Biases::None] } {
                let biases = *biases;
                let shape = ModelShape { experts, biases, ..ModelShape::of_format(format) };
                let shape = ModelShape { gated: false, activation: Activation::Relu2, ..shape };
                compare::agrees(subject, &shape)?;
            }
            compare::agrees(subject, &ModelShape { experts, ..ModelShape::of_format(format) })?;
        }
    }
    Ok(())
}

/// As for other states: bitwise equal in any batch, chunks and slots, after a fork and after a preemption.
pub(super) fn exact(subject: &Subject) -> Verdict {
    for format in drawn(subject, "formats of scans", &[WeightFormat::F16, WeightFormat::Q8_0], 1) {
        for key_dim in subject.draw.some("keys of exact scans", &[64, 160], 1) {
            let recurrent = RecurrentShape { norm_groups: 2, droppable: 7, ..scan(2, 4, key_dim, 64) };
            let shape = ModelShape { recurrent, networks: "-xx", ..of_mixers(format, "h-s") };
            recurrent::exact_of(subject, &shape)?;
        }
    }
    Ok(())
}
