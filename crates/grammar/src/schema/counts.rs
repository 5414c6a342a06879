//! `minProperties` and `maxProperties`, which the library has for objects whose names are all required.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{Keys, at};

/// Names of an object.
pub(super) struct Names<'n> {
    /// Names that schemas list.
    pub all: BTreeSet<String>,
    pub required: &'n BTreeSet<String>,
    /// It may have others.
    pub is_free: bool,
}

/// Most alternatives for a count.
const MAX_WAYS: usize = 128;

/// Returns alternatives that enforce both counts, and lowers those that remain for the library. No alternatives are
/// needed if the list is empty.
///
/// # Errors
/// The counts cannot be enforced.
pub(super) fn ways(
    names: &Names<'_>,
    least: &mut u64,
    most: &mut Option<u64>,
    place: &str,
) -> Result<Vec<Value>, String> {
    let optional: Vec<&String> = names.all.iter().filter(|name| !names.required.contains(*name)).collect();
    let required = names.required.len() as u64;
    if *least <= required {
        *least = 0;
    }
    let total = required + optional.len() as u64;
    if !names.is_free && most.is_some_and(|most| most >= total) {
        *most = None;
    }
    if *least == 0 && most.is_none() {
        return Ok(Vec::new());
    }
    // A grammar cannot keep free names from coming twice, which counts as one property. One of them is one property.
    let free = u64::from(names.is_free);
    if *least > total + free {
        let keyword = at("minProperties", place);
        return Err(if names.is_free {
            format!(
                "{keyword} is {least}, and names are free: a repeated name would count as one property; list the names in `properties`, or require at most {}",
                total + free
            )
        } else {
            format!("{keyword} is {least}, and only {total} names are allowed, so nothing is valid")
        });
    }
    if optional.is_empty() {
        return Ok(Vec::new());
    }
    let (low, high) = (least.saturating_sub(required), most.map(|most| most.saturating_sub(required)));
    // The sets of optional names with enough and not too many, or the smallest and the largest of them.
    let exact = names.is_free || low > 0 && high.is_some();
    let chosen = |low: u64, high: u64| {
        subsets(optional.len(), low.min(optional.len() as u64), high.min(optional.len() as u64))
    };
    let sets = if exact {
        chosen(low.saturating_sub(free), high.unwrap_or(u64::MAX))
    } else {
        match high {
            Some(high) => chosen(high, high),
            None => chosen(low, low),
        }
    };
    let Some(sets) = sets else {
        let keyword = at(if *least > 0 { "minProperties" } else { "maxProperties" }, place);
        return Err(format!(
            "{keyword} has too many combinations of the {} properties that are not required; require them",
            optional.len()
        ));
    };
    let mut ways = Vec::new();
    for set in sets {
        let (inside, outside): (Vec<_>, Vec<_>) =
            optional.iter().enumerate().partition(|(index, _)| set & 1 << index != 0);
        let inside: Vec<&str> = inside.into_iter().map(|(_, name)| name.as_str()).collect();
        let outside: Keys =
            outside.into_iter().map(|(_, name)| ((*name).clone(), Value::Bool(false))).collect();
        let mut way = Keys::from_iter([("type".to_owned(), "object".into())]);
        if exact || high.is_none() {
            way.insert("required".into(), inside.into());
        }
        if exact || high.is_some() {
            way.insert("properties".into(), outside.into());
        }
        ways.push(way.into());
    }
    // Free names are counted by the library, beside those that a set requires.
    if !names.is_free {
        (*least, *most) = (0, None);
    }
    ways.push(json!({"type": ["null", "boolean", "number", "string", "array"]}));
    Ok(ways)
}

/// Returns the subsets, as bits, whose sizes are within bounds; `None` if there are too many.
fn subsets(items: usize, low: u64, high: u64) -> Option<Vec<u32>> {
    if items > 16 {
        return None;
    }
    let fits = |set: &u32| (low..=high).contains(&u64::from(set.count_ones()));
    let sets: Vec<u32> = (0..1 << items).filter(fits).take(MAX_WAYS + 1).collect();
    (sets.len() <= MAX_WAYS).then_some(sets)
}
