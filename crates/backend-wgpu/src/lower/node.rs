//! Nodes: the launches of a step, as data. A node names what it computes and the slots that it reads and writes.

use paguro_backend::{
    Activation, DeltaRule, DeltaShape, DistanceBias, Experts, KvSlot, Latent, LayerEmbeds, Linear, MatrixId,
    Norm, PositionScale, QkNorm, ShortConv, Ssd, VectorId,
};

use super::{kernels::ExpertTiles, slot::Slot};
use crate::{layout::Layout, matrix::Order, plan::Tile};

/// Steps with the same nodes, by their number of rows: `from..to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowClass {
    /// Least rows.
    pub from: usize,
    /// Rows of the next class.
    pub to: usize,
}

impl RowClass {
    /// Steps of one row, where much of a launch's time is its latency.
    pub const ONE: Self = Self { from: 1, to: 2 };

    /// Returns true for steps of one row.
    pub fn is_one(self) -> bool {
        self == Self::ONE
    }

    /// Returns true for a step of `rows` rows.
    pub fn holds(self, rows: usize) -> bool {
        (self.from..self.to).contains(&rows)
    }
}

/// A launch.
#[derive(Clone, Debug)]
pub struct Node {
    /// The operation.
    pub kernel: Kernel,
    /// Formats of the activations that it writes, if it writes some.
    pub emits: Formats,
    /// Synchronization with the nodes before and after it.
    pub sync: Sync,
    /// Rows of the step for each of its rows.
    pub merged: usize,
}

/// Activations of matmuls, by their source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Acts {
    /// Those of attention, or of gate and up.
    Plain,
    /// Those of a norm.
    Normed,
}

/// Formats of activations. Those for cooperative matrices are written beside them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Formats {
    /// Eight bits.
    pub q8: bool,
    /// Floats.
    pub f32: bool,
    /// True if all readers use cooperative matrices, so that only activations for these are written.
    pub halves_only: bool,
}

/// Columns of a slot of rows: a buffer `[rows, stride]` from column `first` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The buffer.
    pub slot: Slot,
    /// Elements of its rows.
    pub stride: usize,
    /// First column.
    pub first: usize,
}

/// The operation of a node. `lower.rs` lists their kernels.
#[derive(Clone, Debug)]
pub enum Kernel {
    /// Rows of a table of embeddings, with those of token types, or of one of positions, which are added. Rows that a step gives
    /// have this many parts.
    Embed { table: MatrixId, scale: f32, is_of_positions: bool, types: Option<VectorId>, parts: usize },
    /// The first part of given rows as the residual stream, of a program without tokens.
    SetGiven,
    /// Addition of a part of given rows to the residual stream.
    AddGiven(usize),
    /// Embeddings for all layers.
    LayerEmbeds(Box<LayerEmbeds>),
    /// A norm of rows, as activations.
    Norm(NormRows),
    /// An operation on each of `width` elements of rows.
    MapRows { from: Span, to: Span, width: usize, map: RowMap },
    /// Activations in floats, as rows of `width` elements.
    Unpack { acts: Acts, to: Span, width: usize },
    /// Addition of a branch to rows of the residual stream or of another branch.
    AddBranch(AddBranch),
    /// A matmul of activations.
    Matmul(Matmul),
    /// The products of the next matmul's activations with A of adapters.
    Shrink(Matmul),
    /// A matmul of each row with the matrices of its experts.
    ExpertMatmul(ExpertMatmul),
    /// Norms of heads, rotation, queries, and K and V into pages.
    RopeStore(Box<RopeStore>),
    /// The same for a latent vector.
    StoreLatent(Box<Latent>),
    /// Activations of each head's queries for its absorbing matrix, and their rotated elements.
    LatentQueries(Box<Latent>),
    /// The transform of queries for quantized pages.
    HadamardQueries { kv: KvSlot, heads: usize },
    /// Pages of K, or of V, in the order of the block tables.
    Gather { kv: KvSlot, is_k: bool },
    /// Attention with one kind of tile.
    Attend(Attend),
    /// Merge of the partials of attention.
    Merge(Merge),
    /// The activation of a feed-forward network, as activations of a matmul.
    Activate(Activate),
    /// The choice of experts.
    Route(Box<Experts>),
    /// Rows by expert.
    RouteTiles(ExpertTiles),
    /// Places for the chosen experts of a layer with slots. With a router, the kernel first chooses the experts of a single row.
    PlaceExperts { pool: Pool, chooses: Option<Box<Experts>> },
    /// Copies of experts to their places.
    FillExperts(FillExperts),
    /// Activations in half precision by expert, of rows of `width` elements for weights in `layout`.
    GatherHalves { acts: Acts, layout: Layout, width: usize, tiles: ExpertTiles },
    /// The weighted sum of a row's experts.
    AddExperts(AddExperts),
    /// A short convolution, as activations.
    ShortConv(Box<ShortConv>),
    /// The state of a short convolution after the step.
    Keep(Box<ShortConv>),
    /// Queries, keys, values, decays and strengths of a delta rule, of which these are the inputs.
    DeltaInputs { delta: Box<DeltaRule>, a: Span, b: Span },
    /// A delta rule, or a scan.
    Delta(Heads),
    /// Norm and gate of a delta rule's results, as activations.
    DeltaNorm { delta: Box<DeltaRule>, z: Span },
    /// Values, steps and decays of a scan.
    SsdInputs { ssd: Box<Ssd>, d: Span },
    /// Skip connection, gate and norm of a scan's results, as activations.
    SsdNorm { ssd: Box<Ssd>, z: Span },
    /// The state of a delta rule or a scan after the step.
    KeepDelta { heads: Heads, convolution: paguro_backend::Convolution, mixed: Span },
}

