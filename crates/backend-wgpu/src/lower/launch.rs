//! The lowered model: launches, and the buffers between them and the host.

use std::sync::Arc;

use bytemuck::{bytes_of, cast_slice};

use super::{handoff_partials::HandoffPartials, kernels::Matmul, recurrent::LayerState};
use crate::{
    device::{ARGS_BYTES, Device},
    hidden::Hazards,
    pipeline::Pipeline,
    plan::{Args, Tile, Tiling},
    template::Constants,
};

/// Number of workgroups of a launch.
#[derive(Clone, Debug)]
pub enum Grid {
    /// This number of workgroups per row.
    Each(u32),
    /// One workgroup per row, along x.
    Rows,
    /// One workgroup per 256 rows.
    Threads,
    /// A matmul: its outputs, the matrices of its stack, and its kernels.
    Matmul(u32, u32, Arc<[Matmul]>),
    /// This number of workgroups per item of attention with this kind of tile, in the launch's KV group.
    Attention(Tile, u32),
    /// This number of workgroups per row, if attention has left the result of a row in partials.
    Merge(u32),
    /// One workgroup per page of the block tables.
    Pages,
    /// Workgroups for each pair of a row and one of its experts: along x if `along_x`, otherwise along y.
    Pairs {
        /// Experts of a row.
        used: u32,
        /// Workgroups per pair.
        each: u32,
        /// True if pairs are along x.
        along_x: bool,
    },
    /// Workgroups for each tile of rows of one expert, or for each place of a tile.
    ExpertTiles {
        /// Division of rows into tiles.
        tiles: ExpertTiles,
        /// Workgroups per tile.
        each: u32,
        /// True if tiles are along x; places are along y.
        along_x: bool,
    },
    /// This number of workgroups per sequence.
    Sequences(u32),
    /// A single workgroup.
    One,
}

/// Division of a step's rows into tiles of one expert each (`route_tiles.wgsl`).
#[derive(Clone, Copy, Debug)]
pub struct ExpertTiles {
    /// Number of experts.
    pub count: u32,
    /// Experts of a row.
    pub used: u32,
    /// Places of a tile.
    pub tile: u32,
}

impl ExpertTiles {
    /// Returns the maximum number of tiles of a step with `rows` rows.
    pub fn most(self, rows: u32) -> u32 {
        let pairs = rows * self.used;
        pairs / self.tile + self.count.min(pairs)
    }
}

/// Steps that use a launch, by their number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// All steps.
    Always,
    /// Steps of one row.
    OneRow,
    /// Steps of more than one row.
    MoreRows,
    /// Steps of at least this many rows.
    From(usize),
    /// Steps of at least the first number of rows, and of fewer than the second.
    Between(usize, usize),
    /// No steps: the kernel is compiled for inspection.
    Never,
}

impl When {
    /// Returns `MoreRows` if another launch handles steps of one row, and `Always` otherwise.
    pub fn unless_one_row(other: bool) -> Self {
        if other { Self::MoreRows } else { Self::Always }
    }

    /// Returns true for a step of `rows` rows.
    pub fn holds(self, rows: usize) -> bool {
        match self {
            Self::Always => true,
            Self::OneRow => rows == 1,
            Self::MoreRows => rows > 1,
            Self::From(from) => rows >= from,
            Self::Never => false,
            Self::Between(from, to) => (from..to).contains(&rows),
        }
    }
}

