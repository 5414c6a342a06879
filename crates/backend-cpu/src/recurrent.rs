//! Mixers with a state, as phases of the thread pool. Threads divide rows, value heads and their columns, never the
//! chunks of a sequence:
//!
//! | phase | shared by | reads | writes |
//! |-|-|-|-|
//! | add, norm, quantize | row | `branch_outputs`, `x` | `x`, `rows` |
//! | input, or qkv, z, a, b | 16 outputs | `rows` | `mixed`, `z`, `decay`, `beta` |
//! | biases, if there are any | row | `mixed` | `mixed` |
//! | convolve | row | `mixed`, states | `convolved`, `decay`, `beta`; of a short convolution `rows` |
//! | delta rule | sequence, value head, columns | `convolved`, `decay`, `beta`, states | matrices and updates of states, `out` |
//! | norm, gate, quantize | row | `out`, `z` | `rows` |
//! | keep | sequence | `mixed`, `convolved`, `decay`, states | inputs, keys and decays of states |
//! | project | 16 outputs | `rows` | `branch_outputs` |
//!
//! The scan of Mamba-2 is in `ssd.rs`.
//!
//! A thread computes the rows of its part in order. A head's matrix is read once for several rows, and the sums of each
//! row have the same order as in a step of one row.

use std::ops::Range;

use paguro_backend::{
    Activation, Convolution, DeltaRule, DeltaShape, STATE_CHUNK, ShortConv, Ssd, StateUse, StepSequence,
};

use paguro_cpu_kernels::{
    delta::{Piece, Tiles},
    simd::LANES,
};

use crate::{
    pass::{Kernel, Pass},
    states::blocks,
    thread_pool::Chunking,
    worker::{AllPending, Kinds, Pending, Worker},
};

/// A convolution's input in `mixed`.
#[derive(Clone, Copy)]
pub enum Inputs {
    /// A row.
    Plain,
    /// `b ⊙ u` of a row of b, c and u.
    Gated,
}

/// Value heads of a delta rule or a scan.
pub struct ValueHeads<'a> {
    pub shape: &'a DeltaShape,
    /// Index of the layer's state.
    pub state: usize,
    pub rule: Rule<'a>,
}

/// The rule that value heads compute.
#[derive(Clone, Copy)]
pub enum Rule<'a> {
    Delta(&'a DeltaRule),
    Scan(&'a Ssd),
}

impl ValueHeads<'_> {
    /// Key head of a value head.
    fn key_head(&self, value_head: usize) -> usize {
        match self.rule {
            Rule::Delta(op) => op.key_head(value_head),
            Rule::Scan(op) => op.key_head(value_head),
        }
    }
}

/// Computes a short convolution. Returns its output, `[rows, hidden]`.
pub fn short_conv(pass: &mut Pass<'_>, op: &ShortConv, pending: AllPending, output: usize) -> Pending {
    let (model, buffers) = (pass.model, pass.buffers);
    let mixed = &buffers.recurrent.mixed;
    let width = op.width;
    pass.add_norm(op.norm, pending, Kinds::of(model, &[op.input]));
    pass.multiply(pass.rows(), [(op.input.matrix, mixed)]);
    pass.add_bias(op.input, mixed, 3 * width);
    let kinds = Kinds::of(model, &[op.out]);
    pass.phase(Kernel::Convolve, pass.rows(), Chunking::Guided(1), |worker, range| {
        for row in range {
            let mut out = std::mem::take(&mut worker.scratch.row);
            let y = &mut out[..width];
            worker.convolve(&op.convolution, op.state, row, Inputs::Gated, y);
            // SAFETY: no other worker writes it in this phase; see the table at the head of this file.
            let c = &unsafe { worker.read(mixed, row, 3 * width) }[width..2 * width];
            model.rows.multiply(y, c);
            worker.set_input(&buffers.input, row, 0, y, kinds, true);
            worker.scratch.row = out;
        }
    });
    pass.phase(Kernel::Keep, pass.step.sequences.len(), Chunking::Single, |worker, range| {
        for sequence in range {
            worker.keep_inputs(sequence, op.state, Inputs::Gated);
        }
    });
    pass.multiply(pass.rows(), [(op.out.matrix, &buffers.branch_outputs[output])]);
    Pending { output, bias: op.out.bias, post_norm: op.post_norm, scale: 1.0 }
}

