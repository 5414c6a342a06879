//! A scheduler and a fake runner that are driven step by step.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    time::{Duration, Instant},
};

use paguro_backend::{
    AdapterId, AttentionMode, KvDtype, Limits, PageMove, Runner, Score, StepError, StepOutput, Ticket,
};

use super::fake::{self, Control, FakeRunner, VOCAB};
use crate::{
    FinishReason, PageOrder, Request, Usage,
    checked_request::CheckedRequest,
    layout::{BlockLayout, Checkpoints},
    pages::Pages,
    request::{Event, PictureLimits, RequestLimits},
    scheduler::Scheduler,
    states::States,
};

/// Maximum time of a step with a part of a prompt beside decoding sequences.
pub const STEP_TIME: Duration = Duration::from_millis(100);

/// Contents of the adapters that the runner has, which are also their numbers.
pub const ADAPTERS: [u8; 3] = [1, 2, 3];

#[derive(Clone, Debug)]
pub struct Setup {
    pub block_size: usize,
    /// Usable ones.
    pub pages: usize,
    pub windows: Vec<Option<u32>>,
    pub rows: usize,
    /// Times of a step: constant, per row, and per earlier token that a row attends to.
    pub times: [Duration; 3],
    pub sequences: usize,
    pub scores: usize,
    pub cache: bool,
    pub low_water: f32,
    pub high_water: f32,
    pub order: PageOrder,
    pub max_context: usize,
    pub max_wait_steps: u64,
    /// True if the runner carries tokens from step to step.
    pub carries: bool,
    /// Steps that the runner has in flight.
    pub lanes: usize,
    /// True if sequences have states.
    pub states: bool,
    /// See [`Program::bidirectional`](paguro_backend::Program::bidirectional).
    pub encoder: bool,
    /// Pages of a checkpoint.
    pub checkpoint_pages: usize,
    /// Blocks from one checkpoint to the next while a prompt is computed.
    pub checkpoint_blocks: usize,
    pub masks: Masks,
    /// True if answers are drafted.
    pub speculate: bool,
}

/// Time at which masks are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Masks {
    /// Before the next step.
    Soon,
    /// When the test [says so](Rig::finish_masks).
    Held,
    /// Before one of the next steps, at random. Each takes this time.
    Late { seed: u64, took: Duration },
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            block_size: 4,
            pages: 16,
            windows: vec![None],
            rows: 16,
            times: [Duration::ZERO; 3],
            sequences: 8,
            scores: 8,
            cache: true,
            low_water: 1.0,
            high_water: 1.0,
            order: PageOrder::InOrder,
            max_context: 1000,
            max_wait_steps: 1000,
            carries: false,
            lanes: 1,
            states: false,
            encoder: false,
            checkpoint_pages: 2,
            checkpoint_blocks: 3,
            masks: Masks::Soon,
            speculate: false,
        }
    }
}

/// Received events of one branch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub end: Option<(FinishReason, Usage)>,
}

/// Received events of one request.
#[derive(Clone, Debug, Default)]
pub struct Heard {
    pub started: Option<usize>,
    pub scores: Option<(usize, Vec<Score>)>,
    pub embedding: Option<Vec<f32>>,
    pub branches: BTreeMap<usize, Answer>,
    pub failed: bool,
}

pub struct Rig {
    pub limits: Limits,
    pub scheduler: Scheduler,
    pub runner: FakeRunner,
    pub control: Control,
    pub heard: BTreeMap<u64, Heard>,
    /// Events of the last call, by request.
    pub news: Vec<(u64, Event)>,
    /// Rows of each sequence in the last step, empty for those without rows.
    pub planned: Vec<(u64, usize, Range<usize>)>,
    pub held: Vec<(u64, usize)>,
    /// True if the step after the last one was planned ahead.
    pub ahead: bool,
    /// Duration of the last step.
    pub took: Duration,
    times: [Duration; 3],
    masks: Masks,
    in_flight: VecDeque<Ticket>,
    next: u64,
}

