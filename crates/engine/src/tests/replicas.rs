//! Several engines behind one handle: which one gets a request, and failures of one.

use std::sync::{Arc, Mutex};

use super::{
    clients::*,
    fake::{self, Control, Fault, VOCAB},
};
use crate::{
    AdapterWeights, BlockSet, Engine, EngineOptions, Event, EventSink, FailureSink, Handle, KvEvent, Medium,
    Replicas, Request, RequestError, SubmitError,
};

/// Two engines as one, and what they report.
struct Pair {
    engine: Engine,
    controls: [Control; 2],
    failures: Arc<Mutex<Vec<String>>>,
    events: Arc<Mutex<Vec<KvEvent>>>,
}

fn pair(options: &EngineOptions) -> Pair {
    let failures: Arc<Mutex<Vec<String>>> = Arc::default();
    let events: Arc<Mutex<Vec<KvEvent>>> = Arc::default();
    let (said, received) = (failures.clone(), events.clone());
    let sink = EventSink(Arc::new(move |events| received.lock().unwrap().extend(events)));
    let replicas = Replicas::new(2, Some(sink));
    let mut controls = Vec::new();
    let engines = (0..2).map(|number| {
        let said = said.clone();
        let note = move |reason: &str| said.lock().unwrap().push(format!("{number}: {reason}"));
        let options = EngineOptions { failures: Some(FailureSink(Arc::new(note))), ..options.clone() };
        let (engine, control) = start(&[None], replicas.options(number, &options));
        controls.push(control);
        (number, engine)
    });
    let engines = engines.collect();
    let engine = replicas.join(engines).unwrap();
    Pair { engine, controls: controls.try_into().unwrap(), failures, events }
}

/// Requests so far by engine.
fn counts(handle: &Handle) -> Vec<u64> {
    handle.engines().map(|engine| engine.stats().prompt_tokens).collect()
}

/// Sends a request, and returns its answer and the engine that got it.
fn ask(handle: &Handle, request: &Request) -> (usize, Heard) {
    let before = counts(handle);
    let heard = read(handle.generate(request.clone()).unwrap());
    let after = counts(handle);
    let engine = (0..before.len()).find(|&engine| after[engine] > before[engine]).unwrap();
    (engine, heard)
}

/// A request whose prompt begins with `shared` tokens of one text and goes on with `own` tokens of text `number`.
fn prompt(shared: usize, number: usize, own: usize) -> Request {
    let own = (0..own).map(|at| (7 + number * 31 + at * (number + 2)) % VOCAB);
    let tokens = (0..shared).map(|at| at * 5 % VOCAB).chain(own).map(|token| token as u32).collect();
    Request { max_tokens: Some(3), ..Request::new(tokens) }
}

#[test]
fn a_request_goes_where_its_prefix_is_or_else_where_there_is_less_work() {
    let Pair { engine, controls, .. } = pair(&options());
    let handle = engine.handle();
    // Prompts, the engine of each, and the cached tokens.
    let table = [
        (prompt(0, 1, 21), 0, 0),
        // Another text fills the empty cache.
        (prompt(24, 2, 9), 1, 0),
        (prompt(0, 1, 21), 0, 20),
        (prompt(0, 1, 40), 0, 20),
        (prompt(24, 3, 14), 1, 24),
        // A shorter prefix is worth as much as its tokens.
        (prompt(8, 4, 14), 1, 8),
    ];
    for (request, expected, cached) in table {
        let (engine, heard) = ask(&handle, &request);
        let usage = heard.branches[0].end.as_ref().unwrap().1;
        assert_eq!((engine, usage.cached_tokens), (expected, cached), "{:?}", request.prompt);
        assert_answers(&heard, &[None], &request);
    }
    // Running and waiting requests are more work than a short prefix.
    controls.iter().for_each(|control| control.hold_after(0));
    let before = counts(&handle);
    let mut busy: Vec<_> = (0..2).map(|_| handle.generate(prompt(0, 1, 21)).unwrap()).collect();
    for generation in &mut busy {
        assert!(matches!(generation.next_blocking(), Some(Event::Started { .. })));
    }
    busy.extend((0..4).map(|_| handle.generate(prompt(0, 1, 21)).unwrap()));
    controls.iter().for_each(Control::let_go);
    for heard in busy.into_iter().map(read) {
        assert_answers(&heard, &[None], &prompt(0, 1, 21));
    }
    let after = counts(&handle);
    assert_eq!([after[0] - before[0], after[1] - before[1]], [63, 63]);
    assert_eq!(handle.stats().prompt_tokens, after.iter().sum::<u64>());
    assert_clean(&engine);
}

