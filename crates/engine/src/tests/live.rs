//! The engine thread with real clients: blocking and async readers, storms of cancellations, failures, shutdown.

use std::{
    thread,
    time::{Duration, Instant},
};

use paguro_backend::Weights;
use paguro_model::tokenizer::SpecialText;

use super::fake::{Control, Expected, FakeBackend, Fault, VOCAB, oracle, program, tokenizer};
use crate::{
    Engine, EngineError, EngineOptions, Event, FinishReason, Generation, Grammar, ModelParts, PageBudget,
    Request, RequestError, SubmitError, Usage,
};

const MAX_CONTEXT: usize = 200;

fn options() -> EngineOptions {
    EngineOptions {
        block_size: 4,
        pages: PageBudget::Pages(60),
        max_batch_tokens: 32,
        max_sequences: 16,
        ..EngineOptions::default()
    }
}

fn start(windows: &[Option<u32>], options: EngineOptions) -> (Engine, Control) {
    start_with(windows, options, Vec::new()).unwrap()
}

/// Starts an engine whose device carries tokens from step to step, or does not.
fn start_that_carries(carries: bool, windows: &[Option<u32>], options: EngineOptions) -> (Engine, Control) {
    let (engine, control) = start(windows, options);
    if carries {
        control.carry();
    }
    (engine, control)
}

fn start_with(
    windows: &[Option<u32>],
    options: EngineOptions,
    stop_tokens: Vec<u32>,
) -> Result<(Engine, Control), EngineError> {
    let backend = FakeBackend::default();
    let parts = ModelParts {
        program: program(windows, false, false),
        weights: Weights::default(),
        tokenizer: Some(tokenizer()),
        stop_tokens,
        max_context: MAX_CONTEXT,
    };
    Ok((Engine::start(&backend, parts, options)?, backend.control))
}

fn request(i: usize) -> Request {
    Request {
        max_tokens: Some(10 + i % 17),
        ..Request::new((0..4 + i % 23).map(|at| ((i * 5 + at * 3) % VOCAB) as u32).collect())
    }
}

/// All received events.
#[derive(Clone, Debug, Default, PartialEq)]
struct Heard {
    branches: Vec<Branch>,
    failed: Option<RequestError>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Branch {
    tokens: Vec<u32>,
    text: String,
    end: Option<(FinishReason, Usage)>,
}

impl Heard {
    fn add(&mut self, event: Event) {
        let mut of = |branch: usize| {
            self.branches.resize(self.branches.len().max(branch + 1), Branch::default());
            self.branches.swap_remove(branch)
        };
        match event {
            Event::Token { branch, token, text, .. } => {
                let mut state = of(branch);
                state.tokens.push(token);
                state.text += &text;
                self.put(branch, state);
            }
            Event::Finished { branch, text, reason, usage, .. } => {
                let mut state = of(branch);
                state.text += &text;
                state.end = Some((reason, usage));
                self.put(branch, state);
            }
            Event::Failed(error) => self.failed = Some(error),
            Event::Started { .. }
            | Event::Prefilled { .. }
            | Event::PromptScores { .. }
            | Event::Embedding { .. } => {}
        }
    }

    /// Undoes the `swap_remove` of `branch`.
    fn put(&mut self, branch: usize, state: Branch) {
        self.branches.push(state);
        let last = self.branches.len() - 1;
        self.branches.swap(branch, last);
    }

