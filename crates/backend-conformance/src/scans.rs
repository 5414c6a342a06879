//! Cases of the scan of Mamba-2, of sums of mixers, and of layers without a mixer or a feed-forward network.

use paguro_backend::{Activation, DeltaShape, KvDtype, WeightFormat};

use super::{
    Biases, Driver, ExpertsShape, ModelShape, RecurrentShape, Subject, Verdict,
    compare::{self, agrees_on},
    exactness::{drawn, supported},
    recurrent,
};

/// Parts of these models that a backend may refuse to load, by their names in errors.
const MAY_REFUSE: [&str; 4] = [
    "scans with states",
    "sums of mixers",
    "models without attention",
    "experts with rows of their own width",
];

/// False if the backend refuses the model for one of the parts that it may refuse.
fn loads(subject: &Subject, shape: &ModelShape) -> Result<bool, String> {
    match Driver::new(&*(subject.backend)(2), &shape.build(1), &subject.options()) {
        Ok(_) => Ok(true),
        Err(error) if MAY_REFUSE.iter().any(|part| error.contains(part)) => {
            println!("skipped: {error}");
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Over sequences that begin and end everywhere in a chunk.
fn agrees(subject: &Subject, shape: &ModelShape) -> Verdict {
    if !loads(subject, shape)? {
        return Ok(());
    }
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
    for (format, biases) in [(WeightFormat::F32, Biases::None), (WeightFormat::Q8_0, Biases::All)] {
        let recurrent = RecurrentShape { scales: true, norm_groups: 2, ..scan(2, 4, 32, 32) };
        let shape = ModelShape { recurrent, biases, branch_scale: 0.7, ..of_mixers(format, "hsh") };
        agrees(subject, &shape)?;
    }
    Ok(())
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
        for (shared, latent) in [(None, None), (Some(96), None), (Some(96), Some(32)), (None, Some(64))] {
            let experts = Some(ExpertsShape { shared, latent, ..plain });
            // Beside a bias of a router, a rounding difference may flip its choice.
            let exact = format == WeightFormat::F32 && subject.kv_dtype == KvDtype::F16;
            for biases in if exact { &[Biases::None, Biases::All][..] } else { &[Biases::None] } {
                let biases = *biases;
                let shape = ModelShape { experts, biases, ..ModelShape::of_format(format) };
                let shape = ModelShape { gated: false, activation: Activation::Relu2, ..shape };
                if loads(subject, &shape)? {
                    compare::agrees(subject, &shape)?;
                }
            }
            let shape = ModelShape { experts, ..ModelShape::of_format(format) };
            if loads(subject, &shape)? {
                compare::agrees(subject, &shape)?;
            }
        }
    }
    Ok(())
}

/// As for other states: bitwise equal in any batch, chunks and slots, after a fork and after a preemption.
pub(super) fn exact(subject: &Subject) -> Verdict {
    for format in drawn(subject, "formats of scans", &[WeightFormat::F16, WeightFormat::Q8_0], 1) {
        let recurrent = RecurrentShape { norm_groups: 2, ..scan(2, 4, 64, 64) };
        let of = |mixers| ModelShape { recurrent, networks: "x-x-", ..of_mixers(format, mixers) };
        let with_sum = of("sa-h");
        let shape = if loads(subject, &with_sum)? { with_sum } else { of("sa-s") };
        recurrent::exact_of(subject, &shape)?;
    }
    Ok(())
}
