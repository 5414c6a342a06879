//! Bars on standard error for files that come.

use std::sync::{Mutex, PoisonError};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use paguro_registry::Progress;

use crate::{settings::Terminal, units};

/// A bar for each file that is on its way. Without a terminal, a line says what is being done.
pub struct Bars {
    terminal: Terminal,
    verb: &'static str,
    all: MultiProgress,
    /// By index of the file.
    bars: Mutex<Vec<ProgressBar>>,
}

impl Bars {
    /// Nothing shows before there is something to do. `verb` says what that is: "getting".
    pub fn new(terminal: Terminal, verb: &'static str) -> Self {
        let target =
            if terminal.progress { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Self { terminal, verb, all: MultiProgress::with_draw_target(target), bars: Mutex::default() }
    }

    /// Shows it.
    pub fn show(&self, progress: Progress<'_>) {
        let mut bars = self.bars.lock().unwrap_or_else(PoisonError::into_inner);
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
                let style = ProgressStyle::with_template(
                    "{prefix:30!} [{bar:30}] {decimal_bytes:>10}/{decimal_total_bytes:10} {decimal_bytes_per_sec:>12} {eta:>4} {msg}",
                )
                .expect("the template is valid")
                .progress_chars("=> ");
                *bars = files
                    .iter()
                    .map(|file| {
                        let bar = ProgressBar::hidden().with_style(style.clone());
                        bar.set_length(file.size);
                        bar.with_prefix(file.name.clone())
                    })
                    .collect();
            }
            Progress::Bytes { file, done } => {
                let bar = self.shown(&mut bars, file);
                bar.set_message("");
                bar.set_position(done);
            }
            Progress::Waiting { file } => {
                let text = "another pull is getting it";
                self.shown(&mut bars, file).set_message(text);
                self.say(text);
            }
            Progress::Retrying { file, problem } => {
                self.shown(&mut bars, file).set_message(format!("trying again: {problem}"));
                self.say(&format!("trying again: {problem}"));
            }
            Progress::Finished { file } => bars[file].finish_and_clear(),
            // `Recording` takes no time to speak of.
            _ => {}
        }
    }

    /// The file's bar, from now on to be seen.
    fn shown<'a>(&self, bars: &'a mut [ProgressBar], file: usize) -> &'a ProgressBar {
        let bar = &bars[file];
        if bar.is_hidden() && self.terminal.progress {
            self.all.add(bar.clone());
        }
        bar
    }

    /// For those without bars.
    fn say(&self, text: &str) {
        if !self.terminal.progress {
            self.terminal.status(text);
        }
    }
}

impl Drop for Bars {
    fn drop(&mut self) {
        for bar in self.bars.get_mut().unwrap_or_else(PoisonError::into_inner) {
            bar.finish_and_clear();
        }
    }
}
