//! Names the sources of this crate, on which the contents of stored pages depend.

#[path = "build/sources.rs"]
mod sources;

fn main() {
    sources::export();
}
