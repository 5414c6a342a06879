//! Any text as base64 and as a data URL.

#![no_main]

use libfuzzer_sys::fuzz_target;
use paguro_vision::{from_base64, from_data_url};

fuzz_target!(|text: &str| {
    for bytes in [from_base64(text, 1000), from_data_url(text, 1000)].into_iter().flatten() {
        assert!(bytes.len() <= 1000);
    }
});
