//! Attention of one layer, as phases of the thread pool: see the table in `forward.rs`.

use std::ops::Range;

use paguro_backend::{Attention, AttentionMode, Linear, Norm, QkNormKind, RopeStyle, VectorId, reference};
use paguro_cpu_kernels::{
    attention::{SplitJob, clear_partial, partial_len, sink_partial},
    pages::{Half, Place},
};

use crate::{
    bounds, gather,
    pass::{Kernel, Pass},
    plan::{Attend, Heads, Tile},
    thread_pool::Chunking,
    worker::{AllPending, Kinds, Model, Pending, Worker},
};

/// Attention. Returns its output, `[rows, hidden]`.
pub fn attention(pass: &mut Pass<'_>, op: &Attention, pending: AllPending, output: usize) -> Pending {
    let (model, buffers, rows) = (pass.model, pass.buffers, pass.rows());
    let heads = Heads::of(&model.program, op);
    let or_q = |linear: Option<Linear>| linear.unwrap_or(op.q);
    let kinds = Kinds::of(model, &[op.q, or_q(op.k), or_q(op.v), or_q(op.gate)]);
    pass.add_norm(op.norm, pending, kinds);
    let is_bounded = [Some(op.q), op.k, op.v].iter().flatten().any(|linear| linear.bounds.is_some());
    let q = (op.q.matrix, &buffers.q);
    let [k, v, gate] = [(op.k, &buffers.k), (op.v, &buffers.v), (op.gate, &buffers.attention_gate)]
        .map(|(linear, out)| linear.map(|linear| (linear.matrix, out)));
    match (k, v, gate) {
        _ if is_bounded => bounds::bounded_qkv(pass, op),
        (Some(k), Some(v), Some(gate)) => pass.multiply(rows, [q, k, v, gate]),
        (Some(k), Some(v), None) => pass.multiply(rows, [q, k, v]),
        (Some(other), None, None) | (None, _, Some(other)) => pass.multiply(rows, [q, other]),
        (Some(k), None, Some(gate)) => pass.multiply(rows, [q, k, gate]),
        (None, _, None) => pass.multiply(rows, [q]),
    }
    if let Some(norm) = op.qk_norm.filter(|norm| norm.kind == QkNormKind::Row) {
        pass.phase(Kernel::QkNorm, rows, Chunking::Guided(1), |worker, range| {
            for row in range {
                // SAFETY: the phase is shared by row, or by K/V head of a row; see the table in `forward.rs`.
                worker.finish_row(
                    unsafe { worker.write(&buffers.q, row, heads.q_width()) },
                    op.q.bias,
                    norm.q,
                );
                if let Some(k) = op.k {
                    // SAFETY: the phase is shared by row, or by K/V head of a row; see the table in `forward.rs`.
                    worker.finish_row(
                        unsafe { worker.write(&buffers.k, row, heads.kv_width()) },
                        k.bias,
                        norm.k,
                    );
                }
            }
        });
    }
    let kv_heads = heads.kv;
    pass.phase(Kernel::RopeStore, pass.rows() * kv_heads, Chunking::Guided(8), |worker, range| {
        for unit in range {
            worker.rope_store(op, unit / kv_heads, unit % kv_heads);
        }
    });
    attend(pass, &Attend::of(&model.program, op));
    let width = heads.q_width();
    let kinds = Kinds::of(model, &[op.out]);
    pass.phase(Kernel::Quantize, pass.rows(), Chunking::Guided(2), |worker, range| {
        for row in range {
            // SAFETY: the phase is shared by row, or by K/V head of a row; see the table in `forward.rs`.
            let attended = unsafe { worker.write(&buffers.attended, row, width) };
            if let Some(gate) = op.gate {
                // SAFETY: the phase is shared by row, or by K/V head of a row; see the table in `forward.rs`.
                let gates = unsafe { worker.write(&buffers.attention_gate, row, width) };
                if let Some(bias) = gate.bias {
                    model.rows.add(gates, model.vector(bias));
                }
                model.delta.sigmoid_gate(attended, gates);
            }
            if let Some(bounds) = &op.out.bounds {
                bounds.clamp_input(attended);
            }
            worker.set_input(&buffers.input, row, 0, attended, kinds, true);
        }
    });
    pass.multiply(pass.rows(), [(op.out.matrix, &buffers.branch_outputs[output])]);
    bounds::clamp_output(pass, op.out, &buffers.branch_outputs[output], model.program.hidden);
    Pending { output, bias: op.out.bias, post_norm: op.post_norm, scale: 1.0 }
}

/// Attention of queries over pages.
pub fn attend(pass: &mut Pass<'_>, op: &Attend) {
    if pass.model.attention == AttentionMode::Gather {
        return gather::attend(pass, op);
    }
    let work = pass.plan.attention(op.kv.group);
    pass.phase(Kernel::Attend, work.items.len(), Chunking::Single, |worker, range| {
        for item in &work.items[range] {
            let tile = &work.tiles[item.tile];
            match tile.first_partial {
                Some(_) => item.splits.clone().for_each(|split| worker.attend_shared(op, tile, split)),
                None => worker.attend_tile(op, tile),
            }
        }
    });
    if !work.shared.is_empty() {
        pass.phase(Kernel::AttendMerge, work.shared.len(), Chunking::Guided(1), |worker, range| {
            for &tile in &work.shared[range] {
                worker.merge_shared(op, &work.tiles[tile]);
            }
        });
    }
}

