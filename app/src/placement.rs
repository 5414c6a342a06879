//! Placement of a model's weights: on one device as a whole, with the experts in the host's memory and slots for some of them on the
//! device, or with the layers divided among several devices.

use std::ops::Range;

use paguro_backend::{
    Backend, MemoryPlan, Program, Role, Weights, legal_cuts, obstacle, split, stage_program,
};
use paguro_backend_stages::Stages;
use paguro_engine::{Engine, EngineOptions, EnginePlan, PageBudget};
use paguro_model::{Model, Vision};

use crate::{
    cli::{Device, ExpertSlots},
    devices::{Chosen, Opened},
    failure::{Failure, Outcome},
    units,
};

/// Tokens of the context for whose K and V slots and layers leave memory, if the context may shrink. Beyond them, K and V get a
/// quarter of the memory besides weights and buffers with slots, and the rest with layers.
const CONTEXT_BESIDE_SLOTS: usize = 8192;

/// Minimum context to which pages are reduced on one device. A smaller one would be of no use.
const LEAST_CONTEXT: usize = 1024;

/// A model that is to be placed on devices.
#[derive(Clone, Copy)]
pub struct Placing<'a> {
    /// The devices.
    pub devices: &'a Chosen,
    /// The model's name, for errors.
    pub name: &'a str,
    /// The program.
    pub program: &'a Program,
    /// Its weights.
    pub weights: &'a Weights,
    /// Its tower for images.
    pub vision: Option<&'a Vision>,
    /// Tokens that the model was opened for.
    pub context: usize,
    /// Bytes of the GPUs, or of the CPU without any, that the model may use; `None` for all that are free.
    pub memory: Option<u64>,
}

/// The layers of a model by device, in order; a device that runs none is not listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Devices and their layers.
    pub stages: Vec<(Device, Range<usize>)>,
}

/// Bytes of weights that a token reads.
#[derive(Clone, Copy, Debug)]
pub struct Reads {
    /// Those of layers that all tokens read.
    pub always: u64,
    /// Those of the chosen experts.
    pub experts: u64,
    /// Those of the head.
    pub head: u64,
}

impl Reads {
    /// Returns the bytes of layers.
    pub fn layers(&self) -> u64 {
        self.always + self.experts
    }

    /// Returns all bytes.
    pub fn total(&self) -> u64 {
        self.layers() + self.head
    }
}

/// The devices of a placement as one.
pub enum Placed<'a> {
    /// One device.
    Whole(&'a dyn Backend),
    /// Several.
    Divided(Stages<'a>),
}

impl Placed<'_> {
    /// Returns the backend to load the model with.
    pub fn backend(&self) -> &dyn Backend {
        match self {
            Self::Whole(backend) => *backend,
            Self::Divided(stages) => stages,
        }
    }
}

impl Placement {
    /// Returns the devices as one.
    pub fn on<'a>(&self, devices: &'a Chosen) -> Placed<'a> {
        let opened = self.stages.iter().map(|(device, _)| devices.find(*device));
        let opened: Vec<_> = opened.map(|opened| opened.unwrap_or(devices.main())).collect();
        match &opened[..] {
            [one] => Placed::Whole(&*one.backend),
            _ => {
                let (cuts, layers) = (self.cuts(), self.stages.last().map_or(0, |(_, own)| own.end));
                let is_placed = move |program: &Program| program.layers.len() == layers;
                let cuts = Box::new(move |program: &Program| match is_placed(program) {
                    true => cuts.clone(),
                    false => Vec::new(),
                });
                Placed::Divided(Stages::new(opened.iter().map(|one| &*one.backend).collect(), cuts))
            }
        }
    }

    /// Returns the layers before which the model is cut.
    fn cuts(&self) -> Vec<usize> {
        self.stages.iter().skip(1).map(|(_, layers)| layers.start).collect()
    }

    /// Returns the name of the devices for people: of several, each with its layers and bytes. `parts` are the plans of the stages.
    pub fn label(&self, backend: &dyn Backend, parts: &[EnginePlan]) -> String {
        let of = |((device, layers), part): (&(Device, Range<usize>), &EnginePlan)| {
            format!("{device} ({} layers, {})", layers.len(), units::bytes(part.memory.total()))
        };
        match self.stages.len() {
            1 => backend.name().to_owned(),
            _ => self.stages.iter().zip(parts).map(of).collect::<Vec<_>>().join(", "),
        }
    }

    /// Returns a description of the stages for people, if there are several.
    pub fn describe(&self) -> Option<String> {
        let of = |(device, layers): &(Device, Range<usize>)| format!("{} on {device}", layers.len());
        let all: Vec<_> = self.stages.iter().map(of).collect();
        (all.len() > 1).then(|| format!("layers are divided: {}", all.join(", ")))
    }
}

