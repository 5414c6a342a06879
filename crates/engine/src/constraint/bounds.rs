//! Bounds of grammars. The recursion and memory of the compiler grow with the grammar, so the grammar is measured
//! before it is compiled. The measurement does not recurse.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

/// Most JSON values of all schemas of a grammar.
const MAX_VALUES: usize = 20_000;

/// Deepest nesting of JSON in a schema, and of brackets in a rule or a regular expression.
pub(super) const MAX_DEPTH: usize = 100;

/// Most names in a grammar: properties, required properties, definitions, rules, terminals.
pub(super) const MAX_NAMES: usize = 5_000;

/// Most names that one object lists as `properties` or as `required`. The compiler recurses once for each of them.
const MAX_OBJECT_NAMES: usize = 2_000;

/// Most different values of `$ref`.
const MAX_REFERENCES: usize = 1_000;

/// Most values of all `enum`s.
const MAX_CHOICES: usize = 5_000;

/// Most bytes of all names, patterns and values that a grammar consists of, without descriptions.
pub(super) const MAX_TEXT: usize = 256 << 10;

/// Deepest recursion of the compiler, counted in nested schemas and rules: if every reference were followed before the
/// one before it is finished.
const MAX_LEVELS: usize = 4_000;

/// Keywords whose values are counts. The compiler reads them as 32-bit numbers.
const COUNTS: [&str; 6] =
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"];

/// Keywords that only describe a schema.
const ANNOTATIONS: [&str; 5] = ["title", "description", "$comment", "default", "examples"];

/// Size of a grammar for its compiler.
#[derive(Debug, Default)]
pub(super) struct Measure {
    values: usize,
    names: usize,
    references: usize,
    choices: usize,
    text: usize,
    levels: usize,
}

impl Measure {
    /// Adds a JSON schema.
    ///
    /// # Errors
    /// The bound that it exceeds.
    pub fn schema(&mut self, schema: &Value) -> Result<(), String> {
        let mut nodes = vec![Node { value: schema, parent: 0, depth: 1, names: false }];
        let mut next = 0;
        while let Some(&node) = nodes.get(next) {
            self.node(node)?;
            let child = |value, names| Node { value, parent: next, depth: node.depth + 1, names };
            match node.value {
                Value::Array(values) => nodes.extend(values.iter().map(|value| child(value, false))),
                Value::Object(keys) => {
                    let keywords =
                        keys.iter().filter(|(key, _)| node.names || !ANNOTATIONS.contains(&key.as_str()));
                    nodes.extend(keywords.map(|(key, value)| child(value, !node.names && lists_names(key))));
                }
                _ => {}
            }
            next += 1;
        }
        self.add_levels(&nodes, schema)
    }

    /// Measures one value of a schema.
    fn node(&mut self, node: Node<'_>) -> Result<(), String> {
        self.values += 1;
        at_most("JSON values", self.values, MAX_VALUES)?;
        at_most("levels of nested JSON", node.depth, MAX_DEPTH)?;
        match node.value {
            Value::String(text) => self.add_text(text.len()),
            Value::Object(keys) => {
                if node.names {
                    at_most("names in one object", keys.len(), MAX_OBJECT_NAMES)?;
                    self.add_names(keys.len())?;
                }
                if let Some(Value::Array(required)) = keys.get("required").filter(|_| !node.names) {
                    at_most("names in `required`", required.len(), MAX_OBJECT_NAMES)?;
                    self.add_names(required.len())?;
                }
                if let Some(Value::Array(choices)) = keys.get("enum").filter(|_| !node.names) {
                    self.choices += choices.len();
                    at_most("values in `enum`", self.choices, MAX_CHOICES)?;
                }
                let is_count = |(key, _): &(&String, &Value)| !node.names && COUNTS.contains(&key.as_str());
                let is_large =
                    |value: &Value| value.as_f64().is_some_and(|count| count > f64::from(u32::MAX));
                if let Some((key, count)) = keys.iter().filter(is_count).find(|(_, count)| is_large(count)) {
                    return Err(format!("`{key}` is {count}; at most {} is compiled", u32::MAX));
                }
                self.add_text(keys.keys().map(String::len).sum())
            }
            _ => Ok(()),
        }
    }

