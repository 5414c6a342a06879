//! A program, lowered once more: to a fixed list of launches with their kernels and buffers.

mod activation;
mod allocate;
mod attention;
mod coop_attention;
mod experts;
mod fused;
mod handoff;
mod handoff_partials;
mod head;
mod kernels;
mod latent;
mod launch;
mod layer_input;
mod matmuls;
mod memory;
mod recurrent;
mod ssd;

use std::{collections::HashMap, sync::Arc};

use paguro_backend::{Activation, KvSlot, Limits, Linear, LoadError, MatrixId, Norm, VectorId, Weights};

use crate::{
    device::Device,
    hidden::Hazards,
    layout::{BLOCK, Layout},
    matrix::{DeviceMatrix, Order},
    ops::{self, Op, Program},
    pages,
    plan::Tiling,
    template::{Constants, Value},
};

use Value::{F, U};
use handoff::Handoff;
use handoff_partials::HandoffPartials;
use launch::LaunchVariant;
use matmuls::Inputs;

pub use kernels::{Matmul, exact_rows, matmul};
pub use launch::{Grid, Io, Kernel, Launch, Model, When};
pub use memory::buffer_bytes;
pub use recurrent::{LayerState, StateBuffer};

/// Rows whose logits are computed at once: bounds their memory for large vocabularies.
pub const LOGIT_ROWS: usize = 64;

/// Files of WGSL.
macro_rules! wgsl {
    ($($name:literal),*) => {
        &[$(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/shaders/", $name, ".wgsl"))),*]
    };
}
pub(crate) use wgsl;

/// The output of a matmul or the input of another kernel: a buffer `[rows, stride]` from column `first` on.
#[derive(Clone)]
struct Place {
    buffer: wgpu::Buffer,
    stride: usize,
    first: usize,
}

/// Epilogue of a matmul: the result is scaled, capped, and stored or added.
#[derive(Clone, Copy)]
struct Store {
    scale: f32,
    cap: Option<f32>,
    adds: bool,
    /// Epilogue of matmuls with cooperative matrices, which replaces the fields above.
    gates: Option<Gates>,
}

/// Computes activations from the interleaved results of gate and up, for a matmul with cooperative matrices.
#[derive(Clone, Copy)]
struct Gates {
    activation: Activation,
    /// Layout of that matmul's weights.
    down: Layout,
    /// Elements of a row of activations.
    width: usize,
    /// Maximum rows of a step in which one of the two matmuls is without cooperative matrices.
    few: u32,
}

impl Store {
    const WRITE: Self = Self { scale: 1.0, cap: None, adds: false, gates: None };

    fn add(scale: f32) -> Self {
        Self { scale, adds: true, ..Self::WRITE }
    }

    fn constants(&self) -> Constants {
        let mut constants = vec![];
        if self.scale != 1.0 {
            constants.extend([("SCALED", U(1)), ("SCALE", F(self.scale))]);
        }
        if let Some(cap) = self.cap {
            constants.extend([("CAP", U(1)), ("SOFT_CAP", F(cap))]);
        }
        if self.adds {
            constants.push(("ADD", U(1)));
        }
        constants
    }
}

/// Activations that a matmul reads.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Acts {
    /// Those of attention, or of gate and up.
    Plain,
    /// Those of a norm.
    Normed,
}

/// Input of a norm.
#[derive(Clone, Copy)]
enum Before {
    /// The residual stream with all branches added.
    Added,
    /// The residual stream; in steps of one row also its activations without the factor of the norm with this epsilon.
    Emitted(f32),
    /// The result of a matmul that must still be normed and added; the sum is scaled.
    Pending(Norm, f32),
}

/// State while a program is lowered to a [`Model`].
pub struct Lowering<'a> {
    device: &'a Device,
    program: &'a Program,
    weights: &'a Weights,
    limits: &'a Limits,
    matrices: HashMap<(Vec<MatrixId>, Order), Arc<DeviceMatrix>>,
    vectors: HashMap<VectorId, wgpu::Buffer>,
    counters: Vec<String>,
    /// Attention tiles and splits of each K/V group.
    tilings: Vec<Tiling>,
    /// Side of the cooperative matrices that steps of few rows attend with, if they do.
    few: Option<u32>,
    pages: Vec<[wgpu::Buffer; 2]>,
    /// Pages in the order of the block tables, for gathered attention.
    gathered: Option<[wgpu::Buffer; 2]>,
    step: wgpu::Buffer,
    tokens: wgpu::Buffer,
    x: wgpu::Buffer,
    y: wgpu::Buffer,
    /// The branch that waits until another one has read the residual stream.
    waiting: Option<wgpu::Buffer>,
    /// Buffers of mixtures of experts.
    experts: Option<experts::Buffers>,
    /// Buffers of mixers with a state and of gated attention.
    mixers: Option<recurrent::Buffers>,
    /// States of sequences, by layer.
    states: Vec<LayerState>,
    /// Buffers of latent attention.
    latents: Option<latent::Buffers>,
    /// Buffers of embeddings for layers.
    embeds: Option<layer_input::Buffers>,
    /// Activations of matmuls: quants, scales, floats.
    acts: [wgpu::Buffer; 3],
    /// Activations of norms.
    normed: [wgpu::Buffer; 3],
    /// Sums of the squares of a row's blocks, where its norm's factor is still to be made; whole fours, the last ones of nothing.
    squares: wgpu::Buffer,
    /// Factors of the norms of rows.
    factors: wgpu::Buffer,
    /// A word that is 0, which compilers cannot know.
    zero: wgpu::Buffer,
    /// Number of blocks in the activation buffers.
    act_blocks: usize,
    scratch: [wgpu::Buffer; 3],
    queries: wgpu::Buffer,
    partial_sums: wgpu::Buffer,
    partial_tops: wgpu::Buffer,
    ropes: Vec<[wgpu::Buffer; 2]>,
    /// Buffers of the handoff in steps of one row, if the device uses it.
    handoff: Option<Handoff>,
    /// Buffers of the handoff from attention to its merge, if the device uses it.
    handoff_partials: Option<HandoffPartials>,
    /// Counter of the attention that is to be merged next, if it is timed with the merge.
    timed_with: Option<usize>,
}

