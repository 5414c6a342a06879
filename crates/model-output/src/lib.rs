//! Parser of a model's text into reasoning, answer and tool calls.
//!
//! `families.rs` is the table of syntaxes, `syntax.rs` finds the one of a chat template, and `grammar.rs` writes the
//! grammars that allow the texts that [`OutputParser`] reads. The crate depends on no other crate of the workspace.
//!
//! Each model family marks these parts in its own syntax, which [`Format`] derives from the chat template.
//! [`OutputParser`] splits the text while it streams. Text that may become a marker is held back until it is decided,
//! so no emitted text is ever revised, and the result does not depend on the boundaries of deltas. Text that resembles
//! a call without being one stays text. Only the beginning of a further call that a limit has cut off is dropped.

mod braces;
mod call;
mod channels;
mod families;
mod grammar;
mod json;
mod syntax;
#[cfg(test)]
mod tests;
mod tools;
mod write;

use std::{borrow::Cow, sync::Arc};

use call::{Call, Malformed};
use channels::Channels;
use families::GENERIC;
use syntax::{Reading, Tags};

pub use grammar::{AnswerRules, OfferedTool, Otherwise, Thought};
pub use json::one_line;
pub use syntax::{CallSyntax, Format};
pub use tools::ReadTool;
pub use write::{instructions, write_calls};

/// A part of the text, in order. Neighbouring pieces of one kind belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// More reasoning.
    Reasoning(String),
    /// More of the answer.
    Text(String),
    /// Beginning of a call of an offered tool.
    CallBegin {
        /// The tool's name.
        name: String,
    },
    /// More of the arguments' JSON, as the model wrote it.
    Arguments(String),
    /// End of the call.
    CallEnd {
        /// True if the arguments are a complete JSON object.
        complete: bool,
    },
}

/// Options of an [`OutputParser`].
#[derive(Clone, Debug)]
pub struct ParserOptions {
    /// True to separate reasoning. Otherwise it stays in the answer, with its tags.
    pub split_reasoning: bool,
    /// True if the prompt ends within reasoning ([`Format::thought`]).
    pub in_reasoning: bool,
    /// True if the prompt ends within the answer's text ([`Format::in_answer`]).
    pub in_answer: bool,
    /// The offered tools. Without any, no calls are parsed.
    pub tools: Arc<[ReadTool]>,
    /// True to parse calls in JSON without the family's markers, as small models write them: at the beginning of an answer or
    /// in a fence.
    pub lenient: bool,
    /// True to emit arguments while they are written. Otherwise a call is emitted when it is complete, and as text if it is
    /// malformed or unfinished.
    pub stream_arguments: bool,
}

/// Splits a streamed text.
#[derive(Clone, Debug)]
pub struct OutputParser {
    options: ParserOptions,
    reasoning: Option<Tags>,
    /// Tags around the answer.
    answer: Option<Tags>,
    /// True within these tags.
    in_tags: bool,
    syntax: &'static CallSyntax,
    state: State,
    /// Parser of texts that consist of messages. It then parses everything.
    channels: Option<Channels>,
    /// Whitespace that belongs to the next marker, if one follows.
    space: String,
    /// Text that may be the beginning of a marker.
    held: String,
    /// True after the first call.
    called: bool,
    /// True if the last call had no marker.
    bare: bool,
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug)]
enum State {
    /// In reasoning. Whitespace at its beginning is dropped.
    Reasoning {
        began: bool,
    },
    /// Between two parts. Whitespace is dropped, and more markers are possible than within text.
    Edge(Edge),
    Text,
    Call(Box<Reader>),
}

/// Properties of an edge.
#[derive(Clone, Copy, Debug)]
struct Edge {
    /// True at the beginning of the answer, where reasoning may begin.
    start: bool,
    /// True if whitespace belongs to the text that follows.
    keeps_space: bool,
    /// Index of the first text of the syntax's `tail` that may follow; `None` unless a call precedes.
    tail: Option<usize>,
}

/// A marker at an edge.
#[derive(Clone, Copy, Debug)]
enum Mark {
    Think,
    /// The tag before the answer.
    Answer,
    /// A marker that begins a call.
    Call,
    /// The name of a tool that begins a call.
    Name,
    /// The first character of a call without a marker.
    Bare,
    /// The beginning of a fence with a JSON object.
    Fence,
    /// The separator of objects in an array.
    Comma,
    Tail(usize),
}

/// A partially parsed call.
#[derive(Clone, Debug)]
struct Reader {
    call: Call,
    /// Its text that has not been emitted. It becomes text if this is not a call.
    raw: String,
    /// Emitted bytes of the arguments; `None` before the call is emitted.
    passed: Option<usize>,
}

