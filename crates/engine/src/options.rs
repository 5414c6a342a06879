//! Options of an engine, and the conversion of the page budget to a number of pages.

use std::{sync::Arc, time::Duration};

use paguro_backend::{AttentionMode, Backend, Capacity, KvDtype, Limits, MemoryPlan, Program, Weights};
use paguro_model::Vision;

use crate::{
    AdapterLimits, DiskCache, DraftModel, EngineError, EventSink, FailureSink, HostMemory,
    encoder::most_rows,
    layout::{BlockLayout, Checkpoints},
    states::States,
};

/// Options of an engine. The defaults suit one machine that serves a few conversations.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Tokens in a page.
    pub block_size: usize,
    /// Budget of pages.
    pub pages: PageBudget,
    /// Maximum tokens of a sequence, prompt and answer together; `None` for the context that the model was loaded for.
    /// The page budget limits it further: see [`Handle::max_context`](crate::Handle::max_context).
    pub max_context: Option<usize>,
    /// Maximum rows of a step. Decoding sequences get one row each; prompts get the rest.
    pub max_batch_tokens: usize,
    /// Maximum rows of a step of an encoder's texts, unless a single one has more; `None` for as many as the device computes at full
    /// speed, within an eighth of its memory, but no fewer than [`max_batch_tokens`](EngineOptions::max_batch_tokens). With few tokens
    /// in each text, a step may have more than [`max_sequences`](EngineOptions::max_sequences) of them.
    pub encoder_tokens: Option<usize>,
    /// Maximum time of a step that computes a part of a prompt beside decoding sequences. The length of the part is
    /// chosen by the times of earlier steps. Without decoding sequences, a step may take four times as long.
    pub step_time: Duration,
    /// Maximum number of running sequences; each branch of a request is one. At most `max_batch_tokens`. If there are
    /// more, tenants get equal shares, and so do the requests of each tenant.
    pub max_sequences: usize,
    /// Prompt tokens scored or embedded in one step ([`Request::score_prompt_from`](crate::Request::score_prompt_from),
    /// [`Request::embedding`](crate::Request::embedding)). Each costs a row of logits in the backend's memory.
    pub max_scores: usize,
    /// Requests that wait to run; the next one is refused with [`SubmitError::QueueFull`](crate::SubmitError).
    pub queue_capacity: usize,
    /// Maximum prompt tokens of waiting requests. A request beyond it is refused with
    /// [`SubmitError::QueueTokensFull`](crate::SubmitError), unless the queue is empty. `None` for no limit.
    pub queue_tokens: Option<usize>,
    /// Number of steps after which a waiting request gets the highest priority among the waiting ones, which prevents
    /// starvation.
    pub max_wait_steps: u64,
    /// True if answers are drafted. Tokens do not depend on it. See [`DraftOptions`](crate::DraftOptions) for the options of
    /// a request.
    pub speculate: bool,
    /// A model that drafts answers, beside the texts of requests; it is not loaded unless [`EngineOptions::speculate`]. A head that
    /// the device does not run is not used; see [`Handle::draft_problem`](crate::Handle::draft_problem).
    pub draft: Option<Arc<DraftModel>>,
    /// Number of tokens that the model drafts in every step, see [`DraftOptions::of_model`](crate::DraftOptions::of_model). `None` lets
    /// the engine choose the source and the length of each draft.
    pub draft_depth: Option<usize>,
    /// True if blocks stay in the prefix cache after their sequence has ended.
    pub prefix_cache: bool,
    /// A store on disk that outlives the engine; `None` for pages in memory only. It requires the prefix cache.
    pub disk: Option<DiskCache>,
    /// Memory of the host for blocks that are evicted from the device. `None` drops them, which is right where the device is the
    /// host. It requires the prefix cache.
    pub host: Option<Arc<HostMemory>>,
    /// Receiver of events of the prefix cache and its tiers, for routers.
    pub events: Option<EventSink>,
    /// Receiver of the first of several failed steps in a row, and of the engine's end by a defect.
    pub failures: Option<FailureSink>,
    /// If more than this fraction of the pages is in use or cached, unused cached blocks are evicted, least recently
    /// used first, ...
    pub cache_high_water: f32,
    /// ... down to this fraction. Both at `1` evict only on demand.
    pub cache_low_water: f32,
    /// Type of stored K and V. It is the same for all pages of an engine, so keys of the prefix cache do not contain
    /// it.
    pub kv_dtype: KvDtype,
    /// Paged, or the reference way.
    pub attention: AttentionMode,
    /// Order in which free pages are allocated.
    pub page_order: PageOrder,
    /// Bytes of rows of pictures that are kept for later turns and for sequences that were preempted.
    pub encoder_cache: u64,
    /// Most rows of a picture, for models whose pictures have different numbers; `None` for the model's. Memory is planned for it.
    pub max_image_tokens: Option<usize>,
    /// Limits of adapters.
    pub adapters: AdapterLimits,
    /// Slots for experts in each layer, see [`Limits::expert_slots`].
    pub expert_slots: Option<usize>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            block_size: 32,
            pages: PageBudget::Auto,
            max_context: None,
            max_batch_tokens: 512,
            encoder_tokens: None,
            step_time: Duration::from_millis(100),
            max_sequences: 64,
            max_scores: 128,
            queue_capacity: 1024,
            queue_tokens: None,
            max_wait_steps: 1000,
            speculate: true,
            draft: None,
            draft_depth: None,
            prefix_cache: true,
            disk: None,
            host: None,
            events: None,
            failures: None,
            cache_high_water: 1.0,
            cache_low_water: 1.0,
            kv_dtype: KvDtype::F16,
            attention: AttentionMode::Paged,
            page_order: PageOrder::InOrder,
            encoder_cache: 256 << 20,
            max_image_tokens: None,
            adapters: AdapterLimits::default(),
            expert_slots: None,
        }
    }
}

