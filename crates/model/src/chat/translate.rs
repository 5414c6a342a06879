//! From jinja2 to minijinja: statements. See [`super::expression`] for what is inside of them.
//!
//! Text becomes expressions too (`{{ "text" }}`), so that everything a template writes passes the one place where it
//! is counted, and nothing depends on how minijinja treats whitespace.

use super::{
    expression::{Source, quoted},
    lexer::{Located, Token},
};

/// Nesting of blocks that no template needs; the parsers are recursive.
const MAX_BLOCKS: usize = 40;

/// A template on its way.
pub(super) struct Translator {
    tokens: std::vec::IntoIter<Located>,
    current: Option<Located>,
    line: usize,
    /// How deep the expression being read is nested.
    pub(super) depth: usize,
    blocks: usize,
    out: String,
}

/// Translates a template; the error is a message with its line.
pub(super) fn translate(tokens: Vec<Located>) -> Source {
    let mut tokens = tokens.into_iter();
    let current = tokens.next();
    let mut translator = Translator { tokens, current, line: 1, depth: 0, blocks: 0, out: String::new() };
    translator.body(&[])?;
    match translator.current {
        None => Ok(translator.out),
        Some(_) => translator.error("unexpected tag"),
    }
}

impl Translator {
    pub(super) fn error<T>(&self, message: impl std::fmt::Display) -> Result<T, String> {
        Err(format!("line {}: {message}", self.line))
    }

    pub(super) fn peek(&self) -> Option<&Token> {
        self.current.as_ref().map(|(token, _)| token)
    }

    pub(super) fn next(&mut self) -> Option<Token> {
        let (token, line) = std::mem::replace(&mut self.current, self.tokens.next())?;
        self.line = line;
        Some(token)
    }

    pub(super) fn advance(&mut self) {
        self.next();
    }

    fn after_next(&self) -> Option<&Token> {
        self.tokens.as_slice().first().map(|(token, _)| token)
    }

    /// Whether the token after the next is this operator.
    pub(super) fn next_is(&self, operator: &str) -> bool {
        matches!(self.after_next(), Some(Token::Operator(found)) if *found == operator)
    }

    /// Whether the token after the next is this name.
    pub(super) fn next_is_name(&self, name: &str) -> bool {
        matches!(self.after_next(), Some(Token::Name(found)) if found == name)
    }

    pub(super) fn skip(&mut self, operator: &str) -> bool {
        let found = matches!(self.peek(), Some(Token::Operator(found)) if *found == operator);
        if found {
            self.advance();
        }
        found
    }

    pub(super) fn skip_name(&mut self, name: &str) -> bool {
        let found = matches!(self.peek(), Some(Token::Name(found)) if found == name);
        if found {
            self.advance();
        }
        found
    }

    pub(super) fn expect(&mut self, operator: &str) -> Result<(), String> {
        match self.skip(operator) {
            true => Ok(()),
            false => self.error(format!("expected '{operator}', not {}", described(self.peek()))),
        }
    }

    pub(super) fn name(&mut self, what: &str) -> Source {
        match self.next() {
            Some(Token::Name(name)) => Ok(name),
            other => self.error(format!("expected {what}, not {}", described(other.as_ref()))),
        }
    }

    fn block_end(&mut self) -> Result<(), String> {
        match self.next() {
            Some(Token::BlockEnd) => Ok(()),
            other => self.error(format!("expected the end of the tag, not {}", described(other.as_ref()))),
        }
    }

    fn tag(&mut self, content: impl std::fmt::Display) {
        self.out.push_str(&format!("{{% {content} %}}"));
    }

