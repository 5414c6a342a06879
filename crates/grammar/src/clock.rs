//! Processor time and priority of threads. Elsewhere than on Linux, time is that of the clock, and priorities are equal.

#[cfg(target_os = "linux")]
use rustix::{process, thread, time};

use std::time::Duration;

/// Difference of the priority of a slow thread, as in `nice`: it gets a tenth of the processor beside another thread.
const SLOW: i32 = 10;

/// The same for a thread that nobody waits for: the lowest priority.
pub(super) const ABANDONED: i32 = 19;

/// A thread whose priority can be lowered from any thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Priority {
    #[cfg(target_os = "linux")]
    thread: process::Pid,
}

impl Priority {
    /// Returns the priority of the calling thread.
    pub fn of_this_thread() -> Self {
        Self {
            #[cfg(target_os = "linux")]
            thread: thread::gettid(),
        }
    }

    /// Lowers the priority by `nice` for the rest of the thread's life.
    pub fn lower(self, nice: i32) {
        // The number is that of a thread. Without permission, the thread keeps its priority.
        #[cfg(target_os = "linux")]
        let _ = process::setpriority_process(Some(self.thread), nice);
        #[cfg(not(target_os = "linux"))]
        let _ = nice;
    }
}

/// Measures the processor time of a thread from a moment on.
#[derive(Clone, Copy, Debug)]
pub struct ThreadClock {
    #[cfg(target_os = "linux")]
    priority: Priority,
    #[cfg(target_os = "linux")]
    begin: Duration,
    #[cfg(not(target_os = "linux"))]
    begin: std::time::Instant,
}

#[cfg(target_os = "linux")]
impl ThreadClock {
    /// Begins to measure the calling thread.
    pub fn start() -> Self {
        Self { priority: Priority::of_this_thread(), begin: now() }
    }

    /// Returns the time since the start. The calling thread must be the measured one.
    pub fn stop(&self) -> Duration {
        now().saturating_sub(self.begin)
    }

    /// Returns the time since the start, from any thread; `None` if it is unknown.
    pub fn elapsed(&self) -> Option<Duration> {
        let path = format!("/proc/self/task/{}/schedstat", self.priority.thread.as_raw_nonzero());
        let text = std::fs::read_to_string(path).ok()?;
        let nanoseconds = text.split_whitespace().next()?.parse().ok()?;
        Some(Duration::from_nanos(nanoseconds).saturating_sub(self.begin))
    }

    /// Gives the thread a low priority for the rest of its life.
    pub fn lower_priority(&self) {
        self.priority.lower(SLOW);
    }
}

#[cfg(target_os = "linux")]
fn now() -> Duration {
    let time = time::clock_gettime(time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(not(target_os = "linux"))]
impl ThreadClock {
    /// Begins to measure the calling thread.
    pub fn start() -> Self {
        Self { begin: std::time::Instant::now() }
    }

    /// Returns the time since the start.
    pub fn stop(&self) -> Duration {
        self.begin.elapsed()
    }

    /// Returns the time since the start.
    pub fn elapsed(&self) -> Option<Duration> {
        Some(self.begin.elapsed())
    }

    /// Has no effect.
    pub fn lower_priority(&self) {
        Priority::of_this_thread().lower(SLOW);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_thread_is_the_same_from_inside_and_outside() {
        let clock = ThreadClock::start();
        let mut sum = 0_u64;
        while clock.stop() < Duration::from_millis(20) {
            sum = std::hint::black_box(sum + 1);
        }
        let outside = std::thread::spawn(move || clock.elapsed()).join().unwrap();
        // The kernel updates the other number at each tick, so it is behind and never ahead.
        assert!(outside.is_none_or(|time| time > Duration::ZERO && time <= clock.stop()));
    }
}
