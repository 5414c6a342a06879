//! A short program out of a long one: the input, one layer of each kind, and the exit.
//!
//! Kernels are compiled for a model's shapes and formats. A device that computes the excerpt correctly has run the kernels that the
//! whole model needs, in a fraction of its time and memory.

use std::collections::HashSet;

use crate::{
    Digest, Exit, Experts, FeedForward, KvLayout, KvSlot, Layer, Matrix, MatrixId, Mixer, Program, Role,
    VectorId, Visitor, Weights, copied::Copied,
};

/// Returns the excerpt of a program, with the weights that it refers to.
///
/// Two layers are of one kind if they differ only in the values of their weights and in their place in the pages.
///
/// Routers choose the same experts for all rows, because devices round differently and so decide near ties differently;
/// the weights of the experts are still those of their scores.
pub fn excerpt(program: &Program, weights: &Weights) -> (Program, Weights) {
    let mut kinds = HashSet::new();
    let layers = program.layers.iter().filter(|layer| kinds.insert(kind(layer, weights)));
    let mut short = Program { layers: layers.cloned().collect(), ..program.clone() };
    short.given_parts = program.given_parts.min(short.layers.len() + 1);
    if let Exit::Merged(merged) = &mut short.exit {
        merged.taps.iter_mut().for_each(|tap| tap.layers = tap.layers.min(short.layers.len()));
    }
    let mut chosen = Vec::new();
    short.state.layers.clear();
    for layer in &mut short.layers {
        for state in layer.mixer.parts_mut().filter_map(Mixer::state_mut) {
            short.state.layers.push(program.state.layers[*state]);
            *state = short.state.layers.len() - 1;
        }
    }
    let kv = short.kv.clone();
    share_again(&kv, &mut short.layers);
    for layer in &mut short.layers {
        if let Some(op) = experts_of(&mut layer.ffn) {
            op.router.selection_bias = None;
            // Groups without a chosen expert would be chosen by their scores.
            let among = op.router.groups.map_or(op.count, |groups| op.count / groups.count * groups.used);
            chosen.push(choice(op.count, among, op.router.used));
        }
    }
    let mut copied = Copied::new(weights);
    short.visit(&mut copied);
    let mut some = copied.some;
    let experts = short.layers.iter_mut().filter_map(|layer| experts_of(&mut layer.ffn));
    for (op, choice) in experts.zip(chosen) {
        some.vectors.push(choice);
        op.router.selection_bias = Some(VectorId(some.vectors.len() as u32 - 1));
    }
    (short, some)
}

/// Returns the mixture of experts of a layer.
fn experts_of(ffn: &mut FeedForward) -> Option<&mut Experts> {
    match ffn {
        FeedForward::Experts(op) => Some(op),
        FeedForward::None | FeedForward::Dense(_) => None,
    }
}

/// Has layers without K and V of their own read those of the last layer before them whose K and V have the same shape. The
/// layer that they read in the long program may not be in the short one, but one of its kind is.
fn share_again(kv: &KvLayout, layers: &mut [Layer]) {
    let mut stored: Vec<KvSlot> = Vec::new();
    for layer in layers {
        for mixer in layer.mixer.parts_mut() {
            let Mixer::Attention(attention) = mixer else { continue };
            let place = &mut attention.kv;
            if attention.k.is_some() {
                stored.push(*place);
                continue;
            }
            let group = |place: &KvSlot| kv.groups[place.group];
            let shape = group(place);
            if let Some(found) = stored.iter().rfind(|other| group(other) == shape) {
                *place = *found;
            }
        }
    }
}

/// Returns a selection bias that decides for `used` of the first `among` of `count` experts: no score is larger than
/// one.
fn choice(count: usize, among: usize, used: usize) -> Vec<f32> {
    let mut bias = vec![0.0; count];
    (0..used).for_each(|index| bias[index * among / used] = 4.0);
    bias
}

/// Returns a hash that is equal for layers of one kind.
fn kind(layer: &Layer, weights: &Weights) -> [u8; 32] {
    let mut layer = layer.clone();
    for mixer in layer.mixer.parts_mut() {
        match mixer {
            Mixer::Attention(attention) => attention.kv.layer_slot = 0,
            Mixer::Latent(latent) => latent.kv.layer_slot = 0,
            Mixer::None | Mixer::Conv(_) | Mixer::DeltaRule(_) | Mixer::Ssd(_) | Mixer::Sum(_) => {}
        }
        mixer.state_mut().into_iter().for_each(|state| *state = 0);
    }
    if let Some(input) = &mut layer.input {
        input.index = 0;
    }
    let mut shapes = Shapes { weights, digest: Digest::default() };
    layer.visit(&mut shapes);
    shapes.digest.finish()
}

/// Hashes the fields of a layer, with the shapes of matrices in place of their ids.
struct Shapes<'a> {
    weights: &'a Weights,
    digest: Digest,
}

impl Visitor for Shapes<'_> {
    fn matrix(&mut self, id: &mut MatrixId, _: Role) {
        let Matrix { name: _, format, parts, rows, cols, bytes: _ } = self.weights.matrix(*id);
        self.digest.bytes(format.name().as_bytes());
        [parts, rows, cols].into_iter().for_each(|&size| self.digest.number(size as u64));
    }

    fn number(&mut self, bits: u64) {
        self.digest.number(bits);
    }
}
