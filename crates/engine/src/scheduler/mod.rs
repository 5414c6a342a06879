//! Plans one ragged step at a time.
//!
//! 1. [Admission](admission): requests leave the [queue] while there are places (`max_sequences`) and pages. Priority decides
//!    first; then every tenant gets its share of the places, and within a tenant every request. If no place is free, the
//!    head of the queue may preempt a sequence of a tenant or request with more than its share.
//! 2. [Rows](rows): every decoding sequence gets one row; prompts share the rest of the step's rows and time.
//! 3. If all sequences decode, some get rows that check [drafts].
//! 4. Branches of a request (`n` answers) separate when their common prompt is computed, as many as there are places.
//!    The others wait in the queue and find the prompt in the prefix cache.
//! 5. Pages are taken from the free list, then from unused blocks of the prefix cache, least recently used first, then
//!    from a running sequence: the youngest one of the tenant that claims most, of the lowest running priority.
//!
//! A preempted sequence returns to the queue with its tokens. It later recomputes the tokens that the cache has lost,
//! and continues exactly where it was.
//!
//! No deadlock: a sequence that does not fit alone is refused when it is submitted, and pages are taken only while more
//! than one sequence runs. No starvation: a request without a place either has a tenant that is behind others, and gets
//! a place after their [quantum](admission::QUANTUM), or waits for older requests of the same tenant, each of which ends.
//!
//! A plan depends on the order of requests and on the measured times of earlier steps, but on no clock.
//!
//! | module | subject |
//! |-|-|
//! | [admission], [queue] | sequences that leave the queue, those that they preempt, fair shares |
//! | [rows], [prompts] | rows of decoding sequences and of prompts, by the time of a step |
//! | [masks] | sequences that wait for the mask of their grammar |
//! | [drafts] | rows that check drafts |
//! | [pictures] | sequences that wait for the rows of a picture |
//! | [tiers] | prefixes that are loaded from memory of the host and from disk |
//! | [requests] | begin and cancellation of requests |
//! | [inspect] | views for readers, and the count of all pages |
//! | [ahead] | the plan of the next step while the device computes this one |
//! | [lanes] | several steps in flight, of different sequences |
//! | [outputs] | results of a step |

mod admission;
mod ahead;
mod buffers;
mod drafts;
mod inspect;
mod lanes;
mod masks;
mod model_drafts;
mod outputs;
mod pictures;
mod prompts;
mod queue;
mod requests;
mod rows;
mod tiers;

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use paguro_backend::{GivenRows, Limits, Output, PageMove, StateUse, Step};

use self::{
    buffers::{PlannedStep, Saves},
    outputs::finish,
};
use crate::{
    RequestError, Stats,
    cost::{StepCost, Work},
    encoder::EncoderCache,
    fair::Ledger,
    layout::BlockLayout,
    mask_workers::MaskWorkers,
    pages::Pages,
    request::{Event, FinishReason},
    sequence::{Rank, Sequence},
    speculation::Speculation,
    states::States,
};

/// All sequences and their pages.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: Limits,
    /// Maximum seconds of a step with a chunk of a prompt beside decoding sequences.
    step_time: f64,
    max_wait_steps: u64,
    layout: BlockLayout,
    pages: Pages,
    states: States,
    ledger: Ledger,
    cost: StepCost,
    /// Drafts; `None` if there are none.
    speculation: Option<Speculation>,
    /// Seconds of a model's drafts before the next step, or the last one until its time is known.
    drafting_seconds: f64,
    /// True if masks are computed after the drafts of a model.
    defers_masks: bool,
    /// Owners of sequences whose masks are to be computed after drafts, with their last tokens.
    masks_due: Vec<((u64, usize), Vec<u32>)>,
    /// Work of the last step, until its time is known.
    last_work: Option<Work>,
    /// The last step, until its time shows how long such steps take.
    last_check: Option<drafts::Check>,
    /// Number of the step that is planned next.
    step: u64,
    /// Requests so far, and sequences that went to the end of their tenant's queue.
    arrivals: u64,
    /// Waiting sequences in order of rank. They hold no pages.
    waiting: BTreeMap<Rank, Sequence>,
    /// Running sequences in order of rank.
    running: Vec<Sequence>,
    /// The step that is planned last.
    plan: PlannedStep,
    /// Steps that are planned before it and not computed yet, the oldest first.
    in_flight: VecDeque<PlannedStep>,
    /// Buffers of computed steps, for later ones.
    spare: Vec<PlannedStep>,
    /// Number of steps that may be in flight; see [`lanes`].
    pub lanes: usize,
    saves: Saves,
    mask_workers: MaskWorkers,
    /// Rows of pictures.
    pub encoder_cache: EncoderCache,
    /// Events that are not published yet, with their requests. Their texts are empty: the reader decodes tokens.
    pub events: Vec<(u64, Event)>,
    stats: Stats,
}

