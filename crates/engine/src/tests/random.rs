//! Random schedules: every answer equals the one that its request gets alone, and every page is returned.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use paguro_model::Pooling;
use proptest::prelude::*;

use super::{
    drafts::known,
    fake::{CONSTRAINTS, Fault, VOCAB},
    oracle::{Expected, oracle},
    rig::{ADAPTERS, Masks, Rig, Setup},
};
use crate::{Adapter, DraftOptions, FinishReason, PageOrder, Replay, Request, Stats};

#[derive(Clone, Debug)]
struct Case {
    setup: Setup,
    /// With the step before which they arrive.
    requests: Vec<(usize, Request)>,
    /// Step, which of the requests, which branch or all.
    cancels: Vec<(usize, usize, Option<usize>)>,
    faults: Vec<(usize, Fault)>,
}

fn setups() -> impl Strategy<Value = Setup> {
    let windows = prop::collection::vec(prop::option::weighted(0.6, 1..14_u32), 1..4);
    let order =
        prop_oneof![Just(PageOrder::InOrder), any::<u64>().prop_map(|seed| PageOrder::Scattered { seed })];
    let water = prop_oneof![3 => Just((1.0, 1.0)), 1 => (0.0..0.5_f32, 0.5..1.0_f32)];
    let steps = (1..7_usize).prop_flat_map(|sequences| (Just(sequences), sequences..24, 2..6_usize));
    let times = prop_oneof![
        2 => Just([0; 3]).boxed(),
        1 => (0..50_000_u64, 0..50_000_u64, 0..2000_u64).prop_map(|(a, b, c)| [a, b, c]).boxed(),
    ];
    let states = (any::<bool>(), 1..4_usize, 1..5_usize);
    let masks = prop_oneof![
        1 => Just(Masks::Soon).boxed(),
        2 => (any::<u64>(), 0..20_u64)
            .prop_map(|(seed, ms)| Masks::Late { seed, took: Duration::from_millis(ms) }).boxed(),
    ];
    let lanes = prop_oneof![4 => Just(1), 3 => 2..4_usize];
    let runner = (0..30_u64, (lanes, any::<bool>()), times, states, masks);
    (1..6_usize, 4..40_usize, windows, steps, any::<bool>(), water, order, runner).prop_map(
        |(
            block_size,
            pages,
            windows,
            (sequences, rows, scores),
            cache,
            (low_water, high_water),
            order,
            (max_wait_steps, (lanes, carries), times, (states, checkpoint_pages, checkpoint_blocks), masks),
        )| {
            Setup {
                block_size,
                pages: pages * windows.len(),
                windows,
                rows,
                times: times.map(Duration::from_micros),
                sequences,
                scores,
                cache,
                low_water,
                high_water,
                order,
                max_context: 60,
                max_wait_steps,
                carries,
                lanes,
                states,
                encoder: false,
                checkpoint_pages,
                checkpoint_blocks,
                masks,
                speculate: true,
            }
        },
    )
}

static LOADED: LazyLock<[Adapter; 3]> =
    LazyLock::new(|| ADAPTERS.map(|content| Adapter::without_engine(content.into(), [content; 32])));

