//! Latent attention: each row stores one latent vector, and matrices for each head are applied to queries and to results.
//!
//! | operation | launches | kernel file |
//! |-|-|-|
//! | norm; matmuls of queries and of the latent vector | two or three | `norm.wgsl`, `matvec.wgsl`, `matmul.wgsl`, `coop.wgsl` |
//! | queries of a rank: norm, and their second matmul | two | as above |
//! | norm and rotation of the latent vector, into pages | one | `rope_store.wgsl` |
//! | queries: activations of each head, and rotation | one | `latent_queries.wgsl` |
//! | a matmul of each head with its own matrix | one | `matvec.wgsl`, `matmul.wgsl` |
//! | with quantized pages: a transform of queries | one | `hadamard_queries.wgsl` |
//! | attention and its merge, as activations of each head | as elsewhere | `attend.wgsl`, `attend_merge.wgsl` |
//! | a matmul of each head with its own matrix | one | `matvec.wgsl`, `matmul.wgsl` |
//! | activations, and the matmul onto the residual stream | two | `norm.wgsl`, matmuls |

use paguro_backend::{LatentQuery, LatentShape, Linear, LoadError};

use crate::{
    device::Device,
    layout::BLOCK,
    matrix::Order,
    ops::{Attend, LatentAdd, Op, Program},
};

use super::{
    Acts, Before, Grid, Launch, Lowering, Place, Store,
    Value::{F, U},
    When,
    matmuls::Inputs,
    wgsl,
};

/// Elements of rows of intermediate results: of each kind, those of the layer that needs most.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Room {
    /// Queries.
    queries: usize,
    /// Queries between their two matrices.
    rank: usize,
    /// Latent vectors with the elements that are rotated.
    keys: usize,
    /// Results of all heads.
    values: usize,
    /// Widest row that is an input of a matmul.
    pub widest: usize,
}

/// Buffers of latent attention, which layers use one after the other.
#[derive(Clone)]
pub(super) struct Buffers {
    queries: wgpu::Buffer,
    rank: wgpu::Buffer,
    keys: wgpu::Buffer,
    values: wgpu::Buffer,
}

impl Room {
    pub(super) fn of(program: &Program) -> Self {
        let mut room = Self::default();
        for op in &program.ops {
            let Op::Latent(op) = op else { continue };
            let shape = op.latent.shape;
            let rank = match op.latent.query {
                LatentQuery::Direct(_) => 0,
                LatentQuery::Down { down: _, rank, norm: _, up: _ } => rank,
            };
            let heads = shape.heads * shape.plain.max(shape.latent).next_multiple_of(BLOCK);
            room = Self {
                queries: room.queries.max(shape.query_width()),
                rank: room.rank.max(rank),
                keys: room.keys.max(shape.key_dim()),
                values: room.values.max(shape.value_width()),
                widest: room.widest.max(heads).max(rank).max(shape.value_width()),
            };
        }
        room
    }

    /// Words of [`Buffers`].
    pub(super) fn words(self, rows: usize) -> usize {
        rows * (self.queries + self.rank + self.keys + self.values)
    }

    /// Allocates the buffers, if there is latent attention.
    pub(super) fn buffers(self, device: &Device, rows: usize) -> Result<Option<Buffers>, LoadError> {
        if self.queries == 0 {
            return Ok(None);
        }
        let buffer = |width: usize| device.buffer(rows * width, "latent attention");
        Ok(Some(Buffers {
            queries: buffer(self.queries)?,
            rank: buffer(self.rank)?,
            keys: buffer(self.keys)?,
            values: buffer(self.values)?,
        }))
    }
}