/// Computes the gated delta rule. Returns its output, `[rows, hidden]`.
pub fn delta_rule(pass: &mut Pass<'_>, op: &DeltaRule, pending: AllPending, output: usize) -> Pending {
    let (model, buffers, step) = (pass.model, pass.buffers, pass.step);
    let recurrent = &buffers.recurrent;
    let (channels, width) = (op.shape.channels(), op.shape.value_width());
    pass.add_norm(op.norm, pending, Kinds::of(model, &[op.qkv, op.gate, op.alpha, op.beta]));
    let inputs = [
        (op.qkv, &recurrent.mixed),
        (op.gate, &recurrent.z),
        (op.alpha, &recurrent.decay),
        (op.beta, &recurrent.beta),
    ];
    pass.multiply(pass.rows(), inputs.map(|(linear, out)| (linear.matrix, out)));
    pass.add_bias(op.qkv, &recurrent.mixed, channels);
    pass.phase(Kernel::Convolve, pass.rows(), Chunking::Guided(1), |worker, range| {
        for row in range {
            // SAFETY: the phase is shared by row; see the table at the head of this file.
            let out = unsafe { worker.write(&recurrent.convolved, row, channels) };
            worker.convolve(&op.convolution, op.state, row, Inputs::Plain, out);
            worker.finish_inputs(op, row, out);
        }
    });
    let heads = ValueHeads { shape: &op.shape, state: op.state, rule: Rule::Delta(op) };
    delta_heads(pass, Kernel::Delta, &heads);
    let kinds = Kinds::of(model, &[op.out]);
    pass.phase(Kernel::NormGate, pass.rows(), Chunking::Guided(1), |worker, range| {
        for row in range {
            // SAFETY: no other worker writes it in this phase; see the table at the head of this file.
            let out = unsafe { worker.read(&recurrent.out, row, width) };
            // SAFETY: the phase is shared by row; see the table at the head of this file.
            let gates = unsafe { worker.write(&recurrent.z, row, width) };
            worker.add_row_bias(op.gate.bias, gates);
            let value_dim = op.shape.value_dim;
            for (out, gate) in out.chunks_exact(value_dim).zip(gates.chunks_exact_mut(value_dim)) {
                let normed = &mut worker.scratch.row[..value_dim];
                model.norm(Some(op.out_norm), out, normed);
                model.rows.activate_gate(gate, normed, Activation::Silu);
            }
            worker.set_input(&buffers.input, row, 0, gates, kinds, true);
        }
    });
    pass.phase(Kernel::Keep, step.sequences.len(), Chunking::Single, |worker, range| {
        for sequence in range {
            worker.keep_inputs(sequence, op.state, Inputs::Plain);
            worker.keep_rows(&op.shape, op.state, sequence);
        }
    });
    pass.multiply(pass.rows(), [(op.out.matrix, &buffers.branch_outputs[output])]);
    Pending { output, bias: op.out.bias, post_norm: op.post_norm, scale: 1.0 }
}

/// Phase: all rows of the step in all value heads.
pub fn delta_heads(pass: &mut Pass<'_>, kernel: Kernel<'_>, op: &ValueHeads<'_>) {
    let (sequences, heads) = (pass.step.sequences.len(), op.shape.value_heads);
    // Few heads are divided, so that all threads have some.
    let blocks = blocks(op.shape);
    let columns_per_item = if sequences * heads < 2 * pass.pool.threads() { 1 } else { blocks };
    let items = blocks.div_ceil(columns_per_item);
    pass.phase(kernel, sequences * heads * items, Chunking::Single, |worker, range| {
        for unit in range {
            let (head, first) = (unit / items % heads, unit % items * columns_per_item);
            let columns = first..blocks.min(first + columns_per_item);
            worker.delta_head(op, unit / items / heads, head, columns);
        }
    });
}