/// Prompts of a few families, which share beginnings of any length.
fn requests() -> impl Strategy<Value = Request> {
    let prompt = (0..3_u32, 0..30_usize, 0..20_u32, 0..12_usize).prop_map(|(family, shared, own, rest)| {
        let token = |stream: u32, at: usize| (stream * 17 + at as u32 * 5 + 1) % VOCAB as u32;
        let own = (0..rest.max(1)).map(move |at| token(own + 3, at));
        (0..shared).map(|at| token(family, at)).chain(own).collect::<Vec<_>>()
    });
    let max_tokens = prop_oneof![8 => (0..24_usize).prop_map(Some), 1 => Just(None)];
    let score = prop::option::weighted(0.2, any::<prop::sample::Index>());
    let pooling = prop::sample::select(vec![Pooling::Last, Pooling::Mean, Pooling::First, Pooling::All]);
    let logprobs = prop::option::weighted(0.3, 0..4_usize);
    let reports = (score, logprobs, prop::option::weighted(0.2, pooling));
    let stops = prop::collection::vec(0..VOCAB as u32, 0..3);
    let constraint = prop_oneof![3 => Just(None), 1 => (0..3_usize).prop_map(Some)];
    let tenant = prop::sample::select(vec![None, Some("a"), Some("b"), Some("c")]);
    let drafts = prop::option::weighted(
        0.6,
        (1..8_usize, prop::sample::select(vec![0.0, 0.5, 0.8, 1.0]), any::<bool>()),
    );
    let who = (0..3_i32, tenant, drafts)
        .prop_map(|(priority, tenant, drafts)| (priority, tenant.map(Arc::from), drafts));
    let scale = prop::sample::select(vec![1.0, 0.5, 0.0]);
    let adapters = prop::collection::vec((0..3_usize, scale), 0..3);
    let ends = (max_tokens, stops, 0..9_usize);
    (
        prompt,
        prop_oneof![2 => 1..4_usize, 1 => 4..9_usize],
        ends,
        reports,
        who,
        (0..4_u64, adapters),
        constraint,
    )
        .prop_map(
            |(
                prompt,
                branches,
                (max_tokens, stop_tokens, min_tokens),
                (score, logprobs, embedding),
                (priority, tenant, drafts),
                (seed, adapters),
                constraint,
            )| {
                let constraint = constraint.map(|index| CONSTRAINTS[index].clone());
                let min_tokens = min_tokens.min(max_tokens.unwrap_or(usize::MAX));
                let mut request = Request {
                    branches,
                    max_tokens,
                    min_tokens,
                    stop_tokens,
                    constraint,
                    logprobs,
                    embedding,
                    priority,
                    tenant,
                    adapters: adapters.iter().map(|&(at, scale)| (LOADED[at].clone(), scale)).collect(),
                    drafts: drafts.map_or(DraftOptions::off(), |(most, chance, eager)| {
                        let replay = Some(Replay { tokens: [].into(), chance, seed, of_model: false });
                        DraftOptions { most, eager, replay, ..DraftOptions::default() }
                    }),
                    ..Request::new(prompt)
                };
                request.score_prompt_from = score.map(|index| index.index(request.prompt.len()));
                request.sampling.seed = seed;
                request.lasting_tokens = (seed % 2 == 0).then_some(request.prompt.len() * 3 / 4);
                request
            },
        )
}

fn cases() -> impl Strategy<Value = Case> {
    let faults = prop_oneof![Just(Fault::Submit), Just(Fault::Collect), Just(Fault::Answer)];
    (
        setups(),
        prop::collection::vec((0..40_usize, requests()), 1..14),
        prop::collection::vec((0..60_usize, 0..14_usize, prop::option::of(0..3_usize)), 0..5),
        prop_oneof![3 => Just(Vec::new()).boxed(), 1 => prop::collection::vec((0..60_usize, faults), 1..3).boxed()],
    )
        .prop_map(|(setup, requests, cancels, faults)| Case { setup, requests, cancels, faults })
}

fn play(case: &Case) -> Result<Stats, String> {
    let Some(mut rig) = Rig::new(&case.setup) else { return Ok(Stats::default()) };
    let mut ids = vec![None; case.requests.len()];
    let last = case.requests.iter().map(|&(step, _)| step).max().unwrap_or(0);
    let mut step = 0;
    let mut trace = Vec::new();
    while step <= last || !rig.is_idle() {
        for (id, (_, request)) in ids.iter_mut().zip(&case.requests).filter(|(_, (at, _))| *at == step) {
            let answer = known(&case.setup, rig.limits.max_context, request);
            *id = rig.submit(&answer).ok();
        }
        for &(_, which, branch) in case.cancels.iter().filter(|(at, ..)| *at == step) {
            if let Some(id) = ids.get(which).copied().flatten() {
                rig.cancel(id, branch);
            }
        }
        if !rig.is_idle() {
            if let Some(&(_, fault)) = case.faults.iter().find(|(at, _)| *at == step) {
                rig.control.then(fault);
            }
            rig.step()?;
            trace.push(format!("{step}: {:?} hold {:?}", rig.planned, rig.held));
        }
        step += 1;
        if step > 10_000 {
            return Err(format!("does not come to an end:\n{}", trace[trace.len() - 80..].join("\n")));
        }
    }
    let stats = rig.scheduler.stats();
    if stats.pages_used != 0 || stats.pages_free() + stats.pages_cached != case.setup.pages {
        return Err(format!("pages are missing: {stats:?}"));
    }
    if stats.states_used != 0 {
        return Err(format!("states are missing: {stats:?}"));
    }
    if !case.setup.cache && stats.pages_cached > 0 {
        return Err("pages are cached without a cache".into());
    }
    for (id, (_, request)) in ids.iter().zip(&case.requests) {
        let Some(id) = *id else { continue };
        let heard = &rig.heard[&id];
        let mut dead_end = false;
        for branch in 0..request.branches {
            let expected =
                oracle(&case.setup.windows, case.setup.states, rig.limits.max_context, request, branch);
            dead_end |= expected.reason.is_none();
            let answer = heard.branches.get(&branch).cloned().unwrap_or_default();
            judge(&expected, &answer.tokens, answer.end.map(|(reason, _)| reason), heard.failed)
                .map_err(|problem| format!("request {id}, branch {branch}: {problem}"))?;
            if let (Some(expected), Some((from, scores))) = (expected.scores, &heard.scores)
                && (request.score_prompt_from != Some(*from) || expected != *scores)
            {
                return Err(format!("request {id}: scores {scores:?} from {from}, not {expected:?}"));
            }
            if heard.embedding.is_some() && heard.embedding != expected.embedding {
                return Err(format!("request {id}: {:?}, not {:?}", heard.embedding, expected.embedding));
            }
        }
        if heard.failed && !dead_end && case.faults.is_empty() {
            return Err(format!("request {id} failed without a reason"));
        }
        let complete =
            heard.branches.values().all(|b| !matches!(b.end, None | Some((FinishReason::Cancelled, _))));
        if complete && !heard.failed && heard.scores.is_some() != request.score_prompt_from.is_some() {
            return Err(format!("request {id}: scores are missing or were not asked for"));
        }
        if complete && !heard.failed && heard.embedding.is_some() != request.embedding.is_some() {
            return Err(format!("request {id}: the embedding is missing or was not asked for"));
        }
    }
    Ok(stats)
}