impl Rig {
    /// Creates a rig; `None` if the pages do not hold one token.
    pub fn new(setup: &Setup) -> Option<Self> {
        let program = fake::program(&setup.windows, setup.states, setup.encoder);
        let mut layout = BlockLayout::new(&program, setup.block_size, setup.rows);
        let has_cache =
            setup.cache && !setup.encoder && (!setup.states || setup.checkpoint_pages <= setup.pages);
        layout.checkpoints = (setup.states && has_cache).then_some(Checkpoints {
            pages: setup.checkpoint_pages,
            interval: setup.checkpoint_blocks * setup.block_size,
        });
        let max_context = layout.longest(setup.pages, setup.max_context);
        if max_context == 0 {
            return None;
        }
        let limits = Limits {
            block_size: setup.block_size,
            pages: setup.pages + 1,
            max_rows: setup.rows,
            max_sequences: setup.sequences,
            max_outputs: setup.sequences + setup.scores,
            max_context,
            states: if setup.states { States::slots_for(setup.sequences) } else { 0 },
            kv_dtype: KvDtype::F16,
            attention: AttentionMode::Paged,
            expert_slots: None,
        };
        let mut pages = Pages::new(limits.pages, setup.order);
        if has_cache {
            pages = pages.with_cache(b"test", setup.low_water, setup.high_water);
        }
        let control = Control::default();
        if setup.carries {
            control.carry();
        }
        control.divide(setup.lanes);
        let mut scheduler = Scheduler::new(limits, STEP_TIME, setup.max_wait_steps, layout, pages);
        scheduler.mask_workers().hold();
        scheduler.lanes = setup.lanes;
        if setup.speculate {
            scheduler.speculate();
        }
        let mut runner = FakeRunner::new(&program, limits, control.clone());
        for content in ADAPTERS {
            runner.load_adapter(AdapterId(content.into()), &[fake::adapter(content).1]).expect("it fits");
        }
        Some(Self {
            scheduler,
            runner,
            limits,
            control,
            heard: BTreeMap::new(),
            news: Vec::new(),
            planned: Vec::new(),
            held: Vec::new(),
            ahead: false,
            took: Duration::ZERO,
            times: setup.times,
            masks: setup.masks,
            in_flight: VecDeque::new(),
            next: 0,
        })
    }

    pub fn submit(&mut self, request: &Request) -> Result<u64, crate::SubmitError> {
        let Limits { max_context, max_sequences, .. } = self.limits;
        let limits = RequestLimits {
            pictures: PictureLimits::TextOnly,
            vocab: VOCAB,
            token_ids: VOCAB,
            max_context,
            max_sequences,
            is_encoder: self.scheduler.is_encoder(),
        };
        request.check(limits)?;
        let id = self.next;
        let checked = CheckedRequest::new(id, request, &[], limits)?;
        self.next += 1;
        self.scheduler.submit(checked, request.prompt.clone());
        self.heard.insert(id, Heard::default());
        Ok(id)
    }

    pub fn expire(&mut self, now: Instant) {
        self.scheduler.expire(now);
        self.listen();
    }

    pub fn cancel(&mut self, request: u64, branch: Option<usize>) {
        self.scheduler.cancel(request, branch);
        self.listen();
    }

    /// Completes the masks that are being computed for a request, as if they had taken `took`.
    pub fn finish_masks(&mut self, request: u64, took: Duration) {
        self.scheduler.mask_workers().finish(|other| other == request, took);
        self.scheduler.settle_masks();
        self.listen();
    }

    /// Completes masks at their time.
    fn compute_masks(&mut self) {
        match &mut self.masks {
            Masks::Soon => self.scheduler.mask_workers().finish(|_| true, Duration::ZERO),
            Masks::Held => {}
            Masks::Late { seed, took } => {
                let mut is_known = |request| {
                    *seed = fake::mix(*seed, request);
                    *seed % 3 == 0
                };
                self.scheduler.mask_workers().finish(&mut is_known, *took);
            }
        }
        self.scheduler.settle_masks();
    }

