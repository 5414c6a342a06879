//! The scan of Mamba-2, as phases of the thread pool. It shares the kernels and the state of the delta rule; its B, C and x
//! are the keys, queries and values.
//!
//! | phase | shared by | reads | writes |
//! |-|-|-|-|
//! | add, norm, quantize | row | `branch_outputs`, `x` | `x`, `rows` |
//! | C, B and x; z; d | 16 outputs | `rows` | `mixed`, `z`, `decay` |
//! | biases, if there are any | row | `mixed` | `mixed` |
//! | convolve | row | `mixed`, states | `convolved`, `decay`, `beta` |
//! | products of C and B | row | `convolved`, states | `dots` |
//! | scan | sequence, value head, columns | `convolved`, `dots`, `decay`, `beta`, states | matrices and updates of states, `out` |
//! | skip, gate, norm, quantize | row | `out`, `convolved`, `z` | `rows` |
//! | keep | sequence | `mixed`, `convolved`, `decay`, states | inputs, keys and decays of states |
//! | project | 16 outputs | `rows` | `branch_outputs` |

use paguro_backend::{Activation, GatedNorm, GroupNorm, STATE_CHUNK, Ssd};

use crate::{
    pass::{Kernel, Pass},
    recurrent::{self, Inputs, Rule, ValueHeads, state_of},
    thread_pool::Chunking,
    worker::{AllPending, Kinds, Pending, Worker},
};

/// Computes the scan of Mamba-2. Returns its output, `[rows, hidden]`.
pub fn ssd(pass: &mut Pass<'_>, op: &Ssd, pending: AllPending, output: usize) -> Pending {
    let (model, buffers) = (pass.model, pass.buffers);
    let recurrent = &buffers.recurrent;
    let (channels, width) = (op.shape.channels(), op.shape.value_width());
    pass.add_norm(op.norm, pending, Kinds::of(model, &[op.cbv, op.gate, op.dt]));
    let inputs = [(op.cbv, &recurrent.mixed), (op.gate, &recurrent.z), (op.dt, &recurrent.decay)];
    pass.multiply(pass.rows(), inputs.map(|(linear, out)| (linear.matrix, out)));
    pass.add_bias(op.cbv, &recurrent.mixed, channels);
    pass.phase(Kernel::Convolve, pass.rows(), Chunking::Guided(1), |worker, range| {
        for row in range {
            // SAFETY: the phase is shared by row; see the table in `recurrent.rs`.
            let out = unsafe { worker.write(&recurrent.convolved, row, channels) };
            worker.convolve(&op.convolution, op.state, row, Inputs::Plain, out);
            model.rows.activate(out, Activation::Silu);
            worker.ssd_steps(op, row);
        }
    });
    pass.phase(Kernel::ScanDots, pass.rows(), Chunking::Guided(1), |worker, range| {
        for row in range {
            worker.ssd_dots(op, row);
        }
    });
    let heads = ValueHeads { shape: &op.shape, state: op.state, rule: Rule::Scan(op) };
    recurrent::delta_heads(pass, Kernel::Scan, &heads);
    let kinds = Kinds::of(model, &[op.out]);
    pass.phase(Kernel::NormGate, pass.rows(), Chunking::Guided(1), |worker, range| {
        for row in range {
            let mut normed = std::mem::take(&mut worker.scratch.row);
            worker.ssd_output(op, row, &mut normed[..width]);
            worker.set_input(&buffers.input, row, 0, &normed[..width], kinds, true);
            worker.scratch.row = normed;
        }
    });
    pass.phase(Kernel::Keep, pass.step.sequences.len(), Chunking::Single, |worker, range| {
        for sequence in range {
            worker.keep_inputs(sequence, op.state, Inputs::Plain);
            worker.keep_rows(&op.shape, op.state, sequence);
        }
    });
    pass.multiply(pass.rows(), [(op.out.matrix, &buffers.branch_outputs[output])]);
    Pending { output, bias: op.out.bias, post_norm: op.post_norm, scale: 1.0 }
}

