//! Kernels of WGSL: their files, constants, and the slots that their buffers are.

use std::ops::Range;

use paguro_backend::{KvSlot, Limits, Linear, MatrixId, VectorId};

use super::{launch::Grid, wgsl};
use crate::{
    hidden::Hazards,
    layout::{BLOCK, Layout},
    lower::{Acts, Facts, Formats, Kernel, Node, RowClass, Sizes, Slot, few_works},
    matrix::{self, Order},
    pages::{self, head_words, page_words},
    template::{
        Constants,
        Value::{self, U},
    },
};

/// Slots by the names of their buffers in a kernel. Of two with one name, the first one is bound.
pub type Slots = Vec<(&'static str, Slot)>;

/// Files, constants and slots of a part of a kernel.
#[derive(Clone, Debug, Default)]
pub struct Part {
    pub files: Vec<&'static str>,
    pub constants: Constants,
    pub slots: Slots,
    /// Slots that are bound under a second name, so that wgpu does not see these uses.
    pub seconds: Slots,
}

/// A kernel.
#[derive(Clone, Debug)]
pub struct Code {
    /// Its name.
    pub name: String,
    /// The name of its counter, if it is not the same.
    pub counter: Option<String>,
    /// Its source and buffers.
    pub part: Part,
    /// Differences from the accesses declared to wgpu.
    pub hazards: &'static Hazards,
}

/// A launch.
#[derive(Clone, Debug)]
pub struct Coded {
    /// The kernel; for matmuls, one for each number of rows.
    pub kernels: Vec<Code>,
    /// Its size.
    pub grid: Grid,
    /// Its K/V group, if it has one.
    pub kv_group: usize,
    /// Rows of the step for each of its rows.
    pub merged: usize,
}

/// Matrices of one layout that are joined to one.
#[derive(Clone, Debug, PartialEq)]
pub struct Joined {
    /// The matrices.
    pub matrices: Vec<MatrixId>,
    /// The order of their rows.
    pub order: Order,
    /// Slots on the device, if the host has the experts.
    pub slots: Option<usize>,
}

/// Biases of some rows of joined matrices.
#[derive(Clone)]
pub struct Biases {
    vectors: Vec<Option<VectorId>>,
    order: Order,
    rows: Range<usize>,
    /// The biases.
    pub values: Vec<f32>,
}

/// A joined matrix on the device.
pub struct Weights {
    /// Index of the matrix.
    pub index: usize,
    /// Layout.
    pub layout: Layout,
    /// Blocks of inputs.
    pub blocks: usize,
    /// Inputs.
    pub cols: usize,
    /// Rows, in as many parts as bindings require; with slots, those of the slots.
    pub parts: Vec<Range<usize>>,
    /// With slots, rows of all experts in the host's memory.
    pub host: Vec<Range<usize>>,
    /// With slots, rows of the experts without a slot.
    pub staged: Vec<Range<usize>>,
}

/// Turns nodes into kernels.
pub struct Coder<'a> {
    pub facts: &'a Facts<'a>,
    pub sizes: &'a Sizes,
    /// Matrices that kernels read.
    pub matrices: Vec<Joined>,
    /// Joined biases that kernels read.
    pub biases: Vec<Biases>,
    /// Kernels for inspection only.
    pub shown: Vec<(String, Part)>,
}

impl Part {
    /// Creates a part of these.
    pub fn new(files: &[&'static str], constants: Constants, slots: Slots) -> Self {
        Self { files: files.to_vec(), constants, slots, seconds: vec![] }
    }

    /// Adds another part. Its slots have precedence.
    pub fn with(mut self, other: Self) -> Self {
        self.files.extend(other.files);
        self.constants.extend(other.constants);
        self.slots = [other.slots, self.slots].concat();
        self.seconds.extend(other.seconds);
        self
    }
}

impl Coded {
    /// A launch of one kernel with barriers.
    pub fn new(name: impl Into<String>, part: Part, grid: Grid) -> Self {
        let code = Code { name: name.into(), counter: None, part, hazards: &Hazards::DECLARED };
        Self { kernels: vec![code], grid, kv_group: 0, merged: 1 }
    }

