//! Results of nextest, from the JUnit file that it writes (`[profile.ci.junit]` in `.config/nextest.toml`).

use anyhow::{Context, Result, bail};

/// Path of the file below the folder of build outputs.
pub const FILE: &str = "nextest/ci/junit.xml";

/// A test that ran.
#[derive(Debug, Default, PartialEq)]
pub struct Case {
    /// Test program and test.
    pub name: String,
    pub seconds: f64,
    pub failed: bool,
    /// Output of the test.
    pub output: String,
}

/// Reads the tests of a file.
///
/// # Errors
/// The text is no such file.
pub fn read(text: &str) -> Result<Vec<Case>> {
    let (mut cases, mut case, mut is_output) = (Vec::new(), None::<Case>, false);
    let mut rest = text;
    while let Some((before, tag)) = rest.split_once('<') {
        if let (true, Some(case)) = (is_output, &mut case) {
            case.output += &unescape(before);
        }
        let end = end(tag).context("a tag without end")?;
        rest = &tag[end + 1..];
        let (tag, is_empty) = match tag[..end].strip_suffix('/') {
            Some(tag) => (tag, true),
            None => (&tag[..end], false),
        };
        let name = tag.split_whitespace().next().unwrap_or_default();
        match name {
            "testcase" => {
                let value =
                    |name: &str| attribute(tag, name).with_context(|| format!("a test without `{name}`"));
                let name = format!("{} {}", value("classname")?, value("name")?);
                let seconds = value("time")?.parse().context("a time that is no number")?;
                let new = Case { name, seconds, ..Case::default() };
                if is_empty { cases.push(new) } else { case = Some(new) }
            }
            "/testcase" => cases.extend(case.take()),
            "failure" | "error" => {
                if let Some(case) = &mut case {
                    case.failed = true;
                }
            }
            "system-out" | "system-err" => is_output = !is_empty,
            "/system-out" | "/system-err" => is_output = false,
            _ => {}
        }
    }
    if !text.contains("<testsuites") || case.is_some() {
        bail!("an incomplete JUnit file");
    }
    Ok(cases)
}

/// Returns the position of the `>` that ends a tag, which is not in quotes.
fn end(tag: &str) -> Option<usize> {
    let mut quoted = false;
    tag.find(|c| {
        quoted ^= c == '"';
        c == '>' && !quoted
    })
}

fn attribute(tag: &str, name: &str) -> Option<String> {
    let (_, rest) = tag.split_once(&format!(" {name}=\""))?;
    Some(unescape(rest.split_once('"')?.0))
}

fn unescape(text: &str) -> String {
    let replaced = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&apos;", "'"), ("&amp;", "&")];
    replaced.iter().fold(text.to_owned(), |text, (escaped, plain)| text.replace(escaped, plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_have_names_times_results_and_output() {
        let text = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="nextest-run" tests="3" failures="1" time="2.0">
    <testsuite name="app::it" tests="2" failures="1">
        <testcase name="runs::good" classname="app::it" timestamp="2026" time="0.25">
            <system-out>skipped: no &lt;device&gt; &amp;amp;
more</system-out>
            <system-err/>
        </testcase>
        <testcase name="bad" classname="app::it" time="1.500">
            <failure message="a > b" type="test failure">why</failure>
            <system-err>panicked</system-err>
        </testcase>
    </testsuite>
    <testsuite name="lib" tests="1"><testcase name="quiet" classname="lib" time="0.001"/></testsuite>
</testsuites>"#;
        let case = |name: &str, seconds: f64, failed: bool, output: &str| Case {
            name: name.to_owned(),
            seconds,
            failed,
            output: output.to_owned(),
        };
        let expected = [
            case("app::it runs::good", 0.25, false, "skipped: no <device> &amp;\nmore"),
            case("app::it bad", 1.5, true, "panicked"),
            case("lib quiet", 0.001, false, ""),
        ];
        assert_eq!(read(text).unwrap(), expected);
        assert!(read(&text[..text.len() / 2]).is_err() && read("").is_err());
    }
}