/// Memory budget of K and V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageBudget {
    /// One sequence of the longest context, or up to four of them within 32768 tokens in total, with the checkpoints of
    /// their states; at most half of the device's memory besides weights and buffers.
    Auto,
    /// Enough for this many tokens without releases of windows, and for the checkpoints of their states if these fit
    /// into half of the device's memory besides weights and buffers.
    Tokens(usize),
    /// At most this many bytes.
    Bytes(u64),
    /// This many pages, the scratch page not counted.
    Pages(usize),
}

/// Order of free pages; the first free page in this order is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageOrder {
    /// By number: a sequence that runs alone has contiguous pages.
    InOrder,
    /// Pseudorandom, for measuring the worst case of paging.
    Scattered {
        /// Seed of the order.
        seed: u64,
    },
}

/// Maximum tokens of [`PageBudget::Auto`] for more than one sequence.
const AUTO_TOKENS: usize = 32_768;
/// Tokens of texts with which a step of an encoder has as many texts as it may.
const SHORT_TEXT: usize = 32;
/// Checkpoints that budgets in tokens have room for beside those at intervals: at the ends of the last prompts and answers.
const SHORT_CHECKPOINTS: usize = 4;

impl EngineOptions {
    /// Checks all options and computes the derived numbers.
    pub(crate) fn resolve(
        &self,
        backend: &dyn Backend,
        program: &Program,
        weights: &Weights,
        vision: Option<&Vision>,
        model_context: usize,
    ) -> Result<Resolved, EngineError> {
        self.check()?;
        let max_context = self.max_context.unwrap_or(model_context);
        if !(1..=model_context).contains(&max_context) {
            let problem =
                format!("is {max_context}, but the model was loaded for 1 to {model_context} tokens");
            return Err(invalid("max_context", problem));
        }
        let step_tokens = self.step_tokens(backend, program, max_context);
        // All rows of a text are in one step.
        let max_rows = if program.bidirectional { step_tokens.max(max_context) } else { step_tokens };
        // A picture whose rows see each other is in one step, beside all that decode.
        let span =
            vision.filter(|_| program.has_spans()).map(|vision| most_rows(vision, self.max_image_tokens));
        let max_rows = max_rows.max(span.map_or(0, |span| span.saturating_add(self.max_sequences)));
        let mut layout = BlockLayout::new(program, self.block_size, max_rows);
        let checkpoint_pages = backend.checkpoint_pages(program, self.block_size, self.kv_dtype);
        if checkpoint_pages > 0 && self.prefix_cache {
            layout.checkpoints = Some(layout.checkpoints_of(checkpoint_pages));
        }
        let for_tokens = |tokens: usize| layout.blocks(tokens).saturating_mul(layout.groups());
        let draft = self.draft_model(program);
        let mut page_bytes = backend.page_bytes(program, self.block_size, self.kv_dtype).max(1) as u64;
        let max_sequences = match program.bidirectional {
            true => self.max_sequences.max(max_rows / SHORT_TEXT),
            false => self.places(backend, program, weights),
        };
        let states = if program.state.is_empty() { 0 } else { States::slots_for(max_sequences) };
        let has_head = draft.is_some_and(|draft| draft.shared.is_some());
        let limits = |pages: usize, max_context: usize| Limits {
            block_size: self.block_size,
            pages,
            max_rows,
            max_sequences,
            // One row of a prompt may need a score and an embedding.
            max_outputs: max_sequences
                + if layout.is_whole { max_rows } else { self.max_scores.max(2) }
                + if has_head { max_rows } else { 0 },
            max_context,
            states,
            kv_dtype: self.kv_dtype,
            attention: self.attention,
            expert_slots: self.expert_slots,
        };
        let checkpoints_for = |tokens: usize| {
            let pages = |checkpoints: Checkpoints| {
                checkpoints.pages.saturating_mul(tokens / checkpoints.interval + SHORT_CHECKPOINTS)
            };
            layout.checkpoints.map_or(0, pages)
        };
        if let Some(draft) = draft {
            page_bytes += draft.bytes_per_page(backend, &limits(1, max_context), layout.groups());
        }
        let half_of_rest = || {
            let mut fixed = backend.plan(program, weights, &limits(0, max_context)).fixed();
            if let Some(draft) = draft {
                fixed = fixed.saturating_add(draft.plan(backend, &limits(1, max_context), &layout).fixed());
            }
            let rest = backend.capacity().bytes_free.saturating_sub(fixed);
            usize::try_from(rest / 2 / page_bytes).unwrap_or(usize::MAX)
        };
        let usable = match self.pages {
            PageBudget::Pages(pages) => pages,
            PageBudget::Tokens(tokens) => {
                let pages = for_tokens(tokens);
                let more = checkpoints_for(tokens);
                if more == 0 { pages } else { pages.saturating_add(more).min(half_of_rest()).max(pages) }
            }
            PageBudget::Bytes(bytes) => {
                usize::try_from(bytes / page_bytes).unwrap_or(usize::MAX).saturating_sub(1)
            }
            // The rows of each step in flight, and a page that each sequence fills in part.
            PageBudget::Auto if layout.is_whole => {
                let pages = layout.blocks(max_rows).saturating_mul(backend.lanes(program));
                let pages = pages.saturating_add(max_sequences);
                pages.saturating_mul(layout.groups()).min(half_of_rest())
            }
            PageBudget::Auto => {
                let one = layout.peak_of_all(max_context);
                let four = max_context.saturating_mul(4).min(AUTO_TOKENS);
                let checkpoints = checkpoints_for(max_context.max(four));
                one.max(for_tokens(four)).saturating_add(checkpoints).min(half_of_rest())
            }
        };
        if usable >= u32::MAX as usize {
            return Err(invalid("pages", format!("{usable} pages are more than can be numbered")));
        }
        layout.checkpoints = layout.checkpoints.filter(|checkpoints| checkpoints.pages <= usable);
        let max_context = layout.longest(usable, max_context);
        if max_context == 0 {
            let needed = layout.peak_of_all(1);
            return Err(EngineError::TooFewPages { pages: usable, needed, page_bytes });
        }
        let limits = limits(usable + 1, max_context);
        Ok(Resolved { limits, step_tokens, layout })
    }

