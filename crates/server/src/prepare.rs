//! Preparation of requests: parsing large bodies, rendering templates, tokenizing, compiling grammars. All of it runs
//! on a few threads of its own with large stacks, so it neither blocks the threads that serve connections nor overflows
//! them.
//!
//! Clients are queued fairly, and large requests use at most half of the threads, so a small one never waits for a
//! large one. A job that takes long, as one that waits for a slow grammar, holds up no other: it no longer counts, and
//! another thread starts.

use std::{
    collections::VecDeque,
    fmt,
    net::{IpAddr, Ipv6Addr},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use axum::http::Extensions;
use tokio::sync::oneshot;

use crate::{access::Tenant, error::ApiError, listen::Arrival};

/// Stack of a thread, in bytes. Templates and grammars are bounded such that they need less.
const STACK: usize = 64 << 20;

/// Time after which an idle thread ends. Its stack keeps the memory of its deepest work until then.
const IDLE: Duration = Duration::from_secs(10);

/// Time after which a job no longer counts as one of those that run.
const LONG: Duration = Duration::from_millis(500);

/// Maximum number of jobs that do not count.
const MAX_LONG: usize = 8;

/// Priority of threads in the background, as in `nice`.
#[cfg(target_os = "linux")]
const BACKGROUND: i32 = 15;

/// Returns false once the client has disconnected.
pub type IsWanted<'a> = dyn Fn() -> bool + Sync + 'a;

/// A client, for fair queueing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Client {
    /// A key, by its id.
    Key(Arc<str>),
    /// An address without a key; for IPv6 its network, because one client owns all addresses of it.
    Address(IpAddr),
    /// A Unix socket, or a request within the process.
    #[default]
    Local,
}

impl Client {
    /// Returns the client of a request: its key, or else its address.
    pub fn of(extensions: &Extensions) -> Self {
        if let Some(Tenant(key)) = extensions.get() {
            return Self::Key(key.as_str().into());
        }
        extensions.get().and_then(|arrival: &Arrival| arrival.peer).map_or(Self::Local, Self::at)
    }

    /// Returns the client at an address.
    pub fn at(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(address) if !address.is_loopback() => {
                let network = u128::from(address) >> 64 << 64;
                Ipv6Addr::from(network).into()
            }
            address => address,
        })
    }
}

/// Cost of a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Milliseconds.
    Small,
    /// Up to seconds.
    Large,
}

/// The threads and their queue.
#[derive(Debug)]
pub struct Preparation {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Maximum number of threads.
    threads: usize,
    /// Time after which an idle thread ends.
    idle: Duration,
    /// True if the threads have a low priority, and long jobs count as others do.
    in_background: bool,
}

#[derive(Debug, Default)]
struct Queue {
    /// Clients with waiting work, in order of service, each with its jobs in order of arrival.
    waiting: VecDeque<(Client, VecDeque<Job>)>,
    /// Number of threads that run or wait.
    threads: usize,
    /// Number of idle threads.
    idle: usize,
    running: Vec<Running>,
    /// Number of jobs that have begun.
    begun: u64,
    /// Number of large jobs that run, without long ones.
    large: usize,
    /// Number of long jobs that run.
    long: usize,
    ended: bool,
}

/// A running job.
#[derive(Debug)]
struct Running {
    id: u64,
    size: Size,
    began: Instant,
    is_long: bool,
}

struct Job {
    size: Size,
    work: Box<dyn Work>,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Job").field(&self.size).finish()
    }
}

trait Work: Send {
    /// Returns false if the client has disconnected.
    fn is_wanted(&self) -> bool;

    fn run(self: Box<Self>);
}

struct Task<T, F> {
    work: F,
    answer: oneshot::Sender<Result<T, ApiError>>,
}

