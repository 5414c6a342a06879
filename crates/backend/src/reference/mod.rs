//! The naive backend that defines what every operation means.
//!
//! It decodes all weights to f32, sums in f64, goes row by row and is slow: read it as documentation. The
//! [`conformance`](mod@crate::conformance) suite compares every other backend with it.

mod attention;
pub mod ops;
mod pages;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

pub use attention::{AttentionShape, attention};
pub use pages::KvRounding;
pub(crate) use pages::RoundFn;
use pages::{Arena, Half, rounding};
#[cfg(test)]
pub(crate) use pages::{round_f16, round_q8};

use crate::{
    Attend, AttentionMode, Backend, Capacity, DownAdd, Embed, KernelCount, KvDtype, Limits, Linear,
    LoadError, Matrix, Norm, NormGateUp, NormLogits, NormQkvRopeStore, Op, Outcome, Output, PageMove,
    Program, ProjectAdd, Runner, Step, StepError, StepOutput, Ticket, Want, Weights,
    sampling::{self, Scratch},
};

/// The reference as a backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference {
    /// How K and V are rounded in pages of [`KvDtype::F16`].
    pub kv: KvRounding,
    /// Fills new pages with large finite noise from this seed, so that a read of what was never written shows.
    pub poison: Option<u64>,
}

impl Backend for Reference {
    fn name(&self) -> &str {
        "reference"
    }

    fn capacity(&self) -> Capacity {
        Capacity {
            description: "naive reference, one thread, f64 sums".to_owned(),
            bytes_free: u64::MAX,
            features: Vec::new(),
        }
    }

    fn page_bytes(&self, program: &Program, block_size: usize, _: KvDtype) -> usize {
        // Rounded, but kept in single precision.
        program.kv.page_elements(block_size) * size_of::<f32>()
    }

    fn buffer_bytes(&self, _: &Program, _: &Limits) -> u64 {
        // Allocated row by row, while it computes.
        0
    }

    fn load(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        Ok(Box::new(self.load_with(
            attention,
            rounding(limits.kv_dtype, self.kv),
            program,
            weights,
            limits,
        )?))
    }
}

impl Reference {
    /// Loads with other functions for attention and rounding: mutation tests put in wrong ones.
    pub(crate) fn load_with(
        &self,
        attention: AttentionFn,
        round: RoundFn,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<ReferenceRunner, LoadError> {
        program.check(&weights)?;
        let decode = |matrix: &Matrix| {
            let bytes = matrix.read()?;
            matrix.check_finite(&bytes, 0)?;
            let mut decoded = vec![0.0; matrix.rows * matrix.cols];
            matrix.format.dequantize(&bytes, &mut decoded);
            Ok(decoded)
        };
        let matrices = weights.matrices.iter().map(decode).collect::<Result<_, LoadError>>()?;
        weights.check_unchanged()?;
        Ok(ReferenceRunner {
            arena: Arena::new(&program.kv, &limits, round, self.poison),
            program: Arc::new(program.clone()),
            matrices,
            vectors: weights.vectors,
            limits,
            attention,
            sampler: Scratch::default(),
            answers: Vec::new(),
            in_flight: VecDeque::new(),
            carried: Vec::new(),
            submitted: 0,
            launches: BTreeMap::new(),
        })
    }
}

/// The type of [`attention()`].
pub(crate) type AttentionFn = fn(&[f32], &[f32], &[f32], &AttentionShape, &mut [f32]);

/// A loaded model.
pub(crate) struct ReferenceRunner {
    program: Arc<Program>,
    /// `[rows, cols]` each, by [`MatrixId`](crate::MatrixId).
    matrices: Vec<Vec<f32>>,
    vectors: Vec<Vec<f32>>,
    limits: Limits,
    arena: Arena,
    attention: AttentionFn,
    sampler: Scratch,
    /// The answers of the step that is being computed.
    answers: Vec<Outcome>,
    /// Those of steps that were not collected.
    in_flight: VecDeque<(Ticket, Vec<Outcome>)>,
    /// Tokens of the last step that the next one may begin with, by output.
    carried: Vec<Option<u32>>,
    /// Number of steps submitted, and the ticket of the last one.
    submitted: u64,
    launches: BTreeMap<&'static str, u64>,
}

impl Runner for ReferenceRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        step.validate(&self.program, &self.limits)?;
        if self.in_flight.len() > usize::from(!step.carried.is_empty()) {
            return Err(StepError::Invalid("the step before was not collected".into()));
        }
        let mut tokens = step.tokens.to_vec();
        for carried in step.carried {
            let token = self.carried.get(carried.output).copied().flatten();
            tokens[carried.row] = token.ok_or_else(|| {
                StepError::Invalid(format!("output {} of the step before was not carried", carried.output))
            })?;
        }
        self.forward(&Step { tokens: &tokens, ..*step });
        let answers = std::mem::take(&mut self.answers);
        let token = |(output, answer): (&Output<'_>, &Outcome)| match answer {
            Outcome::Sampled(sampled) if self.carries(&output.want) => Some(sampled.token),
            _ => None,
        };
        self.carried = step.outputs.iter().zip(&answers).map(token).collect();
        self.submitted += 1;
        self.in_flight.push_back((Ticket(self.submitted), answers));
        Ok(Ticket(self.submitted))
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), StepError> {
        match self.in_flight.pop_front_if(|(first, _)| *first == ticket) {
            Some((_, answers)) => out.outcomes = answers,
            None => {
                let message = format!("step {} was collected or never submitted", ticket.0);
                return Err(StepError::Invalid(message));
            }
        }
        Ok(())
    }

    fn carries(&self, want: &Want<'_>) -> bool {
        // Penalties would need the token that is carried.
        matches!(want, Want::Sample(request) if request.mask.is_none() && !request.params.penalizes())
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError> {
        for &PageMove::Copy { from, to } in moves {
            let pages = self.arena.pages();
            if from.0 as usize >= pages || to.0 as usize >= pages {
                return Err(StepError::Invalid(format!(
                    "cannot copy page {} to {} of {pages}",
                    from.0, to.0
                )));
            }
            self.arena.copy(from, to);
        }
        Ok(())
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        let counts = self.launches.iter();
        counts
            .map(|(name, &launches)| KernelCount {
                name: format!("{name}/reference"),
                launches,
                nanoseconds: 0,
            })
            .collect()
    }
}

