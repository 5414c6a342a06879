//! Rows of a model that its head continues.

/// Most rows of a sequence that are kept for a head. It begins behind them if it has not read earlier ones.
pub(crate) const KEPT_ROWS: usize = 512;

/// The last rows of a sequence, after the model's last norm.
#[derive(Clone, Debug)]
pub(crate) struct HiddenRows {
    /// Least number of rows to keep, at least one.
    kept: usize,
    /// Position of the first one.
    first: usize,
    /// `[rows, width]`
    values: Vec<f32>,
    width: usize,
}

impl HiddenRows {
    /// Creates a list of the last rows, `kept` at least.
    pub fn new(kept: usize) -> Self {
        Self { kept, first: 0, values: Vec::new(), width: 0 }
    }

    /// Returns the least number of rows that are kept.
    pub fn kept(&self) -> usize {
        self.kept
    }

    /// Returns the position of the first row.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Returns the position after the last row.
    pub fn end(&self) -> usize {
        self.first + self.values.len().checked_div(self.width).unwrap_or(0)
    }

    /// Adds the row of a position, after which no rows remain. Rows before a gap are dropped, and so are the first ones if there
    /// are too many.
    pub fn push(&mut self, position: usize, row: &[f32]) {
        self.truncate(position);
        if self.end() != position || self.values.is_empty() {
            (self.first, self.width) = (position, row.len());
            self.values.clear();
        }
        // Removed many at a time, because removal moves the others.
        if self.end() - self.first >= 2 * self.kept {
            self.drop_before(self.end() - self.kept);
        }
        self.values.extend_from_slice(row);
    }

    /// Drops the rows from `end` on.
    pub fn truncate(&mut self, end: usize) {
        self.values.truncate(end.saturating_sub(self.first) * self.width);
    }

    /// Drops the rows before a position.
    pub fn drop_before(&mut self, position: usize) {
        let rows = position.clamp(self.first, self.end()) - self.first;
        self.values.drain(..rows * self.width);
        self.first += rows;
    }

    /// Returns the rows of these positions, `[rows, width]`, all of which are known.
    pub fn of(&self, positions: std::ops::Range<usize>) -> &[f32] {
        let at = |position: usize| (position - self.first) * self.width;
        &self.values[at(positions.start)..at(positions.end)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_contiguous_and_few() {
        let mut rows = HiddenRows::new(KEPT_ROWS);
        (5..9).for_each(|at| rows.push(at, &[at as f32, 0.5]));
        assert_eq!((rows.first(), rows.end(), rows.of(6..8)), (5, 9, &[6.0, 0.5, 7.0, 0.5][..]));
        // Rows that were rejected are replaced.
        rows.push(7, &[70.0, 0.5]);
        assert_eq!((rows.end(), rows.of(7..8)), (8, &[70.0, 0.5][..]));
        rows.drop_before(7);
        assert_eq!((rows.first(), rows.end()), (7, 8));
        // After a gap, as behind a prefix that was cached.
        rows.push(20, &[20.0, 0.5]);
        assert_eq!((rows.first(), rows.end()), (20, 21));
        (21..5000).for_each(|at| rows.push(at, &[at as f32, 0.5]));
        assert!((KEPT_ROWS..=2 * KEPT_ROWS).contains(&(rows.end() - rows.first())));
        assert_eq!(rows.of(4999..5000), [4999.0, 0.5]);
    }
}
