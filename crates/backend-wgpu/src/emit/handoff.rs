//! Handoff between launches of a step of one row without barriers (`handoff_words.wgsl`), and of partials of attention
//! (`handoff_partials.wgsl`).
//!
//! A layer has one barrier, before attention. All its other launches start as soon as their workgroups fit, prefetch
//! weights, and wait for words of the previous launch. Layers alternate between two buffers of words. Attention clears the
//! buffer of the next layer, because the barrier before it has waited for all readers of that buffer. Partials of attention
//! are too many for that: their only reader, the merge, clears them. Queries, and the residual stream between layers, pass a
//! barrier and need no polling. They also alternate between two buffers, so that no launch overwrites data that another one
//! still reads.

use super::{
    code::{Coder, Part, Slots, written_acts},
    wgsl,
};
use crate::{
    hidden::Hazards,
    layout::BLOCK,
    lower::{Acts, Link, MATRICES, MOST_QUERIES, Slot},
    template::{
        Constants,
        Value::{self, U},
    },
};

/// Hazards of matmuls whose outputs are all read by launches that wait for them, or after a barrier.
pub const MATMUL: Hazards =
    Hazards { hidden: &["handoff", "gave_up", "cleared", "queries", "k_pages", "v_pages", "out"], ends: &[] };
/// Hazards of the last matmul onto the stream, and of that of the head, whose outputs are ordinary buffers.
pub const LAST: Hazards = Hazards { hidden: &["handoff", "gave_up"], ends: &[] };
/// Hazards of products with A of adapters beside whose launch the matmul runs. It has the barrier of the matmul's output. It clears
/// the buffer `next` in wgpu's sight: matmuls of other formats on the same activations have other outputs, and the one before may
/// still read its products there.
pub const SHRINK: Hazards = Hazards { hidden: &["handoff"], ends: &["out"] };
/// Hazards of that matmul.
pub const SHRUNK: Hazards = Hazards { hidden: &["handoff", "gave_up", "out"], ends: &[] };
/// Hazards of attention in steps with handoff of words, with the barrier before it.
pub const ATTENTION: Hazards =
    Hazards { hidden: &["handoff", "cleared", "handoff_partials"], ends: &["queries", "k_pages", "v_pages"] };
/// Hazards of attention with handoff of partials only.
pub const ATTENTION_PARTIALS: Hazards = Hazards { hidden: &["handoff_partials"], ends: &[] };
/// Hazards of the merge, which waits for partials. Activations have a second name, because attention also writes some if its
/// results are whole; the barrier before their reader covers both.
pub const MERGE: Hazards = Hazards {
    hidden: &["handoff", "gave_up", "handoff_partials", "acts_quants", "acts_scales", "acts_floats"],
    ends: &[],
};

/// Value of a word before it is written. No four quants have it, because quants are -127 to 127.
pub const EMPTY: u32 = 0x8080_8080;
/// [`EMPTY`] as a constant of kernels.
pub const EMPTY_WORD: (&str, Value) = ("EMPTY", U(EMPTY));

/// Matmuls of a layer that adapters may change.
const LOW_MATMULS: usize = MOST_QUERIES + 3;

/// Offsets of words in a buffer of words.
pub struct Words {
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
    /// Products with A of adapters. Each of [`LOW_MATMULS`] matmuls has every such quad.
    low: usize,
    /// All words.
    pub all: usize,
    /// Words of queries, before the stream between layers.
    pub queries: usize,
    blocks: usize,
}

impl Coder<'_> {
    /// Returns the offsets of words.
    pub fn words(&self) -> Words {
        let program = self.facts.program;
        let queries = self.facts.kv.groups[0].q_width();
        let widths = program.layers.iter().map(|layer| match &layer.ffn {
            paguro_backend::FeedForward::Dense(dense) => dense.width,
            paguro_backend::FeedForward::None | paguro_backend::FeedForward::Experts(_) => 0,
        });
        let blocks = program.hidden / BLOCK;
        let projected = 10 * queries / BLOCK;
        let stream = projected + 11 * blocks;
        let gated = stream + program.hidden;
        let down = gated + widths.max().unwrap_or(0);
        let low = down + 11 * blocks;
        let low_words = self.facts.adapted.map_or(0, |adapted| MATRICES * adapted.ranks);
        let all = low + LOW_MATMULS * low_words;
        Words { attended: 0, projected, stream, gated, down, low, all, queries, blocks }
    }

    /// Returns the part of attention, or of its merge with its inputs, that hands partials over.
    pub fn partials(&self, is_merge: bool) -> Part {
        let most = self.facts.tilings[0].partials;
        let constants = vec![("HANDOFF_PARTIALS", U(1)), ("MOST_PARTIALS", U(most as u32)), EMPTY_WORD];
        let slots = vec![("handoff_partials", Slot::HandoffPartials)];
        let mut part = Part::new(wgsl!("handoff", "handoff_partials"), constants, slots);
        if is_merge {
            part.constants.extend([("AWAITED", U(1)), ("GIVES_UP", U(1))]);
            part.seconds = written_acts(Acts::Plain);
            part.seconds.push(("gave_up", Slot::Tokens));
        }
        part
    }
}

