//! Formats of strings in a JSON schema. Some patterns of the grammar library allow strings that validators refuse: 29
//! February in any year, a 60th second at any time, labels of host names of any length. For these, `format` is replaced
//! by a pattern that every validator accepts.

use serde_json::{Map, Value, json};

/// Replaces the formats of a schema and of all schemas in it.
pub(crate) fn replace(schema: &mut Value) {
    visit(schema, &mut |keys| {
        if let Some(pattern) = keys.get("format").and_then(Value::as_str).and_then(pattern) {
            keys.shift_remove("format");
            require(keys, pattern);
        }
    });
}

/// Calls a function with a schema and all schemas in it.
pub(crate) fn visit(schema: &mut Value, found: &mut impl FnMut(&mut Map<String, Value>)) {
    match schema {
        Value::Array(schemas) => schemas.iter_mut().for_each(|schema| visit(schema, found)),
        Value::Object(keys) => {
            found(keys);
            for (key, value) in keys.iter_mut() {
                match key.as_str() {
                    // Values that only resemble schemas.
                    "const" | "enum" | "default" | "examples" => {}
                    // Their keys are names, and no keywords.
                    "properties" | "patternProperties" | "$defs" | "definitions" => {
                        if let Value::Object(schemas) = value {
                            schemas.values_mut().for_each(|schema| visit(schema, found));
                        }
                    }
                    _ => visit(value, found),
                }
            }
        }
        _ => {}
    }
}

/// Adds a pattern to a schema's existing ones.
fn require(keys: &mut Map<String, Value>, pattern: String) {
    if !keys.contains_key("pattern") {
        keys.insert("pattern".into(), Value::String(pattern));
    } else if let Value::Array(all) = keys.entry("allOf").or_insert_with(|| json!([])) {
        all.push(json!({"pattern": pattern}));
    }
}

/// Returns the pattern of a format; `None` for formats that the grammar library implements correctly or refuses.
fn pattern(format: &str) -> Option<String> {
    // RFC 3339 with uppercase letters and fractions of common length, without leap seconds, which no pattern can
    // predict, and without the year 0.
    const MULTIPLE_OF_4: &str = "(?:0[48]|[2468][048]|[13579][26])";
    const TIME: &str = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
    let date = || {
        format!(
            "(?:(?:[0-9]{{3}}[1-9]|[0-9]{{2}}[1-9]0|[0-9][1-9]00|[1-9]000)-\
             (?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)\
             |02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{MULTIPLE_OF_4}|{MULTIPLE_OF_4}00)-02-29)"
        )
    };
    // RFC 1123, without labels with `--` at the third position, which are Punycode or reserved: at most seven labels of
    // at most 31 characters, so that the total length is valid.
    const LABEL: &str = "[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,15}";
    let text = match format {
        "date" => date(),
        "time" => TIME.into(),
        "date-time" => format!("{}T{TIME}", date()),
        "hostname" => format!(r"{LABEL}(?:\.{LABEL}){{0,6}}"),
        // RFC 5321: at most 64 characters before the `@`. Not all validators accept quoted text and IP addresses.
        "email" => {
            const ATOM: &str = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,20}";
            format!(r"{ATOM}(?:\.{ATOM}){{0,2}}@(?:{LABEL}\.){{1,6}}[a-zA-Z]{{2,20}}")
        }
        _ => return None,
    };
    Some(format!("^(?:{text})$"))
}

#[cfg(test)]
mod tests {
    use regex::Regex;

    use super::*;

    #[test]
    fn only_what_every_validator_takes() {
        for (format, taken, refused) in [
            (
                "date",
                &["2024-02-29", "2000-02-29", "1900-02-28", "0001-12-31", "1000-04-30"][..],
                &["2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31", "2024-13-01", "2024-1-01"][..],
            ),
            (
                "time",
                &["23:59:59Z", "00:00:00.123456789+23:59"],
                &["23:59:60Z", "24:00:00Z", "12:00:00", "12:00:00z", "12:00:00.Z"],
            ),
            (
                "date-time",
                &["2024-02-29T00:00:00Z"],
                &["2023-02-29T00:00:00Z", "2024-02-29t00:00:00Z", "2024-02-29"],
            ),
            ("hostname", &["a", "a-b.c0"], &["", "a.", "-a", "a-", "ab--c", "a_b"]),
            ("email", &["a.b+c@d-e.org"], &["a@b", ".a@b.c", "a.@b.cd", "a@-b.cd", "a@[1.2.3.4]"]),
        ] {
            let pattern = Regex::new(&pattern(format).unwrap()).unwrap();
            for text in taken {
                assert!(pattern.is_match(text), "{format}: {text}");
            }
            for text in refused {
                assert!(!pattern.is_match(text), "{format}: {text}");
            }
        }
    }

    #[test]
    fn only_keywords_are_replaced() {
        let mut schema = json!({
            "properties": {
                "format": {"const": {"format": "date"}},
                "day": {"type": "string", "format": "date", "pattern": "^2"},
                "id": {"format": "uuid"},
            },
            "items": [{"format": "time"}],
        });
        replace(&mut schema);
        let kept = json!({
            "properties": {
                "format": {"const": {"format": "date"}},
                "day": {"type": "string", "pattern": "^2", "allOf": [{"pattern": pattern("date")}]},
                "id": {"format": "uuid"},
            },
            "items": [{"pattern": pattern("time")}],
        });
        assert_eq!(schema, kept);
    }
}
