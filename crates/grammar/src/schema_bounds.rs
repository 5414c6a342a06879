//! JSON schemas as their compiler reads them: their annotations, and their size.
//!
//! A reference may lead to any part of a schema, also to one that is none by its position. So the compiler gets no part
//! that is not measured: annotations are removed, and everything else counts.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use super::bounds::{Measure, at_most};

/// Most JSON values of all schemas of a grammar.
const MAX_VALUES: usize = 20_000;

/// Most names that one object lists as `properties` or as `required`. The compiler recurses once for each of them.
const MAX_OBJECT_NAMES: usize = 2_000;

/// Most different values of `$ref`.
const MAX_REFERENCES: usize = 1_000;

/// Most values of all `enum`s.
const MAX_CHOICES: usize = 5_000;

/// Most expressions of all `patternProperties`. The compiler intersects each with each.
const MAX_PATTERN_NAMES: usize = 100;

/// Most different patterns and formats of a schema that combines schemas, whose patterns the compiler intersects.
const MAX_COMBINED_PATTERNS: usize = 50;

/// Most properties of an object with `minProperties` or `maxProperties`. Its grammar has their square.
const MAX_COUNTED_PROPERTIES: usize = 100;

/// Largest `multipleOf`, in units of its last digit; also for the product of all of them in a schema that combines
/// schemas. The compiler multiplies it by ten in 32 bits.
const MAX_DIVISOR: f64 = 1e8;

/// Most states of the expression of a `multipleOf`: one for each remainder, where factors 2 and 5 hardly count.
const MAX_REMAINDERS: f64 = 10_000.0;

/// Most remainders of all `multipleOf`s.
const MAX_ALL_REMAINDERS: f64 = 20_000.0;

/// Most digits of a `multipleOf` after the point.
const MAX_DIGITS: i32 = 8;

/// Keywords whose values are counts. The compiler reads them as 32-bit numbers.
const COUNTS: [&str; 6] =
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"];

/// Keywords that only describe a schema.
const ANNOTATIONS: [&str; 5] = ["title", "description", "$comment", "default", "examples"];

/// Keywords whose values are objects of schemas under names.
const NAMES: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

/// Keywords whose values are schemas, or lists of schemas.
const SCHEMAS: [&str; 15] = [
    "items",
    "additionalItems",
    "prefixItems",
    "contains",
    "unevaluatedItems",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
];

/// Keywords that apply further schemas to the same value.
const COMBINING: [&str; 4] = ["allOf", "anyOf", "oneOf", "$ref"];

/// Keywords that restrict no value.
const FREE: [&str; 7] = ["type", "$schema", "$id", "id", "$anchor", "$defs", "definitions"];

/// Options of a schema in a grammar whose values are regular expressions.
const SEPARATORS: [&str; 3] = ["item_separator", "key_separator", "whitespace_pattern"];

/// Position of a JSON value in a schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    /// A schema, or a list of schemas.
    Schema,
    /// An object whose keys are names, and whose values are schemas.
    Names,
    /// Any other value: a constant, or the value of an unknown keyword.
    Data,
}

impl Position {
    /// Returns the position of the value of a key.
    fn of(self, key: &str) -> Self {
        match self {
            Self::Schema if NAMES.contains(&key) => Self::Names,
            Self::Schema if SCHEMAS.contains(&key) => Self::Schema,
            Self::Schema | Self::Data => Self::Data,
            Self::Names => Self::Schema,
        }
    }
}

/// Removes all annotations from a schema, and returns true if there were any.
pub(super) fn strip(schema: &mut Value) -> bool {
    let mut found = false;
    let mut rest = vec![(schema, Position::Schema)];
    while let Some((value, position)) = rest.pop() {
        match value {
            Value::Array(values) => rest.extend(values.iter_mut().map(|value| (value, position))),
            Value::Object(keys) => {
                if position == Position::Schema {
                    let all = keys.len();
                    keys.retain(|key, _| !ANNOTATIONS.contains(&key.as_str()));
                    found |= keys.len() < all;
                }
                rest.extend(keys.iter_mut().map(|(key, value)| (value, position.of(key))));
            }
            _ => {}
        }
    }
    found
}

