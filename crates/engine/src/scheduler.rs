//! Plans one ragged step at a time.
//!
//! The rules, in the order in which they matter:
//!
//! - Sequences have a [rank](Rank): priority, then their tenant's turn, then age. Running ones are kept in this order,
//!   waiting ones too. Who has waited for long enough rises to the highest priority that waits.
//! - Every sequence that decodes gets its row in every step. Prompts share the rest of the token budget (less of it
//!   while somebody decodes, unless many short ones come at once), in order of rank and in chunks, so a prompt delays
//!   the others by one chunk at most.
//! - The head of the queue is admitted when its whole prompt finds room beside what the running prompts will
//!   still take. It takes from the prefix cache what it can. Nobody overtakes the head.
//! - Pages come from the free list, then from unused blocks of the prefix cache, the longest unused first, then
//!   from the running sequence of the lowest rank: it goes back to the queue and later computes again what
//!   the cache has lost. It keeps its tokens, so it goes on exactly where it was.
//!
//! A rank is a claim to rows and pages, not to a place: a running sequence is never pushed out to make a place
//! among `max_sequences`, only for its pages.
//!
//! While a step runs, the next one can be [planned ahead](Scheduler::plan_ahead), if nobody waits and all sequences
//! decode: each gets one more row, whose token the device knows before we do. Who turns out to have ended then has a
//! row that nobody looks at. Its pages may go to others at once, because steps run in the order of their plans.
//!
//! Nothing can stall: the running sequence of the highest rank can take the pages of all others, and a sequence
//! that does not fit alone was refused when it was submitted. Nothing starves: sooner or later it is among those of
//! the highest priority and its turn comes, and then it is preempted only by those whose turn came before, who end.

use std::{collections::BTreeMap, time::Instant};

use paguro_backend::{
    Carried, Limits, Outcome, Output, PageId, PageMove, Sampled, Score, Step, StepError, StepOutput,
    StepSequence, Want,
};

use crate::{
    RequestError, Stats,
    constraint::MaskWorkers,
    layout::Layout,
    pages::Pages,
    request::{FinishReason, Signal},
    sequence::{Job, Rank, Sequence},
    turns::Turns,
};

/// All sequences and their pages.
#[derive(Debug)]
pub(crate) struct Scheduler {
    limits: Limits,
    /// Prompt rows of a step in which sequences decode too.
    mixed_prompt_rows: usize,
    max_wait_steps: u64,
    layout: Layout,
    pages: Pages,
    turns: Turns,
    /// Number of the step that is planned next.
    step: u64,
    /// In order of rank. They hold no pages.
    waiting: BTreeMap<Rank, Sequence>,
    /// In order of rank.
    running: Vec<Sequence>,
    plan: Plan,
    /// The step after it, if there is one.
    next_plan: Plan,
    is_ahead: bool,
    mask_workers: MaskWorkers,
    /// What happened since somebody last looked, by request.
    pub signals: Vec<(u64, Signal)>,
    stats: Stats,
}

/// A step's buffers, reused from step to step. The rows of each sequence stand in [`Sequence::rows`].
#[derive(Debug, Default)]
struct Plan {
    /// To be made before the step.
    moves: Vec<PageMove>,
    tokens: Vec<u32>,
    carried: Vec<Carried>,
    sequences: Vec<StepSequence>,
    pages: Vec<PageId>,
    /// Of a step that was planned ahead: request and first branch of each sequence, some of which may have ended since.
    owners: Vec<(u64, usize)>,
}

impl Plan {
    /// Adds a sequence with these tokens from position `start` on.
    fn add(&mut self, sequence: &Sequence, start: usize, tokens: &[u32]) {
        let Self { tokens: all, sequences, pages, .. } = self;
        let (first_row, first_page) = (all.len(), pages.len());
        all.extend_from_slice(tokens);
        for table in &sequence.tables {
            pages.extend_from_slice(&table.pages);
        }
        sequences.push(StepSequence { rows: first_row..all.len(), start, tables: first_page..pages.len() });
    }

