//! Output for the terminal: status lines, spinners and bars on standard error.

use std::{
    borrow::Cow,
    io::Write,
    sync::mpsc::{RecvTimeoutError, Sender, channel},
    thread::{self, JoinHandle},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{failure::Failure, settings::Terminal, units};

/// Time after which progress is shown, to avoid flicker.
const PATIENCE: Duration = Duration::from_millis(300);

/// Fewest columns of a text beside a name.
const MIN_BESIDE: usize = 28;

/// Returns the width of the terminal of standard error; `None` if it is none.
pub fn columns() -> Option<usize> {
    terminal_size::terminal_size_of(std::io::stderr()).map(|(width, _)| width.0.into())
}

/// Time between two frames of a spinner.
const TICK: Duration = Duration::from_millis(100);

impl Terminal {
    /// Prints a line about the answer on standard error, unless `--quiet`.
    pub fn status(&self, line: &str) {
        if !self.quiet {
            self.note(line);
        }
    }

    /// Prints a dim text on standard error, also with `--quiet`. Lines longer than the terminal are broken between words.
    pub fn note(&self, text: &str) {
        for line in text.lines() {
            match columns().filter(|columns| line.chars().count() > *columns) {
                Some(columns) => units::wrapped(line, columns).iter().for_each(|line| self.dim_line(line)),
                None => self.dim_line(line),
            }
        }
    }

    /// Prints a failure on standard error, if it has something to print.
    pub fn report(&self, failure: &Failure) {
        if let Some(report) = failure.report_within(self.color_errors, columns()) {
            // Standard error may be closed.
            let _ = std::io::stderr().write_all(report.as_bytes());
        }
    }

    fn dim_line(&self, line: &str) {
        let line =
            if self.color_errors { Cow::Owned(format!("\x1b[2m{line}\x1b[0m")) } else { Cow::Borrowed(line) };
        // Standard error may be closed.
        let _ = writeln!(std::io::stderr(), "{line}");
    }

    /// Prints rows of a name and a text on standard error, dim, in the width of the terminal. On narrow terminals, the
    /// text is below the name.
    pub fn table(&self, rows: &[(String, String)]) {
        let columns = columns().unwrap_or(80);
        let name_width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let beside = columns.saturating_sub(name_width + 2);
        for (name, text) in rows {
            if beside < MIN_BESIDE {
                units::wrapped(name, columns).iter().for_each(|line| self.dim_line(line));
                let width = columns.saturating_sub(2);
                units::wrapped(text, width).iter().for_each(|line| self.dim_line(&format!("  {line}")));
                continue;
            }
            let mut name = name.as_str();
            for line in units::wrapped(text, beside) {
                self.dim_line(&format!("{name:name_width$}  {line}"));
                name = "";
            }
        }
    }

    /// Returns bold text for standard output, if it has colors.
    pub fn bold(&self, text: &str) -> String {
        if self.color { format!("\x1b[1m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Returns dim text for standard output, if it has colors.
    pub fn dim(&self, text: &str) -> String {
        if self.color { format!("\x1b[2m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Shows a spinner with a variable text, from [`PATIENCE`] on until the value is dropped.
    pub fn spinner_with(&self, text: impl Fn() -> String + Send + 'static) -> Option<Spinner> {
        self.progress.then(|| Spinner::start(text))
    }

    /// Shows a bar up to `total`.
    pub fn bar(&self, total: usize, text: &str) -> ProgressBar {
        let target = if self.progress { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(total as u64), target);
        let style = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} {msg} {eta}")
            .expect("the template is valid");
        bar.with_style(style.progress_chars("=> ")).with_prefix(text.to_owned())
    }
}

/// An animation that stops on drop.
#[derive(Debug)]
pub struct Spinner {
    done: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Spinner {
    fn start(text: impl Fn() -> String + Send + 'static) -> Self {
        let (done, wait) = channel();
        let thread = thread::spawn(move || {
            if wait.recv_timeout(PATIENCE) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let spinner = ProgressBar::new_spinner();
            // Any result but a timeout means that the sender was dropped.
            while wait.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                spinner.set_message(text());
                spinner.tick();
            }
            spinner.finish_and_clear();
        });
        Self { done: Some(done), thread: Some(thread) }
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        drop(self.done.take());
        if let Some(thread) = self.thread.take() {
            // The line must be cleared before other output is written; a spinner that panicked has left none.
            let _ = thread.join();
        }
    }
}
