//! Handoff between launches of a step of one row without barriers (`handoff_words.wgsl`).
//!
//! A layer has one barrier, before attention. All its other launches start as soon as their workgroups fit, prefetch
//! weights, and wait for words of the previous launch. Layers alternate between two buffers of words. Attention clears the
//! buffer of the next layer, because the barrier before it has waited for all readers of that buffer. Partials of attention
//! are too many for that: their only reader, the merge, clears them (`handoff_partials.rs`). Queries, and the residual stream
//! between layers, pass a barrier and need no polling. They also alternate between two buffers, so that no launch overwrites
//! data that another one still reads.

use paguro_backend::{Linear, LoadError};

use crate::ops::{self, Op, Program};

use super::{Lowering, Value::U, handoff_partials::HandoffPartials};
use crate::{
    hidden::{Hazards, second_name},
    layout::BLOCK,
    template::{Constants, Value},
};

/// Hazards of matmuls whose outputs are all read by launches that wait for them, or after a barrier.
pub(super) const MATMUL: Hazards =
    Hazards { hidden: &["handoff", "gave_up", "cleared", "queries", "k_pages", "v_pages", "out"], ends: &[] };
/// Hazards of the last matmul onto the stream, and of that of the head, whose outputs are ordinary buffers.
pub(super) const LAST: Hazards = Hazards { hidden: &["handoff", "gave_up"], ends: &[] };

/// Value of a word before it is written. No four quants have it, because quants are -127 to 127.
pub(super) const EMPTY: u32 = 0x8080_8080;
/// [`EMPTY`] as a constant of kernels.
pub(super) const EMPTY_WORD: (&str, Value) = ("EMPTY", U(EMPTY));

/// Buffers of the handoff.
pub struct Handoff {
    buffers: [wgpu::Buffer; 2],
    /// Queries, and behind them the stream that a layer begins with.
    between: [wgpu::Buffer; 2],
    /// Second names of `between`, for its writers.
    hidden_between: [wgpu::Buffer; 2],
    hidden_pages: Vec<[wgpu::Buffer; 2]>,
    hidden_tokens: wgpu::Buffer,
    words: Words,
    /// Index of the layer that is being lowered.
    pub(super) layer: usize,
}

/// Offsets of words in a buffer.
struct Words {
    /// Output of attention; see `acts_int.wgsl`.
    attended: usize,
    /// Output of the projection, with sums of squares.
    projected: usize,
    /// The stream in the middle of the layer.
    stream: usize,
    /// Output of gate and up, in floats.
    gated: usize,
    /// Output of down, with sums of squares.
    down: usize,
    all: usize,
    queries: usize,
    blocks: usize,
}

/// Input of a matmul.
#[derive(Clone, Copy)]
pub(super) enum HandoffInput {
    Attended,
    Projected,
    Gated,
    /// Output of down in the previous layer.
    Down,
}

