//! Seeds of samples: hashes of the files of crates. One commit has one sample, and so has a tree with changes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::ci::cargo;

/// Files outside of the crates that change what their tests do.
const COMMON: [&str; 2] = ["Cargo.lock", "Cargo.toml"];

/// A seed for each package, of the files of the package and of the packages of the workspace on which it and its tests depend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seeds(BTreeMap<String, u64>);

impl Seeds {
    /// Hashes the files that git tracks or would track, as they are now.
    ///
    /// # Errors
    /// Cargo or git fails.
    pub fn read(root: &Path) -> Result<Self> {
        let metadata = cargo(root).args(["metadata", "--format-version", "1", "--no-deps"]).output()?;
        ensure!(metadata.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&metadata.stderr));
        let metadata: Value = serde_json::from_slice(&metadata.stdout)?;
        let packages =
            packages(&metadata, root).context("an answer of cargo metadata that is not understood")?;
        Ok(Self::of(&packages, &hashes(root)?))
    }

    /// Returns the seeds of packages with these hashes of files.
    fn of(packages: &[Package], files: &BTreeMap<String, u64>) -> Self {
        let hash_of = |folder: &str| {
            let of_folder = |path: &str| path.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
            let of_folder = files.iter().filter(|(path, _)| of_folder(path));
            of_folder.fold(0, |hash, (path, content)| mix(mix(hash, words(path.as_bytes())), *content))
        };
        let common = COMMON.iter().fold(0, |hash, file| mix(hash, files.get(*file).copied().unwrap_or(0)));
        let own: BTreeMap<&str, u64> =
            packages.iter().map(|package| (package.name.as_str(), hash_of(&package.folder))).collect();
        let seed = |package: &Package| {
            let (mut all, mut next) = (BTreeSet::new(), vec![package.name.as_str()]);
            while let Some(name) = next.pop() {
                if all.insert(name) {
                    let known = packages.iter().filter(|package| package.name == name);
                    next.extend(known.flat_map(|package| &package.uses).map(String::as_str));
                }
            }
            let hashes = all.iter().filter_map(|name| own.get(name));
            hashes.fold(common, |hash, other| mix(hash, *other)) % 1_000_000
        };
        Self(packages.iter().map(|package| (package.name.clone(), seed(package))).collect())
    }

    /// Returns one seed for all packages, for tests.
    #[cfg(test)]
    pub fn fixed(names: &[&str], seed: u64) -> Self {
        Self(names.iter().map(|name| ((*name).to_owned(), seed)).collect())
    }

    /// Returns the seed of a package.
    pub fn get(&self, package: &str) -> u64 {
        self.0.get(package).copied().unwrap_or_default()
    }
}

/// A package of the workspace.
struct Package {
    name: String,
    /// Path from the root, with slashes.
    folder: String,
    /// Names of its dependencies.
    uses: Vec<String>,
}

fn packages(metadata: &Value, root: &Path) -> Option<Vec<Package>> {
    let package = |package: &Value| {
        let manifest = Path::new(package["manifest_path"].as_str()?);
        let folder = manifest.parent()?.strip_prefix(root).ok()?.to_string_lossy().replace('\\', "/");
        let uses = package["dependencies"].as_array()?.iter();
        let uses = uses.filter_map(|package| package["name"].as_str()).map(str::to_owned).collect();
        Some(Package { name: package["name"].as_str()?.to_owned(), folder, uses })
    };
    metadata["packages"].as_array()?.iter().map(package).collect()
}

/// Returns the hash of each file by its path.
fn hashes(root: &Path) -> Result<BTreeMap<String, u64>> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(root);
    let paths = match git.output() {
        Ok(output) if output.status.success() => {
            let paths = output.stdout.split(|&byte| byte == 0).filter(|path| !path.is_empty());
            paths.map(|path| String::from_utf8_lossy(path).into_owned()).collect()
        }
        // An archive of the sources.
        _ => {
            let mut paths = Vec::new();
            walk(root, "", &mut paths)?;
            paths
        }
    };
    let mut hashes = BTreeMap::new();
    for path in paths {
        // A file that was deleted is still listed.
        if let Ok(content) = fs::read(root.join(&path)) {
            hashes.insert(path, words(&content));
        }
    }
    Ok(hashes)
}

fn walk(folder: &Path, prefix: &str, paths: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type()?;
        if kind.is_dir() && !["target", "node_modules", ".git"].contains(&name.as_str()) {
            walk(&entry.path(), &format!("{prefix}{name}/"), paths)?;
        } else if kind.is_file() {
            paths.push(format!("{prefix}{name}"));
        }
    }
    Ok(())
}

/// Hashes bytes, eight at a time.
fn words(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(bytes.len() as u64, |hash, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        mix(hash, u64::from_le_bytes(word))
    })
}

/// The finalizer of SplitMix64 over a running hash.
pub fn mix(hash: u64, value: u64) -> u64 {
    let mut x = (hash ^ value).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_depends_on_the_crate_and_on_what_it_uses_and_on_nothing_else() {
        let package = |name: &str, uses: &[&str]| Package {
            name: name.into(),
            folder: format!("crates/{name}"),
            uses: uses.iter().map(|name| (*name).to_owned()).collect(),
        };
        // Tests of `base` use `suite`, which uses `base`.
        let packages =
            [package("base", &["suite", "serde"]), package("suite", &["base"]), package("top", &["suite"])];
        let paths =
            ["Cargo.lock", "README.md", "crates/base/src/lib.rs", "crates/suite/lib.rs", "crates/top/x.txt"];
        let files = |changed: &str| {
            let content = |path: &str| if path == changed { b"new".as_slice() } else { b"old" };
            paths.iter().map(|path| ((*path).to_owned(), words(content(path)))).collect::<BTreeMap<_, _>>()
        };
        let seeds = |changed: &str| Seeds::of(&packages, &files(changed));
        let before = seeds("");
        assert_eq!(before, seeds("README.md"));
        let changes = |changed: &str| {
            let after = seeds(changed);
            ["base", "suite", "top"].map(|name| after.get(name) != before.get(name))
        };
        assert_eq!(changes("Cargo.lock"), [true; 3]);
        assert_eq!(changes("crates/base/src/lib.rs"), [true; 3]);
        assert_eq!(changes("crates/suite/lib.rs"), [true; 3]);
        assert_eq!(changes("crates/top/x.txt"), [false, false, true]);
        let mut renamed = files("");
        let content = renamed.remove("crates/top/x.txt").unwrap();
        renamed.insert("crates/top/y.txt".into(), content);
        assert_ne!(Seeds::of(&packages, &renamed).get("top"), before.get("top"));
    }

    #[test]
    fn this_tree_has_a_seed_for_each_package() {
        let seeds = Seeds::read(&crate::root()).unwrap();
        assert_eq!(seeds, Seeds::read(&crate::root()).unwrap());
        assert!(
            ["paguro", "paguro-backend-cpu", "paguro-backend-wgpu", "xtask"]
                .iter()
                .all(|name| seeds.0.contains_key(*name))
        );
    }
}
