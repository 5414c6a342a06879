//! Adapters (LoRA): low-rank changes of a model's matrices, which apply to some sequences of a step.

use std::collections::HashMap;

use crate::{Exit, Input, LoadError, Matrix, MatrixId, Mixer, Program, Role, WeightFormat, Weights};

/// An adapter of a runner. The engine chooses the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterId(pub u32);

/// An adapter that a sequence of a step uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterUse {
    /// Index into [`Step::sequences`](crate::Step::sequences).
    pub sequence: usize,
    /// The adapter.
    pub adapter: AdapterId,
    /// Multiplies the adapter's changes, beside [`LowRank::scale`].
    pub scale: f32,
}

/// Change of one matrix: `y = x·Wᵀ + scale * (x·Aᵀ)·Bᵀ + b`. It applies to linears only; rows of a table that is also the
/// head are looked up without it.
#[derive(Clone, Debug)]
pub struct LowRank {
    /// The matrix W, `[out, in]`.
    pub matrix: MatrixId,
    /// `[rank, in]`, in floats.
    pub a: Matrix,
    /// `[out, rank]`, in floats.
    pub b: Matrix,
    /// Multiplies the change.
    pub scale: f32,
}

impl LowRank {
    /// Returns the rank.
    pub fn rank(&self) -> usize {
        self.a.rows
    }

    /// Returns the bytes of both matrices.
    pub fn bytes(&self) -> u64 {
        (self.a.bytes.len() as u64).saturating_add(self.b.bytes.len() as u64)
    }
}

/// The matrices of a program that adapters can change: those of linears that compute whole rows. Experts, embeddings and
/// the heads of latent attention are none of them, nor are towers.
#[derive(Clone, Debug, Default)]
pub struct Adaptable {
    matrices: HashMap<MatrixId, (String, [usize; 2])>,
}

impl Adaptable {
    /// Returns those of a valid program.
    pub fn of(program: &Program, weights: &Weights) -> Self {
        let is_tower = matches!(program.input, Input::Patches(_)) || matches!(program.exit, Exit::Merged(_));
        if is_tower {
            return Self::default();
        }
        let heads = program.mixers().filter_map(|mixer| match mixer {
            Mixer::Latent(op) => Some([op.absorb.matrix, op.value.matrix]),
            Mixer::None
            | Mixer::Attention(_)
            | Mixer::Conv(_)
            | Mixer::DeltaRule(_)
            | Mixer::Ssd(_)
            | Mixer::Sum(_) => None,
        });
        let heads: Vec<MatrixId> = heads.flatten().collect();
        let is_linear = |&(id, role): &(MatrixId, Role)| match role {
            Role::Layer => !heads.contains(&id),
            Role::Head => true,
            Role::Lookup | Role::Experts { .. } => false,
        };
        let of_matrix = |(id, _): (MatrixId, Role)| {
            let Matrix { name, format: _, parts: _, rows, cols, bytes: _ } = weights.matrix(id);
            (id, (name.clone(), [*rows, *cols]))
        };
        Self { matrices: program.matrices().into_iter().filter(is_linear).map(of_matrix).collect() }
    }

    /// Returns the shape `[out, in]` of a matrix that adapters can change.
    pub fn shape(&self, id: MatrixId) -> Option<[usize; 2]> {
        self.matrices.get(&id).map(|matrix| matrix.1)
    }

    /// Checks that a pair fits its matrix. A runner may index without checks afterwards.
    ///
    /// # Errors
    /// [`LoadError::BadWeights`], with both tensors and their shapes.
    pub fn check(&self, pair: &LowRank) -> Result<(), LoadError> {
        let LowRank { matrix, a, b, scale } = pair;
        let bad = |tensor: &Matrix, problem: String| {
            Err(LoadError::BadWeights { tensor: tensor.name.clone(), problem })
        };
        let Some((name, [out, inputs])) = self.matrices.get(matrix) else {
            return bad(a, "adapters cannot change this matrix".to_owned());
        };
        if !scale.is_finite() {
            return bad(a, format!("its scale is {scale}"));
        }
        let fits =
            a.parts == 1 && b.parts == 1 && a.rows > 0 && [b.rows, b.cols, a.cols] == [*out, a.rows, *inputs];
        if !fits {
            return bad(
                a,
                format!(
                    "A [{}, {}] and B [{}, {}] do not fit `{name}` [{out}, {inputs}] of the model",
                    a.rows, a.cols, b.rows, b.cols
                ),
            );
        }
        for side in [a, b] {
            if !matches!(side.format, WeightFormat::F32 | WeightFormat::F16 | WeightFormat::BF16) {
                return bad(side, format!("it is in {}; adapters are in F32, F16 or BF16", side.format));
            }
            let size = side.rows.checked_mul(side.format.row_bytes(side.cols));
            if size != Some(side.bytes.len()) {
                return bad(side, format!("{} bytes for [{}, {}]", side.bytes.len(), side.rows, side.cols));
            }
        }
        Ok(())
    }
}
