//! Adapters (LoRA) of a runner: launches for the steps that have some, which share all other buffers with those that have none. They
//! are made after an adapter was loaded, on the thread that waits for it, and again if buffers have grown. Until then, steps with
//! earlier adapters have the launches and the buffers from before.

use std::sync::{Arc, Mutex};

use paguro_backend::{
    Adaptable, AdapterId, AdapterWork, Limits, LoadError, LowRank, Matrix, Program, Step, StepError, Weights,
};

use super::GpuRunner;
use crate::{
    device::{Device, lock},
    emit::{Bound, Model, emit},
    heads::KvLayout,
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
    /// True if buffers have grown since the launches were made.
    is_stale: bool,
    /// If so, the adapters that these launches can have.
    known: Vec<AdapterId>,
    /// Number of loads for which buffers have grown.
    grown: usize,
    /// Launches of another thread.
    prepared: Arc<Mutex<Option<Prepared>>>,
}

/// Launches, and the adapters and sizes that they are for.
struct Prepared {
    model: Model,
    adapted: Adapted,
    ids: Vec<AdapterId>,
    grown: usize,
}

/// All that launches depend on.
struct Inputs {
    device: Arc<Device>,
    program: Program,
    weights: Weights,
    kv: KvLayout,
    limits: Limits,
    adapted: Adapted,
    bound: Bound,
}

impl Inputs {
    fn emit(self) -> Result<(Model, Adapted), LoadError> {
        let Self { device, program, weights, kv, limits, adapted, bound } = self;
        let facts = Facts::new(device.now(), &program, &kv, Some(&weights), &limits)?;
        let model = emit(&device, &Facts { adapted: Some(&adapted), ..facts }, &weights, bound)?;
        device.compile_all()?;
        Ok((model, adapted))
    }
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
        if !matches!(loaded, Ok(false)) {
            if !self.adapted.is_stale {
                self.adapted.known = adapters.ids().filter(|&known| known != id).collect();
            }
            (self.adapted.is_stale, self.adapted.grown) = (true, self.adapted.grown + 1);
        }
        loaded?;
        self.device.check().map_err(|error| LoadError::Device(error.to_string()))
    }

    /// Removes an adapter. With the last one, its memory is freed.
    pub(super) fn remove_adapter(&mut self, id: AdapterId) {
        let Some(adapters) = &mut self.adapted.adapters else { return };
        adapters.unload(id);
        self.adapted.known.retain(|&known| known != id);
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
        if !step.adapters.is_empty() {
            self.adopt_prepared().map_err(|error| StepError::Device(error.to_string()))?;
        }
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
        let AdaptedModel { adapted, model, is_stale, known, .. } = &mut self.adapted;
        let is_known = step.adapters.iter().all(|used| known.contains(&used.adapter));
        let mut needs_launches = model.is_none() || *is_stale && !is_known;
        for (of_outputs, table) in
            [(false, &rows)].into_iter().chain(outputs.iter().map(|(_, table)| (true, table)))
        {
            if !table.fits(of_outputs, adapted) {
                table.enlarge(of_outputs, adapted);
                needs_launches = true;
            }
        }
        self.flights[flight].plan.adapted = Some(StepAdapters { rows, outputs });
        if needs_launches {
            let made = self.inputs(self.adapted.adapted.clone()).emit();
            let (model, adapted) = made.map_err(|error| StepError::Device(error.to_string()))?;
            self.adopt(model, adapted).map_err(|error| StepError::Device(error.to_string()))?;
            self.adapted.is_stale = false;
        }
        Ok(())
    }

    /// Returns the work of making launches for the adapters that are loaded, unless they exist.
    pub(super) fn adapter_work(&self) -> Option<AdapterWork> {
        let AdaptedModel { adapters, adapted, model, is_stale, known: _, grown, prepared } = &self.adapted;
        let adapters = adapters.as_ref()?;
        let mut room = adapted.clone();
        adapters.make_room(&self.limits, low_rank_rows(&self.device.target), &mut room);
        if room.ranks == 0 || model.is_some() && !is_stale && room == *adapted {
            return None;
        }
        let (inputs, prepared) = (self.inputs(room), prepared.clone());
        let (ids, grown) = (adapters.ids().collect(), *grown);
        Some(Box::new(move || {
            let (model, adapted) = inputs.emit()?;
            *lock(&prepared) = Some(Prepared { model, adapted, ids, grown });
            Ok(())
        }))
    }

    /// Replaces the launches by those of another thread, if there are some.
    fn adopt_prepared(&mut self) -> Result<(), LoadError> {
        let Some(Prepared { model, adapted, ids, grown }) = lock(&self.adapted.prepared).take() else {
            return Ok(());
        };
        // Others may have been made meanwhile.
        if !model.counters.starts_with(self.kernel_statistics.names()) {
            return Ok(());
        }
        let has = |id: &AdapterId| self.adapted.has(*id);
        self.adapted.known = ids.into_iter().filter(has).collect();
        self.adapted.is_stale = self.adapted.grown != grown;
        self.adopt(model, adapted)
    }

    fn adopt(&mut self, model: Model, adapted: Adapted) -> Result<(), LoadError> {
        self.kernel_statistics.extend(&self.device, &model.counters)?;
        (self.adapted.model, self.adapted.adapted) = (Some(model), adapted);
        Ok(())
    }

    /// Returns all that launches with these sizes depend on.
    fn inputs(&self, mut adapted: Adapted) -> Inputs {
        let (sites, buffers) = self.adapted.adapters.as_ref().map(Adapters::changed).unwrap_or_default();
        adapted.sites = sites;
        let mut bound = self.model.bound.clone();
        // Words of handoff have those of low-rank products behind them.
        bound.buffers.retain(|slot, _| !matches!(slot, Slot::Words(_)));
        bound.counters = self.kernel_statistics.names().to_vec();
        for (site, [a, b]) in buffers.into_iter().enumerate() {
            bound.buffers.extend([(Slot::A(site), a), (Slot::B(site), b)]);
        }
        let (device, program, weights) = (self.device.clone(), self.program.clone(), self.weights.clone());
        Inputs { device, program, weights, kv: self.kv.clone(), limits: self.limits, adapted, bound }
    }
}
