//! Whether weights fit a program: [`Program::check`], which every backend calls first in `load`.

use crate::{
    KvSlot, Linear, LoadError, MatrixId, Norm, NormLogits, NormQkvRopeStore, Op, Program, VectorId, Weights,
};

impl Program {
    /// Checks that every id exists, that every matrix and vector has the shape its operation needs and as many bytes
    /// as its shape says, and that the operations come in an order that makes sense: an embedding, layers, a head.
    /// A backend that has called this may index without fear.
    ///
    /// # Errors
    /// [`LoadError::BadProgram`], or [`LoadError::BadWeights`] with the tensor and what is wrong with it.
    pub fn check(&self, weights: &Weights) -> Result<(), LoadError> {
        let Self { hidden, vocab, heads, ffn, .. } = *self;
        let (kv_heads, head_dim) = (self.kv.kv_heads, self.kv.head_dim);
        let shape = [hidden, vocab, heads, ffn, kv_heads, head_dim, self.kv.slots, self.kv.groups.len()];
        require(!shape.contains(&0), || format!("a dimension is zero in {self:?}"))?;
        require(heads.is_multiple_of(kv_heads), || {
            format!("{heads} query heads cannot share {kv_heads} K/V heads evenly")
        })?;
        require(!self.kv.groups.iter().any(|group| group.window == Some(0)), || {
            "a sliding window of no tokens".to_owned()
        })?;
        for (index, rope) in self.ropes.iter().enumerate() {
            let pairs = rope.frequencies.len();
            require(2 * pairs <= head_dim, || {
                format!("rope {index} rotates {} of {head_dim} elements", 2 * pairs)
            })?;
        }
        for matrix in &weights.matrices {
            let (block, bytes) = (matrix.format.block_len(), matrix.bytes.len());
            require_of(&matrix.name, matrix.cols.is_multiple_of(block), || {
                format!("rows of {} elements are not whole {} blocks of {block}", matrix.cols, matrix.format)
            })?;
            let blocks = matrix.rows.checked_mul(matrix.cols / block);
            let expected = blocks.and_then(|blocks| blocks.checked_mul(matrix.format.block_bytes()));
            require_of(&matrix.name, expected == Some(bytes), || {
                format!("{bytes} bytes for {} x {} elements of {}", matrix.rows, matrix.cols, matrix.format)
            })?;
        }

        let weights = Checker { weights };
        for (index, op) in self.ops.iter().enumerate() {
            let (first, last) = (index == 0, index + 1 == self.ops.len());
            let in_order = first == matches!(op, Op::Embed(_)) && last == matches!(op, Op::NormLogits(_));
            require(in_order, || {
                format!("operation {index} is {}, but the embedding comes first and the head last", op.name())
            })?;
            match op {
                Op::Embed(embed) => weights.matrix(embed.table, vocab, hidden)?,
                Op::NormQkvRopeStore(op) => {
                    let NormQkvRopeStore { norm, q, k, v, q_norm, k_norm, rope, kv } = op;
                    weights.norm(norm, hidden)?;
                    weights.linear(q, heads * head_dim, hidden)?;
                    weights.linear(k, kv_heads * head_dim, hidden)?;
                    weights.linear(v, kv_heads * head_dim, hidden)?;
                    for norm in [q_norm, k_norm].into_iter().flatten() {
                        weights.norm(norm, head_dim)?;
                    }
                    require(*rope < self.ropes.len(), || format!("there is no rope {rope}"))?;
                    self.check_slot(kv)?;
                }
                Op::Attend(attend) => self.check_slot(&attend.kv)?,
                Op::ProjectAdd(op) => {
                    weights.linear(&op.project, hidden, heads * head_dim)?;
                    op.post_norm.iter().try_for_each(|norm| weights.norm(norm, hidden))?;
                }
                Op::NormGateUp(op) => {
                    weights.norm(&op.norm, hidden)?;
                    weights.linear(&op.gate, ffn, hidden)?;
                    weights.linear(&op.up, ffn, hidden)?;
                }
                Op::DownAdd(op) => {
                    weights.linear(&op.down, hidden, ffn)?;
                    op.post_norm.iter().try_for_each(|norm| weights.norm(norm, hidden))?;
                }
                Op::NormLogits(NormLogits { norm, head, soft_cap: _ }) => {
                    weights.norm(norm, hidden)?;
                    weights.linear(head, vocab, hidden)?;
                }
            }
        }
        require(!self.ops.is_empty(), || "there are no operations".to_owned())
    }

    fn check_slot(&self, slot: &KvSlot) -> Result<(), LoadError> {
        let exists = slot.group < self.kv.groups.len() && slot.slot < self.kv.slots;
        require(exists, || format!("there is no place {slot:?} for K and V"))
    }
}

struct Checker<'a> {
    weights: &'a Weights,
}

impl Checker<'_> {
    fn matrix(&self, id: MatrixId, rows: usize, cols: usize) -> Result<(), LoadError> {
        let matrix = self.weights.matrices.get(id.0 as usize);
        let matrix = matrix.ok_or_else(|| LoadError::BadProgram(format!("there is no matrix {}", id.0)))?;
        require_of(&matrix.name, (matrix.rows, matrix.cols) == (rows, cols), || {
            format!("it is {} x {}, the model needs {rows} x {cols}", matrix.rows, matrix.cols)
        })
    }

    fn vector(&self, id: VectorId, width: usize) -> Result<(), LoadError> {
        let vector = self.weights.vectors.get(id.0 as usize);
        let vector = vector.ok_or_else(|| LoadError::BadProgram(format!("there is no vector {}", id.0)))?;
        require_of(&format!("vector {}", id.0), vector.len() == width, || {
            format!("it has {} elements, the model needs {width}", vector.len())
        })
    }

    fn norm(&self, norm: &Norm, width: usize) -> Result<(), LoadError> {
        self.vector(norm.weight, width)
    }

    fn linear(&self, linear: &Linear, rows: usize, cols: usize) -> Result<(), LoadError> {
        self.matrix(linear.matrix, rows, cols)?;
        linear.bias.iter().try_for_each(|&bias| self.vector(bias, rows))
    }
}

/// A rule about the program alone.
fn require(holds: bool, problem: impl FnOnce() -> String) -> Result<(), LoadError> {
    if holds { Ok(()) } else { Err(LoadError::BadProgram(problem())) }
}

/// A rule about one tensor.
fn require_of(tensor: &str, holds: bool, problem: impl FnOnce() -> String) -> Result<(), LoadError> {
    if holds { Ok(()) } else { Err(LoadError::BadWeights { tensor: tensor.to_owned(), problem: problem() }) }
}
