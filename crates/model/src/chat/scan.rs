//! A pass over a template's source before minijinja compiles it.
//!
//! minijinja's parser, its code generator and the destructors of its syntax trees recurse once per link of a chain
//! (`a.b.c`, `1 + 1 + 1`, `elif`) without a limit. The pass counts the tokens of each tag and the open blocks, and
//! refuses templates that would be too deep for [`super::STACK`].
//!
//! Two statements are rewritten:
//! - `{% generation %}`, Hugging Face's mark for training, becomes `{% with %}`, which renders its body in a scope.
//! - `{% set namespace.name = value %}` stores `__plain(value)`, see [`super::python::plain`].

use super::TemplateError;

/// Most bytes of a source. The largest known templates have 30 KB.
const MAX_SOURCE: usize = 256 << 10;

/// Most tokens in one tag. No expression can be deeper than it has tokens. Known templates have up to 200.
const MAX_TOKENS: usize = 4000;

/// Most brackets that are open at once.
const MAX_BRACKETS: usize = 50;

/// Most blocks that are open at once, where each `elif` and `else` of an open block counts as one.
const MAX_BLOCKS: usize = 400;

/// Checks the bounds and returns the rewritten source, or the exceeded bound or unclosed tag.
pub(super) fn prepare(source: &str) -> Result<String, TemplateError> {
    if source.len() > MAX_SOURCE {
        let problem = format!("it has {} bytes; at most {MAX_SOURCE} are accepted", source.len());
        return Err(TemplateError::TooLarge(problem));
    }
    // jinja2 normalizes line breaks.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut scan = Scan { source: &source, at: 0, balance: 0, open: Vec::new(), depth: 0 };
    let mut out = String::with_capacity(source.len() + 64);
    while let Some(start) = scan.next_marker() {
        out.push_str(&source[scan.at..start]);
        scan.at = start + 2;
        match source.as_bytes()[start + 1] {
            b'#' => scan.skip_past("#}", "a comment")?,
            b'%' if scan.skip_basic_tag("raw") => scan.skip_raw()?,
            kind => {
                let tag = scan.tag(if kind == b'%' { "%}" } else { "}}" })?;
                if kind == b'%' {
                    scan.count_block(&tag)?;
                    if let Some(rewritten) = tag.rewritten(&source, start, scan.at) {
                        out.push_str(&rewritten);
                        continue;
                    }
                }
            }
        }
        out.push_str(&source[start..scan.at]);
    }
    out.push_str(&source[scan.at..]);
    Ok(out)
}

struct Scan<'s> {
    source: &'s str,
    at: usize,
    /// Number of open brackets. As in minijinja's lexer, a tag starts with the balance of the previous one.
    balance: isize,
    /// Depth that each open block adds.
    open: Vec<usize>,
    depth: usize,
}

/// State of the scan within a tag.
struct Tag<'s> {
    /// The first name and its offset in the source.
    name: &'s str,
    name_start: usize,
    tokens: usize,
    /// The first `=` outside of brackets: the offset behind it.
    assign: Option<usize>,
    /// True if a `.` precedes the first `=`.
    dotted: bool,
    /// The offset of `%}`, `-%}` or `+%}`.
    end: usize,
}

impl<'s> Scan<'s> {
    fn at_line(&self, problem: impl std::fmt::Display) -> String {
        let line = self.source[..self.at].matches('\n').count() + 1;
        format!("line {line}: {problem}")
    }

    fn unfinished<T>(&self, what: &str) -> Result<T, TemplateError> {
        Err(TemplateError::Syntax(self.at_line(format_args!("{what} has no end"))))
    }

    fn too_large<T>(&self, problem: impl std::fmt::Display) -> Result<T, TemplateError> {
        Err(TemplateError::TooLarge(self.at_line(problem)))
    }

    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    /// Returns the offset of the next `{{`, `{%` or `{#`.
    fn next_marker(&self) -> Option<usize> {
        let pairs = self.source.as_bytes()[self.at..].windows(2);
        let found = pairs.enumerate().find(|(_, pair)| pair[0] == b'{' && b"{%#".contains(&pair[1]));
        found.map(|(offset, _)| self.at + offset)
    }

