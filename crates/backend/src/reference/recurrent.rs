//! Mixers with a state, row by row, and the states of a loaded model.

use super::{ReferenceRunner, attention::dot, ops};
use crate::{
    Activation, Convolution, DeltaRule, DeltaShape, GatedNorm, GroupNorm, Limits, NormKind, STATE_CHUNK,
    ShortConv, Ssd, StateId, StateLayout, StateShape, StateUse, Step,
};

/// State of one layer.
#[derive(Clone, Debug)]
pub struct LayerState {
    shape: StateShape,
    /// `[rows, channels]`: the input of the convolution at position `p` is in row `p % rows`.
    inputs: Vec<f32>,
    /// `[value_heads, key_dim, value_dim]` as of the beginning of the chunk.
    matrices: Vec<f32>,
    /// Keys of the rows of the chunk, `[STATE_CHUNK, key_heads, key_dim]`.
    keys: Vec<f32>,
    /// Their updates u, `[STATE_CHUNK, value_heads, value_dim]`.
    updates: Vec<f32>,
    /// Their decays, summed up from the beginning of the chunk, `[STATE_CHUNK, value_heads]`.
    decays: Vec<f32>,
}

impl LayerState {
    /// Returns a state before position 0, filled with zeros.
    pub fn new(shape: StateShape) -> Self {
        let zeros = |len: usize| vec![0.0; len];
        let delta = shape.delta;
        let chunk = |width: fn(&DeltaShape) -> usize| zeros(STATE_CHUNK * delta.as_ref().map_or(0, width));
        Self {
            shape,
            inputs: zeros(shape.rows * shape.channels),
            matrices: zeros(delta.map_or(0, |delta| delta.value_width() * delta.key_dim)),
            keys: chunk(DeltaShape::key_width),
            updates: chunk(DeltaShape::value_width),
            decays: chunk(|delta| delta.value_heads),
        }
    }

    fn parts(&mut self) -> [&mut Vec<f32>; 5] {
        [&mut self.inputs, &mut self.matrices, &mut self.keys, &mut self.updates, &mut self.decays]
    }

    /// Returns the convolution of the row `input`, `[channels]`, at `position`, of which it becomes part of the state.
    ///
    /// - `weight`: `[taps, channels]`
    /// - `bias`: `[channels]`
    pub fn convolve(
        &mut self,
        input: &[f32],
        position: usize,
        weight: &[f32],
        bias: Option<&[f32]>,
    ) -> Vec<f32> {
        let StateShape { rows, channels, delta: _ } = self.shape;
        let needed = weight.len() / channels - 1;
        let first = position.saturating_sub(needed);
        let out = (0..channels).map(|channel| {
            let tap = |back: usize| f64::from(weight[(needed - back) * channels + channel]);
            let earlier = (first..position).map(|earlier| {
                let input = self.inputs[earlier % rows * channels + channel];
                tap(position - earlier) * f64::from(input)
            });
            let bias = bias.map_or(0.0, |bias| f64::from(bias[channel]));
            (earlier.sum::<f64>() + tap(0) * f64::from(input[channel]) + bias) as f32
        });
        let out = out.collect();
        self.inputs[position % rows * channels..][..channels].copy_from_slice(input);
        out
    }

