//! Masks after drafted tokens are those that the next computations have, and computing them changes nothing else.

use std::{
    hash::{BuildHasher, BuildHasherDefault, DefaultHasher},
    sync::{Arc, Mutex},
    time::Instant,
};

use super::{Drafted, MaskTask, Parser, Spare, Verdict};
use crate::{Constraint, Grammar, TokenText, Vocabulary};

const VOCAB: usize = 64;

/// Constraints over syllables, with single bytes of long characters among them: one without a necessary end, one with an
/// end, one with a dead end (no token writes an `x`).
fn constraints() -> [Constraint; 3] {
    let mut words: Vec<Vec<u8>> = ["<unk>", "<s>", "</s>"].map(|name| name.as_bytes().to_vec()).into();
    words.extend("日本語🦀".bytes().map(|byte| vec![byte]));
    for syllable in ["pa", "gu", "ro", "é", "日", "ñ", "!", " "] {
        words.extend(["", "n", " ", "s", " b", "日"].map(|other| [other, syllable].concat().into_bytes()));
    }
    assert_eq!(words.len(), VOCAB);
    let tokens = (0..).zip(&words).map(|(id, bytes)| TokenText { bytes, is_control: id < 3 });
    let vocabulary = Arc::new(Vocabulary::new(tokens, &[]).unwrap());
    ["( ?(pa|guro|日本?)!?)*", "(npa|sgu|bro|é){3,9}!!", "(pa|ro){4}x"]
        .map(|regex| vocabulary.compile(&Grammar::Regex(regex.into())).unwrap())
}

fn mix(a: u64, b: u64) -> u64 {
    BuildHasherDefault::<DefaultHasher>::new().hash_one((a, b))
}

/// A branch whose masks are computed here.
struct Branch {
    parser: Option<Parser>,
    words: usize,
}

impl Branch {
    fn new(constraint: &Constraint) -> Self {
        Self { parser: Some(Parser::new(constraint.clone().parser)), words: constraint.words }
    }

    fn copy(&self) -> Self {
        Self { parser: self.parser.as_ref().map(Parser::copy), words: self.words }
    }

    /// Returns the mask after `tokens`, if the grammar does not end, and the masks after the tokens of `draft`. With
    /// `fails`, looking ahead is ended from outside.
    fn step(&mut self, tokens: &[u32], draft: &[u32], fails: bool) -> (Option<Vec<u32>>, Vec<Vec<u32>>) {
        let parser = Arc::new(Mutex::new(self.parser.take().expect("the grammar has not ended")));
        let mut task = MaskTask {
            parser: Some(parser),
            tokens: tokens.to_vec(),
            is_last: false,
            within: None,
            draft: draft.iter().map(|&token| Drafted { token, within: None }).collect(),
            words: self.words,
            budget: Arc::default(),
            computation: Arc::default(),
            expected: None,
            begin: Instant::now(),
        };
        let mut answer = task.compute();
        if fails && let Some(parser) = &mut answer.parser {
            // The copy is made before anything can end the work.
            let copy = || Spare { parser: Box::new(parser.now.deep_clone()), tokens: Vec::new() };
            parser.spare = Some(parser.spare.take().unwrap_or_else(copy));
            parser.now.cancellation_handle().expect("the computation can be ended").cancel();
        }
        task.look_ahead(&mut answer);
        self.parser = answer.parser.take();
        let mask = match &answer.verdict {
            Verdict::Mask(mask) => Some(mask.bits().to_vec()),
            _ => None,
        };
        (mask, answer.ahead.iter().map(|mask| mask.bits().to_vec()).collect())
    }
}

fn one_of(mask: &[u32], seed: u64) -> u32 {
    let allowed: Vec<u32> =
        (0..VOCAB as u32).filter(|token| mask[*token as usize / 32] >> (token % 32) & 1 == 1).collect();
    allowed[seed as usize % allowed.len()]
}

#[test]
fn masks_ahead_are_those_of_the_next_computations() {
    let (mut compared, mut accepted) = (0, 0);
    for (seed, constraint) in (0..60).flat_map(|seed| constraints().into_iter().map(move |it| (seed, it))) {
        let mut plain = Branch::new(&constraint);
        let mut ahead = plain.copy();
        // The step in which looking ahead fails, of some branches.
        let failing = (seed % 3 == 0).then_some(seed / 3 % 7);
        let (mut tokens, mut draft) = (Vec::new(), Vec::new());
        for step in 0..10 {
            let (expected, _) = plain.step(&tokens, &[], false);
            if let Some(mask) = &expected {
                // Two tokens that may follow, and one that probably may not.
                let mut scout = plain.copy();
                draft = vec![one_of(mask, mix(seed, step))];
                if let Some(mask) = scout.step(&draft, &[], false).0 {
                    draft.extend([
                        one_of(&mask, mix(step, seed)),
                        (mix(seed, step + 1) % VOCAB as u64) as u32,
                    ]);
                }
            }
            let (mask, masks) = ahead.step(&tokens, &draft, failing == Some(step));
            assert_eq!(mask, expected);
            let Some(mask) = mask else { break };
            let mut scout = plain.copy();
            for (&token, mask) in draft.iter().zip(&masks) {
                assert_eq!(scout.step(&[token], &[], false).0.as_ref(), Some(mask));
                compared += 1;
            }
            if failing.is_some_and(|failing| failing <= step) {
                assert!(masks.is_empty());
            }
            let taken = mix(step, seed + 1) as usize % (masks.len() + 1);
            tokens = match taken {
                0 => vec![one_of(&mask, mix(seed, step + 7))],
                taken => draft[..taken].to_vec(),
            };
            accepted += taken;
        }
    }
    assert!(compared > 200 && accepted > 80, "{compared} {accepted}");
}
