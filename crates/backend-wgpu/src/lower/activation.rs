//! Activations of feed-forward networks: gate and up with the activations of the next matmul, and embeddings for layers, which are
//! gated in the same way.

use paguro_backend::{Activation, LayerInput, Linear, LoadError};

use crate::ops::NormGateUp;

use super::{
    Acts, Before, Gates, Grid, Launch, Lowering, Place, Store,
    Value::{self, F, U},
    When,
    fused::{Finish, Source},
    handoff::{self, HandoffInput},
    kernels::{self, FEW_ROWS},
    launch::ExpertTiles,
    matmuls::Inputs,
    wgsl,
};
use crate::{
    hidden::Hazards,
    layout::{BLOCK, Layout},
    matrix::Order,
    template::Constants,
};

impl Lowering<'_> {
    /// Adds gate and up, and the activations of the next matmul. Returns true if that matmul reads floats in steps of
    /// one row.
    pub(super) fn gate_and_up(
        &mut self,
        op: &NormGateUp,
        before: Before,
        down: &Linear,
        body: &mut Vec<Launch>,
    ) -> Result<bool, LoadError> {
        let Some(gate) = &op.gate else { return self.only_up(op, before, down, body) };
        let linears = [gate, &op.up];
        let gates = self.gates(op, down);
        let order = if gates { Order::InTurn } else { Order::Joined };
        let groups = self.groups(linears, |_| order);
        let finishes = if gates { vec![self.gate_finish(op)] } else { vec![] };
        let fused = self.fused_gates(op, down).filter(|_| gates);
        let store = Store { gates: fused, ..Store::WRITE };
        let source = before.source();
        let [gate, up] =
            self.after_norm(linears, &groups, (source, store), finishes, HandoffInput::Projected, body)?;
        let launch = self.activate(op.activation, Some(&gate), &up, gates, down, Places::Rows)?;
        let when = match fused {
            Some(Gates { few, .. }) => When::Between(2, few as usize + 1),
            None => When::unless_one_row(gates),
        };
        body.push(Launch { when, ..launch });
        Ok(gates)
    }

    /// Adds up without a gate.
    fn only_up(
        &mut self,
        op: &NormGateUp,
        before: Before,
        down: &Linear,
        body: &mut Vec<Launch>,
    ) -> Result<bool, LoadError> {
        let linears = [&op.up];
        let groups = self.groups(linears, |_| Order::Joined);
        let source = (before.source(), Store::WRITE);
        let [up] = self.after_norm(linears, &groups, source, vec![], HandoffInput::Projected, body)?;
        let launch = self.activate(op.activation, None, &up, false, down, Places::Rows)?;
        body.push(launch);
        Ok(false)
    }

    /// Returns true if the matmul of gate and up also computes the activations of `down` in steps of one row.
    pub(super) fn gates(&self, op: &NormGateUp, down: &Linear) -> bool {
        let Some(gate) = &op.gate else { return false };
        let layout = |linear: &Linear| Layout::of(self.weights.matrix(linear.matrix).format);
        layout(gate) == layout(&op.up)
            && op.width.is_multiple_of(BLOCK)
            && self.is_whole(&[gate, &op.up])
            && self.is_whole(&[down])
            && kernels::has_room(self.device, layout(down), op.width / BLOCK)
    }

    /// Returns the epilogue of gate and up in steps whose matmuls have cooperative matrices.
    fn fused_gates(&self, op: &NormGateUp, down: &Linear) -> Option<Gates> {
        let layouts = [&op.up, down].map(|linear| Layout::of(self.weights.matrix(linear.matrix).format));
        let has = self.device.cooperative.is_some() && !layouts.contains(&Layout::F32);
        let few = layouts.map(kernels::few_rows).into_iter().max()?;
        has.then_some(Gates { activation: op.activation, down: layouts[1], width: op.width, few })
    }

    /// Adds the matmul of a layer embedding's gate in steps of one row, with the activation. Returns false if there is
    /// none.
    pub(super) fn gates_embed(
        &mut self,
        op: &LayerInput,
        embed: &Place,
        body: &mut Vec<Launch>,
    ) -> Result<bool, LoadError> {
        let [gate, out] = [&op.gate, &op.out].map(|linear| self.weights.matrix(linear.matrix));
        let (width, layout) = (gate.rows, Layout::of(out.format));
        let is_fused = width.is_multiple_of(BLOCK)
            && self.is_whole(&[&op.gate])
            && self.is_whole(&[&op.out])
            && kernels::has_room(self.device, layout, width / BLOCK);
        if !is_fused {
            return Ok(false);
        }
        let mut constants = vec![
            ("ACT_BLOCKS", U((width / BLOCK) as u32)),
            ("EMBED", U(1)),
            ("UP_FIRST", U(embed.first as u32)),
        ];
        constants.extend(activation_constants(op.activation));
        let finish = Finish {
            name: "_embed",
            files: wgsl!("activation", "finish_gate").to_vec(),
            constants,
            buffers: vec![("gated", self.acts[2].clone()), ("up", embed.buffer.clone())],
            by_blocks: false,
            hazards: Hazards::DECLARED,
        };
        let inputs =
            Inputs { linears: &[&op.gate], order: Order::Joined, acts: Acts::Normed, in_order: false };
        self.one_row(&inputs, Source::Made, finish, None, body)?;
        Ok(true)
    }

    fn gate_finish(&self, op: &NormGateUp) -> Finish {
        let mut constants = vec![("ACT_BLOCKS", U((op.width / BLOCK) as u32))];
        constants.extend(activation_constants(op.activation));
        let finish = Finish {
            name: "_gate",
            files: wgsl!("activation", "finish_gate").to_vec(),
            constants,
            buffers: vec![("gated", self.acts[2].clone())],
            by_blocks: false,
            hazards: Hazards::DECLARED,
        };
        match self.word_handoff() {
            Some(handoff) => finish.with(handoff.gate(), handoff::MATMUL),
            None => finish,
        }
    }

    /// Constants of the epilogue that stores activations, and its buffer.
    pub(super) fn gates_finish(&self, gates: Gates) -> (Constants, wgpu::Buffer) {
        let mut constants = activation_constants(gates.activation);
        constants.extend([
            ("GATES", U(1)),
            ("ACT_BLOCKS", U((gates.width / BLOCK) as u32)),
            ("GATED_AT", U(2 * self.halves_at(gates.down))),
        ]);
        (constants, self.half_acts(Acts::Plain, gates.down))
    }

    pub(super) fn activate(
        &mut self,
        activation: Activation,
        gate: Option<&Place>,
        up: &Place,
        in_turn: bool,
        down: &Linear,
        places: Places<'_>,
    ) -> Result<Launch, LoadError> {
        let width = self.weights.matrix(down.matrix).cols;
        let mut constants = vec![
            ("WIDTH", U(width as u32)),
            ("STAGED", U(8 * 33)),
            ("GATED", U(u32::from(gate.is_some()))),
            ("GATE_STRIDE", U(gate.map_or(0, |gate| gate.stride) as u32)),
            ("UP_STRIDE", U(up.stride as u32)),
            ("UP_FIRST", U(up.first as u32)),
            ("EACH", U(1 + u32::from(in_turn))),
        ];
        constants.extend(activation_constants(activation));
        constants.extend(self.emit_for(&[down], width));
        constants.extend(match places {
            // Matmuls of pairs have no cooperative matrices.
            Places::Pairs { .. } => vec![],
            Places::Rows | Places::Tiles { .. } => self.halves(FEW_ROWS + 1),
        });
        let mut buffers = vec![("up", &up.buffer)];
        buffers.extend(gate.map(|gate| ("gate", &gate.buffer)));
        let each = width.div_ceil(8 * BLOCK) as u32;
        let grid = match places {
            Places::Rows => Grid::Each(each),
            Places::Pairs { used } => Grid::Pairs { used, each, along_x: false },
            Places::Tiles { tiles, tile_experts } => {
                constants.extend([("TILED", U(1)), ("TILE", U(tiles.tile)), NO_EXPERT]);
                buffers.push(("tile_experts", tile_experts));
                Grid::ExpertTiles { tiles, each, along_x: false }
            }
        };
        self.launch(
            "activate",
            wgsl!("args", "quantize", "emit", "activation", "activate"),
            constants,
            &buffers,
            grid,
            0,
        )
    }
}

/// Rows of activations.
#[derive(Clone, Copy)]
pub(super) enum Places<'a> {
    /// One for each row of the step.
    Rows,
    /// One for each row and one of its experts.
    Pairs { used: u32 },
    /// All places of tiles that have an expert.
    Tiles { tiles: ExpertTiles, tile_experts: &'a wgpu::Buffer },
}

/// Marks a tile without an expert.
pub(super) const NO_EXPERT: (&str, Value) = ("NO_EXPERT", U(u32::MAX));

/// Returns the constants of kernels with an activation.
pub(super) fn activation_constants(activation: Activation) -> Constants {
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