    /// Returns the delta rule of one row, `[value_heads, value_dim]`.
    ///
    /// Within a chunk that began with the state `S`, with decays `G` that are summed up from there:
    ///
    /// ```text
    /// u_t = β_t (v_t - e^{G_t} Sᵀk_t - Σ_{i<t} e^{G_t - G_i} (k_i · k_t) u_i)
    /// o_t = e^{G_t} Sᵀq_t + Σ_{i<=t} e^{G_t - G_i} (k_i · q_t) u_i
    /// ```
    ///
    /// - `q`, `k`: `[key_heads, key_dim]`, of norm one, and queries scaled
    /// - `v`: `[value_heads, value_dim]`
    /// - `decay`, `beta`: `[value_heads]`
    pub fn delta(
        &mut self,
        op: &DeltaRule,
        position: usize,
        [q, k, v]: [&[f32]; 3],
        decay: &[f32],
        beta: &[f32],
    ) -> Vec<f32> {
        let DeltaShape { key_heads: _, value_heads, key_dim, value_dim } = op.shape;
        let (key_width, value_width) = (op.shape.key_width(), op.shape.value_width());
        let row = self.begin_row(&op.shape, position, k, |head| op.key_head(head));
        let mut out = Vec::with_capacity(value_width);
        for head in 0..value_heads {
            let key = op.key_head(head) * key_dim..(op.key_head(head) + 1) * key_dim;
            let decayed = self.add_decay(row, value_heads, head, decay[head]);
            let decay_since = |from: f32| f64::from(decayed - from).exp();
            let matrix = &self.matrices[head * key_dim * value_dim..][..key_dim * value_dim];
            // Sᵀx of one column.
            let product = |x: &[f32], column: usize| -> f64 {
                let rows = matrix.chunks_exact(value_dim).zip(x);
                rows.map(|(row, &x)| f64::from(row[column]) * f64::from(x)).sum()
            };
            let (q, k) = (&q[key.clone()], &k[key.clone()]);
            // Weights of the chunk's rows, this one last.
            let weights = |x: &[f32]| -> Vec<f64> {
                let rows = 0..=row;
                let weight = |i: usize| {
                    let decay = decay_since(self.decays[i * value_heads + head]);
                    decay * dot(&self.keys[i * key_width..][key.clone()], x)
                };
                rows.map(weight).collect()
            };
            let (of_key, of_query) = (weights(k), weights(q));
            for column in 0..value_dim {
                let at = head * value_dim + column;
                let sum = |weights: &[f64], updates: &[f32]| -> f64 {
                    let rows = weights.iter().enumerate();
                    rows.map(|(i, weight)| weight * f64::from(updates[i * value_width + at])).sum()
                };
                let known = decay_since(0.0) * product(k, column) + sum(&of_key[..row], &self.updates);
                let update = f64::from(beta[head]) * (f64::from(v[at]) - known);
                self.updates[row * value_width + at] = update as f32;
                out.push((decay_since(0.0) * product(q, column) + sum(&of_query, &self.updates)) as f32);
            }
        }
        out
    }

    /// Returns the scan of one row, `[value_heads, value_dim]`, without its skip connection.
    ///
    /// Within a chunk that began with the state `S`, with decays `G` that are summed up from there:
    ///
    /// ```text
    /// u_t = Δ_t v_t
    /// o_t = e^{G_t} SᵀC_t + Σ_{i<=t} e^{G_t - G_i} (B_i · C_t) u_i
    /// ```
    ///
    /// - `c`, `b`: `[key_heads, key_dim]`
    /// - `v`: `[value_heads, value_dim]`
    /// - `decay`, `dt`: `[value_heads]`
    pub fn scan(
        &mut self,
        op: &Ssd,
        position: usize,
        [c, b, v]: [&[f32]; 3],
        decay: &[f32],
        dt: &[f32],
    ) -> Vec<f32> {
        let DeltaShape { key_heads: _, value_heads, key_dim, value_dim } = op.shape;
        let (key_width, value_width) = (op.shape.key_width(), op.shape.value_width());
        let row = self.begin_row(&op.shape, position, b, |head| op.key_head(head));
        let mut out = Vec::with_capacity(value_width);
        for head in 0..value_heads {
            let key = op.key_head(head) * key_dim..(op.key_head(head) + 1) * key_dim;
            let decayed = self.add_decay(row, value_heads, head, decay[head]);
            let decay_since = |from: f32| f64::from(decayed - from).exp();
            let c = &c[key.clone()];
            let weight = |i: usize| {
                let decay = decay_since(self.decays[i * value_heads + head]);
                decay * dot(&self.keys[i * key_width..][key.clone()], c)
            };
            let weights: Vec<f64> = (0..=row).map(weight).collect();
            let matrix = &self.matrices[head * key_dim * value_dim..][..key_dim * value_dim];
            for column in 0..value_dim {
                let at = head * value_dim + column;
                self.updates[row * value_width + at] = dt[head] * v[at];
                let rows = matrix.chunks_exact(value_dim).zip(c);
                let known: f64 = rows.map(|(row, &c)| f64::from(row[column]) * f64::from(c)).sum();
                let rows = weights.iter().enumerate();
                let new: f64 = rows.map(|(i, w)| w * f64::from(self.updates[i * value_width + at])).sum();
                out.push((decay_since(0.0) * known + new) as f32);
            }
        }
        out
    }

