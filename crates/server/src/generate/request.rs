//! What every API's chat request becomes: messages, tools and options, in our own words. What the model reads is
//! made of it here.

use std::{
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

use paguro_engine::{Handle, Request};
use paguro_model::{
    GenerationDefaults, Model,
    chat::ChatInput,
    tokenizer::{Gap, SpecialTokens, Tokenizer},
};
use serde_json::{Map, Value, json};

use super::{
    DryOptions,
    reading::{Reading, tools_as_text},
};
use crate::{
    count::{ClientCount, check_length},
    error::ApiError,
    output::{Format as OutputFormat, OfferedTool},
    wire::{OneOrMany, Tolerance},
};

/// A chat that the model is to answer.
#[derive(Clone, Debug, Default)]
pub struct ChatRequest {
    /// What was said so far.
    pub messages: Vec<Message>,
    /// What the model may call.
    pub tools: Vec<Tool>,
    /// Whether it may, or must.
    pub tool_choice: ToolChoice,
    /// Whether it may call several at once.
    pub parallel_tool_calls: bool,
    /// What the answer must be.
    pub format: Format,
    /// Whether and how much a model that thinks should think.
    pub reasoning: Reasoning,
    /// Other variables of the chat template.
    pub template_variables: Map<String, Value>,
    /// The last message is the model's own, and the answer goes on from it.
    pub continue_last: bool,
    /// Whether arguments of calls are wanted as a whole only.
    pub whole_calls: bool,
    /// How to sample and when to end.
    pub options: Options,
    /// Ignored fields of the request, or the refusal of them.
    pub tolerance: Tolerance,
}

/// A prompt that the model is to continue as it stands.
#[derive(Clone, Debug)]
pub struct TextRequest {
    /// What to continue.
    pub prompt: Prompt,
    /// What the continuation must be.
    pub format: Format,
    /// Most tokens where neither the request nor the library says how many.
    pub default_max_tokens: Option<usize>,
    /// How to sample and when to end.
    pub options: Options,
}

/// What a model continues.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text; special tokens in it are recognised, and what the model puts before every text is added.
    Text(String),
    /// Tokens, as they are.
    Tokens(Vec<u32>),
    /// A gap between two texts. What fills it begins with `middle`.
    Gap {
        /// The text before it.
        prefix: String,
        /// The text after it.
        suffix: String,
        /// The beginning of what it is filled with.
        middle: String,
        /// Names and contents of other files.
        files: Vec<(String, String)>,
        /// The field that asks for it.
        param: &'static str,
    },
}

/// One message.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// What is said.
    pub content: String,
    /// What an assistant thought before it said that.
    pub reasoning: Option<String>,
    /// Who of several, or which tool.
    pub name: Option<String>,
    /// What an assistant called.
    pub tool_calls: Vec<ToolCall>,
    /// Which call this is the result of.
    pub tool_call_id: Option<String>,
}

/// Who says a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// The one who set this up.
    System,
    /// The one who asks.
    #[default]
    User,
    /// The model.
    Assistant,
    /// The result of a call.
    Tool,
}

/// A call that an assistant made.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Names the call.
    pub id: String,
    /// Names the tool.
    pub name: String,
    /// An object, as JSON text.
    pub arguments: String,
}

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments; `None` takes none.
    pub parameters: Option<Value>,
    /// Whether calls must fit the schema.
    pub strict: bool,
}

/// Whether tools are called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// If the model wants to.
    #[default]
    Auto,
    /// No.
    None,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// What an answer must be.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Format {
    /// Anything.
    #[default]
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON that fits this schema.
    JsonSchema(Value),
}

/// How a model that thinks should think.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reasoning {
    /// Whether; `None` leaves it to the model's template.
    pub enabled: Option<bool>,
    /// How much, in the words that templates know: `low`, `medium`, `high`.
    pub effort: Option<String>,
    /// Most tokens of it: then it is closed, and the answer begins.
    pub budget: Option<usize>,
    /// Refuses to think on a model that cannot. Otherwise that is a hint, which is left out.
    pub demanded: bool,
    /// The field that says so.
    pub param: &'static str,
}

