//! A program, lowered once more: to a fixed list of launches with their kernels and buffers.

mod attention;
mod coop_attention;
mod experts;
mod fused;
mod handed_parts;
mod hands;
mod head;
mod kernels;
mod latent;
mod launch;
mod layer_input;
mod products;
mod recurrent;
mod ssd;

use std::{collections::HashMap, sync::Arc};

use paguro_backend::{
    Activation, AttentionMode, KvSlot, Limits, Linear, LoadError, MatrixId, Norm, VectorId, Weights,
};

use crate::ops::{self, KvGroup, Op, Program};

use crate::{
    adapter::LEAST_THREADS,
    device::Device,
    hidden::Hazards,
    layout::{BLOCK, Layout},
    matrix::{DeviceMatrix, Order},
    pages::{self, page_words},
    plan::{self, Tiling},
    template::{Constants, Value},
};

use Value::{F, U};
use experts::Room;
use handed_parts::HandedParts;
use hands::Hands;
use launch::Way;
use products::Inputs;

pub use kernels::{Product, exact_rows, product};
pub use launch::{Grid, Io, Kernel, Launch, Model, When};
pub use recurrent::{LayerState, StateBuffer};

/// Elements of a head, at most: a workgroup of attention has its queries and sums in its memory.
const MOST_HEAD_DIM: usize = 640;
/// Rows whose logits are computed at once: bounds their memory for large vocabularies.
pub const LOGIT_ROWS: usize = 64;
/// Maximum queries of an attention tile, which share reads of K and V.
const TILE_QUERIES: usize = 8;
/// Maximum queries of an attention tile on software drivers, where unrolled code takes long to compile.
const SOFTWARE_TILE_QUERIES: usize = 4;

