//! Kernels of rows: embeddings, norms, additions of branches, activations.

use paguro_backend::{Activation, LayerEmbeds, MatrixId, Norm, NormKind, VectorId};

use super::{
    code::{Coded, Coder, Part, Slots, written_acts},
    experts::sum_experts,
    launch::Grid,
    matmul::decoder,
    wgsl,
};
use crate::{
    heads::is_plain,
    layout::BLOCK,
    lower::{
        Activate, Acts, AddBranch, Facts, Formats, NormRows, Places, RowMap, Slot, Span, kernels::FEW_ROWS,
    },
    matrix::Order,
    template::{
        Constants,
        Value::{self, F, U},
    },
};

/// Files of a norm.
const NORM: &[&str] = wgsl!("args", "quantize", "emit", "row_scale", "norm");

/// Marks a tile without an expert.
pub const NO_EXPERT: (&str, Value) = ("NO_EXPERT", U(u32::MAX));

impl Coder<'_> {
    /// Returns the launches of a table of embeddings, one for each of its parts.
    pub fn embed(
        &mut self,
        table: MatrixId,
        scale: f32,
        (is_of_positions, types): (bool, Option<VectorId>),
        parts: usize,
    ) -> Vec<Coded> {
        let hidden = self.facts.program.hidden;
        let linear = paguro_backend::Linear { matrix: table, bias: None, bounds: None };
        let weights = self.weights(&[linear], Order::Joined);
        let what = if is_of_positions { "positions" } else { "embed" };
        let part = |index: usize| {
            let rows = &weights.parts[index];
            let constants = vec![
                ("BLOCKS", U(weights.blocks as u32)),
                ("WIDTH", U(hidden as u32)),
                ("OUTPUTS", U(rows.len() as u32)),
                ("OUT_FIRST", U(rows.start as u32)),
                ("SCALE", F(scale)),
                ("POSITIONS", U(u32::from(is_of_positions))),
                ("GIVEN", U(u32::from(parts > 0))),
                ("PARTS", U(parts as u32)),
                ("TYPES", U(u32::from(types.is_some()))),
                ("TYPE_IDS", U(self.facts.program.vocab as u32)),
            ];
            let files = [wgsl!("args"), decoder(weights.layout), wgsl!("embed")].concat();
            let mut slots = vec![("step", Slot::Step), ("x", Slot::Stream), ("sampled", Slot::Tokens)];
            slots.push(("given", Slot::Given));
            slots.extend(types.map(|types| ("types", Slot::Vector(types))));
            slots.extend(self.planes(&weights, index));
            let grid = Grid::Each(weights.blocks.div_ceil(64) as u32);
            Coded::new(format!("{what}_{}", weights.layout.name()), Part::new(&files, constants, slots), grid)
        };
        (0..weights.parts.len()).map(part).collect()
    }

    /// Returns the launch that adds a part of given rows to the residual stream, or sets the stream to it.
    pub fn given(&self, part: usize, sets: bool) -> Coded {
        let Facts { program, .. } = self.facts;
        let constants = vec![
            ("WIDTH", U(program.hidden as u32)),
            ("PARTS", U(program.given_parts as u32)),
            ("PART", U(part as u32)),
            ("SETS", U(u32::from(sets))),
        ];
        let slots = vec![("step", Slot::Step), ("x", Slot::Stream), ("given", Slot::Given)];
        let grid = Grid::Given(program.hidden.div_ceil(256) as u32);
        let name = if sets { "set_given" } else { "add_given" };
        Coded::new(name, Part::new(wgsl!("args", "add_given"), constants, slots), grid)
    }

    /// Returns the launch of embeddings for layers.
    pub fn layer_embeds(&self, op: &LayerEmbeds) -> Coded {
        let constants = vec![
            ("COUNT", U(op.count as u32)),
            ("WIDTH", U(op.width as u32)),
            ("SCALE", F(op.scale)),
            ("EPS", F(op.norm.eps)),
        ];
        let weight = Slot::Vector(op.norm.weight);
        let slots = vec![("embeds", Slot::Embeds), ("table_rows", Slot::TableRows), ("weight", weight)];
        let part = Part::new(wgsl!("args", "layer_embeds"), constants, slots);
        Coded::new("layer_embeds", part, Grid::Each(op.count as u32))
    }

    /// Returns the launch of a norm.
    pub fn norm(&self, op: &NormRows, formats: Formats) -> Coded {
        // Matmuls apply a factor to activations unless they are complete.
        let is_complete = op.acts == Acts::Plain;
        let width = op.width;
        let slices = width.next_multiple_of(BLOCK).div_ceil(256);
        // The staging memory of a round fits into half of every device's workgroup memory.
        let rounds = slices.div_ceil(16);
        let slices = slices.div_ceil(rounds);
        let mut constants = vec![
            ("WIDTH", U(width as u32)),
            ("ROUNDS", U(rounds as u32)),
            ("SLICES", U(slices as u32)),
            ("STAGED", U(slices as u32 * 8 * 33)),
        ];
        constants.extend(row_scale(width, op.norm.map_or(0.0, |norm| norm.eps)));
        let (norms, mut slots) = norm_vectors(op.norm);
        constants.extend(norms);
        let leaves_factor = !is_complete && !op.replaces && op.norm.as_ref().is_some_and(is_plain);
        constants.push(("FULL", U(u32::from(!leaves_factor))));
        constants.push(("COMPLETE", U(u32::from(is_complete))));
        constants.push(("REPLACES", U(u32::from(op.replaces))));
        constants.push(("WRITES_X", U(u32::from(op.replaces || op.sums.is_some()))));
        if op.norm.is_some_and(|norm| norm.kind == NormKind::Layer) {
            constants.push(("REDUCES", U(1)));
        }
        if op.is_of_outputs {
            constants.push(("GATHER", U(1)));
        }
        if op.is_of_outputs || op.to.is_some() {
            constants.push(("STORES", U(1)));
        }
        if op.rows.stride != width || op.rows.first > 0 {
            let [stride, first] = [op.rows.stride, op.rows.first].map(|x| U(x as u32));
            constants.extend([("STRIDED", U(1)), ("IN_STRIDE", stride), ("IN_FIRST", first)]);
        }
        constants.extend(self.emit_for(formats, width));
        // A slice of outputs may have few of many rows, whose number decides.
        constants.extend(self.halves(if op.is_of_outputs { 0 } else { FEW_ROWS + 1 }));
        slots.extend([("x", op.rows.slot), ("factors", Slot::Factors)]);
        slots.extend([("step", Slot::Step), ("normed", op.to.unwrap_or(Slot::Embeddings))]);
        slots.extend(written_acts(op.acts));
        if let Some((norm, scale)) = op.adds {
            constants.extend([("POST", U(1)), ("REDUCES", U(1)), ("POST_EPS", F(norm.eps))]);
            constants.push(("OUT_SCALE", F(scale)));
            slots.extend([("y", Slot::Branch), ("post", Slot::Vector(norm.weight))]);
        }
        let mut part = Part::new(NORM, constants, slots);
        if let Some(sums) = &op.sums {
            part = part.with(sum_experts(sums)).with(Part::new(&[], vec![("SUMS", U(1))], vec![]));
        }
        let name = match op.acts {
            Acts::Plain => "norm_rows",
            Acts::Normed if op.is_of_outputs => "norm_outputs",
            Acts::Normed => "norm",
        };
        Coded::new(name, part, Grid::Rows)
    }

    /// Returns the launch of an operation on elements of rows.
    pub fn map_rows(&self, from: Span, to: Span, width: usize, map: RowMap) -> Coded {
        let mut constants = vec![
            ("WIDTH", U(width as u32)),
            ("IN_STRIDE", U(from.stride as u32)),
            ("IN_FIRST", U(from.first as u32)),
            ("OUT_STRIDE", U(to.stride as u32)),
            ("OUT_FIRST", U(to.first as u32)),
        ];
        let mut slots = vec![("x", from.slot), ("out", to.slot)];
        match map {
            RowMap::Copy => {}
            RowMap::Add => constants.push(("ADDS", U(1))),
            RowMap::Mean { rows, scale } => {
                constants.extend([("MEAN", U(1)), ("JOINED", U(rows as u32)), ("SCALE", F(scale))]);
            }
            RowMap::Affine { scale, bias } => {
                constants.push(("AFFINE", U(1)));
                slots.extend([("scales", Slot::Vector(scale)), ("biases", Slot::Vector(bias))]);
            }
            RowMap::Activation(activation) => {
                constants.push(("ACTIVATES", U(1)));
                constants.extend(activation_constants(activation));
            }
            RowMap::Gated(activation, gate) => {
                constants.extend([("GATED", U(1)), ("GATE_STRIDE", U(gate.stride as u32))]);
                constants.extend(activation_constants(activation));
                slots.push(("gate", gate.slot));
            }
            RowMap::Clamp { min, max } => {
                constants.push(("CLAMPS", U(1)));
                slots.push(("bounds", Slot::Bounds([min.to_bits(), max.to_bits()])));
            }
        }
        let part = Part::new(wgsl!("args", "activation", "map_rows"), constants, slots);
        Coded::new("map_rows", part, Grid::Each(width.div_ceil(256) as u32))
    }

    /// Returns the launch that copies activations to rows.
    pub fn unpack(&self, acts: Acts, to: Span, width: usize) -> Coded {
        let constants = vec![("WIDTH", U(width as u32)), ("ACT_BLOCKS", U(width.div_ceil(BLOCK) as u32))];
        let slots = vec![("x_floats", Slot::Floats(acts)), ("out", to.slot)];
        let part = Part::new(wgsl!("args", "unpack"), constants, slots);
        Coded::new("unpack", part, Grid::Each(width.div_ceil(256) as u32))
    }

    /// Returns the launch that adds a branch.
    pub fn add_branch(&self, op: &AddBranch) -> Coded {
        let (mut constants, mut slots) = norm_vectors(op.post_norm);
        let eps = op.post_norm.map_or(0.0, |norm| norm.eps);
        let width = self.facts.program.hidden as u32;
        constants.extend([("WIDTH", U(width)), ("SCALE", F(op.scale)), ("EPS", F(eps))]);
        constants.extend([("OUT_SCALE", F(op.out_scale)), ("BRANCH", U(u32::from(op.from.is_some())))]);
        constants.push(("WRITES", U(u32::from(op.writes))));
        slots.push(("x", op.to));
        slots.extend(op.from.map(|from| ("y", from)));
        Coded::new("add_branch", Part::new(wgsl!("args", "add_branch"), constants, slots), Grid::Rows)
    }

    /// Returns the launch of the activation of a network.
    pub fn activate(&self, op: &Activate, formats: Formats) -> Coded {
        let mut constants = vec![
            ("WIDTH", U(op.width as u32)),
            ("STAGED", U(8 * 33)),
            ("GATED", U(u32::from(op.gate.is_some()))),
            ("GATE_STRIDE", U(op.gate.map_or(0, |gate| gate.stride) as u32)),
            ("UP_STRIDE", U(op.up.stride as u32)),
            ("UP_FIRST", U(op.up.first as u32)),
            ("EACH", U(1 + u32::from(op.in_turn))),
        ];
        constants.extend(activation_constants(op.activation));
        constants.extend(self.emit_for(formats, op.width));
        let mut slots = vec![("up", op.up.slot), ("tile_experts", Slot::TileExperts)];
        slots.extend(op.gate.map(|gate| ("gate", gate.slot)));
        slots.extend(written_acts(Acts::Plain));
        let each = op.width.div_ceil(8 * BLOCK) as u32;
        let grid = match op.places {
            Places::Rows => Grid::Each(each),
            // Matmuls of pairs have no cooperative matrices.
            Places::Pairs { used } => Grid::Pairs { used, each, along_x: false },
            Places::Tiles(tiles) => {
                constants.extend([("TILED", U(1)), ("TILE", U(tiles.tile)), NO_EXPERT]);
                Grid::ExpertTiles { tiles, each, along_x: false }
            }
        };
        if !matches!(op.places, Places::Pairs { .. }) {
            constants.extend(self.halves(FEW_ROWS + 1));
        }
        let files = wgsl!("args", "quantize", "emit", "activation", "activate");
        Coded::new("activate", Part::new(files, constants, slots), grid)
    }
}

