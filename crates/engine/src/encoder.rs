//! The encoder: a thread that runs the vision tower beside the steps of the text model, and a cache of its rows.
//!
//! The thread computes one picture after the other. It is [paced](Pace): while a step of the text model runs, it pauses, also in the
//! midst of a picture, and between two steps it goes on for a time. Rows do not depend on pauses.
//!
//! After each step of the text model, the encoder computes for half of `step_time`. Rows of pictures are in a cache with
//! a bound of bytes, the least recently used evicted first, and sequences hold those that they still need.

use std::{
    collections::HashMap,
    fmt,
    num::NonZero,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use paguro_backend::{
    AttentionMode, Backend, GivenRows, KernelCount, KvDtype, Limits, MemoryPlan, Output, OutputKind,
    OutputValue, Pace, PacedRunner, PageId, Runner, Step, StepOutput, StepSequence,
};
use paguro_model::{Tower, Vision};
use paguro_vision::{Pixels, SizeRule};

use crate::{EncoderTimes, EngineError, pictures::PixelSource};

/// Tokens in a page of the tower.
const BLOCK_SIZE: usize = 32;

/// Rows of a picture for the text model, each with all of its parts. They stay as the device returned them, because copies of tens of
/// megabytes take as long as some layers of a tower.
pub(crate) struct Encoded(Vec<Vec<f32>>);

impl fmt::Debug for Encoded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Encoded({} rows)", self.rows())
    }
}

impl Encoded {
    pub fn rows(&self) -> usize {
        self.0.len()
    }

    /// Returns consecutive rows.
    pub fn part(&self, first: usize, count: usize) -> &[Vec<f32>] {
        &self.0[first..first + count]
    }

    fn bytes(&self) -> u64 {
        self.0.iter().map(|row| size_of_val(row.as_slice()) as u64).sum()
    }
}

/// Encoded pictures by key, the least recently used of which is dropped first.
#[derive(Debug, Default)]
pub(crate) struct EncoderCache {
    entries: HashMap<[u8; 32], Entry>,
    bytes: u64,
    limit: u64,
    clock: u64,
    /// Number of times that rows were found which an earlier picture has used.
    pub hits: u64,
}

#[derive(Debug)]
struct Entry {
    rows: Arc<Encoded>,
    used: u64,
    /// True once the picture for which they were computed has found them.
    is_known: bool,
}

impl EncoderCache {
    pub fn new(limit: u64) -> Self {
        Self { limit, ..Self::default() }
    }

    pub fn find(&mut self, key: &[u8; 32]) -> Option<Arc<Encoded>> {
        self.clock += 1;
        let entry = self.entries.get_mut(key)?;
        entry.used = self.clock;
        self.hits += u64::from(std::mem::replace(&mut entry.is_known, true));
        Some(Arc::clone(&entry.rows))
    }

    /// Returns the number of pictures, of their rows, and of the bytes of these, and the limit of the bytes.
    pub fn sizes(&self) -> (usize, usize, u64, u64) {
        let rows = self.entries.values().map(|entry| entry.rows.rows()).sum();
        (self.entries.len(), rows, self.bytes, self.limit)
    }

    pub fn contains(&self, key: &[u8; 32]) -> bool {
        self.entries.contains_key(key)
    }

    /// Keeps rows, and drops others beyond the limit. The new ones are kept in any case, for those who wait for them, and so are rows
    /// that sequences hold.
    pub fn keep(&mut self, key: [u8; 32], rows: Arc<Encoded>) {
        self.clock += 1;
        self.bytes += rows.bytes();
        if let Some(old) = self.entries.insert(key, Entry { rows, used: self.clock, is_known: false }) {
            self.bytes -= old.rows.bytes();
        }
        while self.bytes > self.limit {
            let unused = self
                .entries
                .iter()
                .filter(|(other, entry)| **other != key && Arc::strong_count(&entry.rows) == 1);
            let Some((&oldest, _)) = unused.min_by_key(|(_, entry)| entry.used) else { break };
            self.bytes -= self.entries.remove(&oldest).map_or(0, |entry| entry.rows.bytes());
        }
    }

    /// Drops all rows.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.bytes = 0;
    }
}

/// A picture to encode.
#[derive(Debug)]
pub(crate) struct Job {
    /// Key of its rows.
    pub key: [u8; 32],
    /// Number of rows that its places have.
    pub rows: usize,
    pub pixels: Arc<dyn PixelSource>,
}

/// A picture that was encoded.
#[derive(Debug)]
pub(crate) struct Done {
    pub key: [u8; 32],
    pub result: Result<Arc<Encoded>, String>,
    pub times: EncoderTimes,
}

