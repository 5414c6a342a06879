//! Drafts by a model: a head of the model itself, its assistant, or a smaller model with the same tokens.
//!
//! | | model of its own | head | assistant |
//! |-|-|-|-|
//! | row of position `p` | token `p` | token `p`, and the model's row of position `p - 1` | as of a head |
//! | output | the draft of token `p + 1` | the same, and a row in place of the model's | as of a head |
//! | rows that remain after a check | those of accepted tokens | those before the draft: the others are computed again with the model's rows | none |
//! | reads at most | the last [`MOST_READ`] tokens before it begins | those of rows that are kept ([`HiddenRows`]) | the last token |
//!
//! A model of its own and a head have pages and states of their own. They follow a sequence lazily: rows are computed when a draft is
//! wanted. Their positions count from the first token that they have read, because rotations depend on distances alone. An
//! assistant reads the model's pages ([`Program::shares_pages`]). All rows of a draft are at the position of the last token, and
//! see the tokens before it.
//!
//! The lengths of drafts are chosen before their first step. So a device that [carries](Runner::carries) tokens and rows gets each step
//! before the tokens of the step before are read, and is never idle within a chain of drafts. Tokens that only one of the models has
//! end a draft when they are read.

use std::{collections::HashMap, time::Instant};

use paguro_backend::{
    Carried, GivenRows, Limits, Output, OutputKind, OutputValue, PageId, Program, Runner, STATE_CHUNK,
    SampleRequest, Sampled, SamplingParams, StateId, StateUse, Step, StepError, StepOutput, StepSequence,
    Ticket,
};

use super::{HiddenRows, KEPT_ROWS, MOST_DRAFTED, RowTimes};
use crate::{
    cost::{StepCost, Work},
    sequence::BlockTable,
};

/// Most drafted tokens of a model in a step.
pub const MOST_BY_MODEL: usize = 8;

/// Most tokens before the end of a text that a draft model reads when it begins.
pub(crate) const MOST_READ: usize = 2048;

/// Rows that a draft model reads without regard to their time: a few tokens that were accepted without it.
pub(crate) const SHORT_LAG: usize = 2 * MOST_BY_MODEL;

/// A draft model that runs.
pub(crate) struct DraftRunner {
    runner: Box<dyn Runner>,
    limits: Limits,
    /// Number of K/V groups.
    groups: usize,
    is_head: bool,
    /// True if a step may begin with tokens and rows of the step before that were not read.
    carries: bool,
    /// True for an assistant, which has no pages.
    shares_pages: bool,
    /// Tokens that both models have.
    vocab: usize,
    has_states: bool,
    /// Rows that its states can drop.
    droppable: usize,
    free: Vec<PageId>,
    free_states: Vec<StateId>,
    sequences: HashMap<(u64, usize), Known>,
    /// Times of its steps.
    cost: StepCost,
    times: RowTimes,
    greedy: SamplingParams,
    out: StepOutput,
}

/// Rows of a sequence that are computed.
#[derive(Debug, Default)]
struct Known {
    /// Position of the first one in the sequence.
    base: usize,
    /// Their number, drafted ones included.
    rows: usize,
    /// Pages by group.
    tables: Vec<Vec<PageId>>,
    state: Option<StateId>,
    /// Number of tokens that the sequence had before the last draft, and the draft.
    confirmed: usize,
    drafted: Vec<u32>,
}

/// A sequence, as a draft model sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text<'a> {
    /// Request and branch.
    pub owner: (u64, usize),
    /// All tokens; the model has computed the rows of all but the last one.
    pub tokens: &'a [u32],
    /// The model's last rows, for heads.
    pub rows: Option<&'a HiddenRows>,
    /// The model's pages of the tokens but the last one, for assistants.
    pub tables: &'a [BlockTable],
}

/// Rows that a draft needs before its second token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lag {
    /// Position of the first row in the sequence.
    start: usize,
    /// Position in the sequence of the draft model's first row.
    base: usize,
    /// Their number, at least one.
    pub rows: usize,
    /// Most drafted tokens.
    pub most: usize,
}

impl Lag {
    /// Returns the position before which the model's rows are not needed any more: the end of what is read, of which nothing is if
    /// the text is long.
    pub fn read_to(&self, is_long: bool) -> usize {
        if is_long { self.start } else { self.start + self.rows }
    }

