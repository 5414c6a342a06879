//! Results of test runners, and the output of `cargo test`, reduced to the names and output of failed tests. The rest has thousands
//! of lines, and a truncated log must contain the failure.

use std::collections::BTreeSet;

use crate::junit::Case;

/// Takes the lines one by one.
#[derive(Default)]
pub struct Digest {
    part: Part,
    skipped: BTreeSet<String>,
    failed: Vec<String>,
    /// Seconds and name.
    times: Vec<(f64, String)>,
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

    /// Adds a result of nextest.
    pub fn case(&mut self, case: Case) {
        let lines = case.output.lines().map(str::trim_start).filter(|line| line.starts_with("skipped: "));
        self.skipped.extend(lines.map(str::to_owned));
        if case.failed {
            self.failed.push(case.name.clone());
        }
        self.times.push((case.seconds, case.name));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_nextest_are_collected() {
        let case = |name: &str, seconds: f64, failed: bool, output: &str| Case {
            name: name.to_owned(),
            seconds,
            failed,
            output: output.to_owned(),
        };
        let mut digest = Digest::default();
        digest.case(case("app good", 0.5, false, "text\n  skipped: no device\n"));
        digest.case(case("app bad", 61.0, true, "why"));
        assert_eq!(digest.failed(), ["app bad"]);
        assert_eq!(digest.skipped().iter().collect::<Vec<_>>(), ["skipped: no device"]);
        assert_eq!(digest.times(), [(61.0, "app bad"), (0.5, "app good")]);
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
