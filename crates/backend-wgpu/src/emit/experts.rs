//! Kernels of mixtures of experts.
//!
//! No decision of the host is needed, and only chosen experts are read. In steps of one row, every workgroup of gate and
//! up chooses the experts itself (`choose.wgsl`), and `sum_matvec.wgsl` multiplies down and adds the results. In steps
//! of few rows, `route.wgsl` chooses, and a workgroup multiplies one row with the weights of one of its experts. In
//! steps of many rows, `route_tiles.wgsl` groups rows by expert into tiles, which have 16 rows while experts have at
//! most that many rows on average, and a workgroup multiplies a tile. If the device has cooperative matrices, all tiles
//! use them (`gather_halves.wgsl`). Without them, all kernels sum a row's inputs in one order, and its experts are added
//! in ascending order, so the bits are the same.

use std::ops::Range;

use paguro_backend::{ExpertGroups, Experts, Scores};

use super::{
    code::{Code, Coded, Coder, Part, Slots, half_acts, read_acts},
    launch::Grid,
    matmul::{decoder, gate_finish, input, store_constants},
    rows::NO_EXPERT,
    vectors, wgsl,
};
use crate::{
    hidden::Hazards,
    layout::{BLOCK, Layout},
    lower::{
        Acts, AddExperts, Epilogue, ExpertMatmul, ExpertTiles, FillExperts, Formats, Input, Pool, Slot,
        kernels::{self, Matmul},
    },
    template::{
        Constants,
        Value::{F, U},
    },
};

/// Name of the launch that finds places for experts.
pub const PLACE_EXPERTS: &str = "place_experts";

/// Workgroups that copy an expert. One workgroup alone cannot have enough loads of the host's memory on their way.
const COPY_WORKGROUPS: u32 = 64;