    /// Begins the row at `position`, which has these keys. The first row of a chunk folds the chunk before it. Returns the row's place
    /// in its chunk.
    fn begin_row(
        &mut self,
        shape: &DeltaShape,
        position: usize,
        keys: &[f32],
        key_head: impl Fn(usize) -> usize,
    ) -> usize {
        let (row, width) = (position % STATE_CHUNK, shape.key_width());
        match (position, row) {
            (0, _) => self.matrices.fill(0.0),
            (_, 0) => self.fold(shape, key_head),
            _ => {}
        }
        self.keys[row * width..][..width].copy_from_slice(keys);
        row
    }

    /// Adds a head's decay in this row to its sum over the chunk. Returns the sum.
    fn add_decay(&mut self, row: usize, heads: usize, head: usize, decay: f32) -> f32 {
        let before = if row == 0 { 0.0 } else { self.decays[(row - 1) * heads + head] };
        self.decays[row * heads + head] = before + decay;
        before + decay
    }

    /// Makes the rows of a full chunk part of the matrices.
    fn fold(&mut self, shape: &DeltaShape, key_head: impl Fn(usize) -> usize) {
        let DeltaShape { key_heads: _, value_heads, key_dim, value_dim } = *shape;
        let (key_width, value_width) = (shape.key_width(), shape.value_width());
        for (index, x) in self.matrices.iter_mut().enumerate() {
            let (head, column) = (index / (key_dim * value_dim), index % value_dim);
            let key = key_head(head) * key_dim + index / value_dim % key_dim;
            let decay = |row: usize| f64::from(self.decays[row * value_heads + head]);
            let last = decay(STATE_CHUNK - 1);
            let added = (0..STATE_CHUNK).map(|row| {
                let update = self.updates[row * value_width + head * value_dim + column];
                (last - decay(row)).exp() * f64::from(self.keys[row * key_width + key]) * f64::from(update)
            });
            *x = (last.exp() * f64::from(*x) + added.sum::<f64>()) as f32;
        }
    }
}

/// Queries, keys and values of a row that the convolution has passed, `[channels]`: SiLU, and norms of the heads of
/// queries and keys.
pub fn delta_inputs(shape: &DeltaShape, mixed: &[f32]) -> Vec<f32> {
    let mut mixed: Vec<f32> = mixed.iter().map(|&x| ops::activate(None, x, Activation::Silu)).collect();
    let queries = shape.key_heads;
    for (head, x) in mixed[..2 * shape.key_width()].chunks_exact_mut(shape.key_dim).enumerate() {
        let scale = if head < queries { (shape.key_dim as f64).sqrt() } else { 1.0 };
        let norm = (dot(x, x) + f64::from(DeltaRule::EPS)).sqrt() * scale;
        x.iter_mut().for_each(|x| *x = (f64::from(*x) / norm) as f32);
    }
    mixed
}

