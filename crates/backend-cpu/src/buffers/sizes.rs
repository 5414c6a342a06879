//! Sizes of all buffers, for a program and the largest step.

use paguro_backend::{FeedForward, Limits, LoadError, Program};
use paguro_cpu_kernels::{
    attention::{SPLIT, partial_len},
    delta::DeltaScratch,
    quantize::{QuantBlock, row_blocks},
};

use super::{Buffers, ExpertBuffers, ExpertSizes, LatentBuffers, LatentSizes, RecurrentSizes, RowOpSizes};
use crate::{
    buffers::{MatmulInput, Shared},
    plan::{Heads, StepPlan},
    support::heads,
};

/// Rows whose logits are computed at once: bounds their memory for large vocabularies.
const LOGIT_ROWS: usize = 64;
/// Floats for partial attention of shared splits, at most: 16 MiB.
const PARTIAL_FLOATS: usize = 4 << 20;

/// Elements of [`Buffers`] and of the working memory of threads, for the largest step.
pub struct BufferSizes {
    /// Elements of the largest head.
    pub head_dim: usize,
    /// Largest dimensions of latent attention.
    latent: LatentSizes,
    /// Sizes of the ends of towers.
    pub row_ops: RowOpSizes,
    /// Elements of a row's embeddings for all layers.
    pub layer_embeds: usize,
    /// Cosines and sines of a rope and row, at most.
    pub rope_stride: usize,
    /// Largest dimensions of mixtures of experts.
    pub experts: ExpertSizes,
    /// Sizes of mixers with a state.
    pub recurrent: RecurrentSizes,
    /// Elements of gates of attention.
    attention_gate: usize,
    rows: usize,
    hidden: usize,
    /// Elements of a row of the stream, or of an embedding before it is joined.
    widest_x: usize,
    /// Elements of rows that the head projects.
    projected: usize,
    /// Elements of the widest row.
    pub widest: usize,
    /// Elements of the widest row of an expert.
    widest_expert: usize,
    /// Maximum number of partial results of a query with one split.
    pub partial_count: usize,
    /// Floats of the partial results of a tile.
    pub tile_partial: usize,
    q: usize,
    kv: usize,
    ffn: usize,
    rope_table: usize,
    partials: usize,
    logits: usize,
}

impl BufferSizes {
    /// Returns the sizes for a program and limits.
    pub fn new(program: &Program, limits: &Limits, threads: usize) -> Self {
        let rows = limits.max_rows;
        let heads = heads(program).unwrap_or_default();
        let most_of = |size: fn(&Heads) -> usize| heads.iter().map(size).max().unwrap_or(1);
        let (q, kv) = (most_of(Heads::q_width), most_of(Heads::kv_width));
        let head_dim = most_of(|heads| heads.dim);
        let tile_partial = most_of(|heads| StepPlan::tile_queries(heads.per_kv()) * partial_len(heads.dim));
        let partial_len = partial_len(head_dim);
        // All heads of all sequences could share all splits; a fixed amount of memory suffices for those that should.
        let splits = limits.max_context.div_ceil(SPLIT) * limits.max_sequences;
        let most = splits.saturating_mul(most_of(|heads| heads.queries));
        let partial_count = if threads > 1 { most.min(PARTIAL_FLOATS / partial_len) } else { 0 };
        let experts = ExpertSizes::of(program);
        let ffn = program.layers.iter().map(|layer| match &layer.ffn {
            FeedForward::Dense(dense) => dense.width,
            FeedForward::None | FeedForward::Experts(_) => experts.shared,
        });
        let embeds = program.layer_embeds();
        let ffn = ffn.chain(embeds.map(|embeds| embeds.width)).max().unwrap_or(0);
        let layer_embeds = embeds.map_or(0, |embeds| embeds.count * embeds.width);
        let rope_stride = program.ropes.iter().map(|rope| 2 * rope.frequencies.len()).max().unwrap_or(0);
        let hidden = program.hidden;
        let projection = program.head().and_then(|head| head.projection);
        let latent = LatentSizes::of(program);
        let recurrent = RecurrentSizes::of(program);
        let has_gate = program.attentions().any(|attention| attention.gate.is_some());
        Self {
            head_dim,
            latent,
            row_ops: RowOpSizes::of(program, rows),
            layer_embeds,
            rope_stride,
            experts,
            recurrent,
            attention_gate: if has_gate { rows * q } else { 0 },
            rows,
            hidden,
            widest_x: hidden.max(program.part_width()),
            projected: projection.map_or(0, |projection| limits.max_outputs * projection.width),
            widest: hidden
                .max(program.joined().map_or(0, |joined| 2 * joined.width))
                .max(ffn)
                .max(q)
                .max(experts.count)
                .max(experts.latent)
                .max(recurrent.widest())
                .max(latent.widest()),
            widest_expert: if experts.count > 0 { hidden.max(experts.width).max(experts.latent) } else { 0 },
            partial_count,
            tile_partial,
            q: rows * q,
            kv: rows * kv,
            ffn: rows * ffn,
            rope_table: program.ropes.len() * rows * rope_stride,
            partials: partial_count * partial_len,
            logits: match (program.head(), program.bidirectional) {
                (None, _) => 0,
                (Some(_), true) => program.vocab, // nobody wants logits of encoders
                (Some(_), false) => limits.max_outputs.clamp(1, LOGIT_ROWS) * program.vocab,
            },
        }
    }