impl<T, F> Work for Task<T, F>
where
    T: Send,
    F: FnOnce(&IsWanted<'_>) -> Result<T, ApiError> + Send,
{
    fn is_wanted(&self) -> bool {
        !self.answer.is_closed()
    }

    fn run(self: Box<Self>) {
        let Self { work, answer } = *self;
        let outcome = work(&|| !answer.is_closed());
        // The client may have disconnected meanwhile.
        let _ = answer.send(outcome);
    }
}

impl Preparation {
    /// Creates a pool with as many threads as cores, at least two. They start on demand.
    pub fn new() -> Self {
        let threads = thread::available_parallelism().map_or(2, |cores| cores.get().max(2));
        Self::create(threads, IDLE, false)
    }

    /// Creates a pool of at most this many threads, which leave the processor to others.
    pub fn in_background(threads: usize) -> Self {
        Self::create(threads, IDLE, true)
    }

    #[cfg(test)]
    fn with_threads(threads: usize, idle: Duration) -> Self {
        Self::create(threads, idle, false)
    }

    fn create(threads: usize, idle: Duration, in_background: bool) -> Self {
        let queue = Mutex::default();
        let shared = Shared { queue, changed: Condvar::new(), threads, idle, in_background };
        Self { shared: Arc::new(shared) }
    }

    /// Runs `work` in fair order among clients. Work whose future was dropped does not start; running work can check
    /// with its argument whether it is still wanted.
    ///
    /// # Errors
    /// The work's own error, or no thread could be started.
    pub async fn run<T: Send + 'static>(
        &self,
        client: &Client,
        size: Size,
        work: impl FnOnce(&IsWanted<'_>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (answer, outcome) = oneshot::channel();
        let job = Job { size, work: Box::new(Task { work, answer }) };
        self.shared.push(client, job)?;
        let mut outcome = outcome;
        loop {
            match tokio::time::timeout(LONG, &mut outcome).await {
                Ok(Ok(outcome)) => return outcome,
                Ok(Err(_)) => return Err(ApiError::Internal("preparing the request has failed".into())),
                // Others may wait behind long jobs.
                Err(_) => self.shared.relieve(),
            }
        }
    }
}

impl Drop for Preparation {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(self: &Arc<Self>, client: &Client, job: Job) -> Result<(), ApiError> {
        let mut queue = self.lock();
        queue.push(client, job);
        self.start_thread(&mut queue)?;
        drop(queue);
        self.changed.notify_one();
        Ok(())
    }

    /// Starts a thread if work waits and there may be another one.
    fn start_thread(self: &Arc<Self>, queue: &mut Queue) -> Result<(), ApiError> {
        let waiting: usize = queue.waiting.iter().map(|(_, jobs)| jobs.len()).sum();
        if queue.idle < waiting && queue.threads < self.threads + queue.long {
            let shared = self.clone();
            let thread = thread::Builder::new().name("paguro-prepare".into()).stack_size(STACK);
            match thread.spawn(move || shared.work()) {
                Ok(_) => queue.threads += 1,
                Err(error) if queue.threads == 0 => {
                    queue.waiting.clear();
                    return Err(ApiError::Unavailable(format!("no thread can be started: {error}")));
                }
                // The work waits for the existing threads.
                Err(error) => tracing::warn!(%error, "no thread can be started"),
            }
        }
        Ok(())
    }

    /// Stops counting long jobs, and starts threads for the work that waits behind them.
    fn relieve(self: &Arc<Self>) {
        if self.in_background {
            return;
        }
        let mut queue = self.lock();
        let Queue { running, large, long, .. } = &mut *queue;
        for job in running.iter_mut().filter(|job| !job.is_long && job.began.elapsed() > LONG) {
            if *long == MAX_LONG {
                break;
            }
            job.is_long = true;
            *long += 1;
            *large -= usize::from(job.size == Size::Large);
        }
        // An error is logged, and there are threads.
        let _ = self.start_thread(&mut queue);
        drop(queue);
        self.changed.notify_one();
    }

    /// The loop of a thread.
    fn work(&self) {
        #[cfg(target_os = "linux")]
        if self.in_background {
            // The priority is a courtesy to other threads.
            let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), BACKGROUND);
        }
        let most_large = (self.threads / 2).max(1);
        let mut queue = self.lock();
        loop {
            if queue.ended {
                return;
            }
            let Some(job) = queue.next(most_large) else {
                queue.idle += 1;
                let waited = self.changed.wait_timeout(queue, self.idle);
                let (woken, wait) = waited.unwrap_or_else(PoisonError::into_inner);
                queue = woken;
                queue.idle -= 1;
                if wait.timed_out() && queue.waiting.is_empty() {
                    queue.threads -= 1;
                    return;
                }
                continue;
            };
            let id = queue.begin(job.size);
            drop(queue);
            // A panic drops the sender of the answer, so the waiting request gets an error.
            let _ = catch_unwind(AssertUnwindSafe(|| job.work.run()));
            queue = self.lock();
            queue.end(id);
            if queue.threads > self.threads + queue.long {
                queue.threads -= 1;
                self.changed.notify_one();
                return;
            }
            if job.size == Size::Large {
                self.changed.notify_one();
            }
        }
    }
}

impl Queue {
    fn push(&mut self, client: &Client, job: Job) {
        match self.waiting.iter_mut().find(|(other, _)| other == client) {
            Some((_, jobs)) => jobs.push_back(job),
            None => self.waiting.push_back((client.clone(), VecDeque::from([job]))),
        }
    }

    /// Notes that a job begins, and returns its number.
    fn begin(&mut self, size: Size) -> u64 {
        self.begun += 1;
        self.large += usize::from(size == Size::Large);
        self.running.push(Running { id: self.begun, size, began: Instant::now(), is_long: false });
        self.begun
    }

