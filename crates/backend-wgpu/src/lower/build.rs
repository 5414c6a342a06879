//! The first pass: a program as nodes, one for each operation. Nothing is fused, and the nodes depend on formats of weights
//! only in that results of matrices of one layout are computed by one matmul. The walk also finds the sizes of all slots.

mod attention;
mod ends;
mod experts;
mod recurrent;

use paguro_backend::{
    Dense, Embed, Exit, FeedForward, Head, Input, Layer, LayerEmbeds, LayerInput, Linear, LoadError, Mixer,
    Norm, Residual,
};

use super::{
    LOGIT_ROWS, List,
    facts::Facts,
    node::{
        Activate, Acts, AddBranch, Epilogue, Input as MatmulInput, Kernel, Matmul, Node, NormRows, Places,
        RowClass, Span,
    },
    slot::{Sizes, Slot},
};
use crate::{
    layout::BLOCK,
    matrix::Order,
    plan::{self, Tables},
    sampler,
};

/// Rows that cooperative matrices may read past the last one.
const MOST_ROWS: usize = super::kernels::MOST_ROWS;

/// A list of nodes for a class of rows, while it grows.
pub struct Builder<'a> {
    facts: &'a Facts<'a>,
    class: RowClass,
    /// Rows of the largest step of the class.
    rows: usize,
    nodes: Vec<Node>,
    sizes: &'a mut Sizes,
}

/// Addition of a branch to the residual stream.
#[derive(Clone, Copy)]
struct Add {
    /// Norm of the branch before it is added.
    post_norm: Option<Norm>,
    /// Factor of the added values.
    scale: f32,
    /// True if it is added later. Of the branches that read the same residual stream, all but the last one wait.
    waits: bool,
}

impl<'a> Builder<'a> {
    /// Builds the nodes of a class of rows, and enters the sizes of their slots.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] for too many rows.
    pub fn build(facts: &'a Facts<'a>, class: RowClass, sizes: &'a mut Sizes) -> Result<List, LoadError> {
        let rows = facts.limits.max_rows.min(class.to - 1);
        let mut builder = Self { facts, class, rows, nodes: Vec::new(), sizes };
        let program = facts.program;
        builder.step();
        match &program.input {
            Input::Tokens(embed) => builder.embed(embed),
            Input::Rows => builder.begin_with_rows(),
            Input::Patches(patches) => builder.patches(patches),
        }
        if let Exit::Merged(merged) = &program.exit {
            builder.taps(merged, 0);
        }
        for (index, layer) in program.layers.iter().enumerate() {
            builder.layer(index, layer)?;
            if index + 1 < builder.given_parts() {
                builder.push(Kernel::AddGiven(index + 1));
            }
            if let Exit::Merged(merged) = &program.exit {
                builder.taps(merged, index + 1);
            }
        }
        let body = std::mem::take(&mut builder.nodes);
        if let Exit::Logits(head) = &program.exit {
            builder.head(head);
        }
        Ok(List { class, body, head: builder.nodes, direct: None })
    }

    fn need(&mut self, slot: Slot, width: usize) {
        self.sizes.need(slot, self.rows * width);
    }

    /// Requires room for rows of activations.
    fn need_acts(&mut self, rows: usize, width: usize) {
        let (sizes, blocks) = (&mut self.sizes, width.div_ceil(BLOCK));
        sizes.act_blocks = sizes.act_blocks.max(rows * blocks);
        if self.facts.target.cooperative.is_some() {
            // Cooperative matrices read whole tiles, including unwritten rows and blocks.
            let halves = (rows.next_multiple_of(MOST_ROWS) * blocks + BLOCK) * 16;
            sizes.act_halves = sizes.act_halves.max(halves);
        }
    }

    fn push(&mut self, kernel: Kernel) {
        self.nodes.push(Node::new(kernel));
    }

    /// Enters the sizes of slots that all programs have.
    fn step(&mut self) {
        let Facts { kv, limits, tilings, program, .. } = self.facts;
        self.sizes.need(Slot::Step, plan::words(kv, limits, tilings, &Tables::of(program)));
        self.sizes.need(Slot::Tokens, limits.max_outputs.max(1) + 1);
        self.sizes.need(Slot::Zero, 1);
        self.sizes.need(Slot::Squares, program.hidden.div_ceil(4 * BLOCK) * 4);
        self.sizes.need(Slot::Factors, self.rows.max(LOGIT_ROWS).max(limits.max_outputs));
        self.need(Slot::Stream, program.hidden);
        self.need(Slot::Branch, program.hidden);
    }

