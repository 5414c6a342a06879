//! Formatting of numbers.

use std::time::Duration;

pub use paguro_server::units::bytes;

/// Formats a count: `21.0 M`, `1.1 B`.
pub fn count(n: u64) -> String {
    match n as f64 {
        n if n >= 999.95e6 => format!("{:.1} B", n / 1e9),
        n if n >= 999.95e3 => format!("{:.1} M", n / 1e6),
        n if n >= 999.95 => format!("{:.1} k", n / 1e3),
        n => format!("{n}"),
    }
}

/// Formats a rate with three significant digits: `312`, `8.52`.
pub fn rate(per_second: f64) -> String {
    match per_second {
        x if x >= 99.95 => format!("{x:.0}"),
        x if x >= 9.995 => format!("{x:.1}"),
        x => format!("{x:.2}"),
    }
}

/// Rounds a measurement to three decimals for JSON.
pub fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// Breaks a text between words into lines of at most `width` characters; longer words get their own line. Text between
/// backticks is one word, and so is a command line from `paguro` on, so that both can be copied.
pub fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in words(text) {
        match lines.last_mut().filter(|line| line.chars().count() + 1 + word.chars().count() <= width) {
            Some(line) => {
                line.push(' ');
                line.push_str(word);
            }
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

/// Appends blanks up to `width` characters.
pub fn pad(text: &str, width: usize) -> String {
    format!("{text:width$}")
}

/// Returns the words of [`wrapped`].
fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text.trim();
    std::iter::from_fn(move || {
        let end = match rest {
            "" => return None,
            _ if rest.starts_with("paguro ") => rest.len(),
            _ => {
                // A backtick inside of a word begins such a text as well: (`--ctx 8`.
                let blank = rest.find(char::is_whitespace).unwrap_or(rest.len());
                let is_open = rest[..blank].matches('`').count() % 2 == 1;
                let close = rest[blank..].find('`').filter(|_| is_open).map(|at| blank + at + 1);
                close.map_or(blank, |close| {
                    close + rest[close..].find(char::is_whitespace).unwrap_or(rest.len() - close)
                })
            }
        };
        let word = &rest[..end];
        rest = rest[end..].trim_start();
        Some(word)
    })
}

/// Returns tokens per second; `None` without tokens or time.
pub fn tokens_per_second(tokens: usize, time: Duration) -> Option<f64> {
    (tokens > 0 && !time.is_zero()).then(|| tokens as f64 / time.as_secs_f64())
}

/// Formats an age in its largest unit: `3 hours ago`.
pub fn ago(age: Duration) -> String {
    const UNITS: [(u64, &str); 4] = [(7 * 86400, "week"), (86400, "day"), (3600, "hour"), (60, "minute")];
    let seconds = age.as_secs();
    match UNITS.iter().find(|(unit, _)| seconds >= *unit) {
        Some((unit, noun)) => format!("{} ago", plural((seconds / unit) as usize, noun)),
        None => "just now".to_owned(),
    }
}

/// Formats a count with its noun: `1 token`, `2 tokens`.
pub fn plural(n: usize, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_four_digits_at_most() {
        let table = [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.0 kB"),
            (999_949, "999.9 kB"),
            (999_950, "1.0 MB"),
            (22_441_664, "22.4 MB"),
            (u64::MAX, "18446744.1 TB"),
        ];
        for (n, text) in table {
            assert_eq!(bytes(n), text);
        }
        let table = [(12, "12"), (21_000_000, "21.0 M"), (1_100_048_384, "1.1 B"), (999_999_999, "1.0 B")];
        for (n, text) in table {
            assert_eq!(count(n), text);
        }
    }

    #[test]
    fn texts_are_wrapped_between_words() {
        assert_eq!(wrapped("how full the context is", 12), ["how full the", "context is"]);
        assert_eq!(wrapped("extraordinary thing", 5), ["extraordinary", "thing"]);
        assert_eq!(wrapped("give (`--ctx 8 x`) or more", 8), ["give", "(`--ctx 8 x`)", "or more"]);
        assert_eq!(wrapped("then: paguro run tales hi", 10), ["then:", "paguro run tales hi"]);
        assert_eq!(wrapped("an odd ` mark", 6), ["an odd", "` mark"]);
        assert!(wrapped(" ", 5).is_empty());
        assert_eq!(rounded(64.27347499999999), 64.273);
    }

    #[test]
    fn ages_have_one_unit() {
        let table = [
            (0, "just now"),
            (60, "1 minute ago"),
            (7199, "1 hour ago"),
            (3 * 86400, "3 days ago"),
            (30 * 86400, "4 weeks ago"),
        ];
        for (seconds, text) in table {
            assert_eq!(ago(Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn rates_have_three_digits() {
        for (x, text) in [(311.6, "312"), (99.96, "100"), (44.04, "44.0"), (9.996, "10.0"), (8.519, "8.52")] {
            assert_eq!(rate(x), text);
        }
    }
}
