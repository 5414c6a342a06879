//! Compilation of grammars for the tokens of one model.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Instant,
};

use llguidance::{
    ParserFactory, TokenParser,
    api::TopLevelGrammar,
    toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie},
};

use super::{
    COMPILE_TIME, Grammar, GrammarError, cache,
    compiler::{Compilers, NoResult},
    message,
};

/// A model's tokens in the form that grammars need. Creating it takes long, so an engine creates one when it is first
/// needed.
pub struct Vocabulary {
    factory: ParserFactory,
    words: usize,
    cache: Mutex<cache::Cache>,
    pub(super) compilers: Compilers,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary").field("words", &self.words).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// Creates the vocabulary of a model's tokens, in order. `stop_tokens` are allowed where a grammar may end.
    ///
    /// # Errors
    /// [`GrammarError::Vocabulary`]: the tokens have too many beginnings.
    pub fn new<'t>(
        tokens: impl IntoIterator<Item = TokenText<'t>>,
        stop_tokens: &[u32],
    ) -> Result<Self, GrammarError> {
        let words: Vec<_> =
            (0..).zip(tokens).map(|(id, token)| token.word(stop_tokens.contains(&id))).collect();
        let vocab = words.len();
        check_trie(&words).map_err(GrammarError::Vocabulary)?;
        let info = TokRxInfo::new(vocab as u32, llguidance::toktrie::INVALID_TOKEN);
        let mut trie = TokTrie::from(&info, &words);
        let ends: Vec<u32> = stop_tokens.iter().copied().filter(|&token| (token as usize) < vocab).collect();
        if !ends.is_empty() {
            trie = trie.with_eos_tokens(&ends);
        }
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&environment)
            .map_err(|error| GrammarError::Vocabulary(message(&error)))?;
        factory.quiet();
        let limits = factory.limits_mut();
        // Limits the memory of a client's grammar: a state needs about a kilobyte.
        limits.max_lexer_states = MAX_LEXER_STATES;
        limits.max_items_in_row = MAX_ROW;
        limits.max_grammar_size = MAX_SYMBOLS;
        limits.verbose_errors = false;
        Ok(Self {
            factory,
            words: vocab.div_ceil(32),
            cache: Mutex::default(),
            compilers: Compilers::default(),
        })
    }

    /// Compiles a grammar on another thread, or returns the cached result. Blocks for at most [`COMPILE_TIME`].
    ///
    /// # Errors
    /// [`GrammarError`]: the grammar is invalid, not supported, or too slow to compile.
    pub fn compile(self: &Arc<Self>, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        self.compile_while(grammar, Instant::now() + COMPILE_TIME, &|| true)
    }

    /// Compiles a grammar like [`Self::compile`], but blocks until `until` at the latest, and only while `is_wanted`
    /// returns true. An abandoned compilation continues in the background.
    ///
    /// # Errors
    /// As those of [`Self::compile`]; [`GrammarError::NotWanted`] if `is_wanted` has returned false.
    pub fn compile_while(
        self: &Arc<Self>,
        grammar: &Grammar,
        until: Instant,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Constraint, GrammarError> {
        let kind = grammar.kind();
        grammar.check_depth().map_err(|problem| GrammarError::Invalid { kind, problem })?;
        let source = cache::Source::of(grammar);
        if let Some(compiled) = self.lock_cache().get(&source) {
            return compiled;
        }
        let (vocabulary, grammar) = (self.clone(), grammar.clone());
        let work = move || {
            let compiled = vocabulary.compile_here(&grammar);
            // A thread that was abandoned replaces the error.
            vocabulary.lock_cache().insert(source, &compiled);
            compiled
        };
        self.compilers.run(source.bytes, until, is_wanted, work).unwrap_or_else(|reason| {
            Err(match reason {
                NoResult::NoTime => GrammarError::TooSlow { kind },
                NoResult::TooSlow => {
                    let error = GrammarError::TooSlow { kind };
                    self.lock_cache().insert_if_new(source, &Err(error.clone()));
                    error
                }
                NoResult::Busy => GrammarError::Busy { kind },
                NoResult::NotWanted => GrammarError::NotWanted,
                NoResult::Failed(problem) => {
                    GrammarError::Invalid { kind, problem: format!("compiling it failed: {problem}") }
                }
            })
        })
    }

    /// Compiles a grammar that was measured.
    pub(super) fn parser(&self, grammar: TopLevelGrammar) -> Result<TokenParser, String> {
        self.factory.create_parser(grammar).map_err(|error| message(&error))
    }

    fn lock_cache(&self) -> MutexGuard<'_, cache::Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compiles a grammar on this thread, whose stack must be large.
    fn compile_here(self: &Arc<Self>, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        let invalid = |problem| GrammarError::Invalid { kind: grammar.kind(), problem };
        let lowered = grammar.lower(self.factory.tok_env().tok_trie()).map_err(invalid)?;
        let mut parser = self.parser(lowered).map_err(|problem| {
            // The place is one of the translation.
            let translated = !matches!(grammar, Grammar::Lark(_)) && problem.starts_with("at ");
            let problem =
                problem.split_once("): ").filter(|_| translated).map_or(&*problem, |(_, rest)| rest);
            invalid(problem.to_owned())
        })?;
        // A warning means that a part of the grammar was not applied.
        if let Some(warning) = parser.grammar_warnings().into_iter().next() {
            return Err(invalid(warning));
        }
        let first = parser.parser_stats().all_items;
        if first > MAX_ROW {
            let problem = format!(
                "it begins with {first} alternatives and optional parts; at most {MAX_ROW} are followed at once"
            );
            return Err(invalid(problem));
        }
        parser.start_without_prompt();
        // The vocabulary's cache holds constraints, so a strong reference would be a cycle.
        Ok(Constraint { parser, words: self.words, vocabulary: Arc::downgrade(self) })
    }
}

