//! All operations except attention, one function each: the definition of a program.

use super::attention::dot;
use crate::{AXES, Activation, ExpertGroups, NormKind, PositionScale, Rope, RopeStyle, Router, Scores};

/// `out = x·Wᵀ + b` for one row.
///
/// - `x`: `[cols]`
/// - `matrix`: `[rows, cols]`
/// - `bias`, `out`: `[rows]`
pub fn linear(x: &[f32], matrix: &[f32], bias: Option<&[f32]>, out: &mut [f32]) {
    for (row, (out, weights)) in out.iter_mut().zip(matrix.chunks_exact(x.len())).enumerate() {
        let bias = bias.map_or(0.0, |bias| f64::from(bias[row]));
        *out = (dot(x, weights) + bias) as f32;
    }
}

/// `x / sqrt(mean(x²) + eps) * weight + bias`, in place; all `[width]`. [`NormKind::Layer`] subtracts the mean first.
pub fn norm(x: &mut [f32], kind: NormKind, weight: &[f32], bias: Option<&[f32]>, eps: f32) {
    if kind == NormKind::Layer {
        let mean = x.iter().map(|&x| f64::from(x)).sum::<f64>() / x.len() as f64;
        x.iter_mut().for_each(|x| *x = (f64::from(*x) - mean) as f32);
    }
    let mean_square = dot(x, x) / x.len() as f64;
    let scale = 1.0 / (mean_square + f64::from(eps)).sqrt();
    for (i, x) in x.iter_mut().enumerate() {
        let bias = bias.map_or(0.0, |bias| f64::from(bias[i]));
        *x = (f64::from(*x) * scale * f64::from(weight[i]) + bias) as f32;
    }
}

/// Rotates one head, `[head_dim]`, to a position and its coordinates, in place.
pub fn rotate(head: &mut [f32], position: usize, coordinates: [usize; AXES], rope: &Rope) {
    let pairs = rope.frequencies.len();
    for (pair, &frequency) in rope.frequencies.iter().enumerate() {
        let (a, b) = match rope.style {
            RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
            RopeStyle::HalfSplit => (pair, pair + pairs),
        };
        let position = rope.axes.get(pair).map_or(position, |&axis| coordinates[usize::from(axis)]);
        let (sin, cos) = (position as f64 * f64::from(frequency)).sin_cos();
        let magnitude = f64::from(rope.magnitude);
        let (x, y) = (f64::from(head[a]), f64::from(head[b]));
        head[a] = (magnitude * (x * cos - y * sin)) as f32;
        head[b] = (magnitude * (x * sin + y * cos)) as f32;
    }
}

/// Returns the factor of a query at `position`: `1 + beta * ln(1 + floor(position / original))`.
pub fn position_scale(scale: &PositionScale, position: usize) -> f32 {
    let periods = position / scale.original as usize;
    (1.0 + f64::from(scale.beta) * (periods as f64).ln_1p()) as f32
}

/// Returns the activation of an input `up` with its gate, or of an input alone.
pub fn activate(gate: Option<f32>, up: f32, activation: Activation) -> f32 {
    let of = |x: f64| match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::Gelu => 0.5 * x * erfc(-x / std::f64::consts::SQRT_2),
        Activation::Relu2 => x.max(0.0).powi(2),
        Activation::ClampedSwiglu { alpha, limit } => {
            let x = x.min(limit.into());
            x / (1.0 + (-f64::from(alpha) * x).exp())
        }
    };
    let Some(gate) = gate else { return of(up.into()) as f32 };
    let up = match activation {
        Activation::ClampedSwiglu { alpha: _, limit } => f64::from(up.clamp(-limit, limit)) + 1.0,
        Activation::Silu | Activation::GeluTanh | Activation::Gelu | Activation::Relu2 => f64::from(up),
    };
    (of(gate.into()) * up) as f32
}

/// `x * sigmoid(gate)`
pub fn sigmoid_gate(gate: f32, x: f32) -> f32 {
    (f64::from(x) / (1.0 + (-f64::from(gate)).exp())) as f32
}

/// Returns the complementary error function, to about 1e-15: a series near zero, a continued fraction elsewhere.
fn erfc(x: f64) -> f64 {
    if x < 0.0 {
        return 2.0 - erfc(-x);
    }
    if x < 2.0 {
        // erf(x) = 2/sqrt(π) exp(-x²) Σ (2x²)^n x / (1·3·5···(2n+1))
        let (mut term, mut sum, mut n) = (x, x, 1.0);
        while term > sum * 1e-17 {
            term *= 2.0 * x * x / (2.0 * n + 1.0);
            sum += term;
            n += 1.0;
        }
        return 1.0 - std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp() * sum;
    }
    // erfc(x) = exp(-x²)/sqrt(π) / (x + 1/2 / (x + 2/2 / (x + 3/2 / ...)))
    let fraction = (1..=60).rev().fold(x, |below, k| x + f64::from(k) / 2.0 / below);
    (-x * x).exp() / std::f64::consts::PI.sqrt() / fraction
}

/// Returns the experts of one row with their weights, in ascending order of ids; see [`Router`].
///
/// - `logits`: `[experts]`, in single precision, because rounding would otherwise decide near ties
/// - `selection_bias`: `[experts]`
pub fn route(logits: &[f32], router: &Router, selection_bias: Option<&[f32]>) -> Vec<(usize, f32)> {
    let Router {
        scores,
        groups,
        used,
        renormalize,
        factor,
        norm: _,
        linear: _,
        selection_bias: _,
        expert_scale: _,
    } = *router;
    let logit = |expert: usize| f64::from(logits[expert]);
    let largest = (0..logits.len()).map(logit).fold(f64::NEG_INFINITY, f64::max);
    let scores: Vec<f64> = match scores {
        Scores::Softmax => {
            let total: f64 = (0..logits.len()).map(|expert| (logit(expert) - largest).exp()).sum();
            (0..logits.len()).map(|expert| (logit(expert) - largest).exp() / total).collect()
        }
        Scores::Sigmoid => (0..logits.len()).map(|expert| 1.0 / (1.0 + (-logit(expert)).exp())).collect(),
    };
    let ranked = |expert: usize| scores[expert] + selection_bias.map_or(0.0, |bias| f64::from(bias[expert]));
    let mut chosen: Vec<usize> = (0..logits.len()).collect();
    if let Some(ExpertGroups { count, used, best }) = groups {
        let size = logits.len() / count;
        let score = |group: usize| {
            let mut ranks: Vec<f64> = (group * size..(group + 1) * size).map(ranked).collect();
            ranks.sort_by(|a, b| b.total_cmp(a));
            ranks[..best].iter().sum::<f64>()
        };
        let mut all: Vec<usize> = (0..count).collect();
        all.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
        chosen.retain(|expert| all[..used].contains(&(expert / size)));
    }
    // The sort is stable: among equal ones, the lowest id is first.
    chosen.sort_by(|&a, &b| ranked(b).total_cmp(&ranked(a)));
    chosen.truncate(used);
    chosen.sort_unstable();
    let total: f64 = chosen.iter().map(|&expert| scores[expert]).sum();
    let divisor = if renormalize { total.max(f64::from(f32::MIN_POSITIVE)) } else { 1.0 };
    let weight = |expert: usize| (scores[expert] / divisor * f64::from(factor)) as f32;
    chosen.into_iter().map(|expert| (expert, weight(expert))).collect()
}

/// `cap * tanh(x / cap)`.
pub fn soft_cap(x: f32, cap: f32) -> f32 {
    (f64::from(cap) * (f64::from(x) / f64::from(cap)).tanh()) as f32
}
