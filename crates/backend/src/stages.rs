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
/// another.
pub fn legal_cuts(program: &Program) -> Vec<usize> {
    (1..program.layers.len()).filter(|&cut| obstacle(program, cut).is_none()).collect()
}

/// Returns the reason for which a program cannot be cut before a layer, or nothing if it can.
pub fn obstacle(program: &Program, cut: usize) -> Option<&'static str> {
    let Program { bidirectional, input, given_parts, layers, exit, .. } = program;
    if *bidirectional {
        return Some("rows of an encoder attend to later ones");
    }
    if matches!(input, Input::Patches(_)) || matches!(exit, Exit::Merged(_)) {
        return Some("it is a tower");
    }
    if program.joined().is_some() {
        return Some("it is a head for multi-token prediction");
    }
    if layers[cut..].iter().any(|layer| layer.input.is_some()) {
        return Some("embeddings for layers are needed behind the cut");
    }
    if cut + 1 < *given_parts {
        return Some("parts of images are added behind the cut");
    }
    let stored: Vec<_> = layers[..cut].iter().flat_map(|layer| kv_slots(layer, true)).collect();
    let is_shared =
        layers[cut..].iter().flat_map(|layer| kv_slots(layer, false)).any(|slot| stored.contains(&slot));
    is_shared.then_some("layers behind the cut read K and V of layers before it")
}

/// Returns the slots of K and V that a layer stores, or those of other layers that it reads.
fn kv_slots(layer: &Layer, stores: bool) -> Vec<(usize, usize)> {
    let slot = |mixer: &Mixer| match mixer {
        Mixer::Attention(Attention { kv, k, .. }) => {
            (k.is_some() == stores).then_some((kv.group, kv.layer_slot))
        }
        _ => None,
    };
    layer.mixer.parts().filter_map(slot).collect()
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
    let stage = |(start, end)| of_program(stage_program(program, start..end), weights, start..end);
    starts.zip(ends).map(stage).collect()
}

/// Returns the first layers of a program that writes tokens, with its head: a smaller model whose layers take the time that they take
/// in the whole one.
pub fn first_layers(whole: &Program, weights: &Weights, count: usize) -> Stage {
    let mut program = stage_program(whole, 0..count);
    (program.exit, program.vocab, program.given_parts) = (whole.exit.clone(), whole.vocab, 1);
    of_program(program, weights, 0..count)
}

/// Returns a stage with only the weights of its program.
fn of_program(mut program: Program, weights: &Weights, layers: Range<usize>) -> Stage {
    let mut copied = Copied::new(weights);
    program.visit(&mut copied);
    let Copied { some, matrices, .. } = copied;
    Stage { layers, program, weights: some, matrices }
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
    program.state.layers.clear();
    for state in
        program.layers.iter_mut().flat_map(|layer| layer.mixer.parts_mut()).filter_map(Mixer::state_mut)
    {
        program.state.layers.push(whole.state.layers[*state]);
        *state = program.state.layers.len() - 1;
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
