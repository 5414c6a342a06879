//! Progress of a prompt's prefill, on the terminal.

use paguro_engine::Handle;

use crate::{settings::Terminal, terminal::Spinner};

/// Shows the progress of a prompt with `tokens` tokens, from the next step until the value is dropped. The engine must
/// not have another request.
pub fn reading(terminal: &Terminal, handle: &Handle, tokens: usize) -> Option<Spinner> {
    let handle = handle.clone();
    let read = move || {
        let stats = handle.stats();
        stats.rows + stats.prefix_hit_tokens
    };
    let before = read();
    terminal.spinner_with(move || {
        let done = read().saturating_sub(before).min(tokens as u64);
        format!("reading the prompt {done}/{tokens}")
    })
}
