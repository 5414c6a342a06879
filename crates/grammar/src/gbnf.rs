//! GBNF, the format of llama.cpp's grammars, translated to llguidance's Lark.
//!
//! [`read`] parses the text. GBNF derives characters one by one, but the compiler's lexer matches terminals greedily, so
//! [`regular`] finds the parts that can be terminals, and [`lexemes`] splits those whose longest match could be wrong.

mod charset;
mod lexemes;
mod occurrences;
mod overlap;
#[cfg(test)]
mod random;
mod read;
mod regular;
#[cfg(test)]
mod tests;

use llguidance::toktrie::TokTrie;

use self::charset::CharSet;

/// Index of a node in [`Source::nodes`].
type NodeId = usize;

/// A grammar as it was read.
#[derive(Debug, Default)]
struct Source {
    nodes: Vec<Node>,
    /// The bodies of the rules.
    rules: Vec<NodeId>,
    /// The index of the rule `root`.
    root: usize,
}

/// A part of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Node {
    /// A character of a set.
    Class(CharSet),
    /// Characters one after the other, at least one.
    Text(Box<str>),
    /// A token of the model, or any other token.
    Token { id: u32, is_negated: bool },
    /// Reference to a rule, by its index.
    Rule(usize),
    /// Parts one after the other; none is the empty text.
    Sequence(Vec<NodeId>),
    /// One of several nodes.
    Choice(Vec<NodeId>),
    /// A repeated node. Without `max` there is no limit.
    Repeat { item: NodeId, min: u32, max: Option<u32> },
}

impl Source {
    fn add(&mut self, node: Node) -> NodeId {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    /// Returns the children of a node, without following rules.
    fn children(&self, node: NodeId) -> &[NodeId] {
        match &self.nodes[node] {
            Node::Sequence(items) | Node::Choice(items) => items,
            Node::Repeat { item, .. } => std::slice::from_ref(item),
            Node::Class(_) | Node::Text(_) | Node::Token { .. } | Node::Rule(_) => &[],
        }
    }

    /// Returns all nodes of a rule's body.
    fn body(&self, rule: usize) -> impl Iterator<Item = NodeId> {
        let mut rest = vec![self.rules[rule]];
        std::iter::from_fn(move || {
            let node = rest.pop()?;
            rest.extend(self.children(node));
            Some(node)
        })
    }
}

/// Translates a grammar.
///
/// # Errors
/// Line and column of an error, with a description.
pub(super) fn to_lark(text: &str, tokens: &TokTrie) -> Result<String, String> {
    let mut source = read::read(text, tokens)?;
    let regular = regular::prepare(&mut source);
    Ok(lexemes::write(&mut source, &regular, tokens.eos_tokens()))
}

/// Returns true if a grammar is GBNF, and not Lark: its first rule has `::=`.
pub(super) fn is_gbnf(text: &str) -> bool {
    let mut rest = text.trim_start_matches('\u{feff}').trim_start();
    while rest.starts_with('#') || rest.starts_with("//") {
        rest = rest.find('\n').map_or("", |end| rest[end..].trim_start());
    }
    let after_name =
        rest.trim_start_matches(|c: char| c.is_alphanumeric() || "_-?!%".contains(c)).trim_start();
    if after_name.len() < rest.len() && after_name.starts_with([':', '.', '[', '{']) {
        return after_name.starts_with("::=");
    }
    text.contains("::=")
}