impl<'a> Placing<'a> {
    /// Returns a loaded model on devices whose free memory it may use.
    pub fn of(devices: &'a Chosen, model: &'a Model) -> Self {
        Self {
            devices,
            name: &model.name,
            program: &model.program,
            weights: &model.weights,
            vision: model.vision.as_deref(),
            context: model.max_context,
            memory: None,
        }
    }

    /// Returns the bytes of a device that the model may use.
    pub fn limit(&self, opened: &Opened) -> u64 {
        let free = opened.backend.capacity().bytes_free;
        match self.memory {
            // The limit of a CPU alone may exceed what is free now.
            Some(memory) if self.devices.all().len() == 1 => memory,
            Some(memory) if opened.device != Device::Cpu => memory.min(free),
            _ => free,
        }
    }

    /// Returns the bytes that a token reads of these layers on a device.
    pub fn reads(&self, device: Device, layers: &Range<usize>) -> Reads {
        let backend = &self.devices.find(device).unwrap_or(self.devices.main()).backend;
        let mut reads = Reads { always: 0, experts: 0, head: 0 };
        for (id, role) in stage_program(self.program, layers.clone()).matrices() {
            let bytes = backend.device_layout(self.weights.matrix(id)).bytes as u64;
            match role {
                Role::Lookup => {}
                Role::Layer => reads.always += bytes,
                Role::Head => reads.head += bytes,
                Role::Experts { used, count } => reads.experts += bytes / count as u64 * used as u64,
            }
        }
        reads
    }

    /// Returns the whole model on the main device.
    pub fn whole(&self) -> Placement {
        Placement { stages: vec![(self.devices.main().device, 0..self.program.layers.len())] }
    }

    /// Returns the placement if its devices are opened, and otherwise the whole model on the main one.
    pub fn on_these(&self, placement: &Placement) -> Placement {
        let is_opened = |(device, _): &(Device, _)| self.devices.find(*device).is_some();
        match placement.stages.iter().all(is_opened) {
            true => placement.clone(),
            false => self.whole(),
        }
    }

    /// Returns the placement of the model that the flags and the memory of the devices lead to, and the options with slots for experts
    /// and with as many pages as fit. If `may_shrink` is true, there may be fewer pages than the options have.
    ///
    /// # Errors
    /// The flags do not suit the model, or it fits with no placement.
    pub fn place(
        &self,
        slots: ExpertSlots,
        options: &EngineOptions,
        may_shrink: bool,
    ) -> Outcome<(Placement, EngineOptions)> {
        let Chosen { gpu_layers, .. } = self.devices;
        let gpus = self.devices.gpus().count();
        let has_cpu = self.devices.find(Device::Cpu).is_some();
        let all = self.program.layers.len();
        let divided = || match slots {
            ExpertSlots::Auto | ExpertSlots::All => Ok(options.clone()),
            _ => self.with_slots(slots, options.clone(), may_shrink),
        };
        if let (Some(count), 1..) = (*gpu_layers, gpus) {
            return self.fit(self.stages(count.min(all))?, divided()?, may_shrink);
        }
        if gpus > 1 {
            let options = divided()?;
            return match has_cpu {
                true => self.most_on_gpus(&options, may_shrink),
                false => self.fit(self.stages(all)?, options, may_shrink),
            };
        }
        let with_slots = self.with_slots(slots, options.clone(), may_shrink);
        let whole = with_slots.and_then(|options| self.fit(self.whole(), options, may_shrink));
        whole.or_else(|failure| {
            if gpus == 0 || !has_cpu {
                return Err(failure);
            }
            divided().and_then(|options| self.most_on_gpus(&options, may_shrink)).map_err(|_| failure)
        })
    }

