//! The chunks in which the reference computes a delta rule or a scan are the recurrence of its definition.

use paguro_backend::{
    Convolution, DeltaRule, DeltaShape, GatedNorm, KeySharing, Linear, MatrixId, Norm, NormKind, Ssd,
    StateShape, VectorId, reference::recurrent::LayerState,
};

/// Numbers between -1 and 1.
fn numbers(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

#[test]
fn chunks_are_the_recurrence() {
    let shape = DeltaShape { key_heads: 2, value_heads: 4, key_dim: 5, value_dim: 3 };
    let (linear, norm) = (Linear { matrix: MatrixId(0), bias: None, bounds: None }, VectorId(0));
    for sharing in [KeySharing::Consecutive, KeySharing::Alternating] {
        let op = DeltaRule {
            norm: None,
            shape,
            sharing,
            qkv: linear,
            gate: linear,
            alpha: linear,
            beta: linear,
            convolution: Convolution { taps: 4, weight: VectorId(0), bias: None },
            decay: VectorId(0),
            dt: VectorId(0),
            out_norm: Norm { kind: NormKind::Rms, weight: norm, bias: None, eps: 0.0 },
            out: linear,
            post_norm: None,
            state: 0,
        };
        let mut next = numbers(7);
        let mut state =
            LayerState::new(StateShape { rows: 3, channels: shape.channels(), delta: Some(shape) });
        // [value_heads][key_dim][value_dim]
        let mut matrices = vec![vec![vec![0.0_f64; shape.value_dim]; shape.key_dim]; shape.value_heads];
        for position in 0..100 {
            let mut row = |len: usize, scale: f32| -> Vec<f32> { (0..len).map(|_| scale * next()).collect() };
            let (q, k) = (row(shape.key_width(), 0.6), row(shape.key_width(), 0.6));
            let v = row(shape.value_width(), 1.0);
            let decay: Vec<f32> = row(shape.value_heads, 1.0).iter().map(|x| -x.abs()).collect();
            let beta: Vec<f32> = row(shape.value_heads, 0.5).iter().map(|x| 0.5 + x).collect();
            let ours = state.delta(&op, position, [&q, &k, &v], &decay, &beta);
            for (head, matrix) in matrices.iter_mut().enumerate() {
                let first = op.key_head(head) * shape.key_dim;
                let (q, k) = (&q[first..][..shape.key_dim], &k[first..][..shape.key_dim]);
                for column in 0..shape.value_dim {
                    let kept = f64::from(decay[head]).exp();
                    matrix.iter_mut().for_each(|row| row[column] *= kept);
                    let product = |matrix: &[Vec<f64>], x: &[f32]| -> f64 {
                        matrix.iter().zip(x).map(|(row, x)| row[column] * f64::from(*x)).sum()
                    };
                    let at = head * shape.value_dim + column;
                    let update = f64::from(beta[head]) * (f64::from(v[at]) - product(matrix, k));
                    matrix.iter_mut().zip(k).for_each(|(row, k)| row[column] += f64::from(*k) * update);
                    let expected = product(matrix, q);
                    let error = (f64::from(ours[at]) - expected).abs();
                    assert!(error < 1e-4, "position {position}, {at}: {} for {expected}", ours[at]);
                }
            }
        }
    }
}

/// `S = e^(decay Δ) S + Δ B vᵀ` and `o = SᵀC`, row by row in double precision.
#[test]
fn chunks_are_the_scan() {
    for (key_heads, value_heads, key_dim, value_dim) in [(1, 3, 5, 4), (2, 4, 3, 7), (3, 3, 8, 2)] {
        let shape = DeltaShape { key_heads, value_heads, key_dim, value_dim };
        let (linear, vector) = (Linear { matrix: MatrixId(0), bias: None, bounds: None }, VectorId(0));
        let op = Ssd {
            norm: None,
            shape,
            cbv: linear,
            gate: linear,
            gate_scale: 1.0,
            dt: linear,
            dt_scale: 1.0,
            dt_bias: vector,
            dt_limits: (0.0, f32::INFINITY),
            convolution: Convolution { taps: 4, weight: vector, bias: None },
            decay: vector,
            skip: vector,
            out_norm: GatedNorm::GateOnly,
            out: linear,
            post_norm: None,
            state: 0,
        };
        let mut next = numbers(11);
        let mut state =
            LayerState::new(StateShape { rows: 3, channels: shape.channels(), delta: Some(shape) });
        // [value_heads][key_dim][value_dim]
        let mut matrices = vec![vec![vec![0.0_f64; value_dim]; key_dim]; value_heads];
        for position in 0..100 {
            let mut row = |len: usize| -> Vec<f32> { (0..len).map(|_| next()).collect() };
            let (c, b, v) = (row(shape.key_width()), row(shape.key_width()), row(shape.value_width()));
            let dt: Vec<f32> = row(value_heads).iter().map(|x| x.abs()).collect();
            let decay: Vec<f32> = dt.iter().map(|dt| -0.4 * dt).collect();
            let ours = state.scan(&op, position, [&c, &b, &v], &decay, &dt);
            for (head, matrix) in matrices.iter_mut().enumerate() {
                let first = head / (value_heads / key_heads) * key_dim;
                for column in 0..value_dim {
                    let at = head * value_dim + column;
                    let mut expected = 0.0;
                    for (key, row) in matrix.iter_mut().enumerate() {
                        let added = f64::from(dt[head] * v[at]) * f64::from(b[first + key]);
                        row[column] = f64::from(decay[head]).exp() * row[column] + added;
                        expected += row[column] * f64::from(c[first + key]);
                    }
                    let error = (f64::from(ours[at]) - expected).abs();
                    assert!(error < 1e-4, "position {position}, {at}: {} for {expected}", ours[at]);
                }
            }
        }
    }
}
