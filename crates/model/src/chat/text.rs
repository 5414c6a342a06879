//! Python's string functions, on strings.

use minijinja::{Error, State, Value};

use super::values::{charge, is_space};

/// `str.isspace` and its kind.
pub(super) fn query(text: &str, name: &str) -> Option<bool> {
    let all = |test: fn(char) -> bool| !text.is_empty() && text.chars().all(test);
    let cased = |c: char| c.is_lowercase() || c.is_uppercase();
    Some(match name {
        "isspace" => all(is_space),
        "isdigit" => all(|c| c.is_ascii_digit() || (!c.is_ascii() && c.is_numeric() && !c.is_alphabetic())),
        "isdecimal" => all(|c| c.is_ascii_digit() || (!c.is_ascii() && c.is_numeric() && !c.is_alphabetic())),
        "isnumeric" => all(char::is_numeric),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isascii" => text.is_ascii(),
        "islower" => text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase),
        "isupper" => text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase),
        "istitle" => text.chars().any(cased) && convert(text, "title")? == text,
        "isidentifier" => {
            text.starts_with(|c: char| c == '_' || c.is_alphabetic())
                && text.chars().all(|c| c == '_' || c.is_alphanumeric())
        }
        _ => return None,
    })
}

/// `str.upper` and its kind.
pub(super) fn convert(text: &str, name: &str) -> Option<String> {
    Some(match name {
        "upper" => text.to_uppercase(),
        "lower" | "casefold" => text.to_lowercase(),
        "capitalize" => capitalize(text),
        "swapcase" => text
            .chars()
            .flat_map(|c| {
                if c.is_uppercase() {
                    c.to_lowercase().collect()
                } else {
                    c.to_uppercase().collect::<Vec<_>>()
                }
            })
            .collect(),
        // A letter is large if no letter is before it: "they're" is "They'Re".
        "title" => {
            let mut after_letter = false;
            let mut out = String::with_capacity(text.len());
            for c in text.chars() {
                if after_letter {
                    out.extend(c.to_lowercase())
                } else {
                    out.extend(c.to_uppercase())
                }
                after_letter = c.is_alphabetic();
            }
            out
        }
        _ => return None,
    })
}

/// The first character large, the others small.
pub(super) fn capitalize(text: &str) -> String {
    let mut characters = text.chars();
    let first = characters.next().map(char::to_uppercase);
    first.into_iter().flatten().collect::<String>() + &characters.as_str().to_lowercase()
}

pub(super) fn strip<'t>(text: &'t str, characters: Option<&str>, left: bool, right: bool) -> &'t str {
    let strips = |c: char| characters.map_or_else(|| is_space(c), |characters| characters.contains(c));
    let text = if left { text.trim_start_matches(strips) } else { text };
    if right { text.trim_end_matches(strips) } else { text }
}

/// `str.split` and `str.rsplit`; without a separator, at runs of whitespace, and no part is empty.
pub(super) fn split<'t>(
    text: &'t str,
    separator: Option<&str>,
    limit: Option<usize>,
    from_right: bool,
) -> Vec<&'t str> {
    let limit = limit.unwrap_or(usize::MAX);
    let parts = limit.saturating_add(1);
    let mut out: Vec<&str> = match (separator, from_right) {
        (Some(separator), false) => return text.splitn(parts, separator).collect(),
        (Some(separator), true) => text.rsplitn(parts, separator).collect(),
        (None, false) => {
            let mut out = Vec::new();
            let mut rest = text.trim_start_matches(is_space);
            while !rest.is_empty() {
                if out.len() == limit {
                    out.push(rest);
                    break;
                }
                let end = rest.find(is_space).unwrap_or(rest.len());
                out.push(&rest[..end]);
                rest = rest[end..].trim_start_matches(is_space);
            }
            return out;
        }
        (None, true) => {
            let mut out = Vec::new();
            let mut rest = text.trim_end_matches(is_space);
            while !rest.is_empty() {
                if out.len() == limit {
                    out.push(rest);
                    break;
                }
                let start = rest
                    .rfind(is_space)
                    .map_or(0, |at| at + rest[at..].chars().next().map_or(1, char::len_utf8));
                out.push(&rest[start..]);
                rest = rest[..start].trim_end_matches(is_space);
            }
            out
        }
    };
    out.reverse();
    out
}

pub(super) fn partition<'t>(text: &'t str, separator: &str, from_right: bool) -> [&'t str; 3] {
    let at = if from_right { text.rfind(separator) } else { text.find(separator) };
    match at {
        Some(at) => [&text[..at], &text[at..at + separator.len()], &text[at + separator.len()..]],
        None if from_right => ["", "", text],
        None => [text, "", ""],
    }
}

/// `str.splitlines`, which knows more line breaks than `\n`.
pub(super) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let breaks = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut out = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let Some(end) = rest.find(breaks) else {
            out.push(rest);
            break;
        };
        let length = if rest[end..].starts_with("\r\n") {
            2
        } else {
            rest[end..].chars().next().map_or(1, char::len_utf8)
        };
        out.push(if keep_ends { &rest[..end + length] } else { &rest[..end] });
        rest = &rest[end + length..];
    }
    out
}

pub(super) fn replace(
    state: &mut State,
    text: &str,
    old: &str,
    new: &str,
    count: Option<usize>,
) -> Result<Value, Error> {
    let found = text.matches(old).count().min(count.unwrap_or(usize::MAX));
    charge(state, text.len() + found.saturating_mul(new.len()))?;
    Ok(Value::from(text.replacen(old, new, found)))
}

/// The characters from `start` to `end`, counted from the end if negative.
pub(super) fn between(text: &str, start: Option<i64>, end: Option<i64>) -> &str {
    offset_and_between(text, start, end).1
}

/// The same with the number of characters before it.
pub(super) fn offset_and_between(text: &str, start: Option<i64>, end: Option<i64>) -> (usize, &str) {
    if start.is_none() && end.is_none() {
        return (0, text);
    }
    let length = text.chars().count();
    let bound = |bound: Option<i64>, default: usize| match bound {
        None => default,
        Some(bound) if bound < 0 => length.saturating_sub(bound.unsigned_abs() as usize),
        Some(bound) => length.min(bound as usize),
    };
    let (start, end) = (bound(start, 0), bound(end, length));
    let at = |index: usize| text.char_indices().nth(index).map_or(text.len(), |(at, _)| at);
    (start, if start < end { &text[at(start)..at(end)] } else { "" })
}

/// `str.center`, `ljust` and `rjust`.
pub(super) fn pad(
    state: &mut State,
    text: &str,
    width: i64,
    fill: char,
    method: &str,
) -> Result<Value, Error> {
    let length = text.chars().count();
    let width = usize::try_from(width).unwrap_or(0);
    let missing = width.saturating_sub(length);
    charge(state, text.len().saturating_add(missing.saturating_mul(fill.len_utf8())))?;
    let left = match method {
        "ljust" => 0,
        "rjust" => missing,
        // Python puts the odd one to the left if the width is odd.
        _ => missing / 2 + (missing & width & 1),
    };
    let fill = |count: usize| std::iter::repeat_n(fill, count);
    Ok(Value::from(fill(left).chain(text.chars()).chain(fill(missing - left)).collect::<String>()))
}
