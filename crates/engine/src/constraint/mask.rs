//! Masks of allowed tokens, computed by threads while the device computes logits.

use std::{
    fmt,
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::Instant,
};

use llguidance::{TokenParser, api::StopReason, panic_utils::catch_unwind};
use paguro_backend::TokenMask;

use super::{COMPILER_STACK, Constraint, message};

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
    /// Returns the position before the first token, whose mask must be [computed](Guide::compute) before it is sampled.
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

    /// Consumes a token that was sampled with the mask. Returns true at the end of the grammar, where no token may follow.
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
struct MaskTask {
    parser: Arc<Mutex<Parser>>,
    within: Option<Arc<TokenMask>>,
    next: Arc<Next>,
    words: usize,
    times: Arc<MaskTimes>,
}

impl MaskTask {
    fn run(self) {
        let begin = Instant::now();
        let mut parser = self.parser.lock().unwrap_or_else(PoisonError::into_inner);
        let mask = catch_unwind(AssertUnwindSafe(|| parser.0.compute_mask()));
        let reason = parser.0.stop_reason();
        // The thread that waits for the mask may need the parser next.
        drop(parser);
        // Counted before the mask is filled, so that the statistics of a step include its masks.
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
impl Drop for MaskTask {
    fn drop(&mut self) {
        if self.next.mask.known().is_none() {
            self.give_up("the computation of its mask ended early".into());
        }
    }
}

/// Threads that compute masks, started with the first one.
#[derive(Debug, Default)]
pub(crate) struct MaskWorkers {
    tasks: Option<Sender<MaskTask>>,
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
    /// Returns the number of masks computed so far.
    pub fn masks(&self) -> u64 {
        self.times.masks.load(Ordering::Relaxed)
    }

    /// Returns the time of these computations, summed over threads.
    pub fn nanoseconds(&self) -> u64 {
        self.times.nanoseconds.load(Ordering::Relaxed)
    }

    fn run(&mut self, guide: &Guide, within: Option<Arc<TokenMask>>) {
        let task = MaskTask {
            parser: guide.parser.clone(),
            within,
            next: guide.next.clone(),
            words: guide.words,
            times: self.times.clone(),
        };
        let tasks = self.tasks.get_or_insert_with(start_workers);
        // Without any thread there is no receiver.
        if let Err(error) = tasks.send(task) {
            error.0.run();
        }
    }
}

/// Starts threads that end when the sender is dropped.
fn start_workers() -> Sender<MaskTask> {
    let (tasks, receiver) = channel();
    let receiver = Arc::new(Mutex::new(receiver));
    let count = thread::available_parallelism().map_or(1, |cores| cores.get().min(MAX_WORKERS));
    for _ in 0..count {
        let receiver = receiver.clone();
        // If a thread cannot be started, the others compute all masks.
        let thread = thread::Builder::new().name("paguro-mask".into()).stack_size(COMPILER_STACK);
        let _ = thread.spawn(move || work(&receiver));
    }
    tasks
}

fn work(tasks: &Mutex<Receiver<MaskTask>>) {
    loop {
        let task = tasks.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match task {
            Ok(task) => task.run(),
            Err(_) => return,
        }
    }
}