    /// Returns the parts of given rows that layers add. Steps of one row know none, so that each layer continues the one before.
    fn given_parts(&self) -> usize {
        if self.class.is_one() { 0 } else { self.facts.program.given_parts }
    }

    /// Begins with the first part of given rows.
    fn begin_with_rows(&mut self) {
        let Facts { program, .. } = self.facts;
        self.need(Slot::Given, program.given_parts * program.hidden);
        self.push(Kernel::SetGiven);
    }

    fn embed(&mut self, embed: &Embed) {
        let Embed { table, scale, positions, types, norm, layers, joined } = embed;
        // Joined rows have their embeddings beside the given rows.
        let parts = if joined.is_some() { 0 } else { self.given_parts() };
        if parts > 0 {
            self.need(Slot::Given, parts * self.facts.program.hidden);
        }
        let (of_types, scale) = (types.map(|types| types.table), *scale);
        self.push(Kernel::Embed { table: *table, scale, is_of_positions: false, types: of_types, parts });
        if let Some(positions) = positions {
            let (table, scale) = (positions.table, 1.0);
            self.push(Kernel::Embed { table, scale, is_of_positions: true, types: None, parts });
        }
        if let Some(joined) = joined {
            self.joined(joined);
        }
        self.replace(*norm);
        let Some(embeds) = layers else { return };
        let LayerEmbeds { table: _, scale: _, count, width, projection, norm: _ } = embeds;
        self.norm(None);
        self.matmul(projection, count * width, Acts::Normed, Slot::Embeds);
        self.need(Slot::TableRows, count * width);
        self.push(Kernel::LayerEmbeds(Box::new(embeds.clone())));
    }

    fn layer(&mut self, index: usize, layer: &Layer) -> Result<(), LoadError> {
        let Layer {
            mixer,
            ffn,
            residual,
            norm_after_mixer,
            norm_after_ffn,
            branch_scale,
            input,
            output_scale,
        } = layer;
        let has_both = !matches!(mixer, Mixer::None) && !matches!(ffn, FeedForward::None);
        let waits = *residual == Residual::Parallel && has_both;
        let waiting = match mixer {
            Mixer::Sum(branches) => {
                let [first, second] = &branches[..] else { unreachable!("other sums were refused") };
                let first = self.mixer(&first.mixer, first.scale * branch_scale, true);
                self.mixer(&second.mixer, second.scale * branch_scale, false);
                self.join(first);
                None
            }
            mixer => self.mixer(mixer, *branch_scale, waits).filter(|_| waits),
        };
        self.replace(*norm_after_mixer);
        match ffn {
            FeedForward::Dense(dense) => {
                self.dense(dense, Slot::Branch);
                self.add(Add { post_norm: dense.post_norm, scale: *branch_scale, waits: false });
            }
            FeedForward::Experts(experts) => self.experts(index, experts, *branch_scale)?,
            FeedForward::None => {}
        }
        self.join(waiting);
        self.replace(*norm_after_ffn);
        if let Some(input) = input {
            self.layer_input(input);
        }
        if *output_scale != 1.0 {
            self.add_branch(None, Slot::Stream, None, *output_scale);
        }
        Ok(())
    }

    /// Adds a mixer that is no sum, and its output to the residual stream. Returns the addition.
    fn mixer(&mut self, mixer: &Mixer, scale: f32, waits: bool) -> Option<Add> {
        let (out, width, post_norm) = match mixer {
            Mixer::Attention(op) => {
                self.attention(op);
                (&op.out, self.facts.group(op.kv).out_width(), op.post_norm)
            }
            Mixer::Latent(op) => {
                self.latent(op);
                (&op.out, op.shape.value_width(), op.post_norm)
            }
            Mixer::Conv(op) => {
                self.short_conv(op);
                (&op.out, op.width, op.post_norm)
            }
            Mixer::DeltaRule(op) => {
                self.delta_rule(op);
                (&op.out, op.shape.value_width(), op.post_norm)
            }
            Mixer::Ssd(op) => {
                self.ssd(op);
                (&op.out, op.shape.value_width(), op.post_norm)
            }
            Mixer::None | Mixer::Sum(_) => return None,
        };
        self.need_acts(self.rows, width);
        let add = Add { post_norm, scale, waits };
        let slot = if waits { Slot::Waiting } else { Slot::Branch };
        let hidden = self.facts.program.hidden;
        match out.bounds {
            None => self.matmul(out, hidden, Acts::Plain, slot),
            Some(_) => self.bounded_out(out, width, slot),
        }
        self.add(add);
        Some(add)
    }

