//! Threads that compute the masks of grammars.
//!
//! A grammar can need any time for a mask, and a computation that runs can only be ended. So threads are of two kinds:
//!
//! - *Prompt* threads compute masks that are expected within [`PROMPT`], and the first mask of each grammar, unless
//!   many masks are slow and some of them are of the same tenant. There are at most [`MOST_PROMPT`] of them.
//! - *Slow* threads have a low priority, so that they use the time that steps and other masks leave. A prompt thread
//!   becomes a slow one when its mask takes longer than [`PROMPT`]; another prompt thread replaces it. A slow thread
//!   ends when there is no slow mask to begin.
//!
//! Of the masks that a thread may compute, the tenant with the fewest running ones is first, then the mask that should
//! have ended first if it had begun at once.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use paguro_grammar::{Answer, COMPILER_STACK, Computation, MaskTask, PROMPT, ThreadClock};

use crate::{checked_request::CheckedRequest, fair::Tenant};

/// Maximum number of prompt threads.
const MOST_PROMPT: usize = 4;

/// Maximum number of slow threads that begin a mask.
const MOST_SLOW: usize = 4;

/// Number of slow threads beside which the first masks of their tenants wait for a slow thread.
const MANY_SLOW: usize = 8;

/// Maximum number of threads. A prompt thread beyond it is not replaced.
const MOST_THREADS: usize = 32;

/// The threads, started with the first mask. They end when this value is dropped.
#[derive(Debug, Default)]
pub(crate) struct MaskWorkers {
    pool: Arc<Pool>,
    /// Number of computations whose end was reported by [`MaskWorkers::tend`].
    reported: u64,
    /// Tasks that tests run themselves.
    #[cfg(test)]
    by_hand: Option<Vec<Queued>>,
}

#[derive(Debug, Default)]
struct Pool {
    state: Mutex<State>,
    /// Wakes threads: a task was queued, or the pool is closed.
    queued: Condvar,
    /// Wakes the engine: a computation has ended.
    ended: Condvar,
    masks: AtomicU64,
    nanoseconds: AtomicU64,
}

/// A mask to compute.
#[derive(Debug)]
struct Queued {
    task: MaskTask,
    request: Arc<CheckedRequest>,
}

#[derive(Debug, Default)]
struct State {
    queue: Vec<Queued>,
    running: Vec<Running>,
    /// Number of prompt and slow threads.
    threads: Kinds,
    /// Maximum number of prompt threads on this machine, once it is known: asking the system takes long.
    most_prompt: Option<usize>,
    /// Number of prompt threads that wait for a task.
    idle: usize,
    /// Number of computations that have ended.
    ended: u64,
    is_closed: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Kinds {
    prompt: usize,
    slow: usize,
}

/// A computation that runs.
#[derive(Debug)]
struct Running {
    computation: Arc<Computation>,
    tenant: Tenant,
    begin: Instant,
    clock: ThreadClock,
    limit: Duration,
    is_slow: bool,
}

/// Kind of a thread, or of a task by its expected time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Prompt,
    Slow,
}

impl State {
    /// Returns true if a thread of this kind may begin the task.
    fn may_begin(&self, Queued { task, request }: &Queued, kind: Kind) -> bool {
        match task.expected {
            None => {
                let of_tenant = |running: &Running| running.is_slow && running.tenant == request.tenant;
                let waits = self.threads.slow >= MANY_SLOW && self.running.iter().any(of_tenant);
                waits == (kind == Kind::Slow)
            }
            Some(expected) => (kind == Kind::Slow) == (expected > PROMPT),
        }
    }

    /// Removes the next task for a thread of this kind from the queue.
    fn next(&mut self, kind: Kind) -> Option<Queued> {
        let running = |queued: &Queued| {
            let tenant = &queued.request.tenant;
            self.running.iter().filter(|running| running.tenant == *tenant).count()
        };
        let may_begin = (0..self.queue.len()).filter(|&index| self.may_begin(&self.queue[index], kind));
        let next = may_begin.min_by_key(|&index| {
            let queued = &self.queue[index];
            (running(queued), queued.task.begin + queued.task.expected.unwrap_or(PROMPT))
        });
        next.map(|index| self.queue.swap_remove(index))
    }

    /// Returns the kind of a thread that should be started.
    fn missing(&mut self) -> Option<Kind> {
        if self.queue.is_empty() {
            return None;
        }
        let cores = || thread::available_parallelism().map_or(1, |cores| cores.get().min(MOST_PROMPT));
        let most_prompt = *self.most_prompt.get_or_insert_with(cores);
        let Kinds { prompt, slow } = self.threads;
        let waits = |kind| self.queue.iter().filter(|task| self.may_begin(task, kind)).count();
        if prompt + slow >= MOST_THREADS {
            None
        } else if prompt < most_prompt && waits(Kind::Prompt) > self.idle {
            Some(Kind::Prompt)
        } else if slow < MOST_SLOW && waits(Kind::Slow) > 0 {
            Some(Kind::Slow)
        } else {
            None
        }
    }
}

