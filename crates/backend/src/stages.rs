//! Programs cut between layers into stages. Each stage begins with the rows of the residual stream that the one before ends with.

use std::{collections::HashMap, ops::Range};

use crate::{Attention, Exit, Input, Layer, MatrixId, Mixer, Program, Weights, copied::Copied};

/// A stage of a program, as a program of its own.
#[derive(Clone, Debug)]
pub struct Stage {
    /// Its layers in the whole program.
    pub layers: Range<usize>,
    /// The stage. It has all K/V groups of the whole program, so that block tables are the same.
    pub program: Program,
    /// Weights that it refers to.
    pub weights: Weights,
    /// Its matrices by their ids in the whole program.
    pub matrices: HashMap<MatrixId, MatrixId>,
}

/// Returns the layers before which a program can be cut: those at which nothing but the residual stream passes from one layer to
/// another. Encoders, towers and programs with states of sequences cannot be cut.
pub fn legal_cuts(program: &Program) -> Vec<usize> {
    let Program { bidirectional, state, input, given_parts, layers, exit, .. } = program;
    let is_whole = *bidirectional || !state.is_empty();
    if is_whole || matches!(input, Input::Patches(_)) || matches!(exit, Exit::Merged(_)) {
        return Vec::new();
    }
    // Parts of given rows are added behind the first layers, and embeddings for layers in layers with an input.
    let mut first = given_parts.saturating_sub(1).max(1);
    let last_input = layers.iter().rposition(|layer| layer.input.is_some());
    first = first.max(last_input.map_or(0, |last| last + 1));
    let stores = |layer: &Layer| -> Vec<(usize, usize)> {
        let attentions = layer.mixer.parts().filter_map(|mixer| match mixer {
            Mixer::Attention(op) => Some((op, op.k.is_some())),
            _ => None,
        });
        let kept = attentions.filter(|(_, stores)| *stores);
        kept.map(|(Attention { kv, .. }, _)| (kv.group, kv.layer_slot)).collect()
    };
    let reads = |layer: &Layer| -> Vec<(usize, usize)> {
        let parts = layer.mixer.parts().filter_map(|mixer| match mixer {
            Mixer::Attention(op) if op.k.is_none() => Some((op.kv.group, op.kv.layer_slot)),
            _ => None,
        });
        parts.collect()
    };
    (first..layers.len())
        .filter(|&cut| {
            let stored: Vec<_> = layers[..cut].iter().flat_map(stores).collect();
            !layers[cut..].iter().flat_map(reads).any(|slot| stored.contains(&slot))
        })
        .collect()
}

/// Cuts a program before each of some layers, in ascending order.
///
/// # Panics
/// If a cut is not [legal](legal_cuts).
pub fn split(program: &Program, weights: &Weights, cuts: &[usize]) -> Vec<Stage> {
    let legal = legal_cuts(program);
    assert!(cuts.iter().all(|cut| legal.contains(cut)), "cuts {cuts:?}, of which {legal:?} are legal");
    let starts = [0].into_iter().chain(cuts.iter().copied());
    let ends = cuts.iter().copied().chain([program.layers.len()]);
    let stage = |(start, end): (usize, usize)| {
        let mut program = stage_program(program, start..end);
        let mut copied = Copied::new(weights);
        program.visit(&mut copied);
        let Copied { some, matrices, .. } = copied;
        Stage { layers: start..end, program, weights: some, matrices }
    };
    starts.zip(ends).map(stage).collect()
}

/// Returns the stage of these layers, which refers to the weights of the whole program.
pub fn stage_program(whole: &Program, layers: Range<usize>) -> Program {
    let (is_first, is_last) = (layers.start == 0, layers.end == whole.layers.len());
    let mut program = Program { layers: whole.layers[layers].to_vec(), ..whole.clone() };
    if !is_first {
        (program.input, program.given_parts) = (Input::Rows, 1);
    }
    if !is_last {
        program.exit = Exit::Rows;
    }
    let has_vocab = matches!(program.input, Input::Tokens(_)) || matches!(program.exit, Exit::Logits(_));
    if !has_vocab {
        program.vocab = 0;
    }
    // Slots of the stage by group, in the order of their first use.
    let mut slots = vec![Vec::new(); program.kv.groups.len()];
    for mixer in program.layers.iter_mut().flat_map(|layer| layer.mixer.parts_mut()) {
        let kv = match mixer {
            Mixer::Attention(op) => &mut op.kv,
            Mixer::Latent(op) => &mut op.kv,
            Mixer::None | Mixer::Conv(_) | Mixer::DeltaRule(_) | Mixer::Ssd(_) | Mixer::Sum(_) => continue,
        };
        let known: &mut Vec<usize> = &mut slots[kv.group];
        kv.layer_slot = known.iter().position(|slot| *slot == kv.layer_slot).unwrap_or_else(|| {
            known.push(kv.layer_slot);
            known.len() - 1
        });
    }
    for (group, slots) in program.kv.groups.iter_mut().zip(slots) {
        // A group has at least one slot, also where no layer of the stage uses it.
        group.layer_slots = slots.len().max(1);
    }
    program
}
