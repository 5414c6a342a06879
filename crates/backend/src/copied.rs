//! Copies of the weights that a part of a program refers to.

use std::collections::HashMap;

use crate::{MatrixId, Role, TableId, VectorId, Visitor, Weights};

/// Weights that a program refers to, numbered in the order of its references.
pub struct Copied<'a> {
    from: &'a Weights,
    /// The copies, which share the bytes of matrices.
    pub some: Weights,
    /// New ids of matrices by their old ones.
    pub matrices: HashMap<MatrixId, MatrixId>,
    vectors: HashMap<VectorId, VectorId>,
    tables: HashMap<TableId, TableId>,
}

impl<'a> Copied<'a> {
    /// Creates a visitor that copies nothing yet.
    pub fn new(from: &'a Weights) -> Self {
        let (matrices, vectors, tables) = (HashMap::new(), HashMap::new(), HashMap::new());
        Self { from, some: Weights::default(), matrices, vectors, tables }
    }
}

impl Visitor for Copied<'_> {
    fn matrix(&mut self, id: &mut MatrixId, _: Role) {
        let Self { from, some, matrices, .. } = self;
        *id = *matrices.entry(*id).or_insert_with(|| {
            some.matrices.push(from.matrix(*id).clone());
            MatrixId(some.matrices.len() as u32 - 1)
        });
    }

    fn vector(&mut self, id: &mut VectorId) {
        let Self { from, some, vectors, .. } = self;
        *id = *vectors.entry(*id).or_insert_with(|| {
            some.vectors.push(from.vector(*id).to_vec());
            VectorId(some.vectors.len() as u32 - 1)
        });
    }

    fn table(&mut self, id: &mut TableId) {
        let Self { from, some, tables, .. } = self;
        *id = *tables.entry(*id).or_insert_with(|| {
            some.tables.push(from.table(*id).clone());
            TableId(some.tables.len() as u32 - 1)
        });
    }
}