impl MaskWorkers {
    /// Returns the number of masks computed so far.
    pub fn masks(&self) -> u64 {
        self.pool.masks.load(Ordering::Relaxed)
    }

    /// Returns the time of these computations, summed over threads.
    pub fn nanoseconds(&self) -> u64 {
        self.pool.nanoseconds.load(Ordering::Relaxed)
    }

    /// Queues a task of a request.
    pub fn run(&mut self, task: MaskTask, request: &Arc<CheckedRequest>) {
        let queued = Queued { task, request: request.clone() };
        #[cfg(test)]
        if let Some(by_hand) = &mut self.by_hand {
            return by_hand.push(queued);
        }
        let mut state = self.pool.lock();
        state.queue.push(queued);
        let idle = state.idle;
        self.pool.start_threads(state);
        if idle > 0 {
            self.pool.queued.notify_one();
        }
    }

    /// Returns true if a computation has ended since the last call. Gives slow computations a low priority, and ends
    /// those that take too long.
    pub fn tend(&mut self) -> bool {
        let mut state = self.pool.lock();
        let State { running, threads, queue, .. } = &mut *state;
        queue.retain(|queued| !queued.task.computation.is_stopped());
        for task in running {
            let time = task.begin.elapsed();
            if time > PROMPT && !task.is_slow && threads.prompt + threads.slow < MOST_THREADS {
                task.is_slow = true;
                task.clock.lower_priority();
                threads.prompt -= 1;
                threads.slow += 1;
            }
            if time > task.limit && task.clock.elapsed().unwrap_or(time) > task.limit {
                task.computation.give_up();
            }
        }
        let ended = state.ended;
        self.pool.start_threads(state);
        std::mem::replace(&mut self.reported, ended) != ended
    }

    /// Waits until `is_done` returns true, which is checked whenever a computation ends, or until `deadline`.
    pub fn wait(&self, deadline: Instant, is_done: impl Fn() -> bool) {
        #[cfg(test)]
        if self.by_hand.is_some() {
            return;
        }
        let mut state = self.pool.lock();
        while !is_done() {
            let Some(rest) = deadline.checked_duration_since(Instant::now()) else { return };
            let (next, _) = self.pool.ended.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner);
            state = next;
        }
    }
}

#[cfg(test)]
impl MaskWorkers {
    /// Leaves all later tasks to [`MaskWorkers::finish`].
    pub fn hold(&mut self) {
        self.by_hand = Some(Vec::new());
    }

    /// Computes the held tasks of the chosen requests here, as if each took `took`.
    pub fn finish(&mut self, mut chosen: impl FnMut(u64) -> bool, took: Duration) {
        let held = self.by_hand.iter_mut().flatten();
        let chosen: Vec<bool> = held.map(|queued| chosen(queued.request.id)).collect();
        let mut chosen = chosen.into_iter();
        let tasks = self.by_hand.as_mut().map(|held| held.extract_if(.., |_| chosen.next() == Some(true)));
        let tasks: Vec<_> = tasks.into_iter().flatten().collect();
        for Queued { mut task, .. } in tasks {
            let mut answer = task.compute();
            task.look_ahead(&mut answer);
            self.pool.finish(&task, answer, took);
        }
    }
}

impl Drop for MaskWorkers {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        state.is_closed = true;
        state.queue.clear();
        state.running.iter().for_each(|running| running.computation.give_up());
        drop(state);
        self.pool.queued.notify_all();
    }
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the threads that the queue needs. Without any thread, computes a task here.
    fn start_threads(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        while let Some(kind) = state.missing() {
            let pool = self.clone();
            let thread = thread::Builder::new().name("paguro-mask".into()).stack_size(COMPILER_STACK);
            if thread.spawn(move || pool.work(kind)).is_err() {
                let Kinds { prompt: 0, slow: 0 } = state.threads else { return };
                let task = state.next(Kind::Prompt).or_else(|| state.next(Kind::Slow));
                let Some(task) = task else { return };
                drop(state);
                self.run(task, Kind::Prompt);
                return;
            }
            match kind {
                // The new thread is idle until it has a task.
                Kind::Prompt => {
                    (state.threads.prompt, state.idle) = (state.threads.prompt + 1, state.idle + 1)
                }
                Kind::Slow => state.threads.slow += 1,
            }
        }
    }

    fn work(self: Arc<Self>, mut kind: Kind) {
        if kind == Kind::Slow {
            ThreadClock::start().lower_priority();
        }
        let mut is_idle = kind == Kind::Prompt;
        loop {
            let mut state = self.lock();
            let task = loop {
                if is_idle {
                    state.idle -= 1;
                }
                if state.is_closed {
                    return;
                }
                let task = state.next(kind);
                if task.is_none() && kind == Kind::Prompt {
                    (state.idle, is_idle) = (state.idle + 1, true);
                    state = self.queued.wait(state).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                break task;
            };
            is_idle = false;
            let Some(task) = task else {
                state.threads.slow -= 1;
                // First masks may begin again.
                self.start_threads(state);
                self.queued.notify_one();
                return;
            };
            drop(state);
            kind = self.run(task, kind);
        }
    }

    /// Computes a task on this thread, which is of kind `kind`. Returns its kind afterwards.
    fn run(&self, Queued { mut task, request }: Queued, kind: Kind) -> Kind {
        let clock = ThreadClock::start();
        self.lock().running.push(Running {
            computation: task.computation.clone(),
            tenant: request.tenant.clone(),
            begin: Instant::now(),
            clock,
            limit: task.limit(),
            is_slow: kind == Kind::Slow,
        });
        let mut answer = task.compute();
        let took = clock.stop();
        task.look_ahead(&mut answer);
        self.finish(&task, answer, took)
    }

    fn finish(&self, task: &MaskTask, answer: Answer, took: Duration) -> Kind {
        self.masks.fetch_add(u64::from(task.has_mask()), Ordering::Relaxed);
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
        // Statistics of a step include its masks, so they are counted first.
        task.finish(answer, took);
        let mut state = self.lock();
        state.ended += 1;
        let own =
            state.running.iter().position(|running| Arc::ptr_eq(&running.computation, &task.computation));
        let is_slow = own.is_some_and(|own| state.running.swap_remove(own).is_slow);
        drop(state);
        self.ended.notify_all();
        if is_slow { Kind::Slow } else { Kind::Prompt }
    }
}

