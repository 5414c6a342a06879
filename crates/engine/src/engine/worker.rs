//! The loop of the engine thread: commands, a step, its results. It sleeps when it is idle.

use std::{
    any::Any,
    collections::{HashMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, PoisonError,
        atomic::Ordering,
        mpsc::{Receiver, RecvTimeoutError, Sender},
    },
    time::{Duration, Instant},
};

use paguro_backend::{Output, Runner, StepError, StepOutput, Ticket};

use super::tiers::{Loaded, Saving};
use crate::{
    FailureSink,
    adapters::{Loading, RequestAdapters},
    encoder::Encoder,
    handle::{Command, EventSender, Shared},
    request::Event,
    scheduler::Scheduler,
    speculation::DraftRunner,
};

/// Time for which the encoder computes while nothing else does, before commands are obeyed.
const ENCODER_TURN: Duration = Duration::from_millis(20);

/// State of the engine thread.
pub(super) struct Worker {
    pub(super) scheduler: Scheduler,
    pub(super) runner: Box<dyn Runner>,
    pub(super) commands: Receiver<Command>,
    /// Clients by the number of their request.
    pub(super) clients: HashMap<u64, Client>,
    pub(super) shared: Arc<Shared>,
    /// Outputs of a step; the vector is reused.
    pub(super) outputs: Vec<Output<'static>>,
    pub(super) answer: StepOutput,
    /// Units that were loaded from other tiers.
    pub(super) loaded: (Sender<Loaded>, Receiver<Loaded>),
    /// Steps that are submitted and not collected, the oldest first, with the time of their submission.
    pub(super) in_flight: VecDeque<(Ticket, Instant)>,
    /// Computes rows of pictures, if the model sees.
    pub(super) encoder: Option<Encoder>,
    /// The model that drafts, if there is one, and its time since the last step.
    pub(super) drafter: Option<DraftRunner>,
    pub(super) drafting: Duration,
    /// Adapters that are being loaded.
    pub(super) loading: VecDeque<Loading>,
    /// Receiver of failures.
    pub(super) failures: Option<FailureSink>,
    /// Ends when nothing is left to do.
    pub(super) stopping: bool,
}

/// A request that has not ended.
pub(super) struct Client {
    pub(super) events: EventSender,
    pub(super) prompt_tokens: usize,
    pub(super) adapters: RequestAdapters,
    /// Branches that have not ended.
    pub(super) open: usize,
    /// True if the request has left the queue, by a start or an end.
    pub(super) started: bool,
}

