//! Kernels of mixers with a state. A step overwrites the states that it reads, so it cannot be repeated. Programs with states
//! therefore run without handoff.
//!
//! Each layer has one set of buffers with a state slot for each sequence. `delta.wgsl` computes the rows of a sequence
//! in blocks, with a workgroup for each 32 columns of a value head, or 16 where it has little memory. Sums have one
//! order, so the bits do not depend on where steps begin.

use paguro_backend::{Convolution, DeltaRule, DeltaShape, GatedNorm, STATE_CHUNK, ShortConv, Ssd, VectorId};

use super::{
    code::{Coded, Coder, Part, Slots, written_acts},
    launch::Grid,
    wgsl,
};
use crate::{
    layout::BLOCK,
    lower::{Acts, Formats, Heads, Slot, Span, StatePart, kernels::FEW_ROWS},
    template::{
        Constants,
        Value::{F, U},
    },
};

/// Threads of a delta rule that share a column of a state.
const PARTS: usize = 8;
/// Columns of a value head that a workgroup has, and rows of a block: the first for which it has the memory.
const COLUMNS_AND_ROWS: [[usize; 2]; 3] = [[32, 8], [32, 4], [16, 4]];
/// Elements of a key of which a workgroup can have a chunk's in its memory.
const HELD_KEY_DIM: usize = 128;
/// Threads of a workgroup that makes inputs of a delta rule or of a scan.
const INPUT_THREADS: usize = 128;