    /// Returns the tokens of a step, unless a single text of an encoder has more.
    fn step_tokens(&self, backend: &dyn Backend, program: &Program, max_context: usize) -> usize {
        if !program.bidirectional {
            return self.max_batch_tokens;
        }
        if let Some(tokens) = self.encoder_tokens {
            return tokens.max(1);
        }
        let Capacity { step_rows, bytes_free, .. } = backend.capacity();
        let buffers = |rows: usize| {
            let max_rows = rows.max(max_context);
            let max_sequences = self.max_sequences.max(max_rows / SHORT_TEXT);
            let limits = Limits {
                block_size: self.block_size,
                pages: 1,
                max_rows,
                max_sequences,
                max_outputs: max_sequences + max_rows,
                max_context,
                states: 0,
                kv_dtype: self.kv_dtype,
                attention: self.attention,
                expert_slots: self.expert_slots,
            };
            backend.buffer_bytes(program, &limits)
        };
        let mut tokens = step_rows;
        while tokens > self.max_batch_tokens && buffers(tokens) > bytes_free / 8 {
            tokens /= 2;
        }
        tokens.max(self.max_batch_tokens)
    }

    /// Returns the model that drafts beside a program, if it is used.
    pub(crate) fn draft_model(&self, program: &Program) -> Option<&DraftModel> {
        self.draft.as_deref().filter(|_| self.speculate && !program.bidirectional)
    }