/// A variant of a launch with its own inputs and outputs.
pub struct LaunchVariant {
    /// Steps that use it.
    pub when: When,
    /// Code beside that of its kernel.
    pub files: Vec<&'static str>,
    /// Constants of that code.
    pub constants: Constants,
    /// Its buffers.
    pub buffers: Vec<(&'static str, wgpu::Buffer)>,
    /// Differences from the accesses declared to wgpu.
    pub hazards: &'static Hazards,
}

impl LaunchVariant {
    /// Creates a variant without handoff: wgpu places barriers for all its buffers.
    pub fn with_barriers(when: When) -> Self {
        Self { when, files: vec![], constants: vec![], buffers: vec![], hazards: &Hazards::DECLARED }
    }
}

/// A kernel and its buffers.
pub struct Kernel {
    /// Its code.
    pub pipeline: Arc<Pipeline>,
    /// Its buffers.
    pub group: wgpu::BindGroup,
    /// Arguments after its [`Args`].
    pub arguments: Vec<u32>,
    /// Buffers that make it wait for accesses that wgpu does not see (`hidden.rs`).
    pub ends: Vec<wgpu::Buffer>,
}

impl Kernel {
    /// Compiles a kernel of some files with these constants, and binds its buffers.
    pub fn new(
        device: &Device,
        name: &str,
        files: &[&str],
        constants: &Constants,
        buffers: &[(&str, &wgpu::Buffer)],
        hazards: &Hazards,
    ) -> Self {
        let pipeline = device.pipeline(name, files, constants, hazards);
        let group = device.bind(&pipeline, buffers);
        let arguments = device.arguments(constants).iter().map(|(_, value)| value.bits()).collect();
        let ends = hazards.ends.iter().filter_map(|end| buffers.iter().find(|(name, _)| name == end));
        let ends = ends.map(|(_, buffer)| (*buffer).clone()).collect();
        Self { pipeline, group, arguments, ends }
    }

    /// Encodes a dispatch of this number of workgroups.
    pub fn encode(&self, pass: &mut wgpu::ComputePass<'_>, args: &Args, [x, y]: [u32; 2]) {
        pass.set_pipeline(self.pipeline.inner());
        pass.set_bind_group(0, &self.group, &[]);
        pass.set_immediates(0, bytes_of(args));
        if !self.arguments.is_empty() {
            pass.set_immediates(ARGS_BYTES, cast_slice(&self.arguments));
        }
        pass.dispatch_workgroups(x, y, 1);
    }
}

/// A launch.
pub struct Launch {
    /// Steps that use it.
    pub when: When,
    /// The kernel; for matmuls, one for each number of rows.
    pub kernels: Vec<Kernel>,
    /// Its size.
    pub grid: Grid,
    /// Its KV group, if it has one.
    pub kv_group: usize,
    /// Index of the first kernel's counter; the others follow.
    pub counter: usize,
    /// The counter of a launch that this one waits for, and is timed together with.
    pub timed_with: Option<usize>,
}

/// A model on the device.
pub struct Model {
    /// Launches for all rows, in order.
    pub body: Vec<Launch>,
    /// Norm of the rows with outputs.
    pub head_norm: Launch,
    /// Their matmuls with the head.
    pub head: Vec<Launch>,
    /// Launches of the head in a step of one row without its own norm, if the last layer computes it.
    pub one_row_head: Vec<Launch>,
    /// Bias and penalties.
    pub adjust: Launch,
    /// The best tokens.
    pub argmax: [Launch; 2],
    /// Sampling, for outputs with a temperature.
    pub sample: Launch,
    /// States of sequences, by layer.
    pub states: Vec<LayerState>,
    /// Pages, one buffer for K and one for V of each layer slot.
    pub pages: Vec<[wgpu::Buffer; 2]>,
    /// Buffers that the host writes or reads.
    pub io: Io,
    /// Attention tiles and splits of each K/V group.
    pub tilings: Vec<Tiling>,
    /// Rows of the table of embeddings for layers, `[rows, count * width]`.
    pub table_rows: Option<wgpu::Buffer>,
    /// Names of the counters.
    pub counters: Vec<String>,
    /// Buffers of the handoff from attention to its merge, if the device uses it.
    pub handoff_partials: Option<HandoffPartials>,
}

/// Buffers between host and device.
pub struct Io {
    /// Words of a step.
    pub step: wgpu::Buffer,
    /// `[LOGIT_ROWS, vocab]`
    pub logits: wgpu::Buffer,
    /// `[LOGIT_ROWS, hidden]`
    pub normed: wgpu::Buffer,
    /// See `sample.wgsl`.
    pub samples: wgpu::Buffer,
    /// See `sample.wgsl`.
    pub masks: wgpu::Buffer,
    /// See `sample.wgsl`.
    pub tokens: wgpu::Buffer,
    /// See `adjust.wgsl`.
    pub edits: wgpu::Buffer,
}
