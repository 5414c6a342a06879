//! Lengths of source files, and words that are specific to one machine.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use super::Report;

/// A file of the project.
pub struct File {
    /// Path relative to the workspace.
    pub path: PathBuf,
    /// `None` for files that are not text.
    pub text: Option<String>,
}

/// A file can be read in one sitting until here.
const LONG: usize = 500;
/// A file past this is a room that needs a wall.
const TOO_LONG: usize = 700;

/// Paths of specific machines, each in two pieces so that this file does not contain them.
const FORBIDDEN: [(&str, &str); 5] =
    [("/wo", "rk/"), ("/ro", "ot/"), ("/ho", "me/"), ("/Use", "rs/"), (".libr", "ary/")];

/// Returns all files that git tracks or would add; without git, all except hidden folders and build outputs.
pub fn list(root: &Path) -> Result<Vec<File>> {
    let mut paths = Vec::new();
    match known_to_git(root) {
        Some(known) => paths.extend(known),
        None => walk(root, Path::new(""), &mut paths)?,
    }
    // A file may be deleted and not yet committed.
    let present = paths.into_iter().filter(|path| root.join(path).is_file());
    let read = |path: PathBuf| {
        let bytes = std::fs::read(root.join(&path)).with_context(|| path.display().to_string())?;
        let text = String::from_utf8(bytes).ok().filter(|text| !text.contains('\0'));
        Ok(File { path, text })
    };
    present.map(read).collect()
}

fn known_to_git(root: &Path) -> Option<Vec<PathBuf>> {
    let mut command = Command::new("git");
    command.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(root);
    let output = command.output().ok().filter(|output| output.status.success())?;
    let names = String::from_utf8(output.stdout).ok()?;
    Some(names.split_terminator('\0').map(PathBuf::from).collect())
}

fn walk(root: &Path, folder: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(root.join(folder))? {
        let entry = entry?;
        let (name, path) = (entry.file_name(), folder.join(entry.file_name()));
        if !entry.file_type()?.is_dir() {
            paths.push(path);
        } else if name != "target" && !name.as_encoded_bytes().starts_with(b".") {
            walk(root, &path, paths)?;
        }
    }
    Ok(())
}

pub fn check(files: &[File], report: &mut Report) {
    for File { path, text } in files {
        let Some(text) = text else { continue };
        let path = path.display();
        if path.to_string().ends_with(".rs") {
            match text.lines().count() {
                lines if lines > TOO_LONG => {
                    report.errors.push(format!("{path} has {lines} lines, more than {TOO_LONG}"));
                }
                lines if lines > LONG => {
                    report.warnings.push(format!("{path} has {lines} lines, more than {LONG}"));
                }
                _ => {}
            }
        }
        for (index, line) in text.lines().enumerate() {
            for (start, end) in FORBIDDEN {
                let word = format!("{start}{end}");
                if line.contains(&word) {
                    report.errors.push(format!("{path}:{}: `{word}` is a place on one machine", index + 1));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_files_and_places_are_found() {
        let file = |path: &str, text: String| File { path: path.into(), text: Some(text) };
        let home = FORBIDDEN[2].0.to_owned() + FORBIDDEN[2].1;
        let mut report = Report::default();
        let files = [
            file("a.rs", "\n".repeat(501)),
            file("b.rs", "\n".repeat(701)),
            file("c.md", "\n".repeat(701)),
            file("d.md", format!("one\nin {home}me\n")),
            File { path: "e.gguf".into(), text: None },
        ];
        check(&files, &mut report);
        assert_eq!(report.warnings, ["a.rs has 501 lines, more than 500"]);
        assert_eq!(
            report.errors,
            [
                "b.rs has 701 lines, more than 700".to_owned(),
                format!("d.md:2: `{home}` is a place on one machine")
            ]
        );
    }
}