/// How to sample and when to end. What is `None` is what the model recommends, or our default.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)] // named as the fields of `SamplingParams` and `Request` that they set
pub struct Options {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub top_n_sigma: Option<f32>,
    pub xtc_probability: Option<f32>,
    pub xtc_threshold: Option<f32>,
    pub dry: DryOptions,
    pub repetition_penalty: Option<f32>,
    pub frequency_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
    pub penalty_window: Option<u32>,
    pub logit_bias: Vec<(u32, f32)>,
    /// Random if not given.
    pub seed: Option<u64>,
    pub stop: Vec<String>,
    pub stop_tokens: Vec<u32>,
    pub include_stop_string: bool,
    pub ignore_stop_tokens: bool,
    pub min_tokens: usize,
    pub max_tokens: Option<ClientCount>,
    /// Most tokens of prompt and answer together, at most the model's own bound.
    pub context: Option<ClientCount>,
    /// Number of answers, 1 if not given.
    pub n: Option<ClientCount>,
    pub logprobs: Option<ClientCount>,
    /// Reports log-probabilities of the prompt's tokens, too, with as many of the best ones as `logprobs` says.
    pub score_prompt: bool,
    /// Reports the progress of the prompt's prefill.
    pub report_prefill: bool,
    pub priority: i32,
}

/// The counts of [`Options`], checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Counts {
    /// Number of answers.
    pub branches: usize,
    max_tokens: Option<usize>,
    context: Option<usize>,
    logprobs: Option<usize>,
}

/// Most stop strings. Every answer is searched for all of them with every token.
const MAX_STOPS: usize = 1024;

/// Most bytes of all stop strings.
const MAX_STOP_BYTES: usize = 64 << 10;

/// Most of the best tokens whose log-probabilities are reported.
const MAX_LOGPROBS: usize = 20;

impl Counts {
    /// Bounds the answer to a prompt of `prompt` tokens by the context that was asked for.
    ///
    /// # Errors
    /// The prompt leaves no room for an answer.
    pub fn bound(&mut self, prompt: usize) -> Result<(), ApiError> {
        let Some(context) = self.context else { return Ok(()) };
        if prompt >= context {
            return Err(ApiError::ContextTooLong { tokens: prompt, limit: context });
        }
        let rest = context - prompt;
        self.max_tokens = Some(self.max_tokens.map_or(rest, |most| most.min(rest)));
        Ok(())
    }
}

impl Options {
    /// A seed as clients write it: random below 0.
    pub fn seed(seed: Option<i64>) -> Option<u64> {
        seed.and_then(|seed| u64::try_from(seed).ok())
    }

    /// The texts that end an answer. An empty one would end every answer at once, so it stands for none.
    pub fn stop_strings(stop: Option<OneOrMany<String>>) -> Vec<String> {
        let mut stop = stop.map(OneOrMany::into_vec).unwrap_or_default();
        stop.retain(|text| !text.is_empty());
        stop
    }

    /// The tokens that penalties look at, as llama.cpp and Ollama write them: all if the number is 0 or below.
    pub fn window(last: Option<i64>) -> Option<u32> {
        last.filter(|last| *last > 0).map(|last| u32::try_from(last).unwrap_or(u32::MAX))
    }

