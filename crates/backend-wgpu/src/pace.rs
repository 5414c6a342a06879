//! Short submissions, for devices whose watchdog ends long ones or whose desktop would stutter.
//!
//! The time of a launch is estimated from previous steps by their number of rows. A submission has as many launches as
//! fit into the limit, and a step whose single launches are too long is split into passes of fewer rows.

use std::{ops::Range, time::Duration};

use paguro_backend::{
    AdapterUse, Carried, Coordinates, GivenRows, Output, PageId, StateUse, Step, StepSequence,
};

/// Row counts are learned by powers of two.
const CLASSES: usize = 24;

/// Ratio of the longest launch of a layer to the average one.
const LONGEST: u64 = 4;

/// Rows of the first step of many rows, before any time is known.
const FIRST_ROWS: usize = 128;

/// Estimate of the device's speed, learned from steps.
pub struct Pace {
    limit: Option<u64>,
    /// Nanoseconds of an average launch.
    launch: [Option<u64>; CLASSES],
}

impl Pace {
    /// Rows that are always worth a pass.
    pub const LEAST_ROWS: usize = 16;

    /// Creates the estimate for a device whose submissions should take at most `limit`.
    pub fn new(limit: Option<Duration>) -> Self {
        let limit = limit.map(|limit| (limit.as_nanos() as u64).max(1));
        Self { limit, launch: [None; CLASSES] }
    }

    fn batch_size_class(rows: usize) -> usize {
        (rows.max(1).ilog2() as usize).min(CLASSES - 1)
    }

    /// Returns the nanoseconds of an average launch with `rows` rows; `None` before any similar step.
    fn launch_time(&self, rows: usize) -> Option<u64> {
        let class = Self::batch_size_class(rows);
        self.launch[class].or_else(|| {
            // Doubling the rows at most doubles the time.
            let known = (0..class).rev().find_map(|less| self.launch[less].map(|time| (time, class - less)));
            known.map(|(time, doublings)| time.saturating_mul(1 << doublings.min(32)))
        })
    }

    /// Returns the launches of a submission, at most `wanted`.
    pub fn launches(&self, rows: usize, wanted: usize) -> usize {
        let Some(limit) = self.limit else { return wanted };
        let most = match self.launch_time(rows) {
            Some(time) => (limit / time.max(1)) as usize,
            None => FIRST_ROWS / rows.max(1),
        };
        wanted.min(most.max(1))
    }

    /// Rows of a pass, for a step of `rows` rows.
    pub fn rows(&self, rows: usize) -> usize {
        let Some(limit) = self.limit else { return rows };
        let mut fits = rows;
        let is_long = |rows: usize| match self.launch_time(rows) {
            Some(time) => time.saturating_mul(LONGEST) > limit,
            None => rows > FIRST_ROWS,
        };
        while fits > Self::LEAST_ROWS && is_long(fits) {
            fits = (fits / 2).max(Self::LEAST_ROWS);
        }
        fits
    }

    /// Records the time of a pass.
    pub fn learn(&mut self, rows: usize, launches: usize, time: Duration) {
        if self.limit.is_none() || launches == 0 {
            return;
        }
        let time = (time.as_nanos() as u64 / launches as u64).max(1);
        let known = &mut self.launch[Self::batch_size_class(rows)];
        // A slow step counts at once, a fast one gradually: clock speeds vary, and the measurement includes waiting.
        *known = Some(known.map_or(time, |known| time.max(known - known / 8)));
    }
}

/// Some rows of a step as a step of their own.
pub struct Pass<'a> {
    tokens: &'a [u32],
    carried: Vec<Carried>,
    given: Vec<GivenRows<'a>>,
    coordinates: &'a [Coordinates],
    spans: Vec<Range<usize>>,
    adapters: Vec<AdapterUse>,
    sequences: Vec<StepSequence>,
    pages: Vec<PageId>,
    outputs: Vec<Output<'a>>,
    /// Index of each output among those of the whole step.
    pub places: Vec<usize>,
}

