//! The model of the [fake runner](super::fake) without pages, batches, chunks and a cache.

use std::time::Duration;

use paguro_backend::{SampleRequest, Score, TokenMask};
use paguro_grammar::{Guide, Verdict};
use paguro_model::Pooling;

use super::fake::{VOCAB, adapted, adapter, best, embedding, mix, sample, score, visible};
use crate::{FinishReason, Request};

/// Expected answer of one branch.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    pub tokens: Vec<u32>,
    /// `None` if the grammar has a dead end.
    pub reason: Option<FinishReason>,
    pub scores: Option<Vec<Score>>,
    pub embedding: Option<Vec<f32>>,
}

/// Computes the answer of a branch over one contiguous sequence.
pub fn oracle(
    windows: &[Option<u32>],
    states: bool,
    max_context: usize,
    request: &Request,
    branch: usize,
) -> Expected {
    // The number of an adapter is its content.
    let uses = request.adapters.iter().filter(|(_, scale)| *scale != 0.0);
    let uses: Vec<_> = uses.map(|(used, scale)| (adapter(used.digest()[0]).0, *scale)).collect();
    let mut params = request.sampling.clone();
    params.seed += branch as u64;
    let mut tokens = request.prompt.clone();
    let (mut first, mut second, mut digests) = (Vec::new(), Vec::new(), Vec::new());
    let attend = |position: usize, layer: &[u64]| {
        let groups = windows.iter().flat_map(|&window| visible(window, position));
        groups.fold(0, |digest, key| mix(digest, layer[key]))
    };
    let mut state = 0;
    let (mut answer, mut reason) = (Vec::new(), None);
    let mut guide = request.constraint.clone().map(Guide::new);
    if let Some(guide) = &mut guide {
        follow(guide, Vec::new());
    }
    while reason.is_none() {
        for (position, &token) in tokens.iter().enumerate().skip(digests.len()) {
            first.push(adapted(mix(u64::from(token), position as u64), &uses));
            second.push(attend(position, &first));
            state = mix(state, first[position]);
            let digest = attend(position, &second);
            digests.push(if states { mix(digest, state) } else { digest });
        }
        if request.max_tokens == Some(answer.len()) {
            reason = Some(FinishReason::Length);
        } else if tokens.len() == max_context {
            reason = Some(FinishReason::ContextFull);
        } else {
            let (draw, logprobs) = (answer.len() as u64, request.logprobs);
            let early = answer.len() < request.min_tokens && !request.stop_tokens.is_empty();
            let within = early.then(|| all_but(&request.stop_tokens));
            let mask = match &guide {
                None => within,
                Some(guide) => match guide.mask() {
                    Some(mask) => Some(narrow(mask.bits(), within.as_ref())),
                    None => break,
                },
            };
            let mask = mask.as_ref();
            let prompt_tokens = request.prompt.len();
            let sampling =
                SampleRequest { params: &params, draw, history: &tokens, prompt_tokens, mask, logprobs };
            let token = sample(*digests.last().unwrap(), &sampling).token;
            tokens.push(token);
            if request.stop_tokens.contains(&token) {
                reason = Some(FinishReason::Stop(token));
                break;
            }
            answer.push(token);
            if let Some(guide) = &mut guide
                && follow(guide, vec![token])
            {
                reason = Some(FinishReason::Complete);
            }
        }
    }
    let scores = request.score_prompt_from.map(|from| {
        let followed = request.prompt.iter().enumerate().skip(from + 1);
        let top = request.logprobs.unwrap_or(0);
        let of = |digest, token| Score { logprob: score(digest, token), top: best(digest, top) };
        followed.map(|(next, &token)| of(digests[next - 1], token)).collect()
    });
    let embedding = request.embedding.map(|pooling| {
        let prompt = &digests[..request.prompt.len()];
        if pooling == Pooling::All {
            return prompt.iter().flat_map(|&digest| embedding(digest)).collect();
        }
        let pooled = match pooling {
            Pooling::Last => &prompt[prompt.len() - 1..],
            Pooling::Mean | Pooling::All => prompt,
            Pooling::First => &prompt[..1],
        };
        let sum = |i: usize| pooled.iter().map(|&digest| f64::from(embedding(digest)[i])).sum::<f64>();
        (0..3).map(|i| (sum(i) / pooled.len() as f64) as f32).collect()
    });
    Expected { tokens: answer, reason, scores, embedding }
}

/// Continues a grammar after `tokens`, on this thread and without a limit of time. Returns true if it ends.
fn follow(guide: &mut Guide, tokens: Vec<u32>) -> bool {
    let mut task = guide.compute(tokens, false, None, Vec::new());
    let answer = task.compute();
    task.finish(answer, Duration::ZERO);
    matches!(guide.settle(), Some((Verdict::End, _)))
}

fn all_but(tokens: &[u32]) -> TokenMask {
    let mut bits = [u32::MAX; VOCAB.div_ceil(32)];
    tokens.iter().for_each(|&token| bits[token as usize / 32] &= !(1 << (token % 32)));
    TokenMask::new(bits)
}

/// Restricts a grammar's mask to `within`, unless nothing would remain.
fn narrow(mask: &[u32], within: Option<&TokenMask>) -> TokenMask {
    let mask = &mask[..VOCAB.div_ceil(32)];
    let both: Option<Vec<u32>> =
        within.map(|within| mask.iter().zip(within.bits()).map(|(a, b)| a & b).collect());
    let both = both.filter(|both| both.iter().any(|&word| word != 0));
    TokenMask::new(both.unwrap_or(mask.to_vec()))
}