    /// These, and the others' where these say nothing.
    pub fn or(self, other: Self) -> Self {
        fn list<T>(these: Vec<T>, others: Vec<T>) -> Vec<T> {
            if these.is_empty() { others } else { these }
        }
        Self {
            temperature: self.temperature.or(other.temperature),
            top_k: self.top_k.or(other.top_k),
            top_p: self.top_p.or(other.top_p),
            min_p: self.min_p.or(other.min_p),
            top_n_sigma: self.top_n_sigma.or(other.top_n_sigma),
            xtc_probability: self.xtc_probability.or(other.xtc_probability),
            xtc_threshold: self.xtc_threshold.or(other.xtc_threshold),
            dry: self.dry.or(other.dry),
            repetition_penalty: self.repetition_penalty.or(other.repetition_penalty),
            frequency_penalty: self.frequency_penalty.or(other.frequency_penalty),
            presence_penalty: self.presence_penalty.or(other.presence_penalty),
            penalty_window: self.penalty_window.or(other.penalty_window),
            logit_bias: list(self.logit_bias, other.logit_bias),
            seed: self.seed.or(other.seed),
            stop: list(self.stop, other.stop),
            stop_tokens: list(self.stop_tokens, other.stop_tokens),
            include_stop_string: self.include_stop_string || other.include_stop_string,
            ignore_stop_tokens: self.ignore_stop_tokens || other.ignore_stop_tokens,
            min_tokens: self.min_tokens.max(other.min_tokens),
            max_tokens: self.max_tokens.or(other.max_tokens),
            context: self.context.or(other.context),
            n: self.n.or(other.n),
            logprobs: self.logprobs.or(other.logprobs),
            score_prompt: self.score_prompt || other.score_prompt,
            report_prefill: self.report_prefill || other.report_prefill,
            priority: self.priority,
        }
    }

    /// Checks all counts and lists, before anything is made of them.
    ///
    /// # Errors
    /// The first one that is out of bounds, by name.
    pub(super) fn check(&self, handle: &Handle) -> Result<Counts, ApiError> {
        let (max_context, vocab) = (handle.max_context(), handle.vocab());
        check_length(self.stop.len(), MAX_STOPS, "stop")?;
        let bytes = self.stop.iter().map(String::len).sum::<usize>();
        if bytes > MAX_STOP_BYTES {
            let message = format!("`stop` has {bytes} bytes; one request can have {MAX_STOP_BYTES}");
            return Err(ApiError::invalid("stop", message));
        }
        self.dry.check()?;
        check_length(self.stop_tokens.len(), vocab, "stop_token_ids")?;
        check_length(self.logit_bias.len(), vocab, "logit_bias")?;
        let logprobs = self.logprobs.map(|count| count.within(0..=MAX_LOGPROBS, "logprobs"));
        Ok(Counts {
            branches: self.n.map_or(Ok(1), |n| n.within(1..=handle.max_branches(), "n"))?,
            max_tokens: self.max_tokens.map(|tokens| tokens.at_most(max_context)),
            context: self.context.map(|context| context.at_most(max_context)),
            logprobs: logprobs.transpose()?,
        })
    }

    /// The engine's request for these tokens.
    pub(super) fn request(self, prompt: Vec<u32>, counts: &Counts, defaults: &GenerationDefaults) -> Request {
        let mut sampling = defaults.sampling();
        sampling.temperature = self.temperature.unwrap_or(sampling.temperature);
        sampling.top_k = self.top_k.unwrap_or(sampling.top_k);
        sampling.top_p = self.top_p.unwrap_or(sampling.top_p);
        sampling.min_p = self.min_p.unwrap_or(sampling.min_p);
        sampling.top_n_sigma = self.top_n_sigma.unwrap_or(sampling.top_n_sigma);
        sampling.xtc_probability = self.xtc_probability.unwrap_or(sampling.xtc_probability);
        sampling.xtc_threshold = self.xtc_threshold.unwrap_or(sampling.xtc_threshold);
        if self.dry.multiplier.is_some() {
            sampling.dry = self.dry.sampling();
        }
        sampling.repetition_penalty = self.repetition_penalty.unwrap_or(sampling.repetition_penalty);
        sampling.frequency_penalty = self.frequency_penalty.unwrap_or(sampling.frequency_penalty);
        sampling.presence_penalty = self.presence_penalty.unwrap_or(sampling.presence_penalty);
        sampling.penalty_window = self.penalty_window.or(sampling.penalty_window);
        sampling.logit_bias = self.logit_bias;
        sampling.seed = self.seed.unwrap_or_else(|| RandomState::new().hash_one(0));
        Request {
            prompt,
            branches: counts.branches,
            max_tokens: counts.max_tokens.or(defaults.max_tokens),
            stop_tokens: self.stop_tokens,
            ignore_stop_tokens: self.ignore_stop_tokens,
            include_stop_string: self.include_stop_string,
            min_tokens: self.min_tokens,
            stop_strings: self.stop,
            sampling,
            logprobs: counts.logprobs,
            score_prompt_from: self.score_prompt.then_some(0),
            report_prefill: self.report_prefill,
            priority: self.priority,
            ..Request::default()
        }
    }
}

