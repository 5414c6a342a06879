//! Parser of Harmony, the format of gpt-oss. An answer consists of messages, each with a header that names its channel and, for
//! a call, the tool. The channel `analysis` is reasoning; other channels without a recipient are text.
//!
//! Source: OpenAI's "Harmony response format".

use super::{
    Piece,
    json::{Scan, Scanner},
    tools::ReadTool,
};

const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const START: &str = "<|start|>";
const CONSTRAIN: &str = "<|constrain|>";

/// The control tokens of the format.
pub(super) const MARKS: &[&str] = &[CHANNEL, MESSAGE, START, CONSTRAIN, "<|end|>", "<|call|>", "<|return|>"];

/// Marks that end a message. `<|start|>` and `<|channel|>` end it if the model omits the end.
const ENDS: &[&str] = &["<|end|>", "<|call|>", "<|return|>", START, CHANNEL];

/// Largest size of a header in bytes. Longer text is not a header.
const MAX_HEADER: usize = 512;

/// Splits messages.
#[derive(Clone, Debug)]
pub(super) struct Channels {
    at: At,
    /// Text that may be the beginning of a mark.
    held: String,
    pieces: Vec<Piece>,
}

#[derive(Clone, Debug)]
enum At {
    /// In a header with this text.
    Header(String),
    Body(Body),
}

#[derive(Clone, Debug)]
enum Body {
    /// `began`: true after the first character that is not whitespace.
    Reasoning {
        began: bool,
    },
    Text {
        began: bool,
    },
    Call(Arguments),
}

/// The body of a call.
#[derive(Clone, Debug)]
struct Arguments {
    name: String,
    text: String,
    scanner: Scanner,
    state: Scan,
    /// Emitted bytes of the text; `None` before the call is emitted.
    passed: Option<usize>,
}

impl Channels {
    /// Creates a parser that begins before a header, or in the body of an answer or of reasoning.
    pub fn new(in_answer: bool, in_reasoning: bool) -> Self {
        let at = match (in_answer, in_reasoning) {
            (_, true) => At::Body(Body::Reasoning { began: false }),
            (true, false) => At::Body(Body::Text { began: true }),
            (false, false) => At::Header(String::new()),
        };
        Self { at, held: String::new(), pieces: Vec::new() }
    }

    /// Parses more of the text. `stream`: arguments are emitted while they are written.
    pub fn push(&mut self, delta: &str, tools: &[ReadTool], stream: bool) -> Vec<Piece> {
        for c in delta.chars() {
            self.held.push(c);
            for free in super::release(&mut self.held, MARKS).chars() {
                self.take(free, stream);
            }
            if MARKS.contains(&self.held.as_str()) {
                let mark = std::mem::take(&mut self.held);
                self.mark(&mark, tools, stream);
            }
        }
        std::mem::take(&mut self.pieces)
    }

    /// Ends the text and returns the rest. `cut`: a limit ended it.
    pub fn finish(mut self, cut: bool, stream: bool) -> Vec<Piece> {
        for c in std::mem::take(&mut self.held).chars() {
            self.take(c, stream);
        }
        match std::mem::replace(&mut self.at, At::Header(String::new())) {
            // An incomplete header at a limit is dropped.
            At::Header(header) if !header.trim().is_empty() && !cut => self.emit(Piece::Text(header)),
            At::Header(_) => {}
            At::Body(body) => self.end(body, cut),
        }
        self.pieces
    }

    /// Returns true within reasoning.
    pub fn in_reasoning(&self) -> bool {
        matches!(self.at, At::Body(Body::Reasoning { .. }))
    }

    fn mark(&mut self, mark: &str, tools: &[ReadTool], stream: bool) {
        match std::mem::replace(&mut self.at, At::Header(String::new())) {
            At::Header(header) if mark == MESSAGE => self.at = At::Body(body(&header, tools)),
            At::Header(header) if ENDS[..3].contains(&mark) => {
                // A message without a channel.
                if !header.trim().is_empty() {
                    self.emit(Piece::Text(header));
                }
            }
            At::Header(header) => self.at = At::Header(header + mark),
            At::Body(body) if ENDS.contains(&mark) => {
                self.end(body, false);
                if mark == CHANNEL {
                    self.at = At::Header(CHANNEL.into());
                }
            }
            // Not a mark in a body.
            At::Body(body) => {
                self.at = At::Body(body);
                mark.chars().for_each(|c| self.take(c, stream));
            }
        }
    }