fn judge(expected: &Expected, tokens: &[u32], end: Option<FinishReason>, failed: bool) -> Result<(), String> {
    let whole = match end {
        None if failed => false,
        None => return Err("has no end".into()),
        Some(FinishReason::Cancelled) => false,
        Some(reason) if Some(&reason) == expected.reason.as_ref() => true,
        Some(reason) => return Err(format!("{reason:?}, not {:?}", expected.reason)),
    };
    if whole && tokens != expected.tokens || !expected.tokens.starts_with(tokens) {
        return Err(format!("{tokens:?} instead of {:?}", expected.tokens));
    }
    Ok(())
}

/// Number of random schedules: `PROPTEST_CASES`, or those that take a few seconds.
fn schedules() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(600)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: schedules(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_schedule_gives_the_answers_of_solo_runs_and_all_pages_back(case in cases()) {
        if let Err(problem) = play(&case) {
            return Err(TestCaseError::fail(problem));
        }
    }
}

/// Many sequences and few pages, so that preemption is frequent: all answers equal those without it.
#[test]
fn far_more_sequences_than_pages_all_finish_as_if_alone() {
    for (windows, cache, states) in [
        (vec![None], true, false),
        (vec![None], false, false),
        (vec![None, Some(7)], true, false),
        (vec![None], true, true),
    ] {
        let setup = Setup { pages: 40, windows, cache, states, rows: 48, sequences: 40, ..Setup::default() };
        let request = |i: usize| Request {
            max_tokens: Some(20 + i % 30),
            ..Request::new((0..3 + i % 25).map(|at| ((i * 13 + at) % VOCAB) as u32).collect())
        };
        let case = Case {
            requests: (0..64).map(|i| (i / 8, request(i))).collect(),
            cancels: Vec::new(),
            faults: Vec::new(),
            setup,
        };
        let stats = play(&case).unwrap();
        assert!(stats.preemptions > 20, "{stats:?}");
        // With states, the pages of the running sequences leave no room for the checkpoints of the others.
        assert_eq!(stats.prefix_hit_tokens > 0, cache && !states, "{stats:?}");
    }
}

/// Clients beyond the places, with prompts of several chunks: the device has its next step before it ends one.
#[test]
fn under_load_nearly_all_steps_are_planned_ahead() {
    let setup =
        Setup { pages: 6000, rows: 96, sequences: 64, carries: true, max_context: 400, ..Setup::default() };
    let request = |i: usize| Request {
        max_tokens: Some(40 + i * 7 % 80),
        ..Request::new((0..20 + i % 100).map(|at| ((i * 13 + at) % VOCAB) as u32).collect())
    };
    let requests = (0..256).map(|i| (0, request(i))).collect();
    let stats = play(&Case { requests, cancels: Vec::new(), faults: Vec::new(), setup }).unwrap();
    assert!(stats.steps_ahead * 100 > stats.steps * 95, "{} of {}", stats.steps_ahead, stats.steps);
}