    /// Measures the depth of a compiler's recursion that expands each reference in place, and only once.
    fn add_levels(&mut self, nodes: &[Node<'_>], schema: &Value) -> Result<(), String> {
        // Children follow their parents.
        let mut heights = vec![1usize; nodes.len()];
        for (index, node) in nodes.iter().enumerate().skip(1).rev() {
            heights[node.parent] = heights[node.parent].max(heights[index] + 1);
        }
        let index: HashMap<*const Value, usize> =
            nodes.iter().enumerate().map(|(index, node)| (std::ptr::from_ref(node.value), index)).collect();
        let references: HashSet<&str> = nodes
            .iter()
            .filter(|node| !node.names)
            .filter_map(|node| node.value.get("$ref").and_then(Value::as_str))
            .collect();
        self.references += references.len();
        at_most("different references", self.references, MAX_REFERENCES)?;
        let target =
            |reference: &str| reference.strip_prefix('#').and_then(|pointer| schema.pointer(pointer));
        let mut followed = HashSet::new();
        for &reference in &references {
            let (mut chain, mut last) = (HashSet::new(), reference);
            while !followed.contains(last) {
                if !chain.insert(last) {
                    return Err(format!("`$ref` `{last}` leads back to itself, so nothing is valid"));
                }
                match target(last).and_then(|target| target.get("$ref")?.as_str()) {
                    Some(next) => last = next,
                    None => break,
                }
            }
            followed.extend(chain);
        }
        let height = |reference: &str| {
            let target = target(reference);
            // The target of an anchor or an identifier may be any part of the schema.
            target
                .and_then(|target| index.get(&std::ptr::from_ref(target)))
                .map_or(heights[0], |&index| heights[index])
        };
        self.levels += heights[0] + references.into_iter().map(height).sum::<usize>();
        self.check_levels()
    }

    fn check_levels(&self) -> Result<(), String> {
        at_most("levels, references followed", self.levels, MAX_LEVELS)
    }

    /// Adds a regular expression.
    ///
    /// # Errors
    /// The bound that it exceeds.
    pub fn regex(&mut self, regex: &str) -> Result<(), String> {
        self.add_text(regex.len())?;
        let mut depth = 0usize;
        for byte in regex.bytes() {
            match byte {
                b'(' => depth += 1,
                b')' => depth = depth.saturating_sub(1),
                _ => {}
            }
            at_most("levels of nested groups", depth, MAX_DEPTH)?;
        }
        Ok(())
    }

    /// Adds a Lark grammar, with the schemas in it.
    ///
    /// # Errors
    /// The bound that it exceeds.
    pub fn lark(&mut self, lark: &str) -> Result<(), String> {
        const SCHEMA: &str = "%json";
        let mut rest = lark;
        let (mut depth, mut deepest) = (0usize, 0);
        while let Some(char) = rest.chars().next() {
            let end = match char {
                '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
                '"' | '/' => {
                    let end = super::grammar::literal(rest);
                    self.regex(&rest[..end])?;
                    end
                }
                '%' if rest.starts_with(SCHEMA) => {
                    SCHEMA.len() + self.embedded_schema(&rest[SCHEMA.len()..])?
                }
                _ => {
                    self.add_text(1)?;
                    char.len_utf8()
                }
            };
            match char {
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' => depth = depth.saturating_sub(1),
                ':' => {
                    self.add_names(1)?;
                    self.levels += 1 + deepest;
                    self.check_levels()?;
                    deepest = 0;
                }
                _ => {}
            }
            deepest = deepest.max(depth);
            at_most("levels of nested brackets", depth, MAX_DEPTH)?;
            rest = &rest[end..];
        }
        Ok(())
    }

    /// Adds the schema at the beginning of `text`, and returns its length. The compiler reports errors of a malformed
    /// one.
    fn embedded_schema(&mut self, text: &str) -> Result<usize, String> {
        let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
        match values.next() {
            Some(Ok(schema)) => self.schema(&schema).map(|()| values.byte_offset()),
            _ => Ok(0),
        }
    }

    fn add_names(&mut self, names: usize) -> Result<(), String> {
        self.names += names;
        at_most("names", self.names, MAX_NAMES)
    }

    fn add_text(&mut self, bytes: usize) -> Result<(), String> {
        self.text += bytes;
        at_most("bytes of names and values", self.text, MAX_TEXT)
    }
}

/// A value in a schema.
#[derive(Clone, Copy)]
struct Node<'s> {
    value: &'s Value,
    /// Index of the value that contains it.
    parent: usize,
    depth: usize,
    /// Its keys are names, and no keywords.
    names: bool,
}

/// Returns true if a keyword's value is an object whose keys are names.
fn lists_names(keyword: &str) -> bool {
    matches!(keyword, "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas")
}

