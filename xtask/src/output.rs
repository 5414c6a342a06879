//! What `cargo test -- --show-output` prints, cut down to what somebody reads: results, and the names and the output of what
//! failed. The rest is thousands of lines, and a log that is cut short must not be cut where the failure stands.

use std::collections::BTreeSet;

/// Takes the lines one by one.
#[derive(Default)]
pub struct Digest {
    part: Part,
    skipped: BTreeSet<String>,
    failed: Vec<String>,
}

/// Which part of a test binary's output the lines are in.
#[derive(Default)]
enum Part {
    #[default]
    Names,
    /// What the tests that passed have printed.
    Successes,
    /// What the others have printed, and their names.
    Failures,
}

impl Digest {
    /// Takes a line, and says whether to show it.
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
        if let Some(name) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
            self.failed.push(name.to_owned());
        }
        match self.part {
            Part::Names => !(line.is_empty() || line.starts_with("running ") || line.ends_with(" ... ok")),
            Part::Successes => false,
            Part::Failures => true,
        }
    }

    /// What the tests could not do here, each once.
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
