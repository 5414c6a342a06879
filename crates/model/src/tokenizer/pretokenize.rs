//! Splitting of text into words before byte-pair encoding, as each model family was trained.
//!
//! GGUF files only name the method (`tokenizer.ggml.pre`). The expressions are those of the models' `tokenizer.json`
//! files; llama.cpp (`llama-vocab.cpp`) defines the names. Most expressions end in `\s+(?!\S)|\s+`: the look-ahead
//! leaves the last space to the following word. [`regex`] runs in linear time because it has no look-ahead, so they are
//! written with `\s+` alone, and [`Spaces`] implements the look-ahead.

use std::ops::Range;

use regex::Regex;

use super::TokenizerError;

/// A step: every word is split at the matches, and the text between matches also becomes words.
#[derive(Debug)]
enum Step {
    Split(Regex, Spaces),
    /// Runs of digits are cut into threes from the right: `1234567` is `1 234 567`. Runs before something that
    /// `unless_before` matches are left alone.
    Thousands {
        runs: Regex,
        unless_before: Option<Regex>,
    },
}

/// Handling of a match that consists of whitespace.
#[derive(Clone, Copy, Debug)]
enum Spaces {
    /// The match is unchanged.
    Keep,
    /// `\s+(?!\S)|\s+`: its last character is given back if something follows, unless it is the only one.
    GiveBack,
    /// Like the previous one, after `\s*[\r\n]+`: a match that ends in a line break is unchanged.
    GiveBackUnlessNewline,
    /// `\s{512}(?!\S)|\s{256}(?!\S)|...|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}` after `\s*[\r\n]+` (Jais 2).
    PowersUnlessNewline,
}

/// Properties of a named pre-tokenizer besides its words.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    steps: Vec<Step>,
    /// True if a word that is a token becomes that token, independent of the merges.
    pub(super) ignore_merges: bool,
    /// True if text begins with BOS unless the file states otherwise.
    pub(super) add_bos: bool,
    /// Words are bytes written as the 256 printable characters of GPT-2. If not, they are plain UTF-8 with `▁` for
    /// spaces, and bytes fall back to `<0xAB>`.
    pub(super) byte_level: bool,
}

const CONTRACTIONS: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
const LINES: &str = r"[^\n]+|\n+";
const SYMBOLS_AND_SPACES: &str = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+";
const HAN_AND_KANA: &str = "[一-龥぀-ゟ゠-ヿ]+";
const DEEPSEEK3_WORDS: &str =
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##;
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

/// Letters that have case, as DeepSeek LLM's `tokenizer.json` spells them out.
const CASED_LETTERS: &str = "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃";

/// Returns the words of one case, or capitalized, as in GPT-4o and Tekken; `tail` may follow each.
fn cased_words(not_han: &str, tail: &str) -> String {
    let upper = format!(r"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{not_han}]");
    let lower = format!(r"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{not_han}]");
    format!(r"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{tail}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{tail}")
}