    /// Returns the placement with the most layers on GPUs, and the options for it.
    fn most_on_gpus(&self, options: &EngineOptions, may_shrink: bool) -> Outcome<(Placement, EngineOptions)> {
        let all = self.program.layers.len();
        let whole = self.stages(all).and_then(|stages| self.fit(stages, options.clone(), may_shrink));
        let mut failure = match whole {
            Ok(found) => return Ok(found),
            Err(failure) => failure,
        };
        // Layers on the CPU, in ascending order. More of them fit as well, unless its memory ends.
        let cuts = legal_cuts(self.program);
        let (mut begin, mut end, mut found) = (0, cuts.len(), None);
        while begin < end {
            let middle = begin.midpoint(end);
            let stages = self.stages(all - cuts[middle]);
            match stages.and_then(|stages| self.fit(stages, options.clone(), may_shrink)) {
                Ok(fits) => (found, end) = (Some(fits), middle),
                Err(problem) => (failure, begin) = (problem, middle + 1),
            }
        }
        found.ok_or(failure)
    }

    /// Returns the stages with the last `count` layers on GPUs, by their shares, and the others on the CPU.
    fn stages(&self, count: usize) -> Outcome<Placement> {
        let all = self.program.layers.len();
        let cuts = legal_cuts(self.program);
        let refused = |cut: usize| {
            let reason = obstacle(self.program, cut.clamp(1, all)).unwrap_or("it has a single layer");
            let problem = format!("{} cannot be divided among devices: {reason}", self.name);
            Failure::new(problem).hint("--device with one device runs it as a whole")
        };
        let (on_cpu, mut stages) = (all - count, Vec::new());
        let mut from = 0;
        if on_cpu > 0 {
            from = match on_cpu == all {
                true => all,
                false => *cuts.iter().find(|cut| **cut >= on_cpu).ok_or_else(|| refused(on_cpu))?,
            };
            stages.push((Device::Cpu, 0..from));
        }
        let gpus = self.shares();
        let (first, sum) = (from, gpus.iter().map(|(_, share)| share).sum::<f64>());
        let mut before = 0.0;
        for (index, (device, share)) in gpus.iter().enumerate() {
            before += share / sum;
            let goal = first as f64 + before * (all - first) as f64;
            let distance = |cut: &&usize| (goal - **cut as f64).abs();
            let end = match index + 1 == gpus.len() {
                true => all,
                false => cuts
                    .iter()
                    .filter(|cut| **cut > from)
                    .min_by(|one, other| distance(one).total_cmp(&distance(other)))
                    .copied()
                    .ok_or_else(|| refused(goal as usize))?,
            };
            if end > from {
                stages.push((*device, from..end));
            }
            from = end;
        }
        Ok(Placement { stages })
    }

    /// Returns the GPUs that have a share in the layers.
    fn shares(&self) -> Vec<(Device, f64)> {
        let shares = self.devices.split.as_ref().map(|split| split.shares());
        let share = |(index, gpu): (usize, &Opened)| match shares {
            Some(shares) => (gpu.device, shares.get(index).copied().unwrap_or(0.0)),
            None => (gpu.device, self.limit(gpu).max(1) as f64),
        };
        self.devices.gpus().enumerate().map(share).filter(|(_, share)| *share > 0.0).collect()
    }

