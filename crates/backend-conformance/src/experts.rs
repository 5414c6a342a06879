//! Cases about mixtures of experts.

use paguro_backend::{Activation, Scores, WeightFormat};

use super::{
    Biases, DriveOptions, ExpertsShape, ModelShape, Rng, Subject, Verdict,
    compare::{Schedule, agrees, agrees_on, same},
    exactness::{alone, drawn},
};

fn with(experts: ExpertsShape) -> ModelShape {
    ModelShape { experts: Some(experts), ..ModelShape::default() }
}

/// One and all of the experts, many experts, odd widths, biases, shared experts.
pub(super) fn experts(subject: &Subject) -> Verdict {
    let plain = ExpertsShape::default();
    let shared = ExpertsShape { shared: Some(48), ..plain };
    let shapes = [
        with(plain),
        with(ExpertsShape { used: 1, width: 40, ..plain }),
        with(ExpertsShape { used: 8, width: 17, ..plain }),
        with(ExpertsShape { count: 130, used: 16, width: 24, ..plain }),
        ModelShape { tied: true, ..with(ExpertsShape { count: 512, used: 10, width: 32, ..plain }) },
        with(shared),
        with(ExpertsShape { output_gate: true, ..shared }),
        ModelShape { biases: Biases::All, ..with(ExpertsShape { count: 5, used: 3, ..shared }) },
        ModelShape {
            biases: Biases::All,
            activation: Activation::ClampedSwiglu { alpha: 1.7, limit: 1.5 },
            sinks: true,
            ..with(ExpertsShape { count: 4, used: 4, ..plain })
        },
        ModelShape { post_norms: true, branch_scale: 0.5, hidden: 72, ..with(plain) },
    ];
    subject.draw.some("experts", &shapes, 4).iter().try_for_each(|shape| agrees(subject, shape))
}

/// Every way to choose and to weigh.
pub(super) fn routers(subject: &Subject) -> Verdict {
    let plain = ExpertsShape { used: 3, ..ExpertsShape::default() };
    let sigmoid = ExpertsShape { scores: Scores::Sigmoid, selection_bias: true, ..plain };
    let routers = [
        ExpertsShape { renormalize: false, ..plain },
        ExpertsShape { factor: 2.5, ..plain },
        sigmoid,
        ExpertsShape { renormalize: false, factor: 1.5, ..sigmoid },
        ExpertsShape { selection_bias: true, ..plain },
        ExpertsShape { router: WeightFormat::F16, ..plain },
        ExpertsShape { router: WeightFormat::BF16, ..plain },
    ];
    subject
        .draw
        .some("routers", &routers, 4)
        .into_iter()
        .try_for_each(|router| agrees(subject, &with(router)))
}

/// Experts in all formats that the backend has, of mixed formats, and in steps of many rows.
pub(super) fn formats(subject: &Subject) -> Verdict {
    for format in drawn(subject, "formats of experts", &WeightFormat::ALL, 3) {
        let shape = of_format(format);
        agrees(subject, &shape)?;
        if format == WeightFormat::Q4_K && !subject.unsupported.contains(&WeightFormat::Q6_K) {
            agrees(subject, &ModelShape { finer: Some(WeightFormat::Q6_K), ..shape })?;
        }
    }
    // Many rows for some experts, none for others.
    for format in drawn(
        subject,
        "many rows of experts",
        &[WeightFormat::F16, WeightFormat::Q4_K, WeightFormat::MXFP4],
        1,
    ) {
        let shape = of_format(format);
        let schedule = Schedule::whole(vec![Rng::new(5).tokens(190, shape.vocab)]);
        let options = DriveOptions { max_context: 200, ..subject.options() };
        agrees_on(subject, &schedule, &shape, &options)?;
    }
    Ok(())
}

fn of_format(format: WeightFormat) -> ModelShape {
    let width = if format.block_len() > 32 { 256 } else { 96 };
    let experts = ExpertsShape { width, shared: Some(width), ..ExpertsShape::default() };
    ModelShape { experts: Some(experts), ..ModelShape::of_format(format) }
}

