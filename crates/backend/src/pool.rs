//! Memory of experts in slots: the host has all experts of a layer, and the device some of them.

use crate::{Experts, FeedForward, Linear, MatrixId, Program};

/// Bytes of the layers whose experts are in slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertBytes {
    /// All of their experts, in the host's memory.
    pub host: u64,
    /// Slots in the device's memory.
    pub slots: u64,
    /// Room in the device's memory for the experts of one layer that have no slot, which steps of many rows need.
    pub staging: u64,
}

impl Program {
    /// Returns the mixtures of experts, each with the index of its layer.
    pub fn experts(&self) -> impl Iterator<Item = (usize, &Experts)> {
        self.layers.iter().enumerate().filter_map(|(index, layer)| match &layer.ffn {
            FeedForward::Experts(experts) => Some((index, experts)),
            FeedForward::None | FeedForward::Dense(_) => None,
        })
    }

    /// Returns the bytes of layers with more than `slots` experts if they have as many slots. `bytes_of` returns those of a
    /// stack of matrices on the device.
    pub fn expert_bytes(&self, slots: usize, bytes_of: impl Fn(MatrixId) -> u64) -> ExpertBytes {
        let mut all = ExpertBytes::default();
        // The matrices before the activation, and the one behind it.
        let mut staging = [0_u64; 2];
        for (_, experts) in self.experts().filter(|(_, experts)| experts.count > slots) {
            let (count, slots) = (experts.count as u64, slots as u64);
            let before = experts.gate.iter().chain([&experts.up]).map(|linear| bytes_of(linear.matrix)).sum();
            let layer: [u64; 2] = [before, bytes_of(experts.down.matrix)];
            for (bytes, staging) in layer.into_iter().zip(&mut staging) {
                all.host += bytes;
                all.slots += bytes / count * slots;
                *staging = (*staging).max(bytes / count * (count - slots));
            }
        }
        all.staging = staging.iter().sum();
        all
    }
}

impl Experts {
    /// Returns the stacks of matrices.
    pub fn stacks(&self) -> impl Iterator<Item = &Linear> {
        self.gate.iter().chain([&self.up, &self.down])
    }
}
