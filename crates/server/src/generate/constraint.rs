//! What an answer must be, as the engine's constraint: the format that was asked for, and calls that are forced, must
//! fit their schemas, or must not come in numbers.

use paguro_engine::{Constraint, Grammar, GrammarError, Handle};
use paguro_model::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::{ChatRequest, Format, Tool, ToolChoice, reading::Reading};
use crate::{
    error::ApiError,
    output::{AnswerRules, OfferedTool, Otherwise},
};

impl Format {
    /// The schema of an answer; `None` where it may be anything.
    fn schema(&self) -> Option<Value> {
        match self {
            Self::Text => None,
            Self::JsonObject => Some(json!({"type": "object"})),
            Self::JsonSchema(schema) => Some(schema.clone()),
        }
    }

    /// The constraint of an answer that is nothing else.
    ///
    /// # Errors
    /// What the schema asks for and cannot have.
    pub(super) fn constraint(&self, handle: &Handle) -> Result<Option<Constraint>, ApiError> {
        let Some(schema) = self.schema() else { return Ok(None) };
        let constraint = handle.compile(&Grammar::JsonSchema(schema));
        constraint.map(Some).map_err(|error| refuse("response_format", "", &error))
    }
}

impl ChatRequest {
    /// What the answer must be; `None` where it may be anything.
    ///
    /// # Errors
    /// What a schema asks for and cannot have.
    pub(super) fn constraint(
        &self,
        reading: &Reading,
        tokenizer: &Tokenizer,
        handle: &Handle,
    ) -> Result<Option<Constraint>, ApiError> {
        let forced = matches!(self.tool_choice, ToolChoice::Required | ToolChoice::Named(_));
        let offered: Vec<_> = self.offered_tools().collect();
        if offered.is_empty() && !reading.in_reasoning() {
            return self.format.constraint(handle);
        }
        let schema = self.format.schema().filter(|_| !forced);
        let strict = self.tools.iter().any(|tool| tool.strict && self.offers(tool));
        let bounded = !offered.is_empty() && (forced || strict || !self.parallel_tool_calls);
        if schema.is_none() && !bounded {
            return Ok(None);
        }
        let any = json!({"type": "object"});
        let tools = self.followed(offered, &any, handle)?;
        if let Some(schema) = &schema {
            // On its own, what is wrong with it is said in its own words.
            let compiled = handle.compile(&Grammar::JsonSchema(schema.clone()));
            compiled.map_err(|error| refuse("response_format", "", &error))?;
        }
        let rules = AnswerRules {
            tools: &tools,
            // Who names a tool wants one call of it.
            parallel: self.parallel_tool_calls && !matches!(self.tool_choice, ToolChoice::Named(_)),
            otherwise: match &schema {
                Some(schema) => Some(Otherwise::Json(schema)),
                None if forced => None,
                None => Some(Otherwise::Text),
            },
            in_reasoning: reading.in_reasoning(),
        };
        let lark = reading.grammar(&rules, tokenizer)?;
        let param = if schema.is_some() { "response_format" } else { "tools" };
        handle.compile(&Grammar::Lark(lark)).map(Some).map_err(|error| refuse(param, "", &error))
    }

    /// The tools with the schemas that are followed: those that are not strict give way to any object where they ask
    /// for what cannot be.
    fn followed<'t>(
        &self,
        offered: Vec<OfferedTool<'t>>,
        any: &'t Value,
        handle: &Handle,
    ) -> Result<Vec<OfferedTool<'t>>, ApiError> {
        let strict = |name: &str| self.tools.iter().any(|tool| tool.strict && tool.name == name);
        let followed = |tool: OfferedTool<'t>| {
            let Some(schema) = tool.parameters else { return Ok(tool) };
            match handle.compile(&Grammar::JsonSchema(schema.clone())) {
                Ok(_) => Ok(tool),
                Err(_) if !strict(tool.name) => Ok(OfferedTool { parameters: Some(any), ..tool }),
                Err(error) => Err(refuse("tools", &format!(" of the tool `{}`", tool.name), &error)),
            }
        };
        offered.into_iter().map(followed).collect()
    }

    fn offers(&self, tool: &Tool) -> bool {
        self.offered_tools().any(|offered| offered.name == tool.name)
    }
}

/// A grammar that cannot be followed; `whose` says of several.
fn refuse(param: &str, whose: &str, error: &GrammarError) -> ApiError {
    let message = match error {
        GrammarError::Invalid { kind, problem } => {
            format!("`{param}`: the {kind}{whose} cannot be followed: {problem}")
        }
        other => format!("`{param}`: {other}"),
    };
    ApiError::invalid(param, message)
}