impl Scheduler {
    pub fn new(
        limits: Limits,
        step_time: Duration,
        max_wait_steps: u64,
        layout: BlockLayout,
        pages: Pages,
    ) -> Self {
        Self {
            limits,
            step_time: step_time.as_secs_f64(),
            max_wait_steps,
            layout,
            pages,
            states: States::new(limits.states),
            ledger: Ledger::default(),
            cost: StepCost::default(),
            speculation: None,
            drafting_seconds: 0.0,
            defers_masks: false,
            masks_due: Vec::new(),
            last_work: None,
            last_check: None,
            step: 0,
            arrivals: 0,
            waiting: BTreeMap::new(),
            running: Vec::new(),
            plan: PlannedStep::default(),
            in_flight: VecDeque::new(),
            spare: Vec::new(),
            lanes: 1,
            saves: Saves::default(),
            mask_workers: MaskWorkers::default(),
            encoder_cache: EncoderCache::default(),
            events: Vec::new(),
            stats: Stats::default(),
        }
    }

    /// Drafts answers from now on, except for encoders.
    pub fn speculate(&mut self) {
        self.speculation = (!self.layout.is_whole).then(Speculation::default);
    }

    /// Ends the requests whose deadline is not after `now`.
    pub fn expire(&mut self, now: Instant) {
        for sequence in
            self.remove(|sequence| sequence.request.deadline.is_some_and(|deadline| deadline <= now))
        {
            if sequence.prefix.cached_tokens.is_some() {
                finish(&sequence, &FinishReason::DeadlineExceeded, None, &mut self.events);
            } else {
                self.events.push((sequence.request.id, Event::Failed(RequestError::DeadlineExceeded)));
            }
        }
    }

    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Plans the rows of each sequence in the next step and reserves their pages; requests that leave the queue start
    /// at `now`. The plan is empty only if the scheduler is [idle](Scheduler::is_idle), or all sequences wait for the
    /// disk, for masks or for steps in flight.
    pub fn plan(&mut self, now: Instant) {
        self.begin_plan();
        self.plan.moves.append(&mut self.saves.moves);
        self.plan.saved.append(&mut self.saves.keys);
        self.raise_long_waits();
        self.step += 1;
        self.start_loads();
        if self.admit_all(now) {
            self.take_encoded();
            self.read_for_drafts();
            self.plan_rows();
        }
        if self.plan.is_empty() {
            let waits = |sequence: &Sequence| sequence.sampler.awaits_mask() || sequence.awaits_picture();
            let is_alone = self.in_flight.is_empty() && self.has_work();
            let can_wait = !is_alone || self.running.iter().any(waits);
            assert!(can_wait, "one sequence can always go on");
            // It is no step, and the time of the wait does not count as steps.
            self.step -= 1;
        }
    }

    fn plan_rows(&mut self) {
        loop {
            let running = self.running.len();
            self.share_rows();
            self.open_branches();
            self.reserve_pages();
            // If all that had rows have lost their pages, the others get the rows.
            let has_rows = self.running.iter().any(|sequence| sequence.planned.granted > 0);
            if self.running.len() == running || has_rows {
                break;
            }
        }
        self.plan_drafts();
        self.write_plan();
    }

