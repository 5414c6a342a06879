//! Each rule by itself, and the launches of whole layers, without a GPU.

use paguro_backend::{Adaptable, AttentionMode, Exit, KvDtype, Limits, NormKind, QkNormKind, WeightFormat};
use paguro_backend_conformance::{ExpertsShape, ModelShape, RandomModel};

use super::*;
use crate::{
    heads::KvLayout,
    lower::{Adapted, Sizes, build::Builder, lower, node::Link, node::Sync, sites},
    target::Target,
};

const LIMITS: Limits = Limits {
    block_size: 32,
    pages: 4,
    max_rows: 512,
    max_sequences: 1,
    max_outputs: 1,
    max_context: 64,
    states: 0,
    kv_dtype: KvDtype::F16,
    attention: AttentionMode::Paged,
    expert_slots: None,
};

/// A GPU without cooperative matrices or handoff.
fn target() -> Target {
    Target {
        name: "a GPU of a test".to_owned(),
        is_software: false,
        as_hardware: false,
        emulated: false,
        cooperative: None,
        subgroup: 32,
        most_threads: 256,
        workgroup_threads: 1024,
        workgroup_memory: 48 << 10,
        workgroups: 65_535,
        binding_limit: 1 << 30,
        processors: 8,
        has_host_memory: true,
        handoff: false,
        timed: false,
    }
}

/// A model whose matrices have one layout.
fn dense() -> ModelShape {
    ModelShape {
        hidden: 256,
        ffn: 512,
        format: WeightFormat::Q4_K,
        windows: vec![None; 3],
        ..ModelShape::default()
    }
}

fn moe() -> ModelShape {
    // The first layer of these models is dense.
    let qk_norm = Some(QkNormKind::Head);
    let format = WeightFormat::Q8_0;
    ModelShape { experts: Some(ExpertsShape::default()), qk_norm, format, ..dense() }
}

