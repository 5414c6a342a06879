//! Mixtures of experts. The device routes rows, so the host reads no result within a layer.
//!
//! | operation | launches | kernel file | steps |
//! |-|-|-|-|
//! | norm | one | `norm.wgsl` | all |
//! | dense network beside experts | as one elsewhere; norms of its output and of the experts' sum | `add_branch.wgsl` | all |
//! | shared expert | as a dense network; and its output's gate | `matvec.wgsl`, `matmul.wgsl`, `activate.wgsl` | all |
//! | router's logits | one | `matvec.wgsl`, `matmul.wgsl` | all |
//! | choice and weights | one | `route.wgsl` | all |
//! | rows by expert | one; with cooperative matrices activations in that order | `route_tiles.wgsl`, `gather_halves.wgsl` | many rows |
//! | rows of the experts' own width | a matmul, and its activations | `matvec.wgsl`, `matmul.wgsl`, `norm.wgsl` | all |
//! | gate and up | one or two | `matvec.wgsl`, a row of one expert | few rows |
//! | | | `matmul.wgsl`, `coop.wgsl`, a tile of rows of one expert | many rows |
//! | activation | one | `activate.wgsl` | all |
//! | down | one | as gate and up | all |
//! | weighted sum | one | `add_experts.wgsl` | all |
//! | its width | activations, a matmul, and its addition | `norm.wgsl`, `matvec.wgsl`, `matmul.wgsl`, `add_experts.wgsl` | all |
//!
//! Only experts that some row has chosen are read. A row's sums have the same order in all steps, except with cooperative matrices.

mod room;

use paguro_backend::{Beside, Dense, ExpertGroups, Experts, Linear, LoadError, Scores, SharedExpert};

use crate::{
    layout::{BLOCK, Layout},
    matrix::Order,
    ops::{self, ExpertsAdd},
    template::Constants,
};

use super::{
    Acts, Before, Grid, Launch, Lowering, Place, Store,
    Value::{F, U},
    When,
    activation::{NO_EXPERT, Places},
    kernels,
    matmuls::{Inputs, decoder, planes},
    wgsl,
};
pub(super) use room::{Buffers, Room};
use room::{Shares, row_width};

/// A matmul of experts, with the rows of activations that it reads.
struct Matmul<'l> {
    linears: Vec<&'l Linear>,
    acts: Acts,
    /// True if activations are those of rows, and not those of places.
    reads_rows: bool,
}

