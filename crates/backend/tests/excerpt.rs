//! Excerpts have one layer of each kind, and the weights of these layers.

use paguro_backend::{ExpertGroups, FeedForward, MatrixId, QkNormKind, WeightFormat, excerpt};
use paguro_backend_conformance::{Biases, ExpertsShape, ModelShape, RandomModel};

#[test]
fn one_layer_of_each_kind() {
    let windows = vec![Some(16), None, Some(16), None, Some(16)];
    let shape = ModelShape {
        windows,
        biases: Biases::All,
        qk_norm: Some(QkNormKind::Head),
        post_norms: true,
        tied: true,
        ..ModelShape::of_format(WeightFormat::Q4_K)
    };
    let model = shape.build(1);
    let (program, weights) = excerpt(&model.program, &model.weights);
    program.check(&weights).unwrap();
    // A layer that sees everything, and one with a window.
    assert_eq!(program.layers.len(), 2);
    // Seven matrices of each layer, and the table that is the head.
    assert_eq!(weights.matrices.len(), 2 * 7 + 1);
    assert_eq!(weights.matrix(MatrixId(0)).name, model.weights.matrix(MatrixId(0)).name);
    assert_eq!(program.kv, model.program.kv);
}

#[test]
fn experts_are_a_kind() {
    let experts = Some(ExpertsShape { shared: Some(48), output_gate: true, ..ExpertsShape::default() });
    let model =
        ModelShape { experts, windows: vec![None; 4], biases: Biases::All, ..ModelShape::default() }.build(1);
    let (program, weights) = excerpt(&model.program, &model.weights);
    program.check(&weights).unwrap();
    assert_eq!(program.layers.len(), 2);
    // No rounding changes the choice: a bias decides, which no score exceeds.
    let FeedForward::Experts(experts) = &program.layers[1].ffn else { panic!("{:?}", program.layers[1]) };
    let bias = weights.vector(experts.router.selection_bias.unwrap());
    assert_eq!(bias, [4.0, 0.0, 0.0, 0.0, 4.0, 0.0, 0.0, 0.0]);
}

/// The chosen experts fill the groups that a row may use.
#[test]
fn experts_in_groups_are_chosen_from_the_first_ones() {
    let groups = Some(ExpertGroups { count: 4, used: 2, best: 1 });
    let experts = Some(ExpertsShape { groups, ..ExpertsShape::default() });
    let model = ModelShape { experts, ..ModelShape::default() }.build(1);
    let (program, weights) = excerpt(&model.program, &model.weights);
    let FeedForward::Experts(experts) = &program.layers[1].ffn else { panic!("{:?}", program.layers[1]) };
    let bias = weights.vector(experts.router.selection_bias.unwrap());
    assert_eq!(bias, [4.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
}

#[test]
fn a_finer_format_is_a_kind() {
    let mut model =
        ModelShape { windows: vec![None; 3], ..ModelShape::of_format(WeightFormat::Q4_K) }.build(1);
    let layers = |model: &RandomModel| excerpt(&model.program, &model.weights).0.layers.len();
    assert_eq!(layers(&model), 1);
    let fine = ModelShape { windows: vec![None; 3], ..ModelShape::of_format(WeightFormat::Q6_K) }.build(1);
    let last = model.weights.matrices.iter().rposition(|matrix| matrix.rows == model.program.hidden);
    let last = last.expect("the last layer's down");
    model.weights.matrices[last] = fine.weights.matrices[last].clone();
    assert_eq!(layers(&model), 2);
}