impl Coder<'_> {
    /// Returns the launch of a short convolution.
    pub fn short_conv(&self, op: &ShortConv, formats: Formats) -> Coded {
        let mut part = self.convolution(&op.convolution, op.state, op.width);
        part.constants.extend([("MIXED_STRIDE", U(3 * op.width as u32)), ("SHORT", U(1))]);
        part.constants.extend(self.emit_for(formats, op.width));
        part.constants.extend(self.halves(FEW_ROWS + 1));
        part.constants.push(("STAGED", U(8 * 33)));
        part.files =
            wgsl!("args", "quantize", "emit", "sequences", "convolution", "convolve", "short_conv").to_vec();
        part.slots.extend(mixed(op.state, "inputs"));
        part.slots.extend(written_acts(Acts::Plain));
        Coded::new("short_conv", part, Grid::Each(op.width.div_ceil(8 * BLOCK) as u32))
    }

    /// Returns the launch that stores the state of a short convolution.
    pub fn keep(&self, op: &ShortConv) -> Coded {
        let mut part = self.convolution(&op.convolution, op.state, op.width);
        part.constants.extend([("MIXED_STRIDE", U(3 * op.width as u32)), ("SHORT", U(1))]);
        part.files = wgsl!("args", "sequences", "convolution", "keep").to_vec();
        part.slots.extend(mixed(op.state, "kept"));
        Coded::new("keep", part, Grid::Sequences(op.width.div_ceil(256) as u32))
    }

    /// Returns the launch of queries, keys and values of a delta rule, and of decays and strengths.
    pub fn delta_inputs(&self, op: &DeltaRule, a: &Span, b: &Span) -> Coded {
        let shape = &op.shape;
        let value_units = shape.value_width().div_ceil(INPUT_THREADS);
        let mut part = self.convolution(&op.convolution, op.state, shape.channels());
        part.constants.extend(delta_constants(shape, op.sharing == paguro_backend::KeySharing::Alternating));
        part.constants.extend([
            ("MIXED_STRIDE", U(a.stride as u32)),
            ("A_FIRST", U(a.first as u32)),
            ("B_FIRST", U(b.first as u32)),
            ("KEY_UNITS", U(2 * shape.key_heads as u32)),
            ("VALUE_UNITS", U(value_units as u32)),
            ("QUERY_SCALE", F((shape.key_dim as f32).sqrt())),
            ("UNIT_EPS", F(DeltaRule::EPS)),
        ]);
        part.files = wgsl!("args", "sequences", "convolution", "convolve", "delta_inputs").to_vec();
        part.slots.extend(inputs(op.state, [op.decay, op.dt]));
        Coded::new("delta_inputs", part, Grid::Each((2 * shape.key_heads + value_units + 1) as u32))
    }

    /// Returns the launch of C, B and values of a scan, and of steps and decays.
    pub fn ssd_inputs(&self, op: &Ssd, d: &Span) -> Coded {
        let channels = op.shape.channels();
        let units = channels.div_ceil(INPUT_THREADS);
        let mut part = self.convolution(&op.convolution, op.state, channels);
        part.constants.extend([
            ("MIXED_STRIDE", U(d.stride as u32)),
            ("D_FIRST", U(d.first as u32)),
            ("HEADS", U(op.shape.value_heads as u32)),
            ("CHANNEL_UNITS", U(units as u32)),
            ("DT_SCALE", F(op.dt_scale)),
            ("LEAST", F(op.dt_limits.0)),
            ("MOST", F(op.dt_limits.1.min(f32::MAX))),
        ]);
        part.files = wgsl!("args", "sequences", "convolution", "convolve", "ssd_inputs").to_vec();
        part.slots.extend(inputs(op.state, [op.decay, op.dt_bias]));
        Coded::new("ssd_inputs", part, Grid::Each(units as u32 + 1))
    }

    /// Returns the launch of the rule itself, or of a scan.
    pub fn delta(&self, op: &Heads) -> Coded {
        let shape = &op.shape;
        let holds_keys = shape.key_dim <= HELD_KEY_DIM;
        // Quads of a key that a thread has.
        let quads = shape.key_dim.div_ceil(4 * PARTS);
        let memory = self.facts.target.workgroup_memory as usize;
        let fits = |[columns, rows]: &[usize; 2]| delta_bytes(*columns, *rows, holds_keys, quads) <= memory;
        let [columns, rows] = COLUMNS_AND_ROWS.into_iter().find(fits).unwrap_or(COLUMNS_AND_ROWS[2]);
        let blocks = shape.value_dim.div_ceil(columns);
        let whole_quads = [shape.key_dim, shape.channels()].iter().all(|width| width.is_multiple_of(4));
        let mut constants = delta_constants(shape, op.alternating);
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
        let mut slots = convolved();
        slots.extend([
            ("step", Slot::Step),
            ("values", Slot::Values),
            ("matrices", Slot::State(op.state, StatePart::Matrices)),
            ("updates", Slot::State(op.state, StatePart::Updates)),
            ("kept_keys", Slot::State(op.state, StatePart::Keys)),
            ("kept_decays", Slot::State(op.state, StatePart::Decays)),
        ]);
        let part = Part::new(wgsl!("args", "sequences", "delta"), constants, slots);
        let grid = Grid::Sequences((shape.value_heads * blocks) as u32);
        Coded::new(if op.scans { "scan" } else { "delta" }, part, grid)
    }

    /// Returns the launch of norms of a delta rule's results and of their gates.
    pub fn delta_norm(&self, op: &DeltaRule, z: &Span, formats: Formats) -> Coded {
        let DeltaShape { key_heads: _, value_heads, key_dim: _, value_dim } = op.shape;
        let width = op.shape.value_width();
        let mut constants = vec![
            ("HEADS", U(value_heads as u32)),
            ("VALUE_DIM", U(value_dim as u32)),
            ("FACTORS_HERE", U(256_usize.div_ceil(value_dim) as u32 + 1)),
            ("EPS", F(op.out_norm.eps)),
        ];
        constants.extend(self.gated(width, z, formats));
        let mut slots =
            vec![("values", Slot::Values), ("z", z.slot), ("weight", Slot::Vector(op.out_norm.weight))];
        slots.extend(written_acts(Acts::Plain));
        let part = Part::new(wgsl!("args", "quantize", "emit", "delta_norm"), constants, slots);
        Coded::new("delta_norm", part, Grid::Each(width.div_ceil(8 * BLOCK) as u32))
    }

    /// Returns the launch of the skip connection, gate and norm of a scan's results.
    pub fn ssd_norm(&self, op: &Ssd, z: &Span, formats: Formats) -> Coded {
        let width = op.shape.value_width();
        let norm = op.out_norm.norm();
        let group = norm.map_or(width, |norm| width / norm.groups);
        let mut constants = vec![
            ("VALUE_DIM", U(op.shape.value_dim as u32)),
            ("CHANNELS", U(op.shape.channels() as u32)),
            ("FIRST_VALUE", U(2 * op.shape.key_width() as u32)),
            ("GATE_SCALE", F(op.gate_scale)),
            ("NORM", U(u32::from(norm.is_some()))),
            ("NORM_FIRST", U(u32::from(matches!(op.out_norm, GatedNorm::BeforeGate(_))))),
            ("NORM_GROUP", U(group as u32)),
            ("FACTORS_HERE", U(256_usize.div_ceil(group) as u32 + 1)),
            ("EPS", F(norm.map_or(0.0, |norm| norm.eps))),
        ];
        constants.extend(self.gated(width, z, formats));
        let mut slots = vec![
            ("values", Slot::Values),
            ("z", z.slot),
            ("convolved", Slot::Convolved),
            ("skip", Slot::Vector(op.skip)),
        ];
        slots.extend(norm.map(|norm| ("weight", Slot::Vector(norm.weight))));
        slots.extend(written_acts(Acts::Plain));
        let part = Part::new(wgsl!("args", "quantize", "emit", "ssd_norm"), constants, slots);
        Coded::new("ssd_norm", part, Grid::Each(width.div_ceil(8 * BLOCK) as u32))
    }

    /// Returns the constants of results with gates `z`.
    fn gated(&self, width: usize, z: &Span, formats: Formats) -> Constants {
        let mut constants = vec![
            ("WIDTH", U(width as u32)),
            ("Z_STRIDE", U(z.stride as u32)),
            ("Z_FIRST", U(z.first as u32)),
            ("STAGED", U(8 * 33)),
        ];
        constants.extend(self.emit_for(formats, width));
        constants.extend(self.halves(FEW_ROWS + 1));
        constants
    }

    /// Returns the launch that stores inputs of the convolution, keys and decays of the step's rows in the state.
    pub fn keep_delta(&self, op: &Heads, convolves: &Convolution, span: &Span) -> Coded {
        let channels = op.shape.channels();
        let mut part = self.convolution(convolves, op.state, channels);
        part.constants.extend(delta_constants(&op.shape, op.alternating));
        part.constants.extend([("MIXED_STRIDE", U(span.stride as u32)), ("DELTA", U(1))]);
        part.files = wgsl!("args", "sequences", "convolution", "keep").to_vec();
        part.slots.extend(mixed(op.state, "kept"));
        part.slots.extend(convolved());
        part.slots.extend([
            ("kept_keys", Slot::State(op.state, StatePart::Keys)),
            ("kept_decays", Slot::State(op.state, StatePart::Decays)),
        ]);
        Coded::new("keep_delta", part, Grid::Sequences(channels.div_ceil(256) as u32))
    }

    /// Returns constants of a convolution with this state, and its vectors.
    fn convolution(&self, op: &Convolution, state: usize, channels: usize) -> Part {
        let constants = vec![
            ("TAPS", U(op.taps as u32)),
            ("KEPT", U(self.facts.program.state.layers[state].rows as u32)),
            ("CHANNELS", U(channels as u32)),
            ("CONV_BIAS", U(u32::from(op.bias.is_some()))),
        ];
        let mut slots = vec![("taps", Slot::Vector(op.weight))];
        slots.extend(op.bias.map(|bias| ("conv_bias", Slot::Vector(bias))));
        Part::new(&[], constants, slots)
    }
}

