//! Mixers with a state.
//!
//! | operation | launches | kernel file |
//! |-|-|-|
//! | norm | one | `norm.wgsl` |
//! | short convolution: b, c, u | one | `matvec.wgsl`, `matmul.wgsl`, `coop.wgsl` |
//! | convolution, and activations of its output | one | `short_conv.wgsl` |
//! | delta rule: queries, keys and values; z, a, b | one for each layout | `matvec.wgsl`, `matmul.wgsl`, `coop.wgsl` |
//! | convolution, norms, decays and strengths | one | `delta_inputs.wgsl` |
//! | delta rule | one | `delta.wgsl` |
//! | norm, gate, and activations of the output | one | `delta_norm.wgsl` |
//! | either: the state after the step's rows | one | `keep.wgsl` |
//! | matmul onto the residual stream | one | `matvec.wgsl`, `matmul.wgsl`, `coop.wgsl` |
//!
//! A step overwrites the states that it reads, so it cannot be repeated. Programs with states therefore run without handoff.

use paguro_backend::{
    Convolution, DeltaRule, DeltaShape, KeySharing, Limits, LoadError, STATE_CHUNK, StateShape, VectorId,
};

use crate::{
    device::Device,
    layout::BLOCK,
    ops::{self, Op, Program},
    template::Constants,
};

use super::{
    Before, Grid, Launch, Lowering, Place, Store,
    Value::{F, U},
    When,
    handoff::Bindings,
    kernels::FEW_ROWS,
    wgsl,
};

/// Threads of a delta rule that share a column of a state.
const PARTS: usize = 8;
/// Columns of a value head that a workgroup has, and rows of a block: the first for which it has the memory.
const COLUMNS_AND_ROWS: [[usize; 2]; 3] = [[32, 8], [32, 4], [16, 4]];
/// Elements of a key of which a workgroup can have a chunk's in its memory.
const HELD_KEY_DIM: usize = 128;
/// Threads of a workgroup that makes inputs of a delta rule or of a scan.
pub(super) const INPUT_THREADS: usize = 128;

/// States of all sequences in one layer.
pub struct LayerState {
    /// `[states, rows, channels]`: the input of the convolution at position `p` is in row `p % rows`.
    pub(super) inputs: StateBuffer,
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
    /// # Errors
    /// Not enough memory, or the buffer exceeds a binding.
    fn new(device: &Device, shape: &StateShape, states: usize) -> Result<Self, LoadError> {
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
}

/// Room for intermediate results of the mixers of a program, for each row: of each kind, that of the mixer that needs most.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Room {
    /// Results of matmuls: inputs of convolutions with gates, decays and strengths, or b, c and u of a short one.
    mixed: usize,
    /// Queries, keys and values.
    channels: usize,
    /// Values of all heads.
    values: usize,
    /// Value heads.
    heads: usize,
    /// Gates of attention's output.
    gates: usize,
    /// Widest row that is an input of a matmul.
    pub widest: usize,
}

/// Value heads of a delta rule or a scan.
pub(super) struct Heads<'a> {
    pub shape: &'a DeltaShape,
    /// True if value heads alternate between key heads.
    pub alternating: bool,
    /// True if updates do not depend on the state.
    pub scans: bool,
    /// Index of the layer's state.
    pub state: usize,
}

impl<'a> Heads<'a> {
    fn of(op: &'a DeltaRule) -> Self {
        let alternating = op.sharing == KeySharing::Alternating;
        Self { shape: &op.shape, alternating, scans: false, state: op.state }
    }
}

/// Buffers of mixers, which layers use one after the other.
#[derive(Clone)]
pub(super) struct Buffers {
    pub mixed: wgpu::Buffer,
    pub convolved: wgpu::Buffer,
    pub decays: wgpu::Buffer,
    pub betas: wgpu::Buffer,
    pub values: wgpu::Buffer,
    /// `[rows, heads * head_dim]` gates of attention's output.
    pub gates: wgpu::Buffer,
}

impl Room {
    pub(super) fn of(program: &Program) -> Self {
        let mut room = Self::default();
        for op in &program.ops {
            let (shape, of_heads) = match op {
                Op::ShortConv(op) => {
                    room.mixed = room.mixed.max(3 * op.conv.width);
                    room.widest = room.widest.max(op.conv.width);
                    continue;
                }
                Op::DeltaRule(op) => (&op.delta.shape, 2),
                Op::Ssd(op) => (&op.ssd.shape, 1),
                Op::Attend(op) if op.is_gated => {
                    room.gates = room.gates.max(program.kv.groups[op.kv.group].q_width());
                    continue;
                }
                _ => continue,
            };
            let projected = shape.channels() + shape.value_width() + of_heads * shape.value_heads;
            room.mixed = room.mixed.max(projected);
            room.channels = room.channels.max(shape.channels());
            room.values = room.values.max(shape.value_width());
            room.heads = room.heads.max(shape.value_heads);
            room.widest = room.widest.max(shape.value_width());
        }
        room
    }

