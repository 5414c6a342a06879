//! Mixtures of experts. The device routes rows, so the host reads no result within a layer.

use paguro_backend::{Experts, LoadError};

use super::{Add, Builder};
use crate::{
    layout::BLOCK,
    lower::{
        kernels::Shares,
        node::{
            Activate, Acts, AddBranch, AddExperts, Epilogue, ExpertMatmul, Input, Kernel, Places, Pool, Span,
        },
        slot::Slot,
    },
    matrix::{Order, part_ranges},
};

impl Builder<'_> {
    /// Adds a mixture of experts, from the norm to the residual stream.
    pub(super) fn experts(&mut self, layer: usize, op: &Experts, scale: f32) -> Result<(), LoadError> {
        let facts = self.facts;
        let pool = facts.pool(layer, op, self.class);
        let (hidden, used) = (facts.program.hidden, op.router.used);
        let tiles = Shares::of(&facts.target, op, facts.limits).tiles(self.class);
        // Rows of activations and results of experts.
        let most_tiles = tiles.map_or(0, |tiles| tiles.most(self.rows as u32) as usize);
        let places = tiles.map_or(0, |tiles| most_tiles * tiles.tile as usize).max(self.rows * used);
        if places > facts.target.workgroups as usize {
            return Err(facts.unsupported(
                format!("{} rows in a step with {} experts", facts.limits.max_rows, op.count),
                "a smaller --batch-tokens works",
            ));
        }
        if let Some(beside) = &op.beside {
            self.dense(&beside.dense, Slot::Shared);
        }
        if op.router.norm.is_some() {
            self.norm(op.router.norm);
            self.route(op, pool, most_tiles, places);
        }
        self.norm(op.norm);
        self.shared_expert(op);
        if op.router.norm.is_none() {
            self.route(op, pool, most_tiles, places);
        }
        // Elements of a row that experts read.
        let width = op.latent.map_or(hidden, |latent| latent.width);
        let mut acts = Acts::Normed;
        if let Some(latent) = &op.latent {
            self.matmul(&latent.down, width, Acts::Normed, Slot::Narrow);
            self.activations(Slot::Narrow, width, None);
            acts = Acts::Plain;
        }
        let matmul = |linears: Vec<_>, acts, reads_rows, out| ExpertMatmul {
            linears,
            order: Order::Stacked(op.count),
            count: op.count,
            used,
            acts,
            input: Input::Ready,
            reads_rows,
            chooses: None,
            sums: None,
            tiles,
            pool,
            stack: 0,
            out,
            epilogue: Epilogue::STORE,
        };
        let scratch = |index, stride| Span { slot: Slot::Scratch(index), stride, first: 0 };
        let layout = |linear: &paguro_backend::Linear| facts.layout(linear.matrix);
        self.sizes.need(Slot::Scratch(0), 2 * places * op.width);
        self.sizes.need(Slot::Scratch(1), places * op.width);
        let (mut matmuls, gate, up) = match &op.gate {
            None => {
                let up = scratch(0, op.width);
                (vec![matmul(vec![op.up], acts, true, up)], None, up)
            }
            Some(gate) if layout(gate) == layout(&op.up) => {
                let both = scratch(0, 2 * op.width);
                let up = Span { first: op.width, ..both };
                (vec![matmul(vec![*gate, op.up], acts, true, both)], Some(both), up)
            }
            Some(gate) => {
                let [a, b] = [scratch(0, op.width), scratch(1, op.width)];
                (vec![matmul(vec![*gate], acts, true, a), matmul(vec![op.up], acts, true, b)], Some(a), b)
            }
        };
        matmuls.iter_mut().enumerate().for_each(|(stack, matmul)| matmul.stack = stack);
        let mut down =
            matmul(vec![op.down], Acts::Plain, false, Span { slot: Slot::Results, stride: width, first: 0 });
        down.stack = matmuls.len();
        if pool.is_some() {
            matmuls.iter().chain([&down]).for_each(|matmul| self.stage(matmul));
        }
        if let (Some(tiles), Some(_)) = (tiles, facts.target.cooperative) {
            self.sizes.need(Slot::Halves, (places * width.div_ceil(BLOCK) + BLOCK) * 16);
            // Activations between up and down are made in the order of places.
            for matmul in matmuls {
                let layout = layout(&matmul.linears[0]);
                self.push(Kernel::GatherHalves { acts, layout, width, tiles });
                self.push(Kernel::ExpertMatmul(matmul));
            }
        } else {
            matmuls.into_iter().for_each(|matmul| self.push(Kernel::ExpertMatmul(matmul)));
        }
        self.activate(Activate {
            activation: op.activation,
            gate,
            up,
            in_turn: false,
            width: op.width,
            places: tiles.map_or(Places::Pairs { used: used as u32 }, Places::Tiles),
        });
        self.sizes.need(Slot::Results, places * width);
        self.push(Kernel::ExpertMatmul(down));
        self.sum(op, width, tiles.is_some());
        self.add(Add { post_norm: op.post_norm, scale, waits: false });
        Ok(())
    }

    /// Adds the shared expert's result, and the gate of its output.
    fn shared_expert(&mut self, op: &Experts) {
        let Some(shared) = &op.shared else { return };
        let (gate, up) = self.gate_and_up(shared.gate.as_ref(), &shared.up, shared.width);
        let (activation, width, places) = (op.activation, shared.width, Places::Rows);
        self.activate(Activate { activation, gate, up, in_turn: false, width, places });
        self.matmul(&shared.down, self.facts.program.hidden, Acts::Plain, Slot::Shared);
        if let Some(gate) = &shared.output_gate {
            self.matmul(gate, 1, Acts::Normed, Slot::OutputGate);
        }
    }

    /// Adds the router: its logits, the choice, and with tiles the order of rows by expert.
    fn route(&mut self, op: &Experts, pool: Option<Pool>, most_tiles: usize, places: usize) {
        let used = op.router.used;
        self.matmul(&op.router.linear, op.count, Acts::Normed, Slot::RouterLogits);
        if let Some(crate::lower::node::Node { kernel: Kernel::Matmul(matmul), .. }) = self.nodes.last_mut() {
            matmul.in_order = true;
        }
        self.need(Slot::Chosen, used);
        self.need(Slot::Weights, used);
        let chooses = pool.filter(|_| self.class.is_one()).map(|_| Box::new(op.clone()));
        if chooses.is_none() {
            self.push(Kernel::Route(Box::new(op.clone())));
        }
        if let Some(pool) = pool {
            self.sizes.need(Slot::Fills, 1 + 2 * pool.count);
            self.push(Kernel::PlaceExperts { pool, chooses });
        }
        let tiles = Shares::of(&self.facts.target, op, self.facts.limits).tiles(self.class);
        if let Some(tiles) = tiles {
            self.need(Slot::Places, used);
            self.sizes.need(Slot::Sources, places);
            self.sizes.need(Slot::TileExperts, most_tiles);
            self.push(Kernel::RouteTiles(tiles));
        }
    }

    /// Enters the sizes of the staging area for a matmul's experts. Without weights, they are a part of the weights' sizes.
    fn stage(&mut self, matmul: &ExpertMatmul) {
        let (facts, stack) = (self.facts, matmul.stack);
        let Some(pool) = matmul.pool.filter(|_| facts.weights.is_some()) else { return };
        let words =
            facts.layout(matmul.linears[0].matrix).row_words(facts.cols(&matmul.linears[0]).div_ceil(BLOCK));
        let counts: Vec<usize> = matmul.linears.iter().map(|linear| facts.rows(linear)).collect();
        let limit = facts.target.binding_limit;
        let parts = part_ranges(limit, words, &counts, matmul.order, pool.slots..pool.count);
        for (part, rows) in parts.iter().enumerate() {
            for (plane, words) in words.iter().enumerate().filter(|(_, words)| **words > 0) {
                self.sizes.need(Slot::Staged { stack, part, plane }, rows.len() * words);
            }
        }
    }

    /// Adds the weighted sum of a row's experts as a branch.
    fn sum(&mut self, op: &Experts, width: usize, is_tiled: bool) {
        let hidden = self.facts.program.hidden;
        let out = match (&op.beside, &op.latent) {
            (Some(_), _) => Slot::Sum,
            (None, Some(_)) => Slot::Narrow,
            (None, None) => Slot::Branch,
        };
        self.need(out, width);
        let shared = op.shared.as_ref();
        let add = |results, is_weighted, width, has_shared: bool, out| AddExperts {
            results,
            is_weighted,
            is_tiled: is_weighted && is_tiled,
            used: op.router.used,
            width,
            has_shared,
            has_output_gate: has_shared && shared.is_some_and(|shared| shared.output_gate.is_some()),
            out,
            adds: None,
        };
        let has_shared = shared.is_some() && op.latent.is_none();
        self.push(Kernel::AddExperts(add(Slot::Results, true, width, has_shared, out)));
        if let Some(latent) = &op.latent {
            self.activations(Slot::Narrow, width, None);
            self.matmul(&latent.up, hidden, Acts::Plain, Slot::Sum);
            let sum = add(Slot::Sum, false, hidden, shared.is_some(), Slot::Branch);
            self.push(Kernel::AddExperts(sum));
        }
        if let Some(beside) = &op.beside {
            let (to, out_scale) = (Slot::Branch, 1.0);
            let (from, post_norm) = (Some(Slot::Sum), Some(beside.sum_norm));
            let sum = AddBranch { from, to, post_norm, scale: 1.0, out_scale, writes: true };
            self.push(Kernel::AddBranch(sum));
            self.add_branch(Some(Slot::Shared), to, beside.dense.post_norm, out_scale);
        }
    }
}