    /// Returns a lag of few rows in its place.
    pub fn short(&self) -> Self {
        let rows = self.rows.min(4);
        Self { start: self.start + self.rows - rows, rows, ..*self }
    }
}

/// Rows of a sequence in a step.
struct Part<'a> {
    text: Text<'a>,
    rows: PartRows<'a>,
    /// True if a token is drafted after the last row.
    samples: bool,
}

/// Tokens of the rows of a part, and what a head joins with them.
#[derive(Clone, Copy)]
enum PartRows<'a> {
    /// The tokens, and for heads `[rows, hidden]`.
    Known { tokens: &'a [u32], given: &'a [f32] },
    /// One row: the token, and for heads the row, after the part of this number among those of the step before that have a drafted
    /// token.
    Carried(usize),
}

/// A step that was submitted.
struct Submitted {
    ticket: Ticket,
    work: Work,
}

impl DraftRunner {
    /// `seconds` is the time of a step of `rows` rows, which was measured.
    pub fn new(
        runner: Box<dyn Runner>,
        program: &Program,
        limits: Limits,
        vocab: usize,
        (rows, seconds): (usize, std::time::Duration),
    ) -> Self {
        let mut cost = StepCost::default();
        cost.learn(Work::default().and(0, rows), seconds);
        let (greedy, is_head) = (SamplingParams::default(), program.joined().is_some());
        let carries = runner.carries(&OutputKind::Sample(request(&greedy)))
            && (!is_head || runner.carries(&OutputKind::Embedding));
        let shares_pages = program.shares_pages;
        let pages = if shares_pages { 1 } else { limits.pages };
        Self {
            runner,
            limits,
            groups: program.kv.groups.len(),
            is_head,
            carries,
            shares_pages,
            vocab: vocab.min(program.vocab),
            has_states: !program.state.is_empty(),
            droppable: program.droppable_rows().unwrap_or(usize::MAX),
            free: (1..pages as u32).rev().map(PageId).collect(),
            free_states: (0..limits.states as u32).rev().map(StateId).collect(),
            sequences: HashMap::new(),
            cost,
            times: RowTimes::default(),
            greedy,
            out: StepOutput::default(),
        }
    }

    /// Returns true for a head or an assistant, which read rows of the model.
    pub fn is_head(&self) -> bool {
        self.is_head
    }

    /// Returns the number of the model's rows that are kept for it.
    pub fn kept_rows(&self) -> usize {
        kept_rows(self.shares_pages)
    }

    /// Drops the rows of sequences that do not run.
    pub fn retain(&mut self, runs: impl Fn((u64, usize)) -> bool) {
        let ended: Vec<_> = self.sequences.keys().copied().filter(|&owner| !runs(owner)).collect();
        ended.into_iter().for_each(|owner| self.release(owner));
    }

    fn release(&mut self, owner: (u64, usize)) {
        let Some(known) = self.sequences.remove(&owner) else { return };
        self.free.extend(known.tables.into_iter().flatten());
        self.free_states.extend(known.state);
    }

    /// Returns the rows that a draft needs; `None` if the model cannot draft after this text.
    pub fn lag(&self, text: &Text<'_>) -> Option<Lag> {
        let len = text.tokens.len();
        let first = match (self.is_head, text.rows) {
            (true, Some(rows)) if rows.end() + 1 == len && rows.end() > rows.first() => rows.first() + 1,
            (true, _) => return None,
            (false, _) => len.saturating_sub(MOST_READ),
        };
        if self.shares_pages {
            let (start, last) = (len - 1, text.tokens[len - 1]);
            let blocks = start.div_ceil(self.limits.block_size);
            let has_pages = text.tables.iter().all(|table| table.pages.len() >= blocks);
            let fits = has_pages && (last as usize) < self.vocab && len <= self.limits.max_context;
            return fits.then_some(Lag { start, base: 0, rows: 1, most: usize::MAX });
        }
        let fresh = Lag { start: first, base: first, rows: len - first, most: 0 };
        let known = self.sequences.get(&text.owner).map(|known| {
            let start = known.valid(text.tokens, self.is_head);
            Lag { start, base: known.base, rows: len - start, most: 0 }
        });
        // A text that was not read for long begins anew.
        let fits =
            |lag: &Lag| lag.start >= first && len + MOST_BY_MODEL - lag.base <= self.limits.max_context;
        let lag = known.filter(fits).unwrap_or(fresh);
        let last = len - 1 - lag.base;
        // Drafted rows may be dropped, and are in the chunk of the last row then.
        let most = match self.has_states {
            true => self.droppable.min(STATE_CHUNK - 1 - last % STATE_CHUNK) + 1,
            false => usize::MAX,
        };
        let most = most.min(self.limits.max_context.saturating_sub(last));
        let exists = text.tokens[lag.start..].iter().all(|&token| (token as usize) < self.vocab);
        (exists && most > 0).then_some(Lag { most, ..lag })
    }

