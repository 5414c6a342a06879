//! Bounds of grammars. The recursion, the time and the memory of the compiler grow with the grammar, so the grammar is
//! measured before it is compiled, in the form in which the compiler reads it ([`super::schema_bounds`], [`super::lark`]). The
//! measurement does not recurse.

use std::collections::{HashMap, HashSet};

use super::lark::{Lexeme, Source, Token};

/// Deepest nesting of JSON in a schema, and of brackets in a rule or a regular expression.
pub(super) const MAX_DEPTH: usize = 100;

/// Most names in a grammar: properties, required properties, definitions, rules, terminals.
pub(super) const MAX_NAMES: usize = 5_000;

/// Most bytes of all names, patterns and values that a grammar consists of, without descriptions.
pub(super) const MAX_TEXT: usize = 256 << 10;

/// Deepest recursion of the compiler, counted in nested schemas: if every reference were followed before the one before
/// it is finished.
const MAX_LEVELS: usize = 4_000;

/// Deepest recursion of the compiler, counted in rules and brackets.
const MAX_RULE_LEVELS: usize = 1_000;

/// Most alternatives of all rules. The compiler's steps take the square of a rule's alternatives.
const MAX_ALTERNATIVES: usize = 5_000;

/// Most repetitions and optional parts of one rule, terminal or regular expression. The compiler takes their square.
const MAX_REPETITIONS: usize = 1_000;

/// Most intersections of terminals.
const MAX_INTERSECTIONS: usize = 50;

/// Most sets of characters of a regular expression that name a class of Unicode (`\p`, `\w`), or ignore case. Each has
/// hundreds of ranges.
const MAX_CLASSES: usize = 2_000;

/// Size of a grammar for its compiler.
#[derive(Debug, Default)]
pub(super) struct Measure {
    pub values: usize,
    names: usize,
    pub references: usize,
    pub choices: usize,
    pub pattern_names: usize,
    pub remainders: f64,
    text: usize,
    schema_levels: usize,
    alternatives: usize,
    intersections: usize,
    classes: usize,
}

impl Measure {
    /// Adds a regular expression in the syntax of the crate `regex`.
    ///
    /// # Errors
    /// The bound that it exceeds.
    pub fn regex(&mut self, regex: &str) -> Result<(), String> {
        self.add_text(regex.len())?;
        self.expression(regex)
    }

    /// Measures a regular expression, except its length.
    pub fn expression(&mut self, regex: &str) -> Result<(), String> {
        let (mut depth, mut repetitions) = (0usize, 0);
        let (mut last, mut escaped) = (0, false);
        for byte in regex.bytes() {
            // Brackets and operators count in sets of characters as well.
            match byte {
                b'p' | b'P' | b'w' | b'W' | b'd' | b'D' | b's' | b'S' if escaped => self.classes += 1,
                _ if escaped => {}
                b'(' => depth += 1,
                b')' => depth = depth.saturating_sub(1),
                // Flags of a group, and the braces of `\p{L}` and `\x{41}`.
                b'?' if last == b'(' => {}
                b'{' if last == b'\\' => {}
                b'?' | b'*' | b'+' | b'{' => repetitions += 1,
                _ => {}
            }
            // An escaped letter that may have braces counts as its backslash.
            let has_braces = escaped && matches!(byte, b'p' | b'P' | b'x' | b'u' | b'U');
            last = if has_braces {
                b'\\'
            } else if escaped {
                0
            } else {
                byte
            };
            escaped = byte == b'\\' && !escaped;
            at_most("levels of nested groups", depth, MAX_DEPTH)?;
        }
        at_most("repetitions in one expression", repetitions, MAX_REPETITIONS)?;
        at_most("classes of characters", self.classes, MAX_CLASSES)
    }

