//! A model of step times that is fitted to measured steps: a constant, a time per row, and a time per earlier token
//! that a row attends to. After each step, normalized least mean squares (Widrow and Hoff) correct the three weights in
//! proportion to their inputs, so the estimate is accurate for work similar to that of recent steps.

use std::time::Duration;

/// The parts of a step that its time depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Work {
    /// Rows.
    pub rows: f64,
    /// The sum of the rows' positions.
    pub depth: f64,
}

impl Work {
    /// The rows `start..start + rows` of a sequence as well.
    pub fn and(self, start: usize, rows: usize) -> Self {
        let (start, rows) = (start as f64, rows as f64);
        Self { rows: self.rows + rows, depth: self.depth + rows * (start + (rows - 1.0).max(0.0) / 2.0) }
    }

    /// Scaled, so that equal numbers are about equally expensive.
    fn features(self) -> [f64; 3] {
        [1.0, self.rows / 16.0, self.depth / (16.0 * 1024.0)]
    }
}

/// The part of an error that one step corrects.
const RATE: f64 = 0.5;

/// The estimate, in seconds for each feature of [`Work`].
#[derive(Debug, Default)]
pub(crate) struct StepCost {
    weights: Option<[f64; 3]>,
}

impl StepCost {
    /// Corrects the estimate by a step that took `measured`.
    pub fn learn(&mut self, work: Work, measured: Duration) {
        let features = work.features();
        let norm: f64 = features.iter().map(|x| x * x).sum();
        let error = measured.as_secs_f64() - self.seconds(work);
        // Limits the effect of a step that was delayed by other causes.
        let error = RATE * error.min(self.seconds(work).max(0.005));
        let Some(weights) = &mut self.weights else {
            // Attributes the whole time to rows, which overestimates longer steps rather than underestimating them.
            self.weights = Some([0.0, measured.as_secs_f64() / features[1].max(1.0 / 16.0), 0.0]);
            return;
        };
        for (weight, feature) in weights.iter_mut().zip(features) {
            *weight = (*weight + error * feature / norm).max(0.0);
        }
    }

    /// Returns the expected seconds of a step with this work; 0 before the first measurement.
    pub fn seconds(&self, work: Work) -> f64 {
        let weights = self.weights.unwrap_or_default();
        weights.iter().zip(work.features()).map(|(weight, feature)| weight * feature).sum()
    }

    /// Returns the expected seconds of a row more, without those of its depth.
    pub fn row_seconds(&self) -> f64 {
        self.seconds(Work { rows: 1.0, depth: 0.0 }) - self.seconds(Work::default())
    }

    /// Returns the expected seconds of rows for this sum of positions, which may be negative: a difference.
    pub fn depth_seconds(&self, depth: f64) -> f64 {
        self.weights.unwrap_or_default()[2] * Work { rows: 0.0, depth }.features()[2]
    }

    /// Returns the maximum number of rows from `start` on, up to `most`, with which a step that already has `work`
    /// takes at most `limit` seconds.
    pub fn rows_within(&self, work: Work, start: usize, most: usize, limit: f64) -> usize {
        let (mut fits, mut too_many) = (0, most + 1);
        while fits + 1 < too_many {
            let middle = fits + (too_many - fits) / 2;
            if self.seconds(work.and(start, middle)) <= limit { fits = middle } else { too_many = middle }
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A prompt beside a stream, on machines of all speeds and with disturbances: after a few steps, no step is much
    /// longer than the target, and most are close to it.
    #[test]
    fn chunks_take_the_time_that_they_may() {
        for (base, row, depth, noise) in [
            (0.015, 0.007, 1e-6, 0.0),
            (0.015, 0.007, 1e-6, 0.3),
            (0.05, 0.02, 0.0, 0.1),
            (0.002, 0.0002, 1e-7, 0.2),
            (0.01, 0.001, 2e-6, 0.2),
        ] {
            let time = |work: Work| base + row * work.rows + depth * work.depth;
            let mut cost = StepCost::default();
            let probe = Work::default().and(0, 8);
            cost.learn(probe, Duration::from_secs_f64(3.0 * time(probe)));
            let (mut start, mut step, mut used) = (0, 0_u32, Vec::new());
            while start < 8000 {
                let work = Work::default().and(500 + step as usize, 1);
                let rows = cost.rows_within(work, start, (8000 - start).min(512), 0.1).max(1);
                let work = work.and(start, rows);
                let factor = 1.0 + noise * (f64::from(step * 7919 % 100) / 50.0 - 1.0);
                let measured = time(work) * factor;
                cost.learn(work, Duration::from_secs_f64(measured));
                if step > 20 && rows < 512 && start + rows < 8000 {
                    used.push(measured);
                }
                (start, step) = (start + rows, step + 1);
            }
            let longest = used.iter().copied().fold(0.0, f64::max);
            assert!(longest < 0.2, "{longest} {base} {row} {depth} {noise}");
            let mean = used.iter().sum::<f64>() / used.len().max(1) as f64;
            assert!(used.is_empty() || (0.08..0.12).contains(&mean), "{mean} {base} {row} {depth} {noise}");
        }
    }

    #[test]
    fn one_disturbed_step_changes_little() {
        let mut cost = StepCost::default();
        let work = Work::default().and(100, 10);
        (0..20).for_each(|_| cost.learn(work, Duration::from_millis(50)));
        cost.learn(work, Duration::from_secs(30));
        assert!(cost.seconds(work) < 0.08, "{}", cost.seconds(work));
    }

    #[test]
    fn without_a_measurement_everything_fits() {
        assert_eq!(StepCost::default().rows_within(Work::default(), 0, 512, 0.1), 512);
    }
}