    fn take(&mut self, c: char, stream: bool) {
        match &mut self.at {
            At::Header(header) => {
                header.push(c);
                let start = header.trim_start();
                // Text outside of the format is text of the answer.
                let words = [START, CHANNEL, "to=", "assistant", "commentary"];
                let fits = words.iter().any(|word| start.starts_with(word) || word.starts_with(start));
                if !fits || header.len() > MAX_HEADER {
                    let text = std::mem::take(header);
                    self.at = At::Body(Body::Text { began: true });
                    self.emit(Piece::Text(text));
                }
            }
            At::Body(Body::Reasoning { began }) => {
                if *began || !c.is_whitespace() {
                    *began = true;
                    self.emit(Piece::Reasoning(c.into()));
                }
            }
            At::Body(Body::Text { began }) => {
                if *began || !c.is_whitespace() {
                    *began = true;
                    self.emit(Piece::Text(c.into()));
                }
            }
            At::Body(Body::Call(arguments)) => {
                let pieces = arguments.push(c, stream);
                pieces.into_iter().for_each(|piece| self.emit(piece));
            }
        }
    }

    fn end(&mut self, body: Body, cut: bool) {
        if let Body::Call(arguments) = body {
            let pieces = arguments.finish(cut);
            pieces.into_iter().for_each(|piece| self.emit(piece));
        }
    }

    fn emit(&mut self, piece: Piece) {
        super::join(&mut self.pieces, piece);
    }
}

impl Arguments {
    fn push(&mut self, c: char, stream: bool) -> Vec<Piece> {
        if self.state == Scan::End {
            // Text after the object of a call is dropped.
            return Vec::new();
        }
        let first = self.text.trim_start().is_empty();
        self.text.push(c);
        if self.state != Scan::More || (first && c.is_whitespace()) {
            return Vec::new();
        }
        self.state = if first && c != '{' { Scan::Malformed } else { self.scanner.push(c) };
        if !stream || !matches!(self.state, Scan::More | Scan::End) {
            return Vec::new();
        }
        let mut pieces = Vec::new();
        let from = self.passed.unwrap_or_else(|| {
            pieces.push(Piece::CallBegin { name: self.name.clone() });
            self.text.len() - c.len_utf8()
        });
        pieces.push(Piece::Arguments(self.text[from..].to_owned()));
        self.passed = Some(self.text.len());
        pieces
    }

    fn finish(self, cut: bool) -> Vec<Piece> {
        let complete = self.state == Scan::End;
        if self.passed.is_some() {
            return vec![Piece::CallEnd { complete }];
        }
        let arguments = match self.text.trim() {
            "" if !cut => "{}",
            text if complete => text,
            // Not a call: a text.
            _ => return vec![Piece::Text(self.text)],
        };
        let (name, arguments) = (self.name, arguments.to_owned());
        vec![Piece::CallBegin { name }, Piece::Arguments(arguments), Piece::CallEnd { complete: true }]
    }
}

/// Returns the body that follows a header `<|start|>ROLE to=TOOL<|channel|>CHANNEL to=TOOL <|constrain|>TYPE`. The recipient stands
/// in one of the two places.
fn body(header: &str, tools: &[ReadTool]) -> Body {
    let recipient = header.split_once("to=").map(|(_, rest)| {
        let end = rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len());
        let name = &rest[..end];
        name.strip_prefix("functions.").unwrap_or(name)
    });
    if let Some(tool) = recipient.and_then(|name| tools.iter().find(|tool| tool.name == name)) {
        return Body::Call(Arguments {
            name: tool.name.clone(),
            text: String::new(),
            scanner: Scanner::new(),
            state: Scan::More,
            passed: None,
        });
    }
    let channel = header.rsplit_once(CHANNEL).map_or("", |(_, rest)| rest.trim_start());
    if channel.starts_with("analysis") {
        Body::Reasoning { began: false }
    } else {
        Body::Text { began: false }
    }
}