    /// Returns the number of rows of the planned step.
    pub fn planned_rows(&self) -> usize {
        self.plan.tokens.len()
    }

    /// Copies of pages and states to be made before the planned step, in order.
    pub fn moves(&self) -> &[PageMove] {
        &self.plan.moves
    }

    /// Writes the outputs of the planned step.
    pub fn write_outputs<'a>(&'a self, outputs: &mut Vec<Output<'a>>) {
        self.plan.write_outputs(&self.running, outputs);
    }

    /// Returns the rows of pictures in the planned step.
    pub fn given(&self) -> Vec<GivenRows<'_>> {
        self.plan.given()
    }

    /// Returns the planned step with these rows of pictures and these outputs.
    pub fn step<'a>(&'a self, given: &'a [GivenRows<'a>], outputs: &'a [Output<'a>]) -> Step<'a> {
        self.plan.step(given, outputs)
    }

    pub fn stats(&self) -> Stats {
        let pages = self.pages.counts();
        Stats {
            waiting: self.waiting.len(),
            running: self.running.len(),
            pages_total: pages.total,
            pages_used: pages.total - pages.free - pages.cached,
            pages_cached: pages.cached,
            states_total: self.states.total(),
            states_used: self.states.total() - self.states.free(),
            checkpoints: self.pages.checkpoints(),
            evictions: self.pages.evictions,
            blocks: self.blocks(),
            host: self.host_stats(),
            disk: self.disk_stats(),
            masks: self.mask_workers.masks(),
            mask_nanoseconds: self.mask_workers.nanoseconds(),
            ..self.stats
        }
    }

    /// Evicts every cached block that no sequence uses.
    pub fn clear_cache(&mut self) {
        self.encoder_cache.clear();
        self.pages.clear_cache();
    }

    /// Records the duration of the last step.
    pub fn record_time(&mut self, duration: Duration) {
        self.stats.step_times.record(duration);
        if let Some(work) = self.last_work.take() {
            self.cost.learn(work, duration);
        }
        self.record_check(duration);
    }

    /// Records the duration of a step of `rows` rows of one sequence, which ran before there were requests.
    pub fn record_probe(&mut self, rows: usize, duration: Duration) {
        self.cost.learn(Work::default().and(0, rows), duration);
    }

    fn write_plan(&mut self) {
        let copies = self.plan.moves.iter().filter(|one| matches!(one, PageMove::Copy { .. }));
        self.stats.page_copies += copies.count() as u64;
        for sequence in self.running.iter().filter(|sequence| sequence.planned.granted > 0) {
            let rows = sequence.planned.granted;
            let start = sequence.next_position() - rows;
            let tokens = &sequence.tokens.with_draft()[start..][..rows];
            self.plan.decodes &= !sequence.prefills();
            self.plan.drafted += sequence.planned.drafted;
            // A slot that rows in flight leave is not read again.
            let state = match start > sequence.kv.computed {
                true => sequence.kv.state.map(|state| StateUse::in_place(state.write)),
                false => sequence.kv.state,
            };
            let outputs = sequence.outputs();
            self.plan.add(sequence, start, tokens, state, outputs, &self.layout);
        }
    }

    fn run(&mut self, sequence: Sequence) {
        let index = self.running.partition_point(|other| other.rank() < sequence.rank());
        self.running.insert(index, sequence);
    }

    /// Removes the chosen sequences, running and waiting ones, and releases their pages.
    fn remove(&mut self, chosen: impl Fn(&Sequence) -> bool) -> Vec<Sequence> {
        let mut removed: Vec<_> = self.running.extract_if(.., |sequence| chosen(sequence)).collect();
        for sequence in &mut removed {
            sequence.release(&self.layout, &mut self.pages, &mut self.states);
        }
        removed.extend(
            self.waiting.extract_if(.., |_, sequence| chosen(sequence)).map(|(_, sequence)| sequence),
        );
        removed
    }
}