    fn clear(&mut self) {
        self.moves.clear();
        self.tokens.clear();
        self.carried.clear();
        self.sequences.clear();
        self.pages.clear();
        self.owners.clear();
    }

    fn step<'a>(&'a self, outputs: &'a [Output<'a>]) -> Step<'a> {
        let Self { tokens, carried, sequences, pages, .. } = self;
        Step { tokens, carried, sequences, pages, outputs }
    }
}

/// What is left of a step for prompts.
struct Budget {
    rows: usize,
    /// Most of them for one prompt.
    chunk: usize,
    /// Scores and embeddings.
    outputs: usize,
}

impl Scheduler {
    pub fn new(
        limits: Limits,
        mixed_prompt_rows: usize,
        max_wait_steps: u64,
        layout: Layout,
        pages: Pages,
    ) -> Self {
        Self {
            limits,
            mixed_prompt_rows,
            max_wait_steps,
            layout,
            pages,
            turns: Turns::default(),
            step: 0,
            waiting: BTreeMap::new(),
            running: Vec::new(),
            plan: Plan::default(),
            next_plan: Plan::default(),
            is_ahead: false,
            mask_workers: MaskWorkers::default(),
            signals: Vec::new(),
            stats: Stats::default(),
        }
    }

    /// Queues a request that was checked.
    pub fn submit(&mut self, job: Job, prompt: Vec<u32>) {
        let mut sequence = Sequence::new(job, prompt, &self.layout, &self.pages);
        sequence.turn = self.turns.take(sequence.priority, &sequence.job.tenant, sequence.tokens.len());
        sequence.waits_since = self.step;
        sequence.compute_mask(&mut self.mask_workers);
        self.waiting.insert(sequence.rank(), sequence);
    }

    /// Ends a request, or one branch of it; its pages are free at once.
    pub fn cancel(&mut self, request: u64, branch: Option<usize>) {
        for sequence in
            self.remove(|s| s.job.id == request && branch.is_none_or(|b| s.branches == (b..b + 1)))
        {
            finish(&sequence, &FinishReason::Cancelled, None, &mut self.signals);
        }
    }

    /// Ends what was to be done by `now`.
    pub fn expire(&mut self, now: Instant) {
        for sequence in self.remove(|sequence| sequence.job.deadline.is_some_and(|deadline| deadline <= now))
        {
            if sequence.cached_tokens.is_some() {
                finish(&sequence, &FinishReason::DeadlineExceeded, None, &mut self.signals);
            } else {
                self.signals.push((sequence.job.id, Signal::Failed(RequestError::DeadlineExceeded)));
            }
        }
    }

    pub fn cancel_all(&mut self) {
        for sequence in self.remove(|_| true) {
            finish(&sequence, &FinishReason::Cancelled, None, &mut self.signals);
        }
    }

    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Decides who computes what in the next step, and takes the pages for it; who leaves the queue starts `now`. There
    /// is something to compute unless the scheduler is [idle](Scheduler::is_idle).
    pub fn plan(&mut self, now: Instant) {
        self.plan.clear();
        let preemptions = self.stats.preemptions;
        self.raise_those_who_waited_long();
        self.step += 1;
        // Between two prompts the rank decides, even if one of them is running already.
        while self.head_outranks_a_running_prompt() && self.admit(now).is_some() {}

        let decodes = self.running.iter().filter(|sequence| !sequence.prefills()).count();
        let rest = self.limits.max_rows - decodes;
        let chunk = if decodes > 0 { self.mixed_prompt_rows } else { rest };
        let mut budget = Budget {
            rows: if self.short_prompts_outnumber(decodes) { rest } else { rest.min(chunk) },
            chunk,
            outputs: self.limits.max_outputs - self.limits.max_sequences,
        };
        let mut index = 0;
        while index < self.running.len() {
            self.schedule(index, &mut budget);
            index += 1;
        }
        // Whoever was just preempted must not take pages back from those who needed them.
        while budget.rows > 0
            && self.stats.preemptions == preemptions
            && let Some(index) = self.admit(now)
        {
            if !self.running[index].prefills() {
                budget.rows -= 1;
            }
            self.schedule(index, &mut budget);
        }
        self.write_plan();
        assert!(self.is_idle() || !self.plan.tokens.is_empty(), "somebody can always go on");
    }