/// Activations of one pass, each `[rows, its own width]`.
struct Activations {
    /// The residual stream, `[rows, hidden]`.
    x: Vec<f32>,
    /// Queries, `[rows, heads * head_dim]`.
    q: Vec<f32>,
    /// What attention gave, `[rows, heads * head_dim]`.
    a: Vec<f32>,
    /// Activated gate times up, `[rows, ffn]`.
    g: Vec<f32>,
}

impl ReferenceRunner {
    /// Runs the program, and answers the outputs at its end.
    fn forward(&mut self, step: &Step<'_>) {
        let program = Arc::clone(&self.program);
        let mut state = Activations { x: Vec::new(), q: Vec::new(), a: Vec::new(), g: Vec::new() };
        for op in &program.ops {
            match op {
                Op::Embed(op) => self.embed(op, step, &mut state),
                Op::NormQkvRopeStore(op) => self.norm_qkv_rope_store(op, step, &mut state),
                Op::Attend(op) => self.attend(op, step, &mut state),
                Op::ProjectAdd(op) => self.project_add(op, &mut state),
                Op::NormGateUp(op) => self.norm_gate_up(op, &mut state),
                Op::DownAdd(op) => self.down_add(op, &mut state),
                Op::NormLogits(op) => self.norm_logits(op, step, &state),
            }
            let kernel = match (op, self.limits.attention) {
                (Op::Attend(_), AttentionMode::Gather) => "attend_gather",
                _ => op.name(),
            };
            *self.launches.entry(kernel).or_default() += 1;
        }
    }

    fn embed(&self, op: &Embed, step: &Step<'_>, state: &mut Activations) {
        let table = &self.matrices[op.table.0 as usize];
        let hidden = self.program.hidden;
        let rows = step.tokens.iter().flat_map(|&token| &table[token as usize * hidden..][..hidden]);
        state.x = rows.map(|x| x * op.scale).collect();
    }

