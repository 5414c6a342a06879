//! Attention of one layer, as phases of the team: see the table in `forward.rs`.

use std::ops::Range;

use paguro_backend::{
    Attention, AttentionMode, Linear, Norm, QkNorm, QkNormKind, RopeStyle, VectorId, reference,
};

use crate::{
    attention::{SplitJob, clear_partial, partial_len, sink_partial},
    counters::Kernel,
    forward::{AllPending, Kinds, Member, Model, Pass, Pending},
    gather,
    pages::{Half, Place},
    plan::Tile,
    team::Portions,
};

impl Pass<'_> {
    /// Attention. Returns its output, `[rows, hidden]`.
    pub fn attention(&mut self, op: &Attention, pending: AllPending) -> Pending {
        let (model, buffers) = (self.model, self.buffers);
        let kinds = Kinds::of(model, &[op.q, op.k, op.v, op.gate.unwrap_or(op.q)]);
        self.add_norm(op.norm, pending, kinds);
        let [q, k, v] = [(op.q.matrix, &buffers.q), (op.k.matrix, &buffers.k), (op.v.matrix, &buffers.v)];
        match op.gate {
            Some(gate) => self.multiply(self.rows(), [q, k, v, (gate.matrix, &buffers.attention_gate)]),
            None => self.multiply(self.rows(), [q, k, v]),
        }
        if let Some(norm @ QkNorm { kind: QkNormKind::Row, .. }) = op.qk_norm {
            self.phase(Kernel::QkNorm, self.rows(), Portions::Guided(1), |member, range| {
                for row in range {
                    for (x, heads, linear, norm) in [
                        (&buffers.q, model.heads, &op.q, norm.q),
                        (&buffers.k, model.kv_heads, &op.k, norm.k),
                    ] {
                        let x = member.write(x, row, heads * model.head_dim);
                        member.finish_row(x, linear.bias, norm);
                    }
                }
            });
        }
        let kv_heads = model.kv_heads;
        self.phase(Kernel::RopeStore, self.rows() * kv_heads, Portions::Guided(8), |member, range| {
            for unit in range {
                member.rope_store(op, unit / kv_heads, unit % kv_heads);
            }
        });
        self.attend(op);
        let width = model.heads * model.head_dim;
        let kinds = Kinds::of(model, &[op.out]);
        self.phase(Kernel::Quantize, self.rows(), Portions::Guided(2), |member, range| {
            for row in range {
                let attended = member.write(&buffers.attended, row, width);
                if let Some(gate) = op.gate {
                    let gates = member.write(&buffers.attention_gate, row, width);
                    if let Some(bias) = gate.bias {
                        model.rows.add(gates, model.vector(bias));
                    }
                    model.delta.sigmoid_gate(attended, gates);
                }
                member.set_input(&buffers.input, row, 0, attended, kinds, true);
            }
        });
        self.multiply(self.rows(), [(op.out.matrix, &buffers.products[0])]);
        Pending { product: 0, bias: op.out.bias, post_norm: op.post_norm, scale: 1.0 }
    }

    fn attend(&mut self, op: &Attention) {
        if self.model.attention == AttentionMode::Gather {
            return self.attend_gather(op);
        }
        let cuts = self.plan.cuts(op.kv.group);
        self.phase(Kernel::Attend, cuts.items.len(), Portions::Single, |member, range| {
            for item in &cuts.items[range] {
                let tile = &cuts.tiles[item.tile];
                match tile.first_partial {
                    Some(_) => item.splits.clone().for_each(|split| member.attend_shared(op, tile, split)),
                    None => member.attend_tile(op, tile),
                }
            }
        });
        if !cuts.shared.is_empty() {
            self.phase(Kernel::AttendMerge, cuts.shared.len(), Portions::Guided(1), |member, range| {
                for &tile in &cuts.shared[range] {
                    member.merge_shared(op, &cuts.tiles[tile]);
                }
            });
        }
    }

    /// The reference way, for comparison: see [`gather`].
    fn attend_gather(&mut self, op: &Attention) {
        let model = self.model;
        let (step, kv_heads) = (self.step, model.kv_heads);
        self.phase(
            Kernel::AttendGather,
            step.sequences.len() * kv_heads,
            Portions::Single,
            |member, range| {
                for unit in range {
                    let (sequence, kv_head) = (&step.sequences[unit / kv_heads], unit % kv_heads);
                    let job = gather::Job {
                        program: &model.program,
                        // SAFETY: nobody writes pages in the phase that attends.
                        pages: unsafe { member.arena.pages() },
                        step,
                        sequence,
                        op,
                        kv_head,
                        sinks: op.sinks.map(|sinks| model.vector(sinks)),
                    };
                    // SAFETY: queries are only read in this phase, and only this member has these heads of these rows.
                    unsafe { job.run(&member.buffers.q, &member.buffers.attended) };
                }
            },
        );
    }
}

