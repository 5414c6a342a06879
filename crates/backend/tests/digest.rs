//! Digests of programs, and the walk through their fields.

use std::collections::HashSet;

use paguro_backend::{
    Activation, Digest, Exit, FeedForward, Input, Joined, KvSlot, MatrixId, Mixer, Program, Projection,
    QkNormKind, Residual, Role, RopeStyle, TableId, VectorId, Visitor, visible,
};
use paguro_backend_conformance::{Biases, ExpertsShape, ModelShape, RandomModel};

/// A model with a mixer of each kind, experts, and embeddings for layers.
fn model() -> RandomModel {
    let shape = ModelShape {
        mixers: "aldcsh",
        windows: vec![Some(9), None, None, None, None, None],
        biases: Biases::All,
        qk_norm: Some(QkNormKind::Head),
        experts: Some(ExpertsShape { shared: Some(48), ..ExpertsShape::default() }),
        layer_embeds: Some(32),
        ..ModelShape::default()
    };
    shape.build(1)
}

type Change = fn(&mut Program);

/// Returns the digest of a program after a change.
fn digest_after(change: Change) -> [u8; 32] {
    let mut program = model().program;
    // Computed numbers may differ in the last bit between systems.
    program.ropes.iter_mut().for_each(|rope| rope.frequencies = vec![1.0, 0.5, 0.25]);
    change(&mut program);
    program.digest()
}

/// Returns the digests of a program after different changes.
fn digests() -> Vec<[u8; 32]> {
    fn attention(program: &mut Program) -> &mut paguro_backend::Attention {
        let Mixer::Attention(op) = &mut program.layers[0].mixer else { panic!("attention comes first") };
        op
    }
    fn dense(program: &mut Program) -> &mut paguro_backend::Dense {
        let FeedForward::Dense(op) = &mut program.layers[0].ffn else {
            panic!("a dense network comes first")
        };
        op
    }
    let changes: [Change; 28] = [
        |_| (),
        |program| program.hidden += 1,
        |program| program.vocab += 1,
        |program| program.bidirectional = true,
        |program| program.kv.groups[0].window = None,
        |program| program.kv.groups[0].window = Some(0),
        |program| program.kv.groups[0].spans = true,
        |program| program.state.layers[0].rows += 1,
        |program| program.ropes[0].style = RopeStyle::Interleaved,
        |program| program.ropes[0].frequencies[1] *= 1.000_001,
        |program| program.ropes[0].axes = vec![0; 32],
        |program| program.ropes[0].axes = vec![0; 31],
        |program| program.ropes[0].magnitude = -1.0,
        |program| program.input = Input::Rows,
        |program| program.embed_mut().expect("tokens").scale = 2.0,
        |program| program.embed_mut().expect("tokens").table = MatrixId(3),
        |program| program.given_parts = 1,
        |program| program.layers.truncate(5),
        |program| program.layers.swap(0, 1),
        |program| program.layers[0].residual = Residual::Parallel,
        |program| program.layers[0].branch_scale = 0.5,
        |program| program.layers[0].output_scale = 0.5,
        |program| attention(program).kv = KvSlot { group: 0, layer_slot: 7 },
        |program| attention(program).soft_cap = Some(0.0),
        |program| attention(program).scale = 0.0,
        |program| dense(program).activation = Activation::Relu2,
        |program| program.exit = Exit::Rows,
        |program| program.head_mut().expect("logits").soft_cap = Some(2.0),
    ];
    changes.map(digest_after).to_vec()
}

/// Returns the digests after changes of fields that add nothing to the digests of programs without them.
fn later_digests() -> Vec<[u8; 32]> {
    let changes: [Change; 3] = [
        |program| program.shares_pages = true,
        |program| {
            let head = program.head_mut().expect("logits");
            head.projection = Some(Projection { width: 8, linear: head.linear });
        },
        |program| {
            let linear = program.head().expect("logits").linear;
            let joined = Joined { width: 8, token_norm: None, given_norm: None, linear };
            program.embed_mut().expect("tokens").joined = Some(joined);
        },
    ];
    changes.map(digest_after).to_vec()
}

