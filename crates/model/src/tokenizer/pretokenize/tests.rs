use std::sync::OnceLock;

use expect_test::{Expect, expect};
use proptest::prelude::*;
use tokenizers::{
    OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, SplitDelimiterBehavior,
    pre_tokenizers::split::{Split, SplitPattern},
};

use super::*;

/// A step as `tokenizer.json` files have it: one expression with look-ahead, run by a backtracking engine.
fn original(step: &Step) -> Split {
    let pattern = match step {
        Step::Split(regex, spaces) => {
            let tail = match spaces {
                Spaces::Keep => r"|\s+",
                Spaces::GiveBack | Spaces::GiveBackUnlessNewline => r"|\s+(?!\S)|\s+",
                Spaces::PowersUnlessNewline => {
                    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
                }
            };
            match regex.as_str().strip_suffix(r"|\s+") {
                Some(head) => format!("{head}{tail}"),
                None => regex.as_str().to_owned(),
            }
        }
        Step::Thousands { runs, unless_before } => {
            let digit = runs.as_str().trim_end_matches('+');
            let end = if unless_before.is_some() { r"\b".to_owned() } else { format!("(?!{digit})") };
            format!("{digit}{{1,3}}(?=(?:{digit}{{3}})*{end})")
        }
    };
    Split::new(SplitPattern::Regex(pattern), SplitDelimiterBehavior::Isolated, false).unwrap()
}

/// Returns one pre-tokenizer of each family, with its steps as in `tokenizer.json` files.
fn families() -> &'static [(&'static str, PreTokenizer, Vec<Split>)] {
    static FAMILIES_WITH_ORIGINALS: OnceLock<Vec<(&str, PreTokenizer, Vec<Split>)>> = OnceLock::new();
    FAMILIES_WITH_ORIGINALS.get_or_init(|| {
        let family = |(_, names): &(Family, &'static [&'static str])| {
            let pre = PreTokenizer::new(names[0]).unwrap();
            let originals = pre.steps.iter().map(original).collect();
            (names[0], pre, originals)
        };
        FAMILIES.iter().map(family).collect()
    })
}

fn check_against_originals(text: &str) {
    for (name, pre, originals) in families() {
        let mut expected = PreTokenizedString::from(text);
        originals.iter().for_each(|split| split.pre_tokenize(&mut expected).unwrap());
        let expected: Vec<&str> = expected
            .get_splits(OffsetReferential::Original, OffsetType::Byte)
            .into_iter()
            .map(|(word, ..)| word)
            .filter(|word| !word.is_empty())
            .collect();
        let actual: Vec<&str> = pre.words(text).into_iter().map(|word| &text[word]).collect();
        assert_eq!(actual, expected, "{name}: {text:?}");
    }
}

proptest! {
    #[test]
    fn words_are_those_of_the_originals(text in "[ab Aé'sRE1٣½ \t\n\r\u{a0}\u{3000}.,/!(_你か한\u{301}ह\u{93f}🙂]{0,30}") {
        check_against_originals(&text);
    }

    #[test]
    fn words_of_spaces_are_those_of_the_originals(text in "[ \t\n\rx1.]{0,24}") {
        check_against_originals(&text);
    }

    #[test]
    fn words_of_anything_are_those_of_the_originals(text in any::<String>()) {
        check_against_originals(&text);
    }
}

#[test]
fn long_runs_of_spaces_are_cut_as_by_the_originals() {
    for length in [1, 2, 3, 4, 5, 7, 8, 9, 511, 512, 513, 1030] {
        let spaces = " ".repeat(length);
        check_against_originals(&spaces);
        check_against_originals(&format!("{spaces}x"));
        check_against_originals(&format!("x{spaces}\n{spaces}."));
    }
}

#[test]
fn every_name_has_a_pre_tokenizer() {
    let names: Vec<&str> = FAMILIES.iter().flat_map(|(_, names)| names.iter().copied()).collect();
    for name in &names {
        PreTokenizer::new(name).unwrap();
    }
    let mut unique = names.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), names.len());
    let error = PreTokenizer::new("klingon").unwrap_err().to_string();
    assert!(
        error.starts_with("pre-tokenizer `klingon` is not supported (supported: default, llama3,"),
        "{error}"
    );
}

fn check(name: &str, text: &str, expected: Expect) {
    let words = PreTokenizer::new(name).unwrap().words(text);
    let words: Vec<String> = words.into_iter().map(|word| format!("{:?}", &text[word])).collect();
    expected.assert_eq(&words.join(" "));
}

#[test]
fn words_of_some_families() {
    let text = "I'LL pay  $1234,50 \n\n für 你好x!";
    check(
        "gpt-2",
        text,
        expect![[r#""I" "'" "LL" " pay" " " " $" "1234" "," "50" " \n\n" " für" " 你好x" "!""#]],
    );
    check(
        "llama-bpe",
        text,
        expect![[r#""I" "'LL" " pay" " " " $" "123" "4" "," "50" " \n\n" " für" " 你好x" "!""#]],
    );
    check(
        "qwen2",
        text,
        expect![[r#""I" "'LL" " pay" " " " $" "1" "2" "3" "4" "," "5" "0" " \n\n" " für" " 你好x" "!""#]],
    );
    check(
        "deepseek-v3",
        text,
        expect![[r#""I" "'LL" " pay" " " " $" "123" "4" "," "50" " \n\n" " für" " " "你好" "x" "!""#]],
    );
    check(
        "kimi-k2",
        text,
        expect![[r#""I'LL" " pay" " " " $" "123" "4" "," "50" " \n\n" " für" " " "你好" "x" "!""#]],
    );
    check(
        "gpt-4o",
        "camelCaseWORD it's HTTPServer's",
        expect![[r#""camel" "Case" "WORD" " it's" " HTTPServer's""#]],
    );
    check("superbpe", "12345678 items", expect![[r#""12" "345" "678" " items""#]]);
    check("tiny_aya", "1234567 and 1234x", expect![[r#""1" "234" "567" " and" " " "123" "4" "x""#]]);
}