impl Lowering<'_> {
    /// Latent attention, from the norm to the residual stream.
    pub(super) fn latent(
        &mut self,
        op: &LatentAdd,
        before: Before,
        next: Option<&Op>,
        body: &mut Vec<Launch>,
    ) -> Result<Before, LoadError> {
        let latent = &op.latent;
        let LatentShape { heads: _, plain: _, rotated: _, latent: width, value } = latent.shape;
        let own = self.latents.clone().expect("programs with latent attention have the buffers");
        let first = latent.query.linears().next().expect("there is one matrix or two");
        self.norm(latent.norm, before, &[first, &latent.down], body)?;
        self.normed_matmul(&latent.down, &own.keys, body)?;
        match &latent.query {
            LatentQuery::Direct(linear) => self.normed_matmul(linear, &own.queries, body)?,
            LatentQuery::Down { down, rank, norm, up } => {
                self.normed_matmul(down, &own.rank, body)?;
                self.activations_of(&own.rank, *rank, Some(*norm), &[up], body)?;
                let place =
                    Place { buffer: own.queries.clone(), stride: latent.shape.query_width(), first: 0 };
                let order = Order::Joined;
                let inputs = Inputs { linears: &[up], order, acts: Acts::Plain, in_order: false };
                self.matmul(&inputs, &place, Store::WRITE, When::Always, body)?;
            }
        }
        self.store_latent(op, &own, body)?;
        self.latent_queries(op, &own, body)?;
        let queries = Place {
            buffer: self.queries.clone(),
            stride: self.program.kv.groups[latent.kv.group].head_dim,
            first: 0,
        };
        self.head_matmul(&latent.absorb, latent.shape.heads, &queries, body)?;
        if self.limits.kv_dtype.is_quantized() {
            let files = wgsl!("args", "hadamard", "hadamard_queries");
            let (constants, grid) = (self.heads(latent.kv), Grid::Each(latent.shape.heads as u32));
            let buffers = [("queries", &queries.buffer)];
            body.push(self.launch("hadamard_queries", files, constants, &buffers, grid, latent.kv.group)?);
        }
        let attend =
            Attend { scale: latent.scale, soft_cap: None, sinks: None, is_gated: false, kv: latent.kv };
        self.attend(&attend, &latent.value, body)?;
        self.merge(&latent.value, &attend, Some(width), body)?;
        let values = Place { buffer: own.values.clone(), stride: value, first: 0 };
        self.head_matmul(&latent.value, latent.shape.heads, &values, body)?;
        self.activations_of(&own.values, latent.shape.value_width(), None, &[&latent.out], body)?;
        self.add(&latent.out, false, &op.add, next, body)
    }

    /// A matmul of each head of each row with its own matrix of a stack.
    fn head_matmul(
        &mut self,
        linear: &Linear,
        heads: usize,
        place: &Place,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let order = Order::Stacked(heads);
        let inputs = Inputs { linears: &[linear], order, acts: Acts::Plain, in_order: true };
        self.matmul(&inputs, place, Store::WRITE, When::Always, body)
    }

    /// Norm and rotation of the latent vector, into pages.
    fn store_latent(
        &mut self,
        op: &LatentAdd,
        own: &Buffers,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let latent = &op.latent;
        let shape = latent.shape;
        let (rotates, rope_tables) = self.rotation(Some(latent.rope), None);
        let mut constants = vec![
            ("Q_HEADS", U(0)),
            ("K_STRIDE", U(shape.key_dim() as u32)),
            ("K_FIRST", U(0)),
            ("LATENT", U(shape.latent as u32)),
            ("NORM_WIDTH", U(shape.latent as u32)),
            ("ROTATE_AT", U(shape.latent as u32)),
            ("QK_NORM", U(1)),
            ("HEAD_NORMS", U(1)),
            ("NORM_FIRST", U(1)),
            ("Q_EPS", F(latent.latent_norm.eps)),
            ("K_EPS", F(latent.latent_norm.eps)),
        ];
        constants.extend(rotates);
        constants.extend(self.stored(latent.kv));
        let [k_pages, v_pages] = self.pages_of(latent.kv);
        let (step, queries) = (self.step.clone(), self.queries.clone());
        let weight = self.vector(latent.latent_norm.weight)?;
        let mut buffers = vec![
            ("q", &own.keys),
            ("k", &own.keys),
            ("v", &own.keys),
            ("step", &step),
            ("queries", &queries),
            ("k_pages", &k_pages),
            ("v_pages", &v_pages),
            ("q_norm", &weight),
            ("k_norm", &weight),
        ];
        buffers.extend(rope_tables.iter().map(|(name, buffer)| (*name, buffer)));
        body.push(self.launch_store(constants, &buffers, 2, latent.kv)?);
        Ok(())
    }

    /// Activations of each head's queries for its absorbing matrix, and their rotated elements.
    fn latent_queries(
        &mut self,
        op: &LatentAdd,
        own: &Buffers,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let latent = &op.latent;
        let LatentShape { heads, plain, rotated, latent: width, value: _ } = latent.shape;
        let (rotates, rope_tables) = self.rotation(Some(latent.rope), latent.position_scale);
        let mut constants = vec![
            ("PLAIN", U(plain as u32)),
            ("ROTATED", U(rotated as u32)),
            ("LATENT", U(width as u32)),
            ("STAGED", U(plain.div_ceil(BLOCK) as u32 * 33)),
        ];
        constants.extend(rotates);
        constants.extend(self.heads(latent.kv));
        constants.extend(self.emit_for(&[&latent.absorb], plain));
        let (step, queries) = (self.step.clone(), self.queries.clone());
        let mut buffers = vec![("q", &own.queries), ("step", &step), ("queries", &queries)];
        buffers.extend(rope_tables.iter().map(|(name, buffer)| (*name, buffer)));
        let files = wgsl!("args", "quantize", "emit", "rotate", "latent_queries");
        let grid = Grid::Each(heads as u32);
        body.push(self.launch("latent_queries", files, constants, &buffers, grid, latent.kv.group)?);
        Ok(())
    }
}