impl<'a> Pass<'a> {
    /// Splits a step of a model with `groups` KV groups and `block_size` tokens per page into passes of at most `rows`
    /// rows, or of more that see each other: those of a span, or all of a sequence if it `is_whole`.
    pub fn split(
        step: &'a Step<'a>,
        rows: usize,
        groups: usize,
        block_size: usize,
        is_whole: bool,
    ) -> Vec<Self> {
        let (mut passes, mut first) = (Vec::new(), 0);
        while first < step.tokens.len() {
            let end = (first + rows.max(1)).min(step.tokens.len());
            let is_cut = |together: &Range<usize>| together.start < end && end < together.end;
            let together = match is_whole {
                true => step.sequences.iter().map(|sequence| sequence.rows.clone()).find(is_cut),
                false => step.spans.iter().find(|span| is_cut(span)).cloned(),
            };
            let end = match together {
                Some(together) if together.start > first => together.start,
                Some(together) => together.end,
                None => end,
            };
            passes.push(Self::new(step, first..end, groups, block_size));
            first = end;
        }
        passes
    }

    /// Returns the maximum number of passes: two neighbouring ones have more rows than the smallest passes.
    pub fn most(rows: usize) -> usize {
        1 + 2 * rows.div_ceil(Pace::LEAST_ROWS)
    }

    fn new(step: &'a Step<'a>, all: Range<usize>, groups: usize, block_size: usize) -> Self {
        let Range { start: first, end } = all;
        let (mut sequences, mut pages, mut adapters) = (Vec::new(), Vec::new(), Vec::new());
        for (index, sequence) in step.sequences.iter().enumerate() {
            let own = sequence.rows.start.max(first)..sequence.rows.end.min(end);
            if own.is_empty() {
                continue;
            }
            let start = sequence.start + own.start - sequence.rows.start;
            let (table, blocks) = (pages.len(), (start + own.len()).div_ceil(block_size));
            for group in 0..groups {
                pages.extend_from_slice(&sequence.table(step.pages, group, groups)[..blocks]);
            }
            let rows = own.start - first..own.end - first;
            // Later passes continue the state that the sequence's first pass has written.
            let state = match start == sequence.start {
                true => sequence.state,
                false => sequence.state.map(|state| StateUse::in_place(state.write)),
            };
            let sequence = sequences.len();
            adapters.extend(step.adapters_of(index).iter().map(|used| AdapterUse { sequence, ..*used }));
            sequences.push(StepSequence { rows, start, tables: table..pages.len(), state });
        }
        let (places, outputs) = step
            .outputs
            .iter()
            .enumerate()
            .filter(|(_, output)| (first..end).contains(&output.row))
            .map(|(place, output)| (place, Output { row: output.row - first, kind: output.kind }))
            .unzip();
        let carried = step.carried.iter().filter(|carried| (first..end).contains(&carried.row));
        let carried = carried.map(|carried| Carried { row: carried.row - first, ..*carried }).collect();
        let own = |rows: &Range<usize>| {
            let own = rows.start.max(first)..rows.end.min(end);
            (!own.is_empty()).then(|| own.start - first..own.end - first)
        };
        let given = step.given.iter().filter_map(|given| {
            let rows = own(&given.rows)?;
            let width = given.values.len() / given.rows.len();
            let from = rows.start + first - given.rows.start;
            let values = &given.values[from * width..][..rows.len() * width];
            Some(GivenRows { rows, values })
        });
        Self {
            tokens: &step.tokens[first..end],
            carried,
            given: given.collect(),
            coordinates: step.coordinates.get(first..end).unwrap_or_default(),
            spans: step.spans.iter().filter_map(own).collect(),
            adapters,
            sequences,
            pages,
            outputs,
            places,
        }
    }

