//! The digest of a program.

use super::{MatrixId, Program, Role, TableId, VectorId, Visitor};

impl Program {
    /// Returns a hash of all fields. Two programs have one digest only if they are equal. It does not depend on the version
    /// of this crate: it changes with the program, or with the order of the [walk](Program::visit).
    pub fn digest(&self) -> [u8; 32] {
        let mut digest = Digest::default();
        self.clone().visit(&mut digest);
        digest.finish()
    }
}

/// A visitor that hashes all fields.
#[derive(Default)]
pub struct Digest(blake3::Hasher);

impl Digest {
    /// Returns the hash.
    pub fn finish(self) -> [u8; 32] {
        self.0.finalize().into()
    }

    /// Returns the first eight bytes of the hash, for names that people read.
    pub fn short(self) -> u64 {
        self.finish()[..8].iter().fold(0, |hash, byte| hash << 8 | u64::from(*byte))
    }

    /// Adds bytes of known length.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }
}

impl Visitor for Digest {
    fn matrix(&mut self, id: &mut MatrixId, _: Role) {
        self.number(id.0.into());
    }

    fn vector(&mut self, id: &mut VectorId) {
        self.number(id.0.into());
    }

    fn table(&mut self, id: &mut TableId) {
        self.number(id.0.into());
    }

    fn number(&mut self, bits: u64) {
        self.bytes(&bits.to_le_bytes());
    }
}