impl Worker {
    /// Runs the loop. A panic closes the channels, which wakes all waiting callers, and is reported to later ones.
    pub(super) fn run_guarded(mut self) {
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run()));
        self.scheduler.send_end();
        let reason = match outcome {
            Ok(()) => "it was shut down".to_owned(),
            Err(panic) => {
                let reason = format!("a defect: {}", panic_message(panic.as_ref()));
                self.report_failure(&reason);
                reason
            }
        };
        // Only a shutdown sets another reason.
        let _ = self.shared.stopped.set(reason);
    }

    fn run(&mut self) {
        loop {
            while let Ok(command) = self.commands.try_recv() {
                self.obey(command);
            }
            if !self.scheduler.is_idle() {
                self.scheduler.expire(Instant::now());
            }
            self.load_adapters();
            self.take_loaded();
            self.scheduler.settle_masks();
            if self.scheduler.has_work() || !self.in_flight.is_empty() {
                self.step();
            } else if !self.scheduler.is_idle() {
                self.publish();
                self.wait_for_load();
            } else if !self.loading.is_empty() && !self.stopping {
                self.publish();
            } else if self.stopping {
                self.finish_saves();
                self.publish();
                return;
            } else {
                self.abandon_picture();
                self.publish();
                if cfg!(debug_assertions)
                    && let Err(problem) = self.check()
                {
                    panic!("page accounting is wrong: {problem}");
                }
                let command = match self.save_in_idle_time() {
                    Saving::Some => continue,
                    Saving::Full => match self.commands.recv_timeout(Duration::from_millis(5)) {
                        Err(RecvTimeoutError::Timeout) => continue,
                        received => received.map_err(|_| ()),
                    },
                    // Sleeps until a command arrives. Fails if there are no handles left.
                    Saving::Done => self.commands.recv().map_err(|_| ()),
                };
                match command {
                    Ok(command) => self.obey(command),
                    Err(()) => return,
                }
            }
        }
    }

    /// Recounts pages and states.
    pub(super) fn check(&self) -> Result<(), String> {
        self.drafter.iter().try_for_each(DraftRunner::check)?;
        self.scheduler.check()
    }

    /// Loads adapters for a few milliseconds.
    fn load_adapters(&mut self) {
        if let Some(loading) = self.loading.front_mut()
            && loading.advance(self.runner.as_mut())
        {
            self.loading.pop_front();
        }
    }

    fn step(&mut self) {
        let begin = Instant::now();
        match self.run_step() {
            Ok(Some(in_flight)) => {
                self.shared.is_failing.store(false, Ordering::Relaxed);
                let drafting = std::mem::take(&mut self.drafting);
                let duration = begin.elapsed().saturating_sub(drafting);
                self.scheduler.record_time(in_flight.time_of_one(duration));
                self.scheduler.record_drafting(drafting);
                // Before the encoder's turn, which takes longer than a token may be late.
                self.publish();
                self.encode(self.scheduler.encoder_time());
            }
            // Nothing else can be computed; the time bounds how late commands are obeyed.
            Ok(None) if self.encode(ENCODER_TURN) => {}
            Ok(None) => self.wait_for_parts(),
            Err(error) => {
                // Later steps may have read what the failed one has not written, so their results are dropped.
                while let Some((ticket, _)) = self.in_flight.pop_front() {
                    let _ = self.runner.collect(ticket, &mut self.answer);
                }
                if !self.shared.is_failing.swap(true, Ordering::Relaxed) {
                    self.report_failure(&error.to_string());
                }
                self.scheduler.fail(&error);
                self.scheduler.record_time(begin.elapsed());
            }
        }
        self.save_some();
        self.publish();
    }

    fn report_failure(&self, reason: &str) {
        if let Some(FailureSink(sink)) = &self.failures {
            sink(reason);
        }
    }

    /// Computes rows of pictures for this time at most. Returns false if there are none to compute.
    pub(super) fn encode(&mut self, time: Duration) -> bool {
        let Self { encoder: Some(encoder), scheduler, .. } = self else { return false };
        if encoder.busy().is_some_and(|key| !scheduler.wants_picture(&key)) {
            encoder.abandon();
        }
        if encoder.busy().is_none() {
            let Some(job) = scheduler.next_picture() else { return false };
            if scheduler.encoder_cache.contains(&job.key) {
                return false; // the next plan finds it
            }
            encoder.begin(job);
        }
        if let Some(done) = encoder.advance(time) {
            scheduler.finish_picture(done);
        }
        scheduler.record_encoder(encoder.computed);
        true
    }

    /// Drops the picture that is encoded for a request that has ended.
    fn abandon_picture(&mut self) {
        self.encoder.iter_mut().for_each(Encoder::abandon);
    }

    /// Submits the next steps, and collects the oldest one. Returns `None` if no step was in flight.
    fn run_step(&mut self) -> Result<Option<InFlight>, StepError> {
        let submitted = self.submit_steps();
        let steps = self.in_flight.len();
        let Some((ticket, begin)) = self.in_flight.pop_front() else { return submitted.map(|()| None) };
        // The device gets its next step while it computes this one.
        let submitted = submitted.and_then(|()| self.submit_ahead());
        self.runner.collect(ticket, &mut self.answer)?;
        let since_submission = begin.elapsed();
        self.scheduler.apply(&mut self.answer, Instant::now())?;
        if let Err(error) = submitted {
            // The steps in flight are older than the one that was not submitted, and may be the cause.
            while let Some((ticket, _)) = self.in_flight.pop_front() {
                self.runner.collect(ticket, &mut self.answer)?;
                self.scheduler.apply(&mut self.answer, Instant::now())?;
            }
            return Err(error);
        }
        self.draft();
        Ok(Some(InFlight { steps, since_submission }))
    }

    /// Submits steps until there is one for each lane, or nothing to compute.
    fn submit_steps(&mut self) -> Result<(), StepError> {
        while self.in_flight.len() < self.scheduler.lanes && self.plan_and_submit()? {}
        Ok(())
    }

    /// Plans and submits the step that follows the one that is about to be collected, if the device carries its tokens.
    fn submit_ahead(&mut self) -> Result<(), StepError> {
        let drafter = self.drafter.as_ref();
        let drafts = drafter.is_some_and(|drafter| self.scheduler.will_draft_by_model(drafter));
        let may_plan = self.in_flight.len() < self.scheduler.lanes && !drafts;
        if may_plan && self.scheduler.plan_ahead(Instant::now(), |kind| self.runner.carries(kind)) {
            self.rescue();
            self.submit_planned()?;
        }
        Ok(())
    }

    /// Drafts the next tokens with a model, unless the next step is submitted. A model whose step fails drafts no more.
    fn draft(&mut self) {
        let begin = Instant::now();
        if let Some(drafter) = self.drafter.as_mut().filter(|_| self.in_flight.is_empty())
            && self.scheduler.draft_by_model(drafter).is_err()
        {
            self.drafter = None;
            self.scheduler.draft_without_model();
        }
        self.drafting = begin.elapsed();
        self.scheduler.start_masks();
    }

    /// Plans a step and submits it. Returns false if all sequences wait for loads, masks or steps in flight.
    fn plan_and_submit(&mut self) -> Result<bool, StepError> {
        self.scheduler.plan(Instant::now());
        self.start_loads();
        self.rescue();
        if !self.scheduler.events.is_empty() {
            // Starts are published before the step, which may take long.
            self.publish();
        }
        if !self.scheduler.moves().is_empty() {
            self.runner.move_pages(self.scheduler.moves())?;
        }
        if self.scheduler.planned_rows() == 0 {
            return Ok(false);
        }
        self.submit_planned()?;
        Ok(true)
    }

    /// Submits the step that was planned last.
    fn submit_planned(&mut self) -> Result<(), StepError> {
        // The text model has the processor for itself.
        self.encoder.iter_mut().for_each(Encoder::pause);
        let Self { scheduler, runner, .. } = self;
        let mut outputs = recycle(std::mem::take(&mut self.outputs));
        scheduler.write_outputs(&mut outputs);
        let given = scheduler.given();
        let submitted = runner.submit(&scheduler.step(&given, &outputs));
        drop(given);
        self.outputs = recycle(outputs);
        self.in_flight.push_back((submitted?, Instant::now()));
        Ok(())
    }

    /// Publishes the counters before the events, so that a reader of an event sees its step counted.
    pub(super) fn publish(&mut self) {
        self.scheduler.send_kv_events();
        *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner) = self.scheduler.stats();
        for (request, event) in self.scheduler.events.drain(..) {
            let Some(client) = self.clients.get_mut(&request) else { continue };
            let starts = matches!(event, Event::Started { .. });
            match event {
                Event::Finished { .. } => client.open -= 1,
                Event::Failed(_) => client.open = 0,
                Event::Started { .. }
                | Event::Prefilled { .. }
                | Event::Token { .. }
                | Event::PromptScores { .. }
                | Event::Embedding { .. } => {}
            }
            if !client.started && (starts || client.open == 0) {
                client.started = true;
                client.adapters.start();
                self.shared.queue.leave(client.prompt_tokens);
            }
            client.events.send(event);
            if client.open == 0 {
                client.adapters.leave(true);
                self.clients.remove(&request);
            }
        }
    }
}