    /// Returns the maximum number of running sequences: the setting, limited for models with states to those whose
    /// states fit into half of the memory besides the weights.
    fn places(&self, backend: &dyn Backend, program: &Program, weights: &Weights) -> usize {
        let state_bytes = backend.state_bytes(program) as u64;
        if state_bytes == 0 {
            return self.max_sequences;
        }
        let held = weights.matrices.iter().map(|matrix| backend.device_layout(matrix).bytes as u64).sum();
        let fit = backend.capacity().bytes_free.saturating_sub(held) / 2 / state_bytes;
        let fit = usize::try_from(fit).unwrap_or(usize::MAX).saturating_sub(1);
        self.max_sequences.min(fit.max(1))
    }

    fn check(&self) -> Result<(), EngineError> {
        for (option, value) in [
            ("block_size", self.block_size),
            ("max_batch_tokens", self.max_batch_tokens),
            ("max_sequences", self.max_sequences),
            ("max_scores", self.max_scores),
            ("queue_capacity", self.queue_capacity),
        ] {
            if value == 0 {
                return Err(invalid(option, "must be at least 1"));
            }
        }
        if self.max_sequences > self.max_batch_tokens {
            let problem = format!(
                "is {}, but a step has only max_batch_tokens = {} rows and every running sequence needs one",
                self.max_sequences, self.max_batch_tokens
            );
            return Err(invalid("max_sequences", problem));
        }
        if !(0.0..=1.0).contains(&self.cache_high_water) {
            return Err(invalid("cache_high_water", "must be a fraction between 0 and 1"));
        }
        if !(0.0..=self.cache_high_water).contains(&self.cache_low_water) {
            return Err(invalid("cache_low_water", "must be a fraction between 0 and cache_high_water"));
        }
        Ok(())
    }
}

fn invalid(option: &'static str, problem: impl Into<String>) -> EngineError {
    EngineError::InvalidOption { option, problem: problem.into() }
}

