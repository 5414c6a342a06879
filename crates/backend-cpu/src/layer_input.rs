//! Embeddings for layers, as phases of the thread pool.
//!
//! | phase | shared by | reads | writes |
//! |-|-|-|-|
//! | quantize, before the first layer | row | `x` | `rows` |
//! | project | 16 outputs | `rows` | `layer_embeds` |
//! | norm, add the table's row | row | `layer_embeds`, table | `layer_embeds` |
//! | add, quantize, at a layer's end | row | `branch_outputs`, `x` | `x`, `rows` |
//! | gate | 16 outputs | `rows` | `gate` |
//! | activate, quantize | row | `gate`, `layer_embeds` | `rows` |
//! | out | 16 outputs | `rows` | `branch_outputs` |
//!
//! The table is not in memory: each row is read from its source, by the thread that needs it.

use std::sync::{Mutex, PoisonError};

use paguro_backend::{LayerEmbeds, LayerInput, StepError};

use crate::{
    pass::{Kernel, Pass},
    thread_pool::Chunking,
    worker::{AllPending, Kinds, Pending, Worker, WorkerScratch},
};

/// Computes the embeddings for all layers.
///
/// # Errors
/// [`StepError::Device`] if the table cannot be read or has changed.
pub fn layer_embeds(pass: &mut Pass<'_>, op: &LayerEmbeds) -> Result<(), StepError> {
    let (model, buffers, rows) = (pass.model, pass.buffers, pass.rows());
    pass.add_norm(None, AllPending::NONE, Kinds::of(model, &[op.projection]));
    pass.multiply(rows, [(op.projection.matrix, &buffers.layer_embeds)]);
    let failed = Mutex::new(None);
    pass.phase(Kernel::LayerEmbed, rows, Chunking::Guided(1), |worker, range| {
        for row in range {
            if let Err(error) = worker.layer_embeds(op, row) {
                *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                return;
            }
        }
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => model.tables[op.table.0 as usize].check_source(),
    }
}

/// Applies an embedding for the layer. Returns the branch to add to the residual stream, `[rows, hidden]`.
pub fn layer_input(pass: &mut Pass<'_>, op: &LayerInput, pending: AllPending) -> Pending {
    let (model, buffers, rows) = (pass.model, pass.buffers, pass.rows());
    let (width, kinds) = (model.matrix(op.gate.matrix).rows(), Kinds::of(model, &[op.out]));
    pass.add_norm(None, pending, Kinds::of(model, &[op.gate]));
    pass.multiply(rows, [(op.gate.matrix, &buffers.gate)]);
    let stride = model.program.layer_embeds().map_or(0, |embeds| embeds.count * embeds.width);
    pass.phase(Kernel::LayerInput, rows, Chunking::Guided(4), |worker, range| {
        for row in range {
            // SAFETY: the phase is shared by row.
            let gate = unsafe { worker.write(&buffers.gate, row, width) };
            if let Some(bias) = op.gate.bias {
                model.rows.add(gate, model.vector(bias));
            }
            // SAFETY: no other worker writes it in this phase.
            let embeds = unsafe { worker.read(&buffers.layer_embeds, row, stride) };
            model.rows.activate_gate(gate, &embeds[op.index * width..][..width], op.activation);
            worker.set_input(&buffers.input, row, 0, gate, kinds, true);
        }
    });
    pass.multiply(rows, [(op.out.matrix, &buffers.branch_outputs[0])]);
    Pending { output: 0, bias: op.out.bias, post_norm: op.post_norm, scale: 1.0 }
}

impl Worker<'_> {
    fn layer_embeds(&mut self, op: &LayerEmbeds, row: usize) -> Result<(), StepError> {
        let model = self.model;
        // SAFETY: the phase is shared by row.
        let all = unsafe { self.write(&self.buffers.layer_embeds, row, op.count * op.width) };
        if let Some(bias) = op.projection.bias {
            model.rows.add(all, model.vector(bias));
        }
        let WorkerScratch { encoded, embeds, row: normed, .. } = &mut *self.scratch;
        let token = self.step.tokens[row] as usize;
        model.tables[op.table.0 as usize].decode_row(token, encoded, embeds)?;
        let normed = &mut normed[..op.width];
        for (projected, embed) in all.chunks_exact_mut(op.width).zip(embeds.chunks_exact(op.width)) {
            model.norm(Some(op.norm), projected, normed);
            projected.copy_from_slice(normed);
            model.rows.add_scaled(projected, embed, op.scale);
        }
        Ok(())
    }
}
