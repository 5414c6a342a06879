//! Cutting a template into text and tokens, as jinja2's lexer does with `trim_blocks` and `lstrip_blocks` set.

use super::values::is_space;

/// A piece of a template.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    /// Text that is written as it is.
    Data(String),
    /// `{{`
    VariableBegin,
    /// `}}`
    VariableEnd,
    /// `{%`
    BlockBegin,
    /// `%}`
    BlockEnd,
    Name(String),
    Text(String),
    Integer(u128),
    Float(f64),
    Operator(&'static str),
}

/// Longest first: `**` is not two `*`.
const OPERATORS: &[&str] = &[
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}", ">", "<",
    "=", ".", ":", "|", ",", ";",
];

/// A token and the line where it begins.
pub(super) type Located = (Token, usize);

/// Cuts `source`; the error is a message with its line.
pub(super) fn tokenize(source: &str) -> Result<Vec<Located>, String> {
    let mut source = source.replace("\r\n", "\n").replace('\r', "\n");
    if source.ends_with('\n') {
        source.pop();
    }
    let mut lexer = Lexer { source: &source, at: 0, line: 1, counted: 0, tokens: Vec::new() };
    lexer.root()?;
    Ok(lexer.tokens)
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    /// The line of `counted`.
    line: usize,
    counted: usize,
    tokens: Vec<Located>,
}