/// Memory and limits of an engine, computed before anything is loaded.
#[derive(Clone, Debug)]
pub struct EnginePlan {
    /// Bytes on the device.
    pub memory: MemoryPlan,
    /// Maximum tokens of a sequence: the setting, or the capacity of the pages.
    pub max_context: usize,
    /// Pages that sequences can use.
    pub pages: usize,
    /// Bytes of one of them, with those of a model that drafts for as many tokens.
    pub page_bytes: u64,
    /// Bytes of the states of one sequence, beside its pages.
    pub state_bytes: u64,
    /// Bytes of the pages of a checkpoint, a copy of these states in the prefix cache; 0 if there are none.
    pub checkpoint_bytes: u64,
    /// Tokens from one checkpoint to the next while a prompt is computed; 0 if there are none.
    pub checkpoint_interval: usize,
    /// Maximum number of running sequences: the setting, or the number of states.
    pub max_sequences: usize,
    /// Slots for experts: the setting.
    pub expert_slots: Option<usize>,
    layout: BlockLayout,
}

impl EnginePlan {
    /// Returns the number of bytes of the pages that one sequence of `tokens` tokens needs when it runs alone.
    pub fn kv_for(&self, tokens: usize) -> u64 {
        (self.layout.peak_of_all(tokens) as u64 + 1).saturating_mul(self.page_bytes)
    }

    /// Returns the maximum number of tokens of a sequence in pages of `bytes` bytes, if nothing else bounds them.
    pub fn longest_in(&self, bytes: u64) -> usize {
        let pages = usize::try_from(bytes / self.page_bytes.max(1)).unwrap_or(usize::MAX).saturating_sub(1);
        self.layout.longest(pages, (u32::MAX / 2) as usize)
    }
}

impl EnginePlan {
    /// Adds the memory of a model that drafts beside a model with these limits.
    pub(crate) fn add_draft(
        &mut self,
        draft: &DraftModel,
        backend: &dyn Backend,
        limits: &Limits,
        layout: &BlockLayout,
    ) {
        let MemoryPlan { weights, kv, states, buffers, host } = draft.plan(backend, limits, layout);
        let memory = &mut self.memory;
        memory.weights = memory.weights.saturating_add(weights);
        memory.kv = memory.kv.saturating_add(kv);
        memory.states = memory.states.saturating_add(states);
        memory.buffers = memory.buffers.saturating_add(buffers);
        memory.host = memory.host.saturating_add(host);
        self.page_bytes += draft.bytes_per_page(backend, limits, layout.groups());
    }
}

/// Options with every number settled.
#[derive(Clone, Debug)]
pub(crate) struct Resolved {
    pub limits: Limits,
    /// Tokens of a step, unless a single text of an encoder has more.
    pub step_tokens: usize,
    pub layout: BlockLayout,
}

impl Resolved {
    /// Returns the memory and limits that these options lead to.
    pub fn plan(self, backend: &dyn Backend, program: &Program, weights: &Weights) -> EnginePlan {
        let Self { limits, step_tokens: _, layout } = self;
        let page_bytes = backend.page_bytes(program, limits.block_size, limits.kv_dtype) as u64;
        let pages = backend.checkpoint_pages(program, limits.block_size, limits.kv_dtype);
        let checkpoints = (pages > 0).then(|| layout.checkpoints_of(pages));
        EnginePlan {
            checkpoint_bytes: checkpoints.map_or(0, |checkpoints| checkpoints.pages as u64 * page_bytes),
            checkpoint_interval: checkpoints.map_or(0, |checkpoints| checkpoints.interval),
            memory: backend.plan(program, weights, &limits),
            max_context: limits.max_context,
            pages: limits.pages - 1,
            state_bytes: backend.state_bytes(program) as u64,
            max_sequences: limits.max_sequences,
            expert_slots: limits.expert_slots,
            page_bytes,
            layout,
        }
    }
}