/// Returns the part of a kernel that writes or reads low-rank products in this buffer of handoff.
pub fn low(own: usize) -> Part {
    let constants = vec![("LOW_AT", U(0)), ("LOW_STRIDE", U(1)), EMPTY_WORD];
    Part::new(wgsl!("handoff", "handoff_words"), constants, vec![("handoff", Slot::LowWords(own))])
}

impl Words {
    /// Returns the part of a matmul with `threads` threads that reads words.
    pub fn reads(&self, layer: usize, link: Link, threads: u32) -> Part {
        let Self { attended, projected, gated, down, blocks, .. } = *self;
        let (at, words, from) = match link {
            Link::Project => (attended, projected - attended, layer),
            Link::GateUp => (projected, 11 * blocks, layer),
            Link::Down(_) => (gated, down - gated, layer),
            // The output of down in the previous layer.
            Link::Queries(_) | Link::Head | Link::Attend | Link::Merge => (down, 11 * blocks, layer + 1),
        };
        let constants = vec![
            ("AWAITED", U(words as u32)),
            ("GIVES_UP", U(1)),
            ("AWAIT_ROUNDS", U((words as u32 / 4).div_ceil(threads))),
            ("AWAIT_AT", U(at as u32)),
        ];
        let slots = vec![("handoff", Slot::Words(from % 2))];
        let mut part = Part::new(wgsl!("handoff", "handoff_words"), constants, slots);
        part.seconds = vec![("gave_up", Slot::Tokens)];
        part
    }

    /// Returns the constants for the low-rank products of a matmul. They are in the buffer of words that the matmul
    /// [reads](Self::reads). No constant depends on the ranks of adapters, so kernels are compiled once for all.
    pub fn low(&self, link: Link) -> Constants {
        let number = match link {
            Link::Queries(number) => number,
            Link::Project => MOST_QUERIES,
            Link::GateUp => MOST_QUERIES + 1,
            Link::Down(_) | Link::Head | Link::Attend | Link::Merge => MOST_QUERIES + 2,
        };
        vec![("LOW_AT", U((self.low + 4 * number) as u32)), ("LOW_STRIDE", U(LOW_MATMULS as u32))]
    }

    /// Returns the part of a launch that writes words. A matmul onto the stream publishes the input of the next one if
    /// `publishes` is true; that of queries writes `pages`.
    pub fn writes(&self, layer: usize, link: Link, publishes: bool, pages: Option<[Slot; 2]>) -> Part {
        let own = Slot::Words(layer % 2);
        let cleared = ("CLEARED", U(1));
        let mut slots: Slots = vec![("handoff", own)];
        let mut seconds = vec![];
        let mut files: &[&'static str] = &[];
        let constants = match link {
            Link::Queries(number) => {
                seconds.push(("queries", Slot::Between(layer % 2)));
                let [k_pages, v_pages] = pages.expect("matmuls of queries write pages");
                seconds.extend([("k_pages", k_pages), ("v_pages", v_pages)]);
                slots.clear();
                // No layer precedes the first one, so it clears its own words.
                if layer > 0 || number > 0 {
                    return Part { seconds, ..Part::default() };
                }
                slots.push(("cleared", own));
                vec![cleared]
            }
            Link::Attend => {
                files = wgsl!("handoff_words", "clear");
                slots.push(("cleared", Slot::Words((layer + 1) % 2)));
                slots.push(("queries", Slot::Between(layer % 2)));
                [self.publishes_attended(), vec![cleared]].concat()
            }
            Link::Merge => {
                files = wgsl!("handoff_words", "clear");
                self.publishes_attended()
            }
            Link::Project => {
                let first = match layer {
                    0 => {
                        slots.push(("x", Slot::Stream));
                        0
                    }
                    layer => {
                        seconds.push(("x", Slot::Between(layer % 2)));
                        self.queries
                    }
                };
                [self.stream(first), self.publishes_acts(self.projected)].concat()
            }
            Link::GateUp => vec![("HANDOFF", U(1)), ("GATED_AT", U(self.gated as u32))],
            Link::Down(is_last) => {
                match is_last {
                    true => slots.push(("out", Slot::Stream)),
                    false => seconds.push(("out", Slot::Between((layer + 1) % 2))),
                }
                let mut constants = self.stream(if is_last { 0 } else { self.queries });
                constants.push(("AWAITS_X", U(1)));
                if publishes {
                    constants.extend(self.publishes_acts(self.down));
                }
                constants
            }
            Link::Head => return Part::default(),
        };
        Part { files: files.to_vec(), constants, slots, seconds }
    }

    fn publishes_attended(&self) -> Constants {
        vec![("PUBLISHES", U(1)), ("PUBLISH_AT", U(self.attended as u32))]
    }

    fn stream(&self, first: usize) -> Constants {
        vec![("HANDOFF", U(1)), ("X_AT", U(self.stream as u32)), ("X_FIRST", U(first as u32))]
    }

    fn publishes_acts(&self, at: usize) -> Constants {
        let squares = at + 10 * self.blocks;
        vec![("PUBLISHES", U(1)), ("PUBLISH_AT", U(at as u32)), ("SQUARES_AT", U(squares as u32))]
    }
}