    /// The pass as a step.
    pub fn step(&self) -> Step<'_> {
        let Self { tokens, carried, given, coordinates, spans, adapters, sequences, pages, outputs, .. } =
            self;
        Step { tokens, carried, given, coordinates, spans, adapters, sequences, pages, outputs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(100);

    #[test]
    fn submissions_stay_within_the_limit() {
        let mut pace = Pace::new(Some(LIMIT));
        // Before anything is known.
        assert_eq!([1, 64, 512].map(|rows| pace.rows(rows)), [1, 64, 128]);
        assert_eq!([1, 64, 128].map(|rows| pace.launches(rows, 48)), [48, 2, 1]);
        // An 8B model on a small GPU: 512 rows take 21 s in 288 launches, some of which take four times as long as
        // others.
        pace.learn(128, 288, Duration::from_millis(5250));
        assert_eq!(pace.launches(128, 192), 5);
        assert_eq!(pace.rows(512), 128);
        pace.learn(1, 288, Duration::from_millis(90));
        assert_eq!(pace.launches(1, 192), 192);
        // Another program occupies the GPU: passes become smaller at once, and larger again later.
        pace.learn(128, 288, Duration::from_millis(21_000));
        assert_eq!((pace.rows(512), pace.launches(128, 192)), (64, 1));
        (0..20).for_each(|_| pace.learn(128, 288, Duration::from_millis(5250)));
        assert_eq!(pace.rows(512), 128);
    }

    #[test]
    fn other_devices_are_not_bounded() {
        let mut pace = Pace::new(None);
        pace.learn(512, 300, Duration::from_secs(30));
        assert_eq!((pace.rows(2048), pace.launches(2048, 384)), (2048, 384));
    }

    #[test]
    fn rows_that_see_each_other_are_in_one_pass() {
        let pages = [PageId(1); 8];
        let sequences = [(0..50, 0..2), (50..70, 2..3), (70..130, 3..5)].map(|(rows, tables)| StepSequence {
            rows,
            start: 0,
            tables,
            state: None,
        });
        let values: Vec<f32> = (0..20_u8).map(f32::from).collect();
        let step = Step {
            tokens: &[1; 130],
            given: &[GivenRows { rows: 40..50, values: &values }],
            spans: &[10..12, 30..49, 49..50, 72..115],
            sequences: &sequences,
            pages: &pages,
            ..Step::default()
        };
        let cuts = |is_whole| -> Vec<usize> {
            Pass::split(&step, 16, 1, 32, is_whole).iter().map(|pass| pass.tokens.len()).collect()
        };
        assert_eq!(cuts(false), [16, 14, 19, 16, 7, 43, 15]);
        assert_eq!(cuts(true), [50, 20, 60]);
        let passes = Pass::split(&step, 16, 1, 32, false);
        assert_eq!([0, 3].map(|pass: usize| passes[pass].spans.first()), [Some(&(10..12)), Some(&(0..1))]);
        let given: Vec<_> = passes.iter().flat_map(|pass| pass.step().given.to_vec()).collect();
        assert_eq!((given[0].rows.clone(), given[0].values), (10..19, &values[..18]));
        assert_eq!((given[1].rows.clone(), given[1].values), (0..1, &values[18..]));
    }

    #[test]
    fn passes_are_steps() {
        let pages: Vec<_> = (1..=14).map(PageId).collect();
        // Two groups; a prompt of 40 tokens at position 30, and a sequence that decodes at position 50.
        let sequences = [
            StepSequence { rows: 0..40, start: 30, tables: 0..6, state: None },
            StepSequence { rows: 40..41, start: 50, tables: 6..10, state: None },
        ];
        let tokens: Vec<u32> = (0..41).collect();
        let kind = paguro_backend::OutputKind::Logits;
        let outputs = [Output { row: 40, kind }, Output { row: 3, kind }];
        let carried = [Carried { row: 40, output: 0, given: None }];
        let step = Step {
            tokens: &tokens,
            carried: &carried,
            sequences: &sequences,
            pages: &pages,
            outputs: &outputs,
            ..Step::default()
        };
        let passes = Pass::split(&step, 16, 2, 32, false);
        let shapes: Vec<_> = passes
            .iter()
            .map(|pass| (pass.tokens.len(), pass.sequences.len(), pass.places.clone()))
            .collect();
        assert_eq!(shapes, [(16, 1, vec![1]), (16, 1, vec![]), (9, 2, vec![0])]);
        assert_eq!((passes[0].sequences[0].start, passes[1].sequences[0].start), (30, 46));
        // 46 and 62 tokens are two pages of each group, 70 are three.
        assert_eq!(passes[0].pages, [1, 2, 4, 5].map(PageId));
        assert_eq!(passes[2].pages, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10].map(PageId));
        assert_eq!((passes[2].sequences[1].rows.clone(), passes[2].carried[0].row), (8..9, 8));
        assert_eq!((passes[2].outputs[0].row, passes[0].outputs[0].row), (8, 3));
    }
}
