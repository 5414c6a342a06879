//! The naive backend that defines every operation.
//!
//! It decodes all weights to f32, sums in f64, processes one row after the other and is slow: read it as documentation.
//! The conformance suite compares every other backend with it.

mod attention;
mod latent;
pub mod ops;
mod pages;
pub mod recurrent;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

pub use attention::{AttentionShape, HeadVectors, attention};
use pages::{Arena, Half, rounding};
pub use pages::{KvRounding, RoundFn, round_f16, round_q4, round_q8};
use recurrent::{States, delta_gates, delta_inputs};

use crate::{
    Activation, Attention, AttentionMode, Backend, Capacity, Convolution, DeltaRule, Dense, Experts,
    FeedForward, Head, KernelCount, KvDtype, Layer, LayerEmbeds, LayerInput, Limits, Linear, LoadError,
    Matrix, MatrixId, Mixer, Norm, Outcome, Output, PageContent, PageFormat, PageId, PageMove, Program,
    QkNormKind, Residual, Runner, SharedExpert, ShortConv, StateUse, Step, StepError, StepOutput,
    StepSequence, Ticket, VectorId, Want, Weights,
    sampling::{self, Scratch},
};

/// The reference as a backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference {
    /// Rounding of K and V in pages of [`KvDtype::F16`].
    pub kv: KvRounding,
    /// Fills new pages with large finite noise from this seed, so that reads of unwritten data are detected.
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
        // Rounded, but stored in single precision.
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
    /// Loads with other functions for attention and rounding: tests of the conformance suite put in wrong ones.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn load_with(
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
            let mut decoded = vec![0.0; matrix.parts * matrix.rows * matrix.cols];
            matrix.format.dequantize(&bytes, &mut decoded);
            Ok(decoded)
        };
        let matrices = weights.matrices.iter().map(decode).collect::<Result<_, LoadError>>()?;
        weights.check_unchanged()?;
        Ok(ReferenceRunner {
            tables: weights.tables,
            arena: Arena::new(&program.kv, &limits, round, self.poison),
            states: States::new(&program.state, &limits, self.poison),
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
pub type AttentionFn = fn(&[f32], &[f32], &[f32], HeadVectors<'_>, &AttentionShape, &mut [f32]);

/// A loaded model.
pub struct ReferenceRunner {
    program: Arc<Program>,
    /// `[parts, rows, cols]` each, by [`MatrixId`].
    matrices: Vec<Vec<f32>>,
    vectors: Vec<Vec<f32>>,
    tables: Vec<Matrix>,
    limits: Limits,
    arena: Arena,
    states: States,
    attention: AttentionFn,
    sampler: Scratch,
    /// The answers of the step that is being computed.
    answers: Vec<Outcome>,
    /// Outputs of steps that were not collected.
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
        self.forward(&Step { tokens: &tokens, ..*step })?;
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
        let parts = self.states.numbers().div_ceil(self.arena.page_numbers());
        for &page_move in moves {
            page_move.check(&self.limits, parts)?;
            match page_move {
                PageMove::Copy { from, to } => self.arena.copy(from, to),
                PageMove::SaveState { state, part, to } => {
                    self.states.part(state, part, self.arena.page_mut(to), |number, page| *page = *number);
                }
                PageMove::RestoreState { from, part, state } => {
                    self.states.part(state, part, self.arena.page_mut(from), |number, page| *number = *page);
                }
            }
        }
        Ok(())
    }

    fn page_format(&self) -> Option<PageFormat> {
        let Limits { block_size, kv_dtype, .. } = self.limits;
        let name = format!("reference {kv_dtype:?} {block_size} {}", crate::page_io::SOURCES);
        Some(PageFormat { name, page_bytes: self.arena.page_numbers() * size_of::<f32>() })
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), StepError> {
        let bytes = self.arena.page_numbers() * size_of::<f32>();
        self.page_format().into_iter().try_for_each(|format| format.check(pages, out.len(), &self.limits))?;
        pages.iter().zip(out.chunks_exact_mut(bytes)).for_each(|(&page, out)| self.arena.read(page, out));
        Ok(())
    }

    fn write_pages(&mut self, pages: &[PageId], bytes: &[u8], _: PageContent) -> Result<(), StepError> {
        let page_bytes = self.arena.page_numbers() * size_of::<f32>();
        self.page_format()
            .into_iter()
            .try_for_each(|format| format.check(pages, bytes.len(), &self.limits))?;
        pages
            .iter()
            .zip(bytes.chunks_exact(page_bytes))
            .for_each(|(&page, from)| self.arena.write(page, from));
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

impl ReferenceRunner {
    /// Runs the program, and answers the outputs at its end.
    fn forward(&mut self, step: &Step<'_>) -> Result<(), StepError> {
        let program = Arc::clone(&self.program);
        // The residual stream, one vector for each row.
        let mut x: Vec<Vec<f32>> = Vec::with_capacity(step.tokens.len());
        for sequence in step.sequences {
            let rows = (sequence.start..).zip(sequence.rows.clone());
            x.extend(rows.map(|(position, row)| self.embed(step.tokens[row], position)));
        }
        self.count("embed");
        let embeds = self.layer_embeds(step, &x)?;
        for layer in &program.layers {
            self.layer(layer, step, &mut x);
            self.layer_end(layer, &embeds, &mut x);
        }
        self.head(&program.head, step, &x);
        self.count("head");
        Ok(())
    }

    /// Embeddings for layers of all rows, `[count * width]` each; none without [`LayerEmbeds`].
    fn layer_embeds(&self, step: &Step<'_>, x: &[Vec<f32>]) -> Result<Vec<Vec<f32>>, StepError> {
        let Some(LayerEmbeds { table, scale, count, width, projection, norm }) = &self.program.embed.layers
        else {
            return Ok(Vec::new());
        };
        let table = &self.tables[table.0 as usize];
        let of_row = |(x, &token): (&Vec<f32>, &u32)| {
            let mut own = vec![0.0; count * width];
            table.decode_row(token as usize, &mut Vec::new(), &mut own)?;
            let projected = self.linear(projection, x);
            for (own, projected) in own.chunks_exact_mut(*width).zip(projected.chunks_exact(*width)) {
                let normed = self.norm(norm, projected);
                own.iter_mut().zip(normed).for_each(|(own, normed)| *own = normed + scale * *own);
            }
            Ok(own)
        };
        let rows = x.iter().zip(step.tokens).map(of_row).collect::<Result<_, StepError>>()?;
        table.check_source()?;
        Ok(rows)
    }

    /// Adds the layer's own embedding, if it has one, and scales the residual stream: the end of a layer, after both branches.
    fn layer_end(&mut self, layer: &Layer, embeds: &[Vec<f32>], x: &mut [Vec<f32>]) {
        if let Some(LayerInput { index, gate, activation, out, post_norm }) = &layer.input {
            for (x, embed) in x.iter_mut().zip(embeds) {
                let gate = self.linear(gate, x);
                let embed = &embed[index * gate.len()..][..gate.len()];
                let gated: Vec<f32> = gate
                    .iter()
                    .zip(embed)
                    .map(|(&gate, &embed)| ops::activate(Some(gate), embed, *activation))
                    .collect();
                let added = self.optional_norm(*post_norm, &self.linear(out, &gated));
                x.iter_mut().zip(added).for_each(|(x, added)| *x += added);
            }
            self.count("layer_input");
        }
        if layer.output_scale != 1.0 {
            x.iter_mut().flatten().for_each(|x| *x *= layer.output_scale);
        }
    }

    fn layer(&mut self, layer: &Layer, step: &Step<'_>, x: &mut [Vec<f32>]) {
        let mixed = self.mix(&layer.mixer, step, x);
        if layer.residual == Residual::Sequential {
            add(x, &mixed, layer.branch_scale);
        }
        self.norm_rows(layer.norm_after_mixer, x);
        let fed: Vec<Vec<f32>> = match &layer.ffn {
            FeedForward::None => Vec::new(),
            FeedForward::Dense(dense) => x.iter().map(|x| self.dense(dense, x)).collect(),
            FeedForward::Experts(experts) => x.iter().map(|x| self.experts(experts, x)).collect(),
        };
        match &layer.ffn {
            FeedForward::None => {}
            FeedForward::Dense(_) => self.count("dense"),
            FeedForward::Experts(_) => self.count("experts"),
        }
        if layer.residual == Residual::Parallel {
            add(x, &mixed, layer.branch_scale);
        }
        add(x, &fed, layer.branch_scale);
        self.norm_rows(layer.norm_after_ffn, x);
    }

    /// Norms rows in place, if there is a norm.
    fn norm_rows(&self, norm: Option<Norm>, x: &mut [Vec<f32>]) {
        if let Some(norm) = norm {
            x.iter_mut().for_each(|x| *x = self.norm(&norm, x));
        }
    }

    /// Returns the output of a mixer for each row.
    fn mix(&mut self, mixer: &Mixer, step: &Step<'_>, x: &[Vec<f32>]) -> Vec<Vec<f32>> {
        match mixer {
            Mixer::None => Vec::new(),
            Mixer::Attention(attention) => self.attention(attention, step, x),
            Mixer::Latent(latent) => self.latent(latent, step, x),
            Mixer::Conv(conv) => self.conv(conv, step, x),
            Mixer::DeltaRule(delta) => self.delta(delta, step, x),
            Mixer::Ssd(ssd) => self.ssd(ssd, step, x),
            Mixer::Sum(branches) => {
                let mut sum = vec![vec![0.0; self.program.hidden]; x.len()];
                for branch in branches {
                    add(&mut sum, &self.mix(&branch.mixer, step, x), branch.scale);
                }
                sum
            }
        }
    }

    fn embed(&self, token: u32, position: usize) -> Vec<f32> {
        let (embed, hidden) = (&self.program.embed, self.program.hidden);
        let row = |table: MatrixId, row: usize| &self.matrices[table.0 as usize][row * hidden..][..hidden];
        let (kind, token) = (token as usize / self.program.vocab, token as usize % self.program.vocab);
        let mut x: Vec<f32> = row(embed.table, token).iter().map(|x| x * embed.scale).collect();
        if let Some(positions) = &embed.positions {
            x.iter_mut().zip(row(positions.table, position)).for_each(|(x, y)| *x += y);
        }
        if let Some(types) = &embed.types {
            let of_type = &self.vector(types.table)[kind * hidden..][..hidden];
            x.iter_mut().zip(of_type).for_each(|(x, y)| *x += y);
        }
        self.optional_norm(embed.norm, &x)
    }

    /// Returns the output of attention for each row.
    fn attention(&mut self, op: &Attention, step: &Step<'_>, x: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let groups = self.program.kv.groups.len();
        let mut added = Vec::with_capacity(x.len());
        for sequence in step.sequences {
            let table = sequence.table(step.pages, op.kv.group, groups);
            let mut queries = Vec::new();
            for (position, row) in (sequence.start..).zip(sequence.rows.clone()) {
                let h = self.optional_norm(op.norm, &x[row]);
                queries.extend(self.queries(op, &h, position));
                if let Some(k) = &op.k {
                    let [k, v] = self.keys_values(op, k, &h, position);
                    self.arena.store(table, op.kv, Half::K, position, &k);
                    self.arena.store(table, op.kv, Half::V, position, &v);
                }
            }
            let mut attended = self.attend(op, step, sequence, &queries);
            let width = op.heads * self.program.kv_group(op).head_dim;
            for (a, row) in attended.chunks_exact_mut(width).zip(sequence.rows.clone()) {
                if let Some(gate) = &op.gate {
                    let gate = self.linear(gate, &self.optional_norm(op.norm, &x[row]));
                    a.iter_mut().zip(gate).for_each(|(a, gate)| *a = ops::sigmoid_gate(gate, *a));
                }
                added.push(self.optional_norm(op.post_norm, &self.linear(&op.out, a)));
            }
        }
        self.count("store");
        self.count(match self.limits.attention {
            AttentionMode::Paged => "attend",
            AttentionMode::Gather => "attend_gather",
        });
        added
    }

    /// Queries of a row `h` at `position`, `[heads * head_dim]`.
    fn queries(&self, op: &Attention, h: &[f32], position: usize) -> Vec<f32> {
        let norm = op.qk_norm.map(|norm| (norm.q, norm.kind));
        let mut q = self.norm_and_rotate(op, self.linear(&op.q, h), norm, position);
        if let Some(scale) = &op.position_scale {
            let factor = ops::position_scale(scale, position);
            q.iter_mut().for_each(|q| *q *= factor);
        }
        q
    }

    /// Keys and values of a row `h` at `position`, `[kv_heads * head_dim]` each.
    fn keys_values(&self, op: &Attention, k: &Linear, h: &[f32], position: usize) -> [Vec<f32>; 2] {
        let k = self.linear(k, h);
        let mut v = op.v.map_or_else(|| k.clone(), |v| self.linear(&v, h));
        if let Some(norm) = &op.v_norm {
            for head in v.chunks_exact_mut(self.program.kv_group(op).head_dim) {
                head.copy_from_slice(&self.norm(norm, head));
            }
        }
        let norm = op.qk_norm.map(|norm| (norm.k, norm.kind));
        [self.norm_and_rotate(op, k, norm, position), v]
    }

    /// Norms and rotates a row of queries or keys.
    fn norm_and_rotate(
        &self,
        op: &Attention,
        mut row: Vec<f32>,
        norm: Option<(Norm, QkNormKind)>,
        position: usize,
    ) -> Vec<f32> {
        if let Some((norm, QkNormKind::Row)) = norm {
            row = self.norm(&norm, &row);
        }
        for head in row.chunks_exact_mut(self.program.kv_group(op).head_dim) {
            if let Some((norm, QkNormKind::Head)) = norm {
                head.copy_from_slice(&self.norm(&norm, head));
            }
            if let Some(rope) = op.rope {
                ops::rotate(head, position, &self.program.ropes[rope]);
            }
            if let Some((norm, QkNormKind::HeadAfterRope)) = norm {
                head.copy_from_slice(&self.norm(&norm, head));
            }
        }
        row
    }

    /// Attention of the rows of one sequence, `[rows, heads * head_dim]`.
    fn attend(&self, op: &Attention, step: &Step<'_>, sequence: &StepSequence, q: &[f32]) -> Vec<f32> {
        let group = self.program.kv_group(op);
        let table = sequence.table(step.pages, op.kv.group, self.program.kv.groups.len());
        let shape = AttentionShape {
            heads: op.heads,
            kv_heads: group.kv_heads,
            head_dim: group.head_dim,
            start: sequence.start,
            scale: op.scale,
            soft_cap: op.soft_cap,
            window: group.window,
            len: self.program.bidirectional.then(|| sequence.len()),
        };
        let k = self.arena.gather(table, op.kv, Half::K);
        let v = self.arena.gather(table, op.kv, Half::V);
        let vector = |id: Option<VectorId>| id.map(|id| self.vector(id));
        let vectors =
            HeadVectors { sinks: vector(op.sinks), biases: vector(op.distance_bias.map(|bias| bias.table)) };
        let mut out = vec![0.0; q.len()];
        (self.attention)(q, &k, &v, vectors, &shape, &mut out);
        out
    }

    /// Returns a short convolution's output, which is added to each row.
    fn conv(&mut self, op: &ShortConv, step: &Step<'_>, x: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let mut added = Vec::with_capacity(x.len());
        for sequence in step.sequences {
            let state = sequence.state.expect("validated");
            for (position, row) in (sequence.start..).zip(sequence.rows.clone()) {
                let input = self.linear(&op.input, &self.optional_norm(op.norm, &x[row]));
                let (b, rest) = input.split_at(op.width);
                let (c, u) = rest.split_at(op.width);
                let gated: Vec<f32> = b.iter().zip(u).map(|(b, u)| b * u).collect();
                let y = self.convolve(&op.convolution, state, (op.state, sequence.start), &gated, position);
                let y: Vec<f32> = c.iter().zip(y).map(|(c, y)| c * y).collect();
                added.push(self.optional_norm(op.post_norm, &self.linear(&op.out, &y)));
            }
        }
        self.count("conv");
        added
    }

    /// Returns a delta rule's output, which is added to each row.
    fn delta(&mut self, op: &DeltaRule, step: &Step<'_>, x: &[Vec<f32>]) -> Vec<Vec<f32>> {
        let mut added = Vec::with_capacity(x.len());
        for sequence in step.sequences {
            let state = sequence.state.expect("validated");
            for (position, row) in (sequence.start..).zip(sequence.rows.clone()) {
                let h = self.optional_norm(op.norm, &x[row]);
                let [mixed, gate, a, b] =
                    [&op.qkv, &op.gate, &op.alpha, &op.beta].map(|linear| self.linear(linear, &h));
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
                added.push(self.optional_norm(op.post_norm, &self.linear(&op.out, &out)));
            }
        }
        self.count("delta");
        added
    }

    /// The convolution of one row of a sequence whose step began at `start`, in the state of `layer`.
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

    /// Returns the output of a dense network for one row.
    fn dense(&self, op: &Dense, x: &[f32]) -> Vec<f32> {
        let h = self.optional_norm(op.norm, x);
        let gate = op.gate.map(|gate| self.linear(&gate, &h));
        let g = activated(gate.as_deref(), &self.linear(&op.up, &h), op.activation);
        self.optional_norm(op.post_norm, &self.linear(&op.down, &g))
    }

    /// Returns the output of a mixture of experts for one row.
    fn experts(&self, op: &Experts, x: &[f32]) -> Vec<f32> {
        let h = self.optional_norm(op.norm, x);
        let mut y = match &op.shared {
            Some(shared) => self.shared(shared, op, &h),
            None => vec![0.0; self.program.hidden],
        };
        let input = op.latent.map_or_else(|| h.clone(), |latent| self.linear(&latent.down, &h));
        let mut sum = vec![0.0; input.len()];
        let router = &op.router;
        let router_input = router.norm.map_or_else(|| h.clone(), |norm| self.norm(&norm, x));
        let logits = self.linear(&router.linear, &router_input);
        let scale = |expert: usize| router.expert_scale.map_or(1.0, |scale| self.vector(scale)[expert]);
        let bias = router.selection_bias.map(|bias| self.vector(bias));
        let chosen = ops::route(&logits, router, bias);
        for (expert, weight) in chosen {
            let gate = op.gate.map(|gate| self.part(&gate, expert, &input, op.width));
            let up = self.part(&op.up, expert, &input, op.width);
            let g = activated(gate.as_deref(), &up, op.activation);
            let out = self.part(&op.down, expert, &g, input.len());
            let weight = weight * scale(expert);
            sum.iter_mut().zip(out).for_each(|(sum, out)| *sum += weight * out);
        }
        let sum = op.latent.map_or_else(|| sum.clone(), |latent| self.linear(&latent.up, &sum));
        y.iter_mut().zip(sum).for_each(|(y, sum)| *y += sum);
        if let Some(beside) = &op.beside {
            y = self.norm(&beside.sum_norm, &y);
            y.iter_mut().zip(self.dense(&beside.dense, x)).for_each(|(y, dense)| *y += dense);
        }
        self.optional_norm(op.post_norm, &y)
    }

    fn shared(&self, op: &SharedExpert, experts: &Experts, h: &[f32]) -> Vec<f32> {
        let gate = op.gate.map(|gate| self.linear(&gate, h));
        let g = activated(gate.as_deref(), &self.linear(&op.up, h), experts.activation);
        let mut y = self.linear(&op.down, &g);
        if let Some(gate) = &op.output_gate {
            let factor = 1.0 / (1.0 + (-self.linear(gate, h)[0]).exp());
            y.iter_mut().for_each(|y| *y *= factor);
        }
        y
    }

    fn head(&mut self, op: &Head, step: &Step<'_>, x: &[Vec<f32>]) {
        for output in step.outputs {
            let h = self.norm(&op.norm, &x[output.row]);
            let mut logits = self.linear(&op.linear, &h);
            for logit in &mut logits {
                *logit *= op.scale;
                if let Some(cap) = op.soft_cap {
                    *logit = ops::soft_cap(*logit, cap);
                }
            }
            let answer = sampling::answer(&logits, &output.want, &mut self.sampler);
            self.answers.push(answer.unwrap_or(Outcome::Embedding(h)));
        }
    }

    fn count(&mut self, kernel: &'static str) {
        *self.launches.entry(kernel).or_default() += 1;
    }

    fn vector(&self, id: VectorId) -> &[f32] {
        &self.vectors[id.0 as usize]
    }

    fn norm(&self, norm: &Norm, x: &[f32]) -> Vec<f32> {
        let mut out = x.to_vec();
        let bias = norm.bias.map(|bias| self.vector(bias));
        ops::norm(&mut out, norm.kind, self.vector(norm.weight), bias, norm.eps);
        out
    }

    fn optional_norm(&self, norm: Option<Norm>, x: &[f32]) -> Vec<f32> {
        norm.map_or_else(|| x.to_vec(), |norm| self.norm(&norm, x))
    }

    fn linear(&self, linear: &Linear, x: &[f32]) -> Vec<f32> {
        let rows = self.matrices[linear.matrix.0 as usize].len() / x.len();
        self.part(linear, 0, x, rows)
    }

    /// Matrix `part` of a stack, each of `rows` rows.
    fn part(&self, linear: &Linear, part: usize, x: &[f32], rows: usize) -> Vec<f32> {
        let size = rows * x.len();
        let matrix = &self.matrices[linear.matrix.0 as usize][part * size..(part + 1) * size];
        let bias = linear.bias.map(|bias| &self.vector(bias)[part * rows..(part + 1) * rows]);
        let mut out = vec![0.0; rows];
        ops::linear(x, matrix, bias, &mut out);
        out
    }
}

/// The activation of a row, with or without a gate.
fn activated(gate: Option<&[f32]>, up: &[f32], activation: Activation) -> Vec<f32> {
    let of = |(i, &up): (usize, &f32)| ops::activate(gate.map(|gate| gate[i]), up, activation);
    up.iter().enumerate().map(of).collect()
}

/// `x += y * scale`, row by row.
fn add(x: &mut [Vec<f32>], y: &[Vec<f32>], scale: f32) {
    for (x, y) in x.iter_mut().flatten().zip(y.iter().flatten()) {
        *x += y * scale;
    }
}
