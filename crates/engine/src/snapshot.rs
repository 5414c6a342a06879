//! Snapshot of all pages and sequences, made between two steps on request. The engine stores only one pair of numbers
//! per sequence for it, so it has no cost otherwise.

use paguro_backend::KernelCount;

use crate::{Stats, scheduler::Scheduler, sequence::Sequence};

/// State of every page and sequence. A page that is in no block table and not cached is free.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The counters of the same moment.
    pub stats: Stats,
    /// Most rows of a step: its token budget.
    pub max_rows: usize,
    /// Most sequences that run at the same time.
    pub max_sequences: usize,
    /// Tokens in a page.
    pub block_size: usize,
    /// The running sequences and then the waiting ones, both in the order in which they are served.
    pub sequences: Vec<SequenceSnapshot>,
    /// Pages that only the prefix cache holds, in ascending order. Page numbers begin at 1.
    pub cached: Vec<u32>,
    /// Pictures, if the model sees.
    pub pictures: Option<PicturesSnapshot>,
    /// Kernel statistics, if requested.
    pub kernels: Option<Vec<KernelCount>>,
}

/// Pictures that sequences wait for, and those whose rows are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PicturesSnapshot {
    /// Pictures that sequences wait for, without the one that is encoded.
    pub waiting: usize,
    /// True if one is being encoded.
    pub is_encoding: bool,
    /// Pictures whose rows are kept.
    pub kept: usize,
    /// Their rows.
    pub kept_rows: usize,
    /// Bytes of these rows.
    pub kept_bytes: u64,
    /// Bytes beyond which rows are dropped.
    pub most_bytes: u64,
}

/// State of one sequence. A request whose prompt is not computed yet is one sequence for all branches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceSnapshot {
    /// Number of its request, counted from the start of the engine.
    pub request: u64,
    /// First branch that it represents.
    pub branch: usize,
    /// Number of branches that it represents.
    pub branches: usize,
    /// True if it runs, false if it waits.
    pub running: bool,
    /// True if it ran before and lost its pages to others.
    pub preempted: bool,
    /// The priority that it has now.
    pub priority: i32,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that the prefix cache had when it started.
    pub cached_tokens: usize,
    /// Tokens whose K and V are in its pages.
    pub computed: usize,
    /// Tokens of the answer so far.
    pub generated: usize,
    /// Most tokens of the answer.
    pub max_tokens: usize,
    /// Its rows in the last step.
    pub rows: usize,
    /// Pages of its block tables, in order, one table after the other.
    pub pages: Vec<u32>,
}

impl Snapshot {
    pub(crate) fn new(
        scheduler: &Scheduler,
        pictures: Option<PicturesSnapshot>,
        kernels: Option<Vec<KernelCount>>,
    ) -> Self {
        let stats = scheduler.stats();
        let limits = scheduler.limits();
        let sequences = scheduler.sequences();
        Self {
            max_rows: limits.max_rows,
            max_sequences: limits.max_sequences,
            block_size: limits.block_size,
            sequences: sequences
                .map(|(sequence, running)| SequenceSnapshot::new(sequence, running, stats.steps))
                .collect(),
            cached: scheduler.cached_pages().map(|page| page.0).collect(),
            pictures,
            kernels,
            stats,
        }
    }
}

impl SequenceSnapshot {
    fn new(sequence: &Sequence, running: bool, step: u64) -> Self {
        let (last_step, rows) = sequence.sched.last_rows;
        Self {
            request: sequence.request.id,
            branch: sequence.branches.start,
            branches: sequence.branches.len(),
            running,
            preempted: !running && sequence.prefix.cached_tokens.is_some(),
            priority: sequence.sched.priority,
            prompt_tokens: sequence.tokens.prompt(),
            cached_tokens: sequence.prefix.cached_tokens.unwrap_or(0),
            computed: sequence.kv.computed,
            generated: sequence.tokens.generated(),
            max_tokens: sequence.request.max_tokens,
            rows: if running && last_step == step { rows } else { 0 },
            pages: sequence.kv.held_pages().map(|page| page.0).collect(),
        }
    }
}
