//! Steps that run beside others: in a process of their own, whose output is shown when all of them have ended.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio, id},
    time::Duration,
};

use anyhow::{Context, Result};

use crate::{
    ci::{cargo, quiet},
    clients,
    table::{self, Outcome, Row},
};

/// Steps in another process.
pub struct Beside {
    steps: Vec<&'static str>,
    child: Child,
    output: PathBuf,
}

/// Starts these steps. The program that they need is built first, because cargo commands wait for each other.
///
/// # Errors
/// The process does not start.
pub fn start(root: &Path, steps: &[&'static str], all: bool) -> Result<Beside> {
    let target = clients::target(root);
    fs::create_dir_all(&target)?;
    let output = target.join("ci-beside.txt");
    let file = File::create(&output)?;
    // This program; cargo may have replaced its file meanwhile.
    let own = Path::new("/proc/self/exe");
    let mut command = Command::new(if own.exists() { own.to_owned() } else { std::env::current_exe()? });
    command.arg("test").args(steps).args(all.then_some("--all")).current_dir(root);
    command.stdin(Stdio::null()).stderr(file.try_clone()?).stdout(file);
    // Without it the steps fail for the same reason, and say so.
    if let Ok(program) = clients::program(&target, &mut cargo(root)) {
        command.env(clients::PROGRAM, program);
    }
    let child = command.spawn().context("xtask does not start")?;
    Ok(Beside { steps: steps.to_vec(), child, output })
}

impl Beside {
    /// Waits for the steps, prints their output, and returns their rows of the table.
    ///
    /// # Errors
    /// The output cannot be read.
    pub fn finish(mut self) -> Result<Vec<Row>> {
        let status = self.child.wait()?;
        let text = String::from_utf8_lossy(&fs::read(&self.output)?).into_owned();
        let (output, rows) = text.rsplit_once(table::HEADER).unwrap_or((&text, ""));
        print!("{output}");
        let row = |&step: &&'static str| {
            let row = rows.lines().find_map(|line| Row::parse(step, line));
            let lost = Outcome::Failed(format!("xtask ended without a result: {status}"));
            row.unwrap_or(Row { step, outcome: lost, time: Duration::ZERO })
        };
        Ok(self.steps.iter().map(row).collect())
    }
}

/// Lowers the priority of this process and of those that it starts later, where that is possible.
pub fn lower_priority() {
    if cfg!(unix) {
        quiet(Command::new("renice").args(["-n", "10", "-p", &id().to_string()]));
    }
}