impl Coder<'_> {
    /// Returns the launch of the choice of experts.
    pub fn route(&self, op: &Experts) -> Coded {
        let part = Part::new(wgsl!("args", "route"), vec![], vec![]).with(choice(op, 256));
        Coded::new("route", part, Grid::Rows)
    }

    /// Returns the launch that orders rows by expert.
    pub fn route_tiles(&self, tiles: ExpertTiles) -> Coded {
        let constants =
            vec![("COUNT", U(tiles.count)), ("USED", U(tiles.used)), NO_EXPERT, ("TILE", U(tiles.tile))];
        let slots = vec![
            ("chosen", Slot::Chosen),
            ("places", Slot::Places),
            ("sources", Slot::Sources),
            ("tile_experts", Slot::TileExperts),
        ];
        Coded::new("route_tiles", Part::new(wgsl!("args", "route_tiles"), constants, slots), Grid::One)
    }

    /// Returns the launch that finds places for the chosen experts of a layer with slots.
    pub fn place_experts(&self, pool: &Pool, chooses: Option<&Experts>) -> Coded {
        let constants = vec![
            ("SLOTS", U(pool.slots as u32)),
            ("STREAMS", U(u32::from(pool.streams))),
            ("CHOOSES", U(u32::from(chooses.is_some()))),
        ];
        let chosen = match chooses {
            Some(experts) => choice(experts, 256),
            None => {
                Part::new(&[], vec![("COUNT", U(pool.count as u32)), ("USED", U(pool.used as u32))], vec![])
            }
        };
        let slots = vec![("chosen", Slot::Chosen), ("pool", Slot::Pool(pool.layer)), ("fills", Slot::Fills)];
        Coded::new(
            PLACE_EXPERTS,
            Part::new(wgsl!("args", "place_experts"), constants, slots).with(chosen),
            Grid::One,
        )
    }

    /// Returns the launches that copy a matmul's experts, one for each part of the host's planes and of those on the device.
    pub fn fill_experts(&mut self, op: &FillExperts) -> Vec<Coded> {
        let FillExperts { pool, stack, linears, order } = op;
        let weights = self.weights_in(linears, *order, Some(pool.slots));
        let outputs: usize = linears.iter().map(|linear| self.facts.rows(linear)).sum();
        let words = weights.layout.row_words(weights.blocks).map(|words| words * outputs);
        let (to, most) = match pool.streams {
            true => (&weights.staged, pool.count - pool.slots),
            false => (&weights.parts, pool.slots),
        };
        let mut launches = Vec::new();
        for ((from_part, from), (to_part, to)) in
            weights.host.iter().enumerate().flat_map(|from| to.iter().enumerate().map(move |to| (from, to)))
        {
            let experts =
                |rows: &Range<usize>| [rows.start / outputs, rows.len() / outputs].map(|n| U(n as u32));
            let ([from_first, from_held], [to_first, to_held]) = (experts(from), experts(to));
            let mut constants = vec![
                ("FROM_FIRST", from_first),
                ("FROM_HELD", from_held),
                ("TO_FIRST", to_first),
                ("TO_HELD", to_held),
                ("WORKGROUPS", U(COPY_WORKGROUPS)),
            ];
            let mut slots = vec![("fills", Slot::Fills)];
            let planes = words.iter().enumerate().filter(|(_, words)| **words > 0);
            let names = [
                ("from_0", "to_0", "UNITS_0", "WIDE_0"),
                ("from_1", "to_1", "UNITS_1", "WIDE_1"),
                ("from_2", "to_2", "UNITS_2", "WIDE_2"),
            ];
            let mut count = 0;
            for ((plane, &words), (from, to, units, wide)) in planes.zip(names) {
                let matrix = weights.index;
                let is_wide = words.is_multiple_of(4);
                constants.push((units, U((words / if is_wide { 4 } else { 1 }) as u32)));
                constants.push((wide, U(u32::from(is_wide))));
                slots.push((from, Slot::HostPlane { matrix, part: from_part, plane }));
                let to_slot = match pool.streams {
                    true => Slot::Staged { stack: *stack, part: to_part, plane },
                    false => Slot::Plane { matrix, part: to_part, plane },
                };
                slots.push((to, to_slot));
                count += 1;
            }
            constants.push(("PLANES", U(count)));
            let grid = Grid::Copies { used: pool.used as u32, most: most as u32, each: COPY_WORKGROUPS };
            let part = Part::new(wgsl!("args", "fill_experts"), constants, slots);
            launches.push(Coded::new("fill_experts", part, grid));
        }
        launches
    }

    /// Returns the launch that copies activations in half precision in the order of places.
    pub fn gather_halves(&self, acts: Acts, layout: Layout, width: usize, tiles: ExpertTiles) -> Coded {
        let blocks = width.div_ceil(BLOCK) as u32;
        let constants = vec![
            ("ACT_BLOCKS", U(blocks)),
            ("HALVES_AT", U(self.halves_at(layout))),
            ("TILE", U(tiles.tile)),
            NO_EXPERT,
        ];
        let slots = vec![
            ("from_halves", half_acts(acts, layout)),
            ("to_halves", Slot::Halves),
            ("sources", Slot::Sources),
            ("tile_experts", Slot::TileExperts),
        ];
        let part = Part::new(wgsl!("args", "gather_halves"), constants, slots);
        let grid = Grid::ExpertTiles { tiles, each: (4 * blocks).div_ceil(64), along_x: false };
        Coded::new("gather_halves", part, grid)
    }

    /// Returns the launches of a matmul of each row with the matrices of its experts, one for each part of the stack.
    pub fn expert_matmul(&mut self, op: &ExpertMatmul, formats: Formats) -> Vec<Coded> {
        if let Some(sum) = &op.sums {
            return vec![self.sum_matvec(op, sum, formats)];
        }
        let target = self.facts.target.clone();
        let weights = self.weights_in(&op.linears, op.order, op.pool.map(|pool| pool.slots));
        let layout = weights.layout;
        let outputs: usize = op.linears.iter().map(|linear| self.facts.rows(linear)).sum();
        let kernel = match (op.tiles, target.cooperative.filter(|_| layout != Layout::F32)) {
            // The activations that a workgroup quantizes are shared by a block of outputs.
            (None, _) if op.input == Input::Floats => {
                kernels::one_row(&target, layout, outputs as u32, Some(BLOCK as u32))
            }
            // Each workgroup chooses, so a few large ones are faster.
            (None, _) if op.chooses.is_some() => {
                kernels::one_row(&target, layout, outputs as u32, Some(2 * BLOCK as u32))
            }
            (None, _) => kernels::of_pairs(),
            (Some(tiles), Some(side)) => kernels::of_cooperative_tiles(side, tiles.tile),
            (Some(tiles), None) => kernels::of_tiles(&target, tiles.tile),
        };
        // Activations in half precision of rows were gathered; those between up and down are made in the order of places.
        let (halves, halves_at) = match op.reads_rows {
            true => (Slot::Halves, 0),
            false => (half_acts(op.acts, layout), self.halves_at(layout)),
        };
        let hidden = self.facts.program.hidden;
        let mut launches = Vec::new();
        let bias = self.bias(&op.linears, op.order, 0..op.count * outputs);
        let own = weights.parts.iter().enumerate().map(|(part, rows)| (rows, self.planes(&weights, part)));
        let staged = weights.staged.iter().enumerate().filter(|_| op.pool.is_some_and(|pool| pool.streams));
        let staged = staged.map(|(part, rows)| (rows, staged_planes(op.stack, part)));
        for (rows, planes) in Vec::from_iter(own.chain(staged)) {
            let mut constants = vec![
                ("EXPERTS", U(1)),
                ("FIRST_EXPERT", U((rows.start / outputs) as u32)),
                ("HELD_EXPERTS", U((rows.len() / outputs) as u32)),
                ("PLACES_OF_ROW", U(if op.reads_rows { op.used as u32 } else { 1 })),
                ("BY_SOURCE", U(u32::from(op.reads_rows))),
                ("BLOCKS", U(weights.blocks as u32)),
                ("OUTPUTS", U(outputs as u32)),
                ("OUT_STRIDE", U(op.out.stride as u32)),
                ("OUT_FIRST", U(op.out.first as u32)),
            ];
            let (places, place_constants) = place_of_expert(op.pool);
            constants.extend(place_constants);
            constants.extend(store_constants(&op.epilogue));
            let mut slots = vec![
                ("out", op.out.slot),
                ("row_factors", Slot::Factors),
                ("row_squares", Slot::Squares),
                ("chosen", Slot::Chosen),
                ("sources", Slot::Sources),
                ("tile_experts", Slot::TileExperts),
                ("zero", Slot::Zero),
                ("x_halves", halves),
            ];
            slots.extend(places);
            slots.extend(planes);
            slots.extend(read_acts(op.acts));
            let files = [wgsl!("args", "place_of_expert"), decoder(layout), wgsl!("factor")].concat();
            let (mut suffix, mut finish) = ("_experts", Part::new(wgsl!("store"), vec![], vec![]));
            if let Epilogue::Gate(activation) = op.epilogue {
                suffix = "_experts_gate";
                finish = gate_finish(activation, outputs / 2);
                constants.push(("FINISHES", U(1)));
            }
            let mut input = input(op.input, op.acts, layout, weights.blocks, kernel.threads(&target), hidden);
            if op.input == Input::Floats {
                input = input.with(Part::new(wgsl!("quantize"), vec![], vec![]));
            }
            if let Some(experts) = &op.chooses {
                suffix = "_routed_gate";
                constants.push(("CHOOSES", U(1)));
                input = input.with(choice(experts, kernel.threads(&target)));
            }
            let rest = Part::new(&files, constants, slots).with(input).with(bias.clone()).with(finish);
            let code = |kernel: &Matmul| {
                let (files, constants) = vectors::kernel(kernel, &target, layout, weights.blocks, halves_at);
                let part = rest.clone().with(Part::new(files, constants, vec![]));
                (kernel.name(layout) + suffix, part)
            };
            let is_stored = matches!(op.epilogue, Epilogue::Store { .. }) && op.input == Input::Ready;
            if target.as_hardware && layout != Layout::F32 && is_stored {
                for (side, tile) in [(16, 16), (16, 32), (8, 16), (8, 32)] {
                    let (name, part) = code(&kernels::of_cooperative_tiles(side, tile));
                    self.show(name, &part);
                }
            }
            let each = (outputs as u32).div_ceil(kernel.covers()[1]);
            let grid = match op.tiles {
                None => Grid::Pairs { used: op.used as u32, each, along_x: true },
                Some(tiles) => Grid::ExpertTiles { tiles, each, along_x: true },
            };
            let (name, part) = code(&kernel);
            let counter = Some(format!("{name}[{outputs}x{}]", weights.cols));
            let kernels = vec![Code { name, counter, part, hazards: &Hazards::DECLARED }];
            launches.push(Coded { kernels, grid, kv_group: 0, merged: 1 });
        }
        launches
    }

    /// Returns the launch of a matmul of one row with the matrices of its experts that adds the results to the stream.
    fn sum_matvec(&mut self, op: &ExpertMatmul, sum: &AddExperts, formats: Formats) -> Coded {
        let target = self.facts.target.clone();
        let weights = self.weights_in(&op.linears, op.order, op.pool.map(|pool| pool.slots));
        let (layout, blocks, outputs) =
            (weights.layout, weights.blocks, self.facts.rows(&op.linears[0]) as u32);
        debug_assert_eq!(weights.parts.len(), 1, "the rule looks for a whole stack");
        let kernel = kernels::one_row(&target, layout, outputs, Some(BLOCK as u32));
        let threads = kernel.threads(&target);
        let (places, place_constants) = place_of_expert(op.pool);
        let mut constants = vec![
            ("MATMUL", U(1)),
            ("THREADS", U(threads)),
            ("OUTS", U(BLOCK as u32 / (threads / 32))),
            ("EXPERTS_OF_ROW", U(op.used as u32)),
            ("BLOCKS", U(blocks as u32)),
            ("OUTPUTS", U(outputs)),
            ("WIDTH", U(outputs)),
        ];
        constants.extend(place_constants);
        let mut slots = vec![("chosen", Slot::Chosen)];
        slots.extend(places);
        slots.extend(self.planes(&weights, 0));
        slots.extend(read_acts(op.acts));
        let files = [wgsl!("args", "place_of_expert", "quantize", "sum_matvec"), decoder(layout)].concat();
        let hidden = self.facts.program.hidden;
        let part = Part::new(&files, constants, slots)
            .with(input(op.input, op.acts, layout, op.used * blocks, threads, hidden))
            .with(self.bias(&op.linears, op.order, 0..op.count * outputs as usize))
            .with(sum_experts(sum))
            .with(self.add_finish(&op.epilogue, formats));
        let name = format!("{}_experts_add", kernel.name(layout));
        let counter = Some(format!("{name}[{outputs}x{}]", weights.cols));
        let kernels = vec![Code { name, counter, part, hazards: &Hazards::DECLARED }];
        Coded { kernels, grid: Grid::Matmul(outputs, 1, [kernel].into()), kv_group: 0, merged: 1 }
    }

    /// Returns the launch that adds results of experts, or of the matmul that follows their sum, to the shared expert's.
    pub fn add_experts(&self, op: &AddExperts) -> Coded {
        let constants = vec![("ADD", U(u32::from(op.adds.is_some()))), ("WIDTH", U(op.width as u32))];
        let part = Part::new(wgsl!("args", "add_experts"), constants, vec![("out", op.out)]);
        Coded::new("add_experts", part.with(sum_experts(op)), Grid::Each(op.width.div_ceil(256) as u32))
    }
}

