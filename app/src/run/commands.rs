//! What a line typed in the chat means.

/// One entry of the chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// For the model.
    Message(String),
    /// `/reset`: forget the conversation.
    Reset,
    /// `/system TEXT`, or no text to take it away.
    System(Option<String>),
    /// `/set NAME VALUE`: a sampling value.
    Set {
        /// As the flag is called, without dashes.
        name: String,
        /// As on the command line.
        value: String,
    },
    /// `/show`
    Show,
    /// `/help`
    Help,
    /// `/exit`
    Exit,
    /// A slash and something else; the name.
    Unknown(String),
    /// Nothing.
    Empty,
}

/// The text of `/help`.
pub const HELP: &str = "\
/reset            forget the conversation
/system TEXT      set the system message (without TEXT: take it away) and forget the conversation
/set NAME VALUE   change a sampling value, named as its flag: /set temperature 0.5
/show             show the model, the sampling values and how full the context is
/help             this text
/exit             leave, as Ctrl-D does
\"\"\"               begins and ends a text of several lines; a \\ at the end of a line continues it, too
Ctrl-C            stops the answer";

impl Entry {
    /// What `text`, complete with all its lines, means.
    pub fn parse(text: &str) -> Self {
        let trimmed = text.trim();
        let Some(command) = trimmed.strip_prefix('/') else {
            return if trimmed.is_empty() { Self::Empty } else { Self::Message(trimmed.to_owned()) };
        };
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match (name, rest.is_empty()) {
            ("reset", true) => Self::Reset,
            ("system", empty) => Self::System((!empty).then(|| rest.to_owned())),
            ("set", false) => match rest.split_once([' ', '=']) {
                Some((name, value)) => Self::Set { name: name.into(), value: value.trim().into() },
                None => Self::Unknown(trimmed.into()),
            },
            ("show", true) => Self::Show,
            ("help" | "?", true) => Self::Help,
            ("exit" | "quit" | "bye", true) => Self::Exit,
            _ => Self::Unknown(trimmed.into()),
        }
    }
}

/// Puts lines together to one entry.
#[derive(Debug, Default)]
pub struct Lines {
    text: String,
    quoted: bool,
}

/// The mark around a text of several lines.
const QUOTES: &str = "\"\"\"";

impl Lines {
    /// Adds a line; returns the whole text once it is complete.
    pub fn push(&mut self, line: &str) -> Option<String> {
        if self.quoted {
            return match line.trim_end().strip_suffix(QUOTES) {
                Some(last) => {
                    self.text += last;
                    self.take()
                }
                None => self.more(line),
            };
        }
        if self.text.is_empty()
            && let Some(first) = line.trim_start().strip_prefix(QUOTES)
        {
            // Quotes that open and close on the same line.
            if let Some(only) = first.trim_end().strip_suffix(QUOTES) {
                return Some(only.to_owned());
            }
            self.quoted = true;
            return if first.is_empty() { None } else { self.more(first) };
        }
        match line.strip_suffix('\\') {
            Some(continued) => self.more(continued),
            None => {
                self.text += line;
                self.take()
            }
        }
    }

    /// Whether an entry has begun and is not complete.
    pub fn open(&self) -> bool {
        self.quoted || !self.text.is_empty()
    }

    fn more(&mut self, line: &str) -> Option<String> {
        self.text += line;
        self.text.push('\n');
        None
    }

    fn take(&mut self) -> Option<String> {
        self.quoted = false;
        Some(std::mem::take(&mut self.text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(lines: &[&str]) -> Option<Entry> {
        let mut all = Lines::default();
        let mut last = None;
        for line in lines {
            assert_eq!(last, None, "complete before {line:?}");
            last = all.push(line);
        }
        assert_eq!(last.is_none(), all.open());
        last.map(|text| Entry::parse(&text))
    }

    #[test]
    fn lines_become_entries() {
        let message = |text: &str| Some(Entry::Message(text.into()));
        assert_eq!(entry(&["Hello"]), message("Hello"));
        assert_eq!(entry(&["  "]), Some(Entry::Empty));
        assert_eq!(entry(&["one \\", "two"]), message("one \ntwo"));
        assert_eq!(entry(&["\"\"\"one", "", "/exit", "two\"\"\""]), message("one\n\n/exit\ntwo"));
        assert_eq!(entry(&["\"\"\"", "one", "\"\"\""]), message("one"));
        assert_eq!(entry(&["\"\"\"one\"\"\""]), message("one"));
        assert_eq!(entry(&["\"\"\"one"]), None);
        assert_eq!(entry(&["one\\"]), None);
        assert_eq!(entry(&["/reset "]), Some(Entry::Reset));
        assert_eq!(entry(&["/system Be brief. "]), Some(Entry::System(Some("Be brief.".into()))));
        assert_eq!(entry(&["/system"]), Some(Entry::System(None)));
        assert_eq!(entry(&["/set top-k 5"]), Some(Entry::Set { name: "top-k".into(), value: "5".into() }));
        assert_eq!(entry(&["/set top-k=5"]), Some(Entry::Set { name: "top-k".into(), value: "5".into() }));
        assert_eq!(entry(&["/set top-k"]), Some(Entry::Unknown("/set top-k".into())));
        assert_eq!(entry(&["/reset now"]), Some(Entry::Unknown("/reset now".into())));
        assert_eq!(entry(&["/etc"]), Some(Entry::Unknown("/etc".into())));
    }
}