    fn skip_past(&mut self, end: &str, what: &str) -> Result<(), TemplateError> {
        let Some(found) = self.rest().find(end) else { return self.unfinished(what) };
        self.at += found + end.len();
        Ok(())
    }

    /// Skips the rest of `{% name %}`, if it follows a `{%`.
    fn skip_basic_tag(&mut self, name: &str) -> bool {
        let rest = self.rest();
        let trimmed = rest.strip_prefix(['-', '+']).unwrap_or(rest).trim_ascii_start();
        let Some(after) = trimmed.strip_prefix(name) else { return false };
        let after = after.trim_ascii_start();
        let Some(after) = after.strip_prefix(['-', '+']).unwrap_or(after).strip_prefix("%}") else {
            return false;
        };
        self.at += rest.len() - after.len();
        true
    }

    fn skip_raw(&mut self) -> Result<(), TemplateError> {
        loop {
            self.skip_past("{%", "a raw block")?;
            if self.skip_basic_tag("endraw") {
                return Ok(());
            }
        }
    }

    /// Reads a tag up to and with its end.
    fn tag(&mut self, end: &str) -> Result<Tag<'s>, TemplateError> {
        if self.rest().starts_with(['-', '+']) {
            self.at += 1;
        }
        let outer = self.balance;
        let mut tag =
            Tag { name: "", name_start: self.at, tokens: 0, assign: None, dotted: false, end: self.at };
        loop {
            let rest = self.rest();
            let trimmed = rest.trim_ascii_start();
            self.at += rest.len() - trimmed.len();
            tag.end = self.at;
            let Some(&first) = trimmed.as_bytes().first() else { return self.unfinished("a tag") };
            let after = trimmed.strip_prefix(['-', '+']).unwrap_or(trimmed).strip_prefix(end);
            if let Some(after) = after.filter(|_| self.balance == 0) {
                self.at += trimmed.len() - after.len();
                return Ok(tag);
            }
            tag.tokens += 1;
            if tag.tokens > MAX_TOKENS {
                return self.too_large(format!("a tag has more than {MAX_TOKENS} tokens"));
            }
            let length = match first {
                b'\'' | b'"' => match string_length(trimmed.as_bytes()) {
                    Some(length) => length,
                    None => return self.unfinished("a string"),
                },
                b'(' | b'[' | b'{' => {
                    self.balance += 1;
                    if self.balance > MAX_BRACKETS as isize {
                        return self.too_large(format!("more than {MAX_BRACKETS} brackets are nested"));
                    }
                    1
                }
                b')' | b']' | b'}' => {
                    self.balance -= 1;
                    1
                }
                b'=' | b'!' | b'<' | b'>' if trimmed.as_bytes().get(1) == Some(&b'=') => 2,
                b'=' => {
                    if tag.assign.is_none() && self.balance == outer {
                        tag.assign = Some(self.at + 1);
                    }
                    1
                }
                b'.' => {
                    tag.dotted |= tag.assign.is_none();
                    1
                }
                _ => {
                    let is_word = |c: char| c == '_' || c.is_ascii_alphanumeric();
                    let word = trimmed.find(|c| !is_word(c)).unwrap_or(trimmed.len());
                    if tag.tokens == 1 {
                        (tag.name, tag.name_start) = (&trimmed[..word], self.at);
                    }
                    word.max(trimmed.chars().next().map_or(1, char::len_utf8))
                }
            };
            self.at += length;
        }
    }

    /// Counts how deep blocks are nested.
    fn count_block(&mut self, tag: &Tag<'_>) -> Result<(), TemplateError> {
        match tag.name {
            "set" if tag.assign.is_some() => {}
            "for" | "if" | "with" | "filter" | "call" | "macro" | "autoescape" | "generation" | "set" => {
                self.open.push(1);
                self.depth += 1;
            }
            "elif" | "else" => {
                if let Some(links) = self.open.last_mut() {
                    *links += 1;
                    self.depth += 1;
                }
            }
            // A name that ends no block is a syntax error to minijinja, which then reads no further.
            name if name.starts_with("end") => self.depth -= self.open.pop().unwrap_or(0),
            _ => {}
        }
        match self.depth > MAX_BLOCKS {
            true => self.too_large(format!("more than {MAX_BLOCKS} blocks or `elif` are nested")),
            false => Ok(()),
        }
    }
}