impl ChatRequest {
    /// The tokens that the model reads.
    ///
    /// # Errors
    /// A model without chat template, or whose template refuses these messages or has no room for what is asked.
    pub(crate) fn prompt(&self, model: &Model, max_context: usize) -> Result<Vec<u32>, ApiError> {
        Ok(self.prepare(model, max_context)?.0)
    }

    /// The tokens that the model reads, and how to read what it writes.
    pub(super) fn prepare(&self, model: &Model, max_context: usize) -> Result<(Vec<u32>, Reading), ApiError> {
        let offers_tools = self.offered_tools().next().is_some();
        let template = match (&model.tool_template, &model.chat_template, &model.template_problem) {
            (Some(template), ..) if offers_tools => template,
            (_, Some(template), _) => template,
            (_, None, Some(problem)) => {
                return Err(ApiError::invalid("model", format!("the model cannot chat: {problem}")));
            }
            (_, None, None) => {
                let message =
                    "the model has no chat template, so it cannot chat; /v1/completions continues text";
                return Err(ApiError::invalid("model", message));
            }
        };
        let source = template.source();
        let format = OutputFormat::detect(source);
        let mut extra = self.template_variables.clone();
        let budget = self.reasoning.write(&format, source, &mut extra, &self.tolerance)?;
        let has_place = source.contains("tools");
        let mut messages = if has_place { self.messages.clone() } else { tools_as_text(self) };
        // Templates without a place for reasoning look for it in the content themselves.
        if source.contains("reasoning_content") || source.contains("message.thinking") {
            let answers = messages.len().saturating_sub(usize::from(self.continue_last));
            messages[..answers].iter_mut().for_each(Message::separate_reasoning);
        }
        let mut input =
            ChatInput::new(messages.iter().map(|message| message.for_template(&format, source)).collect());
        input.tools = (offers_tools && has_place)
            .then(|| self.offered_tools().map(|tool| tool_for_template(&tool)).collect());
        input.extra = extra;
        let last = messages.last().map_or("", |last| last.content.trim());
        input.add_generation_prompt = !self.continue_last || last.is_empty();
        let mut prompt = template.prompt(&input, &model.tokenizer)?;
        if !input.add_generation_prompt {
            // As Hugging Face's `continue_final_message` does it.
            let Some(at) = prompt.text.rfind(last) else {
                let message = "the model's chat template changes the last message, so it cannot be continued";
                return Err(ApiError::invalid("messages", message));
            };
            prompt.text.truncate(at + last.len());
        }
        check_text(&prompt.text, model, max_context)?;
        let reading = Reading::new(self, format, &prompt.text, budget)?;
        Ok((model.tokenizer.encode_chat(&prompt), reading))
    }
}

/// Refuses a text that is too long, whatever its tokens are: finding them takes time.
///
/// # Errors
/// It is.
pub(crate) fn check_text(text: &str, model: &Model, max_context: usize) -> Result<(), ApiError> {
    // A token has a byte at least.
    if text.len() <= max_context {
        return Ok(());
    }
    let most = model.tokenizer.max_text_bytes(max_context);
    if text.len() <= most {
        return Ok(());
    }
    // The least that a text of this length can have.
    let tokens = text.len().div_ceil((most / max_context.max(1)).max(1));
    Err(ApiError::ContextTooLong { tokens, limit: max_context })
}