    /// Returns true if there is no work to compute or collect.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle() && self.in_flight.is_empty()
    }

    /// Submits steps and collects one, as the engine does; an error is one that was not ordered. Returns the page copies that it made.
    pub fn step(&mut self) -> Result<Vec<PageMove>, String> {
        self.compute_masks();
        self.ahead = false;
        let (moves, submitted) = self.submit_steps()?;
        (self.planned, self.held) = (self.scheduler.planned(), self.scheduler.held());
        let outcome = match (submitted, self.in_flight.pop_front()) {
            (submitted, Some(ticket)) => self.collect(ticket, submitted)?,
            (Err(error), None) => Err(error),
            (Ok(()), None) => {
                // All sequences wait for masks, or the last ones have ended.
                self.listen();
                self.scheduler.check()?;
                return Ok(moves);
            }
        };
        if let Err(error) = outcome {
            let ordered = ["made to fail", "fewer outputs", "more outputs"];
            if !ordered.iter().any(|text| error.to_string().contains(text)) {
                return Err(error.to_string());
            }
            while let Some(ticket) = self.in_flight.pop_front() {
                let _ = self.runner.collect(ticket, &mut StepOutput::default());
            }
            self.scheduler.fail(&error);
        }
        let [all, row, seen] = self.times;
        let positions = self.planned.iter().flat_map(|(_, _, positions)| positions.clone());
        self.took = positions.fold(all, |time, position| time + row + seen * position as u32);
        self.scheduler.record_time(self.took);
        self.listen();
        self.scheduler.check()?;
        Ok(moves)
    }

    /// Plans and submits steps until all lanes have one. Returns the page copies. The outer error is one of a plan.
    fn submit_steps(&mut self) -> Result<(Vec<PageMove>, Result<(), StepError>), String> {
        let mut all = Vec::new();
        while self.in_flight.len() < self.scheduler.lanes {
            let moves = self.plan()?;
            let moved = self.runner.move_pages(&moves);
            all.extend(moves);
            if moved.is_err() || self.scheduler.planned_rows() == 0 {
                return Ok((all, moved));
            }
            if let Err(error) = self.submit_planned() {
                return Ok((all, Err(error)));
            }
        }
        Ok((all, Ok(())))
    }

    fn plan(&mut self) -> Result<Vec<PageMove>, String> {
        let decoding = self.scheduler.decoding();
        let preemptions = self.scheduler.stats().preemptions;
        self.scheduler.plan(Instant::now());
        let moves = self.scheduler.moves().to_vec();
        let preempted = (self.scheduler.stats().preemptions - preemptions) as usize;
        if self.scheduler.planned_rows() > self.limits.max_rows {
            return Err(format!("too many rows: {}", self.scheduler.planned_rows()));
        }
        let rows = self.scheduler.planned();
        let served = decoding
            .iter()
            .filter(|who| rows.iter().any(|(request, branch, _)| (*request, *branch) == **who));
        // Branches that share a state may wait for one of their own, and sequences for their lane.
        let all_at_once =
            self.times == [Duration::ZERO; 3] && self.limits.states == 0 && self.scheduler.lanes == 1;
        if all_at_once && served.count() + preempted < decoding.len() {
            return Err(format!("of {decoding:?} somebody has no row in {rows:?}"));
        }
        self.scheduler.check()?;
        Ok(moves)
    }

    fn submit_planned(&mut self) -> Result<(), StepError> {
        let mut outputs = Vec::new();
        self.scheduler.write_outputs(&mut outputs);
        let ticket = self.runner.submit(&self.scheduler.step(&[], &outputs))?;
        self.in_flight.push_back(ticket);
        Ok(())
    }

    /// Plans ahead, collects, applies. The outer error is one of the page accounting.
    fn collect(
        &mut self,
        ticket: Ticket,
        mut submitted: Result<(), StepError>,
    ) -> Result<Result<(), StepError>, String> {
        let may_plan = submitted.is_ok() && self.in_flight.len() < self.scheduler.lanes;
        self.ahead = may_plan && self.scheduler.plan_ahead(Instant::now(), |kind| self.runner.carries(kind));
        if self.ahead {
            self.scheduler.check()?;
            submitted = self.submit_planned();
        }
        let mut outcome = self.apply(ticket);
        // A step that was not submitted may have read what an older one has not written.
        while outcome.is_ok()
            && submitted.is_err()
            && let Some(ticket) = self.in_flight.pop_front()
        {
            outcome = self.apply(ticket);
        }
        Ok(outcome.and(submitted))
    }

    fn apply(&mut self, ticket: Ticket) -> Result<(), StepError> {
        let mut answer = StepOutput::default();
        self.runner.collect(ticket, &mut answer)?;
        self.scheduler.apply(&mut answer, Instant::now())
    }

    fn listen(&mut self) {
        self.news = std::mem::take(&mut self.scheduler.events);
        for (request, event) in &self.news {
            let heard = self.heard.get_mut(request).expect("a known request");
            assert!(!heard.failed, "nothing comes after a failure");
            match event.clone() {
                Event::Started { cached_tokens, .. } => {
                    assert_eq!(heard.started.replace(cached_tokens), None, "started twice");
                }
                Event::Prefilled { .. } => {}
                Event::PromptScores { from, scores } => {
                    assert_eq!(heard.scores.replace((from, scores)), None, "scored twice");
                }
                Event::Embedding { values } => {
                    assert_eq!(heard.embedding.replace(values), None, "embedded twice");
                }
                Event::Token { branch, token, .. } => {
                    let branch = heard.branches.entry(branch).or_default();
                    assert_eq!(branch.end, None, "a token after the end");
                    branch.tokens.push(token);
                }
                Event::Finished { branch, reason, usage, .. } => {
                    let branch = heard.branches.entry(branch).or_default();
                    assert_eq!(branch.end.replace((reason, usage)), None, "ended twice");
                }
                Event::Failed(_) => heard.failed = true,
            }
        }
    }
}
