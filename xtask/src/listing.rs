//! Names of all tests, by which lists of names are checked.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    process::Stdio,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::ci::cargo;

/// Tests by the ids of their programs: `paguro-engine`, or `paguro-backend-cpu::conformance` for a target in `tests`.
#[derive(Debug, Default)]
pub struct Listing(BTreeMap<String, BTreeSet<String>>);

impl Listing {
    /// Builds all tests and lists them.
    ///
    /// # Errors
    /// They do not compile.
    pub fn read(root: &Path) -> Result<Self> {
        let mut command = cargo(root);
        command.args(["nextest", "list", "--workspace", "--locked", "--message-format", "json"]);
        let output = command.stderr(Stdio::inherit()).output().context("cargo does not start")?;
        if !output.status.success() {
            bail!("the tests do not compile");
        }
        let listed: Value = serde_json::from_slice(&output.stdout)?;
        Self::parse(&listed).context("an answer of nextest that is not understood")
    }

    fn parse(listed: &Value) -> Option<Self> {
        let suites = listed["rust-suites"].as_object()?.iter();
        let suite = |(id, suite): (&String, &Value)| {
            let names = suite["testcases"].as_object()?.keys().cloned().collect();
            Some((id.clone(), names))
        };
        suites.map(suite).collect::<Option<_>>().map(Self)
    }

    #[cfg(test)]
    pub fn of(tests: &[(&str, &[&str])]) -> Self {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Self(tests.iter().map(|(id, tests)| ((*id).to_owned(), names(tests))).collect())
    }

    /// Returns the tests of a program.
    pub fn tests(&self, id: &str) -> impl Iterator<Item = &str> {
        self.0.get(id).into_iter().flatten().map(String::as_str)
    }

    /// Returns true if a program has this test.
    pub fn has(&self, id: &str, test: &str) -> bool {
        self.0.get(id).is_some_and(|tests| tests.contains(test))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tests_are_listed_by_program() {
        let suite = |names: &[&str]| {
            let cases: serde_json::Map<_, _> =
                names.iter().map(|name| ((*name).to_owned(), json!({"ignored": false}))).collect();
            json!({"package-name": "x", "testcases": cases})
        };
        let listed =
            json!({"test-count": 2, "rust-suites": {"app": suite(&["a::b"]), "app::it": suite(&["c"])}});
        let listing = Listing::parse(&listed).unwrap();
        assert!(listing.has("app", "a::b") && !listing.has("app", "c") && listing.has("app::it", "c"));
        assert!(Listing::parse(&json!({})).is_none());
    }
}
