//! The contract's rules, checked: [`Step::validate`]. `parts` has the rules of what most steps have not.

use std::fmt::Display;

use crate::{
    AdapterId, KvLayout, Limits, OutputKind, PageId, Program, SampleRequest, Step, StepError, StepSequence,
    TokenMask,
};

/// Fails with [`StepError::Invalid`] and a message unless the rule holds.
macro_rules! rule {
    ($holds:expr, $($message:tt)*) => {
        if !$holds {
            return Err(StepError::Invalid(format!($($message)*)));
        }
    };
}

mod parts;

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
        if !self.is_plain(program) {
            self.validate_parts(program, limits)?;
        }
        if !program.shares_pages {
            self.validate_writes(&program.kv, limits)?;
        }
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

    /// Returns true if rows are tokens that are known, and sequences have nothing but pages.
    fn is_plain(&self, program: &Program) -> bool {
        let has_none = self.carried.is_empty()
            && self.given.is_empty()
            && self.coordinates.is_empty()
            && self.spans.is_empty()
            && self.adapters.is_empty()
            && self.sequences.iter().all(|sequence| sequence.state.is_none());
        has_none && program.state.is_empty() && program.merged().is_none() && !program.needs_given_rows()
    }

    /// Refuses carried tokens, for runners that have none.
    ///
    /// # Errors
    /// [`StepError::Invalid`]
    pub fn carries_nothing(&self) -> Result<(), StepError> {
        rule!(self.carried.is_empty(), "this device takes no tokens from a step that was not collected");
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
