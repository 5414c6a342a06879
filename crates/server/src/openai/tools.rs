//! Tools of a request and its `tool_choice`. Chat completions nest the properties of a function in `function`; responses
//! do not.

use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use serde_json::Value;
use utoipa::ToSchema;

use crate::{
    error::ApiError,
    generate::{Tool, ToolChoice},
    wire::Tolerance,
};

/// A function that the model may call, or a tool of another kind.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(untagged)]
pub enum ToolParam {
    /// A function in the format of chat completions.
    Nested(NestedTool),
    /// A function in the format of responses.
    Flat(FlatTool),
    /// Functions in a namespace; each is offered under its own name.
    Namespace(NamespaceTool),
    /// Tools of other types (`web_search`, `custom`, `mcp`, ...) are not offered, because this server runs no tools.
    /// They are ignored and named in `X-Paguro-Ignored`, and refused if `tool_choice` requires one.
    #[schema(value_type = Object)]
    Other(Value),
}

/// A function in the format of chat completions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NestedTool {
    /// Always `function`.
    #[serde(default)]
    r#type: FunctionType,
    /// The function.
    function: FunctionParam,
}

/// A function in the format of responses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FlatTool {
    /// Always `function`.
    #[serde(default)]
    r#type: FunctionType,
    #[serde(flatten)]
    function: FunctionParam,
}

/// Functions in a namespace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct NamespaceTool {
    /// Always `namespace`.
    r#type: NamespaceType,
    /// Name of the namespace.
    name: String,
    /// Description of the namespace, which is not part of the prompt.
    description: Option<String>,
    /// The functions.
    #[schema(no_recursion)]
    tools: Vec<ToolParam>,
}

/// Always `function`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum FunctionType {
    /// A function.
    #[default]
    Function,
}

/// Always `namespace`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum NamespaceType {
    /// A namespace.
    Namespace,
}

/// A function.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FunctionParam {
    /// Its name.
    pub name: String,
    /// Its description, for the model.
    #[serde(default)]
    pub description: Option<String>,
    /// JSON schema of its arguments; absent if it has none.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    pub parameters: Option<Value>,
    /// True if calls must fit the schema.
    #[serde(default)]
    pub strict: Option<bool>,
}

impl<'de> Deserialize<'de> for ToolParam {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let read = match value.get("type").map(|kind| kind.as_str()) {
            None | Some(Some("function")) if value.get("function").is_some() => {
                serde_json::from_value(value).map(Self::Nested)
            }
            None | Some(Some("function")) => serde_json::from_value(value).map(Self::Flat),
            Some(Some("namespace")) => serde_json::from_value(value).map(Self::Namespace),
            Some(_) => Ok(Self::Other(value)),
        };
        read.map_err(D::Error::custom)
    }
}

/// Tools that are offered to the model.
#[derive(Debug, Default)]
pub struct Offer {
    /// Functions.
    pub tools: Vec<Tool>,
    /// Pairs of a function's name and its namespace, for functions that have one.
    pub namespaces: Vec<(String, String)>,
}

impl Offer {
    /// Returns the functions among these tools.
    ///
    /// # Errors
    /// The request is strict and has a tool that would be ignored: one of another type, a namespace in a namespace, or a
    /// function in a namespace whose name another function has.
    pub fn of(tools: Vec<ToolParam>, path: &str, tolerance: &Tolerance) -> Result<Self, ApiError> {
        let mut offer = Self::default();
        offer.add(tools, path, None, tolerance)?;
        Ok(offer)
    }

    fn add(
        &mut self,
        tools: Vec<ToolParam>,
        path: &str,
        namespace: Option<&str>,
        tolerance: &Tolerance,
    ) -> Result<(), ApiError> {
        for (i, tool) in tools.into_iter().enumerate() {
            let path = format!("{path}[{i}]");
            match tool {
                ToolParam::Nested(NestedTool { function, .. })
                | ToolParam::Flat(FlatTool { function, .. }) => {
                    let FunctionParam { name, description, parameters, strict } = function;
                    if namespace.is_some() && self.tools.iter().any(|tool| tool.name == name) {
                        let why = format_args!("there is another function `{name}`");
                        tolerance.leave_out(&path, why)?;
                        continue;
                    }
                    self.namespaces.extend(namespace.map(|namespace| (name.clone(), namespace.to_owned())));
                    self.tools.push(Tool { name, description, parameters, strict: strict == Some(true) });
                }
                ToolParam::Namespace(NamespaceTool { name, tools, .. }) if namespace.is_none() => {
                    self.add(tools, &format!("{path}.tools"), Some(&name), tolerance)?;
                }
                ToolParam::Namespace(_) => tolerance.leave_out(&path, "a namespace in a namespace")?,
                ToolParam::Other(tool) => {
                    let kind = tool.get("type").and_then(Value::as_str).unwrap_or_default();
                    let why = format_args!("this server runs no tools, so a `{kind}` is not offered");
                    tolerance.leave_out(&path, why)?;
                }
            }
        }
        Ok(())
    }
}

/// Rule for calls of tools: `none`, `auto`, `required`, a function to call, or the allowed functions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ToolChoiceParam(pub Value);

impl ToolChoiceParam {
    /// Converts the choice, and removes the tools that it excludes from `tools`.
    ///
    /// # Errors
    /// The choice is invalid, or names a tool that is not offered.
    pub fn check(choice: Option<Self>, tools: &mut Vec<Tool>) -> Result<ToolChoice, ApiError> {
        let Some(Self(choice)) = choice else { return Ok(ToolChoice::Auto) };
        let refuse = |message: String| Err(ApiError::invalid("tool_choice", message));
        if let Some(mode) = choice.as_str() {
            return ToolChoice::check(Ok(mode), tools);
        }
        let name_of = |tool: &Value| {
            let function = tool.get("function").unwrap_or(tool);
            function.get("name").and_then(Value::as_str).map(str::to_owned)
        };
        match choice.get("type").and_then(Value::as_str) {
            None | Some("function") => match name_of(&choice) {
                Some(name) => ToolChoice::check(Err(&name), tools),
                None => refuse("`tool_choice` does not name the function".into()),
            },
            Some("allowed_tools") => {
                let allowed = choice.get("allowed_tools").unwrap_or(&choice);
                let names: Vec<_> =
                    allowed["tools"].as_array().into_iter().flatten().filter_map(name_of).collect();
                tools.retain(|tool| names.contains(&tool.name));
                ToolChoice::check(Ok(allowed["mode"].as_str().unwrap_or("auto")), tools)
            }
            Some(mode @ ("auto" | "none" | "required")) => ToolChoice::check(Ok(mode), tools),
            Some(other) => refuse(format!(
                "`tool_choice` demands a tool of the type `{other}`, but this server runs no tools: it offers functions only"
            )),
        }
    }
}
