//! What launches of a step of one row hand to the next ones without barriers (`hand.wgsl`).
//!
//! A layer has one barrier, before attention. All of its other launches start when there is room for their workgroups, ask for weights,
//! and wait for words of the launch before. Where words lie, a slot, layers take in turn: attention empties that of the next layer, as
//! the barrier has waited for all who took words from it. Parts of attention's results are too many for that: their merge, which alone
//! takes them, empties them itself. Queries and the residual stream between layers pass a barrier on their way, and so need no asking;
//! they, too, have two places in turn, lest someone still reads what is written.

use paguro_backend::{AttentionMode, Limits, Linear, LoadError, Norm, Op, Program};

use super::{Lowering, Value::U, When, wgsl};
use crate::{
    device::Device,
    hidden::{Hazards, second_name},
    layout::BLOCK,
    plan::Tiling,
    template::{Constants, Value},
};

/// Products: all that they write is taken by launches that wait for it, or behind a barrier.
pub(super) const PRODUCT: Hazards =
    Hazards { hidden: &["hands", "gave_up", "cleared", "queries", "k_pages", "v_pages", "out"], ends: &[] };
/// The last product onto the stream, and the head's: what they write takes the usual way.
pub(super) const LAST: Hazards = Hazards { hidden: &["hands", "gave_up"], ends: &[] };
/// Attention, with the barrier before it.
const ATTENTION: Hazards =
    Hazards { hidden: &["hands", "cleared", "parts_handed"], ends: &["queries", "k_pages", "v_pages"] };
/// The same where it hands nothing over but parts.
const ATTENTION_PARTS: Hazards = Hazards { hidden: &["parts_handed"], ends: &[] };
/// Its merge, which waits for parts. Activations have a second name, as attention makes some, too, where its results are whole: the
/// barrier before who takes them is for both.
const MERGE: Hazards = Hazards {
    hidden: &["hands", "gave_up", "parts_handed", "acts_quants", "acts_scales", "acts_floats"],
    ends: &[],
};

/// What a word is until it is there: no four quants, which are -127 to 127.
const EMPTY: u32 = 0x8080_8080;
/// The same for kernels.
pub(super) const EMPTY_WORD: (&str, Value) = ("EMPTY", U(EMPTY));
/// Words that are made so at once.
const EMPTY_WORDS: usize = 1 << 16;

/// Buffers of what is handed over.
pub struct Hands {
    slots: [wgpu::Buffer; 2],
    /// Queries, and behind them the stream that a layer begins with.
    between: [wgpu::Buffer; 2],
    /// The same under the name of those that write it.
    hidden_between: [wgpu::Buffer; 2],
    hidden_pages: Vec<[wgpu::Buffer; 2]>,
    hidden_tokens: wgpu::Buffer,
    words: Words,
    /// Of the layer that is being lowered.
    pub(super) layer: usize,
}

/// Where words lie in a slot.
struct Words {
    /// What attention makes: see `acts_int.wgsl`.
    attended: usize,
    /// What the projection makes, with sums of squares.
    projected: usize,
    /// The stream in the middle of the layer.
    stream: usize,
    /// What gate and up make: floats.
    gated: usize,
    /// What down makes, with sums of squares.
    down: usize,
    all: usize,
    queries: usize,
    blocks: usize,
}

/// What a product takes.
#[derive(Clone, Copy)]
pub(super) enum Take {
    Attended,
    Projected,
    Gated,
    /// Of the layer before.
    Down,
}