impl Worker<'_> {
    /// Steps Δ of a row, and its decays.
    fn ssd_steps(&self, op: &Ssd, row: usize) {
        let (model, recurrent, heads) = (self.model, &self.buffers.recurrent, op.shape.value_heads);
        // SAFETY: the phase is shared by row; see the table in `recurrent.rs`.
        let (decays, steps) = (unsafe { self.write(&recurrent.decay, row, heads) }, unsafe {
            self.write(&recurrent.beta, row, heads)
        });
        self.add_row_bias(op.dt.bias, decays);
        let constants = model.vector(op.decay).iter().zip(model.vector(op.dt_bias));
        for ((decay, step), (constant, bias)) in decays.iter_mut().zip(steps).zip(constants) {
            let x = op.dt_scale * *decay + bias;
            let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
            *step = softplus.clamp(op.dt_limits.0, op.dt_limits.1);
            *decay = constant * *step;
        }
    }

    /// Products of a row's C with B of the chunk's rows up to this one, for each key head.
    fn ssd_dots(&self, op: &Ssd, row: usize) {
        let (recurrent, shape) = (&self.buffers.recurrent, &op.shape);
        let (key_width, key_dim) = (shape.key_width(), shape.key_dim);
        let sequence = &self.step.sequences[self.plan.sequence(row)];
        let (place, state) = (self.states.place(op.state), state_of(sequence));
        let position = self.plan.positions[row];
        // SAFETY: no other worker writes it in this phase; see the table in `recurrent.rs`.
        let c = &unsafe { self.read(&recurrent.convolved, row, shape.channels()) }[..key_width];
        // SAFETY: the phase is shared by row; see the table in `recurrent.rs`.
        let dots = unsafe { self.write(&recurrent.dots, row, shape.key_heads * STATE_CHUNK) };
        for index in 0..=position % STATE_CHUNK {
            let back = position % STATE_CHUNK - index;
            let b = match position - back < sequence.start {
                // SAFETY: nobody writes keys of states in this phase.
                true => unsafe { self.states.get(state.read, place.keys(index)) },
                false => {
                    // SAFETY: no other worker writes it in this phase; see the table in `recurrent.rs`.
                    let earlier = unsafe { self.read(&recurrent.convolved, row - back, shape.channels()) };
                    &earlier[key_width..2 * key_width]
                }
            };
            for (head, (c, b)) in c.chunks_exact(key_dim).zip(b.chunks_exact(key_dim)).enumerate() {
                dots[head * STATE_CHUNK + index] = self.model.delta.dot(c, b);
            }
        }
    }

    /// The scan's output with its skip connection, gate and norm.
    fn ssd_output(&self, op: &Ssd, row: usize, to: &mut [f32]) {
        let (model, recurrent, shape) = (self.model, &self.buffers.recurrent, &op.shape);
        let width = to.len();
        // SAFETY: the phase is shared by row; see the table in `recurrent.rs`.
        let out = unsafe { self.write(&recurrent.out, row, width) };
        // SAFETY: no other worker writes it in this phase; see the table in `recurrent.rs`.
        let values =
            &unsafe { self.read(&recurrent.convolved, row, shape.channels()) }[2 * shape.key_width()..];
        let heads = out.chunks_exact_mut(shape.value_dim).zip(values.chunks_exact(shape.value_dim));
        for ((out, values), &skip) in heads.zip(model.vector(op.skip)) {
            model.rows.add_scaled(out, values, skip);
        }
        // SAFETY: the phase is shared by row; see the table in `recurrent.rs`.
        let gates = unsafe { self.write(&recurrent.z, row, width) };
        self.add_row_bias(op.gate.bias, gates);
        if op.gate_scale != 1.0 {
            model.rows.scale(gates, op.gate_scale);
        }
        model.rows.activate(gates, Activation::Silu);
        let norm = |GroupNorm { groups, weight, eps }: &GroupNorm, out: &[f32], to: &mut [f32]| {
            let size = width / groups;
            let weights = model.vector(*weight).chunks_exact(size);
            let both = out.chunks_exact(size).zip(to.chunks_exact_mut(size));
            both.zip(weights).for_each(|((out, to), weights)| model.rows.rms_norm(out, weights, *eps, to));
        };
        match &op.out_norm {
            GatedNorm::GateOnly => {
                to.copy_from_slice(out);
                model.rows.multiply(to, gates);
            }
            GatedNorm::AfterGate(group_norm) => {
                model.rows.multiply(out, gates);
                norm(group_norm, out, to);
            }
            GatedNorm::BeforeGate(group_norm) => {
                norm(group_norm, out, to);
                model.rows.multiply(to, gates);
            }
        }
    }
}
