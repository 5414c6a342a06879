//! Times of steps with few rows, by their number.
//!
//! The [model of all steps](crate::cost) is a line, which fits long steps. Checking drafts needs the times of 1, 2, 3 ...
//! rows, which are no line: kernels compute some numbers of rows in the time of one. So the time of each number is
//! measured, at the depth of the sequences that run now. Between measured numbers, times are interpolated; beyond them, the
//! line's time for a row is added. So a number of rows that was never tried is tried if it may be worth it, and its
//! measured time decides from then on.

use crate::cost::{StepCost, Work};

/// Most rows whose time is measured by their number.
pub(crate) const MOST: usize = 128;

/// Part of an error that one step corrects.
const RATE: f64 = 0.3;

/// Measured steps after which a time is forgotten.
const OLD: u64 = 256;

/// Depth of a row, in tokens, below which times are alike.
const SHALLOW: f64 = 512.0;

#[derive(Clone, Copy, Debug)]
struct Entry {
    seconds: f64,
    /// Mean depth of its rows.
    depth: f64,
    /// Number of the measurement.
    at: u64,
}

/// Measured times by number of rows.
#[derive(Debug)]
pub(crate) struct RowTimes {
    entries: [Option<Entry>; MOST + 1],
    measured: u64,
}

impl Default for RowTimes {
    fn default() -> Self {
        Self { entries: [None; MOST + 1], measured: 0 }
    }
}

/// Returns the mean depth of the rows.
fn mean_depth(work: Work) -> f64 {
    work.depth / work.rows.max(1.0)
}

fn are_alike(a: f64, b: f64) -> bool {
    let ratio = (a + SHALLOW) / (b + SHALLOW);
    (0.5..=2.0).contains(&ratio)
}

impl RowTimes {
    /// Records the time of a step without a part of a prompt.
    pub fn learn(&mut self, work: Work, seconds: f64) {
        let Some(entry) = self.entries.get_mut(work.rows as usize).filter(|_| work.rows >= 1.0) else {
            return;
        };
        self.measured += 1;
        let (depth, at) = (mean_depth(work), self.measured);
        match entry {
            Some(old) if at - old.at <= OLD && are_alike(old.depth, depth) => {
                // Limits the effect of a step that was delayed by other causes.
                let error = (seconds - old.seconds).min(old.seconds / 2.0);
                *old = Entry { seconds: old.seconds + RATE * error, depth, at };
            }
            entry => *entry = Some(Entry { seconds, depth, at }),
        }
    }

    /// Returns the expected seconds of a step, or `None` if no time of as few rows at such a depth is known.
    pub fn seconds(&self, cost: &StepCost, work: Work) -> Option<f64> {
        let rows = (work.rows as usize).min(MOST);
        let depth = mean_depth(work);
        // Without the time for the difference in depth.
        let known = |(rows, entry): (usize, &Option<Entry>)| {
            let entry =
                (*entry).filter(|entry| self.measured - entry.at <= OLD && are_alike(entry.depth, depth))?;
            let deeper = cost.depth_seconds((depth - entry.depth) * rows as f64);
            Some((rows, (entry.seconds + deeper).max(entry.seconds / 2.0)))
        };
        let entries = || self.entries.iter().enumerate();
        let (below, least) = entries().take(rows + 1).rev().find_map(known)?;
        if below == rows && work.rows as usize <= MOST {
            return Some(least);
        }
        let beyond = work.rows - below as f64;
        Some(match entries().skip(rows + 1).find_map(known) {
            Some((above, most)) => least + (most - least).max(0.0) * beyond / (above - below) as f64,
            None => {
                let row = cost.row_seconds() + cost.depth_seconds(depth);
                least + beyond * row.min(least / below as f64 / 4.0)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(ms: f64) -> f64 {
        ms / 1000.0
    }

    fn rows(start: usize, rows: usize) -> Work {
        Work::default().and(start, rows)
    }

    #[test]
    fn times_are_measured_interpolated_and_extended() {
        let (mut times, cost) = (RowTimes::default(), StepCost::default());
        assert_eq!(times.seconds(&cost, rows(0, 1)), None);
        times.learn(rows(0, 1), millis(10.0));
        times.learn(rows(0, 5), millis(20.0));
        let ms = |count: usize| (times.seconds(&cost, rows(0, count)).unwrap() * 1e3).round();
        assert_eq!([1, 2, 3, 5, 9].map(ms), [10.0, 13.0, 15.0, 20.0, 20.0]);
    }

    /// Devices of different shapes: a line, a stair, and free rows. After some steps of each number, times are known.
    #[test]
    fn times_of_any_shape_are_learnt() {
        let shapes: [fn(usize) -> f64; 3] = [
            |rows| 20.0 + 6.0 * rows as f64,
            |rows| 30.0 * rows.div_ceil(4) as f64,
            |rows| if rows <= 16 { 12.0 } else { 40.0 },
        ];
        for shape in shapes {
            let (mut times, cost) = (RowTimes::default(), StepCost::default());
            for step in 0..200 {
                let count = [1, 2, 4, 8, 12, 16, 17, 24][step % 8];
                let noise = 1.0 + 0.1 * ((step * 7919 % 100) as f64 / 50.0 - 1.0);
                times.learn(rows(300, count), millis(shape(count) * noise));
            }
            for count in [1, 2, 4, 8, 16, 24] {
                let seconds = times.seconds(&cost, rows(300, count)).unwrap() * 1e3;
                assert!((seconds / shape(count) - 1.0).abs() < 0.12, "{seconds} for {count} rows");
            }
        }
    }

    #[test]
    fn times_of_another_depth_and_old_ones_are_unknown() {
        let (mut times, cost) = (RowTimes::default(), StepCost::default());
        times.learn(rows(100, 1), millis(10.0));
        assert!(times.seconds(&cost, rows(400, 1)).is_some());
        assert_eq!(times.seconds(&cost, rows(8000, 1)), None);
        (0..=OLD).for_each(|_| times.learn(rows(100, 2), millis(10.0)));
        assert_eq!(times.seconds(&cost, rows(100, 1)), None);
        times.learn(rows(100, 1), millis(30.0));
        let seconds = times.seconds(&cost, rows(100, 1)).unwrap();
        assert!((seconds - 0.03).abs() < 1e-9, "{seconds}: an old time has no effect");
    }

    #[test]
    fn one_disturbed_step_changes_little() {
        let (mut times, cost) = (RowTimes::default(), StepCost::default());
        (0..9).for_each(|_| times.learn(rows(0, 1), millis(10.0)));
        times.learn(rows(0, 1), millis(9000.0));
        assert!(times.seconds(&cost, rows(0, 1)).unwrap() < 0.012);
    }
}
