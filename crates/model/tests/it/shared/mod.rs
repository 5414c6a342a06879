//! The shared data beside the checkout.

use std::path::PathBuf;

/// A file or folder of the shared data: under `PAGURO_SHARED`, or else under `shared` beside the checkout. Says that
/// the test is skipped where it is absent.
pub fn folder(name: &str) -> Option<PathBuf> {
    let workspace = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let root = std::env::var_os("PAGURO_SHARED")
        .map_or_else(|| PathBuf::from(workspace).join("../shared"), PathBuf::from);
    let path = root.join(name);
    if path.exists() {
        return Some(path);
    }
    println!("skipped: {} not present", path.display());
    None
}