#[test]
fn a_failed_engine_leaves_the_others_serving() {
    let Pair { engine, controls: [first, second], failures, .. } = pair(&options());
    let handle = engine.handle();
    first.then(Fault::Collect);
    let (at, heard) = ask(&handle, &prompt(0, 1, 21));
    assert!(at == 0 && matches!(heard.failed, Some(RequestError::Step(_))), "{heard:?}");
    for number in 1..5 {
        let (engine, heard) = ask(&handle, &prompt(0, number, 21));
        assert_eq!(engine, 1);
        assert_answers(&heard, &[None], &prompt(0, number, 21));
    }
    assert!(!handle.is_failing() && handle.engines().next().unwrap().is_failing());
    // If all fail, requests are tried again, and a step that works ends the failure.
    second.then(Fault::Submit);
    assert!(ask(&handle, &prompt(0, 7, 21)).1.failed.is_some() && handle.is_failing());
    assert_answers(&ask(&handle, &prompt(0, 8, 21)).1, &[None], &prompt(0, 8, 21));
    assert!(!handle.is_failing());
    assert_eq!(failures.lock().unwrap().len(), 2, "{failures:?}");
    // A panic ends an engine for good.
    let (alive, _) = ask(&handle, &prompt(0, 9, 21));
    [&first, &second][alive].then(Fault::Panic);
    let (_, heard) = ask_until_failure(&handle);
    assert!(matches!(heard.failed, Some(RequestError::EngineStopped(_))), "{heard:?}");
    assert_answers(&read(handle.generate(prompt(0, 3, 21)).unwrap()), &[None], &prompt(0, 3, 21));
    assert!(!handle.has_stopped());
    assert!(failures.lock().unwrap().last().unwrap().starts_with(&format!("{alive}: a defect")));
    engine.shutdown();
    assert!(matches!(handle.generate(prompt(0, 1, 9)), Err(SubmitError::Stopped { .. })));
}

/// Sends requests until one fails.
fn ask_until_failure(handle: &Handle) -> (usize, Heard) {
    for number in 0..50 {
        let heard = read(handle.generate(prompt(0, number, 21)).unwrap());
        if heard.failed.is_some() {
            return (number, heard);
        }
    }
    panic!("no request failed");
}

#[test]
fn adapters_are_loaded_by_all_engines_that_work() {
    for is_failing in [false, true] {
        let Pair { engine, controls, .. } = pair(&options());
        let handle = engine.handle();
        if is_failing {
            controls[0].then(Fault::Collect);
            assert_eq!(ask(&handle, &prompt(0, 1, 21)).0, 0);
        }
        let weights = AdapterWeights { name: "a".into(), pairs: vec![fake::adapter(1).1] };
        let adapter = handle.load_adapter(weights).unwrap();
        let request = Request { adapters: vec![(adapter.clone(), 1.0)], ..prompt(0, 2, 21) };
        let before = counts(&handle);
        controls.iter().for_each(|control| control.hold_after(0));
        let generations: Vec<_> = (0..4).map(|_| handle.generate(request.clone()).unwrap()).collect();
        controls.iter().for_each(Control::let_go);
        let answers: Vec<_> =
            generations.into_iter().map(read).map(|heard| heard.branches[0].tokens.clone()).collect();
        assert!(answers.iter().all(|answer| *answer == answers[0] && answer.len() == 3), "{answers:?}");
        let has_some: Vec<_> =
            counts(&handle).iter().zip(before).map(|(now, before)| *now > before).collect();
        assert_eq!(has_some, [!is_failing, true]);
        assert_ne!(answers[0], ask(&handle, &prompt(0, 2, 21)).1.branches[0].tokens);
        assert_clean(&engine);
        assert_eq!(adapter.requests(), (0, 0));
    }
}

#[test]
fn events_of_several_engines_are_those_of_one_cache() {
    let Pair { engine, controls, events, .. } = pair(&options());
    let handle = engine.handle();
    controls.iter().for_each(|control| control.hold_after(0));
    let both: Vec<_> = (0..2).map(|_| handle.generate(prompt(0, 1, 13)).unwrap()).collect();
    controls.iter().for_each(Control::let_go);
    both.into_iter().for_each(|generation| drop(read(generation)));
    assert!(counts(&handle).iter().all(|tokens| *tokens == 13));
    let stored = || {
        let mut blocks = BlockSet::default();
        for event in &*events.lock().unwrap() {
            match event {
                KvEvent::Stored { hashes, medium: Medium::Device, .. } => {
                    hashes.iter().for_each(|hash| blocks.insert_hash(*hash));
                }
                KvEvent::Removed { hashes, medium: Medium::Device } => {
                    hashes.iter().for_each(|hash| blocks.remove_hash(*hash));
                }
                event => panic!("{event:?}"),
            }
        }
        blocks
    };
    // Three blocks of the prompt, which both have.
    assert_eq!((stored().count, stored()), (3, handle.stats().blocks[0]));
    let mut each = handle.engines();
    let (one, other) = (each.next().unwrap(), each.next().unwrap());
    for (engine, left) in [(one, 3), (other, 0)] {
        engine.clear_prefix_cache();
        assert_eq!(engine.check_pages().unwrap(), Ok(()));
        assert_eq!((stored().count, stored()), (left, handle.stats().blocks[0]));
    }
}
