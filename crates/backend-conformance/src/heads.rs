//! Cases of heads for multi-token prediction: programs whose embeddings are joined with rows of another one, and which share
//! matrices with it.

use paguro_backend::{MatrixId, WeightFormat};

use super::{
    Biases, Driver, ExpertsShape, ModelShape, RandomModel, Subject, Verdict,
    compare::same,
    exactness::drawn,
    rows::{Text, Texts, agrees_on, alone, run, unless_refused},
};

pub(super) fn shape_of(format: WeightFormat) -> ModelShape {
    let windows = vec![None];
    ModelShape {
        joined: true,
        given_parts: 1,
        windows,
        attention_gate: true,
        ..ModelShape::of_format(format)
    }
}

/// Texts all of whose rows are given, and steps.
#[allow(clippy::single_range_in_vec_init)] // a list of one range
fn texts(shape: &ModelShape) -> Texts {
    let text = |length: usize, seed| Text::new(shape, length, &[0..length], seed);
    let steps =
        vec![vec![(0, 18), (1, 6)], vec![(2, 9), (0, 15)], vec![(0, 1), (1, 1)], vec![(1, 13), (0, 6)]];
    (vec![text(40, 1), text(20, 2), text(9, 3)], steps)
}

/// Embeddings joined with given rows.
pub(super) fn joined_rows(subject: &Subject) -> Verdict {
    let plain = shape_of(WeightFormat::F32);
    let shapes = [
        ModelShape { embed_scale: 3.0, positions: Some(160), ..plain.clone() },
        ModelShape { biases: Biases::All, ..plain.clone() },
        ModelShape { experts: Some(ExpertsShape::default()), windows: vec![None; 2], ..plain },
        shape_of(WeightFormat::Q8_0),
        ModelShape { finer: Some(WeightFormat::Q6_K), ..shape_of(WeightFormat::Q4_K) },
    ];
    shapes.iter().try_for_each(|shape| agrees_on(subject, shape, &texts(shape), &subject.options()))
}

/// A head is exact in any batch, alone or beside the model with which it shares its embeddings and its last matrix.
pub(super) fn exact(subject: &Subject) -> Verdict {
    for format in drawn(subject, "heads", &[WeightFormat::F16, WeightFormat::Q8_0], 1) {
        let shape = shape_of(format);
        unless_refused(subject, || beside_its_model(subject, &shape))?;
    }
    Ok(())
}

fn beside_its_model(subject: &Subject, shape: &ModelShape) -> Verdict {
    let plain = ModelShape { joined: false, given_parts: 0, windows: vec![None; 2], ..shape.clone() };
    let (model, mut head) = (plain.build(4), shape.build(5));
    let ends = |model: &RandomModel| {
        let (embed, head) = (model.program.embed(), model.program.head());
        [embed.map(|embed| embed.table), head.map(|head| head.linear.matrix)].map(|id| id.expect("both ends"))
    };
    let shared: Vec<(MatrixId, MatrixId)> = ends(&head).into_iter().zip(ends(&model)).collect();
    for &(own, of_model) in &shared {
        head.weights.matrices[own.0 as usize] = model.weights.matrix(of_model).clone();
    }
    let options = subject.exact_options();
    let (texts, steps) = texts(shape);
    let expected = alone(&*(subject.backend)(2), &head, &options, &texts)?;
    let backend = (subject.backend)(3);
    let mut of_model = Driver::new(&*backend, &model, &options)?;
    let mut of_head = of_model.head(&*backend, &head, &shared, &options)?;
    let prompt = Text::new(&plain, 30, &[], 6);
    let whole = [vec![(0, prompt.tokens.len())]];
    let prompts = std::slice::from_ref(&prompt);
    let before = run(&mut of_model, prompts, &whole)?;
    same("a head beside its model", &run(&mut of_head, &texts, &steps)?, &expected)?;
    same("a model beside its head", &run(&mut of_model, prompts, &whole)?, &before)?;
    // The head outlives the model.
    drop(of_model);
    same("a head after its model", &run(&mut of_head, &texts, &steps)?, &expected)
}
