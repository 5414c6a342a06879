//! Cases of layers that differ, of data that layers share, and of embeddings for layers.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering::SeqCst},
    },
};

use paguro_backend::{Activation, ByteSource, Bytes, QkNormKind, WeightFormat};

use super::{
    Biases, DriveOptions, Driver, ExpertsShape, ModelShape, Rng, Subject, Verdict,
    compare::{Logits, Schedule, agrees, same},
    exactness::{alone, drawn},
};

/// Layers with a window that have other K/V heads than the rest.
pub(super) fn kv_geometry(subject: &Subject) -> Verdict {
    let shapes =
        [((4, 64), None), ((2, 32), Some(1)), ((1, 128), None), ((1, 16), Some(2)), ((1, 512), None)];
    for (window_heads, layer_slots) in subject.draw.some("K/V heads of windows", &shapes, 3) {
        let windows = vec![Some(9), None, Some(9), None];
        let window_heads = Some(window_heads);
        agrees(subject, &ModelShape { window_heads, windows, layer_slots, ..ModelShape::default() })?;
    }
    Ok(())
}

/// Layers that read the K and V of earlier ones.
pub(super) fn shared_kv(subject: &Subject) -> Verdict {
    let shape = ModelShape { shared_kv: 2, windows: vec![None; 4], ..ModelShape::default() };
    agrees(subject, &shape)?;
    let windows = vec![None, Some(9), Some(9), None, Some(9), None];
    let biases = Biases::Qkv;
    for qk_norm in [None, Some(QkNormKind::Head), Some(QkNormKind::Row)] {
        let shape = ModelShape { windows: windows.clone(), qk_norm, biases, shared_kv: 3, ..shape.clone() };
        agrees(subject, &shape)?;
    }
    agrees(subject, &ModelShape { attention_gate: true, windows, window_heads: Some((1, 32)), ..shape })
}

/// Values that are keys before their norm and rotation, and norms of values.
pub(super) fn keys_as_values(subject: &Subject) -> Verdict {
    let shape = ModelShape { windows: vec![None, Some(9), None], ..ModelShape::default() };
    for biases in [Biases::None, Biases::Qkv] {
        for qk_norm in [None, Some(QkNormKind::Head)] {
            let kinds = [(true, true), (true, false), (false, true)];
            for (keys_as_values, v_norm) in subject.draw.some("keys as values", &kinds, 1) {
                agrees(subject, &ModelShape { biases, qk_norm, keys_as_values, v_norm, ..shape.clone() })?;
            }
        }
    }
    Ok(())
}

/// Embeddings for layers, and scales of layers, each alone and beside other things at the end of a layer.
pub(super) fn layer_embeds(subject: &Subject) -> Verdict {
    for format in drawn(subject, "embeddings for layers", &[WeightFormat::F32, WeightFormat::Q8_0], 2) {
        let shape = ModelShape { layer_embeds: Some(32), ..ModelShape::of_format(format) };
        agrees(subject, &shape)?;
        let scaled = ModelShape { output_scale: 0.6, activation: Activation::GeluTanh, ..shape.clone() };
        agrees(subject, &ModelShape { post_norms: true, biases: Biases::All, ..scaled })?;
        let residual = paguro_backend::Residual::Parallel;
        agrees(subject, &ModelShape { residual, output_scale: 1.2, branch_scale: 0.5, ..shape })?;
    }
    agrees(subject, &ModelShape { output_scale: 0.5, ..ModelShape::default() })
}

/// Dense networks beside experts, with norms and scales of their own.
pub(super) fn experts_beside(subject: &Subject) -> Verdict {
    let experts = ExpertsShape { beside: Some(72), used: 3, ..ExpertsShape::default() };
    let shape = ModelShape { experts: Some(experts), ..ModelShape::default() };
    agrees(subject, &shape)?;
    // Without biases of the router, with which rounding may change a choice.
    let all = Some(ExpertsShape { used: experts.count, ..experts });
    let biased = ModelShape { biases: Biases::All, experts: all, ..shape.clone() };
    agrees(subject, &ModelShape { post_norms: true, ..biased })?;
    let residual = paguro_backend::Residual::Parallel;
    agrees(subject, &ModelShape { residual, branch_scale: 0.7, ..shape })?;
    let experts = ExpertsShape { beside: Some(96), ..experts };
    agrees(subject, &ModelShape { experts: Some(experts), ..ModelShape::of_format(WeightFormat::Q8_0) })
}