/// Beginnings of a block with calls, anywhere in an answer.
const FENCES: &[&str] = &["```json", "```tool_call"];

/// Beginning of a block without a language. It is recognised at the beginning of an answer only, because elsewhere it mostly
/// ends a block.
const PLAIN_FENCE: &str = "```\n";

/// End of a block.
const FENCE_END: &str = "```";

impl OutputParser {
    /// Creates a parser for the text of an answer from its first character on.
    pub fn new(format: Format, options: ParserOptions) -> Self {
        let split = |tags: &Tags| options.split_reasoning.then_some(*tags);
        let (reasoning, answer) =
            (format.reasoning.as_ref().and_then(split), format.answer.as_ref().and_then(split));
        let syntax = format.calls.unwrap_or(&GENERIC);
        let channels = matches!(syntax.reading, Reading::Channels)
            .then(|| Channels::new(options.in_answer, options.in_reasoning));
        let state = match reasoning {
            Some(_) if options.in_reasoning => State::Reasoning { began: false },
            _ => State::Edge(Edge { start: true, keeps_space: true, tail: None }),
        };
        let mut options = options;
        if format.calls.is_err() {
            options.tools = Arc::default();
        }
        Self {
            options,
            reasoning,
            answer,
            in_tags: false,
            syntax,
            state,
            channels,
            space: String::new(),
            held: String::new(),
            called: false,
            bare: false,
            pieces: Vec::new(),
        }
    }

    /// Parses more of the text. Returns the pieces that are certain.
    pub fn push(&mut self, delta: &str) -> Vec<Piece> {
        if let Some(channels) = &mut self.channels {
            return channels.push(delta, &self.options.tools, self.options.stream_arguments);
        }
        for c in delta.chars() {
            self.take(c);
        }
        std::mem::take(&mut self.pieces)
    }

    /// Ends the text and returns the rest. `cut`: a limit ended it.
    pub fn finish(mut self, cut: bool) -> Vec<Piece> {
        if let Some(channels) = self.channels {
            return channels.finish(cut, self.options.stream_arguments);
        }
        match std::mem::replace(&mut self.state, State::Text) {
            State::Reasoning { .. } => self.emit_held(Piece::Reasoning),
            // The beginning of a further call is dropped.
            State::Edge(Edge { tail: Some(_), .. }) if cut => {}
            State::Call(reader) if cut && self.called => {
                if reader.passed.is_some() && !reader.call.arguments_end {
                    self.pieces.push(Piece::CallEnd { complete: false });
                }
            }
            State::Text | State::Edge(Edge { keeps_space: true, .. }) => self.emit_held(Piece::Text),
            State::Edge(_) => {
                self.space.clear();
                self.emit_held(Piece::Text);
            }
            State::Call(reader) => self.abandon(*reader),
        }
        self.pieces
    }

    /// Returns true within reasoning.
    pub fn in_reasoning(&self) -> bool {
        match &self.channels {
            Some(channels) => channels.in_reasoning(),
            None => matches!(self.state, State::Reasoning { .. }),
        }
    }

