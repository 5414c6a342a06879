//! Speculation: steps check guessed tokens of an answer beside computing its next one.
//!
//! A step with one row of a sequence reads all weights for one token. A row has the same bits in any batch, so a step can
//! also have rows for the tokens that probably follow (a *draft*), each with an output of its own. Output `k` is what the
//! sequence's own draw gives after draft token `k`, with its own number, history and mask. As long as a drafted token equals
//! the output before it, the next output is valid. Texts are therefore the same with and without drafts, for every seed
//! and sampler; drafts decide only how many tokens a step gives.
//!
//! - A [`Drafter`] guesses: [`History`] what followed the text's end where it occurs earlier
//!   ([`automaton`]), without a model of its own. It reads each token once, and a limited number in a step, so that no
//!   prompt delays a step.
//! - A [`DraftRunner`] guesses with a model, if there is one: before a step, for sequences whose own texts give no better guess
//!   (`scheduler/model_drafts.rs`).
//! - [`acceptance`] estimates the chance of each guess from what the answers were, [`times`] the time of a step with so many
//!   rows from measured ones, and [`lengths`] chooses.
//! - The scheduler (`scheduler/drafts.rs`) adds the rows to a step in which all sequences decode, if pages are free, and
//!   walks through their outputs. Rejected rows are overwritten later; they are in no block that is published.

mod acceptance;
mod automaton;
mod drafter;
mod lengths;
mod rows;
mod runner;
mod times;

use std::sync::Arc;

pub(crate) use self::{
    acceptance::Acceptance,
    drafter::{Drafter, History, Replayed},
    lengths::{Candidate, Credit, LEAST_RATE, choose},
    rows::{HiddenRows, KEPT_ROWS},
    runner::{DraftRunner, Lag, MOST_READ, SHORT_LAG, Text, kept_rows},
    times::RowTimes,
};
pub use self::{drafter::Replay, runner::MOST_BY_MODEL};

/// Most drafted tokens of a sequence in a step.
pub const MOST_DRAFTED: usize = 31;

/// Most tokens that the drafter of a sequence holds. It begins again with the last half of them.
const MOST_HELD: usize = 1 << 17;

/// Most tokens that all drafters hold together, about 100 bytes each. Further sequences have no drafts.
pub(crate) const MOST_HELD_IN_ALL: usize = 1 << 20;

/// Reading of tokens by drafters beside a step.
pub(crate) const READING: Reading = Reading { share: 0.02, seconds: 200e-9, least: 64 };

/// Number of tokens that drafters read beside a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    /// Part of the step's time that it may take.
    share: f64,
    /// Time of a token.
    seconds: f64,
    /// Tokens that are read in any step.
    pub least: usize,
}

impl Reading {
    /// Returns the number of tokens to read beside a step of so many seconds.
    pub fn tokens_in(self, seconds: f64) -> usize {
        ((seconds * self.share / self.seconds) as usize).clamp(self.least, MOST_HELD)
    }
}

/// Chance of a whole draft at which it ends.
const LEAST_CHANCE: f64 = 0.02;

/// Options of the drafts of a request. They change the speed of an answer, and not its tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftOptions {
    /// Most drafted tokens of a step, at most [`MOST_DRAFTED`]; 0 for no drafts.
    pub most: usize,
    /// Drafts with fewer tokens are not checked.
    pub least: usize,
    /// Least estimated chance of a drafted token.
    pub least_chance: f64,
    /// Tokens that the answer probably resembles, as a further source of drafts.
    pub prediction: Arc<[u32]>,
    /// True to check drafts of the full length, whatever their chances and the times of steps: for measurements.
    pub eager: bool,
    /// True for drafts of a model alone. The text's own guesses are not used.
    pub only_model: bool,
    /// Drafts for a measurement.
    pub replay: Option<Replay>,
}

impl Default for DraftOptions {
    fn default() -> Self {
        let prediction = Arc::from([]);
        Self {
            most: MOST_DRAFTED,
            least: 0,
            least_chance: 0.0,
            prediction,
            eager: false,
            only_model: false,
            replay: None,
        }
    }
}