/// What a sign beside a delimiter does to the whitespace on its side.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sign {
    /// Strips it.
    Minus,
    /// Keeps it, whatever the settings.
    Plus,
    None,
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn error<T>(&mut self, message: impl std::fmt::Display) -> Result<T, String> {
        Err(format!("line {}: {message}", self.line()))
    }

    /// The line of what comes next.
    fn line(&mut self) -> usize {
        self.line += self.source[self.counted..self.at].matches('\n').count();
        self.counted = self.at;
        self.line
    }

    fn push(&mut self, token: Token) {
        let line = self.line();
        self.tokens.push((token, line));
    }

    fn push_data(&mut self, data: &str) {
        if !data.is_empty() {
            self.push(Token::Data(data.to_owned()));
        }
    }

    fn skip_space(&mut self) {
        self.at = self.source.len() - self.rest().trim_start_matches(is_space).len();
    }

    /// Text and tags until the end.
    fn root(&mut self) -> Result<(), String> {
        loop {
            let rest = self.rest();
            let tag = rest
                .match_indices('{')
                .find(|&(at, _)| matches!(rest.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')));
            let Some((at, _)) = tag else {
                self.push_data(rest);
                return Ok(());
            };
            let kind = rest.as_bytes()[at + 1];
            let sign = sign(&rest[at + 2..]);
            let text = self.before_tag(&rest[..at], sign, kind == b'{');
            self.push_data(text);
            self.at += at;
            if let Some(length) = raw_tag(self.rest(), "raw") {
                self.raw(length)?;
                continue;
            }
            self.at += 2 + usize::from(sign != Sign::None);
            match kind {
                b'#' => self.comment()?,
                b'%' => self.tag(Token::BlockBegin, Token::BlockEnd, "%}")?,
                _ => self.tag(Token::VariableBegin, Token::VariableEnd, "}}")?,
            }
        }
    }

    /// The text before a tag without what the tag strips of it.
    fn before_tag<'t>(&self, text: &'t str, sign: Sign, is_variable: bool) -> &'t str {
        match sign {
            Sign::Minus => text.trim_end_matches(is_space),
            Sign::Plus => text,
            Sign::None if is_variable => text,
            // lstrip_blocks: whitespace between the beginning of the line and the tag.
            Sign::None => {
                let line_start = text.rfind('\n').map_or(0, |at| at + 1);
                let starts_line = line_start > 0
                    || self.source[..self.at].is_empty()
                    || self.source[..self.at].ends_with('\n');
                match starts_line && text[line_start..].chars().all(is_space) {
                    true => &text[..line_start],
                    false => text,
                }
            }
        }
    }

    fn comment(&mut self) -> Result<(), String> {
        let Some(end) = self.rest().find("#}") else { return self.error("missing end of comment tag") };
        let inside = &self.rest()[..end];
        self.at += end + 2;
        self.after_tag(match inside.chars().next_back() {
            Some('-') => Sign::Minus,
            Some('+') => Sign::Plus,
            _ => Sign::None,
        });
        Ok(())
    }

    /// Strips what the end of a block or comment strips of the text after it.
    fn after_tag(&mut self, sign: Sign) {
        match sign {
            Sign::Minus => self.skip_space(),
            Sign::Plus => {}
            // trim_blocks
            Sign::None => self.at += usize::from(self.rest().starts_with('\n')),
        }
    }

    /// `{% raw %}` text `{% endraw %}`; `length` is that of the first tag.
    fn raw(&mut self, length: usize) -> Result<(), String> {
        let stripped = self.rest()[..length].ends_with("-%}");
        self.at += length;
        if stripped {
            self.skip_space();
        }
        let rest = self.rest();
        let end = rest.match_indices("{%").find_map(|(at, _)| Some((at, raw_tag(&rest[at..], "endraw")?)));
        let Some((at, length)) = end else { return self.error("missing end of raw directive") };
        let text = self.before_tag(&rest[..at], sign(&rest[at + 2..]), false);
        self.push_data(text);
        let tag = &rest[at..at + length];
        self.at += at + length;
        self.after_tag(match tag.strip_suffix("%}").and_then(|tag| tag.chars().next_back()) {
            Some('-') => Sign::Minus,
            Some('+') => Sign::Plus,
            _ => Sign::None,
        });
        Ok(())
    }

    /// The tokens of one tag.
    fn tag(&mut self, begin: Token, end: Token, delimiter: &str) -> Result<(), String> {
        let is_block = end == Token::BlockEnd;
        self.push(begin);
        let mut open = Vec::new();
        loop {
            // Inside of brackets, `}}` is two of them.
            if open.is_empty() {
                let sign = match self.rest().chars().next() {
                    Some('-') if self.rest()[1..].starts_with(delimiter) => Some(Sign::Minus),
                    Some('+') if is_block && self.rest()[1..].starts_with(delimiter) => Some(Sign::Plus),
                    _ if self.rest().starts_with(delimiter) => Some(Sign::None),
                    _ => None,
                };
                if let Some(sign) = sign {
                    self.push(end);
                    self.at += delimiter.len() + usize::from(sign != Sign::None);
                    match (is_block, sign) {
                        (false, Sign::None) => {}
                        _ => self.after_tag(sign),
                    }
                    return Ok(());
                }
            }
            self.token(&mut open)?;
        }
    }

    /// One token inside of a tag; `open` are the closing brackets that are due.
    fn token(&mut self, open: &mut Vec<&'static str>) -> Result<(), String> {
        let rest = self.rest();
        let Some(first) = rest.chars().next() else { return self.error("the template ends inside of a tag") };
        if is_space(first) {
            self.skip_space();
            return Ok(());
        }
        if first.is_ascii_digit() {
            return self.number();
        }
        if first == '_' || first.is_alphanumeric() {
            let length = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
            let name = rest[..length].to_owned();
            // The translation calls its own functions so; Python keeps such names for itself, too.
            if name.starts_with("__") {
                return self.error(format!("`{name}` is a reserved name"));
            }
            self.push(Token::Name(name));
            self.at += length;
            return Ok(());
        }
        if first == '\'' || first == '"' {
            return self.text(first);
        }
        let Some(&operator) = OPERATORS.iter().find(|&&operator| rest.starts_with(operator)) else {
            return self.error(format!("unexpected character {first:?}"));
        };
        match operator {
            "(" => open.push(")"),
            "[" => open.push("]"),
            "{" => open.push("}"),
            ")" | "]" | "}" if open.pop() != Some(operator) => {
                return self.error(format!("unexpected '{operator}'"));
            }
            _ => {}
        }
        self.push(Token::Operator(operator));
        self.at += operator.len();
        Ok(())
    }

    fn number(&mut self) -> Result<(), String> {
        let bytes = self.rest().as_bytes();
        let digits = |from: usize| {
            bytes[from..].iter().take_while(|byte| byte.is_ascii_digit() || **byte == b'_').count()
        };
        let radix = match bytes.get(..2) {
            Some(b"0x" | b"0X") => 16,
            Some(b"0o" | b"0O") => 8,
            Some(b"0b" | b"0B") => 2,
            _ => 10,
        };
        let mut end = digits(0);
        let mut is_float = false;
        if radix != 10 {
            end = 2 + bytes[2..]
                .iter()
                .take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'_')
                .count();
        } else {
            // After a dot, a number is an index: `x.0.1` has no float in it.
            let after_dot = self.source[..self.at].ends_with('.');
            let fraction =
                bytes.get(end) == Some(&b'.') && bytes.get(end + 1).is_some_and(u8::is_ascii_digit);
            if !after_dot && fraction {
                is_float = true;
                end += 1 + digits(end + 1);
            }
            if !after_dot && matches!(bytes.get(end), Some(b'e' | b'E')) {
                let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
                if bytes.get(end + 1 + sign).is_some_and(u8::is_ascii_digit) {
                    is_float = true;
                    end += 1 + sign + digits(end + 1 + sign);
                }
            }
        }
        let literal = self.rest()[..end].replace('_', "");
        let token = if is_float {
            literal.parse().ok().map(Token::Float)
        } else {
            let digits = if radix == 10 { &literal[..] } else { &literal[2..] };
            u128::from_str_radix(digits, radix).ok().map(Token::Integer)
        };
        let Some(token) = token else { return self.error(format!("`{literal}` is not a number")) };
        self.push(token);
        self.at += end;
        Ok(())
    }

    fn text(&mut self, quote: char) -> Result<(), String> {
        let rest = &self.rest()[1..];
        let mut escaped = false;
        let end = rest.find(|c: char| {
            let ends = c == quote && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let Some(end) = end else { return self.error("a string does not end") };
        match unescape(&rest[..end]) {
            Some(text) => self.push(Token::Text(text)),
            None => return self.error("a string has a malformed escape"),
        }
        self.at += end + 2;
        Ok(())
    }
}

/// The sign after an opening delimiter.
fn sign(after: &str) -> Sign {
    match after.chars().next() {
        Some('-') => Sign::Minus,
        Some('+') => Sign::Plus,
        _ => Sign::None,
    }
}

/// The length of a tag that consists of `name` alone: `{%- raw %}`.
fn raw_tag(text: &str, name: &str) -> Option<usize> {
    let inside = text.strip_prefix("{%")?;
    let inside = inside.strip_prefix(['-', '+']).unwrap_or(inside).trim_start_matches(is_space);
    let rest = inside.strip_prefix(name)?.trim_start_matches(is_space);
    let plus = if name == "endraw" { rest.strip_prefix("+%}") } else { None };
    let rest = rest.strip_prefix("-%}").or(plus).or_else(|| rest.strip_prefix("%}"))?;
    Some(text.len() - rest.len())
}

/// Python's escapes (`unicode-escape`); unknown ones stay as they are.
fn unescape(text: &str) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        let escape = rest.chars().next()?;
        rest = &rest[escape.len_utf8()..];
        let hex = |length: usize| {
            let digits = rest.get(..length).filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()))?;
            u32::from_str_radix(digits, 16).ok()
        };
        match escape {
            '\n' => {}
            '\\' | '\'' | '"' => out.push(escape),
            'a' => out.push('\u{7}'),
            'b' => out.push('\u{8}'),
            'f' => out.push('\u{c}'),
            'n' => out.push('\n'),
            'r' => out.push('\r'),
            't' => out.push('\t'),
            'v' => out.push('\u{b}'),
            'x' | 'u' | 'U' => {
                let length = match escape {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                out.push(char::from_u32(hex(length)?)?);
                rest = &rest[length..];
            }
            '0'..='7' => {
                let more = rest.bytes().take(2).take_while(|byte| (b'0'..=b'7').contains(byte)).count();
                let first = escape.to_digit(8)?;
                let value =
                    rest[..more].bytes().fold(first, |value, byte| value * 8 + u32::from(byte - b'0'));
                out.push(char::from_u32(value)?);
                rest = &rest[more..];
            }
            _ => {
                out.push('\\');
                out.push(escape);
            }
        }
    }
    out.push_str(rest);
    Some(out)
}