    /// Adds a branch, unless it waits.
    fn add(&mut self, Add { post_norm, scale, waits }: Add) {
        if !waits {
            self.add_branch(Some(Slot::Branch), Slot::Stream, post_norm, 1.0);
            self.scale_last(scale);
        }
    }

    /// Adds the branch that has waited.
    fn join(&mut self, waiting: Option<Add>) {
        if let Some(Add { post_norm, scale, .. }) = waiting {
            self.add_branch(Some(Slot::Waiting), Slot::Stream, post_norm, 1.0);
            self.scale_last(scale);
        }
    }

    fn add_branch(&mut self, from: Option<Slot>, to: Slot, post_norm: Option<Norm>, out_scale: f32) {
        self.push(Kernel::AddBranch(AddBranch { from, to, post_norm, scale: 1.0, out_scale, writes: false }));
    }

    /// Scales the branch that was added last.
    fn scale_last(&mut self, scale: f32) {
        if let Some(Node { kernel: Kernel::AddBranch(add), .. }) = self.nodes.last_mut() {
            add.scale = scale;
        }
    }

    /// Adds a norm of the residual stream; without a norm, its rows as they are.
    fn norm(&mut self, norm: Option<Norm>) {
        let hidden = self.facts.program.hidden;
        self.need_acts(self.rows, hidden);
        let rows = Span { slot: Slot::Stream, stride: hidden, first: 0 };
        self.push(Kernel::Norm(NormRows::new(norm, rows, Acts::Normed)));
    }

    /// Adds a norm of the residual stream that replaces its rows, if there is one.
    fn replace(&mut self, norm: Option<Norm>) {
        if norm.is_some() {
            self.norm(norm);
            if let Some(Node { kernel: Kernel::Norm(norm), .. }) = self.nodes.last_mut() {
                norm.replaces = true;
            }
        }
    }

    /// Adds a norm of other rows of `width` elements, as activations of a matmul; without a norm, the rows as they are.
    fn activations(&mut self, slot: Slot, width: usize, norm: Option<Norm>) {
        self.need_acts(self.rows, width);
        let rows = Span { slot, stride: width, first: 0 };
        self.push(Kernel::Norm(NormRows::new(norm, rows, Acts::Plain)));
    }

    /// Adds a matmul of one matrix onto `outputs` elements of its own slot.
    fn matmul(&mut self, linear: &Linear, outputs: usize, acts: Acts, slot: Slot) {
        self.need(slot, outputs);
        let out = Span { slot, stride: outputs, first: 0 };
        self.push(Kernel::Matmul(Matmul::new(vec![*linear], acts, out)));
    }

    /// Adds matmuls of the activations of a norm, one for the matrices of each layout, with all results side by side in one
    /// slot or in a slot of scratch for each matmul. Returns the place of each matrix's results.
    fn matmuls<const N: usize>(
        &mut self,
        linears: [(&Linear, usize); N],
        side_by_side: Option<Slot>,
    ) -> [Span; N] {
        let layout = |index: usize| self.facts.layout(linears[index].0.matrix);
        let mut joined: Vec<Vec<usize>> = Vec::new();
        for index in 0..N {
            match joined.iter_mut().find(|members| layout(members[0]) == layout(index)) {
                Some(members) => members.push(index),
                None => joined.push(vec![index]),
            }
        }
        let all: usize = linears.iter().map(|(_, outputs)| outputs).sum();
        if let Some(slot) = side_by_side {
            self.need(slot, all);
        }
        // The first matrix is always in the first matmul, and so on.
        for index in (0..N).filter(|_| side_by_side.is_none()) {
            let most = linears[index..].iter().map(|(_, outputs)| outputs).sum();
            self.need(Slot::Scratch(index), most);
        }
        let mut spans = [Span { slot: Slot::Zero, stride: 0, first: 0 }; N];
        let mut first = 0;
        for (index, members) in joined.iter().enumerate() {
            let outputs = members.iter().map(|&member| linears[member].1).sum();
            let out = match side_by_side {
                Some(slot) => Span { slot, stride: all, first },
                None => Span { slot: Slot::Scratch(index), stride: outputs, first: 0 },
            };
            let mut own = out;
            for &member in members {
                spans[member] = own;
                own.first += linears[member].1;
            }
            first += outputs;
            let linears = members.iter().map(|&member| *linears[member].0).collect();
            self.push(Kernel::Matmul(Matmul::new(linears, Acts::Normed, out)));
        }
        spans
    }

