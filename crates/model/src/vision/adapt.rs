//! Changes of a text model's program for pictures: given rows, coordinates, spans. A text without pictures computes the same.

use paguro_backend::{AXES, Program};
use serde_json::{Map, Value};

use super::object;
use crate::{error::ModelError, gguf::Metadata};

/// A text model, and the tower whose rows it reads.
pub(crate) struct Text<'a> {
    source: Source<'a>,
    pub(super) program: &'a mut Program,
}

enum Source<'a> {
    Gguf(&'a Metadata),
    Hf(&'a Map<String, Value>),
}

/// Order of the axes of pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sections {
    /// One after the other (Qwen2.5-VL).
    Blocks,
    /// In turns (Qwen3-VL).
    Interleaved,
}

impl<'a> Text<'a> {
    pub(super) fn gguf(metadata: &'a Metadata, program: &'a mut Program, tower: &Program) -> Self {
        Self::new(Source::Gguf(metadata), program, tower)
    }

    pub(super) fn hf(config: &'a Map<String, Value>, program: &'a mut Program, tower: &Program) -> Self {
        Self::new(Source::Hf(config), program, tower)
    }

    /// Rows of pictures replace embeddings, and their other parts are added after layers.
    fn new(source: Source<'a>, program: &'a mut Program, tower: &Program) -> Self {
        program.given_parts = tower.merged().map_or(1, |merged| merged.taps.len());
        Self { source, program }
    }

    /// Rows of a picture see each other in groups with a window, or in all.
    pub(super) fn spans(&mut self, only_windows: bool) {
        for group in &mut self.program.kv.groups {
            group.spans = !only_windows || group.window.is_some();
        }
    }

    pub(super) fn is_hf(&self) -> bool {
        matches!(self.source, Source::Hf(_))
    }

    /// Returns a value of the text model's configuration in a folder.
    pub(super) fn text_config(&self, key: &str) -> Option<&'a Value> {
        match self.source {
            Source::Gguf(_) => None,
            Source::Hf(config) => object(config, "text_config").unwrap_or(config).get(key),
        }
    }

    /// Pairs of all rotations have axes.
    pub(super) fn sections(&mut self, order: Sections, default: [usize; AXES]) -> Result<(), ModelError> {
        let found = match self.source {
            Source::Gguf(metadata) => {
                let architecture = metadata.str("general.architecture").unwrap_or_default();
                let list = metadata.u32s(&format!("{architecture}.rope.dimension_sections"));
                list.map(|list| list.into_iter().map(|section| section as usize).collect::<Vec<_>>())
            }
            Source::Hf(_) => {
                let rope = ["rope_parameters", "rope_scaling"].iter().find_map(|key| self.text_config(key));
                let list = rope.and_then(|rope| rope.get("mrope_section")).and_then(Value::as_array);
                list.map(|list| {
                    list.iter().filter_map(Value::as_u64).map(|section| section as usize).collect()
                })
            }
        };
        let sections = match found.as_deref() {
            None => default,
            Some(&[t, h, w] | &[t, h, w, 0]) => [t, h, w],
            Some(other) => {
                return Err(ModelError::unsupported(format!("RoPE in the sections {other:?}")));
            }
        };
        for rope in &mut self.program.ropes {
            let pairs = rope.frequencies.len();
            let all = sections.iter().try_fold(0_usize, |sum, section| sum.checked_add(*section));
            if all != Some(pairs) {
                return Err(ModelError::Config(format!(
                    "RoPE has the sections {sections:?} for {pairs} pairs"
                )));
            }
            rope.axes = (0..pairs).map(|pair| order.axis(pair, sections)).collect();
        }
        Ok(())
    }
}

impl Sections {
    fn axis(self, pair: usize, [time, rows, columns]: [usize; AXES]) -> u8 {
        match self {
            Self::Blocks if pair < time => 0,
            Self::Blocks if pair < time + rows => 1,
            Self::Blocks => 2,
            Self::Interleaved if pair % 3 == 1 && pair < 3 * rows => 1,
            Self::Interleaved if pair % 3 == 2 && pair < 3 * columns => 2,
            Self::Interleaved => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_in_sections_or_in_turns() {
        let axes = |order: Sections, sections: [usize; 3]| -> String {
            let all = sections.iter().sum();
            (0..all).map(|pair| char::from(b"thw"[usize::from(order.axis(pair, sections))])).collect()
        };
        assert_eq!(axes(Sections::Blocks, [2, 3, 3]), "tthhhwww");
        assert_eq!(axes(Sections::Interleaved, [4, 3, 3]), "thwthwthwt");
        // transformers' `apply_interleaved_mrope` with the sections of Qwen3-VL.
        assert_eq!(axes(Sections::Interleaved, [24, 20, 20]), format!("{}tttt", "thw".repeat(20)));
    }
}
