//! Scans of random models, and sums of mixers.

use paguro_backend::{Attention, Branch, GatedNorm, GroupNorm, Mixer, Ssd};

use super::{Biases, Builder, RecurrentShape};

impl Builder<'_> {
    pub(super) fn ssd(&mut self, layer: usize, state: usize) -> Ssd {
        let shape = self.shape;
        let RecurrentShape { delta, norm_groups, norm_before_gate, scales, .. } = shape.recurrent;
        let (hidden, heads, width) = (shape.hidden, delta.value_heads, delta.value_width());
        let all = shape.biases == Biases::All;
        let name = |what: &str| format!("layer {layer} {what}");
        let norm = self.pre_norm();
        let cbv = self.linear(&name("cbv"), delta.channels(), hidden, 1.5, all);
        let gate = self.linear(&name("z"), width, hidden, 1.5, all);
        let dt = self.linear(&name("dt"), heads, hidden, 1.5, all);
        let convolution = self.convolution(delta.channels());
        // From heads with a memory of a few tokens to heads with more than a chunk.
        let decay = (0..heads).map(|_| -(2.0 * self.rng.normal() - 3.0).exp()).collect();
        let dt_bias = (0..heads).map(|_| self.rng.normal()).collect();
        let skip = (0..heads).map(|_| 1.0 + 0.5 * self.rng.normal()).collect();
        let weight = (0..width).map(|_| 1.0 + 0.3 * self.rng.normal()).collect();
        // Large enough that a forgotten eps shows.
        let group_norm = GroupNorm { groups: norm_groups, weight: self.vector(weight), eps: 0.05 };
        Ssd {
            norm,
            shape: delta,
            cbv,
            gate,
            gate_scale: if scales { 0.6 } else { 1.0 },
            dt,
            dt_scale: if scales { 1.4 } else { 1.0 },
            dt_bias: self.vector(dt_bias),
            dt_limits: if scales { (0.2, 1.5) } else { (0.0, f32::INFINITY) },
            convolution,
            decay: self.vector(decay),
            skip: self.vector(skip),
            out_norm: match (norm_groups, norm_before_gate) {
                (0, _) => GatedNorm::GateOnly,
                (_, false) => GatedNorm::AfterGate(group_norm),
                (_, true) => GatedNorm::BeforeGate(group_norm),
            },
            out: self.onto_stream(&name("project"), 1, width),
            post_norm: shape.post_norms.then(|| self.norm(hidden)),
            state,
        }
    }

    /// Attention and a scan side by side.
    pub(super) fn sum(&mut self, attention: Attention, layer: usize, state: usize) -> Mixer {
        let scales = if self.shape.recurrent.scales { [0.5, 1.7] } else { [1.0; 2] };
        let mixers = [Mixer::Attention(attention), Mixer::Ssd(Box::new(self.ssd(layer, state)))];
        let branches = mixers.into_iter().zip(scales);
        Mixer::Sum(branches.map(|(mixer, scale)| Branch { mixer, scale }).collect())
    }
}