    /// Returns the expected seconds of reading `tokens` tokens.
    pub fn reading_seconds(&self, tokens: usize) -> f64 {
        self.cost.seconds(Work::default().and(0, tokens))
    }

    /// Returns the expected seconds of drafts: of each, its lag and its number of tokens.
    pub fn seconds(&self, drafts: impl Iterator<Item = (Lag, usize)> + Clone) -> f64 {
        let longest = drafts.clone().map(|draft| draft.1).max().unwrap_or(0);
        let of_step = |step: usize| {
            let drafts = drafts.clone().filter(|(_, length)| *length > step);
            let work = drafts.fold(Work::default(), |work, (lag, _)| match step {
                0 => work.and(lag.start - lag.base, lag.rows),
                _ => work.and(lag.start - lag.base + lag.rows + step - 1, 1),
            });
            self.step_seconds(work)
        };
        (0..longest).map(of_step).sum()
    }

    fn step_seconds(&self, work: Work) -> f64 {
        self.times.seconds(&self.cost, work).unwrap_or_else(|| self.cost.seconds(work))
    }

    /// Drafts tokens after each text, up to the maximum of each. Reading the texts takes at most `seconds`, or the time of
    /// [`SHORT_LAG`] rows; a text that is not read to its end has no draft.
    ///
    /// # Errors
    /// [`StepError`]: a step fails.
    pub fn draft(&mut self, texts: &[(Text<'_>, usize)], seconds: f64) -> Result<Vec<Vec<u32>>, StepError> {
        let mut drafts = vec![Vec::new(); texts.len()];
        // The first step: rows up to the last token.
        let (mut parts, mut drafting) = (Vec::new(), Vec::new());
        let (mut work, mut left) = (Work::default(), self.limits.max_rows);
        for (index, (text, most)) in texts.iter().enumerate() {
            let Some(lag) = self.lag(text).filter(|_| *most > 0 && left > 0) else { continue };
            let rows = self.cost.rows_within(work, lag.start - lag.base, lag.rows.min(left), seconds);
            // On a slow device as well, the text must not grow faster than it is read.
            let least = if parts.is_empty() { lag.rows.min(SHORT_LAG).min(left) } else { 0 };
            let rows = rows.max(least);
            let most = (*most).min(lag.most);
            if rows == 0 || !self.begin(text, lag, rows + most, texts) {
                continue;
            }
            (work, left) = (work.and(lag.start - lag.base, rows), left - rows);
            let end = lag.start + rows;
            let given = match text.rows.filter(|_| self.is_head) {
                Some(known) => known.of(lag.start - 1..end - 1),
                None => &[],
            };
            let samples = rows == lag.rows;
            if samples {
                drafting.push((index, most));
            }
            let rows = PartRows::Known { tokens: &text.tokens[lag.start..end], given };
            parts.push(Part { text: *text, rows, samples });
        }
        if parts.is_empty() {
            return Ok(drafts);
        }
        let mut begin = Instant::now();
        let mut submitted = self.submit(&parts)?;
        // True for drafts that have ended with a token that only one of the models has.
        let mut has_ended = vec![false; texts.len()];
        // A row each for the following tokens.
        for length in 1.. {
            let ahead = self.carries.then(|| {
                let longer = drafting.iter().enumerate().filter(|(_, (_, most))| *most > length);
                let part = |(number, (index, _)): (usize, &(usize, usize))| Part {
                    text: texts[*index].0,
                    rows: PartRows::Carried(number),
                    samples: true,
                };
                longer.map(part).collect::<Vec<_>>()
            });
            let ahead = match ahead.filter(|parts| !parts.is_empty()) {
                Some(parts) => Some(self.submit(&parts)?),
                None => None,
            };
            let sampled = self.collect(submitted, &mut begin)?;
            for (&(index, _), (token, _)) in drafting.iter().zip(&sampled) {
                let exists = *token != Sampled::NO_TOKEN && (*token as usize) < self.vocab;
                has_ended[index] |= !exists;
                if !has_ended[index] {
                    drafts[index].push(*token);
                }
            }
            let numbered = drafting.iter().copied().zip(&sampled);
            let next = numbered
                .filter(|((index, most), _)| *most > length && (ahead.is_some() || !has_ended[*index]));
            let (next, sampled): (Vec<_>, Vec<_>) = next.unzip();
            submitted = match ahead {
                Some(ahead) => ahead,
                None if next.is_empty() => break,
                None => {
                    let parts: Vec<_> = next
                        .iter()
                        .zip(sampled)
                        .map(|((index, _), (token, row))| Part {
                            text: texts[*index].0,
                            rows: PartRows::Known { tokens: std::slice::from_ref(token), given: row },
                            samples: true,
                        })
                        .collect();
                    self.submit(&parts)?
                }
            };
            drafting = next;
        }
        for ((text, _), draft) in texts.iter().zip(&drafts) {
            if let Some(known) = self.sequences.get_mut(&text.owner) {
                known.confirmed = text.tokens.len();
                known.drafted.clone_from(draft);
            }
        }
        Ok(drafts)
    }

    /// Prepares the next `rows` rows of a text. Returns false if there are no pages for them, also without those of texts that have no
    /// draft now.
    fn begin(&mut self, text: &Text<'_>, lag: Lag, rows: usize, all: &[(Text<'_>, usize)]) -> bool {
        if self.shares_pages {
            return true;
        }
        let owner = text.owner;
        if self.sequences.get(&owner).is_some_and(|known| known.base != lag.base) {
            self.release(owner);
        }
        let blocks = (lag.start - lag.base + rows).div_ceil(self.limits.block_size);
        let held = self.sequences.get(&owner).map_or(0, |known| known.tables.iter().map(Vec::len).sum());
        let needed = (blocks * self.groups).saturating_sub(held);
        let has_state = self.sequences.get(&owner).is_some_and(|known| known.state.is_some());
        let needs_state = self.has_states && !has_state;
        while self.free.len() < needed || needs_state && self.free_states.is_empty() {
            let drafts = |other: &(u64, usize)| all.iter().any(|(text, _)| text.owner == *other);
            let Some(other) = self.sequences.keys().copied().find(|other| !drafts(other)) else {
                self.release(owner);
                return false;
            };
            self.release(other);
        }
        let Self { sequences, free, free_states, groups, .. } = self;
        let known = sequences.entry(owner).or_insert_with(|| Known {
            base: lag.base,
            tables: vec![Vec::new(); *groups],
            state: if needs_state { free_states.pop() } else { None },
            ..Known::default()
        });
        known.rows = lag.start - lag.base;
        known.confirmed = text.tokens.len();
        known.drafted.clear();
        for table in &mut known.tables {
            let from = free.len() - blocks.saturating_sub(table.len());
            table.extend(free.drain(from..));
        }
        true
    }

