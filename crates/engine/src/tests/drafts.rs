//! Drafts over the fake runner: steps that they save, pages that they take and return, and the rules of a step.

use std::time::Duration;

use super::{
    oracle::oracle,
    rig::{Rig, Setup},
};
use crate::{DraftOptions, MOST_DRAFTED, Replay, Request, Stats};

/// Completes the options of a request whose drafts are those of its known answer.
pub fn known(setup: &Setup, max_context: usize, request: &Request) -> Request {
    let mut known = request.clone();
    // Others are refused.
    let fits = (1..max_context).contains(&request.prompt.len());
    if let Some(replay) = known.drafts.replay.as_mut().filter(|_| fits) {
        replay.tokens = oracle(&setup.windows, setup.states, max_context, request, 0).tokens.into();
    }
    known
}

fn request(tokens: usize, max_tokens: usize, most: usize, chance: f64) -> Request {
    let replay = Some(Replay { tokens: [].into(), chance, seed: 3, of_model: false });
    let drafts = DraftOptions { most, eager: true, replay, ..DraftOptions::default() };
    Request { max_tokens: Some(max_tokens), drafts, ..Request::new((0..tokens as u32).collect()) }
}

/// Plays requests that arrive together to their end, and checks their answers.
fn play(setup: &Setup, requests: &[Request]) -> Stats {
    let mut rig = Rig::new(setup).unwrap();
    let max_context = rig.limits.max_context;
    let ids: Vec<u64> =
        requests.iter().map(|request| rig.submit(&known(setup, max_context, request)).unwrap()).collect();
    while !rig.is_idle() {
        rig.step().unwrap();
    }
    for (id, request) in ids.into_iter().zip(requests) {
        let expected = oracle(&setup.windows, setup.states, max_context, request, 0);
        let answer = &rig.heard[&id].branches[&0];
        assert_eq!(answer.tokens, expected.tokens);
        let (_, usage) = answer.end.as_ref().unwrap();
        assert!(usage.accepted_tokens <= usage.drafted_tokens, "{usage:?}");
    }
    let stats = rig.scheduler.stats();
    assert_eq!((stats.pages_used, stats.states_used), (0, 0));
    stats
}

fn setup() -> Setup {
    Setup { speculate: true, pages: 60, ..Setup::default() }
}

#[test]
fn accepted_drafts_save_steps_and_rejected_ones_cost_none() {
    for (chance, steps, checked, accepted) in [(1.0, 4, 20, 20), (0.0, 24, 133, 0)] {
        let stats = play(&setup(), &[request(9, 24, 7, chance)]);
        assert_eq!((stats.steps, stats.draft_tokens, stats.accepted_tokens), (steps, checked, accepted));
        assert_eq!(stats.tokens, 24);
    }
    let without = Setup { speculate: false, ..setup() };
    for (setup, most) in [(setup(), 0), (without, 7)] {
        let stats = play(&setup, &[request(9, 24, most, 1.0)]);
        assert_eq!((stats.steps, stats.drafts), (24, 0));
    }
}

#[test]
fn blocks_of_accepted_drafts_are_in_the_prefix_cache_and_those_of_rejected_ones_are_not() {
    for chance in [0.0, 0.6, 1.0] {
        let stats = play(&setup(), &[request(9, 24, 7, chance)]);
        // The last token is never computed: 32 tokens in blocks of 4.
        assert_eq!(stats.pages_cached, 8, "{chance}");
    }
}

#[test]
fn states_are_those_of_the_accepted_tokens() {
    for (cache, pages) in [(true, 60), (false, 60), (true, 14)] {
        let setup = Setup { states: true, cache, pages, ..setup() };
        let right = play(&setup, &[request(9, 24, 7, 1.0)]);
        assert!(right.steps < 14 && right.accepted_tokens == right.draft_tokens, "{right:?}");
        for chance in [0.0, 0.4, 0.8] {
            let stats = play(&setup, &[request(9, 24, 7, chance), request(6, 20, 3, chance)]);
            assert!(stats.drafts > 5, "{stats:?}");
        }
    }
    // A single slot suffices.
    let one = Setup { states: true, sequences: 1, ..setup() };
    assert!(play(&one, &[request(9, 24, 7, 0.5)]).drafts > 5);
}