/// The names, family by family; each family is one arm of [`PreTokenizer::new`].
const FAMILIES: &[(Family, &[&str])] = &[
    (Family::Default, &["default"]),
    (
        Family::Llama3,
        &[
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
    ),
    (Family::Glm4, &["glm4", "glm5"]),
    (Family::Dbrx, &["dbrx", "smaug-bpe", "chatglm-bpe"]),
    (Family::Jais2, &["jais-2"]),
    (Family::DeepseekLlm, &["deepseek-llm"]),
    (Family::DeepseekCoder, &["deepseek-coder"]),
    (Family::Deepseek3, &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"]),
    (Family::Spark, &["spark2_5"]),
    (Family::Youtu, &["youtu"]),
    (Family::Falcon, &["falcon"]),
    (
        Family::Starcoder,
        &["starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"],
    ),
    (
        Family::Gpt2,
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "gigachat",
            "jina-v2-es",
            "jina-v2-de",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
            "exaone4",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
        ],
    ),
    (
        Family::Qwen2,
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
    ),
    (Family::Qwen35, &["qwen35"]),
    (Family::Ufakzeka, &["ufakzeka"]),
    (Family::Laguna, &["laguna"]),
    (Family::Bloom, &["bloom", "poro-chat", "gpt3-finnish"]),
    (Family::Viking, &["viking"]),
    (Family::Tekken, &["tekken"]),
    (Family::Chameleon, &["chameleon"]),
    (Family::Gpt4o, &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"]),
    (Family::GraniteEmbedding, &["granite-embed-multi-97m"]),
    (Family::TinyAya, &["tiny_aya", "cohere2moe"]),
    (Family::KimiK2, &["kimi-k2"]),
    (Family::Superbpe, &["superbpe"]),
    (Family::Bailing, &["bailingmoe", "bailingmoe2", "llada-moe"]),
    (Family::SeedCoder, &["seed-coder"]),
    (Family::Afmoe, &["afmoe"]),
    (Family::ExaoneMoe, &["exaone-moe"]),
    (Family::MiniCpm5, &["minicpm5"]),
    (Family::Gemma4, &["gemma4", "granite-embed-multi-311m", "sarvam-moe"]),
];

/// Returns one name of each family: first those that ignore merges for words that are tokens, or do not, as given; the most common
/// ones first, and the one without a meaning of its own last.
pub(super) fn names(ignore_merges: bool) -> impl Iterator<Item = &'static str> {
    let differs = move |name: &&str| {
        FAMILIES
            .iter()
            .any(|(family, names)| names.contains(name) && family.ignores_merges() != ignore_merges)
    };
    common_names().filter(move |name| !differs(name)).chain(common_names().filter(differs))
}

fn common_names() -> impl Iterator<Item = &'static str> {
    const COMMON: [&str; 6] = ["llama-bpe", "qwen2", "qwen35", "gpt-2", "gpt-4o", "tekken"];
    let is_common = |names: &[&str]| names.iter().any(|name| COMMON.contains(name));
    let others = FAMILIES.iter().filter(move |(_, names)| !is_common(names)).map(|(_, names)| names[0]);
    COMMON.into_iter().chain(others.filter(|&name| name != "default")).chain(["default"])
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Default,
    Llama3,
    Glm4,
    Dbrx,
    Jais2,
    DeepseekLlm,
    DeepseekCoder,
    Deepseek3,
    Spark,
    Youtu,
    Falcon,
    Starcoder,
    Gpt2,
    Qwen2,
    Qwen35,
    Ufakzeka,
    Laguna,
    Bloom,
    Viking,
    Tekken,
    Chameleon,
    Gpt4o,
    GraniteEmbedding,
    TinyAya,
    KimiK2,
    Superbpe,
    Bailing,
    SeedCoder,
    Afmoe,
    ExaoneMoe,
    MiniCpm5,
    Gemma4,
}

impl Family {
    fn ignores_merges(self) -> bool {
        use Family as F;
        matches!(self, F::Llama3 | F::Glm4 | F::Youtu | F::Tekken | F::GraniteEmbedding | F::MiniCpm5)
    }
}

impl PreTokenizer {
    /// Returns the pre-tokenizer that files call `name`.
    pub(super) fn new(name: &str) -> Result<Self, TokenizerError> {
        let family = FAMILIES.iter().find(|(_, names)| names.contains(&name)).map(|&(family, _)| family);
        let Some(family) = family else {
            let supported: Vec<&str> = FAMILIES.iter().flat_map(|(_, names)| names.iter().copied()).collect();
            return Err(TokenizerError::UnsupportedPreTokenizer {
                name: name.into(),
                supported: supported.join(", "),
            });
        };
        let steps = steps(family).map_err(|error| TokenizerError::Invalid {
            what: format!("pre-tokenizer `{name}`"),
            problem: error.to_string(),
        })?;
        use Family as F;
        Ok(Self {
            steps,
            ignore_merges: family.ignores_merges(),
            add_bos: matches!(family, F::Llama3 | F::Tekken | F::Chameleon),
            byte_level: family != F::Gemma4,
        })
    }

    /// Returns the words of `text` in order, which cover all of it.
    pub(super) fn words(&self, text: &str) -> Vec<Range<usize>> {
        let mut words: Vec<_> = std::iter::once(0..text.len()).collect();
        for step in &self.steps {
            let mut cut = Vec::with_capacity(words.len() + text.len() / 4);
            for word in words {
                let start = word.start;
                let mut push = |range: Range<usize>| {
                    if !range.is_empty() {
                        cut.push(start + range.start..start + range.end);
                    }
                };
                match step {
                    Step::Split(regex, spaces) => split(&text[word], regex, *spaces, &mut push),
                    Step::Thousands { runs, unless_before } => {
                        thousands(&text[word], runs, unless_before.as_ref(), &mut push);
                    }
                }
            }
            words = cut;
        }
        words
    }
}