/// With as many steps in flight as a device has stages, each has its share of the sequences, and chunks of a prompt follow each other.
#[test]
fn lanes_divide_sequences_and_prompts() {
    for lanes in [2, 3] {
        let setup = Setup { pages: 200, rows: 12, lanes, ..Setup::default() };
        let request =
            |len: usize| Request { max_tokens: Some(30), ..Request::new((0..len as u32).collect()) };
        let mut rig = Rig::new(&setup).unwrap();
        rig.submit(&request(40)).unwrap();
        // A chunk for each lane, of which the first one is collected.
        rig.step().unwrap();
        assert_eq!(rig.planned, [(0, 0, 0..12)]);
        assert_eq!(rig.scheduler.stats().steps_ahead, 1);
        for len in 1..6 {
            rig.submit(&request(len)).unwrap();
        }
        for _ in 0..20 {
            rig.step().unwrap();
        }
        let mut tokens: Vec<_> = rig.heard.values().map(|heard| heard.branches[&0].tokens.len()).collect();
        for _ in 0..lanes {
            assert!(rig.step().is_ok() && rig.planned.len() == 6 / lanes, "{:?}", rig.planned);
        }
        tokens.iter_mut().for_each(|count| *count += 1);
        let after: Vec<_> = rig.heard.values().map(|heard| heard.branches[&0].tokens.len()).collect();
        assert_eq!(after, tokens, "each sequence has a token of {lanes} steps");
    }
}

/// A device of stages that passes tokens on itself has the next step of a lane before the host knows the last one's tokens.
#[test]
fn lanes_are_planned_ahead() {
    for sequences in [1, 6] {
        let setup = Setup { pages: 200, rows: 12, lanes: 2, carries: true, ..Setup::default() };
        let mut rig = Rig::new(&setup).unwrap();
        for len in 1..=sequences {
            let prompt = (0..len as u32).collect();
            rig.submit(&Request { max_tokens: Some(40), ..Request::new(prompt) }).unwrap();
        }
        for _ in 0..8 {
            rig.step().unwrap();
        }
        let tokens = |rig: &Rig| -> Vec<usize> {
            rig.heard.values().map(|heard| heard.branches[&0].tokens.len()).collect()
        };
        let before = tokens(&rig);
        let rounds = if sequences == 1 { 10 } else { 20 };
        for _ in 0..rounds {
            rig.step().unwrap();
            assert!(rig.ahead, "{sequences} sequences");
        }
        assert_eq!(tokens(&rig), before.iter().map(|count| count + 10).collect::<Vec<_>>());
    }
}

/// Page tables that are wrong on purpose must be seen, or the tests above prove nothing.
#[test]
fn the_fake_runner_sees_a_page_that_is_mixed_up() {
    use paguro_backend::{PageMove, Runner};

    let mut rig = Rig::new(&Setup::default()).unwrap();
    let request = Request { max_tokens: Some(8), ..Request::new((0..9).collect()) };
    rig.submit(&request).unwrap();
    rig.step().unwrap();
    let pages: Vec<_> = rig.scheduler.tables().concat();
    rig.runner.move_pages(&[PageMove::Copy { from: pages[0], to: pages[1] }]).unwrap();
    assert!(rig.step().unwrap_err().contains("position 0 where 4 should be"));
}

#[test]
fn the_fake_runner_sees_a_state_of_another_time() {
    use paguro_backend::{PageId, PageMove, Runner, StateId};

    let mut rig = Rig::new(&Setup { states: true, ..Setup::default() }).unwrap();
    rig.submit(&Request { max_tokens: Some(8), ..Request::new((0..9).collect()) }).unwrap();
    let (state, page) = (StateId(0), PageId(16));
    rig.step().unwrap();
    rig.runner.move_pages(&[PageMove::SaveState { state, part: 0, to: page }]).unwrap();
    rig.step().unwrap();
    let wrong = rig.runner.move_pages(&[PageMove::RestoreState { from: page, part: 1, state }]);
    assert!(wrong.unwrap_err().to_string().contains("where part 1"));
    rig.runner.move_pages(&[PageMove::RestoreState { from: page, part: 0, state }]).unwrap();
    assert!(rig.step().unwrap_err().contains("a state of 8 tokens where 9 should be"));
}