impl Member<'_> {
    /// Bias and norm of a whole row, in place.
    fn finish_row(&mut self, x: &mut [f32], bias: Option<VectorId>, norm: Norm) {
        let model = self.model;
        if let Some(bias) = bias {
            model.rows.add(x, model.vector(bias));
        }
        let normed = &mut self.own.row[..x.len()];
        model.norm(Some(norm), x, normed);
        x.copy_from_slice(normed);
    }

    /// Bias, head norm and rotation of one K/V head and its query heads in one row; K and V into the page.
    fn rope_store(&mut self, op: &Attention, row: usize, kv_head: usize) {
        let (model, buffers, plan) = (self.model, self.buffers, self.plan);
        let Model { head_dim, heads, kv_heads, .. } = *model;
        let group = model.queries_per_kv();
        let turns = op.rope.map(|index| {
            let rope = &model.program.ropes[index];
            let turns = self.read(&buffers.turns, index * self.step.tokens.len() + row, head_dim);
            (&turns[..2 * rope.frequencies.len()], rope.style)
        });
        let scale = op
            .position_scale
            .map(|scale| reference::ops::position_scale(&scale, plan.positions[row]))
            .filter(|&scale| scale != 1.0);
        let norms = op.qk_norm.map(|norm| (norm.q, norm.k, norm.kind));
        for head in kv_head * group..(kv_head + 1) * group {
            let q = self.write(&buffers.q, row * heads + head, head_dim);
            self.finish_head(q, head, &op.q, norms.map(|norms| (norms.0, norms.2)), turns);
            if let Some(scale) = scale {
                model.rows.scale(q, scale);
            }
        }
        let k = self.write(&buffers.k, row * kv_heads + kv_head, head_dim);
        self.finish_head(k, kv_head, &op.k, norms.map(|norms| (norms.1, norms.2)), turns);
        let v = self.write(&buffers.v, row * kv_heads + kv_head, head_dim);
        self.finish_head(v, kv_head, &op.v, None, None);
        let (page, token) = plan.place(self.step, row, op.kv.group);
        let place = Place { page, slot: op.kv.slot, kv_head, token };
        for (half, x) in [(Half::K, k), (Half::V, v)] {
            self.own.stored.set(&model.rows, x);
            // SAFETY: in this phase each row's slot is written by one member, and nobody reads pages.
            unsafe { self.arena.write(place, half, &self.own.stored) };
        }
    }

    /// Bias, norm and rotation of one head of a product, each where there is one. Rows that were normed as a whole have
    /// their bias already.
    fn finish_head(
        &mut self,
        x: &mut [f32],
        head: usize,
        linear: &Linear,
        norm: Option<(Norm, QkNormKind)>,
        turns: Option<(&[f32], RopeStyle)>,
    ) {
        let model = self.model;
        let of_kind = |wanted| norm.filter(|(_, kind)| *kind == wanted).map(|(norm, _)| norm);
        let bias = linear.bias.filter(|_| of_kind(QkNormKind::Row).is_none());
        if let Some(bias) = bias {
            model.rows.add(x, &model.vector(bias)[head * x.len()..][..x.len()]);
        }
        if let Some(norm) = of_kind(QkNormKind::Head) {
            self.finish_row(x, None, norm);
        }
        if let Some((turns, style)) = turns {
            model.rows.rotate(x, turns, style);
        }
        if let Some(norm) = of_kind(QkNormKind::HeadAfterRope) {
            self.finish_row(x, None, norm);
        }
    }

    /// One tile over one split.
    fn attend_split(&mut self, op: &Attention, tile: &Tile, split: usize) {
        let (model, step) = (self.model, self.step);
        let (head_dim, group) = (model.head_dim, model.queries_per_kv());
        let width = model.heads * head_dim;
        let kv = &model.program.kv;
        let job = SplitJob {
            // SAFETY: K and V of earlier phases; nobody writes pages in the phase that attends.
            pages: unsafe { self.arena.pages() },
            table: step.sequences[tile.sequence].table(step.pages, op.kv.group, kv.groups.len()),
            slot: op.kv.slot,
            kv_head: tile.kv_head,
            // SAFETY: queries are only read in this phase.
            q: unsafe { self.buffers.q.get(tile.rows.start * width..tile.rows.end * width) },
            row_stride: width,
            first_head: tile.kv_head * group * head_dim,
            group,
            rows: tile.rows.len(),
            position: tile.position,
            split,
            scale: op.scale,
            soft_cap: op.soft_cap,
            window: kv.groups[op.kv.group].window.map(|window| window as usize),
        };
        model.attend.attend_split(&job, &mut self.own.scores, &mut self.own.partial);
    }

    /// Sets `self.own.sums` to what the splits of a tile are added to: nothing, or the sinks. Returns their length.
    fn start_sums(&mut self, op: &Attention, tile: &Tile) -> usize {
        let (model, group) = (self.model, self.model.queries_per_kv());
        let partial = partial_len(model.head_dim);
        let len = self.plan.queries(tile) * partial;
        for (query, sum) in self.own.sums[..len].chunks_exact_mut(partial).enumerate() {
            match op.sinks {
                None => clear_partial(sum),
                Some(sinks) => sink_partial(sum, model.vector(sinks)[tile.kv_head * group + query % group]),
            }
        }
        len
    }

    /// A tile over all of its splits, one after the other.
    fn attend_tile(&mut self, op: &Attention, tile: &Tile) {
        let model = self.model;
        let len = self.start_sums(op, tile);
        for split in tile.splits.clone() {
            self.attend_split(op, tile, split);
            let own = &mut *self.own;
            merge_all(model, &mut own.sums[..len], &own.partial[..len]);
        }
        self.finish_tile(tile);
    }

    /// Where a split of a tile whose splits members share has its partial results.
    fn partials(&self, tile: &Tile, split: usize) -> Range<usize> {
        let first = tile.first_partial.expect("the plan shares the splits of this tile");
        let queries = self.plan.queries(tile);
        let start = first + (split - tile.splits.start) * queries;
        let len = partial_len(self.model.head_dim);
        start * len..(start + queries) * len
    }

    /// One split of a tile whose splits members share.
    fn attend_shared(&mut self, op: &Attention, tile: &Tile, split: usize) {
        self.attend_split(op, tile, split);
        let range = self.partials(tile, split);
        let len = range.len();
        // SAFETY: only this member has this split of this tile.
        let out = unsafe { self.buffers.partials.get_mut(range) };
        out.copy_from_slice(&self.own.partial[..len]);
    }

    /// Adds up the splits of a tile, in order.
    fn merge_shared(&mut self, op: &Attention, tile: &Tile) {
        let model = self.model;
        let len = self.start_sums(op, tile);
        for split in tile.splits.clone() {
            let range = self.partials(tile, split);
            // SAFETY: partial results are only read in this phase.
            let partials = unsafe { self.buffers.partials.get(range) };
            merge_all(model, &mut self.own.sums[..len], partials);
        }
        self.finish_tile(tile);
    }

    /// Writes a tile's attention from `self.own.sums`.
    fn finish_tile(&mut self, tile: &Tile) {
        let model = self.model;
        let (head_dim, heads, group) = (model.head_dim, model.heads, model.queries_per_kv());
        let sums = self.own.sums.chunks_exact(partial_len(head_dim));
        for (query, sum) in sums.take(self.plan.queries(tile)).enumerate() {
            let (row, head) = (tile.rows.start + query / group, tile.kv_head * group + query % group);
            let start = (row * heads + head) * head_dim;
            // SAFETY: only this member has this tile.
            model.attend.finish(sum, unsafe { self.buffers.attended.get_mut(start..start + head_dim) });
        }
    }
}

/// Adds partial results query by query.
fn merge_all(model: &Model, sums: &mut [f32], partials: &[f32]) {
    let len = partial_len(model.head_dim);
    for (sum, partial) in sums.chunks_exact_mut(len).zip(partials.chunks_exact(len)) {
        model.attend.merge(sum, partial);
    }
}
