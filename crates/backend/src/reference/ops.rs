//! Every operation but attention, one function each: the definition of what a program means.

use super::attention::dot;
use crate::{Activation, Rope, RopeStyle};

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

/// `x / sqrt(mean(x²) + eps) * weight`, in place; all `[width]`.
pub fn rms_norm(x: &mut [f32], weight: &[f32], eps: f32) {
    let mean_square = dot(x, x) / x.len() as f64;
    let scale = 1.0 / (mean_square + f64::from(eps)).sqrt();
    for (x, &weight) in x.iter_mut().zip(weight) {
        *x = (f64::from(*x) * scale * f64::from(weight)) as f32;
    }
}

/// Rotates one head, `[head_dim]`, to a position, in place.
pub fn rotate(head: &mut [f32], position: usize, rope: &Rope) {
    let pairs = rope.frequencies.len();
    for (pair, &frequency) in rope.frequencies.iter().enumerate() {
        let (a, b) = match rope.style {
            RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
            RopeStyle::HalfSplit => (pair, pair + pairs),
        };
        let (sin, cos) = (position as f64 * f64::from(frequency)).sin_cos();
        let magnitude = f64::from(rope.magnitude);
        let (x, y) = (f64::from(head[a]), f64::from(head[b]));
        head[a] = (magnitude * (x * cos - y * sin)) as f32;
        head[b] = (magnitude * (x * sin + y * cos)) as f32;
    }
}

/// The gate's activation.
pub fn activate(x: f32, activation: Activation) -> f32 {
    let x = f64::from(x);
    let y = match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
    };
    y as f32
}

/// `cap * tanh(x / cap)`.
pub fn soft_cap(x: f32, cap: f32) -> f32 {
    (f64::from(cap) * (f64::from(x) / f64::from(cap)).tanh()) as f32
}
