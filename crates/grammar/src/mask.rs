//! The position of an answer in its grammar, and the computation of the mask of its next token.

#[cfg(test)]
mod tests;

use std::{
    fmt,
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use llguidance::{CancellationHandle, TokenParser, api::StopReason, panic_utils::catch_unwind};
use paguro_backend::TokenMask;

use super::{Constraint, message};

/// Time of a mask that counts neither as slow nor against the budget of its answers.
pub const PROMPT: Duration = Duration::from_millis(5);

/// Time after which no further mask after a drafted token is begun, because the next step waits for the computation.
const AHEAD: Duration = Duration::from_micros(1500);

/// Maximum time of one mask.
const MOST_OF_MASK: Duration = Duration::from_secs(1);

/// Maximum time of the masks of all branches, beyond [`PROMPT`] of each.
const MOST_OF_REQUEST: Duration = Duration::from_secs(30);

/// Position of one branch in its grammar. It is kept during preemption, like the tokens.
///
/// Each step of the answer begins a [computation](Guide::compute), which the caller runs on a thread of its choice. Its
/// [verdict](Verdict) decides if and how the answer continues.
///
/// A computation also looks ahead: it computes the masks after drafted tokens, and then rolls the parser back. The time of
/// these masks counts against no limit, and their failure is none of the answer's, so that drafts change no answer. After
/// a failure, the parser is made again from a [copy](Spare).
#[derive(Debug)]
pub struct Guide {
    /// Beginning of the grammar, until the first computation.
    start: Option<Parser>,
    /// The last computation. Branches share it, because they separate only after it has ended.
    next: Arc<Computation>,
    /// Time of the masks of all branches.
    budget: Arc<MaskBudget>,
    words: usize,
    /// Expected time of the next mask. `None` before the first one.
    expected: Option<Duration>,
    /// Start of the last computation.
    begin: Instant,
    /// True after [`Guide::settle`] has returned the verdict.
    is_settled: bool,
}

/// Result of a computation.
#[derive(Debug)]
pub enum Verdict {
    /// Mask of the next token.
    Mask(TokenMask),
    /// The grammar does not end here; there is no mask because the answer has its maximum length.
    Open,
    /// The grammar ends here, and no token may follow.
    End,
    /// The grammar allows no token here, has become too large, or needs too long.
    Failed(MaskError),
}

/// Reason for which a grammar has no verdict.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MaskError {
    /// The grammar allows no further token, or has become too large.
    #[error("the grammar allows no continuation of the answer: {0}")]
    NoContinuation(String),
    /// The masks of the grammar take too long to compute. The text names the limit.
    #[error(
        "the grammar is too slow: {0}; make it less ambiguous (let one rule match each part of the text, and write repetitions with `*` and not with recursion), or give it fewer and shorter alternatives"
    )]
    TooSlow(String),
}

/// The state of a grammar's parser. A box, because it is large and moves to the threads.
struct Parser {
    now: Box<TokenParser>,
    /// From which it can be made again if looking ahead fails; made when it first looks ahead.
    spare: Option<Spare>,
    /// True if it can be rolled back, and looking ahead has neither failed nor taken long.
    looks_ahead: bool,
}

/// An earlier state of a parser.
struct Spare {
    parser: Box<TokenParser>,
    /// Tokens since then.
    tokens: Vec<u32>,
}

impl Parser {
    fn new(parser: TokenParser) -> Self {
        let looks_ahead = parser.parser.grammar().lexer_spec().can_rollback();
        Self { now: Box::new(parser), spare: None, looks_ahead }
    }

    /// Returns a parser in the same state.
    fn copy(&self) -> Self {
        Self { looks_ahead: self.looks_ahead, ..Self::new(self.now.deep_clone()) }
    }

    /// Goes on with a token.
    fn consume(&mut self, token: u32) -> anyhow::Result<()> {
        if let Some(spare) = &mut self.spare {
            spare.tokens.push(token);
        }
        self.now.consume_token(token).map(drop)
    }
}

impl fmt::Debug for Parser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Parser").finish()
    }
}

/// A computation that is queued, runs, or has ended.
#[derive(Debug, Default)]
pub struct Computation {
    result: OnceLock<Computed>,
    stop: Mutex<Stop>,
}

#[derive(Debug)]
struct Computed {
    verdict: Verdict,
    /// Masks after the first drafted tokens.
    ahead: Vec<TokenMask>,
    took: Duration,
    /// The position after the tokens. `None` after a failure.
    parser: Option<Arc<Mutex<Parser>>>,
}

