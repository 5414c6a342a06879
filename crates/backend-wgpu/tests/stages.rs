//! Stages of a model on several devices: two GPUs, which are one that was opened twice, and a GPU behind the reference.

use std::{sync::LazyLock, time::Duration};

use paguro_backend::{
    Backend, KvDtype, NormKind, Program, WeightFormat, legal_cuts,
    reference::{KvRounding, Reference},
};
use paguro_backend_conformance::{
    Biases, Draw, DriveOptions, Driver, ExpertsShape, ModelShape, Rng, Subject, gpu_subject,
};
use paguro_backend_stages::Stages;
use paguro_backend_wgpu::{Gpu, GpuOptions, gpus};

/// Threads of its stages do not sleep at once.
static ONE: LazyLock<Result<Gpu, String>> = LazyLock::new(|| open(Duration::from_millis(1)));
static OTHER: LazyLock<Result<Gpu, String>> = LazyLock::new(|| open(Duration::ZERO));
static REFERENCE: Reference = Reference { kv: KvRounding::F16, poison: Some(1) };

fn open(spin: Duration) -> Result<Gpu, String> {
    Gpu::open(0, GpuOptions { poison: true, spin: Some(spin), ..GpuOptions::default() })
}

/// Variants of slow tests: a sample on a software driver.
fn draw() -> Draw {
    let is_software = gpus().first().is_some_and(|gpu| gpu.is_software);
    if is_software { Draw::from_env() } else { Draw::All }
}

/// Returns these devices with a cut at a place that depends on the program.
fn stages(devices: [&'static dyn Backend; 2]) -> Stages<'static> {
    let cut = |program: &Program| {
        let legal = legal_cuts(program);
        let place = usize::from(program.digest()[0]) % legal.len().max(1);
        legal.get(place).copied().into_iter().collect()
    };
    Stages::new(devices.into(), Box::new(cut))
}

/// Logits of two sequences, in steps of several rows and of one.
fn logits(backend: &dyn Backend, shape: &ModelShape) -> Vec<Vec<Vec<f32>>> {
    let mut driver = Driver::new(backend, &shape.build(5), &DriveOptions::default()).unwrap();
    let mut rng = Rng::new(7);
    let ids = [30, 12].map(|length| driver.start(&rng.tokens(length, shape.vocab)));
    for parts in [[17, 5], [1, 1], [7, 1], [5, 5]] {
        driver.step(&[(ids[0], parts[0]), (ids[1], parts[1])]).unwrap();
    }
    ids.map(|id| driver.logits(id).1.to_vec()).into()
}

#[test]
fn two_gpus_compute_the_bits_of_one() {
    let (one, other) = match (&*ONE, &*OTHER) {
        (Ok(one), Ok(other)) => (one, other),
        (Err(error), _) | (_, Err(error)) => return println!("skipped: stages on GPUs: {error}"),
    };
    let of =
        |format| ModelShape { windows: vec![Some(9), None, Some(9), None], ..ModelShape::of_format(format) };
    let experts = ExpertsShape::default();
    let shapes = [
        ModelShape { post_norms: true, output_scale: 0.5, ..of(WeightFormat::Q4_K) },
        ModelShape { tied: true, norms: NormKind::Layer, biases: Biases::All, ..of(WeightFormat::F16) },
        ModelShape { experts: Some(experts), ..of(WeightFormat::Q8_0) },
        ModelShape { windows: vec![None; 4], mixers: "dada", ..of(WeightFormat::Q8_0) },
    ];
    for shape in draw().some("stages of GPUs", &shapes, 2) {
        let whole = logits(one, &shape);
        assert_eq!(logits(&stages([one, other]), &shape), whole, "{shape:?}");
        // Kernels of a device are shared by both stages.
        for cut in 1..4 {
            let cut = move |_: &Program| vec![cut];
            assert_eq!(logits(&Stages::new(vec![one, one], Box::new(cut)), &shape), whole, "{shape:?}");
        }
    }
}

fn subject(devices: [Result<&'static dyn Backend, &'static String>; 2]) -> Result<Subject, &'static String> {
    let [first, second] = devices;
    let devices = [first?, second?];
    let exact_rows = ONE.as_ref()?.exact_rows();
    Ok(gpu_subject(move || Box::new(stages(devices)), exact_rows, KvDtype::F16, draw()))
}

fn one() -> Result<&'static dyn Backend, &'static String> {
    ONE.as_ref().map(|gpu| gpu as &dyn Backend)
}

mod twice {
    use super::{one, subject};

    paguro_backend_conformance::conformance!(maybe subject([one(), one()]); only
        adapters carried_tokens exact_after_copy_on_write exact_from_outside outputs);
}

mod behind_the_reference {
    use super::{REFERENCE, one, subject};

    paguro_backend_conformance::conformance!(maybe subject([Ok(&REFERENCE), one()]); only
        given_rows spans carried_tokens kernel_counts);
}
