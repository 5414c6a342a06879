//! Documents that name files which do not exist.

use std::path::Path;

use super::{Report, files::File};

/// Folders of paths in code font that are relative to the workspace.
const FOLDERS: [&str; 7] = ["app/", "bench/", "crates/", "docs/", "models/", "xtask/", ".ci/"];

pub fn check(root: &Path, files: &[File], report: &mut Report) {
    for File { path, text } in files {
        let (true, Some(text)) = (path.extension().is_some_and(|extension| extension == "md"), text) else {
            continue;
        };
        let folder = path.parent().unwrap_or(Path::new(""));
        let missing_links = links(text).into_iter().filter(|link| !root.join(folder).join(link).exists());
        let missing_paths = paths(text).into_iter().filter(|path| !root.join(path).exists());
        for missing in missing_links.chain(missing_paths) {
            report.errors.push(format!("{}: there is no `{missing}`", path.display()));
        }
    }
}

/// Targets of `[text](target)` that are files, without the part after `#`.
fn links(text: &str) -> Vec<&str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|found| found.0);
    let files = targets.filter(|target| !target.contains("://") && !target.starts_with("mailto:"));
    files.filter_map(|target| target.split('#').next()).filter(|target| !target.is_empty()).collect()
}

/// Paths in code font, outside of code blocks.
fn paths(text: &str) -> Vec<&str> {
    // Every second piece between fences is a block, every second one between ticks is code.
    let prose = text.split("```").step_by(2);
    let code = prose.flat_map(|prose| prose.split('`').skip(1).step_by(2));
    code.filter(|code| {
        let whole = !code.contains(['*', '<', '{', ' ', '\n']) && !code.contains("...");
        whole && FOLDERS.iter().any(|folder| code.starts_with(folder))
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_paths_are_found() {
        let text = "See [this](docs/a.md#part), [that](https://example.org/x), [here](#here) and `crates/x/src/y.rs`,\n\
                    not `x.rs`, `crates/*/y` or\n```\ncargo run `crates/z`\n```\nbut `docs/b.md`.";
        assert_eq!(links(text), ["docs/a.md"]);
        assert_eq!(paths(text), ["crates/x/src/y.rs", "docs/b.md"]);
    }
}
