//! The emitted model: launches, and the buffers between them and the host.

use std::sync::Arc;

use bytemuck::{bytes_of, cast_slice};
use paguro_backend::{LoadError, STATE_CHUNK, StateShape};

use super::{bind::Bound, handoff::EMPTY};
use crate::{
    device::{ARGS_BYTES, Device},
    hidden::Hazards,
    lower::{ExpertTiles, RowClass, StatePart, kernels::Matmul},
    pipeline::Pipeline,
    plan::{Args, Tile, Tiling},
    template::Constants,
};

/// Number of workgroups of a launch.
#[derive(Clone, Debug)]
pub enum Grid {
    /// This number of workgroups per row.
    Each(u32),
    /// This number of workgroups per row, if the step has given rows.
    Given(u32),
    /// One workgroup per row, along x.
    Rows,
    /// One workgroup per 256 rows.
    Threads,
    /// A matmul: its outputs, the matrices of its stack, and its kernels.
    Matmul(u32, u32, Arc<[Matmul]>),
    /// Low-rank products of adapters of a step's rows, or of those with outputs: the matrices of the site, and the kernels.
    LowRank {
        /// Matrices of the site.
        matrices: u32,
        /// True for rows with outputs.
        of_outputs: bool,
        /// Kernels by number of rows.
        kernels: Arc<[Matmul]>,
    },
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
    /// Workgroups for each expert that a step may copy: at most `used` for each row, and `most` in all. Experts are along y.
    Copies {
        /// Experts of a row.
        used: u32,
        /// Most experts.
        most: u32,
        /// Workgroups per expert.
        each: u32,
    },
    /// This number of workgroups per sequence.
    Sequences(u32),
    /// A single workgroup.
    One,
}

/// A kernel and its buffers.
pub struct Kernel {
    /// Its code.
    pub pipeline: Arc<Pipeline>,
    /// Its buffers.
    pub group: wgpu::BindGroup,
    /// Index of its counter.
    pub counter: usize,
    /// Arguments after its [`Args`].
    pub arguments: Vec<u32>,
    /// Buffers that make it, or the readers of its results, wait for accesses that wgpu does not see (`hidden.rs`).
    pub ends: Vec<wgpu::Buffer>,
}

impl Kernel {
    /// Binds the buffers of a kernel with these constants.
    pub fn new(
        device: &Device,
        pipeline: Arc<Pipeline>,
        constants: &Constants,
        buffers: &[(&str, &wgpu::Buffer)],
        hazards: &Hazards,
    ) -> Self {
        let group = device.bind(&pipeline, buffers);
        let arguments = device.arguments(constants).iter().map(|(_, value)| value.bits()).collect();
        let ends = hazards.ends.iter().filter_map(|end| buffers.iter().find(|(name, _)| name == end));
        let ends = ends.map(|(_, buffer)| (*buffer).clone()).collect();
        Self { pipeline, group, counter: 0, arguments, ends }
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
    /// The kernel; for matmuls, one for each number of rows.
    pub kernels: Vec<Kernel>,
    /// Its size.
    pub grid: Grid,
    /// Its K/V group, if it has one.
    pub kv_group: usize,
    /// Rows of the step for each of its rows.
    pub merged: u32,
    /// The counter of a launch that this one waits for, and is timed together with.
    pub timed_with: Option<usize>,
    /// True if the launch cannot run once more to be timed, because it changes places of experts.
    pub runs_once: bool,
}

/// A model on the device.
pub struct Model {
    /// Launches for all rows, in order, by the number of rows of a step.
    pub body: Vec<(RowClass, Vec<Arc<Launch>>)>,
    /// The end of a model that has logits.
    pub head: Option<Head>,
    /// States of sequences, by layer.
    pub states: Vec<LayerState>,
    /// Pages, one buffer for K and one for V of each layer slot.
    pub pages: Vec<[wgpu::Buffer; 2]>,
    /// Buffers that the host writes or reads.
    pub io: Io,
    /// Places of experts, by layer with slots: the layer's index, its slots, bytes of an expert and the buffer.
    pub pools: Vec<LayerPool>,
    /// Attention tiles and splits of each K/V group.
    pub tilings: Vec<Tiling>,
    /// Rows of the table of embeddings for layers, `[rows, count * width]`.
    pub table_rows: Option<wgpu::Buffer>,
    /// Given rows, `[given rows, parts, hidden]`.
    pub given: Option<wgpu::Buffer>,
    /// Tables of the adapters of a step's rows, and of a slice of its outputs.
    pub adapted: [Option<wgpu::Buffer>; 2],
    /// Words of the first launch of a step that passes low-rank products by handoff, which the host clears.
    pub low_words: Option<wgpu::Buffer>,
    /// Names of the counters.
    pub counters: Vec<String>,
    /// Partials of attention with handoff to their merge, if the device uses it.
    pub handoff_partials: Option<HandoffPartials>,
    /// All buffers.
    pub bound: Bound,
}

/// Launches for rows with outputs, and their buffers.
pub struct Head {
    /// Norm of the rows.
    pub norm: Arc<Launch>,
    /// Their matmuls.
    pub logits: Vec<Arc<Launch>>,
    /// The same in a step of one row without its own norm, if the last layer computes it.
    pub one_row: Vec<Arc<Launch>>,
    /// Means of normed rows, of an encoder.
    pub mean: Option<Launch>,
    /// Bias and penalties.
    pub adjust: Launch,
    /// The best tokens.
    pub argmax: [Launch; 2],
    /// Sampling, for outputs with a temperature.
    pub sample: Launch,
    /// Buffers that the host writes or reads.
    pub io: HeadIo,
}

/// Buffers between a head and the host.
pub struct HeadIo {
    /// `[LOGIT_ROWS, vocab]`
    pub logits: wgpu::Buffer,
    /// `[outputs, hidden]`
    pub normed: wgpu::Buffer,
    /// See `sample.wgsl`.
    pub samples: wgpu::Buffer,
    /// See `sample.wgsl`.
    pub masks: wgpu::Buffer,
    /// See `adjust.wgsl`.
    pub edits: wgpu::Buffer,
    /// `[sequences, hidden]`, of an encoder.
    pub means: Option<wgpu::Buffer>,
}

/// Buffers between host and device.
pub struct Io {
    /// Words of a step.
    pub step: wgpu::Buffer,
    /// See `sample.wgsl`.
    pub tokens: wgpu::Buffer,
    /// The residual stream, `[rows, hidden]`, or merged rows, `[merged rows, taps, width]`.
    pub residual: wgpu::Buffer,
}

/// Words that are set to EMPTY with one copy.
const EMPTY_WORDS: usize = 1 << 16;

/// Partials of attention with handoff to their merge.
pub struct HandoffPartials {
    partials: wgpu::Buffer,
    /// Words with the EMPTY value, for clearing.
    empty_words: wgpu::Buffer,
}

impl HandoffPartials {
    /// Creates partials in a buffer, which are emptied if it is new.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn new(device: &Device, partials: wgpu::Buffer, is_new: bool) -> Result<Self, LoadError> {
        let empty_words = device.upload(&[EMPTY; EMPTY_WORDS], "empty words")?;
        let partials = Self { partials, empty_words };
        if is_new {
            partials.empty(device);
        }
        Ok(partials)
    }

