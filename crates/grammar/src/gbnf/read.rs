//! The parser of GBNF. It accepts llama.cpp's syntax, `_` in names, and rules that continue in the next line unless a
//! new rule begins there, as in XGrammar's EBNF.

use std::collections::HashMap;

use llguidance::toktrie::TokTrie;

use super::{CharSet, Node, NodeId, Source};
use crate::bounds::{MAX_DEPTH, MAX_NAMES, MAX_TEXT};

/// Maximum number of repetitions of one item.
const MAX_REPETITIONS: u32 = 100_000;

/// Longest text of one node. Longer ones are several nodes, so that the parts of a grammar stay small.
const MAX_NODE_TEXT: usize = 256;

/// Reads a grammar.
pub fn read(text: &str, tokens: &TokTrie) -> Result<Source, String> {
    if text.len() > MAX_TEXT {
        return Err(format!("it has {} bytes; at most {MAX_TEXT} are compiled", text.len()));
    }
    let at = if text.starts_with('\u{feff}') { '\u{feff}'.len_utf8() } else { 0 };
    let mut reader = Reader {
        text,
        at,
        tokens,
        source: Source::default(),
        names: HashMap::new(),
        rules: Vec::new(),
        groups: Vec::new(),
    };
    reader.skip(true);
    while reader.peek().is_some() {
        reader.rule()?;
    }
    reader.finish()
}

/// A rule by its name.
struct Rule<'t> {
    name: &'t str,
    /// The first place where it is named.
    at: usize,
    /// Its body and the place where it is defined.
    body: Option<(NodeId, usize)>,
}

struct Reader<'t> {
    text: &'t str,
    at: usize,
    tokens: &'t TokTrie,
    source: Source,
    names: HashMap<&'t str, usize>,
    rules: Vec<Rule<'t>>,
    /// Places of the groups that are open.
    groups: Vec<usize>,
}

impl<'t> Reader<'t> {
    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn take(&mut self, expected: char) -> bool {
        let found = self.peek() == Some(expected);
        if found {
            self.at += expected.len_utf8();
        }
        found
    }

    fn expect(&mut self, expected: char) -> Result<(), String> {
        if self.take(expected) { Ok(()) } else { self.unexpected(&format!("`{expected}` should be here")) }
    }

    /// Returns an error at a place.
    fn error<T>(&self, at: usize, problem: &str) -> Result<T, String> {
        Err(format!("{}: {problem}", self.place(at)))
    }

    fn place(&self, at: usize) -> String {
        let before = &self.text[..at];
        let line = before.rfind('\n').map_or(0, |end| end + 1);
        let number = before.bytes().filter(|&byte| byte == b'\n').count() + 1;
        format!("line {number}, column {}", before[line..].chars().count() + 1)
    }

    /// Returns an error about the next character.
    fn unexpected<T>(&self, expectation: &str) -> Result<T, String> {
        let found = match self.peek() {
            None => "the grammar ends".to_owned(),
            Some('\n' | '\r') => "the line ends".to_owned(),
            Some(char) => format!("`{char}` is not expected"),
        };
        let open = self.groups.last().map(|&group| format!("; the group of {} is open", self.place(group)));
        self.error(self.at, &format!("{found}, and {expectation}{}", open.unwrap_or_default()))
    }

    /// Skips blanks and comments, and ends of lines where they mean nothing.
    fn skip(&mut self, lines: bool) {
        loop {
            match self.peek() {
                Some(' ' | '\t') => self.at += 1,
                Some('\r' | '\n') if lines => self.at += 1,
                Some('#') => {
                    let rest = &self.text[self.at..];
                    self.at += rest.find(['\r', '\n']).unwrap_or(rest.len());
                }
                _ => return,
            }
        }
    }

