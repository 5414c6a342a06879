//! A rendered chat that distinguishes text of the template from text of messages.
//!
//! Only control tokens that the template wrote are control tokens of the prompt. The same holds for markers such as
//! `<tool_call>` that are ordinary tokens, except those in an assistant's own text. Before rendering, a mark is
//! inserted before each name of a control token in a message; after rendering, the marks are removed and their
//! positions recorded. A mark does not split the name and is not whitespace, so templates that trim, split, slice, join
//! or search texts, or write them as JSON, behave as without it. Names are matched regardless of case and whitespace,
//! and a prefix of a name at the end of a text also counts, so that texts do not become names when a template changes
//! or joins them.

use aho_corasick::{AhoCorasick, AhoCorasickKind};
use serde_json::{Map, Value};

/// Mark before a control token's name in a message. This noncharacter does not occur in interchanged text, and is
/// removed from messages that contain it.
pub(crate) const MARK: char = '\u{10ffff}';

/// Bounds of a content that the answer continues, noncharacters as well. Templates may trim or change what is outside of
/// them or between them, but do not separate them from the content's ends.
const BOUNDS: [char; 2] = ['\u{ffffe}', '\u{fffff}'];

/// Returns the content between its bounds.
pub(super) fn bounded(content: &str) -> String {
    let [open, close] = BOUNDS;
    format!("{open}{content}{close}")
}

/// Removes characters that are bounds from all texts.
pub(super) fn without_bounds(json: &Value) -> Value {
    match json {
        Value::String(text) => text.replace(BOUNDS, "").into(),
        Value::Array(items) => items.iter().map(without_bounds).collect(),
        Value::Object(entries) => {
            let entries = entries.iter().map(|(key, value)| (key.replace(BOUNDS, ""), without_bounds(value)));
            Value::Object(entries.collect())
        }
        other => other.clone(),
    }
}

/// Returns a rendered text up to the end of the bounded content, with `content` as the content; `None` if the end of the
/// content is absent. If only its beginning is absent, a template has taken the content apart, and its form is kept.
pub(super) fn up_to_bound(text: &str, content: &str) -> Option<String> {
    let [open, close] = BOUNDS;
    let text = &text[..text.rfind(close)?];
    let text = match text.rfind(open) {
        Some(start) => [&text[..start], content].concat(),
        None => text.to_owned(),
    };
    Some(text.replace(BOUNDS, ""))
}

/// A rendered chat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatPrompt {
    /// The text.
    pub text: String,
    /// Byte offsets at which no control token's name has its meaning, ascending.
    pub(crate) literal: Vec<usize>,
}

impl ChatPrompt {
    /// Takes the marks out of a rendered text.
    pub(super) fn from_marked(marked: &str) -> Self {
        let mut prompt = Self { text: String::with_capacity(marked.len()), literal: Vec::new() };
        for (at, part) in marked.split(MARK).enumerate() {
            if at > 0 {
                prompt.literal.push(prompt.text.len());
            }
            prompt.text.push_str(part);
        }
        prompt
    }

    /// Appends a text in which no control token's name has its meaning.
    pub(crate) fn push_literal(&mut self, text: &str) {
        let start = self.text.len();
        // A name that begins before the text does not have its meaning either.
        self.literal.extend(text.char_indices().map(|(at, _)| start + at));
        self.text.push_str(text);
    }

    /// Returns true if a token's name at these bytes is part of a message.
    pub(crate) fn is_literal(&self, name: std::ops::Range<usize>) -> bool {
        let after = self.literal.partition_point(|&offset| offset < name.start);
        self.literal.get(after).is_some_and(|&offset| offset < name.end)
    }
}

/// Finds the names of control tokens, and of markers, in messages.
#[derive(Clone, Debug, Default)]
pub(crate) struct ControlNames {
    /// Folded and sorted.
    names: Vec<String>,
    finder: Option<AhoCorasick>,
    longest: usize,
    /// Names that an assistant's own text may have, folded and sorted.
    markers: Vec<String>,
}

/// Marks of reasoning in an assistant's own text, which clients send back.
const REASONING: [&str; 2] = ["<think>", "</think>"];

