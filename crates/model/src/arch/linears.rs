//! Linears of a model by their names in both kinds of files, for adapters.
//!
//! An adapter names a tensor of the files that it was trained or converted for, and those may have another arrangement
//! than the base's own files. So a name leads to a place in the program, and to the rows of the named tensor that the
//! matrices there consist of.

use std::ops::Range;

use paguro_backend::{
    Adaptable, Attention, DeltaRule, DeltaShape, Dense, Experts, FeedForward, Latent, LatentQuery, Layer,
    Linear, MatrixId, Mixer, Program, RopeStyle, Ssd, Weights,
};

use super::{
    Config, DeltaFiles, HfMatrices, Multipliers, Recurrent,
    names::{Names, Part},
};

/// Names and arrangement of an adapter's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Naming {
    /// Those of llama.cpp.
    Gguf,
    /// Those of transformers.
    Hf,
}

/// A matrix of the tensor that an adapter names.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) matrix: MatrixId,
    /// Its rows, as rows of the tensor.
    pub(crate) rows: Vec<usize>,
    /// Its columns, as columns of the tensor, if they have another order.
    pub(crate) columns: Option<Vec<usize>>,
}

impl Piece {
    fn new(matrix: MatrixId, rows: Vec<usize>) -> Self {
        Self { matrix, rows, columns: None }
    }
}

/// Parts that are linears.
const PARTS: [Part; 31] = [
    Part::Q,
    Part::K,
    Part::V,
    Part::Qkv,
    Part::AttentionOut,
    Part::QDown,
    Part::QUp,
    Part::LatentDown,
    Part::Gate,
    Part::Up,
    Part::GateUp,
    Part::Down,
    Part::Router,
    Part::ExpertsIn,
    Part::ExpertsOut,
    Part::SharedGate,
    Part::SharedUp,
    Part::SharedGateUp,
    Part::SharedDown,
    Part::OutputGate,
    Part::InputGate,
    Part::InputOut,
    Part::ConvIn,
    Part::ConvOut,
    Part::DeltaQkv,
    Part::DeltaGate,
    Part::DeltaAlpha,
    Part::DeltaBeta,
    Part::DeltaOut,
    Part::SsmIn,
    Part::LatentUp,
];

/// Linears of a lowered model.
#[derive(Clone, Debug)]
pub(crate) struct Linears {
    names: [Names; 2],
    /// Arrangement of the model's own files.
    own: Naming,
    program: Program,
    adaptable: Adaptable,
    /// True if value heads in GGUF files are interleaved by key heads.
    alternating: bool,
    /// True if inputs or outputs of linears are multiplied in files of Hugging Face.
    is_multiplied: bool,
}

impl Linears {
    pub(crate) fn new(config: &Config, own: Naming, program: &Program, weights: &Weights) -> Self {
        let alternating = matches!(
            config.recurrent,
            Some(Recurrent::Delta { files: DeltaFiles { alternating: true }, .. })
        );
        Self {
            names: [Names::gguf(config.definition), Names::hf(config.definition, |_| false)],
            own,
            program: program.clone(),
            adaptable: Adaptable::of(program, weights),
            alternating,
            is_multiplied: config.multipliers != Multipliers::NONE,
        }
    }

    /// Returns the shape `[out, in]` of a matrix that adapters can change.
    pub(crate) fn shape(&self, id: MatrixId) -> Option<[usize; 2]> {
        self.adaptable.shape(id)
    }