/// State of a computation's early end.
#[derive(Debug, Default)]
struct Stop {
    /// True if the result is not needed any more, or takes too long.
    is_stopped: bool,
    is_too_slow: bool,
    /// True when the verdict is known and only masks after drafted tokens are computed.
    is_ahead: bool,
    /// Ends the work of the parser soon. It is set while a thread computes.
    handle: Option<CancellationHandle>,
}

impl Computation {
    /// Ends a computation whose result is not needed any more.
    fn abandon(&self) {
        self.stop(false);
    }

    /// Ends a computation that takes too long.
    pub fn give_up(&self) {
        self.stop(true);
    }

    /// Returns true if the result is not needed any more, or takes too long.
    pub fn is_stopped(&self) -> bool {
        self.lock().is_stopped
    }

    fn stop(&self, is_too_slow: bool) {
        let mut stop = self.lock();
        // Slow masks after drafted tokens only end early.
        if !(stop.is_ahead && is_too_slow) {
            stop.is_stopped = true;
            stop.is_too_slow |= is_too_slow;
        }
        if let Some(handle) = &stop.handle {
            handle.cancel();
        }
    }

    /// Sets the handle that ends the computation early. Returns false if it was stopped before.
    fn begin(&self, handle: Option<CancellationHandle>) -> bool {
        let mut stop = self.lock();
        stop.handle = handle;
        !stop.is_stopped
    }

    /// Begins to look ahead, which the handle ends early.
    fn begin_ahead(&self, handle: CancellationHandle) {
        let mut stop = self.lock();
        (stop.is_ahead, stop.handle) = (true, Some(handle));
    }

    fn lock(&self) -> MutexGuard<'_, Stop> {
        self.stop.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Guide {
    /// Returns the position before the first token, whose mask must be [computed](Guide::compute) before it is sampled.
    pub fn new(constraint: Constraint) -> Self {
        Self {
            start: Some(Parser::new(constraint.parser)),
            next: Arc::default(),
            budget: Arc::default(),
            words: constraint.words,
            expected: None,
            begin: Instant::now(),
            is_settled: false,
        }
    }

    /// Returns the same position for another branch. The computation must have ended. The position is copied by the
    /// thread that computes the next one.
    pub fn fork(&self) -> Self {
        debug_assert!(!self.is_computing(), "branches separate when the first mask is known");
        Self {
            start: self.start.as_ref().map(Parser::copy),
            next: self.next.clone(),
            budget: self.budget.clone(),
            words: self.words,
            expected: self.expected,
            begin: self.begin,
            is_settled: true,
        }
    }

    /// Begins the computation after `tokens`, or before the first token: does the grammar end here, and if not, the mask
    /// of the next token. The mask is restricted to `within` unless the result would be empty; the last token of an
    /// answer needs none. The computation also has the masks after the tokens of `draft`, each restricted likewise. The last
    /// computation must have ended.
    pub fn compute(
        &mut self,
        tokens: Vec<u32>,
        is_last: bool,
        within: Option<Arc<TokenMask>>,
        draft: Vec<Drafted>,
    ) -> MaskTask {
        let last = std::mem::take(&mut self.next);
        (self.begin, self.is_settled) = (Instant::now(), false);
        let parser = match (self.start.take(), last.result.get()) {
            (Some(start), _) => Some(Arc::new(Mutex::new(start))),
            (None, Some(computed)) => computed.parser.clone(),
            (None, None) => None,
        };
        // A parser with one owner is not copied.
        drop(last);
        MaskTask {
            parser,
            tokens,
            is_last,
            within,
            draft,
            words: self.words,
            budget: self.budget.clone(),
            computation: self.next.clone(),
            expected: self.expected,
            begin: self.begin,
        }
    }

    /// Returns true if a computation was started whose verdict is not [settled](Guide::settle).
    pub fn is_computing(&self) -> bool {
        self.start.is_none() && !self.is_settled
    }

    /// Returns true if the last computation has ended.
    pub fn is_known(&self) -> bool {
        self.next.result.get().is_some()
    }

    /// Returns true if a computation was started that will probably end within `time` of its start.
    pub fn ends_within(&self, time: Duration) -> bool {
        let is_expected = self.expected.is_some_and(|expected| expected <= time);
        self.is_computing() && is_expected && self.begin.elapsed() <= time
    }

    /// Returns the verdict of the last computation and its time, once, after it has ended.
    pub fn settle(&mut self) -> Option<(&Verdict, Duration)> {
        if !self.is_computing() {
            return None;
        }
        let Computed { verdict, took, .. } = self.next.result.get()?;
        self.is_settled = true;
        // A grammar that was slow once stays slow for a while. The first mask is unusual: it builds the states of the lexer.
        self.expected = Some(self.expected.map_or(*took / 4, |expected| (expected * 3 / 4).max(*took)));
        Some((verdict, *took))
    }

    /// Returns the mask of the next token, if it is known.
    pub fn mask(&self) -> Option<&TokenMask> {
        match &self.next.result.get()?.verdict {
            Verdict::Mask(mask) => Some(mask),
            _ => None,
        }
    }

    /// Returns the masks after the first drafted tokens of the last computation. There may be fewer of them than drafted
    /// tokens: not for tokens that the grammar does not allow, or with which it ends.
    pub fn masks_ahead(&self) -> &[TokenMask] {
        self.next.result.get().map_or(&[], |computed| &computed.ahead)
    }
}

/// A drafted token.
#[derive(Clone, Debug)]
pub struct Drafted {
    /// The token.
    pub token: u32,
    /// Restriction of the mask after it.
    pub within: Option<Arc<TokenMask>>,
}

/// Ends a computation whose sequence has ended.
impl Drop for Guide {
    fn drop(&mut self) {
        if self.is_computing() && self.next.result.get().is_none() {
            self.next.abandon();
        }
    }
}

/// Time of the masks of all branches, beyond [`PROMPT`] of each.
#[derive(Debug, Default)]
struct MaskBudget {
    nanoseconds: AtomicU64,
}

impl MaskBudget {
    fn spend(&self, took: Duration) {
        let slow = u64::try_from(took.saturating_sub(PROMPT).as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.fetch_add(slow, Ordering::Relaxed);
    }

    fn left(&self) -> Duration {
        MOST_OF_REQUEST.saturating_sub(Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed)))
    }
}

