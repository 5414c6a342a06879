//! Mixers with a state.

use paguro_backend::{Convolution, DeltaRule, KeySharing, ShortConv, Ssd};

use super::Builder;
use crate::lower::{
    node::{Acts, Heads, Kernel, Span},
    slot::Slot,
};

impl Builder<'_> {
    /// Adds a short convolution, from the norm to the activations of its output.
    pub(super) fn short_conv(&mut self, op: &ShortConv) {
        self.norm(op.norm);
        self.matmul(&op.input, 3 * op.width, Acts::Normed, Slot::Mixed);
        self.need_acts(self.rows, op.width);
        self.push(Kernel::ShortConv(Box::new(op.clone())));
        self.push(Kernel::Keep(Box::new(op.clone())));
    }

    /// Adds a delta rule, from the norm to the activations of its output.
    pub(super) fn delta_rule(&mut self, op: &DeltaRule) {
        let shape = op.shape;
        self.norm(op.norm);
        let (values, heads) = (shape.value_width(), shape.value_heads);
        let linears =
            [(&op.qkv, shape.channels()), (&op.gate, values), (&op.alpha, heads), (&op.beta, heads)];
        let [mixed, z, a, b] = self.matmuls(linears, Some(Slot::Mixed));
        self.push(Kernel::DeltaInputs { delta: Box::new(op.clone()), a, b });
        let alternating = op.sharing == KeySharing::Alternating;
        let heads = Heads { shape, alternating, scans: false, state: op.state };
        self.heads(heads, op.convolution, mixed, Kernel::DeltaNorm { delta: Box::new(op.clone()), z });
    }

    /// Adds a scan, from the norm to the activations of its output.
    pub(super) fn ssd(&mut self, op: &Ssd) {
        let shape = op.shape;
        self.norm(op.norm);
        let linears =
            [(&op.cbv, shape.channels()), (&op.gate, shape.value_width()), (&op.dt, shape.value_heads)];
        let [mixed, z, d] = self.matmuls(linears, Some(Slot::Mixed));
        self.push(Kernel::SsdInputs { ssd: Box::new(op.clone()), d });
        let heads = Heads { shape, alternating: false, scans: true, state: op.state };
        self.heads(heads, op.convolution, mixed, Kernel::SsdNorm { ssd: Box::new(op.clone()), z });
    }

    /// Adds the rule of value heads, the norm of its results, and the state after the step.
    fn heads(&mut self, heads: Heads, convolution: Convolution, mixed: Span, norm: Kernel) {
        let shape = heads.shape;
        self.need(Slot::Convolved, shape.channels());
        self.need(Slot::Decays, shape.value_heads);
        self.need(Slot::Betas, shape.value_heads);
        self.need(Slot::Values, shape.value_width());
        self.push(Kernel::Delta(heads));
        self.need_acts(self.rows, shape.value_width());
        self.push(norm);
        self.push(Kernel::KeepDelta { heads, convolution, mixed });
    }
}
