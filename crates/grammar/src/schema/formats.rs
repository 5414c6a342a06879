//! Formats of strings in a JSON schema. Some patterns of the grammar library allow strings that validators refuse: 29
//! February in any year, a 60th second at any time, labels of host names of any length. For these, `format` is replaced
//! by a pattern that every validator accepts.

/// `duration` of RFC 3339 without weeks, which not all validators accept.
pub(super) const DURATION: &str = "^P(?:[0-9]{1,3}Y(?:[0-9]{1,2}M(?:[0-9]{1,2}D)?)?|[0-9]{1,3}M(?:[0-9]{1,2}D)?|[0-9]{1,4}D|\
     (?:[0-9]{1,4}D)?T(?:[0-9]{1,3}H(?:[0-9]{1,3}M(?:[0-9]{1,3}S)?)?|[0-9]{1,3}M(?:[0-9]{1,3}S)?|[0-9]{1,5}S))$";

/// Formats with a pattern. Any other is an annotation.
#[cfg(test)]
pub(super) const ALL: [&str; 28] = [
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "idn-email",
    "hostname",
    "idn-hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uri-reference",
    "iri",
    "iri-reference",
    "uuid",
    "uuid1",
    "uuid3",
    "uuid4",
    "uuid5",
    "uuid6",
    "uuid7",
    "uuid8",
    "json-pointer",
    "relative-json-pointer",
    "ipvanyaddress",
    "base64",
    "base64url",
    "regex",
];

