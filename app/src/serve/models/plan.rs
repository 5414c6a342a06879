//! Memory and limits of a load.

use std::sync::{Arc, PoisonError};

use paguro_backend::KvDtype;
use paguro_engine::{DraftModel, EngineOptions, EnginePlan, PageBudget};
use paguro_model::{LoadOptions, ModelFile, ModelShape};
use paguro_server::{Details, LoadError, LoadPlan};

use super::{ServedModels, failed, unusable};
use crate::{
    cli::ExpertSlots,
    load,
    models::Source,
    placement::{Placement, Placing},
    presets::Preset,
};

/// Default maximum of tokens with pages, and of the tokens of one sequence.
const MOST_TOKENS: usize = load::DEFAULT_CONTEXT;

/// Minimum context of a load, if the model supports it.
const LEAST_TOKENS: usize = 1024;

/// Returns what the memory of a model that drafts depends on.
fn draft_shape(source: &Source, context: usize) -> Result<Arc<DraftModel>, LoadError> {
    let file = load::file(source).map_err(failed)?;
    let max_context = file.context_length().map_or(context, |trained| context.min(trained.max(1)));
    let shape = file.shape(&LoadOptions { max_context: Some(max_context) });
    let ModelShape { program, weights, .. } = shape.map_err(|error| unusable(&error))?;
    Ok(Arc::new(DraftModel { program, weights, max_context, shared: None }))
}

impl ServedModels {
    /// Returns the maximum tokens of a sequence for a model trained for `trained` tokens; `requested` is the value of a request.
    fn wanted(&self, preset: &Preset, trained: usize, requested: Option<usize>) -> usize {
        let own = match preset.ctx.or(self.context) {
            Some(0) => trained,
            Some(tokens) => tokens,
            None => trained.min(MOST_TOKENS),
        };
        requested.map_or(own, |requested| own.max(requested.min(trained)))
    }

    /// Returns the options of an engine.
    pub(super) fn engine_options(&self, preset: &Preset, context: usize, pages: PageBudget) -> EngineOptions {
        self.speculate.of(EngineOptions {
            pages,
            max_context: Some(context),
            max_sequences: self.parallel,
            max_batch_tokens: self.batch_tokens,
            encoder_tokens: self.encoder_tokens,
            step_time: self.step_time,
            queue_capacity: self.queue,
            queue_tokens: self.queue_tokens,
            kv_dtype: preset.kv_dtype.map_or(self.kv_dtype, KvDtype::from),
            max_image_tokens: self.image_tokens,
            adapters: self.adapter_limits,
            ..EngineOptions::default()
        })
    }

    /// Returns the model that drafts for the model in this file, if one was set for it.
    pub(super) fn drafts_for(&self, file: &ModelFile) -> Option<&Source> {
        let (draft, first) = self.draft.as_ref()?;
        file.files().iter().any(|file| file.starts_with(first)).then_some(draft)
    }

    /// Returns the memory and limits of an engine for sequences of `context` tokens, and the placement of the model. The placement and
    /// the slots for experts depend on the context alone, so that a load has those of its plan.
    pub(super) fn engine_plan(
        &self,
        file: &ModelFile,
        preset: &Preset,
        context: usize,
        pages: PageBudget,
    ) -> Result<(EnginePlan, Placement), LoadError> {
        let shape = file.shape(&LoadOptions { max_context: Some(context) });
        let ModelShape { program, weights, mtp, vision, .. } = shape.map_err(|error| unusable(&error))?;
        let draft = match self.drafts_for(file).filter(|_| file.assistant().is_none()) {
            Some(source) => Some(draft_shape(source, context)?),
            None => mtp.map(|head| DraftModel::head(&head, context)),
        };
        let options = EngineOptions { draft, ..self.engine_options(preset, context, pages) };
        let mut planner = self.planner.lock().unwrap_or_else(PoisonError::into_inner);
        let device = match &mut *planner {
            Some(device) => device,
            none => {
                let opened = self.devices.open(&self.on, self.threads, &|_| ()).map_err(failed)?;
                // Of engines on equal devices, the plan of one is that of all.
                none.insert(opened.engines().remove(0))
            }
        };
        let placing = Placing {
            devices: device,
            name: "the model",
            program: &program,
            weights: &weights,
            vision: vision.as_deref(),
            context,
            memory: Some(self.memory),
        };
        let has_experts = program.experts().next().is_some();
        let slots = match self.on.replicas {
            // Each engine would have all experts in the host's memory.
            true => ExpertSlots::All,
            false => self.on.expert_slots.filter(|_| has_experts).unwrap_or_default(),
        };
        let one = EngineOptions { pages: PageBudget::Tokens(context), ..options.clone() };
        let (placement, placed) = match placing.place(slots, &one, true) {
            // The numbers of a model that exceeds the memory are those of the whole.
            Err(_) if !device.is_divided() => {
                (placing.whole(), placing.with_slots(slots, one, true).map_err(failed)?)
            }
            placed => placed.map_err(failed)?,
        };
        let options = EngineOptions { expert_slots: placed.expert_slots, ..options };
        Ok((placing.plan_on_gpus(&placement, &options).map_err(failed)?, placement))
    }

