//! Drafts by a model before a step; [`crate::speculation`] has the rules.
//!
//! - A sequence's own text goes first, if its guess at the next token is at least as likely to be right as the model's.
//! - The lengths are chosen with the expected times of the model's steps, before any of them. Whether the drafts are checked is
//!   decided again when the step is planned.
//! - The model reads a text up to its end only if the sequence's credit pays for it, and for `step_time` in a step at most.
//! - Masks of grammars are computed after the drafts, because their computation continues through these.

use std::time::Duration;

use paguro_backend::StepError;

use super::Scheduler;
use crate::{
    cost::Work,
    sequence::Sequence,
    speculation::{
        Acceptance, Candidate, Draft, DraftRunner, LEAST_RATE, Lag, MOST_BY_MODEL, MOST_READ, ModelKind,
        SHORT_LAG, Speculator, Text,
    },
};

/// A draft that a model may make.
#[derive(Debug)]
struct Planned {
    /// Index of the running sequence.
    index: usize,
    lag: Lag,
    /// Chance of each token that it and all before it are accepted.
    chances: Vec<f64>,
    /// Tokens to draft.
    length: usize,
}

impl Scheduler {
    /// Drafts with a model from now on, beside the sequences' own texts.
    pub fn draft_by(&mut self, drafter: &DraftRunner) {
        let kind = match drafter.is_head() {
            true => ModelKind::Head { kept_rows: drafter.kept_rows() },
            false => ModelKind::Model,
        };
        if let Some(speculation) = &mut self.speculation {
            speculation.model = Some(kind);
            self.defers_masks = true;
        }
    }

    /// Stops drafting with a model, which has failed.
    pub fn draft_without_model(&mut self) {
        self.speculation.iter_mut().for_each(|speculation| speculation.model = None);
        self.running.iter_mut().for_each(|sequence| sequence.drafts.rows = None);
        self.defers_masks = false;
        self.stats.failed_steps += 1;
    }

    /// Returns the number of rows of a step whose outputs are reserved for a head.
    pub(super) fn hidden_outputs(&self) -> usize {
        let model = self.speculation.as_ref().and_then(|speculation| speculation.model);
        if matches!(model, Some(ModelKind::Head { kept_rows: _ })) { self.limits.max_rows } else { 0 }
    }

    /// Returns true if the model will probably draft before the next step.
    pub fn will_draft_by_model(&self, drafter: &DraftRunner) -> bool {
        // The tokens of the running step are not known yet; the lengths are similar without them.
        self.plan_model_drafts(drafter).iter().any(|planned| planned.length > 0)
    }

    /// Drafts the next tokens of the sequences for which that probably pays.
    ///
    /// # Errors
    /// The model's step fails. The sequences have no drafts by it.
    pub fn draft_by_model(&mut self, drafter: &mut DraftRunner) -> Result<(), StepError> {
        drafter.retain(|owner| self.running.iter().any(|sequence| sequence.owner() == owner));
        self.grant_credit(drafter);
        let planned = self.plan_model_drafts(drafter);
        let texts: Vec<_> = planned
            .iter()
            .filter(|planned| planned.length > 0)
            .map(|planned| (text(&self.running[planned.index]), planned.length))
            .collect();
        let drafts = if texts.is_empty() { Vec::new() } else { drafter.draft(&texts, self.step_time)? };
        let drafting = planned.into_iter().filter(|planned| planned.length > 0).zip(drafts);
        for (Planned { index, lag, chances, .. }, tokens) in drafting {
            let sequence = &mut self.running[index];
            if let Some(rows) = &mut sequence.drafts.rows {
                // Those before the last token are read; the last one is not, if the draft is checked.
                rows.drop_before(lag.read_to(tokens.is_empty()).saturating_sub(1));
            }
            if tokens.is_empty() {
                continue;
            }
            let replayed = sequence.drafts.speculator.as_ref().and_then(|it| it.replayed(tokens.len()));
            let tokens = replayed.unwrap_or(tokens);
            let chances = chances[..tokens.len()].to_vec();
            sequence.set_draft(Draft { tokens, chances, of_model: true });
        }
        Ok(())
    }

    /// Starts the computations of masks that were deferred until there are drafts.
    pub fn start_masks(&mut self) {
        for (owner, new) in std::mem::take(&mut self.masks_due) {
            if let Some(sequence) = self.running.iter_mut().find(|sequence| sequence.owner() == owner) {
                sequence.compute_mask(new, &mut self.mask_workers);
            }
        }
    }

    /// Records the time of the model before the next step.
    pub fn record_drafting(&mut self, duration: Duration) {
        self.drafting_seconds += duration.as_secs_f64();
        self.stats.draft_model_nanoseconds += duration.as_nanos() as u64;
    }

