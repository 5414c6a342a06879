//! Programs that this backend runs.

use paguro_backend::{Layer, LoadError, Mixer, Program, Residual};

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
    for layer in &program.layers {
        let Layer {
            mixer,
            ffn: _,
            residual,
            norm_after_mixer: _,
            norm_after_ffn: _,
            branch_scale: _,
            input: _,
            output_scale: _,
        } = layer;
        if let Mixer::Sum(branches) = mixer {
            let is_parallel = *residual == Residual::Parallel;
            if branches.len() > 2 || is_parallel {
                let beside = if is_parallel { " beside a feed-forward network" } else { "" };
                return Err(LoadError::Unsupported {
                    device: "cpu".into(),
                    what: format!("a sum of {} mixers{beside}", branches.len()),
                    supported: "sums of two before a network work".into(),
                });
            }
        }
    }
    heads(program).map(|_| ())
}
