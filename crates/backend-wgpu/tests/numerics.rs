//! The sources of the kernels, as a hash.

use std::{collections::BTreeMap, fs, path::Path};

use paguro_backend_wgpu::NUMERICS;

/// Version of the bits, and the hash of the kernels' sources.
const GOLDEN: (u32, u64) = (2, 0x0be2_31b9_b518_4b43);

/// Pages on disk are read again by later versions with equal [`NUMERICS`], so kernels with other bits need another one. Bits depend
/// on the device, so this test compares sources: without comments, and with any white space as one space. It cannot see changes of the
/// order in which launches are lowered.
#[test]
fn other_kernels_have_another_version() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/shaders");
    let files = fs::read_dir(folder).expect("a folder of shaders").map(|file| file.expect("an entry").path());
    let sources: BTreeMap<_, _> = files
        .filter(|path| path.extension().is_some_and(|extension| extension == "wgsl"))
        .map(|path| {
            (path.file_name().expect("a name").to_owned(), fs::read_to_string(&path).expect("a text"))
        })
        .collect();
    assert!(sources.len() > 20, "{} shaders", sources.len());
    // FNV-1a.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for (name, source) in &sources {
        let lines = source.lines().map(|line| line.split("//").next().unwrap_or_default());
        let words = lines.flat_map(str::split_whitespace).chain([name.to_str().expect("a plain name")]);
        for byte in words.flat_map(|word| word.bytes().chain([b' '])) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    assert_eq!(
        (NUMERICS, hash),
        GOLDEN,
        "kernels have changed ({hash:#x}): increase `NUMERICS` if they compute other bits, and record version and hash in GOLDEN"
    );
}
