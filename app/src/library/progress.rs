//! Bars on standard error for files that are downloaded, copied or read.

use std::sync::{Mutex, PoisonError};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use paguro_library::Progress;

use crate::{settings::Terminal, units};

/// Template of a bar: 63 columns and the rest of the line. A narrower terminal truncates it.
const BAR: &str = "{prefix:18!} [{wide_bar}] {decimal_bytes:>9}/{decimal_total_bytes:9} {decimal_bytes_per_sec:>11} {eta:>4}";
/// Template of a bar on a terminal of fewer than 72 columns: at most 37 columns.
const NARROW_BAR: &str = "{prefix:12!} {percent:>3}% {decimal_bytes_per_sec:>11} {eta:>4}";
/// Template of a message in place of a bar, truncated at the edge of the terminal.
const TEXT: &str = "{prefix:18!} {wide_msg}";

/// A progress bar for each file. Without a terminal, a line names each action.
pub struct Bars {
    terminal: Terminal,
    verb: &'static str,
    all: MultiProgress,
    styles: [ProgressStyle; 2],
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By index of the file.
    bars: Vec<FileBar>,
    /// Bar for actions without a file.
    hub: Option<ProgressBar>,
}

/// The bar of a file and its content.
struct FileBar {
    bar: ProgressBar,
    shows: Shows,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Shows {
    /// Existing bytes of the file that are verified.
    Checking,
    /// Bytes that are transferred.
    Bytes,
    /// A message.
    Text,
}

impl Bars {
    /// Creates the bars, which appear when there is work. `verb` names it: "getting".
    pub fn new(terminal: Terminal, verb: &'static str) -> Self {
        let target =
            if terminal.progress { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let narrow = console::Term::stderr().size_checked().is_some_and(|(_, columns)| columns < 72);
        let styles = [if narrow { NARROW_BAR } else { BAR }, TEXT].map(|template| {
            ProgressStyle::with_template(template).expect("the template is valid").progress_chars("=> ")
        });
        let all = MultiProgress::with_draw_target(target);
        Self { terminal, verb, all, styles, state: Mutex::default() }
    }

    /// Displays the progress.
    pub fn show(&self, progress: Progress<'_>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let bars = &mut state.bars;
        match progress {
            Progress::Files(files) => {
                if !self.terminal.progress {
                    let size = units::bytes(files.iter().map(|file| file.size).sum());
                    self.terminal.status(&format!(
                        "{} {}, {size}",
                        self.verb,
                        units::plural(files.len(), "file")
                    ));
                }
                let bar = |file: &paguro_library::Transfer| {
                    let bar = ProgressBar::hidden().with_style(self.styles[0].clone());
                    bar.set_length(file.size);
                    FileBar { bar: bar.with_prefix(file.name.clone()), shows: Shows::Bytes }
                };
                state.clear();
                state.bars = files.iter().map(bar).collect();
            }
            Progress::Bytes { file, done } => self.advance(&mut bars[file], Shows::Bytes, done),
            Progress::Checking { file, done } => self.advance(&mut bars[file], Shows::Checking, done),
            Progress::Waiting { file } => self.say(&mut bars[file], "another pull is getting it"),
            Progress::Retrying { file, problem, attempt, attempts } => {
                let text = format!("{problem}; try {attempt} of {attempts}");
                match file {
                    Some(file) => self.say(&mut bars[file], &text),
                    None if self.terminal.progress => {
                        let new = || {
                            let bar = ProgressBar::hidden().with_style(self.styles[1].clone());
                            self.all.add(bar.with_prefix("the hub"))
                        };
                        state.hub.get_or_insert_with(new).set_message(text);
                    }
                    None => self.terminal.status(&text),
                }
            }
            Progress::Finished { file } => bars[file].bar.finish_and_clear(),
            // `Recording` takes negligible time.
            _ => {}
        }
    }

    fn advance(&self, file: &mut FileBar, shows: Shows, done: u64) {
        self.see(file);
        file.bar.set_position(done);
        if file.shows != shows {
            file.bar.set_style(self.styles[0].clone());
            // Existing bytes count for neither the speed nor the remaining time.
            file.bar.reset_eta();
            file.shows = shows;
        }
    }

    /// Displays a message in place of the bar, or as a line without bars.
    fn say(&self, file: &mut FileBar, text: &str) {
        if !self.terminal.progress {
            return self.terminal.status(text);
        }
        self.see(file);
        file.bar.set_style(self.styles[1].clone());
        file.bar.set_message(text.to_owned());
        file.shows = Shows::Text;
    }

    /// Makes the file's bar visible.
    fn see(&self, file: &FileBar) {
        if file.bar.is_hidden() && self.terminal.progress {
            self.all.add(file.bar.clone());
        }
    }
}

impl State {
    fn clear(&mut self) {
        for bar in self.bars.drain(..).map(|file| file.bar).chain(self.hub.take()) {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        self.state.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
    }
}