/// A value in a schema.
#[derive(Clone, Copy)]
struct Node<'s> {
    value: &'s Value,
    /// Index of the value that contains it.
    parent: usize,
    depth: usize,
    position: Position,
}

/// Properties of a whole schema.
#[derive(Default)]
struct Whole<'s> {
    /// True if the compiler intersects schemas of the same value.
    combines: bool,
    /// Different patterns and formats.
    patterns: HashSet<&'s str>,
    /// Different divisors, in units of their last digits.
    divisors: Vec<f64>,
}

impl Measure {
    /// Adds a JSON schema without annotations.
    ///
    /// # Errors
    /// The bound that it exceeds.
    pub fn schema(&mut self, schema: &Value) -> Result<(), String> {
        let mut whole = Whole::default();
        let mut nodes = vec![Node { value: schema, parent: 0, depth: 1, position: Position::Schema }];
        let mut next = 0;
        while let Some(&node) = nodes.get(next) {
            self.node(node, &mut whole)?;
            let child = |value, position| Node { value, parent: next, depth: node.depth + 1, position };
            match node.value {
                Value::Array(values) => {
                    nodes.extend(values.iter().map(|value| child(value, node.position)));
                }
                Value::Object(keys) => {
                    nodes.extend(keys.iter().map(|(key, value)| child(value, node.position.of(key))));
                }
                _ => {}
            }
            next += 1;
        }
        if whole.combines {
            at_most(
                "different patterns and formats, and combines schemas",
                whole.patterns.len(),
                MAX_COMBINED_PATTERNS,
            )?;
            check_divisor("the product of all `multipleOf`", whole.divisors.iter().product())?;
        }
        self.add_levels(&nodes, schema)
    }