/// A computation to run: [compute](MaskTask::compute), [look ahead](MaskTask::look_ahead), [finish](MaskTask::finish).
#[derive(Debug)]
pub struct MaskTask {
    parser: Option<Arc<Mutex<Parser>>>,
    tokens: Vec<u32>,
    is_last: bool,
    within: Option<Arc<TokenMask>>,
    draft: Vec<Drafted>,
    words: usize,
    budget: Arc<MaskBudget>,
    /// Its end, early or with a result.
    pub computation: Arc<Computation>,
    /// Its expected time. `None` for the first mask of an answer.
    pub expected: Option<Duration>,
    /// Time at which it began.
    pub begin: Instant,
}

/// Result of a computation, before its time is known.
pub struct Answer {
    verdict: Verdict,
    ahead: Vec<TokenMask>,
    parser: Option<Parser>,
}

impl MaskTask {
    /// Returns the maximum time of the computation.
    pub fn limit(&self) -> Duration {
        MOST_OF_MASK.min(self.budget.left() + PROMPT)
    }

    /// Returns true if the task has a mask as its result.
    pub fn has_mask(&self) -> bool {
        !self.is_last
    }

    /// Computes the verdict.
    pub fn compute(&mut self) -> Answer {
        let failed = |problem: &str| Answer {
            verdict: Verdict::Failed(MaskError::NoContinuation(problem.into())),
            ahead: Vec::new(),
            parser: None,
        };
        let Some(parser) = self.parser.take() else { return failed("its computation ended early") };
        let mut parser = match Arc::try_unwrap(parser) {
            Ok(parser) => parser.into_inner().unwrap_or_else(PoisonError::into_inner),
            // Other branches continue from the same position.
            Err(shared) => lock(&shared).copy(),
        };
        if !self.computation.begin(Some(parser.now.enable_cancellation())) {
            return failed("its computation was stopped");
        }
        let verdict = catch_unwind(AssertUnwindSafe(|| {
            for &token in &self.tokens {
                parser.consume(token)?;
            }
            if !self.tokens.is_empty() && parser.now.check_stop()? {
                return Ok(Verdict::End);
            }
            match self.is_last {
                true => Ok(Verdict::Open),
                false => Ok(Verdict::Mask(self.mask(&mut parser.now, self.within.as_deref())?)),
            }
        }));
        let is_stopped = !self.computation.begin(None);
        match verdict {
            _ if is_stopped => failed("its computation was stopped"),
            Ok(verdict) => Answer { verdict, ahead: Vec::new(), parser: Some(parser) },
            Err(_) if parser.now.stop_reason() == StopReason::NoExtensionBias => {
                failed("the vocabulary has no token for what must come next, or nothing is allowed there")
            }
            Err(error) => failed(&message(&error)),
        }
    }

