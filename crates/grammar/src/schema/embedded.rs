//! Schemas in Lark grammars (`%json`), and the library's options of schemas.

use serde_json::{Value, json};

use super::{Keys, narrow};

/// Key of the library's options.
const OPTIONS: &str = "x-guidance";

/// Options that a grammar may set. Others would loosen its schema.
const SEPARATORS: [&str; 4] =
    ["item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern"];

/// Rewrites a schema in a grammar, with its separators.
///
/// # Errors
/// A keyword or an option that cannot be followed.
pub(crate) fn narrow_embedded(mut schema: Value) -> Result<Value, String> {
    let mut options = Keys::new();
    if let Some(Value::Object(given)) = schema.as_object_mut().and_then(|keys| keys.shift_remove(OPTIONS)) {
        if let Some(name) = given.keys().find(|name| !SEPARATORS.contains(&name.as_str())) {
            return Err(format!("the option `{name}` of `{OPTIONS}` is not supported; leave it out"));
        }
        options = given;
    }
    let mut schema = narrow(&schema)?;
    options.insert("json_allowed_escapes".into(), escapes(&schema)?.into());
    if let Value::Object(keys) = &mut schema {
        keys.insert(OPTIONS.into(), options.into());
    }
    Ok(schema)
}

/// Returns the letters after `\` in JSON strings of answers. `\u0061` would be another spelling of `a`, with which a
/// property could come twice, so `\u` is allowed only if a value needs it for a control character.
///
/// # Errors
/// A value needs it, and names of properties are free.
pub(crate) fn escapes(schema: &Value) -> Result<String, String> {
    const SHORT: &str = "nrbtf\\\"";
    let (mut controls, mut free) = (false, false);
    let mut rest = vec![schema];
    while let Some(value) = rest.pop() {
        match value {
            Value::Object(keys) => {
                let has = |key: &str| keys.get(key).is_some_and(|schema| schema != &json!(false));
                free |= has("additionalProperties") || has("patternProperties");
                rest.extend(keys.values());
            }
            Value::Array(values) => rest.extend(values),
            Value::String(text) => {
                controls |=
                    text.chars().any(|char| char.is_ascii_control() && !"\n\r\t\u{8}\u{c}".contains(char));
            }
            _ => {}
        }
    }
    match (controls, free) {
        (false, _) => Ok(SHORT.into()),
        (true, false) => Ok(format!("{SHORT}u")),
        (true, true) => {
            Err("a value has a control character beside free names of properties; leave it out".into())
        }
    }
}
