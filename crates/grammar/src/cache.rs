//! Cache of compiled grammars. An agent sends the same tools in every turn, and compiling them takes longer than a
//! step.

use std::collections::VecDeque;

use sha2::{Digest, Sha256};

use super::{Constraint, Grammar, GrammarError};

/// Maximum number of grammars.
const MAX_ENTRIES: usize = 32;

/// Maximum bytes of a grammar's source. The compiled form grows with it.
const MAX_SOURCE: usize = 64 << 10;

/// Maximum bytes of all sources.
const MAX_SOURCES: usize = 512 << 10;

/// A grammar's name in the cache.
#[derive(Clone, Copy)]
pub(super) struct Source {
    digest: [u8; 32],
    pub bytes: usize,
}

impl Source {
    pub fn of(grammar: &Grammar) -> Self {
        let (kind, text) = match grammar {
            // The order of keys is the order of properties, so it is a part of the text.
            Grammar::JsonSchema(schema) => (0u8, schema.to_string()),
            Grammar::JsonObject => (1, String::new()),
            Grammar::Regex(regex) => (2, regex.clone()),
            Grammar::Lark(lark) => (3, lark.clone()),
            Grammar::Gbnf(gbnf) => (4, gbnf.clone()),
        };
        let digest = Sha256::new().chain_update([kind]).chain_update(&text).finalize().into();
        Self { digest, bytes: text.len() }
    }
}

type Compiled = Result<Constraint, GrammarError>;

/// Compiled grammars, most recently used first.
#[derive(Default)]
pub(super) struct Cache {
    entries: VecDeque<(Source, Compiled)>,
}

impl Cache {
    /// Returns the cached result of compiling a grammar.
    pub fn get(&mut self, source: &Source) -> Option<Compiled> {
        let index = self.entries.iter().position(|(other, _)| other.digest == source.digest)?;
        let entry = self.entries.remove(index)?;
        let compiled = entry.1.clone();
        self.entries.push_front(entry);
        Some(compiled)
    }

    /// Adds a compiled grammar, unless it is large, and evicts the least recently used ones.
    pub fn insert(&mut self, source: Source, compiled: &Compiled) {
        self.entries.retain(|(other, _)| other.digest != source.digest);
        self.insert_if_new(source, compiled);
    }

    /// Adds a result, unless there is one.
    pub fn insert_if_new(&mut self, source: Source, compiled: &Compiled) {
        if source.bytes > MAX_SOURCE || self.get(&source).is_some() {
            return;
        }
        self.entries.push_front((source, compiled.clone()));
        let bytes = |entries: &VecDeque<(Source, Compiled)>| {
            entries.iter().map(|(source, _)| source.bytes).sum::<usize>()
        };
        while self.entries.len() > MAX_ENTRIES || bytes(&self.entries) > MAX_SOURCES {
            self.entries.pop_back();
        }
    }
}
