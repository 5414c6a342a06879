//! Sources of drafts.

use std::{fmt, sync::Arc};

use super::automaton::{Match, SuffixAutomaton};

/// Guesses the tokens that follow a text. Wrong guesses cost time and change no token.
///
/// A sequence has one, which reads the tokens that are confirmed. Models that draft (heads for multi-token prediction,
/// assistants, small models) are further implementations.
pub(crate) trait Drafter: fmt::Debug + Send {
    /// Continues the text with a token, of the answer if `is_answer` is true, and otherwise of the prompt.
    fn push(&mut self, token: u32, is_answer: bool);

    /// Returns the guess at the token at `index` after the text, if all tokens before it are guessed right.
    fn guess(&self, index: usize) -> Option<Guess>;

    /// Returns the number of tokens that it holds in memory.
    fn held(&self) -> usize;
}

/// A drafted token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Guess {
    /// The token.
    pub token: u32,
    /// Number of tokens before it that occur before its source too. Chances of guesses with similar numbers are similar.
    pub len: usize,
}

/// Token between texts that do not follow each other; no vocabulary has it.
const BORDER: u32 = u32::MAX;

/// Length of a match at the beginning of a prediction.
const PREDICTED: usize = 16;

/// Guesses that the text continues as after the last occurrence of its longest end that occurs earlier, in the prompt, the
/// answer, or a prediction of the answer.
#[derive(Debug, Default)]
pub(crate) struct History {
    automaton: SuffixAutomaton,
    /// Length of the prediction, which is the beginning of the automaton's text.
    predicted: usize,
    /// Tokens of the answer so far, while it equals the prediction.
    as_predicted: Option<usize>,
}

impl History {
    /// Creates the source of a sequence whose answer may resemble `prediction`.
    pub fn new(prediction: &[u32]) -> Self {
        let mut automaton = SuffixAutomaton::default();
        prediction.iter().for_each(|&token| automaton.push(token));
        if !prediction.is_empty() {
            automaton.push(BORDER);
        }
        let as_predicted = (!prediction.is_empty()).then_some(0);
        Self { automaton, predicted: prediction.len(), as_predicted }
    }
}

impl Drafter for History {
    fn push(&mut self, token: u32, is_answer: bool) {
        if is_answer {
            let follows = |&at: &usize| at < self.predicted && self.automaton.text()[at] == token;
            self.as_predicted = self.as_predicted.filter(follows).map(|at| at + 1);
        }
        self.automaton.push(token);
    }

    fn guess(&self, index: usize) -> Option<Guess> {
        let text = self.automaton.text();
        let found = self.automaton.found();
        let (len, token) = match (self.as_predicted, found) {
            (Some(at), found) if at < self.predicted && found.is_none_or(|it| it.len <= at + PREDICTED) => {
                (at + PREDICTED, *text[..self.predicted].get(at + index)?)
            }
            // An occurrence that reaches the end of the text has a period.
            (_, Some(Match { len, next })) => (len, text[next + index % (text.len() - next)]),
            (_, None) => return None,
        };
        (token != BORDER).then_some(Guess { token, len: len + index })
    }

    fn held(&self) -> usize {
        self.automaton.text().len()
    }
}

/// Drafts of a known answer, each token of which is right with the same chance: for measurements of what drafts of such a
/// quality would gain.
#[derive(Clone, Debug, PartialEq)]
pub struct Replay {
    /// The answer.
    pub tokens: Arc<[u32]>,
    /// Chance of each drafted token to be right, regardless of the others.
    pub chance: f64,
    /// Seed of the draws.
    pub seed: u64,
    /// True if they take the place of the drafts of a model, whose time they take.
    pub of_model: bool,
}

/// The drafts of a [`Replay`].
#[derive(Debug)]
pub(crate) struct Replayed {
    replay: Replay,
    /// Tokens of the answer so far.
    answered: usize,
}

impl Replayed {
    pub fn new(replay: Replay) -> Self {
        Self { replay, answered: 0 }
    }
}

impl Drafter for Replayed {
    fn push(&mut self, _: u32, is_answer: bool) {
        self.answered += usize::from(is_answer);
    }

    fn guess(&self, index: usize) -> Option<Guess> {
        let at = self.answered + index;
        let token = *self.replay.tokens.get(at)?;
        let is_right = paguro_backend::sampling::uniform(self.replay.seed, at as u64) < self.replay.chance;
        let token = if is_right { token } else { token.checked_sub(1).unwrap_or(1) };
        Some(Guess { token, len: 1 })
    }

    fn held(&self) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guesses(drafter: &dyn Drafter, most: usize) -> Vec<(u32, usize)> {
        (0..most).map_while(|index| drafter.guess(index)).map(|Guess { token, len }| (token, len)).collect()
    }

    #[test]
    fn a_text_continues_as_before() {
        let mut history = History::default();
        [1, 2, 3, 4, 5, 9, 2, 3].iter().for_each(|&token| history.push(token, false));
        assert_eq!(guesses(&history, 3), [(4, 2), (5, 3), (9, 4)]);
        history.push(4, true);
        assert_eq!(guesses(&history, 1), [(5, 3)]);
        history.push(8, true);
        assert_eq!(guesses(&history, 1), []);
    }

    #[test]
    fn a_text_with_a_period_continues_with_it() {
        let mut history = History::default();
        [7, 1, 2, 1, 2, 1].iter().for_each(|&token| history.push(token, true));
        assert_eq!(guesses(&history, 5).iter().map(|guess| guess.0).collect::<Vec<_>>(), [2, 1, 2, 1, 2]);
    }

    #[test]
    fn an_answer_begins_as_predicted_and_returns_to_the_prediction() {
        let mut history = History::new(&[1, 2, 3, 4, 5, 6]);
        history.push(9, false);
        assert_eq!(guesses(&history, 9).iter().map(|guess| guess.0).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
        history.push(1, true);
        assert_eq!(guesses(&history, 2), [(2, PREDICTED + 1), (3, PREDICTED + 2)]);
        // Another token than the predicted one, and then the prediction again.
        history.push(8, true);
        assert_eq!(guesses(&history, 1), []);
        [3, 4].iter().for_each(|&token| history.push(token, true));
        assert_eq!(guesses(&history, 9), [(5, 2), (6, 3)]);
    }

    #[test]
    fn replayed_drafts_are_right_as_often_as_wanted() {
        let tokens: Arc<[u32]> = (0..2000).map(|at| at % 50).collect();
        for chance in [0.0, 0.3, 0.7, 1.0] {
            let drafter = Replayed::new(Replay { tokens: tokens.clone(), chance, seed: 4, of_model: false });
            let right = (0..2000).filter(|&at| drafter.guess(at).unwrap().token == tokens[at]).count();
            assert!((right as f64 / 2000.0 - chance).abs() < 0.03, "{right} of 2000, not {chance}");
        }
    }
}