/// A kernel's constants and buffers.
pub(super) type Bindings = (Constants, Vec<(&'static str, wgpu::Buffer)>);

impl Lowering<'_> {
    /// Creates the buffers of the handoff, if the device supports it and every layer of the model has the five
    /// launches.
    ///
    /// # Errors
    /// Not enough memory.
    pub(super) fn create_handoff(&self) -> Result<Option<Handoff>, LoadError> {
        let Self { device, program, pages, .. } = self;
        let Some(HandoffPartials { hidden_tokens, .. }) =
            self.handoff_partials.as_ref().filter(|_| self.supports_word_handoff())
        else {
            return Ok(None);
        };
        let queries = program.kv.q_width();
        let blocks = program.hidden / BLOCK;
        let projected = 10 * queries / BLOCK;
        let stream = projected + 11 * blocks;
        let gated = stream + program.hidden;
        let down = gated + program.ffn;
        let all = down + 11 * blocks;
        let words = Words { attended: 0, projected, stream, gated, down, all, queries, blocks };
        let buffer = || device.buffer(all, "handoff between launches");
        let room = || device.buffer(queries + program.hidden, "queries and the residual stream");
        let between = [room()?, room()?];
        // wgpu clears a buffer before its first use, but does not see uses under second names.
        self.empty(pages.iter().flatten().chain(&between));
        let second = |buffer: &wgpu::Buffer| second_name(&device.inner, buffer);
        Ok(Some(Handoff {
            buffers: [buffer()?, buffer()?],
            hidden_between: [second(&between[0]), second(&between[1])],
            between,
            hidden_pages: pages.iter().map(|[k, v]| [second(k), second(v)]).collect(),
            hidden_tokens: hidden_tokens.clone(),
            words,
            layer: 0,
        }))
    }

    /// Clears buffers that wgpu assumes to be zero.
    pub(super) fn empty<'b>(&self, buffers: impl Iterator<Item = &'b wgpu::Buffer>) {
        let mut encoder = self.device.encoder();
        for buffer in buffers {
            encoder.clear_buffer(buffer, 0, None);
        }
        self.device.queue.submit([encoder.finish()]);
    }

    /// Returns true if every layer has the five launches, with activations of eight bits in whole groups of four words.
    fn supports_word_handoff(&self) -> bool {
        let Program { hidden, ffn, ref kv, ref ops, .. } = *self.program;
        let quantized = |linear: &Linear| self.is_quantized(linear);
        let adds =
            |linear: &Linear, add: &ops::Add| add.is_plain() && quantized(linear) && self.is_whole(&[linear]);
        let plain = |norm: Option<paguro_backend::Norm>| norm.as_ref().is_some_and(ops::is_plain);
        let layer = |op: &Op, next: Option<&Op>| match (op, next) {
            (Op::NormQkvRopeStore(op), _) => {
                let is_plain = plain(op.norm) && op.gate.is_none();
                is_plain && self.rotates(op) && op.qkv().all(quantized)
            }
            (Op::ProjectAdd(op), Some(Op::NormGateUp(_))) => adds(&op.project, &op.add),
            (Op::ProjectAdd(_), _) => false,
            (Op::NormGateUp(op), Some(Op::DownAdd(next))) => {
                let gate = op.gate.as_ref().is_some_and(quantized);
                plain(op.norm) && gate && self.gates(op, &next.down) && adds(&next.down, &next.add)
            }
            (Op::ShortConv(_) | Op::DeltaRule(_) | Op::Ssd(_) | Op::Latent(_), _) => false,
            (Op::Experts(_) | Op::Join(_) | Op::LayerEmbeds(_) | Op::LayerInput(_) | Op::Scale(_), _) => {
                false
            }
            (Op::NormLogits(op), _) => plain(Some(op.norm)),
            // A layer without a mixer has fewer launches.
            (Op::Embed(_) | Op::DownAdd(_), next) => !matches!(next, Some(Op::NormGateUp(_))),
            _ => true,
        };
        [hidden, kv.q_width(), ffn].iter().all(|width| width.is_multiple_of(4 * BLOCK))
            && ops.iter().enumerate().all(|(index, op)| layer(op, ops.get(index + 1)))
    }
}

impl Handoff {
    fn buffer(&self) -> (&'static str, wgpu::Buffer) {
        ("handoff", self.buffers[self.layer % 2].clone())
    }

    /// Returns the constants and buffers of a matmul with `threads` threads that reads words.
    pub(super) fn reads(&self, input: HandoffInput, threads: u32) -> Bindings {
        let Words { attended, projected, gated, down, blocks, .. } = self.words;
        let (at, words) = match input {
            HandoffInput::Attended => (attended, projected - attended),
            HandoffInput::Projected => (projected, 11 * blocks),
            HandoffInput::Gated => (gated, down - gated),
            HandoffInput::Down => (down, 11 * blocks),
        };
        let buffer = match input {
            HandoffInput::Down => ("handoff", self.buffers[(self.layer + 1) % 2].clone()),
            _ => self.buffer(),
        };
        let constants = vec![
            ("AWAITED", U(words as u32)),
            ("AWAIT_ROUNDS", U((words as u32 / 4).div_ceil(threads))),
            ("AWAIT_AT", U(at as u32)),
        ];
        (constants, vec![buffer, ("gave_up", self.hidden_tokens.clone())])
    }