impl Worker<'_> {
    /// Bias, head norm and rotation of one K/V head and its query heads in one row; K and V into the page, if the layer has
    /// its own.
    fn rope_store(&mut self, op: &Attention, row: usize, kv_head: usize) {
        let (model, buffers, plan) = (self.model, self.buffers, self.plan);
        let heads = Heads::of(&model.program, op);
        let (head_dim, queries_per_kv) = (heads.dim, heads.per_kv());
        let rope_row = op.rope.map(|index| {
            let rope = &model.program.ropes[index];
            let table_row = index * self.step.tokens.len() + plan.rows[row];
            // SAFETY: no other worker writes it in this phase; see the table in `forward.rs`.
            let rope_row = unsafe { self.read(&buffers.rope_table, table_row, model.rope_stride) };
            (&rope_row[..2 * rope.frequencies.len()], rope.style)
        });
        let scale = op
            .position_scale
            .map(|scale| reference::ops::position_scale(&scale, plan.positions[row]))
            .filter(|&scale| scale != 1.0);
        let norms = op.qk_norm.map(|norm| (norm.q, norm.k, norm.kind));
        for head in kv_head * queries_per_kv..(kv_head + 1) * queries_per_kv {
            // SAFETY: the phase is shared by row, or by K/V head of a row; see the table in `forward.rs`.
            let q = unsafe { self.write(&buffers.q, row * heads.queries + head, head_dim) };
            self.finish_head(q, head, op.q.bias, norms.map(|norms| (norms.0, norms.2)), rope_row);
            if let Some(scale) = scale {
                model.rows.scale(q, scale);
            }
            if self.arena.is_quantized() {
                model.rows.hadamard(q);
            }
        }
        let Some(own_k) = op.k else { return };
        // SAFETY: the phase is shared by row, or by K/V head of a row; see the table in `forward.rs`.
        let k = unsafe { self.write(&buffers.k, row * heads.kv + kv_head, head_dim) };
        // SAFETY: the phase is shared by row, or by K/V head of a row; see the table in `forward.rs`.
        let v = unsafe { self.write(&buffers.v, row * heads.kv + kv_head, head_dim) };
        let v_norm = op.v_norm.map(|norm| (norm, QkNormKind::Head));
        let k_bias = match op.v {
            Some(own_v) => {
                self.finish_head(v, kv_head, own_v.bias, v_norm, None);
                own_k.bias
            }
            None => {
                self.finish_head(k, kv_head, own_k.bias, None, None);
                v.copy_from_slice(k);
                self.finish_head(v, kv_head, None, v_norm, None);
                None
            }
        };
        self.finish_head(k, kv_head, k_bias, norms.map(|norms| (norms.1, norms.2)), rope_row);
        let (page, token) = plan.place(self.step, row, op.kv.group);
        let place = Place { group: op.kv.group, page, layer_slot: op.kv.layer_slot, kv_head, token };
        for (half, x) in [(Half::K, k), (Half::V, v)] {
            self.scratch.stored.set(&model.rows, x);
            // SAFETY: in this phase each row's slot is written by one worker, and nobody reads pages.
            unsafe { self.arena.write(place, half, &self.scratch.stored) };
        }
    }

    /// Applies bias, norm and RoPE to one head of a matmul's result, as far as the layer has them. Rows that were
    /// normed as a whole include their bias.
    fn finish_head(
        &mut self,
        x: &mut [f32],
        head: usize,
        bias: Option<VectorId>,
        norm: Option<(Norm, QkNormKind)>,
        rope_row: Option<(&[f32], RopeStyle)>,
    ) {
        let model = self.model;
        let of_kind = |wanted| norm.filter(|(_, kind)| *kind == wanted).map(|(norm, _)| norm);
        let bias = bias.filter(|_| of_kind(QkNormKind::Row).is_none());
        if let Some(bias) = bias {
            model.rows.add(x, &model.vector(bias)[head * x.len()..][..x.len()]);
        }
        if let Some(norm) = of_kind(QkNormKind::Head) {
            self.finish_row(x, None, norm);
        }
        if let Some((rope_row, style)) = rope_row {
            model.rows.rotate(x, rope_row, style);
        }
        if let Some(norm) = of_kind(QkNormKind::HeadAfterRope) {
            self.finish_row(x, None, norm);
        }
    }

    /// Computes one tile over one split.
    fn attend_split(&mut self, op: &Attend, tile: &Tile, split: usize) {
        let (model, step) = (self.model, self.step);
        let heads = op.heads;
        let (queries_per_kv, width) = (heads.per_kv(), heads.q_width());
        let kv = &model.program.kv;
        let job = SplitJob {
            // SAFETY: K and V of earlier phases; nobody writes pages in the phase that attends.
            pages: unsafe { self.arena.pages(op.kv.group) },
            table: step.sequences[tile.sequence].table(step.pages, op.kv.group, kv.groups.len()),
            layer_slot: op.kv.layer_slot,
            kv_head: tile.kv_head,
            // SAFETY: queries are only read in this phase.
            q: unsafe { self.buffers.q.get(tile.rows.start * width..tile.rows.end * width) },
            row_stride: width,
            first_head: tile.kv_head * queries_per_kv * heads.dim,
            queries_per_kv,
            rows: tile.rows.len(),
            position: tile.position,
            split,
            scale: op.scale,
            soft_cap: op.soft_cap,
            window: kv.groups[op.kv.group].window,
            len: tile.len,
            spans: kv.groups[op.kv.group].spans.then(|| self.plan.spans.of(tile.sequence)),
            biases: op.bias.map(|bias| {
                let biases = model.vector(bias);
                let of_group = biases.len() / heads.kv;
                &biases[tile.kv_head * of_group..][..of_group]
            }),
        };
        model.attend.attend_split(&job, &mut self.scratch.scores, &mut self.scratch.partial);
    }

    /// Initializes `self.scratch.sums`, to which the splits of a tile are added: zero, or the sinks. Returns the length.
    fn start_sums(&mut self, op: &Attend, tile: &Tile) -> usize {
        let model = self.model;
        let heads = op.heads;
        let (queries_per_kv, partial) = (heads.per_kv(), partial_len(heads.dim));
        let len = tile.queries * partial;
        for (query, sum) in self.scratch.sums[..len].chunks_exact_mut(partial).enumerate() {
            match op.sinks {
                None => clear_partial(sum),
                Some(sinks) => sink_partial(
                    sum,
                    model.vector(sinks)[tile.kv_head * queries_per_kv + query % queries_per_kv],
                ),
            }
        }
        len
    }

    /// A tile over all of its splits, one after the other.
    fn attend_tile(&mut self, op: &Attend, tile: &Tile) {
        let model = self.model;
        let len = self.start_sums(op, tile);
        for split in tile.splits.clone() {
            self.attend_split(op, tile, split);
            let scratch = &mut *self.scratch;
            merge_all(model, len / tile.queries, &mut scratch.sums[..len], &scratch.partial[..len]);
        }
        self.finish_tile(op, tile);
    }

    /// Returns the range of the partial results of a split whose tile several workers share.
    fn partials(&self, op: &Attend, tile: &Tile, split: usize) -> Range<usize> {
        let first = tile.first_partial.expect("the plan shares the splits of this tile");
        let start = first + (split - tile.splits.start) * tile.queries;
        let len = partial_len(op.heads.dim);
        start * len..(start + tile.queries) * len
    }

    /// Computes one split of a tile that several workers share.
    fn attend_shared(&mut self, op: &Attend, tile: &Tile, split: usize) {
        self.attend_split(op, tile, split);
        let range = self.partials(op, tile, split);
        let len = range.len();
        // SAFETY: only this worker has this split of this tile.
        let out = unsafe { self.buffers.partials.get_mut(range) };
        out.copy_from_slice(&self.scratch.partial[..len]);
    }

    /// Adds up the splits of a tile, in order.
    fn merge_shared(&mut self, op: &Attend, tile: &Tile) {
        let model = self.model;
        let len = self.start_sums(op, tile);
        for split in tile.splits.clone() {
            let range = self.partials(op, tile, split);
            // SAFETY: partial results are only read in this phase.
            let partials = unsafe { self.buffers.partials.get(range) };
            merge_all(model, len / tile.queries, &mut self.scratch.sums[..len], partials);
        }
        self.finish_tile(op, tile);
    }

    /// Writes a tile's attention from `self.scratch.sums`.
    fn finish_tile(&mut self, op: &Attend, tile: &Tile) {
        let model = self.model;
        let heads = op.heads;
        let queries_per_kv = heads.per_kv();
        let sums = self.scratch.sums.chunks_exact(partial_len(heads.dim));
        for (query, sum) in sums.take(tile.queries).enumerate() {
            let (row, head) = (
                tile.rows.start + query / queries_per_kv,
                tile.kv_head * queries_per_kv + query % queries_per_kv,
            );
            let start = (row * heads.queries + head) * heads.dim;
            // SAFETY: only this worker has this tile.
            let attended = unsafe { self.buffers.attended.get_mut(start..start + heads.dim) };
            model.attend.finish(sum, attended);
            if self.arena.is_quantized() {
                model.rows.hadamard(attended);
            }
        }
    }
}

/// Adds partial results of `len` numbers each, query by query.
fn merge_all(model: &Model, len: usize, sums: &mut [f32], partials: &[f32]) {
    for (sum, partial) in sums.chunks_exact_mut(len).zip(partials.chunks_exact(len)) {
        model.attend.merge(sum, partial);
    }
}
