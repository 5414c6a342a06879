//! Failures that end the program: a line, optional hints, and an exit code.

use std::{error::Error, fmt, io, process::ExitCode};

use crate::units;

/// Fewest columns of a text, on terminals that are narrower.
const MIN_WIDTH: usize = 20;

/// Reason for which a command failed.
#[derive(Debug)]
pub struct Failure {
    kind: Kind,
    message: String,
    /// Hints, one per line.
    hints: Vec<String>,
}

/// Result of functions whose failure ends the program.
pub type Outcome<T> = Result<T, Failure>;

/// Kind of a failure, with its exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A failure: 1.
    Failed,
    /// A usage error: 2, as in clap.
    Usage,
    /// Ctrl-C, after all output has been printed: 130, as in shells.
    Interrupted,
    /// The reader of standard output has closed it (`| head`), which is not a failure: 0.
    ReaderGone,
}

impl Failure {
    /// Creates a failure.
    pub fn new(message: impl fmt::Display) -> Self {
        Self { kind: Kind::Failed, message: message.to_string(), hints: Vec::new() }
    }

    /// Creates a usage error.
    pub fn usage(message: impl fmt::Display) -> Self {
        Self { kind: Kind::Usage, message: message.to_string(), hints: Vec::new() }
    }

    /// Creates the failure for Ctrl-C.
    pub fn interrupted() -> Self {
        Self { kind: Kind::Interrupted, message: String::new(), hints: Vec::new() }
    }

    /// Formats an error with its causes on one line.
    pub fn from_error(error: &dyn Error) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            // Many errors include their cause.
            if !message.contains(&cause_text) {
                message = format!("{message}: {cause_text}");
            }
            source = cause.source();
        }
        Self::new(message)
    }

    /// Adds a hint after earlier ones.
    #[must_use]
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.hints.push(hint.to_string());
        self
    }

    /// Adds a hint, unless there is one.
    #[must_use]
    pub fn or_hint(self, hint: impl fmt::Display) -> Self {
        if self.hints.is_empty() { self.hint(hint) } else { self }
    }

    /// Returns the message without the hints.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Returns the exit code.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self.kind {
            Kind::Failed => 1,
            Kind::Usage => 2,
            Kind::Interrupted => 130,
            Kind::ReaderGone => 0,
        })
    }

    /// Returns the lines for standard error; `None` if there are none. `color` colors the first word.
    #[cfg(test)]
    pub fn report(&self, color: bool) -> Option<String> {
        self.report_within(color, None)
    }

    /// Returns the lines for standard error; `None` if there are none. `color` colors the first word. Lines longer than
    /// `columns` are broken between words.
    pub fn report_within(&self, color: bool, columns: Option<usize>) -> Option<String> {
        if matches!(self.kind, Kind::Interrupted | Kind::ReaderGone) {
            return None;
        }
        let (red, cyan, reset) = if color { ("\x1b[1;31m", "\x1b[1;36m", "\x1b[0m") } else { ("", "", "") };
        let mut text = format!("{red}error:{reset} {}\n", indented(&self.message, "error: ".len(), columns));
        for hint in &self.hints {
            text += &format!("{cyan}hint:{reset} {}\n", indented(hint, "hint: ".len(), columns));
        }
        Some(text)
    }
}

/// Breaks a text between words. Lines after the first one begin with `indent` blanks.
fn indented(text: &str, indent: usize, columns: Option<usize>) -> String {
    let width = columns.map_or(usize::MAX, |columns| columns.saturating_sub(indent).max(MIN_WIDTH));
    let lines = text.lines().map(|line| match line.chars().count() > width {
        true => units::wrapped(line, width).join(&format!("\n{:indent$}", "")),
        false => line.to_owned(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        let kind = if error.kind() == io::ErrorKind::BrokenPipe { Kind::ReaderGone } else { Kind::Failed };
        Self { kind, message: error.to_string(), hints: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_one_line_and_a_hint() {
        let failure = Failure::usage("there is no `x.gguf`").hint("did you mean `y.gguf`?");
        assert_eq!(
            failure.report(false).unwrap(),
            "error: there is no `x.gguf`\nhint: did you mean `y.gguf`?\n"
        );
        assert!(failure.report(true).unwrap().starts_with("\x1b[1;31merror:\x1b[0m there"));
    }

    #[test]
    fn long_lines_are_broken_between_words() {
        let failure =
            Failure::new("there is no model `a name of four` in the library").hint("paguro pull qwen3:4b");
        assert_eq!(
            failure.report_within(false, Some(28)).unwrap(),
            "error: there is no model\n       `a name of four` in\n       the library\nhint: paguro pull qwen3:4b\n"
        );
    }

    #[test]
    fn a_reader_that_has_gone_is_no_failure() {
        let failure = Failure::from(io::Error::from(io::ErrorKind::BrokenPipe));
        assert_eq!(failure.report(false), None);
        assert_eq!(failure.exit_code(), ExitCode::from(0));
        assert!(Failure::from(io::Error::from(io::ErrorKind::StorageFull)).report(false).is_some());
    }

    #[test]
    fn causes_are_appended_once() {
        #[derive(Debug)]
        struct Outer(Inner);
        #[derive(Debug)]
        struct Inner;
        impl fmt::Display for Outer {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "cannot open the model")
            }
        }
        impl fmt::Display for Inner {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "it is a teapot")
            }
        }
        impl Error for Inner {}
        impl Error for Outer {
            fn source(&self) -> Option<&(dyn Error + 'static)> {
                Some(&self.0)
            }
        }
        let failure = Failure::from_error(&Outer(Inner));
        assert_eq!(failure.report(false).unwrap(), "error: cannot open the model: it is a teapot\n");
    }
}
