//! Penalties of tokens that the window already has.

use super::dry;
use crate::SampleRequest;

/// Buffers of [`penalties`], reused from call to call.
#[derive(Clone, Debug, Default)]
pub struct PenaltyScratch {
    /// Occurrences in the window, `[vocab]`; all zero between calls.
    counts: Vec<u32>,
    dry: dry::Scratch,
}

/// Calls `each` once for each penalized token, with its repetition penalty and the amount that is subtracted from its
/// logit afterwards. `scratch` holds no data between calls.
pub fn penalties(
    request: &SampleRequest<'_>,
    vocab: usize,
    scratch: &mut PenaltyScratch,
    mut each: impl FnMut(usize, f32, f32),
) {
    let PenaltyScratch { counts, dry } = scratch;
    let repetitions = dry.penalties(&request.params.dry, request.history);
    occurrences(request, vocab, counts, |token, subtracted| {
        let more = repetitions.get_mut(&(token as u32)).map_or(0.0, std::mem::take);
        each(token, request.params.repetition_penalty, subtracted + more);
    });
    let rest = repetitions.iter().filter(|(token, penalty)| (**token as usize) < vocab && **penalty > 0.0);
    rest.for_each(|(&token, &penalty)| each(token as usize, 1.0, penalty));
}

/// Calls `each` once for each generated token in the window, with the amount that is subtracted.
fn occurrences(
    request: &SampleRequest<'_>,
    vocab: usize,
    counts: &mut Vec<u32>,
    mut each: impl FnMut(usize, f32),
) {
    let SampleRequest { params, draw: _, history, prompt_tokens, mask: _, logprobs: _ } = *request;
    if !params.penalizes_tokens() {
        return;
    }
    let length = params.penalty_window.map_or(history.len(), |window| history.len().min(window as usize));
    let start = history.len() - length;
    let window = &history[start..];
    counts.resize(counts.len().max(vocab), 0);
    // A token that occurs has at least 1, and 1 more for each time that it was generated.
    for (position, &token) in (start..).zip(window) {
        if let Some(count) = counts[..vocab].get_mut(token as usize) {
            *count = (*count).max(1) + u32::from(position >= prompt_tokens);
        }
    }
    for token in window.iter().map(|&token| token as usize).filter(|&token| token < vocab) {
        // Each token once; this also leaves the counts as they were found.
        match std::mem::take(&mut counts[token]) {
            0 => {}
            1 => each(token, 0.0),
            count => {
                let generated = (count - 1) as f32;
                each(token, generated * params.frequency_penalty + params.presence_penalty);
            }
        }
    }
}
