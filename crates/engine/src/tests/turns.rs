//! Conversations over the fake runner: each turn computes its new tokens, and the few after the last position where a
//! cached prefix can end.

use super::{
    fake::VOCAB,
    rig::{Rig, Setup},
};
use crate::Request;

/// Tokens that a user adds in a turn, and tokens of each answer.
const NEW: usize = 70;
const ANSWER: usize = 50;
/// Tokens that begin an answer, and that a history without thoughts does not have.
const OPENING: usize = 5;

/// Returns the prompt tokens that each turn computes beyond those that it adds. If `drops_thoughts`, the history has
/// other tokens in place of the opening and the answer.
fn recomputed(setup: &Setup, turns: usize, drops_thoughts: bool) -> Vec<usize> {
    let mut rig = Rig::new(setup).unwrap();
    let token = |turn: usize, at: usize| ((turn * 41 + at * 7) % VOCAB) as u32;
    let (mut history, mut known) = (Vec::new(), 0);
    let mut computed = Vec::new();
    for turn in 0..turns {
        history.extend((0..NEW).map(|at| token(turn, at)));
        let mut prompt = history.clone();
        prompt.extend((0..OPENING).map(|at| at as u32));
        let lasting_tokens = Some(history.len());
        let request = Request { max_tokens: Some(ANSWER), lasting_tokens, ..Request::new(prompt.clone()) };
        let id = rig.submit(&request).unwrap();
        while !rig.is_idle() {
            rig.step().unwrap();
        }
        let heard = &rig.heard[&id];
        computed.push((prompt.len() - heard.started.unwrap()).saturating_sub(prompt.len() - known));
        match drops_thoughts {
            true => {
                known = history.len();
                history.extend((0..ANSWER / 2).map(|at| token(turn + 100, at)));
            }
            false => {
                history = prompt;
                history.extend(&heard.branches[&0].tokens);
                known = history.len();
            }
        }
    }
    computed
}

#[test]
fn a_turn_computes_what_is_new_and_little_more() {
    let setup = Setup { block_size: 32, pages: 400, rows: 512, max_context: 4000, ..Setup::default() };
    let hybrid = Setup { states: true, checkpoint_pages: 9, checkpoint_blocks: 32, ..setup.clone() };
    let windowed = |windows| Setup { windows, pages: 800, ..setup.clone() };
    for (setup, drops_thoughts, most) in [
        // A block that is not full, and the last token of an answer, which is never computed.
        (&setup, false, 32),
        (&setup, true, 31),
        (&hybrid, false, 32),
        // The end of a prompt gets a checkpoint if it is 64 tokens past the one before it.
        (&hybrid, true, 31 + 64),
        (&Setup { pages: 160, ..hybrid.clone() }, false, 32),
        (&Setup { carries: true, ..hybrid.clone() }, false, 32),
        (&windowed(vec![None, Some(40)]), false, 32),
        (&windowed(vec![None, Some(40)]), true, 31),
        (&windowed(vec![Some(100)]), true, 31),
    ] {
        let more = recomputed(setup, 20, drops_thoughts);
        assert!(more.iter().all(|&tokens| tokens <= most), "{more:?} for {setup:?}, {drops_thoughts}");
    }
}
