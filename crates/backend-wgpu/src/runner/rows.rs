//! Rows of outputs on their way to the host: copies at the end of a step, and the answers that are made of them.

use std::{num::NonZero, thread};

use paguro_backend::OutputValue;

use crate::emit::{Head, Model};

/// Bytes of rows that a thread copies at least: about a millisecond.
const BYTES_OF_THREAD: usize = 4 << 20;
/// Most threads that copy rows.
const MOST_THREADS: usize = 8;

/// Buffers with rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Logits of a slice of output rows.
    Logits,
    /// Normed rows of a slice.
    Normed,
    /// The residual stream, or merged rows.
    Residual,
    /// Means of texts.
    Means,
}

/// A row for the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostRow {
    /// Index of the output in its step or pass.
    pub output: usize,
    /// Index of the output in the whole step.
    pub place: usize,
    /// First byte in the host's buffer.
    pub at: usize,
    /// Bytes of the row.
    pub bytes: usize,
    /// Its buffer.
    pub source: Source,
}

/// Rows that a step copies for the host.
#[derive(Clone, Debug, Default)]
pub struct Readback {
    /// Buffer, first byte there, first byte in the host's buffer, bytes.
    copies: Vec<(Source, usize, usize, usize)>,
    /// Rows of outputs.
    pub rows: Vec<HostRow>,
    /// Bytes in the host's buffer.
    pub bytes: usize,
    /// True if they are behind the tokens of the step, in one buffer; otherwise they have their own.
    pub is_behind_tokens: bool,
}

impl Readback {
    /// No rows yet, of this many bytes in all.
    pub fn of(bytes: usize) -> Self {
        Self { bytes, ..Self::default() }
    }

    /// Adds a copy of consecutive bytes to this place of the host's buffer.
    pub fn copy(&mut self, from: Source, first: usize, to: usize, bytes: usize) {
        self.copies.push((from, first, to, bytes));
    }

    /// Returns the host's buffer of the rows, which is that `behind` the tokens or one `apart`, and their first byte there.
    pub fn host<'a>(
        &self,
        behind: (&'a wgpu::Buffer, u64),
        apart: &'a wgpu::Buffer,
    ) -> (&'a wgpu::Buffer, u64) {
        if self.is_behind_tokens { behind } else { (apart, 0) }
    }

    /// True if all rows are answers as they are.
    pub fn is_plain(&self) -> bool {
        self.rows.iter().all(|row| row.source != Source::Logits)
    }

    /// Adds the copies to the commands of a step, to places of a buffer from byte `start` on.
    pub fn encode(
        &self,
        model: &Model,
        commands: &mut wgpu::CommandEncoder,
        (host, start): (&wgpu::Buffer, u64),
    ) {
        for &(source, from, to, bytes) in &self.copies {
            let of_head = |of: fn(&Head) -> Option<&wgpu::Buffer>| model.head.as_ref().and_then(of);
            let buffer = match source {
                Source::Logits => of_head(|head| Some(&head.io.logits)),
                Source::Normed => of_head(|head| Some(&head.io.normed)),
                Source::Means => of_head(|head| head.io.means.as_ref()),
                Source::Residual => Some(&model.io.residual),
            };
            if let Some(buffer) = buffer {
                commands.copy_buffer_to_buffer(buffer, from as u64, host, start + to as u64, bytes as u64);
            }
        }
    }

    /// Enters the rows as answers. Many bytes are copied by several threads, because new memory is slow to write first.
    pub fn answer(&self, words: &[u8], answers: &mut [Option<OutputValue>]) {
        let mut values: Vec<Vec<f32>> =
            self.rows.iter().map(|row| Vec::with_capacity(row.bytes / 4)).collect();
        let fill = |values: &mut [Vec<f32>], rows: &[HostRow]| {
            for (value, row) in values.iter_mut().zip(rows) {
                value.extend(floats(&words[row.at..][..row.bytes]));
            }
        };
        let bytes: usize = self.rows.iter().map(|row| row.bytes).sum();
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        let threads = (bytes / BYTES_OF_THREAD).min(processors).clamp(1, MOST_THREADS);
        let each = self.rows.len().div_ceil(threads).max(1);
        thread::scope(|scope| {
            let mut parts = values.chunks_mut(each).zip(self.rows.chunks(each));
            let own = parts.next();
            parts.for_each(|(values, rows)| drop(scope.spawn(move || fill(values, rows))));
            if let Some((values, rows)) = own {
                fill(values, rows);
            }
        });
        for (value, row) in values.into_iter().zip(&self.rows) {
            answers[row.place] = Some(match row.source {
                Source::Residual => OutputValue::Residual(value),
                Source::Logits => OutputValue::Logits(value),
                Source::Normed | Source::Means => OutputValue::Embedding(value),
            });
        }
    }
}

/// Returns numbers as the device has them in memory.
pub fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_any_number_are_in_their_places() {
        let words: Vec<u8> = (0..1 << 22).flat_map(|i| (i as f32).to_le_bytes()).collect();
        for count in [1, 3, 64] {
            let bytes = words.len() / count / 4 * 4;
            let row = |i: usize| HostRow {
                output: i,
                place: count - 1 - i,
                at: i * bytes,
                bytes,
                source: if i.is_multiple_of(2) { Source::Residual } else { Source::Means },
            };
            let readback = Readback { rows: (0..count).map(row).collect(), ..Readback::default() };
            let mut answers = vec![None; count];
            readback.answer(&words, &mut answers);
            for (place, answer) in answers.into_iter().enumerate() {
                let i = count - 1 - place;
                let expected: Vec<f32> = floats(&words[i * bytes..][..bytes]).collect();
                let expected = match i % 2 {
                    0 => OutputValue::Residual(expected),
                    _ => OutputValue::Embedding(expected),
                };
                assert!(answer == Some(expected), "{i} of {count}");
            }
        }
    }
}
