//! Several steps in flight: stages compute at the same time, and a device that fails ends the steps that it has.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use paguro_backend::{
    AdapterId, AttentionMode, Backend, Capacity, Carried, DeviceLayout, ExpertCount, KernelCount, KvDtype,
    Limits, LoadError, LowRank, Matrix, MatrixId, Output, OutputKind, OutputValue, PacedRunner, PageContent,
    PageFormat, PageId, PageMove, Program, Runner, SampleRequest, SamplingParams, StateId, Step, StepError,
    StepOutput, StepSequence, Ticket, Weights,
    reference::{KvRounding, Reference},
};
use paguro_backend_conformance::{ModelShape, RandomModel};
use paguro_backend_stages::Stages;

static REFERENCE: Reference = Reference { kv: KvRounding::F16, poison: Some(1) };

/// Called before each step of a stage, and before copies of pages.
type Hook = Arc<dyn Fn() -> Result<(), StepError> + Send + Sync>;

/// The reference, with a hook.
struct Hooked(Hook);

struct HookedRunner(Box<dyn Runner>, Hook);

impl Backend for Hooked {
    fn name(&self) -> &str {
        "hooked"
    }

    fn capacity(&self) -> Capacity {
        REFERENCE.capacity()
    }

    fn page_bytes(&self, program: &Program, block_size: usize, kv_dtype: KvDtype) -> usize {
        REFERENCE.page_bytes(program, block_size, kv_dtype)
    }

    fn state_bytes(&self, program: &Program) -> usize {
        REFERENCE.state_bytes(program)
    }

    fn device_layout(&self, matrix: &Matrix) -> DeviceLayout {
        REFERENCE.device_layout(matrix)
    }

    fn weight_bytes(&self, program: &Program, weights: &Weights) -> u64 {
        REFERENCE.weight_bytes(program, weights)
    }

    fn buffer_bytes(&self, program: &Program, limits: &Limits) -> u64 {
        REFERENCE.buffer_bytes(program, limits)
    }

    fn load(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        let runner = REFERENCE.load(program, weights, limits)?;
        Ok(Box::new(HookedRunner(runner, Arc::clone(&self.0))))
    }

    fn runs_tower(&self, _: &Program) -> bool {
        false
    }