    /// Measures one value of a schema.
    fn node<'s>(&mut self, node: Node<'s>, whole: &mut Whole<'s>) -> Result<(), String> {
        self.values += 1;
        at_most("JSON values", self.values, MAX_VALUES)?;
        at_most("levels of nested JSON", node.depth, super::bounds::MAX_DEPTH)?;
        let keys = match node.value {
            Value::String(text) => return self.add_text(text.len()),
            Value::Object(keys) => keys,
            _ => return Ok(()),
        };
        self.add_text(keys.keys().map(String::len).sum())?;
        at_most("names in one object", keys.len(), MAX_OBJECT_NAMES)?;
        if node.position != Position::Schema {
            self.add_names(keys.len())?;
        }
        // A reference may lead to any object.
        if let Some(Value::Array(required)) = keys.get("required") {
            at_most("names in `required`", required.len(), MAX_OBJECT_NAMES)?;
            self.add_names(required.len())?;
        }
        if let Some(Value::Array(choices)) = keys.get("enum") {
            self.choices += choices.len();
            at_most("values in `enum`", self.choices, MAX_CHOICES)?;
        }
        if let Some(Value::Object(patterns)) = keys.get("patternProperties") {
            self.pattern_names += patterns.len();
            at_most("names in `patternProperties`", self.pattern_names, MAX_PATTERN_NAMES)?;
            patterns.keys().try_for_each(|pattern| self.expression(pattern))?;
        }
        for key in ["pattern", "format"] {
            if let Some(Value::String(pattern)) = keys.get(key) {
                self.expression(pattern)?;
                whole.patterns.insert(pattern);
            }
        }
        for key in SEPARATORS {
            if let Some(Value::String(separator)) = keys.get(key) {
                self.expression(separator)?;
            }
        }
        if node.position == Position::Names {
            return Ok(());
        }
        let combining = COMBINING.iter().filter(|key| keys.contains_key(**key)).count();
        let restricting = keys.keys().filter(|key| !FREE.contains(&key.as_str())).count();
        whole.combines |= keys.contains_key("allOf") || (combining > 0 && restricting > 1);
        let large = |count: &Value| count.as_f64().is_some_and(|count| count > f64::from(u32::MAX));
        let mut counts = COUNTS.iter().filter_map(|key| Some((key, keys.get(*key)?)));
        if let Some((key, count)) = counts.find(|(_, count)| large(count)) {
            return Err(format!("`{key}` is {count}; at most {} is compiled", u32::MAX));
        }
        if let Some(Value::Object(properties)) = keys.get("properties")
            && (keys.contains_key("minProperties") || keys.contains_key("maxProperties"))
        {
            at_most(
                "properties in an object with `minProperties` or `maxProperties`",
                properties.len(),
                MAX_COUNTED_PROPERTIES,
            )?;
        }
        if let Some(Value::Number(divisor)) = keys.get("multipleOf") {
            let (units, digits) = units(&divisor.to_string()).unwrap_or((f64::INFINITY, 0));
            if digits > MAX_DIGITS {
                return Err(format!(
                    "`multipleOf` is {divisor}; at most {MAX_DIGITS} digits after the point are compiled"
                ));
            }
            check_divisor(&format!("`multipleOf` {divisor}"), units)?;
            self.remainders += remainders(units);
            if self.remainders > MAX_ALL_REMAINDERS {
                return Err(format!(
                    "all `multipleOf`s have more than {MAX_ALL_REMAINDERS} remainders, without factors 2 and 5"
                ));
            }
            if !whole.divisors.contains(&units) {
                whole.divisors.push(units);
            }
        }
        Ok(())
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
        let references: HashSet<&str> =
            nodes.iter().filter_map(|node| node.value.get("$ref").and_then(Value::as_str)).collect();
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
        self.add_schema_levels(heights[0] + references.into_iter().map(height).sum::<usize>())
    }
}

/// Returns a divisor without factors 2 and 5.
fn remainders(units: f64) -> f64 {
    [2.0, 5.0].into_iter().fold(units, |mut rest, factor| {
        while rest >= factor && rest.is_finite() && rest % factor == 0.0 {
            rest /= factor;
        }
        rest
    })
}

fn check_divisor(name: &str, units: f64) -> Result<(), String> {
    if units <= MAX_DIVISOR && remainders(units) <= MAX_REMAINDERS {
        return Ok(());
    }
    Err(format!(
        "{name} has too many remainders; up to {MAX_REMAINDERS} are compiled, without factors 2 and 5"
    ))
}