/// Calls `look` with what is known of a model and its nodes without any rule.
fn with_nodes(target: Target, shape: &ModelShape, class: RowClass, look: impl FnOnce(&Facts<'_>, Vec<Node>)) {
    let model = shape.build(1);
    let kv = KvLayout::of(&model.program, &target.name).unwrap();
    let facts = Facts::new(target, &model.program, &kv, Some(&model.weights), &LIMITS).unwrap();
    let list = Builder::build(&facts, class, &mut Sizes::default()).unwrap();
    look(&facts, list.body);
}

/// Calls `look` with the lists of all classes of a model.
fn with_lists(target: Target, shape: &ModelShape, look: impl FnOnce(&[List])) {
    with_model(target, &shape.build(1), look);
}

/// Calls `look` with the lists of all classes of a model.
fn with_model(target: Target, model: &RandomModel, look: impl FnOnce(&[List])) {
    let kv = KvLayout::of(&model.program, &target.name).unwrap();
    let facts = Facts::new(target, &model.program, &kv, Some(&model.weights), &LIMITS).unwrap();
    look(&lower(&facts).unwrap().0);
}

/// Returns the name of each node.
fn names(nodes: &[Node]) -> Vec<String> {
    let name = |node: &Node| {
        let debug = format!("{:?}", node.kernel);
        let kernel = debug.split(['(', ' ']).next().unwrap_or_default().to_owned();
        match matmul(node) {
            Some(op) => {
                let debug = format!("{:?}", op.epilogue);
                let epilogue = debug.split(['(', ' ']).next().unwrap_or_default();
                format!("{}+{epilogue}", kernel.to_lowercase())
            }
            None => kernel,
        }
    };
    nodes.iter().map(name).collect()
}

const MANY: RowClass = RowClass { from: 2, to: usize::MAX };

#[test]
fn branches_are_added_by_their_matmul() {
    with_nodes(target(), &dense(), MANY, |facts, nodes| {
        let is_addition = |node: &Node| matches!(node.kernel, Kernel::AddBranch(_));
        assert_eq!(nodes.iter().filter(|node| is_addition(node)).count(), 6);
        let fused = apply(facts, MANY, add_directly, &nodes);
        assert_eq!(fused.iter().filter(|node| is_addition(node)).count(), 0);
        assert_eq!(fused.len(), nodes.len() - 6);
        assert_eq!(names(&fused)[7], "matmul+Add", "{:?}", names(&fused));
    });
    with_nodes(target(), &moe(), MANY, |facts, nodes| {
        let fused = apply(facts, MANY, add_directly, &nodes);
        let adds = |node: &&Node| matches!(node.kernel, Kernel::AddExperts(op) if op.adds == Some(1.0));
        assert_eq!(fused.iter().filter(adds).count(), 2);
    });
}

#[test]
fn normed_branches_are_added_by_the_next_norm() {
    let shape = ModelShape { post_norms: true, output_scale: 0.5, ..dense() };
    with_nodes(target(), &shape, MANY, |facts, nodes| {
        assert_eq!(apply(facts, MANY, add_directly, &nodes).len(), nodes.len(), "norms come first");
        let scaled = apply(facts, MANY, scale_sum, &nodes);
        assert_eq!(scaled.len(), nodes.len() - 3, "one scale for each layer");
        let normed = apply(facts, MANY, norm_sum, &scaled);
        // The last branch is left for the head.
        assert_eq!(normed.len(), scaled.len() - 5);
        let scales = normed.iter().filter_map(|node| match &node.kernel {
            Kernel::Norm(norm) => Some(norm.adds?.1),
            _ => None,
        });
        assert_eq!(scales.collect::<Vec<_>>(), [1.0, 0.5, 1.0, 0.5, 1.0]);
    });
}

#[test]
fn heads_are_rotated_by_their_matmul_in_steps_of_one_row() {
    with_nodes(target(), &dense(), RowClass::ONE, |facts, nodes| {
        let ordered = apply(facts, RowClass::ONE, order_pairs, &nodes);
        assert_eq!(ordered.len(), nodes.len());
        let rotated = apply(facts, RowClass::ONE, rope_in_matmul, &ordered);
        assert_eq!(rotated.len(), nodes.len() - 3);
        assert_eq!(names(&rotated)[2..4], ["matmul+Rope", "Attend"]);
        assert_eq!(apply(facts, MANY, rope_in_matmul, &ordered).len(), nodes.len());
    });
    // A workgroup has a whole head for its norm, and not all heads.
    let normed = ModelShape { qk_norm: Some(QkNormKind::Head), ..dense() };
    with_nodes(target(), &normed, RowClass::ONE, |facts, nodes| {
        let ordered = apply(facts, RowClass::ONE, order_pairs, &nodes);
        assert_eq!(apply(facts, RowClass::ONE, rope_in_matmul, &ordered).len(), nodes.len() - 3);
    });
    // Norms of values, and a layer that only has queries; then keys that are values as well, which nothing rotates twice.
    let shared = ModelShape { v_norm: true, shared_kv: 1, ..normed };
    with_nodes(target(), &shared, RowClass::ONE, |facts, nodes| {
        assert_eq!(apply(facts, RowClass::ONE, rope_in_matmul, &nodes).len(), nodes.len() - 3);
    });
    let as_values = ModelShape { keys_as_values: true, ..shared };
    with_nodes(target(), &as_values, RowClass::ONE, |facts, nodes| {
        assert_eq!(apply(facts, RowClass::ONE, rope_in_matmul, &nodes).len(), nodes.len() - 1);
    });
    let shape = ModelShape { qk_norm: Some(QkNormKind::Row), ..dense() };
    with_nodes(target(), &shape, RowClass::ONE, |facts, nodes| {
        assert_eq!(names(&apply(facts, RowClass::ONE, order_pairs, &nodes)), names(&nodes));
        assert_eq!(apply(facts, RowClass::ONE, rope_in_matmul, &nodes).len(), nodes.len());
    });
}

#[test]
fn activations_are_computed_by_gate_and_up() {
    with_nodes(target(), &dense(), RowClass::ONE, |facts, nodes| {
        let ordered = apply(facts, RowClass::ONE, order_gates, &nodes);
        let in_turn = |node: &&Node| matmul(node).is_some_and(|op| op.order == Order::InTurn);
        assert_eq!(ordered.iter().filter(in_turn).count(), 3);
        let gated = apply(facts, RowClass::ONE, gate_in_matmul, &ordered);
        assert_eq!(gated.len(), nodes.len() - 3);
        let floats = |node: &&Node| matmul(node).is_some_and(|op| op.input == Input::Floats);
        assert_eq!(gated.iter().filter(floats).count(), 3);
        assert_eq!(apply(facts, MANY, gate_in_matmul, &ordered).len(), nodes.len());
        assert_eq!(apply(facts, MANY, gate_in_coop, &ordered).len(), nodes.len());
    });
    let cooperative = Target { cooperative: Some(16), ..target() };
    with_nodes(cooperative, &dense(), MANY, |facts, nodes| {
        let ordered = apply(facts, MANY, order_gates, &nodes);
        let few = RowClass { from: 2, to: 9 };
        assert_eq!(apply(facts, few, gate_in_coop, &ordered).len(), nodes.len());
        let many = RowClass { from: 9, to: 13 };
        assert_eq!(apply(facts, many, gate_in_coop, &ordered).len(), nodes.len() - 3);
    });
}

#[test]
fn activations_without_gates_are_computed_by_their_matmul() {
    let ungated = ModelShape { gated: false, ..dense() };
    with_nodes(target(), &ungated, MANY, |facts, nodes| {
        assert_eq!(apply(facts, MANY, activation_in_coop, &nodes).len(), nodes.len());
    });
    let cooperative = Target { cooperative: Some(16), ..target() };
    with_nodes(cooperative, &ungated, MANY, |facts, nodes| {
        let few = RowClass { from: 2, to: 9 };
        assert_eq!(apply(facts, few, activation_in_coop, &nodes).len(), nodes.len());
        let many = RowClass { from: 9, to: 13 };
        assert_eq!(apply(facts, many, activation_in_coop, &nodes).len(), nodes.len() - 3);
    });
}

#[test]
fn experts_are_chosen_by_gate_and_up_in_steps_of_one_row() {
    with_nodes(target(), &moe(), RowClass::ONE, |facts, nodes| {
        let ordered = apply(facts, RowClass::ONE, order_experts, &nodes);
        let gated = apply(facts, RowClass::ONE, gate_in_experts, &ordered);
        // Two layers of experts after a dense one.
        let chosen = apply(facts, RowClass::ONE, choice_in_experts, &gated);
        assert_eq!(chosen.len(), gated.len() - 2);
        assert_eq!(apply(facts, MANY, choice_in_experts, &gated).len(), gated.len());
        // Without the activation, the kernel is that of other matmuls.
        assert_eq!(apply(facts, RowClass::ONE, choice_in_experts, &ordered).len(), nodes.len());
    });
}

#[test]
fn experts_are_added_by_down_in_steps_of_one_row() {
    with_nodes(target(), &moe(), RowClass::ONE, |facts, nodes| {
        let nodes = apply(facts, RowClass::ONE, add_directly, &nodes);
        let summed = apply(facts, RowClass::ONE, sum_in_experts, &nodes);
        assert_eq!(summed.len(), nodes.len() - 2);
        assert_eq!(apply(facts, MANY, sum_in_experts, &nodes).len(), nodes.len());
        // The matmul then writes the activations of the next norm, as others do.
        let [fused, before] =
            [&summed, &nodes].map(|nodes| apply(facts, RowClass::ONE, norm_in_matmul, nodes).len());
        assert_eq!(fused, before - 2 - 1);
    });
    let small = Target { workgroup_memory: 8 << 10, ..target() };
    let nodes = |target: &Target| kernels::has_room_for_sums(target, 8, 24);
    assert_eq!(
        [&target(), &small, &Target { most_threads: 1024, ..target() }].map(nodes),
        [false, false, true]
    );
}

#[test]
fn given_rows_are_added_after_layers_in_steps_of_more_rows() {
    let shape = ModelShape { given_parts: 4, ..dense() };
    let parts = |nodes: &[Node]| -> Vec<usize> {
        let part =
            |(index, node): (usize, &Node)| matches!(node.kernel, Kernel::AddGiven(_)).then_some(index);
        nodes.iter().enumerate().filter_map(part).collect()
    };
    with_lists(target(), &shape, |lists| {
        // The embedding, and eleven launches of each layer.
        assert_eq!(parts(&lists[1].body), [12, 24, 36]);
        assert_eq!((parts(&lists[0].body), lists[0].body.len()), (vec![], 1 + 1 + 3 * 6));
    });
}

#[test]
fn norms_are_written_by_the_matmul_before_them_in_steps_of_one_row() {
    for (shape, fused) in [
        (dense(), 5),
        (moe(), 4),
        // A LayerNorm needs all of a row.
        (ModelShape { norms: NormKind::Layer, ..dense() }, 0),
    ] {
        with_nodes(target(), &shape, RowClass::ONE, |facts, nodes| {
            let nodes = apply(facts, RowClass::ONE, add_directly, &nodes);
            let normed = apply(facts, RowClass::ONE, norm_in_matmul, &nodes);
            assert_eq!(normed.len(), nodes.len() - fused, "{:?}", names(&normed));
            assert_eq!(apply(facts, MANY, norm_in_matmul, &nodes).len(), nodes.len());
            let applies = |node: &&Node| match &node.kernel {
                Kernel::Matmul(op) => matches!(op.input, Input::Squares(_)),
                Kernel::ExpertMatmul(op) => matches!(op.input, Input::Squares(_)),
                _ => false,
            };
            assert!(normed.iter().filter(applies).count() >= fused);
        });
    }
}

#[test]
fn layers_have_as_many_launches_as_listed() {
    // The embedding, and three layers; with one row the first norm is a launch, and the last layer has the head's.
    with_lists(target(), &dense(), |lists| {
        let launches: Vec<_> = lists.iter().map(|list| (list.class.from, list.body.len())).collect();
        assert_eq!(launches, [(1, 1 + 1 + 3 * 6), (2, 1 + 3 * 11)]);
        assert!(lists[0].direct.is_some() && lists[1].direct.is_none());
    });
    // Two layers of experts after a dense one.
    with_lists(target(), &moe(), |lists| {
        let launches: Vec<_> = lists.iter().map(|list| (list.class.from, list.body.len())).collect();
        // With more rows, the sum of experts is a launch in the last layer only.
        let expected = [(1, 1 + 7 + 7 + 7), (2, 1 + 11 + 2 * 13 + 1), (8, 1 + 11 + 2 * 14 + 1)];
        assert_eq!(launches[..3], expected, "{:?}", names(&lists[0].body));
    });
    // Gemma 4: experts beside a dense network, norms after branches, embeddings for layers.
    let experts = ExpertsShape { beside: Some(64), ..ExpertsShape::default() };
    let shape = ModelShape {
        layer_embeds: Some(32),
        experts: Some(experts),
        post_norms: true,
        output_scale: 0.5,
        format: WeightFormat::Q8_0,
        ..dense()
    };
    with_lists(target(), &shape, |lists| {
        assert_eq!(lists[0].body.len(), 4 + 11 + 2 * 20 + 1, "{:?}", names(&lists[0].body));
    });
}

#[test]
fn handoff_has_one_barrier_for_each_layer() {
    let with = Target { handoff: true, ..target() };
    with_lists(with.clone(), &dense(), |lists| {
        let links: Vec<_> = lists[0].body.iter().map(|node| node.sync).collect();
        let layer = |index: usize| {
            let links = [
                Link::Queries(0),
                Link::Attend,
                Link::Merge,
                Link::Project,
                Link::GateUp,
                Link::Down(index == 2),
            ];
            links.map(|link| Sync::Words(index, link))
        };
        assert_eq!(links[..2], [Sync::Barriers; 2]);
        assert_eq!(links[2..], (0..3).flat_map(layer).collect::<Vec<_>>()[..]);
        assert_eq!(lists[0].direct.as_ref().map(|node| node.sync), Some(Sync::Words(3, Link::Head)));
        // Steps of more rows hand over partials.
        let partials = lists[1].body.iter().filter(|node| node.sync == Sync::Partials).count();
        assert_eq!(partials, 3 * 3);
    });
    // Timed launches, and experts, hand over partials only.
    for (target, shape) in [(Target { timed: true, ..with.clone() }, dense()), (with, moe())] {
        with_lists(target, &shape, |lists| {
            let partials = lists[0].body.iter().filter(|node| node.sync == Sync::Partials).count();
            assert_eq!(partials, 3 * 2);
            assert!(lists[0].body.iter().all(|node| !matches!(node.sync, Sync::Words(..))));
        });
    }
}

/// With adapters, a layer of one row has its barrier before attention only. Those of the first layer's queries pass another one.
#[test]
fn products_with_adapters_are_handed_over() {
    let model = ModelShape { finer: Some(WeightFormat::Q6_K), ..dense() }.build(1);
    let target = Target { handoff: true, ..target() };
    let kv = KvLayout::of(&model.program, &target.name).unwrap();
    let facts = Facts::new(target, &model.program, &kv, Some(&model.weights), &LIMITS).unwrap();
    let sites = sites(&facts, &Adaptable::of(&model.program, &model.weights)).unwrap();
    let adapted = Adapted { sites, ranks: 16, low: 16, ..Adapted::default() };
    let (lists, _) = lower(&Facts { adapted: Some(&adapted), ..facts }).unwrap();
    let is_shrink = |node: &&Node| matches!(node.kernel, Kernel::Shrink(_));
    let is_of_words = |node: &&Node| matches!(node.sync, Sync::Words(..));
    let body = &lists[0].body;
    assert_eq!(body.iter().filter(is_shrink).count(), 3 * 5, "{:?}", names(body));
    assert_eq!(body.iter().filter(is_of_words).count(), body.len() - 2 - 2, "{:?}", names(body));
}

/// Parts of a model that begin or end with rows have the launches of the whole one.
#[test]
fn programs_of_rows_have_the_launches_of_their_layers() {
    let part = |shape: &ModelShape, is_first: bool| {
        let mut model = shape.build(1);
        match is_first {
            true => {
                model.program.layers.truncate(2);
                model.program.exit = Exit::Rows;
            }
            false => {
                model.program.layers.drain(..2);
                (model.program.input, model.program.given_parts) = (paguro_backend::Input::Rows, 1);
            }
        }
        model
    };
    let with = Target { handoff: true, ..target() };
    with_model(with.clone(), &part(&dense(), true), |lists| {
        let body = &lists[0].body;
        assert_eq!((body.len(), lists[0].head.len()), (1 + 1 + 2 * 6, 0));
        assert_eq!(body[body.len() - 1].sync, Sync::Words(1, Link::Down(true)));
        assert!(matches!(matmul(&body[body.len() - 1]).unwrap().epilogue, Epilogue::Add(1.0)));
    });
    with_model(with, &part(&dense(), false), |lists| {
        let body = &lists[0].body;
        assert!(matches!(body[0].kernel, Kernel::SetGiven) && body.len() == 1 + 1 + 6);
        assert_eq!(lists[0].direct.as_ref().map(|node| node.sync), Some(Sync::Words(1, Link::Head)));
    });
    // A branch with a norm is added by a norm, as in the whole model.
    let normed = ModelShape { post_norms: true, ..dense() };
    with_model(target(), &part(&normed, true), |lists| {
        let is_sum =
            |node: &Node| matches!(&node.kernel, Kernel::Norm(op) if op.adds.is_some() && op.norm.is_none());
        assert!(lists.iter().all(|list| is_sum(&list.body[list.body.len() - 1])));
    });
}

#[test]
fn steps_with_cooperative_matrices_read_the_partials_that_they_write() {
    let target = Target { handoff: true, cooperative: Some(16), ..target() };
    with_lists(target, &dense(), |lists| {
        let wide = lists.iter().find(|list| list.class.from == 129).expect("attention has matrices");
        // Some of their rows may have tiles without matrices; all leave partials in one place.
        assert!(wide.body.iter().all(|node| node.sync == Sync::Barriers));
        assert!(lists[1].body.iter().any(|node| node.sync == Sync::Partials));
    });
}