    /// Returns the number of rows of experts.
    fn slots(&self) -> usize {
        self.rows * self.experts.used
    }

    fn input(rows: usize, width: usize) -> Result<MatmulInput, LoadError> {
        Ok(MatmulInput {
            quantized: Shared::new(rows * row_blocks(width), "quantized rows")?,
            float: Shared::new(rows * width, "rows")?,
            quantized_stride: row_blocks(width),
            float_stride: width,
        })
    }

    /// # Errors
    /// [`LoadError::OutOfMemory`]
    pub fn allocate(&self) -> Result<Buffers, LoadError> {
        let floats = Shared::<f32>::new;
        let (slots, stream) = (self.slots(), self.rows * self.hidden);
        Ok(Buffers {
            x: floats(self.rows * self.widest_x, "the residual stream")?,
            branch_outputs: [floats(stream, "outputs of branches")?, floats(stream, "outputs of branches")?],
            input: Self::input(self.rows, self.widest)?,
            q: floats(self.q, "queries")?,
            k: floats(self.kv, "keys")?,
            v: floats(self.kv, "values")?,
            attended: floats(self.q, "attention")?,
            attention_gate: floats(self.attention_gate, "gates of attention")?,
            gate: floats(self.ffn, "gates")?,
            up: floats(self.ffn, "ups")?,
            rope_table: floats(self.rope_table, "rotations")?,
            partials: floats(self.partials, "partial attention")?,
            logits: floats(self.logits, "logits")?,
            projected: floats(self.projected, "projected rows")?,
            row_ops: self.row_ops.allocate()?,
            recurrent: self.recurrent.allocate(self.rows)?,
            layer_embeds: floats(self.rows * self.layer_embeds, "embeddings for layers")?,
            latent: LatentBuffers {
                rank: floats(self.rows * self.latent.rank, "ranks of queries")?,
                query: floats(self.rows * self.latent.query, "queries of latent attention")?,
                input: Self::input(self.rows * self.latent.heads, self.latent.input)?,
                heads: floats(
                    self.rows * self.latent.heads * self.latent.output,
                    "heads of latent attention",
                )?,
            },
            experts: ExpertBuffers {
                latent: floats(self.rows * self.experts.latent, "rows of experts")?,
                latent_out: floats(if self.experts.latent > 0 { stream } else { 0 }, "sums of experts")?,
                logits: floats(self.rows * self.experts.count, "a router")?,
                output_gate: floats(self.rows, "a shared expert")?,
                ids: Shared::new(slots, "chosen experts")?,
                weights: floats(slots, "chosen experts")?,
                input: Self::input(slots, self.widest_expert)?,
                gate: floats(slots * self.experts.width, "experts")?,
                up: floats(slots * self.experts.width, "experts")?,
                out: floats(
                    if slots > 0 { slots * self.hidden.max(self.experts.latent) } else { 0 },
                    "experts",
                )?,
            },
        })
    }

    /// Returns the bytes of all buffers, and of the working memory of `threads` threads.
    fn bytes(&self, threads: usize) -> u64 {
        /// A thread's strips of weights, its scores and its stack, as far as it gets resident.
        const THREAD: usize = 512 << 10;
        let slots = self.slots();
        let shared = self.rows * (2 * self.hidden + self.widest_x)
            + 2 * (self.q + self.kv + self.ffn)
            + self.rows * (self.widest + self.experts.count + 1)
            + slots
                * (2 * self.experts.width + self.widest_expert + self.hidden.max(self.experts.latent) + 2)
            + self.rows * (self.experts.latent + if self.experts.latent > 0 { self.hidden } else { 0 })
            + self.rows * self.recurrent.floats()
            + self.attention_gate
            + self.rows * self.layer_embeds
            + self.rows * self.latent.floats()
            + self.row_ops.floats()
            + self.rope_table
            + self.partials
            + self.logits
            + self.projected;
        let (key_dim, value_dim) = self.recurrent.head();
        let per_thread = 2 * self.tile_partial
            + self.widest.max(self.row_ops.widest)
            + self.experts.sum
            + self.layer_embeds
            + self.recurrent.conv()
            + DeltaScratch::floats(key_dim, value_dim);
        let floats = (shared + threads * per_thread) * size_of::<f32>();
        let blocks = self.rows * row_blocks(self.widest)
            + slots * row_blocks(self.widest_expert)
            + self.rows * self.latent.heads * row_blocks(self.latent.input)
            + self.row_ops.blocks();
        (floats + blocks * size_of::<QuantBlock>() + threads * THREAD) as u64
    }
}

/// Returns the number of bytes that a load allocates beside weights and pages.
pub fn buffer_bytes(program: &Program, limits: &Limits, threads: usize) -> u64 {
    match heads(program) {
        Ok(_) => BufferSizes::new(program, limits, threads).bytes(threads),
        // No such program is loaded.
        Err(_) => 0,
    }
}