    /// Words of [`Buffers`].
    pub(super) fn words(&self, rows: usize) -> usize {
        let Self { mixed, channels, values, heads, gates, .. } = self;
        rows * (mixed + channels + values + 2 * heads + gates)
    }

    /// Allocates them, if there are such mixers.
    pub(super) fn buffers(&self, device: &Device, rows: usize) -> Result<Option<Buffers>, LoadError> {
        if self.words(rows) == 0 {
            return Ok(None);
        }
        let buffer = |width: usize, what: &str| device.buffer(rows * width, what);
        Ok(Some(Buffers {
            mixed: buffer(self.mixed, "inputs of mixers")?,
            convolved: buffer(self.channels, "convolutions")?,
            decays: buffer(self.heads, "decays of delta rules")?,
            betas: buffer(self.heads, "strengths of delta rules")?,
            values: buffer(self.values, "results of delta rules")?,
            gates: buffer(self.gates, "gates of attention")?,
        }))
    }
}

/// States of all layers.
pub(super) fn states(
    device: &Device,
    program: &Program,
    limits: &Limits,
) -> Result<Vec<LayerState>, LoadError> {
    program.state.layers.iter().map(|shape| LayerState::new(device, shape, limits.states)).collect()
}

/// A kernel that makes inputs of a delta rule or of a scan.
pub(super) struct StateInputs {
    pub name: &'static str,
    pub files: &'static [&'static str],
    pub constants: Constants,
    /// Buffers of the convolution.
    pub vectors: Vec<(&'static str, wgpu::Buffer)>,
    pub grid: Grid,
}

