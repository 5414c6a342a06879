//! Embeddings that are joined with given rows, as phases of the thread pool before the first layer.
//!
//! | phase | shared by | reads | writes |
//! |-|-|-|-|
//! | embed, norm, quantize | row | given rows | `x`, `rows` |
//! | project | 16 outputs | `rows` | `x` |
//! | bias, if there is one | row | `x` | `x` |
//!
//! The first phase writes rows of the width of embeddings to `x`, the others rows of the residual stream.

use paguro_backend::{Embed, Joined};

use crate::{
    pass::{Kernel, Pass},
    thread_pool::Chunking,
    worker::Kinds,
};

/// Writes the residual stream before the first layer. Returns false without writing if the embedding is joined with nothing.
pub fn joined(pass: &mut Pass<'_>, embed: &Embed) -> bool {
    let Some(Joined { width, token_norm, given_norm, linear }) = embed.joined else { return false };
    let (model, buffers, rows, hidden) = (pass.model, pass.buffers, pass.rows(), pass.model.program.hidden);
    let kinds = Kinds::of(model, &[linear]);
    pass.phase(Kernel::Embed, rows, Chunking::Guided(1), |worker, range| {
        for row in range {
            // SAFETY: the phase is shared by row.
            let x = unsafe { worker.write(&buffers.x, row, width) };
            worker.embed(embed, row, x);
            let mut both = std::mem::take(&mut worker.scratch.row);
            let (token, given) = both[..2 * width].split_at_mut(width);
            model.norm(token_norm, x, token);
            let row_of_step = worker.given(row, 0).expect("a valid step gives all rows");
            model.norm(given_norm, row_of_step, given);
            worker.set_input(&buffers.input, row, 0, &both[..2 * width], kinds, true);
            worker.scratch.row = both;
        }
    });
    pass.multiply(rows, [(linear.matrix, &buffers.x)]);
    pass.add_bias(linear, &buffers.x, hidden);
    true
}
