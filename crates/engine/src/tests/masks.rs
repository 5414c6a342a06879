//! Masks that are late: decisions of the scheduler as [scripts](super::script), and threads that compute masks.

use std::task::{Context, Poll, Waker};

use expect_test::expect;

use super::{
    clients::*,
    fake::CONSTRAINTS,
    rig::{Rig, Setup},
    script::check,
};
use crate::{EngineOptions, Event, FinishReason, Grammar, PageBudget, Request};

#[test]
fn a_late_mask_delays_only_its_own_sequence() {
    check(
        "pages 32, held masks",
        "A 6 +3 grammar \n B 3 +6 \n step 2 \n mask A 9 \n step 2 \n mask A 9 \n step \n mask A 9 \n run \n mask A 9",
        expect![[r#"
            run A 0..5, B 0..3; free 29 cached 0
            run B 3; hold A; free 29 cached 0
            mask A; free 29 cached 0
            run A 5, B 4; free 28 cached 0
            run B 5; hold A; free 28 cached 0
            mask A; free 28 cached 0
            run A 6, B 6; free 28 cached 0
            mask A; free 28 cached 0
            run A 7, B 7; free 28 cached 2
              B: Length
            run ; hold A; free 28 cached 2
            mask A; free 28 cached 4
              A: Length
        "#]],
    );
}

/// A mask may be known before the prompt is computed, or while the sequence has no place.
#[test]
fn a_mask_is_computed_while_its_sequence_waits() {
    check(
        "pages 6, no cache, held masks",
        "A 8 +9 \n B 8 +5 grammar \n mask B 1 \n step 3 \n mask B 1 \n step 4 \n mask B 1 \n run",
        expect![[r#"
            mask B; free 6 cached 0
            run A 0..8, B 0..8; free 2 cached 0
            run A 8; hold B; free 1 cached 0
            run A 9; hold B; free 1 cached 0
            mask B; free 1 cached 0
            run A 10, B 8; free 0 cached 0
            run A 11; hold B; free 0 cached 0
            run A 12; hold B; free 2 cached 0
            run A 13; hold B; free 2 cached 0
            mask B; free 2 cached 0
            run A 14; hold B; free 2 cached 0
            run A 15; hold B; free 6 cached 0
              A: Length
            run B 0..10; free 3 cached 0
            run ; hold B; free 3 cached 0
        "#]],
    );
}

#[test]
fn branches_separate_when_their_first_mask_is_known() {
    check(
        "pages 16, held masks",
        "A 6 +2 x3 grammar \n step 2 \n mask A 1 \n step 2 \n mask A 1 \n step \n mask A 1",
        expect![[r#"
            run A 0..5; free 14 cached 0
            run ; hold A; free 14 cached 0
            mask A; free 14 cached 0
            run A 5; free 14 cached 0
            run ; hold A A.1 A.2; free 14 cached 0
            mask A; free 14 cached 0
            run A 6, A.1 6, A.2 6; copy 2>3; copy 2>4; free 12 cached 0
            mask A; free 15 cached 1
              A: Length
              A.1: Length
              A.2: Length
        "#]],
    );
}

#[test]
fn the_end_of_a_grammar_is_known_with_its_mask() {
    check(
        "pages 16, held masks",
        "A 4 +40 ends \n mask A 1 \n step \n mask A 1 \n step \n mask A 1 \n step \n mask A 1 \n step \n mask A 1 \n step \n mask A 1 \n step \n mask A 1",
        expect![[r#"
            mask A; free 16 cached 0
            run A 0..4; free 15 cached 0
            mask A; free 15 cached 0
            run A 4; free 14 cached 0
            mask A; free 14 cached 0
            run A 5; free 14 cached 0
            mask A; free 14 cached 0
            run A 6; free 14 cached 0
            mask A; free 14 cached 0
            run A 7; free 14 cached 0
            mask A; free 14 cached 2
              A: Complete
            run ; free 14 cached 2
            mask A; free 14 cached 2
        "#]],
    );
}

#[test]
fn a_sequence_that_waits_for_a_mask_can_be_cancelled_and_expires() {
    check(
        "pages 16, held masks",
        "A 6 +3 grammar \n B 6 +3 grammar in 5 \n step 2 \n cancel A \n clock 6 \n mask A 1 \n mask B 1 \n run",
        expect![[r#"
            run A 0..5, B 0..5; free 12 cached 0
            run ; hold A B; free 12 cached 0
            cancel A; free 13 cached 1
              A: Cancelled
            clock; free 14 cached 2
              B: DeadlineExceeded
            mask A; free 14 cached 2
            mask B; free 14 cached 2
        "#]],
    );
}

#[test]
fn masks_that_take_too_long_end_their_request() {
    check(
        "pages 16, held masks",
        "A 4 +3 grammar \n B 4 +3 grammar \n mask B 999 \n mask A 1001 \n step 2",
        expect![[r#"
            mask B; free 16 cached 0
            mask A; free 16 cached 0
              A: the grammar is too slow: the mask of one token took more than 1 s; make it less ambiguous (let one rule match each part of the text, and write repetitions with `*` and not with recursion), or give it fewer and shorter alternatives
            run B 0..4; free 15 cached 0
            run ; hold B; free 15 cached 0
        "#]],
    );
    let steps = "mask A 995 \n step \n ".repeat(10);
    check(
        "pages 16, held masks",
        &format!("A 4 +90 x4 grammar \n {steps}"),
        expect![[r#"
            mask A; free 16 cached 0
            run A 0..4; free 15 cached 0
            mask A; free 15 cached 0
            run A 4, A.1 4, A.2 4, A.3 4; free 11 cached 0
            mask A; free 11 cached 0
            run A 5, A.1 5, A.2 5, A.3 5; free 11 cached 0
            mask A; free 11 cached 0
            run A 6, A.1 6, A.2 6, A.3 6; free 11 cached 0
            mask A; free 11 cached 0
            run A 7, A.1 7, A.2 7, A.3 7; free 11 cached 0
            mask A; free 11 cached 0
            run A 8, A.1 8, A.2 8, A.3 8; free 7 cached 0
            mask A; free 7 cached 0
            run A 9, A.1 9, A.2 9, A.3 9; free 7 cached 0
            mask A; free 7 cached 0
            run A 10, A.1 10, A.2 10, A.3 10; free 7 cached 0
            mask A; free 11 cached 5
              A: the grammar is too slow: the masks of this request took more than 30 s; make it less ambiguous (let one rule match each part of the text, and write repetitions with `*` and not with recursion), or give it fewer and shorter alternatives
            run ; free 11 cached 5
            mask A; free 11 cached 5
            run ; free 11 cached 5
        "#]],
    );
}

#[test]
fn the_time_of_masks_is_charged_to_the_tenant() {
    let script = |ms: usize| {
        format!(
            "A 4 +1 by x grammar \n step \n B 4 +1 by x \n C 30 +1 by y \n D 30 +1 by y \n mask A {ms} \n step \n mask A 0 \n run"
        )
    };
    let settings = "sequences 1, row 1, rows 40, pages 64, no cache, held masks";
    check(
        settings,
        &script(0),
        expect![[r#"
        run A 0..3; free 63 cached 0
        mask A; free 63 cached 0
        run A 3; hold B C D; free 63 cached 0
        mask A; free 64 cached 0
          A: Length
        run C 0..30; hold B D; free 64 cached 0
          C: Length
        run B 0..4; hold D; free 64 cached 0
          B: Length
        run D 0..30; free 64 cached 0
          D: Length
    "#]],
    );
    check(
        settings,
        &script(300),
        expect![[r#"
        run A 0..3; free 63 cached 0
        mask A; free 63 cached 0
        run A 3; hold B C D; free 63 cached 0
        mask A; free 64 cached 0
          A: Length
        run C 0..30; hold B D; free 64 cached 0
          C: Length
        run D 0..30; hold B; free 64 cached 0
          D: Length
        run B 0..4; free 64 cached 0
          B: Length
    "#]],
    );
}

/// One grammar among many streams loses every second step, and the others continue ahead of the host.
#[test]
fn a_grammar_among_many_streams_is_held_and_the_others_are_planned_ahead() {
    for (streams, ahead) in [(32, 30..42), (15, 0..2)] {
        let setup = Setup {
            pages: 1000,
            rows: 128,
            sequences: 40,
            carries: true,
            max_context: 100,
            ..Setup::default()
        };
        let mut rig = Rig::new(&setup).unwrap();
        let [endless, ..] = &*CONSTRAINTS;
        for stream in 0..=streams {
            let constraint = (stream == streams).then(|| endless.clone());
            let request =
                Request { constraint, max_tokens: Some(40), ..Request::new(vec![stream as u32; 3]) };
            rig.submit(&request).unwrap();
        }
        (0..40).for_each(|_| drop(rig.step().unwrap()));
        let tokens = |id: u64| rig.heard[&id].branches[&0].tokens.len();
        let others: Vec<usize> = (0..streams).map(tokens).collect();
        assert!(others.iter().all(|tokens| *tokens >= 39), "{others:?}");
        let (held, steps) = (tokens(streams), rig.scheduler.stats().steps_ahead);
        assert!(ahead.contains(&steps), "{steps} steps ahead of {streams} streams");
        assert_eq!(held >= 39, steps < 2, "{held} tokens of the grammar");
        assert!(held >= 19, "{held} tokens of the grammar");
        while !rig.is_idle() {
            rig.step().unwrap();
        }
    }
}

/// As in llama.cpp, `ignore_eos` excludes the end token where the grammar allows something else.
#[test]
fn an_ignored_end_token_ends_an_answer_only_where_the_grammar_ends() {
    let end = 2;
    let (engine, _) = start_with(&[None], options(), vec![end]).unwrap();
    let handle = engine.handle();
    let reasons = |regex: &str, ignore_stop_tokens: bool| -> Vec<FinishReason> {
        let constraint = Some(handle.compile(&Grammar::Regex(regex.into())).unwrap());
        let answers = (0..12).map(|i| {
            let constraint = constraint.clone();
            let request = Request { constraint, ignore_stop_tokens, max_tokens: Some(30), ..request(i) };
            read(handle.generate(request).unwrap()).reason().clone()
        });
        answers.collect()
    };
    assert!(reasons("(pa|ro)*", false).contains(&FinishReason::Stop(end)));
    assert!(reasons("(pa|ro)*", true).iter().all(|reason| *reason == FinishReason::Length));
    assert!(reasons("(pa|ro){3}", true).iter().all(|reason| *reason == FinishReason::Complete));
}

/// The row of a grammar's item count grows with each token, and the time of a mask with it.
#[test]
fn the_slow_masks_of_some_streams_delay_no_other_stream() {
    let (engine, _) = start(&[None], EngineOptions { pages: PageBudget::Pages(400), ..options() });
    let handle = engine.handle();
    let ambiguous = Grammar::Lark("start: s\ns: w | s s | s s s\nw: /(.|\\n)/".into());
    let constraint = Some(handle.compile(&ambiguous).unwrap());
    let schema = Some(handle.compile(&Grammar::Regex("[a-z ]*".into())).unwrap());
    let slow: Vec<_> = (0..4)
        .map(|_| {
            let constraint = constraint.clone();
            handle.generate(Request { constraint, max_tokens: Some(180), ..request(3) }).unwrap()
        })
        .collect();
    for constraint in [None, schema] {
        let heard =
            read(handle.generate(Request { constraint, max_tokens: Some(150), ..request(8) }).unwrap());
        assert_eq!(heard.branches[0].tokens.len(), 150);
    }
    for mut generation in slow {
        let mut tokens = 0;
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(event)) = generation.poll_next(&mut context) {
            tokens += usize::from(matches!(event, Event::Token { .. }));
            assert!(!matches!(event, Event::Finished { .. } | Event::Failed(_)), "{event:?}");
        }
        assert!(tokens < 150, "{tokens}");
    }
    assert_clean(&engine);
}
