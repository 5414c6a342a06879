//! Incremental parser of one tool call.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::{
    braces,
    json::{Scan, Scanner, is_space},
    syntax::{Elements, Reading},
    tools::{ReadTool, keywords},
};

/// A partially parsed call.
#[derive(Clone, Debug)]
pub(super) struct Call {
    reading: Reading,
    tools: Arc<[ReadTool]>,
    at: At,
    /// Complete name.
    pub name: Option<String>,
    /// Arguments as written so far: a prefix of a JSON object.
    pub arguments: String,
    /// True if `arguments` is complete.
    pub arguments_end: bool,
    /// True if the object is the value of a key `function`.
    nested: bool,
    /// True for an object without a marker.
    bare: bool,
    /// True if the object has keys that calls do not have.
    foreign: bool,
    /// True after the last character of the call.
    pub end: bool,
}

#[derive(Clone, Debug)]
enum At {
    /// Before the opening brace of the call's object or its arguments.
    Header(String),
    /// Before a key of the object.
    Key { first: bool },
    /// In a key, with its JSON so far.
    InKey(String, Scanner),
    /// After a key.
    Colon(Key),
    /// Before the key's value.
    Value(Key),
    /// In a value other than the arguments.
    InValue(Key, String, Scanner),
    /// In the arguments, which are a member of the call's object or follow its name.
    Arguments { scanner: Scanner, in_object: bool },
    /// After a value of the object.
    Next,
    /// Before a key between marks, or at the end.
    ElementEdge(String),
    /// In a key between marks.
    ElementKey(String),
    /// Between a key and its value.
    ElementGap { key: String, text: String },
    /// In the value of a key.
    ElementValue { key: String, text: String },
    /// Within the parentheses of a call in Python's form.
    Parentheses { text: String, open: usize, quote: Option<char>, escaped: bool },
    /// Within the braces of a call in Gemma's form.
    Braces { text: String, open: usize, quoted: bool },
}

/// Keys of a call's object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Name,
    Arguments,
    /// `function`: the name, or an object with name and arguments.
    Function,
    /// Keys without a use, such as `id` and `type`.
    Other,
}

/// The text is not a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// Maximum bytes of a name with its markers. A longer text is not a call.
const MAX_HEADER: usize = 256;

impl Call {
    /// Creates a parser before the first character.
    pub fn new(reading: Reading, tools: Arc<[ReadTool]>) -> Self {
        let at = At::Header(String::new());
        let arguments = String::new();
        Self {
            reading,
            tools,
            at,
            name: None,
            arguments,
            arguments_end: false,
            nested: false,
            bare: false,
            foreign: false,
            end: false,
        }
    }

    /// Creates a parser of an object without a marker. The object may be any JSON, so it is a call only if it has
    /// arguments, or only a name.
    pub fn bare(tools: Arc<[ReadTool]>) -> Self {
        Self { bare: true, ..Self::new(Reading::Objects, tools) }
    }

    /// Parses one character.
    pub fn push(&mut self, c: char) -> Result<(), Malformed> {
        // The state is moved out to own its text; it is replaced, or the call is malformed.
        self.at = match std::mem::replace(&mut self.at, At::Next) {
            At::Header(text) => self.header(text, c)?,
            At::InKey(mut text, mut scanner) => {
                text.push(c);
                match scanner.push(c) {
                    Scan::More => At::InKey(text, scanner),
                    Scan::End => At::Colon(self.key(&text)?),
                    Scan::EndBefore | Scan::Malformed => return Err(Malformed),
                }
            }
            At::InValue(key, text, scanner) => self.value(key, text, scanner, c)?,
            At::Arguments { scanner, in_object } => self.argument(scanner, in_object, c)?,
            At::Parentheses { text, open, quote, escaped } => self.keyword(text, open, quote, escaped, c)?,
            At::Braces { text, open, quoted } => self.braced(text, open, quoted, c)?,
            at @ (At::ElementEdge(_)
            | At::ElementKey(_)
            | At::ElementGap { .. }
            | At::ElementValue { .. }) => {
                let Reading::Elements(elements) = self.reading else { return Err(Malformed) };
                self.element(elements, at, c)?
            }
            at if is_space(c) => at,
            At::Key { .. } if c == '"' => {
                let mut scanner = Scanner::new();
                scanner.push(c);
                At::InKey(c.into(), scanner)
            }
            At::Key { first: true } | At::Next if c == '}' => self.end_object()?,
            At::Next if c == ',' => At::Key { first: false },
            At::Colon(key) if c == ':' => At::Value(key),
            At::Value(Key::Arguments) if c == '{' => self.argument(Scanner::new(), true, c)?,
            At::Value(Key::Function) if c == '{' && !self.nested => {
                self.nested = true;
                At::Key { first: true }
            }
            At::Value(key @ Key::Other) => self.value(key, String::new(), Scanner::new(), c)?,
            At::Value(key @ (Key::Name | Key::Function)) if c == '"' => {
                self.value(key, String::new(), Scanner::new(), c)?
            }
            // A JSON string, or `null`.
            At::Value(key @ Key::Arguments) if matches!(c, '"' | 'n') => {
                self.value(key, String::new(), Scanner::new(), c)?
            }
            At::Key { .. } | At::Next | At::Colon(_) | At::Value(_) => return Err(Malformed),
        };
        Ok(())
    }