    /// Sets the K/V group.
    pub fn of_group(self, kv: KvSlot) -> Self {
        Self { kv_group: kv.group, ..self }
    }
}

impl<'a> Coder<'a> {
    /// Creates a coder for these slots.
    pub fn new(facts: &'a Facts<'a>, sizes: &'a Sizes) -> Self {
        Self { facts, sizes, matrices: vec![], biases: vec![], shown: vec![] }
    }

    /// Returns the launches of a node in steps of a class of rows.
    pub fn code(&mut self, node: &Node, class: RowClass) -> Vec<Coded> {
        match &node.kernel {
            Kernel::Embed { table, scale, is_of_positions, types, parts } => {
                self.embed(*table, *scale, (*is_of_positions, *types), *parts)
            }
            Kernel::SetGiven => vec![self.given(0, true)],
            Kernel::AddGiven(part) => vec![self.given(*part, false)],
            Kernel::Matmul(op) => self.matmul(op, node, class),
            Kernel::Shrink(op) => vec![self.shrink(op, node, class)],
            Kernel::ExpertMatmul(op) => self.expert_matmul(op, node.emits),
            Kernel::LayerEmbeds(op) => vec![self.layer_embeds(op)],
            Kernel::Norm(op) => vec![self.norm(op, node.emits)],
            Kernel::MapRows { from, to, width, map } => vec![self.map_rows(*from, *to, *width, *map)],
            Kernel::Unpack { acts, to, width } => vec![self.unpack(*acts, *to, *width)],
            Kernel::AddBranch(op) => vec![self.add_branch(op)],
            Kernel::RopeStore(op) => vec![self.rope_store(op)],
            Kernel::StoreLatent(op) => vec![self.store_latent(op)],
            Kernel::LatentQueries(op) => vec![self.latent_queries(op, node.emits)],
            Kernel::HadamardQueries { kv, heads } => vec![self.hadamard_queries(*kv, *heads)],
            Kernel::Gather { kv, is_k } => vec![self.gather(*kv, *is_k)],
            Kernel::Attend(op) => vec![self.attend(op, node)],
            Kernel::Merge(op) => vec![self.merge(op, node)],
            Kernel::Activate(op) => vec![self.activate(op, node.emits)],
            Kernel::Route(op) => vec![self.route(op)],
            Kernel::RouteTiles(tiles) => vec![self.route_tiles(*tiles)],
            Kernel::PlaceExperts { pool, chooses } => vec![self.place_experts(pool, chooses.as_deref())],
            Kernel::FillExperts(op) => self.fill_experts(op),
            Kernel::GatherHalves { acts, layout, width, tiles } => {
                vec![self.gather_halves(*acts, *layout, *width, *tiles)]
            }
            Kernel::AddExperts(op) => vec![self.add_experts(op)],
            Kernel::ShortConv(op) => vec![self.short_conv(op, node.emits)],
            Kernel::Keep(op) => vec![self.keep(op)],
            Kernel::DeltaInputs { delta, a, b } => vec![self.delta_inputs(delta, a, b)],
            Kernel::Delta(heads) => vec![self.delta(heads)],
            Kernel::DeltaNorm { delta, z } => vec![self.delta_norm(delta, z, node.emits)],
            Kernel::SsdInputs { ssd, d } => vec![self.ssd_inputs(ssd, d)],
            Kernel::SsdNorm { ssd, z } => vec![self.ssd_norm(ssd, z, node.emits)],
            Kernel::KeepDelta { heads, convolution, mixed } => {
                vec![self.keep_delta(heads, convolution, mixed)]
            }
        }
    }

    /// Returns a joined matrix.
    pub fn weights(&mut self, linears: &[Linear], order: Order) -> Weights {
        self.weights_in(linears, order, None)
    }

