//! Falcon-H1's multipliers. GGUF files have no keys for them: they are in the matrices, as llama.cpp's converter writes them.

use super::super::{Config, Multipliers, Part, Recurrent, SsdConfig};

/// Factors of the rows of matrices, and of their biases.
#[derive(Clone, Debug, Default)]
pub(super) struct Factors {
    weights: Vec<Rows>,
    biases: Vec<Rows>,
}

/// Numbers of rows of a part with their factors; the last factor holds for all further rows.
type Rows = (Part, Vec<(usize, f32)>);

impl Factors {
    /// Returns true if nothing is multiplied.
    pub(super) fn is_none(&self) -> bool {
        self.weights.is_empty() && self.biases.is_empty()
    }

    /// Factors of a matrix; `None` for one.
    pub(super) fn of(&self, part: Part) -> Option<&[(usize, f32)]> {
        self.weights.iter().find(|factors| factors.0 == part).map(|factors| factors.1.as_slice())
    }

    /// Factors of a bias, to which multipliers of inputs do not apply; `None` for one.
    pub(super) fn of_bias(&self, part: Part) -> Option<&[(usize, f32)]> {
        self.biases.iter().find(|factors| factors.0 == part).map(|factors| factors.1.as_slice())
    }
}

/// Moves the multipliers of a configuration into factors of its matrices.
pub(super) fn fold(mut config: Config) -> (Config, Factors) {
    if !config.block.beside {
        return (config, Factors::default());
    }
    let Multipliers { attention_in, attention_out, scan_in, scan_out, ffn_in } = config.multipliers;
    let plain = 1.0 / (config.head_dim as f32).sqrt();
    // `falcon_h1::from_hf` divides by the scale of branches, and that by the gate's factor.
    let branch = config.branch_scale;
    let all = |part: Part, factor: f32| (part, vec![(usize::MAX, factor)]);
    let key = config.attention_scale / plain;
    let mut weights = vec![
        all(Part::Embedding, config.embed_scale),
        all(Part::Head, config.logit_scale),
        all(Part::Q, attention_in),
        all(Part::K, attention_in * key),
        all(Part::V, attention_in),
        all(Part::AttentionOut, attention_out * branch),
        all(Part::DeltaOut, scan_out * branch),
        all(Part::Gate, ffn_in),
        all(Part::Down, branch * ffn_in),
    ];
    let mut biases = vec![
        all(Part::K, key),
        all(Part::AttentionOut, attention_out * branch),
        all(Part::DeltaOut, scan_out * branch),
        all(Part::Gate, ffn_in),
        all(Part::Down, branch * ffn_in),
    ];
    if let Some(Recurrent::Ssd(scan)) = &mut config.recurrent {
        let SsdConfig { shape, gate_scale, dt_scale, channel_scales: [c, b, x], .. } = *scan;
        let (width, keys) = (shape.value_width(), shape.key_width());
        // z, x, B, C and d.
        let rows = [(width, gate_scale), (width, x), (keys, b), (keys, c), (usize::MAX, dt_scale)];
        weights.push((Part::SsmIn, rows.map(|(rows, factor)| (rows, factor * scan_in)).to_vec()));
        biases.push((Part::SsmIn, rows.to_vec()));
        (scan.gate_scale, scan.dt_scale, scan.channel_scales) = (1.0, 1.0, [1.0; 3]);
    }
    config.multipliers = Multipliers::NONE;
    (config.embed_scale, config.logit_scale, config.branch_scale) = (1.0, 1.0, 1.0);
    config.attention_scale = plain;
    for factors in [&mut weights, &mut biases] {
        factors.retain(|(_, rows)| rows.iter().any(|&(_, factor)| (factor - 1.0).abs() > 1e-6));
    }
    (config, Factors { weights, biases })
}