/// Files of WGSL.
macro_rules! wgsl {
    ($($name:literal),*) => {
        &[$(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/shaders/", $name, ".wgsl"))),*]
    };
}
use wgsl;

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
    /// The residual stream with everything added to it.
    Added,
    /// The residual stream; in steps of one row also its activations without the factor of the norm with this epsilon.
    Emitted(f32),
    /// The result of a matmul that must still be normed and added.
    Pending(Norm),
}

/// Computes the attention tiles and splits of each K/V group.
fn tilings(device: &Device, program: &Program, limits: &Limits) -> Vec<Tiling> {
    program.kv.groups.iter().map(|group| tiling(device, program, group, limits)).collect()
}

fn tiling(device: &Device, program: &Program, of: &KvGroup, limits: &Limits) -> Tiling {
    let (rows, heads, kv_heads, dim) = (limits.max_rows, of.heads, of.kv_heads, of.head_dim);
    let group = of.queries_per_kv();
    let few = coop_attention::few(device, program, limits);
    let most = if device.is_software && few.is_none() { SOFTWARE_TILE_QUERIES } else { TILE_QUERIES };
    // Larger heads have no room for more in the memory of a workgroup.
    let queries = if dim > 128 { most.min(4) } else { most };
    let (tile_heads, head_tiles) = (group.min(queries), group.div_ceil(queries));
    let splits = plan::splits(limits.max_context);
    let parts = rows + (limits.max_sequences * splits).min(8192);
    let parts = parts.min(device.binding_limit() as usize / 4 / (heads * (dim + 4))).max(rows);
    let emits =
        dim.is_multiple_of(BLOCK) && !of.is_latent && queries * dim / 4 <= attention::THREADS as usize;
    Tiling {
        rows: (queries / tile_heads).max(1),
        heads: tile_heads,
        workgroups: kv_heads * head_tiles,
        emits,
        always_merges: program.always_merges(),
        parts,
        // Devices do not report how many workgroups run concurrently. Each of an H200's 132 processors runs two, or
        // three smaller ones.
        busy: match few {
            Some(_) => 396,
            None if device.is_software => 8,
            None => 264,
        },
        wide: coop_attention::wide(device, program, of, limits).filter(|_| emits),
    }
}

/// Elements of all sums of partial results of attention, and of all maxima with sums of weights.
fn partials(program: &Program, tilings: &[Tiling]) -> [usize; 2] {
    let most = |of: fn(&KvGroup) -> usize| {
        let groups = program.kv.groups.iter().zip(tilings);
        groups.map(|(group, tiling)| tiling.parts * of(group)).max().unwrap_or(0)
    };
    [most(KvGroup::q_width), most(|group| 2 * group.heads)]
}

/// Elements of the widest rows of queries and of keys that matmuls make.
fn qkv_widths(program: &Program) -> [usize; 2] {
    let groups = || program.kv.groups.iter().filter(|group| !group.is_latent);
    let kv = groups().map(|group| group.kv_heads * group.head_dim).max().unwrap_or(0);
    [groups().map(KvGroup::q_width).max().unwrap_or(0), kv]
}

/// Returns the blocks of the activation buffers, and the words of their half-precision copies.
fn activation_words(device: &Device, program: &Program, limits: &Limits) -> (usize, usize) {
    let mixers = recurrent::Room::of(program).widest;
    let latent = latent::Room::of(program).widest;
    let embeds = layer_input::Room::of(program).width;
    let room = Room::of(device, program, limits);
    let widths =
        [program.hidden, qkv_widths(program)[0], program.ffn, mixers, latent, embeds, room.narrow_width];
    let widest = widths.map(|width| width.div_ceil(BLOCK)).into_iter().max().unwrap_or(1);
    let rows = limits.max_rows.max(LOGIT_ROWS);
    let of_experts = room.act_blocks;
    let for_experts = if of_experts > 0 { (of_experts + BLOCK) * 16 } else { 0 };
    // Cooperative matrices read whole tiles, including unwritten rows and blocks.
    let halves = match device.cooperative {
        None => 0,
        Some(_) => ((rows.next_multiple_of(kernels::MOST_ROWS) * widest + BLOCK) * 16).max(for_experts),
    };
    ((rows * widest).max(of_experts), halves)
}

/// Returns the bytes of all buffers besides weights and pages. A test compares the result with the allocations of a
/// load.
pub fn buffer_bytes(device: &Device, program: &Program, limits: &Limits) -> u64 {
    let Program { hidden, ffn, vocab, .. } = *program;
    let (rows, outputs) = (limits.max_rows, limits.max_outputs.max(1));
    let [q, kv] = qkv_widths(program);
    let tilings = tilings(device, program, limits);
    let (blocks, halves) = activation_words(device, program, limits);
    let pairs: usize = program.ropes.iter().map(|rope| rope.frequencies.len()).sum();
    let turns = 2 * pairs * (limits.max_context.div_ceil(256) + 256);
    let room = Room::of(device, program, limits);
    let products = room.scratch(rows, [q, kv, ffn]).iter().sum::<usize>();
    let branch = if program.has_joins() { rows * hidden } else { 0 };
    // Twice, if steps of many rows use partials without handoff.
    let copies =
        1 + usize::from(has_wide(&tilings) && handed_parts::hands_parts(device, program, limits, &tilings));
    let parts = copies * partials(program, &tilings).iter().sum::<usize>();
    let logit_rows = limits.max_outputs.clamp(1, LOGIT_ROWS);
    let masks = logit_rows.max(outputs.min(256)) * vocab.div_ceil(32);
    let sampling = logit_rows * 2 * (vocab + hidden) + 4 * crate::sampler::room(logit_rows, vocab) + masks;
    let gathered = match limits.attention {
        AttentionMode::Paged => 0,
        AttentionMode::Gather => {
            2 * plan::tables(&program.kv, limits)
                * page_words(&program.kv, limits.block_size, limits.kv_dtype)
        }
    };
    let words = plan::words(&program.kv, limits, &tilings)
        + rows * (2 * hidden + program.kv.q_width())
        + 2 * (blocks * 42 + 2 * halves)
        + turns
        + products
        + branch
        + room.words()
        + recurrent::Room::of(program).words(rows)
        + latent::Room::of(program).words(rows)
        + layer_input::Room::of(program).words(rows)
        + parts
        + sampling
        + gathered
        + 12 * outputs;
    4 * words as u64
}

/// Returns true if attention in steps of many rows uses cooperative matrices.
fn has_wide(tilings: &[Tiling]) -> bool {
    tilings.iter().any(|tiling| tiling.wide.is_some())
}

/// A program on its way to becoming a [`Model`].
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
    /// Pages in the order of the block tables, for the reference way.
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
    /// Activations of products: quants, scales, floats.
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
    part_sums: wgpu::Buffer,
    part_tops: wgpu::Buffer,
    ropes: Vec<[wgpu::Buffer; 2]>,
    /// Buffers of the handoff in steps of one row, if the device uses it.
    hands: Option<Hands>,
    /// Buffers of the handoff from attention to its merge, if the device uses it.
    handed_parts: Option<HandedParts>,
    /// Counter of the attention that is to be merged next, if it is timed with the merge.
    timed_with: Option<usize>,
}