    /// Text and tags up to a tag of one of these names, which is returned with its name read; up to the end of the
    /// template if there are none.
    fn body(&mut self, ends: &[&str]) -> Source {
        loop {
            match self.next() {
                None if ends.is_empty() => return Ok(String::new()),
                None => return self.error(format!("the template ends before `{}`", ends.join("` or `"))),
                Some(Token::Data(text)) => self.out.push_str(&format!("{{{{ {} }}}}", quoted(&text))),
                Some(Token::VariableBegin) => {
                    let expression = self.tuple(true, &[])?;
                    match self.next() {
                        Some(Token::VariableEnd) => self.out.push_str(&format!("{{{{ {expression} }}}}")),
                        other => {
                            let found = described(other.as_ref());
                            return self.error(format!("expected the end of the expression, not {found}"));
                        }
                    }
                }
                Some(Token::BlockBegin) => {
                    let name = self.name("the name of a tag")?;
                    if ends.contains(&name.as_str()) {
                        return Ok(name);
                    }
                    self.blocks += 1;
                    if self.blocks > MAX_BLOCKS {
                        return self.error("blocks are nested too deeply");
                    }
                    self.statement(&name)?;
                    self.blocks -= 1;
                    self.block_end()?;
                }
                Some(token) => return self.error(format!("unexpected {}", described(Some(&token)))),
            }
        }
    }

    /// A tag after its name, with what it encloses, up to but without its `%}`.
    fn statement(&mut self, name: &str) -> Result<(), String> {
        match name {
            "for" => self.for_loop(),
            "if" => self.condition(),
            "set" => self.set(),
            "macro" => {
                let name = self.name("the name of a macro")?;
                let signature = self.signature()?;
                self.tag(format_args!("macro {name}({signature})"));
                self.enclosed("endmacro")
            }
            "call" => {
                let signature = if self.peek() == Some(&Token::Operator("(")) {
                    self.signature()?
                } else {
                    String::new()
                };
                let function = self.name("the name of a macro")?;
                let arguments = self.arguments()?;
                self.tag(format_args!("call({signature}) {function}({arguments})"));
                self.enclosed("endcall")
            }
            "filter" => {
                let mut filters = vec![self.filter()?];
                while self.skip("|") {
                    filters.push(self.filter()?);
                }
                self.tag(format_args!("filter {}", filters.join("|")));
                self.enclosed("endfilter")
            }
            "with" => {
                let mut assignments = Vec::new();
                while self.peek() != Some(&Token::BlockEnd) {
                    if !assignments.is_empty() {
                        self.expect(",")?;
                    }
                    let target = self.target(&["="])?;
                    self.expect("=")?;
                    assignments.push(format!("{target}={}", self.expression()?));
                }
                self.tag(format_args!("with {}", assignments.join(", ")));
                self.enclosed("endwith")
            }
            // What the assistant says, marked for training. It has its own scope.
            "generation" => {
                self.tag("with");
                self.enclosed_as("endgeneration", "endwith")
            }
            "block" => {
                let name = self.name("the name of a block")?;
                self.tag(format_args!("block {name}"));
                self.enclosed("endblock")?;
                self.skip_name(&name);
                Ok(())
            }
            "print" => loop {
                let expression = self.expression()?;
                self.out.push_str(&format!("{{{{ {expression} }}}}"));
                if !self.skip(",") {
                    return Ok(());
                }
            },
            "break" | "continue" => {
                self.tag(name);
                Ok(())
            }
            _ => self.error(format!("unknown tag `{name}`")),
        }
    }

    /// The rest of a tag, and what follows up to its end.
    fn enclosed(&mut self, end: &str) -> Result<(), String> {
        self.enclosed_as(end, end)
    }

    fn enclosed_as(&mut self, end: &str, end_written: &str) -> Result<(), String> {
        self.block_end()?;
        self.body(&[end])?;
        self.tag(end_written);
        Ok(())
    }

    fn for_loop(&mut self) -> Result<(), String> {
        let target = self.target(&[])?;
        if !self.skip_name("in") {
            return self.error(format!("expected `in`, not {}", described(self.peek())));
        }
        let iterable = self.tuple(false, &["recursive"])?;
        let condition = match self.skip_name("if") {
            true => format!(" if {}", self.expression()?),
            false => String::new(),
        };
        let recursive = if self.skip_name("recursive") { " recursive" } else { "" };
        self.tag(format_args!("for {target} in __iterate({iterable}){condition}{recursive}"));
        self.block_end()?;
        if self.body(&["endfor", "else"])? == "else" {
            self.tag("else");
            self.block_end()?;
            self.body(&["endfor"])?;
        }
        self.tag("endfor");
        Ok(())
    }