    fn load_tower(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<PacedRunner, LoadError> {
        REFERENCE.load_tower(program, weights, limits)
    }
}

impl Runner for HookedRunner {
    fn submit(&mut self, step: &Step<'_>) -> Result<Ticket, StepError> {
        (self.1)()?;
        self.0.submit(step)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<(), StepError> {
        self.0.collect(ticket, out)
    }

    fn carries(&self, kind: &OutputKind<'_>) -> bool {
        self.0.carries(kind)
    }

    fn load_head(
        &mut self,
        program: &Program,
        weights: Weights,
        shared: &[(MatrixId, MatrixId)],
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        self.0.load_head(program, weights, shared, limits)
    }

    fn move_pages(&mut self, moves: &[PageMove]) -> Result<(), StepError> {
        (self.1)()?;
        self.0.move_pages(moves)
    }

    fn page_format(&self) -> Option<PageFormat> {
        self.0.page_format()
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), StepError> {
        self.0.read_pages(pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], bytes: &[u8], content: PageContent) -> Result<(), StepError> {
        self.0.write_pages(pages, bytes, content)
    }

    fn load_adapter(&mut self, id: AdapterId, pairs: &[LowRank]) -> Result<(), LoadError> {
        self.0.load_adapter(id, pairs)
    }

    fn unload_adapter(&mut self, id: AdapterId) {
        self.0.unload_adapter(id);
    }

    fn kernel_counts(&self) -> Vec<KernelCount> {
        self.0.kernel_counts()
    }

    fn expert_counts(&mut self) -> Result<Vec<ExpertCount>, StepError> {
        self.0.expert_counts()
    }
}

/// Loads a model in two stages, before whose steps the hooks are called. Returns the pages of a copy of its states, too.
fn load(model: &RandomModel, first: Hook, second: Hook) -> (Box<dyn Runner>, usize) {
    let limits = Limits {
        block_size: 16,
        pages: 64,
        max_rows: 16,
        max_sequences: 2,
        max_outputs: 16,
        max_context: 32,
        states: if model.program.state.is_empty() { 0 } else { 4 },
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
        expert_slots: None,
    };
    let (first, second) = (Hooked(first), Hooked(second));
    let stages = Stages::new(vec![&first as &dyn Backend, &second], Box::new(|_: &Program| vec![2]));
    let parts = stages.checkpoint_pages(&model.program, limits.block_size, limits.kv_dtype);
    (stages.load(&model.program, model.weights.clone(), limits).unwrap(), parts)
}

fn nothing() -> Hook {
    Arc::new(|| Ok(()))
}

/// Submits these tokens from position `start` on of a sequence, which has a page and a state of its number.
fn submit(runner: &mut dyn Runner, program: &Program, sequence: u32, start: usize, tokens: &[u32]) -> Ticket {
    let pages = vec![PageId(sequence); program.kv.groups.len()];
    let sequences = [StepSequence {
        rows: 0..tokens.len(),
        start,
        tables: 0..pages.len(),
        state: program.state.in_place(StateId(sequence)),
    }];
    let outputs = [Output { row: tokens.len() - 1, kind: OutputKind::Logits }];
    let step = Step { tokens, sequences: &sequences, pages: &pages, outputs: &outputs, ..Step::default() };
    runner.submit(&step).unwrap()
}

fn collect(runner: &mut dyn Runner, ticket: Ticket) -> Result<OutputValue, StepError> {
    let mut out = StepOutput::default();
    runner.collect(ticket, &mut out).map(|()| out.outcomes.remove(0))
}

fn shape(mixers: &'static str) -> ModelShape {
    ModelShape { windows: vec![None; 4], mixers, ..ModelShape::default() }
}

/// Each stage begins its second step only when the other one computes too, so one at a time would never come to an end.
#[test]
fn stages_compute_at_the_same_time() {
    /// Lets two threads go on together.
    #[derive(Default)]
    struct Meeting(Mutex<usize>, Condvar);

    impl Meeting {
        fn meet(&self) -> Result<(), StepError> {
            let mut count = self.0.lock().unwrap();
            *count += 1;
            self.1.notify_all();
            let goal = count.next_multiple_of(2);
            let alone = |count: &mut usize| *count < goal;
            let (count, waited) = self.1.wait_timeout_while(count, Duration::from_secs(20), alone).unwrap();
            drop(count);
            match waited.timed_out() {
                true => Err(StepError::Device("the other stage does nothing".into())),
                false => Ok(()),
            }
        }
    }

    /// Meets the other stage at some of its steps.
    fn meets(meeting: &Arc<Meeting>, at: fn(usize) -> bool) -> Hook {
        let (meeting, steps) = (Arc::clone(meeting), AtomicUsize::new(0));
        Arc::new(move || match at(steps.fetch_add(1, Ordering::Relaxed)) {
            true => meeting.meet(),
            false => Ok(()),
        })
    }

    let model = shape("").build(1);
    let meeting = Arc::new(Meeting::default());
    // The first stage is a step ahead.
    let first = meets(&meeting, |step| step > 0);
    let second = meets(&meeting, |step| step < 3);
    let mut runner = load(&model, first, second).0;
    assert_eq!(runner.lanes(), 2);
    let mut tickets = VecDeque::new();
    let mut answers = Vec::new();
    for step in 0..4 {
        let (sequence, start) = (1 + step % 2, 3 * (step as usize / 2));
        tickets.push_back(submit(&mut *runner, &model.program, sequence, start, &[1, 2, 3]));
        if step > 0 {
            answers.push(collect(&mut *runner, tickets.pop_front().unwrap()).unwrap());
        }
    }
    answers.push(collect(&mut *runner, tickets.pop_front().unwrap()).unwrap());
    // Both sequences have the same tokens.
    assert!(answers[0] == answers[1] && answers[2] == answers[3] && answers[0] != answers[2]);
}

/// Chunks of a prompt in flight at the same time, and copies of pages and states between them, have the results of steps that are
/// collected one by one.
#[test]
fn steps_and_copies_pass_the_stages_in_order() {
    for mixers in ["", "daca"] {
        let model = shape(mixers).build(1);
        let tokens: Vec<u32> = (5..13).collect();
        let run = |in_flight: bool| {
            let (mut runner, parts) = load(&model, nothing(), nothing());
            let mut tickets = VecDeque::new();
            let mut answers = Vec::new();
            let mut step = |runner: &mut dyn Runner, sequence, start, tokens| {
                tickets.push_back(submit(runner, &model.program, sequence, start, tokens));
                while tickets.len() > usize::from(in_flight) {
                    answers.push(collect(runner, tickets.pop_front().unwrap()).unwrap());
                }
            };
            step(&mut *runner, 1, 0, &tokens[..4]);
            step(&mut *runner, 1, 4, &tokens[4..]);
            // Sequence 2 continues from copies of what sequence 1 has written.
            let (state, page) = (StateId(1), |part: usize| PageId(3 + part as u32));
            let save = |part| PageMove::SaveState { state, part, to: page(part) };
            let restore = |part| PageMove::RestoreState { from: page(part), part, state: StateId(2) };
            let mut moves = vec![PageMove::Copy { from: PageId(1), to: PageId(2) }];
            moves.extend((0..parts).map(save).chain((0..parts).map(restore)));
            runner.move_pages(&moves).unwrap();
            assert!(runner.move_pages(&[save(parts)]).is_err(), "a part that does not exist");
            step(&mut *runner, 2, 8, &[3]);
            step(&mut *runner, 1, 8, &[3]);
            step(&mut *runner, 1, 9, &[4]);
            answers.truncate(4);
            assert!(answers[2] == answers[3] && answers[1] != answers[2]);
            answers
        };
        assert_eq!(run(true), run(false), "mixers {mixers:?}");
    }
}

/// A step on a device that fails ends with its error. The steps of other models go on, and later ones if the device does. After copies
/// of pages that failed, no step has a result.
#[test]
fn a_device_that_fails_ends_its_steps() {
    let model = shape("").build(1);
    for fails_first in [true, false] {
        let is_lost = Arc::new(AtomicBool::new(true));
        let lost = Arc::clone(&is_lost);
        let failing: Hook = Arc::new(move || match lost.load(Ordering::Relaxed) {
            true => Err(StepError::Device("the device was lost".into())),
            false => Ok(()),
        });
        let (mut runner, _) = match fails_first {
            true => load(&model, failing, nothing()),
            false => load(&model, nothing(), failing),
        };
        let (mut other, _) = load(&model, nothing(), nothing());
        let program = &model.program;
        let tickets = [1, 2].map(|sequence| submit(&mut *runner, program, sequence, 0, &[1, 2, 3]));
        let third = submit(&mut *other, program, 1, 0, &[1, 2, 3]);
        for ticket in tickets {
            let error = collect(&mut *runner, ticket).unwrap_err();
            assert_eq!(error.to_string(), "the device was lost");
        }
        let expected = collect(&mut *other, third).unwrap();
        is_lost.store(false, Ordering::Relaxed);
        let ticket = submit(&mut *runner, program, 1, 0, &[1, 2, 3]);
        assert_eq!(collect(&mut *runner, ticket).unwrap(), expected);
        for fails in [true, false] {
            is_lost.store(fails, Ordering::Relaxed);
            runner.move_pages(&[PageMove::Copy { from: PageId(1), to: PageId(2) }]).unwrap();
            let ticket = submit(&mut *runner, program, 1, 0, &[1, 2, 3]);
            let error = collect(&mut *runner, ticket).unwrap_err();
            assert_eq!(error.to_string(), "pages were not copied: the device was lost; load the model again");
        }
    }
}

/// A step that carries a token of the oldest one, with a step of another sequence between them, equals one whose token the host knows.
/// If the oldest one fails, so does the step that carries its token.
#[test]
fn tokens_pass_from_the_last_stage_to_the_first() {
    let model = shape("").build(1);
    let params = SamplingParams::default();
    let request = SampleRequest {
        params: &params,
        draw: 0,
        history: &[],
        prompt_tokens: 3,
        mask: None,
        logprobs: None,
    };
    let submit =
        |runner: &mut dyn Runner, sequence: u32, start: usize, tokens: &[u32], carried: &[Carried]| {
            let pages = vec![PageId(sequence); model.program.kv.groups.len()];
            let sequences =
                [StepSequence { rows: 0..tokens.len(), start, tables: 0..pages.len(), state: None }];
            let outputs = [Output { row: tokens.len() - 1, kind: OutputKind::Sample(request) }];
            let (sequences, pages) = (&sequences, &pages);
            runner.submit(&Step { tokens, carried, sequences, pages, outputs: &outputs, ..Step::default() })
        };
    let token = |answer: OutputValue| match answer {
        OutputValue::Sampled(sampled) => sampled.token,
        other => panic!("{other:?}"),
    };
    let carried = [Carried { row: 0, output: 0, given: None }];

    let (mut runner, _) = load(&model, nothing(), nothing());
    let runner = &mut *runner;
    assert!(submit(runner, 1, 0, &[0], &carried).is_err(), "nothing is in flight");
    let first = submit(runner, 1, 0, &[1, 2, 3], &[]).unwrap();
    let second = submit(runner, 2, 0, &[1, 2, 4], &[]).unwrap();
    let unknown = [Carried { row: 0, output: 1, given: None }];
    assert!(submit(runner, 1, 3, &[0], &unknown).is_err(), "the step has one output");
    let third = submit(runner, 1, 3, &[0], &carried).unwrap();
    assert!(submit(runner, 3, 0, &[1], &[]).is_err(), "a step for each stage, and one more");
    let known = token(collect(runner, first).unwrap());
    let fourth = submit(runner, 2, 3, &[0], &carried).unwrap();
    let other = token(collect(runner, second).unwrap());
    let after = [third, fourth].map(|ticket| token(collect(runner, ticket).unwrap()));
    for (sequence, known, after) in [(1, known, after[0]), (2, other, after[1])] {
        let ticket = submit(runner, sequence, 3, &[known], &[]).unwrap();
        assert_eq!(token(collect(runner, ticket).unwrap()), after, "sequence {sequence}");
    }

    let is_first = AtomicBool::new(true);
    let fails_once: Hook = Arc::new(move || match is_first.swap(false, Ordering::Relaxed) {
        true => Err(StepError::Device("the device was lost".into())),
        false => Ok(()),
    });
    let (mut runner, _) = load(&model, nothing(), fails_once);
    let first = submit(&mut *runner, 1, 0, &[1, 2, 3], &[]).unwrap();
    let second = submit(&mut *runner, 1, 3, &[0], &carried).unwrap();
    let errors = [first, second].map(|ticket| collect(&mut *runner, ticket).unwrap_err().to_string());
    assert_eq!(errors, ["the device was lost", "the step before failed: the device was lost"]);
}

/// A defect in a thread of a stage is a defect of its caller.
#[test]
fn a_panic_of_a_stage_reaches_the_caller() {
    let model = shape("").build(1);
    let panics: Hook = Arc::new(|| panic!("a stage was made to panic"));
    let (mut runner, _) = load(&model, nothing(), panics);
    let ticket = submit(&mut *runner, &model.program, 1, 0, &[1]);
    let collected = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| collect(&mut *runner, ticket)));
    let panic = collected.expect_err("a panic");
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"a stage was made to panic"));
}
