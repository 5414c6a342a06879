//! Grammars of answers.
//!
//! A [`Grammar`] is measured ([`bounds`]) and compiled to a [`Constraint`] on its own thread with a large stack,
//! because the compiler recurses. For every sampled token the constraint provides a mask of allowed tokens. Consuming a
//! token is fast, but computing the next mask may be slow, so [`MaskWorkers`] compute it while the device computes the
//! logits, and the sampler waits for it at the end of the step at the latest.
//!
//! The grammar applies to bytes, and each token represents the bytes that it writes, so the model chooses the tokens
//! for a text. Control tokens write nothing. They are in no mask, except those that a Lark grammar names (`<|call|>`),
//! and the model's stop tokens where the grammar may end.

mod bounds;
mod cache;
mod gbnf;
#[cfg(test)]
mod tests;

use std::{
    fmt,
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::Instant,
};

use llguidance::{
    JsonCompileOptions, ParserFactory, TokenParser,
    api::{StopReason, TopLevelGrammar},
    panic_utils::catch_unwind,
    toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie},
};
use paguro_backend::TokenMask;
use paguro_model::tokenizer::Tokenizer;
use serde_json::{Value, json};

use self::bounds::Measure;
use crate::{closed, formats};

/// Grammar of an answer from its first to its last character.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Grammar {
    /// JSON that fits this schema. Properties have the schema's order; an object that names some has no others unless
    /// the schema allows them ([`narrow_schema`]). Between tokens of JSON there may be one space, or a line break and
    /// up to [`MAX_INDENT`] spaces.
    JsonSchema(Value),
    /// Any JSON object, likewise.
    JsonObject,
    /// Text that this regular expression matches as a whole, in the syntax of the crate `regex`, without
    /// look-around.
    Regex(String),
    /// Text that the rule `start` of this grammar derives, in llguidance's dialect of Lark.
    Lark(String),
    /// Text that the rule `root` of this grammar derives, in llama.cpp's GBNF.
    Gbnf(String),
}

/// Blanks that JSON may be indented by. White space without a bound is where small models get lost.
pub const MAX_INDENT: usize = 40;

/// Error of a grammar.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// Tokens without text follow no grammar.
    #[error("grammars need text, and the engine has no tokenizer")]
    NoTokenizer,
    /// The model's vocabulary is out of the ordinary.
    #[error("grammars do not work with this model: {0}")]
    Vocabulary(String),
    /// The grammar is invalid, uses an unsupported feature, or allows no text.
    #[error("the {kind} cannot be followed: {problem}")]
    Invalid {
        /// Kind of constraint: `JSON schema`, `regular expression`, `Lark grammar`, `GBNF grammar`.
        kind: &'static str,
        /// The problem, with the name of the element.
        problem: String,
    },
}

impl Grammar {
    /// A grammar in GBNF or Lark: GBNF if its first rule has `::=`.
    pub fn of_text(text: String) -> Self {
        if gbnf::is_gbnf(&text) { Self::Gbnf(text) } else { Self::Lark(text) }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::JsonSchema(_) | Self::JsonObject => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Lark(_) => "Lark grammar",
            Self::Gbnf(_) => "GBNF grammar",
        }
    }

    /// Refuses a grammar that is too large for the compiler.
    fn measure(&self) -> Result<(), String> {
        let mut measure = Measure::default();
        match self {
            Self::JsonSchema(schema) => measure.schema(schema),
            Self::JsonObject => Ok(()),
            Self::Regex(regex) => measure.regex(regex),
            Self::Lark(lark) => measure.lark(lark),
            // Its form in Lark is measured.
            Self::Gbnf(_) => Ok(()),
        }
    }

    fn lower(&self, tokens: &TokTrie) -> Result<TopLevelGrammar, String> {
        match self {
            Self::JsonSchema(schema) => json_grammar(schema),
            Self::JsonObject => json_grammar(&json!({"type": "object"})),
            Self::Regex(regex) => Ok(TopLevelGrammar::from_regex(regex)),
            Self::Lark(lark) => match unsupported_attribute(lark) {
                Some(name) => Err(format!("the attribute `{name}` is not supported; leave it out")),
                None => Ok(TopLevelGrammar::from_lark(lark.clone())),
            },
            Self::Gbnf(gbnf) => {
                let lark = gbnf::to_lark(gbnf, tokens)?;
                Measure::default().lark(&lark)?;
                Ok(TopLevelGrammar::from_lark(lark))
            }
        }
    }
}

