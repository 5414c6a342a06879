//! The time of a token, measured with a part of the model. Its first layers run on the devices as in the whole model, and then on each
//! device alone, once with few of them and once with more. All other layers of a device are taken to need the time of the added ones for
//! each byte.

use std::mem::{Discriminant, discriminant};

use paguro_backend::{FeedForward, Layer, Mixer, first_layers, legal_cuts};
use paguro_engine::{Engine, EngineOptions, ModelParts, PageBudget};

use crate::{
    bench,
    failure::{Failure, Outcome},
    placement::{Placement, Placing},
};

/// Tokens of one measurement.
const TOKENS: usize = 48;

/// Most layers before the pattern of kinds begins, and most layers of the pattern.
const MOST_LEADING: usize = 4;
const LONGEST_PATTERN: usize = 12;

/// Bytes of weights up to which a model is run as a whole, and which the parts of a larger one should have at most. With few small
/// layers, the time of a token would be that of the host.
const MOST: u64 = 8 << 30;

/// Fewest layers of each device, and that are added on it.
const FEWEST: usize = 4;

/// A predicted time.
pub struct Trial {
    /// Seconds of a token whose experts have slots.
    pub seconds: f64,
    /// Most layers that were run.
    pub layers: usize,
}

/// Runs parts of a model, and returns the time of a token of the whole one; `None` if no part is divided as the whole. `link` is the
/// bandwidth of copies of experts.
///
/// # Errors
/// A device does not run the part.
pub fn trial(
    placing: &Placing<'_>,
    placement: &Placement,
    options: &EngineOptions,
    link: Option<f64>,
) -> Outcome<Option<Trial>> {
    let kinds: Vec<_> = placing.program.layers.iter().map(kind).collect();
    let (leading, pattern) = pattern(&kinds);
    let owns: Vec<_> = placement.stages.iter().map(|(_, own)| own.len()).collect();
    let weights = placing.weights.bytes_on(&*placing.devices.main().backend).max(1);
    let share = (MOST as f64 / weights as f64).min(0.5);
    // Layers of each device in the smallest part, and those that are added where a device has more.
    let added = |index: usize| {
        let wanted = (owns[index] as f64 * share / 2.0).ceil() as usize;
        pattern * wanted.max(FEWEST).div_ceil(pattern)
    };
    let few = |index: usize| if index == 0 { leading + added(index) } else { added(index) };
    let has_more = |index: usize| weights > MOST && few(index) + added(index) < owns[index];
    let smallest: Vec<_> =
        owns.iter().enumerate().map(|(index, own)| if has_more(index) { few(index) } else { *own }).collect();
    let bytes = |part: &Placement| -> Vec<u64> {
        part.stages.iter().map(|(device, own)| placing.reads(*device, own).layers()).collect()
    };
    let Some(part) = part(placing, placement, &smallest) else { return Ok(None) };
    let (least, all) = (bytes(&part), bytes(placement));
    let at_least = seconds(placing, &part, options, link)?;
    let mut trial = Trial { seconds: at_least, layers: smallest.iter().sum() };
    for (index, (device, _)) in placement.stages.iter().enumerate().filter(|(index, _)| has_more(*index)) {
        // Alone, so that the time of rows between devices is not a part of the difference.
        let alone = |layers: usize| Placement { stages: vec![(*device, 0..layers)] };
        let (few, more) = (alone(few(index)), alone(few(index) + added(index)));
        let before = if owns.len() == 1 { at_least } else { seconds(placing, &few, options, link)? };
        let longer = (seconds(placing, &more, options, link)? - before).max(0.0);
        let per_byte = longer / bytes(&more)[0].saturating_sub(bytes(&few)[0]).max(1) as f64;
        trial.seconds += per_byte * all[index].saturating_sub(least[index]) as f64;
        trial.layers = trial.layers.max(more.stages[0].1.end);
    }
    Ok(Some(trial))
}

/// Returns the first layers on the devices of a placement, by number; `None` if they cannot be divided so.
fn part(placing: &Placing<'_>, placement: &Placement, counts: &[usize]) -> Option<Placement> {
    let mut end = 0;
    let stages = counts.iter().zip(&placement.stages).map(|(count, (device, _))| {
        end += count;
        (*device, end - count..end)
    });
    let part = Placement { stages: stages.collect() };
    let legal = legal_cuts(placing.program);
    part.stages.iter().skip(1).all(|(_, own)| legal.contains(&own.start)).then_some(part)
}

/// A kind of layer: those of one kind differ in their weights only.
type Kind = (Discriminant<Mixer>, Discriminant<FeedForward>, Option<usize>);

fn kind(layer: &Layer) -> Kind {
    let group = layer.mixer.parts().find_map(|mixer| match mixer {
        Mixer::Attention(op) => Some(op.kv.group),
        Mixer::Latent(op) => Some(op.kv.group),
        _ => None,
    });
    (discriminant(&layer.mixer), discriminant(&layer.ffn), group)
}

/// Returns the number of leading layers, and the length of the pattern that the kinds of the others repeat. Layers without a short
/// pattern are one.
fn pattern<K: PartialEq>(kinds: &[K]) -> (usize, usize) {
    let all =
        (0..=MOST_LEADING).flat_map(|leading| (1..=LONGEST_PATTERN).map(move |length| (leading, length)));
    let repeats = |(leading, length): &(usize, usize)| {
        let rest = kinds.get(*leading..).unwrap_or_default();
        rest.iter().zip(rest.iter().skip(*length)).all(|(one, next)| one == next)
    };
    all.filter(repeats).min_by_key(|(leading, length)| leading + length).unwrap_or((0, kinds.len()))
}

/// Returns the time of a token of the first layers with a placement, without that of copies of experts.
fn seconds(
    placing: &Placing<'_>,
    part: &Placement,
    options: &EngineOptions,
    link: Option<f64>,
) -> Outcome<f64> {
    let count = part.stages.last().map_or(0, |(_, own)| own.end);
    let stage = first_layers(placing.program, placing.weights, count);
    let vocab = stage.program.vocab;
    let parts = ModelParts {
        program: stage.program,
        weights: stage.weights,
        tokenizer: None,
        stop_tokens: Vec::new(),
        max_context: placing.context,
        vision: None,
    };
    let context = (2 * TOKENS).min(placing.context);
    let options = EngineOptions {
        pages: PageBudget::Tokens(context.next_multiple_of(options.block_size)),
        max_context: Some(context),
        speculate: false,
        draft: None,
        ..options.clone()
    };
    let placed = part.on(placing.devices);
    let engine =
        Engine::start(placed.backend(), parts, options).map_err(|error| Failure::from_error(&error))?;
    let (seconds, copied) = bench::token_seconds(engine.handle(), vocab, TOKENS.min(context / 2))?;
    Ok(seconds - link.map_or(0.0, |link| copied / link))
}

#[cfg(test)]
mod tests {
    use super::pattern;

    #[test]
    fn kinds_of_layers_repeat() {
        // Llama; three dense layers before experts; Gemma 3; Qwen 3.5.
        for (kinds, expected) in [
            ("aaaaaaaaaaaaaaaa", (0, 1)),
            ("aaabbbbbbbbbbbbb", (3, 1)),
            ("aaaaabaaaaabaaaaab", (0, 6)),
            ("dddadddadddaddda", (0, 4)),
            ("abcdefghijklmnopqrstuvwx", (0, 24)),
        ] {
            assert_eq!(pattern(kinds.as_bytes()), expected, "{kinds}");
        }
    }
}
