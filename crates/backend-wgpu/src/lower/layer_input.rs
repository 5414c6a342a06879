//! Embeddings for layers, and scales of the residual stream (Gemma 4).
//!
//! | operation | launches | kernel file |
//! |-|-|-|
//! | projection of the residual stream before the first layer | norm, matmul | `norm.wgsl`, `matvec.wgsl`, `matmul.wgsl`, `coop.wgsl` |
//! | norm, and rows of the table | one | `layer_embeds.wgsl` |
//! | at a layer's end: gate | norm, matmul, activation; steps of one row: the matmul has the activation | `norm.wgsl`, matmuls, `activate.wgsl`, `finish_gate.wgsl` |
//! | output | one | matmuls |
//! | scale | none where the next norm adds a branch, or one | `norm.wgsl`, `add_branch.wgsl` |
//!
//! The table stays in its file. The host reads the rows of a step's tokens and uploads them with the step.

use paguro_backend::{LayerEmbeds, LayerInput, LoadError};

use crate::{
    device::Device,
    matrix::Order,
    ops::{Add, Op, Program},
};

use super::{
    Acts, Before, Grid, Launch, Lowering, Place, Store,
    Value::{F, U},
    When,
    activation::Places,
    matmuls::Inputs,
    wgsl,
};

/// Elements of a row of intermediate results.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Room {
    /// Width of all embeddings.
    all: usize,
    /// Width of one embedding.
    pub width: usize,
}

/// Buffers of embeddings for layers.
#[derive(Clone)]
pub(super) struct Buffers {
    /// Rows of the table, `[rows, count * width]`.
    pub table_rows: wgpu::Buffer,
    /// `[rows, count * width]`
    embeds: wgpu::Buffer,
    /// `[rows, width]`
    gate: wgpu::Buffer,
}

impl Room {
    pub(super) fn of(program: &Program) -> Self {
        let embeds = program.ops.iter().find_map(|op| match op {
            Op::LayerEmbeds(op) => Some(Self { all: op.count * op.width, width: op.width }),
            _ => None,
        });
        embeds.unwrap_or_default()
    }

    /// Words of [`Buffers`].
    pub(super) fn words(self, rows: usize) -> usize {
        rows * (2 * self.all + self.width)
    }

    /// Allocates them, if there are embeddings.
    pub(super) fn buffers(self, device: &Device, rows: usize) -> Result<Option<Buffers>, LoadError> {
        if self.all == 0 {
            return Ok(None);
        }
        let buffer = |width: usize| device.buffer(rows * width, "embeddings for layers");
        Ok(Some(Buffers {
            table_rows: buffer(self.all)?,
            embeds: buffer(self.all)?,
            gate: buffer(self.width)?,
        }))
    }
}

impl Lowering<'_> {
    fn embeds(&self) -> Buffers {
        self.embeds.clone().expect("programs with embeddings for layers have the buffers")
    }

    /// Computes the embeddings of all layers.
    pub(super) fn layer_embeds(&mut self, op: &LayerEmbeds, body: &mut Vec<Launch>) -> Result<(), LoadError> {
        let own = self.embeds();
        self.norm(None, Before::Added, &[&op.projection], body)?;
        self.normed_matmul(&op.projection, &own.embeds, body)?;
        let constants = vec![
            ("COUNT", U(op.count as u32)),
            ("WIDTH", U(op.width as u32)),
            ("SCALE", F(op.scale)),
            ("EPS", F(op.norm.eps)),
        ];
        let weight = self.vector(op.norm.weight)?;
        let buffers = [("embeds", &own.embeds), ("table_rows", &own.table_rows), ("weight", &weight)];
        let grid = Grid::Each(op.count as u32);
        body.push(self.launch(
            "layer_embeds",
            wgsl!("args", "layer_embeds"),
            constants,
            &buffers,
            grid,
            0,
        )?);
        Ok(())
    }

    /// Adds a layer's own embedding to the residual stream.
    pub(super) fn layer_input(
        &mut self,
        op: &LayerInput,
        before: Before,
        next: Option<&Op>,
        body: &mut Vec<Launch>,
    ) -> Result<Before, LoadError> {
        let (own, room) = (self.embeds(), Room::of(self.program));
        self.norm(None, before, &[&op.gate], body)?;
        let gate = Place { buffer: own.gate, stride: room.width, first: 0 };
        let embed = Place { buffer: own.embeds, stride: room.all, first: op.index * room.width };
        let activates = self.gates_embed(op, &embed, body)?;
        let inputs =
            Inputs { linears: &[&op.gate], order: Order::Joined, acts: Acts::Normed, in_order: false };
        let when = When::unless_one_row(activates);
        self.matmul(&inputs, &gate, Store::WRITE, when, body)?;
        let launch = self.activate(op.activation, Some(&gate), &embed, false, &op.out, Places::Rows)?;
        body.push(Launch { when, ..launch });
        let add = Add { post_norm: op.post_norm, scale: 1.0, waits: false };
        self.add(&op.out, activates, &add, next, body)
    }

    /// Scales the residual stream, after the pending branch is added.
    pub(super) fn scale(
        &mut self,
        scale: f32,
        before: Before,
        body: &mut Vec<Launch>,
    ) -> Result<Before, LoadError> {
        if let Before::Pending(norm, before) = before {
            return Ok(Before::Pending(norm, before * scale));
        }
        let (x, add) = (self.x.clone(), Add { post_norm: None, scale: 1.0, waits: false });
        self.add_to(&x, None, &add, scale, vec![], body)?;
        Ok(Before::Added)
    }
}