    fn header(&mut self, mut text: String, c: char) -> Result<At, Malformed> {
        match self.reading {
            Reading::Elements(elements) if c != '{' || !text.trim().is_empty() => {
                text.push(c);
                return self.element_name(elements, text);
            }
            Reading::Elements(_) => return Ok(At::Key { first: true }),
            Reading::Braces if c == '{' => {
                let name = text.trim_start();
                self.name = Some(name.strip_prefix("call:").unwrap_or(name).trim().to_owned());
                return Ok(At::Braces { text: String::new(), open: 0, quoted: false });
            }
            Reading::Braces => {
                text.push(c);
                return if text.len() <= MAX_HEADER { Ok(At::Header(text)) } else { Err(Malformed) };
            }
            Reading::Keywords => return self.keyword_name(text, c),
            Reading::Channels => return Err(Malformed),
            Reading::Objects | Reading::Named { .. } | Reading::Either { .. } => {}
        }
        let objects = matches!(self.reading, Reading::Objects);
        if c != '{' {
            // Before an object, only an array may begin.
            let fits = !objects || is_space(c) || (c == '[' && text.trim().is_empty());
            text.push(c);
            return if fits && text.len() <= MAX_HEADER { Ok(At::Header(text)) } else { Err(Malformed) };
        }
        match self.reading {
            Reading::Either { .. } if matches!(text.trim(), "" | "[") => Ok(At::Key { first: true }),
            Reading::Objects => Ok(At::Key { first: true }),
            Reading::Named { before, after } | Reading::Either { before, after } => {
                self.name = Some(name_in(&text, before, after).ok_or(Malformed)?.to_owned());
                self.argument(Scanner::new(), false, c)
            }
            Reading::Elements(_) | Reading::Braces | Reading::Keywords | Reading::Channels => Err(Malformed),
        }
    }

    /// Parses the text up to the end of a name: a mark, the first key, or the end of the call.
    fn element_name(&mut self, elements: &Elements, text: String) -> Result<At, Malformed> {
        let start = text.trim_start();
        let start = elements.before.iter().find_map(|mark| start.strip_prefix(mark)).unwrap_or(start);
        let (key, _) = elements.key;
        let ends = elements.name_ends.iter().chain([&key]).chain(elements.ends);
        let Some((name, mark)) = ends.filter_map(|mark| Some((start.strip_suffix(mark)?, *mark))).next()
        else {
            return if text.len() <= MAX_HEADER { Ok(At::Header(text)) } else { Err(Malformed) };
        };
        let name = name.trim().trim_matches('"');
        if name.is_empty() && mark == "\n" {
            return Ok(At::Header(text));
        }
        self.name = Some(name.to_owned());
        if elements.ends.contains(&mark) {
            return Ok(self.end_elements());
        }
        Ok(if mark == key { At::ElementKey(String::new()) } else { At::ElementEdge(String::new()) })
    }