fn json_grammar(schema: &Value) -> Result<TopLevelGrammar, String> {
    // This key of the library could disable its checks.
    const OPTIONS: &str = "x-guidance";
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        Value::Bool(false) => return Err("`false` allows nothing".into()),
        Value::Object(keys) if keys.contains_key(OPTIONS) => {
            return Err(format!("the key `{OPTIONS}` is not supported; leave it out"));
        }
        Value::Object(_) => schema.clone(),
        _ => return Err("a schema is an object or a boolean".into()),
    };
    let options = JsonCompileOptions {
        whitespace_pattern: Some(format!(r"[ \t]|\r?\n[ \t]{{0,{MAX_INDENT}}}")),
        ..JsonCompileOptions::default()
    };
    narrow_schema(&mut schema);
    options.apply_to(&mut schema);
    Ok(TopLevelGrammar::from_json_schema(schema))
}

/// Narrows a JSON schema for generation, also inside of a grammar (`%json`): formats become patterns that every
/// validator accepts, and objects that name properties have no others unless the schema allows them. Every value of the
/// result fits the original schema.
pub fn narrow_schema(schema: &mut Value) {
    formats::replace(schema);
    closed::close(schema);
}

/// Returns an attribute of the grammar (`rule[stop="x"]: ...`) that would change the sampling or remove text, if there
/// is one.
fn unsupported_attribute(lark: &str) -> Option<&'static str> {
    let mut rest = lark;
    let mut word = "";
    while let Some(char) = rest.chars().next() {
        let end = match char {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '"' | '/' => literal(rest),
            _ if char.is_alphanumeric() || char == '_' => {
                rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())
            }
            _ => char.len_utf8(),
        };
        let (token, after) = rest.split_at(end);
        if token == "=" {
            let refused = ["temperature", "stop", "stop_capture"].into_iter().find(|&name| name == word);
            if refused.is_some() {
                return refused;
            }
        }
        if !token.trim().is_empty() {
            word = token;
        }
        rest = after;
    }
    None
}

/// Bytes of the string or regular expression that `text` begins with.
fn literal(text: &str) -> usize {
    let quote = text.as_bytes()[0];
    let mut escaped = false;
    let end = text.bytes().skip(1).position(|byte| {
        let ends = byte == quote && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |end| end + 2)
}

/// A model's tokens in the form that grammars need. Creating it takes long, so an engine creates one when it is first
/// needed.
pub(crate) struct Vocabulary {
    factory: ParserFactory,
    words: usize,
    cache: Mutex<cache::Cache>,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary").field("words", &self.words).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// Creates the vocabulary for logits with `vocab` entries. `stop_tokens` are allowed where a grammar may end.
    pub fn new(tokenizer: &Tokenizer, vocab: usize, stop_tokens: &[u32]) -> Result<Self, GrammarError> {
        let words: Vec<_> = (0..vocab as u32).map(|token| bytes_of(tokenizer, token, stop_tokens)).collect();
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
        // Limits the memory of a client's grammar: a state takes about a kilobyte.
        limits.max_lexer_states = MAX_LEXER_STATES;
        limits.verbose_errors = false;
        Ok(Self { factory, words: vocab.div_ceil(32), cache: Mutex::default() })
    }

    /// Compiles a grammar, unless it was compiled lately.
    pub fn compile(self: &Arc<Self>, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        let invalid = |problem| GrammarError::Invalid { kind: grammar.kind(), problem };
        grammar.measure().map_err(invalid)?;
        let source = cache::Source::of(grammar);
        if let Some(compiled) = self.lock_cache().get(&source) {
            return compiled;
        }
        let compiled = on_large_stack(|| self.compile_here(grammar))
            .unwrap_or_else(|problem| Err(invalid(format!("compiling it failed: {problem}"))));
        self.lock_cache().insert(source, &compiled);
        compiled
    }

    fn lock_cache(&self) -> MutexGuard<'_, cache::Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compiles a grammar on this thread, whose stack must be large.
    fn compile_here(self: &Arc<Self>, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        let invalid = |problem| GrammarError::Invalid { kind: grammar.kind(), problem };
        let lowered = grammar.lower(self.factory.tok_env().tok_trie()).map_err(invalid)?;
        let mut parser = self.factory.create_parser(lowered).map_err(|error| {
            let problem = message(&error);
            // The place is one of the translation.
            let translated = matches!(grammar, Grammar::Gbnf(_)) && problem.starts_with("at ");
            let problem =
                problem.split_once("): ").filter(|_| translated).map_or(&*problem, |(_, rest)| rest);
            invalid(problem.to_owned())
        })?;
        // A warning means that a part of the grammar was not applied.
        if let Some(warning) = parser.grammar_warnings().into_iter().next() {
            return Err(invalid(warning));
        }
        parser.start_without_prompt();
        // The vocabulary's cache holds constraints, so a strong reference would be a cycle.
        Ok(Constraint { parser, words: self.words, vocabulary: Arc::downgrade(self) })
    }
}

/// Stack of the thread that compiles grammars, in bytes. The deepest grammar that [`bounds`] allows uses a quarter of
/// it.
const COMPILER_STACK: usize = 64 << 20;

/// Runs `work` on a new thread with a large stack and waits for it.
///
/// # Errors
/// The thread could not be started, or has panicked.
fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().name("paguro-grammar".into()).stack_size(COMPILER_STACK);
        let thread = thread.spawn_scoped(scope, work).map_err(|error| error.to_string())?;
        thread.join().map_err(|_| "the compiler has panicked".to_owned())
    })
}