/// All of it in one model, as in Gemma 4.
fn of_all_kinds(format: WeightFormat) -> ModelShape {
    let wide = if format.block_len() > 32 { 256 } else { 64 };
    ModelShape {
        kv_heads: 1,
        head_dim: 128,
        window_heads: Some((2, 64)),
        windows: vec![Some(9), None, Some(9), None, Some(9), None],
        shared_kv: 2,
        keys_as_values: true,
        v_norm: true,
        layer_embeds: Some(wide),
        output_scale: 0.8,
        post_norms: true,
        qk_norm: Some(QkNormKind::Head),
        activation: Activation::GeluTanh,
        tied: true,
        logit_cap: Some(30.0),
        experts: Some(ExpertsShape { beside: Some(256), width: 256, ..ExpertsShape::default() }),
        ..ModelShape::of_format(format)
    }
}

/// A row is the same, bit for bit, in any batch, in any chunks, in any pages, on any number of threads.
pub(super) fn exact(subject: &Subject) -> Verdict {
    let formats = [WeightFormat::F16, WeightFormat::Q8_0, WeightFormat::Q4_K];
    for format in drawn(subject, "layers of all kinds", &formats, 1) {
        let shape = of_all_kinds(format);
        agrees(subject, &shape)?;
        let model = shape.build(5);
        let schedule = Schedule::mixed(16, shape.vocab);
        let expected = alone(subject, &model, &schedule.sequences)?;
        let ways = [(1, None, false, true, 16), (3, Some(4), true, false, 32), (2, None, true, true, 32)];
        for (threads, scatter, stale, sparse, block_size) in subject.draw.some("ways of all kinds", &ways, 1)
        {
            let threads = if subject.has_threads { threads } else { 2 };
            // The number of outputs may decide how the head adds up, where that of rows does elsewhere.
            let sparse = sparse && subject.exact_rows == 1;
            let options = DriveOptions { scatter, stale, sparse, block_size, ..subject.exact_options() };
            let ours = schedule.load_and_run(&*(subject.backend)(threads), &model, &options)?;
            same(&format!("{options:?}, {threads} threads ({format})"), &ours, &expected)?;
        }
        let mut driver = Driver::new(&*(subject.backend)(2), &model, &subject.exact_options())?;
        for chunk in subject.draw.some("chunks of all kinds", &[1, 5, 16, 17], 1) {
            let id = driver.start(&schedule.sequences[1]);
            driver.run(id, chunk)?;
            let chunked: Logits = vec![driver.logits(id).1.to_vec()];
            driver.preempt(id);
            same(&format!("chunks of {chunk} ({format})"), &chunked, &expected[1..2].to_vec())?;
        }
    }
    Ok(())
}

/// A file that gets lost while a model runs.
struct LostFile {
    bytes: Vec<u8>,
    state: Arc<AtomicU8>,
}

const WHOLE: u8 = 0;
const SHORT: u8 = 1;
const CHANGED: u8 = 2;

impl ByteSource for LostFile {
    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if self.state.load(SeqCst) == SHORT {
            return Err(io::Error::other("it was truncated"));
        }
        self.bytes.read_at(offset, out)
    }

    fn check_unchanged(&self) -> io::Result<()> {
        if self.state.load(SeqCst) == CHANGED { Err(io::Error::other("it was changed")) } else { Ok(()) }
    }
}

/// A step that cannot read its rows of a table fails, with the reason; steps that can are right, also after it.
pub(super) fn unreadable_tables(subject: &Subject) -> Verdict {
    let shape = ModelShape { layer_embeds: Some(32), ..ModelShape::default() };
    let mut model = shape.build(3);
    let sequences = vec![Rng::new(3).tokens(20, shape.vocab)];
    let expected = alone(subject, &model, &sequences)?;
    let state = Arc::new(AtomicU8::new(WHOLE));
    let table = &mut model.weights.tables[0];
    let bytes = table.bytes.read().expect("in memory").into_owned();
    let len = bytes.len();
    table.bytes = Bytes::new(Arc::new(LostFile { bytes, state: Arc::clone(&state) }), 0, len);
    let mut driver = Driver::new(&*(subject.backend)(2), &model, &subject.exact_options())?;
    for (now, reason) in [(WHOLE, ""), (SHORT, "it was truncated"), (WHOLE, ""), (CHANGED, "it was changed")]
    {
        state.store(now, SeqCst);
        let id = driver.start(&sequences[0]);
        match driver.step(&[(id, 20)]) {
            Ok(()) if now == WHOLE => {
                same("a file that was lost", &vec![driver.logits(id).1.to_vec()], &expected)?;
                driver.preempt(id);
            }
            Ok(()) => return Err(format!("a step passes although of its table {reason}")),
            Err(error) if now == WHOLE => return Err(error),
            Err(error) if error.contains(reason) && error.contains("embeddings for layers") => {}
            Err(error) => return Err(format!("the error does not say that {reason}: {error}")),
        }
    }
    Ok(())
}