#[cfg(test)]
mod tests {
    use paguro_grammar::Guide;

    use super::*;
    use crate::{
        Request,
        request::{PictureLimits, RequestLimits},
        tests::fake::CONSTRAINTS,
    };

    fn task(id: u64, tenant: &str, expected: Option<u64>, begin: Instant) -> Queued {
        let request = Request { tenant: Some(tenant.into()), ..Request::new(vec![0]) };
        let limits = RequestLimits {
            pictures: PictureLimits::TextOnly,
            vocab: 32,
            token_ids: 32,
            max_context: 9,
            max_sequences: 1,
            is_encoder: false,
        };
        let request = Arc::new(CheckedRequest::new(id, &request, &[], limits).unwrap());
        let mut task = Guide::new(CONSTRAINTS[0].clone()).compute(Vec::new(), false, None, Vec::new());
        (task.expected, task.begin) = (expected.map(Duration::from_millis), begin);
        Queued { task, request }
    }

    fn running(tenant: &str) -> Running {
        Running {
            computation: Arc::default(),
            tenant: Some(tenant.into()),
            begin: Instant::now(),
            clock: ThreadClock::start(),
            limit: Duration::MAX,
            is_slow: true,
        }
    }

    fn order(state: &mut State, kind: Kind) -> Vec<u64> {
        std::iter::from_fn(|| state.next(kind)).map(|queued| queued.request.id).collect()
    }

    #[test]
    fn tenants_with_few_running_masks_and_short_masks_are_first() {
        let now = Instant::now();
        let later = now + Duration::from_millis(1);
        let running = vec![running("a"), running("a"), running("b")];
        let queue = vec![
            task(1, "a", Some(0), now),
            task(2, "b", Some(4), now),
            task(3, "b", Some(1), later),
            task(4, "c", Some(5), later),
            task(5, "c", Some(6), now),
            task(6, "a", None, now),
        ];
        let mut state = State { running, queue, ..State::default() };
        assert_eq!(order(&mut state, Kind::Prompt), [4, 3, 2, 1, 6]);
        assert_eq!(order(&mut state, Kind::Slow), [5]);
    }

    #[test]
    fn first_masks_wait_while_many_masks_of_their_tenant_are_slow() {
        let now = Instant::now();
        let mut state = State::default();
        state.threads.slow = MANY_SLOW;
        state.running = vec![running("a")];
        state.queue = vec![task(1, "a", None, now), task(2, "a", Some(0), now), task(3, "b", None, now)];
        assert_eq!(order(&mut state, Kind::Prompt), [3, 2]);
        // A slow thread that ends one of them begins another.
        assert_eq!(order(&mut state, Kind::Slow), [1]);
    }

    #[test]
    fn threads_are_started_for_tasks_that_no_thread_waits_for() {
        let mut state = State::default();
        assert_eq!(state.missing(), None);
        state.queue = vec![task(1, "a", Some(0), Instant::now())];
        assert_eq!(state.missing(), Some(Kind::Prompt));
        (state.threads.prompt, state.idle) = (1, 1);
        assert_eq!(state.missing(), None);
        // Prompt threads with slow masks are replaced, up to a bound.
        state.threads = Kinds { prompt: 0, slow: MOST_THREADS - 1 };
        state.idle = 0;
        assert_eq!(state.missing(), Some(Kind::Prompt));
        state.threads.slow = MOST_THREADS;
        assert_eq!(state.missing(), None);
        state.threads = Kinds { prompt: 1, slow: MOST_SLOW - 1 };
        state.queue = vec![task(1, "a", Some(9), Instant::now())];
        assert_eq!(state.missing(), Some(Kind::Slow));
        state.threads.slow = MOST_SLOW;
        assert_eq!(state.missing(), None);
    }
}
