//! Reading one tool call while it is being written.

use serde_json::{Map, Value};

use super::{
    json::{Scan, Scanner, is_space},
    syntax::Reading,
};

/// A call as far as it has been read.
#[derive(Clone, Debug)]
pub(super) struct Call {
    reading: Reading,
    at: At,
    /// The name, once it is whole.
    pub name: Option<String>,
    /// The arguments as they are written: the beginning of a JSON object.
    pub arguments: String,
    /// They are whole.
    pub arguments_end: bool,
    /// Whether the object is within that of a key `function`.
    nested: bool,
    /// Whether nothing but the call's object says that it is one.
    bare: bool,
    /// Whether the object has keys that no call needs.
    foreign: bool,
    /// Everything that belongs to the call has been read.
    pub end: bool,
}

#[derive(Clone, Debug)]
enum At {
    /// Before the brace that begins the call's object or its arguments.
    Header(String),
    /// Before a key of the object.
    Key { first: bool },
    /// In a key, of which this is the JSON.
    InKey(String, Scanner),
    /// After a key.
    Colon(Key),
    /// Before its value.
    Value(Key),
    /// In a value that is not the arguments.
    InValue(Key, String, Scanner),
    /// In the arguments; in the call's object or after its name.
    Arguments { scanner: Scanner, in_object: bool },
    /// After a value of the object.
    Next,
}

/// What an object may say of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Name,
    Arguments,
    /// `function`: the name, or an object with name and arguments.
    Function,
    /// `id`, `type`: nothing that anybody needs.
    Other,
}

/// No call goes on like this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// Longer than any name with its markers: what is not a call is soon known for what it is.
const MAX_HEADER: usize = 256;

impl Call {
    /// Before its first character.
    pub fn new(reading: Reading) -> Self {
        let at = At::Header(String::new());
        let arguments = String::new();
        Self {
            reading,
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

    /// Before its first character, for an object without a marker. Any JSON may stand there, so it is a call only if it
    /// has arguments, or nothing but a name.
    pub fn bare() -> Self {
        Self { bare: true, ..Self::new(Reading::Objects) }
    }

    /// Takes one character.
    pub fn push(&mut self, c: char) -> Result<(), Malformed> {
        // The state is taken out, for the text in it; it moves on, or the call is malformed.
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
            // A string of JSON, or `null`.
            At::Value(key @ Key::Arguments) if matches!(c, '"' | 'n') => {
                self.value(key, String::new(), Scanner::new(), c)?
            }
            At::Key { .. } | At::Next | At::Colon(_) | At::Value(_) => return Err(Malformed),
        };
        Ok(())
    }

    fn header(&mut self, mut text: String, c: char) -> Result<At, Malformed> {
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
        }
    }

    fn key(&mut self, text: &str) -> Result<Key, Malformed> {
        let key: String = serde_json::from_str(text).map_err(|_| Malformed)?;
        Ok(match key.as_str() {
            "name" | "tool_name" | "function_name" | "tool" if self.name.is_none() => Key::Name,
            "function" | "tool_call" if self.name.is_none() => Key::Function,
            "arguments" | "parameters" | "args" | "input" if !self.arguments_end => Key::Arguments,
            "id" | "tool_call_id" | "type" => Key::Other,
            // Where any JSON may stand, what is not a call is soon known for what it is.
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
            // A number, of which nobody knew that it had ended.
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

    /// Takes arguments that are not an object but the JSON text of one, or `null`.
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

    /// A call without arguments has an empty object of them.
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

/// The name in the text before the arguments. Nothing else may stand there, but an id between two of `after`.
fn name_in<'t>(header: &'t str, before: &[&str], after: &[&str]) -> Option<&'t str> {
    let mut text = header.trim();
    for wrapping in before {
        text = text.strip_prefix(wrapping).unwrap_or(text).trim_start();
    }
    let end = after.iter().filter_map(|mark| text.find(mark)).min()?;
    let (name, mut rest) = text.split_at(end);
    while !rest.is_empty() {
        rest = after.iter().find_map(|mark| rest.strip_prefix(mark))?;
        let word = |c: char| c.is_ascii_alphanumeric();
        let is_id = after.iter().any(|mark| rest.trim_start_matches(word).starts_with(mark));
        rest = if is_id { rest.trim_start_matches(word) } else { rest };
    }
    Some(name.trim())
}
