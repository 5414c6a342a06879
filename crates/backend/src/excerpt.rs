//! A short program out of a long one: the embedding, one layer of each kind, and the head.
//!
//! Kernels are compiled for a model's shapes and formats. A device that computes the excerpt correctly has run the kernels that the
//! whole model needs, in a fraction of its time and memory.

use std::collections::{HashMap, HashSet};

use crate::{
    Attention, Convolution, DeltaRule, Dense, FeedForward, GatedNorm, KvLayout, KvSlot, LatentQuery, Layer,
    Linear, MatrixId, Mixer, Norm, Program, ShortConv, TableId, VectorId, Weights,
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
    let mut chosen = Vec::new();
    short.state.layers.clear();
    for layer in &mut short.layers {
        for state in layer.mixer.parts_mut().filter_map(state_of) {
            short.state.layers.push(program.state.layers[*state]);
            *state = short.state.layers.len() - 1;
        }
    }
    let kv = short.kv.clone();
    share_again(&kv, &mut short.layers);
    for layer in &mut short.layers {
        if let FeedForward::Experts(op) = &mut layer.ffn {
            op.router.selection_bias = None;
            // Groups without a chosen expert would be chosen by their scores.
            let among = op.router.groups.map_or(op.count, |groups| op.count / groups.count * groups.used);
            chosen.push(choice(op.count, among, op.router.used));
        }
    }
    let mut some = Weights::default();
    let (mut matrices, mut vectors) = (HashMap::new(), HashMap::new());
    let mut references = References {
        matrix: &mut |id: &mut MatrixId| {
            *id = *matrices.entry(*id).or_insert_with(|| {
                some.matrices.push(weights.matrix(*id).clone());
                MatrixId(some.matrices.len() as u32 - 1)
            });
        },
        vector: &mut |id: &mut VectorId| {
            *id = *vectors.entry(*id).or_insert_with(|| {
                some.vectors.push(weights.vector(*id).to_vec());
                VectorId(some.vectors.len() as u32 - 1)
            });
        },
    };
    (references.matrix)(&mut short.embed.table);
    short.embed.positions.iter_mut().for_each(|positions| (references.matrix)(&mut positions.table));
    short.embed.types.iter_mut().for_each(|types| (references.vector)(&mut types.table));
    short.embed.norm.iter_mut().for_each(|norm| references.norm(norm));
    if let Some(layers) = &mut short.embed.layers {
        references.linear(&mut layers.projection);
        references.norm(&mut layers.norm);
    }
    short.layers.iter_mut().for_each(|layer| references.layer(layer));
    references.norm(&mut short.head.norm);
    references.linear(&mut short.head.linear);
    let experts = short.layers.iter_mut().filter_map(|layer| match &mut layer.ffn {
        FeedForward::Experts(op) => Some(op),
        _ => None,
    });
    for (op, choice) in experts.zip(chosen) {
        some.vectors.push(choice);
        op.router.selection_bias = Some(VectorId(some.vectors.len() as u32 - 1));
    }
    if let Some(layers) = &mut short.embed.layers {
        some.tables.push(weights.table(layers.table).clone());
        layers.table = TableId(0);
    }
    (short, some)
}