    fn condition(&mut self) -> Result<(), String> {
        let test = self.tuple(false, &[])?;
        self.tag(format_args!("if {test}"));
        self.block_end()?;
        loop {
            match self.body(&["elif", "else", "endif"])?.as_str() {
                "elif" => {
                    let test = self.tuple(false, &[])?;
                    self.tag(format_args!("elif {test}"));
                    self.block_end()?;
                }
                "else" => {
                    self.tag("else");
                    self.block_end()?;
                    self.body(&["endif"])?;
                    break;
                }
                _ => break,
            }
        }
        self.tag("endif");
        Ok(())
    }

    fn set(&mut self) -> Result<(), String> {
        let target = self.target(&[])?;
        if self.skip("=") {
            let value = self.tuple(true, &[])?;
            // What a namespace holds may hold the namespace's old content, and so on: its depth is checked.
            match target.contains('.') {
                true => self.tag(format_args!("set {target} = __shallow({value})")),
                false => self.tag(format_args!("set {target} = {value}")),
            }
            return Ok(());
        }
        let mut filters = String::new();
        while self.skip("|") {
            filters = format!("{filters}|{}", self.filter()?);
        }
        self.tag(format_args!("set {target}{filters}"));
        self.enclosed("endset")
    }

    /// What is assigned to: a name, an attribute of a namespace, or several of these.
    fn target(&mut self, ends: &[&str]) -> Source {
        let mut targets = Vec::new();
        let mut is_tuple = false;
        loop {
            let at_end = match self.peek() {
                Some(Token::Name(name)) => name == "in",
                Some(Token::Operator(operator)) => {
                    *operator == ")" || *operator == "=" || ends.contains(operator)
                }
                _ => true,
            };
            if at_end {
                break;
            }
            if self.skip("(") {
                self.blocks += 1;
                if self.blocks > MAX_BLOCKS {
                    return self.error("a target is nested too deeply");
                }
                targets.push(format!("({})", self.target(&[])?));
                self.blocks -= 1;
                self.expect(")")?;
            } else {
                let name = self.name("a name to assign to")?;
                if ["true", "True", "false", "False", "none", "None"].contains(&name.as_str()) {
                    return self.error(format!("cannot assign to `{name}`"));
                }
                targets.push(match self.skip(".") {
                    true => format!("{name}.{}", self.name("an attribute")?),
                    false => name,
                });
            }
            if !self.skip(",") {
                break;
            }
            is_tuple = true;
        }
        match targets.len() {
            0 => self.error("expected a name to assign to"),
            1 if is_tuple => Ok(format!("{},", targets[0])),
            _ => Ok(targets.join(", ")),
        }
    }

    /// `(a, b=c)`, without the parentheses.
    fn signature(&mut self) -> Source {
        self.expect("(")?;
        let mut parameters = Vec::new();
        while !self.skip(")") {
            if !parameters.is_empty() {
                self.expect(",")?;
            }
            let name = self.name("the name of a parameter")?;
            parameters.push(match self.skip("=") {
                true => format!("{name}={}", self.expression()?),
                false => name,
            });
        }
        Ok(parameters.join(", "))
    }
}

/// A token as error messages show it.
pub(super) fn described(token: Option<&Token>) -> String {
    match token {
        None => "the end of the template".into(),
        Some(Token::Data(_)) => "text".into(),
        Some(Token::VariableBegin) => "`{{`".into(),
        Some(Token::VariableEnd) => "`}}`".into(),
        Some(Token::BlockBegin) => "`{%`".into(),
        Some(Token::BlockEnd) => "`%}`".into(),
        Some(Token::Name(name)) => format!("`{name}`"),
        Some(Token::Text(text)) => format!("{text:?}"),
        Some(Token::Integer(value)) => value.to_string(),
        Some(Token::Float(value)) => value.to_string(),
        Some(Token::Operator(operator)) => format!("`{operator}`"),
    }
}