    fn end(&mut self, id: u64) {
        let Some(index) = self.running.iter().position(|job| job.id == id) else { return };
        let job = self.running.swap_remove(index);
        if job.is_long {
            self.long -= 1;
        } else if job.size == Size::Large {
            self.large -= 1;
        }
    }

    /// Returns the next runnable job of the first client, which then moves to the end of the queue.
    fn next(&mut self, most_large: usize) -> Option<Job> {
        for (_, jobs) in &mut self.waiting {
            jobs.retain(|job| job.work.is_wanted());
        }
        self.waiting.retain(|(_, jobs)| !jobs.is_empty());
        let may_run = |job: &Job| job.size == Size::Small || self.large < most_large;
        let mut found = self.waiting.iter().enumerate();
        let (turn, index) =
            found.find_map(|(turn, (_, jobs))| Some((turn, jobs.iter().position(may_run)?)))?;
        let (client, mut jobs) = self.waiting.remove(turn)?;
        let job = jobs.remove(index);
        if !jobs.is_empty() {
            self.waiting.push_back((client, jobs));
        }
        job
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct Named(&'static str, mpsc::Sender<&'static str>, bool);

    impl Work for Named {
        fn is_wanted(&self) -> bool {
            self.2
        }

        fn run(self: Box<Self>) {
            self.1.send(self.0).unwrap();
        }
    }

    #[test]
    fn clients_take_turns_and_large_work_leaves_room() {
        let mut queue = Queue::default();
        let (sender, names) = mpsc::channel();
        let key = |name: &str| Client::Key(name.into());
        let mut push = |client: &str, name, size, wanted| {
            queue.push(&key(client), Job { size, work: Box::new(Named(name, sender.clone(), wanted)) });
        };
        push("a", "a1", Size::Large, true);
        push("a", "a2", Size::Large, true);
        push("a", "a3", Size::Small, true);
        push("a", "left", Size::Small, false);
        push("b", "b1", Size::Large, true);
        push("b", "b2", Size::Small, true);
        // The first job is large, and one large job may run.
        let mut order = Vec::new();
        let mut take = |queue: &mut Queue| match queue.next(1) {
            Some(job) => {
                queue.large += usize::from(job.size == Size::Large);
                job.work.run();
                order.push(names.try_recv().unwrap());
            }
            None => order.push("none"),
        };
        for _ in 0..4 {
            take(&mut queue);
        }
        queue.large = 0;
        take(&mut queue);
        queue.large = 0;
        take(&mut queue);
        take(&mut queue);
        assert_eq!(order, ["a1", "b2", "a3", "none", "b1", "a2", "none"]);
    }

    #[test]
    fn an_address_is_a_client_and_a_network_of_ipv6_is_one() {
        let at = |address: &str| Client::at(address.parse().unwrap());
        assert_eq!(at("::ffff:10.0.0.1"), at("10.0.0.1"));
        assert_ne!(at("10.0.0.2"), at("10.0.0.1"));
        assert_eq!(at("2001:db8::1"), at("2001:db8::2"));
        assert_ne!(at("2001:db8:0:1::1"), at("2001:db8:0:2::1"));
    }

    #[test]
    fn a_panic_is_an_error_and_the_thread_goes_on() {
        let preparation = Preparation::with_threads(1, IDLE);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let run = |work: fn() -> u32| {
            runtime.block_on(preparation.run(&Client::Local, Size::Large, move |_| Ok(work())))
        };
        assert!(run(|| panic!("on purpose")).is_err());
        assert_eq!(run(|| 7), Ok(7));
    }

    #[test]
    fn an_idle_thread_ends_and_another_one_takes_its_place() {
        let preparation = Preparation::with_threads(1, Duration::from_millis(1));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        for round in 0..3 {
            let run = preparation.run(&Client::Local, Size::Small, move |_| Ok(round));
            assert_eq!(runtime.block_on(run), Ok(round));
            let deadline = Instant::now() + Duration::from_secs(60);
            while preparation.shared.lock().threads > 0 {
                assert!(Instant::now() < deadline, "the thread does not end");
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn a_long_job_holds_up_no_other() {
        let preparation = Preparation::with_threads(1, IDLE);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (release, blocked) = mpsc::channel::<()>();
        let first = preparation.run(&Client::Local, Size::Large, move |_| {
            blocked.recv().ok();
            Ok(1)
        });
        let second = async {
            let second = preparation.run(&Client::Local, Size::Large, |_| Ok(2)).await;
            release.send(()).unwrap();
            second
        };
        let both = async { tokio::join!(first, second) };
        assert_eq!(runtime.block_on(both), (Ok(1), Ok(2)));
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let queue = preparation.shared.lock();
            let counts = (queue.long, queue.large, queue.running.len());
            if counts == (0, 0, 0) && queue.threads == 1 {
                break;
            }
            drop(queue);
            assert!(Instant::now() < deadline, "{counts:?} are still counted");
            thread::sleep(Duration::from_millis(1));
        }
    }
}