    /// Computes the mask of the next token, restricted to `within` unless nothing would remain.
    fn mask(&self, parser: &mut TokenParser, within: Option<&TokenMask>) -> anyhow::Result<TokenMask> {
        let mask = parser.compute_mask()?;
        let mask = &mask.as_slice()[..self.words];
        let within = within.map(|within| and(mask, within.bits()));
        let within = within.filter(|bits| bits.iter().any(|&word| word != 0));
        Ok(TokenMask::new(within.unwrap_or(mask.into())))
    }

    /// Computes the masks after drafted tokens, and leaves the parser in its state before them.
    pub fn look_ahead(&self, answer: &mut Answer) {
        let (Verdict::Mask(first), Some(parser)) = (&answer.verdict, &mut answer.parser) else { return };
        if self.draft.is_empty() || !parser.looks_ahead {
            return;
        }
        let begin = Instant::now();
        let spare = || Spare { parser: Box::new(parser.now.deep_clone()), tokens: Vec::new() };
        let spare = parser.spare.take().unwrap_or_else(spare);
        self.computation.begin_ahead(parser.now.enable_cancellation());
        let ahead = &mut answer.ahead;
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let mut consumed = 0;
            for Drafted { token, within } in &self.draft {
                let is_allowed = ahead.last().unwrap_or(first).allows(*token);
                if !is_allowed || begin.elapsed() > AHEAD {
                    break;
                }
                parser.now.consume_token(*token)?;
                consumed += 1;
                if parser.now.check_stop()? {
                    break;
                }
                match self.mask(&mut parser.now, within.as_deref()) {
                    Ok(mask) => ahead.push(mask),
                    Err(_) if parser.now.stop_reason() == StopReason::NoExtensionBias => break,
                    Err(error) => return Err(error),
                }
            }
            parser.now.rollback(consumed)
        }));
        // Nobody ends the parser's work any more.
        let was_stopped = parser.now.cancellation_handle().is_some_and(|handle| handle.is_cancelled());
        let is_wanted = self.computation.begin(None);
        match outcome {
            _ if !is_wanted => {}
            Ok(()) if !was_stopped => {
                parser.looks_ahead = begin.elapsed() <= PROMPT;
                parser.spare = Some(spare).filter(|_| parser.looks_ahead);
            }
            _ => {
                ahead.clear();
                let Spare { parser: mut again, tokens } = spare;
                let replay = AssertUnwindSafe(|| {
                    tokens.iter().try_for_each(|&token| again.consume_token(token).map(drop))
                });
                // It has gone this way before.
                let replayed = catch_unwind(replay);
                debug_assert!(replayed.is_ok());
                *parser = Parser { looks_ahead: false, ..Parser::new(*again) };
            }
        }
    }

    /// Publishes the result of a computation that took `took`. It fails if that is too long.
    pub fn finish(&self, answer: Answer, took: Duration) {
        let limit = self.limit();
        self.budget.spend(took);
        let Answer { verdict, ahead, parser } = answer;
        let (verdict, parser) = match took > limit || self.computation.lock().is_too_slow {
            true => (Verdict::Failed(MaskError::TooSlow(slow(limit))), None),
            false => (verdict, parser),
        };
        let parser = parser.map(|parser| Arc::new(Mutex::new(parser)));
        // The first one counts.
        let _ = self.computation.result.set(Computed { verdict, ahead, took, parser });
    }
}

/// Completes the computation even if the thread panics, so that no sequence waits for ever.
impl Drop for MaskTask {
    fn drop(&mut self) {
        if self.computation.result.get().is_none() {
            let problem = "its computation ended early".into();
            let verdict = Verdict::Failed(MaskError::NoContinuation(problem));
            self.finish(Answer { verdict, ahead: Vec::new(), parser: None }, Duration::ZERO);
        }
    }
}

/// Returns the limit that a computation has exceeded, as a part of an error.
fn slow(limit: Duration) -> String {
    match limit < MOST_OF_MASK {
        true => format!("the masks of this request took more than {} s", MOST_OF_REQUEST.as_secs()),
        false => format!("the mask of one token took more than {} s", MOST_OF_MASK.as_secs()),
    }
}

fn lock(parser: &Mutex<Parser>) -> MutexGuard<'_, Parser> {
    parser.lock().unwrap_or_else(PoisonError::into_inner)
}

fn and(a: &[u32], b: &[u32]) -> Box<[u32]> {
    a.iter().zip(b).map(|(a, b)| a & b).collect()
}