/// The kind of a norm, and its vectors.
fn norm_vectors(norm: Option<Norm>) -> (Constants, Slots) {
    let Some(Norm { kind, weight, bias, eps: _ }) = norm else { return (vec![], vec![]) };
    let constants = vec![
        ("NORMS", U(1)),
        ("LAYER", U(u32::from(kind == NormKind::Layer))),
        ("NORM_BIAS", U(u32::from(bias.is_some()))),
    ];
    let mut slots = vec![("weight", Slot::Vector(weight))];
    slots.extend(bias.map(|bias| ("norm_bias", Slot::Vector(bias))));
    (constants, slots)
}

/// Constants for the factor of a norm of rows of this width.
pub fn row_scale(width: usize, eps: f32) -> Constants {
    vec![
        // Fours of blocks.
        ("SQUARES", U(width.div_ceil(4 * BLOCK) as u32)),
        ("INVERSE_WIDTH", F(1.0 / width as f32)),
        ("EPS", F(eps)),
    ]
}

/// Returns the constants of kernels with an activation.
pub fn activation_constants(activation: Activation) -> Constants {
    match activation {
        Activation::GeluTanh => vec![("GELU", U(1))],
        Activation::Gelu => vec![("GELU_ERF", U(1))],
        Activation::Relu2 => vec![("RELU2", U(1))],
        Activation::ClampedSwiglu { alpha, limit } => {
            vec![("CLAMPED", U(1)), ("SLOPE", F(alpha)), ("LIMIT", F(limit))]
        }
        Activation::Silu => vec![],
    }
}
