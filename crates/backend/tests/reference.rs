//! The reference's operations against numbers worked out by hand.

use paguro_backend::{
    Activation, ExpertGroups, Linear, MatrixId, NormKind, PositionScale, Rope, RopeStyle, Router, Scores,
    reference::{AttentionShape, HeadVectors, attention, ops},
};

fn close(ours: &[f32], expected: &[f32]) {
    assert_eq!(ours.len(), expected.len());
    for (i, (a, b)) in ours.iter().zip(expected).enumerate() {
        assert!((a - b).abs() < 1e-6, "element {i}: {ours:?} is not {expected:?}");
    }
}

#[test]
fn linear_is_row_times_column() {
    let mut out = [0.0; 3];
    ops::linear(&[1.0, 2.0], &[1.0, 0.0, 0.0, 1.0, 3.0, -1.0], None, &mut out);
    close(&out, &[1.0, 2.0, 1.0]);
    ops::linear(&[1.0, 2.0], &[1.0, 0.0, 0.0, 1.0, 3.0, -1.0], Some(&[0.5, 0.0, -1.0]), &mut out);
    close(&out, &[1.5, 2.0, 0.0]);
}

#[test]
fn norms_have_root_mean_square_one() {
    let mut x = [3.0, 4.0];
    ops::norm(&mut x, NormKind::Rms, &[1.0, 2.0], None, 0.0);
    let rms = 12.5f32.sqrt();
    close(&x, &[3.0 / rms, 8.0 / rms]);
    let mut x = [3.0, 4.0];
    ops::norm(&mut x, NormKind::Rms, &[1.0, 1.0], Some(&[1.0, 0.0]), 12.5);
    close(&x, &[1.6, 0.8]);
    let mut x = [3.0, 5.0];
    ops::norm(&mut x, NormKind::Layer, &[1.0, 2.0], Some(&[0.5, 0.0]), 0.0);
    close(&x, &[-0.5, 2.0]);
}

#[test]
fn rope_turns_pairs() {
    let quarter = std::f32::consts::FRAC_PI_2;
    let turn = |style, magnitude, position| {
        let mut head = [1.0, 2.0, 3.0, 4.0, 5.0];
        let rope = Rope { style, frequencies: vec![quarter, 0.0], axes: Vec::new(), magnitude };
        ops::rotate(&mut head, position, [7; 3], &rope);
        head
    };
    close(&turn(RopeStyle::Interleaved, 1.0, 0), &[1.0, 2.0, 3.0, 4.0, 5.0]);
    close(&turn(RopeStyle::Interleaved, 1.0, 1), &[-2.0, 1.0, 3.0, 4.0, 5.0]);
    close(&turn(RopeStyle::Interleaved, 1.0, 2), &[-1.0, -2.0, 3.0, 4.0, 5.0]);
    close(&turn(RopeStyle::HalfSplit, 1.0, 1), &[-3.0, 2.0, 1.0, 4.0, 5.0]);
    // The magnitude is for what is rotated; the fifth element is not.
    close(&turn(RopeStyle::HalfSplit, 2.0, 3), &[6.0, 4.0, -2.0, 8.0, 5.0]);
}