    /// Adds a Lark grammar, with the schemas in it.
    ///
    /// # Errors
    /// The bound that it exceeds.
    pub fn lark(&mut self, source: &Source) -> Result<(), String> {
        let mut scope = Scope::default();
        // Enclosing grammars, with their open braces.
        let mut outer: Vec<(Scope<'_>, usize)> = Vec::new();
        let (mut depth, mut braces) = (0usize, 0usize);
        let mut nested = false;
        for lexeme in source.lexemes() {
            let text = source.text_of(lexeme);
            self.lexeme(lexeme, text)?;
            match lexeme.token {
                Token::Newline => scope.is_at_start = true,
                // An alternative on a line of its own continues the item before it.
                Token::Or => scope.is_at_start = false,
                Token::Rule | Token::Terminal if scope.is_at_start => {
                    self.add_names(1)?;
                    scope.define(text, lexeme.token == Token::Rule);
                }
                Token::Statement => scope.define("", false),
                Token::Rule | Token::Terminal => scope.item().references.push((text, depth)),
                _ => {}
            }
            if scope.item().is_rule {
                self.alternatives += usize::from(lexeme.token == Token::Or);
                at_most("alternatives in rules", self.alternatives, MAX_ALTERNATIVES)?;
            }
            let repeats = matches!(lexeme.token, Token::Operator | Token::Tilde | Token::OpenBrace)
                || (lexeme.token == Token::Open && text == "[");
            scope.item().repetitions += usize::from(repeats);
            at_most("repetitions and optional parts in one rule", scope.item().repetitions, MAX_REPETITIONS)?;
            match lexeme.token {
                Token::Open | Token::OpenBrace => depth += 1,
                Token::Close | Token::CloseBrace => depth = depth.saturating_sub(1),
                _ => {}
            }
            let item = scope.item();
            item.depth = item.depth.max(depth);
            at_most("levels of nested brackets", depth, MAX_DEPTH)?;
            match lexeme.token {
                Token::OpenBrace if nested => {
                    outer.push((std::mem::take(&mut scope), braces));
                    braces = 0;
                }
                Token::OpenBrace => braces += 1,
                Token::CloseBrace if braces > 0 => braces -= 1,
                Token::CloseBrace => {
                    if let Some((enclosing, open)) = outer.pop() {
                        std::mem::replace(&mut scope, enclosing).check_levels()?;
                        braces = open;
                    }
                }
                _ => {}
            }
            nested = lexeme.token == Token::Nested;
        }
        scope.check_levels()?;
        outer.into_iter().try_for_each(|(scope, _)| scope.check_levels())
    }

    /// Measures a part of a Lark grammar by itself.
    fn lexeme(&mut self, lexeme: &Lexeme, text: &str) -> Result<(), String> {
        match lexeme.token {
            Token::Newline => {}
            Token::Regex => self.regex(text)?,
            _ => self.add_text(text.len())?,
        }
        self.intersections += usize::from(lexeme.token == Token::And);
        at_most("intersections", self.intersections, MAX_INTERSECTIONS)?;
        match &lexeme.value {
            Some(json) if lexeme.token == Token::Substring => self.add_text(json.range.len()),
            Some(json) => self.schema(&json.value),
            None => Ok(()),
        }
    }

    pub fn add_schema_levels(&mut self, levels: usize) -> Result<(), String> {
        self.schema_levels += levels;
        at_most("levels, references followed", self.schema_levels, MAX_LEVELS)
    }

    pub fn add_names(&mut self, names: usize) -> Result<(), String> {
        self.names += names;
        at_most("names", self.names, MAX_NAMES)
    }

    pub fn add_text(&mut self, bytes: usize) -> Result<(), String> {
        self.text += bytes;
        at_most("bytes of names and values", self.text, MAX_TEXT)
    }
}

/// Rules, terminals and statements of one grammar.
#[derive(Debug)]
struct Scope<'s> {
    items: Vec<Item<'s>>,
    /// True at the beginning of a line.
    is_at_start: bool,
}

/// A rule, a terminal or a statement.
#[derive(Debug, Default)]
struct Item<'s> {
    /// Its name, empty for statements.
    name: &'s str,
    is_rule: bool,
    /// Names of rules and terminals, with the number of open brackets.
    references: Vec<(&'s str, usize)>,
    depth: usize,
    repetitions: usize,
}

impl Default for Scope<'_> {
    fn default() -> Self {
        Self { items: vec![Item::default()], is_at_start: true }
    }
}

impl<'s> Scope<'s> {
    fn define(&mut self, name: &'s str, is_rule: bool) {
        // These characters are no part of the name.
        let name = name.strip_prefix('!').unwrap_or(name);
        let name = name.strip_prefix('?').unwrap_or(name);
        self.items.push(Item { name, is_rule, ..Item::default() });
        self.is_at_start = false;
    }