fn split(text: &str, regex: &Regex, spaces: Spaces, push: &mut impl FnMut(Range<usize>)) {
    let mut done = 0;
    while let Some(found) = regex.find_at(text, done) {
        let end = found.start() + spaces.kept(found.as_str(), found.end() == text.len());
        push(done..found.start());
        push(found.start()..end);
        // No expression here matches an empty text; this prevents an endless loop.
        if end == done {
            break;
        }
        done = end;
    }
    push(done..text.len());
}

impl Spaces {
    /// Returns the number of bytes that stay in a match; `at_end` is true if no text follows.
    fn kept(self, matched: &str, at_end: bool) -> usize {
        let newline_stays = matches!(self, Spaces::GiveBackUnlessNewline | Spaces::PowersUnlessNewline);
        let last = matched.chars().next_back();
        let all_stays = match self {
            Spaces::Keep => true,
            _ => {
                (newline_stays && matches!(last, Some('\r' | '\n')))
                    || !last.is_some_and(char::is_whitespace)
                    || !matched.starts_with(char::is_whitespace)
            }
        };
        if all_stays {
            return matched.len();
        }
        let count = matched.chars().count();
        let keep = match self {
            Spaces::PowersUnlessNewline => {
                // A repetition may only stop before whitespace or at the end of the text.
                let fits = |n: usize| n < count || (n == count && at_end);
                [512, 256, 128, 64, 32, 16, 8, 4, 2].into_iter().find(|&n| fits(n)).unwrap_or(1)
            }
            _ if at_end || count == 1 => count,
            _ => count - 1,
        };
        matched.char_indices().nth(keep).map_or(matched.len(), |(at, _)| at)
    }
}

fn thousands(text: &str, runs: &Regex, unless_before: Option<&Regex>, push: &mut impl FnMut(Range<usize>)) {
    let mut done = 0;
    for run in runs.find_iter(text) {
        if unless_before.is_some_and(|follower| follower.is_match(&text[run.end()..])) {
            continue;
        }
        push(done..run.start());
        done = run.start();
        let count = run.as_str().chars().count();
        for (index, (at, _)) in run.as_str().char_indices().enumerate() {
            if index > 0 && (count - index) % 3 == 0 {
                push(done..run.start() + at);
                done = run.start() + at;
            }
        }
        push(done..run.end());
        done = run.end();
    }
    push(done..text.len());
}