/// Returns a divisor in units of its last digit, and its number of digits after the point: 25 and 2 for 0.25.
fn units(divisor: &str) -> Option<(f64, i32)> {
    let (number, exponent) = divisor.split_once(['e', 'E']).unwrap_or((divisor, "0"));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let fraction = fraction.trim_end_matches('0');
    let units: f64 = format!("{}{fraction}", whole.trim_start_matches('-')).parse().ok()?;
    let digits = fraction.len() as i32 - exponent.parse::<i32>().ok()?;
    Some((units * 10f64.powi((-digits).max(0)), digits.max(0)))
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

    fn patterns(count: usize) -> Vec<Value> {
        (0..count).map(|i| json!({"pattern": i.to_string()})).collect()
    }

    fn with(mut schema: Value, more: &Value) -> Value {
        schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        schema
    }

    #[test]
    fn what_is_too_large_is_told_by_its_measure() {
        let many = object(0, 2_001);
        let cases = [
            (chain(900), None),
            (chain(1_001), Some("1002 different references; at most 1000")),
            (chain(20_000), Some("names in one object; at most 2000")),
            (object(2_000, 2_000), None),
            (object(2_001, 0), Some("2001 names in one object; at most 2000")),
            (many.clone(), Some("2001 names in `required`; at most 2000")),
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
            // Places that are no schema, and to which a reference or a constant leads.
            (json!({"const": {"description": {"required": vec!["a"; 2_001]}}}), Some("in `required`")),
            (json!({"enum": [{"default": object(2_001, 0)}]}), Some("names in one object")),
            (json!({"unknown": {"title": many}}), Some("in `required`")),
            (json!({"properties": {"description": {"default": 1, "anyOf": [many]}}}), Some("in `required`")),
            (json!({"properties": many, "$ref": "#/properties"}), Some("in `required`")),
            // Expressions that the compiler intersects.
            (json!({"anyOf": patterns(2_000)}), None),
            (json!({"allOf": patterns(51)}), Some("51 different patterns and formats, and combines")),
            (with(json!({"anyOf": patterns(51)}), &json!({"minLength": 3})), Some("combines schemas")),
            (
                json!({"patternProperties": (0..101).map(|i| (i.to_string(), json!({}))).collect::<Map<_, _>>()}),
                Some("101 names in `patternProperties`; at most 100"),
            ),
            (json!({"pattern": "(".repeat(101)}), Some("levels of nested groups")),
            (with(object(100, 0), &json!({"minProperties": 1})), None),
            (with(object(101, 0), &json!({"minProperties": 1})), Some("with `minProperties`")),
            (json!({"multipleOf": 99_999_989}), Some("`multipleOf` 99999989 has too many remainders")),
            (
                json!({"items": {"multipleOf": 9973}, "prefixItems": [{"multipleOf": 9967}, {"multipleOf": 86_400}]}),
                None,
            ),
            (
                json!({"prefixItems": vec![json!({"multipleOf": 9973}); 3]}),
                Some("more than 20000 remainders"),
            ),
            (json!({"multipleOf": 1e-9}), Some("at most 8 digits")),
            (json!({"anyOf": [{"multipleOf": 1000}, {"multipleOf": 0.25}, {"multipleOf": 86_400}]}), None),
            (
                json!({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}, {"multipleOf": 0.07}]}),
                Some("the product of all `multipleOf` has too many remainders"),
            ),
        ];
        for (mut schema, expected) in cases {
            strip(&mut schema);
            let measured = Measure::default().schema(&schema);
            let agrees = match (&measured, expected) {
                (Ok(()), None) => true,
                (Err(problem), Some(expected)) => problem.contains(expected),
                _ => false,
            };
            assert!(agrees, "{measured:?} instead of {expected:?}: {:.200}", schema.to_string());
        }
    }

    #[test]
    fn only_annotations_are_removed() {
        let mut schema = json!({
            "title": "a", "description": {"required": ["x"]}, "type": "object", "required": ["title"],
            "properties": {"title": {"default": 1, "const": {"default": 2}}, "examples": {"examples": [3]}},
            "anyOf": [{"description": "b"}, {"enum": [{"title": 4}]}],
            "components": {"title": {"description": "c"}},
        });
        assert!(strip(&mut schema));
        let stripped = json!({
            "type": "object", "required": ["title"],
            "properties": {"title": {"const": {"default": 2}}, "examples": {}},
            "anyOf": [{}, {"enum": [{"title": 4}]}],
            "components": {"title": {"description": "c"}},
        });
        assert_eq!(schema, stripped);
        assert!(!strip(&mut schema));
    }

    #[test]
    fn a_divisor_is_counted_in_its_last_digit() {
        let cases = [
            ("5", (5.0, 0)),
            ("0.25", (25.0, 2)),
            ("1000.0", (1000.0, 0)),
            ("1e3", (1000.0, 0)),
            ("1.5e-7", (15.0, 8)),
        ];
        for (divisor, expected) in cases {
            assert_eq!(units(divisor), Some(expected), "{divisor}");
        }
    }
}