/// Logits of a row are the same, bit for bit, in any batch, chunking and number of threads, also where choices are
/// close.
pub(super) fn exact(subject: &Subject) -> Verdict {
    for format in drawn(subject, "experts in a batch", subject.kernel_formats, 2) {
        let shape = of_format(format);
        // A width of whole blocks in all formats.
        let latents = subject.draw.some(&format!("rows of experts {format}"), &[None, Some(256)], 1);
        let latent = latents[0];
        let experts = shape.experts.map(|experts| ExpertsShape { stable: false, used: 3, latent, ..experts });
        let shape = ModelShape { experts, ..shape };
        let model = shape.build(12);
        let schedule = Schedule::mixed(16, shape.vocab);
        let expected = alone(subject, &model, &schedule.sequences)?;
        for threads in if subject.has_threads { &[1, 2, 5][..] } else { &[2] } {
            let ours =
                schedule.load_and_run(&*(subject.backend)(*threads), &model, &subject.exact_options())?;
            same(&format!("in a batch on {threads} threads ({format})"), &ours, &expected)?;
        }
        // Enough rows for every expert to have many, and then a few.
        let sequences = vec![Rng::new(3).tokens(150, shape.vocab)];
        let options = DriveOptions { max_context: 160, ..subject.exact_options() };
        let run = |steps: &[usize]| {
            let steps = steps.iter().map(|&count| vec![(0, count)]).collect();
            let schedule = Schedule { sequences: sequences.clone(), steps };
            schedule.load_and_run(&*(subject.backend)(2), &model, &options)
        };
        same(&format!("chunks ({format})"), &run(&[37, 1, 3, 100, 9])?, &run(&[150])?)?;
    }
    Ok(())
}

/// With slots for some experts, logits are those with all experts on the device, bit for bit: with the fewest slots, with two more
/// than a row uses and with one expert fewer than all, in steps of a few and of many rows, and for every kind of layer with experts.
pub(super) fn slots(subject: &Subject) -> Verdict {
    let backend = (subject.backend)(2);
    if backend.capacity().host_free == 0 {
        let model = with(ExpertsShape::default()).build(1);
        let options = DriveOptions { expert_slots: Some(2), ..subject.options() };
        return match Schedule::mixed(16, 16).load_and_run(&*backend, &model, &options) {
            Err(refusal) if refusal.contains("experts in slots") => Ok(()),
            other => Err(format!("slots on a device without memory of its own: {:?}", other.map(|_| ()))),
        };
    }
    let plain = ExpertsShape { stable: false, ..ExpertsShape::default() };
    let shapes = [
        with(ExpertsShape { count: 40, used: 4, width: 96, ..plain }),
        with(ExpertsShape { used: 3, shared: Some(48), output_gate: true, ..plain }),
        with(ExpertsShape { width: 17, beside: Some(40), ..plain }),
        with(ExpertsShape { used: 3, latent: Some(32), shared: Some(48), ..plain }),
        ModelShape { gated: false, ..with(ExpertsShape { used: 3, width: 40, ..plain }) },
        ModelShape {
            biases: Biases::All,
            activation: Activation::ClampedSwiglu { alpha: 1.7, limit: 1.5 },
            sinks: true,
            ..with(ExpertsShape { count: 9, used: 4, ..plain })
        },
    ];
    let mut shapes = subject.draw.some("shapes of experts in slots", &shapes, 2);
    for format in drawn(subject, "formats of experts in slots", &WeightFormat::ALL, 1) {
        let shape = of_format(format);
        let experts = shape.experts.map(|experts| ExpertsShape { stable: false, used: 3, ..experts });
        shapes.push(ModelShape { experts, ..shape });
    }
    for shape in shapes {
        // Several layers with experts share what is beside their slots.
        let shape = ModelShape { windows: vec![None; 4], ..shape };
        let (model, experts) = (shape.build(7), shape.experts.unwrap_or_default());
        let mut schedule = Schedule::mixed(16, shape.vocab);
        // Rows one by one, so that slots are replaced.
        schedule.sequences.push(Rng::new(9).tokens(12, shape.vocab));
        schedule.steps.extend([3, 1, 1, 1, 1, 2, 1, 1, 1].map(|count| vec![(4, count)]));
        let run = |expert_slots| {
            let options = DriveOptions { expert_slots, ..subject.options() };
            schedule.load_and_run(&*backend, &model, &options)
        };
        let resident = run(None)?;
        for slots in [experts.used, experts.used + 2, experts.count - 1] {
            let ours = run(Some(slots))?;
            same(&format!("{slots} slots ({shape:?})"), &ours, &resident)?;
        }
    }
    Ok(())
}