/// Returns the pattern of a format; `None` for a format that is an annotation.
pub(super) fn pattern(format: &str) -> Option<String> {
    // RFC 3339 with uppercase letters and fractions of common length, without leap seconds, which no pattern can
    // predict, and without the year 0.
    const MULTIPLE_OF_4: &str = "(?:0[48]|[2468][048]|[13579][26])";
    const TIME: &str = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
    let date = || {
        format!(
            "(?:(?:[0-9]{{3}}[1-9]|[0-9]{{2}}[1-9]0|[0-9][1-9]00|[1-9]000)-\
             (?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)\
             |02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{{2}}{MULTIPLE_OF_4}|{MULTIPLE_OF_4}00)-02-29)"
        )
    };
    // RFC 1123, without labels with `--` at the third position, which are Punycode or reserved: at most seven labels of
    // at most 31 characters, so that the total length is valid.
    const LABEL: &str = "[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,15}";
    const IPV4: &str = r"(?:(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
    const PATH: &str =
        r"(?:/[a-zA-Z0-9._~-]{1,40}){1,8}/?(?:\?[a-zA-Z0-9=&_-]{1,60})?(?:#[a-zA-Z0-9_-]{1,40})?";
    const POINTER: &str = r"(?:/(?:[a-zA-Z0-9 _.-]|~[01]){0,40})*";
    let uuid = |version: &str, variant: &str| {
        const HEX: &str = "[0-9a-fA-F]";
        format!("{HEX}{{8}}-{HEX}{{4}}-{version}{HEX}{{3}}-{variant}{HEX}{{3}}-{HEX}{{12}}")
    };
    // Eight groups, or fewer on both sides of `::`.
    let ipv6 = || {
        const GROUP: &str = "[0-9a-fA-F]{1,4}";
        let mut forms =
            vec![format!("(?:{GROUP}:){{7}}{GROUP}"), "::".to_owned(), format!("(?:{GROUP}:){{1,7}}:")];
        for left in 0..7 {
            let before = if left == 0 { ":".to_owned() } else { format!("(?:{GROUP}:){{{left}}}") };
            forms.push(format!("{before}(?::{GROUP}){{1,{}}}", 7 - left));
        }
        forms.join("|")
    };
    // RFC 3986: addresses with a host, and the common ones without.
    let uri = || {
        const CHARS: &str = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9A-F]{2})";
        format!(
            r"(?:(?:https?|ftp|wss?)://(?:{LABEL}\.){{0,5}}{LABEL}(?::[1-9][0-9]{{1,3}})?(?:/{CHARS}*)*(?:\?(?:{CHARS}|[/?])*)?(?:#(?:{CHARS}|[/?])*)?|(?:mailto|urn|tel|data|[a-z]{{2,10}}):{CHARS}+(?:/{CHARS}*)*(?:#(?:{CHARS}|[/?])*)?)"
        )
    };
    let text = match format {
        "date" => date(),
        "time" => TIME.into(),
        "date-time" => format!("{}T{TIME}", date()),
        "hostname" => format!(r"{LABEL}(?:\.{LABEL}){{0,6}}"),
        // RFC 5321: at most 64 characters before the `@`. Not all validators accept quoted text and IP addresses.
        "email" => {
            const ATOM: &str = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,20}";
            format!(r"{ATOM}(?:\.{ATOM}){{0,2}}@(?:{LABEL}\.){{1,6}}[a-zA-Z]{{2,20}}")
        }
        "duration" => return Some(DURATION.into()),
        // Every one of these is one of the international form as well.
        "idn-email" => return pattern("email"),
        "idn-hostname" => return pattern("hostname"),
        "ipv4" => IPV4.into(),
        "ipv6" => ipv6(),
        "ipvanyaddress" => format!("{IPV4}|{}", ipv6()),
        "uri" | "iri" => uri(),
        "uri-reference" | "iri-reference" => format!("{}|{PATH}", uri()),
        "uuid" => uuid("[0-9a-fA-F]", "[0-9a-fA-F]"),
        "uuid1" | "uuid3" | "uuid4" | "uuid5" | "uuid6" | "uuid7" | "uuid8" => uuid(&format[4..], "[89abAB]"),
        "json-pointer" => POINTER.into(),
        "relative-json-pointer" => format!("(?:0|[1-9][0-9]{{0,3}})(?:#|{POINTER})"),
        "base64" => "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?".into(),
        "base64url" => "(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-][AQgw]|[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048])?".into(),
        // A pattern that every engine reads in the same way.
        "regex" => r"\^?(?:[a-zA-Z0-9 ]|\[[a-z]{1,3}\]|\[[0-9]-9\])(?:[a-zA-Z0-9 _-]|\\[dws.]|\[a-z\]|\[0-9\]|\(a\|b\)|[a-z][*+?])*\$?".into(),
        _ => return None,
    };
    Some(format!("^(?:{text})$"))
}

#[cfg(test)]
mod tests {
    use regex::Regex;

    use super::*;

    #[test]
    fn only_what_every_validator_takes() {
        for (format, taken, refused) in [
            (
                "date",
                &["2024-02-29", "2000-02-29", "1900-02-28", "0001-12-31", "1000-04-30"][..],
                &["2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31", "2024-13-01", "2024-1-01"][..],
            ),
            (
                "time",
                &["23:59:59Z", "00:00:00.123456789+23:59"],
                &["23:59:60Z", "24:00:00Z", "12:00:00", "12:00:00z", "12:00:00.Z"],
            ),
            (
                "date-time",
                &["2024-02-29T00:00:00Z"],
                &["2023-02-29T00:00:00Z", "2024-02-29t00:00:00Z", "2024-02-29"],
            ),
            ("hostname", &["a", "a-b.c0"], &["", "a.", "-a", "a-", "ab--c", "a_b"]),
            ("email", &["a.b+c@d-e.org"], &["a@b", ".a@b.c", "a.@b.cd", "a@-b.cd", "a@[1.2.3.4]"]),
        ] {
            let pattern = Regex::new(&pattern(format).unwrap()).unwrap();
            for text in taken {
                assert!(pattern.is_match(text), "{format}: {text}");
            }
            for text in refused {
                assert!(!pattern.is_match(text), "{format}: {text}");
            }
        }
    }
}
