//! Invariants of ARCHITECTURE.md that a search of the source can check.

use super::{Report, files::File};

/// A pattern of source code, the files that may have it, and the invariant that another file would break.
struct Rule {
    /// In two pieces, so that this file does not contain it.
    pattern: (&'static str, &'static str),
    allowed: &'static [&'static str],
    invariant: &'static str,
}

/// Files that may read the environment. The last two are code of tests.
const ENVIRONMENT: &[&str] = &[
    "app/src/main.rs",
    "app/src/settings.rs",
    "app/src/cli/parse.rs",
    "crates/backend-conformance/src/draw.rs",
    "crates/backend-cpu/src/isa.rs",
];

/// Files in which a library reads the proxy of an HTTP client, and code of tests.
const PROXIES: &[&str] = &[
    "crates/library/src/hub/client.rs",
    "crates/server/src/mcp/http.rs",
    "crates/backend-conformance/src/draw.rs",
    "crates/backend-conformance/src/mutations.rs",
];

const RULES: &[Rule] = &[
    Rule {
        pattern: ("env::", "var"),
        allowed: ENVIRONMENT,
        invariant: "the environment is read once, by `main`",
    },
    Rule {
        pattern: ("from_", "env("),
        allowed: PROXIES,
        invariant: "the environment is read once, by `main`, except proxies",
    },
    Rule { pattern: ("Mmap::", "map"), allowed: &[], invariant: "no file is mapped into memory" },
    Rule { pattern: ("Mmap", "Options"), allowed: &[], invariant: "no file is mapped into memory" },
    Rule { pattern: ("static ", "mut "), allowed: &[], invariant: "there is no mutable global variable" },
];

/// Checks the rules in sources of the application and the crates, outside of folders with tests.
pub fn check(files: &[File], report: &mut Report) {
    for File { path, text } in files {
        let (Some(text), path) = (text, path.to_string_lossy().replace('\\', "/")) else { continue };
        let is_source = path.ends_with(".rs")
            && path.contains("/src/")
            && !path.contains("/tests")
            && (path.starts_with("app/") || path.starts_with("crates/"));
        if !is_source {
            continue;
        }
        for Rule { pattern: (start, end), allowed, invariant } in RULES {
            let pattern = format!("{start}{end}");
            let line = text.lines().position(|line| line.contains(&pattern));
            if let (Some(line), false) = (line, allowed.contains(&path.as_str())) {
                report.errors.push(format!("{path}:{}: `{pattern}`, but {invariant}", line + 1));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(path: &str, text: &str) -> Vec<String> {
        crate::tidy::errors_of(check, path, text)
    }

    #[test]
    fn the_environment_is_read_in_few_places() {
        let line = format!("\nlet home = {}{}(\"HOME\");\n", "std::env::", "var");
        assert_eq!(errors("app/src/settings.rs", &line), Vec::<String>::new());
        assert_eq!(errors("crates/server/tests/a.rs", &line), Vec::<String>::new());
        assert_eq!(
            errors("crates/server/src/a.rs", &line),
            [format!("crates/server/src/a.rs:2: `{}{}`, but {}", "env::", "var", RULES[0].invariant)]
        );
    }
}
