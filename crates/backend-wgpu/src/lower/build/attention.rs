//! Attention and latent attention.

use paguro_backend::{
    Attention, AttentionMode, DistanceBias, KvSlot, Latent, LatentQuery, LatentShape, Linear,
};

use super::Builder;
use crate::{
    layout::BLOCK,
    lower::{
        node::{Acts, Attend, Kernel, Matmul, Merge, RopeStore, Span},
        slot::Slot,
    },
    matrix::Order,
    pages::page_words,
    plan::{self, Tile},
};

impl Builder<'_> {
    /// Adds attention, from the norm to the activations of its output.
    pub(super) fn attention(&mut self, op: &Attention) {
        let group = *self.facts.group(op.kv);
        let (q_width, kv_width) = (group.out_width(), group.kv_heads * group.unpadded_dim);
        let is_bounded = self.facts.program.has_bounds();
        if !is_bounded {
            self.norm(op.norm);
        }
        let q = (&op.q, q_width);
        let spans = match (&op.k, &op.v) {
            (Some(k), Some(v)) if is_bounded => self.bounded(op.norm, [q, (k, kv_width), (v, kv_width)]),
            (Some(k), Some(v)) => self.matmuls([q, (k, kv_width), (v, kv_width)], None),
            (Some(k), None) => {
                let [q, k] = self.matmuls([q, (k, kv_width)], None);
                [q, k, k]
            }
            (None, _) => self.matmuls([q], None).repeat(3).try_into().expect("three of one"),
        };
        self.need(Slot::Queries, group.q_width());
        self.push(Kernel::RopeStore(Box::new(RopeStore {
            linears: [Some(op.q), op.k, op.k.and(op.v)],
            spans,
            qk_norm: op.qk_norm,
            v_norm: op.v_norm,
            rope: op.rope,
            position_scale: op.position_scale,
            kv: op.kv,
            is_together: false,
        })));
        if let Some(gate) = &op.gate {
            self.matmul(gate, q_width, Acts::Normed, Slot::Gates);
        }
        self.attend(op.scale, (op.soft_cap, op.distance_bias), op.kv);
        let (sinks, is_gated) = (op.sinks, op.gate.is_some());
        self.push(Kernel::Merge(Merge { kv: op.kv, sinks, is_gated, latent: None }));
    }

    /// Adds attention with all kinds of tiles of the class.
    fn attend(
        &mut self,
        scale: f32,
        (soft_cap, distance_bias): (Option<f32>, Option<DistanceBias>),
        kv: KvSlot,
    ) {
        let (facts, class) = (self.facts, self.class);
        let (group, tiling) = (facts.group(kv), facts.tilings[kv.group]);
        let is_gathered = facts.limits.attention == AttentionMode::Gather;
        for is_k in [true, false].into_iter().filter(|_| is_gathered) {
            let words = page_words(facts.kv, facts.limits.block_size, facts.limits.kv_dtype);
            self.sizes.need(Slot::Gathered { is_k }, plan::tables(facts.kv, facts.limits) * words);
            self.push(Kernel::Gather { kv, is_k });
        }
        if facts.hands_partials(class, kv.group) {
            let words = tiling.partials * group.heads * (group.head_dim + 4);
            self.sizes.need(Slot::HandoffPartials, words);
        } else {
            self.sizes.need(Slot::PartialSums, tiling.partials * group.q_width());
            self.sizes.need(Slot::PartialTops, tiling.partials * 2 * group.heads);
        }
        let is_wide = tiling.wide.is_some_and(|wide| class.from >= wide.from);
        let tiles: &[Tile] = match () {
            () if is_wide => &[Tile::Row, Tile::WideRow, Tile::WideRows],
            () if class.is_one() || tiling.rows == 1 => &[Tile::Row],
            () => &[Tile::Row, Tile::Rows],
        };
        // A single row sees what is before it.
        let is_ranged = !class.is_one() && (facts.program.bidirectional || group.spans);
        for &tile in tiles {
            self.push(Kernel::Attend(Attend {
                scale,
                soft_cap,
                distance_bias,
                kv,
                tile,
                is_gathered,
                is_ranged,
            }));
        }
    }

    /// Adds latent attention, from the norm to the activations of its output.
    pub(super) fn latent(&mut self, op: &Latent) {
        let LatentShape { heads, plain, latent, value, .. } = op.shape;
        let query_width = op.shape.query_width();
        self.norm(op.norm);
        self.matmul(&op.down, op.shape.key_dim(), Acts::Normed, Slot::LatentKeys);
        match &op.query {
            LatentQuery::Direct(linear) => {
                self.matmul(linear, query_width, Acts::Normed, Slot::LatentQueries);
            }
            LatentQuery::Down { down, rank, norm, up } => {
                self.matmul(down, *rank, Acts::Normed, Slot::LatentRank);
                self.activations(Slot::LatentRank, *rank, Some(*norm));
                self.matmul(up, query_width, Acts::Plain, Slot::LatentQueries);
            }
        }
        self.push(Kernel::StoreLatent(Box::new(op.clone())));
        self.need_acts(self.rows * heads, plain);
        self.push(Kernel::LatentQueries(Box::new(op.clone())));
        let head_dim = self.facts.group(op.kv).head_dim;
        self.head_matmul(&op.absorb, heads, Span { slot: Slot::Queries, stride: head_dim, first: 0 });
        if self.facts.limits.kv_dtype.is_quantized() {
            self.push(Kernel::HadamardQueries { kv: op.kv, heads });
        }
        self.attend(op.scale, (None, None), op.kv);
        self.need_acts(self.rows * heads, latent.next_multiple_of(BLOCK));
        self.push(Kernel::Merge(Merge { kv: op.kv, sinks: None, is_gated: false, latent: Some(latent) }));
        self.head_matmul(&op.value, heads, Span { slot: Slot::LatentValues, stride: value, first: 0 });
        self.activations(Slot::LatentValues, op.shape.value_width(), None);
    }

    /// Adds a matmul of each head of each row with its own matrix of a stack.
    fn head_matmul(&mut self, linear: &Linear, heads: usize, out: Span) {
        self.need(out.slot, heads * out.stride);
        let order = Order::Stacked(heads);
        self.push(Kernel::Matmul(Matmul {
            order,
            in_order: true,
            ..Matmul::new(vec![*linear], Acts::Plain, out)
        }));
    }
}