impl Lowering<'_> {
    pub(super) fn mixers(&self) -> &Buffers {
        self.mixers.as_ref().expect("programs with such mixers have the buffers")
    }

    /// A short convolution, from the norm to the residual stream.
    pub(super) fn short_conv(
        &mut self,
        op: &ops::ShortConvAdd,
        before: Before,
        next: Option<&Op>,
        body: &mut Vec<Launch>,
    ) -> Result<Before, LoadError> {
        let conv = &op.conv;
        let own = self.mixers().clone();
        self.norm(conv.norm, before, &[&conv.input], body)?;
        self.normed_matmul(&conv.input, &own.mixed, body)?;

        let (mut constants, vectors) = self.convolution(&conv.convolution, conv.width)?;
        constants.extend([("MIXED_STRIDE", U(3 * conv.width as u32)), ("SHORT", U(1))]);
        let step = self.step.clone();
        let inputs = self.states[conv.state].inputs.buffer.clone();
        let mut buffers = vec![("step", &step), ("mixed", &own.mixed), ("inputs", &inputs)];
        buffers.extend(vectors.iter().map(|(name, buffer)| (*name, buffer)));
        let mut emits = constants.clone();
        emits.extend(self.emit_for(&[&conv.out], conv.width));
        emits.extend(self.halves(FEW_ROWS + 1));
        emits.push(("STAGED", U(8 * 33)));
        let files = wgsl!("args", "quantize", "emit", "sequences", "convolution", "convolve", "short_conv");
        let grid = Grid::Each(conv.width.div_ceil(8 * BLOCK) as u32);
        body.push(self.launch("short_conv", files, emits, &buffers, grid, 0)?);

        let grid = Grid::Sequences(conv.width.div_ceil(256) as u32);
        let files = wgsl!("args", "sequences", "convolution", "keep");
        let buffers = [("step", &step), ("mixed", &own.mixed), ("kept", &inputs)];
        body.push(self.launch("keep", files, constants, &buffers, grid, 0)?);
        self.add(&conv.out, false, &op.add, next, body)
    }

    /// A delta rule, from the norm to the residual stream.
    pub(super) fn delta_rule(
        &mut self,
        op: &ops::DeltaRuleAdd,
        before: Before,
        next: Option<&Op>,
        body: &mut Vec<Launch>,
    ) -> Result<Before, LoadError> {
        let delta = &op.delta;
        let own = self.mixers().clone();
        let linears = [&delta.qkv, &delta.gate, &delta.alpha, &delta.beta];
        self.norm(delta.norm, before, &linears, body)?;
        let groups = self.side_by_side(linears, &own.mixed);
        let [mixed, z, a, b] = self.matmuls(linears, &groups, Store::WRITE, When::Always, body)?;
        self.delta_inputs(delta, &own, [&a, &b], body)?;
        self.delta(&Heads::of(delta), &own, body)?;
        self.delta_norm(delta, &own, &z, body)?;
        self.keep_delta(&Heads::of(delta), &delta.convolution, &own, &mixed, body)?;
        self.add(&delta.out, false, &op.add, next, body)
    }

    /// Queries, keys and values, and decays and strengths.
    fn delta_inputs(
        &mut self,
        op: &DeltaRule,
        own: &Buffers,
        [a, b]: [&Place; 2],
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let shape = &op.shape;
        let (mut constants, vectors) = self.convolution(&op.convolution, shape.channels())?;
        let value_units = shape.value_width().div_ceil(INPUT_THREADS);
        constants.extend(delta_constants(&Heads::of(op)));
        constants.extend([
            ("MIXED_STRIDE", U(a.stride as u32)),
            ("A_FIRST", U(a.first as u32)),
            ("B_FIRST", U(b.first as u32)),
            ("KEY_UNITS", U(2 * shape.key_heads as u32)),
            ("VALUE_UNITS", U(value_units as u32)),
            ("QUERY_SCALE", F((shape.key_dim as f32).sqrt())),
            ("UNIT_EPS", F(DeltaRule::EPS)),
        ]);
        let files = wgsl!("args", "sequences", "convolution", "convolve", "delta_inputs");
        let grid = Grid::Each((2 * shape.key_heads + value_units + 1) as u32);
        let inputs = StateInputs { name: "delta_inputs", files, constants, vectors, grid };
        self.state_inputs(inputs, op.state, [op.decay, op.dt], own, body)
    }

    /// The launch of a kernel that makes inputs of a delta rule or of a scan from the matmul of a row; `gates` are the weights of its decays
    /// and steps.
    pub(super) fn state_inputs(
        &mut self,
        StateInputs { name, files, constants, vectors, grid }: StateInputs,
        state: usize,
        gates: [VectorId; 2],
        own: &Buffers,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let [decay, dt] = [self.vector(gates[0])?, self.vector(gates[1])?];
        let (step, inputs) = (self.step.clone(), self.states[state].inputs.buffer.clone());
        let mut buffers = vec![
            ("step", &step),
            ("mixed", &own.mixed),
            ("inputs", &inputs),
            ("convolved", &own.convolved),
            ("decays", &own.decays),
            ("betas", &own.betas),
            ("decay", &decay),
            ("dt", &dt),
        ];
        buffers.extend(vectors.iter().map(|(name, buffer)| (*name, buffer)));
        body.push(self.launch(name, files, constants, &buffers, grid, 0)?);
        Ok(())
    }

    /// The rule itself, or a scan.
    pub(super) fn delta(
        &mut self,
        op: &Heads<'_>,
        own: &Buffers,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let shape = op.shape;
        let holds_keys = shape.key_dim <= HELD_KEY_DIM;
        // Quads of a key that a thread has.
        let quads = shape.key_dim.div_ceil(4 * PARTS);
        let memory = self.device.limits.max_compute_workgroup_storage_size as usize;
        let fits = |[columns, rows]: &[usize; 2]| delta_bytes(*columns, *rows, holds_keys, quads) <= memory;
        let [columns, rows] = COLUMNS_AND_ROWS.into_iter().find(fits).unwrap_or(COLUMNS_AND_ROWS[2]);
        let blocks = shape.value_dim.div_ceil(columns);
        let whole_quads = [shape.key_dim, shape.channels()].iter().all(|width| width.is_multiple_of(4));
        let mut constants = delta_constants(op);
        constants.extend([
            ("SCAN", U(u32::from(op.scans))),
            ("KEYS_HELD", U(u32::from(holds_keys))),
            ("CHANNELS", U(shape.channels() as u32)),
            ("COLUMNS", U(columns as u32)),
            ("COLUMN_BLOCKS", U(blocks as u32)),
            ("PARTS", U(PARTS as u32)),
            ("QUADS", U(quads as u32)),
            ("BLOCK_ROWS", U(rows as u32)),
            ("WHOLE_QUADS", U(u32::from(whole_quads))),
            ("ROW_PAIRS", U((rows * STATE_CHUNK).div_ceil(PARTS * columns) as u32)),
        ]);
        let step = self.step.clone();
        let state = self.delta_state(op.state);
        let buffers = [
            ("step", &step),
            ("convolved", &own.convolved),
            ("decays", &own.decays),
            ("betas", &own.betas),
            ("values", &own.values),
            ("matrices", &state.matrices.buffer),
            ("updates", &state.updates.buffer),
            ("kept_keys", &state.keys.buffer),
            ("kept_decays", &state.decays.buffer),
        ];
        let files = wgsl!("args", "sequences", "delta");
        let grid = Grid::Sequences((shape.value_heads * blocks) as u32);
        body.push(self.launch(
            if op.scans { "scan" } else { "delta" },
            files,
            constants,
            &buffers,
            grid,
            0,
        )?);
        Ok(())
    }

    /// Norms of the results and their gates, as activations.
    fn delta_norm(
        &mut self,
        op: &DeltaRule,
        own: &Buffers,
        z: &Place,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let DeltaShape { key_heads: _, value_heads, key_dim: _, value_dim } = op.shape;
        let width = op.shape.value_width();
        let mut constants = vec![
            ("WIDTH", U(width as u32)),
            ("HEADS", U(value_heads as u32)),
            ("VALUE_DIM", U(value_dim as u32)),
            ("FACTORS_HERE", U(256_usize.div_ceil(value_dim) as u32 + 1)),
            ("EPS", F(op.out_norm.eps)),
            ("Z_STRIDE", U(z.stride as u32)),
            ("Z_FIRST", U(z.first as u32)),
            ("STAGED", U(8 * 33)),
        ];
        constants.extend(self.emit_for(&[&op.out], width));
        constants.extend(self.halves(FEW_ROWS + 1));
        let weight = self.vector(op.out_norm.weight)?;
        let buffers = [("values", &own.values), ("z", &z.buffer), ("weight", &weight)];
        let files = wgsl!("args", "quantize", "emit", "delta_norm");
        let grid = Grid::Each(width.div_ceil(8 * BLOCK) as u32);
        body.push(self.launch("delta_norm", files, constants, &buffers, grid, 0)?);
        Ok(())
    }

    /// Stores inputs of the convolution, keys and decays of the step's rows in the state.
    pub(super) fn keep_delta(
        &mut self,
        op: &Heads<'_>,
        convolution: &Convolution,
        own: &Buffers,
        mixed: &Place,
        body: &mut Vec<Launch>,
    ) -> Result<(), LoadError> {
        let channels = op.shape.channels();
        let (mut constants, _) = self.convolution(convolution, channels)?;
        constants.extend(delta_constants(op));
        constants.extend([("MIXED_STRIDE", U(mixed.stride as u32)), ("DELTA", U(1))]);
        let (step, inputs) = (self.step.clone(), self.states[op.state].inputs.buffer.clone());
        let state = self.delta_state(op.state);
        let buffers = [
            ("step", &step),
            ("mixed", &own.mixed),
            ("kept", &inputs),
            ("convolved", &own.convolved),
            ("decays", &own.decays),
            ("kept_keys", &state.keys.buffer),
            ("kept_decays", &state.decays.buffer),
        ];
        let files = wgsl!("args", "sequences", "convolution", "keep");
        let grid = Grid::Sequences(channels.div_ceil(256) as u32);
        body.push(self.launch("keep_delta", files, constants, &buffers, grid, 0)?);
        Ok(())
    }

    fn delta_state(&self, layer: usize) -> DeltaState {
        self.states[layer].delta.clone().expect("`Program::check` compared the shapes")
    }

    /// Constants of a convolution, and its vectors.
    pub(super) fn convolution(&mut self, op: &Convolution, channels: usize) -> Result<Bindings, LoadError> {
        let constants = vec![
            ("KEPT", U(op.taps as u32 - 1)),
            ("CHANNELS", U(channels as u32)),
            ("CONV_BIAS", U(u32::from(op.bias.is_some()))),
        ];
        let mut buffers = vec![("taps", self.vector(op.weight)?)];
        if let Some(bias) = op.bias {
            buffers.push(("conv_bias", self.vector(bias)?));
        }
        Ok((constants, buffers))
    }
}

/// Bytes of workgroup memory that `delta.wgsl` needs for this number of columns, and of rows of a block.
fn delta_bytes(columns: usize, rows: usize, holds_keys: bool, quads: usize) -> usize {
    let key = 16 * (PARTS * quads + 1);
    let keys = if holds_keys { STATE_CHUNK } else { rows };
    let pairs = rows * (PARTS * columns + STATE_CHUNK);
    (keys + rows) * key + 8 * pairs + 4 * STATE_CHUNK * (columns + 1) + 4 * rows
}

fn delta_constants(op: &Heads<'_>) -> Constants {
    let DeltaShape { key_heads, value_heads, key_dim, value_dim } = *op.shape;
    vec![
        ("CHUNK", U(STATE_CHUNK as u32)),
        ("HEADS", U(value_heads as u32)),
        ("KEY_HEADS", U(key_heads as u32)),
        ("KEY_DIM", U(key_dim as u32)),
        ("VALUE_DIM", U(value_dim as u32)),
        ("ALTERNATING", U(u32::from(op.alternating))),
    ]
}