    /// Page copies to be made before the planned step.
    pub fn moves(&self) -> &[PageMove] {
        &self.plan.moves
    }

    /// What the planned step is to compute.
    pub fn write_outputs<'a>(&'a self, outputs: &mut Vec<Output<'a>>) {
        let running = self.running.iter().filter(|sequence| sequence.rows > 0);
        for (sequence, part) in running.zip(&self.plan.sequences) {
            outputs.extend(sequence.scored_in(sequence.rows).map(|position| Output {
                row: part.rows.start + position - sequence.computed,
                want: Want::Score {
                    token: sequence.tokens[position + 1],
                    top: sequence.job.logprobs.unwrap_or(0),
                },
            }));
            outputs.extend(sequence.embedded_in(sequence.rows).map(|position| Output {
                row: part.rows.start + position - sequence.computed,
                want: Want::Embedding,
            }));
            if sequence.samples() {
                outputs.extend(sequence.branches.clone().map(|branch| Output {
                    row: part.rows.end - 1,
                    want: Want::Sample(sequence.sample_request(branch, false)),
                }));
            }
        }
    }

    /// The planned step with these outputs.
    pub fn step<'a>(&'a self, outputs: &'a [Output<'a>]) -> Step<'a> {
        self.plan.step(outputs)
    }

    /// Decides what the step after the planned one computes, if that is certain enough while the planned one runs: nobody
    /// waits, and all sequences that go on do so with a row each whose token the device `carries`. Says whether it
    /// did.
    pub fn plan_ahead(&mut self, carries: impl Fn(&Want<'_>) -> bool) -> bool {
        // What a mask allows depends on the token before.
        let may_go_on = |sequence: &Sequence| {
            let request = sequence.sample_request(sequence.branches.start, true);
            request.mask.is_none() && carries(&Want::Sample(request))
        };
        let go_on = || self.running.iter().filter(|sequence| !sequence.ends());
        let pages = || go_on().map(|sequence| sequence.pages_ahead(&self.layout)).sum::<usize>();
        if !self.waiting.is_empty()
            || !self.running.iter().all(Sequence::has_one_output)
            || go_on().next().is_none()
            || !go_on().all(may_go_on)
            || pages() > self.pages.available()
        {
            return false;
        }
        let Self { running, layout, pages, plan, next_plan, .. } = self;
        next_plan.clear();
        let mut output = 0;
        for sequence in running {
            let owner = (sequence.job.id, sequence.branches.start);
            // Between them are those of sequences that have ended since the planned step was planned ahead.
            while plan.owners.get(output).is_some_and(|other| *other != owner) {
                output += 1;
            }
            if !sequence.ends() {
                sequence.reserve_ahead(layout, pages);
                let row = next_plan.tokens.len();
                next_plan.carried.push(Carried { row, output });
                next_plan.owners.push(owner);
                next_plan.add(sequence, sequence.computed + sequence.rows, &[0]);
            }
            output += 1;
        }
        self.step += 1;
        self.is_ahead = true;
        true
    }

    /// What the step that was planned ahead is to compute.
    pub fn write_outputs_ahead<'a>(&'a self, outputs: &mut Vec<Output<'a>>) {
        let ahead = self.running.iter().filter(|sequence| sequence.ahead);
        outputs.extend(ahead.enumerate().map(|(row, sequence)| {
            let request = sequence.sample_request(sequence.branches.start, true);
            Output { row, want: Want::Sample(request) }
        }));
    }

    /// The step that was planned ahead, with these outputs.
    pub fn step_ahead<'a>(&'a self, outputs: &'a [Output<'a>]) -> Step<'a> {
        self.next_plan.step(outputs)
    }

    /// Takes in what the step computed; it was done at `at`. If another one was planned ahead, that is the planned one now.
    ///
    /// # Errors
    /// If the outcomes are not those that the step asked for; nothing has changed then.
    pub fn apply(&mut self, output: &mut StepOutput, at: Instant) -> Result<(), StepError> {
        self.drop_outcomes_of_the_ended(output)?;
        self.check_outcomes(output)?;
        self.stats.steps += 1;
        self.stats.rows += self.plan.tokens.len() as u64;
        self.stats.last_rows = self.plan.tokens.len();
        self.stats.last_sequences = self.plan.sequences.len();
        self.stats.step_rows.record(self.plan.tokens.len());
        self.stats.step_sequences.record(self.plan.sequences.len());
        let mut outcomes = output.outcomes.drain(..);
        let mut forks = Vec::new();
        let mut failed = Vec::new();
        for sequence in self.running.iter_mut().filter(|sequence| sequence.rows > 0) {
            for _ in sequence.scored_in(sequence.rows) {
                let Some(Outcome::Score(score)) = outcomes.next() else {
                    unreachable!("outcomes were checked")
                };
                sequence.scores.push(score);
            }
            for _ in sequence.embedded_in(sequence.rows) {
                let Some(Outcome::Embedding(embedding)) = outcomes.next() else {
                    unreachable!("outcomes were checked")
                };
                sequence.pool(&embedding);
            }
            let samples = sequence.samples();
            sequence.advance(&self.layout, &mut self.pages);
            if let Some((from, scores)) = sequence.take_scores() {
                self.signals.push((sequence.job.id, Signal::PromptScores { from, scores }));
            }
            if let Some(values) = sequence.take_embedding() {
                self.signals.push((sequence.job.id, Signal::Embedding { values }));
            }
            if samples {
                let first_fork = forks.len();
                let branches = sequence.branches.clone();
                sequence.branches = branches.start..branches.start + 1;
                forks.extend(branches.skip(1).map(|branch| sequence.fork(branch, &mut self.pages)));
                for sequence in std::iter::once(sequence).chain(&mut forks[first_fork..]) {
                    let Some(Outcome::Sampled(sampled)) = outcomes.next() else {
                        unreachable!("outcomes were checked")
                    };
                    self.stats.tokens += 1;
                    self.turns.charge(sequence.priority, &sequence.job.tenant);
                    match accept(sequence, sampled, at, &mut self.signals) {
                        Ok(()) if sequence.finished => {}
                        // It is worked out while the news are told and the next step runs.
                        Ok(()) => sequence.compute_mask(&mut self.mask_workers),
                        Err(problem) => failed.push((sequence.job.id, problem)),
                    }
                }
            } else if sequence.remaining() == 0 {
                // Nothing was asked for but the prompt.
                sequence.finished = true;
                finish(sequence, &sequence.job.at_max_tokens, None, &mut self.signals);
            }
        }
        drop(outcomes);
        for fork in forks {
            self.run(fork);
        }
        failed.dedup_by_key(|(request, _)| *request);
        for (request, problem) in failed {
            self.remove(|sequence| sequence.job.id == request);
            self.signals.push((request, Signal::Failed(RequestError::Constraint(problem))));
        }
        for mut sequence in self.running.extract_if(.., |sequence| sequence.finished) {
            sequence.release(&mut self.pages);
        }
        self.pages.trim();
        if std::mem::take(&mut self.is_ahead) {
            std::mem::swap(&mut self.plan, &mut self.next_plan);
            for sequence in &mut self.running {
                sequence.rows = usize::from(std::mem::take(&mut sequence.ahead));
            }
        }
        Ok(())
    }

    /// The step failed: so do all requests that were part of it, and the step that was planned after it. What it would have
    /// written is lost with them.
    pub fn fail(&mut self, error: &StepError) {
        self.is_ahead = false;
        self.stats.failed_steps += 1;
        let mut requests: Vec<_> = self.running.iter().filter(|s| s.rows > 0).map(|s| s.job.id).collect();
        requests.sort();
        requests.dedup();
        self.remove(|sequence| requests.binary_search(&sequence.job.id).is_ok());
        let failed = || Signal::Failed(RequestError::Step(error.to_string()));
        self.signals.extend(requests.into_iter().map(|request| (request, failed())));
    }

    pub fn stats(&self) -> Stats {
        let pages = self.pages.counts();
        Stats {
            waiting: self.waiting.len(),
            running: self.running.len(),
            pages_total: pages.total,
            pages_used: pages.total - pages.free - pages.cached,
            pages_cached: pages.cached,
            evictions: self.pages.evictions,
            masks: self.mask_workers.masks(),
            mask_nanoseconds: self.mask_workers.nanoseconds(),
            ..self.stats
        }
    }

    /// Gives up every cached block that no sequence uses.
    pub fn clear_cache(&mut self) {
        self.pages.clear_cache();
    }

    /// How long the last step took.
    pub fn record_time(&mut self, duration: std::time::Duration) {
        self.stats.step_times.record(duration);
    }

    /// Recounts all pages against all block tables.
    pub fn check(&self) -> Result<(), String> {
        if let Some(sequence) = self.waiting.values().find(|sequence| sequence.held_pages().next().is_some())
        {
            return Err(format!("request {} waits but holds pages", sequence.job.id));
        }
        if !self.running.is_sorted_by_key(Sequence::rank) {
            return Err("running sequences are out of order".into());
        }
        for sequence in &self.running {
            let rows = sequence.rows + usize::from(sequence.ahead);
            let blocks = self.layout.blocks(sequence.computed + rows);
            if sequence.tables.iter().any(|table| table.pages.len() != blocks) {
                return Err(format!("request {} has block tables of a wrong length", sequence.job.id));
            }
        }
        self.pages.check(self.running.iter().flat_map(Sequence::held_pages))
    }

    fn raise_those_who_waited_long(&mut self) {
        let Some(since) = self.step.checked_sub(self.max_wait_steps) else { return };
        let Some((_, head)) = self.waiting.first_key_value() else { return };
        let (top, turn) = (head.priority, self.turns.now(head.priority));
        let long =
            |_: &Rank, sequence: &mut Sequence| sequence.priority < top && sequence.waits_since <= since;
        let raised: Vec<_> = self.waiting.extract_if(.., long).collect();
        for (_, mut sequence) in raised {
            (sequence.priority, sequence.turn) = (top, turn);
            self.waiting.insert(sequence.rank(), sequence);
        }
    }

    /// Whether more prompts that one chunk can hold want their first token than sequences want their next one: then a
    /// small budget would hold up more than a large one does.
    fn short_prompts_outnumber(&self, decodes: usize) -> bool {
        let running = self.running.iter().filter(|sequence| sequence.prefills());
        let prompts = running.chain(self.waiting.values());
        prompts.filter(|prompt| prompt.remaining() <= self.mixed_prompt_rows).nth(decodes).is_some()
    }

    fn head_outranks_a_running_prompt(&self) -> bool {
        let Some((head, _)) = self.waiting.first_key_value() else { return false };
        self.running.iter().any(|sequence| sequence.prefills() && *head < sequence.rank())
    }

    /// Moves the head of the queue to the running sequences, if there is room; `now` is when it starts. Returns its
    /// index.
    fn admit(&mut self, now: Instant) -> Option<usize> {
        let (_, head) = self.waiting.first_key_value()?;
        // A request takes the places of all its branches at once, so that they need not wait when they fork.
        let places: usize = self.running.iter().map(|sequence| sequence.branches.len()).sum();
        if places + head.branches.len() > self.limits.max_sequences {
            return None;
        }
        let cached = head.cached_blocks(&self.layout, &self.pages);
        // A block that somebody is about to compute need not be computed twice.
        let in_work =
            |other: &Sequence| other.rank() < head.rank() && head.could_wait_for(other, cached, &self.layout);
        if self.running.iter().any(in_work) || !self.has_room(head, cached) {
            return None;
        }
        let (_, mut sequence) = self.waiting.pop_first()?;
        let first_time = sequence.cached_tokens.is_none();
        self.turns.admitted(sequence.priority, sequence.turn);
        sequence.take_cached(cached, &self.layout, &mut self.pages);
        self.stats.prefix_query_tokens += sequence.tokens.len() as u64;
        self.stats.prefix_hit_tokens += sequence.computed as u64;
        if first_time {
            self.stats.prompt_tokens += sequence.job.prompt_tokens as u64;
            self.signals
                .push((sequence.job.id, Signal::Started { cached_tokens: sequence.computed, at: now }));
        }
        Some(self.run(sequence))
    }

    /// Whether all that the sequence has to prefill fits beside what the running ones will still prefill, with
    /// another block for everybody who may need one. Alone it always fits.
    fn has_room(&self, sequence: &Sequence, cached: usize) -> bool {
        if self.running.is_empty() {
            return true;
        }
        let to_come = |sequence: &Sequence, cached| {
            sequence.pages_to_come(cached, &self.layout) + sequence.headroom(&self.layout)
        };
        let promised: usize = self.running.iter().map(|running| to_come(running, 0)).sum();
        let available =
            self.pages.available() - sequence.evictable_in_cached(cached, &self.layout, &self.pages);
        to_come(sequence, cached) + promised <= available
    }

    /// Gives one running sequence its rows and their pages, from sequences of lower rank if it must be; or takes
    /// its own pages, if it is the last.
    fn schedule(&mut self, index: usize, budget: &mut Budget) {
        let rows = if self.running[index].prefills() { budget.take(&self.running[index]) } else { 1 };
        if rows == 0 {
            return;
        }
        while self.pages.available() < self.running[index].pages_for(rows, &self.layout, &self.pages) {
            self.preempt_last();
            if self.running.len() == index {
                assert!(index > 0, "a sequence that does not fit alone is refused when it is submitted");
                return;
            }
        }
        self.running[index].reserve(rows, &self.layout, &mut self.pages, &mut self.plan.moves);
    }

    /// The running sequence of the lowest rank goes back to the queue, where its rank makes it a head.
    fn preempt_last(&mut self) {
        let mut sequence = self.running.pop().expect("somebody needs pages");
        sequence.release(&mut self.pages);
        self.stats.preemptions += 1;
        sequence.waits_since = self.step;
        self.waiting.insert(sequence.rank(), sequence);
    }

    fn write_plan(&mut self) {
        self.stats.page_copies += self.plan.moves.len() as u64;
        for sequence in self.running.iter().filter(|sequence| sequence.rows > 0) {
            let tokens = &sequence.tokens[sequence.computed..][..sequence.rows];
            self.plan.add(sequence, sequence.computed, tokens);
        }
    }

    /// Leaves out what a step that was planned ahead has computed for sequences that have ended since. The others are
    /// still in the same order.
    fn drop_outcomes_of_the_ended(&self, output: &mut StepOutput) -> Result<(), StepError> {
        let owners = &self.plan.owners;
        if owners.is_empty() {
            return Ok(());
        }
        let (given, asked) = (output.outcomes.len(), owners.len());
        if given != asked {
            let more = if given > asked { "more" } else { "fewer" };
            return Err(StepError::Device(format!("the runner answered {more} outputs than were asked for")));
        }
        let mut owners = owners.iter();
        let mut left = self.running.iter().filter(|sequence| sequence.rows > 0).peekable();
        output.outcomes.retain(|_| {
            let owner = owners.next();
            left.next_if(|sequence| Some(&(sequence.job.id, sequence.branches.start)) == owner).is_some()
        });
        Ok(())
    }

    fn check_outcomes(&self, output: &StepOutput) -> Result<(), StepError> {
        let mut rest = output.outcomes.as_slice();
        for sequence in self.running.iter().filter(|sequence| sequence.rows > 0) {
            let scores = sequence.scored_in(sequence.rows).len();
            let embeddings = sequence.embedded_in(sequence.rows).len();
            let samples = if sequence.samples() { sequence.branches.len() } else { 0 };
            let Some((own, others)) = rest.split_at_checked(scores + embeddings + samples) else {
                return Err(StepError::Device(
                    "the runner answered fewer outputs than were asked for".into(),
                ));
            };
            let (scored, own) = own.split_at(scores);
            let (embedded, sampled) = own.split_at(embeddings);
            if !scored.iter().all(|outcome| matches!(outcome, Outcome::Score(_)))
                || !embedded.iter().all(|outcome| matches!(outcome, Outcome::Embedding(_)))
                || !sampled.iter().all(|outcome| matches!(outcome, Outcome::Sampled(_)))
            {
                return Err(StepError::Device(
                    "the runner answered other outputs than were asked for".into(),
                ));
            }
            rest = others;
        }
        if !rest.is_empty() {
            return Err(StepError::Device("the runner answered more outputs than were asked for".into()));
        }
        Ok(())
    }

    fn run(&mut self, sequence: Sequence) -> usize {
        let index = self.running.partition_point(|other| other.rank() < sequence.rank());
        self.running.insert(index, sequence);
        index
    }

    /// Takes the chosen sequences out, wherever they are, and their pages with them.
    fn remove(&mut self, chosen: impl Fn(&Sequence) -> bool) -> Vec<Sequence> {
        let mut removed: Vec<_> = self.running.extract_if(.., |sequence| chosen(sequence)).collect();
        for sequence in &mut removed {
            sequence.release(&mut self.pages);
        }
        removed.extend(
            self.waiting.extract_if(.., |_, sequence| chosen(sequence)).map(|(_, sequence)| sequence),
        );
        removed
    }
}

