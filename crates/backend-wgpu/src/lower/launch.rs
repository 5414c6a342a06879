//! What a model becomes: launches, and the buffers between them and the host.

use std::sync::Arc;

use super::{handed_parts::HandedParts, kernels::Product, recurrent::LayerState};
use crate::{
    hidden::Hazards,
    pipeline::Pipeline,
    plan::{Tile, Tiling},
    template::Constants,
};

/// How many workgroups a launch has.
#[derive(Clone, Debug)]
pub enum Grid {
    /// This many for each row.
    Each(u32),
    /// One for each row, along x.
    Rows,
    /// One for each 256 rows.
    Threads,
    /// A product: its outputs, the matrices of its stack, and its kernels.
    Product(u32, u32, Arc<[Product]>),
    /// The items of a KV group's attention with such a tile, this many for each.
    Attention(Tile, u32),
    /// This many for each row, if attention has left a row's result in parts.
    Merge(u32),
    /// The pages of all block tables.
    Pages,
    /// So many for each row and one of its experts: along x if it is first, else along y.
    Pairs {
        /// Experts of a row.
        used: u32,
        /// Workgroups for each.
        each: u32,
        /// Whether pairs are along x.
        along_x: bool,
    },
    /// The same for each tile of rows of one expert, or for each of a tile's places.
    ExpertTiles {
        /// How rows become tiles.
        tiles: ExpertTiles,
        /// Workgroups for each.
        each: u32,
        /// Whether tiles are along x; places are along y.
        along_x: bool,
    },
    /// This many for each sequence.
    Sequences(u32),
    /// A single workgroup.
    One,
}

/// How a step's rows become tiles of which each has one expert (`route_tiles.wgsl`).
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
    /// Tiles that a step of so many rows may need.
    pub fn most(self, rows: u32) -> u32 {
        let pairs = rows * self.used;
        pairs / self.tile + self.count.min(pairs)
    }
}

/// The steps that a launch is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// All.
    Always,
    /// Those of one row.
    OneRow,
    /// Those of more.
    MoreRows,
    /// Those of at least so many.
    From(usize),
    /// Those of so many, and of fewer than so many.
    Between(usize, usize),
    /// None: the kernel is only looked at.
    Never,
}

impl When {
    /// All, but those of one row if something else is for these.
    pub fn unless_one_row(other: bool) -> Self {
        if other { Self::MoreRows } else { Self::Always }
    }

    /// Whether it is for a step of so many rows.
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

/// A way in which a launch takes and gives.
pub struct Way {
    /// In which steps.
    pub when: When,
    /// Code beside that of its kernel.
    pub files: Vec<&'static str>,
    /// What that code is made with.
    pub constants: Constants,
    /// Its buffers.
    pub buffers: Vec<(&'static str, wgpu::Buffer)>,
    /// What wgpu does not see.
    pub hazards: &'static Hazards,
}

impl Way {
    /// With barriers.
    pub fn told(when: When) -> Self {
        Self { when, files: vec![], constants: vec![], buffers: vec![], hazards: &Hazards::TOLD }
    }
}

/// A kernel and what it works on.
pub struct Kernel {
    /// Its code.
    pub pipeline: Arc<Pipeline>,
    /// Its buffers.
    pub group: wgpu::BindGroup,
    /// What it gets after its [`Args`](crate::plan::Args).
    pub arguments: Vec<u32>,
    /// Those of its buffers that make it wait for what wgpu does not see (`hidden.rs`).
    pub ends: Vec<wgpu::Buffer>,
}

/// One launch.
pub struct Launch {
    /// In which steps.
    pub when: When,
    /// The kernel; for products, one for each number of rows.
    pub kernels: Vec<Kernel>,
    /// Its size.
    pub grid: Grid,
    /// The KV group, where there is one.
    pub kv_group: usize,
    /// Index of the first kernel's counter; the others follow.
    pub counter: usize,
    /// The counter of a launch that this one waits for, and is timed together with.
    pub timed_with: Option<usize>,
}

/// A model on the device.
pub struct Model {
    /// What to launch for every row, in order.
    pub body: Vec<Launch>,
    /// Norm of the rows with outputs.
    pub head_norm: Launch,
    /// Their products with the head.
    pub head: Vec<Launch>,
    /// The same without a norm of its own, for a step of one row, where the last layer makes what that takes.
    pub one_row_head: Vec<Launch>,
    /// Bias and penalties.
    pub adjust: Launch,
    /// The best tokens.
    pub argmax: [Launch; 2],
    /// The draw, where there is a temperature.
    pub sample: Launch,
    /// States of sequences, by layer.
    pub states: Vec<LayerState>,
    /// Pages, one buffer for K and one for V of each layer slot.
    pub pages: Vec<[wgpu::Buffer; 2]>,
    /// Buffers that the host writes or reads.
    pub io: Io,
    /// How attention of each K/V group is cut.
    pub tilings: Vec<Tiling>,
    /// Rows of the table of embeddings for layers, `[rows, count * width]`.
    pub table_rows: Option<wgpu::Buffer>,
    /// Names of the counters.
    pub counters: Vec<String>,
    /// Parts of attention that are handed to its merge, where they are.
    pub handed_parts: Option<HandedParts>,
}

/// Buffers between host and device.
pub struct Io {
    /// A step's words.
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
