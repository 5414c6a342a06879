//! Statistics of the engine.

use std::time::Duration;

use crate::{BlockSet, DiskStats, HostStats};

/// Statistics after a step. Gauges are current values; counters count since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Waiting sequences, including preempted ones. A request whose prompt is not computed yet is one sequence for all
    /// branches.
    pub waiting: usize,
    /// Sequences that run.
    pub running: usize,
    /// Pages that sequences can use.
    pub pages_total: usize,
    /// Pages in block tables of sequences.
    pub pages_used: usize,
    /// Pages that only the prefix cache holds.
    pub pages_cached: usize,
    /// Slots for the states of sequences; none if the model has no states.
    pub states_total: usize,
    /// Slots of states in use.
    pub states_used: usize,
    /// Copies of states in the prefix cache. Their pages are cached ones.
    pub checkpoints: usize,
    /// Blocks of the prefix cache on the device, in memory of the host, and those on the disk that events have reported.
    pub blocks: [BlockSet; 3],
    /// Steps so far.
    pub steps: u64,
    /// Steps that were planned and submitted while the device computed the one before.
    pub steps_ahead: u64,
    /// Steps that failed.
    pub failed_steps: u64,
    /// Rows computed: prompt tokens and generated ones, some of them again after a preemption.
    pub rows: u64,
    /// Tokens sampled.
    pub tokens: u64,
    /// Tokens of the prompts of requests that have started.
    pub prompt_tokens: u64,
    /// Tokens that were looked up in the prefix cache: those of a prompt at its start, and those of a sequence that
    /// continues after a preemption.
    pub prefix_query_tokens: u64,
    /// Looked-up tokens found in the prefix cache.
    pub prefix_hit_tokens: u64,
    /// The host tier of the prefix cache.
    pub host: HostStats,
    /// The disk tier of the prefix cache.
    pub disk: DiskStats,
    /// Cached pages that were evicted for other sequences or to stay below the water mark.
    pub evictions: u64,
    /// Sequences that lost their place or their pages to others and went back to the queue.
    pub preemptions: u64,
    /// Pages copied because a branch wrote one that it shared.
    pub page_copies: u64,
    /// Rows of the last step.
    pub last_rows: usize,
    /// Sequences of the last step.
    pub last_sequences: usize,
    /// Rows of all steps.
    pub step_rows: Sizes,
    /// Sequences of all steps: the batch size.
    pub step_sequences: Sizes,
    /// Durations of steps.
    pub step_times: StepTimes,
    /// Drafts that were checked: sequences with one, of all steps.
    pub drafts: u64,
    /// Their tokens.
    pub draft_tokens: u64,
    /// Tokens of drafts that were accepted.
    pub accepted_tokens: u64,
    /// Time that drafts have saved, in nanoseconds: the expected time of steps without drafts for as many tokens, less that
    /// of the steps that checked them, and of a model that drafted them. Negative if it was longer.
    pub draft_nanoseconds: i64,
    /// Time of a model that drafts, in nanoseconds.
    pub draft_model_nanoseconds: u64,
    /// Masks of grammars computed, failed ones included.
    pub masks: u64,
    /// Processor time of these computations, in nanoseconds, of all threads together.
    pub mask_nanoseconds: u64,
    /// Pictures of requests that have started.
    pub pictures: u64,
    /// Pictures whose rows the vision tower has computed.
    pub encoded_pictures: u64,
    /// Pictures whose rows were found in the encoder's cache.
    pub encoder_cache_hits: u64,
    /// Time of the vision tower, in nanoseconds.
    pub encoder_nanoseconds: u64,
    /// Parts of this time, without pauses at their ends.
    pub encoder_times: EncoderTimes,
}

/// Time of pictures in a vision tower.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncoderTimes {
    /// Patches and positions, made by the host from decoded pixels.
    pub patches: Duration,
    /// Submission of steps, and waiting for them.
    pub steps: Duration,
    /// Reading of rows.
    pub rows: Duration,
}

impl EncoderTimes {
    /// Returns the sums.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            patches: self.patches + other.patches,
            steps: self.steps + other.steps,
            rows: self.rows + other.rows,
        }
    }
}

impl Stats {
    /// Returns the number of free pages.
    pub fn pages_free(&self) -> usize {
        self.pages_total - self.pages_used - self.pages_cached
    }

