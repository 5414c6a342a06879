//! Opening of models and start of engines, with progress on the terminal.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use paguro_engine::{DraftModel, Engine, EngineOptions, Handle, PageBudget};
use paguro_model::{LoadOptions, Model, ModelError, ModelFile, gguf::GgufError, tokenizer::Tokenizer};

use crate::{
    cli::{Device, ExpertSlots, RunOnArgs},
    devices::{Chosen, Devices},
    failure::{Failure, Outcome},
    models::{EMBEDDED, EMBEDDED_FILE, Source},
    placement::Placing,
    settings::{LibrarySettings, Terminal},
};

/// Maximum default context of a model that was trained for more tokens.
pub const DEFAULT_CONTEXT: usize = 65_536;

/// Returns the context with which a model is loaded unless another one is requested: its trained context, up to
/// [`DEFAULT_CONTEXT`].
pub fn default_context(file: &ModelFile) -> usize {
    file.context_length().map_or(DEFAULT_CONTEXT, |trained| trained.clamp(1, DEFAULT_CONTEXT))
}

/// Hint for other files.
const A_MODEL_IS: &str = "a model is a GGUF file or a Hugging Face folder";

/// A running model.
#[derive(Debug)]
pub struct Loaded {
    /// The model.
    pub model: Arc<Model>,
    /// Handle of the engine.
    pub handle: Handle,
    /// Short name of the device, or of several.
    pub device: String,
    /// Devices, and the bytes of the weights on each.
    pub stages: Vec<(Device, u64)>,
    /// Number of CPU threads.
    pub threads: usize,
    /// Memory of the pages of K and V, which is allocated with use on a CPU.
    pub kv_bytes: u64,
    /// Start time of the engine.
    pub time: Duration,
    /// The engine runs while this value lives.
    _engine: Engine,
}

/// Opens a model's file without interpreting it.
///
/// # Errors
/// The file is invalid.
pub fn file(source: &Source) -> Outcome<ModelFile> {
    match source {
        Source::Embedded => ModelFile::from_static(EMBEDDED, EMBEDDED_FILE),
        Source::Path(path) | Source::Library { path, .. } => ModelFile::open(path),
    }
    .map_err(failure)
}

/// Reads only the tokenizer, which even unsupported models have.
///
/// # Errors
/// The file is invalid or not supported.
pub fn tokenizer(source: &Source) -> Outcome<Tokenizer> {
    file(source)?.tokenizer().map_err(failure)
}

/// Opens a model for sequences of up to `context` tokens, or of its trained context.
///
/// # Errors
/// The model is invalid or not supported.
pub fn model(source: &Source, context: Option<usize>) -> Outcome<Arc<Model>> {
    let model = file(source)?.load(&LoadOptions { max_context: context }).map_err(failure)?;
    Ok(Arc::new(model))
}

/// Opens a model that scores texts, like [`model`].
///
/// # Errors
/// As of [`model`]; a reranker whose parts cannot be read.
pub fn reranker(source: &Source) -> Outcome<Arc<Model>> {
    let mut model = file(source)?.load(&LoadOptions { max_context: None }).map_err(failure)?;
    model.find_judge(&source.short_name()).map_err(Failure::new)?;
    Ok(Arc::new(model))
}

/// Context for which a model is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Context {
    /// [`default_context`].
    Default,
    /// The trained context.
    Trained,
    /// This number of tokens.
    Tokens(usize),
}

/// Opens a model that writes text, like [`model`].
///
/// # Errors
/// The model is an encoder, invalid or not supported.
pub fn writer(source: &Source, context: Context) -> Outcome<Arc<Model>> {
    writer_of(&file(source)?, source, context)
}

