//! One measurement: requests through the engine, timed by the engine's events.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use paguro_backend::SamplingParams;
use paguro_engine::{Adapter, DraftOptions, Event, Generation, Handle, MOST_DRAFTED, Replay, Request};

use super::{Case, Test, report::median};
use crate::{
    cli::BenchDrafts,
    failure::{Failure, Outcome},
};

/// Generator of random prompts, which the prefix cache does not contain.
#[derive(Debug)]
pub struct Random {
    state: u64,
    vocab: u32,
}

impl Random {
    /// Creates a generator for a vocabulary. Equal seeds give equal prompts.
    pub fn new(seed: u64, vocab: usize) -> Self {
        Self { state: seed, vocab: vocab as u32 }
    }

    /// Returns random tokens.
    pub fn tokens(&mut self, count: usize) -> Vec<u32> {
        (0..count).map(|_| self.next() % self.vocab).collect()
    }

    /// SplitMix64 (Steele, Lea, Flood 2014); returns the upper half.
    pub fn next(&mut self) -> u32 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 32) as u32
    }
}

/// An engine, and the adapters of its requests.
pub struct Target {
    /// The engine.
    pub handle: Handle,
    /// Request `i` has adapter `i` modulo their number.
    pub adapters: Vec<Adapter>,
    /// Temperature of sampling; request `i` has the seed `i`.
    pub temperature: f32,
}

/// Tokens of each sequence before the measurement.
pub struct Prefixes(Vec<Vec<u32>>);

impl Prefixes {
    /// Computes the tokens before the case's depth into the engine's prefix cache, which must be on. All other cached
    /// prefixes are dropped first, so that pages are allocated from an empty arena in its order.
    ///
    /// # Errors
    /// The engine refuses or fails.
    pub fn compute(target: &Target, case: &Case, random: &mut Random) -> Outcome<Self> {
        target.handle.clear_prefix_cache();
        let prefixes: Vec<_> = (0..case.batch).map(|_| random.tokens(case.depth)).collect();
        if case.depth > 0 {
            let only_prefix = |(index, prefix): (usize, &Vec<u32>)| {
                submit(target, index, prefix.clone(), 0, DraftOptions::off())
            };
            let generations = prefixes.iter().enumerate().map(only_prefix).collect::<Outcome<Vec<_>>>()?;
            timelines(generations)?;
        }
        Ok(Self(prefixes))
    }
}

/// Maximum number of repetitions for a case whose sequences did not overlap.
const TRIES: usize = 5;

/// Speed of a case.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// Tokens per second.
    pub tokens_per_second: f64,
    /// Drafted tokens that were checked.
    pub drafted: u64,
    /// Drafted tokens that were accepted.
    pub accepted: u64,
    /// Answers that differ from those without drafts, if these are known.
    pub changed: u64,
}

/// Runs the case once with its prefixes.
///
/// # Errors
/// The engine refuses or fails; too few pages, so that sequences were preempted; or sequences ended repeatedly before
/// the last one was submitted, because the machine is busy.
pub fn measure(target: &Target, case: &Case, prefixes: &Prefixes, random: &mut Random) -> Outcome<Measured> {
    let handle = &target.handle;
    let before = handle.stats().preemptions;
    let mut rate = None;
    for _ in 0..TRIES {
        rate = run(target, case, prefixes, random)?;
        if rate.is_some() {
            break;
        }
    }
    if handle.stats().preemptions > before {
        return Err(Failure::new(
            "sequences were preempted while they were measured: there are too few pages",
        ));
    }
    rate.ok_or_else(|| {
        Failure::new("a measured sequence ended before the others had begun: is the machine busy?")
    })
}

/// Returns the seconds of a token that an engine decodes alone: the median of a few rounds; and the bytes of experts that each token
/// copied.
///
/// # Errors
/// As [`measure`].
pub fn token_seconds(handle: Handle, vocab: usize, tokens: usize) -> Outcome<(f64, f64)> {
    const ROUNDS: usize = 3;
    /// Longest warm-up, and the time without a higher speed after which it ends.
    const WARM_UP: Duration = Duration::from_secs(8);
    const STEADY: Duration = Duration::from_secs(1);
    let target = Target { handle, adapters: Vec::new(), temperature: 0.0 };
    let case = Case { test: Test::Decode, tokens, depth: 0, batch: 1, drafts: BenchDrafts::Off };
    let mut random = Random::new(super::SEED, vocab);
    let prefixes = Prefixes::compute(&target, &case, &mut random)?;
    // The clock of a GPU rises for seconds, and longest where stages wait for each other.
    let (began, mut last_gain, mut best) = (Instant::now(), Instant::now(), 0.0);
    while last_gain.elapsed() < STEADY && began.elapsed() < WARM_UP {
        let rate = measure(&target, &case, &prefixes, &mut random)?.tokens_per_second;
        if rate > 1.02 * best {
            (best, last_gain) = (rate, Instant::now());
        }
    }
    let copied = || -> Outcome<u64> {
        let counts = target.handle.expert_counts().map_err(|error| Failure::from_error(&error))?;
        Ok(counts.iter().map(|count| count.misses * count.bytes).sum::<u64>())
    };
    let before = copied()?;
    let rounds = (0..ROUNDS).map(|_| Ok(measure(&target, &case, &prefixes, &mut random)?.tokens_per_second));
    let rates = rounds.collect::<Outcome<Vec<_>>>()?;
    let copied = (copied()? - before) as f64 / (ROUNDS * (tokens + case.slack())) as f64;
    Ok((1.0 / median(rates), copied))
}

