//! Names of all tests, by which lists of names are checked.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::ci::cargo;

/// A built test program.
#[derive(Clone, Debug)]
pub struct Program {
    /// As nextest calls it: `paguro-engine`, or `paguro-backend-cpu::conformance` for a target in `tests`.
    pub id: String,
    /// The file.
    pub file: PathBuf,
    /// The folder of its package, in which it runs.
    pub folder: PathBuf,
}

impl Program {
    /// Builds all test programs of the workspace.
    ///
    /// # Errors
    /// They do not compile.
    pub fn all(root: &Path) -> Result<Vec<Self>> {
        let mut command = cargo(root);
        command.args(["test", "--workspace", "--locked", "--tests", "--no-run"]);
        command.args(["--message-format", "json-render-diagnostics"]);
        let output = command.stderr(Stdio::inherit()).output().context("cargo does not start")?;
        if !output.status.success() {
            bail!("the tests do not compile");
        }
        let lines = output.stdout.split(|&byte| byte == b'\n').filter(|line| line.starts_with(b"{"));
        let messages: Vec<Value> = lines.map(serde_json::from_slice).collect::<Result<_, _>>()?;
        let mut programs: Vec<_> = messages.iter().filter_map(Self::read).collect();
        programs.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(programs)
    }

    /// Reads a message of Cargo. Returns `None` if it is not on a test program.
    fn read(message: &Value) -> Option<Self> {
        let file = message["executable"].as_str().filter(|_| message["profile"]["test"] == true)?;
        let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
        let target = &message["target"];
        let (kind, name) = (target["kind"][0].as_str()?, target["name"].as_str()?);
        // `path+file:///repo/crates/engine#paguro-engine@0.1.0`, or `path+file:///repo/xtask#0.1.0`
        let id = message["package_id"].as_str()?;
        let package = match id.rsplit_once('#')?.1.split_once('@') {
            Some((package, _)) => package,
            None => folder.file_name()?.to_str()?,
        };
        let id = match kind {
            "test" => format!("{package}::{name}"),
            "bin" => format!("{package}::bin/{name}"),
            _ => package.to_owned(),
        };
        Some(Self { id, file: file.into(), folder })
    }

    /// Returns a command that runs it.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.file);
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }

    fn tests(&self) -> Result<BTreeSet<String>> {
        let listed = self.command().args(["--list", "--format", "terse"]).output();
        let listed = listed.with_context(|| format!("{} does not start", self.file.display()))?;
        if !listed.status.success() {
            bail!("{} does not list its tests", self.id);
        }
        let text = String::from_utf8_lossy(&listed.stdout);
        Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }
}

/// Tests by the ids of their programs.
#[derive(Debug, Default)]
pub struct Listing(BTreeMap<String, BTreeSet<String>>);

impl Listing {
    /// Lists the tests of these programs.
    ///
    /// # Errors
    /// A program does not run.
    pub fn read(programs: &[Program]) -> Result<Self> {
        let tests = programs.iter().map(|program| Ok((program.id.clone(), program.tests()?)));
        tests.collect::<Result<_>>().map(Self)
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
    fn programs_have_the_ids_that_nextest_gives_them() {
        let message = |id: &str, kind: &str, name: &str| {
            json!({
                "package_id": id,
                "manifest_path": "/repo/crates/one/Cargo.toml",
                "target": {"kind": [kind], "name": name},
                "profile": {"test": true},
                "executable": "/repo/target/debug/deps/one-1",
            })
        };
        let named = "path+file:///repo/crates/one#paguro-one@0.1.0";
        for (id, kind, name, expected) in [
            (named, "lib", "paguro_one", "paguro-one"),
            (named, "test", "it", "paguro-one::it"),
            (named, "bin", "tool", "paguro-one::bin/tool"),
            ("path+file:///repo/crates/one#0.1.0", "lib", "one", "one"),
        ] {
            let program = Program::read(&message(id, kind, name)).unwrap();
            assert_eq!((program.id.as_str(), program.folder.to_str()), (expected, Some("/repo/crates/one")));
        }
        let mut library = message(named, "lib", "paguro_one");
        library["profile"]["test"] = false.into();
        assert!(Program::read(&library).is_none());
    }

    #[test]
    fn tests_are_listed_by_program() {
        let listing = Listing::of(&[("app", &["a::b"]), ("app::it", &["c"])]);
        assert!(listing.has("app", "a::b") && !listing.has("app", "c") && listing.has("app::it", "c"));
    }
}