    /// Adds the part of its prompt's time that drafts may cost to a new answer's credit. A model of its own may also read the text once:
    /// whoever sets it wants that.
    fn grant_credit(&mut self, drafter: &DraftRunner) {
        let new = |sequence: &&mut Sequence| !sequence.drafts.has_credit && sequence.tokens.generated() > 0;
        for sequence in self.running.iter_mut().filter(new) {
            sequence.drafts.has_credit = true;
            let (prompt, cached) = (sequence.tokens.prompt(), sequence.prefix.cached_tokens.unwrap_or(0));
            let seconds = self.cost.seconds(Work::default().and(cached, prompt.saturating_sub(cached)));
            sequence.drafts.credit.0 += (1.0 - LEAST_RATE) * seconds;
            if !drafter.is_head() {
                sequence.drafts.credit.0 += drafter.reading_seconds(prompt.min(MOST_READ));
            }
        }
    }

    /// Chooses the drafts of the model for a step in which all sequences decode; none for other steps.
    fn plan_model_drafts(&self, drafter: &DraftRunner) -> Vec<Planned> {
        let Some(speculation) = self.speculation.as_ref().filter(|it| it.model.is_some()) else {
            return Vec::new();
        };
        let has_place = self.running.len() < self.limits.max_sequences;
        let decodes = |sequence: &Sequence| !sequence.prefills() && sequence.tokens.generated() > 0;
        if !self.running.iter().all(decodes) || has_place && !self.waiting.is_empty() {
            return Vec::new();
        }
        let work = self.running.iter().fold(Work::default(), |work, it| work.and(it.kv.computed, 1));
        let (mut candidates, mut planned) = (Vec::new(), Vec::new());
        for (index, sequence) in self.running.iter().enumerate() {
            let Some(speculator) = sequence.drafts.speculator.as_ref().filter(|_| sequence.may_draft())
            else {
                continue;
            };
            let start = sequence.kv.computed + 1;
            let own = &sequence.drafts.next.chances;
            let lag = drafter.lag(&text(sequence)).filter(|lag| self.may_read(sequence, lag, drafter));
            let most = lag.map_or(0, |lag| {
                lag.most.min(MOST_BY_MODEL).min(sequence.most_drafted()).min(self.most_rows(sequence))
            });
            let chances = chances(speculator, &speculation.all_by_model, most, &sequence.request.drafts);
            let is_better = chances.first() > own.first() && !sequence.drafts.next.of_model;
            match lag.filter(|_| is_better) {
                Some(lag) => {
                    planned.push((
                        candidates.len(),
                        Planned { index, lag, chances: chances.clone(), length: 0 },
                    ));
                    candidates.push((index, Candidate { start, chances }));
                }
                None if !own.is_empty() => {
                    candidates.push((index, Candidate { start, chances: own.clone() }));
                }
                None => {}
            }
        }
        if planned.is_empty() {
            return Vec::new();
        }
        // Long texts are read once, for all later drafts.
        let drafting = |lengths: &[usize]| {
            drafter.seconds(planned.iter().map(|(candidate, it)| (it.lag.short(), lengths[*candidate])))
        };
        let everyone: Vec<usize> = (0..self.running.len()).collect();
        let (drafting_sequences, candidates): (Vec<_>, Vec<_>) = candidates.into_iter().unzip();
        let lengths = self.choose_lengths(&everyone, &drafting_sequences, &candidates, work, drafting);
        let planned = planned.into_iter();
        planned.map(|(candidate, it)| Planned { length: lengths[candidate], ..it }).collect()
    }

    /// Returns true if the sequence's credit pays for reading its text.
    fn may_read(&self, sequence: &Sequence, lag: &Lag, drafter: &DraftRunner) -> bool {
        lag.rows <= SHORT_LAG
            || sequence.request.drafts.eager
            || drafter.seconds(std::iter::once((*lag, 1))) <= sequence.drafts.credit.0
    }
}

/// Returns a sequence as a draft model sees it.
fn text(sequence: &Sequence) -> Text<'_> {
    Text {
        owner: sequence.owner(),
        tokens: &sequence.tokens,
        rows: sequence.drafts.rows.as_ref(),
        tables: &sequence.kv.tables,
    }
}

/// Returns the chance of each of the model's tokens that it and all before it are accepted, as many as the request permits.
fn chances(
    speculator: &Speculator,
    all: &Acceptance,
    most: usize,
    options: &crate::DraftOptions,
) -> Vec<f64> {
    let mut together = 1.0;
    let of = |index| {
        let chance = speculator.by_model.chance(all, Acceptance::len_of_model(index));
        together *= chance;
        (chance >= options.least_chance).then_some(together)
    };
    (0..most).map_while(of).collect()
}
