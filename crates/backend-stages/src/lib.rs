//! One model over several devices: a program is cut between layers into stages, and each device runs one.
//!
//! [`Stages`] is a backend of backends, which only the application composes. The engine sees one device, and each of its pages is
//! one page of every stage, with K and V of the layers of that stage. The residual stream passes from stage to stage through the
//! host's memory, in single precision. So the bits of a row depend on the devices and the cuts, and on nothing else.
//!
//! Each stage has a thread ([`pipeline`]), and the runner has as many [lanes](Runner::lanes) as stages: the engine keeps as many steps in
//! flight, so that all devices compute.

mod links;
mod pipeline;
mod runner;
mod stage;
mod step;

use std::ops::Range;

use paguro_backend::{
    Adaptable, Backend, Capacity, DeviceLayout, Input, KvDtype, Limits, LoadError, Matrix, MatrixId,
    PacedRunner, Program, Runner, Stage, Weights, legal_cuts, split, stage_program,
};

use self::{runner::StagesRunner, stage::LoadedStage};

/// Places of the cuts of a program: layers in ascending order.
pub type Cuts<'a> = Box<dyn Fn(&Program) -> Vec<usize> + Send + Sync + 'a>;

/// Devices, each of which runs one stage of a model.
pub struct Stages<'a> {
    name: String,
    devices: Vec<&'a dyn Backend>,
    cuts: Cuts<'a>,
}

impl<'a> Stages<'a> {
    /// Composes devices, in the order of their stages. `cuts` returns the layers before which a program is cut, one fewer than
    /// there are devices. The last device runs other programs as a whole: those of other lengths, and those that cannot be cut there.
    ///
    /// # Panics
    /// Without devices.
    pub fn new(devices: Vec<&'a dyn Backend>, cuts: Cuts<'a>) -> Self {
        assert!(!devices.is_empty(), "stages need devices");
        let names: Vec<_> = devices.iter().map(|device| device.name()).collect();
        Self { name: names.join("+"), devices, cuts }
    }

    /// Returns the index of the device that runs a tower.
    fn device_of(&self, tower: &Program) -> usize {
        self.devices.iter().position(|device| device.runs_tower(tower)).unwrap_or(0)
    }

    /// Returns the devices that run a stage of a program, and the cuts between their stages.
    fn cut(&self, program: &Program) -> (&[&'a dyn Backend], Vec<usize>) {
        if matches!(program.input, Input::Patches(_)) {
            let tower = self.device_of(program);
            return (&self.devices[tower..=tower], Vec::new());
        }
        let (cuts, legal) = ((self.cuts)(program), legal_cuts(program));
        let is_legal = cuts.len() + 1 == self.devices.len() && cuts.iter().all(|cut| legal.contains(cut));
        match is_legal {
            true => (&self.devices, cuts),
            false => (&self.devices[self.devices.len() - 1..], Vec::new()),
        }
    }

    /// Returns the stages of a program, which refer to its own weights, with their devices and layers.
    fn programs(&self, program: &Program) -> Vec<(&'a dyn Backend, Range<usize>, Program)> {
        let (devices, cuts) = self.cut(program);
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let ends = cuts.iter().copied().chain([program.layers.len()]);
        let layers = starts.zip(ends).map(|(start, end)| start..end);
        let stages = devices.iter().zip(layers);
        stages.map(|(device, own)| (*device, own.clone(), stage_program(program, own))).collect()
    }
}

/// Returns the limits of a stage of these layers. All but the last one return the rows of the residual stream.
pub fn limits_of(device: &dyn Backend, layers: &Range<usize>, whole: &Program, limits: &Limits) -> Limits {
    let is_last = layers.end == whole.layers.len();
    let has_more = |slots: &usize| {
        whole.experts().any(|(layer, experts)| layers.contains(&layer) && experts.count > *slots)
    };
    let mut mixers = whole.layers[layers.clone()].iter().flat_map(|layer| layer.mixer.parts());
    let has_states = mixers.any(|mixer| mixer.state().is_some());
    let has_slots = |slots: &usize| device.capacity().host_free > 0 && has_more(slots);
    Limits {
        max_outputs: if is_last { limits.max_outputs } else { limits.max_rows },
        states: if has_states { limits.states } else { 0 },
        expert_slots: limits.expert_slots.filter(has_slots),
        ..*limits
    }
}

impl Backend for Stages<'_> {
    fn name(&self) -> &str {
        &self.name
    }