    /// Returns the matrices of the tensor `path`, which has no `.weight`, and `out` rows: names may be those of two parts.
    ///
    /// # Errors
    /// The reason for which adapters cannot change it.
    pub(crate) fn find(&self, naming: Naming, path: &str, out: usize) -> Result<Vec<Piece>, String> {
        if self.is_multiplied {
            return Err("adapters of models with multipliers of linears (Falcon-H1) are not supported".into());
        }
        let names = &self.names[naming as usize];
        if let Some((layer, rest)) = names.split_layer(path) {
            let layer = self.program.layers.get(layer).ok_or_else(|| {
                format!("the model has no layer {layer}; it has {}", self.program.layers.len())
            })?;
            let parts = PARTS.into_iter().filter(|&part| names.part_name(part) == rest);
            let found: Vec<_> = parts.filter_map(|part| self.pieces(layer, part, naming)).collect();
            let rows = |pieces: &Vec<Piece>| pieces.iter().map(|piece| piece.rows.len()).sum::<usize>();
            let fits = |found: &Result<Vec<Piece>, String>| found.as_ref().is_ok_and(|it| rows(it) == out);
            let best = found.iter().position(fits).unwrap_or(0);
            return match found.into_iter().nth(best) {
                Some(pieces) => pieces,
                None if rest.contains("exp") => Err("adapters of experts are not supported".into()),
                None => Err("it is no linear of the model that adapters can change".into()),
            };
        }
        if names.is_model_part(path, Part::Head) {
            let head = self.program.head().ok_or("the model has no head")?;
            return Ok(vec![self.whole(&head.linear)]);
        }
        if names.is_model_part(path, Part::LayerProjection)
            && let Some(embeds) = self.program.layer_embeds()
        {
            return Ok(vec![self.whole(&embeds.projection)]);
        }
        match names.is_model_part(path, Part::Embedding) {
            true => Err("adapters of embeddings are not supported".into()),
            false => Err("the model has no such tensor".into()),
        }
    }

    fn rows(&self, linear: &Linear) -> usize {
        self.shape(linear.matrix).map_or(0, |[out, _]| out)
    }

    fn whole(&self, linear: &Linear) -> Piece {
        Piece::new(linear.matrix, (0..self.rows(linear)).collect())
    }

    /// Returns linears whose rows are one after the other in a tensor.
    fn joined(&self, linears: &[&Linear]) -> Vec<Piece> {
        let mut first = 0;
        let piece = |linear: &&Linear| {
            let rows = first..first + self.rows(linear);
            first = rows.end;
            Piece::new(linear.matrix, rows.collect())
        };
        linears.iter().map(piece).collect()
    }

    /// Returns the matrices of a part of a layer; `None` if the layer has none.
    fn pieces(&self, layer: &Layer, part: Part, naming: Naming) -> Option<Result<Vec<Piece>, String>> {
        let mixers = layer.mixer.parts().find_map(|mixer| match mixer {
            Mixer::Attention(op) => self.attention(op, part, naming),
            Mixer::Latent(op) => self.latent(op, part),
            Mixer::Conv(op) => match part {
                Part::ConvIn => Some(Ok(vec![self.whole(&op.input)])),
                Part::ConvOut => Some(Ok(vec![self.whole(&op.out)])),
                _ => None,
            },
            Mixer::DeltaRule(op) => self.delta(op, part, naming).map(Ok),
            Mixer::Ssd(op) => self.ssd(op, part).map(Ok),
            Mixer::None | Mixer::Sum(_) => None,
        });
        let input = || {
            let input = layer.input.as_ref()?;
            match part {
                Part::InputGate => Some(vec![self.whole(&input.gate)]),
                Part::InputOut => Some(vec![self.whole(&input.out)]),
                _ => None,
            }
        };
        let ffn = || match &layer.ffn {
            FeedForward::None => None,
            FeedForward::Dense(op) => self.dense(op, part),
            FeedForward::Experts(op) => self.experts(op, part),
        };
        mixers.or_else(|| ffn().or_else(input).map(Ok))
    }

