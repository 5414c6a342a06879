//! Outputs of rows: logits, embeddings, tokens.

use paguro_backend::LoadError;

use crate::ops::{NormLogits, Program};

use super::{
    Acts, Before, Grid, Io, LOGIT_ROWS, Launch, Lowering, Model, Place, Store,
    Value::U,
    When,
    matmuls::{Inputs, NORM},
    wgsl,
};
use crate::{matrix::Order, sampler};

impl Lowering<'_> {
    /// Adds the last norm, whose input `before` describes, and the outputs.
    pub(super) fn finish(
        mut self,
        body: Vec<Launch>,
        before: Before,
        op: &NormLogits,
    ) -> Result<Model, LoadError> {
        let Program { hidden, vocab, .. } = *self.program;
        let rows = self.limits.max_outputs.clamp(1, LOGIT_ROWS);
        let outputs = self.limits.max_outputs.max(1);
        let logits = self.device.buffer(rows * vocab, "logits")?;
        let normed = self.device.buffer(rows * hidden, "embeddings")?;
        let samples = self.device.buffer(outputs * 8, "samples")?;
        let edits = self.device.buffer(4 * sampler::room(rows, vocab), "bias and penalties")?;
        let masks = self.device.buffer(rows.max(outputs.min(256)) * vocab.div_ceil(32), "masks")?;
        let tokens = self.tokens.clone();
        let (mut constants, norm_buffers) = self.norm_constants(Some(op.norm), hidden, false)?;
        constants.push(("GATHER", U(1)));
        constants.extend(self.emit_for(&[&op.head], hidden));
        // A slice may have few of many rows, whose number decides.
        constants.extend(self.halves(0));
        let x = self.x.clone();
        let step = self.step.clone();
        let made: Vec<_> = self.written_acts(Acts::Normed).collect();
        let factors = self.factors.clone();
        let mut buffers = vec![("x", &x), ("factors", &factors), ("step", &step), ("normed", &normed)];
        buffers.extend(norm_buffers.iter().map(|(name, buffer)| (*name, buffer)));
        buffers.extend(made.iter().map(|(name, buffer)| (*name, buffer)));
        let head_norm = self.launch("norm_outputs", NORM, constants, &buffers, Grid::Rows, 0)?;
        let mut head = Vec::new();
        let place = Place { buffer: logits.clone(), stride: vocab, first: 0 };
        let store = Store { scale: op.scale, cap: op.soft_cap, ..Store::WRITE };
        let inputs =
            Inputs { linears: &[&op.head], order: Order::Joined, acts: Acts::Normed, in_order: false };
        self.matmul(&inputs, &place, store, When::Always, &mut head)?;
        // After the others, as it shares a counter with them.
        let one_row_head = match before {
            Before::Emitted(_) => self.one_row_head(op, &place, &store)?,
            Before::Added | Before::Pending(..) => vec![],
        };
        let chunks = vocab.div_ceil(2048) as u32;
        let best = self.device.buffer(outputs * chunks as usize * 2, "best tokens")?;
        let constants = vec![("VOCAB", U(vocab as u32)), ("CHUNKS", U(chunks))];
        let merge = vec![("CHUNKS", U(chunks)), ("MERGE", U(1))];
        let (whole, low_bits) = sampler::whole(vocab);
        let draw =
            vec![("VOCAB", U(vocab as u32)), ("WHOLE", U(whole)), ("LOW_BITS", U(low_bits)), ("LOADS", U(8))];
        let buffers = [
            ("samples", &samples),
            ("best", &best),
            ("logits", &logits),
            ("masks", &masks),
            ("tokens", &tokens),
            ("edits", &edits),
        ];
        let adjust = self.launch("adjust", wgsl!("args", "adjust"), vec![], &buffers, Grid::Threads, 0)?;
        let files = wgsl!("args", "argmax");
        let argmax = [
            self.launch("argmax", files, constants, &buffers, Grid::Each(chunks), 0)?,
            self.launch("argmax_merge", files, merge, &buffers, Grid::Rows, 0)?,
        ];
        let sample = self.launch("sample", wgsl!("args", "sample"), draw, &buffers, Grid::Rows, 0)?;
        Ok(Model {
            body,
            head_norm,
            head,
            one_row_head,
            adjust,
            argmax,
            sample,
            states: self.states,
            pages: self.pages,
            io: Io { step: self.step, logits, normed, samples, masks, tokens, edits },
            tilings: self.tilings,
            table_rows: self.embeds.map(|embeds| embeds.table_rows),
            counters: self.counters,
            handoff_partials: self.handoff_partials,
        })
    }
}