    /// Returns a joined stack of which the device has as many slots.
    pub fn weights_in(&mut self, linears: &[Linear], order: Order, slots: Option<usize>) -> Weights {
        let matrices = linears.iter().map(|linear| linear.matrix).collect();
        let joined = Joined { matrices, order, slots };
        let known = self.matrices.iter().position(|known| *known == joined);
        let index = known.unwrap_or_else(|| {
            self.matrices.push(joined);
            self.matrices.len() - 1
        });
        let (layout, cols) = (self.facts.layout(linears[0].matrix), self.facts.cols(&linears[0]));
        let counts: Vec<usize> = linears.iter().map(|linear| self.facts.rows(linear)).collect();
        let blocks = cols.div_ceil(BLOCK);
        let (limit, words, all) = (self.facts.target.binding_limit, layout.row_words(blocks), order.stacks());
        let ranges = |stacks: Range<usize>| matrix::part_ranges(limit, words, &counts, order, stacks);
        let parts = ranges(0..slots.unwrap_or(all));
        let host = slots.map_or_else(Vec::new, |_| ranges(0..all));
        let staged = slots.map_or_else(Vec::new, |slots| ranges(slots..all));
        Weights { index, layout, blocks, cols, parts, host, staged }
    }

    /// Returns the slots of a part of a matrix.
    pub fn planes(&self, weights: &Weights, part: usize) -> Slots {
        let matrix = weights.index;
        let names = ["w_quants", "w_high", "w_scales"].into_iter().enumerate();
        names.map(|(plane, name)| (name, Slot::Plane { matrix, part, plane })).collect()
    }

    /// Returns the biases of some rows of joined matrices, if there are some, as a part of a kernel.
    pub fn bias(&mut self, linears: &[Linear], order: Order, rows: Range<usize>) -> Part {
        let Some(weights) = self.facts.weights.filter(|_| linears.iter().any(|linear| linear.bias.is_some()))
        else {
            return Part::new(&[], vec![("BIAS", U(0))], vec![]);
        };
        let counts: Vec<usize> = linears.iter().map(|linear| self.facts.rows(linear)).collect();
        let of = |(matrix, row): (usize, usize)| {
            linears[matrix].bias.map_or(0.0, |bias| weights.vector(bias)[row])
        };
        let vectors: Vec<_> = linears.iter().map(|linear| linear.bias).collect();
        let is_known =
            |known: &Biases| known.vectors == vectors && known.order == order && known.rows == rows;
        let index = self.biases.iter().position(is_known).unwrap_or_else(|| {
            let values = order.rows(&counts)[rows.clone()].iter().copied().map(of).collect();
            self.biases.push(Biases { vectors, order, rows, values });
            self.biases.len() - 1
        });
        Part::new(&[], vec![("BIAS", U(1))], vec![("bias", Slot::Bias(index))])
    }

    /// Returns the constants of activations of this width.
    pub fn emit_for(&self, formats: Formats, width: usize) -> Constants {
        vec![
            ("ACT_BLOCKS", U(width.div_ceil(BLOCK) as u32)),
            ("EMIT_Q8", U(u32::from(formats.q8))),
            ("EMIT_F32", U(u32::from(formats.f32))),
            ("HALVES_ONLY", U(u32::from(formats.halves_only))),
        ]
    }

