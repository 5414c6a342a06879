//! Sentences that begin with a clause instead of a noun, in comments and documents, and phrases that no document has.

use super::{Report, files::File};

/// Beginnings of sentences whose subject is a clause. Instead of "What a page holds is counted.", write "The tokens of a
/// page are counted."
const CLAUSE_WORDS: [&str; 11] = [
    "What",
    "Who",
    "Whoever",
    "Whose",
    "How far",
    "How many",
    "How much",
    "So many",
    "So much",
    "Of those",
    "Those that",
];

/// Private vocabulary of earlier documents.
const PHRASES: [&str; 4] = ["in any company", "in company", "and its kin", " lest "];

/// Maximum words of a decision, without its tables: one page.
const DECISION_WORDS: usize = 900;

pub fn check(files: &[File], report: &mut Report) {
    for File { path, text } in files {
        let (Some(text), path) = (text, path.to_string_lossy().replace('\\', "/")) else { continue };
        let Some(prose) = prose(&path, text) else { continue };
        if path.starts_with("docs/decisions/") {
            let lines = prose.iter().filter(|(_, line)| !line.starts_with('|'));
            let words: usize = lines.map(|(_, line)| line.split_whitespace().count()).sum();
            if words > DECISION_WORDS {
                report.errors.push(format!("{path}: {words} words, more than {DECISION_WORDS}"));
            }
        }
        for (number, line) in prose {
            for start in sentences(line) {
                let error = clause_word(start).map(|word| {
                    format!("{path}:{number}: a sentence begins with `{word}`; name its subject")
                });
                report.errors.extend(error);
            }
            if path.ends_with(".md") {
                let phrase = PHRASES.iter().find(|phrase| line.contains(*phrase));
                let error = phrase.map(|phrase| format!("{path}:{number}: `{phrase}` is in no document"));
                report.errors.extend(error);
            }
        }
    }
}

/// Comments of source code, or the text of a document outside of code blocks, with line numbers from 1. `None` for other
/// files.
fn prose<'a>(path: &str, text: &'a str) -> Option<Vec<(usize, &'a str)>> {
    if path.contains("/dist/") {
        return None;
    }
    let markers: &[&str] = match path.rsplit('.').next()? {
        "md" => &[],
        "rs" | "wgsl" => &["///", "//!", "//"],
        "ts" | "tsx" | "css" => &["/**", "//", "* "],
        "py" | "sh" | "yml" | "toml" => &["#"],
        _ => return None,
    };
    let mut in_block = false;
    let lines = text.lines().enumerate().filter_map(|(index, line)| {
        let line = line.trim_start();
        if markers.is_empty() {
            in_block ^= line.starts_with("```");
            return (!in_block).then_some((index + 1, line));
        }
        let comment = markers.iter().find_map(|marker| line.strip_prefix(marker))?;
        Some((index + 1, comment))
    });
    Some(lines.collect())
}

/// Returns the sentences of a line, which begin at its first letter, and after each full stop, colon and similar marks.
fn sentences(line: &str) -> impl Iterator<Item = &str> {
    let first = line.trim_start_matches(|letter: char| !letter.is_alphanumeric() && letter != '`');
    let ends = line.match_indices(['.', ':', '!', '?', '|']).map(|(end, _)| end + 1);
    let later = ends.filter(|end| line[*end..].starts_with([' ', '*']));
    let later = later.map(|end| line[end..].trim_start_matches([' ', '*', '_', '[']));
    std::iter::once(first).chain(later).filter(|sentence| !sentence.is_empty())
}

/// Returns the clause word at the beginning of a sentence.
fn clause_word(sentence: &str) -> Option<&'static str> {
    let whole = |word: &&&str| {
        let rest = sentence.strip_prefix(**word);
        rest.is_some_and(|rest| !rest.starts_with(|next: char| next.is_alphanumeric()))
    };
    CLAUSE_WORDS.iter().find(whole).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn errors(path: &str, text: &str) -> Vec<String> {
        crate::tidy::errors_of(check, path, text)
    }

    #[test]
    fn clauses_are_found_in_documents_and_comments() {
        let text = "# What it is\n\nA page. Who holds it? **How many.** Whole pages.\n```\n# What\n```\n- Whatever.\n";
        let found = errors("docs/a.md", text);
        let places: Vec<_> =
            found.iter().map(|error| error.split(" a ").next().unwrap_or_default()).collect();
        assert_eq!(places, ["docs/a.md:1:", "docs/a.md:3:", "docs/a.md:3:"]);
        assert_eq!(errors("bench/a.py", "x = 1  # What\n# So many.\n").len(), 1);
        assert_eq!(errors("a.rs", "/// Who reads it.\nlet what = \"What\";\n").len(), 1);
    }

    #[test]
    fn phrases_are_found_in_documents_only() {
        assert_eq!(errors("docs/a.md", "Equal alone and in company.").len(), 1);
        assert_eq!(errors("a.rs", "// Equal alone and in company.").len(), 0);
    }

    #[test]
    fn a_decision_is_one_page() {
        let table = "| word |\n".repeat(DECISION_WORDS);
        assert!(errors("docs/decisions/1.md", &(table.clone() + &"word ".repeat(DECISION_WORDS))).is_empty());
        assert_eq!(errors("docs/decisions/1.md", &(table + &"word ".repeat(DECISION_WORDS + 1))).len(), 1);
    }
}