/// A kernel's constants and buffers.
pub(super) type Parts = (Constants, Vec<(&'static str, wgpu::Buffer)>);

/// Parts of attention's results that are handed to its merge, in steps of one row and of several.
pub struct HandedParts {
    parts: wgpu::Buffer,
    /// How many there is room for.
    most: usize,
    /// Some of what they are until they are there.
    empty_words: wgpu::Buffer,
    /// Under the names of those that write without wgpu's knowledge.
    hidden_tokens: wgpu::Buffer,
    hidden_acts: [wgpu::Buffer; 3],
}

/// A way in which attention or its merge takes and gives.
pub(super) struct Way {
    pub when: When,
    pub files: Vec<&'static str>,
    pub constants: Constants,
    pub buffers: Vec<(&'static str, wgpu::Buffer)>,
    pub hazards: &'static Hazards,
}

impl Way {
    /// With barriers.
    fn told(when: When) -> Self {
        Self { when, files: vec![], constants: vec![], buffers: vec![], hazards: &Hazards::TOLD }
    }

    /// The same in steps of one row, with words.
    fn with(&self, (constants, buffers): Parts, hazards: &'static Hazards) -> Self {
        let constants = [self.constants.clone(), constants].concat();
        let buffers = [buffers, self.buffers.clone()].concat();
        let files = [&self.files[..], wgsl!("hand_words", "clear")].concat();
        Self { when: When::OneRow, files, constants, buffers, hazards }
    }
}

impl Lowering<'_> {
    /// Buffers for what launches hand over, if the device takes it that way and every layer of the model has five launches.
    ///
    /// # Errors
    /// No memory.
    pub(super) fn hands(&self) -> Result<Option<Hands>, LoadError> {
        let Self { device, program, pages, .. } = self;
        let Some(HandedParts { hidden_tokens, .. }) =
            self.handed_parts.as_ref().filter(|_| self.all_hand_over())
        else {
            return Ok(None);
        };
        let queries = program.heads * program.kv.head_dim;
        let blocks = program.hidden / BLOCK;
        let projected = 10 * queries / BLOCK;
        let stream = projected + 11 * blocks;
        let gated = stream + program.hidden;
        let down = gated + program.ffn;
        let all = down + 11 * blocks;
        let words = Words { attended: 0, projected, stream, gated, down, all, queries, blocks };
        let slot = || device.buffer(all, "what launches hand over");
        let room = || device.buffer(queries + program.hidden, "queries and the residual stream");
        let between = [room()?, room()?];
        // wgpu empties a buffer before its first use, but does not see uses under second names.
        self.empty(pages.iter().flatten().chain(&between));
        let second = |buffer: &wgpu::Buffer| second_name(&device.inner, buffer);
        Ok(Some(Hands {
            slots: [slot()?, slot()?],
            hidden_between: [second(&between[0]), second(&between[1])],
            between,
            hidden_pages: pages.iter().map(|[k, v]| [second(k), second(v)]).collect(),
            hidden_tokens: hidden_tokens.clone(),
            words,
            layer: 0,
        }))
    }

    /// A buffer for parts of attention, if the device takes those without barriers.
    ///
    /// # Errors
    /// No memory.
    pub(super) fn handed_parts(&self) -> Result<Option<HandedParts>, LoadError> {
        let Self { device, program, limits, tiling, tokens, acts, .. } = self;
        if !hands_parts(device, limits, tiling) {
            return Ok(None);
        }
        self.empty(acts.iter().chain([tokens]));
        let second = |buffer: &wgpu::Buffer| second_name(&device.inner, buffer);
        let words = tiling.parts * program.heads * (program.kv.head_dim + 4);
        let parts = HandedParts {
            parts: device.buffer(words, "parts of attention that are handed over")?,
            most: tiling.parts,
            empty_words: device.upload(&[EMPTY; EMPTY_WORDS], "empty words")?,
            hidden_tokens: second(tokens),
            hidden_acts: acts.each_ref().map(second),
        };
        parts.empty(device);
        Ok(Some(parts))
    }

    /// Makes buffers that wgpu takes for empty really so.
    fn empty<'b>(&self, buffers: impl Iterator<Item = &'b wgpu::Buffer>) {
        let mut encoder = self.device.encoder();
        for buffer in buffers {
            encoder.clear_buffer(buffer, 0, None);
        }
        self.device.queue.submit([encoder.finish()]);
    }

    /// How attention to tiles of one row, or of several, gives what it has made.
    pub(super) fn attention_ways(&self, is_one_row: bool) -> Vec<Way> {
        let Some(parts) = &self.handed_parts else { return vec![Way::told(When::Always)] };
        let few = parts.way(When::Always, vec![], vec![], &ATTENTION_PARTS);
        match self.product_hands().filter(|_| is_one_row) {
            None => vec![few],
            Some(hands) => {
                let one = few.with(hands.attention(), &ATTENTION);
                vec![one, Way { when: When::MoreRows, ..few }]
            }
        }
    }

    /// How their merge does. With cooperative matrices, steps of many rows leave parts that it reads behind a barrier.
    pub(super) fn merge_ways(&self) -> Vec<Way> {
        let Some(parts) = &self.handed_parts else { return vec![Way::told(When::Always)] };
        let wide = self.tiling.wide.map(|wide| wide.from);
        let acts = ["acts_quants", "acts_scales", "acts_floats"].into_iter().zip(parts.hidden_acts.clone());
        let buffers = acts.chain([("gave_up", parts.hidden_tokens.clone())]).collect();
        let hands = self.product_hands();
        let from = if hands.is_some() { 2 } else { 1 };
        let when = When::Between(from, wide.unwrap_or(usize::MAX));
        let few = parts.way(when, vec![("TAKES", U(1))], buffers, &MERGE);
        let one = hands.map(|hands| few.with(hands.merge(), &MERGE));
        let wide = wide.map(|from| Way::told(When::From(from)));
        one.into_iter().chain([few]).chain(wide).collect()
    }

    /// Whether every layer has the five launches, with activations of eight bits, whose words are whole fours.
    fn all_hand_over(&self) -> bool {
        let Program { hidden, heads, ffn, ref kv, ref ops, .. } = *self.program;
        let quantized = |linear: &Linear| self.is_quantized(linear);
        let adds = |linear: &Linear, post_norm: Option<Norm>| {
            post_norm.is_none() && quantized(linear) && self.is_whole(&[linear])
        };
        let layer = |op: &Op, next: Option<&Op>| match (op, next) {
            (Op::NormQkvRopeStore(op), _) => {
                self.rotates(op) && [&op.q, &op.k, &op.v].map(quantized) == [true; 3]
            }
            (Op::ProjectAdd(op), Some(Op::NormGateUp(_))) => adds(&op.project, op.post_norm),
            (Op::ProjectAdd(_), _) => false,
            (Op::NormGateUp(op), Some(Op::DownAdd(next))) => {
                self.gates(op, &next.down) && quantized(&op.gate) && adds(&next.down, next.post_norm)
            }
            _ => true,
        };
        [hidden, heads * kv.head_dim, ffn].iter().all(|width| width.is_multiple_of(4 * BLOCK))
            && ops.iter().enumerate().all(|(index, op)| layer(op, ops.get(index + 1)))
    }
}

/// Whether attention hands its parts to their merge.
pub(super) fn hands_parts(device: &Device, limits: &Limits, tiling: &Tiling) -> bool {
    device.hands_over && tiling.emits && limits.attention == AttentionMode::Paged
}

impl HandedParts {
    /// Makes all words such that they are still to come.
    pub fn empty(&self, device: &Device) {
        let size = self.empty_words.size();
        let mut encoder = device.encoder();
        for at in (0..self.parts.size()).step_by(size as usize) {
            let rest = size.min(self.parts.size() - at);
            encoder.copy_buffer_to_buffer(&self.empty_words, 0, &self.parts, at, rest);
        }
        device.queue.submit([encoder.finish()]);
    }

    /// For attention, or for its merge with what that takes.
    fn way(
        &self,
        when: When,
        mut constants: Constants,
        mut buffers: Vec<(&'static str, wgpu::Buffer)>,
        hazards: &'static Hazards,
    ) -> Way {
        constants.extend([("HANDS_PARTS", U(1)), ("MOST_PARTS", U(self.most as u32)), EMPTY_WORD]);
        buffers.push(("parts_handed", self.parts.clone()));
        Way { when, files: wgsl!("hand", "hand_parts").to_vec(), constants, buffers, hazards }
    }
}

impl Hands {
    fn slot(&self) -> (&'static str, wgpu::Buffer) {
        ("hands", self.slots[self.layer % 2].clone())
    }

    /// For a product of so many threads that takes words.
    pub(super) fn takes(&self, take: Take, threads: u32) -> Parts {
        let Words { attended, projected, gated, down, blocks, .. } = self.words;
        let (at, words) = match take {
            Take::Attended => (attended, projected - attended),
            Take::Projected => (projected, 11 * blocks),
            Take::Gated => (gated, down - gated),
            Take::Down => (down, 11 * blocks),
        };
        let slot = match take {
            Take::Down => ("hands", self.slots[(self.layer + 1) % 2].clone()),
            _ => self.slot(),
        };
        let constants = vec![
            ("TAKES", U(words as u32)),
            ("TAKE_ROUNDS", U((words as u32 / 4).div_ceil(threads))),
            ("TAKE_AT", U(at as u32)),
        ];
        (constants, vec![slot, ("gave_up", self.hidden_tokens.clone())])
    }

    /// For attention of a layer.
    pub(super) fn attention(&self) -> Parts {
        let mut constants = self.gives_attended();
        constants.push(("CLEARED", U(self.words.all.div_ceil(4) as u32)));
        let cleared = self.slots[(self.layer + 1) % 2].clone();
        let between = self.between[self.layer % 2].clone();
        (constants, vec![self.slot(), ("cleared", cleared), ("queries", between)])
    }

    /// For its merge.
    pub(super) fn merge(&self) -> Parts {
        (self.gives_attended(), vec![self.slot()])
    }

    fn gives_attended(&self) -> Constants {
        vec![("GIVES", U(1)), ("GIVE_AT", U(self.words.attended as u32))]
    }

    /// For queries, keys and values of a layer, whose pages are in this slot of the model's. Those of the first layer empty its words: it has
    /// no layer before that does.
    pub(super) fn queries(&self, kv_slot: usize, is_first_product: bool) -> Parts {
        let [k_pages, v_pages] = self.hidden_pages[kv_slot].clone();
        let queries = self.hidden_between[self.layer % 2].clone();
        let mut buffers = vec![("queries", queries), ("k_pages", k_pages), ("v_pages", v_pages)];
        let mut constants = vec![];
        if self.layer == 0 && is_first_product {
            constants.push(("CLEARED", U(self.words.all.div_ceil(4) as u32)));
            buffers.push(("cleared", self.slots[0].clone()));
        }
        (constants, buffers)
    }

    /// For the projection, which adds to the stream: `x` in the first layer.
    pub(super) fn projection(&self, x: &wgpu::Buffer) -> Parts {
        let (stream, first) = match self.layer {
            0 => (x.clone(), 0),
            layer => (self.hidden_between[layer % 2].clone(), self.words.queries),
        };
        let mut constants = self.stream(first);
        constants.extend(self.gives_acts(self.words.projected));
        (constants, vec![self.slot(), ("x", stream)])
    }

    /// For gate and up.
    pub(super) fn gate(&self) -> Parts {
        (vec![("HANDS", U(1)), ("GATED_AT", U(self.words.gated as u32))], vec![self.slot()])
    }

    /// For down, which adds to the stream, and may give what the next product takes; after the last one, the stream is in `x`.
    pub(super) fn down(&self, gives: bool, last: Option<wgpu::Buffer>) -> Parts {
        let mut constants = self.stream(if last.is_some() { 0 } else { self.words.queries });
        constants.push(("TAKES_X", U(1)));
        if gives {
            constants.extend(self.gives_acts(self.words.down));
        }
        let next = || self.hidden_between[(self.layer + 1) % 2].clone();
        (constants, vec![self.slot(), ("out", last.unwrap_or_else(next))])
    }

    fn stream(&self, first: usize) -> Constants {
        vec![("HANDS", U(1)), ("X_AT", U(self.words.stream as u32)), ("X_FIRST", U(first as u32))]
    }

    fn gives_acts(&self, at: usize) -> Constants {
        let squares = at + 10 * self.words.blocks;
        vec![("GIVES", U(1)), ("GIVE_AT", U(at as u32)), ("SQUARES_AT", U(squares as u32))]
    }
}