impl<'a> Lowering<'a> {
    /// Uploads the weights and lists the launches.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn lower(mut self) -> Result<Model, LoadError> {
        let mut body = Vec::new();
        let mut head = None;
        // Input of the next norm in steps of one row and of several.
        let mut before = Before::Added;
        // True if the next matmul reads floats in steps of one row.
        let mut floats = false;
        let ops = &self.program.ops;
        for (index, op) in ops.iter().enumerate() {
            let next = ops.get(index + 1);
            match op {
                Op::Embed(op) => self.embed(op, &mut body)?,
                Op::LayerEmbeds(op) => self.layer_embeds(op, &mut body)?,
                Op::NormQkvRopeStore(op) => {
                    let linears: Vec<&Linear> = op.qkv().chain(&op.gate).collect();
                    self.norm(op.norm, before, &linears, &mut body)?;
                    self.queries_keys_values(op, before, &mut body)?;
                    if let Some(gate) = &op.gate {
                        let gates = self.mixers().gates.clone();
                        self.normed_matmul(gate, &gates, &mut body)?;
                    }
                }
                Op::Attend(op) => {
                    let Some(Op::ProjectAdd(next)) = next else { return Err(self.order()) };
                    self.attend(op, &next.project, &mut body)?;
                    self.merge(&next.project, op, None, &mut body)?;
                }
                Op::ProjectAdd(op) => {
                    before = self.add(&op.project, false, &op.add, next, &mut body)?;
                }
                Op::ShortConv(op) => before = self.short_conv(op, before, next, &mut body)?,
                Op::Latent(op) => before = self.latent(op, before, next, &mut body)?,
                Op::LayerInput(op) => before = self.layer_input(op, before, next, &mut body)?,
                Op::Scale(scale) => before = self.scale(*scale, before, &mut body)?,
                Op::DeltaRule(op) => before = self.delta_rule(op, before, next, &mut body)?,
                Op::Ssd(op) => before = self.ssd(op, before, next, &mut body)?,
                Op::NormGateUp(op) => {
                    let Some(Op::DownAdd(next)) = next else { return Err(self.order()) };
                    let linears: Vec<&Linear> = op.gate.iter().chain([&op.up]).collect();
                    self.norm(op.norm, before, &linears, &mut body)?;
                    floats = self.gate_and_up(op, before, &next.down, &mut body)?;
                }
                Op::Experts(op) => before = self.experts(op, before, &mut body)?,
                Op::Join(add) => {
                    let branch = self.branch_of(add);
                    self.add_branch(add, &branch, &mut body)?;
                }
                Op::DownAdd(op) => {
                    before = self.add(&op.down, floats, &op.add, next, &mut body)?;
                    if let Some(handoff) = &mut self.handoff {
                        handoff.layer += 1;
                    }
                }
                Op::NormLogits(op) => head = Some(op),
            }
        }
        let op = head.ok_or_else(|| self.order())?;
        if let Before::Pending(..) = before {
            // The last layer: its own norm is unused, but its sum is the input of outputs.
            self.norm(Some(op.norm), before, &[&op.head], &mut body)?;
        }
        self.finish(body, before, op)
    }

    /// Returns the pages of K and V of a layer.
    fn pages_of(&self, kv_slot: KvSlot) -> [wgpu::Buffer; 2] {
        let Limits { block_size, kv_dtype, .. } = *self.limits;
        self.pages[pages::place(&self.program.kv, kv_slot, block_size, kv_dtype).0].clone()
    }

    /// Returns the buffer of a branch that is not added directly.
    fn branch_of(&self, add: &ops::Add) -> wgpu::Buffer {
        match add.waits {
            false => self.y.clone(),
            true => self.waiting.clone().expect("programs with such branches have the buffer"),
        }
    }

    fn order(&self) -> LoadError {
        unsupported(
            self.device,
            "this order of operations".into(),
            "an embedding, layers of a mixer and feed-forward, and a head work",
        )
    }

    /// Returns the constants for the kinds of activations that these matmuls read.
    fn emit_for(&self, linears: &[&Linear], width: usize) -> Constants {
        vec![
            ("ACT_BLOCKS", U(width.div_ceil(BLOCK) as u32)),
            ("EMIT_Q8", U(u32::from(linears.iter().any(|linear| self.is_quantized(linear))))),
            ("EMIT_F32", U(u32::from(linears.iter().any(|linear| !self.is_quantized(linear))))),
        ]
    }

    /// Returns true if a matmul reads activations of eight bits.
    fn is_quantized(&self, linear: &Linear) -> bool {
        Layout::of(self.weights.matrix(linear.matrix).format).is_quantized()
    }

    /// Returns the constants for half-precision activations for cooperative matrices, in launches of at least `from`
    /// rows.
    fn halves(&self, from: u32) -> Constants {
        if self.device.cooperative.is_none() && !self.device.as_hardware {
            return vec![];
        }
        vec![
            ("HALVES", U(1)),
            ("HALVES_FROM", U(from)),
            ("QUANTS_END", U(self.halves_at(Layout::Q8))),
            ("FLOATS_END", U(self.halves_at(Layout::F16))),
        ]
    }

    /// Returns the offset, in units of 16 bytes, of half-precision activations behind the ones that matmuls with this
    /// layout read otherwise.
    fn halves_at(&self, layout: Layout) -> u32 {
        (self.act_blocks * if layout.is_quantized() { 2 } else { 8 }) as u32
    }

    fn launch(
        &mut self,
        name: &str,
        files: &[&str],
        constants: Constants,
        buffers: &[(&str, &wgpu::Buffer)],
        grid: Grid,
        kv_group: usize,
    ) -> Result<Launch, LoadError> {
        self.launch_variant(
            LaunchVariant::with_barriers(When::Always),
            (name, files, &constants),
            buffers,
            grid,
            kv_group,
        )
    }

    /// Creates a launch with its own buffers and hazards.
    fn launch_variant(
        &mut self,
        variant: LaunchVariant,
        (name, files, constants): (&str, &[&str], &Constants),
        buffers: &[(&str, &wgpu::Buffer)],
        grid: Grid,
        kv_group: usize,
    ) -> Result<Launch, LoadError> {
        let files = [files, &variant.files].concat();
        let constants = [&constants[..], &variant.constants].concat();
        let made: Vec<_> = self.written_acts(Acts::Plain).collect();
        let mut all: Vec<_> = variant.buffers.iter().map(|(name, buffer)| (*name, buffer)).collect();
        all.extend(buffers);
        all.extend(made.iter().map(|(name, buffer)| (*name, buffer)));
        let kernels = vec![self.kernel_with(name, &files, &constants, &all, variant.hazards)];
        let counter = self.counter(&[name.to_owned()]);
        // A launch that waits for another one is timed together with it.
        let waits = self.device.timed && variant.hazards.hides();
        let timed_with = self.timed_with.filter(|_| waits);
        if waits {
            self.timed_with = timed_with.or(Some(counter));
        }
        Ok(Launch { when: variant.when, kernels, grid, kv_group, counter, timed_with })
    }

    /// Returns the handoff buffers of matmuls; `None` while each is timed.
    fn word_handoff(&self) -> Option<&Handoff> {
        self.handoff.as_ref().filter(|_| !self.device.timed)
    }

    fn kernel(
        &self,
        name: &str,
        files: &[&str],
        constants: &Constants,
        buffers: &[(&str, &wgpu::Buffer)],
    ) -> Kernel {
        self.kernel_with(name, files, constants, buffers, &Hazards::DECLARED)
    }

    fn kernel_with(
        &self,
        name: &str,
        files: &[&str],
        constants: &Constants,
        buffers: &[(&str, &wgpu::Buffer)],
        hazards: &Hazards,
    ) -> Kernel {
        Kernel::new(self.device, name, files, constants, buffers, hazards)
    }

    /// The place of these counters, one after the other.
    fn counter(&mut self, names: &[String]) -> usize {
        let known = self.counters.windows(names.len()).position(|window| window == names);
        known.unwrap_or_else(|| {
            self.counters.extend_from_slice(names);
            self.counters.len() - names.len()
        })
    }

    fn matrix(&mut self, inputs: &Inputs<'_>) -> Result<Arc<DeviceMatrix>, LoadError> {
        let ids: Vec<_> = inputs.linears.iter().map(|linear| linear.matrix).collect();
        let key = (ids, inputs.order);
        if let Some(matrix) = self.matrices.get(&key) {
            return Ok(matrix.clone());
        }
        let sources: Vec<_> = key.0.iter().map(|&id| self.weights.matrix(id)).collect();
        let matrix = Arc::new(DeviceMatrix::upload(self.device, &sources, inputs.order)?);
        self.matrices.insert(key, matrix.clone());
        Ok(matrix)
    }

    /// Returns activations under the names of their readers.
    fn read_acts(&self, acts: Acts) -> impl Iterator<Item = (&'static str, wgpu::Buffer)> {
        ["x_quants", "x_scales", "x_floats"].into_iter().zip(self.acts_of(acts).clone())
    }

    /// Returns the buffer of half-precision activations for matmuls with a layout.
    fn half_acts(&self, acts: Acts, layout: Layout) -> wgpu::Buffer {
        self.acts_of(acts)[if layout.is_quantized() { 0 } else { 2 }].clone()
    }

    /// Returns activations under the names of their writers.
    fn written_acts(&self, acts: Acts) -> impl Iterator<Item = (&'static str, wgpu::Buffer)> {
        ["acts_quants", "acts_scales", "acts_floats"].into_iter().zip(self.acts_of(acts).clone())
    }

    fn acts_of(&self, acts: Acts) -> &[wgpu::Buffer; 3] {
        match acts {
            Acts::Plain => &self.acts,
            Acts::Normed => &self.normed,
        }
    }

    fn vector(&mut self, id: VectorId) -> Result<wgpu::Buffer, LoadError> {
        if let Some(vector) = self.vectors.get(&id) {
            return Ok(vector.clone());
        }
        let vector = self.device.upload(self.weights.vector(id), "a vector")?;
        self.vectors.insert(id, vector.clone());
        Ok(vector)
    }
}

fn unsupported(device: &Device, what: String, supported: &str) -> LoadError {
    LoadError::Unsupported { device: device.name.clone(), what, supported: supported.to_owned() }
}