    /// Returns the constants for half-precision activations for cooperative matrices, in launches of at least `from`
    /// rows.
    pub fn halves(&self, from: u32) -> Constants {
        if !self.facts.target.has_halves() {
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
    pub fn halves_at(&self, layout: Layout) -> u32 {
        (self.sizes.act_blocks * if layout.is_quantized() { 2 } else { 8 }) as u32
    }

    /// Returns the constants for the shapes of heads and pages, and the layer's place in pages.
    pub fn heads(&self, kv_slot: KvSlot) -> Constants {
        let (kv, Limits { block_size, kv_dtype, .. }) = (self.facts.kv, *self.facts.limits);
        let group = kv.groups[kv_slot.group];
        vec![
            ("HEADS", U(group.heads as u32)),
            ("KV_HEADS", U(group.kv_heads as u32)),
            ("DIM", U(group.head_dim as u32)),
            ("HEAD", U(group.unpadded_dim as u32)),
            ("APART", U(if group.is_latent { group.head_dim } else { group.unpadded_dim } as u32)),
            ("PAGE", U(block_size as u32)),
            ("PAGE_WORDS", U(page_words(kv, block_size, kv_dtype) as u32)),
            ("LAYER_SLOT_AT", U(pages::place(kv, kv_slot, block_size, kv_dtype).1 as u32)),
            ("SIXTEENS", U(u32::from(self.facts.few.is_some()))),
            ("KV_GROUP", U(kv_slot.group as u32)),
        ]
    }

    /// Returns the constants for the pages of a layer.
    pub fn stored(&self, kv_slot: KvSlot) -> Constants {
        let dtype = self.facts.limits.kv_dtype;
        let words = head_words(self.facts.group(kv_slot).head_dim, dtype);
        let mut constants = self.heads(kv_slot);
        constants.extend([
            ("QUANTS", U(u32::from(dtype.is_quantized()))),
            ("Q4", U(u32::from(dtype == paguro_backend::KvDtype::Q4))),
            ("HEAD_WORDS", U(words as u32)),
        ]);
        constants
    }

    /// Stores the source of a kernel that the device may not support, for inspection.
    pub fn show(&mut self, name: String, part: &Part) {
        self.shown.push((name, part.clone()));
    }

    /// Shows the variant of a kernel for the layout of V that `attend_few.wgsl` needs.
    pub fn show_for_few(&mut self, name: &str, part: &Part) {
        let knows_pages = part.constants.iter().any(|(name, _)| *name == "SIXTEENS");
        let Facts { target, kv, limits, .. } = self.facts;
        if target.as_hardware && knows_pages && few_works(kv, limits) {
            let of = |file| if V_WORDS.contains(&file) { V_HALVES[0] } else { file };
            let files: Vec<_> = part.files.iter().map(|&file| of(file)).collect();
            self.show(format!("{name}_few"), &Part::new(&files, for_few(&part.constants), vec![]));
        }
    }

    /// Returns the files that store V in half precision.
    pub fn v_store(&self) -> &'static [&'static str] {
        match self.facts.few {
            Some(_) => V_HALVES,
            None => V_WORDS,
        }
    }
}

/// Access to V in pages, in the layout for plain attention and in that for cooperative matrices.
const V_WORDS: &[&str] = wgsl!("v_words");
const V_HALVES: &[&str] = wgsl!("v_halves");

/// Returns the constants of kernels that access pages in the layout for `attend_few.wgsl`.
pub fn for_few(constants: &Constants) -> Constants {
    let is = |name: &str, value: Value| if name == "SIXTEENS" { U(1) } else { value };
    constants.iter().map(|&(name, value)| (name, is(name, value))).collect()
}

/// Returns activations under the names of their readers.
pub fn read_acts(acts: Acts) -> Slots {
    vec![("x_quants", Slot::Quants(acts)), ("x_scales", Slot::Scales(acts)), ("x_floats", Slot::Floats(acts))]
}

/// Returns activations under the names of their writers.
pub fn written_acts(acts: Acts) -> Slots {
    vec![
        ("acts_quants", Slot::Quants(acts)),
        ("acts_scales", Slot::Scales(acts)),
        ("acts_floats", Slot::Floats(acts)),
    ]
}

/// Returns the buffer of half-precision activations for matmuls with a layout.
pub fn half_acts(acts: Acts, layout: Layout) -> Slot {
    if layout.is_quantized() { Slot::Quants(acts) } else { Slot::Floats(acts) }
}