    /// Checks that a placement fits, and returns it with the options, whose pages fit as well.
    fn fit(
        &self,
        placement: Placement,
        options: EngineOptions,
        may_shrink: bool,
    ) -> Outcome<(Placement, EngineOptions)> {
        let plan = self.plan(placement.on(self.devices).backend(), &options)?;
        let least = match placement.stages.len() {
            1 => plan.kv_for(plan.max_context.min(LEAST_CONTEXT)),
            _ => plan.kv_for(plan.max_context.min(CONTEXT_BESIDE_SLOTS)),
        };
        let least = match may_shrink {
            true => plan.pages.min((least / plan.page_bytes.max(1)).saturating_sub(1) as usize),
            false => plan.pages,
        };
        let mut most = plan.pages;
        for (part, (device, layers)) in
            self.parts(&placement, &options, plan.pages)?.into_iter().zip(&placement.stages)
        {
            let opened = self.devices.find(*device).unwrap_or(self.devices.main());
            let left = self.limit(opened).saturating_sub(part.memory.fixed());
            let pages = usize::try_from(left / part.page_bytes.max(1)).unwrap_or(usize::MAX);
            if pages <= least {
                let is_whole = layers.len() == self.program.layers.len();
                return Err(self.too_large(&part, (!is_whole).then_some(layers), opened));
            }
            most = most.min(pages - 1);
        }
        let pages = if most < plan.pages { PageBudget::Pages(most) } else { options.pages };
        Ok((placement, EngineOptions { pages, ..options }))
    }

    /// Returns the refusal of a model, or of some of its layers, that exceeds the memory of a device.
    fn too_large(&self, plan: &EnginePlan, layers: Option<&Range<usize>>, opened: &Opened) -> Failure {
        let MemoryPlan { weights, host, kv, states, buffers } = plan.memory;
        let limit = self.limit(opened);
        let failure = Failure::new(format!(
            "{}{} needs {} of memory (weights {}{}, K and V {}, states and buffers {}), but the {} has {} free",
            layers.map_or_else(String::new, |layers| format!(
                "layers {} to {} of ",
                layers.start,
                layers.end - 1
            )),
            self.name,
            units::bytes(plan.memory.total()),
            units::bytes(weights),
            match plan.expert_slots {
                Some(slots) => format!(
                    " with {slots} slots for experts, which take {} of the host's",
                    units::bytes(host)
                ),
                None => String::new(),
            },
            units::bytes(kv),
            units::bytes(states.saturating_add(buffers)),
            opened.backend.name(),
            units::bytes(limit),
        ));
        let left = limit.saturating_sub(plan.memory.fixed());
        match plan.longest_in(left).min(plan.max_context) {
            0 => failure.hint("a smaller model or other weights would fit"),
            fits => failure.hint(format!("a context of {fits} tokens would fit: -c {fits}")),
        }
    }

    /// Returns the memory and limits on a backend with these options.
    ///
    /// # Errors
    /// The options are invalid, or pages have no room.
    pub fn plan(&self, backend: &dyn Backend, options: &EngineOptions) -> Outcome<EnginePlan> {
        let Self { program, weights, vision, context, .. } = *self;
        let plan = Engine::plan(backend, program, weights, vision, context, options);
        plan.map_err(|error| Failure::from_error(&error))
    }