impl DraftOptions {
    /// Options without drafts.
    pub fn off() -> Self {
        Self { most: 0, ..Self::default() }
    }

    /// Returns the options with drafts of a model alone, of `depth` tokens in every step, or of the request's most tokens if these are
    /// fewer.
    pub fn of_model(self, depth: usize) -> Self {
        Self { most: self.most.min(depth), eager: true, only_model: true, ..self }
    }
}

/// Guesses at the next tokens of a sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Draft {
    pub tokens: Vec<u32>,
    /// Chance of each token that it and all before it are accepted.
    pub chances: Vec<f64>,
    /// True if a model has drafted them.
    pub of_model: bool,
}

impl Draft {
    pub fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.chances.truncate(len);
    }
}

/// The drafter of a sequence, and the chances of its guesses.
#[derive(Debug)]
pub(crate) struct Speculator {
    drafter: Box<dyn Drafter>,
    /// Number of tokens of the sequence that the drafter has read or passed over.
    read: usize,
    /// Number of tokens whose guesses were compared.
    compared: usize,
    own: Acceptance,
    /// Chances of a model's drafts.
    pub by_model: Acceptance,
    /// True if drafts of a [`Replay`] take the place of a model's.
    replays_model: bool,
    /// True for drafts of a model alone.
    only_model: bool,
}

impl Speculator {
    /// Creates the drafter of a sequence with a prompt of `prompt_tokens` tokens.
    pub fn new(options: &DraftOptions, prompt_tokens: usize) -> Self {
        let drafter: Box<dyn Drafter> = match &options.replay {
            Some(replay) => Box::new(Replayed::new(replay.clone())),
            None => {
                let prediction = &options.prediction[..options.prediction.len().min(MOST_HELD / 4)];
                Box::new(History::new(prediction))
            }
        };
        let read = prompt_tokens.saturating_sub(MOST_HELD / 2);
        let (own, by_model) = (Acceptance::default(), Acceptance::of_model());
        let replays_model = options.replay.as_ref().is_some_and(|replay| replay.of_model);
        Self { drafter, read, compared: 0, own, by_model, replays_model, only_model: options.only_model }
    }

    /// Returns the number of tokens in memory.
    pub fn held(&self) -> usize {
        self.drafter.held()
    }

    /// Reads at most `most` of the sequence's tokens that were not read, of which the first `prompt_tokens` are its prompt.
    /// Records in its own chances and in those of `all` how good the guesses at tokens of the answer were. Returns the
    /// number of tokens that were read.
    pub fn read(&mut self, tokens: &[u32], prompt_tokens: usize, most: usize, all: &mut Acceptance) -> usize {
        if self.drafter.held() >= MOST_HELD {
            self.drafter = Box::new(History::default());
            self.read = self.read.max(tokens.len().saturating_sub(MOST_HELD / 2));
        }
        let (begin, end) = (self.read, tokens.len().min(self.read + most));
        for (at, &token) in tokens.iter().enumerate().take(end).skip(begin) {
            let is_answer = at >= prompt_tokens;
            if is_answer && at >= self.compared {
                self.compared = at + 1;
                if let Some(guess) = self.drafter.guess(0) {
                    self.own.observe(all, guess.len, guess.token == token);
                }
            }
            self.drafter.push(token, is_answer);
        }
        self.read = end;
        end - begin
    }

    /// Returns the drafts of a [`Replay`] in place of a model's, if the request has one.
    pub fn replayed(&self, most: usize) -> Option<Vec<u32>> {
        self.replays_model.then(|| {
            (0..most).map_while(|index| self.drafter.guess(index)).map(|guess| guess.token).collect()
        })
    }