    fn capacity(&self) -> Capacity {
        let all: Vec<_> = self.devices.iter().map(|device| device.capacity()).collect();
        let descriptions: Vec<_> = all.iter().map(|capacity| capacity.description.clone()).collect();
        Capacity {
            description: descriptions.join("; "),
            bytes_free: all.iter().map(|capacity| capacity.bytes_free).fold(0, u64::saturating_add),
            host_free: all.iter().map(|capacity| capacity.host_free).max().unwrap_or(0),
            step_rows: all.iter().map(|capacity| capacity.step_rows).min().unwrap_or(1),
            features: all.into_iter().flat_map(|capacity| capacity.features).collect(),
        }
    }

    fn page_bytes(&self, program: &Program, block_size: usize, kv_dtype: KvDtype) -> usize {
        let stages = self.programs(program);
        stages.iter().map(|(device, _, stage)| device.page_bytes(stage, block_size, kv_dtype)).sum()
    }

    fn state_bytes(&self, program: &Program) -> usize {
        self.programs(program).iter().map(|(device, _, stage)| device.state_bytes(stage)).sum()
    }

    fn checkpoint_pages(&self, program: &Program, block_size: usize, kv_dtype: KvDtype) -> usize {
        // Each page has the same part of the states of all stages.
        let stages = self.programs(program).into_iter();
        let pages = stages.map(|(device, _, stage)| device.checkpoint_pages(&stage, block_size, kv_dtype));
        pages.max().unwrap_or(0)
    }

    fn device_layout(&self, matrix: &Matrix) -> DeviceLayout {
        let layouts = self.devices.iter().map(|device| device.device_layout(matrix));
        layouts.max_by_key(|layout| layout.bytes).expect("there are devices")
    }

    fn weight_bytes(&self, program: &Program, weights: &Weights) -> u64 {
        let (devices, cuts) = self.cut(program);
        let stages = devices.iter().zip(split(program, weights, &cuts));
        let bytes = stages.map(|(device, stage)| device.weight_bytes(&stage.program, &stage.weights));
        bytes.fold(0, u64::saturating_add)
    }

    fn buffer_bytes(&self, program: &Program, limits: &Limits) -> u64 {
        let stages = self.programs(program);
        let bytes = stages.iter().map(|(device, layers, stage)| {
            device.buffer_bytes(stage, &limits_of(*device, layers, program, limits))
        });
        bytes.fold(0, u64::saturating_add)
    }

    fn load(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<Box<dyn Runner>, LoadError> {
        program.check(&weights)?;
        let (devices, cuts) = self.cut(program);
        if let [whole] = devices {
            let own = limits_of(*whole, &(0..program.layers.len()), program, &limits);
            return whole.load(program, weights, own);
        }
        let stages = devices.iter().zip(split(program, &weights, &cuts));
        let mut loaded = Vec::new();
        for (device, Stage { layers, program: stage, weights, matrices }) in stages {
            let own = limits_of(*device, &layers, program, &limits);
            let adaptable = Adaptable::of(&stage, &weights);
            let is_adaptable = |(_, own): &(MatrixId, MatrixId)| adaptable.shape(*own).is_some();
            let matrices = matrices.into_iter().filter(is_adaptable).collect();
            let parts = device.checkpoint_pages(&stage, limits.block_size, limits.kv_dtype);
            let runner = device.load(&stage, weights, own)?;
            loaded.push((LoadedStage::new(runner, &stage, layers, parts), matrices));
        }
        let parts = self.checkpoint_pages(program, limits.block_size, limits.kv_dtype);
        Ok(Box::new(StagesRunner::new(loaded, program, limits, parts)?))
    }

    fn runs_tower(&self, tower: &Program) -> bool {
        // Text models of all devices have given rows; only the device of the tower needs its operations.
        self.devices.iter().any(|device| device.runs_tower(tower))
    }

    fn load_tower(
        &self,
        program: &Program,
        weights: Weights,
        limits: Limits,
    ) -> Result<PacedRunner, LoadError> {
        self.devices[self.device_of(program)].load_tower(program, weights, limits)
    }
}
