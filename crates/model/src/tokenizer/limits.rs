//! Bounds of a file's tokenizer, so that loading and encoding need bounded time and memory.
//!
//! All bounds are far beyond known tokenizers. The pure-Rust regular expressions of a `tokenizer.json` can backtrack,
//! so each is tried on texts that provoke backtracking; its own limit of a million steps per match also applies.

use serde::Deserialize;
use serde_json::Value;

use super::TokenizerError;

/// Most bytes of a token's name.
const MAX_NAME: usize = 1000;

/// Most bytes of the names of all added tokens. Known vocabularies have up to some 100 kB.
const MAX_ADDED: usize = 4 << 20;

/// Most normalizers, pre-tokenizers, decoders or post-processors in a row.
const MAX_STEPS: usize = 64;

/// Maximum ratio of a normalized text's length to the original. Known tokenizers have up to 33.
const MAX_GROWTH: usize = 64;

/// Maximum bytes of text that is added before a text, or around each part of a word.
const MAX_AFFIX: usize = 64;

/// Most tokens that are put before or behind a prompt.
pub(super) const MAX_TEMPLATE: usize = 64;

/// Maximum characters of a word for WordPiece, whose time is quadratic.
const MAX_WORD: u64 = 1000;

/// Most steps that a regular expression may go back on a text of [`PROBE`] characters.
const MAX_BACKTRACKS: usize = 100_000;
const PROBE: usize = 2000;

fn refused<T>(what: &str, problem: String) -> Result<T, TokenizerError> {
    Err(TokenizerError::Invalid { what: what.into(), problem })
}

/// Refuses a token whose name is too long.
pub(super) fn check_name(what: &str, id: usize, name: &[u8]) -> Result<(), TokenizerError> {
    if name.len() <= MAX_NAME {
        return Ok(());
    }
    let start = String::from_utf8_lossy(&name[..32]).into_owned();
    refused(
        what,
        format!("token {id}, `{start}...`, has {} bytes; at most {MAX_NAME} are accepted", name.len()),
    )
}

/// Refuses more added tokens than can be looked for.
pub(super) fn check_added(what: &str, bytes: usize) -> Result<(), TokenizerError> {
    match bytes {
        0..=MAX_ADDED => Ok(()),
        _ => refused(what, format!("the added tokens have {bytes} bytes; at most {MAX_ADDED} are accepted")),
    }
}

/// The parts of a `tokenizer.json` that are checked before the tokenizer is built.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    id: usize,
    content: String,
}

#[derive(Default, Deserialize)]
struct Model {
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    max_input_chars_per_word: Option<u64>,
}

/// Checks a `tokenizer.json` that is well-formed JSON.
pub(super) fn check_json(json: &[u8]) -> Result<(), TokenizerError> {
    const WHAT: &str = "tokenizer.json";
    let parts: Parts = match serde_json::from_slice(json) {
        Ok(parts) => parts,
        Err(error) => return refused(WHAT, error.to_string()),
    };
    for token in &parts.added_tokens {
        check_name(WHAT, token.id, token.content.as_bytes())?;
    }
    check_added(WHAT, parts.added_tokens.iter().map(|token| token.content.len()).sum())?;
    let affixes = [&parts.model.continuing_subword_prefix, &parts.model.end_of_word_suffix];
    for affix in affixes.into_iter().flatten() {
        check_affix(affix)?;
    }
    if let Some(most) = parts.model.max_input_chars_per_word.filter(|&most| most > MAX_WORD) {
        return refused(
            WHAT,
            format!("`max_input_chars_per_word` is {most}; at most {MAX_WORD} are accepted"),
        );
    }
    for (name, part) in [
        ("normalizer", &parts.normalizer),
        ("pre_tokenizer", &parts.pre_tokenizer),
        ("post_processor", &parts.post_processor),
        ("decoder", &parts.decoder),
    ] {
        let mut steps = Vec::new();
        flatten(part, &mut steps);
        if steps.len() > MAX_STEPS {
            return refused(
                WHAT,
                format!("`{name}` has {} steps; at most {MAX_STEPS} are accepted", steps.len()),
            );
        }
        for step in &steps {
            check_regex(step)?;
        }
        if name == "normalizer" {
            check_growth(&steps)?;
        }
    }
    Ok(())
}