    /// Adds a dense network, from its norm to its result.
    fn dense(&mut self, dense: &Dense, to: Slot) {
        if self.facts.program.has_bounds() {
            return self.bounded_dense(dense, to);
        }
        let Dense { norm, width, gate, up, activation, down, post_norm: _ } = dense;
        self.norm(*norm);
        let (gate, up) = self.gate_and_up(gate.as_ref(), up, *width);
        self.activate(Activate {
            activation: *activation,
            gate,
            up,
            in_turn: false,
            width: *width,
            places: Places::Rows,
        });
        self.matmul(down, self.facts.program.hidden, Acts::Plain, to);
    }

    fn gate_and_up(&mut self, gate: Option<&Linear>, up: &Linear, width: usize) -> (Option<Span>, Span) {
        match gate {
            Some(gate) => {
                let [gate, up] = self.matmuls([(gate, width), (up, width)], None);
                (Some(gate), up)
            }
            None => {
                let [up] = self.matmuls([(up, width)], None);
                (None, up)
            }
        }
    }

    fn activate(&mut self, op: Activate) {
        let rows = match op.places {
            Places::Rows => self.rows,
            Places::Pairs { used } => self.rows * used as usize,
            Places::Tiles(tiles) => (tiles.most(self.rows as u32) * tiles.tile) as usize,
        };
        self.need_acts(rows, op.width);
        self.push(Kernel::Activate(op));
    }

    /// Adds a layer's own embedding to the residual stream.
    fn layer_input(&mut self, op: &LayerInput) {
        let embeds = self.facts.program.layer_embeds().expect("`Program::check` has looked for them");
        let width = embeds.width;
        self.norm(None);
        self.matmul(&op.gate, width, Acts::Normed, Slot::EmbedGate);
        self.activate(Activate {
            activation: op.activation,
            gate: Some(Span { slot: Slot::EmbedGate, stride: width, first: 0 }),
            up: Span { slot: Slot::Embeds, stride: embeds.count * width, first: op.index * width },
            in_turn: false,
            width,
            places: Places::Rows,
        });
        self.matmul(&op.out, self.facts.program.hidden, Acts::Plain, Slot::Branch);
        self.add(Add { post_norm: op.post_norm, scale: 1.0, waits: false });
    }

    /// Adds the outputs: the last norm, and logits.
    fn head(&mut self, head: &Head) {
        let Facts { program, limits, .. } = self.facts;
        let (hidden, vocab) = (program.hidden, program.vocab);
        let (rows, outputs) = (limits.max_outputs.clamp(1, LOGIT_ROWS), limits.max_outputs.max(1));
        let sizes = &mut *self.sizes;
        sizes.need(Slot::Logits, rows * vocab);
        sizes.need(Slot::Embeddings, outputs * hidden);
        if program.bidirectional {
            sizes.need(Slot::Means, limits.max_sequences * hidden);
        }
        sizes.need(Slot::Samples, 8 * outputs);
        sizes.need(Slot::Edits, 4 * sampler::room(rows, vocab));
        sizes.need(Slot::Masks, rows.max(outputs.min(256)) * vocab.div_ceil(32));
        sizes.need(Slot::Best, outputs * vocab.div_ceil(sampler::CHUNK) * 2);
        self.need_acts(outputs.max(LOGIT_ROWS), hidden);
        let rows = Span { slot: Slot::Stream, stride: hidden, first: 0 };
        let norm = NormRows::new(Some(head.norm), rows, Acts::Normed);
        self.push(Kernel::Norm(NormRows { is_of_outputs: true, ..norm }));
        let out = Span { slot: Slot::Logits, stride: vocab, first: 0 };
        let mut matmul = Matmul::new(vec![head.linear], Acts::Normed, out);
        matmul.epilogue = Epilogue::Store { scale: head.scale, cap: head.soft_cap };
        self.push(Kernel::Matmul(matmul));
    }
}

impl NormRows {
    /// Creates a norm of rows.
    pub fn new(norm: Option<Norm>, rows: Span, acts: Acts) -> Self {
        let (width, to) = (rows.stride, None);
        Self { norm, rows, width, to, acts, adds: None, sums: None, is_of_outputs: false, replaces: false }
    }
}

impl Matmul {
    /// Creates a matmul that stores its results.
    pub fn new(linears: Vec<Linear>, acts: Acts, out: Span) -> Self {
        let (order, input, epilogue) = (Order::Joined, MatmulInput::Ready, Epilogue::STORE);
        Self { linears, order, acts, input, in_order: false, few: 0, site: None, out, epilogue }
    }
}