    fn item(&mut self) -> &mut Item<'s> {
        if self.items.is_empty() {
            self.items.push(Item::default());
        }
        let last = self.items.len() - 1;
        &mut self.items[last]
    }

    /// Checks the depth of the compiler's recursion. It compiles a rule where it first meets its name.
    fn check_levels(&self) -> Result<(), String> {
        let by_name: HashMap<&str, usize> =
            self.items.iter().enumerate().map(|(index, item)| (item.name, index)).collect();
        let mut met = HashSet::new();
        // Statements come first, then the rule `start`. Others are met from these or not at all.
        let statements = (0..self.items.len()).filter(|&index| self.items[index].name.is_empty());
        for root in statements.chain(by_name.get("start").copied()) {
            // Items in progress, with the level at which each began and the next one of its references.
            let mut path = vec![(root, 0, 0)];
            met.insert(root);
            while let Some((index, level, next)) = path.last_mut() {
                let item = &self.items[*index];
                at_most("levels of rules in rules", *level + item.depth, MAX_RULE_LEVELS)?;
                let Some((name, depth)) = item.references.get(*next) else {
                    path.pop();
                    continue;
                };
                *next += 1;
                let below = *level + 1 + depth;
                if let Some(&index) = by_name.get(name)
                    && met.insert(index)
                {
                    path.push((index, below, 0));
                }
            }
        }
        Ok(())
    }
}

pub(super) fn at_most(what: &str, count: usize, most: usize) -> Result<(), String> {
    if count <= most { Ok(()) } else { Err(format!("it has {count} {what}; at most {most} are compiled")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lark_is_measured_with_its_schemas() {
        let rules = |count: usize| {
            let rules: String = (0..count).map(|i| format!("r{i}: r{}\n", i + 1)).collect();
            format!("start: r0\n{rules}")
        };
        let chain = |links: usize| {
            let link = |i: usize| format!("\"a{i}\": {{\"$ref\": \"#/$defs/a{}\"}}, ", i + 1);
            let links: String = (0..links).map(link).collect();
            format!("{{\"$comment\": \"//\", \"$defs\": {{{links}\"z\": true}}, \"$ref\": \"#/$defs/a0\"}}")
        };
        let schema = |links| format!("start: %json {}\nx: \"y\"", chain(links));
        let brackets = |depth: usize| format!("start: {}\"a\"{}\n", "(".repeat(depth), ")".repeat(depth));
        let cases = [
            (rules(990), None),
            // Rules that nothing leads to are not compiled.
            (rules(4_001).replace("start: r0", "start: \"a\""), None),
            (rules(1_001), Some("levels of rules in rules")),
            (format!("start: %lark {{ {} }}", rules(1_001)), Some("levels of rules in rules")),
            (format!("start: %lark {{ {}", rules(1_001)), Some("levels of rules in rules")),
            (rules(5_001), Some("5001 names")),
            (schema(900), None),
            (schema(1_500), Some("different references")),
            (format!("# \"\n{}", schema(1_500)), Some("different references")),
            (format!("x: \"y\" # it's 5\" long\n{}", schema(1_500)), Some("different references")),
            (format!("x: <[1-2]> // \"/\n{}", schema(1_500)), Some("different references")),
            (format!("x: <\"> /\\/\"/\n{}", schema(1_500)), Some("different references")),
            (format!("%ignore /#\"/\n{}", schema(1_500)), Some("different references")),
            (format!("start: %lark {{\n{}\n}}", schema(1_500)), Some("different references")),
            (brackets(90), None),
            (brackets(10_000), Some("levels of nested brackets")),
            (format!("start: {}", "a{".repeat(10_000)), Some("levels of nested brackets")),
            (format!("start: {}", "%lark {start:".repeat(10_000)), Some("levels of nested brackets")),
            (format!("start: /{}/", "(".repeat(200)), Some("levels of nested groups")),
            (format!("start: \"{}\"", "x".repeat(300 << 10)), Some("bytes of names and values")),
            (format!("start: \"a\" # {}", "x".repeat(300 << 10)), None),
            (format!("start: {}\"b\"", "\"a\"|".repeat(5_001)), Some("alternatives in rules")),
            (format!("start: T\nT: {}\"b\"", "\"a\"|".repeat(20_000)), None),
            (format!("start: {}\nx: \"a\"", "x? ".repeat(1_001)), Some("optional parts in one rule")),
            (format!("start: {}\nx: \"a\"", "[x] ".repeat(1_001)), Some("optional parts in one rule")),
            (format!("start: /{}/", "[a-z]?".repeat(1_001)), Some("repetitions in one expression")),
            (format!("start: /{}/", r"(?:[\x{41}\?\*\{])".repeat(2_000)), None),
            (format!("start: T\nT: {}/b/", "/a/ & ".repeat(51)), Some("intersections")),
            (format!("start: /{}/", r"\p{L}".repeat(2_001)), Some("classes of characters")),
        ];
        for (lark, expected) in cases {
            let measured = Measure::default().lark(&Source::read(&lark).unwrap());
            let agrees = match (&measured, expected) {
                (Ok(()), None) => true,
                (Err(problem), Some(expected)) => problem.contains(expected),
                _ => false,
            };
            assert!(agrees, "{measured:?} instead of {expected:?}: {lark:.200}");
        }
    }
}
