//! Regular expressions of ECMA 262 in the library's syntax. A class of characters that the two read differently has those
//! that both allow.

/// Patterns that libraries write, with one that fits them and the format beside them, and needs no look-around.
const KNOWN: [(&str, &str); 6] = [
    // pydantic: decimal
    (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^[+-]?[0-9]{1,18}(?:\.[0-9]{1,9})?$"),
    // zod: email, in two versions
    (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        EMAIL,
    ),
    (
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        EMAIL,
    ),
    // zod: hostname, emoji in two versions, duration
    (
        r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$",
        r"^[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,15}(?:\.[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,15}){0,6}$",
    ),
    (
        r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])[\p{Extended_Pictographic}\p{Emoji_Component}]+$",
        r"^\p{Extended_Pictographic}{1,10}$",
    ),
    (
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
        super::formats::DURATION,
    ),
];

const EMAIL: &str = r"^[A-Za-z0-9_+]{1,20}(?:\.[A-Za-z0-9_+]{1,20}){0,2}@(?:[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,15}\.){1,6}[a-zA-Z]{2,20}$";

/// Result of [`rewrite`].
pub(super) struct Rewritten {
    /// Patterns that all have to match.
    pub all: Vec<String>,
    /// They fit the format beside the pattern as well.
    pub fits_format: bool,
}

/// Rewrites a pattern for the library. `format` is the one beside it.
///
/// # Errors
/// The part that is not supported.
pub(super) fn rewrite(pattern: &str, format: Option<&str>) -> Result<Rewritten, String> {
    if let Some((_, known)) = KNOWN.iter().find(|(known, _)| *known == pattern) {
        return Ok(Rewritten { all: vec![(*known).to_owned()], fits_format: true });
    }
    // The versions that zod distinguishes are all of the format.
    let fits_format = format == Some("uuid") && pattern.starts_with("^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-");
    let mut all = Vec::new();
    let mut rest = pattern.to_owned();
    // `^(?=A)B` is `^A` and `^B`.
    while let Some((ahead, after)) = look_ahead(&rest) {
        all.push(plain(&format!("^(?:{ahead})"))?);
        rest = format!("^{after}");
    }
    all.push(plain(&rest)?);
    Ok(Rewritten { all, fits_format })
}

/// Returns the content of a look-ahead at the beginning, and the rest.
fn look_ahead(pattern: &str) -> Option<(&str, &str)> {
    let inner = pattern.strip_prefix("^(?=")?;
    let end = closing(inner)?;
    let after = &inner[end + 1..];
    // An alternative without it would be one of the whole pattern.
    if has_alternatives(after) { None } else { Some((&inner[..end], after)) }
}

/// Returns the position of the bracket that closes a group.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0;
    tokens(text).find_map(|(at, token, class)| match token {
        "(" if !class => {
            depth += 1;
            None
        }
        ")" if !class && depth == 0 => Some(at),
        ")" if !class => {
            depth -= 1;
            None
        }
        _ => None,
    })
}

fn has_alternatives(text: &str) -> bool {
    let mut depth = 0;
    tokens(text).any(|(_, token, class)| {
        match token {
            "(" if !class => depth += 1,
            ")" if !class => depth -= 1,
            _ => {}
        }
        token == "|" && !class && depth == 0
    })
}

/// Returns the characters and escapes of a pattern with their positions, and true for those in a class.
fn tokens(text: &str) -> impl Iterator<Item = (usize, &str, bool)> {
    let mut at = 0;
    let mut class = false;
    std::iter::from_fn(move || {
        let mut chars = text[at..].chars();
        let first = chars.next()?;
        let mut len = first.len_utf8();
        if first == '\\' {
            len += chars.next().map_or(0, char::len_utf8);
        }
        let token = &text[at..at + len];
        let in_class = class;
        match token {
            "[" if !class => class = true,
            "]" => class = false,
            _ => {}
        }
        at += len;
        Some((at - len, token, in_class && token != "]"))
    })
}

/// Rewrites a pattern without look-around.
fn plain(pattern: &str) -> Result<String, String> {
    const SPACE: &str = r" \t\n\r\x0b\x0c";
    let mut out = String::new();
    for (at, token, class) in tokens(pattern) {
        match (token, class) {
            ("(", false)
                if ["(?=", "(?!", "(?<=", "(?<!"].iter().any(|look| pattern[at..].starts_with(look)) =>
            {
                return Err(
                    "look-around (`(?=`, `(?!`, `(?<=`, `(?<!`) is not supported; list the allowed forms"
                        .into(),
                );
            }
            (r"\b" | r"\B", false) => {
                return Err(format!(
                    "the word boundary `{token}` is not supported; name the characters around it"
                ));
            }
            (token, false) if token.starts_with('\\') && matches!(token.as_bytes()[1..], [b'1'..=b'9']) => {
                return Err(format!("the back-reference `{token}` is not supported; list the allowed forms"));
            }
            (".", false) => out += r"[^\n\r\u{2028}\u{2029}]",
            (r"\s", false) => out.extend(["[", SPACE, "]"]),
            (r"\s", true) => out += SPACE,
            (r"\S", false) => out += r"[^\s\u{feff}]",
            // Operators of classes elsewhere.
            ("[" | "&" | "~", true) => out.extend(["\\", token]),
            (r"\b", true) => out += r"\x08",
            (r"\0", _) => out += r"\x00",
            (
                r"\_" | r"\<" | r"\>" | r"\ " | r"\'" | r#"\""# | r"\%" | r"\," | r"\!" | r"\@" | r"\:"
                | r"\;" | r"\=" | r"\`",
                _,
            ) => {
                out += &token[1..];
            }
            _ => out += token,
        }
    }
    // Anything, in the two ways to write it.
    Ok(out.replace(&format!(r"[{SPACE}\S]"), r"[\s\S]").replace("[^]", r"[\s\S]"))
}

/// Returns a pattern of all strings but these; `None` if it would be long.
pub(super) fn other_than(texts: &[&str]) -> Option<String> {
    const MOST: usize = 1000;
    if texts.iter().map(|text| text.len() + 4).sum::<usize>() > MOST
        || texts.iter().any(|text| text.len() > 60)
    {
        return None;
    }
    let texts: Vec<Vec<char>> = texts.iter().map(|text| text.chars().collect()).collect();
    Some(format!("^(?:{})$", other(&texts.iter().map(Vec::as_slice).collect::<Vec<_>>())))
}

fn other(texts: &[&[char]]) -> String {
    let mut firsts: Vec<char> = texts.iter().filter_map(|text| text.first().copied()).collect();
    firsts.sort_unstable();
    firsts.dedup();
    let code = |c: char| format!(r"\x{{{:x}}}", c as u32);
    if firsts.is_empty() {
        return if texts.is_empty() { r"[\s\S]*".into() } else { r"[\s\S]+".into() };
    }
    let codes: String = firsts.iter().map(|&c| code(c)).collect();
    let mut ways = vec![format!(r"[^{codes}][\s\S]*")];
    for first in firsts {
        let rest: Vec<&[char]> =
            texts.iter().filter(|text| text.first() == Some(&first)).map(|text| &text[1..]).collect();
        ways.push(format!("{}(?:{})", code(first), other(&rest)));
    }
    if !texts.iter().any(|text| text.is_empty()) {
        ways.push(String::new());
    }
    ways.join("|")
}

/// Returns a pattern of strings whose length is within bounds.
pub(super) fn of_length(least: u64, most: Option<u64>) -> String {
    let most = most.map_or(String::new(), |most| most.to_string());
    format!(r"^[\s\S]{{{least},{most}}}$")
}
