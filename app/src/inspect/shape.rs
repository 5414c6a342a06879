//! Shapes of a model's layers, for people and programs.

use paguro_backend::{
    DeltaRule, DeltaShape, Experts, FeedForward, KvGroup, LatentShape, Mixer, Program, Role,
};
use paguro_model::{Model, tensor::Tensor};

/// Formats heads and widths of the layers, each kind once.
pub fn layers(program: &Program) -> String {
    let mut attentions: Vec<String> = Vec::new();
    let mut networks: Vec<String> = Vec::new();
    for layer in &program.layers {
        let of_mixer = |mixer: &Mixer| match mixer {
            Mixer::Attention(attention) => {
                let KvGroup { kv_heads, head_dim, .. } = program.kv_group(attention);
                let shared = if attention.k.is_none() { " of an earlier layer" } else { "" };
                format!("{} heads, {kv_heads} KV heads of {head_dim}{shared}", attention.heads)
            }
            Mixer::Latent(latent) => {
                let LatentShape { heads, latent, rotated, .. } = latent.shape;
                format!("latent attention of {heads} heads over {latent} + {rotated} elements")
            }
            Mixer::Conv(conv) => format!("short convolutions over {} tokens", conv.convolution.taps),
            Mixer::DeltaRule(DeltaRule { shape, .. }) => {
                let DeltaShape { key_heads, value_heads, key_dim, value_dim } = shape;
                format!(
                    "gated delta rules of {value_heads} value heads of {value_dim}, {key_heads} key heads of {key_dim}"
                )
            }
            Mixer::Ssd(op) => {
                let DeltaShape { key_heads, value_heads, key_dim, value_dim } = op.shape;
                format!(
                    "Mamba-2 scans of {value_heads} heads of {value_dim}, {key_heads} groups of {key_dim}"
                )
            }
            Mixer::None | Mixer::Sum(_) => String::new(), // `parts` has none
        };
        let attention = layer.mixer.parts().map(of_mixer).collect::<Vec<_>>().join(" beside ");
        let network = match &layer.ffn {
            FeedForward::None => String::new(),
            FeedForward::Dense(dense) => format!("FFN {}", dense.width),
            FeedForward::Experts(experts) => {
                let shared =
                    experts.shared.as_ref().map(|shared| format!(" and a shared one of {}", shared.width));
                let beside = experts.beside.as_ref().map(|beside| format!(" and FFN {}", beside.dense.width));
                let (used, count, width) = (experts.router.used, experts.count, experts.width);
                format!("{used} of {count} experts of {width}{}", shared.or(beside).unwrap_or_default())
            }
        };
        for (all, one) in [(&mut attentions, attention), (&mut networks, network)] {
            if !one.is_empty() && !all.contains(&one) {
                all.push(one);
            }
        }
    }
    let kinds = [attentions, networks].map(|kinds| kinds.join(" or "));
    kinds.into_iter().filter(|kinds| !kinds.is_empty()).collect::<Vec<_>>().join(", ")
}

/// Returns the names of blocks for multi-token prediction, which are not supported, if the file has some.
pub fn skipped(tensors: &[Tensor]) -> Option<String> {
    let block = |tensor: &Tensor| match tensor.name.split_once(".nextn.") {
        Some((block, _)) => Some(block.to_owned()),
        None => tensor.name.starts_with("mtp.").then(|| "mtp".to_owned()),
    };
    let blocks: std::collections::BTreeSet<String> = tensors.iter().filter_map(block).collect();
    let names = blocks.into_iter().map(|block| format!("`{block}`")).collect::<Vec<_>>().join(", ");
    (!names.is_empty()).then(|| format!("{names}: multi-token prediction"))
}

/// Returns the number of parameters in one token's forward pass, for a model with experts.
pub fn active_parameters(model: &Model) -> Option<u64> {
    let unused = model.program.matrices().into_iter().map(|(id, role)| match role {
        Role::Experts { used, count } => {
            let matrix = model.weights.matrix(id);
            (matrix.rows * matrix.cols * (count - used)) as u64
        }
        Role::Lookup | Role::Layer | Role::Head => 0,
    });
    let unused: u64 = unused.sum();
    (unused > 0).then(|| model.description.parameters.saturating_sub(unused))
}

/// Returns the first layer's shape, for programs that expect one number; [`layers`] has all of them. The width is that
/// of the first feed-forward network.
pub fn first_layer(program: &Program) -> (usize, usize, usize, usize) {
    let (heads, kv_heads, head_dim) = match program.attentions().next() {
        Some(attention) => {
            let group = program.kv_group(attention);
            (attention.heads, group.kv_heads, group.head_dim)
        }
        None => (0, 0, 0),
    };
    let width = program.layers.iter().find_map(|layer| match &layer.ffn {
        FeedForward::Dense(dense) => Some(dense.width),
        FeedForward::Experts(experts) => Some(experts.width),
        FeedForward::None => None,
    });
    (heads, kv_heads, head_dim, width.unwrap_or(0))
}

/// Returns the first mixture of experts.
pub fn experts(program: &Program) -> Option<&Experts> {
    program.layers.iter().find_map(|layer| match &layer.ffn {
        FeedForward::Experts(experts) => Some(experts),
        FeedForward::None | FeedForward::Dense(_) => None,
    })
}
