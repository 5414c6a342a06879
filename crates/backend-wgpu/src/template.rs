//! Templates for WGSL: external constants, repeated lines, conditional parts.
//!
//! A line `//% for i in 0..N` repeats the lines up to its `//% end` with `${i}` replaced, also in the ranges of inner
//! loops. `//% if NAME`, with an optional `//% else`, includes lines if the constant exists and is not zero. Loops over
//! registers are unrolled in this way because not every driver unrolls them.
//!
//! The first lines of a file declare the functions and structures that it `provides` to other files and `needs` from them, with `//% `.

use std::fmt::{self, Write};

/// A constant's value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// `u32`
    U(u32),
    /// `i32`
    I(i32),
    /// `f32`
    F(f32),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::U(x) => write!(f, "{x}u"),
            Self::I(x) => write!(f, "i32({x})"),
            // Every float has a bit pattern, but WGSL has no way to write one as a constant; `{:e}` is exact.
            Self::F(x) => write!(f, "f32({x:e})"),
        }
    }
}

/// Constants by name.
pub type Constants = Vec<(&'static str, Value)>;

/// Constants that differ between models of one kind. On software drivers, where compilation dominates, they are
/// arguments, so that kernels are compiled once for all models.
pub const SHAPES: &[&str] = &[
    "ACT_BLOCKS",
    "BLOCKS",
    "CHUNKS",
    "EACH",
    "EPS",
    "FACTOR",
    "FIRST_EXPERT",
    "FROM_FIRST",
    "FROM_HELD",
    "GATED_AT",
    "GATE_STRIDE",
    "HEADS",
    "HEAD_TILES",
    "HELD_EXPERTS",
    "INVERSE_WIDTH",
    "KV_GROUP",
    "KV_HEADS",
    "K_END",
    "K_EPS",
    "K_FIRST",
    "K_STRIDE",
    "LAYER_SLOT_AT",
    "LIMIT",
    "LOW_BITS",
    "NORM_GROUP",
    "ORIGINAL",
    "OUTPUTS",
    "OUT_FIRST",
    "OUT_SCALE",
    "OUT_STRIDE",
    "OWN_BLOCKS",
    "PAGE",
    "PAGE_WORDS",
    "PAIRS",
    "PLACES_OF_ROW",
    "POST_EPS",
    "QUERIES_PER_KV",
    "Q_END",
    "Q_EPS",
    "Q_HEADS",
    "Q_STRIDE",
    "REACH",
    "SCALE",
    "SLOPE",
    "SLOTS",
    "SOFT_CAP",
    "SQUARES",
    "TO_FIRST",
    "TO_HELD",
    "TYPE_IDS",
    "UNITS_0",
    "UNITS_1",
    "UNITS_2",
    "UP_FIRST",
    "UP_STRIDE",
    "USED",
    "VOCAB",
    "V_EPS",
    "V_FIRST",
    "V_STRIDE",
    "WHOLE",
    "WIDTH",
    "WINDOW",
];

impl Value {
    /// Its bits.
    pub fn bits(self) -> u32 {
        match self {
            Self::U(x) => x,
            Self::I(x) => x as u32,
            Self::F(x) => x.to_bits(),
        }
    }

    /// Returns the expression with which a kernel reads argument number `index`.
    fn argument(self, index: usize) -> String {
        match self {
            Self::U(_) => format!("args.constant_{index}"),
            Self::I(_) => format!("bitcast<i32>(args.constant_{index})"),
            Self::F(_) => format!("bitcast<f32>(args.constant_{index})"),
        }
    }
}

/// Declares the constants and expands the directives of some files, one after the other. The constants in `arguments` are not
/// declared: where a file names one, the kernel reads an argument (`args.wgsl`), in their order.
///
/// # Panics
/// On a directive that is not well-formed: the files are part of this crate.
pub fn expand(files: &[&str], constants: &Constants, arguments: &Constants) -> String {
    let mut out = String::new();
    let enables = files.iter().flat_map(|file| file.lines()).filter(|line| is_enable(line));
    enables.for_each(|line| out = format!("{out}{line}\n"));
    for (name, value) in constants.iter().filter(|constant| !arguments.contains(constant)) {
        let _ = writeln!(out, "const {name} = {value};");
    }
    let scope = Scope { constants, arguments, variables: Vec::new() };
    for file in files {
        let lines: Vec<&str> =
            file.lines().filter(|line| !is_enable(line) && header(line).is_none()).collect();
        scope.block(&lines, &mut out);
    }
    out
}

/// Returns true for a line that enables an extension, which must precede all others.
fn is_enable(line: &str) -> bool {
    line.starts_with("enable ")
}

/// Returns the words of a line of a file's header: functions and structures that it `provides`, and those that it `needs` from
/// other files.
fn header(line: &str) -> Option<&str> {
    let words = line.strip_prefix("//% ")?;
    let is_directive = ["if ", "for ", "else", "end"].iter().any(|directive| words.starts_with(directive));
    (!is_directive).then_some(words)
}

/// Names that directives can use.
struct Scope<'a> {
    constants: &'a Constants,
    arguments: &'a Constants,
    variables: Vec<(&'a str, u32)>,
}

impl<'a> Scope<'a> {
    fn block(&self, lines: &[&'a str], out: &mut String) {
        let mut at = 0;
        while let Some(&line) = lines.get(at) {
            let Some(directive) = directive(line) else {
                self.line(line, out);
                at += 1;
                continue;
            };
            let (middle, end) = ends(lines, at);
            let words: Vec<&str> = directive.split_whitespace().collect();
            match words[..] {
                ["for", variable, "in", range] => {
                    let (from, to) = range.split_once("..").expect("a range");
                    for i in self.number(from)..self.number(to) {
                        let mut variables = self.variables.clone();
                        variables.push((variable, i));
                        Scope { variables, ..*self }.block(&lines[at + 1..end], out);
                    }
                }
                ["if", name] => match (self.holds(&self.replaced(name)), middle) {
                    (true, middle) => self.block(&lines[at + 1..middle.unwrap_or(end)], out),
                    (false, Some(middle)) => self.block(&lines[middle + 1..end], out),
                    (false, None) => {}
                },
                _ => panic!("unknown directive {directive}"),
            }
            at = end + 1;
        }
    }

    fn line(&self, line: &str, out: &mut String) {
        let mut line = self.replaced(line);
        if !self.arguments.is_empty() {
            line = self.with_arguments(&line);
        }
        out.push_str(&line);
        out.push('\n');
    }

    fn replaced(&self, line: &str) -> String {
        self.variables.iter().fold(line.to_owned(), |line, (name, value)| {
            line.replace(&format!("${{{name}}}"), &value.to_string())
        })
    }

    fn with_arguments(&self, line: &str) -> String {
        let (code, comment) = line.split_at(line.find("//").unwrap_or(line.len()));
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let mut out = String::new();
        let mut rest = code;
        while let Some(start) = rest.find(is_word) {
            let word = &rest[start..];
            let word = &word[..word.find(|c| !is_word(c)).unwrap_or(word.len())];
            out.push_str(&rest[..start]);
            match self.arguments.iter().position(|(name, _)| *name == word) {
                Some(index) => out.push_str(&self.arguments[index].1.argument(index)),
                None => out.push_str(word),
            }
            rest = &rest[start + word.len()..];
        }
        out + rest + comment
    }

    fn constant(&self, name: &str) -> Option<Value> {
        self.constants.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    fn holds(&self, name: &str) -> bool {
        self.constant(name).is_some_and(|value| value != Value::U(0))
    }

    fn number(&self, text: &str) -> u32 {
        let text = self.replaced(text);
        text.parse().ok().unwrap_or_else(|| match self.constant(&text) {
            Some(Value::U(number)) => number,
            _ => panic!("no number {text}"),
        })
    }
}

/// The lines of this directive's `else`, if it has one, and `end`.
fn ends(lines: &[&str], at: usize) -> (Option<usize>, usize) {
    let (mut depth, mut middle) = (0, None);
    for (index, line) in lines.iter().enumerate().skip(at) {
        match directive(line).map(|directive| directive.split(' ').next().unwrap_or_default()) {
            Some("for" | "if") => depth += 1,
            Some("else") if depth == 1 => middle = Some(index),
            Some("end") => {
                depth -= 1;
                if depth == 0 {
                    return (middle, index);
                }
            }
            _ => {}
        }
    }
    panic!("no end for {}", lines[at])
}

fn directive(line: &str) -> Option<&str> {
    line.trim_start().strip_prefix("//% ").map(str::trim)
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use super::*;

    #[test]
    fn constants_become_arguments() {
        let constants = vec![("A", Value::U(2)), ("AB", Value::F(0.5)), ("C", Value::I(-1))];
        let file = "\
//% if A
let x = A + AA * AB; // A
//% end
let y = C;";
        assert_eq!(
            expand(&[file], &constants, &constants[..2].to_vec()),
            "const C = i32(-1);\nlet x = args.constant_0 + AA * bitcast<f32>(args.constant_1); // A\nlet y = C;\n"
        );
    }

    /// A file's name, and the functions and structures that it provides and needs.
    type Header = (String, BTreeSet<String>, BTreeSet<String>);

    /// Returns the header of a file that its first lines declare.
    fn declared(name: &str, text: &str) -> Header {
        let (mut provides, mut needs, mut has_provided) = (BTreeSet::new(), BTreeSet::new(), false);
        for word in text.lines().filter_map(header).flat_map(str::split_whitespace) {
            match word {
                "provides" => has_provided = false,
                "needs" => has_provided = true,
                word if has_provided => _ = needs.insert(word.to_owned()),
                word => _ = provides.insert(word.to_owned()),
            }
        }
        (name.to_owned(), provides, needs)
    }

    /// Returns the words of a text without comments, each with the word before it and true if it is called.
    fn words(text: &str) -> Vec<(String, String, bool)> {
        let (mut words, mut before) = (Vec::new(), String::new());
        for line in text.lines() {
            let mut rest = line.split("//").next().unwrap_or_default();
            let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            while let Some(start) = rest.find(is_word) {
                let word = rest[start..].split(|c| !is_word(c)).next().unwrap_or_default().to_owned();
                rest = &rest[start + word.len()..];
                words.push((before, word.clone(), rest.trim_start().starts_with('(')));
                before = word;
            }
        }
        words
    }

    #[test]
    fn files_declare_what_they_provide_and_need() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/shaders");
        let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
        let files: Vec<(String, String)> = files
            .map(|path| {
                (path.file_stem().unwrap().to_str().unwrap().to_owned(), fs::read_to_string(path).unwrap())
            })
            .collect();
        let is_defined = |before: &str| ["fn", "struct", "alias"].contains(&before);
        let own = |text: &str| -> BTreeSet<String> {
            let words =
                words(text).into_iter().filter(|(before, word, _)| is_defined(before) && word != "main");
            words.map(|(_, word, _)| word).collect()
        };
        let all: BTreeSet<String> = files.iter().flat_map(|(_, text)| own(text)).collect();
        let needs = |text: &str| -> BTreeSet<String> {
            let own = own(text);
            let used = words(text).into_iter().filter(|(_, word, is_called)| {
                // A function is called, and a structure is named.
                let is_type = word.starts_with(|c: char| c.is_ascii_uppercase());
                all.contains(word) && !own.contains(word) && (*is_called || is_type)
            });
            used.map(|(_, word, _)| word).collect()
        };
        let needed: BTreeSet<String> = files.iter().flat_map(|(_, text)| needs(text)).collect();
        for (name, text) in &files {
            let provides = own(text).intersection(&needed).cloned().collect();
            assert_eq!(declared(name, text), (name.clone(), provides, needs(text)));
        }
    }

    #[test]
    fn directives_expand() {
        let file = "\
//% for i in 0..N
let a_${i} = ${i}u;
//% for j in 1..3
b(${i}, ${j});
//% end
//% for j in 0..M_${i}
c(${i});
//% end
//% end
//% if ON
on
//% if OFF
never
//% else
also
//% end
//% else
off
//% end";
        let constants = vec![
            ("N", Value::U(2)),
            ("M_0", Value::U(0)),
            ("M_1", Value::U(1)),
            ("ON", Value::U(1)),
            ("OFF", Value::U(0)),
            ("X", Value::F(0.5)),
        ];
        assert_eq!(
            expand(&[file], &constants, &Vec::new()),
            "const N = 2u;\nconst M_0 = 0u;\nconst M_1 = 1u;\nconst ON = 1u;\nconst OFF = 0u;\nconst X = f32(5e-1);\n\
             let a_0 = 0u;\nb(0, 1);\nb(0, 2);\nlet a_1 = 1u;\nb(1, 1);\nb(1, 2);\nc(1);\non\nalso\n"
        );
    }
}