    /// Returns the memory of each stage of a placement with this number of pages.
    ///
    /// # Errors
    /// As [`Placing::plan`].
    pub fn parts(
        &self,
        placement: &Placement,
        options: &EngineOptions,
        pages: usize,
    ) -> Outcome<Vec<EnginePlan>> {
        let pages = PageBudget::Pages(pages);
        let count = placement.stages.len();
        if count == 1 {
            let options = EngineOptions { pages, ..options.clone() };
            return Ok(vec![self.plan(placement.on(self.devices).backend(), &options)?]);
        }
        let backend = |device: &Device| &*self.devices.find(*device).unwrap_or(self.devices.main()).backend;
        let tower = self.vision.map(|vision| &vision.tower.program);
        let runs = |(device, _): &(Device, _)| tower.is_some_and(|tower| backend(device).runs_tower(tower));
        let tower = placement.stages.iter().position(runs);
        let stages = split(self.program, self.weights, &placement.cuts());
        let numbered = stages.into_iter().zip(&placement.stages).enumerate();
        let parts = numbered.map(|(index, (stage, (device, _)))| {
            let (backend, is_last) = (backend(device), index + 1 == count);
            let options = EngineOptions {
                pages,
                // The last device also runs a model that drafts. Heads are not run by several devices.
                draft: options.draft.clone().filter(|draft| is_last && draft.shared.is_none()),
                // All stages but the last one return all rows.
                max_scores: if is_last { options.max_scores } else { options.max_batch_tokens },
                expert_slots: options.expert_slots.filter(|_| backend.capacity().host_free > 0),
                ..options.clone()
            };
            let vision = self.vision.filter(|_| tower == Some(index));
            let plan = Engine::plan(backend, &stage.program, &stage.weights, vision, self.context, &options);
            plan.map_err(|error| Failure::from_error(&error))
        });
        parts.collect()
    }

    /// Returns the memory and limits of a placement. Of several devices, those of the GPUs, and the bytes on the CPU among those of the
    /// host's memory.
    ///
    /// # Errors
    /// As [`Placing::plan`].
    pub fn plan_on_gpus(&self, placement: &Placement, options: &EngineOptions) -> Outcome<EnginePlan> {
        let placed = placement.on(self.devices);
        if placement.stages.len() == 1 {
            return self.plan(placed.backend(), options);
        }
        let mut options = options.clone();
        if let PageBudget::Bytes(bytes) = options.pages {
            let pages = self.parts(placement, &options, 1 << 10)?;
            let page_bytes: u64 = on_gpus(placement, &pages).map(|part| part.page_bytes).sum();
            let pages = usize::try_from(bytes / page_bytes.max(1)).unwrap_or(usize::MAX);
            options.pages = PageBudget::Pages(pages.saturating_sub(1));
        }
        let mut plan = self.plan(placed.backend(), &options)?;
        let parts = self.parts(placement, &options, plan.pages)?;
        let sum = |of: fn(&EnginePlan) -> u64| on_gpus(placement, &parts).map(of).sum::<u64>();
        let all: u64 = parts.iter().map(|part| part.memory.total()).sum();
        let of_gpus = sum(|part| part.memory.total());
        plan.memory = MemoryPlan {
            weights: sum(|part| part.memory.weights),
            host: sum(|part| part.memory.host) + all - of_gpus,
            kv: sum(|part| part.memory.kv),
            states: sum(|part| part.memory.states),
            buffers: sum(|part| part.memory.buffers),
        };
        plan.page_bytes = sum(|part| part.page_bytes);
        Ok(plan)
    }

