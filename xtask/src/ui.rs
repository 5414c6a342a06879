//! The page: builds `ui/`, compares the result with the committed files of the server, and drives a browser through the
//! page of a running server (`app/tests/ui`).

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    ci::{install, quiet},
    clients,
    table::Outcome,
};

/// Folder of the committed build.
const DIST: &str = "crates/server/src/ui/dist";

/// Names under which systems have Chromium.
const BROWSERS: [&str; 4] = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

/// The npm package that reports the page's quality.
const LIGHTHOUSE: &str = "lighthouse@13.5.0";

/// Builds the page, then tests it in a browser.
pub fn run(root: &Path, mut cargo: Command) -> Result<Outcome> {
    if !quiet(Command::new("node").arg("--version")) || !quiet(Command::new("npm").arg("--version")) {
        return Ok(Outcome::Skipped("no Node with npm (apt-get install npm)".into()));
    }
    if let Some(problem) = build(root)? {
        return Ok(Outcome::Failed(problem));
    }
    let Some(browser) = browser() else {
        return Ok(Outcome::Passed(
            "no Chromium, so only the build was checked (apt-get install chromium)".into(),
        ));
    };
    let target = clients::target(root);
    let binary = clients::program(&target, &mut cargo)?;
    let installed = target.join("ui-tests");
    fs::create_dir_all(&installed)?;
    let mut tests = match clients::node(&root.join("app/tests/ui"), &installed)? {
        Err(reason) => return Ok(Outcome::Passed(format!("only the build was checked: {reason}"))),
        Ok(tests) => tests,
    };
    let screenshots = target.join("ui-screenshots");
    let tales = root.join("models/tales/tales-Q8_0.gguf");
    clients::write_model(&tales, &ADDER, &installed.join("adder.gguf"))?;
    tests.env("PAGURO_BINARY", &binary).env("PAGURO_CHROMIUM", &browser).env("PAGURO_TALES", &tales);
    tests.env("PAGURO_SCRIPTED", &installed).env("PAGURO_SCREENSHOTS", &screenshots);
    // Without the folder, tests with images are skipped.
    tests.env("PAGURO_SEES", root.join("../shared/model/vision/qwen3vl-hf"));
    let status = tests.status().context("node does not start")?;
    if !status.success() {
        return Ok(Outcome::Failed(format!("the page in a browser: {status}")));
    }
    let pictures = format!("pictures of all pages are in {}", screenshots.display());
    Ok(Outcome::Passed(format!("{pictures}; {}", lighthouse(&target, &installed, &binary, &browser)?)))
}

/// Answers of the model that calls a tool.
const ADDER: [&str; 4] = [
    "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 2, \"b\": 40}}\n</tool_call>",
    "The sum is forty-two.",
    "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 19, \"b\": 4}}\n</tool_call>",
    "That makes twenty-three.",
];

/// Has Lighthouse look at the page. Returns its scores in a line, or why there are none: nothing is asserted.
fn lighthouse(target: &Path, tests: &Path, binary: &Path, browser: &Path) -> Result<String> {
    let folder = target.join("ui-lighthouse");
    fs::create_dir_all(&folder)?;
    if !folder.join("package.json").exists() {
        fs::write(folder.join("package.json"), r#"{"private": true, "type": "module"}"#)?;
    }
    let install = ["install", "--silent", "--no-audit", "--no-fund", LIGHTHOUSE];
    if !Command::new("npm").args(install).current_dir(&folder).status()?.success() {
        return Ok("no Lighthouse report: npm cannot install it".into());
    }
    let mut run = Command::new("node");
    run.arg("lighthouse.mjs").current_dir(tests).env("PAGURO_BINARY", binary);
    run.env("PAGURO_CHROMIUM", browser).env("PAGURO_LIGHTHOUSE", &folder);
    let output = run.output()?;
    let last = |text: &[u8]| String::from_utf8_lossy(text).lines().last().unwrap_or_default().to_owned();
    Ok(match output.status.success() {
        true => format!("{}, in {}", last(&output.stdout), folder.join("report.report.html").display()),
        false => format!("no Lighthouse report: {}", last(&output.stderr)),
    })
}

/// Builds the page into the server's folder. Returns a problem, mostly that the committed files differ.
fn build(root: &Path) -> Result<Option<String>> {
    let ui = root.join("ui");
    let npm = |arguments: &[&str]| {
        let status =
            Command::new("npm").args(arguments).current_dir(&ui).status().context("npm does not start")?;
        Ok::<_, anyhow::Error>((!status.success()).then(|| format!("npm {}: {status}", arguments.join(" "))))
    };
    let before = contents(&root.join(DIST))?;
    if let Some(problem) = npm(&["ci", "--silent", "--no-audit", "--no-fund"])? {
        return Ok(Some(problem));
    }
    if let Some(problem) = npm(&["run", "--silent", "build"])? {
        return Ok(Some(problem));
    }
    let after = contents(&root.join(DIST))?;
    let names = before.keys().chain(after.keys());
    let changed = names.filter(|name| before.get(*name) != after.get(*name)).min();
    let problem = |name: &PathBuf| {
        format!(
            "{DIST} is not what `npm run build` makes of ui/ ({}): commit what it has made now",
            name.display()
        )
    };
    Ok(changed.map(problem))
}

/// All files below a folder, by path.
fn contents(folder: &Path) -> Result<BTreeMap<PathBuf, Vec<u8>>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten() {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.insert(path.clone(), fs::read(&path)?);
            }
        }
    }
    Ok(files)
}

/// Returns the path of a Chromium, after an attempt to install one. Playwright needs a path, not a name.
fn browser() -> Option<PathBuf> {
    let find = || {
        let folders: Vec<_> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
        let paths = BROWSERS.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
        paths.into_iter().find(|path| quiet(Command::new(path).arg("--version")))
    };
    find().or_else(|| if install(&["chromium"]) { find() } else { None })
}