    /// Parses a character after the name.
    fn element(&mut self, elements: &Elements, at: At, c: char) -> Result<At, Malformed> {
        let (key_open, key_close) = elements.key;
        let (value_open, value_close) = elements.value;
        match at {
            At::ElementEdge(text) if text.is_empty() && is_space(c) => Ok(At::ElementEdge(text)),
            At::ElementEdge(mut text) => {
                text.push(c);
                if text == key_open {
                    return Ok(At::ElementKey(String::new()));
                }
                if elements.ends.contains(&text.as_str()) {
                    return Ok(self.end_elements());
                }
                let mut marks = elements.ends.iter().chain([&key_open]);
                if marks.any(|mark| mark.starts_with(&text)) {
                    Ok(At::ElementEdge(text))
                } else {
                    Err(Malformed)
                }
            }
            At::ElementKey(mut key) => {
                key.push(c);
                match key.strip_suffix(key_close) {
                    Some(key) => {
                        let key = key.trim().trim_matches('"').to_owned();
                        Ok(match value_open.trim().is_empty() {
                            true => At::ElementValue { key, text: String::new() },
                            false => At::ElementGap { key, text: String::new() },
                        })
                    }
                    None if key.len() > MAX_HEADER => Err(Malformed),
                    None => Ok(At::ElementKey(key)),
                }
            }
            At::ElementGap { key, text } if text.is_empty() && is_space(c) => {
                Ok(At::ElementGap { key, text })
            }
            At::ElementGap { key, mut text } => {
                text.push(c);
                if text == value_open {
                    return Ok(At::ElementValue { key, text: String::new() });
                }
                if value_open.starts_with(&text) { Ok(At::ElementGap { key, text }) } else { Err(Malformed) }
            }
            At::ElementValue { key, mut text } => {
                text.push(c);
                let close = value_close.trim_start();
                let Some(value) = text.strip_suffix(close) else { return Ok(At::ElementValue { key, text }) };
                // Line breaks of the format are not part of the value.
                let own_lines = value_close.starts_with('\n');
                let value = if own_lines { value.strip_prefix('\n').unwrap_or(value) } else { value };
                let value = if own_lines { value.strip_suffix('\n').unwrap_or(value) } else { value };
                self.element_value(&key, value);
                Ok(At::ElementEdge(String::new()))
            }
            _ => Err(Malformed),
        }
    }

    fn element_value(&mut self, key: &str, value: &str) {
        let tool = self.tools.iter().find(|tool| Some(&tool.name) == self.name.as_ref());
        let value = tool.map_or_else(|| Value::from(value), |tool| tool.value(key, value));
        self.arguments += if self.arguments.is_empty() { "{" } else { ", " };
        self.arguments += &format!("{}: {value}", json!(key));
    }

    fn end_elements(&mut self) -> At {
        self.arguments += if self.arguments.is_empty() { "{}" } else { "}" };
        self.arguments_end = true;
        self.end = true;
        At::Next
    }

    /// Parses a character before the parenthesis. Calls may stand in a list.
    fn keyword_name(&mut self, mut text: String, c: char) -> Result<At, Malformed> {
        if c == '(' {
            let name = text.trim_matches(|c: char| c.is_whitespace() || c == '[' || c == ',');
            self.name = Some(name.to_owned());
            return Ok(At::Parentheses { text: String::new(), open: 0, quote: None, escaped: false });
        }
        let fits = c.is_alphanumeric() || c.is_whitespace() || "_-.[,".contains(c);
        text.push(c);
        if fits && text.len() <= MAX_HEADER { Ok(At::Header(text)) } else { Err(Malformed) }
    }

    /// Parses a character within the parentheses, at a depth of `open` further brackets.
    fn keyword(
        &mut self,
        mut text: String,
        mut open: usize,
        mut quote: Option<char>,
        escaped: bool,
        c: char,
    ) -> Result<At, Malformed> {
        let mut escapes = false;
        match quote {
            Some(_) if escaped => {}
            Some(_) if c == '\\' => escapes = true,
            Some(mark) if c == mark => quote = None,
            Some(_) => {}
            None if matches!(c, '"' | '\'') => quote = Some(c),
            None if matches!(c, '(' | '[' | '{') => open += 1,
            None if c == ')' && open == 0 => {
                let arguments = keywords(&text).ok_or(Malformed)?;
                self.arguments = Value::Object(arguments).to_string();
                self.arguments_end = true;
                self.end = true;
                return Ok(At::Next);
            }
            None if matches!(c, ')' | ']' | '}') => open = open.checked_sub(1).ok_or(Malformed)?,
            None => {}
        }
        text.push(c);
        Ok(At::Parentheses { text, open, quote, escaped: escapes })
    }