/// Returns the slot and the constants of `place_of_expert.wgsl`.
fn place_of_expert(pool: Option<Pool>) -> (Slots, Constants) {
    let slots = pool.map(|pool| ("pool", Slot::Pool(pool.layer)));
    let count = pool.map(|pool| ("COUNT", U(pool.count as u32)));
    let constants = [("POOL", U(u32::from(pool.is_some())))].into_iter().chain(count);
    (slots.into_iter().collect(), constants.collect())
}

/// Returns the slots of the experts of a matmul that have no slot.
fn staged_planes(stack: usize, part: usize) -> Slots {
    let names = ["w_quants", "w_high", "w_scales"].into_iter().enumerate();
    names.map(|(plane, name)| (name, Slot::Staged { stack, part, plane })).collect()
}

/// Returns the part that chooses the experts of a row with this many threads.
fn choice(op: &Experts, threads: u32) -> Part {
    let router = &op.router;
    let by_logit =
        router.scores == Scores::Softmax && router.selection_bias.is_none() && router.groups.is_none();
    let mut constants: Constants = vec![
        ("COUNT", U(op.count as u32)),
        ("USED", U(router.used as u32)),
        ("CHOOSERS", U(threads)),
        ("SELECTION", U(u32::from(router.selection_bias.is_some()))),
        ("SIGMOID", U(u32::from(router.scores == Scores::Sigmoid))),
        ("BY_LOGIT", U(u32::from(by_logit))),
        ("RENORMALIZE", U(u32::from(router.renormalize))),
        ("FACTOR", F(router.factor)),
        ("EXPERT_SCALE", U(u32::from(router.expert_scale.is_some()))),
    ];
    if let Some(ExpertGroups { count, used, best }) = router.groups {
        let counts = [("EXPERT_GROUPS", count), ("USED_GROUPS", used), ("BEST", best)];
        constants.extend(counts.map(|(name, count)| (name, U(count as u32))));
    }
    let mut slots =
        vec![("logits", Slot::RouterLogits), ("chosen", Slot::Chosen), ("weights", Slot::Weights)];
    slots.extend(router.selection_bias.map(|bias| ("selection", Slot::Vector(bias))));
    slots.extend(router.expert_scale.map(|scale| ("expert_scale", Slot::Vector(scale))));
    Part::new(wgsl!("choose"), constants, slots)
}

/// Returns the part that sums results of experts.
pub fn sum_experts(op: &AddExperts) -> Part {
    let constants = vec![
        ("TILED", U(u32::from(op.is_tiled))),
        ("CHOSEN", U(u32::from(op.is_weighted))),
        ("USED", U(op.used as u32)),
        ("SHARED_EXPERT", U(u32::from(op.has_shared))),
        ("OUTPUT_GATE", U(u32::from(op.has_output_gate))),
        ("SCALE", F(op.adds.unwrap_or(1.0))),
    ];
    let slots = vec![
        ("results", op.results),
        ("weights", Slot::Weights),
        ("places", Slot::Places),
        ("shared_out", Slot::Shared),
        ("output_gate", Slot::OutputGate),
    ];
    Part::new(wgsl!("sum_experts"), constants, slots)
}