/// Maximum number of states of a grammar's lexer, which are created on demand.
const MAX_LEXER_STATES: usize = 50_000;

/// Longest token that finds a place in the trie, in bytes.
const MAX_TOKEN_BYTES: usize = 1000;

/// Returns the bytes that a token writes; empty if it is not allowed. Control tokens begin with the byte 0xFF, which
/// occurs in no text.
fn bytes_of(tokenizer: &Tokenizer, token: u32, stop_tokens: &[u32]) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(token);
    if bytes.len() > MAX_TOKEN_BYTES {
        Vec::new()
    } else if tokenizer.is_special(token) || stop_tokens.contains(&token) {
        [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
    } else if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
        Vec::new()
    } else {
        bytes.to_vec()
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

/// Returns the first line of a library's error, or of the regular expression's error in it, without internal details.
fn message(error: &impl fmt::Display) -> String {
    let text = error.to_string();
    let line = text.lines().find_map(|line| line.strip_prefix("error: ")).or(text.lines().next());
    match line.unwrap_or_default() {
        line if line.starts_with("oneOf constraints") => {
            "`oneOf` is not supported where its alternatives may overlap; `anyOf` is".to_owned()
        }
        line => line.to_owned(),
    }
}

/// A grammar that was understood, for the model of the engine whose [`Handle`](crate::Handle) made it. May be used
/// for any number of requests.
pub struct Constraint {
    parser: TokenParser,
    /// Number of 32-bit words of its masks.
    words: usize,
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
    pub(crate) fn is_of(&self, vocabulary: Option<&Arc<Vocabulary>>) -> bool {
        vocabulary.is_some_and(|vocabulary| std::ptr::eq(Arc::as_ptr(vocabulary), self.vocabulary.as_ptr()))
    }
}

/// Position of one branch in its grammar. It is kept during preemption, like the tokens.
#[derive(Debug)]
pub(crate) struct Guide {
    /// Locked by a worker while it computes a mask. No token is consumed before the mask is known, so there is no other
    /// user.
    parser: Arc<Mutex<Parser>>,
    next: Arc<Next>,
    words: usize,
}

struct Parser(TokenParser);

impl fmt::Debug for Parser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Parser").finish()
    }
}

/// The mask of the next token.
#[derive(Debug, Default)]
struct Next {
    mask: TokenMask,
    /// Reason for a missing mask; the mask above then allows all tokens.
    problem: OnceLock<String>,
}

impl Guide {
    /// At the beginning. Before the first token is drawn, its mask must be [computed](Guide::compute).
    pub fn new(constraint: Constraint) -> Self {
        let words = constraint.words;
        Self { parser: Arc::new(Mutex::new(Parser(constraint.parser))), next: Arc::default(), words }
    }

    /// Returns the same position for another branch.
    pub fn fork(&self) -> Self {
        let parser = Parser(self.lock().0.deep_clone());
        Self { parser: Arc::new(Mutex::new(parser)), next: self.next.clone(), words: self.words }
    }

    /// Starts computing the mask of the next token, restricted to `within` unless the result would be empty.
    pub fn compute(&mut self, within: Option<Arc<TokenMask>>, workers: &mut MaskWorkers) {
        self.next = Arc::default();
        workers.run(self, within);
    }

    /// Returns the mask of the next token, which may still be being computed.
    pub fn mask(&self) -> &TokenMask {
        &self.next.mask
    }

    /// Fails if the last mask could not be computed. A token that was sampled with it is invalid.
    ///
    /// # Errors
    /// The grammar allows no token here, or has become too large.
    pub fn check(&self) -> Result<(), String> {
        self.next.problem.get().map_or(Ok(()), |problem| Err(problem.clone()))
    }