/// Runs the case once. Returns `None` if a sequence ended before the others had begun.
fn run(target: &Target, case: &Case, prefixes: &Prefixes, random: &mut Random) -> Outcome<Option<Measured>> {
    let handle = &target.handle;
    let Case { test, tokens, depth, .. } = *case;
    if depth == 0 {
        handle.clear_prefix_cache();
    }
    // A prompt has at least one token. The cache contains no measured token.
    let new = if matches!(test, Test::Prefill) { tokens } else { usize::from(depth == 0) };
    let prompts: Vec<_> =
        prefixes.0.iter().map(|prefix| [prefix.clone(), random.tokens(new)].concat()).collect();
    // Sequences that are admitted a few steps earlier decode for longer.
    let most = if test == Test::Prefill { 1 } else { tokens + case.slack() };
    let drafts = drafts(target, case, &prompts, most)?;
    let known: Vec<Option<Replay>> = drafts.iter().map(|drafts| drafts.replay.clone()).collect();
    let before = handle.stats();
    let start = Instant::now();
    let submitted = prompts
        .into_iter()
        .zip(drafts)
        .enumerate()
        .map(|(index, (prompt, drafts))| submit(target, index, prompt, most, drafts));
    let lines = timelines(submitted.collect::<Outcome<Vec<_>>>()?)?;
    let rate = match test {
        Test::Prefill => Some(prefill_rate(&lines, start, depth + tokens)?),
        Test::Decode => decode_rate(&lines, tokens)?,
    };
    let after = handle.stats();
    let is_changed = |(line, known): &(&Timeline, &Option<Replay>)| {
        known.as_ref().is_some_and(|known| *known.tokens != *line.answer)
    };
    let changed = lines.iter().zip(&known).filter(is_changed).count() as u64;
    Ok(rate.map(|tokens_per_second| Measured {
        tokens_per_second,
        drafted: after.draft_tokens - before.draft_tokens,
        accepted: after.accepted_tokens - before.accepted_tokens,
        changed,
    }))
}

/// Returns the drafts of the answers to these prompts. Known answers are computed first, in steps of as many rows: with fast
/// numerics, the last bits depend on their number.
fn drafts(target: &Target, case: &Case, prompts: &[Vec<u32>], most: usize) -> Outcome<Vec<DraftOptions>> {
    let (thousandths, length, of_model) = match case.drafts {
        BenchDrafts::Off => return Ok(vec![DraftOptions::off(); prompts.len()]),
        BenchDrafts::Auto => return Ok(vec![DraftOptions::default(); prompts.len()]),
        BenchDrafts::Model(depth) => return Ok(vec![DraftOptions::default().of_model(depth); prompts.len()]),
        BenchDrafts::Known { thousandths, length, of_model } => (thousandths, length, of_model),
    };
    let tokens: Arc<[u32]> = vec![0; most].into();
    let wrong = || match length {
        None => DraftOptions::off(),
        Some(length) => DraftOptions {
            most: length,
            eager: true,
            replay: Some(Replay { tokens: tokens.clone(), chance: 1.0, seed: 0, of_model: false }),
            ..DraftOptions::default()
        },
    };
    let submitted = prompts.iter().enumerate();
    let submitted = submitted.map(|(index, prompt)| submit(target, index, prompt.clone(), most, wrong()));
    let lines = timelines(submitted.collect::<Outcome<Vec<_>>>()?)?;
    let known = lines.into_iter().enumerate().map(|(index, line)| {
        let (tokens, chance) = (line.answer.into(), f64::from(thousandths) / 1000.0);
        DraftOptions {
            most: length.unwrap_or(MOST_DRAFTED),
            eager: length.is_some(),
            replay: Some(Replay { tokens, chance, seed: index as u64, of_model }),
            ..DraftOptions::default()
        }
    });
    Ok(known.collect())
}