/// Returns the steps of a family.
fn steps(family: Family) -> Result<Vec<Step>, regex::Error> {
    use Spaces::{GiveBack, GiveBackUnlessNewline as GiveBackOrNewline, Keep, PowersUnlessNewline};
    let split = |pattern: &str, spaces| Regex::new(pattern).map(|regex| Step::Split(regex, spaces));
    let thousands = |runs: &str, unless_before: Option<&str>| {
        let unless_before = unless_before.map(Regex::new).transpose()?;
        Ok(Step::Thousands { runs: Regex::new(runs)?, unless_before })
    };
    // Letters with one character before them, then `numbers`, then symbols and spaces: Llama 3 and similar ones.
    let words = |numbers: &str| format!(r"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}|{SYMBOLS_AND_SPACES}");
    let llama3 = |numbers: &str| split(&format!("{CONTRACTIONS}|{}", words(numbers)), GiveBackOrNewline);
    // GPT-4o and Tekken also include a slash after symbols.
    let cased = |not_han: &str, tail: &str, numbers: &str, after_symbols: &str| {
        let words = cased_words(not_han, tail);
        let rest = format!(r" ?[^\s\p{{L}}\p{{N}}]+{after_symbols}*|\s*[\r\n]+|\s+");
        split(&format!("{words}|{numbers}|{rest}"), GiveBackOrNewline)
    };
    let contractions = format!("{CONTRACTIONS}?");
    Ok(match family {
        Family::Default => vec![
            split(r"[\p{P}\$\+<=>\^~\|]+", Keep)?,
            split(GPT2, GiveBack)?,
            split(r"\p{N}+", Keep)?,
            split("[0-9][0-9][0-9]", Keep)?,
        ],
        Family::Llama3 | Family::Glm4 | Family::Dbrx => vec![llama3(r"\p{N}{1,3}")?],
        Family::Jais2 => {
            vec![split(&format!("{CONTRACTIONS}|{}", words(r"\p{N}{1,3}")), PowersUnlessNewline)?]
        }
        Family::DeepseekLlm => vec![
            split(r"[\r\n]", Keep)?,
            split(&format!(r"\s?[{CASED_LETTERS}]+"), Keep)?,
            split(r"\s?[!-/:-~！-／：-～‘-‟　-。]+", Keep)?,
            split(r"\s+$", Keep)?,
            split("[一-龥ࠀ-一가-퟿]+", Keep)?,
            split(r"\p{N}+", Keep)?,
        ],
        Family::DeepseekCoder => vec![
            split(r"[\r\n]", Keep)?,
            split(r"\s?\p{L}+", Keep)?,
            split(r"\s?\p{P}+", Keep)?,
            split("[一-龥ࠀ-一가-퟿]+", Keep)?,
            split(r"\p{N}", Keep)?,
        ],
        Family::Deepseek3 => vec![
            split(r"\p{N}{1,3}", Keep)?,
            split(HAN_AND_KANA, Keep)?,
            split(
                &format!(r"{DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|\s+"),
                GiveBackOrNewline,
            )?,
        ],
        Family::Spark => vec![
            split(r"\p{N}{1,3}", Keep)?,
            split(HAN_AND_KANA, Keep)?,
            split(&format!(r"{DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+"), GiveBack)?,
            split(r"\p{N}", Keep)?,
        ],
        Family::Youtu => vec![
            split("[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", Keep)?,
            cased("", &contractions, r"\p{N}", r"[\r\n/]")?,
        ],
        Family::Falcon => vec![
            split(r"[\p{P}\$\+<=>\^~\|`]+", Keep)?,
            split(GPT2, GiveBack)?,
            split("[0-9][0-9][0-9]", Keep)?,
        ],
        Family::Starcoder => vec![split(r"\p{N}", Keep)?, split(GPT2, GiveBack)?],
        Family::Gpt2 => vec![split(GPT2, GiveBack)?],
        Family::Qwen2 => vec![llama3(r"\p{N}")?],
        Family::Qwen35 => vec![split(
            &format!(
                r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+"
            ),
            GiveBackOrNewline,
        )?],
        Family::Ufakzeka => vec![split(&words(r"\p{N}"), GiveBackOrNewline)?],
        Family::Laguna => vec![split(LINES, Keep)?, llama3(r"\p{N}")?],
        Family::Bloom => vec![split(BLOOM, Keep)?],
        Family::Viking => vec![split(BLOOM, Keep)?, split(r"\p{N}", Keep)?],
        Family::Tekken => vec![cased("", "", r"\p{N}", r"[\r\n/]")?],
        Family::Chameleon => vec![
            split("<sentinel:[0-9]+>", Keep)?,
            split("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", Keep)?,
            split(r"([\t\n]|    |  )", Keep)?,
            split(r"\p{N}", Keep)?,
            split(r"[\p{P}!-/:-@\[-`{-~]", Keep)?,
            split(GPT2, GiveBack)?,
        ],
        Family::Gpt4o | Family::GraniteEmbedding => {
            vec![cased("", &contractions, r"\p{N}{1,3}", r"[\r\n/]")?]
        }
        Family::TinyAya => {
            vec![thousands(r"\d+", Some(r"^\w"))?, cased("", &contractions, r"\p{N}{1,3}", r"[\r\n/]")?]
        }
        Family::KimiK2 => {
            let words = cased_words(r"&&[^\p{Han}]", &contractions);
            vec![split(
                &format!(r"\p{{Han}}+|{words}|\p{{N}}{{1,3}}|{SYMBOLS_AND_SPACES}"),
                GiveBackOrNewline,
            )?]
        }
        Family::Superbpe => vec![split(r"\p{N}+", Keep)?, thousands(r"\d+", None)?],
        Family::Bailing => vec![split(
            &format!(
                r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+"
            ),
            GiveBackOrNewline,
        )?],
        Family::SeedCoder => vec![split(
            &format!(
                r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+"
            ),
            GiveBackOrNewline,
        )?],
        Family::Afmoe => vec![
            thousands(r"\p{N}+", None)?,
            split("[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+", Keep)?,
            split(
                &format!(r"{DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|\s+"),
                GiveBackOrNewline,
            )?,
        ],
        Family::ExaoneMoe => vec![split(
            &format!(
                r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+"
            ),
            GiveBackOrNewline,
        )?],
        Family::MiniCpm5 => vec![split(r"\p{N}{1,3}", Keep)?, llama3(r"\p{N}+")?],
        Family::Gemma4 => vec![split(LINES, Keep)?],
    })
}

#[cfg(test)]
mod tests;
