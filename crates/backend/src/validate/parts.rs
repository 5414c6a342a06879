//! Rules of parts that most steps have not: carried tokens, given rows, coordinates, spans, adapters, states, means.

use crate::{
    AdapterId, AdapterUse, GivenRows, Limits, Output, OutputKind, Program, StateId, StateUse, Step, StepError,
};

impl Step<'_> {
    /// Checks all parts that [`Step::is_plain`] lists. Sequences have been checked.
    pub(super) fn validate_parts(&self, program: &Program, limits: &Limits) -> Result<(), StepError> {
        let rows = self.tokens.len();
        for (index, carried) in self.carried.iter().enumerate() {
            rule!(carried.row < rows, "carried token {index}: row {} of {rows} does not exist", carried.row);
            let joins = program.joined().is_some();
            rule!(
                joins == carried.given.is_some(),
                "carried token {index}: its given row is carried as well if the model joins both, and only then"
            );
        }
        let in_order = self.carried.is_sorted_by(|one, next| one.row < next.row);
        rule!(in_order, "carried tokens are not in order of their rows");
        self.validate_given(program)?;
        let coordinates = self.coordinates.len();
        rule!(coordinates == 0 || program.has_axes(), "coordinates, but the model rotates rows by positions");
        rule!(coordinates == 0 || coordinates == rows, "{coordinates} coordinates for {rows} rows");
        rule!(self.spans.is_empty() || program.has_spans(), "spans, but no layer of the model sees them");
        self.validate_merged(program)?;
        self.validate_spans()?;
        self.validate_adapters()?;
        self.validate_states(program, limits)
    }

    /// A mean is the only one of a whole sequence, of which no logits are needed.
    pub(super) fn validate_mean(&self, index: usize, program: &Program) -> Result<(), StepError> {
        let has_means = program.bidirectional && program.head().is_some_and(|head| head.projection.is_none());
        rule!(has_means, "output {index}: a mean of rows, but the model has none");
        let row = self.outputs[index].row;
        let rows = self.rows_of(&self.outputs[index]);
        rule!(rows.start == row, "output {index}: a mean from row {row}, but its sequence has rows {rows:?}");
        for (other, Output { row, kind }) in self.outputs.iter().enumerate() {
            let is_mean = matches!(kind, OutputKind::Mean);
            rule!(
                other <= index || !is_mean || *row != rows.start,
                "output {other}: a second mean of rows {rows:?}"
            );
            rule!(
                !kind.needs_logits() || !rows.contains(row),
                "output {other}: logits of row {row}, of whose sequence output {index} is the mean"
            );
        }
        Ok(())
    }

    /// Given rows exist, are in order, have all values, and are no carried ones. All rows are given or carried if the model needs that.
    fn validate_given(&self, program: &Program) -> Result<(), StepError> {
        let (rows, width) = (self.tokens.len(), program.given_width());
        rule!(self.given.is_empty() || width > 0, "given rows, but all rows of the model are tokens");
        let mut next = 0;
        for (index, GivenRows { rows: own, values }) in self.given.iter().enumerate() {
            rule!(
                next <= own.start && own.start < own.end && own.end <= rows,
                "given rows {index}: {own:?} of {rows} rows, after row {next}"
            );
            rule!(
                Some(values.len()) == own.len().checked_mul(width),
                "given rows {index}: {} numbers for {} rows of {width}",
                values.len(),
                own.len()
            );
            let first = self.carried.partition_point(|carried| carried.row < own.start);
            let carried = self.carried.get(first).filter(|carried| carried.row < own.end);
            rule!(carried.is_none(), "given rows {index}: {own:?} have a carried token");
            next = own.end;
        }
        if program.needs_given_rows() {
            let carried = self.carried.iter().filter(|carried| carried.given.is_some()).count();
            let given = carried + self.given.iter().map(|given| given.rows.len()).sum::<usize>();
            rule!(given == rows, "{given} of {rows} rows are given, but the model needs all of them");
        }
        Ok(())
    }

    /// Sequences have whole merged rows, and outputs are those of their first rows.
    fn validate_merged(&self, program: &Program) -> Result<(), StepError> {
        let Some(merged) = program.merged() else { return Ok(()) };
        let rows = merged.rows;
        for (index, sequence) in self.sequences.iter().enumerate() {
            let count = sequence.rows.len();
            rule!(count.is_multiple_of(rows), "sequence {index}: {count} rows, of which {rows} become one");
        }
        for (index, output) in self.outputs.iter().enumerate() {
            let row = output.row;
            rule!(
                row.is_multiple_of(rows),
                "output {index}: row {row} is not the first of {rows} that become one"
            );
        }
        Ok(())
    }

    /// Adapters are in order of their sequences, which exist.
    fn validate_adapters(&self) -> Result<(), StepError> {
        let count = self.sequences.len();
        let in_order = self.adapters.is_sorted_by_key(|used| used.sequence);
        rule!(in_order, "adapters are not in order of their sequences");
        for AdapterUse { sequence, adapter: AdapterId(id), scale } in self.adapters {
            rule!(*sequence < count, "adapter {id}: sequence {sequence} of {count} does not exist");
            rule!(scale.is_finite(), "adapter {id}: its scale is {scale}");
        }
        Ok(())
    }

    /// Spans are in order, disjoint, and inside of the rows of one sequence each.
    fn validate_spans(&self) -> Result<(), StepError> {
        let (mut next, mut sequences) = (0, self.sequences.iter());
        let mut sequence = 0..0;
        for (index, span) in self.spans.iter().enumerate() {
            rule!(
                next <= span.start && span.start < span.end,
                "span {index}: rows {span:?} after row {next}"
            );
            while span.start >= sequence.end {
                let next = sequences.next().map(|next| next.rows.clone());
                let Some(next) = next else {
                    return Err(StepError::Invalid(format!("span {index}: rows {span:?} do not exist")));
                };
                sequence = next;
            }
            rule!(
                span.end <= sequence.end,
                "span {index}: rows {span:?} of a sequence with rows {sequence:?}"
            );
            next = span.end;
        }
        Ok(())
    }

    /// Every sequence has a state if the program has some. A state that a sequence writes is neither written nor read
    /// by others.
    fn validate_states(&self, program: &Program, limits: &Limits) -> Result<(), StepError> {
        let has_states = !program.state.is_empty();
        let mut users: Vec<(StateId, usize)> = Vec::new();
        for (index, sequence) in self.sequences.iter().enumerate() {
            let Some(StateUse { read, write }) = sequence.state else {
                rule!(!has_states, "sequence {index}: no state, but the model needs one");
                continue;
            };
            rule!(has_states, "sequence {index}: a state, but the model has none");
            for StateId(id) in [read, write] {
                let count = limits.states;
                rule!((id as usize) < count, "sequence {index}: state {id} of {count} does not exist");
            }
            users.push((write, index));
        }
        users.sort_unstable();
        for pair in users.windows(2) {
            let [(StateId(id), _), (_, index)] = [pair[0], pair[1]];
            rule!(pair[0].0 != pair[1].0, "sequence {index}: state {id} is written twice");
        }
        for (index, sequence) in self.sequences.iter().enumerate() {
            let Some(StateUse { read, write: _ }) = sequence.state.filter(|_| sequence.start > 0) else {
                continue;
            };
            if let Ok(found) = users.binary_search_by_key(&read, |(state, _)| *state) {
                let StateId(id) = read;
                let own = users[found].1 == index;
                rule!(own, "sequence {index}: state {id} is read here and written in the same step");
            }
        }
        Ok(())
    }
}
