//! Names the sources of this crate, on which the contents of stored pages depend.

#[path = "../backend/build/sources.rs"]
mod sources;

fn main() {
    sources::export();
}