fn at_most(what: &str, count: usize, most: usize) -> Result<(), String> {
    if count <= most { Ok(()) } else { Err(format!("it has {count} {what}; at most {most} are compiled")) }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, json};

    use super::*;

    fn chain(links: usize) -> Value {
        let link = |i: usize| (format!("a{i}"), json!({"$ref": format!("#/$defs/a{}", i + 1)}));
        let mut links_map: Map<_, _> = (0..links).map(link).collect();
        links_map.insert(format!("a{links}"), json!({"type": "null"}));
        json!({"$defs": links_map, "$ref": "#/$defs/a0"})
    }

    fn object(properties: usize, required: usize) -> Value {
        let names = |count: usize| (0..count).map(|i| format!("p{i}"));
        let list: Map<_, _> = names(properties).map(|name| (name, json!({}))).collect();
        json!({"properties": list, "required": names(required).collect::<Vec<_>>()})
    }

    fn nested(depth: usize) -> Value {
        (0..depth).fold(json!({}), |inner, _| json!({"items": inner}))
    }

    #[test]
    fn what_is_too_large_is_told_by_its_measure() {
        let cases = [
            (chain(900), None),
            (chain(1_001), Some("1002 different references; at most 1000")),
            (chain(20_000), Some("names in one object; at most 2000")),
            (object(2_000, 2_000), None),
            (object(2_001, 0), Some("2001 names in one object; at most 2000")),
            (object(0, 2_001), Some("2001 names in `required`; at most 2000")),
            (json!({"anyOf": vec![object(500, 0); 11]}), Some("5500 names; at most 5000")),
            (nested(99), None),
            (nested(100), Some("101 levels of nested JSON; at most 100")),
            (json!({"enum": vec![0; 5_001]}), Some("5001 values in `enum`; at most 5000")),
            (json!({"const": "x".repeat(300 << 10)}), Some("bytes of names and values; at most 262144")),
            (json!({"description": "x".repeat(300 << 10), "default": vec![0; 30_000]}), None),
            (
                json!({"maxLength": 1u64 << 63}),
                Some("`maxLength` is 9223372036854775808; at most 4294967295"),
            ),
            (json!({"properties": {"maxLength": {"type": "integer"}}}), None),
            (json!({"$ref": "#"}), Some("`$ref` `#` leads back to itself")),
            (
                json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "items": {"$ref": "#/$defs/a"}}),
                Some("leads back to itself"),
            ),
            (json!({"properties": {"next": {"$ref": "#"}}}), None),
            (json!({"const": vec![0; 20_000]}), Some("20001 JSON values; at most 20000")),
            (
                json!({"$defs": (0..60).map(|i| (format!("a{i}"), nested(90))).collect::<Map<_, _>>(),
                    "allOf": (0..60).map(|i| json!({"$ref": format!("#/$defs/a{i}")})).collect::<Vec<_>>()}),
                Some("levels, references followed; at most 4000"),
            ),
        ];
        for (schema, expected) in cases {
            let measured = Measure::default().schema(&schema);
            let agrees = match (&measured, expected) {
                (Ok(()), None) => true,
                (Err(problem), Some(expected)) => problem.contains(expected),
                _ => false,
            };
            assert!(agrees, "{measured:?} instead of {expected:?}");
        }
    }

    #[test]
    fn lark_is_measured_with_its_schemas() {
        let rules = |count: usize| (0..count).map(|i| format!("r{i}: r{}\n", i + 1)).collect::<String>();
        let schema = |links| format!("start: %json {}\nx: \"y\"", chain(links));
        let brackets = |depth: usize| format!("start: {}\"a\"{}\n", "(".repeat(depth), ")".repeat(depth));
        let cases = [
            (rules(1_000), None),
            (rules(4_001), Some("levels, references followed")),
            (schema(900), None),
            (schema(1_500), Some("different references")),
            (brackets(90), None),
            (brackets(10_000), Some("levels of nested brackets")),
            (format!("start: /{}/", "(".repeat(200)), Some("levels of nested groups")),
            (format!("start: \"{}\"", "x".repeat(300 << 10)), Some("bytes of names and values")),
            ("start: %json {\"a\": ".repeat(3), None),
        ];
        for (lark, expected) in cases {
            let measured = Measure::default().lark(&lark);
            let agrees = match (&measured, expected) {
                (Ok(()), None) => true,
                (Err(problem), Some(expected)) => problem.contains(expected),
                _ => false,
            };
            assert!(agrees, "{measured:?} instead of {expected:?}");
        }
    }
}