impl Lowering<'_> {
    /// A mixture of experts, from the norm to the residual stream.
    pub(super) fn experts(
        &mut self,
        op: &ExpertsAdd,
        before: Before,
        body: &mut Vec<Launch>,
    ) -> Result<Before, LoadError> {
        let experts = &op.experts;
        let shares = Shares::of(self.device, experts, self.limits);
        let places = self.limits.max_rows * experts.router.used;
        let most = self.device.limits.max_compute_workgroups_per_dimension as usize;
        if places.max(shares.most(self.limits.max_rows)[1]) > most {
            return Err(super::unsupported(
                self.device,
                format!("{} rows in a step with {} experts", self.limits.max_rows, experts.count),
                "a smaller --batch-tokens works",
            ));
        }
        let mut before = before;
        if let Some(beside) = &experts.beside {
            self.beside(beside, before, body)?;
            before = Before::Added;
        }
        let mut linears = match &experts.latent {
            Some(latent) => vec![&latent.down],
            None => [&experts.up].into_iter().chain(&experts.gate).collect(),
        };
        if let Some(norm) = experts.router.norm {
            self.norm(Some(norm), before, &[&experts.router.linear], body)?;
            self.route(experts, shares, body)?;
            before = Before::Added;
        } else {
            linears.push(&experts.router.linear);
        }
        if let Some(shared) = &experts.shared {
            linears.push(&shared.up);
            linears.extend(&shared.gate);
            linears.extend(&shared.output_gate);
        }
        self.norm(experts.norm, before, &linears, body)?;
        self.shared_expert(experts, body)?;
        if experts.router.norm.is_none() {
            self.route(experts, shares, body)?;
        }
        if let Some(latent) = &experts.latent {
            let narrow = self.buffers().narrow.clone();
            self.normed_matmul(&latent.down, &narrow, body)?;
            let linears: Vec<&Linear> = [&experts.up].into_iter().chain(&experts.gate).collect();
            self.activations_of(&narrow, latent.width, None, &linears, body)?;
        }
        let gate_up = self.gate_up_matmuls(experts);
        let mut strides = Vec::new();
        for (index, matmul) in gate_up.iter().enumerate() {
            let stride = matmul.linears.len() * experts.width;
            let place = Place { buffer: self.scratch[index].clone(), stride, first: 0 };
            self.expert_matmul(experts, shares, matmul, &place, body)?;
            strides.push(place);
        }
        let (gate, up) = match (&strides[..], experts.gate.is_some()) {
            ([up], false) => (None, up.clone()),
            ([both], true) => (Some(both.clone()), Place { first: experts.width, ..both.clone() }),
            ([gate, up, ..], _) => (Some(gate.clone()), up.clone()),
            ([], _) => unreachable!("there is a matmul for gate and up"),
        };
        let tile_experts = self.buffers().tile_experts.clone();
        let pairs = Places::Pairs { used: experts.router.used as u32 };
        for (when, places) in
            shares.variants(pairs, |tiles| Places::Tiles { tiles, tile_experts: &tile_experts })
        {
            let launch =
                self.activate(experts.activation, gate.as_ref(), &up, false, &experts.down, places)?;
            body.push(Launch { when, ..launch });
        }
        let stride = row_width(experts, self.program.hidden);
        let results = Place { buffer: self.buffers().results.clone(), stride, first: 0 };
        let down = Matmul { linears: vec![&experts.down], acts: Acts::Plain, reads_rows: false };
        self.expert_matmul(experts, shares, &down, &results, body)?;
        self.add_experts(op, shares, body)
    }

    fn buffers(&self) -> &Buffers {
        self.experts.as_ref().expect("programs with experts have the buffers")
    }

    /// The shared expert's result, and the gate of its output.
    fn shared_expert(&mut self, experts: &Experts, body: &mut Vec<Launch>) -> Result<(), LoadError> {
        let Some(shared) = &experts.shared else { return Ok(()) };
        let (gate, up) = match &shared.gate {
            Some(gate) => {
                let linears = [gate, &shared.up];
                let groups = self.groups(linears, |_| Order::Joined);
                let [gate, up] = self.matmuls(linears, &groups, Store::WRITE, When::Always, body)?;
                (Some(gate), up)
            }
            None => {
                let groups = self.groups([&shared.up], |_| Order::Joined);
                let [up] = self.matmuls([&shared.up], &groups, Store::WRITE, When::Always, body)?;
                (None, up)
            }
        };
        let launch =
            self.activate(experts.activation, gate.as_ref(), &up, false, &shared.down, Places::Rows)?;
        body.push(launch);
        self.shared_result(&shared.down, body)?;
        if let Some(gate) = &shared.output_gate {
            let (buffer, order) = (self.buffers().output_gate.clone(), Order::Joined);
            let out = Place { buffer, stride: 1, first: 0 };
            let inputs = Inputs { linears: &[gate], order, acts: Acts::Normed, in_order: false };
            self.matmul(&inputs, &out, Store::WRITE, When::Always, body)?;
        }
        Ok(())
    }

    /// The result of a dense network beside the experts.
    fn beside(&mut self, op: &Beside, before: Before, body: &mut Vec<Launch>) -> Result<(), LoadError> {
        let Dense { norm, width: _, gate, up, activation, down, post_norm: _ } = &op.dense;
        let linears: Vec<&Linear> = gate.iter().chain([up]).collect();
        self.norm(*norm, before, &linears, body)?;
        let (gate, up) = match gate {
            Some(gate) => {
                let groups = self.groups([gate, up], |_| Order::Joined);
                let [gate, up] = self.matmuls([gate, up], &groups, Store::WRITE, When::Always, body)?;
                (Some(gate), up)
            }
            None => {
                let groups = self.groups([up], |_| Order::Joined);
                let [up] = self.matmuls([up], &groups, Store::WRITE, When::Always, body)?;
                (None, up)
            }
        };
        let launch = self.activate(*activation, gate.as_ref(), &up, false, down, Places::Rows)?;
        body.push(launch);
        self.shared_result(down, body)
    }

    /// The matmul of a network beside the experts onto its result.
    fn shared_result(&mut self, down: &Linear, body: &mut Vec<Launch>) -> Result<(), LoadError> {
        let buffer = self.buffers().shared.clone();
        let out = Place { buffer, stride: self.program.hidden, first: 0 };
        let order = Order::Joined;
        let inputs = Inputs { linears: &[down], order, acts: Acts::Plain, in_order: false };
        self.matmul(&inputs, &out, Store::WRITE, When::Always, body)
    }

    /// The router: its logits, the choice, and in steps of many rows their order by expert.
    fn route(&mut self, experts: &Experts, shares: Shares, body: &mut Vec<Launch>) -> Result<(), LoadError> {
        let router = &experts.router;
        let logits = self.buffers().logits.clone();
        let place = Place { buffer: logits.clone(), stride: experts.count, first: 0 };
        let inputs =
            Inputs { linears: &[&router.linear], order: Order::Joined, acts: Acts::Normed, in_order: true };
        self.matmul(&inputs, &place, Store::WRITE, When::Always, body)?;
        let selection = router.selection_bias.map(|bias| self.vector(bias)).transpose()?;
        let counts: Constants = vec![("COUNT", U(experts.count as u32)), ("USED", U(router.used as u32))];
        let mut constants = counts.clone();
        constants.extend([
            ("SELECTION", U(u32::from(selection.is_some()))),
            ("SIGMOID", U(u32::from(router.scores == Scores::Sigmoid))),
            ("RENORMALIZE", U(u32::from(router.renormalize))),
            ("FACTOR", F(router.factor)),
            ("EXPERT_SCALE", U(u32::from(router.expert_scale.is_some()))),
        ]);
        if let Some(ExpertGroups { count, used, best }) = router.groups {
            let counts = [("EXPERT_GROUPS", count), ("USED_GROUPS", used), ("BEST", best)];
            constants.extend(counts.map(|(name, count)| (name, U(count as u32))));
        }
        let expert_scale = router.expert_scale.map(|scale| self.vector(scale)).transpose()?;
        let Buffers { chosen, weights, places, sources, tile_experts, .. } = self.buffers();
        let [chosen, weights, places, sources, tile_experts] =
            [chosen, weights, places, sources, tile_experts].map(Clone::clone);
        let mut buffers = vec![("logits", &logits), ("chosen", &chosen), ("weights", &weights)];
        buffers.extend(selection.iter().map(|selection| ("selection", selection)));
        buffers.extend(expert_scale.iter().map(|scale| ("expert_scale", scale)));
        body.push(self.launch("route", wgsl!("args", "route"), constants, &buffers, Grid::Rows, 0)?);
        let mut constants = counts;
        constants.push(NO_EXPERT);
        let buffers = [
            ("chosen", &chosen),
            ("places", &places),
            ("sources", &sources),
            ("tile_experts", &tile_experts),
        ];
        for (when, tiles) in shares.variants(None, Some) {
            let Some(tiles) = tiles else { continue };
            let constants = [&constants[..], &[("TILE", U(tiles.tile))]].concat();
            let files = wgsl!("args", "route_tiles");
            let launch = self.launch("route_tiles", files, constants, &buffers, Grid::One, 0)?;
            body.push(Launch { when, ..launch });
        }
        Ok(())
    }

    /// Returns gate and up as one matmul if they have one layout and a binding holds an expert of both, otherwise as
    /// two. Without a gate, only up.
    fn gate_up_matmuls<'l>(&self, experts: &'l Experts) -> Vec<Matmul<'l>> {
        let layout = |linear: &Linear| Layout::of(self.weights.matrix(linear.matrix).format);
        let acts = if experts.latent.is_some() { Acts::Plain } else { Acts::Normed };
        let matmul = |linears| Matmul { linears, acts, reads_rows: true };
        let up = &experts.up;
        match &experts.gate {
            None => vec![matmul(vec![up])],
            Some(gate) if layout(gate) == layout(up) => vec![matmul(vec![gate, up])],
            Some(gate) => vec![matmul(vec![gate]), matmul(vec![up])],
        }
    }

    /// A matmul of each row with the matrices of its experts.
    fn expert_matmul(
        &mut self,
        experts: &Experts,
        shares: Shares,
        matmul: &Matmul<'_>,
        place: &Place,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let acts = matmul.acts;
        let inputs =
            Inputs { linears: &matmul.linears, order: Order::Stacked(experts.count), acts, in_order: true };
        let matrix = self.matrix(&inputs)?;
        let read_acts: Vec<_> = self.read_acts(acts).collect();
        let (factors, zero) = (self.factors.clone(), self.zero.clone());
        let outputs = matmul.linears.iter().map(|linear| self.weights.matrix(linear.matrix).rows);
        let outputs = outputs.sum::<usize>();
        let Buffers { chosen, sources, tile_experts, .. } = self.buffers();
        let [chosen, sources, tile_experts] = [chosen, sources, tile_experts].map(Clone::clone);
        let side = self.device.cooperative.filter(|_| matrix.layout != Layout::F32);
        let (halves, halves_at) = self.expert_halves(shares, matmul, matrix.layout, body)?;
        let used = experts.router.used as u32;
        for part in &matrix.parts {
            let bias = self.bias(&inputs, part.first..part.first + part.rows)?;
            let mut variants = shares.variants(kernels::of_pairs(), |tiles| match side {
                Some(side) => kernels::of_cooperative_tiles(side, tiles.tile),
                None => kernels::of_tiles(self.device, tiles.tile),
            });
            if self.device.as_hardware && matrix.layout != Layout::F32 {
                let shapes = [(16, 16), (16, 32), (8, 16), (8, 32)];
                variants.extend(
                    shapes.map(|(side, tile)| (When::Never, kernels::of_cooperative_tiles(side, tile))),
                );
            }
            for (when, kernel) in variants {
                let is_tiled = kernel.covers()[0] > 1;
                let (files, mut constants) =
                    kernel.kernel(self.device, matrix.layout, matrix.blocks, halves_at);
                constants.extend([
                    ("EXPERTS", U(1)),
                    ("FIRST_EXPERT", U((part.first / outputs) as u32)),
                    ("HELD_EXPERTS", U((part.rows / outputs) as u32)),
                    ("PLACES_OF_ROW", U(if matmul.reads_rows { used } else { 1 })),
                    ("BY_SOURCE", U(u32::from(matmul.reads_rows))),
                    ("FACTORS", U(u32::from(acts == Acts::Normed))),
                    ("BLOCKS", U(matrix.blocks as u32)),
                    ("OUTPUTS", U(outputs as u32)),
                    ("OUT_STRIDE", U(place.stride as u32)),
                    ("OUT_FIRST", U(place.first as u32)),
                    ("BIAS", U(u32::from(bias.is_some()))),
                ]);
                let files = [wgsl!("args"), decoder(matrix.layout), wgsl!("factor", "store"), files].concat();
                let name = format!("{}_experts", kernel.name(matrix.layout));
                if when == When::Never {
                    self.device.show(&name, &files, &constants);
                    continue;
                }
                let mut buffers = vec![
                    ("out", &place.buffer),
                    ("row_factors", &factors),
                    ("chosen", &chosen),
                    ("sources", &sources),
                    ("tile_experts", &tile_experts),
                    ("zero", &zero),
                ];
                buffers.extend(halves.iter().map(|halves| ("x_halves", halves)));
                buffers.extend(planes(part));
                buffers.extend(read_acts.iter().map(|(name, buffer)| (*name, buffer)));
                buffers.extend(bias.iter().map(|bias| ("bias", bias)));
                let kernels = vec![self.kernel(&name, &files, &constants, &buffers)];
                let each = (outputs as u32).div_ceil(kernel.covers()[1]);
                let grid =
                    match shares.tiles.into_iter().find(|tiles| is_tiled && tiles.tile == kernel.covers()[0])
                    {
                        None => Grid::Pairs { used, each, along_x: true },
                        Some(tiles) => Grid::ExpertTiles { tiles, each, along_x: true },
                    };
                let counter = self.counter(&[format!("{name}[{outputs}x{}]", self.inputs(&inputs))]);
                body.push(Launch { when, kernels, grid, kv_group: 0, counter, timed_with: None });
            }
        }
        Ok(())
    }

    /// Returns the buffer and offset of half-precision activations in the order of places, if cooperative matrices use
    /// them.
    fn expert_halves(
        &mut self,
        shares: Shares,
        matmul: &Matmul<'_>,
        layout: Layout,
        body: &mut Vec<Launch>,
    ) -> Result<(Option<wgpu::Buffer>, u32), LoadError> {
        let Some(halves) = self.buffers().halves.clone() else { return Ok((None, 0)) };
        let (made, at) = (self.half_acts(matmul.acts, layout), self.halves_at(layout));
        if !matmul.reads_rows {
            // Activations between up and down are made in this order.
            return Ok((Some(made), at));
        }
        let width = self.weights.matrix(matmul.linears[0].matrix).cols;
        let blocks = width.div_ceil(BLOCK) as u32;
        let Buffers { sources, tile_experts, .. } = self.buffers();
        let [sources, tile_experts] = [sources, tile_experts].map(Clone::clone);
        let buffers = [
            ("from_halves", &made),
            ("to_halves", &halves),
            ("sources", &sources),
            ("tile_experts", &tile_experts),
        ];
        for (when, tiles) in shares.variants(None, Some) {
            let Some(tiles) = tiles else { continue };
            let constants =
                vec![("ACT_BLOCKS", U(blocks)), ("HALVES_AT", U(at)), ("TILE", U(tiles.tile)), NO_EXPERT];
            let grid = Grid::ExpertTiles { tiles, each: (4 * blocks).div_ceil(64), along_x: false };
            let files = wgsl!("args", "gather_halves");
            let launch = self.launch("gather_halves", files, constants, &buffers, grid, 0)?;
            body.push(Launch { when, ..launch });
        }
        Ok((Some(halves), 0))
    }

    /// Adds the weighted sum of a row's experts to its branch.
    fn add_experts(
        &mut self,
        op: &ExpertsAdd,
        shares: Shares,
        body: &mut Vec<Launch>,
    ) -> Result<Before, LoadError> {
        let (experts, add) = (&op.experts, &op.add);
        let is_direct = add.post_norm.is_none() && !add.waits;
        let branch = self.branch_of(add);
        let Buffers { places, sum, shared, narrow, .. } = self.buffers();
        let [places, sum, shared, narrow] = [places, sum, shared, narrow].map(Clone::clone);
        let to_stream = if is_direct { (self.x.clone(), Some(add.scale)) } else { (branch.clone(), None) };
        let (out, scale) = match (&experts.beside, &experts.latent) {
            (Some(_), _) => (sum.clone(), None),
            (None, Some(_)) => (narrow.clone(), None),
            (None, None) => to_stream.clone(),
        };
        let width = row_width(experts, self.program.hidden);
        for (when, is_tiled) in shares.variants(0, |_| 1) {
            let constants = vec![("TILED", U(is_tiled)), ("CHOSEN", U(1))];
            let results = self.buffers().results.clone();
            let beside = experts.shared.as_ref().filter(|_| experts.latent.is_none());
            let launch =
                self.add_results(experts, beside, width, (&results, &places), constants, (&out, scale))?;
            body.push(Launch { when, ..launch });
        }
        if let Some(latent) = &experts.latent {
            self.activations_of(&narrow, latent.width, None, &[&latent.up], body)?;
            let place = Place { buffer: sum.clone(), stride: self.program.hidden, first: 0 };
            let inputs =
                Inputs { linears: &[&latent.up], order: Order::Joined, acts: Acts::Plain, in_order: false };
            self.matmul(&inputs, &place, Store::WRITE, When::Always, body)?;
            let hidden = self.program.hidden;
            let (out, scale) = to_stream;
            let launch = self.add_results(
                experts,
                experts.shared.as_ref(),
                hidden,
                (&sum, &places),
                vec![],
                (&out, scale),
            )?;
            body.push(launch);
        }
        if let Some(beside) = &experts.beside {
            let add = |post_norm| ops::Add { post_norm, scale: 1.0, waits: false };
            let writes = vec![("WRITES", U(1))];
            self.add_to(&branch, Some(&sum), &add(Some(beside.sum_norm)), 1.0, writes, body)?;
            self.add_to(&branch, Some(&shared), &add(beside.dense.post_norm), 1.0, vec![], body)?;
            if is_direct {
                self.add_branch(&op.add, &branch, body)?;
            }
        }
        self.after_branch(add, &branch, body)
    }

    /// Adds results of experts, or of the matmul that follows their sum, to the shared expert's. With a scale, adds them to the
    /// rows of `out`.
    fn add_results(
        &mut self,
        experts: &Experts,
        shared: Option<&SharedExpert>,
        width: usize,
        (results, places): (&wgpu::Buffer, &wgpu::Buffer),
        mut constants: Constants,
        (out, scale): (&wgpu::Buffer, Option<f32>),
    ) -> Result<Launch, LoadError> {
        let Buffers { weights, shared: shared_out, output_gate, .. } = self.buffers();
        let [weights, shared_out, output_gate] = [weights, shared_out, output_gate].map(Clone::clone);
        constants.extend([
            ("WIDTH", U(width as u32)),
            ("USED", U(experts.router.used as u32)),
            ("SHARED_EXPERT", U(u32::from(shared.is_some()))),
            ("OUTPUT_GATE", U(u32::from(shared.is_some_and(|shared| shared.output_gate.is_some())))),
            ("ADD", U(u32::from(scale.is_some()))),
            ("SCALE", F(scale.unwrap_or(1.0))),
        ]);
        let buffers = [
            ("results", results),
            ("weights", &weights),
            ("places", places),
            ("shared_out", &shared_out),
            ("output_gate", &output_gate),
            ("out", out),
        ];
        let grid = Grid::Each(width.div_ceil(256) as u32);
        self.launch("add_experts", wgsl!("args", "add_experts"), constants, &buffers, grid, 0)
    }
}