    fn take(&mut self, c: char) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Reasoning { began } => self.reason(began, c),
            State::Text => self.text(c),
            State::Edge(edge) => self.edge(edge, c),
            State::Call(reader) => self.call(reader, c),
        }
    }

    fn reason(&mut self, began: bool, c: char) {
        self.state = State::Reasoning { began: began || !c.is_whitespace() };
        if !began && c.is_whitespace() {
            return;
        }
        let close = self.reasoning.map_or("", |(_, close)| close);
        if self.find(c, &[close], Piece::Reasoning) {
            self.drop_held();
            self.state = State::Edge(Edge { start: false, keeps_space: false, tail: None });
        }
    }

    fn text(&mut self, c: char) {
        let mut markers = Vec::new();
        let answer_end = self.answer.filter(|_| self.in_tags).map(|(_, close)| close);
        markers.extend(answer_end);
        if !self.options.tools.is_empty() {
            markers.extend(self.syntax.markers);
            markers.extend(FENCES.iter().filter(|_| self.options.lenient));
        }
        if self.find(c, &markers, Piece::Text) {
            if answer_end.is_some_and(|end| end == self.held) {
                self.in_tags = false;
                self.drop_held();
                self.state = State::Edge(Edge { start: false, keeps_space: false, tail: None });
                return;
            }
            self.begin_call(self.held.starts_with(FENCE_END), None);
        }
    }

    /// Adds a character of a text in which one of `markers` may come. Returns true if the held text is one. Text that cannot
    /// be part of one is emitted as `kind`.
    fn find(&mut self, c: char, markers: &[&str], kind: fn(String) -> Piece) -> bool {
        if self.held.is_empty() && c.is_whitespace() && !markers.is_empty() {
            self.space.push(c);
            return false;
        }
        self.held.push(c);
        for free in release(&mut self.held, markers).chars() {
            if free.is_whitespace() && !markers.is_empty() {
                self.space.push(free);
            } else {
                let space = std::mem::take(&mut self.space);
                self.emit(kind(space + free.encode_utf8(&mut [0; 4])));
            }
        }
        markers.contains(&self.held.as_str()) && !self.held.is_empty()
    }

    fn edge(&mut self, edge: Edge, c: char) {
        let marks = self.marks(edge);
        if marks.is_empty() && edge.keeps_space {
            // No marker can begin here, so this is text.
            return self.text(c);
        }
        self.state = State::Edge(edge);
        if self.held.is_empty() && c.is_whitespace() {
            self.space.push(c);
            return;
        }
        self.held.push(c);
        if let Some(&(_, mark)) = marks.iter().find(|(text, _)| *text == self.held) {
            return self.pass(edge, mark);
        }
        if marks.iter().any(|(text, _)| text.starts_with(self.held.as_str())) {
            return;
        }
        // In a block of calls, the next call follows without a marker.
        let in_block = edge.tail.is_some_and(|tail| tail < self.tail().len()) && !self.bare;
        if in_block && matches!(self.syntax.reading, Reading::Keywords) {
            let held = std::mem::take(&mut self.held);
            self.begin_call(false, None);
            return held.chars().for_each(|c| self.take(c));
        }
        // Not a marker: text.
        if !edge.keeps_space {
            self.space.clear();
        }
        let held = std::mem::take(&mut self.held);
        self.state = State::Text;
        held.chars().for_each(|c| self.take(c));
    }

    /// Returns the markers that may follow at an edge. No marker is the beginning of another.
    fn marks(&self, edge: Edge) -> Vec<(Cow<'static, str>, Mark)> {
        let mut marks: Vec<(Cow<'static, str>, Mark)> = Vec::new();
        if let Some((open, _)) = self.reasoning.filter(|_| edge.start) {
            marks.push((open.into(), Mark::Think));
        }
        if let Some((open, _)) = self.answer.filter(|_| edge.tail.is_none() && !self.in_tags) {
            marks.push((open.into(), Mark::Answer));
        }
        if self.options.tools.is_empty() {
            return marks;
        }
        let syntax = self.syntax;
        marks.extend(syntax.markers.iter().map(|marker| ((*marker).into(), Mark::Call)));
        if syntax.layout.open.is_empty() && matches!(syntax.reading, Reading::Named { .. }) {
            let end = syntax.layout.infix;
            marks.extend(
                self.options.tools.iter().map(|tool| ([&tool.name, end].concat().into(), Mark::Name)),
            );
        }
        let lenient = self.options.lenient;
        if let Some(next) = edge.tail {
            let tail = &self.tail()[next.min(self.tail().len())..];
            marks.extend((next..).zip(tail).map(|(index, text)| ((*text).into(), Mark::Tail(index))));
            if self.bare || matches!(syntax.reading, Reading::Objects | Reading::Either { .. }) {
                marks.extend([(",".into(), Mark::Comma), ("{".into(), Mark::Bare)]);
            }
            if lenient && !tail.contains(&FENCE_END) {
                marks.extend(FENCES.iter().map(|fence| ((*fence).into(), Mark::Fence)));
            }
        } else if syntax.bare || lenient {
            // If a marker begins with a bracket, an array does not begin a call.
            if !marks.iter().any(|(text, _)| text.starts_with('[')) {
                marks.push(("[".into(), Mark::Bare));
            }
            marks.extend([("{".into(), Mark::Bare), (PLAIN_FENCE.into(), Mark::Fence)]);
            marks.extend(FENCES.iter().map(|fence| ((*fence).into(), Mark::Fence)));
        }
        marks
    }

    /// Returns the texts that may follow a call and belong to it, in order.
    fn tail(&self) -> &'static [&'static str] {
        if self.bare && !self.syntax.bare { GENERIC.tail } else { self.syntax.tail }
    }

    fn pass(&mut self, edge: Edge, mark: Mark) {
        match mark {
            Mark::Think => {
                self.drop_held();
                self.state = State::Reasoning { began: false };
            }
            Mark::Answer => {
                self.drop_held();
                self.in_tags = true;
                self.state = State::Edge(Edge { start: false, keeps_space: false, tail: None });
            }
            Mark::Call => self.begin_call(false, None),
            Mark::Name => {
                let name = std::mem::take(&mut self.held);
                self.begin_call(false, None);
                name.chars().for_each(|c| self.take(c));
            }
            Mark::Fence => self.begin_call(true, None),
            Mark::Bare => {
                let first = self.held.pop();
                // An object after a call with a marker is read in the same syntax.
                self.begin_call(edge.tail.is_none() || self.bare, first);
            }
            // Before anything but an object the comma is text.
            Mark::Comma => {
                self.space = std::mem::take(&mut self.held);
                let tail = Some(self.tail().len());
                self.state = State::Edge(Edge { start: false, keeps_space: true, tail });
            }
            Mark::Tail(index) => {
                self.drop_held();
                self.state = State::Edge(Edge { tail: Some(index + 1), ..edge });
            }
        }
    }

    /// Begins a call after the held marker, or without a marker if `bare`. `first` is its first character, if already read.
    fn begin_call(&mut self, bare: bool, first: Option<char>) {
        let raw = std::mem::take(&mut self.space) + &std::mem::take(&mut self.held);
        self.bare = bare;
        let tools = Arc::clone(&self.options.tools);
        let call = if bare { Call::bare(tools) } else { Call::new(self.syntax.reading, tools) };
        self.state = State::Call(Box::new(Reader { call, raw, passed: None }));
        if let Some(c) = first {
            self.take(c);
        }
    }

    fn call(&mut self, mut reader: Box<Reader>, c: char) {
        match reader.call.push(c) {
            Ok(()) => reader.raw.push(c),
            Err(Malformed) => {
                self.abandon(*reader);
                return self.take(c);
            }
        }
        let Reader { call, raw, passed } = &mut *reader;
        if call.name.as_ref().is_some_and(|name| !self.options.tools.iter().any(|tool| tool.name == *name)) {
            return self.abandon(*reader);
        }
        let ready = call.arguments_end || (self.options.stream_arguments && !call.arguments.is_empty());
        if let (true, Some(name)) = (ready, &call.name) {
            if passed.is_none() {
                self.pieces.push(Piece::CallBegin { name: name.clone() });
                self.called = true;
            }
            let from = passed.unwrap_or(0);
            if call.arguments.len() > from {
                self.emit(Piece::Arguments(call.arguments[from..].to_owned()));
                raw.clear();
            }
            if call.arguments_end && (passed.is_none() || from < call.arguments.len()) {
                self.pieces.push(Piece::CallEnd { complete: true });
            }
            *passed = Some(call.arguments.len());
        }
        self.state = match reader.call.end {
            true => State::Edge(Edge { start: false, keeps_space: false, tail: Some(0) }),
            false => State::Call(reader),
        };
    }

    /// Abandons a call that is malformed or incomplete: its text becomes text of the answer.
    fn abandon(&mut self, reader: Reader) {
        self.state = State::Text;
        if reader.passed.is_some() && !reader.call.arguments_end {
            self.pieces.push(Piece::CallEnd { complete: false });
        }
        if reader.passed.is_none() || !reader.raw.trim().is_empty() {
            self.emit(Piece::Text(reader.raw));
        }
    }

    fn drop_held(&mut self) {
        self.space.clear();
        self.held.clear();
    }

    fn emit_held(&mut self, kind: fn(String) -> Piece) {
        let text = std::mem::take(&mut self.space) + &std::mem::take(&mut self.held);
        self.emit(kind(text));
    }

    fn emit(&mut self, piece: Piece) {
        join(&mut self.pieces, piece);
    }
}

/// Removes and returns the beginning of `held` that cannot be part of any marker, whatever text follows.
fn release(held: &mut String, markers: &[&str]) -> String {
    let may_begin = |rest: &str| markers.iter().any(|marker| marker.starts_with(rest));
    let start = held.char_indices().map(|(at, _)| at).find(|&at| may_begin(&held[at..]));
    held.drain(..start.unwrap_or(held.len())).collect()
}

/// Adds a piece, or appends to the last one if both have the same kind.
fn join(pieces: &mut Vec<Piece>, piece: Piece) {
    match (pieces.last_mut(), &piece) {
        (_, Piece::Text(text) | Piece::Reasoning(text) | Piece::Arguments(text)) if text.is_empty() => {}
        (Some(Piece::Text(last)), Piece::Text(text))
        | (Some(Piece::Reasoning(last)), Piece::Reasoning(text))
        | (Some(Piece::Arguments(last)), Piece::Arguments(text)) => *last += text,
        _ => pieces.push(piece),
    }
}