    fn attention(&self, op: &Attention, part: Part, naming: Naming) -> Option<Result<Vec<Piece>, String>> {
        let head = self.program.kv_group(op).head_dim;
        let rotated = |linear: &Linear| {
            let rows = (0..self.rows(linear)).map(|row| self.rotated_row(row, head, naming));
            Piece::new(linear.matrix, rows.collect())
        };
        // Rows of a head in a tensor that has `count` parts of each head.
        let by_head = |linear: &Linear, at: usize, count: usize| {
            let rows = 0..self.rows(linear);
            let rows = rows.map(|row| (row / head * count + at) * head + row % head);
            Piece::new(linear.matrix, rows.collect())
        };
        Some(Ok(match (part, &op.gate) {
            (Part::Q, Some(gate)) => vec![by_head(&op.q, 0, 2), by_head(gate, 1, 2)],
            (Part::Q, None) => vec![rotated(&op.q)],
            (Part::K, _) => vec![rotated(op.k.as_ref()?)],
            (Part::V, _) => vec![self.whole(op.v.as_ref()?)],
            (Part::Qkv, _) => {
                let linears = [&op.q, op.k.as_ref()?, op.v.as_ref()?];
                let is_by_head = naming == Naming::Hf && self.names[1].hf_matrices() == HfMatrices::QkvByHead;
                match is_by_head {
                    true => (0..3).map(|at| by_head(linears[at], at, 3)).collect(),
                    false => {
                        let mut pieces = self.joined(&linears);
                        for Piece { rows, .. } in &mut pieces[..2] {
                            let first = rows[0];
                            let rotated = |row: &usize| first + self.rotated_row(row - first, head, naming);
                            *rows = rows.iter().map(rotated).collect();
                        }
                        pieces
                    }
                }
            }
            (Part::AttentionOut, _) => vec![self.whole(&op.out)],
            _ => return None,
        }))
    }

    /// Returns the row of an adapter's Q or K for a row of the program's: RoPE pairs neighbours in GGUF files of some
    /// architectures, and halves of a head in folders.
    fn rotated_row(&self, row: usize, head: usize, naming: Naming) -> usize {
        let dims = self.program.ropes.first().map_or(0, |rope| 2 * rope.frequencies.len());
        let (first, at) = (row / head * head, row % head);
        let is_reordered = self.names[0].is_reordered();
        if naming == self.own || !is_reordered && !self.are_neighbours_apart() || at >= dims {
            return row;
        }
        let half = dims / 2;
        // Pairs of the program are neighbours, and halves of the adapter's head, or the other way round.
        first
            + match (self.own == Naming::Gguf) == is_reordered {
                true => at / 2 + at % 2 * half,
                false if at < half => 2 * at,
                false => 2 * (at - half) + 1,
            }
    }

    /// Returns true if RoPE pairs halves of a head in the model's GGUF file, and neighbours in folders (GLM-4V).
    fn are_neighbours_apart(&self) -> bool {
        let rope = self.program.ropes.first();
        self.names[0].pairs_neighbours()
            && rope.is_some_and(|rope| match self.own {
                Naming::Gguf => rope.style == RopeStyle::HalfSplit,
                Naming::Hf => !rope.axes.is_empty(),
            })
    }

    fn latent(&self, op: &Latent, part: Part) -> Option<Result<Vec<Piece>, String>> {
        let linear = match (part, &op.query) {
            (Part::Q, LatentQuery::Direct(linear)) => linear,
            (Part::QDown, LatentQuery::Down { down, .. }) => down,
            (Part::QUp, LatentQuery::Down { up, .. }) => up,
            (Part::LatentDown, _) => &op.down,
            (Part::AttentionOut, _) => &op.out,
            (Part::LatentUp, _) => {
                return Some(Err("adapters of heads of latent attention are not supported".into()));
            }
            _ => return None,
        };
        Some(Ok(vec![self.whole(linear)]))
    }