/// The encoder's thread, from the engine's side.
pub(crate) struct Encoder {
    jobs: Option<Sender<Job>>,
    done: Receiver<Done>,
    pace: Arc<Pace>,
    is_abandoned: Arc<AtomicBool>,
    /// Kernel statistics of the tower after the last picture.
    kernels: Arc<Mutex<Vec<KernelCount>>>,
    thread: Option<JoinHandle<()>>,
    /// Key of the picture that is encoded.
    busy: Option<[u8; 32]>,
    /// Time since which it computes; `None` while it is paused.
    since: Option<Instant>,
    /// Time that it has computed.
    pub computed: Duration,
}

impl Encoder {
    /// Loads the tower and starts the thread, which is paused.
    ///
    /// # Errors
    /// [`EngineError::Load`], [`EngineError::Thread`].
    pub fn start(
        backend: &dyn Backend,
        vision: &Arc<Vision>,
        most: Option<usize>,
    ) -> Result<Self, EngineError> {
        let limits = limits(vision, most);
        let tower = &vision.tower;
        let PacedRunner { runner, pace } =
            backend.load_tower(&tower.program, tower.weights.clone(), limits)?;
        pace.pause();
        let (jobs, received) = channel();
        let (sender, done) = channel();
        let is_abandoned = Arc::<AtomicBool>::default();
        let kernels = Arc::<Mutex<Vec<KernelCount>>>::default();
        let worker = EncoderThread {
            vision: Arc::clone(vision),
            runner,
            limits,
            is_abandoned: Arc::clone(&is_abandoned),
            kernels: Arc::clone(&kernels),
            times: EncoderTimes::default(),
            answer: StepOutput::default(),
        };
        let thread = thread::Builder::new().name("paguro-encoder".into());
        let thread = thread.spawn(move || worker.run(&received, &sender))?;
        let (jobs, thread) = (Some(jobs), Some(thread));
        let (busy, since, computed) = (None, None, Duration::ZERO);
        Ok(Self { jobs, done, pace, is_abandoned, kernels, thread, busy, since, computed })
    }

    /// Returns the kernel statistics of the tower, up to the picture that was encoded last. Their names say that they are the tower's.
    pub fn kernel_counts(&self) -> Vec<KernelCount> {
        let of_tower =
            |count: &KernelCount| KernelCount { name: format!("tower {}", count.name), ..count.clone() };
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner).iter().map(of_tower).collect()
    }

    /// Returns the key of the picture that is encoded.
    pub fn busy(&self) -> Option<[u8; 32]> {
        self.busy
    }

    /// Begins with a picture. It is not computed before [`Encoder::advance`].
    pub fn begin(&mut self, job: Job) {
        debug_assert!(self.busy.is_none());
        self.busy = Some(job.key);
        self.is_abandoned.store(false, Ordering::SeqCst);
        self.pace.reset();
        // Without a receiver, the thread has ended by a defect, and the picture never ends; the next wait reports it.
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job);
        }
    }

    /// Computes for this time, or until the picture is done, and goes on until a [pause](Encoder::pause).
    pub fn advance(&mut self, time: Duration) -> Option<Done> {
        let key = self.busy?;
        if self.since.is_none() {
            self.since = Some(Instant::now());
            self.pace.resume();
        }
        let done = match self.done.recv_timeout(time) {
            Ok(done) => done,
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => {
                let result = Err("the encoder has ended by a defect".into());
                Done { key, result, times: EncoderTimes::default() }
            }
        };
        self.busy = None;
        self.pause();
        Some(done)
    }

    /// Pauses before a step of the text model. It returns once nothing is computed.
    pub fn pause(&mut self) {
        if let Some(since) = self.since.take() {
            self.pace.pause();
            self.computed += since.elapsed();
        }
    }

    /// Drops the picture that is encoded: nobody wants it any more.
    pub fn abandon(&mut self) {
        if self.busy.take().is_some() {
            self.is_abandoned.store(true, Ordering::SeqCst);
            self.pace.abandon();
            // It fails soon.
            let _ = self.done.recv();
            self.pause();
        }
    }
}

