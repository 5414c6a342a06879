//! Expressions: jinja2's grammar, written out again so that minijinja evaluates them as Python would.
//!
//! Operators, subscripts and method calls become calls of the functions in [`super::operators`]; what means the same
//! in both (names, attributes, `and`, filters, tests) stays. Each function here reads one level of the grammar of
//! `jinja2/parser.py` and returns minijinja's source for it, which never needs parentheses around it.

use super::{lexer::Token, methods, translate::Translator};

/// Nesting that no template needs; the parsers are recursive.
const MAX_DEPTH: usize = 60;

pub(super) type Source = Result<String, String>;

impl Translator {
    /// `a, b` is a tuple, `a` is not. `ends` are names that end it.
    pub(super) fn tuple(&mut self, conditional: bool, ends: &[&str]) -> Source {
        let mut items = Vec::new();
        let mut is_tuple = false;
        loop {
            let at_end =
                matches!(self.peek(), Some(Token::VariableEnd | Token::BlockEnd | Token::Operator(")")))
                    || matches!(self.peek(), Some(Token::Name(name)) if ends.contains(&name.as_str()));
            if at_end {
                break;
            }
            items.push(if conditional { self.expression()? } else { self.or()? });
            if !self.skip(",") {
                break;
            }
            is_tuple = true;
        }
        match items.len() {
            1 if !is_tuple => Ok(items.swap_remove(0)),
            0 => self.error("expected an expression"),
            _ => Ok(format!("__tuple({})", items.join(", "))),
        }
    }