/// Returns true if a written state needs rows of another slot.
fn copies_from(state: StateUse) -> bool {
    state.read != state.write
}

/// State of a sequence.
pub fn state_of(sequence: &StepSequence) -> StateUse {
    sequence.state.expect("validated")
}

impl Worker<'_> {
    /// The convolution of a row.
    pub fn convolve(&mut self, op: &Convolution, layer: usize, row: usize, inputs: Inputs, out: &mut [f32]) {
        let (model, place) = (self.model, self.states.place(layer));
        let sequence = &self.step.sequences[self.plan.sequence(row)];
        let state = state_of(sequence);
        let (position, channels) = (self.plan.positions[row], out.len());
        match op.bias {
            Some(bias) => out.copy_from_slice(model.vector(bias)),
            None => out.fill(0.0),
        }
        let weights = model.vector(op.weight).chunks_exact(channels);
        for (back, weight) in (0..op.taps).rev().zip(weights) {
            let Some(position) = position.checked_sub(back) else { continue };
            if position < sequence.start {
                // SAFETY: nobody writes inputs of states in this phase.
                let input = unsafe { self.states.get(state.read, place.input(position)) };
                model.delta.add_product(out, input, weight);
            } else {
                self.with_input(row - back, channels, inputs, |input| {
                    model.delta.add_product(out, input, weight);
                });
            }
        }
    }

    /// Calls `use_it` with an input of a convolution, from this step's rows.
    fn with_input(&mut self, row: usize, channels: usize, inputs: Inputs, use_it: impl FnOnce(&[f32])) {
        let mixed = &self.buffers.recurrent.mixed;
        match inputs {
            // SAFETY: no other worker writes it in this phase; see the table at the head of this file.
            Inputs::Plain => use_it(unsafe { self.read(mixed, row, channels) }),
            Inputs::Gated => {
                // SAFETY: no other worker writes it in this phase; see the table at the head of this file.
                let row = unsafe { self.read(mixed, row, 3 * channels) };
                let gated = &mut self.scratch.conv_input[..channels];
                gated.copy_from_slice(&row[..channels]);
                self.model.rows.multiply(gated, &row[2 * channels..]);
                use_it(gated);
            }
        }
    }

    /// Activation and norms of queries, keys and values; decays and strengths of a row.
    fn finish_inputs(&mut self, op: &DeltaRule, row: usize, x: &mut [f32]) {
        let (model, recurrent) = (self.model, &self.buffers.recurrent);
        let shape = &op.shape;
        model.rows.activate(x, Activation::Silu);
        let scale = 1.0 / (shape.key_dim as f32).sqrt();
        let (queries, rest) = x.split_at_mut(shape.key_width());
        for head in queries.chunks_exact_mut(shape.key_dim) {
            model.delta.unit_norm(head, DeltaRule::EPS, scale);
        }
        for head in rest[..shape.key_width()].chunks_exact_mut(shape.key_dim) {
            model.delta.unit_norm(head, DeltaRule::EPS, 1.0);
        }
        // SAFETY: the phase is shared by row; see the table at the head of this file.
        let (decays, betas) = (
            unsafe { self.write(&recurrent.decay, row, shape.value_heads) },
            // SAFETY: the phase is shared by row; see the table at the head of this file.
            unsafe { self.write(&recurrent.beta, row, shape.value_heads) },
        );
        self.add_row_bias(op.alpha.bias, decays);
        self.add_row_bias(op.beta.bias, betas);
        let constants = model.vector(op.decay).iter().zip(model.vector(op.dt));
        for ((decay, beta), (constant, dt)) in decays.iter_mut().zip(betas).zip(constants) {
            let x = *decay + dt;
            *decay = constant * (x.max(0.0) + (-x.abs()).exp().ln_1p());
            *beta = 1.0 / (1.0 + (-*beta).exp());
        }
    }

    /// All rows of a sequence in some blocks of columns of a value head.
    fn delta_head(&mut self, op: &ValueHeads<'_>, index: usize, head: usize, columns: Range<usize>) {
        let (model, recurrent) = (self.model, &self.buffers.recurrent);
        let sequence = &self.step.sequences[index];
        let (state, place, shape) = (state_of(sequence), self.states.place(op.state), op.shape);
        let start = sequence.start;
        let (matrices, updates) = (place.matrices(head, &columns), place.updates(head, &columns));
        // SAFETY: only this worker has these columns of this head in this phase, and no sequence of the step reads a
        // state that another one writes.
        let (matrices_mut, updates_mut) = unsafe {
            let states = self.states;
            (states.get_mut(state.write, matrices.clone()), states.get_mut(state.write, updates.clone()))
        };
        if start > 0 && copies_from(state) {
            // SAFETY: nobody writes the state that is read.
            unsafe {
                if start > STATE_CHUNK {
                    matrices_mut.copy_from_slice(self.states.get(state.read, matrices));
                }
                updates_mut.copy_from_slice(self.states.get(state.read, updates));
            }
        }
        let mut tiles = Tiles { matrices: matrices_mut, updates: updates_mut };
        let key_head = op.key_head(head);
        let key = key_head * shape.key_dim..(key_head + 1) * shape.key_dim;
        let scratch = &mut self.scratch.delta;
        // Keys and decays of the rows of the open chunk, which is full if this step's first row begins another one. A scan
        // only needs keys to fold them.
        let open = if start == 0 { 0 } else { (start - 1) % STATE_CHUNK + 1 };
        let folds = (sequence.len() - 1) / STATE_CHUNK > (start.max(1) - 1) / STATE_CHUNK;
        let needs_keys = folds || matches!(op.rule, Rule::Delta(_));
        for row in 0..if needs_keys { open } else { 0 } {
            // SAFETY: nobody writes keys or decays of states in this phase.
            scratch.set_key(row, unsafe { &self.states.get(state.read, place.keys(row))[key.clone()] });
        }
        // SAFETY: as above.
        let decays = unsafe { self.states.get(state.read, place.decays(head, 0..open)) };
        scratch.decays[..open].copy_from_slice(decays);

        let (stride, heads) = (shape.channels(), shape.value_heads);
        let first_column = columns.start * LANES;
        let width = (columns.len() * LANES).min(shape.value_dim - first_column);
        let value = 2 * shape.key_width() + head * shape.value_dim + first_column;
        let mut done = 0;
        while done < sequence.rows.len() {
            let (position, row) = (start + done, sequence.rows.start + done);
            let first = position % STATE_CHUNK;
            let rows = (STATE_CHUNK - first).min(sequence.rows.len() - done);
            if first == 0 && position > 0 {
                model.delta.fold(position > STATE_CHUNK, shape.key_dim, &mut tiles, scratch);
            }
            // SAFETY: only read in this phase.
            let inputs = unsafe { recurrent.convolved.get(row * stride..(row + rows) * stride) };
            // SAFETY: only read in this phase.
            let betas = unsafe { recurrent.beta.get(row * heads..(row + rows) * heads) };
            for index in 0..rows {
                let keys = &inputs[index * stride + shape.key_width()..][..shape.key_width()];
                if needs_keys {
                    scratch.set_key(first + index, &keys[key.clone()]);
                }
                let decay = self.buffers.recurrent.decay_of(row + index, head, heads);
                let before = if first + index == 0 { 0.0 } else { scratch.decays[first + index - 1] };
                scratch.decays[first + index] = before + decay;
            }
            let piece = Piece {
                first,
                rows,
                has_matrices: position >= STATE_CHUNK,
                queries: &inputs[key.start..],
                values: &inputs[value..],
                stride,
                beta: &betas[head..],
                beta_stride: heads,
                key_dim: shape.key_dim,
                columns: width,
            };
            match op.rule {
                Rule::Delta(_) => model.delta.rows(&piece, &mut tiles, scratch),
                Rule::Scan(_) => {
                    let stride = shape.key_heads * STATE_CHUNK;
                    // SAFETY: only read in this phase.
                    let dots = unsafe { recurrent.dots.get(row * stride..(row + rows) * stride) };
                    model.delta.scan(&piece, &dots[key_head * STATE_CHUNK..], stride, &mut tiles, scratch);
                }
            }
            let all = columns.len() * LANES;
            for (index, result) in scratch.out.chunks_exact(all).take(rows).enumerate() {
                let at = (row + index) * shape.value_width() + head * shape.value_dim + first_column;
                // SAFETY: only this worker has these columns of this row in this phase.
                let out = unsafe { recurrent.out.get_mut(at..at + width) };
                out.copy_from_slice(&result[..width]);
            }
            done += rows;
        }
    }

    /// Keeps the last inputs of a convolution in the state.
    pub fn keep_inputs(&mut self, index: usize, layer: usize, inputs: Inputs) {
        let place = self.states.place(layer);
        let sequence = &self.step.sequences[index];
        let (state, start, end) = (state_of(sequence), sequence.start, sequence.len());
        for position in end.saturating_sub(place.rows())..end {
            let part = place.input(position);
            if position >= start {
                let row = sequence.rows.start + position - start;
                self.with_input(row, place.channels(), inputs, |input| {
                    // SAFETY: only this worker has this sequence's states in this phase.
                    unsafe { self.states.get_mut(state.write, part) }.copy_from_slice(input);
                });
            } else if copies_from(state) {
                self.copy(state, part);
            }
        }
    }

    /// Keeps keys and decays of the rows of the open chunk in the state.
    pub fn keep_rows(&self, shape: &DeltaShape, layer: usize, index: usize) {
        let place = self.states.place(layer);
        let sequence = &self.step.sequences[index];
        let (state, start, end) = (state_of(sequence), sequence.start, sequence.len());
        let chunk = (end - 1) / STATE_CHUNK * STATE_CHUNK;
        let kept = if copies_from(state) { chunk..start.max(chunk) } else { chunk..chunk };
        for position in kept.clone() {
            self.copy(state, place.keys(position - chunk));
        }
        let new = start.max(chunk)..end;
        for position in new.clone() {
            let row = sequence.rows.start + position - start;
            // SAFETY: no other worker writes it in this phase; see the table at the head of this file.
            let inputs = unsafe { self.read(&self.buffers.recurrent.convolved, row, shape.channels()) };
            let keys = &inputs[shape.key_width()..2 * shape.key_width()];
            // SAFETY: only this worker has this sequence's states in this phase.
            unsafe { self.states.get_mut(state.write, place.keys(position - chunk)) }.copy_from_slice(keys);
        }
        for head in 0..shape.value_heads {
            self.copy(state, place.decays(head, 0..kept.len()));
            // SAFETY: as above.
            let decays = unsafe { self.states.get_mut(state.write, place.decays(head, 0..end - chunk)) };
            for position in new.clone() {
                let row = sequence.rows.start + position - start;
                let decay = self.buffers.recurrent.decay_of(row, head, shape.value_heads);
                let before = if position == chunk { 0.0 } else { decays[position - chunk - 1] };
                decays[position - chunk] = before + decay;
            }
        }
    }

    /// Copies a part of the state that is read to the one that is written.
    fn copy(&self, state: StateUse, part: Range<usize>) {
        if part.is_empty() {
            return;
        }
        // SAFETY: only this worker has this sequence's states in this phase, and nobody writes the one that is read.
        let (from, to) =
            unsafe { (self.states.get(state.read, part.clone()), self.states.get_mut(state.write, part)) };
        to.copy_from_slice(from);
    }
}