#[test]
fn activations_follow_their_formulas() {
    // x * sigmoid(x), GELU's tanh form, GELU, and the square of positive numbers, by Python's math module.
    let table = [
        (-3.0, -0.14227761953270035, -0.0036373920817729943, -0.00404969409489031, 0.0),
        (-0.5, -0.1887703343990727, -0.15428599017485606, -0.15426876936299344, 0.0),
        (0.0, 0.0, 0.0, 0.0, 0.0),
        (1.0, 0.7310585786300049, 0.8411919906082768, 0.8413447460685429, 1.0),
        (4.0, 3.928055160151634, 3.9999297540518075, 3.999_873_315_006_672, 16.0),
    ];
    for (x, silu, gelu_tanh, gelu, relu2) in table {
        let formulas = [
            (Activation::Silu, silu),
            (Activation::GeluTanh, gelu_tanh),
            (Activation::Gelu, gelu),
            (Activation::Relu2, relu2),
        ];
        for (activation, expected) in formulas {
            close(&[ops::activate(None, x, activation)], &[expected as f32]);
            close(&[ops::activate(Some(x), 0.5, activation)], &[0.5 * expected as f32]);
        }
    }
    // gate 2 is bounded to 1 and up -3 to -1, which leaves nothing; gate -1: -sigmoid(-2) * (0.5 + 1).
    let clamped = Activation::ClampedSwiglu { alpha: 2.0, limit: 1.0 };
    close(&[ops::activate(Some(2.0), -3.0, clamped)], &[0.0]);
    close(&[ops::activate(Some(-1.0), 0.5, clamped)], &[-1.5 * 0.11920292]);
    for x in [-1e4, 1e4] {
        for activation in [Activation::Silu, Activation::GeluTanh, Activation::Gelu] {
            assert!(ops::activate(None, x, activation).is_finite());
        }
    }
    close(&[ops::soft_cap(1.0, 2.0), ops::soft_cap(1e9, 2.0)], &[2.0 * 0.5f32.tanh(), 2.0]);
}

#[test]
fn attention_weighs_values() {
    // One head of one element, so that scores are products: softmax over ln 1, ln 2, ln 3 weighs 1/6, 2/6, 3/6.
    let shape = AttentionShape {
        heads: 1,
        kv_heads: 1,
        head_dim: 1,
        start: 2,
        scale: 0.5,
        soft_cap: None,
        window: None,
        len: None,
        spans: None,
    };
    let k = [1.0f32, 2.0, 3.0, f32::NAN].map(|x| 2.0 * x.ln());
    let v = [6.0, 60.0, 600.0, f32::NAN];
    let attend = |shape: AttentionShape, q: &[f32]| {
        let mut out = vec![f32::NAN; q.len()];
        attention(q, &k, &v, HeadVectors::default(), &shape, &mut out);
        out
    };
    close(&attend(shape, &[1.0]), &[1.0 + 20.0 + 300.0]);
    // Earlier rows see less; positions past the last row are not read.
    close(&attend(AttentionShape { start: 0, ..shape }, &[1.0, 1.0, 1.0]), &[6.0, 42.0, 321.0]);
    // A window of two; of more than there is.
    let window = |window| AttentionShape { start: 0, window: Some(window), ..shape };
    close(&attend(window(2), &[1.0, 1.0, 1.0]), &[6.0, 42.0, 24.0 + 360.0]);
    close(&attend(window(1), &[1.0, 1.0, 1.0]), &[6.0, 60.0, 600.0]);
    close(&attend(window(9), &[1.0, 1.0, 1.0]), &[6.0, 42.0, 321.0]);
    // Capped at almost nothing, all weigh the same.
    close(&attend(AttentionShape { soft_cap: Some(1e-9), ..shape }, &[1.0]), &[222.0]);
    // A sink of ln 6 takes half of the weight.
    let mut out = [0.0];
    let sinks = HeadVectors { sinks: Some(&[6.0f32.ln()]), ..HeadVectors::default() };
    attention(&[1.0], &k, &v, sinks, &shape, &mut out);
    close(&out, &[160.5]);
    // In both directions: all of three tokens; those at a distance of less than two.
    let both = AttentionShape { start: 0, len: Some(3), ..shape };
    close(&attend(both, &[1.0, 1.0, 1.0]), &[321.0; 3]);
    close(
        &attend(AttentionShape { window: Some(2), ..both }, &[1.0, 1.0, 1.0]),
        &[42.0, 321.0, 24.0 + 360.0],
    );
    // Biases of ln 6 for the key before, ln 3 for the query's own, and ln 2 for the one after make three equal weights.
    let biases = [6.0f32, 3.0, 2.0].map(f32::ln);
    let vectors = HeadVectors { biases: Some(&biases), ..HeadVectors::default() };
    let middle = AttentionShape { start: 1, ..both };
    attention(&[1.0], &k, &v, vectors, &middle, &mut out);
    close(&out, &[222.0]);
    // A cap of one: the scores become tanh(ln n).
    let weights = [1.0f32, 2.0, 3.0].map(|n| n.ln().tanh().exp());
    let expected = (weights[0] * 6.0 + weights[1] * 60.0 + weights[2] * 600.0) / weights.iter().sum::<f32>();
    assert!((attend(AttentionShape { soft_cap: Some(1.0), ..shape }, &[1.0])[0] - expected).abs() < 1e-3);
}

