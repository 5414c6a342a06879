//! Output of test runners, reduced to results and the names and output of failed tests. The rest has thousands of
//! lines, and a truncated log must contain the failure.

use std::collections::BTreeSet;

/// Takes the lines one by one.
#[derive(Default)]
pub struct Digest {
    part: Part,
    skipped: BTreeSet<String>,
    failed: Vec<String>,
    /// Seconds and name.
    times: Vec<(f64, String)>,
    /// True in nextest's output of a test that failed.
    in_failure: bool,
}

/// Part of a test binary's output.
#[derive(Default)]
enum Part {
    #[default]
    Names,
    /// Output of tests that passed.
    Successes,
    /// Output of the others, and their names.
    Failures,
}

impl Digest {
    /// Reads a line of `cargo test -- --show-output`. Returns true if it is to be shown.
    pub fn line(&mut self, line: &str) -> bool {
        if line.starts_with("skipped: ") {
            self.skipped.insert(line.to_owned());
        }
        match line {
            "successes:" => self.part = Part::Successes,
            "failures:" => self.part = Part::Failures,
            _ if line.starts_with("test result: ") => self.part = Part::Names,
            _ => {}
        }
        if let Some((name, result)) = line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ")) {
            if result.starts_with("FAILED") {
                self.failed.push(name.to_owned());
            }
            // `ok <1.234s>`, with `--report-time`.
            let time = result.split_once('<').and_then(|(_, time)| time.strip_suffix("s>"));
            self.times.extend(time.and_then(|time| Some((time.parse().ok()?, name.to_owned()))));
        }
        match self.part {
            Part::Names => !(line.is_empty() || line.starts_with("running ") || line.contains(" ... ok")),
            Part::Successes => false,
            Part::Failures => true,
        }
    }

    /// Reads a line of `cargo nextest run` with the profile `ci`. Returns true if it is to be shown.
    pub fn nextest(&mut self, line: &str) -> bool {
        // The output of tests is indented.
        if let Some(reason) = line.trim_start().strip_prefix("skipped: ") {
            self.skipped.insert(format!("skipped: {reason}"));
        }
        let Some((word, time, name)) = result(line) else {
            let is_border = line.starts_with('\u{2500}') || line.trim_start().starts_with("Summary [");
            self.in_failure &= !is_border;
            return self.in_failure || is_border || line.starts_with("error") || line.starts_with("warning");
        };
        self.in_failure = !matches!(word, "PASS" | "SLOW" | "START");
        if word == "SLOW" {
            return true;
        }
        // Failures are repeated at the end, without a valid time.
        if !self.times.iter().any(|(_, other)| other == name) {
            self.times.push((time, name.to_owned()));
            if self.in_failure {
                self.failed.push(name.to_owned());
            }
        }
        self.in_failure
    }

    /// Adds the results of another test program.
    pub fn add(&mut self, other: Self) {
        self.skipped.extend(other.skipped);
        self.failed.extend(other.failed);
        self.times.extend(other.times);
    }

    /// The tests with their seconds, slowest first.
    pub fn times(&self) -> Vec<(f64, &str)> {
        let mut times: Vec<_> = self.times.iter().map(|(time, name)| (*time, name.as_str())).collect();
        times.sort_by(|a, b| b.0.total_cmp(&a.0));
        times
    }

    /// Reasons of skipped tests, each once.
    pub fn skipped(&self) -> &BTreeSet<String> {
        &self.skipped
    }

    /// The tests that failed.
    pub fn failed(&self) -> &[String] {
        &self.failed
    }
}

/// The parts of a line of nextest's: `PASS [   1.856s] (37/64) paguro-backend kv::tests::blocks`.
fn result(line: &str) -> Option<(&str, f64, &str)> {
    let (word, rest) = line.trim_start().split_once(" [")?;
    let (time, rest) = rest.split_once("s] ")?;
    let name = rest.trim_start().split_once(") ").map_or(rest, |(_, name)| name).trim();
    let is_word = word.bytes().all(|byte| byte.is_ascii_uppercase() || b"- ()".contains(&byte));
    Some((word.trim(), time.trim().trim_start_matches('>').parse().ok()?, name)).filter(|_| is_word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_nextest_are_read_and_passed_tests_are_not_shown() {
        let printed = "        PASS [   0.005s] (1/3) app good\n\u{2500}\u{2500}\u{2500} STDOUT: app good\n    skipped: no device\n\
                       \u{2500}\u{2500}\u{2500}\n        SLOW [> 60.000s] (   ) app long\n        FAIL [   1.500s] (2/3) app bad\n  stderr\n    why\n\
                       \u{2500}\u{2500}\u{2500}\n     Summary [  61.000s] 3 tests run: 2 passed, 1 failed, 0 skipped\n\
                       \x20       FAIL [   1.500s] (2/3) app bad\n        PASS [  61.000s] (3/3) app long";
        let mut digest = Digest::default();
        let shown: Vec<&str> = printed.lines().filter(|line| digest.nextest(line)).map(str::trim).collect();
        assert!(shown.contains(&"why") && shown.iter().any(|line| line.starts_with("Summary")), "{shown:?}");
        assert!(
            !shown.iter().any(|line| line.starts_with("PASS") || line.starts_with("skipped")),
            "{shown:?}"
        );
        assert_eq!(digest.failed(), ["app bad"]);
        assert_eq!(digest.skipped().iter().collect::<Vec<_>>(), ["skipped: no device"]);
        assert_eq!(digest.times()[..2], [(61.0, "app long"), (1.5, "app bad")]);
    }

    #[test]
    fn what_failed_is_shown_and_named_and_what_passed_is_not() {
        let printed = "running 2 tests\ntest good ... ok\ntest bad ... FAILED\n\nsuccesses:\n\n---- good stdout ----\n\
                       skipped: no device\nmuch text\n\n\nsuccesses:\n    good\n\nfailures:\n\n---- bad stdout ----\n\
                       what happened\n\n\nfailures:\n    bad\n\ntest result: FAILED. 1 passed; 1 failed\n\
                       test next ... ok";
        let mut digest = Digest::default();
        let shown: Vec<&str> = printed.lines().filter(|line| digest.line(line)).collect();
        assert_eq!(shown[0], "test bad ... FAILED");
        assert!(
            shown.contains(&"what happened") && shown.contains(&"test result: FAILED. 1 passed; 1 failed")
        );
        assert!(!shown.contains(&"much text") && !shown.contains(&"test next ... ok"));
        assert_eq!(digest.failed(), ["bad"]);
        assert_eq!(digest.skipped().iter().collect::<Vec<_>>(), ["skipped: no device"]);
    }
}