    fn reason(&self) -> &FinishReason {
        &self.branches[0].end.as_ref().expect("an end").0
    }
}

fn read(mut generation: Generation) -> Heard {
    let mut heard = Heard::default();
    while let Some(event) = generation.next_blocking() {
        heard.add(event);
    }
    heard
}

fn assert_starts(generation: &mut Generation) {
    let event = generation.next_blocking();
    assert!(matches!(event, Some(Event::Started { cached_tokens: 0, .. })), "{event:?}");
}

fn assert_answers(heard: &Heard, windows: &[Option<u32>], request: &Request) {
    for (branch, answer) in heard.branches.iter().enumerate() {
        let Expected { tokens, reason, .. } = oracle(windows, false, MAX_CONTEXT, request, branch);
        assert_eq!(answer.tokens, tokens);
        assert_eq!(answer.end.as_ref().map(|(reason, _)| reason), reason.as_ref());
        let mut all = request.prompt.clone();
        all.extend(&tokens);
        let text = |tokens: &[u32]| tokenizer().decode(tokens, SpecialText::Hide);
        // A character that the prompt has begun and the answer completes belongs to the answer.
        let whole = text(&all);
        // Bytes that are no character do not.
        let valid = whole.replace('\u{fffd}', "");
        assert!(valid.ends_with(&answer.text), "{whole:?} does not end with {:?}", answer.text);
        assert!(!answer.text.contains('\u{fffd}'), "{:?}", answer.text);
    }
    assert_eq!(heard.branches.len(), request.branches);
}

fn assert_clean(engine: &Engine) {
    let handle = engine.handle();
    assert_eq!(handle.check_pages().unwrap(), Ok(()));
    let stats = handle.stats();
    assert_eq!((stats.running, stats.waiting, stats.pages_used), (0, 0, 0), "{stats:?}");
}

#[test]
fn blocking_and_async_readers_hear_the_same() {
    let windows = [None, Some(9)];
    let (engine, _) = start(&windows, options());
    let request = Request { branches: 3, ..request(7) };
    let blocking = read(engine.handle().generate(request.clone()).unwrap());
    assert_answers(&blocking, &windows, &request);
    let handle = engine.handle();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let awaited = runtime.block_on(async {
        let mut generation = handle.generate(request.clone()).unwrap();
        let mut heard = Heard::default();
        while let Some(event) = generation.next().await {
            heard.add(event);
        }
        assert_eq!(generation.next().await, None);
        heard
    });
    assert_eq!(awaited.branches.len(), 3);
    for (a, b) in blocking.branches.iter().zip(&awaited.branches) {
        assert_eq!((&a.tokens, &a.text), (&b.tokens, &b.text));
    }
    assert_clean(&engine);
}

#[test]
fn sixty_four_clients_with_pages_for_twenty_all_get_their_solo_answers() {
    [false, true].into_iter().for_each(sixty_four_clients);
}

fn sixty_four_clients(carries: bool) {
    let windows = [None];
    let (engine, _) = start_that_carries(
        carries,
        &windows,
        EngineOptions { max_sequences: 32, pages: PageBudget::Pages(130), ..options() },
    );
    let clients: Vec<_> = (0..64)
        .map(|i| {
            let handle = engine.handle();
            thread::spawn(move || {
                let request = Request { max_tokens: Some(60 + i % 40), ..request(i) };
                (read(handle.generate(request.clone()).unwrap()), request)
            })
        })
        .collect();
    for client in clients {
        let (heard, request) = client.join().unwrap();
        assert_answers(&heard, &windows, &request);
    }
    assert!(engine.handle().stats().preemptions > 0, "{:?}", engine.handle().stats());
    assert_clean(&engine);
}

#[test]
fn a_storm_of_cancellations_leaves_nothing_behind() {
    [false, true].into_iter().for_each(storm_of_cancellations);
}

fn storm_of_cancellations(carries: bool) {
    let windows = [None, Some(6)];
    let (engine, _) =
        start_that_carries(carries, &windows, EngineOptions { pages: PageBudget::Pages(160), ..options() });
    let clients: Vec<_> = (0..8_usize)
        .map(|client| {
            let handle = engine.handle();
            thread::spawn(move || {
                for i in 0..60 {
                    let request = Request { branches: 1 + i % 3, ..request(client * 60 + i) };
                    let mut generation = handle.generate(request.clone()).unwrap();
                    match (client + i) % 5 {
                        0 => drop(generation),
                        1 => {
                            for _ in 0..i % 11 {
                                generation.next_blocking();
                            }
                        }
                        2 => {
                            let canceller = generation.canceller();
                            let other = thread::spawn(move || canceller.cancel());
                            let heard = read(generation);
                            assert!(heard.branches.iter().all(|branch| branch.end.is_some()));
                            other.join().unwrap();
                        }
                        _ => assert_answers(&read(generation), &windows, &request),
                    }
                }
            })
        })
        .collect();
    clients.into_iter().for_each(|client| client.join().unwrap());
    // Pending cancellations precede this command.
    assert_clean(&engine);
}

#[test]
fn who_reads_late_still_learns_when_it_started() {
    let (engine, _control) = start(&[None], options());
    let handle = engine.handle();
    let mut late = handle.generate(request(1)).unwrap();
    read(handle.generate(request(2)).unwrap());
    let now = Instant::now();
    let Some(Event::Started { at: started, .. }) = late.next_blocking() else { panic!("it started") };
    let Some(Event::Token { at: token, .. }) = late.next_blocking() else { panic!("it has a token") };
    assert!(started < token && token < now, "{started:?}, {token:?}, {now:?}");
}

#[test]
fn a_full_queue_refuses_and_recovers() {
    let (engine, control) = start(&[None], EngineOptions { queue_capacity: 2, ..options() });
    let handle = engine.handle();
    control.hold_after(0);
    let mut first = handle.generate(request(1)).unwrap();
    assert_starts(&mut first);
    let waiting: Vec<_> = (2..4).map(|i| handle.generate(request(i)).unwrap()).collect();
    assert_eq!(handle.generate(request(4)).unwrap_err(), SubmitError::QueueFull { capacity: 2 });
    control.let_go();
    for (i, generation) in waiting.into_iter().enumerate() {
        assert_answers(&read(generation), &[None], &request(i + 2));
    }
    assert_answers(&read(handle.generate(request(4)).unwrap()), &[None], &request(4));
    assert_clean(&engine);
}

#[test]
fn a_queue_that_is_full_of_tokens_refuses_and_recovers() {
    let (engine, control) = start(&[None], EngineOptions { queue_tokens: Some(20), ..options() });
    let handle = engine.handle();
    let prompt = |tokens| Request { max_tokens: Some(2), ..Request::new(vec![5; tokens]) };
    control.hold_after(0);
    let mut first = handle.generate(prompt(9)).unwrap();
    assert_starts(&mut first);
    // A request that waits alone may be longer.
    let long = handle.generate(prompt(30)).unwrap();
    let error = SubmitError::QueueTokensFull { tokens: 1, waiting: 30, capacity: 20 };
    assert_eq!(handle.generate(prompt(1)).unwrap_err(), error);
    drop(long);
    control.let_go();
    let next = loop {
        // Until the engine has processed the end of the long one.
        if let Ok(generation) = handle.generate(prompt(20)) {
            break generation;
        }
    };
    read(next);
    read(first);
    assert_clean(&engine);
}

#[test]
fn a_reader_that_goes_frees_its_pages_before_the_next_step() {
    let (engine, control) = start(&[None], EngineOptions { prefix_cache: false, ..options() });
    let handle = engine.handle();
    let token = |generation: &mut Generation| {
        assert!(matches!(generation.next_blocking(), Some(Event::Token { .. })));
    };
    control.hold_after(0);
    let mut staying = handle.generate(request(12)).unwrap();
    assert_starts(&mut staying);
    let mut going = handle.generate(request(22)).unwrap();
    control.hold_after(1);
    assert_starts(&mut going);
    // The second step has both and is held.
    token(&mut staying);
    let with_both = handle.stats().pages_used;
    drop(going);
    for _ in 2..=3 {
        control.hold_after(1);
        token(&mut staying);
    }
    let stats = handle.stats();
    assert_eq!((stats.steps, stats.last_sequences, stats.running), (3, 1, 1), "{stats:?}");
    assert!(stats.pages_used < with_both, "{stats:?}");
    control.let_go();
    assert_answers(&read(handle.generate(request(3)).unwrap()), &[None], &request(3));
}

#[test]
fn a_deadline_that_has_passed_is_told() {
    let (engine, _) = start(&[None], options());
    let late = Request { deadline: Some(Instant::now()), ..request(8) };
    assert_eq!(read(engine.handle().generate(late).unwrap()).failed, Some(RequestError::DeadlineExceeded));
    let in_time = Request { deadline: Some(Instant::now() + Duration::from_secs(3600)), ..request(8) };
    assert_answers(&read(engine.handle().generate(in_time).unwrap()), &[None], &request(8));
    assert_clean(&engine);
}

#[test]
fn min_tokens_hold_back_stop_tokens_and_stop_strings() {
    let plain = Request { max_tokens: Some(40), ..request(9) };
    let (engine, _) = start(&[None], options());
    let handle = engine.handle();
    let whole = read(handle.generate(plain.clone()).unwrap());
    let stop_tokens = vec![whole.branches[0].tokens[10]];
    let tokens = |request: &Request| read(handle.generate(request.clone()).unwrap()).branches[0].tokens.len();
    let early = Request { stop_tokens: stop_tokens.clone(), ..plain.clone() };
    assert!(tokens(&early) <= 10);
    let late = Request { min_tokens: 25, ..early };
    assert!(tokens(&late) >= 25);
    assert_answers(&read(handle.generate(late.clone()).unwrap()), &[None], &late);

    let text = &whole.branches[0].text;
    let stop: String = text.chars().skip(4).take(3).collect();
    let early = Request { stop_strings: vec![stop.clone()], ..plain.clone() };
    assert!(tokens(&early) < 15);
    let never = Request { min_tokens: 40, ..early };
    let never = read(handle.generate(never).unwrap());
    assert_eq!((&never.branches[0].text, never.reason()), (text, &FinishReason::Length));

    let all = Request { min_tokens: 1, stop_tokens: (0..VOCAB as u32).collect(), ..plain };
    assert_eq!(
        handle.generate(all).unwrap_err().to_string(),
        "`min_tokens` cannot be kept: every token of the vocabulary is a stop token"
    );
}

#[test]
fn requests_that_never_started_leave_the_queue_when_they_are_cancelled() {
    let (engine, control) =
        start(&[None], EngineOptions { queue_capacity: 2, max_sequences: 1, ..options() });
    let handle = engine.handle();
    control.hold_after(0);
    let mut first = handle.generate(request(1)).unwrap();
    first.next_blocking();
    for round in 0..5 {
        let waiting: Vec<_> = (0..2).map(|i| handle.generate(request(round + i)).unwrap()).collect();
        assert!(handle.generate(request(0)).is_err());
        waiting.iter().for_each(|generation| generation.canceller().cancel());
        // Lets one step run, before which the cancellations are obeyed.
        control.hold_after(1);
        for generation in waiting {
            assert_eq!(read(generation).reason(), &FinishReason::Cancelled);
        }
    }
    control.let_go();
    assert_answers(&read(first), &[None], &request(1));
    assert_clean(&engine);
}

#[test]
fn a_slow_reader_holds_up_nobody() {
    let (engine, _) = start(&[None], options());
    let slow = engine.handle().generate(request(3)).unwrap();
    for i in 0..20 {
        assert_answers(&read(engine.handle().generate(request(i)).unwrap()), &[None], &request(i));
    }
    assert_answers(&read(slow), &[None], &request(3));
}

#[test]
fn shutdown_cancels_and_finish_finishes() {
    for finish in [false, true] {
        let (engine, control) = start(&[None], options());
        let handle = engine.handle();
        control.hold_after(3);
        let generations: Vec<_> = (0..24).map(|i| handle.generate(request(i)).unwrap()).collect();
        let ending = thread::spawn(move || if finish { engine.finish() } else { engine.shutdown() });
        while handle.generate(request(0)).map(drop)
            != Err(SubmitError::Stopped { reason: "it was shut down".into() })
        {
            // The engine accepts requests until it processes the shutdown.
            control.hold_after(1);
        }
        control.let_go();
        ending.join().unwrap();
        let heard: Vec<_> = generations.into_iter().map(read).collect();
        if finish {
            heard.iter().enumerate().for_each(|(i, heard)| assert_answers(heard, &[None], &request(i)));
        } else {
            assert!(heard.iter().any(|heard| *heard.reason() == FinishReason::Cancelled));
            assert!(heard.iter().all(|heard| heard.failed.is_none()));
        }
        assert!(matches!(handle.kernel_counts(), Err(SubmitError::Stopped { .. })));
    }
}

#[test]
fn a_failed_step_fails_its_requests_and_the_engine_lives_on() {
    for (fault, carries) in [
        (Fault::Submit, false),
        (Fault::Collect, false),
        (Fault::Answer, false),
        (Fault::Submit, true),
        (Fault::Collect, true),
        (Fault::Answer, true),
    ] {
        let (engine, control) = start_that_carries(carries, &[None], options());
        [Fault::None, Fault::None, fault].into_iter().for_each(|fault| control.then(fault));
        let heard = read(engine.handle().generate(request(5)).unwrap());
        assert!(matches!(&heard.failed, Some(RequestError::Step(_))), "{heard:?}");
        assert!(!heard.branches[0].tokens.is_empty());
        assert_answers(&read(engine.handle().generate(request(5)).unwrap()), &[None], &request(5));
        assert_eq!(engine.handle().stats().failed_steps, 1);
        assert_clean(&engine);
    }
}

#[test]
fn a_panic_is_told_and_hangs_nobody() {
    let (engine, control) = start(&[None], options());
    let handle = engine.handle();
    control.hold_after(2);
    [Fault::None, Fault::None, Fault::Panic].into_iter().for_each(|fault| control.then(fault));
    let generations: Vec<_> = (0..20).map(|i| handle.generate(request(i)).unwrap()).collect();
    control.let_go();
    let reason = "a defect: the runner was made to panic".to_owned();
    for generation in generations {
        assert_eq!(read(generation).failed, Some(RequestError::EngineStopped(reason.clone())));
    }
    assert_eq!(handle.generate(request(0)).unwrap_err(), SubmitError::Stopped { reason });
    engine.shutdown();
}

#[test]
fn stop_strings_end_an_answer_wherever_tokens_end() {
    let (engine, _) = start(&[None], options());
    let handle = engine.handle();
    let mut found = 0;
    for i in 0..40 {
        let request = Request { max_tokens: Some(60), ..request(i) };
        let whole = read(handle.generate(request.clone()).unwrap()).branches[0].text.clone();
        let chars: Vec<char> = whole.chars().collect();
        for from in (3..chars.len().saturating_sub(6)).step_by(7) {
            for len in 1..6 {
                let stop: String = chars[from..from + len].iter().collect();
                let at = whole.find(&stop).unwrap();
                for include in [false, true] {
                    let request = Request {
                        stop_strings: vec!["never there".into(), stop.clone()],
                        include_stop_string: include,
                        ..request.clone()
                    };
                    let heard = read(handle.generate(request).unwrap());
                    let end = if include { at + stop.len() } else { at };
                    assert_eq!(heard.branches[0].text, whole[..end], "{stop:?} in {whole:?}");
                    assert_eq!(heard.reason(), &FinishReason::StopString(stop.clone()));
                    assert_eq!(
                        heard.branches[0].end.as_ref().unwrap().1.generated_tokens,
                        heard.branches[0].tokens.len()
                    );
                    found += 1;
                }
            }
        }
    }
    assert!(found > 1000, "{found}");
    assert_clean(&engine);
}

#[test]
fn a_grammar_is_followed_to_its_end_or_to_a_dead_end() {
    let (engine, _) = start(&[None], options());
    let handle = engine.handle();
    let asked = |regex: &str, branches| {
        let constraint = Some(handle.compile(&Grammar::Regex(regex.into())).unwrap());
        read(handle.generate(Request { constraint, branches, max_tokens: None, ..request(8) }).unwrap())
    };
    let heard = asked("( pa| gu|ro){5}!", 4);
    for branch in &heard.branches {
        let rest = branch.text.strip_suffix('!').unwrap();
        let syllables = rest.replace(" pa", ".").replace(" gu", ".").replace("ro", ".");
        assert_eq!(syllables, ".....", "{:?}", branch.text);
        assert_eq!(branch.end.as_ref().unwrap().0, FinishReason::Complete);
    }
    assert_ne!(heard.branches[0].text, heard.branches[1].text);
    assert!(handle.stats().masks >= 4 * 5, "{:?}", handle.stats());

    let heard = asked("(pa|ro){4}x", 2);
    let error = heard.failed.expect("no token has an x").to_string();
    assert_eq!(
        error,
        "the answer cannot go on as its grammar wants: the vocabulary has no token for what must come next, or nothing is allowed there"
    );
    assert!(heard.branches.iter().all(|branch| branch.end.is_none() && branch.text.len() == 8));
    assert_clean(&engine);
}

#[test]
fn one_branch_ends_with_a_stop_string_and_the_others_go_on() {
    let (engine, _) = start(&[None], options());
    let request = Request { branches: 4, max_tokens: Some(50), ..request(11) };
    let whole = read(engine.handle().generate(request.clone()).unwrap());
    let text = &whole.branches[2].text;
    let stop: String = text.chars().skip(text.chars().count() / 2).take(4).collect();
    let stopped = Request { stop_strings: vec![stop.clone()], ..request };
    let heard = read(engine.handle().generate(stopped).unwrap());
    for (answer, whole) in heard.branches.iter().zip(&whole.branches) {
        match whole.text.find(&stop) {
            Some(at) => assert_eq!(answer.text, whole.text[..at]),
            None => assert_eq!(answer.text, whole.text),
        }
    }
    assert_eq!(heard.branches[2].end.as_ref().unwrap().0, FinishReason::StopString(stop));
    assert_clean(&engine);
}

#[test]
fn stop_tokens_of_the_model_and_of_the_request() {
    let plain = Request { max_tokens: Some(40), ..request(9) };
    let (engine, _) = start(&[None], options());
    let tokens = read(engine.handle().generate(plain.clone()).unwrap()).branches[0].tokens.clone();
    let (own, model) = (tokens[20], tokens[10]);
    let first = |token| tokens.iter().position(|&t| t == token).unwrap();
    let (engine, _) = start_with(&[None], options(), vec![model]).unwrap();
    let ends = |request: Request| {
        let heard = read(engine.handle().generate(request).unwrap());
        let (reason, usage) = heard.branches[0].end.clone().unwrap();
        (reason, heard.branches[0].tokens.len(), usage.generated_tokens)
    };
    let at = first(model);
    assert_eq!(ends(plain.clone()), (FinishReason::Stop(model), at, at + 1));
    let ignoring = Request { ignore_stop_tokens: true, ..plain.clone() };
    assert_eq!(ends(ignoring.clone()), (FinishReason::Length, 40, 40));
    let at = first(own);
    assert_eq!(ends(Request { stop_tokens: vec![own], ..ignoring }), (FinishReason::Stop(own), at, at + 1));
}

#[test]
fn log_probabilities_come_where_they_are_asked_for() {
    let (engine, _) = start(&[None], options());
    for logprobs in [None, Some(0), Some(3)] {
        let mut generation = engine.handle().generate(Request { logprobs, ..request(2) }).unwrap();
        let mut tokens = 0;
        while let Some(event) = generation.next_blocking() {
            if let Event::Token { logprob, top, .. } = event {
                tokens += 1;
                assert_eq!((logprob.is_some(), top.len()), (logprobs.is_some(), logprobs.unwrap_or(0)));
            }
        }
        assert_eq!(tokens, request(2).max_tokens.unwrap());
    }
}

#[test]
fn stats_count_a_step_before_its_events_are_read() {
    let (engine, _) = start(&[None], options());
    let handle = engine.handle();
    let before = handle.stats();
    assert_eq!((before.pages_total, before.steps), (60, 0));
    let request = Request { max_tokens: Some(1), ..request(20) };
    read(handle.generate(request.clone()).unwrap());
    let stats = handle.stats();
    assert_eq!((stats.steps, stats.rows, stats.tokens), (1, request.prompt.len() as u64, 1));
    assert_eq!((stats.running, stats.pages_used), (0, 0));
    assert_eq!(stats.step_times.counts.iter().sum::<u64>(), 1);
    assert_eq!((stats.prompt_tokens, stats.prefix_query_tokens), (24, 24));
    assert_eq!((stats.step_rows.counts[5], stats.step_rows.total), (1, 24));
    assert_eq!((stats.step_sequences.counts[0], stats.step_sequences.total), (1, 1));
    let heard = read(handle.generate(request).unwrap());
    assert_eq!(heard.branches[0].end.as_ref().unwrap().1.cached_tokens, 20);
    assert_eq!(handle.stats().prefix_hit_tokens, 20);
    // One of them is the probe at the start.
    assert_eq!(handle.kernel_counts().unwrap()[0].launches, 3);
}

#[test]
fn options_that_make_no_sense_are_refused_by_name() {
    use expect_test::{Expect, expect};

    let refusal = |change: fn(&mut EngineOptions), expected: Expect| {
        let mut options = options();
        change(&mut options);
        expected.assert_eq(&start_with(&[None], options, Vec::new()).map(drop).unwrap_err().to_string());
    };
    refusal(|o| o.block_size = 0, expect!["engine option `block_size` must be at least 1"]);
    refusal(
        |o| o.max_sequences = 33,
        expect![
            "engine option `max_sequences` is 33, but a step has only max_batch_tokens = 32 rows and every running sequence needs one"
        ],
    );
    refusal(
        |o| o.max_context = Some(201),
        expect!["engine option `max_context` is 201, but the model was loaded for 1 to 200 tokens"],
    );
    refusal(
        |o| o.cache_high_water = 1.5,
        expect!["engine option `cache_high_water` must be a fraction between 0 and 1"],
    );
    refusal(
        |o| (o.cache_high_water, o.cache_low_water) = (0.5, 0.6),
        expect!["engine option `cache_low_water` must be a fraction between 0 and cache_high_water"],
    );
    refusal(
        |o| o.cache_low_water = f32::NAN,
        expect!["engine option `cache_low_water` must be a fraction between 0 and cache_high_water"],
    );
    refusal(
        |o| o.pages = PageBudget::Pages(0),
        expect![
            "the page budget holds 0 pages of 64 bytes, but one sequence needs at least 1; give more memory to the pages"
        ],
    );
    refusal(
        |o| o.pages = PageBudget::Bytes(100),
        expect![
            "the page budget holds 0 pages of 64 bytes, but one sequence needs at least 1; give more memory to the pages"
        ],
    );
}

#[test]
fn page_budgets_become_pages() {
    let pages = |budget, windows: &[Option<u32>]| {
        let (engine, _) = start(windows, EngineOptions { pages: budget, ..options() });
        (engine.handle().stats().pages_total, engine.handle().max_context())
    };
    assert_eq!(pages(PageBudget::Pages(60), &[None]), (60, 200));
    assert_eq!(pages(PageBudget::Pages(10), &[None]), (10, 40));
    assert_eq!(pages(PageBudget::Tokens(100), &[None]), (25, 100));
    assert_eq!(pages(PageBudget::Tokens(100), &[None, Some(8)]), (50, 156));
    // A page has 64 bytes here, and the scratch page is one of them.
    assert_eq!(pages(PageBudget::Bytes(640), &[None]), (9, 36));
    assert_eq!(pages(PageBudget::Auto, &[None]), (200, 200));
}

#[test]
fn a_snapshot_shows_who_holds_which_pages() {
    let (engine, _) = start(&[None], options());
    let handle = engine.handle();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let prompt = Request::new((0..10).map(|at| at % VOCAB as u32).collect());
    // The answer is not read, so it runs to its end or to the cancellation.
    let running = handle.generate(Request { max_tokens: Some(150), ..prompt }).unwrap();
    let snapshot = loop {
        let snapshot = runtime.block_on(handle.snapshot(true)).unwrap();
        if snapshot.sequences.first().is_none_or(|sequence| sequence.generated > 0) {
            break snapshot;
        }
    };
    assert_eq!((snapshot.block_size, snapshot.max_rows, snapshot.max_sequences), (4, 32, 16));
    assert!(snapshot.kernels.is_some());
    if let [sequence] = snapshot.sequences.as_slice() {
        assert!(sequence.running && !sequence.preempted);
        assert_eq!((sequence.prompt_tokens, sequence.max_tokens), (10, 150));
        assert!(sequence.pages.len() >= sequence.computed.div_ceil(4), "{sequence:?}");
        assert_eq!(sequence.pages.len(), snapshot.stats.pages_used);
    }
    drop(running);
    let snapshot = loop {
        let snapshot = runtime.block_on(handle.snapshot(false)).unwrap();
        if snapshot.sequences.is_empty() {
            break snapshot;
        }
    };
    assert!(snapshot.kernels.is_none());
    assert_eq!(snapshot.cached.len(), snapshot.stats.pages_cached);
    assert!(snapshot.cached.len() >= 2 && snapshot.cached.is_sorted(), "two blocks of the prompt are kept");
}