    /// Returns true if models are planned for the CPU.
    pub(super) fn plans_for_cpu(&self) -> bool {
        let planner = self.planner.lock().unwrap_or_else(PoisonError::into_inner);
        planner.as_ref().is_none_or(|device| device.gpus().next().is_none())
    }

    /// Returns the memory of a load whose sequences have `requested` tokens, or the context of the settings.
    pub(super) fn load_plan(
        &self,
        file: &ModelFile,
        preset: &Preset,
        requested: Option<usize>,
    ) -> Result<LoadPlan, LoadError> {
        let trained = file.context_length().unwrap_or(MOST_TOKENS).max(1);
        let mut context = self.wanted(preset, trained, requested).max(1);
        let has_shape = |tokens| file.shape(&LoadOptions { max_context: Some(tokens) }).is_ok();
        // Models with a table of positions, such as encoders, have no others. `--ctx` is for all models.
        if context > trained && !has_shape(context) && has_shape(trained) {
            context = trained;
        }
        let tokens = context.saturating_mul(self.parallel).min(MOST_TOKENS.max(context));
        // Texts of encoders need pages for one step.
        let pages = if file.is_encoder() { PageBudget::Auto } else { PageBudget::Tokens(tokens) };
        let (plan, _) = self.engine_plan(file, preset, context, pages)?;
        // Exactly the bytes of the settings, if given.
        let given = self.kv_bytes.map(|bytes| bytes.saturating_add(plan.page_bytes));
        let enough = plan.kv_for(context);
        Ok(LoadPlan {
            adapters: 0,
            weights: plan.memory.weights,
            buffers: plan.memory.buffers.saturating_add(plan.memory.states),
            kv_least: given.unwrap_or_else(|| plan.kv_for(context.min(LEAST_TOKENS))),
            kv_enough: given.unwrap_or(enough),
            kv_most: given.unwrap_or_else(|| plan.memory.kv.max(enough)),
            context,
        })
    }

    /// Returns the properties from a file's header, and the reason for which the model cannot run, if there is one.
    pub(super) fn details(&self, file: &ModelFile, preset: &Preset) -> Details {
        let description = file.description();
        let (plan, context, problem) = match self.load_plan(file, preset, None) {
            Ok(plan) => (Some(plan), Some(self.context_of(&plan, file, preset)), None),
            Err(error) => (None, None, Some(error.to_string())),
        };
        let shape = file.shape(&LoadOptions { max_context: Some(LEAST_TOKENS) });
        let vision = shape.ok().and_then(|shape| shape.vision);
        let projector = vision.map(|vision| vision.projector_type().to_owned());
        Details {
            format: if file.format().starts_with("GGUF") { "gguf" } else { "safetensors" },
            architecture: file.architecture().map(str::to_owned),
            parameters: description.parameters,
            quantization: description.quantization,
            context,
            sequences: self.parallel,
            encodes_for: file.is_encoder().then(|| match file.has_scores() {
                Ok(true) => "rerank",
                _ => "embedding",
            }),
            projector,
            plan,
            in_place: false,
            pulled: false,
            problem,
        }
    }

    /// Returns the maximum tokens of a sequence if the model gets all memory.
    fn context_of(&self, plan: &LoadPlan, file: &ModelFile, preset: &Preset) -> usize {
        let kv = self.memory.saturating_sub(plan.with(0)).min(plan.kv_most);
        if kv >= plan.kv_enough && self.kv_bytes.is_none() {
            return plan.context;
        }
        let engine = self.engine_plan(file, preset, plan.context, PageBudget::Bytes(kv));
        engine.map_or(plan.context, |(engine, _)| engine.max_context)
    }
}