/// Every change of a program changes its digest, and no two changes give one digest.
#[test]
fn other_programs_have_other_digests() {
    let digests = [digests(), later_digests()].concat();
    assert_eq!(digests.iter().collect::<HashSet<_>>().len(), digests.len());
    assert_eq!(model().program.digest(), model().program.digest());
}

/// Digests are parts of names on disk. If this fails, the walk has changed: other orders of fields and other numbers of variants
/// lose all prefixes that users have stored.
#[test]
fn digests_are_those_of_earlier_versions() {
    let mut all = Digest::default();
    digests().iter().for_each(|digest| all.bytes(digest));
    assert_eq!(
        u64::from_le_bytes(all.finish()[..8].try_into().expect("eight bytes")),
        11_869_064_839_689_517_281
    );
}

/// The walk finds every weight of a model, and changes its ids.
#[test]
fn the_walk_finds_every_weight() {
    struct Ids<'a>(HashSet<(&'static str, u32)>, &'a dyn Fn(u32) -> u32);
    impl Visitor for Ids<'_> {
        fn matrix(&mut self, id: &mut MatrixId, _: Role) {
            id.0 = (self.1)(id.0);
            self.0.insert(("matrix", id.0));
        }

        fn vector(&mut self, id: &mut VectorId) {
            id.0 = (self.1)(id.0);
            self.0.insert(("vector", id.0));
        }

        fn table(&mut self, id: &mut TableId) {
            id.0 = (self.1)(id.0);
            self.0.insert(("table", id.0));
        }
    }
    let mut model = model();
    let weights = &model.weights;
    let all = weights.matrices.len() + weights.vectors.len() + weights.tables.len();
    let mut found = Ids(HashSet::new(), &|id| id);
    model.program.visit(&mut found);
    assert_eq!(found.0.len(), all);
    let mut moved = Ids(HashSet::new(), &|id| id + 1000);
    model.program.visit(&mut moved);
    assert!(moved.0.len() == all && moved.0.iter().all(|(_, id)| *id >= 1000));
    assert_eq!(model.program.embed().expect("tokens").table, MatrixId(1000));
}

#[test]
fn matrices_have_roles() {
    let model = model();
    let matrices = model.program.matrices();
    let count = |role: Role| matrices.iter().filter(|(_, own)| *own == role).count();
    assert_eq!(count(Role::Lookup), 1);
    assert_eq!(count(Role::Head), 1);
    // Gate, up and down of the five layers with experts.
    assert_eq!(count(Role::Experts { used: 2, count: 8 }), 15);
}

#[test]
fn spans_extend_what_a_row_sees() {
    let spans = [3..6, 6..7, 10..14];
    let causal = |position| visible(None, None, Some(&spans), position);
    assert_eq!([0, 2, 3, 5, 6, 7, 10, 13].map(causal), [0..1, 0..3, 0..6, 0..6, 0..7, 0..8, 0..14, 0..14]);
    let window = |position| visible(Some(2), None, Some(&spans), position);
    assert_eq!([3, 5, 7, 12].map(window), [2..6, 4..6, 6..8, 11..14]);
    // In both directions, spans are all that a row sees.
    let both = |position| visible(None, Some(16), Some(&spans), position);
    assert_eq!([0, 4, 6, 13, 15].map(both), [0..1, 3..6, 6..7, 10..14, 15..16]);
    let both = |position| visible(Some(2), Some(16), Some(&spans), position);
    assert_eq!([3, 5, 11].map(both), [3..5, 4..6, 10..13]);
    assert_eq!(visible(Some(2), Some(16), None, 15), 14..16);
    assert_eq!(visible(None, None, None, 15), 0..16);
}
