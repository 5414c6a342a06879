//! Data of a sequence that its scheduler needs: its place in the queue, its service so far, and its rows.

use std::cmp::Reverse;

/// Order of the sequences of one tenant: priority, then waiting time, then age of the request, then branch. A sequence
/// keeps its rank while it runs and when it is preempted, so it is the first of its tenant to run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub priority: Reverse<i32>,
    pub seniority: u64,
    pub request: u64,
    pub branch: usize,
}

/// Place of a sequence in the queue, and the service that it has had.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SchedState {
    /// Priority of its request, or a higher one if it has waited long.
    pub priority: i32,
    /// Number of the sequence in the order of its tenant's queue.
    pub seniority: u64,
    /// The step before which it began to wait.
    pub waits_since: u64,
    /// The step in which it left the queue.
    pub runs_since: u64,
    /// Steps from then until all tokens that a preemption had lost were computed again, with those in which it had no rows.
    pub restoring_steps: u64,
    /// Rows of younger prompts of its tenant that were computed before its own.
    pub overtaken: usize,
    /// The last step in which it had rows.
    pub last_step: u64,
    /// Number of the last step that computed rows of this sequence, counted as in
    /// [`Stats::steps`](crate::Stats::steps), and the number of these rows.
    pub last_rows: (u64, usize),
}

impl SchedState {
    /// Returns the state of a new sequence of the same request that waits from now on.
    pub fn fork(&self) -> Self {
        Self { restoring_steps: 0, overtaken: 0, last_rows: (0, 0), ..*self }
    }
}

/// Rows of a sequence in the steps that are planned.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PlannedRows {
    /// Rows in the step that is planned last.
    pub granted: usize,
    /// Rows in all planned steps that are not computed yet. Granted rows are among them when their pages are reserved.
    pub rows: usize,
    /// The last ones of these that check drafted tokens.
    pub drafted: usize,
}