/// A norm of rows; without a norm, rows stay as they are.
#[derive(Clone, Debug)]
pub struct NormRows {
    /// The norm.
    pub norm: Option<Norm>,
    /// The rows.
    pub rows: Span,
    /// Elements of a row.
    pub width: usize,
    /// Slot of normed rows, which are no activations then.
    pub to: Option<Slot>,
    /// The activations. Those of the residual stream have a factor, which matmuls apply.
    pub acts: Acts,
    /// A branch that is first normed and added to the stream; the sum is scaled.
    pub adds: Option<(Norm, f32)>,
    /// Results of experts that are first added to the stream.
    pub sums: Option<AddExperts>,
    /// True for rows with outputs, whose norms are stored.
    pub is_of_outputs: bool,
    /// True if the normed rows replace those of the residual stream.
    pub replaces: bool,
}

/// An operation on elements of rows.
#[derive(Clone, Copy, Debug)]
pub enum RowMap {
    /// The elements themselves.
    Copy,
    /// Adds them.
    Add,
    /// The mean of consecutive rows, scaled.
    Mean { rows: usize, scale: f32 },
    /// `x * scale + bias`
    Affine { scale: VectorId, bias: VectorId },
    /// An activation function.
    Activation(Activation),
    /// An activation function of gates, times the elements.
    Gated(Activation, Span),
    /// The nearest number between two.
    Clamp { min: f32, max: f32 },
}

/// `to = (to + scale * post_norm(from)) * out_scale`
#[derive(Clone, Copy, Debug)]
pub struct AddBranch {
    /// The branch; none only scales.
    pub from: Option<Slot>,
    /// The rows that it is added to.
    pub to: Slot,
    /// Norm of the branch.
    pub post_norm: Option<Norm>,
    /// Factor of the branch.
    pub scale: f32,
    /// Factor of the sum.
    pub out_scale: f32,
    /// True if the branch replaces the rows.
    pub writes: bool,
}

/// A matmul of activations with joined matrices.
#[derive(Clone, Debug)]
pub struct Matmul {
    /// Matrices of one layout.
    pub linears: Vec<Linear>,
    /// The order of their rows.
    pub order: Order,
    /// Activations.
    pub acts: Acts,
    /// Their state in a step of one row.
    pub input: Input,
    /// True if sums run in one order in steps of any number of rows, also with cooperative matrices.
    pub in_order: bool,
    /// Maximum rows without cooperative matrices, if it is more than that of the layout.
    pub few: u32,
    /// Index of its [site](super::Site), if adapters change it.
    pub site: Option<usize>,
    /// The results.
    pub out: Span,
    /// Operation on the results.
    pub epilogue: Epilogue,
}

/// State of the activations of a matmul. All but `Ready` are for steps of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Input {
    /// Complete, except for the factor of a norm, which is stored.
    Ready,
    /// Without the factor of a norm with this epsilon, which the kernel computes from sums of squares.
    Squares(f32),
    /// Floats, which the kernel quantizes.
    Floats,
}

