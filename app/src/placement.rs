//! Placement of a model's weights: on the device as a whole, or with the experts in the host's memory and slots for some of them on
//! the device.

use paguro_backend::{Backend, Program, Weights};
use paguro_engine::{Engine, EngineOptions, EnginePlan, PageBudget};
use paguro_model::{Model, Vision};

use crate::{
    cli::ExpertSlots,
    failure::{Failure, Outcome},
    units,
};

/// Tokens of the context for whose K and V slots leave memory, if the context may shrink. Beyond them, K and V get a quarter of the
/// memory besides weights and buffers.
const CONTEXT_BESIDE_SLOTS: usize = 8192;

/// A model that is to be placed on a device.
#[derive(Clone, Copy)]
pub struct Placing<'a> {
    /// The device.
    pub backend: &'a dyn Backend,
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
    /// Bytes of the device that the model may use.
    pub memory: u64,
}

impl<'a> Placing<'a> {
    /// Returns a loaded model on a device, of which it may use `memory` bytes.
    pub fn of(backend: &'a dyn Backend, model: &'a Model, memory: u64) -> Self {
        Self {
            backend,
            name: &model.name,
            program: &model.program,
            weights: &model.weights,
            vision: model.vision.as_deref(),
            context: model.max_context,
            memory,
        }
    }

    /// Returns the memory and limits with these options.
    ///
    /// # Errors
    /// The options are invalid, or pages have no room.
    pub fn plan(&self, options: &EngineOptions) -> Outcome<EnginePlan> {
        let Self { backend, program, weights, vision, context, .. } = *self;
        let plan = Engine::plan(backend, program, weights, vision, context, options);
        plan.map_err(|error| Failure::from_error(&error))
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
        let has_host = self.backend.capacity().host_free > 0;
        let bytes_of = |slots: usize| {
            let bytes = |matrix| self.backend.device_layout(self.weights.matrix(matrix)).bytes as u64;
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
                let resident = self.plan(&options);
                let fits = resident.is_ok_and(|plan| plan.memory.total() <= self.memory);
                if fits || !has_host || least >= most {
                    return Ok(options);
                }
                return self.automatic(options, may_shrink, least..most);
            }
        };
        let options = EngineOptions { expert_slots: slots, ..options };
        if slots.is_some() && has_host {
            self.check_host(&self.plan(&options)?)?;
        }
        Ok(options)
    }

    /// Returns the options with the most slots of a range that fit. Without any, with the fewest, which another check refuses.
    fn automatic(
        &self,
        options: EngineOptions,
        may_shrink: bool,
        range: std::ops::Range<usize>,
    ) -> Outcome<EngineOptions> {
        let with =
            |slots: usize, pages| EngineOptions { expert_slots: Some(slots), pages, ..options.clone() };
        let fewest = self.plan(&with(range.start, options.pages))?;
        self.check_host(&fewest)?;
        let mut kv = fewest.memory.kv;
        if may_shrink {
            let left = self.memory.saturating_sub(fewest.memory.fixed());
            let context = fewest.max_context.min(CONTEXT_BESIDE_SLOTS);
            kv = kv.min(fewest.kv_for(context).max(left / 4));
        }
        // Room for one page more, which holds no tokens of sequences.
        let pages = PageBudget::Bytes(kv.saturating_add(fewest.page_bytes));
        let fits = |slots: usize| {
            self.plan(&with(slots, pages)).is_ok_and(|plan| plan.memory.total() <= self.memory)
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
        let (needed, free) = (plan.memory.host, self.backend.capacity().host_free);
        if needed <= free {
            return Ok(());
        }
        let [needed, free] = [needed, free].map(units::bytes);
        let problem =
            format!("the experts of {} need {needed} of the host's memory, but {free} are free", self.name);
        Err(Failure::new(problem).hint("a smaller model or other weights would fit"))
    }
}