#[test]
fn query_heads_share_key_heads_in_order() {
    // Two tokens, two K/V heads, four query heads; scale zero, so that each head averages its values.
    let shape = AttentionShape {
        heads: 4,
        kv_heads: 2,
        head_dim: 2,
        start: 1,
        scale: 0.0,
        soft_cap: None,
        window: None,
        len: None,
        spans: None,
    };
    let v = [0.0, 1.0, 10.0, 11.0, /**/ 2.0, 3.0, 30.0, 31.0];
    let mut out = [0.0; 8];
    attention(&[1.0; 8], &[1.0; 8], &v, HeadVectors::default(), &shape, &mut out);
    close(&out, &[1.0, 2.0, 1.0, 2.0, 20.0, 21.0, 20.0, 21.0]);
}

#[test]
fn queries_grow_by_periods() {
    let scale = PositionScale { beta: 0.5, original: 4 };
    let expected = [1.0, 1.0, 1.0 + 0.5 * 2f32.ln(), 1.0 + 0.5 * 3f32.ln()];
    close(&[0, 3, 4, 8].map(|position| ops::position_scale(&scale, position)), &expected);
}

#[test]
fn routers_choose_and_weigh() {
    // Scores 0.1, 0.2, 0.3, 0.4.
    let logits = [1.0f32, 2.0, 3.0, 4.0].map(f32::ln);
    let router = |scores, groups, used, renormalize, factor| {
        let linear = Linear { matrix: MatrixId(0), bias: None, bounds: None };
        let (norm, selection_bias, expert_scale) = (None, None, None);
        Router { norm, linear, scores, selection_bias, groups, used, renormalize, factor, expert_scale }
    };
    let route = |bias: Option<&[f32]>, used, renormalize, factor| {
        ops::route(&logits, &router(Scores::Softmax, None, used, renormalize, factor), bias)
    };
    let check = |chosen: Vec<(usize, f32)>, ids: &[usize], weights: &[f32]| {
        assert_eq!(chosen.iter().map(|choice| choice.0).collect::<Vec<_>>(), ids);
        close(&chosen.iter().map(|choice| choice.1).collect::<Vec<_>>(), weights);
    };
    check(route(None, 2, false, 1.0), &[2, 3], &[0.3, 0.4]);
    check(route(None, 2, true, 7.0), &[2, 3], &[3.0, 4.0]);
    // A bias chooses, and does not weigh.
    check(route(Some(&[1.0, 0.0, 0.0, 0.0]), 2, false, 1.0), &[0, 3], &[0.1, 0.4]);
    let sigmoid = router(Scores::Sigmoid, None, 1, false, 1.0);
    check(ops::route(&[0.0, 3.0f32.ln()], &sigmoid, None), &[1], &[0.75]);
    // Among equals the lowest.
    let softmax = router(Scores::Softmax, None, 2, true, 1.0);
    check(ops::route(&[0.0; 4], &softmax, None), &[0, 1], &[0.5, 0.5]);
    // The best two of the first group, 0.3 and 0.25, are more than 0.4 and 0.05.
    let logits = [0.3f32, 0.25, 0.4, 0.05].map(f32::ln);
    let groups = |best| Some(ExpertGroups { count: 2, used: 1, best });
    let of_groups = |best| ops::route(&logits, &router(Scores::Softmax, groups(best), 1, false, 1.0), None);
    check(of_groups(2), &[0], &[0.3]);
    check(of_groups(1), &[2], &[0.4]);
}
