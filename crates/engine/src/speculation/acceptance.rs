//! Chances that drafted tokens are accepted, by the length of the match that they continue.
//!
//! Each token of an answer is compared with the token that would have been drafted in its place, whether or not there was
//! a draft, so the chances are known without drafts that fail. Chances of a sequence are its own, with those of all
//! sequences as the expectation at its start.

/// Classes of lengths: 1, 2 to 3, 4 to 7, and so on; the last one has all longer matches.
const CLASSES: usize = 9;

/// Chances before the first observation.
const FIRST: [f64; CLASSES] = [0.1, 0.25, 0.45, 0.65, 0.8, 0.88, 0.92, 0.95, 0.95];

/// Chances of a model's drafts before the first observation, by the number of drafted tokens before: each is a class.
const FIRST_OF_MODEL: f64 = 0.7;

/// Part of the weight of all observations that remains after a token without a draft. A model's chances are only observed with
/// drafts, so those that were bad are tried again after some hundred tokens.
const UNTRIED: f64 = 0.998;

/// Observations that the expectation counts as.
const WEIGHT: f64 = 4.0;

/// Part of the weight of earlier observations of the same class that remains after a new one, for a sequence and for all
/// of them.
const KEPT: [f64; 2] = [0.95, 0.995];

/// Observations by class of length: accepted ones, and all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Acceptance {
    accepted: [f64; CLASSES],
    all: [f64; CLASSES],
    /// Chances before the first observation.
    first: [f64; CLASSES],
}

impl Default for Acceptance {
    fn default() -> Self {
        Self { accepted: [0.0; CLASSES], all: [0.0; CLASSES], first: FIRST }
    }
}

impl Acceptance {
    /// Returns those of a model's drafts.
    pub fn of_model() -> Self {
        Self { first: [FIRST_OF_MODEL; CLASSES], ..Self::default() }
    }

    /// Returns the length that represents a model's drafted token number `index`.
    pub fn len_of_model(index: usize) -> usize {
        1 << index.min(CLASSES - 1)
    }

    /// Forgets a little, after a token without a draft.
    pub fn forget(&mut self) {
        self.accepted.iter_mut().chain(&mut self.all).for_each(|weight| *weight *= UNTRIED);
    }

    /// Records if the token after a match of `len` tokens was the expected one, in the observations of a sequence and in
    /// those of `all` sequences.
    pub fn observe(&mut self, all: &mut Acceptance, len: usize, is_accepted: bool) {
        let class = class(len);
        for (observations, kept) in [self, all].into_iter().zip(KEPT) {
            let accepted = f64::from(u8::from(is_accepted));
            observations.accepted[class] = observations.accepted[class] * kept + accepted;
            observations.all[class] = observations.all[class] * kept + 1.0;
        }
    }

    /// Returns the chance that the token after a match of `len` tokens is the expected one.
    pub fn chance(&self, all: &Acceptance, len: usize) -> f64 {
        let class = class(len);
        let mean = |of: &Acceptance, expected: f64| {
            (of.accepted[class] + WEIGHT * expected) / (of.all[class] + WEIGHT)
        };
        mean(self, mean(all, self.first[class]))
    }
}

fn class(len: usize) -> usize {
    (len.max(1).ilog2() as usize).min(CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chances_follow_the_observations_of_their_class() {
        let (mut own, mut all) = (Acceptance::default(), Acceptance::default());
        assert_eq!(own.chance(&all, 5), FIRST[2]);
        (0..100).for_each(|_| own.observe(&mut all, 5, true));
        assert!(own.chance(&all, 7) > 0.98);
        assert_eq!(own.chance(&all, 8), FIRST[3], "of another class");
        // A new sequence begins with the chances of all, and soon has its own.
        let mut other = Acceptance::default();
        assert!(other.chance(&all, 4) > 0.95);
        (0..20).for_each(|_| other.observe(&mut all, 4, false));
        assert!(other.chance(&all, 4) < 0.2);
        assert!(own.chance(&all, 4) > 0.9);
    }

    #[test]
    fn bad_drafts_of_a_model_are_tried_again() {
        let (mut own, mut all) = (Acceptance::of_model(), Acceptance::of_model());
        let second = Acceptance::len_of_model(1);
        assert_eq!(own.chance(&all, second), FIRST_OF_MODEL);
        (0..100).for_each(|_| own.observe(&mut all, second, false));
        assert!(own.chance(&all, second) < 0.05 && own.chance(&all, 1) == FIRST_OF_MODEL);
        (0..2000).for_each(|_| {
            own.forget();
            all.forget();
        });
        assert!(own.chance(&all, second) > 0.4, "{}", own.chance(&all, second));
    }

    #[test]
    fn chances_of_a_mixture_are_its_mean() {
        for chance in [0.1, 0.5, 0.7, 0.9] {
            let (mut own, mut all) = (Acceptance::default(), Acceptance::default());
            let mut sum = 0.0;
            for index in 0..400_u32 {
                let draw = f64::from(index.wrapping_mul(2_654_435_761) >> 8) / f64::from(1 << 24);
                own.observe(&mut all, 64, draw < chance);
                sum += own.chance(&all, 64) / 400.0;
            }
            assert!((sum - chance).abs() < 0.05, "{sum} instead of {chance}");
        }
    }
}