/// As [`writer`], of a file that is open.
///
/// # Errors
/// As of [`writer`].
pub fn writer_of(file: &ModelFile, source: &Source, context: Context) -> Outcome<Arc<Model>> {
    if file.is_encoder() {
        let name = source.short_name();
        let failure =
            Failure::new(format!("the model `{name}` is an encoder: it reads texts and writes none"));
        return Err(failure.hint(match file.has_scores() {
            Ok(true) => {
                "`paguro rerank` scores texts with it, and `paguro serve` offers scores at /v1/rerank and /v1/classify"
            }
            _ => "`paguro embed` computes vectors with it, and `paguro serve` offers them at /v1/embeddings",
        }));
    }
    let max_context = match context {
        Context::Default => Some(default_context(file)),
        Context::Trained => None,
        Context::Tokens(tokens) => Some(tokens),
    };
    let model = file.load(&LoadOptions { max_context }).map_err(failure)?;
    Ok(Arc::new(model))
}

/// Architectures that only draft for a certain model and are not supported, with their names for people.
const OTHER_DRAFTS: [(&str, &str); 4] =
    [("eagle", "EAGLE"), ("dflash", "DFlash"), ("dspark", "DSpark"), ("medusa", "Medusa")];

/// Opens the model that `--draft` names, for `model`. None for an assistant, which is a part of its model.
///
/// # Errors
/// It is invalid, of a kind that is not supported, or has other tokens.
pub fn draft(
    name: Option<&str>,
    model: &Model,
    library: &LibrarySettings,
) -> Outcome<Option<Arc<DraftModel>>> {
    match name {
        Some(name) => draft_of(&Source::find(Some(name), library)?, model),
        None => Ok(None),
    }
}

/// Opens a model that drafts for another one, see [`draft`].
///
/// # Errors
/// As [`draft`].
pub fn draft_of(source: &Source, model: &Model) -> Outcome<Option<Arc<DraftModel>>> {
    let file = file(source)?;
    if file.is_assistant() {
        return Ok(None);
    }
    refuse_other_drafts(&file, source)?;
    let trained = file.context_length().unwrap_or(model.max_context);
    let context = Context::Tokens(model.max_context.min(trained.max(1)));
    let drafting = writer_of(&file, source, context)?;
    refuse_difference(source, &model.name, model.tokenizer.difference(&drafting.tokenizer))?;
    Ok(Some(DraftModel::model(&drafting)))
}

/// Checks that the model which `--draft` names drafts for `model`, without loading either.
///
/// # Errors
/// As [`draft`].
pub fn check_draft(source: &Source, model: &Source) -> Outcome<()> {
    let drafting = file(source)?;
    match source.path().filter(|_| drafting.is_assistant()) {
        Some(path) => file(model)?.set_assistant(path).map_err(failure),
        None => {
            refuse_other_drafts(&drafting, source)?;
            let own = drafting.tokenizer().map_err(failure)?;
            refuse_difference(source, &model.short_name(), tokenizer(model)?.difference(&own))
        }
    }
}

/// Hint for a draft model that cannot be used.
const DRAFT_HINT: &str = "a draft model is a smaller model of the same family: --draft MODEL";

/// Refuses draft models of kinds that are not supported, by name.
fn refuse_other_drafts(file: &ModelFile, source: &Source) -> Outcome<()> {
    let architecture = file.architecture().unwrap_or_default().to_lowercase();
    match OTHER_DRAFTS.iter().find(|(part, _)| architecture.contains(part)) {
        None => Ok(()),
        Some((_, kind)) => {
            let name = source.short_name();
            let message = format!("the model `{name}` cannot draft: drafts of {kind} are not supported");
            Err(Failure::new(message).hint(DRAFT_HINT))
        }
    }
}

/// Refuses a draft model whose tokens differ from those of the model with this name.
fn refuse_difference(source: &Source, model: &str, difference: Option<String>) -> Outcome<()> {
    difference.map_or(Ok(()), |difference| {
        let name = source.short_name();
        Err(Failure::new(format!("`{name}` cannot draft for `{model}`: {difference}")).hint(DRAFT_HINT))
    })
}

