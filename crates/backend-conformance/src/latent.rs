//! Cases of latent attention and of experts in groups.

use paguro_backend::{ExpertGroups, LatentShape, PositionScale, Scores, WeightFormat};

use super::{
    Biases, DriveOptions, Driver, ExpertsShape, ModelShape, Subject, Verdict,
    compare::{Logits, Schedule, agrees, same},
    exactness::{alone, drawn},
};

fn of_format(format: WeightFormat) -> ModelShape {
    let wide = if format.block_len() > 32 { 256 } else { 64 };
    let latent = LatentShape { heads: 4, plain: wide, rotated: 16, latent: wide, value: 64 };
    ModelShape {
        mixers: "lll",
        windows: vec![None; 3],
        latent,
        rank: Some(256),
        ..ModelShape::of_format(format)
    }
}

/// Latent attention of all shapes, with queries of a rank and direct ones, beside other attention.
pub(super) fn latent_attention(subject: &Subject) -> Verdict {
    let shape = ModelShape { mixers: "ll", ..ModelShape::default() };
    let shapes = [(4, 32, 16, 64, 32), (1, 16, 8, 32, 48), (5, 24, 12, 40, 20), (8, 128, 64, 512, 128)];
    for (heads, plain, rotated, latent, value) in subject.draw.some("latent attention", &shapes, 3) {
        for rank in subject.draw.some("ranks of queries", &[None, Some(48)], 1) {
            let latent = LatentShape { heads, plain, rotated, latent, value };
            agrees(subject, &ModelShape { latent, rank, ..shape.clone() })?;
        }
    }
    let mixed = ModelShape { mixers: "lal", windows: vec![None, Some(9), Some(9)], ..shape.clone() };
    agrees(subject, &mixed)?;
    let position_scale = Some(PositionScale { beta: 0.4, original: 7 });
    agrees(subject, &ModelShape { biases: Biases::All, post_norms: true, position_scale, ..shape })
}

/// Experts in groups.
pub(super) fn expert_groups(subject: &Subject) -> Verdict {
    let groups = |count, used, best| Some(ExpertGroups { count, used, best });
    let plain = ExpertsShape { count: 12, used: 3, ..ExpertsShape::default() };
    let sigmoid = ExpertsShape { scores: Scores::Sigmoid, selection_bias: true, ..plain };
    let all = [
        ExpertsShape { groups: groups(3, 1, 1), ..plain },
        ExpertsShape { groups: groups(4, 2, 1), renormalize: false, ..plain },
        ExpertsShape { groups: groups(4, 2, 2), ..sigmoid },
        ExpertsShape { groups: groups(2, 1, 2), used: 2, factor: 2.5, ..sigmoid },
    ];
    for experts in subject.draw.some("groups of experts", &all, 2) {
        agrees(subject, &ModelShape { experts: Some(experts), ..ModelShape::default() })?;
    }
    Ok(())
}

/// A row is the same, bit for bit, in any batch, in any chunks, in any pages, on any number of threads.
pub(super) fn exact(subject: &Subject) -> Verdict {
    for format in
        drawn(subject, "latent attention", &[WeightFormat::F16, WeightFormat::Q8_0, WeightFormat::Q4_K], 1)
    {
        let shape = of_format(format);
        agrees(subject, &shape)?;
        let model = shape.build(5);
        let schedule = Schedule::mixed(16, shape.vocab);
        let expected = alone(subject, &model, &schedule.sequences)?;
        let ways = [(1, None, false, 16), (3, Some(4), true, 32)];
        for (threads, scatter, stale, block_size) in subject.draw.some("ways of latent attention", &ways, 1) {
            let threads = if subject.has_threads { threads } else { 2 };
            let options = DriveOptions { scatter, stale, block_size, ..subject.exact_options() };
            let ours = schedule.load_and_run(&*(subject.backend)(threads), &model, &options)?;
            same(&format!("{options:?}, {threads} threads ({format})"), &ours, &expected)?;
        }
        let mut driver = Driver::new(&*(subject.backend)(2), &model, &subject.exact_options())?;
        for chunk in subject.draw.some("chunks of latent attention", &[1, 5, 17], 1) {
            let id = driver.start(&schedule.sequences[1]);
            driver.run(id, chunk)?;
            let chunked: Logits = vec![driver.logits(id).1.to_vec()];
            driver.preempt(id);
            same(&format!("chunks of {chunk} ({format})"), &chunked, &expected[1..2].to_vec())?;
        }
    }
    Ok(())
}
