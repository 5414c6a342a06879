//! The engine's constraint of an answer: a requested format and forced calls must fit their schemas. Impossible schemas
//! are refused.

use std::time::Instant;

use paguro_engine::{COMPILE_TIME, Constraint, Grammar, GrammarError, Handle};
use paguro_model::tokenizer::Tokenizer;
use paguro_model_output::{AnswerRules, OfferedTool, Otherwise, Thought};
use serde_json::{Value, json};

use super::{ChatRequest, Format, Tool, ToolChoice, reading::Reading};
use crate::error::ApiError;

/// Compiler of grammars. It stops when the client has disconnected.
pub(super) struct Compiler<'h> {
    handle: &'h Handle,
    /// Returns false if the client has disconnected.
    is_wanted: &'h dyn Fn() -> bool,
    /// Time at which all grammars of the request have to be compiled.
    until: Instant,
}

impl<'h> Compiler<'h> {
    pub fn new(handle: &'h Handle, is_wanted: &'h dyn Fn() -> bool) -> Self {
        Self { handle, is_wanted, until: Instant::now() + COMPILE_TIME }
    }

    /// Compiles a grammar of the field `param`; `whose` names the tool, if there are several.
    fn compile(&self, grammar: &Grammar, param: &str, whose: &str) -> Result<Constraint, ApiError> {
        if !(self.is_wanted)() {
            return Err(ApiError::Unavailable("the client has gone".into()));
        }
        let compiled = self.handle.compile_while(grammar, self.until, self.is_wanted);
        compiled.map_err(|error| refuse(param, whose, &error))
    }
}

impl Format {
    /// Returns the schema of an answer; `None` for any text.
    fn schema(&self) -> Option<Value> {
        match self {
            Self::Text | Self::Whole { .. } => None,
            Self::JsonObject => Some(json!({"type": "object"})),
            Self::JsonSchema(schema) => Some(schema.clone()),
        }
    }

    /// Returns the constraint of an answer without calls or reasoning.
    ///
    /// # Errors
    /// The schema is not supported.
    pub(super) fn constraint(&self, compiler: &Compiler<'_>) -> Result<Option<Constraint>, ApiError> {
        if let Self::Whole { grammar, param } = self {
            return compiler.compile(grammar, param, "").map(Some);
        }
        let Some(schema) = self.schema() else { return Ok(None) };
        compiler.compile(&Grammar::JsonSchema(schema), "response_format", "").map(Some)
    }
}

impl ChatRequest {
    /// Returns the constraint of an answer; `None` for any text.
    ///
    /// # Errors
    /// A schema is not supported.
    pub(super) fn constraint(
        &self,
        reading: &Reading,
        tokenizer: &Tokenizer,
        compiler: &Compiler<'_>,
    ) -> Result<Option<Constraint>, ApiError> {
        let forced = self.forces_a_call();
        let offered: Vec<_> = self.offered_tools().collect();
        if offered.is_empty() && reading.thought == Thought::None && reading.in_answer() {
            return self.format.constraint(compiler);
        }
        if let Format::Whole { param, .. } = self.format {
            let message = format!(
                "`{param}`: a regular expression, a choice or a grammar says what the whole answer is: send it without \
                 `tools`, and with `reasoning_effort` \"none\" to a model that reasons"
            );
            return Err(ApiError::invalid(param, message));
        }
        let schema = self.format.schema().filter(|_| !forced);
        if !self.is_bounded() {
            return Ok(None);
        }
        let whole = |tools: &[OfferedTool<'_>]| {
            let rules = AnswerRules {
                tools,
                // A client that names a tool expects one call of it.
                parallel: self.parallel_tool_calls && !matches!(self.tool_choice, ToolChoice::Named(_)),
                otherwise: match &schema {
                    Some(schema) => Some(Otherwise::Json(schema)),
                    None if forced => None,
                    None => Some(Otherwise::Text),
                },
                thought: reading.thought,
                in_answer: reading.in_answer(),
            };
            let param = if schema.is_some() { "response_format" } else { "tools" };
            compiler.compile(&Grammar::Lark(reading.grammar(&rules, tokenizer)?), param, "")
        };
        if let Ok(constraint) = whole(&offered) {
            return Ok(Some(constraint));
        }
        // Some schema is not supported. Each is compiled alone to find it; tools that are not strict fall back to any
        // object.
        if let Some(schema) = &schema {
            compiler.compile(&Grammar::JsonSchema(schema.clone()), "response_format", "")?;
        }
        let any = json!({"type": "object"});
        whole(&self.followed(offered, &any, compiler)?).map(Some)
    }

    fn forces_a_call(&self) -> bool {
        matches!(self.tool_choice, ToolChoice::Required | ToolChoice::Named(_))
    }

    /// Returns true if a grammar covers the whole answer.
    pub(super) fn is_bounded(&self) -> bool {
        let strict = || self.tools.iter().any(|tool| tool.strict && self.offers(tool));
        let calls_are = || self.forces_a_call() || strict() || !self.parallel_tool_calls;
        let has_schema = self.format != Format::Text && !self.forces_a_call();
        has_schema || (self.offered_tools().next().is_some() && calls_are())
    }

    /// Returns the tools with the schemas to enforce. Tools that are not strict fall back to any object if their schema
    /// is not supported.
    fn followed<'t>(
        &self,
        offered: Vec<OfferedTool<'t>>,
        any: &'t Value,
        compiler: &Compiler<'_>,
    ) -> Result<Vec<OfferedTool<'t>>, ApiError> {
        let strict = |name: &str| self.tools.iter().any(|tool| tool.strict && tool.name == name);
        let followed = |tool: OfferedTool<'t>| {
            let Some(schema) = tool.parameters else { return Ok(tool) };
            let whose = format!(" of the tool `{}`", tool.name);
            match compiler.compile(&Grammar::JsonSchema(schema.clone()), "tools", &whose) {
                Ok(_) => Ok(tool),
                Err(ApiError::Invalid { .. }) if !strict(tool.name) => {
                    Ok(OfferedTool { parameters: Some(any), ..tool })
                }
                Err(error) => Err(error),
            }
        };
        offered.into_iter().map(followed).collect()
    }

    fn offers(&self, tool: &Tool) -> bool {
        self.offered_tools().any(|offered| offered.name == tool.name)
    }
}

/// Returns the error for an unsupported grammar; `whose` names the tool, if there are several.
fn refuse(param: &str, whose: &str, error: &GrammarError) -> ApiError {
    let message = match error {
        GrammarError::Busy { .. } => return ApiError::Unavailable(format!("`{param}`: {error}")),
        GrammarError::NotWanted => return ApiError::Unavailable("the client has gone".into()),
        GrammarError::Invalid { kind, problem } => {
            format!("`{param}`: the {kind}{whose} cannot be followed: {problem}")
        }
        other => format!("`{param}`: {other}"),
    };
    ApiError::invalid(param, message)
}