impl<'a> Lowering<'a> {
    /// Allocates all buffers for `limits`.
    ///
    /// # Errors
    /// [`LoadError`]
    pub fn new(
        device: &'a Device,
        program: &'a Program,
        weights: &'a Weights,
        limits: &'a Limits,
    ) -> Result<Self, LoadError> {
        check_supported(device, program, limits)?;
        let Program { hidden, ffn, .. } = *program;
        let rows = limits.max_rows;
        let few = coop_attention::few(device, program, limits);
        let tilings = tilings(device, program, limits);
        let (blocks, halves) = activation_words(device, program, limits);
        let buffer = |words: usize, what: &str| device.buffer(words, what);
        let page_words = page_words(&program.kv, limits.block_size, limits.kv_dtype);
        let half = |what: &str| buffer(limits.pages * page_words, what);
        let mut pages = Vec::new();
        for _ in 0..pages::buffers(&program.kv, limits.block_size, limits.kv_dtype) {
            pages.push([half("pages of K")?, half("pages of V")?]);
        }
        let gathered = match limits.attention {
            AttentionMode::Paged => None,
            AttentionMode::Gather => {
                let words = plan::tables(&program.kv, limits) * page_words;
                Some([buffer(words, "gathered K")?, buffer(words, "gathered V")?])
            }
        };
        let mut ropes = Vec::new();
        for rope in &program.ropes {
            let [far, near] = attention::turns(rope, limits.max_context);
            ropes.push([device.upload(&far, "rotations")?, device.upload(&near, "rotations")?]);
        }
        let acts = || -> Result<[wgpu::Buffer; 3], LoadError> {
            Ok([
                buffer(blocks * 8 + halves, "activations")?,
                buffer(blocks * 2, "activations")?,
                buffer(blocks * 32 + halves, "activations")?,
            ])
        };
        let [q, kv] = qkv_widths(program);
        // Partials with handoff have a separate buffer.
        let are_handed = handed_parts::hands_parts(device, program, limits, &tilings);
        let leaves_none = are_handed && !has_wide(&tilings);
        let [sums, tops] = if leaves_none { [0; 2] } else { partials(program, &tilings) };
        let room = Room::of(device, program, limits);
        let words = room.scratch(rows, [q, kv, ffn]);
        let scratch = |index: usize| buffer(words[index], "products");
        let mut lowering = Self {
            step: buffer(plan::words(&program.kv, limits, &tilings), "steps")?,
            x: buffer(rows * hidden, "the residual stream")?,
            y: buffer(rows * hidden, "products")?,
            waiting: program.has_joins().then(|| buffer(rows * hidden, "a branch")).transpose()?,
            experts: room.buffers(device)?,
            mixers: recurrent::Room::of(program).buffers(device, rows)?,
            states: recurrent::states(device, program, limits)?,
            latents: latent::Room::of(program).buffers(device, rows)?,
            embeds: layer_input::Room::of(program).buffers(device, rows)?,
            acts: acts()?,
            normed: acts()?,
            squares: buffer(hidden.div_ceil(4 * BLOCK) * 4, "squares")?,
            factors: buffer(rows.max(LOGIT_ROWS), "factors")?,
            zero: buffer(1, "zero")?,
            act_blocks: blocks,
            scratch: [scratch(0)?, scratch(1)?, scratch(2)?],
            queries: buffer(rows * program.kv.q_width(), "queries")?,
            part_sums: buffer(sums, "partial attention")?,
            // The last word is `gave_up` in `hand.wgsl`.
            tokens: buffer(limits.max_outputs.max(1) + 1, "sampled tokens")?,
            part_tops: buffer(tops, "partial attention")?,
            device,
            program,
            weights,
            limits,
            matrices: HashMap::new(),
            vectors: HashMap::new(),
            counters: Vec::new(),
            tilings,
            few,
            pages,
            gathered,
            ropes,
            hands: None,
            handed_parts: None,
            timed_with: None,
        };
        lowering.handed_parts = lowering.handed_parts()?;
        lowering.hands = lowering.hands()?;
        Ok(lowering)
    }

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
                        self.normed_product(gate, &gates, &mut body)?;
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
                    if let Some(hands) = &mut self.hands {
                        hands.layer += 1;
                    }
                }
                Op::NormLogits(op) => head = Some(op),
            }
        }
        let op = head.ok_or_else(|| self.order())?;
        if let Before::Pending(_) = before {
            // The last layer: its own norm is unused, but its sum is the input of outputs.
            self.norm(Some(op.norm), before, &[&op.head], &mut body)?;
        }
        self.finish(body, before, op)
    }

    /// Returns the pages of K and V of a layer.
    fn pages_of(&self, slot: KvSlot) -> [wgpu::Buffer; 2] {
        let Limits { block_size, kv_dtype, .. } = *self.limits;
        self.pages[pages::place(&self.program.kv, slot, block_size, kv_dtype).0].clone()
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
        self.launch_way(Way::told(When::Always), (name, files, &constants), buffers, grid, kv_group)
    }

    /// Creates a launch with its own buffers and hazards.
    fn launch_way(
        &mut self,
        way: Way,
        (name, files, constants): (&str, &[&str], &Constants),
        buffers: &[(&str, &wgpu::Buffer)],
        grid: Grid,
        kv_group: usize,
    ) -> Result<Launch, LoadError> {
        let files = [files, &way.files].concat();
        let constants = [&constants[..], &way.constants].concat();
        let made: Vec<_> = self.made(Acts::Plain).collect();
        let mut all: Vec<_> = way.buffers.iter().map(|(name, buffer)| (*name, buffer)).collect();
        all.extend(buffers);
        all.extend(made.iter().map(|(name, buffer)| (*name, buffer)));
        let kernels = vec![self.kernel_with(name, &files, &constants, &all, way.hazards)?];
        let counter = self.counter(&[name.to_owned()]);
        // A launch that waits for another one is timed together with it.
        let hands_over = self.device.timed && way.hazards.hides();
        let timed_with = self.timed_with.filter(|_| hands_over);
        if hands_over {
            self.timed_with = timed_with.or(Some(counter));
        }
        Ok(Launch { when: way.when, kernels, grid, kv_group, counter, timed_with })
    }

    /// Returns the handoff buffers of matmuls; `None` while each is timed.
    fn product_hands(&self) -> Option<&Hands> {
        self.hands.as_ref().filter(|_| !self.device.timed)
    }

    fn kernel(
        &self,
        name: &str,
        files: &[&str],
        constants: &Constants,
        buffers: &[(&str, &wgpu::Buffer)],
    ) -> Result<Kernel, LoadError> {
        self.kernel_with(name, files, constants, buffers, &Hazards::TOLD)
    }

    fn kernel_with(
        &self,
        name: &str,
        files: &[&str],
        constants: &Constants,
        buffers: &[(&str, &wgpu::Buffer)],
        hazards: &Hazards,
    ) -> Result<Kernel, LoadError> {
        let pipeline = self.device.pipeline(name, files, constants, hazards);
        let group = self.device.bind(&pipeline, buffers);
        let arguments = self.device.arguments(constants).iter().map(|(_, value)| value.bits()).collect();
        let ends = hazards.ends.iter().filter_map(|end| buffers.iter().find(|(name, _)| name == end));
        let ends = ends.map(|(_, buffer)| (*buffer).clone()).collect();
        Ok(Kernel { pipeline, group, arguments, ends })
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
    fn taken(&self, acts: Acts) -> impl Iterator<Item = (&'static str, wgpu::Buffer)> {
        ["x_quants", "x_scales", "x_floats"].into_iter().zip(self.acts_of(acts).clone())
    }

    /// Returns the buffer of half-precision activations for matmuls with a layout.
    fn half_acts(&self, acts: Acts, layout: Layout) -> wgpu::Buffer {
        self.acts_of(acts)[if layout.is_quantized() { 0 } else { 2 }].clone()
    }

    /// Returns activations under the names of their writers.
    fn made(&self, acts: Acts) -> impl Iterator<Item = (&'static str, wgpu::Buffer)> {
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

fn check_supported(device: &Device, program: &Program, limits: &Limits) -> Result<(), LoadError> {
    for KvGroup { head_dim: dim, is_latent, .. } in &program.kv.groups {
        // For larger heads, a workgroup of the merge computes a whole head.
        let fits = if *dim > 256 {
            (dim.is_multiple_of(BLOCK) || *is_latent) && *dim <= MOST_HEAD_DIM
        } else {
            true
        };
        if !dim.is_multiple_of(8) || !fits {
            let supported = format!("multiples of 8 up to 256 and of {BLOCK} up to {MOST_HEAD_DIM} work");
            return Err(unsupported(device, format!("head_dim {dim}"), &supported));
        }
    }
    if !128_usize.is_multiple_of(limits.block_size) || limits.block_size < 16 {
        let what = format!("pages of {} tokens", limits.block_size);
        return Err(unsupported(device, what, "16, 32, 64 and 128 work"));
    }
    if device.limits.max_compute_workgroup_storage_size < 28 << 10
        || device.limits.max_compute_invocations_per_workgroup < LEAST_THREADS
    {
        let what = "attention with its workgroup memory".to_owned();
        return Err(unsupported(device, what, "28 KiB and 256 threads for each workgroup are needed"));
    }
    Ok(())
}
