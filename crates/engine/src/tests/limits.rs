//! Limits of an engine: refused options, pages of budgets, full queues.

use super::clients::*;
use crate::{EngineOptions, PageBudget, Request, SubmitError};

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