    /// Parses a character within the braces, at a depth of `open` further brackets.
    fn braced(
        &mut self,
        mut text: String,
        mut open: usize,
        mut quoted: bool,
        c: char,
    ) -> Result<At, Malformed> {
        match c {
            _ if quoted => {}
            '{' | '[' => open += 1,
            '}' if open == 0 => {
                let arguments = braces::read(&text).ok_or(Malformed)?;
                self.arguments = Value::Object(arguments).to_string();
                self.arguments_end = true;
                self.end = true;
                return Ok(At::Next);
            }
            '}' | ']' => open = open.checked_sub(1).ok_or(Malformed)?,
            _ => {}
        }
        text.push(c);
        quoted ^= text.ends_with(braces::QUOTE);
        Ok(At::Braces { text, open, quoted })
    }

    fn key(&mut self, text: &str) -> Result<Key, Malformed> {
        let key: String = serde_json::from_str(text).map_err(|_| Malformed)?;
        Ok(match key.as_str() {
            "name" | "tool_name" | "function_name" | "tool" if self.name.is_none() => Key::Name,
            "function" | "tool_call" if self.name.is_none() => Key::Function,
            "arguments" | "parameters" | "args" | "input" if !self.arguments_end => Key::Arguments,
            "id" | "tool_call_id" | "type" => Key::Other,
            // An object without a marker is rejected at its first key that calls do not have.
            _ if self.bare && self.name.is_none() => return Err(Malformed),
            _ => {
                self.foreign = true;
                Key::Other
            }
        })
    }

    fn value(&mut self, key: Key, mut text: String, mut scanner: Scanner, c: char) -> Result<At, Malformed> {
        let scan = scanner.push(c);
        match scan {
            Scan::Malformed => return Err(Malformed),
            // The end of a number is known only from the next character.
            Scan::EndBefore => {
                self.push(c)?;
                return Ok(std::mem::replace(&mut self.at, At::Next));
            }
            Scan::More | Scan::End => text.push(c),
        }
        if scan == Scan::More {
            return Ok(At::InValue(key, text, scanner));
        }
        match key {
            Key::Name | Key::Function => {
                self.name = Some(serde_json::from_str(&text).map_err(|_| Malformed)?)
            }
            Key::Arguments => self.whole_arguments(&text)?,
            Key::Other => {}
        }
        Ok(At::Next)
    }

    fn argument(&mut self, mut scanner: Scanner, in_object: bool, c: char) -> Result<At, Malformed> {
        let scan = scanner.push(c);
        if !matches!(scan, Scan::More | Scan::End) {
            return Err(Malformed);
        }
        self.arguments.push(c);
        if scan == Scan::More {
            return Ok(At::Arguments { scanner, in_object });
        }
        self.arguments_end = true;
        self.end = !in_object;
        Ok(At::Next)
    }

    /// Parses arguments that are `null` or a string with a JSON object.
    fn whole_arguments(&mut self, text: &str) -> Result<(), Malformed> {
        let text: Option<String> = serde_json::from_str(text).map_err(|_| Malformed)?;
        let text = text.unwrap_or_default();
        let object = match text.trim() {
            "" | "null" => "{}",
            object => object,
        };
        serde_json::from_str::<Map<String, Value>>(object).map_err(|_| Malformed)?;
        object.clone_into(&mut self.arguments);
        self.arguments_end = true;
        Ok(())
    }

    /// Ends the object. A call without arguments gets an empty object.
    fn end_object(&mut self) -> Result<At, Malformed> {
        if std::mem::take(&mut self.nested) {
            return Ok(At::Next);
        }
        if self.name.is_none() || (self.bare && self.foreign && !self.arguments_end) {
            return Err(Malformed);
        }
        if self.arguments.is_empty() {
            self.arguments += "{}";
            self.arguments_end = true;
        }
        self.end = true;
        Ok(At::Next)
    }
}

/// Returns the name in the text before the arguments. Only an id between two of `after` may also stand there.
fn name_in<'t>(header: &'t str, before: &[&str], after: &[&str]) -> Option<&'t str> {
    let mut text = header.trim_start();
    for wrapping in before {
        text = text.strip_prefix(wrapping).unwrap_or(text).trim_start();
    }
    let end = after.iter().filter_map(|mark| text.find(mark)).min()?;
    let (name, mut rest) = text.split_at(end);
    while !rest.trim().is_empty() {
        rest = after.iter().find_map(|mark| rest.trim_start().strip_prefix(mark))?;
        let word = |c: char| c.is_ascii_alphanumeric();
        let is_id = after.iter().any(|mark| rest.trim_start_matches(word).starts_with(mark));
        rest = if is_id { rest.trim_start_matches(word) } else { rest };
    }
    Some(name.trim())
}
