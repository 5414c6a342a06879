//! Rules that no compiler checks.

mod arrows;
mod files;
mod invariants;
mod links;
mod words;

use std::path::Path;

use anyhow::Result;

/// Findings of the rules.
#[derive(Default)]
pub struct Report {
    /// Fail the step.
    pub errors: Vec<String>,
    /// Are only printed.
    pub warnings: Vec<String>,
}

/// Checks all rules.
pub fn check(root: &Path) -> Result<Report> {
    let mut report = Report::default();
    arrows::check(root, &mut report)?;
    let files = files::list(root)?;
    files::check(&files, &mut report);
    links::check(root, &files, &mut report);
    invariants::check(&files, &mut report);
    words::check(&files, &mut report);
    Ok(report)
}

/// Returns the errors of a check for one file, for tests of the rules.
#[cfg(test)]
fn errors_of(check: fn(&[files::File], &mut Report), path: &str, text: &str) -> Vec<String> {
    let mut report = Report::default();
    check(&[files::File { path: path.into(), text: Some(text.to_owned()) }], &mut report);
    report.errors
}