    /// Guesses at most `most` tokens after `tokens`, each with a chance of at least `least_chance`; none before all of them
    /// are read. An `eager` draft may be unlikely as a whole.
    pub fn draft(
        &self,
        tokens: &[u32],
        most: usize,
        least_chance: f64,
        eager: bool,
        all: &Acceptance,
    ) -> Draft {
        let mut draft = Draft::default();
        if self.read < tokens.len() || self.replays_model || self.only_model {
            return draft;
        }
        let mut together = 1.0;
        for guess in (0..most).map_while(|index| self.drafter.guess(index)) {
            let chance = self.own.chance(all, guess.len);
            together *= chance;
            if chance < least_chance || (together < LEAST_CHANCE && !eager) {
                break;
            }
            draft.tokens.push(guess.token);
            draft.chances.push(together);
        }
        draft
    }
}

/// Speculation of an engine: what is known of all sequences.
#[derive(Debug)]
pub(crate) struct Speculation {
    /// Chances of guesses in the answers so far.
    pub all: Acceptance,
    /// Chances of a model's drafts in the answers so far.
    pub all_by_model: Acceptance,
    /// Times of steps with few rows.
    pub times: RowTimes,
    /// The model that drafts, if there is one.
    pub model: Option<ModelKind>,
}

/// A model that drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ModelKind {
    /// It continues rows of the model, which are outputs of its steps.
    Head {
        /// Least number of rows that are kept.
        kept_rows: usize,
    },
    /// It reads tokens.
    Model,
}

impl Default for Speculation {
    fn default() -> Self {
        let (all, all_by_model) = (Acceptance::default(), Acceptance::of_model());
        Self { all, all_by_model, times: RowTimes::default(), model: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a text in portions, and returns what is drafted at its end.
    fn draft(speculator: &mut Speculator, text: &[u32], prompt: usize, portion: usize) -> Vec<u32> {
        let mut all = Acceptance::default();
        while speculator.read(text, prompt, portion, &mut all) > 0 {}
        speculator.draft(text, 8, 0.0, false, &all).tokens
    }

    #[test]
    fn a_draft_needs_the_whole_text_and_does_not_depend_on_portions() {
        let text: Vec<u32> = (0..200).map(|at| at % 40).collect();
        for portion in [1, 7, 1000] {
            let mut speculator = Speculator::new(&DraftOptions::default(), 100);
            assert_eq!(draft(&mut speculator, &text, 100, portion), [0, 1, 2, 3, 4, 5, 6, 7]);
            let longer = [&text[..], &[0]].concat();
            assert_eq!(speculator.draft(&longer, 8, 0.0, false, &Acceptance::default()), Draft::default());
        }
    }

    #[test]
    fn memory_is_bounded_and_the_end_of_the_text_is_kept() {
        let mut speculator = Speculator::new(&DraftOptions::default(), 10);
        let text: Vec<u32> = (0..3 * MOST_HELD as u32).map(|at| at % 70_000).collect();
        let mut most = 0;
        let mut all = Acceptance::default();
        for end in (0..text.len()).step_by(10_000).chain([text.len(); 20]) {
            speculator.read(&text[..end], 10, 10_000, &mut all);
            most = most.max(speculator.held());
        }
        assert!(most <= MOST_HELD + 10_000, "{most}");
        let draft = speculator.draft(&text, 3, 0.0, false, &all);
        let next = text.len() as u32 % 70_000;
        assert_eq!(draft.tokens, [next, next + 1, next + 2]);
    }

    #[test]
    fn chances_are_those_of_the_whole_draft() {
        let mut speculator = Speculator::new(&DraftOptions::default(), 30);
        let text: Vec<u32> = (0..60).map(|at| at % 20).collect();
        let mut all = Acceptance::default();
        speculator.read(&text, 30, 1000, &mut all);
        let draft = speculator.draft(&text, 8, 0.0, false, &all);
        assert!(draft.chances.is_sorted_by(|a, b| a >= b) && draft.chances[0] <= 1.0, "{draft:?}");
        assert!(speculator.draft(&text, 8, 0.999, false, &all).tokens.is_empty());
    }
}
