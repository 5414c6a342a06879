//! Adapters (LoRA) of a runner: launches for the steps that have some, which share all other buffers with those that have none. They
//! are made before the first such step, and again if buffers have grown.

use paguro_backend::{Adaptable, AdapterId, LoadError, LowRank, Matrix, Step, StepError, Weights};

use super::GpuRunner;
use crate::{
    emit::{Model, emit},
    low_rank::Adapters,
    lower::{Adapted, Facts, Slot, kernels::low_rank_rows, sites},
    plan::{Plan, StepAdapters},
};

/// Adapters, and the launches for them.
#[derive(Default)]
pub(super) struct AdaptedModel {
    adapters: Option<Adapters>,
    /// Sizes of the launches.
    adapted: Adapted,
    model: Option<Model>,
    /// True if buffers have grown since the launches were made. Steps on the device still use these.
    is_stale: bool,
}

impl AdaptedModel {
    /// Returns the launches for a planned step.
    pub(super) fn of<'a>(&'a self, plan: &Plan, model: &'a Model) -> &'a Model {
        self.model.as_ref().filter(|_| plan.adapted.is_some()).unwrap_or(model)
    }

    /// Returns true if an adapter exists.
    pub(super) fn has(&self, id: AdapterId) -> bool {
        self.adapters.as_ref().is_some_and(|adapters| adapters.has(id))
    }
}

/// Returns weights without their bytes, which are on the device.
pub(super) fn without_bytes(weights: &Weights) -> Weights {
    let of = |matrix: &Matrix| Matrix { bytes: Vec::new().into(), ..matrix.clone() };
    let matrices = weights.matrices.iter().map(of).collect();
    Weights { matrices, vectors: weights.vectors.clone(), tables: weights.tables.iter().map(of).collect() }
}

impl GpuRunner {
    /// Adds pairs to an adapter.
    ///
    /// # Errors
    /// [`LoadError`]
    pub(super) fn add_pairs(&mut self, id: AdapterId, pairs: &[LowRank]) -> Result<(), LoadError> {
        let adapters = match &mut self.adapted.adapters {
            Some(adapters) => adapters,
            none => {
                let adaptable = Adaptable::of(&self.program, &self.weights);
                let target = self.device.now();
                let facts = Facts::new(target, &self.program, &self.kv, Some(&self.weights), &self.limits)?;
                let sites = sites(&facts, &adaptable)?;
                none.insert(Adapters::new(adaptable, sites, &self.weights))
            }
        };
        let loaded = adapters.load(&self.device, id, pairs);
        // Some buffers may have grown before an error.
        self.adapted.is_stale |= !matches!(loaded, Ok(false));
        loaded?;
        self.device.check().map_err(|error| LoadError::Device(error.to_string()))
    }

    /// Removes an adapter. With the last one, its memory is freed.
    pub(super) fn remove_adapter(&mut self, id: AdapterId) {
        let Some(adapters) = &mut self.adapted.adapters else { return };
        adapters.unload(id);
        if adapters.is_empty() {
            self.adapted = AdaptedModel::default();
        }
    }

    /// Plans the adapters of a step, and makes the launches for them.
    ///
    /// # Errors
    /// Not enough memory, or a kernel does not compile.
    pub(super) fn plan_adapters(&mut self, step: &Step<'_>) -> Result<(), StepError> {
        let flight = self.flight_index();
        let Some(adapters) = self.adapted.adapters.as_ref().filter(|_| !step.adapters.is_empty()) else {
            return Ok(());
        };
        let (plan, item_rows) = (&self.flights[flight].plan, low_rank_rows(&self.device.target));
        let sequences = (0..).zip(step.sequences);
        let of_rows = sequences.flat_map(|(index, sequence)| sequence.rows.clone().map(move |_| index));
        let rows = adapters.table(step, of_rows, item_rows);
        if rows.low == 0 {
            return Ok(());
        }
        let sequence_of = |&row: &usize| step.sequences.partition_point(|sequence| sequence.rows.end <= row);
        let of_slice = |(first, count): (usize, usize)| {
            let rows = &plan.outputs.rows[first..first + count];
            (first, adapters.table(step, rows.iter().map(sequence_of), item_rows))
        };
        let outputs: Vec<_> = plan.slices().into_iter().map(of_slice).collect();
        let AdaptedModel { adapted, model, is_stale, .. } = &mut self.adapted;
        *is_stale |= model.is_none();
        for (of_outputs, table) in
            [(false, &rows)].into_iter().chain(outputs.iter().map(|(_, table)| (true, table)))
        {
            if !table.fits(of_outputs, adapted) {
                table.enlarge(of_outputs, adapted);
                *is_stale = true;
            }
        }
        self.flights[flight].plan.adapted = Some(StepAdapters { rows, outputs });
        if self.adapted.is_stale {
            let made = self.emit_adapted().map_err(|error| StepError::Device(error.to_string()))?;
            (self.adapted.model, self.adapted.is_stale) = (Some(made), false);
        }
        Ok(())
    }

    /// Makes the launches of steps with adapters.
    fn emit_adapted(&mut self) -> Result<Model, LoadError> {
        // Steps on the device may still use buffers that are emptied.
        self.device.wait().map_err(|error| LoadError::Device(error.to_string()))?;
        let AdaptedModel { adapters, adapted, .. } = &mut self.adapted;
        let (sites, buffers) = adapters.as_ref().map(Adapters::changed).unwrap_or_default();
        adapted.sites = sites;
        let mut bound = self.model.bound.clone();
        // Words of handoff have those of low-rank products behind them.
        bound.buffers.retain(|slot, _| !matches!(slot, Slot::Words(_)));
        bound.counters = self.kernel_statistics.names().to_vec();
        for (site, [a, b]) in buffers.into_iter().enumerate() {
            bound.buffers.extend([(Slot::A(site), a), (Slot::B(site), b)]);
        }
        let target = self.device.now();
        let mut facts = Facts::new(target, &self.program, &self.kv, Some(&self.weights), &self.limits)?;
        facts.adapted = Some(&*adapted);
        let model = emit(&self.device, &facts, &self.weights, bound)?;
        self.device.compile_all()?;
        self.kernel_statistics.extend(&self.device, &model.counters)?;
        Ok(model)
    }
}
