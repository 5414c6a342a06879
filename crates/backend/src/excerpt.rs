//! A short program out of a long one: the embedding, one layer of each kind, and the head.
//!
//! Kernels are compiled for a model's shapes and formats. A device that computes the excerpt correctly has run the kernels that the
//! whole model needs, in a fraction of its time and memory.

use std::collections::{HashMap, HashSet};

use crate::{Linear, MatrixId, Norm, Op, Program, VectorId, Weights};

/// Returns the excerpt of a program, with the weights that it refers to.
///
/// Two layers are of one kind if they differ only in the values of their weights and in their place in the pages.
pub fn excerpt(program: &Program, weights: &Weights) -> (Program, Weights) {
    let mut ops = Vec::new();
    let mut kinds = HashSet::new();
    let mut rest = &program.ops[..];
    while let Some(first) = rest.first() {
        let next = match first {
            Op::NormQkvRopeStore(_) => {
                let after = rest
                    .iter()
                    .skip(1)
                    .position(|op| matches!(op, Op::NormQkvRopeStore(_) | Op::NormLogits(_)));
                after.map_or(rest.len(), |after| after + 1)
            }
            _ => 1,
        };
        let (layer, later) = rest.split_at(next);
        if kinds.insert(kind(layer, weights)) {
            ops.extend_from_slice(layer);
        }
        rest = later;
    }
    let mut some = Weights::default();
    let (mut matrices, mut vectors) = (HashMap::new(), HashMap::new());
    for op in &mut ops {
        op.visit(
            &mut |id| {
                *id = *matrices.entry(*id).or_insert_with(|| {
                    some.matrices.push(weights.matrix(*id).clone());
                    MatrixId(some.matrices.len() as u32 - 1)
                });
            },
            &mut |id| {
                *id = *vectors.entry(*id).or_insert_with(|| {
                    some.vectors.push(weights.vector(*id).to_vec());
                    VectorId(some.vectors.len() as u32 - 1)
                });
            },
        );
    }
    (Program { ops, ..program.clone() }, some)
}

/// Text that is equal for layers of one kind.
fn kind(layer: &[Op], weights: &Weights) -> String {
    let mut shapes = Vec::new();
    let mut layer = layer.to_vec();
    for op in &mut layer {
        op.visit(
            &mut |id| {
                let matrix = weights.matrix(*id);
                shapes.push((matrix.format, matrix.rows, matrix.cols));
                *id = MatrixId(0);
            },
            &mut |id| *id = VectorId(0),
        );
        match op {
            Op::NormQkvRopeStore(op) => op.kv.slot = 0,
            Op::Attend(op) => op.kv.slot = 0,
            _ => {}
        }
    }
    format!("{layer:?} {shapes:?}")
}

impl Op {
    /// Calls the functions with all references to weights.
    fn visit(&mut self, matrix: &mut impl FnMut(&mut MatrixId), vector: &mut impl FnMut(&mut VectorId)) {
        let mut linears: Vec<&mut Linear> = Vec::new();
        let mut norms: Vec<&mut Norm> = Vec::new();
        match self {
            Op::Embed(op) => matrix(&mut op.table),
            Op::NormQkvRopeStore(op) => {
                linears.extend([&mut op.q, &mut op.k, &mut op.v]);
                norms.push(&mut op.norm);
                norms.extend(op.q_norm.as_mut().into_iter().chain(&mut op.k_norm));
            }
            Op::Attend(_) => {}
            Op::ProjectAdd(op) => {
                linears.push(&mut op.project);
                norms.extend(&mut op.post_norm);
            }
            Op::NormGateUp(op) => {
                linears.extend([&mut op.gate, &mut op.up]);
                norms.push(&mut op.norm);
            }
            Op::DownAdd(op) => {
                linears.push(&mut op.down);
                norms.extend(&mut op.post_norm);
            }
            Op::NormLogits(op) => {
                linears.push(&mut op.head);
                norms.push(&mut op.norm);
            }
        }
        for linear in linears {
            matrix(&mut linear.matrix);
            linear.bias.iter_mut().for_each(&mut *vector);
        }
        norms.into_iter().for_each(|norm| vector(&mut norm.weight));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        WeightFormat,
        conformance::{Biases, ModelShape},
    };

    #[test]
    fn one_layer_of_each_kind() {
        let windows = vec![Some(16), None, Some(16), None, Some(16)];
        let shape = ModelShape {
            windows,
            biases: Biases::All,
            qk_norm: true,
            post_norms: true,
            tied: true,
            ..ModelShape::of_format(WeightFormat::Q4_K)
        };
        let model = shape.build(1);
        let (program, weights) = excerpt(&model.program, &model.weights);
        program.check(&weights).unwrap();
        // The embedding, a layer that sees everything, one with a window, and the head.
        assert_eq!(program.ops.len(), 1 + 2 * 5 + 1);
        // Seven matrices of each layer, and the table that is the head.
        assert_eq!(weights.matrices.len(), 2 * 7 + 1);
        assert_eq!(weights.matrix(MatrixId(0)).name, model.weights.matrix(MatrixId(0)).name);
        assert_eq!(program.kv, model.program.kv);
    }

    #[test]
    fn a_finer_format_is_a_kind() {
        let mut model =
            ModelShape { windows: vec![None; 3], ..ModelShape::of_format(WeightFormat::Q4_K) }.build(1);
        let layers = |model: &crate::conformance::RandomModel| {
            let (program, _) = excerpt(&model.program, &model.weights);
            program.ops.iter().filter(|op| matches!(op, Op::Attend(_))).count()
        };
        assert_eq!(layers(&model), 1);
        let fine =
            ModelShape { windows: vec![None; 3], ..ModelShape::of_format(WeightFormat::Q6_K) }.build(1);
        let last = model.weights.matrices.iter().rposition(|matrix| matrix.rows == model.program.hidden);
        let last = last.expect("the last layer's down");
        model.weights.matrices[last] = fine.weights.matrices[last].clone();
        assert_eq!(layers(&model), 2);
    }
}
