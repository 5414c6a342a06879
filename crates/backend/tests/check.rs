//! Programs with mismatched weights, each with the message that names the problem.

use expect_test::{Expect, expect};
use paguro_backend::{
    Attention, Experts, FeedForward, Head, KvSlot, Linear, MatrixId, Mixer, QkNormKind, VectorId,
    WeightFormat,
};
use paguro_backend_conformance::{ExpertsShape, ModelShape, RandomModel};

fn head(model: &mut RandomModel) -> &mut Head {
    model.program.head_mut().expect("a program with logits")
}

fn check(damage: impl FnOnce(&mut RandomModel), expected: Expect) {
    let shape = ModelShape {
        qk_norm: Some(QkNormKind::Head),
        post_norms: true,
        windows: vec![None, Some(9)],
        experts: Some(ExpertsShape { width: 48, ..ExpertsShape::default() }),
        ..ModelShape::default()
    };
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
    check(|model| model.program.layers.clear(), expect!["there are no layers"]);
    check(|model| attention(model).heads = 3, expect!["3 query heads cannot share 2 K/V heads evenly"]);
    check(
        |model| model.program.vocab = 132,
        expect!["tensor `embedding`: it is 131 x 64, the model needs 132 x 64"],
    );
    check(|model| model.program.kv.groups[1].window = Some(0), expect!["a sliding window of no tokens"]);
    check(|model| model.program.ropes[1].frequencies.push(0.0), expect!["rope 1 rotates 66 of 64 elements"]);
    check(|model| model.program.ropes.truncate(1), expect!["there is no rope 1"]);
    check(
        |model| attention(model).kv = KvSlot { group: 2, layer_slot: 0 },
        expect!["there is no place KvSlot { group: 2, layer_slot: 0 } for K and V"],
    );
    check(
        |model| head(model).linear = Linear { matrix: MatrixId(0), bias: Some(VectorId(0)), bounds: None },
        expect!["tensor `vector 0`: it has 64 elements, the model needs 131"],
    );
    check(|model| head(model).scale = f32::NAN, expect!["the scale of logits is NaN"]);
    check(
        |model| attention(model).sinks = Some(VectorId(0)),
        expect!["tensor `vector 0`: it has 64 elements, the model needs 4"],
    );
}

#[test]
fn mixtures_of_experts() {
    check(
        |model| experts(model).count = 9,
        expect!["tensor `layer 1 router`: it is 8 x 64, the model needs 9 x 64"],
    );
    check(|model| experts(model).router.used = 9, expect!["9 of 8 experts for each row"]);
    check(|model| experts(model).router.used = 0, expect!["a dimension of a mixture of experts is zero"]);
    check(
        |model| experts(model).gate = Some(experts(model).down),
        expect!["tensor `layer 1 experts down`: it is 8 x 64 x 48, the model needs 8 x 48 x 64"],
    );
    check(
        |model| {
            let id = experts(model).router.linear.matrix.0 as usize;
            let (rows, cols) = (8, 64);
            let bytes = vec![0; rows * WeightFormat::Q8_0.row_bytes(cols)];
            let matrix = &mut model.weights.matrices[id];
            (matrix.format, matrix.bytes) = (WeightFormat::Q8_0, bytes.into());
        },
        expect!["tensor `layer 1 router`: a router in Q8_0; F32, F16 and BF16 work"],
    );
}

fn attention(model: &mut RandomModel) -> &mut Attention {
    match &mut model.program.layers[0].mixer {
        Mixer::Attention(attention) => attention,
        other => panic!("{other:?}"),
    }
}

fn experts(model: &mut RandomModel) -> &mut Experts {
    match &mut model.program.layers[1].ffn {
        FeedForward::Experts(experts) => experts,
        other => panic!("{other:?}"),
    }
}