impl Case {
    /// Returns the number of additional tokens: those that sequences may decode while others are being admitted, at
    /// most one per sequence, or as many as a step with a draft gives, and the first token, which belongs to the prefill.
    pub fn slack(&self) -> usize {
        match self.test {
            Test::Prefill => 1,
            Test::Decode => {
                let per_step = if self.drafts == BenchDrafts::Off { 1 } else { 1 + MOST_DRAFTED };
                self.batch * per_step + 1
            }
        }
    }

    /// Returns the maximum length of one sequence.
    pub fn context(&self) -> usize {
        self.depth + self.tokens + self.slack()
    }
}

fn submit(
    target: &Target,
    index: usize,
    prompt: Vec<u32>,
    max_tokens: usize,
    drafts: DraftOptions,
) -> Outcome<Generation> {
    let max_tokens = Some(max_tokens);
    let adapter = target.adapters.get(index % target.adapters.len().max(1));
    let adapters = adapter.map(|adapter| (adapter.clone(), 1.0)).into_iter().collect();
    let sampling =
        SamplingParams { temperature: target.temperature, seed: index as u64, ..SamplingParams::default() };
    let request =
        Request { max_tokens, ignore_stop_tokens: true, drafts, adapters, sampling, ..Request::new(prompt) };
    target.handle.generate(request).map_err(|error| Failure::from_error(&error))
}

/// Times of a request's tokens.
#[derive(Debug, Default)]
pub struct Timeline {
    cached: usize,
    /// Time of each token.
    pub tokens: Vec<Instant>,
    answer: Vec<u32>,
}

impl Timeline {
    /// Reads a request to its end.
    ///
    /// # Errors
    /// The request fails.
    pub fn of(mut generation: Generation) -> Outcome<Self> {
        let mut line = Self::default();
        while let Some(event) = generation.next_blocking() {
            match event {
                Event::Started { cached_tokens, .. } => line.cached = cached_tokens,
                Event::Token { at, token, .. } => {
                    line.tokens.push(at);
                    line.answer.push(token);
                }
                Event::Failed(error) => return Err(Failure::from_error(&error)),
                _ => {}
            }
        }
        Ok(line)
    }
}

fn timelines(generations: Vec<Generation>) -> Outcome<Vec<Timeline>> {
    generations.into_iter().map(Timeline::of).collect()
}

/// Returns the time at which the last sequence had its first token.
fn last_to_begin(lines: &[Timeline]) -> Outcome<Instant> {
    let firsts: Option<Vec<_>> = lines.iter().map(|line| line.tokens.first()).collect();
    let last = firsts.and_then(|firsts| firsts.into_iter().max().copied());
    last.ok_or_else(|| Failure::new("a measured request ended without a token"))
}

/// Returns the prefill rate, from the submission to the first token of the last sequence. Cached tokens do not count.
fn prefill_rate(lines: &[Timeline], start: Instant, prompt: usize) -> Outcome<f64> {
    let computed: usize = lines.iter().map(|line| prompt - line.cached).sum();
    let end = last_to_begin(lines)?;
    Ok(computed as f64 / end.duration_since(start).as_secs_f64())
}

/// Returns the decode rate over `tokens` tokens of each sequence, from the time when all of them decode; `None` if a
/// sequence has fewer.
fn decode_rate(lines: &[Timeline], tokens: usize) -> Outcome<Option<f64>> {
    let start = last_to_begin(lines)?;
    let last = |line: &Timeline| line.tokens.iter().filter(|&&at| at > start).nth(tokens - 1).copied();
    let ends: Option<Vec<_>> = lines.iter().map(last).collect();
    let end = ends.and_then(|ends| ends.into_iter().max());
    Ok(end.map(|end| (tokens * lines.len()) as f64 / end.duration_since(start).as_secs_f64()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn decoding_is_timed_only_while_all_decode() {
        let start = Instant::now();
        let line = |seconds: &[u64]| Timeline {
            cached: 0,
            tokens: seconds.iter().map(|&s| start + Duration::from_secs(s)).collect(),
            answer: Vec::new(),
        };
        // The second sequence begins at 10; from then on both need 2 s for each token.
        let lines = [line(&[1, 2, 3, 10, 12, 14]), line(&[10, 12, 14, 16])];
        assert_eq!(decode_rate(&lines, 2).unwrap(), Some(4.0 / 4.0));
        assert_eq!(decode_rate(&lines, 3).unwrap(), None);
        assert!(decode_rate(&[line(&[])], 1).is_err());
    }

    #[test]
    fn cached_tokens_do_not_count_as_prefilled() {
        let start = Instant::now();
        let line = |cached, seconds| Timeline {
            cached,
            tokens: vec![start + Duration::from_secs(seconds)],
            answer: Vec::new(),
        };
        assert_eq!(prefill_rate(&[line(96, 2), line(64, 4)], start, 128).unwrap(), 96.0 / 4.0);
    }
}
