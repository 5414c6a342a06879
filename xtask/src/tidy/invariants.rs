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
    "crates/cpu-kernels/src/isa.rs",
];

/// Files in which a library reads the proxy of an HTTP client, and code of tests.
const PROXIES: &[&str] = &[
    "crates/library/src/hub/client.rs",
    "crates/mcp/src/http.rs",
    "crates/backend-conformance/src/draw.rs",
    "crates/backend-conformance/src/mutations.rs",
];

/// Rounding with a defect, which remembers: code of tests.
const DEFECTS: &str = "crates/backend-conformance/src/mutations/pages.rs";

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
        let globals = if path == DEFECTS { Vec::new() } else { mutable_globals(text) };
        for (line, problem) in globals {
            report.errors.push(format!("{path}:{line}: {problem}, but there is no mutable global variable"));
        }
    }
}

/// Types whose values change behind a shared reference. A `LazyLock` is none: it has one value, which is computed once.
const MUTABLE: &[&str] = &[
    "Cell",
    "RefCell",
    "UnsafeCell",
    "OnceCell",
    "Once",
    "OnceLock",
    "Mutex",
    "RwLock",
    "Condvar",
    "Sender",
    "Receiver",
];

/// Returns the lines of items that are global and mutable, with the reason: by the type of each `static`, which the compiler demands.
fn mutable_globals(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let words = words(text);
    // Items of tests come last in a file. A module in a file of its own does not end this one.
    let tests = words.windows(5).position(
        |words| matches!(words, [(_, "cfg"), (_, "test"), (_, "mod"), _, (_, after)] if *after != ";"),
    );
    let words = &words[..tests.unwrap_or(words.len())];
    for (at, &(line, word)) in words.iter().enumerate() {
        if word == "thread_local" {
            found.push((line, "a value for each thread".to_owned()));
        }
        if word != "static" {
            continue;
        }
        let item =
            words[at + 1..].iter().map(|(_, word)| *word).take_while(|word| !matches!(*word, "=" | ";"));
        let item: Vec<&str> = item.collect();
        // A lifetime has no type behind it.
        if !item.contains(&":") {
            continue;
        }
        let is_mutable =
            |word: &&&str| **word == "mut" || word.starts_with("Atomic") || MUTABLE.contains(word);
        if let Some(word) = item.iter().find(is_mutable) {
            found.push((line, format!("`{}` in the type of a `static`", word)));
        }
    }
    found
}

/// Returns the identifiers of a source, and its `:`, `=` and `;`, with their lines; without comments, strings and lifetimes.
fn words(text: &str) -> Vec<(usize, &str)> {
    let mut words = Vec::new();
    for (line, code) in (1..).zip(text.lines()) {
        let code = code.split("//").next().unwrap_or_default();
        let mut rest = code;
        while let Some(first) = rest.chars().next() {
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            let len = match first {
                c if is_word(c) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
                // To the end of the string, or of the line.
                '"' => rest[1..].find('"').map_or(rest.len(), |end| end + 2),
                '\'' => 1 + rest[1..].find(|c| !is_word(c)).unwrap_or(rest.len() - 1),
                c => c.len_utf8(),
            };
            let (word, after) = rest.split_at(len);
            if is_word(first) || matches!(word, ":" | "=" | ";") {
                words.push((line, word));
            }
            rest = after;
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(path: &str, text: &str) -> Vec<String> {
        crate::tidy::errors_of(check, path, text)
    }

    #[test]
    fn globals_do_not_change() {
        let problems = |text: &str| {
            mutable_globals(text)
                .into_iter()
                .map(|(line, problem)| format!("{line} {problem}"))
                .collect::<Vec<_>>()
        };
        let sound = "static NAMES: &[&str] = &[\"static A: Mutex<u8>;\"];\n// static B: OnceLock<u8> = ..\n\
            pub static MODELS: LazyLock<Vec<Model>> = LazyLock::new(|| Mutex::new(1));\nfn f(x: &'static Mutex<u8>) {}\n\
            fn g<T: 'static>(once: Once) {}\n#[cfg(test)]\nmod tests {\n    static C: AtomicUsize = AtomicUsize::new(0);\n}";
        assert_eq!(problems(sound), Vec::<String>::new());
        for item in [
            "static DONE: AtomicUsize = AtomicUsize::new(0);",
            "pub(super) static FILE: std::sync::OnceLock<Option<PathBuf>> =\n    OnceLock::new();",
            "static\n  TOLD : Once = Once::new();",
            "static A: [Mutex<u8>; 2] = [..];",
            "    static mut COUNT: u32 = 0;",
            "thread_local!(static LAST: u8 = 1);",
        ] {
            assert_eq!(problems(&format!("\n{item}")).len(), 1, "{item}");
        }
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
