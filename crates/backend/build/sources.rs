//! Names the sources of a crate, for formats that must not outlive the code that computed them.

use std::{
    collections::BTreeMap,
    env, fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
};

/// Sets `PAGURO_SOURCES` for the crate: a hash of its files under `src`, of the compiler's version and of the options that
/// code generation depends on.
pub fn export() {
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=build.rs");
    let mut files = BTreeMap::new();
    collect(Path::new("src"), &mut files);
    let mut hash = DefaultHasher::new();
    files.hash(&mut hash);
    for name in ["TARGET", "OPT_LEVEL", "CARGO_CFG_TARGET_FEATURE", "CARGO_PKG_VERSION"] {
        env::var(name).unwrap_or_default().hash(&mut hash);
    }
    let compiler = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(compiler).arg("-vV").output().map(|output| output.stdout).unwrap_or_default();
    version.hash(&mut hash);
    println!("cargo::rustc-env=PAGURO_SOURCES={:016x}", hash.finish());
}

/// Adds the files below a folder, with their contents, in an order that depends on their names only.
fn collect(folder: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
    let entries = fs::read_dir(folder).expect("the sources are readable");
    for entry in entries {
        let path = entry.expect("the sources are readable").path();
        if path.is_dir() {
            collect(&path, files);
        } else {
            let bytes = fs::read(&path).expect("the sources are readable");
            files.insert(path, bytes);
        }
    }
}
