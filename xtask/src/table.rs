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

/// First line of the table.
pub const HEADER: &str = "step     outcome     time\n";

const PASSED: &str = "passed";
const SKIPPED: &str = "skipped";
const FAILED: &str = "FAILED";

impl Row {
    /// Reads a line of the table. Returns `None` if it is not the row of this step.
    pub fn parse(step: &'static str, line: &str) -> Option<Self> {
        let rest = line.strip_prefix(step)?.strip_prefix(' ')?.trim_start();
        let (word, rest) = rest.split_once(' ')?;
        let (seconds, note) = rest.split_once(" s")?;
        let note = note.trim().to_owned();
        let outcome = match word {
            PASSED => Outcome::Passed(note),
            SKIPPED => Outcome::Skipped(note),
            FAILED => Outcome::Failed(note),
            _ => return None,
        };
        Some(Self { step, outcome, time: Duration::try_from_secs_f64(seconds.trim().parse().ok()?).ok()? })
    }
}

/// The table, and one closing line with the time of all steps.
pub fn render(rows: &[Row], total: Duration) -> String {
    let mut text = format!("\n{HEADER}");
    for Row { step, outcome, time } in rows {
        let (word, note) = match outcome {
            Outcome::Passed(note) => (PASSED, note),
            Outcome::Skipped(note) => (SKIPPED, note),
            Outcome::Failed(note) => (FAILED, note),
        };
        let line = format!("{step:<8} {word:<8} {:>6.1} s  {note}", time.as_secs_f64());
        let _ = writeln!(text, "{}", line.trim_end()); // writing to a string cannot fail
    }
    let total = total.as_secs_f64();
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
        Row { step, outcome, time: Duration::from_millis(1200) }
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
            render(&rows, Duration::from_secs(4)),
            "\nstep     outcome     time\nfmt      passed      1.2 s\ntest     FAILED      1.2 s  exit status: 101\n\
             cross    skipped     1.2 s  no rustup\n\nci: FAILED in 4 s: test (skipped: cross)\n"
        );
    }

    #[test]
    fn rows_are_read_as_they_are_written() {
        let rows = [
            row("ui", Outcome::Passed("pictures of 3 s are in target/ui".to_owned())),
            row("clients", Outcome::Failed("exit status: 1".to_owned())),
            row("packaging", Outcome::Skipped("no Python".to_owned())),
        ];
        let text = render(&rows, Duration::from_secs(4));
        let (_, table) = text.split_once(HEADER).unwrap();
        let read = ["ui", "clients", "packaging"]
            .map(|step| table.lines().find_map(|line| Row::parse(step, line)).unwrap());
        assert_eq!(render(&read, Duration::from_secs(4)), text);
        assert!(table.lines().all(|line| Row::parse("client", line).is_none()));
    }
}