    /// Skips whitespace and comments between two parts of a rule. A line break ends a rule if a new one begins after
    /// it.
    fn skip_in_rule(&mut self) {
        self.skip(!self.groups.is_empty());
        let end = self.at;
        self.skip(true);
        if self.groups.is_empty() && (self.peek().is_none() || self.begins_rule()) {
            self.at = end;
        }
    }

    fn begins_rule(&self) -> bool {
        let rest = &self.text[self.at..];
        let after = rest.trim_start_matches(is_name);
        after.len() < rest.len() && after.trim_start_matches([' ', '\t']).starts_with("::=")
    }

    fn name(&mut self) -> &'t str {
        let rest = &self.text[self.at..];
        let name = &rest[..rest.len() - rest.trim_start_matches(is_name).len()];
        self.at += name.len();
        name
    }

    /// Returns the index of the rule with this name.
    fn index(&mut self, name: &'t str, at: usize) -> Result<usize, String> {
        let new = self.rules.len();
        let index = *self.names.entry(name).or_insert(new);
        if index == new {
            if new == MAX_NAMES {
                return Err(format!("it has more than {MAX_NAMES} rules; at most {MAX_NAMES} are compiled"));
            }
            self.rules.push(Rule { name, at, body: None });
        }
        Ok(index)
    }

    fn rule(&mut self) -> Result<(), String> {
        let at = self.at;
        let name = self.name();
        if name.is_empty() {
            return self.unexpected("a rule begins with its name: `name ::= ...`");
        }
        self.skip(false);
        if !self.text[self.at..].starts_with("::=") {
            return self.unexpected(&format!("the rule `{name}` needs `::=` after its name"));
        }
        self.at += "::=".len();
        self.skip(true);
        let body = self.alternatives()?;
        if !matches!(self.peek(), None | Some('\r' | '\n')) && !self.begins_rule() {
            return self.unexpected(
                "a part of a rule is a text in quotes, a class in brackets, `.`, a group, a token, or a rule's name",
            );
        }
        self.skip(true);
        let index = self.index(name, at)?;
        if let Some((_, first)) = self.rules[index].body {
            return self.error(at, &format!("the rule `{name}` is defined at {} already", self.place(first)));
        }
        self.rules[index].body = Some((body, at));
        Ok(())
    }

    fn finish(mut self) -> Result<Source, String> {
        for rule in &self.rules {
            match rule.body {
                Some((body, _)) => self.source.rules.push(body),
                None => return self.error(rule.at, &format!("the rule `{}` is not defined", rule.name)),
            }
        }
        match self.names.get("root") {
            Some(&root) => self.source.root = root,
            None => return Err("there is no rule `root`, which says what the whole answer is".into()),
        }
        Ok(self.source)
    }

    fn alternatives(&mut self) -> Result<NodeId, String> {
        let mut alternatives = vec![self.sequence()?];
        while self.take('|') {
            self.skip(true);
            alternatives.push(self.sequence()?);
        }
        Ok(match alternatives.as_slice() {
            [one] => *one,
            _ => self.source.add(Node::Choice(alternatives)),
        })
    }

    fn sequence(&mut self) -> Result<NodeId, String> {
        let mut items = Vec::new();
        // Quantifiers of the last item.
        let mut quantifiers = 0;
        // An alternative may begin with the end of its rule.
        if !self.begins_rule() || !self.groups.is_empty() {
            while let Some(char) = self.peek() {
                let item = match char {
                    '"' => self.text()?,
                    '[' => self.class()?,
                    '.' => {
                        self.at += 1;
                        self.source.add(Node::Class(CharSet::all()))
                    }
                    '(' => self.group()?,
                    '<' | '!' => self.token()?,
                    '*' | '+' | '?' | '{' => {
                        quantifiers += 1;
                        if quantifiers + self.groups.len() > MAX_DEPTH {
                            return self.error(self.at, &format!("more than {MAX_DEPTH} nested repetitions"));
                        }
                        let (at, Some(item)) = (self.at, items.pop()) else {
                            return self.error(self.at, &format!("`{char}` has nothing before it to repeat"));
                        };
                        let (min, max) = self.quantifier(at)?;
                        items.push(self.source.add(Node::Repeat { item, min, max }));
                        self.skip_in_rule();
                        continue;
                    }
                    _ if is_name(char) => {
                        let at = self.at;
                        let name = self.name();
                        let index = self.index(name, at)?;
                        self.source.add(Node::Rule(index))
                    }
                    _ => break,
                };
                quantifiers = 0;
                items.push(item);
                self.skip_in_rule();
            }
        }
        Ok(match items.as_slice() {
            [one] => *one,
            _ => self.source.add(Node::Sequence(items)),
        })
    }

    fn group(&mut self) -> Result<NodeId, String> {
        if self.groups.len() == MAX_DEPTH {
            return self.error(self.at, &format!("more than {MAX_DEPTH} nested groups"));
        }
        self.groups.push(self.at);
        self.at += 1;
        self.skip(true);
        let group = self.alternatives()?;
        self.expect(')')?;
        self.groups.pop();
        Ok(group)
    }

    fn text(&mut self) -> Result<NodeId, String> {
        let begin = self.at;
        self.at += 1;
        let (mut text, mut chunks) = (String::new(), Vec::new());
        while !self.take('"') {
            if self.peek().is_none() {
                return self.error(begin, "the text that begins here has no closing `\"`");
            }
            text.push(self.char()?);
            if text.len() >= MAX_NODE_TEXT {
                chunks.push(self.source.add(Node::Text(std::mem::take(&mut text).into())));
            }
        }
        if !text.is_empty() {
            chunks.push(self.source.add(Node::Text(text.into())));
        }
        Ok(match chunks.as_slice() {
            [one] => *one,
            _ => self.source.add(Node::Sequence(chunks)),
        })
    }

    fn class(&mut self) -> Result<NodeId, String> {
        let begin = self.at;
        self.at += 1;
        let is_negated = self.take('^');
        let mut ranges = Vec::new();
        while !self.take(']') {
            if self.peek().is_none() {
                return self.error(begin, "the class that begins here has no closing `]`");
            }
            let at = self.at;
            let low = self.char()?;
            let rest = &self.text[self.at..];
            let mut high = low;
            if rest.starts_with('-') && !rest.starts_with("-]") {
                self.at += 1;
                high = self.char()?;
            }
            if high < low {
                let range = &self.text[at..self.at];
                return self
                    .error(at, &format!("the range `{range}` is empty: its ends are in the wrong order"));
            }
            ranges.push((low.into(), high.into()));
        }
        if ranges.is_empty() {
            return self.error(begin, "the class is empty, so no character is in it");
        }
        let set = CharSet::new(ranges);
        let set = if is_negated { set.complement() } else { set };
        if set.is_empty() {
            return self.error(begin, "the class leaves no character out, so none is in it");
        }
        Ok(self.source.add(Node::Class(set)))
    }

    /// Returns a character of a text or a class.
    fn char(&mut self) -> Result<char, String> {
        let at = self.at;
        let Some(char) = self.peek() else { return self.unexpected("a character should be here") };
        self.at += char.len_utf8();
        if char != '\\' {
            return Ok(char);
        }
        let Some(escaped) = self.peek() else { return self.unexpected("an escape should go on here") };
        self.at += escaped.len_utf8();
        match escaped {
            'x' => self.code_point(at, 2),
            'u' => self.code_point(at, 4),
            'U' => self.code_point(at, 8),
            't' => Ok('\t'),
            'r' => Ok('\r'),
            'n' => Ok('\n'),
            '\\' | '"' | '[' | ']' | '-' => Ok(escaped),
            _ => {
                let known = r#"`\\`, `\"`, `\[`, `\]`, `\-`, `\n`, `\r`, `\t`, `\xNN`, `\uNNNN` and `\UNNNNNNNN` are"#;
                self.error(at, &format!("`\\{escaped}` is no escape; {known}"))
            }
        }
    }

    /// Returns the character of an escape with its code point in hexadecimal digits.
    fn code_point(&mut self, begin: usize, digits: usize) -> Result<char, String> {
        let rest = &self.text[self.at..];
        let number = rest.get(..digits).filter(|number| number.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let Some(number) = number else {
            let letter = &self.text[self.at - 1..self.at];
            return self.error(begin, &format!("`\\{letter}` needs {digits} hexadecimal digits"));
        };
        self.at += digits;
        let point = u32::from_str_radix(number, 16).ok().and_then(char::from_u32);
        match point {
            Some(char) => Ok(char),
            None => self.error(begin, &format!("`{}` is no character", &self.text[begin..self.at])),
        }
    }

    fn token(&mut self) -> Result<NodeId, String> {
        let begin = self.at;
        let is_negated = self.take('!');
        let open = self.at;
        self.expect('<')?;
        let id = if self.take('[') {
            let Some(number) = self.number() else {
                return self.unexpected("a token's number should be here");
            };
            self.expect(']')?;
            self.expect('>')?;
            let count = self.tokens.vocab_size();
            match number.filter(|&number| (number as usize) < count) {
                Some(id) => id,
                None => {
                    let token = &self.text[open..self.at];
                    return self
                        .error(open, &format!("there is no token `{token}`: the model has {count} tokens"));
                }
            }
        } else {
            let rest = &self.text[open..];
            let Some(end) = rest.find(['>', '\n']).filter(|&end| rest[end..].starts_with('>')) else {
                return self.error(begin, "the token that begins here has no closing `>`");
            };
            let text = &rest[..=end];
            self.at = open + end + 1;
            match self.tokens.get_special_token(text).or_else(|| self.tokens.token_id(text.as_bytes())) {
                Some(id) => id,
                None => {
                    let problem = format!(
                        "`{text}` is not one token of the model; `<[NUMBER]>` names a token by its id"
                    );
                    return self.error(open, &problem);
                }
            }
        };
        Ok(self.source.add(Node::Token { id, is_negated }))
    }

    /// Reads a number; the inner `None` is one that is too large.
    fn number(&mut self) -> Option<Option<u32>> {
        let rest = &self.text[self.at..];
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        self.at += digits;
        (digits > 0).then(|| rest[..digits].parse().ok())
    }

    /// Reads the number of repetitions of an item.
    fn quantifier(&mut self, begin: usize) -> Result<(u32, Option<u32>), String> {
        for (char, min, max) in [('*', 0, None), ('+', 1, None), ('?', 0, Some(1))] {
            if self.take(char) {
                return Ok((min, max));
            }
        }
        self.expect('{')?;
        self.skip(true);
        let min = self.repetitions()?;
        self.skip(true);
        let mut max = Some(min);
        if self.take(',') {
            self.skip(true);
            max = if self.peek() == Some('}') { None } else { Some(self.repetitions()?) };
            self.skip(true);
        }
        self.expect('}')?;
        if max.is_some_and(|max| max < min) {
            let range = &self.text[begin..self.at];
            return self
                .error(begin, &format!("`{range}` repeats nothing: the second number is the smaller one"));
        }
        Ok((min, max))
    }

    fn repetitions(&mut self) -> Result<u32, String> {
        let at = self.at;
        match self.number() {
            None => self.unexpected("a number of repetitions should be here"),
            Some(Some(number)) if number <= MAX_REPETITIONS => Ok(number),
            Some(_) => {
                let number = &self.text[at..self.at];
                self.error(
                    at,
                    &format!("{number} repetitions are too many; at most {MAX_REPETITIONS} are compiled"),
                )
            }
        }
    }
}

fn is_name(char: char) -> bool {
    char.is_ascii_alphanumeric() || char == '-' || char == '_'
}
