//! Embeddings for layers, and scales of the residual stream (Gemma 4).
//!
//! | operation | launches | kernel file |
//! |-|-|-|
//! | projection of the residual stream before the first layer | norm, matmul | `norm.wgsl`, `matvec.wgsl`, `matmul.wgsl`, `coop.wgsl` |
//! | norm, and rows of the table | one | `layer_embeds.wgsl` |
//! | at a layer's end: gate | norm, matmul, activation | `norm.wgsl`, matmuls, `activate.wgsl` |
//! | output | one | matmuls |
//! | scale | one | `add_branch.wgsl` |
//!
//! The table stays in its file. The host reads the rows of a step's tokens and uploads them with the step.

use paguro_backend::{LayerEmbeds, LayerInput, LoadError};

use crate::{
    device::Device,
    ops::{Add, Op, Program},
};

use super::{
    Before, Grid, Launch, Lowering, Place,
    Value::{F, U},
    matmuls::Places,
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
        self.normed_matmul(&op.gate, &own.gate, body)?;
        let gate = Place { buffer: own.gate, stride: room.width, first: 0 };
        let embed = Place { buffer: own.embeds, stride: room.all, first: op.index * room.width };
        let launch = self.activate(op.activation, Some(&gate), &embed, false, &op.out, Places::Rows)?;
        body.push(launch);
        let add = Add { post_norm: op.post_norm, scale: 1.0, waits: false };
        self.add(&op.out, false, &add, next, body)
    }

    /// Scales the residual stream after adding the pending branch.
    pub(super) fn scale(
        &mut self,
        scale: f32,
        before: Before,
        body: &mut Vec<Launch>,
    ) -> Result<Before, LoadError> {
        let (post_norm, branch) = match before {
            Before::Pending(norm) => (Some(norm), Some(self.y.clone())),
            Before::Added | Before::Emitted(_) => (None, None),
        };
        let (x, add) = (self.x.clone(), Add { post_norm, scale: 1.0, waits: false });
        self.add_to(&x, branch.as_ref(), &add, scale, vec![], body)?;
        Ok(Before::Added)
    }
}