impl Budget {
    /// Rows for a prompt's next chunk.
    fn take(&mut self, sequence: &Sequence) -> usize {
        let most = sequence.remaining().min(self.rows).min(self.chunk);
        let fits = |rows: &usize| sequence.outputs_in(*rows) <= self.outputs;
        let rows = (0..=most).rev().find(fits).unwrap_or(0);
        self.rows -= rows;
        self.outputs -= sequence.outputs_in(rows);
        rows
    }
}

/// Appends a sampled token to its branch.
///
/// # Errors
/// Why the grammar cannot be followed.
fn accept(
    sequence: &mut Sequence,
    sampled: Sampled,
    at: Instant,
    signals: &mut Vec<(u64, Signal)>,
) -> Result<(), String> {
    let Sampled { token, logprob, top } = sampled;
    let (request, branch) = (sequence.job.id, sequence.branches.start);
    let end = sequence.push(token)?;
    let mut stop_score = None;
    if matches!(end, Some(FinishReason::Stop(_))) {
        stop_score = logprob.map(|logprob| Score { logprob, top });
    } else {
        signals.push((request, Signal::Token { branch, token, logprob, top, at }));
    }
    if let Some(reason) = end {
        sequence.finished = true;
        finish(sequence, &reason, stop_score, signals);
    }
    Ok(())
}

