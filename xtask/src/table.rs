//! The summary at the end.

use std::{fmt::Write, time::Duration};

/// Outcome of a step.
pub enum Outcome {
    /// The step passed, optionally with a note.
    Passed(String),
    /// A tool or file is missing; with the reason why that is fine.
    Skipped(String),
    /// With the reason in one line.
    Failed(String),
}

/// A line of the summary.
pub struct Row {
    pub step: &'static str,
    pub outcome: Outcome,
    pub time: Duration,
}

/// The table, and one closing line.
pub fn render(rows: &[Row]) -> String {
    let mut text = String::from("\nstep     outcome     time\n");
    for Row { step, outcome, time } in rows {
        let (word, note) = match outcome {
            Outcome::Passed(note) => ("passed", note),
            Outcome::Skipped(note) => ("skipped", note),
            Outcome::Failed(note) => ("FAILED", note),
        };
        let line = format!("{step:<8} {word:<8} {:>6.1} s  {note}", time.as_secs_f64());
        let _ = writeln!(text, "{}", line.trim_end()); // writing to a string cannot fail
    }
    let total: f64 = rows.iter().map(|row| row.time.as_secs_f64()).sum();
    let named = |wanted: fn(&Outcome) -> bool| -> Vec<&str> {
        rows.iter().filter(|row| wanted(&row.outcome)).map(|row| row.step).collect()
    };
    let failed = named(|outcome| matches!(outcome, Outcome::Failed(_)));
    let skipped = named(|outcome| matches!(outcome, Outcome::Skipped(_)));
    let skips =
        if skipped.is_empty() { String::new() } else { format!(" (skipped: {})", skipped.join(", ")) };
    let _ = match failed.as_slice() {
        [] => writeln!(text, "\nci: passed in {total:.0} s{skips}"),
        _ => writeln!(text, "\nci: FAILED in {total:.0} s: {}{skips}", failed.join(", ")),
    };
    text
}

/// Returns true if no step failed.
pub fn passed(rows: &[Row]) -> bool {
    !rows.iter().any(|row| matches!(row.outcome, Outcome::Failed(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(step: &'static str, outcome: Outcome) -> Row {
        Row { step, outcome, time: Duration::from_millis(1250) }
    }

    #[test]
    fn the_last_line_names_what_failed_and_what_was_skipped() {
        let rows = [
            row("fmt", Outcome::Passed(String::new())),
            row("test", Outcome::Failed("exit status: 101".to_owned())),
            row("cross", Outcome::Skipped("no rustup".to_owned())),
        ];
        assert!(!passed(&rows));
        assert_eq!(
            render(&rows),
            "\nstep     outcome     time\nfmt      passed      1.2 s\ntest     FAILED      1.2 s  exit status: 101\n\
             cross    skipped     1.2 s  no rustup\n\nci: FAILED in 4 s: test (skipped: cross)\n"
        );
    }
}