impl Tag<'_> {
    /// Returns the replacement of the tag in `source[start..end]`.
    fn rewritten(&self, source: &str, start: usize, end: usize) -> Option<String> {
        let before = &source[start..self.name_start];
        match (self.name, self.assign) {
            ("generation" | "endgeneration", _) if self.tokens == 1 => {
                let after = &source[self.name_start + self.name.len()..end];
                let end = if self.name == "generation" { "" } else { "end" };
                Some(format!("{before}{end}with{after}"))
            }
            ("set", Some(assign)) if self.dotted => {
                let (target, value) = (&source[start..assign], &source[assign..self.end]);
                Some(format!("{target} __plain(({value})) {}", &source[self.end..end]))
            }
            _ => None,
        }
    }
}

/// Returns the length of a quoted string with its quotes.
fn string_length(text: &[u8]) -> Option<usize> {
    let mut at = 1;
    while *text.get(at)? != text[0] {
        at += if text[at] == b'\\' { 2 } else { 1 };
    }
    Some(at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewrites_what_minijinja_does_not_know() {
        let check = |source: &str, expected: &str| assert_eq!(prepare(source), Ok(expected.to_owned()));
        check("a {%- generation -%} b {% endgeneration %}\r\n", "a {%- with -%} b {% endwith %}\n");
        check("{% set ns.a = 1, 2 -%}", "{% set ns.a = __plain(( 1, 2 )) -%}");
        check("{% set ns['a'] = ns.a == b %}", "{% set ns['a'] = ns.a == b %}");
        check(
            "{% set a = ns.b %}{% set a %}ns.a = 1{% endset %}",
            "{% set a = ns.b %}{% set a %}ns.a = 1{% endset %}",
        );
        check(
            "{% raw %}{% generation %}{%- endraw %}{# {% generation %} #}{{ '{% generation %}' }}{{ {'a': {}}}}",
            "{% raw %}{% generation %}{%- endraw %}{# {% generation %} #}{{ '{% generation %}' }}{{ {'a': {}}}}",
        );
    }

    #[test]
    fn refuses_what_is_too_deep() {
        let check = |source: String, expected: &str| {
            let error = prepare(&source).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check("x".repeat(MAX_SOURCE + 1), "bytes; at most");
        check(format!("\n{{{{ a{} }}}}", ".b".repeat(MAX_TOKENS)), "line 2: a tag has more than");
        check(format!("{{{{ {}", "[".repeat(51)), "brackets are nested");
        check("{% if 1 %}".repeat(401), "blocks or `elif`");
        check(format!("{{% if 1 %}}{}", "{% elif 1 %}".repeat(400)), "blocks or `elif`");
        check(
            format!("{}{{% if 1 %}}{}", "{% for a in b %}".repeat(200), "{% elif 1 %}".repeat(200)),
            "nested",
        );
        check("{{ 'open".into(), "string has no end");
        check("{{ 'open\\".into(), "string has no end");
        check("{# open".into(), "comment has no end");
        check("{% raw %}{% raw %}".into(), "raw block has no end");
        check("{{ ".into(), "tag has no end");
        let flat = "{% if 1 %}{% elif 2 %}{% endif %}".repeat(1000);
        assert_eq!(prepare(&flat), Ok(flat));
    }
}
