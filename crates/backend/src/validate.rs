//! The contract's rules, checked: [`Step::validate`].

use std::fmt::Display;

use crate::{
    AdapterId, AdapterUse, GivenRows, KvLayout, Limits, Output, OutputKind, PageId, Program, SampleRequest,
    StateId, StateUse, Step, StepError, StepSequence, TokenMask,
};

/// Fails with [`StepError::Invalid`] and a message unless the rule holds.
macro_rules! rule {
    ($holds:expr, $($message:tt)*) => {
        if !$holds {
            return Err(StepError::Invalid(format!($($message)*)));
        }
    };
}

impl Step<'_> {
    /// Checks every rule of the contract, so that a runner may index without fear. Takes time in proportion to the
    /// step's rows and page tables, and one bit of memory for each page of the arena.
    ///
    /// # Errors
    /// [`StepError::Invalid`] with the first rule that is broken, and where.
    pub fn validate(&self, program: &Program, limits: &Limits) -> Result<(), StepError> {
        let rows = self.tokens.len();
        rule!(rows > 0, "no rows");
        at_most(rows, "rows", limits.max_rows)?;
        at_most(self.sequences.len(), "sequences", limits.max_sequences)?;
        at_most(self.outputs.len(), "outputs", limits.max_outputs)?;
        let ids = program.token_ids();
        let biases = program.attentions().filter_map(|attention| attention.distance_bias);
        let longest = biases.map(|bias| bias.reach + 1).min();
        for (row, &token) in self.tokens.iter().enumerate() {
            rule!((token as usize) < ids, "row {row}: token {token} of {ids} does not exist");
        }
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
        let mut next = 0;
        for (index, sequence) in self.sequences.iter().enumerate() {
            let (first, end) = (sequence.rows.start, sequence.rows.end);
            rule!(
                first == next && end > first,
                "sequence {index}: rows {first}..{end} do not follow row {next}"
            );
            next = end;
            let start = sequence.start;
            rule!(
                start == 0 || !program.bidirectional,
                "sequence {index}: begins at position {start}, but its rows attend to later ones"
            );
            let shares_pages = program.shares_pages;
            rule!(
                !shares_pages || start > 0 && end - first == 1,
                "sequence {index}: {} rows at position {start}, not one row after the tokens of another program",
                end - first
            );
            self.validate_tables(index, sequence, program, limits)?;
            if let Some(longest) = longest {
                let len = sequence.len();
                rule!(len <= longest, "sequence {index}: {len} tokens, but biases are for {longest}");
            }
            if let Some(positions) = program.embed().and_then(|embed| embed.positions.as_ref()) {
                let (len, count) = (sequence.len(), positions.count);
                rule!(len <= count, "sequence {index}: {len} tokens, but the model has {count} positions");
            }
        }
        rule!(next == rows, "rows {next}..{rows} belong to no sequence");
        self.validate_merged(program)?;
        self.validate_spans()?;
        self.validate_adapters()?;
        if !program.shares_pages {
            self.validate_writes(&program.kv, limits)?;
        }
        self.validate_states(program, limits)?;
        let with_outputs = self.outputs.iter().map(|output| self.rows_of(output).len()).sum();
        at_most(with_outputs, "rows with outputs", limits.max_outputs)?;
        for (index, output) in self.outputs.iter().enumerate() {
            rule!(output.row < rows, "output {index}: row {} of {rows} does not exist", output.row);
            let has_head = program.head().is_some() || !output.kind.needs_head();
            rule!(has_head, "output {index}: it needs a head, but the model ends with rows");
            match output.kind {
                OutputKind::Sample(request) => validate_request(index, &request, program.vocab)?,
                OutputKind::Score { token, top: _ } => {
                    let vocab = program.vocab;
                    rule!(
                        (token as usize) < vocab,
                        "output {index}: token {token} of {vocab} does not exist"
                    );
                }
                OutputKind::Mean => self.validate_mean(index, program)?,
                OutputKind::Logits | OutputKind::Embedding | OutputKind::Residual => {}
            }
        }
        Ok(())
    }

    /// A mean is the only one of a whole sequence, of which no logits are needed.
    fn validate_mean(&self, index: usize, program: &Program) -> Result<(), StepError> {
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

    /// Refuses carried tokens, for runners that have none.
    ///
    /// # Errors
    /// [`StepError::Invalid`]
    pub fn carries_nothing(&self) -> Result<(), StepError> {
        rule!(self.carried.is_empty(), "this device takes no tokens from a step that was not collected");
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

    /// Checks that a runner has all adapters of the step.
    ///
    /// # Errors
    /// [`StepError::Invalid`]
    pub fn has_adapters(&self, exists: impl Fn(AdapterId) -> bool) -> Result<(), StepError> {
        let missing = self.adapters.iter().map(|used| used.adapter).find(|&id| !exists(id));
        rule!(missing.is_none(), "there is no adapter {}", missing.map_or(0, |AdapterId(id)| id));
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

    /// Checks one sequence's block tables: complete, inside of the arena, scratch only where no row attends.
    fn validate_tables(
        &self,
        index: usize,
        sequence: &StepSequence,
        program: &Program,
        limits: &Limits,
    ) -> Result<(), StepError> {
        let tokens = sequence.start.checked_add(sequence.rows.len());
        let fits = tokens.is_some_and(|tokens| tokens <= limits.max_context);
        rule!(fits, "sequence {index}: longer than the {} tokens that were loaded for", limits.max_context);
        let (kv, paged) = (&program.kv, program.paged_tokens(sequence));
        let blocks = paged.div_ceil(limits.block_size);
        let (start, end) = (sequence.tables.start, sequence.tables.end);
        let inside = start <= end && end <= self.pages.len();
        rule!(inside, "sequence {index}: tables {start}..{end} are not in the {} given", self.pages.len());
        let (groups, pages) = (kv.groups.len(), end - start);
        rule!(
            pages == groups * blocks,
            "sequence {index}: {pages} pages, not {groups} groups of {blocks} for {paged} tokens"
        );
        for (group, window) in kv.groups.iter().map(|group| group.window).enumerate() {
            // The first row attends to positions from here on; later rows do not attend to earlier ones.
            let seen_from = window.map_or(0, |window| (sequence.start + 1).saturating_sub(window as usize));
            for (block, &page) in sequence.table(self.pages, group, groups).iter().enumerate() {
                let PageId(id) = page;
                let place = format_args!("sequence {index}, group {group}, block {block}");
                rule!((id as usize) < limits.pages, "{place}: page {id} of {} does not exist", limits.pages);
                let passed = (block + 1) * limits.block_size <= seen_from;
                rule!(page != PageId::SCRATCH || passed, "{place}: scratch, but its tokens are still seen");
            }
        }
        Ok(())
    }

    /// A page that a sequence writes appears nowhere else in the step: not written twice, not read by others.
    fn validate_writes(&self, kv: &KvLayout, limits: &Limits) -> Result<(), StepError> {
        let groups = kv.groups.len();
        let mut written = vec![0_u64; limits.pages.div_ceil(64)];
        let is_written =
            |written: &[u64], PageId(id): PageId| written[id as usize / 64] >> (id % 64) & 1 == 1;
        for (index, sequence) in self.sequences.iter().enumerate() {
            for group in 0..groups {
                for &page in &sequence.table(self.pages, group, groups)[sequence.start / limits.block_size..]
                {
                    let PageId(id) = page;
                    rule!(
                        !is_written(&written, page),
                        "sequence {index}, group {group}: page {id} is written twice"
                    );
                    written[id as usize / 64] |= 1 << (id % 64);
                }
            }
        }
        for (index, sequence) in self.sequences.iter().enumerate() {
            for group in 0..groups {
                for &page in &sequence.table(self.pages, group, groups)[..sequence.start / limits.block_size]
                {
                    let PageId(id) = page;
                    rule!(
                        !is_written(&written, page),
                        "sequence {index}, group {group}: page {id} is read here and written in the same step"
                    );
                }
            }
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

fn validate_request(index: usize, request: &SampleRequest<'_>, vocab: usize) -> Result<(), StepError> {
    request.params.check(vocab).map_err(|error| StepError::Invalid(format!("output {index}: {error}")))?;
    let Some(mask) = request.mask.map(TokenMask::bits) else { return Ok(()) };
    let words = vocab.div_ceil(32);
    rule!(
        mask.len() == words,
        "output {index}: a mask of {} words, not {words} for {vocab} tokens",
        mask.len()
    );
    // Bits past the vocabulary allow nothing.
    let in_vocabulary =
        |word: usize| if word + 1 < words { u32::MAX } else { u32::MAX >> (words * 32 - vocab) };
    let allows = mask.iter().enumerate().any(|(word, &bits)| bits & in_vocabulary(word) != 0);
    rule!(allows, "output {index}: a mask that allows nothing");
    Ok(())
}

fn at_most(count: usize, what: impl Display, limit: usize) -> Result<(), StepError> {
    rule!(count <= limit, "{count} {what}, more than the {limit} that were loaded for");
    Ok(())
}