/// Has layers without K and V of their own read those of the last layer before them whose K and V have the same shape. The
/// layer that they read in the long program may not be in the short one, but one of its kind is.
fn share_again(kv: &KvLayout, layers: &mut [Layer]) {
    let mut stored: Vec<KvSlot> = Vec::new();
    for layer in layers {
        for mixer in layer.mixer.parts_mut() {
            let Mixer::Attention(Attention { k, kv: place, .. }) = mixer else { continue };
            if k.is_some() {
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

/// Returns the index of a mixer's state.
fn state_of(mixer: &mut Mixer) -> Option<&mut usize> {
    match mixer {
        Mixer::Conv(ShortConv { state, .. }) | Mixer::DeltaRule(DeltaRule { state, .. }) => Some(state),
        Mixer::Ssd(op) => Some(&mut op.state),
        _ => None,
    }
}

/// Returns a selection bias that decides for `used` of the first `among` of `count` experts: no score is larger than
/// one.
fn choice(count: usize, among: usize, used: usize) -> Vec<f32> {
    let mut bias = vec![0.0; count];
    (0..used).for_each(|index| bias[index * among / used] = 4.0);
    bias
}

/// Text that is equal for layers of one kind.
fn kind(layer: &Layer, weights: &Weights) -> String {
    let mut shapes = Vec::new();
    let mut layer = layer.clone();
    let mut references = References {
        matrix: &mut |id: &mut MatrixId| {
            let matrix = weights.matrix(*id);
            shapes.push((matrix.format, matrix.parts, matrix.rows, matrix.cols));
            *id = MatrixId(0);
        },
        vector: &mut |id: &mut VectorId| *id = VectorId(0),
    };
    references.layer(&mut layer);
    for mixer in layer.mixer.parts_mut() {
        match mixer {
            Mixer::Attention(attention) => attention.kv.layer_slot = 0,
            Mixer::Latent(latent) => latent.kv.layer_slot = 0,
            other => state_of(other).into_iter().for_each(|state| *state = 0),
        }
    }
    if let Some(input) = &mut layer.input {
        input.index = 0;
    }
    format!("{layer:?} {shapes:?}")
}

/// Functions that are called with all references to weights.
struct References<'a> {
    matrix: &'a mut dyn FnMut(&mut MatrixId),
    vector: &'a mut dyn FnMut(&mut VectorId),
}

impl References<'_> {
    fn mixer(&mut self, mixer: &mut Mixer) {
        match mixer {
            Mixer::None => {}
            Mixer::Sum(branches) => branches.iter_mut().for_each(|branch| self.mixer(&mut branch.mixer)),
            Mixer::Ssd(op) => {
                for linear in [&mut op.cbv, &mut op.gate, &mut op.dt, &mut op.out] {
                    self.linear(linear);
                }
                self.convolution(&mut op.convolution);
                let vectors = [&mut op.dt_bias, &mut op.decay, &mut op.skip].into_iter();
                let of_norm = match &mut op.out_norm {
                    GatedNorm::GateOnly => None,
                    GatedNorm::AfterGate(norm) | GatedNorm::BeforeGate(norm) => Some(&mut norm.weight),
                };
                vectors.chain(of_norm).for_each(|vector| (self.vector)(vector));
                op.norm.iter_mut().chain(&mut op.post_norm).for_each(|norm| self.norm(norm));
            }
            Mixer::Attention(op) => {
                let linears = [&mut op.q, &mut op.out].into_iter().chain(&mut op.k).chain(&mut op.v);
                linears.chain(&mut op.gate).for_each(|linear| self.linear(linear));
                let qk_norms = op.qk_norm.iter_mut().flat_map(|norm| [&mut norm.q, &mut norm.k]);
                let norms = op.norm.iter_mut().chain(&mut op.post_norm).chain(&mut op.v_norm);
                norms.chain(qk_norms).for_each(|norm| self.norm(norm));
                let biases = op.distance_bias.iter_mut().map(|bias| &mut bias.table);
                op.sinks.iter_mut().chain(biases).for_each(|vector| (self.vector)(vector));
            }
            Mixer::Latent(op) => {
                match &mut op.query {
                    LatentQuery::Direct(linear) => self.linear(linear),
                    LatentQuery::Down { down, norm, up, .. } => {
                        self.linear(down);
                        self.linear(up);
                        self.norm(norm);
                    }
                }
                for linear in [&mut op.down, &mut op.absorb, &mut op.value, &mut op.out] {
                    self.linear(linear);
                }
                let norms = op.norm.iter_mut().chain(&mut op.post_norm).chain([&mut op.latent_norm]);
                norms.for_each(|norm| self.norm(norm));
            }
            Mixer::Conv(op) => {
                self.linear(&mut op.input);
                self.linear(&mut op.out);
                self.convolution(&mut op.convolution);
                op.norm.iter_mut().chain(&mut op.post_norm).for_each(|norm| self.norm(norm));
            }
            Mixer::DeltaRule(op) => {
                for linear in [&mut op.qkv, &mut op.gate, &mut op.alpha, &mut op.beta, &mut op.out] {
                    self.linear(linear);
                }
                self.convolution(&mut op.convolution);
                (self.vector)(&mut op.decay);
                (self.vector)(&mut op.dt);
                let norms = op.norm.iter_mut().chain(&mut op.post_norm).chain([&mut op.out_norm]);
                norms.for_each(|norm| self.norm(norm));
            }
        }
    }

    fn layer(&mut self, layer: &mut Layer) {
        self.mixer(&mut layer.mixer);
        match &mut layer.ffn {
            FeedForward::None => {}
            FeedForward::Dense(op) => self.dense(op),
            FeedForward::Experts(op) => {
                let latent = op.latent.iter_mut().flat_map(|latent| [&mut latent.down, &mut latent.up]);
                let linears = [&mut op.router.linear, &mut op.up, &mut op.down].into_iter();
                linears.chain(&mut op.gate).chain(latent).for_each(|linear| self.linear(linear));
                let vectors = op.router.selection_bias.iter_mut().chain(&mut op.router.expert_scale);
                vectors.for_each(|vector| (self.vector)(vector));
                op.router.norm.iter_mut().for_each(|norm| self.norm(norm));
                if let Some(shared) = &mut op.shared {
                    let linears = [&mut shared.up, &mut shared.down].into_iter().chain(&mut shared.gate);
                    linears.chain(&mut shared.output_gate).for_each(|linear| self.linear(linear));
                }
                if let Some(beside) = &mut op.beside {
                    self.dense(&mut beside.dense);
                    self.norm(&mut beside.sum_norm);
                }
                op.norm.iter_mut().chain(&mut op.post_norm).for_each(|norm| self.norm(norm));
            }
        }
        let norms_after = layer.norm_after_mixer.iter_mut().chain(&mut layer.norm_after_ffn);
        norms_after.for_each(|norm| self.norm(norm));
        if let Some(input) = &mut layer.input {
            self.linear(&mut input.gate);
            self.linear(&mut input.out);
            input.post_norm.iter_mut().for_each(|norm| self.norm(norm));
        }
    }

    fn dense(&mut self, op: &mut Dense) {
        let linears = op.gate.iter_mut().chain([&mut op.up, &mut op.down]);
        linears.for_each(|linear| self.linear(linear));
        op.norm.iter_mut().chain(&mut op.post_norm).for_each(|norm| self.norm(norm));
    }

    fn linear(&mut self, linear: &mut Linear) {
        (self.matrix)(&mut linear.matrix);
        linear.bias.iter_mut().for_each(|bias| (self.vector)(bias));
    }

    fn convolution(&mut self, convolution: &mut Convolution) {
        (self.vector)(&mut convolution.weight);
        convolution.bias.iter_mut().for_each(|bias| (self.vector)(bias));
    }

    fn norm(&mut self, norm: &mut Norm) {
        (self.vector)(&mut norm.weight);
        norm.bias.iter_mut().for_each(|bias| (self.vector)(bias));
    }
}