/// Decay g and strength β of one row and head: `decay * softplus(a + dt)` and `sigmoid(b)`.
pub fn delta_gates(decay: f32, dt: f32, a: f32, b: f32) -> (f32, f32) {
    let softplus = softplus(f64::from(a) + f64::from(dt));
    ((f64::from(decay) * softplus) as f32, (1.0 / (1.0 + (-f64::from(b)).exp())) as f32)
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// Step Δ of one row and head of a scan: `clamp(softplus(dt_scale * d + bias))`.
fn ssd_step(op: &Ssd, d: f32, bias: f32) -> f32 {
    let step = softplus(f64::from(op.dt_scale) * f64::from(d) + f64::from(bias));
    (step as f32).clamp(op.dt_limits.0, op.dt_limits.1)
}

impl ReferenceRunner {
    /// Returns a short convolution's output, which is added to each row.
    pub(super) fn conv(&mut self, op: &ShortConv, step: &Step<'_>, x: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let mut added = Vec::with_capacity(x.len());
        for sequence in step.sequences {
            let state = sequence.state.expect("validated");
            for (position, row) in (sequence.start..).zip(sequence.rows.clone()) {
                let input = self.linear(&op.input, row, &self.optional_norm(op.norm, &x[row]));
                let (b, rest) = input.split_at(op.width);
                let (c, u) = rest.split_at(op.width);
                let gated: Vec<f32> = b.iter().zip(u).map(|(b, u)| b * u).collect();
                let y = self.convolve(&op.convolution, state, (op.state, sequence.start), &gated, position);
                let y: Vec<f32> = c.iter().zip(y).map(|(c, y)| c * y).collect();
                added.push(self.optional_norm(op.post_norm, &self.linear(&op.out, row, &y)));
            }
        }
        self.count("conv");
        added
    }

    /// Returns a delta rule's output, which is added to each row.
    pub(super) fn delta(&mut self, op: &DeltaRule, step: &Step<'_>, x: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let mut added = Vec::with_capacity(x.len());
        for sequence in step.sequences {
            let state = sequence.state.expect("validated");
            for (position, row) in (sequence.start..).zip(sequence.rows.clone()) {
                let h = self.optional_norm(op.norm, &x[row]);
                let [mixed, gate, a, b] =
                    [&op.qkv, &op.gate, &op.alpha, &op.beta].map(|linear| self.linear(linear, row, &h));
                let mixed =
                    self.convolve(&op.convolution, state, (op.state, sequence.start), &mixed, position);
                let mixed = delta_inputs(&op.shape, &mixed);
                let (q, rest) = mixed.split_at(op.shape.key_width());
                let (k, v) = rest.split_at(op.shape.key_width());
                let (decay, dt) = (self.vector(op.decay), self.vector(op.dt));
                let (decay, beta): (Vec<f32>, Vec<f32>) =
                    (0..a.len()).map(|head| delta_gates(decay[head], dt[head], a[head], b[head])).unzip();
                // The convolution has begun the state.
                let own = self.states.begin(StateUse::in_place(state.write), op.state, position);
                let mut out = own.delta(op, position, [q, k, v], &decay, &beta);
                let heads = out.chunks_exact_mut(op.shape.value_dim);
                for (head, gate) in heads.zip(gate.chunks_exact(op.shape.value_dim)) {
                    let normed = self.norm(&op.out_norm, head);
                    for ((out, normed), &gate) in head.iter_mut().zip(normed).zip(gate) {
                        *out = ops::activate(Some(gate), normed, Activation::Silu);
                    }
                }
                added.push(self.optional_norm(op.post_norm, &self.linear(&op.out, row, &out)));
            }
        }
        self.count("delta");
        added
    }

    /// Returns the convolution of one row of a sequence whose step began at `start`, in the state of `layer`.
    fn convolve(
        &mut self,
        op: &Convolution,
        state: StateUse,
        (layer, start): (usize, usize),
        input: &[f32],
        position: usize,
    ) -> Vec<f32> {
        // The first row of the step moves the state from the slot that is read.
        let state = if position == start { state } else { StateUse::in_place(state.write) };
        let (weight, bias) = (&self.vectors[op.weight.0 as usize], op.bias);
        let bias = bias.map(|bias| self.vectors[bias.0 as usize].as_slice());
        self.states.begin(state, layer, position).convolve(input, position, weight, bias)
    }

    /// Returns the output of a scan, which is added to each row.
    pub(super) fn ssd(&mut self, op: &Ssd, step: &Step<'_>, x: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let mut added = Vec::with_capacity(x.len());
        let (value_dim, key_width) = (op.shape.value_dim, op.shape.key_width());
        for sequence in step.sequences {
            let state = sequence.state.expect("validated");
            for (position, row) in (sequence.start..).zip(sequence.rows.clone()) {
                let h = self.optional_norm(op.norm, &x[row]);
                let [mixed, gate, d] = [&op.cbv, &op.gate, &op.dt].map(|linear| self.linear(linear, row, &h));
                let mixed =
                    self.convolve(&op.convolution, state, (op.state, sequence.start), &mixed, position);
                let silu = |x: f32| ops::activate(None, x, Activation::Silu);
                let mixed: Vec<f32> = mixed.into_iter().map(silu).collect();
                let (c, rest) = mixed.split_at(key_width);
                let (b, v) = rest.split_at(key_width);
                let bias = self.vector(op.dt_bias);
                let dt: Vec<f32> = d.iter().zip(bias).map(|(&d, &bias)| ssd_step(op, d, bias)).collect();
                let decay: Vec<f32> = dt.iter().zip(self.vector(op.decay)).map(|(dt, a)| dt * a).collect();
                // The convolution has begun the state.
                let own = self.states.begin(StateUse::in_place(state.write), op.state, position);
                let mut out = own.scan(op, position, [c, b, v], &decay, &dt);
                let skip = self.vector(op.skip);
                for (index, (out, v)) in out.iter_mut().zip(v).enumerate() {
                    *out += skip[index / value_dim] * v;
                }
                let gates: Vec<f32> = gate.iter().map(|gate| silu(op.gate_scale * gate)).collect();
                let out = self.gated_norm(&op.out_norm, out, &gates);
                added.push(self.optional_norm(op.post_norm, &self.linear(&op.out, row, &out)));
            }
        }
        self.count("ssd");
        added
    }

    fn gated_norm(&self, op: &GatedNorm, mut x: Vec<f32>, gates: &[f32]) -> Vec<f32> {
        let gate = |x: &mut [f32]| x.iter_mut().zip(gates).for_each(|(x, gate)| *x *= gate);
        let norm = |x: &mut [f32], GroupNorm { groups, weight, eps }: &GroupNorm| {
            let size = x.len() / groups;
            let weights = self.vector(*weight).chunks_exact(size);
            for (x, weights) in x.chunks_exact_mut(size).zip(weights) {
                ops::norm(x, NormKind::Rms, weights, None, *eps);
            }
        };
        match op {
            GatedNorm::GateOnly => gate(&mut x),
            GatedNorm::AfterGate(op) => {
                gate(&mut x);
                norm(&mut x, op);
            }
            GatedNorm::BeforeGate(op) => {
                norm(&mut x, op);
                gate(&mut x);
            }
        }
        x
    }
}

/// All states of a loaded model.
pub(super) struct States {
    /// States by slot and layer.
    slots: Vec<Vec<LayerState>>,
}

impl States {
    /// Creates states, filled with large finite noise if there is a seed.
    pub(super) fn new(layout: &StateLayout, limits: &Limits, poison: Option<u64>) -> Self {
        let mut noise = poison.map(super::pages::noise);
        let mut slot = || {
            let layers = layout.layers.iter().map(|&shape| {
                let mut state = LayerState::new(shape);
                if let Some(noise) = &mut noise {
                    let numbers = state.parts().into_iter().flatten();
                    numbers.zip(noise).for_each(|(number, noise)| *number = noise);
                }
                state
            });
            layers.collect()
        };
        Self { slots: (0..limits.states).map(|_| slot()).collect() }
    }

    /// Numbers of a slot.
    pub(super) fn numbers(&mut self) -> usize {
        let layers = self.slots.first_mut().into_iter().flatten();
        layers.flat_map(LayerState::parts).map(|part| part.len()).sum()
    }

    /// Calls `copy` with each number of a part of a slot and its number in a page. All parts except the last have the
    /// length of the page.
    pub(super) fn part(
        &mut self,
        StateId(slot): StateId,
        part: usize,
        page: &mut [f32],
        copy: impl Fn(&mut f32, &mut f32),
    ) {
        let numbers = self.slots[slot as usize].iter_mut().flat_map(LayerState::parts).flatten();
        let places = page.len();
        numbers.skip(part * places).zip(page).for_each(|(number, place)| copy(number, place));
    }

    /// Returns the state of a layer that a sequence's rows from `start` on continue and write.
    pub(super) fn begin(&mut self, state: StateUse, layer: usize, start: usize) -> &mut LayerState {
        let StateUse { read, write } = state;
        if start > 0 && read != write {
            self.slots[write.0 as usize][layer] = self.slots[read.0 as usize][layer].clone();
        }
        &mut self.slots[write.0 as usize][layer]
    }
}