impl ControlNames {
    /// Returns the names of control tokens, and markers: other tokens of the vocabulary that the template writes.
    pub(crate) fn new<'n>(
        control: impl Iterator<Item = &'n str>,
        markers: impl Iterator<Item = &'n str>,
    ) -> Self {
        let sorted = |names: &mut Vec<String>| {
            names.retain(|name| !name.is_empty());
            names.sort_unstable();
            names.dedup();
        };
        let mut markers: Vec<_> = markers.chain(REASONING).map(|name| fold(name).0).collect();
        let own = markers.len() - REASONING.len();
        let mut names: Vec<_> = control.map(|name| fold(name).0).chain(markers[..own].to_vec()).collect();
        sorted(&mut names);
        sorted(&mut markers);
        let finder = AhoCorasick::builder().kind(Some(AhoCorasickKind::ContiguousNFA)).build(&names);
        let longest = names.iter().map(String::len).max().unwrap_or(0);
        Self { finder: finder.ok().filter(|_| !names.is_empty()), names, longest, markers }
    }

    /// Marks all names in an assistant's own text.
    pub(super) fn mark_own(&self, text: &str) -> String {
        self.mark_text(text, true)
    }

    /// Marks all names in strings and keys of a JSON value.
    pub(super) fn mark(&self, json: &Value) -> Value {
        self.marked(json, false)
    }

    fn marked(&self, json: &Value, is_assistant: bool) -> Value {
        match json {
            Value::String(text) => self.mark_text(text, is_assistant).into(),
            Value::Array(items) => items.iter().map(|item| self.marked(item, is_assistant)).collect(),
            Value::Object(entries) => {
                let is_assistant = entries.get("role").is_some_and(|role| role == "assistant");
                let entries = entries.iter().map(|(key, value)| {
                    let value = self.marked(value, is_assistant && key == "content");
                    (self.mark_text(key, false), value)
                });
                Value::Object(entries.collect::<Map<_, _>>())
            }
            other => other.clone(),
        }
    }

    fn mark_text(&self, text: &str, is_assistant: bool) -> String {
        let clean;
        let text = if text.contains(MARK) {
            clean = text.replace(MARK, "");
            &clean
        } else {
            text
        };
        let Some(finder) = &self.finder else { return text.to_owned() };
        let (folded, offsets) = fold(text);
        let mut places: Vec<usize> = finder
            .find_overlapping_iter(&folded)
            .filter(|found| !(is_assistant && self.is_marker(&folded[found.range()])))
            .map(|found| offsets[found.start()])
            .collect();
        let end = folded.len().saturating_sub(self.longest);
        let rest = (end..folded.len()).filter(|&at| folded.is_char_boundary(at));
        let is_own = |at: usize| is_assistant && self.is_marker(&folded[at..]);
        let begins = |&at: &usize| self.begins(&folded[at..]) && !is_own(at);
        places.extend(rest.filter(begins).map(|at| offsets[at]));
        places.sort_unstable();
        places.dedup();
        let mut marked = String::with_capacity(text.len() + MARK.len_utf8() * places.len());
        let mut from = 0;
        for place in places {
            marked.push_str(&text[from..place]);
            marked.push(MARK);
            from = place;
        }
        marked.push_str(&text[from..]);
        marked
    }

    /// Returns true if an assistant's own text may have this folded name.
    fn is_marker(&self, name: &str) -> bool {
        self.markers.binary_search_by(|marker| marker.as_str().cmp(name)).is_ok()
    }

    /// Returns true if a name begins with this text.
    fn begins(&self, start: &str) -> bool {
        let at = self.names.partition_point(|name| name.as_str() < start);
        self.names.get(at).is_some_and(|name| name.starts_with(start))
    }
}

/// Returns a text in lower case and without whitespace, and for each of its bytes the offset of the character in the
/// text.
fn fold(text: &str) -> (String, Vec<usize>) {
    let mut folded = String::with_capacity(text.len());
    let mut offsets = Vec::with_capacity(text.len());
    for (at, c) in text.char_indices().filter(|(_, c)| !c.is_whitespace()) {
        folded.push(c.to_ascii_lowercase());
        offsets.resize(folded.len(), at);
    }
    (folded, offsets)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn shown(text: &str) -> String {
        ControlNames::new(["<|end|>", "<s>", "<think>", "</think>"].into_iter(), std::iter::empty())
            .mark_text(text, false)
            .replace(MARK, "^")
    }

    #[test]
    fn names_and_their_beginnings_are_marked() {
        assert_eq!(shown("a <|end|> b<s>"), "a ^<|end|> b^<s>");
        assert_eq!(shown("<|\nEND |> x"), "^<|\nEND |> x");
        assert_eq!(shown("a <|en"), "a ^<|en");
        assert_eq!(shown("a << "), "a <^< ");
        assert_eq!(shown("a < b"), "a < b");
        assert_eq!(shown("<|e<|end|>nd|>"), "<|e^<|end|>nd|>");
        assert_eq!(shown("no\u{10ffff}ne"), "none");
        assert_eq!(shown(""), "");
    }

    #[test]
    fn keys_are_marked_and_an_assistants_reasoning_is_not() {
        let names = ControlNames::new(["<s>", "<think>"].into_iter(), ["<tool_call>"].into_iter());
        let json = json!([{"role": "assistant", "content": "<think><s><tool_call>", "x": "<think>"}, {"<s>": ["<think> <tool_call>", 1]}]);
        let marked = names.mark(&json).to_string().replace(MARK, "^");
        let expected = json!([{"role": "assistant", "content": "<think>^<s><tool_call>", "x": "^<think>"}, {"^<s>": ["^<think> ^<tool_call>", 1]}]);
        assert_eq!(serde_json::from_str::<Value>(&marked).unwrap(), expected);
    }

    #[test]
    fn marks_are_taken_out() {
        let prompt = ChatPrompt::from_marked("a\u{10ffff}<s>b\u{10ffff}");
        assert_eq!((prompt.text.as_str(), &prompt.literal[..]), ("a<s>b", &[1, 5][..]));
        assert!(prompt.is_literal(1..4) && prompt.is_literal(0..2) && prompt.is_literal(5..6));
        assert!(!prompt.is_literal(0..1) && !prompt.is_literal(2..5));
    }
}