    /// Returns the options with slots for experts. If the setting is `auto`, a model that fits has none, and another one gets as many
    /// slots as fit beside K and V, which may take fewer bytes if `may_shrink` is true.
    ///
    /// # Errors
    /// The setting does not suit the model, or the experts exceed the memory of device or host.
    pub fn with_slots(
        &self,
        wanted: ExpertSlots,
        options: EngineOptions,
        may_shrink: bool,
    ) -> Outcome<EngineOptions> {
        let experts = || self.program.experts().map(|(_, experts)| experts);
        let Some(most) = experts().map(|experts| experts.count).max() else {
            return match wanted {
                ExpertSlots::Auto | ExpertSlots::All => Ok(options),
                _ => {
                    Err(Failure::usage(format!("{} has no experts: --expert-slots has no effect", self.name)))
                }
            };
        };
        let least = experts().map(|experts| experts.router.used).max().unwrap_or(1);
        let main = self.devices.main();
        let has_host = main.backend.capacity().host_free > 0;
        let bytes_of = |slots: usize| {
            let bytes = |matrix| main.backend.device_layout(self.weights.matrix(matrix)).bytes as u64;
            self.program.expert_bytes(slots, bytes)
        };
        // At most a tie: a setting of all experts is one without slots.
        let fixed = |slots: usize| Some(slots).filter(|slots| *slots < most);
        let slots = match wanted {
            ExpertSlots::All => None,
            ExpertSlots::Least => fixed(least),
            ExpertSlots::Experts(slots) if slots < least => {
                let problem =
                    format!("--expert-slots is {slots}, but a token of {} uses {least} experts", self.name);
                return Err(Failure::usage(problem).hint(format!("at least {least} slots work")));
            }
            ExpertSlots::Experts(slots) => fixed(slots),
            ExpertSlots::Bytes(bytes) => {
                let one = bytes_of(1).slots.max(1);
                let slots = usize::try_from(bytes / one).unwrap_or(most);
                if slots < least {
                    let [given, needed] = [bytes, one.saturating_mul(least as u64)].map(units::bytes);
                    let problem =
                        format!("--expert-slots is {given}, but {least} slots in each layer take {needed}");
                    return Err(Failure::usage(problem));
                }
                fixed(slots)
            }
            ExpertSlots::Without(layers) => {
                let all = experts().count();
                fixed((most * all.saturating_sub(layers) / all).max(least))
            }
            ExpertSlots::Auto => {
                let resident = self.plan(&*main.backend, &options);
                let fits = resident.is_ok_and(|plan| plan.memory.total() <= self.limit(main));
                if fits || !has_host || least >= most {
                    return Ok(options);
                }
                return self.automatic(options, may_shrink, least..most);
            }
        };
        let options = EngineOptions { expert_slots: slots, ..options };
        if slots.is_some() && has_host {
            self.check_host(&self.plan(&*main.backend, &options)?)?;
        }
        Ok(options)
    }

    /// Returns the options with the most slots of a range that fit. Without any, with the fewest, which another check refuses.
    fn automatic(
        &self,
        options: EngineOptions,
        may_shrink: bool,
        range: Range<usize>,
    ) -> Outcome<EngineOptions> {
        let with =
            |slots: usize, pages| EngineOptions { expert_slots: Some(slots), pages, ..options.clone() };
        let main = self.devices.main();
        let fewest = self.plan(&*main.backend, &with(range.start, options.pages))?;
        self.check_host(&fewest)?;
        let mut kv = fewest.memory.kv;
        if may_shrink {
            let left = self.limit(main).saturating_sub(fewest.memory.fixed());
            let context = fewest.max_context.min(CONTEXT_BESIDE_SLOTS);
            kv = kv.min(fewest.kv_for(context).max(left / 4));
        }
        // Room for one page more, which holds no tokens of sequences.
        let pages = PageBudget::Bytes(kv.saturating_add(fewest.page_bytes));
        let fits = |slots: usize| {
            let plan = self.plan(&*main.backend, &with(slots, pages));
            plan.is_ok_and(|plan| plan.memory.total() <= self.limit(main))
        };
        let (mut slots, mut end) = (range.start, range.end);
        while end - slots > 1 {
            let middle = slots.midpoint(end);
            if fits(middle) { slots = middle } else { end = middle }
        }
        Ok(with(slots, if may_shrink { pages } else { options.pages }))
    }

    /// Checks that the host has memory for the experts.
    fn check_host(&self, plan: &EnginePlan) -> Outcome<()> {
        let (needed, free) = (plan.memory.host, self.devices.main().backend.capacity().host_free);
        if needed <= free {
            return Ok(());
        }
        let [needed, free] = [needed, free].map(units::bytes);
        let problem =
            format!("the experts of {} need {needed} of the host's memory, but {free} are free", self.name);
        Err(Failure::new(problem).hint("a smaller model or other weights would fit"))
    }
}

/// Returns the parts of a placement that are on GPUs.
fn on_gpus<'a>(placement: &'a Placement, parts: &'a [EnginePlan]) -> impl Iterator<Item = &'a EnginePlan> {
    let all = placement.stages.iter().zip(parts);
    all.filter_map(|((device, _), part)| (*device != Device::Cpu).then_some(part))
}
