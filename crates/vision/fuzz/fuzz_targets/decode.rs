//! Any bytes as a picture: the header and the pixels, within limits.

#![no_main]

use libfuzzer_sys::fuzz_target;
use paguro_vision::{Limits, decode, probe};

fuzz_target!(|bytes: &[u8]| {
    let limits = Limits { bytes: 1 << 20, pixels: 1 << 18, side: 1 << 12 };
    let header = probe(bytes, &limits);
    if let Ok(picture) = decode(bytes, &limits) {
        let header = header.expect("a picture that is decoded has a header");
        assert_eq!([picture.width, picture.height], [header.width, header.height]);
        assert_eq!(picture.rgb.len(), picture.width as usize * picture.height as usize * 3);
    }
});