/// Slots of a kernel that reads the results of matmuls and the state of a convolution.
fn mixed(state: usize, name: &'static str) -> Slots {
    let inputs = Slot::State(state, StatePart::Inputs);
    vec![("step", Slot::Step), ("mixed", Slot::Mixed), (name, inputs)]
}

/// Slots of inputs of a delta rule or of a scan.
fn convolved() -> Slots {
    vec![("convolved", Slot::Convolved), ("decays", Slot::Decays), ("betas", Slot::Betas)]
}

/// Slots of a kernel that makes them; `gates` are the weights of decays and steps.
fn inputs(state: usize, gates: [VectorId; 2]) -> Slots {
    let gates = vec![("decay", Slot::Vector(gates[0])), ("dt", Slot::Vector(gates[1]))];
    [mixed(state, "inputs"), convolved(), gates].concat()
}

/// Bytes of workgroup memory that `delta.wgsl` needs for this number of columns, and of rows of a block.
fn delta_bytes(columns: usize, rows: usize, holds_keys: bool, quads: usize) -> usize {
    let key = 16 * (PARTS * quads + 1);
    let keys = if holds_keys { STATE_CHUNK } else { rows };
    let pairs = rows * (PARTS * columns + STATE_CHUNK);
    (keys + rows) * key + 8 * pairs + 4 * STATE_CHUNK * (columns + 1) + 4 * rows
}

fn delta_constants(shape: &DeltaShape, alternating: bool) -> Constants {
    let DeltaShape { key_heads, value_heads, key_dim, value_dim } = *shape;
    vec![
        ("CHUNK", U(STATE_CHUNK as u32)),
        ("HEADS", U(value_heads as u32)),
        ("KEY_HEADS", U(key_heads as u32)),
        ("KEY_DIM", U(key_dim as u32)),
        ("VALUE_DIM", U(value_dim as u32)),
        ("ALTERNATING", U(u32::from(alternating))),
    ]
}