    /// Returns the sums of the numbers of two engines. Sets of blocks are of no use as sums, and are empty.
    pub(crate) fn and(self, other: Self) -> Self {
        Self {
            waiting: self.waiting + other.waiting,
            running: self.running + other.running,
            pages_total: self.pages_total + other.pages_total,
            pages_used: self.pages_used + other.pages_used,
            pages_cached: self.pages_cached + other.pages_cached,
            states_total: self.states_total + other.states_total,
            states_used: self.states_used + other.states_used,
            checkpoints: self.checkpoints + other.checkpoints,
            blocks: Default::default(),
            steps: self.steps + other.steps,
            steps_ahead: self.steps_ahead + other.steps_ahead,
            failed_steps: self.failed_steps + other.failed_steps,
            rows: self.rows + other.rows,
            tokens: self.tokens + other.tokens,
            prompt_tokens: self.prompt_tokens + other.prompt_tokens,
            prefix_query_tokens: self.prefix_query_tokens + other.prefix_query_tokens,
            prefix_hit_tokens: self.prefix_hit_tokens + other.prefix_hit_tokens,
            host: self.host.and(other.host),
            disk: self.disk.and(other.disk),
            evictions: self.evictions + other.evictions,
            preemptions: self.preemptions + other.preemptions,
            page_copies: self.page_copies + other.page_copies,
            last_rows: self.last_rows + other.last_rows,
            last_sequences: self.last_sequences + other.last_sequences,
            step_rows: self.step_rows.and(other.step_rows),
            step_sequences: self.step_sequences.and(other.step_sequences),
            step_times: self.step_times.and(other.step_times),
            drafts: self.drafts + other.drafts,
            draft_tokens: self.draft_tokens + other.draft_tokens,
            accepted_tokens: self.accepted_tokens + other.accepted_tokens,
            draft_nanoseconds: self.draft_nanoseconds + other.draft_nanoseconds,
            draft_model_nanoseconds: self.draft_model_nanoseconds + other.draft_model_nanoseconds,
            masks: self.masks + other.masks,
            mask_nanoseconds: self.mask_nanoseconds + other.mask_nanoseconds,
            pictures: self.pictures + other.pictures,
            encoded_pictures: self.encoded_pictures + other.encoded_pictures,
            encoder_cache_hits: self.encoder_cache_hits + other.encoder_cache_hits,
            encoder_nanoseconds: self.encoder_nanoseconds + other.encoder_nanoseconds,
            encoder_times: self.encoder_times.and(other.encoder_times),
        }
    }
}

/// Histogram with powers of two: entry `i` counts values up to `2^i` (and above half of that); the last entry counts
/// all larger ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Number of steps by size.
    pub counts: [u64; 17],
    /// All sizes together.
    pub total: u64,
}

impl Sizes {
    pub(crate) fn record(&mut self, size: usize) {
        let bits = usize::BITS - size.saturating_sub(1).leading_zeros();
        self.counts[(bits as usize).min(self.counts.len() - 1)] += 1;
        self.total += size as u64;
    }

    fn and(self, other: Self) -> Self {
        Self { counts: sums(self.counts, other.counts), total: self.total + other.total }
    }
}

/// Histogram of step durations with powers of two: entry `i` counts those below `2^i` microseconds (and not below half
/// of that); the last entry counts all longer ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Number of steps by duration.
    pub counts: [u64; 28],
    /// All durations together, in nanoseconds.
    pub total_nanoseconds: u64,
}

impl StepTimes {
    pub(crate) fn record(&mut self, duration: Duration) {
        let bits = u128::BITS - duration.as_micros().leading_zeros();
        self.counts[(bits as usize).min(self.counts.len() - 1)] += 1;
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.total_nanoseconds = self.total_nanoseconds.saturating_add(nanoseconds);
    }

    fn and(self, other: Self) -> Self {
        Self {
            counts: sums(self.counts, other.counts),
            total_nanoseconds: self.total_nanoseconds.saturating_add(other.total_nanoseconds),
        }
    }
}

fn sums<const N: usize>(one: [u64; N], other: [u64; N]) -> [u64; N] {
    std::array::from_fn(|index| one[index] + other[index])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_fall_into_powers_of_two() {
        let mut sizes = Sizes::default();
        for (size, entry) in
            [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (65, 7), (1 << 16, 16), (1 << 40, 16)]
        {
            let before = sizes.counts[entry];
            sizes.record(size);
            assert_eq!(sizes.counts[entry], before + 1, "{size}");
        }
    }

    #[test]
    fn durations_fall_into_powers_of_two() {
        let mut times = StepTimes::default();
        for (micros, entry) in
            [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (1023, 10), (1024, 11), (u64::MAX / 1000, 27)]
        {
            let before = times.counts[entry];
            times.record(Duration::from_micros(micros));
            assert_eq!(times.counts[entry], before + 1, "{micros}");
        }
    }
}