impl Prompt {
    /// The tokens that the model reads.
    ///
    /// # Errors
    /// A text that cannot fit.
    pub(super) fn tokens(self, model: &Model, max_context: usize) -> Result<Vec<u32>, ApiError> {
        match self {
            Self::Text(text) => {
                check_text(&text, model, max_context)?;
                Ok(model.tokenizer.encode_prompt(&text, SpecialTokens::Parse))
            }
            Self::Tokens(tokens) => Ok(tokens),
            Self::Gap { prefix, suffix, middle, files, param } => {
                for text in [&prefix, &suffix, &middle].into_iter().chain(files.iter().map(|file| &file.1)) {
                    check_text(text, model, max_context)?;
                }
                let gap = Gap { prefix: &prefix, suffix: &suffix, middle: &middle, files: &files };
                model.tokenizer.fill_in(&gap).ok_or_else(|| {
                    let message = "the model does not fill in: its tokenizer has no tokens for that";
                    ApiError::invalid(param, format!("`{param}`: {message}"))
                })
            }
        }
    }

    /// The text that the model reads, as people would write it. A character that the last tokens only begin is not part of
    /// it: the answer's text has it.
    pub fn text(self, tokenizer: &Arc<Tokenizer>) -> String {
        match self {
            Self::Text(text) | Self::Gap { prefix: text, .. } => text,
            Self::Tokens(tokens) => {
                let mut stream = tokenizer.stream();
                tokens.into_iter().map(|token| stream.push(token)).collect()
            }
        }
    }
}

impl ToolChoice {
    /// A mode by its name, or the tool (`Err`) that must be called.
    ///
    /// # Errors
    /// A mode that is none, or of a tool that is not offered.
    pub fn check(choice: Result<&str, &str>, tools: &[Tool]) -> Result<Self, ApiError> {
        let refuse = |message: String| Err(ApiError::invalid("tool_choice", message));
        match choice {
            Ok("auto") => Ok(Self::Auto),
            Ok("none") => Ok(Self::None),
            Ok("required") if tools.is_empty() => {
                refuse("`tool_choice` is `required`, but there are no `tools`".into())
            }
            Ok("required") => Ok(Self::Required),
            Ok(other) => {
                refuse(format!("`tool_choice` is none, auto, required or a function, not `{other}`"))
            }
            Err(name) if tools.iter().any(|tool| tool.name == name) => Ok(Self::Named(name.to_owned())),
            Err(name) => refuse(format!("`tool_choice` names `{name}`, which is not in `tools`")),
        }
    }
}

/// Most tokens of reasoning for efforts, with a model whose template knows no efforts. More effort has no bound.
const EFFORTS: &[(&str, usize)] = &[("minimal", 256), ("low", 1024), ("medium", 4096)];

impl Reasoning {
    /// OpenAI's scale of efforts; `param` is the field that it was in.
    ///
    /// # Errors
    /// A word that is not on it.
    pub fn from_effort(effort: Option<String>, param: &'static str) -> Result<Self, ApiError> {
        match effort.as_deref() {
            None => Ok(Self { param, ..Self::default() }),
            Some("none") => Ok(Self { enabled: Some(false), param, ..Self::default() }),
            Some("minimal" | "low" | "medium" | "high" | "xhigh" | "max") => {
                Ok(Self { effort, param, ..Self::default() })
            }
            Some(other) => {
                let message =
                    format!("`{param}` is none, minimal, low, medium, high, xhigh or max, not `{other}`");
                Err(ApiError::invalid(param, message))
            }
        }
    }