/// Operation on the results of a matmul. All but `Store` and `Add` are fused by a rule.
#[derive(Clone, Debug)]
pub enum Epilogue {
    /// Stores them, scaled and capped.
    Store { scale: f32, cap: Option<f32> },
    /// Adds them to the residual stream, scaled.
    Add(f32),
    /// One row: adds them, and writes the activations of this norm without its factor.
    AddNorm(Norm),
    /// One row: rotates them, and stores queries, and K and V into pages.
    Rope(Box<RopeStore>),
    /// One row: computes floats for the next matmul from interleaved gates and inputs.
    Gate(Activation),
    /// One row: the same from gates, and inputs in another buffer.
    GateOf(Activation, Span),
    /// Cooperative matrices: computes activations in half precision, for weights in this layout.
    Activations(Activation, Layout),
}

impl Epilogue {
    /// Stores the results unchanged.
    pub const STORE: Self = Self::Store { scale: 1.0, cap: None };
}

/// A matmul of each row with the matrices of its experts.
#[derive(Clone, Debug)]
pub struct ExpertMatmul {
    /// Matrices of one layout, of all experts.
    pub linears: Vec<Linear>,
    /// The order of their rows.
    pub order: Order,
    /// Number of experts.
    pub count: usize,
    /// Experts of a row.
    pub used: usize,
    /// Activations.
    pub acts: Acts,
    /// Their state in a step of one row.
    pub input: Input,
    /// True if activations are those of rows, and not those of places.
    pub reads_rows: bool,
    /// The router, if the kernel also chooses the experts of its rows.
    pub chooses: Option<Box<Experts>>,
    /// The sum of the results, if the kernel also adds them to the residual stream.
    pub sums: Option<AddExperts>,
    /// Rows that share an expert; without tiles, each row by itself.
    pub tiles: Option<ExpertTiles>,
    /// Slots of the layer, if it has slots.
    pub pool: Option<Pool>,
    /// Number of the matmul in its layer.
    pub stack: usize,
    /// The results, by place.
    pub out: Span,
    /// Operation on the results.
    pub epilogue: Epilogue,
}

/// Slots for the experts of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Index of the layer.
    pub layer: usize,
    /// Number of experts.
    pub count: usize,
    /// Experts of a row.
    pub used: usize,
    /// Number of slots.
    pub slots: usize,
    /// True if rows may choose more experts than there are slots, so that the others are copied to the staging area.
    pub streams: bool,
}

/// Copies of a matmul's experts from the host's memory to their places.
#[derive(Clone, Debug)]
pub struct FillExperts {
    /// Slots of the layer.
    pub pool: Pool,
    /// Number of the matmul in its layer.
    pub stack: usize,
    /// Its matrices.
    pub linears: Vec<Linear>,
    /// The order of their rows.
    pub order: Order,
}

/// Norms of heads, rotation, and the places of queries, keys and values.
#[derive(Clone, Debug)]
pub struct RopeStore {
    /// Matrices of queries, keys and values. Without keys, the layer reads those of another one.
    pub linears: [Option<Linear>; 3],
    /// Results of matmuls.
    pub spans: [Span; 3],
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Norm of each head of V.
    pub v_norm: Option<Norm>,
    /// Index of the rotation.
    pub rope: Option<usize>,
    /// Multiplies queries by a function of their position.
    pub position_scale: Option<PositionScale>,
    /// Slot of k and v.
    pub kv: KvSlot,
    /// True if matmuls write neighbouring pairs together ([`Order::Together`]).
    pub is_together: bool,
}

/// Attention with one kind of tile.
#[derive(Clone, Copy, Debug)]
pub struct Attend {
    /// Scale of the scores.
    pub scale: f32,
    /// Cap of the scores.
    pub soft_cap: Option<f32>,
    /// Biases of the scores.
    pub distance_bias: Option<DistanceBias>,
    /// Slot of k and v; the group has the window.
    pub kv: KvSlot,
    /// The tile.
    pub tile: Tile,
    /// True if pages were gathered.
    pub is_gathered: bool,
    /// True if rows see other tokens than those before them.
    pub is_ranged: bool,
}

/// Merge of partials into activations.
#[derive(Clone, Copy, Debug)]
pub struct Merge {
    /// Slot of k and v.
    pub kv: KvSlot,
    /// One additional score per head.
    pub sinks: Option<VectorId>,
    /// True if the output has gates.
    pub is_gated: bool,
    /// Elements of a head that are a separate row, with latent attention.
    pub latent: Option<usize>,
}