impl Drop for Encoder {
    fn drop(&mut self) {
        self.abandon();
        self.jobs = None;
        self.pace.abandon();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns the most rows of one part of a picture.
pub(crate) fn most_rows(vision: &Vision, most: Option<usize>) -> usize {
    /// Rows of models whose pictures have any number: on processors, larger pictures take minutes.
    const DEFAULT: u64 = 1024;
    let processor = &vision.processor;
    let side = u64::from(processor.patch * processor.merge).max(1);
    let own = match processor.rule {
        SizeRule::Smart { max_pixels, .. } => (max_pixels / (side * side)).min(DEFAULT),
        SizeRule::Square { side: all } => (u64::from(all) / side).pow(2),
        SizeRule::Budget { tokens } => u64::from(tokens.max(1120)),
        SizeRule::LongestEdge { pixels } => u64::from(pixels).div_ceil(side).pow(2),
        SizeRule::Tiles { tile, .. } | SizeRule::Grid { tile, .. } => (u64::from(tile) / side).pow(2),
        SizeRule::Flexible { tile, max_tokens, .. } => {
            (u64::from(tile) / side).pow(2).max(u64::from(max_tokens))
        }
        SizeRule::Padded { max_patches, .. } => {
            (u64::from(max_patches) / u64::from(processor.merge).pow(2).max(1)).min(DEFAULT)
        }
    };
    let own = usize::try_from(own).unwrap_or(usize::MAX).max(1);
    // A bound that the settings name holds for every picture, except for rules that have one size.
    match (most, &processor.rule) {
        (
            Some(most),
            SizeRule::Smart { .. }
            | SizeRule::Budget { .. }
            | SizeRule::LongestEdge { .. }
            | SizeRule::Padded { .. },
        ) => most.max(1),
        _ => own,
    }
}

fn limits(vision: &Vision, most: Option<usize>) -> Limits {
    let rows = most_rows(vision, most);
    let patches = vision.tower.step_rows(rows);
    let groups = vision.tower.program.kv.groups.len();
    Limits {
        block_size: BLOCK_SIZE,
        pages: patches.div_ceil(BLOCK_SIZE).saturating_mul(groups).saturating_add(1),
        max_rows: patches,
        max_sequences: 1,
        max_outputs: rows,
        max_context: patches,
        states: 0,
        kv_dtype: KvDtype::F16,
        attention: AttentionMode::Paged,
        expert_slots: None,
    }
}

/// Returns the memory of a tower, and of the cache of its rows.
pub(crate) fn plan(backend: &dyn Backend, vision: &Vision, most: Option<usize>, cache: u64) -> MemoryPlan {
    let tower = &vision.tower;
    let plan = backend.plan(&tower.program, &tower.weights, &limits(vision, most));
    MemoryPlan { buffers: plan.buffers.saturating_add(plan.kv).saturating_add(cache), kv: 0, ..plan }
}

/// State of the thread.
struct EncoderThread {
    vision: Arc<Vision>,
    runner: Box<dyn Runner>,
    limits: Limits,
    is_abandoned: Arc<AtomicBool>,
    kernels: Arc<Mutex<Vec<KernelCount>>>,
    /// Times of the picture that is encoded.
    times: EncoderTimes,
    answer: StepOutput,
}

impl EncoderThread {
    fn run(mut self, jobs: &Receiver<Job>, done: &Sender<Done>) {
        while let Ok(Job { key, rows, pixels }) = jobs.recv() {
            self.times = EncoderTimes::default();
            let result = self.encode(pixels.as_ref(), rows).map(Arc::new);
            *self.kernels.lock().unwrap_or_else(PoisonError::into_inner) = self.runner.kernel_counts();
            if done.send(Done { key, result, times: self.times }).is_err() {
                return;
            }
        }
    }

    fn encode(&mut self, pixels: &dyn PixelSource, rows: usize) -> Result<Encoded, String> {
        let pixels: Arc<Pixels> = pixels.pixels()?;
        let vision = Arc::clone(&self.vision);
        let tower = &vision.tower;
        let found: usize = pixels.parts.iter().map(paguro_vision::Part::tokens).sum();
        if found != rows {
            return Err(format!("the picture has {found} rows, but the prompt has room for {rows}"));
        }
        let mut encoded = Vec::with_capacity(rows);
        let mut rest = pixels.rgb.as_slice();
        for part in &pixels.parts {
            let bytes = rest.split_off(..part.bytes()).ok_or("the picture has fewer pixels than its size")?;
            if self.is_abandoned.load(Ordering::SeqCst) {
                return Err("the picture is not wanted any more".into());
            }
            self.encode_part(tower, part, bytes, &mut encoded)?;
        }
        Ok(Encoded(encoded))
    }

    /// Runs the tower on a part of a picture, and adds its rows to `encoded` in order.
    fn encode_part(
        &mut self,
        tower: &Tower,
        part: &paguro_vision::Part,
        rgb: &[u8],
        encoded: &mut Vec<Vec<f32>>,
    ) -> Result<(), String> {
        let Self { runner, limits, times, answer, .. } = self;
        let mut since = Instant::now();
        let mut lap = || std::mem::replace(&mut since, Instant::now()).elapsed();
        let input = tower.input(part, rgb)?;
        times.patches += lap();
        let (patches, square) = (tower.step_rows(input.order.len()), tower.patches_of_row());
        if patches > limits.max_rows {
            let (rows, most) = (input.order.len(), limits.max_outputs);
            return Err(format!(
                "the picture has {rows} rows, more than the {most} that memory was planned for"
            ));
        }
        let groups = tower.program.kv.groups.len();
        let blocks = patches.div_ceil(limits.block_size);
        let pages: Vec<PageId> = (1..=(blocks * groups) as u32).map(PageId).collect();
        let sequences = [StepSequence { rows: 0..patches, start: 0, tables: 0..pages.len(), state: None }];
        let output = |row| Output { row: row * square, kind: OutputKind::Residual };
        let outputs: Vec<_> = (0..input.order.len()).map(output).collect();
        let step = Step {
            tokens: &vec![0; patches],
            given: &[GivenRows { rows: 0..patches, values: &input.given }],
            coordinates: &input.coordinates,
            spans: &input.spans,
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
            ..Step::default()
        };
        let ticket = runner.submit(&step).map_err(|error| error.to_string())?;
        times.steps += lap();
        runner.collect(ticket, answer).map_err(|error| error.to_string())?;
        let width = tower.row_width();
        let mut rows = vec![Vec::new(); outputs.len()];
        for (outcome, &to) in answer.outcomes.drain(..).zip(&input.order) {
            match outcome {
                OutputValue::Residual(row) if row.len() == width => rows[to] = row,
                _ => return Err("the tower answered something else than rows".into()),
            }
        }
        if !are_finite(&rows) {
            return Err(
                "the vision tower computes numbers that are not finite: its weights are damaged".into()
            );
        }
        encoded.append(&mut rows);
        times.rows += lap();
        Ok(())
    }
}

/// Returns true if all numbers are finite. Many are looked at by several threads.
fn are_finite(rows: &[Vec<f32>]) -> bool {
    /// Numbers for a thread: about a millisecond.
    const SHARE: usize = 4 << 20;
    let numbers: usize = rows.iter().map(Vec::len).sum();
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = (numbers / SHARE).clamp(1, processors.min(8));
    // Without an end at the first one, the compiler can look at several at once.
    let check =
        |rows: &[Vec<f32>]| rows.iter().all(|row| row.iter().fold(true, |all, x| all & x.is_finite()));
    thread::scope(|scope| {
        let mut parts = rows.chunks(rows.len().div_ceil(threads).max(1));
        let own = parts.next().unwrap_or_default();
        let others: Vec<_> = parts.map(|rows| scope.spawn(move || check(rows))).collect();
        let own = check(own);
        others.into_iter().all(|other| other.join().unwrap_or(false)) && own
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_numbers_that_are_not_finite_are_found() {
        let mut rows = vec![vec![f32::MAX; 1 << 20]; 9];
        assert!(are_finite(&rows) && are_finite(&[]));
        for (row, wrong) in [(0, f32::NAN), (8, f32::INFINITY), (4, f32::NEG_INFINITY)] {
            rows[row][1 << 19] = wrong;
            assert!(!are_finite(&rows));
            rows[row][1 << 19] = 1.0;
        }
    }

    #[test]
    fn the_cache_drops_the_least_recently_used_rows_that_nobody_holds() {
        let rows = || Arc::new(Encoded(vec![vec![0.0; 5]; 5]));
        let mut cache = EncoderCache::new(250);
        cache.keep([1; 32], rows());
        cache.keep([2; 32], rows());
        let held = cache.find(&[1; 32]);
        cache.keep([3; 32], rows());
        let has = |cache: &EncoderCache| [1, 2, 3, 4].map(|key| cache.contains(&[key; 32]));
        assert_eq!(has(&cache), [true, false, true, false]);
        cache.keep([4; 32], rows());
        assert_eq!(has(&cache), [true, false, false, true], "the first one is held");
        drop(held);
        cache.keep([3; 32], rows());
        assert_eq!(has(&cache), [false, false, true, true]);
        assert_eq!(cache.bytes, 200);
        // The first search is that of the picture for which the rows were computed.
        for hits in 0..3 {
            assert!(cache.find(&[3; 32]).is_some() && cache.find(&[1; 32]).is_none());
            assert_eq!(cache.hits, hits);
        }
    }
}