#[test]
fn a_draft_is_no_longer_than_free_pages_and_preempts_nobody() {
    // Each sequence fills its last page at its end: 32 tokens.
    for pages in [16, 17, 18, 24] {
        let setup = Setup { pages, cache: false, ..setup() };
        let stats = play(&setup, &[request(9, 24, 7, 0.5), request(9, 24, 7, 1.0)]);
        assert_eq!(stats.preemptions, 0, "{pages}");
        assert!(stats.accepted_tokens > 5, "{stats:?}");
    }
}

#[test]
fn a_step_with_a_part_of_a_prompt_has_no_drafts() {
    let setup = setup();
    let mut rig = Rig::new(&setup).unwrap();
    let first = known(&setup, rig.limits.max_context, &request(5, 40, 5, 1.0));
    rig.submit(&first).unwrap();
    rig.step().unwrap();
    rig.step().unwrap();
    assert_eq!(rig.planned[0].2.len(), 6);
    rig.submit(&Request { max_tokens: Some(1), ..Request::new((40..80).collect()) }).unwrap();
    while rig.planned.len() < 2 {
        rig.step().unwrap();
    }
    while rig.planned.len() == 2 {
        assert_eq!(rig.planned[0].2.len(), 1, "{:?}", rig.planned);
        rig.step().unwrap();
    }
    assert_eq!(rig.planned[0].2.len(), 6);
}

/// A device that computes concurrently with the host: a draft continues a text that the host knows.
#[test]
fn steps_are_planned_ahead_unless_there_will_be_a_draft() {
    let setup = Setup { carries: true, ..setup() };
    let ahead = |chance: f64, most: usize| {
        let mut rig = Rig::new(&setup).unwrap();
        let request = known(&setup, rig.limits.max_context, &request(5, 30, most, chance));
        rig.submit(&request).unwrap();
        let mut ahead = 0;
        while !rig.is_idle() {
            rig.step().unwrap();
            ahead += usize::from(rig.ahead);
        }
        (ahead, rig.scheduler.stats().steps)
    };
    assert_eq!(ahead(1.0, 0), (29, 30));
    let (planned, steps) = ahead(1.0, 7);
    assert!(planned <= 1 && steps <= 6, "{planned} of {steps}");
}

/// Chances and times decide without a client's help: drafts that are right are checked, and others soon are not.
#[test]
fn drafts_are_checked_where_they_pay() {
    let [all, row, seen] = [10_000, 500, 0].map(Duration::from_micros);
    let setup = Setup { times: [all, row, seen], pages: 400, rows: 64, ..setup() };
    let play = |chance: f64, sequences: usize| {
        let requests: Vec<_> = (0..sequences)
            .map(|index| {
                let mut request = request(9 + index, 150, MOST_DRAFTED, chance);
                request.drafts.eager = false;
                request
            })
            .collect();
        play(&setup, &requests)
    };
    let right = play(0.95, 1);
    assert!(right.steps < 70 && right.draft_nanoseconds > 500_000_000, "{right:?}");
    let wrong = play(0.05, 1);
    assert!(wrong.draft_tokens < 20 && wrong.draft_nanoseconds > -50_000_000, "{wrong:?}");
    // A device on which every row costs the same is full with any number of rows.
    let setup = Setup { times: [0, 1000, 0].map(Duration::from_micros), ..setup };
    let mut request = request(9, 150, MOST_DRAFTED, 0.95);
    request.drafts.eager = false;
    let full = self::play(&setup, &[request]);
    assert!(full.steps > 130, "{full:?}");
}
