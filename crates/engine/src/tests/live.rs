//! The engine thread with real clients: blocking and async readers, storms of cancellations, failures, shutdown.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::{
    clients::*,
    fake::{Fault, VOCAB},
};
use crate::{EngineOptions, Event, FinishReason, Generation, PageBudget, Request, RequestError, SubmitError};

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
    FLOWS.into_iter().for_each(sixty_four_clients);
}

fn sixty_four_clients(flow: Flow) {
    let windows = [None];
    let (engine, _) = start_with_flow(
        flow,
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
    FLOWS.into_iter().for_each(storm_of_cancellations);
}

fn storm_of_cancellations(flow: Flow) {
    let windows = [None, Some(6)];
    let (engine, _) =
        start_with_flow(flow, &windows, EngineOptions { pages: PageBudget::Pages(160), ..options() });
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
    let faults = [Fault::Submit, Fault::Collect, Fault::Answer];
    for (fault, flow) in faults.into_iter().flat_map(|fault| FLOWS.map(|flow| (fault, flow))) {
        let (engine, control) = start_with_flow(flow, &[None], options());
        let (other, _) = start_with_flow(flow, &[None], options());
        let of_other = other.handle().generate(request(5)).unwrap();
        [Fault::None, Fault::None, fault].into_iter().for_each(|fault| control.then(fault));
        let heard = read(engine.handle().generate(request(5)).unwrap());
        assert!(matches!(&heard.failed, Some(RequestError::Step(_))), "{heard:?}");
        assert!(!heard.branches[0].tokens.is_empty());
        assert_answers(&read(engine.handle().generate(request(5)).unwrap()), &[None], &request(5));
        assert_eq!(engine.handle().stats().failed_steps, 1);
        assert_clean(&engine);
        assert_answers(&read(of_other), &[None], &request(5));
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