/// `activation(gate) * up`, or without a gate `activation(up)`.
#[derive(Clone, Copy, Debug)]
pub struct Activate {
    /// The function.
    pub activation: Activation,
    /// Gates.
    pub gate: Option<Span>,
    /// Inputs.
    pub up: Span,
    /// True if the two alternate.
    pub in_turn: bool,
    /// Elements of a row.
    pub width: usize,
    /// Its rows.
    pub places: Places,
}

/// Rows of activations.
#[derive(Clone, Copy, Debug)]
pub enum Places {
    /// One for each row of the step.
    Rows,
    /// One for each row and one of its experts.
    Pairs { used: u32 },
    /// All places of tiles that have an expert.
    Tiles(ExpertTiles),
}

/// Results of experts and of the shared expert, added.
#[derive(Clone, Copy, Debug)]
pub struct AddExperts {
    /// Results: of pairs or places if they are `chosen`, otherwise of rows.
    pub results: Slot,
    /// True if results have the weights of chosen experts.
    pub is_weighted: bool,
    /// True if places are those of tiles.
    pub is_tiled: bool,
    /// Experts of a row.
    pub used: usize,
    /// Elements of a row.
    pub width: usize,
    /// True if there is a shared expert's result.
    pub has_shared: bool,
    /// True if that has a gate.
    pub has_output_gate: bool,
    /// The sum.
    pub out: Slot,
    /// Factor of the sum, if it is added to `out`.
    pub adds: Option<f32>,
}

/// Value heads of a delta rule or a scan.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Their sizes.
    pub shape: DeltaShape,
    /// True if value heads alternate between key heads.
    pub alternating: bool,
    /// True if updates do not depend on the state.
    pub scans: bool,
    /// Index of the layer's state.
    pub state: usize,
}

/// Synchronization of a node with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sync {
    /// Barriers, derived from the accesses.
    Barriers,
    /// Partials of attention pass to the merge by handoff.
    Partials,
    /// All words of a layer pass by handoff: the layer's index, and the node's place in it.
    Words(usize, Link),
    /// Low-rank products of adapters pass by handoff to the next matmul, in one of two buffers.
    Low(usize),
}

/// Place of a node in a layer of handoff.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Matmul of queries, keys and values, by its number in the layer.
    Queries(usize),
    /// Attention.
    Attend,
    /// The merge.
    Merge,
    /// The projection of attention.
    Project,
    /// Gate and up.
    GateUp,
    /// Down; true in the last layer.
    Down(bool),
    /// The head.
    Head,
}

impl Node {
    /// Creates a node with barriers.
    pub fn new(kernel: Kernel) -> Self {
        Self { kernel, emits: Formats::default(), sync: Sync::Barriers, merged: 1 }
    }

    /// Returns the activations that it reads, and the matrix that it multiplies.
    pub fn reads_acts(&self) -> Option<(Acts, Option<&Linear>)> {
        match &self.kernel {
            Kernel::Matmul(op) | Kernel::Shrink(op) => Some((op.acts, op.linears.first())),
            Kernel::ExpertMatmul(op) => Some((op.acts, op.linears.first())),
            Kernel::GatherHalves { acts, .. } | Kernel::Unpack { acts, .. } => Some((*acts, None)),
            _ => None,
        }
    }

    /// Returns the activations that it writes.
    pub fn writes_acts(&self) -> Option<Acts> {
        match &self.kernel {
            Kernel::Norm(op) => op.to.is_none().then_some(op.acts),
            Kernel::Matmul(Matmul { epilogue, .. }) | Kernel::ExpertMatmul(ExpertMatmul { epilogue, .. }) => {
                match epilogue {
                    Epilogue::AddNorm(_) => Some(Acts::Normed),
                    Epilogue::Gate(_) | Epilogue::GateOf(..) | Epilogue::Activations(..) => Some(Acts::Plain),
                    Epilogue::Store { .. } | Epilogue::Add(_) | Epilogue::Rope(_) => None,
                }
            }
            Kernel::Activate(_)
            | Kernel::Attend(_)
            | Kernel::Merge(_)
            | Kernel::LatentQueries(_)
            | Kernel::ShortConv(_)
            | Kernel::DeltaNorm { .. }
            | Kernel::SsdNorm { .. } => Some(Acts::Plain),
            _ => None,
        }
    }
}