    fn norm_qkv_rope_store(&mut self, op: &NormQkvRopeStore, step: &Step<'_>, state: &mut Activations) {
        let head_dim = self.program.kv.head_dim;
        state.q.clear();
        for sequence in step.sequences {
            let table = sequence.table(step.pages, op.kv.group, self.program.kv.groups.len());
            for (position, row) in (sequence.start..).zip(sequence.rows.clone()) {
                let h = self.norm(&op.norm, row_of(&state.x, row, self.program.hidden));
                let mut q = self.linear(&op.q, &h);
                let mut k = self.linear(&op.k, &h);
                let v = self.linear(&op.v, &h);
                for (heads, norm) in [(&mut q, &op.q_norm), (&mut k, &op.k_norm)] {
                    for head in heads.chunks_exact_mut(head_dim) {
                        if let Some(norm) = norm {
                            head.copy_from_slice(&self.norm(norm, head));
                        }
                        ops::rotate(head, position, &self.program.ropes[op.rope]);
                    }
                }
                self.arena.store(table, op.kv, Half::K, position, &k);
                self.arena.store(table, op.kv, Half::V, position, &v);
                state.q.extend(q);
            }
        }
    }

    fn attend(&self, op: &Attend, step: &Step<'_>, state: &mut Activations) {
        let kv = &self.program.kv;
        let width = self.program.heads * kv.head_dim;
        state.a.clear();
        state.a.resize(state.q.len(), 0.0);
        for sequence in step.sequences {
            let table = sequence.table(step.pages, op.kv.group, kv.groups.len());
            let shape = AttentionShape {
                heads: self.program.heads,
                kv_heads: kv.kv_heads,
                head_dim: kv.head_dim,
                start: sequence.start,
                scale: op.scale,
                soft_cap: op.soft_cap,
                window: kv.groups[op.kv.group].window,
            };
            let rows = sequence.rows.start * width..sequence.rows.end * width;
            let k = self.arena.gather(table, op.kv, Half::K);
            let v = self.arena.gather(table, op.kv, Half::V);
            (self.attention)(&state.q[rows.clone()], &k, &v, &shape, &mut state.a[rows]);
        }
    }

    fn project_add(&self, op: &ProjectAdd, state: &mut Activations) {
        let width = self.program.heads * self.program.kv.head_dim;
        for (x, a) in state.x.chunks_exact_mut(self.program.hidden).zip(state.a.chunks_exact(width)) {
            self.add(x, self.linear(&op.project, a), op.post_norm.as_ref());
        }
    }

    fn norm_gate_up(&self, op: &NormGateUp, state: &mut Activations) {
        state.g.clear();
        for x in state.x.chunks_exact(self.program.hidden) {
            let h = self.norm(&op.norm, x);
            let gate = self.linear(&op.gate, &h);
            let up = self.linear(&op.up, &h);
            state.g.extend(gate.iter().zip(&up).map(|(&gate, up)| ops::activate(gate, op.activation) * up));
        }
    }

    fn down_add(&self, op: &DownAdd, state: &mut Activations) {
        for (x, g) in
            state.x.chunks_exact_mut(self.program.hidden).zip(state.g.chunks_exact(self.program.ffn))
        {
            self.add(x, self.linear(&op.down, g), op.post_norm.as_ref());
        }
    }

    fn norm_logits(&mut self, op: &NormLogits, step: &Step<'_>, state: &Activations) {
        for output in step.outputs {
            let h = self.norm(&op.norm, row_of(&state.x, output.row, self.program.hidden));
            let mut logits = self.linear(&op.head, &h);
            if let Some(cap) = op.soft_cap {
                logits.iter_mut().for_each(|x| *x = ops::soft_cap(*x, cap));
            }
            let answer = sampling::answer(&logits, &output.want, &mut self.sampler);
            self.answers.push(answer.unwrap_or(Outcome::Embedding(h)));
        }
    }

    /// `x += post_norm(y)`
    fn add(&self, x: &mut [f32], y: Vec<f32>, post_norm: Option<&Norm>) {
        let y = post_norm.map_or_else(|| y.clone(), |norm| self.norm(norm, &y));
        x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
    }

    fn norm(&self, norm: &Norm, x: &[f32]) -> Vec<f32> {
        let mut out = x.to_vec();
        ops::rms_norm(&mut out, &self.vectors[norm.weight.0 as usize], norm.eps);
        out
    }

    fn linear(&self, linear: &Linear, x: &[f32]) -> Vec<f32> {
        let matrix = &self.matrices[linear.matrix.0 as usize];
        let bias = linear.bias.map(|bias| &self.vectors[bias.0 as usize][..]);
        let mut out = vec![0.0; matrix.len() / x.len()];
        ops::linear(x, matrix, bias, &mut out);
        out
    }
}

/// Row `row` of `[rows, width]`.
fn row_of(x: &[f32], row: usize, width: usize) -> &[f32] {
    &x[row * width..][..width]
}