/// Starts an engine on the chosen device. If memory is short and `may_shrink` is true, it gets fewer pages.
///
/// # Errors
/// The device does not support the model or lacks memory.
pub fn start(
    model: Arc<Model>,
    options: EngineOptions,
    may_shrink: bool,
    threads: Option<usize>,
    (devices, on): (&Devices, &RunOnArgs),
    terminal: Terminal,
) -> Outcome<Loaded> {
    let notice = |line: &str| terminal.note(line);
    let slots = on.expert_slots.unwrap_or_default();
    devices.with(on, threads, &notice, |device| {
        start_on(model.clone(), options.clone(), (may_shrink, slots), (devices, device), terminal)
    })
}

/// Starts an engine on an opened device, see [`start`].
///
/// # Errors
/// As [`start`].
pub fn start_on(
    model: Arc<Model>,
    options: EngineOptions,
    (may_shrink, slots): (bool, ExpertSlots),
    (devices, device): (&Devices, Chosen),
    terminal: Terminal,
) -> Outcome<Loaded> {
    let started = Instant::now();
    let name = model.name.clone();
    let devices = devices.clone();
    let _spinner = terminal.spinner_with(move || match devices.compiling() {
        None => format!("loading {name}"),
        Some(compiling) => format!("loading {name}: {compiling}"),
    });
    let options = with_head(&model, options);
    // A model that exceeds the devices' memory is refused before weights are read.
    let placing = Placing::of(&device, &model);
    let (placement, options) = placing.place(slots, &options, may_shrink)?;
    let placed = placement.on(&device);
    let backend = placed.backend();
    let plan = placing.plan(backend, &options)?;
    let parts = placing.parts(&placement, &options, plan.pages)?;
    let weights = parts.iter().zip(&placement.stages);
    let stages = weights.map(|(part, (device, _))| (*device, part.memory.weights)).collect();
    if let Some(slots) = options.expert_slots {
        terminal.note(&format!(
            "experts are in the host's memory; each layer has {slots} slots for them on the {}",
            device.main().backend.name()
        ));
    }
    placement.describe().iter().for_each(|line| terminal.note(line));
    let engine = Engine::start(backend, &model, options).map_err(|error| Failure::from_error(&error))?;
    let threads = placement.stages.iter().filter_map(|(stage, _)| Some(device.find(*stage)?.threads)).max();
    Ok(Loaded {
        model,
        handle: engine.handle(),
        device: backend.name().to_owned(),
        stages,
        threads: threads.unwrap_or(1),
        kv_bytes: plan.memory.kv,
        time: started.elapsed(),
        _engine: engine,
    })
}

/// Returns the pages for texts of at most `longest` tokens: those of an encoder's step, or of a few texts of a decoder.
pub fn pages_of_texts(model: &Model, longest: usize) -> PageBudget {
    let block_size = EngineOptions::default().block_size;
    match model.program.bidirectional {
        true => PageBudget::Auto,
        false => PageBudget::Tokens((2 * longest).max(4096).next_multiple_of(block_size)),
    }
}

/// Returns the options with the model's own head as the model that drafts, unless there is another one.
pub fn with_head(model: &Model, options: EngineOptions) -> EngineOptions {
    let head = || model.mtp.as_ref().map(|head| DraftModel::head(head, model.max_context));
    EngineOptions { draft: options.draft.clone().or_else(head), ..options }
}

/// Converts a model's error, with a hint if its message has none.
fn failure(error: ModelError) -> Failure {
    let failure = Failure::from_error(&error);
    match error {
        ModelError::Architecture { .. } => failure.hint("`paguro inspect` shows what is in the file"),
        ModelError::NotAModel { .. } => failure.hint(A_MODEL_IS),
        ModelError::Gguf(GgufError::InFile { error, .. }) if matches!(*error, GgufError::NotGguf { .. }) => {
            failure.hint(A_MODEL_IS)
        }
        _ => failure,
    }
}