    /// Goes on with a token that was drawn with the mask. Returns whether the grammar is at its end, so that nothing
    /// may follow.
    ///
    /// # Errors
    /// As for [`Guide::check`].
    pub fn advance(&mut self, token: u32) -> Result<bool, String> {
        let parser = &mut self.lock().0;
        let advanced = catch_unwind(AssertUnwindSafe(|| {
            parser.consume_token(token)?;
            parser.check_stop()
        }));
        advanced.map_err(|error| message(&error))
    }

    fn lock(&self) -> MutexGuard<'_, Parser> {
        self.parser.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A mask to compute.
#[derive(Debug)]
struct Job {
    parser: Arc<Mutex<Parser>>,
    within: Option<Arc<TokenMask>>,
    next: Arc<Next>,
    words: usize,
    times: Arc<MaskTimes>,
}

impl Job {
    fn run(self) {
        let begin = Instant::now();
        let mut parser = self.parser.lock().unwrap_or_else(PoisonError::into_inner);
        let mask = catch_unwind(AssertUnwindSafe(|| parser.0.compute_mask()));
        let reason = parser.0.stop_reason();
        // The thread that waits for the mask may need the parser next.
        drop(parser);
        // Counted before it can be seen, so that the numbers of a step hold its masks.
        let nanoseconds = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.times.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        self.times.masks.fetch_add(1, Ordering::Relaxed);
        match mask {
            Ok(mask) => {
                let mask = &mask.as_slice()[..self.words];
                let bits = self.within.as_ref().map(|within| and(mask, within.bits()));
                self.next
                    .mask
                    .fill(bits.filter(|bits| bits.iter().any(|&word| word != 0)).unwrap_or(mask.into()));
            }
            Err(_) if reason == StopReason::NoExtensionBias => {
                self.give_up(
                    "the vocabulary has no token for what must come next, or nothing is allowed there".into(),
                );
            }
            Err(error) => self.give_up(message(&error)),
        }
    }

    fn give_up(&self, problem: String) {
        // The first one counts.
        let _ = self.next.problem.set(problem);
        self.next.mask.fill(vec![u32::MAX; self.words]);
    }
}

fn and(a: &[u32], b: &[u32]) -> Box<[u32]> {
    a.iter().zip(b).map(|(a, b)| a & b).collect()
}

/// Completes the mask even if the worker panics, so that no thread waits for ever.
impl Drop for Job {
    fn drop(&mut self) {
        if self.next.mask.known().is_none() {
            self.give_up("the computation of its mask ended early".into());
        }
    }
}

/// Threads that compute masks, started with the first one.
#[derive(Debug, Default)]
pub(crate) struct MaskWorkers {
    jobs: Option<Sender<Job>>,
    times: Arc<MaskTimes>,
}

#[derive(Debug, Default)]
struct MaskTimes {
    masks: AtomicU64,
    nanoseconds: AtomicU64,
}

/// Maximum number of threads. Masks take little time compared with a step, so a few workers suffice for any batch.
const MAX_WORKERS: usize = 4;

impl MaskWorkers {
    /// Masks computed so far.
    pub fn masks(&self) -> u64 {
        self.times.masks.load(Ordering::Relaxed)
    }

    /// Time that it took, on all threads together.
    pub fn nanoseconds(&self) -> u64 {
        self.times.nanoseconds.load(Ordering::Relaxed)
    }

    fn run(&mut self, guide: &Guide, within: Option<Arc<TokenMask>>) {
        let job = Job {
            parser: guide.parser.clone(),
            within,
            next: guide.next.clone(),
            words: guide.words,
            times: self.times.clone(),
        };
        let jobs = self.jobs.get_or_insert_with(start_workers);
        // Without any thread there is no receiver.
        if let Err(error) = jobs.send(job) {
            error.0.run();
        }
    }
}

/// They end when the sender is dropped.
fn start_workers() -> Sender<Job> {
    let (jobs, receiver) = channel();
    let receiver = Arc::new(Mutex::new(receiver));
    let count = thread::available_parallelism().map_or(1, |cores| cores.get().min(MAX_WORKERS));
    for _ in 0..count {
        let receiver = receiver.clone();
        // If a thread cannot be started, the others compute all masks.
        let thread = thread::Builder::new().name("paguro-mask".into()).stack_size(COMPILER_STACK);
        let _ = thread.spawn(move || work(&receiver));
    }
    jobs
}

fn work(jobs: &Mutex<Receiver<Job>>) {
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match job {
            Ok(job) => job.run(),
            Err(_) => return,
        }
    }
}