    /// Sets the variables that the template knows. Returns most tokens of the reasoning, if it has a bound.
    ///
    /// A model that cannot reason goes without, unless reasoning is demanded.
    ///
    /// # Errors
    /// The demand, or a hint in a strict request.
    fn write(
        &self,
        format: &OutputFormat,
        template: &str,
        extra: &mut Map<String, Value>,
        tolerance: &Tolerance,
    ) -> Result<Option<usize>, ApiError> {
        let mut switches = ["enable_thinking", "thinking"].into_iter();
        let switch = switches.find(|name| template.contains(name) && !template.contains("message.thinking"));
        let level = template.contains("reasoning_effort");
        let thinks = switch.is_some() || level || format.reasons();
        let off = self.enabled == Some(false) || self.budget == Some(0);
        if !thinks {
            if !off && *self != (Self { param: self.param, ..Self::default() }) {
                let message = "the model does not reason: its chat template knows no reasoning";
                if self.demanded && self.enabled == Some(true) {
                    return Err(ApiError::invalid(self.param, format!("`{}`: {message}", self.param)));
                }
                tolerance.leave_out(self.param, message)?;
            }
            return Ok(None);
        }
        if off {
            match switch {
                Some(name) => drop(extra.insert(name.into(), json!(false))),
                // What the model begins is closed at once.
                None => return Ok(Some(0)),
            }
            return Ok(self.budget);
        }
        let hinted = self.effort.is_some() || self.budget.is_some();
        if let Some(name) = switch.filter(|_| self.enabled == Some(true) || (hinted && !level)) {
            extra.insert(name.into(), json!(true));
        }
        let mut budget = self.budget;
        match &self.effort {
            Some(effort) if level => drop(extra.insert("reasoning_effort".into(), json!(effort))),
            // A template without levels leaves it to a bound.
            Some(effort) => {
                let most = EFFORTS.iter().find(|(name, _)| name == effort).map(|(_, most)| *most);
                budget = budget.into_iter().chain(most).min();
            }
            None => {}
        }
        Ok(budget)
    }
}

impl Message {
    /// True if an answer can go on from this message.
    pub fn can_be_continued(&self) -> bool {
        self.role == Role::Assistant && self.tool_calls.is_empty()
    }

    /// Takes the reasoning that a client sent back at the beginning of an assistant's content.
    fn separate_reasoning(&mut self) {
        if self.role != Role::Assistant || self.reasoning.is_some() {
            return;
        }
        let thought =
            self.content.trim_start().strip_prefix("<think>").and_then(|rest| rest.split_once("</think>"));
        if let Some((reasoning, answer)) = thought {
            let reasoning = reasoning.trim();
            self.reasoning = (!reasoning.is_empty()).then(|| reasoning.to_owned());
            self.content = answer.trim_start().to_owned();
        }
    }

    /// As templates know it: Hugging Face's names, absent where there is nothing.
    fn for_template(&self, format: &OutputFormat, template: &str) -> Value {
        let mut message = Map::new();
        message.insert("role".into(), json!(self.role.name()));
        // gpt-oss's template has another name for reasoning, and takes no content beside the reasoning of a call.
        if template.contains("message.thinking") {
            let calls = !self.tool_calls.is_empty();
            let thinking = match &self.reasoning {
                Some(reasoning) if calls && !self.content.is_empty() => {
                    Some([reasoning, "\n", &self.content].concat())
                }
                reasoning => reasoning.clone(),
            };
            let content = if calls && thinking.is_some() { "" } else { &self.content };
            message.insert("content".into(), json!(content));
            message.extend(thinking.map(|thinking| ("thinking".into(), json!(thinking))));
        } else {
            message.insert("content".into(), json!(self.content));
            message.extend(self.reasoning.as_ref().map(|text| ("reasoning_content".into(), json!(text))));
        }
        if let Some(name) = &self.name {
            message.insert("name".into(), json!(name));
        }
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(|call| call.for_template(format)).collect();
            message.insert("tool_calls".into(), calls);
        }
        if let Some(id) = &self.tool_call_id {
            message.insert("tool_call_id".into(), json!(format.call_id(id)));
        }
        message.into()
    }
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

impl ToolCall {
    /// Templates write the arguments with `tojson`, so they get the object and not its text.
    fn for_template(&self, format: &OutputFormat) -> Value {
        let arguments = serde_json::from_str(&self.arguments).unwrap_or_else(|_| json!(self.arguments));
        let id = format.call_id(&self.id);
        json!({"id": id, "type": "function", "function": {"name": self.name, "arguments": arguments}})
    }
}

fn tool_for_template(tool: &OfferedTool<'_>) -> Value {
    let mut function = Map::new();
    function.insert("name".into(), json!(tool.name));
    if let Some(description) = tool.description {
        function.insert("description".into(), json!(description));
    }
    let none = || json!({"type": "object", "properties": {}});
    function.insert("parameters".into(), tool.parameters.cloned().unwrap_or_else(none));
    json!({"type": "function", "function": function})
}
