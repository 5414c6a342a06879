//! Programs and weights that do not belong together, each with the message that names what is wrong.

use expect_test::{Expect, expect};
use paguro_backend::{
    KvSlot, Linear, MatrixId, Op, VectorId, WeightFormat,
    conformance::{ModelShape, RandomModel},
};

fn check(damage: impl FnOnce(&mut RandomModel), expected: Expect) {
    let shape =
        ModelShape { qk_norm: true, post_norms: true, windows: vec![None, Some(9)], ..ModelShape::default() };
    let mut model = shape.build(1);
    damage(&mut model);
    let verdict = model.program.check(&model.weights);
    let verdict = verdict.map_or_else(|error| error.to_string(), |()| "fine".to_owned());
    expected.assert_eq(&verdict.replace(" does not fit the model", "").replace("invalid program: ", ""));
}

#[test]
fn whole_models_pass() {
    check(|_| (), expect!["fine"]);
    for format in WeightFormat::ALL {
        let model = ModelShape { tied: true, ..ModelShape::of_format(format) }.build(1);
        model.program.check(&model.weights).expect("a model that fits");
    }
}

#[test]
fn weights() {
    check(
        |model| model.weights.matrices[3].rows = 100,
        expect!["tensor `layer 0 v`: 32768 bytes for 100 x 64 elements of F32"],
    );
    check(
        |model| model.weights.matrices[3].format = WeightFormat::F16,
        expect!["tensor `layer 0 v`: 32768 bytes for 128 x 64 elements of F16"],
    );
    check(
        |model| {
            let matrix = &mut model.weights.matrices[3];
            (matrix.format, matrix.cols) = (WeightFormat::Q4_K, 65);
        },
        expect!["tensor `layer 0 v`: rows of 65 elements are not whole Q4_K blocks of 256"],
    );
    check(
        |model| {
            let matrix = &mut model.weights.matrices[3];
            (matrix.rows, matrix.cols) = (usize::MAX, 64);
        },
        expect!["tensor `layer 0 v`: 32768 bytes for 18446744073709551615 x 64 elements of F32"],
    );
    check(
        |model| model.weights.matrices.swap(3, 5),
        expect!["tensor `layer 0 gate`: it is 96 x 64, the model needs 128 x 64"],
    );
    check(
        |model| model.weights.vectors[2].push(1.0),
        expect!["tensor `vector 2`: it has 65 elements, the model needs 64"],
    );
    check(|model| model.weights.vectors.truncate(3), expect!["there is no vector 3"]);
    check(|model| model.weights.matrices.truncate(8), expect!["there is no matrix 8"]);
}

#[test]
fn programs() {
    check(|model| model.program.ops.clear(), expect!["there are no operations"]);
    check(
        |model| model.program.ops.swap(0, 1),
        expect!["operation 0 is norm_qkv_rope_store, but the embedding comes first and the head last"],
    );
    check(
        |model| model.program.ops.truncate(11),
        expect!["operation 10 is down_add, but the embedding comes first and the head last"],
    );
    check(|model| model.program.heads = 3, expect!["3 query heads cannot share 2 K/V heads evenly"]);
    check(
        |model| model.program.vocab = 132,
        expect!["tensor `embedding`: it is 131 x 64, the model needs 132 x 64"],
    );
    check(|model| model.program.kv.groups[1].window = Some(0), expect!["a sliding window of no tokens"]);
    check(|model| model.program.ropes[1].frequencies.push(0.0), expect!["rope 1 rotates 66 of 64 elements"]);
    check(|model| model.program.ropes.truncate(1), expect!["there is no rope 1"]);
    check(
        |model| {
            let Op::Attend(attend) = &mut model.program.ops[2] else { panic!("attention comes second") };
            attend.kv = KvSlot { group: 2, slot: 0 };
        },
        expect!["there is no place KvSlot { group: 2, slot: 0 } for K and V"],
    );
    check(
        |model| {
            let Some(Op::NormLogits(head)) = model.program.ops.last_mut() else {
                panic!("the head comes last")
            };
            head.head = Linear { matrix: MatrixId(0), bias: Some(VectorId(0)) };
        },
        expect!["tensor `vector 0`: it has 64 elements, the model needs 131"],
    );
}