    /// Returns the matrices of a delta rule. GGUF files of some architectures have the value heads of key head `k` at distances of
    /// the number of key heads, folders one after the other.
    fn delta(&self, op: &DeltaRule, part: Part, naming: Naming) -> Option<Vec<Piece>> {
        let DeltaShape { key_heads, value_heads, value_dim, .. } = op.shape;
        let shared = value_heads / key_heads;
        let is_other = self.alternating && naming != self.own;
        // Rows of values in the adapter, of which each head has `len`.
        let value = |row: usize, len: usize| {
            let (head, at) = (row / len, row % len);
            let other = match (is_other, self.own) {
                (false, _) => head,
                (true, Naming::Gguf) => head % key_heads * shared + head / key_heads,
                (true, Naming::Hf) => head % shared * key_heads + head / shared,
            };
            other * len + at
        };
        let values = |linear: &Linear, first: usize, len: usize| {
            let rows = 0..self.rows(linear);
            let of = |row: usize| if row < first { row } else { first + value(row - first, len) };
            vec![Piece::new(linear.matrix, rows.map(of).collect())]
        };
        Some(match part {
            Part::DeltaQkv => values(&op.qkv, 2 * op.shape.key_width(), value_dim),
            Part::DeltaGate => values(&op.gate, 0, value_dim),
            Part::DeltaAlpha => values(&op.alpha, 0, 1),
            Part::DeltaBeta => values(&op.beta, 0, 1),
            Part::DeltaOut => {
                let columns = (0..op.shape.value_width()).map(|column| value(column, value_dim));
                let columns = is_other.then(|| columns.collect());
                vec![Piece { columns, ..self.whole(&op.out) }]
            }
            _ => return None,
        })
    }

    /// Files have z, x, B, C and d in one matrix; a program has C, B and x, then z, then d.
    fn ssd(&self, op: &Ssd, part: Part) -> Option<Vec<Piece>> {
        let (width, keys, heads) = (op.shape.value_width(), op.shape.key_width(), op.shape.value_heads);
        let of = |linear: &Linear, ranges: &[Range<usize>]| {
            Piece::new(linear.matrix, ranges.iter().cloned().flatten().collect())
        };
        match part {
            Part::SsmIn => {
                let (b, c) = (2 * width..2 * width + keys, 2 * width + keys..2 * (width + keys));
                let d = 2 * (width + keys)..2 * (width + keys) + heads;
                Some(vec![
                    of(&op.cbv, &[c, b, width..2 * width]),
                    of(&op.gate, std::slice::from_ref(&(0..width))),
                    of(&op.dt, std::slice::from_ref(&d)),
                ])
            }
            Part::DeltaOut => Some(vec![self.whole(&op.out)]),
            _ => None,
        }
    }

    fn dense(&self, op: &Dense, part: Part) -> Option<Vec<Piece>> {
        Some(match part {
            Part::Gate => vec![self.whole(op.gate.as_ref()?)],
            // Some architectures give the fused matrix the name of the second one.
            Part::GateUp => self.joined(&[op.gate.as_ref()?, &op.up]),
            Part::Up => vec![self.whole(&op.up)],
            Part::Down => vec![self.whole(&op.down)],
            _ => return None,
        })
    }

    fn experts(&self, op: &Experts, part: Part) -> Option<Vec<Piece>> {
        let linear = match (part, &op.shared, &op.latent) {
            (Part::Router, ..) => &op.router.linear,
            (Part::ExpertsIn, _, Some(latent)) => &latent.down,
            (Part::ExpertsOut, _, Some(latent)) => &latent.up,
            (Part::SharedGate, Some(shared), _) => shared.gate.as_ref()?,
            (Part::SharedUp, Some(shared), _) => &shared.up,
            (Part::SharedDown, Some(shared), _) => &shared.down,
            (Part::SharedGateUp, Some(shared), _) => {
                return Some(self.joined(&[shared.gate.as_ref()?, &shared.up]));
            }
            (Part::OutputGate, Some(shared), _) => shared.output_gate.as_ref()?,
            _ => return op.beside.as_ref().and_then(|beside| self.dense(&beside.dense, part)),
        };
        Some(vec![self.whole(linear)])
    }
}