    /// Returns the bindings of a layer's attention.
    pub(super) fn attention(&self) -> Bindings {
        let mut constants = self.publishes_attended();
        constants.push(("CLEARED", U(self.words.all.div_ceil(4) as u32)));
        let cleared = self.buffers[(self.layer + 1) % 2].clone();
        let between = self.between[self.layer % 2].clone();
        (constants, vec![self.buffer(), ("cleared", cleared), ("queries", between)])
    }

    /// Returns the bindings of the merge.
    pub(super) fn merge(&self) -> Bindings {
        (self.publishes_attended(), vec![self.buffer()])
    }

    fn publishes_attended(&self) -> Constants {
        vec![("PUBLISHES", U(1)), ("PUBLISH_AT", U(self.words.attended as u32))]
    }

    /// Returns the bindings of the matmuls of queries, keys and values of a layer, whose pages are in `kv_slot`. In the first
    /// layer, they clear the words, because no layer precedes it.
    pub(super) fn queries(&self, kv_slot: usize, is_first_matmul: bool) -> Bindings {
        let [k_pages, v_pages] = self.hidden_pages[kv_slot].clone();
        let queries = self.hidden_between[self.layer % 2].clone();
        let mut buffers = vec![("queries", queries), ("k_pages", k_pages), ("v_pages", v_pages)];
        let mut constants = vec![];
        if self.layer == 0 && is_first_matmul {
            constants.push(("CLEARED", U(self.words.all.div_ceil(4) as u32)));
            buffers.push(("cleared", self.buffers[0].clone()));
        }
        (constants, buffers)
    }

    /// Returns the bindings of the projection, which adds to the stream (`x` in the first layer).
    pub(super) fn projection(&self, x: &wgpu::Buffer) -> Bindings {
        let (stream, first) = match self.layer {
            0 => (x.clone(), 0),
            layer => (self.hidden_between[layer % 2].clone(), self.words.queries),
        };
        let mut constants = self.stream(first);
        constants.extend(self.publishes_acts(self.words.projected));
        (constants, vec![self.buffer(), ("x", stream)])
    }

    /// Returns the bindings of gate and up.
    pub(super) fn gate(&self) -> Bindings {
        (vec![("HANDOFF", U(1)), ("GATED_AT", U(self.words.gated as u32))], vec![self.buffer()])
    }

    /// Returns the bindings of down, which adds to the stream, and publishes the input of the next matmul if `publishes` is
    /// true. After the last layer, the stream is in `last`.
    pub(super) fn down(&self, publishes: bool, last: Option<wgpu::Buffer>) -> Bindings {
        let mut constants = self.stream(if last.is_some() { 0 } else { self.words.queries });
        constants.push(("AWAITS_X", U(1)));
        if publishes {
            constants.extend(self.publishes_acts(self.words.down));
        }
        let next = || self.hidden_between[(self.layer + 1) % 2].clone();
        (constants, vec![self.buffer(), ("out", last.unwrap_or_else(next))])
    }

    fn stream(&self, first: usize) -> Constants {
        vec![("HANDOFF", U(1)), ("X_AT", U(self.words.stream as u32)), ("X_FIRST", U(first as u32))]
    }

    fn publishes_acts(&self, at: usize) -> Constants {
        let squares = at + 10 * self.words.blocks;
        vec![("PUBLISHES", U(1)), ("PUBLISH_AT", U(at as u32)), ("SQUARES_AT", U(squares as u32))]
    }
}
