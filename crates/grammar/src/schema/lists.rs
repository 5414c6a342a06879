//! `uniqueItems`, `contains` and `unevaluatedItems`.

use serde_json::{Value, json};

use super::{
    Keys, PLACE, TYPES, at,
    combine::{Combiner, Group},
    count, equal, list,
};

/// Most values of items that come in any order.
const MAX_ANY_ORDER: usize = 5;

/// Most values of items.
const MAX_UNIQUE: usize = 8;

/// Positions at which an item may be the one that `contains` requires.
const POSITIONS: u64 = 4;

/// Most items that `minContains` may require.
const MAX_CONTAINED: u64 = 16;

impl Combiner {
    /// Returns the alternatives for the keywords of a list.
    pub(super) fn list_choices(&mut self, keys: &Keys, group: &Group) -> Result<Vec<Vec<Value>>, String> {
        let place = keys.get(PLACE).and_then(Value::as_str).unwrap_or_default();
        let mut choices = Vec::new();
        if keys.contains_key("uniqueItems") {
            choices.extend(self.unique(group, place)?);
        }
        if let Some(schema) = keys.get("contains") {
            choices.push(self.containing(keys, schema, group, place)?);
        }
        for choice in &mut choices {
            let others: Vec<&str> = TYPES.into_iter().filter(|kind| *kind != "array").collect();
            choice.push(json!({"type": others}));
        }
        Ok(choices)
    }

    fn unique(&mut self, group: &Group, place: &str) -> Result<Option<Vec<Value>>, String> {
        let longest = group.own().filter_map(|keys| count(keys, "maxItems")).min();
        if longest.is_some_and(|longest| longest <= 1) {
            return Ok(None);
        }
        let first: Vec<Value> = group
            .own()
            .find(|keys| keys.contains_key("prefixItems"))
            .map_or(Vec::new(), |keys| list(keys, "prefixItems").to_vec());
        let items = group.own().find_map(|keys| keys.get("items")).cloned();
        let ends =
            items == Some(Value::Bool(false)) || longest.is_some_and(|longest| longest <= first.len() as u64);
        if !first.is_empty() && ends {
            let mut differ = true;
            for (index, one) in first.iter().enumerate() {
                for other in &first[index + 1..] {
                    differ &= self.disjoint(one, other, None)?;
                }
            }
            if differ {
                return Ok(None);
            }
        }
        let refusal = || {
            format!(
                "{} is supported for items of at most {MAX_UNIQUE} values (`enum`); leave it out, and remove repeated items from the answer",
                at("uniqueItems", place)
            )
        };
        let values = match items {
            Some(items) if first.is_empty() => self.finite(&items, 0),
            _ => None,
        };
        let mut values = values.ok_or_else(refusal)?;
        let mut different: Vec<Value> = Vec::new();
        for value in values.drain(..) {
            if !different.iter().any(|other| equal(other, &value)) {
                different.push(value);
            }
        }
        if different.len() > MAX_UNIQUE {
            return Err(refusal());
        }
        let least = group.own().filter_map(|keys| count(keys, "minItems")).max().unwrap_or(0) as usize;
        let longest = longest.map_or(different.len(), |longest| (longest as usize).min(different.len()));
        let mut lists = vec![Vec::new()];
        let mut ways = Vec::new();
        let any_order = different.len() <= MAX_ANY_ORDER;
        while let Some(taken) = lists.pop() {
            if taken.len() >= least {
                let values: Vec<&Value> = taken.iter().map(|&index: &usize| &different[index]).collect();
                ways.push(json!({"const": values}));
            }
            if taken.len() < longest {
                let from = if any_order { 0 } else { taken.last().map_or(0, |last| last + 1) };
                for index in (from..different.len()).rev().filter(|index| !taken.contains(index)) {
                    lists.push([taken.as_slice(), &[index]].concat());
                }
            }
        }
        Ok(Some(ways))
    }

    fn containing(
        &mut self,
        keys: &Keys,
        schema: &Value,
        group: &Group,
        place: &str,
    ) -> Result<Vec<Value>, String> {
        let least = count(keys, "minContains").unwrap_or(1);
        let first = |count: u64| vec![schema.clone(); count as usize];
        if least > MAX_CONTAINED {
            return Err(format!(
                "{} is {least}; at most {MAX_CONTAINED} is supported",
                at("minContains", place)
            ));
        }
        if let Some(most) = count(keys, "maxContains") {
            if most < least {
                return Err(format!(
                    "{} is {most}, below the {least} required, so nothing is valid",
                    at("maxContains", place)
                ));
            }
            let types = Vec::from(TYPES.map(str::to_owned));
            let domain = self.domain(&Group::default(), Some(types));
            let Some(rest) = self.opposite(schema, &domain, 0)? else {
                return Err(format!(
                    "{} is supported where the other items can be described; leave it out",
                    at("maxContains", place)
                ));
            };
            let rest = if rest.is_empty() { Value::Bool(false) } else { json!({"anyOf": rest}) };
            let counts = least..=most.min(least + POSITIONS - 1);
            let way = |count: u64| match count {
                0 => json!({"type": "array", "items": rest}),
                _ => json!({"type": "array", "minItems": count, "prefixItems": first(count), "items": rest}),
            };
            return Ok(counts.map(way).collect());
        }
        if least > 1 {
            return Ok(vec![json!({"type": "array", "minItems": least, "prefixItems": first(least)})]);
        }
        let longest = group.own().filter_map(|keys| count(keys, "maxItems")).min().unwrap_or(u64::MAX);
        let way = |before: u64| {
            let mut first = vec![Value::Bool(true); before as usize];
            first.push(schema.clone());
            json!({"type": "array", "minItems": before + 1, "prefixItems": first})
        };
        Ok((0..longest.min(POSITIONS)).map(way).collect())
    }
}

/// Writes `unevaluatedItems` as `items`.
pub(super) fn unevaluated(combiner: &mut Combiner, keys: &Keys, out: &mut Keys) -> Result<(), String> {
    let Some(schema) = keys.get("unevaluatedItems").filter(|_| !keys.contains_key("items")) else {
        return Ok(());
    };
    let combining = ["$ref", "allOf", "anyOf", "oneOf", "if", "not", "contains", "dependentSchemas"];
    if combining.iter().any(|key| keys.contains_key(*key)) {
        let place = keys.get(PLACE).and_then(Value::as_str).unwrap_or_default();
        return Err(format!(
            "{} is not supported beside other schemas of the list; use `items`",
            at("unevaluatedItems", place)
        ));
    }
    let written = combiner.value(schema)?;
    out.insert("items".into(), written);
    Ok(())
}