    /// `a if b else c`
    pub(super) fn expression(&mut self) -> Source {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return self.error("expressions are nested too deeply");
        }
        let mut expression = self.or()?;
        while self.skip_name("if") {
            let test = self.or()?;
            expression = match self.skip_name("else") {
                true => format!("({expression} if {test} else {})", self.expression()?),
                false => format!("({expression} if {test})"),
            };
        }
        self.depth -= 1;
        Ok(expression)
    }

    pub(super) fn or(&mut self) -> Source {
        let mut operands = vec![self.and()?];
        while self.skip_name("or") {
            operands.push(self.and()?);
        }
        Ok(joined(operands, " or "))
    }

    fn and(&mut self) -> Source {
        let mut operands = vec![self.not()?];
        while self.skip_name("and") {
            operands.push(self.not()?);
        }
        Ok(joined(operands, " and "))
    }

    fn not(&mut self) -> Source {
        let mut negations = 0;
        while self.skip_name("not") {
            negations += 1;
        }
        let operand = self.compare()?;
        Ok(match negations {
            0 => operand,
            // Twice is a conversion to a boolean.
            n if n % 2 == 0 => format!("(not (not {operand}))"),
            _ => format!("(not {operand})"),
        })
    }

    fn compare(&mut self) -> Source {
        let mut left = self.sum()?;
        let mut comparisons = Vec::new();
        loop {
            let function = match self.peek() {
                Some(Token::Operator("==")) => "__eq",
                Some(Token::Operator("!=")) => "__ne",
                Some(Token::Operator("<")) => "__lt",
                Some(Token::Operator("<=")) => "__le",
                Some(Token::Operator(">")) => "__gt",
                Some(Token::Operator(">=")) => "__ge",
                Some(Token::Name(name)) if name == "in" => "__in",
                Some(Token::Name(name)) if name == "not" && self.next_is_name("in") => {
                    self.advance();
                    "__not_in"
                }
                _ => break,
            };
            self.advance();
            let right = self.sum()?;
            comparisons.push(format!("{function}({left}, {right})"));
            left = right;
        }
        Ok(if comparisons.is_empty() { left } else { joined(comparisons, " and ") })
    }

    fn sum(&mut self) -> Source {
        let mut terms = vec![self.concatenation()?];
        loop {
            if self.skip("+") {
                terms.push(self.concatenation()?);
            } else if self.skip("-") {
                let left = called("__add", terms);
                terms = vec![format!("({left} - {})", self.concatenation()?)];
            } else {
                return Ok(called("__add", terms));
            }
        }
    }

    fn concatenation(&mut self) -> Source {
        let mut parts = vec![self.product()?];
        while self.skip("~") {
            parts.push(self.product()?);
        }
        Ok(called("__cat", parts))
    }

    fn product(&mut self) -> Source {
        let mut left = self.power()?;
        loop {
            left = if self.skip("*") {
                format!("__mul({left}, {})", self.power()?)
            } else if self.skip("%") {
                format!("__mod({left}, {})", self.power()?)
            } else if self.skip("//") {
                format!("({left} // {})", self.power()?)
            } else if self.skip("/") {
                format!("({left} / {})", self.power()?)
            } else {
                return Ok(left);
            };
        }
    }

    fn power(&mut self) -> Source {
        let mut left = self.unary(true)?;
        while self.skip("**") {
            left = format!("({left} ** {})", self.unary(true)?);
        }
        Ok(left)
    }

    fn unary(&mut self, filtered: bool) -> Source {
        let operand = if self.skip("-") {
            format!("(-{})", self.nested(|this| this.unary(false))?)
        } else if self.skip("+") {
            self.nested(|this| this.unary(false))?
        } else {
            self.primary()?
        };
        let operand = self.postfix(operand)?;
        if filtered { self.filters(operand) } else { Ok(operand) }
    }

    fn nested(&mut self, parse: impl FnOnce(&mut Self) -> Source) -> Source {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return self.error("expressions are nested too deeply");
        }
        let source = parse(self);
        self.depth -= 1;
        source
    }

    fn primary(&mut self) -> Source {
        match self.next() {
            Some(Token::Name(name)) => Ok(match name.as_str() {
                "True" => "true".into(),
                "False" => "false".into(),
                "None" => "none".into(),
                _ => name,
            }),
            Some(Token::Text(mut text)) => {
                while let Some(Token::Text(more)) = self.peek() {
                    text.push_str(more);
                    self.advance();
                }
                Ok(quoted(&text))
            }
            Some(Token::Integer(value)) => Ok(value.to_string()),
            Some(Token::Float(value)) => Ok(format!("{value:?}")),
            Some(Token::Operator("(")) => {
                if self.skip(")") {
                    return Ok("__tuple()".into());
                }
                let inside = self.nested(|this| this.tuple(true, &[]))?;
                self.expect(")")?;
                Ok(inside)
            }
            Some(Token::Operator("[")) => {
                let mut items = Vec::new();
                while !self.skip("]") {
                    items.push(self.expression()?);
                    if !self.skip(",") {
                        self.expect("]")?;
                        break;
                    }
                }
                Ok(format!("__list({})", items.join(", ")))
            }
            Some(Token::Operator("{")) => {
                let mut items = Vec::new();
                while !self.skip("}") {
                    let key = self.expression()?;
                    self.expect(":")?;
                    items.push(format!("{key}, {}", self.expression()?));
                    if !self.skip(",") {
                        self.expect("}")?;
                        break;
                    }
                }
                Ok(format!("__dict({})", items.join(", ")))
            }
            other => self.error(format!("unexpected {}", super::translate::described(other.as_ref()))),
        }
    }

    /// Attributes, subscripts and calls.
    pub(super) fn postfix(&mut self, mut base: String) -> Source {
        loop {
            if self.skip(".") {
                base = match self.next() {
                    Some(Token::Name(name)) if self.peek() == Some(&Token::Operator("(")) => {
                        let arguments = self.arguments()?;
                        let separator = if arguments.is_empty() { "" } else { ", " };
                        format!("__call({base}, {}{separator}{arguments})", quoted(&name))
                    }
                    // In jinja2, an attribute is a method before it is an item.
                    Some(Token::Name(name)) if methods::is_dict_method(&name) => {
                        format!("__attribute({base}, {})", quoted(&name))
                    }
                    Some(Token::Name(name)) => format!("{base}.{name}"),
                    Some(Token::Integer(index)) => format!("__item({base}, {index})"),
                    other => {
                        let found = super::translate::described(other.as_ref());
                        return self.error(format!("expected an attribute after the dot, not {found}"));
                    }
                };
            } else if self.skip("[") {
                base = self.subscript(&base)?;
            } else if self.peek() == Some(&Token::Operator("(")) {
                let arguments = match base.as_str() {
                    // As in assignments to it: what a namespace holds may nest without end.
                    "namespace" => self.arguments_as(|value| format!("__shallow({value})"))?,
                    _ => self.arguments()?,
                };
                base = format!("{base}({arguments})");
            } else {
                return Ok(base);
            }
        }
    }

    fn subscript(&mut self, base: &str) -> Source {
        let mut parts = Vec::new();
        let mut is_slice = false;
        while !self.skip("]") {
            if self.skip(":") {
                is_slice = true;
                if parts.is_empty() {
                    parts.push("none".into());
                }
                let empty = matches!(self.peek(), Some(Token::Operator(":" | "]")));
                parts.push(if empty { "none".into() } else { self.expression()? });
            } else if parts.is_empty() {
                parts.push(self.expression()?);
            } else {
                return self.error("malformed subscript");
            }
        }
        match (is_slice, parts.len()) {
            (false, 1) => Ok(format!("__item({base}, {})", parts[0])),
            (true, 2 | 3) => Ok(format!("__slice({base}, {})", parts.join(", "))),
            _ => self.error("malformed subscript"),
        }
    }

    /// `(a, *b, c=d, **e)`, without the parentheses.
    pub(super) fn arguments(&mut self) -> Source {
        self.arguments_as(|value| value)
    }

    /// The same with something done to the keyword arguments.
    fn arguments_as(&mut self, keyword: impl Fn(String) -> String) -> Source {
        self.expect("(")?;
        let mut arguments = Vec::new();
        while !self.skip(")") {
            arguments.push(if self.skip("*") {
                format!("*{}", self.expression()?)
            } else if self.skip("**") {
                format!("**{}", self.expression()?)
            } else {
                match self.peek() {
                    Some(Token::Name(name)) if self.next_is("=") => {
                        let name = name.clone();
                        self.advance();
                        self.advance();
                        format!("{name}={}", keyword(self.expression()?))
                    }
                    _ => self.expression()?,
                }
            });
            if !self.skip(",") {
                self.expect(")")?;
                break;
            }
        }
        Ok(arguments.join(", "))
    }

    /// Filters and tests, one after the other.
    fn filters(&mut self, mut base: String) -> Source {
        loop {
            if self.skip("|") {
                base = format!("{base}|{}", self.filter()?);
            } else if self.skip_name("is") {
                base = self.test(&base)?;
            } else {
                return Ok(base);
            }
        }
    }

    /// A filter's name with its arguments.
    pub(super) fn filter(&mut self) -> Source {
        let name = self.name("the name of a filter")?;
        Ok(match self.peek() {
            Some(Token::Operator("(")) => format!("{name}({})", self.arguments()?),
            _ => name,
        })
    }

    fn test(&mut self, base: &str) -> Source {
        let negated = self.skip_name("not");
        let name = self.name("the name of a test")?;
        let arguments = match self.peek() {
            Some(Token::Operator("(")) => self.arguments()?,
            Some(Token::Name(word)) if word == "is" => {
                return self.error("tests with `is` cannot be chained");
            }
            Some(Token::Name(word)) if ["else", "or", "and"].contains(&word.as_str()) => String::new(),
            Some(
                Token::Name(_)
                | Token::Text(_)
                | Token::Integer(_)
                | Token::Float(_)
                | Token::Operator("[" | "{"),
            ) => {
                let argument = self.primary()?;
                self.postfix(argument)?
            }
            _ => String::new(),
        };
        let not = if negated { "not " } else { "" };
        Ok(format!("({base} is {not}{name}({arguments}))"))
    }
}

fn joined(mut operands: Vec<String>, operator: &str) -> String {
    match operands.len() {
        1 => operands.swap_remove(0),
        _ => format!("({})", operands.join(operator)),
    }
}

fn called(function: &str, mut operands: Vec<String>) -> String {
    match operands.len() {
        1 => operands.swap_remove(0),
        _ => format!("{function}({})", operands.join(", ")),
    }
}

/// A string literal.
pub(super) fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}