/// The steps of nested sequences, in order.
fn flatten<'v>(part: &'v Value, steps: &mut Vec<&'v Value>) {
    let lists = ["normalizers", "pretokenizers", "processors", "decoders"];
    let list = lists.iter().find_map(|name| part.get(name)?.as_array());
    match list {
        Some(list) => list.iter().for_each(|step| flatten(step, steps)),
        None if part.is_object() => steps.push(part),
        None => {}
    }
}

fn check_affix(affix: &str) -> Result<(), TokenizerError> {
    match affix.len() {
        0..=MAX_AFFIX => Ok(()),
        bytes => refused(
            "tokenizer.json",
            format!("a prefix or suffix has {bytes} bytes; at most {MAX_AFFIX} are accepted"),
        ),
    }
}

/// Multiplies the maximum growth of each step.
fn check_growth(steps: &[&Value]) -> Result<(), TokenizerError> {
    let mut growth = 1_usize;
    for (index, step) in steps.iter().enumerate() {
        let kind = step["type"].as_str().unwrap_or_default();
        let factor = match kind {
            "Replace" => {
                let content = step["content"].as_str().map_or(0, str::len);
                match (step["pattern"]["String"].as_str(), step["pattern"]["Regex"].as_str()) {
                    // Found between all characters.
                    (Some(""), _) => 1 + content,
                    (Some(pattern), _) => content.div_ceil(pattern.len()),
                    (_, Some(pattern)) if matches_nothing(pattern) => 1 + content,
                    _ => content,
                }
            }
            "Prepend" => {
                check_affix(step["prepend"].as_str().unwrap_or_default())?;
                1
            }
            // The string for one character of at most three bytes ends with a zero byte.
            "Precompiled" => {
                let map = step["precompiled_charsmap"].as_str().unwrap_or_default();
                longest_replacement(map).div_ceil(3)
            }
            "ByteLevel" => 2,
            _ => 1,
        };
        growth = growth.saturating_mul(factor.max(1));
        if growth > MAX_GROWTH {
            return refused(
                "tokenizer.json",
                format!(
                    "normalizer {index}, `{kind}`, can make a text {growth} times as long; at most {MAX_GROWTH} times is accepted"
                ),
            );
        }
    }
    Ok(())
}

fn matches_nothing(pattern: &str) -> bool {
    fancy_regex::Regex::new(pattern).is_ok_and(|regex| regex.is_match("").unwrap_or(true))
}

/// Returns the longest string of SentencePiece's compiled map, which is base64 of the length of a trie, the trie, and
/// the strings.
fn longest_replacement(map: &str) -> usize {
    let mut bits = 0_u32;
    let mut held = 0;
    let mut bytes = Vec::with_capacity(map.len() / 4 * 3);
    for digit in map.bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => continue,
        };
        bits = bits << 6 | u32::from(value);
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
        }
    }
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return 0 };
    let strings = rest.get(u32::from_le_bytes(*length) as usize..).unwrap_or_default();
    strings.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(0)
}

/// Tries the regular expression of a step on runs of the characters that it names, and of some others.
fn check_regex(step: &Value) -> Result<(), TokenizerError> {
    let Some(pattern) = step["pattern"]["Regex"].as_str() else { return Ok(()) };
    let problem = |problem: String| {
        let start: String = pattern.chars().take(64).collect();
        refused("tokenizer.json", format!("the regular expression `{start}` {problem}"))
    };
    let regex = fancy_regex::RegexBuilder::new(pattern).backtrack_limit(MAX_BACKTRACKS).build();
    let regex = match regex {
        Ok(regex) => regex,
        Err(error) => return problem(format!("is not supported: {error}")),
    };
    let mut characters: Vec<char> = pattern.chars().chain("aA0 \n!é中".chars()).collect();
    characters.sort_unstable();
    characters.dedup();
    for character in characters.into_iter().take(128) {
        for text in [
            character.to_string().repeat(PROBE),
            character.to_string().repeat(PROBE) + "\u{1}",
            format!("{character}a").repeat(PROBE / 2) + "\u{1}",
        ] {
            // The first match decides: later ones look at less of the same.
            if regex.find(&text).is_err() {
                return problem(format!("backtracks more than {MAX_BACKTRACKS} times on {PROBE} characters"));
            }
        }
    }
    Ok(())
}