    /// Submits a step of these rows. The step before was not collected if some are carried.
    fn submit(&mut self, parts: &[Part<'_>]) -> Result<Submitted, StepError> {
        let Self { runner, limits, is_head, shares_pages, sequences, greedy, .. } = self;
        let (mut tokens, mut given, mut pages) = (Vec::new(), Vec::new(), Vec::new());
        let (mut steps, mut outputs, mut work) = (Vec::new(), Vec::new(), Work::default());
        let mut carried = Vec::new();
        for part in parts {
            let (first_row, first_page) = (tokens.len(), pages.len());
            match part.rows {
                PartRows::Known { tokens: own, given: values } => {
                    tokens.extend_from_slice(own);
                    given.extend_from_slice(values);
                }
                PartRows::Carried(number) => {
                    let output = if *is_head { 2 * number } else { number };
                    let given = is_head.then_some(output + 1);
                    carried.push(Carried { row: first_row, output, given });
                    tokens.push(0);
                }
            }
            let count = tokens.len() - first_row;
            let (start, state) = if *shares_pages {
                let start = part.text.tokens.len() - 1;
                let blocks = start.div_ceil(limits.block_size);
                part.text.tables.iter().for_each(|table| pages.extend_from_slice(&table.pages[..blocks]));
                (start, None)
            } else {
                let known = sequences.entry(part.text.owner).or_default();
                let start = known.rows;
                known.rows += count;
                let blocks = known.rows.div_ceil(limits.block_size);
                known.tables.iter().for_each(|table| pages.extend_from_slice(&table[..blocks]));
                (start, known.state.map(StateUse::in_place))
            };
            work = work.and(start, count);
            let (rows, tables) = (first_row..tokens.len(), first_page..pages.len());
            steps.push(StepSequence { rows, start, tables, state });
            if part.samples {
                let row = tokens.len() - 1;
                outputs.push(Output { row, kind: OutputKind::Sample(request(greedy)) });
                if *is_head {
                    outputs.push(Output { row, kind: OutputKind::Embedding });
                }
            }
        }
        let rows = GivenRows { rows: 0..tokens.len(), values: &given };
        let has_given = *is_head && carried.is_empty();
        let step = Step {
            tokens: &tokens,
            carried: &carried,
            given: if has_given { std::slice::from_ref(&rows) } else { &[] },
            sequences: &steps,
            pages: &pages,
            outputs: &outputs,
            ..Step::default()
        };
        Ok(Submitted { ticket: runner.submit(&step)?, work })
    }

    /// Waits for a step. Returns the drafted token after each part that has one, and for heads the last row. The time of the step is
    /// counted from `begin` on, which becomes now.
    fn collect(
        &mut self,
        submitted: Submitted,
        begin: &mut Instant,
    ) -> Result<Vec<(u32, Vec<f32>)>, StepError> {
        let Submitted { ticket, work } = submitted;
        self.runner.collect(ticket, &mut self.out)?;
        let mut sampled: Vec<(u32, Vec<f32>)> = Vec::new();
        for outcome in self.out.outcomes.drain(..) {
            match outcome {
                OutputValue::Sampled(Sampled { token, .. }) => sampled.push((token, Vec::new())),
                OutputValue::Embedding(row) => {
                    if let Some(last) = sampled.last_mut() {
                        last.1 = row;
                    }
                }
                OutputValue::Score(_) | OutputValue::Logits(_) | OutputValue::Residual(_) => {}
            }
        }
        let now = Instant::now();
        let duration = now - std::mem::replace(begin, now);
        self.cost.learn(work, duration);
        self.times.learn(work, duration.as_secs_f64());
        Ok(sampled)
    }

    /// Recounts pages and states.
    pub fn check(&self) -> Result<(), String> {
        let held: usize = self.sequences.values().flat_map(|known| &known.tables).map(Vec::len).sum();
        let states = self.sequences.values().filter(|known| known.state.is_some()).count();
        let all = (self.free.len() + held + 1, self.free_states.len() + states);
        let pages = if self.shares_pages { 1 } else { self.limits.pages };
        match all == (pages, self.limits.states) {
            true => Ok(()),
            false => Err(format!("a draft model has {all:?} pages and states of {:?}", self.limits)),
        }
    }
}

/// Returns the request for a drafted token: the most probable one.
fn request(greedy: &SamplingParams) -> SampleRequest<'_> {
    SampleRequest { params: greedy, draw: 0, history: &[], prompt_tokens: 0, mask: None, logprobs: None }
}

/// Returns the number of a model's rows that are kept for a head, or for an assistant, which reads the last row that remains after a check.
pub(crate) fn kept_rows(shares_pages: bool) -> usize {
    if shares_pages { MOST_DRAFTED + 1 } else { KEPT_ROWS }
}

impl Known {
    /// Returns the position after the rows that are those of the text: of a head, the rows before the last draft; of a model of
    /// its own, also those of accepted tokens.
    fn valid(&self, tokens: &[u32], is_head: bool) -> usize {
        let accepted = match is_head {
            true => 0,
            false => {
                let after = tokens.get(self.confirmed..).unwrap_or_default();
                after.iter().zip(&self.drafted).take_while(|(token, drafted)| token == drafted).count()
            }
        };
        (self.base + self.rows).min(self.confirmed + accepted).min(tokens.len() - 1)
    }
}

impl std::fmt::Debug for DraftRunner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DraftRunner").field("is_head", &self.is_head).finish_non_exhaustive()
    }
}