/// Most items of a row: alternatives and optional parts that may come next. Computing a row takes the square of them.
const MAX_ROW: usize = 2_000;

/// Most symbols of a grammar while it is built. Afterwards there are at most 65,000.
const MAX_SYMBOLS: usize = 150_000;

/// Maximum number of states of a grammar's lexer, which are created on demand.
const MAX_LEXER_STATES: usize = 50_000;

/// Longest token of the trie, in bytes.
const MAX_TOKEN_BYTES: usize = 1000;

/// A token of a model, as its text.
#[derive(Clone, Copy, Debug)]
pub struct TokenText<'t> {
    /// The bytes that it writes; of a control token, its name.
    pub bytes: &'t [u8],
    /// True for a control token, which writes nothing.
    pub is_control: bool,
}

impl TokenText<'_> {
    /// Returns the word of the trie; empty if the token is not allowed. Control tokens begin with the byte 0xFF, which
    /// occurs in no text.
    fn word(&self, is_stop: bool) -> Vec<u8> {
        let Self { bytes, is_control } = *self;
        if bytes.len() > MAX_TOKEN_BYTES {
            Vec::new()
        } else if is_control || is_stop {
            [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
        } else if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
            Vec::new()
        } else {
            bytes.to_vec()
        }
    }
}

/// Refuses a vocabulary that exceeds the trie, which counts its nodes in 22 bits.
fn check_trie(words: &[Vec<u8>]) -> Result<(), String> {
    const MOST: usize = (1 << 22) - 1;
    let mut sorted: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
    sorted.sort_unstable();
    let mut nodes = 1;
    let mut last: &[u8] = &[];
    for word in sorted {
        let shared = last.iter().zip(word).take_while(|(a, b)| a == b).count();
        // Two tokens that write the same have a node each.
        nodes += (word.len() - shared).max(1);
        last = word;
    }
    if nodes <= MOST { Ok(()) } else { Err(format!("its tokens have more than {MOST} beginnings")) }
}

/// A compiled grammar, for the model whose [`Vocabulary`] compiled it. May be used for any number of answers.
pub struct Constraint {
    pub(super) parser: TokenParser,
    /// Number of 32-bit words of its masks.
    pub(super) words: usize,
    vocabulary: Weak<Vocabulary>,
}

impl Clone for Constraint {
    fn clone(&self) -> Self {
        // A shallow copy would share a lock with this one.
        Self { parser: self.parser.deep_clone(), words: self.words, vocabulary: self.vocabulary.clone() }
    }
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").finish_non_exhaustive()
    }
}

impl Constraint {
    /// Returns true if it was compiled for this vocabulary.
    pub fn is_of(&self, vocabulary: Option<&Arc<Vocabulary>>) -> bool {
        vocabulary.is_some_and(|vocabulary| std::ptr::eq(Arc::as_ptr(vocabulary), self.vocabulary.as_ptr()))
    }
}