/// Tells the end of all branches that a sequence stands for.
fn finish(
    sequence: &Sequence,
    reason: &FinishReason,
    stop_score: Option<Score>,
    signals: &mut Vec<(u64, Signal)>,
) {
    for branch in sequence.branches.clone() {
        let (reason, stop_score) = (reason.clone(), stop_score.clone());
        let finished = Signal::Finished { branch, reason, stop_score, usage: sequence.usage() };
        signals.push((sequence.job.id, finished));
    }
}

#[cfg(test)]
impl Scheduler {
    /// Request and branch of the running sequences that decode.
    pub fn decoding(&self) -> Vec<(u64, usize)> {
        let decoding = self.running.iter().filter(|sequence| !sequence.prefills());
        decoding.map(|sequence| (sequence.job.id, sequence.branches.start)).collect()
    }

    /// Request, branch and positions of the planned rows.
    pub fn planned(&self) -> Vec<(u64, usize, std::ops::Range<usize>)> {
        let planned = self.running.iter().filter(|sequence| sequence.rows > 0);
        planned.map(|s| (s.job.id, s.branches.start, s.computed..s.computed + s.rows)).collect()
    }

    /// Request and branch of those who run without a row in the plan, and of those who wait.
    pub fn held(&self) -> Vec<(u64, usize)> {
        let idle = self.running.iter().filter(|sequence| sequence.rows == 0);
        idle.chain(self.waiting.values()).map(|s| (s.job.id, s.branches.start)).collect()
    }

    /// Pages of the running sequences.
    pub fn tables(&self) -> Vec<Vec<PageId>> {
        self.running.iter().map(|sequence| sequence.held_pages().collect()).collect()
    }
}
