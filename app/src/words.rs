//! Words of file names, by which files belong together.

use std::collections::BTreeSet;

/// Returns the words of a file's name without those that name formats.
pub fn words(name: &str) -> BTreeSet<String> {
    let lower = name.to_ascii_lowercase();
    let words = lower.split(|c: char| !c.is_ascii_alphanumeric());
    let is_format = |word: &str| {
        let rest = word.trim_start_matches(['i', 't', 'b']);
        ["mmproj", "gguf", "model", "of", "k", "m", "s", "l", "xl", "ud", "0", "1", ""].contains(&word)
            || rest
                .strip_prefix(['q', 'f'])
                .is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))
            || word.bytes().all(|byte| byte.is_ascii_digit()) && word.len() == 5
    };
    words.filter(|word| !is_format(word)).map(str::to_owned).collect()
}
