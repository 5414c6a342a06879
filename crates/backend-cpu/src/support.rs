//! Programs that this backend runs.

use paguro_backend::{Activation, FeedForward, Layer, LoadError, Mixer, Program, Residual};

use crate::plan::Heads;

/// Returns the heads of the layers of each K/V group.
///
/// # Errors
/// [`LoadError::Unsupported`] for layers of a group that differ.
pub fn heads(program: &Program) -> Result<Vec<Heads>, LoadError> {
    Heads::of_groups(program).ok_or_else(|| LoadError::Unsupported {
        device: "cpu".into(),
        what: "query heads that differ between layers with the same window and K/V heads".into(),
        supported: "as many query heads in all of these layers work".into(),
    })
}

/// Returns the first of the last layers that store nothing for later rows, if there are some (Gemma 4 E2B: 20 of 35; a
/// feed-forward network of Nemotron-H at the end).
pub fn tail(program: &Program) -> Option<usize> {
    let stores = |layer: &Layer| {
        layer.mixer.parts().any(|mixer| !matches!(mixer, Mixer::Attention(op) if op.k.is_none()))
    };
    let first = program.layers.iter().rposition(stores).map_or(0, |last| last + 1);
    (first < program.layers.len()).then_some(first)
}

/// Refuses unsupported operations by name.
pub fn check(program: &Program) -> Result<(), LoadError> {
    let unsupported = |what: String, supported: &str| {
        Err(LoadError::Unsupported { device: "cpu".into(), what, supported: supported.into() })
    };
    for layer in &program.layers {
        let is_known = |mixer: &Mixer| {
            matches!(
                mixer,
                Mixer::Attention(_) | Mixer::Latent(_) | Mixer::Conv(_) | Mixer::DeltaRule(_) | Mixer::Ssd(_)
            )
        };
        if let Some(mixer) = layer.mixer.parts().find(|mixer| !is_known(mixer)) {
            return unsupported(
                format!("{mixer:?}"),
                "attention, latent attention, short convolutions, gated delta rules and scans work",
            );
        }
        if let Mixer::Sum(branches) = &layer.mixer {
            let is_parallel = layer.residual == Residual::Parallel;
            if branches.len() > 2 || is_parallel {
                let beside = if is_parallel { " beside a feed-forward network" } else { "" };
                let what = format!("a sum of {} mixers{beside}", branches.len());
                return unsupported(what, "sums of two before a network work");
            }
        }
        let activation = match &layer.ffn {
            FeedForward::None => continue,
            FeedForward::Dense(dense) => dense.activation,
            FeedForward::Experts(experts) => {
                if !matches!(
                    experts.router.scores,
                    paguro_backend::Scores::Softmax | paguro_backend::Scores::Sigmoid
                ) {
                    let what = format!("a router with {:?}", experts.router.scores);
                    return unsupported(what, "softmax and sigmoid work");
                }
                experts.activation
            }
            other => return unsupported(format!("{other:?}"), "dense networks and experts work"),
        };
        match activation {
            Activation::Silu
            | Activation::GeluTanh
            | Activation::Gelu
            | Activation::Relu2
            | Activation::ClampedSwiglu { .. } => {}
            other => return unsupported(format!("the activation {other:?}"), "SiLU, GELU and ReLU² work"),
        }
    }
    heads(program).map(|_| ())
}