    /// Sets all words to EMPTY.
    pub fn empty(&self, device: &Device) {
        let size = self.empty_words.size();
        let mut encoder = device.encoder();
        for at in (0..self.partials.size()).step_by(size as usize) {
            let rest = size.min(self.partials.size() - at);
            encoder.copy_buffer_to_buffer(&self.empty_words, 0, &self.partials, at, rest);
        }
        device.queue.submit([encoder.finish()]);
    }
}

/// Slots of a layer's experts.
pub struct LayerPool {
    /// Index of the layer.
    pub layer: usize,
    /// Number of slots.
    pub slots: usize,
    /// Bytes of an expert.
    pub bytes: u64,
    /// See `place_experts.wgsl`.
    pub places: wgpu::Buffer,
}

/// States of all sequences in one layer.
#[derive(Clone)]
pub struct LayerState {
    /// `[states, rows, channels]`: the input of the convolution at position `p` is in row `p % rows`.
    inputs: StateBuffer,
    delta: Option<DeltaState>,
}

/// States of a delta rule.
#[derive(Clone)]
struct DeltaState {
    /// `[states, value_heads, key_dim, value_dim]`, as of the beginning of the chunk.
    matrices: StateBuffer,
    /// Keys of the rows of the chunk, `[states, STATE_CHUNK, key_heads * key_dim]`.
    keys: StateBuffer,
    /// Their updates, `[states, STATE_CHUNK, value_heads * value_dim]`.
    updates: StateBuffer,
    /// Their decays, summed up from the beginning of the chunk, `[states, STATE_CHUNK, value_heads]`.
    decays: StateBuffer,
}

/// A part of all sequences' states.
#[derive(Clone)]
pub struct StateBuffer {
    /// States of all sequences, one after the other.
    pub buffer: wgpu::Buffer,
    /// Bytes of one sequence's.
    pub bytes: u64,
}

impl LayerState {
    /// Allocates the states of a layer.
    ///
    /// # Errors
    /// Not enough memory, or the buffer exceeds a binding.
    pub fn new(device: &Device, shape: &StateShape, states: usize) -> Result<Self, LoadError> {
        let room = |numbers: usize| {
            let buffer = device.buffer(states * numbers, "states of sequences")?;
            Ok::<_, LoadError>(StateBuffer { buffer, bytes: 4 * numbers as u64 })
        };
        let delta = shape.delta.map(|delta| {
            Ok::<_, LoadError>(DeltaState {
                matrices: room(delta.value_width() * delta.key_dim)?,
                keys: room(STATE_CHUNK * delta.key_width())?,
                updates: room(STATE_CHUNK * delta.value_width())?,
                decays: room(STATE_CHUNK * delta.value_heads)?,
            })
        });
        Ok(Self { inputs: room(shape.rows * shape.channels)?, delta: delta.transpose()? })
    }

    /// All its parts.
    pub fn buffers(&self) -> impl Iterator<Item = &StateBuffer> {
        let delta = self.delta.iter().flat_map(|delta| {
            let DeltaState { matrices, keys, updates, decays } = delta;
            [matrices, keys, updates, decays]
        });
        [&self.inputs].into_iter().chain(delta)
    }

    /// Returns the buffer of a part.
    ///
    /// # Panics
    /// If the layer has no delta rule: `Program::check` compared the shapes.
    pub fn part(&self, part: StatePart) -> &wgpu::Buffer {
        let delta = || self.delta.as_ref().expect("`Program::check` compared the shapes");
        let own = match part {
            StatePart::Inputs => &self.inputs,
            StatePart::Matrices => &delta().matrices,
            StatePart::Keys => &delta().keys,
            StatePart::Updates => &delta().updates,
            StatePart::Decays => &delta().decays,
        };
        &own.buffer
    }
}