/// Steps that were in flight when one was collected.
struct InFlight {
    /// Their number, that one included.
    steps: usize,
    /// Time since the submission of that one.
    since_submission: Duration,
}

impl InFlight {
    /// Returns the time that the collected step would take alone, if the engine waited `interval` for it. Stages that compute other
    /// steps at the same time make the interval shorter, and those that compute them before make the time since submission longer.
    fn time_of_one(&self, interval: Duration) -> Duration {
        let all = interval * u32::try_from(self.steps).unwrap_or(u32::MAX);
        if self.steps > 1 { all.min(self.since_submission) } else { interval }
    }
}

/// An empty vector with the memory of another one, whose elements may have borrowed from something else. (Collecting
/// a vector's own iterator reuses its memory if the types have the same size.)
fn recycle<'to>(mut outputs: Vec<Output<'_>>) -> Vec<Output<'to>> {
    outputs.clear();
    outputs.into_iter().map(|_| unreachable!("it was cleared")).collect()
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a message")
}

#[cfg(test)]
mod tests {
    use paguro_backend::OutputKind;

    use super::*;

    #[test]
    fn recycled_outputs_keep_their_memory() {
        let mut outputs = Vec::with_capacity(100);
        outputs.push(Output { row: 0, kind: OutputKind::Score { token: 1, top: 0 } });
        let place = outputs.as_ptr() as usize;
        let outputs = recycle(outputs);
        assert_eq!((outputs.len(), outputs.capacity(), outputs.as_ptr() as usize), (0, 100, place));
    }
}
